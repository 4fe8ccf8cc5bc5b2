// When evicted chunks were last used, for a while: a chunk that comes back soon is then known as used twice
// (docs/craq.md, Eviction). Without it a space in which most chunks go before their second use would never
// learn which ones are wanted again. In memory only, about four bytes a chunk remembered; what it says may
// rarely be another chunk's (1 in 250), which costs a hit and nothing else. Pure.
#pragma once

#include <cstdint>
#include <memory>

#include "base/ids.h"

namespace ffs::engine {

class EvictionHistory {
 public:
  // Of a space of so many chunks. Makes room for more of them by forgetting all, when they have doubled
  // since.
  void fit(uint64_t chunks);

  // The chunk was evicted now; its last use was at `last`. Stamps of access times; now >= last, last not 0.
  void remember(const ChunkKey& key, uint32_t last, uint32_t now);
  // When a chunk that is there again was used before, and forgets it; 0: not known.
  uint32_t recall(const ChunkKey& key, uint32_t now);

  uint64_t entries() const { return uint64_t{buckets_} * kWays; }
  uint64_t memory_bytes() const { return uint64_t{buckets_} * sizeof(Bucket); }

 private:
  static constexpr uint32_t kWays = 16;
  static constexpr uint32_t kStampBits =
      20;  // in units of 16 stamps, about a second: 12 days until they wrap
  static constexpr uint32_t kStampShift = 4;
  static constexpr uint32_t kStampMask = (1u << kStampBits) - 1;
  static constexpr uint64_t kLeastEntries = 16384;
  struct Bucket {
    uint32_t entries[kWays];  // fingerprint (never 0) above, time below; 0: free
  };
  static_assert(sizeof(Bucket) == 64);
  struct Free {
    void operator()(Bucket* buckets) const;
  };
  Bucket* bucket_of(const ChunkKey& key, uint32_t* fingerprint) const;

  std::unique_ptr<Bucket[], Free> memory_;
  uint32_t buckets_ = 0;
};

}  // namespace ffs::engine
