// A storage server: a shard for each device, and one place to hand routing to, fence and stop all
// of them. Functions may be called from any thread; all may block shortly. Not moved, not copied.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/shard.h"

namespace ffs::server {

class Server {
 public:
  // `base`: what all shards share; number, device_path and port are set by add_device.
  explicit Server(const ShardConfig& base) : base_(base) {}
  ~Server();

  // Opens and recovers a device; before start only. Null: *failure says why.
  Shard* add_device(const std::string& path, Failure* failure);
  int start();  // 0, EINVAL without a device, EALREADY
  void configure(const Routing& routing);
  std::vector<TargetReport> report();
  // The shard's numbers; false: no such shard.
  bool metrics(uint32_t shard, ShardMetrics* out);
  int fence(ClientId client);  // 0 or the first errno
  int stop();                  // 0 or the first errno; idempotent

 private:
  ShardConfig base_;
  std::mutex mutex_;  // the list; shards have their own
  std::vector<std::unique_ptr<Shard>> shards_;
  bool started_ = false;
  bool stopped_ = false;
};

}  // namespace ffs::server
