// A state written into snapshots and made from them; the tables.
#include <algorithm>
#include <cstring>

#include "engine/state_accounting.h"

namespace ffs::engine {

namespace {
constexpr ClientId kNobody{};
}

// ------------------------------------------------------------------------------ snapshots

const char* State::restore_chunk(uint16_t target, const ChunkView& view,
                                 std::span<const OverlayView> overlays, bool in_order) {
  Image image;
  if (!from_disk(view.fixed.image, &image)) return "a chunk contradicts itself";
  if (image.kind() == UpdateKind::remove) return "a removed chunk in a snapshot";
  if (const char* wrong = image_error(0, image, overlays)) return wrong;
  if (!in_order && index.find(target, view.fixed.key) != 0) return "a chunk stands twice in a snapshot";
  uint32_t chunk = in_order ? index.append(target, view.fixed.key) : index.insert(target, view.fixed.key);
  Accounting accounting(*this, chunk);
  image.sums = index.sums.add(image.granules());
  if (!view.sums.empty()) {
    std::memcpy(index.sums.at(image.sums, image.granules()), view.sums.data(), view.sums.size_bytes());
  }
  image.overlay = chain_overlays(0, overlays);
  raise_high(image, overlays);
  index[chunk].image = image;
  index[chunk].access = {view.fixed.accessed, view.fixed.accessed_before};
  account_place(chunk, index[chunk].image);
  if (!view.unknown.empty()) unknown_[chunk].assign(view.unknown.begin(), view.unknown.end());
  return nullptr;
}

const char* State::restore_pending(uint16_t target, const StageView& view,
                                   std::span<const OverlayView> overlays) {
  Image image;
  if (!from_disk(view.fixed.image, &image)) return "a pending version contradicts itself";
  if (view.fixed.first_changed != 0 || view.sums.size() != image.granules())
    return "a pending version lacks checksums";
  uint32_t chunk = index.find(target, view.fixed.key);
  if (chunk != 0 && image.version <= newest(chunk)) return "pending versions out of order";
  const Image* base = chunk != 0 ? base_of(chunk, view.fixed.base) : nullptr;
  if (const char* wrong = image_error(chunk, image, overlays)) return wrong;
  if (chunk == 0) chunk = index.insert(target, view.fixed.key);
  Accounting accounting(*this, chunk);
  // Its base may be gone (a refused one that this was built on): then all its overlays are its own.
  add_pending(chunk, view.fixed, image, base, view.sums, overlays);
  index.live(chunk).pendings.back().durable = true;
  return nullptr;
}

void State::own_overlays(uint32_t chunk, const Pending& pending, std::vector<OverlayView>* out) const {
  const Image* base = base_of(chunk, pending.base);
  bool in_place = base != nullptr && base->place != 0 && base->place == pending.image.place;
  list_overlays(pending.image.overlay, in_place ? base->overlay : 0, out);
}

size_t State::chunk_record_bytes(uint32_t chunk) const {
  const Chunk& c = index[chunk];
  auto& list = const_cast<State*>(this)->overlay_scratch_;
  size_t bytes = 0;
  if (!c.image.version.none()) {
    list_overlays(c.image.overlay, 0, &list);
    const auto* unknown = unknown_.size() != 0 ? unknown_.find(chunk) : nullptr;
    bytes += engine::chunk_bytes(c.image.granules(), list, unknown != nullptr ? unknown->size() : 0);
  }
  if (const Live* live = index.live_if(chunk)) {
    for (const Pending& pending : live->pendings) {
      own_overlays(chunk, pending, &list);
      bytes += stage_bytes(pending.image.granules(), list);
    }
  }
  return bytes;
}

void State::encode_chunk_and_pendings(uint32_t chunk, Writer& writer, uint32_t* records) const {
  const Chunk& c = index[chunk];
  auto& list = const_cast<State*>(this)->overlay_scratch_;
  if (!c.image.version.none()) {
    list_overlays(c.image.overlay, 0, &list);
    ChunkRecord fixed{};
    fixed.key = c.key;
    fixed.image = to_disk(c.image);
    fixed.accessed = c.access.last;
    fixed.accessed_before = c.access.previous;
    fixed.overlay_count = static_cast<uint16_t>(list.size());
    const auto* unknown = unknown_.size() != 0 ? unknown_.find(chunk) : nullptr;
    std::span<const uint8_t> extra;
    if (unknown != nullptr) extra = *unknown;
    uint32_t granules = c.image.granules();
    encode_chunk(writer, c.target, fixed, {index.sums.at(c.image.sums, granules), granules}, list, extra);
    (*records)++;
  }
  const Live* live = index.live_if(chunk);
  if (live == nullptr) return;
  for (const Pending& pending : live->pendings) {
    own_overlays(chunk, pending, &list);
    StageRecord fixed{};
    fixed.key = c.key;
    fixed.base = pending.base;
    fixed.image = to_disk(pending.image);
    fixed.client = pending.identity.client.value;
    fixed.sequence = pending.identity.sequence;
    fixed.channel = pending.identity.channel;
    fixed.chain = pending.chain.value;
    fixed.space_epoch = pending.space_epoch;
    fixed.write_offset = pending.write_offset;
    fixed.write_length = pending.write_length;
    uint32_t granules = pending.image.granules();
    fixed.changed_granules = static_cast<uint16_t>(granules);
    fixed.overlay_count = static_cast<uint16_t>(list.size());
    encode_stage(writer, RecordType::pending, c.target, fixed,
                 {index.sums.at(pending.image.sums, granules), granules}, list);
    (*records)++;
  }
}

// ------------------------------------------------------------------------------ tables

void State::set_retry(const RetryKey& key, const RetryEntry& entry) {
  if (key.client == kNobody || fenced.find(key.client.value) != nullptr) return;
  RetryTable& table = retry[key.target];
  RetryEntry* known = table.find(key);
  if (known == nullptr) {
    table_bytes_ += simple_bytes<RetryRecord>();
    table[key] = entry;
  } else if (entry.sequence >= known->sequence) {  // a late record of an update that was given up
    *known = entry;
  }
}

void State::fence(ClientId client) {
  if (fenced.find(client.value) != nullptr) return;
  for (RetryTable& table : retry) {
    const size_t before = table.size();
    if (before == 0) continue;
    table.erase_if([&](const RetryKey& key, const RetryEntry&) { return key.client == client; });
    table_bytes_ -= (before - table.size()) * simple_bytes<RetryRecord>();
  }
  fenced[client.value] = true;
  table_bytes_ += simple_bytes<FenceRecord>();
}

void State::set_space(uint16_t target, uint64_t space, const SpaceEpoch& epoch) {
  SpaceKey key{target, space};
  SpaceEpoch* known = spaces.find(key);
  if (known == nullptr) {
    table_bytes_ += simple_bytes<SpaceEpochRecord>();
    spaces[key] = epoch;
    return;
  }
  known->least_epoch = std::max(known->least_epoch, epoch.least_epoch);
  // 0 is for ever, the latest of all.
  bool for_ever = known->expiry_ms == 0 || epoch.expiry_ms == 0;
  known->expiry_ms = for_ever ? 0 : std::max(known->expiry_ms, epoch.expiry_ms);
}

void State::expire_spaces(uint16_t target, uint64_t manager_ms) {
  size_t before = spaces.size();
  spaces.erase_if([&](const SpaceKey& key, const SpaceEpoch& epoch) {
    return key.target == target && epoch.expiry_ms != 0 && epoch.expiry_ms <= manager_ms;
  });
  table_bytes_ -= (before - spaces.size()) * simple_bytes<SpaceEpochRecord>();
}

void State::set_chain_state(uint16_t target, std::span<const uint8_t> state) {
  auto& own = chain_states[target];
  if (!own.empty()) table_bytes_ -= chain_state_bytes(own.size());
  own.assign(state.begin(), state.end());
  if (!own.empty()) table_bytes_ += chain_state_bytes(own.size());
}

void State::drop_retry(uint16_t target) {
  if (retry[target].empty()) return;
  table_bytes_ -= retry[target].size() * simple_bytes<RetryRecord>();
  dropped_retry.push_back(std::exchange(retry[target], RetryTable()));
}

void State::drop_tables(uint16_t target) {
  drop_retry(target);
  size_t before = spaces.size();
  spaces.erase_if([&](const SpaceKey& key, const SpaceEpoch&) { return key.target == target; });
  table_bytes_ -= (before - spaces.size()) * simple_bytes<SpaceEpochRecord>();
  set_chain_state(target, {});
}

}  // namespace ffs::engine
