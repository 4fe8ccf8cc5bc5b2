// Versions of a chunk in memory: their overlays, finding them, letting them come and go.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "engine/state_accounting.h"

namespace ffs::engine {

namespace {
constexpr ClientId kNobody{};
}

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
  const bool committed = &image == &index[chunk].image;
  if (committed && listener != nullptr) listener->version_leaves(chunk);
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
      if (listener != nullptr) {
        listener->slot_unused(image.place, image.place_class, (image.flags & kFlagSharedSlot) != 0,
                              {index[chunk].target, index[chunk].key.space()});
      }
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
  if (listener != nullptr && c.image.place != 0) listener->version_committed(chunk);
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

}  // namespace ffs::engine
