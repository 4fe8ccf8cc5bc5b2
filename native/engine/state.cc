#include "engine/state.h"

#include <algorithm>
#include <cstring>

#include "engine/state_accounting.h"

namespace ffs::engine {

State::State(uint64_t max_chunks, uint32_t target_count, StateListener* l)
    : index(max_chunks), retry(target_count), chain_states(target_count), usage(target_count), listener(l) {}

// ------------------------------------------------------------------------------ records about chunks

// What a record can't say of a new version of the chunk (0: of a new one), whatever the device holds.
const char* State::image_error(uint32_t chunk, const Image& image,
                               std::span<const OverlayView> overlays) const {
  if (image.place == 0) return overlays.empty() ? nullptr : "overlays of a version without a slot";
  const uint64_t blocks = 1ull << image.place_class;
  if (image.place < first_place || image.place + blocks > end_place ||
      (image.place - first_place) % blocks != 0)
    return "a version in a slot that can't be";
  auto clashes = [&](const Image& other) {
    return other.place == image.place && other.place_class != image.place_class;
  };
  bool clash = chunk != 0 && clashes(index[chunk].image);
  if (const Live* live = chunk != 0 ? index.live_if(chunk) : nullptr) {
    for (const Pending& pending : live->pendings) clash |= clashes(pending.image);
  }
  if (clash) return "a slot of two sizes";
  for (const OverlayView& o : overlays) {
    if (o.first_block + o.blocks > blocks) return "an overlay past the end of its slot";
  }
  return nullptr;
}

const char* State::stage(uint16_t target, const StageRecord& record, std::span<const uint32_t> changed_sums,
                         std::span<const OverlayView> overlays) {
  Image image;
  if (!from_disk(record.image, &image)) return "a staged version contradicts itself";
  uint32_t granules = image.granules();
  if (uint32_t{record.first_changed} + record.changed_granules > granules)
    return "checksums past the chunk's end";
  uint32_t chunk = index.find(target, record.key);
  const Image* base = nullptr;
  if (chunk != 0) {
    if (image.version <= newest(chunk)) return "a staged version is not above the ones before";
    base = base_of(chunk, record.base);
  }
  if (!record.base.none() && base == nullptr) return "a staged version without its base";
  if (const char* wrong = image_error(chunk, image, overlays)) return wrong;
  uint32_t base_granules = base != nullptr ? base->granules() : 0;
  for (uint32_t g = 0; g < granules; g++) {
    bool changed = g >= record.first_changed && g < uint32_t{record.first_changed} + record.changed_granules;
    if (!changed && g >= base_granules) return "a staged version with too few checksums";
  }
  if (chunk == 0) chunk = index.insert(target, record.key);
  {
    Accounting accounting(*this, chunk);
    add_pending(chunk, record, image, base, changed_sums, overlays);
    if (record.flags & kStageCommitNow) commit_up_to(chunk, index.live(chunk).pendings.size() - 1);
  }
  if ((record.flags & kStageCommitNow) == 0 && record.client != 0) {
    RetryEntry entry{record.sequence, record.key, image.version, RetryState::pending, 0};
    retry_change(target, ClientId(record.client), ChainId(record.chain), record.channel, entry);
  }
  erase_if_empty(chunk);  // a removal committed at once
  return nullptr;
}

void State::add_pending(uint32_t chunk, const StageRecord& record, Image image, const Image* base,
                        std::span<const uint32_t> changed_sums, std::span<const OverlayView> overlays) {
  uint32_t granules = image.granules();
  uint32_t base_granules = base != nullptr ? base->granules() : 0;
  image.sums = index.sums.add(granules);
  if (granules > 0) {
    uint32_t* sums = index.sums.at(image.sums, granules);
    uint32_t kept = std::min(granules, base_granules);
    if (kept > 0) std::memcpy(sums, index.sums.at(base->sums, base_granules), kept * sizeof(uint32_t));
    if (!changed_sums.empty())
      std::memcpy(sums + record.first_changed, changed_sums.data(), changed_sums.size_bytes());
  }
  bool in_place = base != nullptr && base->place != 0 && base->place == image.place;
  if (in_place) image.high_blocks = base->high_blocks;
  image.overlay = chain_overlays(in_place ? base->overlay : 0, overlays);
  raise_high(image, overlays);

  Pending pending;
  pending.image = image;
  pending.base = record.base;
  pending.identity = {ClientId(record.client), record.channel, record.sequence};
  pending.chain = ChainId(record.chain);
  pending.space_epoch = record.space_epoch;
  pending.write_offset = record.write_offset;
  pending.write_length = record.write_length;
  Live& live = index.live(chunk);
  live.pendings.push_back(pending);
  account_place(chunk, live.pendings.back().image);
}

const char* State::commit(uint16_t target, const ChunkKey& key, const Version& version) {
  uint32_t chunk = index.find(target, key);
  if (chunk == 0) return "a commit of no chunk";
  if (index[chunk].image.version == version) return nullptr;
  Pending* pending = find_pending(chunk, version);
  if (pending == nullptr) return "a commit of a version that isn't pending";
  {
    Accounting accounting(*this, chunk);
    commit_up_to(chunk, static_cast<size_t>(pending - index.live(chunk).pendings.data()));
  }
  erase_if_empty(chunk);
  return nullptr;
}

const char* State::refuse(uint16_t target, const RefuseRecord& record) {
  uint32_t chunk = index.find(target, record.key);
  Pending* pending = chunk != 0 ? find_pending(chunk, record.version) : nullptr;
  if (pending != nullptr) {
    {
      Accounting accounting(*this, chunk);
      drop_image(chunk, pending->image);
      auto& pendings = index.live(chunk).pendings;
      pendings.erase(pendings.begin() + (pending - pendings.data()));
    }
    erase_if_empty(chunk);
  }
  RetryEntry entry{record.sequence, record.key, record.version, RetryState::refused, record.code};
  retry_change(target, ClientId(record.client), ChainId(record.chain), record.channel, entry);
  return nullptr;
}

// The version may be any, the one that is there as well: it comes from a replica that knows better.
const char* State::install(uint16_t target, const StageRecord& record, std::span<const uint32_t> sums) {
  Image image;
  if (!from_disk(record.image, &image)) return "an installed version contradicts itself";
  if (image.kind() != UpdateKind::replace || record.first_changed != 0 || sums.size() != image.granules())
    return "an installed version isn't whole";
  uint32_t chunk = index.find(target, record.key);
  if (const char* wrong = image_error(chunk, image, {})) return wrong;
  if (chunk == 0) chunk = index.insert(target, record.key);
  {
    Accounting accounting(*this, chunk);
    if (Live* live = index.live_if(chunk)) {
      const bool keeps = (record.flags & kInstallKeepsPendings) != 0;
      auto& pendings = live->pendings;
      size_t dropped = 0;
      for (; dropped < pendings.size(); dropped++) {
        if (keeps && pendings[dropped].image.version > image.version) break;
        drop_image(chunk, pendings[dropped].image);
      }
      pendings.erase(pendings.begin(), pendings.begin() + static_cast<ptrdiff_t>(dropped));
    }
    if (index[chunk].image.version.none()) index[chunk].access = {now_stamp, 0};
    if (!index[chunk].image.version.none()) drop_image(chunk, index[chunk].image);
    if (unknown_.size() != 0) unknown_.erase(chunk);
    image.sums = index.sums.add(image.granules());
    if (!sums.empty())
      std::memcpy(index.sums.at(image.sums, image.granules()), sums.data(), sums.size_bytes());
    raise_high(image, {});
    index[chunk].image = image;
    account_place(chunk, index[chunk].image);
  }
  index.drop_live_if_idle(chunk);
  if (listener != nullptr) listener->version_committed(chunk);
  return nullptr;
}

void State::erase(uint16_t target, const ChunkKey& key) {
  if (uint32_t chunk = index.find(target, key)) forget_chunk(chunk);
}

// The new slot holds what the old one held with its overlays (of which a replay may know more than the
// store did when it moved the chunk).
const char* State::move(uint16_t target, const MoveRecord& record) {
  return put_elsewhere(target, record, false);
}

// The same, with a slot that others may name. Staying where it is, it is only marked so.
const char* State::share(uint16_t target, const ShareRecord& record) {
  return put_elsewhere(target, {record.key, record.version, record.place, record.place_class, {}}, true);
}

const char* State::put_elsewhere(uint16_t target, const MoveRecord& record, bool shared) {
  uint32_t chunk = index.find(target, record.key);
  if (chunk == 0 || record.version.none() || index[chunk].image.version != record.version)
    return "a move of a version that isn't committed";
  Image& image = index[chunk].image;
  Image moved = image;
  moved.place = record.place;
  moved.place_class = record.place_class & 15;
  const bool fits = record.place_class < kClasses && image.stored <= slot_bytes(record.place_class) &&
                    record.place >> kPlaceBits == 0 && image_error(0, moved, {}) == nullptr;
  const bool stays = record.place == image.place;
  if (image.place == 0 || record.place == 0 || (stays && !shared) || !fits)
    return "a move that leads nowhere";
  if (slot_shared(chunk, image)) return "a move out of a slot that a pending version shares";
  Accounting accounting(*this, chunk);
  const uint64_t old_place = image.place;
  const uint8_t old_class = image.place_class;
  const bool was_shared = (image.flags & kFlagSharedSlot) != 0;
  const uint32_t overlay = image.overlay;
  image.place = record.place;
  image.place_class = record.place_class;
  image.overlay = 0;
  image.high_blocks = 0;
  image.flags = (image.flags & ~uint64_t{kFlagSharedSlot}) | (shared ? kFlagSharedSlot : 0);
  raise_high(image, {});
  usage[target].allocated_bytes += slot_bytes(record.place_class) - slot_bytes(old_class);
  if (listener != nullptr && !stays)
    listener->slot_unused(old_place, old_class, was_shared, {target, record.key.space()});
  unref_overlay(overlay);
  return nullptr;
}

void State::drop_pendings(uint32_t chunk) {
  Live* live = index.live_if(chunk);
  if (live == nullptr || live->pendings.empty()) return;
  {
    Accounting accounting(*this, chunk);
    while (!live->pendings.empty()) {
      drop_image(chunk, live->pendings.back().image);
      live->pendings.pop_back();
    }
  }
  erase_if_empty(chunk);
}

void State::forget_chunk(uint32_t chunk) {
  {
    Accounting accounting(*this, chunk);
    if (Live* live = index.live_if(chunk)) {
      while (!live->pendings.empty()) {
        drop_image(chunk, live->pendings.back().image);
        live->pendings.pop_back();
      }
    }
    if (!index[chunk].image.version.none()) drop_image(chunk, index[chunk].image);
    if (unknown_.size() != 0) unknown_.erase(chunk);
  }
  erase_if_empty(chunk);
}

}  // namespace ffs::engine
