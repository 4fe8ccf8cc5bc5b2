#include "engine/evict.h"

#include <algorithm>

namespace ffs::engine {

EvictionRank rank_of(const ChunkSample& chunk, uint64_t now_ms, uint64_t random) {
  using Kind = EvictionRank::Kind;
  if (chunk.expiry_ms != 0 && chunk.expiry_ms <= now_ms) return {Kind::expired, chunk.expiry_ms, 0};
  if (chunk.access.last == 0) return {Kind::unknown, random, 0};
  if (chunk.access.previous == 0) return {Kind::once, chunk.access.last, 0};
  return {Kind::twice, chunk.access.previous, chunk.access.last};
}

uint64_t EvictionPool::next_seed() {
  random_ += 0x9e3779b97f4a7c15;
  return mix64(random_);
}

uint32_t EvictionPool::feed(std::span<const ChunkSample> samples, uint64_t now_ms) {
  uint32_t may_go = 0;
  for (const ChunkSample& chunk : samples) {
    const EvictionRank rank = rank_of(chunk, now_ms, next_seed());
    const bool expired = rank.kind == EvictionRank::Kind::expired;
    if (chunk.pinned && !expired) continue;
    may_go++;
    const auto known = std::find_if(candidates_.begin(), candidates_.end(),
                                    [&](const Victim& v) { return v.key == chunk.key; });
    if (known != candidates_.end()) {
      // Of unknown age still: it keeps the place that it drew.
      if (known->version == chunk.version && known->rank.kind == rank.kind && known->access == chunk.access)
        continue;
      candidates_.erase(known);
    } else if (candidates_.size() == kCandidates) {
      if (rank >= candidates_.front().rank) continue;
      candidates_.erase(candidates_.begin());
    }
    const auto place = std::upper_bound(candidates_.begin(), candidates_.end(), rank,
                                        [](const EvictionRank& r, const Victim& v) { return v.rank < r; });
    candidates_.insert(place, Victim{chunk.key, chunk.version, chunk.access, chunk.allocated_bytes,
                                     chunk.shared, expired, rank});
  }
  return may_go;
}

bool EvictionPool::take(Victim* out) {
  if (candidates_.empty()) return false;
  *out = candidates_.back();
  candidates_.pop_back();
  return true;
}

}  // namespace ffs::engine
