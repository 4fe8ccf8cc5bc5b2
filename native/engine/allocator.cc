#include "engine/allocator.h"

#include <algorithm>
#include <bit>

namespace ffs::engine {

Allocator::Allocator(uint64_t data_offset, uint64_t slab_count)
    : data_block_(data_offset / kBlock), slabs_(slab_count), free_slab_bits_((slab_count + 63) / 64) {
  FFS_CHECK(data_offset > 0 && data_offset % kBlock == 0);
  for (uint64_t i = 0; i < slab_count; i++) set_slab_free(i, true);
}

void Allocator::set_slab_free(uint64_t slab, bool is_free) {
  uint64_t bit = 1ull << (slab % 64);
  FFS_CHECK(((free_slab_bits_[slab / 64] & bit) != 0) != is_free);
  free_slab_bits_[slab / 64] ^= bit;
  free_slabs_ += is_free ? 1 : -1ull;
  if (is_free) free_slab_hint_ = std::min(free_slab_hint_, slab / 64);
}

uint64_t Allocator::lowest_free_slab() {
  while (free_slab_bits_[free_slab_hint_] == 0) free_slab_hint_++;
  return free_slab_hint_ * 64 + static_cast<uint64_t>(std::countr_zero(free_slab_bits_[free_slab_hint_]));
}

// Whether a slot of this class can go to a new chunk and each class in use keeps one to spare.
bool Allocator::leaves_reserve(uint8_t place_class) const {
  uint64_t slabs_left = free_slabs_;
  uint64_t own_left = free_slots_[place_class];
  if (own_left == 0) {
    if (slabs_left == 0) return false;
    slabs_left--;
    own_left = slots_of(place_class);
  }
  own_left--;
  uint64_t slabs_needed = 0;
  for (uint8_t c = 0; c < kClasses; c++) {
    bool used = c == place_class || class_used_[c] > 0;
    if (used && (c == place_class ? own_left : free_slots_[c]) == 0) slabs_needed++;
  }
  return slabs_needed <= slabs_left;
}

uint8_t Allocator::class_for(uint64_t bytes) {
  FFS_CHECK(bytes > 0 && bytes <= kSlabBytes);
  uint64_t blocks = (bytes + kBlock - 1) / kBlock;
  return static_cast<uint8_t>(std::bit_width(std::bit_ceil(blocks)) - 1);
}

bool Allocator::locate(uint64_t place, uint8_t place_class, uint64_t* slab, uint32_t* slot) const {
  constexpr uint64_t slab_blocks = kSlabBytes / kBlock;
  if (place_class >= kClasses || place < data_block_) return false;
  uint64_t at = place - data_block_;
  *slab = at / slab_blocks;
  uint64_t within = at % slab_blocks;
  if (*slab >= slabs_.size() || within % (1ull << place_class) != 0) return false;
  *slot = static_cast<uint32_t>(within >> place_class);
  return true;
}

void Allocator::assign(uint64_t slab, uint8_t place_class) {
  Slab& s = slabs_[slab];
  FFS_CHECK(s.place_class == kNoClass);
  s.place_class = place_class;
  s.used = 0;
  s.hint = 0;
  uint32_t slots = slots_of(place_class);
  s.bits = std::make_unique<uint64_t[]>((slots + 63) / 64);
  free_slots_[place_class] += slots;
  list(slab);
}

void Allocator::list(uint64_t slab) {
  Slab& s = slabs_[slab];
  if (s.listed) return;
  s.listed = true;
  partial_[s.place_class].push_back(static_cast<uint32_t>(slab));
}

uint64_t Allocator::take(uint64_t slab) {
  Slab& s = slabs_[slab];
  uint32_t slots = slots_of(s.place_class);
  for (uint32_t word = s.hint; word * 64 < slots; word++) {
    uint64_t open = ~s.bits[word];
    if (slots < 64) open &= (1ull << slots) - 1;
    if (open == 0) {
      s.hint = static_cast<uint16_t>(word + 1);
      continue;
    }
    auto slot = static_cast<uint32_t>(word * 64 + static_cast<uint32_t>(std::countr_zero(open)));
    s.bits[word] |= open & -open;
    s.hint = static_cast<uint16_t>(word);
    s.used++;
    free_slots_[s.place_class]--;
    class_used_[s.place_class]++;
    used_bytes_ += slot_bytes(s.place_class);
    return data_block_ + slab * (kSlabBytes / kBlock) + (static_cast<uint64_t>(slot) << s.place_class);
  }
  return 0;
}

uint64_t Allocator::allocate(uint8_t place_class, bool use_reserve) {
  FFS_CHECK(place_class < kClasses);
  if (!use_reserve && !leaves_reserve(place_class)) return 0;
  if (free_slots_[place_class] == 0) {
    if (free_slabs_ == 0) return 0;
    uint64_t slab = lowest_free_slab();
    set_slab_free(slab, false);
    assign(slab, place_class);
  }
  auto& partial = partial_[place_class];
  for (;;) {
    FFS_CHECK(!partial.empty());  // free_slots_ says that there is one
    uint64_t place = take(partial.back());
    if (place != 0) return place;
    slabs_[partial.back()].listed = false;
    partial.pop_back();
  }
}

void Allocator::free(uint64_t place, uint8_t place_class) {
  uint64_t slab;
  uint32_t slot;
  FFS_CHECK(locate(place, place_class, &slab, &slot));
  Slab& s = slabs_[slab];
  uint64_t bit = 1ull << (slot % 64);
  FFS_CHECK(s.place_class == place_class && (s.bits[slot / 64] & bit) != 0);
  s.bits[slot / 64] &= ~bit;
  s.hint = std::min<uint16_t>(s.hint, static_cast<uint16_t>(slot / 64));
  s.used--;
  free_slots_[place_class]++;
  class_used_[place_class]--;
  used_bytes_ -= slot_bytes(place_class);
  if (s.used > 0) {
    list(slab);
    return;
  }
  free_slots_[place_class] -= slots_of(place_class);
  auto& partial = partial_[place_class];
  if (s.listed) partial.erase(std::find(partial.begin(), partial.end(), static_cast<uint32_t>(slab)));
  s = Slab{};
  set_slab_free(slab, true);
}

bool Allocator::claim(uint64_t place, uint8_t place_class) {
  uint64_t slab;
  uint32_t slot;
  if (!locate(place, place_class, &slab, &slot)) return false;
  Slab& s = slabs_[slab];
  if (s.place_class == kNoClass) {
    set_slab_free(slab, false);
    assign(slab, place_class);
  }
  uint64_t bit = 1ull << (slot % 64);
  if (s.place_class != place_class || (s.bits[slot / 64] & bit) != 0) return false;
  s.bits[slot / 64] |= bit;
  s.used++;
  free_slots_[place_class]--;
  class_used_[place_class]++;
  used_bytes_ += slot_bytes(place_class);
  return true;
}

bool Allocator::in_use(uint64_t place, uint8_t place_class) const {
  uint64_t slab;
  uint32_t slot;
  if (!locate(place, place_class, &slab, &slot)) return false;
  const Slab& s = slabs_[slab];
  return s.place_class == place_class && (s.bits[slot / 64] & (1ull << (slot % 64))) != 0;
}

}  // namespace ffs::engine
