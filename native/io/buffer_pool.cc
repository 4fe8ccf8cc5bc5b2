#include "io/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>

namespace ffs::io {

namespace {
constexpr uint8_t kFree = 1;    // + order
constexpr uint8_t kInUse = 65;  // + order
constexpr size_t kHugePageBytes = 2u << 20;
constexpr uint32_t kPagesOfLargest = kMaxBufferBytes / kMinBufferBytes;
}  // namespace

int BufferPool::order_of(size_t bytes) {
  FFS_CHECK(bytes > 0 && bytes <= kMaxBufferBytes);
  size_t pages = (bytes + kMinBufferBytes - 1) / kMinBufferBytes;
  return std::bit_width(std::bit_ceil(pages)) - 1;
}

size_t BufferPool::rounded(size_t bytes) {
  return static_cast<size_t>(kMinBufferBytes) << order_of(bytes);
}

Result<std::unique_ptr<BufferPool>> BufferPool::create(Io* io, const Options& options) {
  std::unique_ptr<BufferPool> pool(new BufferPool);
  pool->io_ = io;
  size_t pieces = std::max<size_t>(1, (options.arena_bytes + kMaxBufferBytes - 1) / kMaxBufferBytes);
  pool->arena_bytes_ = pieces * kMaxBufferBytes;
  // Private and anonymous, aligned to huge pages: one descriptor of the device's queue then takes a whole
  // buffer, where 64 KiB of single pages take 16 (a memfd has huge pages only where an administrator says
  // so).
  const size_t mapped = pool->arena_bytes_ + kHugePageBytes;
  void* mapping = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return Error::of(errno, "mapping the buffer arena");
  pool->mapping_ = mapping;
  pool->mapped_bytes_ = mapped;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  pool->base_ = static_cast<uint8_t*>(mapping) + (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
  (void)::madvise(pool->base_, pool->arena_bytes_, MADV_HUGEPAGE);  // a wish
  // What the kernel writes into must stay this process's, also while a child has its memory.
  (void)::madvise(mapping, mapped, MADV_DONTFORK);
  if (options.populate) (void)::madvise(pool->base_, pool->arena_bytes_, MADV_POPULATE_WRITE);

  auto pages = static_cast<uint32_t>(pool->arena_bytes_ / kMinBufferBytes);
  pool->next_.assign(pages, kNone);
  pool->prev_.assign(pages, kNone);
  pool->state_.assign(pages, 0);
  std::fill(std::begin(pool->heads_), std::end(pool->heads_), kNone);
  for (uint32_t page = pages; page > 0; page -= kPagesOfLargest) {
    pool->push(kOrders - 1, page - kPagesOfLargest);
  }
  pool->free_bytes_ = pool->arena_bytes_;

  if (io == nullptr || !options.register_with_io) return pool;
  if (options.register_when_used) pool->extent_bytes_ = kMaxBufferBytes;  // no buffer lies in two
  const size_t extents = (pool->arena_bytes_ + pool->extent_bytes_ - 1) / pool->extent_bytes_;
  pool->regions_.assign(extents, Region{});
  pool->used_.assign(extents, false);
  if (options.register_when_used) return pool;
  for (size_t i = 0; i < extents && pool->registration_error_ == 0; i++) pool->register_extent(i);
  if (pool->registration_error_ != 0) pool->unregister_all();
  return pool;
}

void BufferPool::unregister_all() {
  for (Region& region : regions_) {
    if (region.registered()) io_->unregister_region(region);
    region = Region{};
  }
  registered_ = 0;
}

size_t BufferPool::extent_to_register() const {
  if (registration_error_ != 0) return kNoExtent;
  for (size_t i = 0; i < used_.size(); i++) {
    if (used_[i] && !regions_[i].registered()) return i;
  }
  return kNoExtent;
}

void BufferPool::populate(size_t extent) const {
  // A wish: where the kernel doesn't know it, registering takes the time.
  (void)::madvise(base_ + extent * extent_bytes_,
                  std::min(extent_bytes_, arena_bytes_ - extent * extent_bytes_), MADV_POPULATE_WRITE);
}

void BufferPool::register_extent(size_t extent) {
  const size_t at = extent * extent_bytes_;
  auto region = io_->register_region(base_ + at, std::min(extent_bytes_, arena_bytes_ - at));
  if (!region.ok()) {
    registration_error_ = region.error().code;
    return;
  }
  regions_[extent] = region.value();
  registered_++;
}

BufferPool::~BufferPool() {
  unregister_all();
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_bytes_);
}

void BufferPool::push(int order, uint32_t page) {
  state_[page] = static_cast<uint8_t>(kFree + order);
  prev_[page] = kNone;
  next_[page] = heads_[order];
  if (heads_[order] != kNone) prev_[heads_[order]] = page;
  heads_[order] = page;
}

void BufferPool::unlink(int order, uint32_t page) {
  if (prev_[page] != kNone) {
    next_[prev_[page]] = next_[page];
  } else {
    heads_[order] = next_[page];
  }
  if (next_[page] != kNone) prev_[next_[page]] = prev_[page];
  state_[page] = 0;
}

uint8_t* BufferPool::allocate(size_t bytes) {
  const int wanted = order_of(bytes);
  int order = wanted;
  while (order < kOrders && heads_[order] == kNone) order++;
  if (order == kOrders) return nullptr;
  uint32_t page = heads_[order];
  unlink(order, page);
  while (order > wanted) {
    order--;
    push(order, page + (1u << order));
  }
  state_[page] = static_cast<uint8_t>(kInUse + order);
  free_bytes_ -= static_cast<size_t>(kMinBufferBytes) << order;
  const size_t at = static_cast<size_t>(page) * kMinBufferBytes;
  if (!used_.empty()) used_[at / extent_bytes_] = true;
  return base_ + at;
}

void BufferPool::release(uint8_t* buffer) {
  FFS_CHECK(contains(buffer));
  auto page = static_cast<uint32_t>(offset_of(buffer) / kMinBufferBytes);
  FFS_CHECK(state_[page] >= kInUse && offset_of(buffer) % kMinBufferBytes == 0);
  int order = state_[page] - kInUse;
  free_bytes_ += static_cast<size_t>(kMinBufferBytes) << order;
  state_[page] = 0;
  while (order < kOrders - 1) {
    uint32_t buddy = page ^ (1u << order);
    if (state_[buddy] != kFree + order) break;
    unlink(order, buddy);
    page = std::min(page, buddy);
    order++;
  }
  push(order, page);
}

Region BufferPool::region_of(const void* address) const {
  if (regions_.empty() || !contains(address)) return {};
  return regions_[offset_of(address) / extent_bytes_];
}

size_t BufferPool::largest_free() const {
  for (int order = kOrders - 1; order >= 0; order--) {
    if (heads_[order] != kNone) return static_cast<size_t>(kMinBufferBytes) << order;
  }
  return 0;
}

}  // namespace ffs::io
