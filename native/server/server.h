// A storage server: a shard for each device, and one place to hand routing to, fence and stop all
// of them. Functions may be called from any thread; all may block shortly. Not moved, not copied.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.h"
#include "server/shard.h"

namespace ffs::server {

class Server {
 public:
  // `base`: what all shards share; number, device_path and port are set by add_device.
  explicit Server(const ShardConfig& base);
  ~Server();

  // Opens and recovers a device; before start only. Null: *failure says why.
  struct DeviceOptions {
    engine::WriteCache write_cache = engine::WriteCache::automatic;
    engine::Discard discard = engine::Discard::automatic;
    bool null_data = false;
  };
  Shard* add_device(const std::string& path, const DeviceOptions& options, Failure* failure);
  Shard* add_device(const std::string& path, Failure* failure) { return add_device(path, {}, failure); }
  int start();  // 0, EINVAL without a device, EALREADY
  void configure(const Routing& routing);
  std::vector<TargetReport> report();
  // The shard's numbers; false: no such shard.
  bool metrics(uint32_t shard, ShardMetrics* out);
  int fence(ClientId client);  // 0 or the first errno
  // The manager's lease on this node, on craq's clock (CLOCK_BOOTTIME, ms).
  void lease(uint64_t until_ms);
  void set_keys(const std::vector<SigningKey>& keys);  // that sign capabilities; replaces the ones before
  // Of all shards' chains; replaces what was set before.
  void set_spaces(const std::vector<SpacePolicy>& policies);
  std::vector<SpaceUse> space_use();
  int release_target(TargetId target);  // 0 or ENOENT; returns before it is done
  // Readable when report() has news; reading its 8 bytes rearms it. The server's.
  int news_fd() const { return news_.get(); }
  int stop();  // 0 or the first errno; idempotent

 private:
  Fd news_;  // outlives the shards, which write it
  ShardConfig base_;
  std::mutex mutex_;  // the list; shards have their own
  std::vector<std::unique_ptr<Shard>> shards_;
  bool started_ = false;
  bool stopped_ = false;
};

}  // namespace ffs::server
