#include "engine/granule_sums.h"

#include <cstddef>
#include <cstring>

#include "base/crc32c.h"

namespace ffs::engine {

GranuleSums::GranuleSums(uint32_t granules) {
  if (granules == 0) return;
  uint64_t sets = 1;
  while (sets * kWays < granules) sets *= 2;
  entries_.reset(static_cast<Entry*>(std::calloc(sets * kWays, sizeof(Entry))));
  if (entries_ != nullptr) mask_ = sets - 1;
}

BlockSums* GranuleSums::find(uint64_t block, uint32_t sum) {
  if (entries_ == nullptr) return nullptr;
  Entry* set = set_of(block);
  for (uint32_t i = 0; i < kWays; i++) {
    if (set[i].block != block) continue;
    if (set[i].sum != sum) return nullptr;  // of an earlier content, or of another chunk's
    set[i].used = ++clock_;
    return &set[i].blocks;
  }
  return nullptr;
}

void GranuleSums::put(uint64_t block, uint32_t sum, const BlockSums& blocks) {
  if (entries_ == nullptr) return;
  Entry* set = set_of(block);
  Entry* oldest = set;
  for (uint32_t i = 0; i < kWays; i++) {
    if (set[i].block == block) {
      oldest = &set[i];
      break;
    }
    if (clock_ - set[i].used > clock_ - oldest->used) oldest = &set[i];
  }
  *oldest = Entry{block, sum, ++clock_, blocks};
}

void GranuleSums::put_written(uint64_t block, uint32_t sum, const uint32_t* blocks) {
  if (entries_ == nullptr) return;
  Entry* set = set_of(block);
  Entry* chosen = nullptr;
  const uint32_t first = written_++;
  for (uint32_t i = 0; i < kWays; i++) {
    Entry& entry = set[(first + i) % kWays];
    if (entry.block == block) {
      chosen = &entry;
      break;
    }
    const bool better = chosen == nullptr || (chosen->block != 0 && entry.block == 0);
    if (entry.used == 0 && better) chosen = &entry;
  }
  if (chosen == nullptr) return;
  chosen->block = block;
  chosen->sum = sum;
  chosen->used = 0;
  std::memcpy(chosen->blocks.data(), blocks, sizeof chosen->blocks);
}

void GranuleSums::changed(BlockSums* known, uint32_t sum) {
  auto* entry = reinterpret_cast<Entry*>(reinterpret_cast<uint8_t*>(known) - offsetof(Entry, blocks));
  entry->sum = sum;
}

uint32_t GranuleSums::combined(const BlockSums& blocks) {
  uint32_t sum = 0;
  for (uint32_t block : blocks) sum = crc32c_shift_blocks(sum, 1) ^ block;
  return sum;
}

// Checksums of equal lengths differ by a linear function of where the bytes differ.
uint32_t GranuleSums::replaced(uint32_t sum, uint32_t at, uint32_t old_block, uint32_t new_block) {
  static_assert(kBlock == kCrcBlockBytes && kBlocksOfGranule - 1 <= kMaxCrcShiftBlocks);
  return sum ^ crc32c_shift_blocks(old_block ^ new_block, kBlocksOfGranule - 1 - at);
}

}  // namespace ffs::engine
