#include "io/buffer_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>

namespace ffs::io {

namespace {
constexpr uint8_t kFree = 1;    // + order
constexpr uint8_t kInUse = 65;  // + order
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
  pool->fd_ = ::memfd_create("ffs-buffers", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (pool->fd_ < 0) return Error::of(errno, "memfd_create of the buffer arena");
  if (::ftruncate(pool->fd_, static_cast<off_t>(pool->arena_bytes_)) != 0) {
    return Error::of(errno, "sizing the buffer arena");
  }
  if (::fcntl(pool->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Error::of(errno, "sealing the buffer arena");
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", pool->fd_);
  pool->read_only_fd_ = ::open(path, O_RDONLY | O_CLOEXEC);
  if (pool->read_only_fd_ < 0) return Error::of(errno, "opening the buffer arena for reading");
  int populate = options.populate ? MAP_POPULATE : 0;
  void* base =
      ::mmap(nullptr, pool->arena_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | populate, pool->fd_, 0);
  if (base == MAP_FAILED) return Error::of(errno, "mapping the buffer arena");
  pool->base_ = static_cast<uint8_t*>(base);
  ::madvise(base, pool->arena_bytes_, MADV_HUGEPAGE);  // a wish: fewer page-table misses

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
  if (base_ != nullptr) ::munmap(base_, arena_bytes_);
  if (fd_ >= 0) ::close(fd_);
  if (read_only_fd_ >= 0) ::close(read_only_fd_);
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
