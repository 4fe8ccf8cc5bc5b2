// Aligned memory for one shard: a buddy allocator over one piece of memory, in huge pages
// where the kernel has them, registered with the Io when the limits of the user allow it. Not inherited by
// fork. Used by the shard thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "io/io.h"

namespace ffs::io {

constexpr uint32_t kMinBufferBytes = 4096;
constexpr uint32_t kMaxBufferBytes = 16u << 20;

class BufferPool {
 public:
  struct Options {
    size_t arena_bytes = 256ull << 20;  // rounded up to a multiple of 16 MiB
    bool register_with_io = true;
    bool register_when_used = false;  // by extents of 16 MiB, when the owner gets to it; create() is quick
    bool populate = false;            // touch all pages now (a server), not at first use
  };
  // `io` may be null (no registration). A refused registration is no error: `registered()` is
  // false then and `registration_error()` says why. Blocks (mmap, pinning).
  static Result<std::unique_ptr<BufferPool>> create(Io* io, const Options& options);
  ~BufferPool();  // every buffer must have been released
  BufferPool(const BufferPool&) = delete;

  // At least `bytes` (1 .. kMaxBufferBytes), rounded up to a power of two of at least 4 KiB and
  // aligned to 4 KiB; its content is undefined. Null if there is no such piece: the caller queues and
  // tries again after a release (back-pressure, never an error).
  uint8_t* allocate(size_t bytes);
  void release(uint8_t* buffer);
  static size_t rounded(size_t bytes);

  // The region that holds this address; a default Region if the pool isn't registered.
  Region region_of(const void* address) const;
  bool contains(const void* address) const {
    auto p = static_cast<const uint8_t*>(address);
    return p >= base_ && p < base_ + arena_bytes_;
  }
  bool registered() const { return registered_ > 0; }
  int registration_error() const { return registration_error_; }  // 0 or a positive errno

  // With register_when_used: an extent that was allocated from and isn't registered, or kNoExtent. populate()
  // brings its pages in (it may take 100 ms; any thread, while the pool lives), then register_extent() is
  // quick.
  static constexpr size_t kNoExtent = SIZE_MAX;
  size_t extent_to_register() const;
  void populate(size_t extent) const;
  void register_extent(size_t extent);

  uint64_t offset_of(const void* address) const { return static_cast<const uint8_t*>(address) - base_; }
  uint8_t* base() const { return base_; }
  size_t arena_bytes() const { return arena_bytes_; }

  size_t free_bytes() const { return free_bytes_; }
  // The largest piece that `allocate` could give now; 0 if none.
  size_t largest_free() const;

 private:
  BufferPool() = default;
  static constexpr int kOrders = 13;  // 4 KiB << 0 .. 4 KiB << 12
  static constexpr uint32_t kNone = UINT32_MAX;
  static int order_of(size_t bytes);
  void push(int order, uint32_t page);
  void unlink(int order, uint32_t page);
  void unregister_all();

  Io* io_ = nullptr;
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* base_ = nullptr;
  size_t arena_bytes_ = 0;
  size_t free_bytes_ = 0;
  int registration_error_ = 0;
  size_t extent_bytes_ = kMaxRegionBytes;
  size_t registered_ = 0;        // extents
  std::vector<Region> regions_;  // by extent
  std::vector<bool> used_;       // by extent: allocated from
  uint32_t heads_[kOrders];
  std::vector<uint32_t> next_;  // by page: links of free pieces
  std::vector<uint32_t> prev_;
  std::vector<uint8_t> state_;  // by page: 0 inside a piece, 1 + order: free, 65 + order: in use
};

}  // namespace ffs::io
