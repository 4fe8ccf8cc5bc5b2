// A device that lies in memory. Reads without a copy: the caller gets the place of the bytes, for the kernel
// to send from, and the slot stays the version's until it is given back. New chunks with one copy less: their
// bytes are put into a slot before there is an update, which then only needs its record.
#include <algorithm>

#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

bool ChunkStore::lend(ReadOp* op, Lent* lent) {
  return impl_->lend(op, lent);
}
void ChunkStore::give_back(const Lent& lent) {
  impl_->give_back(lent);
}
int ChunkStore::copy_lent(const Lent& lent, uint8_t* to) const {
  return impl_->map->copy(lent.offset, to, lent.length);
}

// Whether all of the range lies in the slot as it is to be sent: nothing is laid over it, none of it is zeros
// that aren't stored, and no granule is to be verified (those that are whole are the reader's).
bool ChunkStore::Impl::lies_ready(const ReadOp& op, const Image& image) const {
  if (image.place == 0 || image.overlay != 0 || op.verify_whole) return false;
  const uint32_t readable = image.codec == 0 ? image.logical : image.stored;
  const uint32_t from = std::min(op.offset, readable);
  const uint32_t to = from + std::min(op.length, readable - from);
  if (to == from || to > image.stored) return false;
  const bool whole = from % kGranuleBytes == 0 && (to % kGranuleBytes == 0 || to == readable);
  return whole || !op.verify_partial;
}

bool ChunkStore::Impl::lend(ReadOp* op, Lent* lent) {
  const int index = map != nullptr ? target_index(op->target) : -1;
  const uint32_t chunk = index >= 0 ? state->index.find(static_cast<uint16_t>(index), op->key) : 0;
  bool pending = false;
  const Image* image = chunk != 0 ? choose_image(*op, chunk, &pending) : nullptr;
  if (image == nullptr || image->kind() == UpdateKind::remove || !lies_ready(*op, *image)) return false;
  begin(op);
  op->pending = pending;
  describe(op, *image);
  lent->place = image->place;
  lent->offset = image->place * kBlock + op->p.from;
  lent->length = op->read_length;
  lent->bytes = map->at(lent->offset, lent->length);
  ref_slot(lent->place);
  lent_slots++;
  counters.reads++;
  counters.bytes_read += op->read_length;
  return true;
}

// ------------------------------------------------------------------------------ bytes on their way

bool ChunkStore::take_berth(uint32_t bytes, Berth* berth) {
  return impl_->take_berth(bytes, berth);
}
void ChunkStore::give_back(Berth* berth) {
  impl_->give_back(berth);
}

// Whoever sends them may stop in the middle and keep the slot for long, so all of them together have a small
// part of what is free; updates that wait for room, and targets that are being released, come first.
bool ChunkStore::Impl::take_berth(uint32_t bytes, Berth* berth) {
  constexpr uint64_t kPartOfRoom = 8;
  if (map == nullptr || poisoned || closing || bytes == 0 || bytes > kMaxChunkBytes) return false;
  if (!space_waiters.empty() || !releases.empty()) return false;
  const uint8_t place_class = Allocator::class_for(bytes);
  const auto length = static_cast<uint32_t>(slot_bytes(place_class));
  if (allocator->room_bytes() < kPartOfRoom * (berth_bytes + length)) return false;
  const uint64_t place = allocator->allocate(place_class, Allocator::Asker::fresh);
  if (place == 0) return false;
  places_held++;
  berth_bytes += length;
  ref_slot(place);
  *berth = {map->writable(place * kBlock, length), length, place, place_class, false};
  return true;
}

void ChunkStore::Impl::give_back(Berth* berth) {
  FFS_CHECK(berth->bytes != nullptr && berth_bytes >= berth->length);
  berth_bytes -= berth->length;
  unref_slot(berth->place);
  if (!berth->taken_over) {  // no record names it
    allocator->free(berth->place, berth->place_class);
    places_held--;
    note_room();
  }
  *berth = Berth{};
}

// The update's slot is the one that its bytes lie in.
bool ChunkStore::Impl::take_over(StageOp* op) {
  auto& p = op->p;
  Berth* berth = op->berth;
  if (berth == nullptr || berth->taken_over || p.path != kFresh || berth->length < p.stored) return false;
  FFS_CHECK(op->data == berth->bytes && op->piece_checksums != nullptr);
  berth->taken_over = true;
  p.place = berth->place;
  p.place_class = berth->place_class;
  p.new_place = p.in_place = true;
  return true;
}

// ------------------------------------------------------------------------------ what is lent

void ChunkStore::Impl::give_back(const Lent& lent) {
  FFS_CHECK(lent_slots > 0);
  lent_slots--;
  unref_slot(lent.place);
}

}  // namespace ffs::engine
