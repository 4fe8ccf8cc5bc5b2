#include "engine/state.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace ffs::engine {

namespace {
constexpr ClientId kNobody{};
}

// Keeps chunk_bytes_, the counters of the target and committed_chunks right over a change of one chunk.
class State::Accounting {
 public:
  Accounting(State& state, uint32_t chunk) : state_(state), chunk_(chunk) { count(-1); }
  ~Accounting() { count(1); }
  Accounting(const Accounting&) = delete;

 private:
  void count(int sign) {
    const Chunk& chunk = state_.index[chunk_];
    state_.chunk_bytes_ += static_cast<uint64_t>(sign) * state_.chunk_record_bytes(chunk_);
    if (!state_.accounts.empty()) count_space(chunk, sign);
    if (chunk.image.version.none()) return;
    TargetUsage& usage = state_.usage[chunk.target];
    usage.chunks += static_cast<uint64_t>(sign);
    usage.logical_bytes += static_cast<uint64_t>(sign) * chunk.image.logical;
    state_.committed_chunks += static_cast<uint64_t>(sign);
  }
  void count_space(const Chunk& chunk, int sign) {
    SpaceAccount* account = state_.accounts.find({chunk.target, chunk.key.space()});
    if (account == nullptr || !account->has_passed(chunk.key)) return;
    account->allocated_bytes += static_cast<uint64_t>(sign) * state_.allocated_bytes(chunk_);
    if (!chunk.image.version.none()) account->chunks += static_cast<uint64_t>(sign);
  }
  State& state_;
  uint32_t chunk_;
};

State::State(uint64_t max_chunks, uint32_t target_count, StateListener* l)
    : index(max_chunks), retry(target_count), chain_states(target_count), usage(target_count), listener(l) {}

// ------------------------------------------------------------------------------ overlays

uint32_t State::add_overlay(uint32_t next, uint32_t first_block, uint32_t blocks, uint8_t* bytes,
                            uint64_t at) {
  uint32_t number = index.overlays.add();
  index.overlays[number] = Overlay{next, 1, first_block, blocks, bytes, at};
  return number;
}

void State::ref_overlay(uint32_t overlay) {
  if (overlay != 0) index.overlays[overlay].refs++;
}

void State::unref_overlay(uint32_t overlay) {
  while (overlay != 0) {
    Overlay& o = index.overlays[overlay];
    FFS_CHECK(o.refs > 0);
    if (--o.refs > 0) return;
    if (listener != nullptr) {
      listener->overlay_unused(o.bytes, o.blocks);
    } else {
      std::free(o.bytes);
    }
    uint32_t next = o.next;
    index.overlays.remove(overlay);
    overlay = next;
  }
}

void State::drop_overlays() {
  for (uint32_t i = 1; i < index.overlays.end(); i++) {
    Overlay& o = index.overlays[i];
    if (o.refs > 0 && o.bytes != nullptr) listener->overlay_unused(std::exchange(o.bytes, nullptr), o.blocks);
  }
}

void State::chain_totals(uint32_t overlay, uint32_t* count, uint32_t* bytes) const {
  *count = *bytes = 0;
  for (; overlay != 0; overlay = index.overlays[overlay].next) {
    (*count)++;
    *bytes += index.overlays[overlay].blocks * static_cast<uint32_t>(kBlock);
  }
}

void State::list_overlays(uint32_t overlay, uint32_t until, std::vector<OverlayView>* out) const {
  out->clear();
  for (; overlay != 0 && overlay != until; overlay = index.overlays[overlay].next) {
    const Overlay& o = index.overlays[overlay];
    out->push_back({o.first_block, o.blocks, o.bytes, o.at});
  }
  std::reverse(out->begin(), out->end());
}

void State::trim_overlays(uint32_t chunk, uint32_t head) {
  Accounting accounting(*this, chunk);
  auto trim = [&](Image& image) {
    if (image.overlay == head) {
      image.overlay = 0;
      unref_overlay(head);
      return;
    }
    for (uint32_t at = image.overlay; at != 0; at = index.overlays[at].next) {
      if (index.overlays[at].next != head) continue;
      index.overlays[at].next = 0;
      unref_overlay(head);
      return;
    }
  };
  ref_overlay(head);  // stays comparable until all have let go
  trim(index[chunk].image);
  if (Live* live = index.live_if(chunk)) {
    for (Pending& pending : live->pendings) trim(pending.image);
  }
  unref_overlay(head);
}

uint32_t State::chain_overlays(uint32_t base, std::span<const OverlayView> overlays) {
  ref_overlay(base);
  uint32_t head = base;
  for (const OverlayView& view : overlays) {
    head = add_overlay(head, view.first_block, view.blocks, const_cast<uint8_t*>(view.bytes), view.at);
  }
  return head;
}

// ------------------------------------------------------------------------------ finding

Pending* State::find_pending(uint32_t chunk, const Version& version) {
  Live* live = index.live_if(chunk);
  if (live == nullptr) return nullptr;
  for (Pending& pending : live->pendings) {
    if (pending.image.version == version) return &pending;
  }
  return nullptr;
}

Image* State::find_image(uint32_t chunk, const Version& version) {
  if (version.none()) return nullptr;
  if (index[chunk].image.version == version) return &index[chunk].image;
  Pending* pending = find_pending(chunk, version);
  return pending != nullptr ? &pending->image : nullptr;
}

const Image* State::base_of(uint32_t chunk, const Version& base) const {
  return const_cast<State*>(this)->find_image(chunk, base);
}

Version State::newest(uint32_t chunk) const {
  const Live* live = index.live_if(chunk);
  if (live != nullptr && !live->pendings.empty()) return live->pendings.back().image.version;
  return index[chunk].image.version;
}

bool State::slot_shared(uint32_t chunk, const Image& image) const {
  const Chunk& c = index[chunk];
  if (&c.image != &image && !c.image.version.none() && c.image.place == image.place) return true;
  if (const Live* live = index.live_if(chunk)) {
    for (const Pending& pending : live->pendings) {
      if (&pending.image != &image && pending.image.place == image.place) return true;
    }
  }
  return false;
}

uint32_t State::slot_high(uint32_t chunk, uint64_t place) const {
  const Chunk& c = index[chunk];
  uint32_t high = c.image.place == place ? c.image.high_blocks : 0;
  if (const Live* live = index.live_if(chunk)) {
    for (const Pending& pending : live->pendings) {
      if (pending.image.place == place) high = std::max<uint32_t>(high, pending.image.high_blocks);
    }
  }
  return high;
}

// ------------------------------------------------------------------------------ versions come and go

void State::account_place(uint32_t chunk, const Image& image) {
  if (image.place == 0 || slot_shared(chunk, image)) return;
  usage[index[chunk].target].allocated_bytes += slot_bytes(image.place_class);
}

// `image` must still stand where slot_shared looks, and is left empty.
void State::drop_image(uint32_t chunk, Image& image) {
  index.sums.remove(image.sums, image.granules());
  if (image.place != 0) {
    if (slot_shared(chunk, image)) {
      // What the dropped version covered stays off limits for appends of the others.
      auto raise = [&](Image& other) {
        if (other.place == image.place)
          other.high_blocks = std::max<uint32_t>(other.high_blocks, image.high_blocks);
      };
      raise(index[chunk].image);
      for (Pending& pending : index.live(chunk).pendings) raise(pending.image);
    } else {
      usage[index[chunk].target].allocated_bytes -= slot_bytes(image.place_class);
      if (listener != nullptr) listener->slot_unused(image.place, image.place_class);
    }
  }
  uint32_t overlay = image.overlay;
  image = Image{};
  unref_overlay(overlay);
}

void State::raise_high(Image& image, std::span<const OverlayView> overlays) const {
  uint32_t high = static_cast<uint32_t>(round_up(image.stored, kBlock) / kBlock);
  for (const OverlayView& overlay : overlays) high = std::max(high, overlay.first_block + overlay.blocks);
  image.high_blocks = std::max<uint32_t>(image.high_blocks, high);
}

// Pending version number `at` becomes the committed one; those before it fall with the old one.
void State::commit_up_to(uint32_t chunk, size_t at) {
  Chunk& c = index[chunk];
  auto& pendings = index.live(chunk).pendings;
  for (size_t i = 0; i <= at; i++) pending_done(chunk, pendings[i]);
  if (c.image.version.none()) c.access = {now_stamp, 0};
  // The new image stays where it is meanwhile: dropping asks whether others share a slot.
  if (!c.image.version.none()) drop_image(chunk, c.image);
  for (size_t i = 0; i < at; i++) drop_image(chunk, pendings[i].image);
  if (unknown_.size() != 0) unknown_.erase(chunk);
  if (pendings[at].image.kind() == UpdateKind::remove) {
    c.image = Image{};
  } else {
    c.image = pendings[at].image;
  }
  pendings.erase(pendings.begin(), pendings.begin() + static_cast<ptrdiff_t>(at) + 1);
}

void State::erase_if_empty(uint32_t chunk) {
  index.drop_live_if_idle(chunk);
  if (index[chunk].image.version.none() && index[chunk].live == 0) index.erase(chunk);
}

void State::retry_change(uint16_t target, ClientId client, ChainId chain, uint32_t channel,
                         const RetryEntry& entry) {
  if (client == kNobody) return;
  RetryKey key{target, client, chain, channel};
  if (deferred_retry != nullptr) {
    deferred_retry->push_back({key, entry});
  } else {
    set_retry(key, entry);
  }
}

void State::pending_done(uint32_t chunk, const Pending& pending) {
  const Chunk& c = index[chunk];
  if (pending.identity.client == kNobody) return;
  RetryEntry entry{pending.identity.sequence, c.key, pending.image.version, RetryState::done, 0};
  retry_change(c.target, pending.identity.client, pending.chain, pending.identity.channel, entry);
}

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
  return nullptr;
}

void State::erase(uint16_t target, const ChunkKey& key) {
  if (uint32_t chunk = index.find(target, key)) forget_chunk(chunk);
}

// The new slot holds what the old one held with its overlays (of which a replay may know more than the
// store did when it moved the chunk).
const char* State::move(uint16_t target, const MoveRecord& record) {
  uint32_t chunk = index.find(target, record.key);
  if (chunk == 0 || record.version.none() || index[chunk].image.version != record.version)
    return "a move of a version that isn't committed";
  Image& image = index[chunk].image;
  Image moved = image;
  moved.place = record.place;
  moved.place_class = record.place_class & 15;
  const bool fits = record.place_class < kClasses && image.stored <= slot_bytes(record.place_class) &&
                    record.place >> kPlaceBits == 0 && image_error(0, moved, {}) == nullptr;
  if (image.place == 0 || record.place == 0 || record.place == image.place || !fits)
    return "a move that leads nowhere";
  if (slot_shared(chunk, image)) return "a move out of a slot that a pending version shares";
  Accounting accounting(*this, chunk);
  const uint64_t old_place = image.place;
  const uint8_t old_class = image.place_class;
  const uint32_t overlay = image.overlay;
  image.place = record.place;
  image.place_class = record.place_class;
  image.overlay = 0;
  image.high_blocks = 0;
  raise_high(image, {});
  usage[target].allocated_bytes += slot_bytes(record.place_class) - slot_bytes(old_class);
  if (listener != nullptr) listener->slot_unused(old_place, old_class);
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
