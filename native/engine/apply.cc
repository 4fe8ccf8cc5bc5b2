// Overlays of committed versions go into their slots: when the commit is durable and nobody reads an
// older version. Until the blocks are flushed the overlays stay, in memory and in snapshots.
#include <algorithm>

#include "engine/store_impl.h"

namespace ffs::engine {

void ChunkStore::Impl::queue_apply(uint32_t chunk) {
  const Chunk& c = state->index[chunk];
  if (c.image.version.none() || c.image.overlay == 0) return;
  Live& live = state->index.live(chunk);  // keeps the chunk's number while it is queued
  if (live.apply_queued || live.applying) return;
  // Of this commit, and not of later ones, which queue the chunk again: one that is always being
  // overwritten would never have a newest commit that is durable.
  live.apply_block = journal->last_block();
  live.apply_head = c.image.overlay;
  state->ref_overlay(live.apply_head);
  live.apply_queued = true;
  apply_queue.push_back(chunk);
  schedule_pump();
}

// Whether `head` is `overlay` or lies under it.
bool ChunkStore::Impl::in_chain(uint32_t overlay, uint32_t head) const {
  while (overlay != 0 && overlay != head) overlay = state->index.overlays[overlay].next;
  return overlay != 0;
}

void ChunkStore::Impl::pump_apply() {
  for (size_t left = apply_queue.size(); left > 0 && apply_writes < options.max_apply_in_flight && !poisoned;
       left--) {
    uint32_t chunk = apply_queue.front();
    Live& live = state->index.live(chunk);
    // A commit that isn't durable: its flush wakes us. Behind it are later ones, and some that had readers.
    if (live.apply_block > journal->flushed_block()) break;
    apply_queue.pop_front();
    const Image& image = state->index[chunk].image;
    const bool gone = image.version.none() || !in_chain(image.overlay, live.apply_head);
    if (!gone && slot_uses.find(image.place) != nullptr) {  // readers: the last one wakes us
      apply_queue.push_back(chunk);
      continue;
    }
    live.apply_queued = false;
    if (gone) {
      applied++;
      state->unref_overlay(live.apply_head);
      queue_apply(chunk);  // of another slot
      state->erase_if_empty(chunk);
      continue;
    }
    live.applying = true;
    start_apply(chunk, image.place, live.apply_head);
  }
}

ChunkStore::Impl::ApplyJob* ChunkStore::Impl::take_apply_job() {
  if (free_apply_jobs.empty()) return new ApplyJob;
  ApplyJob* job = free_apply_jobs.back();
  free_apply_jobs.pop_back();
  return job;
}

// All blocks at once, each from the newest overlay that has it. The reference to `head` is the job's now.
void ChunkStore::Impl::start_apply(uint32_t chunk, uint64_t place, uint32_t head) {
  ApplyJob* job = take_apply_job();
  job->impl = this;
  job->chunk = chunk;
  job->place = place;
  job->head = head;
  list_apply_runs(head, &job->runs);
  ref_slot(place);
  applying++;
  if (job->writes.size() < job->runs.size()) job->writes = std::vector<io::Op>(job->runs.size());
  job->in_flight = static_cast<uint32_t>(job->runs.size());
  apply_writes += job->in_flight;
  for (size_t i = 0; i < job->runs.size(); i++) {
    const OverlayView& run = job->runs[i];
    io::Op& op = job->writes[i];
    op.owner = job;
    op.done = [](io::Op* done) {
      auto owner = static_cast<ApplyJob*>(done->owner);
      owner->impl->apply_written(owner, done->result);
    };
    io.write(&op, file, place * kBlock + run.first_block * kBlock, run.bytes,
             static_cast<uint32_t>(run.blocks * kBlock), overlay_pool->region_of(run.bytes));
  }
}

void ChunkStore::Impl::list_apply_runs(uint32_t head, std::vector<OverlayView>* runs) {
  runs->clear();
  std::vector<OverlayView>& blocks = apply_blocks;  // one by one, the newest first
  blocks.clear();
  for (uint32_t at = head; at != 0; at = state->index.overlays[at].next) {
    const Overlay& o = state->index.overlays[at];
    for (uint32_t i = 0; i < o.blocks; i++) blocks.push_back({o.first_block + i, 1, o.bytes + i * kBlock});
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const OverlayView& a, const OverlayView& b) { return a.first_block < b.first_block; });
  for (const OverlayView& block : blocks) {
    if (!runs->empty()) {
      OverlayView& last = runs->back();
      const uint32_t end = last.first_block + last.blocks;
      if (block.first_block < end) continue;  // an older one of the same block
      if (block.first_block == end && block.bytes == last.bytes + last.blocks * kBlock) {
        last.blocks++;
        continue;
      }
    }
    runs->push_back(block);
  }
}

void ChunkStore::Impl::apply_written(ApplyJob* job, int32_t result) {
  apply_writes--;
  if (result < 0) job->error = -result;
  if (--job->in_flight > 0) return;
  if (job->error != 0) {
    poison(job->error);  // the slot is torn and only the journal knows better
    end_apply(job);
    return;
  }
  job->sync = journal->next_sync();
  apply_waiting_sync.push_back(job);
  schedule_pump();
}

// Nothing else may come that wants a flush, and there are overlays enough that their room is wanted.
bool ChunkStore::Impl::apply_needs_flush() const {
  if (apply_waiting_sync.empty() || apply_writes > 0) return false;
  return !stage_waiters.empty() || !apply_waiters.empty() ||
         counters.overlay_bytes + heap_overlay_bytes > overlay_limit() / 2;
}

// Whether room comes by itself: overlays are on their way into their slots.
bool ChunkStore::Impl::overlays_will_go() const {
  return !poisoned && (applying > 0 || !apply_queue.empty());
}

// Overlays of the chunk are on their way into its slot, or will be once pending versions are committed: that
// is for others to say, who may want this update to end first, so it is waited for only so long.
bool ChunkStore::Impl::overlays_will_leave(const StageOp& op, uint32_t chunk) const {
  const Live* live = chunk != 0 && !poisoned ? state->index.live_if(chunk) : nullptr;
  if (live == nullptr) return false;
  return live->applying || live->apply_queued || (!live->pendings.empty() && !op.p.waited);
}

// One a chunk, the first of its updates: those of other chunks pass it.
void ChunkStore::Impl::retry_apply_waiters() {
  for (size_t left = apply_waiters.size(); left > 0; left--) {
    StageOp* op = apply_waiters.front();
    apply_waiters.pop_front();
    const bool late = !op->p.waited && now_us >= op->p.apply_until_us;
    op->p.waited |= late;
    const bool changed = op->p.applied != applied || late;
    if (!changed && !poisoned && !op->p.dropped && !op->p.refused) {
      apply_waiters.push_back(op);
    } else {
      arrive(op);
    }
  }
}

// Overlays are part of snapshots: of their room too, no more than a part is for them.
uint64_t ChunkStore::Impl::overlay_limit() const {
  return std::min<uint64_t>(options.overlay_bytes, snapshot_limit() / 2);
}

void ChunkStore::Impl::apply_synced(uint64_t sync) {
  std::vector<ApplyJob*>& done = apply_done;
  done.clear();
  auto waits = [&](ApplyJob* job) {
    if (job->sync > sync) return true;
    done.push_back(job);
    return false;
  };
  apply_waiting_sync.erase(std::stable_partition(apply_waiting_sync.begin(), apply_waiting_sync.end(), waits),
                           apply_waiting_sync.end());
  for (ApplyJob* job : done) {
    if (state->index[job->chunk].image.place == job->place) state->trim_overlays(job->chunk, job->head);
    end_apply(job);
  }
}

void ChunkStore::Impl::end_apply(ApplyJob* job) {
  uint32_t chunk = job->chunk;
  state->index.live(chunk).applying = false;
  state->unref_overlay(job->head);
  unref_slot(job->place);
  applying--;
  applied++;
  job->error = 0;
  free_apply_jobs.push_back(job);
  queue_apply(chunk);
  state->erase_if_empty(chunk);
  schedule_pump();
}

}  // namespace ffs::engine
