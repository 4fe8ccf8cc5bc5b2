// One move: the stored bytes of a committed version are copied into another slot of the class, piece by
// piece, each granule verified on the way, then one record names the new slot. It stands in the queue of
// its chunk like an update, and leaves it, undone, when an update comes (docs/disk_format.md, Space).
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

struct ChunkStore::Impl::MoveWork : StageOp {
  uint32_t readable = 0;  // where the last granule ends
  uint32_t piece = 0;     // bytes of the piece in flight
  bool writing = false;
};

ChunkStore::Impl::MoveWork* ChunkStore::Impl::move_memory() {
  if (free_moves.empty()) return new MoveWork;
  MoveWork* work = free_moves.back();
  free_moves.pop_back();
  return work;
}

void ChunkStore::Impl::free_move_memory() {
  for (MoveWork* work : free_moves) delete work;
  free_moves.clear();
}

// wait: no memory or no journal room now. failed: this chunk isn't to be moved, or can't be.
ChunkStore::Impl::Begin ChunkStore::Impl::start_move(uint32_t number) {
  const Chunk& chunk = state->index[number];
  const Image image = chunk.image;
  // Updates, pending versions and overlays go first; a later round may find the chunk at rest.
  const bool there = chunk.used && image.place != 0 && allocator->draining(allocator->slab_of(image.place));
  if (!there || releasing[chunk.target] || chunk.live != 0 || image.overlay != 0 ||
      busy.find({chunk.target, chunk.key}) != nullptr)
    return Begin::failed;
  if (journal->used_bytes() + journal->gathered_bytes() + kMaxBlockBytes > journal->region_bytes() / 4 * 3) {
    start_snapshot();
    return Begin::wait;
  }
  if (dedup.follow(number)) return Begin::failed;  // that was all
  const size_t memory = std::min<size_t>(align_up(image.stored), kPieceBytes);
  uint8_t* bytes = scratch->allocate(memory);
  if (bytes == nullptr) return Begin::wait;
  const uint64_t place = allocator->allocate(image.place_class, Allocator::Asker::move);
  if (place == 0) {  // updates have taken the slots meanwhile
    scratch->release(bytes);
    return Begin::failed;
  }
  MoveWork* work = move_memory();
  auto& p = work->p;
  work->store = this;
  work->store_kind = kStageKind;
  work->key = chunk.key;
  work->version = Version{};  // nobody may take it for an update of this number
  work->base = image.version;
  work->kind = UpdateKind::replace;
  work->readable = image.codec == 0 ? image.logical : image.stored;
  p = StageOp::Private{};
  p.mode = kMoveMode;
  p.target_index = chunk.target;
  p.ticket = next_ticket++;
  p.stored = image.stored;
  p.place = place;
  p.place_class = image.place_class;
  p.new_place = true;
  places_held++;
  p.scratch = bytes;
  p.base_place = image.place;
  p.holds_base = true;
  ref_slot(p.base_place);
  std::memcpy(p.base_sums, state->index.sums.at(image.sums, image.granules()),
              image.granules() * sizeof(uint32_t));
  work->io.owner = work;
  work->io.op_class = io::OpClass::compaction;
  work->io.done = [](io::Op* op) {
    auto self = static_cast<MoveWork*>(static_cast<StageOp*>(op->owner));
    static_cast<Impl*>(self->store)->move_io_done(self, op->result);
  };
  busy[{chunk.target, chunk.key}].push(work);
  compaction.in_flight++;
  compaction.budget_bytes -= std::min<uint64_t>(compaction.budget_bytes, image.stored);
  move_piece(work);
  return Begin::started;
}

void ChunkStore::Impl::move_piece(MoveWork* work) {
  auto& p = work->p;
  work->piece = std::min(p.stored - p.at, kPieceBytes);
  work->writing = false;
  io.read(&work->io, file, p.base_place * kBlock + p.at, p.scratch, align_up(work->piece),
          scratch->region_of(p.scratch));
}

void ChunkStore::Impl::move_io_done(MoveWork* work, int32_t result) {
  auto& p = work->p;
  if (result < 0 || p.yielded || p.dropped || poisoned || closing || compaction.stopped)
    return end_move(work, false);
  if (!work->writing) {
    if (!move_is_right(*work)) {
      // Scrub and repair deal with it; a copy would only hide where it happened.
      counters.checksum_errors++;
      return end_move(work, false);
    }
    work->writing = true;
    io.write(&work->io, file, p.place * kBlock + p.at, p.scratch, align_up(work->piece),
             scratch->region_of(p.scratch));
    return;
  }
  p.at += work->piece;
  if (p.at < p.stored) return move_piece(work);
  record_move(work);
}

bool ChunkStore::Impl::move_is_right(const MoveWork& work) const {
  const auto& p = work.p;
  for (uint32_t from = p.at; from < p.at + work.piece; from += kGranuleBytes) {
    const uint32_t to = std::min(from + kGranuleBytes, work.readable);
    const uint32_t stored_to = std::min(to, p.stored);
    const uint32_t sum = crc32c(p.scratch + (from - p.at), stored_to - from);
    if (crc32c_extend_zeros(sum, to - stored_to) != p.base_sums[from / kGranuleBytes]) return false;
  }
  return true;
}

// The bytes are in the new slot; nothing has happened to the chunk since the move began, as it had its turn.
void ChunkStore::Impl::record_move(MoveWork* work) {
  auto& p = work->p;
  const uint32_t chunk = state->index.find(p.target_index, work->key);
  const Image* image = chunk != 0 ? &state->index[chunk].image : nullptr;
  if (image == nullptr || image->version != work->base || image->place != p.base_place ||
      state->index[chunk].live != 0 || image->overlay != 0)
    return end_move(work, false);
  if (!dedup.move(chunk, p.place)) {
    MoveRecord record{};
    record.key = work->key;
    record.version = work->base;
    record.place = p.place;
    record.place_class = p.place_class;
    append_simple(RecordType::move, p.target_index, record);
    const char* contradiction = state->move(p.target_index, record);
    FFS_CHECK(contradiction == nullptr);
  }
  name_place(work);
  counters.moves++;
  counters.moved_bytes += p.stored;
  if (!space_waiters.empty()) want_flush();
  end_move(work, true);
}

void ChunkStore::Impl::end_move(MoveWork* work, bool moved) {
  if (!moved) counters.moves_dropped++;
  release_stage(work);
  if (!work->p.yielded) leave_queue(work);
  compaction.in_flight--;
  free_moves.push_back(work);
  schedule_pump();
}

// An update comes to a chunk that is being moved. The move gives up its turn at once; its I/O may still go
// on, between a slot that it holds and one that is its own.
void ChunkStore::Impl::yield_move(OpList& queue) {
  if (queue.empty() || mutants.move_ignores_waiters) return;
  auto head = static_cast<StageOp*>(queue.head);
  if (head->p.mode != kMoveMode) return;
  queue.pop();
  head->p.yielded = true;
}

}  // namespace ffs::engine
