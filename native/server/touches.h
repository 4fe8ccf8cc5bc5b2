// Keys of chunks that were used, kept until they are reported: all, while there are few, else a sample of
// bounded size. Where a key finds its places taken it replaces one; the places change with each report, so
// that no key is always the one that goes. Nothing is allocated after the first use. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace ffs::server {

class Touches {
 public:
  static constexpr uint32_t kPlaces = 2048;

  void note(const ChunkKey& key) {
    if (keys_.empty()) {
      keys_.resize(kPlaces);
      used_.resize(kPlaces);
    }
    auto place = static_cast<uint32_t>(mix64(ChunkKeyHash{}(key) ^ salt_) % kPlaces);
    for (uint32_t i = 0; i < kTries && used_[place] && keys_[place] != key; i++)
      place = (place + 1) % kPlaces;
    if (!used_[place]) count_++;
    used_[place] = true;
    keys_[place] = key;
  }
  uint32_t count() const { return count_; }

  // f(key) for each; then there are none.
  template <typename F>
  void drain(F f) {
    for (uint32_t place = 0; place < used_.size() && count_ > 0; place++) {
      if (!used_[place]) continue;
      used_[place] = false;
      count_--;
      f(keys_[place]);
    }
    salt_ = mix64(salt_ + 1);
  }

 private:
  static constexpr uint32_t kTries = 8;
  std::vector<ChunkKey> keys_;
  std::vector<bool> used_;
  uint32_t count_ = 0;
  uint64_t salt_ = 1;
};

}  // namespace ffs::server
