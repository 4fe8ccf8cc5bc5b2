// Room on the device: updates that wait for a slot, and what there is to tell (docs/disk_format.md, Space).
#include <algorithm>

#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

namespace {
constexpr uint64_t kIdleWaitUs = 5'000'000;      // without any gain
constexpr uint64_t kFruitlessWaitUs = 300'000;   // if only compaction could help, and it didn't just now
constexpr uint64_t kLongestWaitUs = 30'000'000;  // whatever happens
}  // namespace

// A slot or slab came free: those that wait are tried again.
void ChunkStore::Impl::note_room() {
  last_gain_us = now_us;
  room_came = true;
  if (!space_waiters.empty()) schedule_pump();
}

// Whether the op may take this slot now: those that came earlier have the slabs that become free.
uint64_t ChunkStore::Impl::allocate_for(StageOp* op, uint8_t place_class, bool update) {
  const bool own = allocator->has_own_room(place_class, update);
  const bool behind = op->p.room_since_us == 0 ? !space_waiters.empty() : slabs_wanted;
  if (!own && behind) return 0;
  return allocator->allocate(place_class, update ? Allocator::Asker::update : Allocator::Asker::fresh);
}

// Takes the slot that the update is written to: of the class that it wishes, or the least that holds it, or,
// in place of a slot that it will free, another of that class.
bool ChunkStore::Impl::take_slot(StageOp* op, uint8_t base_class) {
  auto& p = op->p;
  const uint32_t hint = std::min(op->size_hint, kMaxChunkBytes);
  const uint8_t least = Allocator::class_for(p.stored);
  const uint8_t wished = hint > p.stored ? Allocator::class_for(hint) : least;
  uint8_t wanted[] = {wished, least, base_class};
  for (size_t i = 0; i < 3; i++) {
    const uint8_t c = wanted[i];
    if (c == kNoClass || c < least || (i > 0 && c == wanted[i - 1])) continue;
    p.place = allocate_for(op, c, c == base_class);
    p.place_class = c;
    if (p.place == 0) continue;
    p.new_place = true;
    places_held++;
    return true;
  }
  p.place_class = kNoClass;
  return false;
}

// No slot now. Waits as long as one may come: by records that become durable, readers that end, slabs that
// are released, discarded or compacted; an overwrite also by commits, which free what pendings replace.
ChunkStore::Impl::Begin ChunkStore::Impl::wait_for_room(StageOp* op, uint8_t base_class, int* code,
                                                        const char** what) {
  auto& p = op->p;
  const uint8_t least = Allocator::class_for(p.stored);
  const bool update = base_class != kNoClass && base_class >= least;
  if (p.room_since_us == 0) {
    p.room_since_us = std::max<uint64_t>(now_us, 1);
    p.room_block = journal->last_block();
  }
  // A new chunk waits for what was being freed when it came; an overwrite also for other overwrites.
  const bool quarantined = !quarantine.empty() && (update || journal->flushed_block() < p.room_block);
  const bool freeing = quarantined || dying_slots > 0;
  const bool by_commit = update && (places_held > 0 || state->index.live_count() > 0);
  const bool by_packing =
      allocator->room_for(least, false) || (update && allocator->room_for(base_class, true));
  if (freeing) want_flush();
  const uint64_t waited = now_us - std::min(now_us, p.room_since_us);
  const uint64_t dry = now_us - std::min(now_us, std::max(last_gain_us, p.room_since_us));
  const bool hopeless = !freeing && !by_commit && compaction.fruitless;
  const bool patient = dry < (hopeless ? kFruitlessWaitUs : kIdleWaitUs) && waited < kLongestWaitUs;
  if (!releases.empty() || (patient && (freeing || by_commit || by_packing))) {
    p.room_class = least;
    p.room_update = update;
    schedule_pump();
    return Begin::wait_room;
  }
  *code = ENOSPC;
  *what = "no free slot of this size";
  return Begin::failed;
}

// In the order of their arrival. What needs a slab doesn't pass one that waits for a slab; of those that ask
// for the same as one that found nothing, only the first is tried.
void ChunkStore::Impl::retry_space_waiters() {
  if (space_waiters.empty()) return;
  if (!room_came && now_us < next_room_check_us && !poisoned && releases.empty()) return;
  room_came = false;
  next_room_check_us = now_us + 20'000;
  std::deque<StageOp*> waiting = std::move(space_waiters);
  space_waiters.clear();
  uint32_t failed[2] = {0, 0};  // classes, by kind
  for (StageOp* op : waiting) {
    const uint32_t bit = 1u << op->p.room_class;
    if ((failed[op->p.room_update] & bit) != 0 && !poisoned && !op->p.dropped && !op->p.refused) {
      space_waiters.push_back(op);
      continue;
    }
    const Begin begun = begin_stage(op);
    if (begun == Begin::wait_room) {
      failed[op->p.room_update] |= bit;
      slabs_wanted = true;
    }
    park(op, begun);
  }
  slabs_wanted = false;
}

// What couldn't begin waits with others of its kind.
void ChunkStore::Impl::park(StageOp* op, Begin begun) {
  if (begun == Begin::wait) stage_waiters.push_back(op);
  if (begun == Begin::wait_room) space_waiters.push_back(op);
  if (begun == Begin::wait_apply) {
    constexpr uint64_t kCommitsComeUs = 20'000;
    op->p.applied = applied;
    if (op->p.apply_until_us == 0) op->p.apply_until_us = now_us + kCommitsComeUs;
    apply_waiters.push_back(op);
    schedule_pump();
  }
}

// ------------------------------------------------------------------------------ what there is

Capacity ChunkStore::Impl::capacity() const {
  Capacity c{allocator->capacity_bytes(), allocator->room_bytes(), super.max_chunks, state->committed_chunks};
  const uint64_t more = super.max_chunks - std::min<uint64_t>(super.max_chunks, state->index.size());
  const bool records = state->snapshot_bytes() + kMaxBlockBytes <= snapshot_limit();
  c.free_bytes = records ? std::min(c.free_bytes, more * kMaxChunkBytes) : 0;
  return c;
}

bool ChunkStore::Impl::room_for(uint32_t bytes) const {
  if (state->index.size() >= super.max_chunks) return false;
  if (state->snapshot_bytes() + kMaxBlockBytes > snapshot_limit()) return false;
  return bytes == 0 || allocator->room_for(Allocator::class_for(std::min(bytes, kMaxChunkBytes)), false);
}

}  // namespace ffs::engine
