// The record of an update (stage.cc): when its data is where it belongs, or beside the data.
#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

// The version as its record will have it.
Image ChunkStore::Impl::image_of(StageOp* op, const Image* base) const {
  auto& p = op->p;
  Image image;
  image.version = op->version;
  image.place = p.place;
  image.place_class = p.place == 0 ? 0 : p.place_class;
  image.stored = p.stored;
  image.logical = p.new_length;
  image.kind_number = static_cast<uint8_t>(op->kind);
  Attributes attributes = op->keep_attributes && base != nullptr ? base->attributes() : op->attributes;
  if (op->kind == UpdateKind::replace) attributes.codec = op->attributes.codec;
  image.set_attributes(attributes);
  if (op->kind == UpdateKind::remove) image.codec = 0;
  if (base != nullptr && p.place != 0 && p.place == base->place) image.flags |= base->flags & kFlagSharedSlot;
  if (p.path == kRebuild || p.path == kFresh) p.first_changed = 0, p.end_changed = image.granules();
  return image;
}

// Whether there is a record to be made of the update; else it has ended.
bool ChunkStore::Impl::still_stands(StageOp* op) {
  auto& p = op->p;
  if (p.dropped && !poisoned) {
    end_dropped(op);
    return false;
  }
  const uint32_t chunk = state->index.find(p.target_index, op->key);
  int code = 0;
  const char* what = nullptr;
  Version named;
  if (poisoned) {
    code = EIO, what = "the store is poisoned by a failed journal write: restart it";
  } else if (p.refused) {
    code = ESTALE, what = "the update was refused meanwhile";
  } else if (!settle_base(*op, &named)) {
    code = ESTALE, what = "the base version was dropped meanwhile";
  } else if (chunk == 0 && op->kind != UpdateKind::remove && state->index.size() >= super.max_chunks) {
    code = ENOSPC, what = "the device has its max_chunks";
  }
  if (code != 0) abandon(op, code, what);
  return code == 0;
}

// The data is where it belongs.
void ChunkStore::Impl::prepared(StageOp* op) {
  auto& p = op->p;
  if (p.mode == kInstallMode && !p.dropped && !poisoned) return install_prepared(op);
  if (!still_stands(op)) return;
  record_version(op);
  if (p.path == kFresh || p.path == kAppend) remember_written(op);
  if (op->commit_now) {
    counters.committed++;
    const uint32_t chunk = state->index.find(p.target_index, op->key);
    if (chunk != 0) queue_apply(chunk);
  }
  release_stage(op);
  leave_busy(op);
  when_durable(op);
}

void ChunkStore::Impl::record_version(StageOp* op) {
  auto& p = op->p;
  const uint32_t chunk = state->index.find(p.target_index, op->key);
  const Image* base = chunk != 0 ? state->find_image(chunk, op->base) : nullptr;
  StageRecord record{};
  record.key = op->key;
  FFS_CHECK(settle_base(*op, &record.base));
  record.image = to_disk(image_of(op, base));
  record.client = op->identity.client.value;
  record.sequence = op->identity.sequence;
  record.channel = op->identity.channel;
  record.chain = op->chain.value;
  record.space_epoch = op->space_epoch;
  record.write_offset = write_offset(*op);
  record.write_length = data_bytes(*op);
  record.first_changed = static_cast<uint16_t>(p.first_changed);
  record.changed_granules = static_cast<uint16_t>(p.end_changed - p.first_changed);
  record.flags = op->commit_now ? kStageCommitNow : 0;
  record.overlay_count = p.overlay != nullptr ? 1 : 0;
  std::span<const uint32_t> sums(p.sums + p.first_changed, record.changed_granules);
  OverlayView overlay{p.overlay_block, p.overlay_blocks, p.overlay};
  std::span<const OverlayView> overlays(&overlay, record.overlay_count);

  Writer writer = journal->append(stage_bytes(record.changed_granules, overlays));
  encode_stage(writer, RecordType::stage, p.target_index, record, sums, overlays);
  FFS_CHECK(writer.ok() && writer.left() == 0);
  p.overlay = nullptr;  // the state's now
  name_place(op);
  const char* contradiction = state->stage(p.target_index, record, sums, overlays);
  FFS_CHECK(contradiction == nullptr);
  counters.staged++;
  if (p.path == kFresh) counters.fresh++;
  if (p.path == kAppend) counters.in_place++;
  if (p.path == kDeferred) counters.deferred++;
}

// ------------------------------------------------------------------------------ records beside their data

// Whether the record is written while the data is (docs/disk_format.md, Journal). Not of what is committed by
// its record, which readers would see at once; of what nobody waits for; or of so much that the small
// updates behind it in the journal would wait noticeably.
bool ChunkStore::Impl::goes_beside(const StageOp& op) const {
  constexpr uint32_t kMostBytes = 4u << 20;
  return records_beside && op.p.mode == kUpdateMode && !op.commit_now &&
         op.op_class != io::OpClass::recovery && op.length <= kMostBytes;
}

// Before the data is written. The op keeps its turn among the updates of the chunk until the data is there:
// none of them sees the version before. False: the update has ended.
bool ChunkStore::Impl::record_beside(StageOp* op) {
  auto& p = op->p;
  if (!still_stands(op)) return false;
  record_version(op);
  const uint32_t chunk = state->index.find(p.target_index, op->key);
  Pending* pending = state->find_pending(chunk, op->version);
  FFS_CHECK(pending != nullptr);
  pending->arriving = true;
  ref_slot(p.place);  // whatever becomes of the version, its slot isn't another's before the write has ended
  journal->expect_data();
  p.beside = true;
  p.record_block = journal->last_block();
  want_flush();
  return true;
}

void ChunkStore::Impl::data_written(StageOp* op, int error) {
  auto& p = op->p;
  p.beside = false;
  if (error != 0) {
    // The record is, or will be, on the device without its data: it may never be known as flushed.
    journal->stop();
    poison(error);
  } else {
    journal->data_arrived(p.record_block);
  }
  unref_slot(p.place);
  const bool dropped = p.dropped && !poisoned;
  if (dropped) return end_dropped(op);
  if (poisoned) return abandon(op, EIO, "the store is poisoned by a failed write: restart it");
  if (p.refused) return abandon(op, ESTALE, "the update was refused meanwhile");
  const uint32_t chunk = state->index.find(p.target_index, op->key);
  Pending* pending = chunk != 0 ? state->find_pending(chunk, op->version) : nullptr;
  if (pending != nullptr) pending->arriving = false;
  remember_written(op);
  release_stage(op);
  leave_busy(op);
  when_durable(op, p.record_block);
}

}  // namespace ffs::engine
