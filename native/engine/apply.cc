// Overlays of committed versions go into their slots: when the commit is durable and nobody reads an
// older version. Until the blocks are flushed the overlays stay, in memory and in snapshots.
#include <algorithm>

#include "engine/store_impl.h"

namespace ffs::engine {

void ChunkStore::Impl::queue_apply(uint32_t chunk) {
  const Chunk& c = state->index[chunk];
  if (c.image.version.none() || c.image.overlay == 0) return;
  Live& live = state->index.live(chunk);  // keeps the chunk's number while it is queued
  // The newest commit counts: its overlays are the ones that will be written.
  live.apply_block = journal->last_block();
  if (live.apply_queued || live.applying) return;
  live.apply_queued = true;
  apply_queue.push_back(chunk);
  schedule_pump();
}

void ChunkStore::Impl::pump_apply() {
  for (size_t left = apply_queue.size(); left > 0 && applying < options.max_apply_in_flight && !poisoned;
       left--) {
    uint32_t chunk = apply_queue.front();
    apply_queue.pop_front();
    Live& live = state->index.live(chunk);
    const Image& image = state->index[chunk].image;
    if (image.version.none() || image.overlay == 0) {
      live.apply_queued = false;
      state->erase_if_empty(chunk);
      continue;
    }
    // Readers: the last one wakes us. A commit that isn't durable: its flush does.
    if (slot_uses.find(image.place) != nullptr || live.apply_block > journal->flushed_block()) {
      apply_queue.push_back(chunk);
      continue;
    }
    live.apply_queued = false;
    live.applying = true;
    auto job = new ApplyJob;
    job->impl = this;
    job->chunk = chunk;
    job->place = image.place;
    job->head = image.overlay;
    state->list_overlays(job->head, 0, &job->list);
    state->ref_overlay(job->head);
    ref_slot(job->place);
    applying++;
    job->op.owner = job;
    job->op.done = [](io::Op* op) {
      auto done = static_cast<ApplyJob*>(op->owner);
      if (op->result < 0) {
        done->impl->poison(-op->result);  // the slot is torn and only the journal knows better
        done->impl->end_apply(done);
        return;
      }
      done->impl->apply_next(done);
    };
    apply_next(job);
  }
}

// One after another, as later ones lie over earlier ones.
void ChunkStore::Impl::apply_next(ApplyJob* job) {
  if (job->at == job->list.size()) {
    job->sync = journal->next_sync();
    apply_waiting_sync.push_back(job);
    if (counters.overlay_bytes > options.overlay_bytes / 2 && !journal->busy()) journal->kick(true);
    return;
  }
  const OverlayView& o = job->list[job->at++];
  uint64_t offset = job->place * kBlock + o.first_block * kBlock;
  io.write(&job->op, file, offset, o.bytes, static_cast<uint32_t>(o.blocks * kBlock),
           overlay_pool->region_of(o.bytes));
}

void ChunkStore::Impl::apply_synced(uint64_t sync) {
  std::vector<ApplyJob*> done;
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
  delete job;
  queue_apply(chunk);
  state->erase_if_empty(chunk);
  schedule_pump();
}

}  // namespace ffs::engine
