// Client memory that a shard may use: extents of sealed memfds, by (client, region id), counted by
// the connections that registered them and by the operations that use them. Mapping and
// populating run on the helper thread. One shard thread otherwise.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "io/io.h"
#include "net/shared_memory.h"

namespace ffs::server {

struct Session;
class Regions;

struct ClientRegion {
  enum class State { kPreparing, kReady, kFailed, kDraining };

  ClientId client;
  uint64_t id = 0;
  uint64_t size = 0;
  uint64_t offset = 0;  // of the extent in the memfd
  dev_t device = 0;
  ino_t inode = 0;
  Fd fd;
  bool huge_pages = false;
  net::Mapping mapping;   // read-only once it is ready
  io::Region registered;  // device reads go here; not registered: the kernel refused
  State state = State::kPreparing;
  int error = 0;  // kFailed
  uint32_t registrations = 0;
  uint32_t uses = 0;  // operations under way
  // Who waits for the registration (kPreparing), and who has unregistered and waits for the end of
  // its `remaining` reads (or, the last one, of the region).
  struct Waiter {
    Session* session;
    uint64_t request_id;
    uint32_t remaining = 0;
  };
  std::vector<Waiter> waiters;
  std::vector<Waiter> leavers;
  Regions* owner = nullptr;
  struct Work : io::Offload {
    ClientRegion* region = nullptr;
  } work;

  // Bytes [address, address + length) for reading by the processor; null where the memory can't
  // be read through a mapping (huge pages that were punched out would raise SIGBUS).
  const uint8_t* readable(uint64_t address) const { return huge_pages ? nullptr : mapping.data() + address; }
  bool holds(uint64_t address, uint64_t length) const { return address <= size && length <= size - address; }
};

class Regions {
 public:
  // `settled` runs when a region becomes ready or failed, and `gone` when a draining one can't be
  // touched any more; both with the waiters still in place. The region is freed after `gone`.
  using Event = void (*)(void* owner, ClientRegion* region);
  Regions(io::Io& io, uint64_t limit_bytes, void* owner, Event settled, Event gone)
      : io_(io), limit_bytes_(limit_bytes), owner_(owner), settled_(settled), gone_(gone) {}

  // A region for this registration: a new one (kPreparing) or the one that is there. EINVAL,
  // EPERM, ERANGE, EDQUOT, EEXIST as docs/wire_format.md, Regions. Adds a registration.
  Result<ClientRegion*> add(ClientId client, uint64_t id, Fd fd, uint64_t offset, uint64_t size);
  // Drops a registration; the last one makes the region drain.
  void drop(ClientRegion* region);
  void use(ClientRegion* region) { region->uses++; }
  void unuse(ClientRegion* region);

  uint64_t count() const { return regions_.size(); }
  uint64_t bytes() const { return bytes_; }
  bool empty() const { return regions_.empty() && draining_ == 0; }

 private:
  struct Key {
    uint64_t client, id;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const { return mix64(key.client ^ mix64(key.id)); }
  };
  static int32_t prepare(io::Offload* offload);
  static void prepared(io::Op* op);
  static int32_t unmap(io::Offload* offload);
  static void unmapped(io::Op* op);
  void end_if_unused(ClientRegion* region);

  io::Io& io_;
  uint64_t limit_bytes_;
  void* owner_;
  Event settled_;
  Event gone_;
  std::unordered_map<Key, std::unique_ptr<ClientRegion>, KeyHash> regions_;
  std::unordered_map<uint64_t, uint64_t> client_bytes_;
  uint64_t bytes_ = 0;
  uint64_t draining_ = 0;
};

}  // namespace ffs::server
