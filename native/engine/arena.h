// Memory of the index: items by number, in pages that never move, so that nothing is copied while a
// store grows and a step stays short. Number 0 is never given out. Removed items are given out again
// first; their memory holds the list of them. Shard thread only.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/ids.h"

namespace ffs::engine {

// T has `uint32_t& free_link()`, a number that the arena may use while the item isn't given out.
template <typename T, uint32_t kPageItems = 1024>
class Arena {
 public:
  uint32_t add() {
    live_++;
    if (free_ == 0) {
      if (used_ == pages_.size() * kPageItems) pages_.push_back(std::make_unique<T[]>(kPageItems));
      return used_++;
    }
    const uint32_t number = free_;
    free_ = (*this)[number].free_link();
    return number;
  }
  void remove(uint32_t number) {
    live_--;
    (*this)[number].free_link() = free_;
    free_ = number;
  }
  T& operator[](uint32_t number) { return pages_[number / kPageItems][number % kPageItems]; }
  const T& operator[](uint32_t number) const { return pages_[number / kPageItems][number % kPageItems]; }
  uint32_t end() const { return used_; }  // above every number ever given out
  uint32_t live() const { return live_; }
  uint64_t memory_bytes() const {
    return pages_.size() * kPageItems * sizeof(T) + pages_.capacity() * sizeof(pages_[0]);
  }

  Arena() { pages_.push_back(std::make_unique<T[]>(kPageItems)); }

 private:
  std::vector<std::unique_ptr<T[]>> pages_;
  uint32_t free_ = 0;
  uint32_t used_ = 1;
  uint32_t live_ = 0;
};

// Granule checksums: runs of 1, 2, 4 .. 256 numbers. A run is named by its handle and its count.
class SumArena {
 public:
  uint32_t add(uint32_t count) {  // 0 for count 0
    if (count == 0) return 0;
    FFS_CHECK(count <= kMaxGranules);
    const uint32_t order = order_of(count);
    Order& o = orders_[order];
    if (o.free != 0) {
      const uint32_t handle = o.free;
      o.free = *at(handle, count);
      return handle;
    }
    if (o.used / (kPageNumbers >> order) >= o.pages.size()) {
      o.pages.push_back(std::make_unique<uint32_t[]>(kPageNumbers));
    }
    return o.used++;
  }
  void remove(uint32_t handle, uint32_t count) {
    if (handle == 0) return;
    Order& o = orders_[order_of(count)];
    *at(handle, count) = o.free;
    o.free = handle;
  }
  uint32_t* at(uint32_t handle, uint32_t count) {
    if (handle == 0) return nullptr;
    const uint32_t order = order_of(count);
    const uint32_t per_page = kPageNumbers >> order;
    return &orders_[order].pages[handle / per_page][(handle % per_page) << order];
  }
  const uint32_t* at(uint32_t handle, uint32_t count) const {
    return const_cast<SumArena*>(this)->at(handle, count);
  }
  uint64_t memory_bytes() const {
    uint64_t bytes = 0;
    for (const Order& o : orders_) {
      bytes += o.pages.size() * kPageNumbers * sizeof(uint32_t) + o.pages.capacity() * sizeof(o.pages[0]);
    }
    return bytes;
  }

 private:
  static constexpr uint32_t kOrders = 9;
  static constexpr uint32_t kPageNumbers = 16384;
  static_assert(1u << (kOrders - 1) == kMaxGranules);
  struct Order {
    std::vector<std::unique_ptr<uint32_t[]>> pages;
    uint32_t free = 0;
    uint32_t used = 1;
  };
  static uint32_t order_of(uint32_t count) { return static_cast<uint32_t>(std::bit_width(count - 1)); }
  Order orders_[kOrders];
};

}  // namespace ffs::engine
