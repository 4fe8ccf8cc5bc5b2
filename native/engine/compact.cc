// Compaction: which slabs are emptied when, and who lives there (docs/disk_format.md, Space). The moves
// themselves: move.cc.
#include <algorithm>

#include "engine/store_impl.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ need

SpaceNeed ChunkStore::Impl::compaction_need() const {
  if (poisoned || compaction.stopped) return SpaceNeed::none;
  const bool running = compaction.phase != Compaction::Phase::idle;
  if (!space_waiters.empty() && (running || allocator->reclaimable_slabs() > 0)) return SpaceNeed::urgent;
  if (running) return SpaceNeed::soon;
  if (now_us < compaction.quiet_until_us) return SpaceNeed::none;
  const uint64_t low = options.compact_eagerly ? UINT64_MAX : allocator->slab_count() / 10 + 2;
  return allocator->free_slabs() < low && allocator->reclaimable_slabs() > 0 ? SpaceNeed::soon
                                                                             : SpaceNeed::none;
}

void ChunkStore::Impl::compact(uint32_t max_bytes) {
  if (compaction_need() == SpaceNeed::none) return;
  compaction.budget_bytes = std::min(compaction.budget_bytes + max_bytes, kMaxBudgetBytes);
  schedule_pump();
}

// ------------------------------------------------------------------------------ rounds

// From the pump. Goes on by itself while updates wait for a slot, else as far as the budget goes.
void ChunkStore::Impl::step_compaction() {
  auto& c = compaction;
  if (poisoned || c.stopped) return;
  const bool urgent = !space_waiters.empty();
  if (now_us - c.stuck_forgotten_us >= (urgent ? 100'000u : 2'000'000u)) {
    allocator->forget_stuck();
    c.stuck_forgotten_us = now_us;
  }
  if (c.phase == Compaction::Phase::idle && (urgent || c.budget_bytes > 0)) begin_round(urgent);
  if (c.phase == Compaction::Phase::scanning && (urgent || c.budget_bytes > 0)) scan_for_victims();
  if (c.phase == Compaction::Phase::moving) start_moves(urgent);
  if (c.phase == Compaction::Phase::settling && journal->flushed_block() >= c.settle_block) end_round();
}

void ChunkStore::Impl::begin_round(bool urgent) {
  auto& c = compaction;
  const bool any = urgent || options.compact_eagerly;
  const uint64_t limit = urgent ? kRoundBytes : std::min(kRoundBytes, c.budget_bytes + kSlabBytes);
  uint64_t chosen_bytes = 0;
  while (c.victims.size() < kMaxVictims) {
    uint32_t slab;
    uint64_t used;
    if (!allocator->pick_victim(any ? kSlabBytes : kBackgroundUsedBytes, &slab, &used)) break;
    c.victims.push_back(slab);
    chosen_bytes += used;
    if (chosen_bytes >= limit) break;
  }
  if (c.victims.empty()) {
    c.fruitless = true;
    c.budget_bytes = 0;
    c.quiet_until_us = now_us + 1'000'000;
    return;
  }
  c.candidates.clear();
  dedup.begin_round();
  c.next = 0;
  c.cursor = 1;
  c.phase = Compaction::Phase::scanning;
}

// The next chunks in the order of memory. What comes to be behind the cursor has no slot in a victim.
void ChunkStore::Impl::scan_for_victims() {
  auto& c = compaction;
  const Index& index = state->index;
  const uint32_t to = std::min(index.end(), c.cursor + kScanChunks);
  for (; c.cursor < to; c.cursor++) {
    const Chunk& chunk = index[c.cursor];
    if (chunk.image.place != 0 && allocator->draining(allocator->slab_of(chunk.image.place)))
      c.candidates.push_back(c.cursor);
  }
  if (c.cursor >= index.end()) c.phase = Compaction::Phase::moving;
  schedule_pump();
}

void ChunkStore::Impl::start_moves(bool urgent) {
  auto& c = compaction;
  const uint32_t most = urgent ? kMovesForNeed : kMovesInBackground;
  // Those that follow into a slot that was copied already take no I/O and no budget, but a little time.
  constexpr uint32_t kStepMoves = 256;
  uint32_t looked = 0;
  while (c.next < c.candidates.size() && c.in_flight < most && (urgent || c.budget_bytes > 0)) {
    if (looked++ == kStepMoves) return schedule_pump();
    if (start_move(c.candidates[c.next]) == Begin::wait) break;  // tried again when the pump runs
    c.next++;
  }
  if (c.next < c.candidates.size() || c.in_flight > 0) return;
  c.phase = Compaction::Phase::settling;
  c.settle_block = journal->last_block();
  want_flush();
}

void ChunkStore::Impl::end_round() {
  auto& c = compaction;
  uint64_t emptied = 0;
  for (uint32_t slab : c.victims) {
    if (!allocator->draining(slab)) emptied++;
    allocator->end_drain(slab, true);
  }
  counters.slabs_emptied += emptied;
  c.fruitless = emptied == 0;
  c.victims.clear();
  c.phase = Compaction::Phase::idle;
  if (emptied > 0) note_room();
  schedule_pump();
}

}  // namespace ffs::engine
