// Recovery and repair: whole versions of another replica put in, chunks taken out. Both take their turn in
// the queue of the chunk's updates; an install is stored as a replacement of everything would be.
#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

void ChunkStore::install(InstallOp* op) {
  StageOp& stage = op->p;
  stage.done = [](StoreOp* done) {
    auto outer = static_cast<InstallOp*>(done->owner);
    outer->error = done->error;
    outer->what = done->what;
    if (outer->done != nullptr) outer->done(outer);
  };
  stage.owner = op;
  stage.op_class = op->op_class;
  stage.target = op->target;
  stage.key = op->key;
  stage.version = op->version;
  stage.base = Version{};
  stage.kind = UpdateKind::replace;
  stage.offset = 0;
  stage.length = op->length;
  stage.data = op->data;
  stage.region = op->region;
  stage.tail_padded = op->tail_padded;
  stage.piece_checksums = op->piece_checksums;
  stage.attributes = op->attributes;
  stage.keep_attributes = false;
  stage.logical_length = op->logical_length;
  stage.size_hint = op->size_hint;
  stage.identity = UpdateIdentity{};
  stage.commit_now = true;
  stage.p.mode = kInstallMode;
  stage.p.only_over = op->only_over;
  impl_->enqueue(&stage);
}

bool ChunkStore::Impl::condition_holds(const StageOp& op) const {
  if (op.p.only_over.none()) return true;
  uint32_t chunk = state->index.find(op.p.target_index, op.key);
  return chunk != 0 && state->index[chunk].image.version == op.p.only_over;
}

// The bytes are in their slot.
void ChunkStore::Impl::install_prepared(StageOp* op) {
  auto& p = op->p;
  if (!condition_holds(*op)) {
    abandon(op, ECANCELED, "another version was committed meanwhile than the condition names");
    return;
  }
  uint32_t chunk = state->index.find(p.target_index, op->key);
  if (chunk == 0 && state->index.size() >= super.max_chunks) {
    abandon(op, ENOSPC, "the device has its max_chunks");
    return;
  }
  StageRecord record{};
  record.key = op->key;
  record.base = p.only_over;
  record.image = to_disk(image_of(op, nullptr));
  record.write_length = op->length;
  record.changed_granules = record.image.granules;
  record.flags = kStageCommitNow;
  if (!p.only_over.none()) record.flags |= kInstallKeepsPendings;
  std::span<const uint32_t> sums(p.sums, record.changed_granules);
  Writer writer = journal->append(stage_bytes(record.changed_granules, {}));
  encode_stage(writer, RecordType::install, p.target_index, record, sums, {});
  FFS_CHECK(writer.ok() && writer.left() == 0);
  name_place(op);
  const char* contradiction = state->install(p.target_index, record, sums);
  FFS_CHECK(contradiction == nullptr);
  counters.installed++;
  release_stage(op);
  leave_busy(op);
  when_durable(op);
}

// ------------------------------------------------------------------------------ taking out

// An erase that waits for the updates of its chunk.
struct ChunkStore::Impl::EraseWork : StageOp {
  StoreOp* outer = nullptr;
};

void ChunkStore::erase(TargetId target, const ChunkKey& key, StoreOp* op) {
  if (op != nullptr) op->store_kind = kPlainOp;
  int index = impl_->target_index(target);
  if (index < 0) return impl_->fail_target(op, target);
  impl_->erase(static_cast<uint16_t>(index), key, op);
}

void ChunkStore::Impl::erase(uint16_t target, const ChunkKey& key, StoreOp* op) {
  if (poisoned || busy.find({target, key}) == nullptr) {
    if (!poisoned) erase_now(target, key);
    when_durable(op);
    return;
  }
  auto work = new EraseWork;
  work->outer = op;
  work->target = identity.targets[target];
  work->key = key;
  work->kind = UpdateKind::remove;
  work->version.update = 1;  // none would be refused; nobody sees it
  work->done = [](StoreOp* done) {
    auto self = static_cast<EraseWork*>(done);
    StoreOp* waits = self->outer;
    auto impl = static_cast<Impl*>(self->store);
    int error = self->error;
    const char* what = self->what;
    delete self;
    if (waits != nullptr) impl->finish(waits, error, what);
  };
  work->p.mode = kEraseMode;
  enqueue(work);
}

void ChunkStore::Impl::erase_now(uint16_t target, const ChunkKey& key) {
  if (state->index.find(target, key) == 0) return;  // also durably: its last record is in the journal
  append_simple(RecordType::erase, target, EraseRecord{key});
  state->erase(target, key);
  counters.erased++;
}

// An update, or an erase, of which nothing is left to do but to tell that it is over: with what dropped it.
void ChunkStore::Impl::end_dropped(StageOp* op) {
  release_stage(op);
  leave_busy(op);
  when_durable(op);
}

}  // namespace ffs::engine
