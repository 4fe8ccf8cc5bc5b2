// A map from 64-bit numbers (not 0) to small values, for very many of them: keys and values lie in arrays of
// their own, seven eighths full at most, and it grows by segments, so that no single step is long. Shard
// thread only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace ffs::engine {

template <typename Value>
class SegmentMap {
 public:
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  Value* find(uint64_t key) {
    if (size_ == 0) return nullptr;
    const uint64_t hash = mix64(key);
    Segment& segment = (*segments_)[hash >> 56];
    if (segment.used == 0) return nullptr;
    for (size_t i = segment.home(hash);; i = segment.after(i)) {
      if (segment.keys[i] == key) return &segment.values[i];
      if (segment.keys[i] == 0) return nullptr;
    }
  }
  const Value* find(uint64_t key) const { return const_cast<SegmentMap*>(this)->find(key); }

  // It must not be there.
  void insert(uint64_t key, Value value) {
    if (segments_ == nullptr) segments_ = std::make_unique<Segments>();
    const uint64_t hash = mix64(key);
    Segment& segment = (*segments_)[hash >> 56];
    if ((segment.used + 1) * 8 > segment.keys.size() * 7) segment.grow();
    segment.put(hash, key, value);
    size_++;
  }

  bool erase(uint64_t key) {
    if (size_ == 0) return false;
    const uint64_t hash = mix64(key);
    Segment& segment = (*segments_)[hash >> 56];
    if (segment.used == 0) return false;
    size_t hole = segment.home(hash);
    for (; segment.keys[hole] != key; hole = segment.after(hole)) {
      if (segment.keys[hole] == 0) return false;
    }
    segment.close(hole);
    size_--;
    return true;
  }

  void clear() {
    segments_.reset();
    size_ = 0;
  }

  template <typename F>
  void for_each(F f) const {
    if (segments_ == nullptr) return;
    for (const Segment& segment : *segments_) {
      for (size_t i = 0; i < segment.keys.size(); i++) {
        if (segment.keys[i] != 0) f(segment.keys[i], segment.values[i]);
      }
    }
  }

  size_t memory_bytes() const {
    if (segments_ == nullptr) return 0;
    size_t bytes = sizeof *segments_;
    for (const Segment& segment : *segments_)
      bytes += segment.keys.capacity() * sizeof(uint64_t) + segment.values.capacity() * sizeof(Value);
    return bytes;
  }

 private:
  struct Segment {
    std::vector<uint64_t> keys;  // 0: empty
    std::vector<Value> values;
    size_t used = 0;

    // By the 32 bits after those that choose the segment.
    size_t home(uint64_t hash) const { return (hash >> 24 & 0xffffffff) * keys.size() >> 32; }
    size_t after(size_t i) const { return i + 1 == keys.size() ? 0 : i + 1; }
    size_t distance(size_t from, size_t to) const { return to >= from ? to - from : to + keys.size() - from; }
    void put(uint64_t hash, uint64_t key, Value value) {
      size_t i = home(hash);
      while (keys[i] != 0) i = after(i);
      keys[i] = key;
      values[i] = value;
      used++;
    }
    void grow() {
      Segment larger;
      const size_t size = std::max<size_t>(8, keys.size() / 2 * 3);
      larger.keys.resize(size);
      larger.values.resize(size);
      for (size_t i = 0; i < keys.size(); i++) {
        if (keys[i] != 0) larger.put(mix64(keys[i]), keys[i], values[i]);
      }
      *this = std::move(larger);
    }
    // Moves back what probing would no longer reach over the hole.
    void close(size_t hole) {
      for (size_t i = after(hole); keys[i] != 0; i = after(i)) {
        if (distance(home(mix64(keys[i])), i) < distance(hole, i)) continue;
        keys[hole] = keys[i];
        values[hole] = values[i];
        hole = i;
      }
      keys[hole] = 0;
      used--;
    }
  };

  using Segments = std::array<Segment, 256>;
  std::unique_ptr<Segments> segments_;  // null: nothing was ever there
  size_t size_ = 0;
};

}  // namespace ffs::engine
