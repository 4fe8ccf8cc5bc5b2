// Pair: what a Channel wants of a connected pair of queues - the seam to libibverbs (verbs_pair.cc), and to a
// pair in memory in tests. One thread, but for the destructor, which any one thread may run. Nothing blocks
// but the destructor: when it is over no device touches memory for this pair any more.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"

namespace ffs::net::rdma {

enum class WorkKind : uint8_t { kSend, kWrite, kRead };

// A work request of the send queue.
struct Work {
  WorkKind kind = WorkKind::kSend;
  bool signalled = false;     // reports its end; that of the others shows in a later one's
  bool inlined = false;       // the bytes are taken while it is posted
  uint8_t* memory = nullptr;  // written by kRead only
  uint32_t length = 0;
  uint32_t local_key = 0;
  uint32_t remote_key = 0;  // kWrite, kRead
  uint64_t remote = 0;      // address there
  uint32_t immediate = 0;   // kSend
  uint64_t number = 0;      // grows by one with each
};

struct Completion {
  bool received = false;  // a message came; else work has ended, and all before it
  uint32_t fault = 0;     // 0: good; else a status of the device (Pair::fault_name)
  uint64_t number = 0;    // of the work, or the receive buffer
  uint32_t bytes = 0;     // received
  uint32_t immediate = 0;
};

class Pair {
 public:
  virtual ~Pair() = default;
  // One doorbell for all of them. An error leaves the pair broken.
  virtual Status post(std::span<const Work> work) = 0;
  virtual Status post_receives(std::span<const uint32_t> buffers) = 0;
  // At most out.size(); 0: there is none; < 0: the pair is broken.
  virtual int poll(std::span<Completion> out) = 0;
  // The next completion makes the owner's descriptor readable. Look once more after it: one may have come
  // before.
  virtual Status arm() = 0;
  virtual const char* fault_name(uint32_t fault) const = 0;
};

}  // namespace ffs::net::rdma
