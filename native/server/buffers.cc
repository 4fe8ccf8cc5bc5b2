#include "server/buffers.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace ffs::server {

namespace {

// Sixteenths of the whole by use. Reads need little: they live as long as a device read and a send.
constexpr size_t kReadShare = 4, kUpdateShare = 6, kTailShare = 3, kBeforeTailShare = 2, kFartherShare = 1;
// Beside that whole: a window of chunks on their way out of, and into, this shard.
constexpr size_t kSyncShare = 4;

}  // namespace

Result<std::unique_ptr<Buffers>> Buffers::create(io::Io& io, size_t total_bytes) {
  auto buffers = std::make_unique<Buffers>();
  buffers->io_ = &io;
  buffers->asked_bytes_ = total_bytes;
  FFS_TRY_STATUS(buffers->make_pool(static_cast<size_t>(BufferUse::kRead), kReadShare));
  FFS_TRY_STATUS(buffers->make_pool(static_cast<size_t>(BufferUse::kUpdate), kUpdateShare));
  FFS_TRY_STATUS(buffers->make_pool(static_cast<size_t>(BufferUse::kSyncOut), kSyncShare));
  FFS_TRY_STATUS(buffers->make_pool(static_cast<size_t>(BufferUse::kSyncIn), kSyncShare));
  FFS_TRY_STATUS(buffers->make_pool(static_cast<size_t>(BufferUse::kTail), kTailShare));
  FFS_TRY_STATUS(buffers->make_pool(static_cast<size_t>(BufferUse::kBeforeTail), kBeforeTailShare));
  return buffers;
}

Status Buffers::make_pool(size_t use, size_t sixteenths) {
  io::BufferPool::Options options;
  options.arena_bytes = std::max<size_t>(asked_bytes_ / 16 * sixteenths, 1);
  options.register_when_used = true;
  FFS_TRY(pools_[use], io::BufferPool::create(io_, options));
  return ok_status();
}

Status Buffers::grow_to_members(uint32_t member_count) {
  for (uint32_t behind = 0; behind + 1 < member_count; behind++) {
    const auto use = static_cast<size_t>(use_by_distance(behind));
    if (pools_[use] == nullptr) FFS_TRY_STATUS(make_pool(use, kFartherShare));
  }
  return ok_status();
}

void Buffers::pin_used() {
  if (pinning() || pin_stopped_) return;
  for (const auto& pool : pools_) {
    if (pool == nullptr) continue;
    const size_t extent = pool->extent_to_register();
    if (extent == io::BufferPool::kNoExtent) continue;
    pin_.owner = this;
    pin_.pool = pool.get();
    pin_.extent = extent;
    pin_.work = [](io::Offload* work) {
      const Pin* pin = static_cast<Pin*>(work);
      pin->pool->populate(pin->extent);
      return 0;
    };
    pin_.op.done = [](io::Op* op) {
      Pin* pin = reinterpret_cast<Pin*>(op);  // its first member's first member
      std::exchange(pin->pool, nullptr)->register_extent(pin->extent);
      pin->owner->pin_used();
    };
    io_->offload(&pin_);
    return;
  }
}

uint8_t* Buffers::try_allocate(BufferUse use, uint32_t bytes) {
  if (lines_[static_cast<size_t>(use)].first != nullptr) return nullptr;
  return pools_[static_cast<size_t>(use)]->allocate(bytes);
}

uint8_t* Buffers::allocate_or_wait(BufferUse use, uint32_t bytes, BufferWaiter* waiter) {
  FFS_CHECK(!waiter->waiting && bytes > 0 && bytes <= io::kMaxBufferBytes);
  waiter->use = use;
  waiter->bytes = bytes;
  if (uint8_t* buffer = try_allocate(use, bytes)) return buffer;
  link(waiter);
  return nullptr;
}

// Whether `late` goes ahead of `early`, who came first.
static bool goes_ahead(const BufferWaiter& late, BufferWaiter* early) {
  if (early->priority == late.priority) return early->turn > late.turn;
  if (early->priority < late.priority || early->overtaken == Buffers::kMostOvertaken) return false;
  early->overtaken++;
  return true;
}

void Buffers::link(BufferWaiter* waiter) {
  Line& line = lines_[static_cast<size_t>(waiter->use)];
  BufferWaiter* before = line.last;
  while (before != nullptr && goes_ahead(*waiter, before)) before = before->previous;
  BufferWaiter*& forward = before != nullptr ? before->next : line.first;
  waiter->previous = before;
  waiter->next = forward;
  (forward != nullptr ? forward->previous : line.last) = waiter;
  forward = waiter;
  waiter->overtaken = 0;
  waiter->waiting = true;
  waiting_++;
}

void Buffers::unlink(BufferWaiter* waiter) {
  Line& line = lines_[static_cast<size_t>(waiter->use)];
  (waiter->previous != nullptr ? waiter->previous->next : line.first) = waiter->next;
  (waiter->next != nullptr ? waiter->next->previous : line.last) = waiter->previous;
  waiter->next = waiter->previous = nullptr;
  waiter->waiting = false;
  waiting_--;
}

void Buffers::cancel(BufferWaiter* waiter) {
  if (!waiter->waiting) return;
  unlink(waiter);
  lines_[static_cast<size_t>(waiter->use)].released = true;  // who stood behind may fit
}

void Buffers::release(uint8_t* buffer) {
  for (size_t use = 0; use < kBufferUses; use++) {
    if (pools_[use] == nullptr || !pools_[use]->contains(buffer)) continue;
    pools_[use]->release(buffer);
    lines_[use].released = true;
    return;
  }
  FFS_CHECK(false && "a buffer of no pool");
}

void Buffers::serve_waiters() {
  for (size_t use = 0; use < kBufferUses; use++) {
    Line& line = lines_[use];
    if (!line.released) continue;
    line.released = false;
    while (line.first != nullptr) {
      BufferWaiter* waiter = line.first;
      uint8_t* buffer = pools_[use]->allocate(waiter->bytes);
      if (buffer == nullptr) break;
      unlink(waiter);
      waiter->ready(waiter, buffer);
    }
  }
}

io::BufferPool& Buffers::pool_of(const uint8_t* buffer) const {
  for (const auto& pool : pools_) {
    if (pool != nullptr && pool->contains(buffer)) return *pool;
  }
  FFS_CHECK(false && "a buffer of no pool");
  return *pools_[0];
}

uint64_t Buffers::total_bytes() const {
  uint64_t total = 0;
  for (const auto& pool : pools_) total += pool != nullptr ? pool->arena_bytes() : 0;
  return total;
}

uint64_t Buffers::free_bytes() const {
  uint64_t total = 0;
  for (const auto& pool : pools_) total += pool != nullptr ? pool->free_bytes() : 0;
  return total;
}

}  // namespace ffs::server
