// Walks everything and compares (ChunkStore::check_consistency).
#include <algorithm>

#include "engine/store_impl.h"

namespace ffs::engine {

std::string ChunkStore::Impl::check_consistency() const {
  std::vector<std::pair<uint64_t, uint8_t>> named, shared;
  uint64_t committed = 0, record_bytes = 0;
  std::vector<TargetUsage> usage(identity.targets.size());
  ChunkKey zero{};
  uint32_t chunk = state->index.lower_bound(0, zero, false);
  uint32_t walked = 0;
  while (chunk != 0) {
    const Chunk& c = state->index[chunk];
    walked++;
    if (state->index.find(c.target, c.key) != chunk) return "the hash doesn't find a chunk of the order";
    std::vector<std::pair<uint64_t, uint8_t>> own, own_shared;
    auto name = [&](const Image& image) {
      if (image.place == 0) return;
      auto& list = (image.flags & kFlagSharedSlot) != 0 ? own_shared : own;
      list.emplace_back(image.place, image.place_class);
    };
    if (!c.image.version.none()) {
      committed++;
      usage[c.target].chunks++;
      usage[c.target].logical_bytes += c.image.logical;
      name(c.image);
    }
    if (const Live* live = state->index.live_if(chunk)) {
      for (const Pending& pending : live->pendings) name(pending.image);
    }
    for (auto* list : {&own, &own_shared}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
      for (const auto& [place, place_class] : *list)
        usage[c.target].allocated_bytes += slot_bytes(place_class);
    }
    named.insert(named.end(), own.begin(), own.end());
    shared.insert(shared.end(), own_shared.begin(), own_shared.end());
    record_bytes += state->chunk_record_bytes(chunk);
    chunk = state->index.lower_bound(c.target, c.key, true);
  }
  if (walked != state->index.size()) return "the order misses chunks";
  if (committed != state->committed_chunks) return "the count of committed chunks is wrong";
  for (size_t t = 0; t < usage.size(); t++) {
    const TargetUsage& known = state->usage[t];
    if (known.chunks != usage[t].chunks || known.logical_bytes != usage[t].logical_bytes ||
        known.allocated_bytes != usage[t].allocated_bytes) {
      return "the usage of a target is wrong";
    }
  }
  if (record_bytes + state->table_bytes() != state->snapshot_bytes())
    return "the size of a snapshot is wrong";
  std::string miscounted = dedup.check(&shared);
  if (!miscounted.empty()) return miscounted;
  named.insert(named.end(), shared.begin(), shared.end());
  for (const Quarantined& q : quarantine) named.emplace_back(q.place, q.place_class);
  slot_uses.for_each([&](uint64_t place, const SlotUse& use) {
    if (use.dying) named.emplace_back(place, use.place_class);
  });
  std::sort(named.begin(), named.end());
  uint64_t bytes = 0;
  for (size_t i = 0; i < named.size(); i++) {
    if (i > 0 && named[i].first == named[i - 1].first) return "two owners of one slot";
    if (!allocator->in_use(named[i].first, named[i].second)) return "a slot in use is free in the allocator";
    bytes += slot_bytes(named[i].second);
  }
  if (places_held == 0 && bytes != allocator->used_bytes())
    return "the allocator holds slots that nobody owns";
  return {};
}

}  // namespace ffs::engine
