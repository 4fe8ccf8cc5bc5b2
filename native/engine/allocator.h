// Space on the device: slabs of 16 MiB, each cut into slots of one class (docs/disk_format.md,
// Slabs and slots). Only memory: what is in use follows from the chunks. A freed slot is handed
// out again at once, so the caller frees only what may be overwritten. Every function but
// `room`, `pick_victim` and `claim` runs in constant time; those look at each class once.
//
// A slab is full, partial (in the list of its class and fill), being emptied (draining: nothing is
// placed there), free, or free and being discarded (handed out only afterwards).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "engine/format.h"

namespace ffs::engine {

class Allocator {
 public:
  Allocator(uint64_t data_offset, uint64_t slab_count);

  // The class of the smallest slot that holds `bytes` (1 .. 16 MiB).
  static uint8_t class_for(uint64_t bytes);
  static uint32_t slots_of(uint8_t place_class) { return 1u << (kClasses - 1 - place_class); }

  // Who asks for a slot. New chunks (and growth into another class) leave one free slot of each class
  // in use to the updates of chunks that have a slot of that class, which free one in turn. A move
  // takes only what is beyond that slot, and never a free slab.
  enum class Asker : uint8_t { fresh, update, move };
  // A free slot as a device block number, of the fullest slab that has one; 0 if there is none.
  uint64_t allocate(uint8_t place_class, Asker asker);
  void free(uint64_t place, uint8_t place_class);
  // Whether a new chunk of this class (or an update) could be placed, now or once slabs are compacted and
  // discarded.
  bool room_for(uint8_t place_class, bool update) const;
  // Bytes that new chunks of the classes in use, and of any class in what is free beside them, can take,
  // now or after compaction.
  uint64_t room_bytes() const;
  // Whether it could be placed now without a free slab.
  bool has_own_room(uint8_t place_class, bool update) const {
    return free_slots_[place_class] >= (update ? 1 : 2);
  }

  // Rebuilding after replay: false if the slot isn't one of this device, or clashes with another.
  bool claim(uint64_t place, uint8_t place_class);
  bool in_use(uint64_t place, uint8_t place_class) const;

  uint64_t capacity_bytes() const { return slabs_.size() * kSlabBytes; }
  uint64_t slab_count() const { return slabs_.size(); }
  uint64_t used_bytes() const { return used_bytes_; }
  // Free ones, including those that are being discarded.
  uint64_t free_slabs() const { return free_slabs_ + discarding_; }
  struct ClassUse {
    uint64_t slabs = 0, slots_used = 0, slots_free = 0;
  };
  ClassUse use_of(uint8_t place_class) const {
    const uint64_t used = class_used_[place_class];
    const uint64_t open = free_slots_[place_class] + draining_open_[place_class];
    return {(used + open) / slots_of(place_class), used, open};
  }
  size_t memory_bytes() const;

  // --- emptying slabs.
  // How many slabs compaction could free by packing each class.
  uint64_t reclaimable_slabs() const;
  // The slab whose emptying moves the fewest bytes and whose slots fit the others of its class, with one to
  // spare; at most `max_used_bytes` of it in use. It is draining from then on. False: there is none.
  bool pick_victim(uint64_t max_used_bytes, uint32_t* slab, uint64_t* used_bytes);
  // Gives a slab that wasn't emptied back. `stuck`: it isn't picked again until one of its slots was
  // freed or forget_stuck() was called.
  void end_drain(uint32_t slab, bool stuck);
  void forget_stuck() { stuck_epoch_ = static_cast<uint8_t>(stuck_epoch_ % 255 + 1); }
  bool draining(uint32_t slab) const { return slabs_[slab].draining; }
  uint32_t slab_of(uint64_t place) const {
    return static_cast<uint32_t>((place - data_block_) / (kSlabBytes / kBlock));
  }

  // --- discards. With tracking on, a slab that becomes free is due for one; it may be handed out before.
  void track_discards(bool on) { track_ = on; }
  uint64_t due_slabs() const { return due_; }
  void all_free_due();
  // Takes a run of at most `max` adjacent due slabs; false: none. They aren't handed out until ended.
  bool begin_discard(uint32_t max, uint32_t* first, uint32_t* count);
  void end_discard(uint32_t first, uint32_t count);
  uint64_t offset_of(uint32_t slab) const { return data_block_ * kBlock + slab * kSlabBytes; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kFills = 16;
  struct Slab {
    // 1: in use. Of up to 64 slots in `few`, of more in `many`.
    uint64_t few = 0;
    std::unique_ptr<uint64_t[]> many;
    uint64_t* bits() { return many != nullptr ? many.get() : &few; }
    const uint64_t* bits() const { return many != nullptr ? many.get() : &few; }
    uint32_t next = kNone, previous = kNone;
    uint16_t used = 0;
    uint16_t hint = 0;  // no free slot before this word
    uint8_t place_class = kNoClass;
    uint8_t stuck = 0;  // the epoch in which it couldn't be emptied
    bool draining = false;
  };
  // What is left for new slots, compaction done or not.
  struct Room {
    uint64_t slabs = 0;
    uint64_t open[kClasses] = {};
    uint64_t lacking = 0;  // classes in use without a free slot of their own
  };
  struct Bits {  // of slabs
    std::vector<uint64_t> words;
    uint64_t hint = 0;  // no bit before this word
    bool get(uint64_t i) const { return (words[i / 64] >> (i % 64) & 1) != 0; }
    void flip(uint64_t i);
    uint64_t lowest();  // there must be one
  };

  Room room(bool compacted) const;
  static bool leaves_reserve(const Room& left, uint8_t place_class);
  bool locate(uint64_t place, uint8_t place_class, uint64_t* slab, uint32_t* slot) const;
  void assign(uint64_t slab, uint8_t place_class);
  uint64_t take_free_slab();
  uint64_t take(uint64_t slab);
  void count_use(uint64_t slab, int sign);
  uint32_t fill_of(const Slab& s) const { return s.used * kFills / slots_of(s.place_class); }
  void link(uint64_t slab);
  void unlink(uint64_t slab);
  uint32_t fullest(uint8_t place_class) const;
  uint32_t sparsest(uint8_t place_class) const;

  uint64_t data_block_;
  std::vector<Slab> slabs_;
  Bits clean_, due_bits_;  // free slabs: the second are due for a discard
  uint64_t free_slabs_ = 0, due_ = 0, discarding_ = 0;
  bool track_ = false;
  uint8_t stuck_epoch_ = 1;
  uint32_t partial_[kClasses][kFills];  // first of each list
  uint16_t filled_[kClasses] = {};      // which lists aren't empty
  uint64_t free_slots_[kClasses] = {};  // of slabs that aren't draining
  uint64_t draining_open_[kClasses] = {};
  uint64_t draining_used_[kClasses] = {};
  uint64_t class_used_[kClasses] = {};
  uint64_t used_bytes_ = 0;
};

}  // namespace ffs::engine
