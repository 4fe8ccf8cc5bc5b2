// Space on the device: slabs of 16 MiB, each cut into slots of one class (docs/disk_format.md,
// Slabs and slots). Only memory: what is in use follows from the chunks. A freed slot is handed
// out again at once, so the caller frees only what may be overwritten.
#pragma once

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

  // A free slot as a device block number; 0 if there is none. New chunks leave one free slot of
  // each class in use to the updates of chunks that exist (`use_reserve`), which free one in turn.
  uint64_t allocate(uint8_t place_class, bool use_reserve);
  void free(uint64_t place, uint8_t place_class);

  // Rebuilding after replay: false if the slot isn't one of this device, or clashes with another.
  bool claim(uint64_t place, uint8_t place_class);
  bool in_use(uint64_t place, uint8_t place_class) const;

  uint64_t capacity_bytes() const { return slabs_.size() * kSlabBytes; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t free_bytes() const { return capacity_bytes() - used_bytes_; }
  uint64_t free_slabs() const { return free_slabs_; }
  struct ClassUse {
    uint64_t slabs = 0, slots_used = 0, slots_free = 0;
  };
  ClassUse use_of(uint8_t place_class) const {
    const uint64_t used = class_used_[place_class], open = free_slots_[place_class];
    return {(used + open) / slots_of(place_class), used, open};
  }

 private:
  struct Slab {
    uint8_t place_class = kNoClass;
    bool listed = false;  // in partial_[class]
    uint16_t used = 0;
    uint16_t hint = 0;                 // no free slot before this word
    std::unique_ptr<uint64_t[]> bits;  // 1: in use; null for the class of whole slabs
  };

  static uint32_t slots_of(uint8_t place_class) { return 1u << (kClasses - 1 - place_class); }
  bool locate(uint64_t place, uint8_t place_class, uint64_t* slab, uint32_t* slot) const;
  void assign(uint64_t slab, uint8_t place_class);
  uint64_t take(uint64_t slab);
  void list(uint64_t slab);
  void set_slab_free(uint64_t slab, bool is_free);
  uint64_t lowest_free_slab();
  bool leaves_reserve(uint8_t place_class) const;

  uint64_t data_block_;
  std::vector<Slab> slabs_;
  std::vector<uint64_t> free_slab_bits_;
  uint64_t free_slabs_ = 0;
  uint64_t free_slab_hint_ = 0;              // no free slab before this word
  std::vector<uint32_t> partial_[kClasses];  // slabs that may have a free slot (checked when taken)
  uint64_t free_slots_[kClasses] = {};
  uint64_t class_used_[kClasses] = {};
  uint64_t used_bytes_ = 0;
};

}  // namespace ffs::engine
