// What the compactor of a store is doing (compact.cc, move.cc). It works in rounds: some slabs whose
// slots are few are marked, so that nothing is placed there; one walk over the chunks finds who lives
// there; these are moved, a few at a time; when that is durable the slabs that are empty are free.
#pragma once

#include <cstdint>
#include <vector>

namespace ffs::engine {

struct Compaction {
  enum class Phase : uint8_t { idle, scanning, moving, settling };

  Phase phase = Phase::idle;
  bool stopped = false;  // the store is closing
  std::vector<uint32_t> victims;
  std::vector<uint32_t> candidates;  // chunks that had a slot in one of them when they were seen
  uint32_t cursor = 0;               // the next chunk to look at
  size_t next = 0;                   // of the candidates
  uint64_t settle_block = 0;         // the journal block with the round's last record
  uint64_t budget_bytes = 0;         // granted by compact() and not spent
  uint32_t in_flight = 0;            // moves
  bool fruitless = false;            // the last try emptied nothing
  uint64_t quiet_until_us = 0;       // nothing was found to gain: not asked again before
  uint64_t stuck_forgotten_us = 0;   // slabs that couldn't be emptied are tried again from time to time
};

constexpr uint32_t kScanChunks = 2048;         // looked at in one step: well under a millisecond
constexpr uint32_t kMaxVictims = 16;           // of a round
constexpr uint64_t kRoundBytes = 64ull << 20;  // moved in a round, about
constexpr uint32_t kMovesForNeed = 8;          // in flight while updates wait
constexpr uint32_t kMovesInBackground = 2;     // and while none does
constexpr uint64_t kMaxBudgetBytes = 64ull << 20;
constexpr uint64_t kBackgroundUsedBytes = 12ull << 20;  // fuller slabs are emptied for need only

}  // namespace ffs::engine
