// From hashes to numbers, at 4 bytes an entry and a load between 7/16 and 7/8: the index's way from a key
// to a chunk. Extendible hashing: the leading bits of a hash choose a segment of 1024 entries, in which
// the trailing bits say where to begin a search. A full segment is split in two, the only step that grows
// with anything, and it takes under 100 microseconds. An entry holds a number and, in the bits above it,
// some of the hash, so that a search rarely looks at a chunk that isn't meant. Shard thread only.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "engine/arena.h"

namespace ffs::engine {

class ChunkHash {
 public:
  // Numbers below `numbers` are expected; larger ones work, with less of the hash in an entry.
  explicit ChunkHash(uint64_t numbers);

  // The number with this hash for which is_it(number) is true; 0: none.
  template <typename F>
  uint32_t find(uint64_t hash, F is_it) const {
    const Segment& segment = segments_[segment_of(hash)];
    const uint32_t mark = mark_of(hash);
    for (uint32_t i = home_of(hash);; i = next(i)) {
      const uint32_t entry = segment.entries[i];
      if (entry == 0) return 0;
      if ((entry & ~number_mask_) == mark && is_it(entry & number_mask_)) return entry & number_mask_;
    }
  }

  // hash_of(number) gives the hash of one that was inserted. `number` isn't there yet, and isn't 0.
  template <typename F>
  void insert(uint64_t hash, uint32_t number, F hash_of) {
    if (number > number_mask_) widen(number, hash_of);
    while (segments_[segment_of(hash)].used >= kMostUsed) split(segment_of(hash), hash_of);
    put(segments_[segment_of(hash)], hash, number);
  }

  // `number` is there.
  template <typename F>
  void erase(uint64_t hash, uint32_t number, F hash_of) {
    Segment& segment = segments_[segment_of(hash)];
    uint32_t hole = home_of(hash);
    while ((segment.entries[hole] & number_mask_) != number) hole = next(hole);
    for (uint32_t i = next(hole); segment.entries[i] != 0; i = next(i)) {
      const uint32_t home = home_of(hash_of(segment.entries[i] & number_mask_));
      // Moves back what a search would no longer reach over the hole.
      if (((i - home) % kEntries) < ((i - hole) % kEntries)) continue;
      segment.entries[hole] = segment.entries[i];
      hole = i;
    }
    segment.entries[hole] = 0;
    segment.used--;
  }

  uint64_t memory_bytes() const {
    return segments_.memory_bytes() + directory_.capacity() * sizeof(directory_[0]);
  }

 private:
  static constexpr uint32_t kEntries = 1024;
  static constexpr uint32_t kMostUsed = kEntries / 8 * 7;
  static constexpr uint32_t kHomeBits = std::bit_width(kEntries - 1);
  struct Segment {
    uint32_t entries[kEntries];
    uint32_t used;
    uint32_t depth;  // how many leading bits of the hash it stands for
    uint32_t& free_link() { return used; }
  };

  static uint32_t mask_for(uint64_t number) {
    const int bits = std::bit_width(number);
    return bits >= 32 ? UINT32_MAX : (1u << bits) - 1;
  }
  static uint32_t next(uint32_t i) { return (i + 1) % kEntries; }
  static uint32_t home_of(uint64_t hash) { return static_cast<uint32_t>(hash % kEntries); }
  uint32_t mark_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> kHomeBits) & ~number_mask_; }
  size_t slot_of(uint64_t hash) const { return depth_ == 0 ? 0 : hash >> (64 - depth_); }
  uint32_t segment_of(uint64_t hash) const { return directory_[slot_of(hash)]; }
  void put(Segment& segment, uint64_t hash, uint32_t number) {
    uint32_t i = home_of(hash);
    while (segment.entries[i] != 0) i = next(i);
    segment.entries[i] = mark_of(hash) | number;
    segment.used++;
  }
  uint32_t add_segment(uint32_t depth);
  void double_directory();

  template <typename F>
  void split(uint32_t number, F hash_of) {
    // Equal hashes would never part; hashes are keyed by a secret, so nobody can make such keys.
    FFS_CHECK(segments_[number].depth < kMostDepth);
    if (segments_[number].depth == depth_) double_directory();
    const uint32_t other = add_segment(segments_[number].depth + 1);
    const Segment old = segments_[number];
    segments_[number] = Segment{{}, 0, old.depth + 1};
    // The half of the directory's slots with the next bit set goes to the new segment.
    bool first = true;
    for (uint32_t entry : old.entries) {
      if (entry == 0) continue;
      const uint64_t hash = hash_of(entry & number_mask_);
      if (first) redirect(hash, old.depth, other);
      first = false;
      put(segments_[segment_of(hash)], hash, entry & number_mask_);
    }
  }
  void redirect(uint64_t hash, uint32_t old_depth, uint32_t to);

  template <typename F>
  void widen(uint32_t number, F hash_of) {
    const uint32_t old_mask = number_mask_;
    number_mask_ = mask_for(number);
    for (uint32_t s = 1; s < segments_.end(); s++) {
      const Segment old = segments_[s];
      segments_[s] = Segment{{}, 0, old.depth};
      for (uint32_t entry : old.entries) {
        if (entry != 0) put(segments_[s], hash_of(entry & old_mask), entry & old_mask);
      }
    }
  }

  static constexpr uint32_t kMostDepth = 32;
  Arena<Segment, 8> segments_;
  std::vector<uint32_t> directory_;  // by the leading depth_ bits
  uint32_t depth_ = 0;
  uint32_t number_mask_;
};

}  // namespace ffs::engine
