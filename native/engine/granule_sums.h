// Checksums by 4 KiB block of granules whose content was verified or written a short while ago. A small
// overwrite of whole blocks finds the granule's new checksum from them, without reading the granule again
// (docs/disk_format.md, Checksums). A bounded cache; what isn't in it is read and verified. Shard
// thread only.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/ids.h"
#include "engine/format.h"

namespace ffs::engine {

constexpr uint32_t kBlocksOfGranule = kGranuleBytes / static_cast<uint32_t>(kBlock);
using BlockSums = std::array<uint32_t, kBlocksOfGranule>;

class GranuleSums {
 public:
  explicit GranuleSums(uint32_t granules);  // how many it remembers, rounded up; 0: none

  bool enabled() const { return entries_ != nullptr; }
  // The sums of the whole granule at device block `block` whose checksum is `sum`; null if unknown. Valid
  // until the next `put`.
  BlockSums* find(uint64_t block, uint32_t sum);
  // `sum` must be the checksum of the granule that the block sums make up.
  void put(uint64_t block, uint32_t sum, const BlockSums& blocks);
  // The same of a granule that was just written as a whole. It takes no room from one whose sums an overwrite
  // has used: long files that are written once don't push out what is being overwritten.
  void put_written(uint64_t block, uint32_t sum, const uint32_t* blocks);
  // The granule at `block` has another content, of which the sums at `known` (from find) tell.
  void changed(BlockSums* known, uint32_t sum);

  // The checksum of a granule from those of its blocks.
  static uint32_t combined(const BlockSums& blocks);
  // A granule's checksum after its block number `at` changed from `old_block` to `new_block`.
  static uint32_t replaced(uint32_t sum, uint32_t at, uint32_t old_block, uint32_t new_block);

 private:
  static constexpr uint32_t kWays = 4;
  struct Entry {
    uint64_t block;  // 0: none; no granule lies there
    uint32_t sum;
    uint32_t used;  // when, in finds and puts; 0: not yet
    BlockSums blocks;
  };
  Entry* set_of(uint64_t block) { return entries_.get() + (mix64(block) & mask_) * kWays; }

  // Zeros of the kernel's: pages that no granule has come to cost nothing.
  std::unique_ptr<Entry[], void (*)(void*)> entries_{nullptr, std::free};
  uint64_t mask_ = 0;
  uint32_t clock_ = 0;
  uint32_t written_ = 0;
};

}  // namespace ffs::engine
