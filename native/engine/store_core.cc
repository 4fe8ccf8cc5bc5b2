// What holds the parts of a store together: who waits for which flush, the pump that runs once a
// pass, slots between their last owner and their next.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "engine/store_impl.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ completion

void ChunkStore::Impl::finish(StoreOp* op, int error, const char* what) {
  op->error = error;
  op->what = what;
  if (op->done != nullptr) op->done(op);
}

void ChunkStore::Impl::fail_later(StoreOp* op, int error, const char* what) {
  op->error = error;
  op->what = what;
  op->store = this;
  op->io.owner = op;
  op->io.done = [](io::Op* io_op) {
    auto store_op = static_cast<StoreOp*>(io_op->owner);
    static_cast<Impl*>(store_op->store)->ops_deferred--;
    if (store_op->done != nullptr) store_op->done(store_op);
  };
  ops_deferred++;
  io.defer(&op->io, 0);
}

// What recovery puts in can wait for more to come: each flush holds the device up, and nobody asks for it.
static bool is_patient(const StoreOp* op) {
  return op != nullptr && op->store_kind == kStageKind &&
         static_cast<const StageOp*>(op)->op_class == io::OpClass::recovery;
}

void ChunkStore::Impl::when_durable(StoreOp* op) {
  when_durable(op, journal->last_block());
}

// Once the journal up to this block is flushed, which may have been written already.
void ChunkStore::Impl::when_durable(StoreOp* op, uint64_t block) {
  if (is_patient(op)) {
    schedule_pump();
  } else {
    // What is on its way is flushed without being asked for; one flush more would be for nobody.
    if (block > journal->taken_block() || block <= journal->flushed_block()) want_flush();
    impatient_waiters += op != nullptr ? 1 : 0;
  }
  if (op == nullptr) return;
  if (poisoned) {
    if (!is_patient(op)) impatient_waiters--;
    fail_later(op, EIO, "the store is poisoned by a failed journal write: restart it");
    return;
  }
  op->wait_block = block;
  durable_waiters.push_by_block(op);
}

StoreOp* ChunkStore::Impl::next_durable() {
  StoreOp* op = durable_waiters.pop();
  if (!is_patient(op)) impatient_waiters--;
  return op;
}

// Whether a flush shall begin for those who can wait: there is enough for one, or nothing more under way, or
// what is under way may wait for what a flush gives back. A tick flushes what is left for long.
bool ChunkStore::Impl::patience_is_over() const {
  if (impatient_waiters > 0 || !records_wait()) return false;
  return gathered_data_bytes >= options.patient_flush_bytes || stages_in_flight == 0 ||
         !stage_waiters.empty() || !space_waiters.empty() || !apply_waiters.empty();
}

void ChunkStore::Impl::want_flush() {
  flush_wanted = true;
  schedule_pump();
}

void ChunkStore::Impl::schedule_pump() {
  if (pump_scheduled) return;
  pump_scheduled = true;
  io.defer(&pump_op, 0);
}

// Runs once a pass after something changed, so that one group takes all that a pass brought.
void ChunkStore::Impl::pump() {
  pump_scheduled = false;
  if (closing) return;
  StepTimer timer(counters);
  step_release();
  if (accounts_unfinished) step_accounts();
  retry_waiting();
  retry_apply_waiters();
  retry_space_waiters();
  step_compaction();
  dedup.step();
  step_discards(false);
  // What waits for room waits for commits to be durable too, which nobody else may ask for.
  const bool waits = !stage_waiters.empty() || !apply_waiters.empty();
  if (waits && !apply_queue.empty() && journal->anything_gathered()) flush_wanted = true;
  // Before what goes into slots: it would wait behind that in the device. While a flush is under way records
  // of small updates gather; those of large ones go on, so that the device has something to do.
  flush_wanted |= patience_is_over();
  const bool ahead =
      gathered_data_bytes >= options.write_ahead_bytes && (records_beside || journal->only_flushes());
  if (flush_wanted && (!journal->busy() || ahead) && !poisoned) {
    flush_wanted = false;
    gathered_data_bytes = 0;
    // An empty group serves those who wait for old blocks that are flushed already.
    journal->kick(false);
    if (!journal->busy()) release_durable(journal->flushed_block());
  }
  pump_apply();
  if (apply_needs_flush() && !journal->busy() && !poisoned) {
    flush_wanted = false;
    journal->kick(true);
  }
  if (journal->used_bytes() > journal->region_bytes() / 2) start_snapshot();
}

// Somebody waits for a record that no group has taken yet. (For the others a flush is under way or comes by
// itself; one more would be of what nobody waits for, and the updates after it would stand behind that.)
bool ChunkStore::Impl::records_wait() const {
  return !durable_waiters.empty() && durable_waiters.tail->wait_block > journal->taken_block();
}

void ChunkStore::Impl::release_durable(uint64_t block) {
  while (!durable_waiters.empty() && durable_waiters.head->wait_block <= block) {
    StoreOp* op = next_durable();
    if (op->store_kind == kStageKind) {
      auto stage_op = static_cast<StageOp*>(op);
      uint32_t chunk = state->index.find(stage_op->p.target_index, stage_op->key);
      Pending* pending = chunk != 0 ? state->find_pending(chunk, stage_op->version) : nullptr;
      if (pending != nullptr) pending->durable = true;
    }
    finish(op, 0, nullptr);
  }
}

void ChunkStore::Impl::journal_flushed(uint64_t block, uint64_t sync) {
  StepTimer timer(counters);
  release_quarantine(block);
  apply_synced(sync);
  snapshot_progress(block, sync);
  release_durable(block);
  if (flush_wanted || (impatient_waiters > 0 && records_wait())) want_flush();
  schedule_pump();
}

// Records that came while others were being written wait for nothing else, and nothing else may happen until
// the flush is over: the device would stand still meanwhile.
void ChunkStore::Impl::journal_written() {
  if (flush_wanted) schedule_pump();
}

void ChunkStore::Impl::journal_failed(int error) {
  poison(error);
}

void ChunkStore::Impl::poison(int error) {
  if (!poisoned) {
    std::fprintf(
        stderr, "ffs: engine: a write or flush failed (%s): the device refuses all updates until a restart\n",
        std::strerror(error));
  }
  poisoned = true;
  const char* what = "the store is poisoned by a failed journal write: restart it";
  while (!durable_waiters.empty()) fail_later(next_durable(), EIO, what);
  schedule_pump();
}

// ------------------------------------------------------------------------------ slots

void ChunkStore::Impl::ref_slot(uint64_t place) {
  slot_uses[place].refs++;
}

void ChunkStore::Impl::unref_slot(uint64_t place) {
  SlotUse* use = slot_uses.find(place);
  FFS_CHECK(use != nullptr && use->refs > 0);
  if (--use->refs > 0) return;
  SlotUse last = *use;
  slot_uses.erase(place);
  if (last.dying) {
    dying_slots--;
    quarantine_slot(place, last.place_class);
  }
  if (!apply_queue.empty() || !stage_waiters.empty()) schedule_pump();
}

void ChunkStore::Impl::version_committed(uint32_t chunk) {
  if (!replaying) dedup.committed(chunk);
}

void ChunkStore::Impl::version_leaves(uint32_t chunk) {
  if (!replaying) dedup.leaves(chunk, state->index[chunk].image);
}

void ChunkStore::Impl::slot_unused(uint64_t place, uint8_t place_class, bool shared, const SpaceKey& space) {
  if (replaying) return;
  if (shared && !dedup.drop_name(place, place_class, space)) return;
  SlotUse* use = slot_uses.find(place);
  if (use != nullptr) {
    use->dying = true;
    use->place_class = place_class;
    dying_slots++;
  } else {
    quarantine_slot(place, place_class);
  }
}

// Until the record that freed it is durable, a crash may bring the slot's old owner back.
void ChunkStore::Impl::quarantine_slot(uint64_t place, uint8_t place_class) {
  if (mutants.discard_before_flush) discard_slot(place, place_class);
  // The record was appended just before, or earlier.
  uint64_t block = journal->last_block();
  if (mutants.reuse_slot_before_flush ||
      (block <= journal->flushed_block() && !journal->anything_gathered())) {
    allocator->free(place, place_class);
    note_room();
    schedule_pump();
  } else {
    quarantine.push_back({place, block, place_class});
  }
}

void ChunkStore::Impl::release_quarantine(uint64_t flushed_block) {
  while (!quarantine.empty() && quarantine.front().block <= flushed_block) {
    allocator->free(quarantine.front().place, quarantine.front().place_class);
    quarantine.pop_front();
    note_room();
  }
}

uint8_t* ChunkStore::Impl::overlay_memory(uint32_t blocks) {
  uint8_t* bytes = overlay_pool->allocate(blocks * kBlock);
  if (bytes != nullptr) counters.overlay_bytes += blocks * kBlock;
  return bytes;
}

void ChunkStore::Impl::overlay_unused(uint8_t* bytes, uint32_t blocks) {
  if (overlay_pool != nullptr && overlay_pool->contains(bytes)) {
    counters.overlay_bytes -= blocks * kBlock;
    overlay_pool->release(bytes);
  } else {
    if (bytes != nullptr) heap_overlay_bytes -= blocks * kBlock;  // made by replay
    std::free(bytes);
  }
}

// ------------------------------------------------------------------------------ time

void ChunkStore::Impl::tick(uint64_t now) {
  constexpr uint64_t kLoneRecordUs = 10'000;
  now_us = now;
  if (last_snapshot_us == 0) last_snapshot_us = now;
  bool nearly_full = journal->used_bytes() > journal->region_bytes() / 4 * 3;
  bool lone = journal->anything_gathered() && !nearly_full;
  if (!poisoned && !journal->busy() && (lone || !apply_waiting_sync.empty()) &&
      now - last_lone_flush_us >= kLoneRecordUs) {
    last_lone_flush_us = now;
    journal->kick(true);
  }
  schedule_pump();
}

bool ChunkStore::Impl::idle() const {
  return stages_in_flight == 0 && reads_in_flight == 0 && durable_waiters.empty() && ops_deferred == 0 &&
         !journal->busy() && applying == 0 && releases.empty() && !snap.active && !pump_scheduled &&
         compaction.in_flight == 0 && dedup.in_flight() == 0 && discards_in_flight == 0;
}

}  // namespace ffs::engine
