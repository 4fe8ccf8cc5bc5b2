// Reads without a copy, of a device that lies in memory: the caller gets the place of the bytes, for the
// kernel to send from, and the slot stays the version's until it is given back.
#include <algorithm>

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

void ChunkStore::Impl::give_back(const Lent& lent) {
  FFS_CHECK(lent_slots > 0);
  lent_slots--;
  unref_slot(lent.place);
}

}  // namespace ffs::engine
