#include "engine/allocator.h"

#include <algorithm>
#include <bit>

namespace ffs::engine {

Allocator::Allocator(uint64_t data_offset, uint64_t slab_count)
    : data_block_(data_offset / kBlock), slabs_(slab_count), free_slabs_(slab_count) {
  FFS_CHECK(data_offset > 0 && data_offset % kBlock == 0);
  clean_.words.resize((slab_count + 63) / 64);
  due_bits_.words.resize((slab_count + 63) / 64);
  for (uint64_t i = 0; i < slab_count; i++) clean_.flip(i);
  for (auto& lists : partial_) std::fill(std::begin(lists), std::end(lists), kNone);
}

size_t Allocator::memory_bytes() const {
  size_t bytes = slabs_.capacity() * sizeof(Slab) + 2 * clean_.words.capacity() * sizeof(uint64_t);
  for (uint8_t c = 0; c < kClasses; c++)
    if (slots_of(c) > 64) bytes += use_of(c).slabs * (slots_of(c) / 8);
  return bytes;
}

// ------------------------------------------------------------------------------ bits and lists

void Allocator::Bits::flip(uint64_t i) {
  words[i / 64] ^= 1ull << (i % 64);
  if (get(i)) hint = std::min(hint, i / 64);
}

uint64_t Allocator::Bits::lowest() {
  while (words[hint] == 0) hint++;
  return hint * 64 + static_cast<uint64_t>(std::countr_zero(words[hint]));
}

// Into the list of its class and fill, if something may be placed there.
void Allocator::link(uint64_t slab) {
  Slab& s = slabs_[slab];
  if (s.draining || s.used == slots_of(s.place_class)) return;
  uint32_t& head = partial_[s.place_class][fill_of(s)];
  s.previous = kNone;
  s.next = head;
  if (head != kNone) slabs_[head].previous = static_cast<uint32_t>(slab);
  head = static_cast<uint32_t>(slab);
  filled_[s.place_class] |= static_cast<uint16_t>(1u << fill_of(s));
}

void Allocator::unlink(uint64_t slab) {
  Slab& s = slabs_[slab];
  if (s.draining || s.used == slots_of(s.place_class)) return;
  uint32_t& head = partial_[s.place_class][fill_of(s)];
  (s.previous != kNone ? slabs_[s.previous].next : head) = s.next;
  if (s.next != kNone) slabs_[s.next].previous = s.previous;
  if (head == kNone) filled_[s.place_class] &= static_cast<uint16_t>(~(1u << fill_of(s)));
  s.next = s.previous = kNone;
}

uint32_t Allocator::fullest(uint8_t place_class) const {
  FFS_CHECK(filled_[place_class] != 0);
  return partial_[place_class][std::bit_width(filled_[place_class]) - 1];
}

// One slot more (1) or less (-1) of the slab is in use.
void Allocator::count_use(uint64_t slab, int sign) {
  Slab& s = slabs_[slab];
  const auto change = static_cast<uint64_t>(sign);
  const uint8_t c = s.place_class;
  unlink(slab);
  s.used = static_cast<uint16_t>(s.used + sign);
  link(slab);
  (s.draining ? draining_open_ : free_slots_)[c] -= change;
  if (s.draining) draining_used_[c] += change;
  class_used_[c] += change;
  used_bytes_ += change * slot_bytes(c);
}

// ------------------------------------------------------------------------------ room

Allocator::Room Allocator::room(bool compacted) const {
  Room left;
  left.slabs = free_slabs_ + (compacted ? discarding_ : 0);
  for (uint8_t c = 0; c < kClasses; c++) {
    left.open[c] = free_slots_[c];
    if (class_used_[c] == 0) continue;
    if (compacted) {
      left.open[c] += draining_open_[c];
      const uint64_t whole = left.open[c] == 0 ? 0 : (left.open[c] - 1) / slots_of(c);
      left.slabs += whole;
      left.open[c] -= whole * slots_of(c);
    }
    if (left.open[c] == 0) left.lacking++;
  }
  return left;
}

// Whether a new chunk of this class can have a slot and each class in use keeps one to spare. What has
// a slot to spare in slabs of its own takes nothing from other classes.
bool Allocator::leaves_reserve(const Room& left, uint8_t place_class) {
  if (left.open[place_class] >= 2) return true;
  // A last free slot of its own needs a successor; else the slab that it lacks has one, but for whole slabs.
  const bool another = left.open[place_class] == 1 || slots_of(place_class) == 1;
  const uint64_t needed = left.lacking + (another ? 1 : 0);
  return needed <= left.slabs;
}

bool Allocator::room_for(uint8_t place_class, bool update) const {
  Room left = room(true);
  if (class_used_[place_class] == 0) left.lacking++;
  if (update) return left.open[place_class] > 0 || left.slabs >= left.lacking;
  return leaves_reserve(left, place_class);
}

uint64_t Allocator::room_bytes() const {
  const Room left = room(true);
  const bool enough = left.lacking <= left.slabs;
  uint64_t bytes = enough ? (left.slabs - left.lacking) * kSlabBytes : 0;
  for (uint8_t c = 0; c < kClasses; c++) {
    if (class_used_[c] == 0) continue;
    if (left.open[c] > 0) bytes += (left.open[c] - 1) * slot_bytes(c);
    if (left.open[c] == 0 && enough) bytes += kSlabBytes - slot_bytes(c);
  }
  return bytes;
}

uint64_t Allocator::reclaimable_slabs() const {
  return room(true).slabs - free_slabs_ - discarding_;
}

// ------------------------------------------------------------------------------ slots

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

// One that needs no discard, if there is any: what is handed out before its discard doesn't get it.
uint64_t Allocator::take_free_slab() {
  FFS_CHECK(free_slabs_ > 0);
  const bool clean = free_slabs_ > due_;
  Bits& bits = clean ? clean_ : due_bits_;
  const uint64_t slab = bits.lowest();
  bits.flip(slab);
  free_slabs_--;
  if (!clean) due_--;
  return slab;
}

void Allocator::assign(uint64_t slab, uint8_t place_class) {
  Slab& s = slabs_[slab];
  FFS_CHECK(s.place_class == kNoClass);
  s.place_class = place_class;
  uint32_t slots = slots_of(place_class);
  if (slots > 64) s.many = std::make_unique<uint64_t[]>(slots / 64);
  free_slots_[place_class] += slots;
  link(slab);
}

uint64_t Allocator::take(uint64_t slab) {
  Slab& s = slabs_[slab];
  uint32_t slots = slots_of(s.place_class);
  for (uint32_t word = s.hint; word * 64 < slots; word++) {
    uint64_t open = ~s.bits()[word];
    if (slots < 64) open &= (1ull << slots) - 1;
    if (open == 0) continue;
    auto slot = static_cast<uint32_t>(word * 64 + static_cast<uint32_t>(std::countr_zero(open)));
    s.bits()[word] |= open & -open;
    s.hint = static_cast<uint16_t>(word);
    count_use(slab, 1);
    return data_block_ + slab * (kSlabBytes / kBlock) + (static_cast<uint64_t>(slot) << s.place_class);
  }
  FFS_CHECK(false);  // it was in a list of slabs with free slots
  return 0;
}

uint64_t Allocator::allocate(uint8_t place_class, Asker asker) {
  FFS_CHECK(place_class < kClasses);
  const uint64_t open = free_slots_[place_class];
  if (asker == Asker::move && open < 2) return 0;
  if (open < 2 && asker != Asker::move) {
    Room left = room(false);
    if (class_used_[place_class] == 0) left.lacking++;  // it is in use from now on
    if (asker == Asker::fresh && !leaves_reserve(left, place_class)) return 0;
    // The slabs that other classes need for their reserve aren't touched.
    if (asker == Asker::update && open == 0 && left.slabs < left.lacking) return 0;
  }
  if (open == 0) {
    if (free_slabs_ == 0) return 0;
    assign(take_free_slab(), place_class);
  }
  return take(fullest(place_class));
}

void Allocator::free(uint64_t place, uint8_t place_class) {
  uint64_t slab;
  uint32_t slot;
  FFS_CHECK(locate(place, place_class, &slab, &slot));
  Slab& s = slabs_[slab];
  uint64_t bit = 1ull << (slot % 64);
  FFS_CHECK(s.place_class == place_class && (s.bits()[slot / 64] & bit) != 0);
  s.bits()[slot / 64] &= ~bit;
  s.hint = std::min<uint16_t>(s.hint, static_cast<uint16_t>(slot / 64));
  s.stuck = 0;
  count_use(slab, -1);
  if (s.used > 0) return;
  unlink(slab);
  (s.draining ? draining_open_ : free_slots_)[place_class] -= slots_of(place_class);
  s = Slab{};
  (track_ ? due_bits_ : clean_).flip(slab);
  free_slabs_++;
  if (track_) due_++;
}

bool Allocator::claim(uint64_t place, uint8_t place_class) {
  uint64_t slab;
  uint32_t slot;
  if (!locate(place, place_class, &slab, &slot)) return false;
  Slab& s = slabs_[slab];
  if (s.place_class == kNoClass) {
    FFS_CHECK(clean_.get(slab));  // nothing was freed or discarded yet
    clean_.flip(slab);
    free_slabs_--;
    assign(slab, place_class);
  }
  uint64_t bit = 1ull << (slot % 64);
  if (s.place_class != place_class || (s.bits()[slot / 64] & bit) != 0) return false;
  s.bits()[slot / 64] |= bit;
  count_use(slab, 1);
  return true;
}

bool Allocator::in_use(uint64_t place, uint8_t place_class) const {
  uint64_t slab;
  uint32_t slot;
  if (!locate(place, place_class, &slab, &slot)) return false;
  const Slab& s = slabs_[slab];
  return s.place_class == place_class && (s.bits()[slot / 64] & (1ull << (slot % 64))) != 0;
}

// ------------------------------------------------------------------------------ emptying slabs

// Of the slabs that aren't stuck one of the least filled; kNone if there is none among the first ones.
uint32_t Allocator::sparsest(uint8_t place_class) const {
  uint32_t probes = 64;
  for (uint16_t lists = filled_[place_class]; lists != 0; lists &= static_cast<uint16_t>(lists - 1)) {
    uint32_t at = partial_[place_class][std::countr_zero(lists)];
    for (; at != kNone && probes > 0; at = slabs_[at].next, probes--) {
      if (slabs_[at].stuck != stuck_epoch_) return at;
    }
  }
  return kNone;
}

bool Allocator::pick_victim(uint64_t max_used_bytes, uint32_t* slab, uint64_t* used_bytes) {
  *used_bytes = max_used_bytes + 1;
  for (uint8_t c = 0; c < kClasses; c++) {
    // Its free slots are lost and its used ones come: a slab's worth in all, and the one to spare.
    if (free_slots_[c] < draining_used_[c] + slots_of(c) + 1) continue;
    const uint32_t found = sparsest(c);
    if (found == kNone) continue;
    const uint64_t bytes = slabs_[found].used * slot_bytes(c);
    if (bytes < *used_bytes) *used_bytes = bytes, *slab = found;
  }
  if (*used_bytes > max_used_bytes) return false;
  Slab& s = slabs_[*slab];
  unlink(*slab);
  s.draining = true;
  const uint64_t open = slots_of(s.place_class) - s.used;
  free_slots_[s.place_class] -= open;
  draining_open_[s.place_class] += open;
  draining_used_[s.place_class] += s.used;
  return true;
}

void Allocator::end_drain(uint32_t slab, bool stuck) {
  Slab& s = slabs_[slab];
  if (!s.draining) return;  // emptied
  s.draining = false;
  const uint64_t open = slots_of(s.place_class) - s.used;
  free_slots_[s.place_class] += open;
  draining_open_[s.place_class] -= open;
  draining_used_[s.place_class] -= s.used;
  s.stuck = stuck ? stuck_epoch_ : 0;
  link(slab);
}

// ------------------------------------------------------------------------------ discards

void Allocator::all_free_due() {
  for (uint64_t i = 0; i < slabs_.size(); i++) {
    if (!clean_.get(i)) continue;
    clean_.flip(i);
    due_bits_.flip(i);
    due_++;
  }
}

bool Allocator::begin_discard(uint32_t max, uint32_t* first, uint32_t* count) {
  if (due_ == 0) return false;
  *first = static_cast<uint32_t>(due_bits_.lowest());
  for (*count = 0; *count < max && *first + *count < slabs_.size(); (*count)++) {
    if (!due_bits_.get(*first + *count)) break;
    due_bits_.flip(*first + *count);
  }
  due_ -= *count;
  free_slabs_ -= *count;
  discarding_ += *count;
  return true;
}

void Allocator::end_discard(uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) clean_.flip(first + i);
  discarding_ -= count;
  free_slabs_ += count;
}

}  // namespace ffs::engine
