// Which chunk of a space goes first: sampled LRU-2 (docs/craq.md, Eviction). Pure: samples in, victims out.
//
// LRU-2 keeps what was used twice lately: the chunk whose use before the last one lies farthest back goes
// first. One that was used once has no such use: all of those go before it, the one that was used longest ago
// first. So a scan over cold chunks pushes out the scan, and not what is used again and again. No list is
// kept: the chunks that a sample of the index shows are compared, and the best candidates of all samples so
// far stay in a small pool. A candidate may be out of date when it is taken: whoever evicts it checks that
// its version and its access stamps are still the same (a chunk that wasn't used since keeps its place in the
// order).
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/chunk_store.h"

namespace ffs::engine {

// The order in which chunks go, the lowest first.
struct EvictionRank {
  enum class Kind : uint8_t {
    expired,  // in the order of their expiry
    unknown,  // not used since a start that knew no stamp of it: at random
    once,     // by the last use
    twice,    // by the use before, then by the last
  };
  Kind kind = Kind::expired;
  uint64_t first = 0;
  uint32_t second = 0;
  friend constexpr auto operator<=>(const EvictionRank&, const EvictionRank&) = default;
};
// `random`: the place of a chunk of unknown age among its like. now_ms: manager time.
EvictionRank rank_of(const ChunkSample& chunk, uint64_t now_ms, uint64_t random);

struct Victim {
  ChunkKey key;
  Version version;
  Access access;
  uint32_t allocated_bytes = 0;
  bool shared = false;  // others name its slot, which stays
  bool expired = false;
  EvictionRank rank;
};

// The candidates of one space on one target.
class EvictionPool {
 public:
  static constexpr uint32_t kCandidates = 64;  // kept
  static constexpr uint32_t kSamples = 24;     // to be fed for each victim that is taken

  explicit EvictionPool(uint64_t seed) : random_(seed) {}

  // The seed of the next sample.
  uint64_t next_seed();
  // Takes over those of the samples that may go: not the pinned ones. An expired one may, pinned or not:
  // nobody can read it any more. Returns how many may.
  uint32_t feed(std::span<const ChunkSample> samples, uint64_t now_ms);
  // The candidate that goes first, taken out of the pool; false: there is none.
  bool take(Victim* out);
  bool empty() const { return candidates_.empty(); }
  void clear() { candidates_.clear(); }

 private:
  std::vector<Victim> candidates_;  // the one that goes first at the end
  uint64_t random_;
};

}  // namespace ffs::engine
