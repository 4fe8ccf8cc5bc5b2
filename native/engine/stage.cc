// Updates: how each becomes durable. Five paths (docs/disk_format.md, How updates use it):
//   fresh       the whole chunk comes with the update: a new slot, written from the caller's memory,
//               or where it lies already (lend.cc, berths)
//   append      blocks beyond all that the slot ever held are written in place
//   deferred    up to 64 KiB over or next to old bytes go into the journal as overlay
//   rebuild     everything else: old and new bytes are copied into a new slot, piece by piece
//   length      no bytes move (extension, removal, cuts at a granule's end); shrink: a cut inside one
#include <algorithm>
#include <cstring>

#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

namespace {

void reset(StageOp* op) {
  auto& p = op->p;
  p.path = 0;
  p.place_class = kNoClass;
  p.crowded = false;
  p.new_place = p.in_place = p.verify_span = p.known_sums = p.holds_base = p.reading = p.beside = false;
  p.in_flight = 0;
  p.place = p.base_place = 0;
  p.base_overlay = p.base_stored = p.base_length = p.stored = p.new_length = 0;
  p.first_changed = p.end_changed = p.span_from = p.span_to = p.at = 0;
  p.scratch = p.overlay = nullptr;
  p.overlay_block = p.overlay_blocks = 0;
}

}  // namespace

// ------------------------------------------------------------------------------ arrival

const char* ChunkStore::Impl::stage_error(const StageOp& op, int* code) const {
  *code = EINVAL;
  if (target_index(op.target) < 0) {
    if (slot_of_target(op.target) < 0) return "no such target on this device";
    *code = EBUSY;
    return "the target is being released";
  }
  if (op.version.none()) return "an update without a version";
  if (op.attributes.tag_bytes > kMaxTagBytes) return "a tag of more than 16 bytes";
  if (op.attributes.role > kMaxRole) return "a role above 15";
  uint8_t codec = op.attributes.codec;
  switch (op.kind) {
    case UpdateKind::write:
      if (op.length == 0) return "a write of no bytes";
      if (uint64_t{op.offset} + op.length > kMaxChunkBytes) return "a write past 16 MiB";
      if (codec != 0 && !op.keep_attributes) return "only whole chunks may be encoded";
      break;
    case UpdateKind::replace:
      if (op.length > kMaxChunkBytes) return "a chunk of more than 16 MiB";
      if (codec == 0 && op.logical_length != 0 && op.logical_length != op.length)
        return "lengths differ without a codec";
      break;
    case UpdateKind::truncate:
      if (op.length > kMaxChunkBytes) return "a length of more than 16 MiB";
      if (codec != 0 && !op.keep_attributes) return "only whole chunks may be encoded";
      break;
    case UpdateKind::remove:
      break;
    default:
      return "an unknown kind of update";
  }
  if (data_bytes(op) != 0 && op.data == nullptr) return "an update without its data";
  *code = EIO;
  if (poisoned) return "the store is poisoned by a failed journal write: restart it";
  return nullptr;
}

void ChunkStore::Impl::stage(StageOp* op) {
  op->p.mode = kUpdateMode;
  enqueue(op);
}

void ChunkStore::Impl::enqueue(StageOp* op) {
  op->store_kind = kStageKind;
  op->store = this;
  op->error = 0;
  op->what = nullptr;
  op->io.owner = op;
  op->p.io2.owner = op;
  reset(op);
  int code;
  if (const char* what = stage_error(*op, &code)) {
    fail_later(op, code, what);
    return;
  }
  op->p.target_index = static_cast<uint16_t>(target_index(op->target));
  OpList& queue = busy[{op->p.target_index, op->key}];
  yield_move(queue);
  op->p.refused = op->p.dropped = op->p.yielded = false;
  op->p.room_since_us = op->p.room_block = op->p.apply_until_us = 0;
  op->p.waited = false;
  op->p.ticket = next_ticket++;
  op->p.base_is_removal = names_removal(*op, queue);
  stages_in_flight++;
  queue.push(op);
  if (queue.head == op) arrive(op);
}

// A removal leaves no trace once it is committed, so what is built on one is noted on arrival.
bool ChunkStore::Impl::names_removal(const StageOp& op, const OpList& before) const {
  if (op.base.none()) return false;
  for (const StoreOp* other = before.head; other != nullptr; other = other->next) {
    auto stage_op = static_cast<const StageOp*>(other);
    if (stage_op->version == op.base) return stage_op->kind == UpdateKind::remove;
  }
  uint32_t chunk = state->index.find(op.p.target_index, op.key);
  const Image* base = chunk != 0 ? state->find_image(chunk, op.base) : nullptr;
  return base != nullptr && base->kind() == UpdateKind::remove;
}

// The version that the record names as base; false if it is gone.
bool ChunkStore::Impl::settle_base(const StageOp& op, Version* base) const {
  uint32_t chunk = state->index.find(op.p.target_index, op.key);
  *base = op.base;
  if (base->none() || (chunk != 0 && state->find_image(chunk, *base) != nullptr)) return true;
  *base = Version{};
  return op.p.base_is_removal && (chunk == 0 || state->newest(chunk).none());
}

// The op is the first of its chunk.
void ChunkStore::Impl::arrive(StageOp* op) {
  park(op, stage_waiters.empty() ? begin_stage(op) : Begin::wait);
}

void ChunkStore::Impl::retry_waiting() {
  // A release waits for its updates, and the first in line may wait for the slots of the release.
  while (!releases.empty()) {
    auto dropped = std::find_if(stage_waiters.begin(), stage_waiters.end(),
                                [](const StageOp* op) { return op->p.dropped; });
    if (dropped == stage_waiters.end()) break;
    StageOp* op = *dropped;
    stage_waiters.erase(dropped);
    FFS_CHECK(begin_stage(op) != Begin::wait);
  }
  while (!stage_waiters.empty()) {
    StageOp* op = stage_waiters.front();
    stage_waiters.pop_front();
    const Begin begun = begin_stage(op);
    if (begun == Begin::wait) {
      stage_waiters.push_front(op);
      break;
    }
    park(op, begun);
  }
  while (!read_waiters.empty()) {
    auto op = static_cast<ReadOp*>(read_waiters.head);
    if (!begin_read(op)) break;
    read_waiters.pop();
    read_progress(op);
  }
}

// ------------------------------------------------------------------------------ planning

ChunkStore::Impl::Begin ChunkStore::Impl::begin_stage(StageOp* op) {
  int code = 0;
  const char* what = nullptr;
  if (op->p.dropped && !poisoned) {
    end_dropped(op);
    return Begin::started;
  }
  if (op->p.mode == kEraseMode && !poisoned) {
    erase_now(op->p.target_index, op->key);
    end_dropped(op);
    return Begin::started;
  }
  Begin begun = poisoned || op->p.refused ? Begin::failed : plan(op, &code, &what);
  if (begun == Begin::failed) {
    if (op->p.refused) code = ESTALE, what = "the update was refused meanwhile";
    if (poisoned) code = EIO, what = "the store is poisoned by a failed journal write: restart it";
    abandon(op, code, what);
  } else if (begun == Begin::started) {
    begin_io(op);
  }
  return begun;
}

// Judges the update against what is there, decides how to store it and takes what that needs.
ChunkStore::Impl::Begin ChunkStore::Impl::plan(StageOp* op, int* code, const char** what) {
  auto failed = [&](int error, const char* text) {
    *code = error;
    *what = text;
    return Begin::failed;
  };
  auto& p = op->p;
  uint32_t chunk = state->index.find(p.target_index, op->key);
  const Image* base = nullptr;
  if (p.mode == kInstallMode) {
    if (!condition_holds(*op))
      return failed(ECANCELED, "another version is committed than the condition names");
    return plan_room(op, nullptr, chunk != 0 ? state->index[chunk].image.place_class : kNoClass, code, what);
  }
  if (chunk != 0) {
    Version newest = state->newest(chunk);
    if (state->find_image(chunk, op->version) != nullptr)
      return failed(EEXIST, "that version is there already");
    if (op->version < newest) return failed(ESTALE, "a newer version is there");
    base = state->find_image(chunk, op->base);
    const Live* live = state->index.live_if(chunk);
    if (live != nullptr && live->pendings.size() >= kMaxPendings) {
      return failed(EBUSY, "too many pending versions of one chunk");
    }
    if (op->base.none() && !newest.none()) {
      const Image* last = state->find_image(chunk, newest);
      if (last->kind() != UpdateKind::remove)
        return failed(ESTALE, "the chunk exists, the update names no base");
    }
  }
  Version named;
  if (!settle_base(*op, &named)) return failed(ESTALE, "the base version is not there");
  const bool exists = base != nullptr && base->kind() != UpdateKind::remove;
  if (exists && base->codec != 0 && (op->kind == UpdateKind::write || op->kind == UpdateKind::truncate)) {
    return failed(EINVAL, "an encoded chunk can only be replaced or removed");
  }
  return plan_room(op, exists ? base : nullptr, exists ? base->place_class : kNoClass, code, what);
}

// What any change needs; `base`: whose bytes count, `base_class`: of the slot that it frees, if any.
ChunkStore::Impl::Begin ChunkStore::Impl::plan_room(StageOp* op, const Image* base, uint8_t base_class,
                                                    int* code, const char** what) {
  auto failed = [&](int error, const char* text) {
    *code = error;
    *what = text;
    return Begin::failed;
  };
  uint32_t chunk = state->index.find(op->p.target_index, op->key);
  bool adds = op->kind != UpdateKind::remove;  // a removal of nothing has its record too
  if (adds && chunk == 0 && state->index.size() >= super.max_chunks)
    return failed(ENOSPC, "the device has its max_chunks");
  if (adds && state->snapshot_bytes() + kMaxBlockBytes > snapshot_limit()) {
    if (overlays_will_go()) return Begin::wait;
    return failed(ENOSPC, "no room for more records in a snapshot");
  }
  uint64_t room = journal->region_bytes() / 4 * 3;
  if (journal->used_bytes() + journal->gathered_bytes() + kMaxBlockBytes > room) {
    start_snapshot();
    return Begin::wait;
  }
  choose_path(op, base, chunk);
  // To copy the whole chunk takes longer than the overlays on their way.
  if (op->p.crowded && overlays_will_leave(*op, chunk)) return Begin::wait_apply;
  return claim_memory(op, base_class, code, what);
}

void ChunkStore::Impl::choose_path(StageOp* op, const Image* base, uint32_t chunk) {
  auto& p = op->p;
  reset(op);
  uint32_t old_stored = base != nullptr ? base->stored : 0;
  uint32_t old_length = base != nullptr ? base->logical : 0;
  uint32_t end = write_offset(*op) + op->length;
  bool whole = op->kind == UpdateKind::replace ||
               (op->kind == UpdateKind::write && op->offset == 0 && end >= old_length);
  if (whole) {
    p.stored = op->length;
    bool coded = op->kind == UpdateKind::replace && op->attributes.codec != 0;
    p.new_length = coded ? op->logical_length : op->length;
    p.path = op->length == 0 ? kLength : aligned_for(*op, 0) ? kFresh : kRebuild;
    return;  // nothing of the base is needed
  }
  if (op->kind == UpdateKind::remove) {
    p.path = kLength;
    return;
  }
  p.base_stored = old_stored;
  p.base_length = old_length;
  if (base != nullptr) {
    if (base->place != 0) p.base_place = base->place, p.place_class = base->place_class;
    p.base_overlay = base->overlay;
    if (base->granules() > 0) {
      std::memcpy(p.base_sums, state->index.sums.at(base->sums, base->granules()),
                  base->granules() * sizeof(uint32_t));
    }
  }
  if (op->kind == UpdateKind::truncate) {
    p.new_length = op->length;
    p.stored = std::min(old_stored, op->length);
    uint32_t granule = op->length / kGranuleBytes * kGranuleBytes;
    bool cuts_bytes = op->length < old_length && op->length != granule && granule < old_stored;
    p.path = cuts_bytes ? kShrink : kLength;
    return;
  }
  p.new_length = std::max(old_length, end);
  p.stored = std::max(old_stored, end);
  p.path = kRebuild;
  const bool shared = base != nullptr && (base->flags & kFlagSharedSlot) != 0;  // others read those bytes
  if (p.base_place == 0 || shared || align_up(p.stored) > slot_bytes(p.place_class)) return;
  bool room_for_overlay =
      state->chunk_record_bytes(chunk) + kDeferredBytes + 2 * kBlock < kMaxChunkRecordBytes;
  uint32_t count, bytes;
  state->chain_totals(p.base_overlay, &count, &bytes);
  room_for_overlay &= count + 1 < kMaxChainOverlays;
  uint32_t first_block = align_up(old_stored) / static_cast<uint32_t>(kBlock);
  bool appends = op->offset == old_stored && old_stored == old_length && end > align_up(old_stored) &&
                 aligned_for(*op, op->offset);
  if (appends && first_block >= state->slot_high(chunk, p.base_place) &&
      (old_stored % kBlock == 0 || room_for_overlay)) {
    p.path = kAppend;
  } else if (op->length <= kDeferredBytes && op->offset <= old_stored) {
    p.crowded = !room_for_overlay;
    if (room_for_overlay) p.path = kDeferred;
  }
}

// Takes slot, scratch and overlay memory; all or nothing.
ChunkStore::Impl::Begin ChunkStore::Impl::claim_memory(StageOp* op, uint8_t base_class, int* code,
                                                       const char** what) {
  auto& p = op->p;
  uint32_t end = write_offset(*op) + op->length;
  if (p.path == kAppend && p.base_stored % kBlock != 0) {
    p.overlay_block = p.base_stored / static_cast<uint32_t>(kBlock);
    p.overlay_blocks = 1;
  } else if (p.path == kDeferred) {
    p.overlay_block = op->offset / static_cast<uint32_t>(kBlock);
    p.overlay_blocks = align_up(end) / static_cast<uint32_t>(kBlock) - p.overlay_block;
  }
  if (p.overlay_blocks > 0) {
    const bool over = counters.overlay_bytes + heap_overlay_bytes > overlay_limit();
    if (over && overlays_will_go()) return Begin::wait;
    p.overlay = over ? nullptr : overlay_memory(p.overlay_blocks);
    if (p.overlay == nullptr) p.path = kRebuild, p.overlay_blocks = 0;
  }
  plan_span(op);
  size_t scratch_bytes = 0;
  if (p.path == kFresh && !op->tail_padded && op->length % kBlock != 0) scratch_bytes = kBlock;
  if (p.path == kAppend) scratch_bytes = 2 * kBlock;  // the old last block, the new one
  if (p.path == kDeferred || p.path == kShrink) scratch_bytes = p.span_to - p.span_from;
  if (p.path == kRebuild) scratch_bytes = kPieceBytes;
  if (scratch_bytes > 0) {
    p.scratch = scratch->allocate(scratch_bytes);
    if (p.scratch == nullptr) {
      release_stage(op);
      return Begin::wait;
    }
  }
  if (p.path != kFresh && p.path != kRebuild) {
    if (p.stored == 0) p.place_class = kNoClass;
    p.place = p.stored == 0 ? 0 : p.base_place;
  } else if (!take_over(op) && !take_slot(op, base_class)) {
    release_stage(op);
    return wait_for_room(op, base_class, code, what);
  }
  if (p.base_place != 0) ref_slot(p.base_place);
  state->ref_overlay(p.base_overlay);
  p.holds_base = true;
  return Begin::started;
}

// Which bytes of the base must be read before the new version can be made (not for rebuilds).
void ChunkStore::Impl::plan_span(StageOp* op) {
  auto& p = op->p;
  uint32_t end = write_offset(*op) + op->length;
  if (p.path == kShrink) {
    p.span_from = op->length / kGranuleBytes * kGranuleBytes;
    p.span_to = std::min(align_up(p.base_stored), p.span_from + kGranuleBytes);
    p.verify_span = true;
  } else if (p.path == kAppend || (p.path == kDeferred && op->offset == p.base_length)) {
    p.span_from = align_down(p.base_stored);
    p.span_to = align_up(p.base_stored);
  } else if (p.path == kDeferred) {
    uint32_t first = op->offset / kGranuleBytes * kGranuleBytes;
    uint32_t last = std::min(align_up(p.base_stored), static_cast<uint32_t>(round_up(end, kGranuleBytes)));
    bool whole_granules = op->offset == first && (end % kGranuleBytes == 0 || end >= p.base_length);
    if (whole_granules || last <= first) return;
    p.known_sums = sums_are_known(*op);
    if (!p.known_sums) p.span_from = first, p.span_to = last, p.verify_span = true;
  }
}

// ------------------------------------------------------------------------------ the end

void ChunkStore::Impl::release_stage(StageOp* op) {
  auto& p = op->p;
  if (p.holds_base) {
    if (p.base_place != 0) unref_slot(p.base_place);
    state->unref_overlay(p.base_overlay);
    p.holds_base = false;
  }
  if (p.scratch != nullptr) scratch->release(p.scratch);
  if (p.overlay != nullptr) overlay_unused(p.overlay, p.overlay_blocks);
  if (p.new_place && p.in_place) {
    op->berth->taken_over = false;  // as before
  } else if (p.new_place) {         // no record names it
    allocator->free(p.place, p.place_class);
    places_held--;
    note_room();
  }
  p.scratch = p.overlay = nullptr;
  p.new_place = p.in_place = false;
}

void ChunkStore::Impl::abandon(StageOp* op, int error, const char* what) {
  release_stage(op);
  leave_busy(op);
  fail_later(op, error, what);
}

// The slot that was taken for the update belongs to a version now, or what was written there does.
void ChunkStore::Impl::name_place(StageOp* op) {
  if (op->p.path == kFresh || op->p.path == kRebuild || op->p.path == kAppend)
    gathered_data_bytes += op->length;
  if (op->p.new_place) places_held--;
  op->p.new_place = false;
}

// The next update of the chunk may begin.
void ChunkStore::Impl::leave_busy(StageOp* op) {
  stages_in_flight--;
  leave_queue(op);
}

void ChunkStore::Impl::leave_queue(StageOp* op) {
  BusyKey key{op->p.target_index, op->key};
  OpList* queue = busy.find(key);
  FFS_CHECK(queue != nullptr && queue->head == op);
  queue->pop();
  if (queue->empty()) {
    busy.erase(key);
  } else {
    stage_waiters.push_back(static_cast<StageOp*>(queue->head));
  }
  if (!reset_waits.empty()) end_resets();
  if (!stage_waiters.empty() || !read_waiters.empty() || !releases.empty()) schedule_pump();
}

}  // namespace ffs::engine
