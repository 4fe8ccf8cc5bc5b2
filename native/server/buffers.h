// Memory for data on its way through a shard, in pools by use, so that no use can starve another
// that would free it (docs/architecture.md, Buffers): a read waits for the device and its
// client only; an update of a client waits for the chain behind it; an update from a predecessor
// waits for the members behind *this* one, hence a pool by distance from the tail: whoever holds a
// buffer waits only for those who are nearer to their tail, so no circle of full pools can form. What
// recovery and repair send waits for the receiver's pool of what they receive, and that one for the
// device only.
// One shard thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "base/ids.h"
#include "base/result.h"
#include "io/buffer_pool.h"
#include "io/io.h"

namespace ffs::server {

// kTail + n: updates from a predecessor, with n members behind this one.
enum class BufferUse : uint8_t { kRead, kUpdate, kSyncOut, kSyncIn, kTail, kBeforeTail };
constexpr size_t kBufferUses = 4 + kMaxReplicas - 1;

constexpr BufferUse use_by_distance(uint32_t members_behind) {
  return static_cast<BufferUse>(static_cast<uint32_t>(BufferUse::kTail) + members_behind);
}

// Somebody who waits for a buffer. `ready` runs from Buffers::serve_waiters with the buffer, which
// is then the waiter's.
struct BufferWaiter {
  void (*ready)(BufferWaiter* waiter, uint8_t* buffer) = nullptr;
  void* owner = nullptr;
  uint8_t priority = 0;   // of the request, set by the owner: 0 first .. 255 last
  uint64_t turn = 0;      // among equals, set by the owner: lower ones first, however long others wait
  uint8_t overtaken = 0;  // by others; at kMostOvertaken nobody goes ahead of it any more
  uint32_t bytes = 0;
  BufferUse use = BufferUse::kRead;
  bool waiting = false;
  BufferWaiter* next = nullptr;
  BufferWaiter* previous = nullptr;
};

class Buffers {
 public:
  static constexpr uint8_t kMostOvertaken = 64;

  // Splits `total_bytes` (rounded up so that each pool holds a chunk) for chains of at most three
  // members, and takes half as much more for recovery. Quick: memory is brought in and registered with the Io
  // as it comes into use, by pin_used().
  static Result<std::unique_ptr<Buffers>> create(io::Io& io, size_t total_bytes);

  // Makes the pools that longer chains need, each a sixteenth of the whole.
  Status grow_to_members(uint32_t member_count);

  // A buffer now, or null: then the waiter stands in its line and its `ready` is called later. First come,
  // first served, but for those of a better priority, whom each that waits lets ahead kMostOvertaken times,
  // and those of the same whose turn comes before. waiter->use and bytes are set here.
  uint8_t* allocate_or_wait(BufferUse use, uint32_t bytes, BufferWaiter* waiter);
  // A buffer if there is one and nobody waits for this use; else null, no waiting.
  uint8_t* try_allocate(BufferUse use, uint32_t bytes);
  void cancel(BufferWaiter* waiter);  // may be called for one that doesn't wait
  void release(uint8_t* buffer);
  // Something was released that somebody waits for.
  bool can_serve() const {
    for (const Line& line : lines_) {
      if (line.released && line.first != nullptr) return true;
    }
    return false;
  }
  // Gives what was released to those who wait.
  void serve_waiters();

  // Registers memory that came into use, one extent after another: its pages are brought in on the helper
  // thread. Until then it is plain memory. After stop_pinning() and once pinning() is false, the pools may
  // go.
  void pin_used();
  void stop_pinning() { pin_stopped_ = true; }
  bool pinning() const { return pin_.pool != nullptr; }

  io::Region region_of(const uint8_t* buffer) const { return pool_of(buffer).region_of(buffer); }
  const io::BufferPool& pool(BufferUse use) const { return *pools_[static_cast<size_t>(use)]; }
  uint64_t total_bytes() const;
  uint64_t free_bytes() const;
  uint64_t waiting() const { return waiting_; }

 private:
  struct Line {
    BufferWaiter* first = nullptr;
    BufferWaiter* last = nullptr;
    bool released = false;  // something came back since the line was served
  };
  struct Pin : io::Offload {
    Buffers* owner = nullptr;
    io::BufferPool* pool = nullptr;  // null: none is under way
    size_t extent = 0;
  };
  Status make_pool(size_t use, size_t sixteenths);
  io::BufferPool& pool_of(const uint8_t* buffer) const;
  void link(BufferWaiter* waiter);
  void unlink(BufferWaiter* waiter);

  io::Io* io_ = nullptr;
  size_t asked_bytes_ = 0;
  std::array<std::unique_ptr<io::BufferPool>, kBufferUses> pools_;
  std::array<Line, kBufferUses> lines_;
  uint64_t waiting_ = 0;
  Pin pin_;
  bool pin_stopped_ = false;
};

}  // namespace ffs::server
