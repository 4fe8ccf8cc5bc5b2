// Records with stable addresses and small numbers, kept for ever: what is given back is taken
// again, so the steady state allocates nothing. T has a `T* next_free` and a `uint32_t slot`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.h"

namespace ffs::server {

template <typename T>
class Slab {
 public:
  T* take() {
    if (free_ == nullptr) grow();
    T* record = free_;
    free_ = record->next_free;
    record->next_free = nullptr;
    used_++;
    return record;
  }
  void give(T* record) {
    FFS_CHECK(used_ > 0);
    used_--;
    record->next_free = free_;
    free_ = record;
  }
  T* at(uint32_t slot) const {
    FFS_CHECK(slot < blocks_.size() * kBlock);
    return &blocks_[slot / kBlock][slot % kBlock];
  }
  size_t used() const { return used_; }
  size_t size() const { return blocks_.size() * kBlock; }

 private:
  static constexpr size_t kBlock = 64;
  void grow() {
    const auto first = static_cast<uint32_t>(blocks_.size() * kBlock);
    blocks_.push_back(std::make_unique<T[]>(kBlock));
    for (size_t i = kBlock; i > 0; i--) {
      T* record = &blocks_.back()[i - 1];
      record->slot = first + static_cast<uint32_t>(i - 1);
      record->next_free = free_;
      free_ = record;
    }
  }
  std::vector<std::unique_ptr<T[]>> blocks_;
  T* free_ = nullptr;
  size_t used_ = 0;
};

}  // namespace ffs::server
