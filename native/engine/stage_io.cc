// The I/O of an update, by its path (stage.cc), and the checksums of what it makes.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ I/O of an update

void ChunkStore::Impl::begin_io(StageOp* op) {
  auto& p = op->p;
  auto done = [](io::Op* io_op) {
    auto stage_op = static_cast<StageOp*>(io_op->owner);
    static_cast<Impl*>(stage_op->store)->stage_io_done(stage_op, io_op->result);
  };
  op->io.done = p.io2.done = done;
  op->io.op_class = p.io2.op_class = op->op_class;
  switch (p.path) {
    case kLength:
      sum_truncate(op);
      prepared(op);
      break;
    case kFresh:
      sum_write(op, 0, kMaxChunkBytes);
      if (p.in_place) {
        counters.bytes_written += op->length;
        prepared(op);
      } else if (!goes_beside(*op) || record_beside(op)) {
        start_data_writes(op);
      }
      break;
    case kRebuild:
      counters.rebuilds++;
      // Granules that the update doesn't touch keep their checksums.
      std::memcpy(p.sums, p.base_sums, granules_of(p.base_length) * sizeof(uint32_t));
      next_piece(op);
      break;
    default:
      if (p.span_to > p.span_from) {
        read_span(op, p.span_from, p.span_to);
      } else {
        span_ready(op);
      }
  }
}

void ChunkStore::Impl::read_span(StageOp* op, uint32_t from, uint32_t to) {
  auto& p = op->p;
  p.in_flight = 1;
  p.reading = true;
  if (p.path == kDeferred && p.verify_span)
    counters.granules_read += (to - from + kGranuleBytes - 1) / kGranuleBytes;
  p.span_from = from;
  p.span_to = to;
  io.read(&op->io, file, p.base_place * kBlock + from, p.scratch, to - from, scratch->region_of(p.scratch));
}

void ChunkStore::Impl::stage_io_done(StageOp* op, int32_t result) {
  auto& p = op->p;
  if (result < 0 && op->error == 0) {
    op->error = -result;
    op->what = "the device failed";
  }
  if (--p.in_flight > 0) return;
  if (p.beside) return data_written(op, op->error);
  if (op->error != 0) {
    abandon(op, op->error, op->what);
    return;
  }
  if (p.reading) {
    p.reading = false;
    span_ready(op);
  } else if (p.path == kRebuild && p.at < p.stored) {
    next_piece(op);
  } else {
    prepared(op);
  }
}

// The old bytes that were needed are in scratch memory.
void ChunkStore::Impl::span_ready(StageOp* op) {
  auto& p = op->p;
  if (p.span_to > p.span_from) patch(p.base_overlay, p.span_from, p.span_to, p.scratch);
  if (p.path == kRebuild) {
    fill_piece(op);
    return;
  }
  if (p.verify_span && !(learn_blocks(op) || span_is_right(op))) {
    counters.checksum_errors++;
    abandon(op, EBADMSG, "an old granule that the update keeps in part fails its checksum");
    return;
  }
  if (p.path == kShrink) {
    sum_truncate(op);
    prepared(op);
    return;
  }
  build_overlay(op);
  sum_write(op, 0, kMaxChunkBytes);
  if (p.path == kAppend) {
    if (!goes_beside(*op) || record_beside(op)) start_data_writes(op);
  } else {
    prepared(op);
  }
}

// Checksum of bytes [from, to) of the base: from scratch memory as far as stored, then zeros.
static uint32_t old_sum(const StageOp& op, uint32_t from, uint32_t to) {
  uint32_t stored_to = std::clamp(op.p.base_stored, from, to);
  uint32_t sum = stored_to > from ? crc32c(op.p.scratch + (from - op.p.span_from), stored_to - from) : 0;
  return crc32c_extend_zeros(sum, to - stored_to);
}

// The granules in scratch memory that aren't replaced as a whole have their checksums.
bool ChunkStore::Impl::span_is_right(const StageOp* op) const {
  const auto& p = op->p;
  uint32_t data_from = write_offset(*op), data_to = data_from + data_bytes(*op);
  for (uint32_t from = p.span_from / kGranuleBytes * kGranuleBytes; from < p.span_to; from += kGranuleBytes) {
    uint32_t to = std::min(from + kGranuleBytes, p.base_length);
    if (data_from <= from && data_to >= to) continue;
    if (old_sum(*op, from, to) != p.base_sums[from / kGranuleBytes]) return false;
  }
  return true;
}

void ChunkStore::Impl::build_overlay(StageOp* op) {
  auto& p = op->p;
  if (p.overlay_blocks == 0) return;
  uint32_t from = p.overlay_block * static_cast<uint32_t>(kBlock);
  uint32_t to = from + p.overlay_blocks * static_cast<uint32_t>(kBlock);
  const bool covered = op->offset == from && op->offset + op->length == to;
  if (!covered) std::memset(p.overlay, 0, to - from);
  uint32_t old_from = std::max(from, p.span_from);
  uint32_t old_to = std::min({to, p.span_to, p.base_stored});
  if (old_to > old_from)
    std::memcpy(p.overlay + (old_from - from), p.scratch + (old_from - p.span_from), old_to - old_from);
  uint32_t data_to = std::min(to, op->offset + op->length);
  std::memcpy(p.overlay + (op->offset - from), op->data, data_to - op->offset);
}

void ChunkStore::Impl::start_data_writes(StageOp* op) {
  auto& p = op->p;
  uint32_t offset = write_offset(*op);
  uint32_t from = p.path == kAppend ? align_up(p.base_stored) : 0;
  uint32_t end = offset + op->length;
  uint32_t to = op->tail_padded ? align_up(end) : align_down(end);
  const uint8_t* data = op->data + (from - offset);
  p.in_flight = static_cast<uint8_t>((to > from ? 1 : 0) + (to < end ? 1 : 0));
  counters.bytes_written += end - from;
  if (to > from) io.write(&op->io, file, p.place * kBlock + from, data, to - from, op->region);
  if (to < end) {
    uint8_t* block = p.scratch + (p.path == kAppend ? kBlock : 0);
    std::memset(block, 0, kBlock);
    std::memcpy(block, op->data + (to - offset), end - to);
    io.write(&p.io2, file, p.place * kBlock + to, block, kBlock, scratch->region_of(block));
  }
}

// ------------------------------------------------------------------------------ rebuild, piece by piece

void ChunkStore::Impl::next_piece(StageOp* op) {
  auto& p = op->p;
  uint32_t to = std::min(p.at + kPieceBytes, p.stored);
  uint32_t offset = write_offset(*op);
  bool replaced = offset <= p.at && offset + data_bytes(*op) >= to;
  uint32_t old_to = std::min(align_up(p.base_stored), p.at + kPieceBytes);
  p.span_from = p.span_to = p.at;
  if (!replaced && old_to > p.at) {
    read_span(op, p.at, old_to);
  } else {
    fill_piece(op);
  }
}

void ChunkStore::Impl::fill_piece(StageOp* op) {
  auto& p = op->p;
  uint32_t from = p.at, to = std::min(from + kPieceBytes, p.stored);
  if (p.span_to > p.span_from && !span_is_right(op)) {
    counters.checksum_errors++;
    abandon(op, EBADMSG, "an old granule that the update keeps fails its checksum");
    return;
  }
  sum_write(op, from, from + kPieceBytes);
  uint32_t kept = std::clamp(p.base_stored, from, to);
  std::memset(p.scratch + (kept - from), 0, align_up(to) - kept);
  uint32_t offset = write_offset(*op);
  uint32_t data_from = std::max(from, offset), data_to = std::min(to, offset + data_bytes(*op));
  if (data_to > data_from)
    std::memcpy(p.scratch + (data_from - from), op->data + (data_from - offset), data_to - data_from);
  p.at = to;
  p.in_flight = 1;
  counters.bytes_written += to - from;
  io.write(&op->io, file, p.place * kBlock + from, p.scratch, align_up(to) - from,
           scratch->region_of(p.scratch));
}

// ------------------------------------------------------------------------------ checksums

// Of the data that falls into this granule.
static uint32_t data_sum(const StageOp& op, uint32_t granule) {
  uint32_t offset = write_offset(op);
  uint32_t first = offset / kGranuleBytes;
  if (op.piece_checksums != nullptr) return op.piece_checksums[granule - first];
  uint32_t from = std::max(granule * kGranuleBytes, offset);
  uint32_t to = std::min((granule + 1) * kGranuleBytes, offset + op.length);
  return crc32c(op.data + (from - offset), to - from);
}

// New checksums of the granules that a write or replace changes and that begin in [limit_from,
// limit_to). Where old bytes stay on both sides of new ones, they are in scratch memory.
void ChunkStore::Impl::sum_write(StageOp* op, uint32_t limit_from, uint32_t limit_to) {
  auto& p = op->p;
  uint32_t offset = write_offset(*op), end = offset + op->length;
  // Bytes that a reader gets: of an encoded chunk the stored ones.
  bool coded = op->kind == UpdateKind::replace && op->attributes.codec != 0;
  uint32_t length = coded ? p.stored : p.new_length;
  p.first_changed = std::min(offset, p.base_length) / kGranuleBytes;
  p.end_changed = granules_of(end);
  for (uint32_t g = p.first_changed; g < p.end_changed; g++) {
    uint32_t from = g * kGranuleBytes;
    if (from < limit_from || from >= limit_to) continue;
    uint32_t old_length = clamp_to(p.base_length, from, kGranuleBytes);
    uint32_t new_length = clamp_to(length, from, kGranuleBytes);
    uint32_t data_from = offset > from ? std::min(offset - from, kGranuleBytes) : 0;
    uint32_t data_to = clamp_to(end, from, kGranuleBytes);
    uint32_t known = old_length > 0 ? p.base_sums[g] : 0;
    uint32_t sum, covered;
    if (data_to <= data_from) {  // between the old end and the data: zeros
      sum = known;
      covered = old_length;
    } else if (data_from == 0 && data_to >= old_length) {
      sum = data_sum(*op, g);
      covered = data_to;
    } else if (data_from >= old_length) {
      sum = crc32c_extend_zeros(known, data_from - old_length);
      sum = crc32c_combine(sum, data_sum(*op, g), data_to - data_from);
      covered = data_to;
    } else if (p.known_sums) {
      p.sums[g] = sum_by_blocks(op, g);
      continue;
    } else {
      sum = old_sum(*op, from, from + data_from);
      sum = crc32c_combine(sum, data_sum(*op, g), data_to - data_from);
      covered = std::max(data_to, old_length);
      if (old_length > data_to) {
        sum = crc32c_combine(sum, old_sum(*op, from + data_to, from + old_length), old_length - data_to);
      }
    }
    p.sums[g] = crc32c_extend_zeros(sum, new_length - covered);
  }
}

// ------------------------------------------------------------------------------ checksums by block

// f(granule) for those that a deferred write changes in part, until it returns false.
template <typename F>
static bool each_partial_granule(const StageOp& op, F f) {
  const uint32_t from = op.offset, to = op.offset + op.length;
  for (uint32_t g = from / kGranuleBytes; g < granules_of(to); g++) {
    const bool starts = from <= g * kGranuleBytes;
    const bool ends = to >= std::min((g + 1) * kGranuleBytes, op.p.base_length);
    if (!(starts && ends) && !f(g)) return false;
  }
  return true;
}

static uint64_t granule_block(const StageOp& op, uint32_t granule) {
  return op.p.base_place + uint64_t{granule} * kBlocksOfGranule;
}

// Only whole granules are known by block.
static bool is_whole(const StageOp& op, uint32_t granule) {
  return (granule + 1) * kGranuleBytes <= std::min(op.p.base_stored, op.p.base_length);
}

// Whether the new checksums can be found without the old bytes.
bool ChunkStore::Impl::sums_are_known(const StageOp& op) {
  if (op.offset % kBlock != 0 || op.length % kBlock != 0) return false;  // they are part of the overlay
  return each_partial_granule(op, [&](uint32_t g) {
    return is_whole(op, g) && granule_sums.find(granule_block(op, g), op.p.base_sums[g]) != nullptr;
  });
}

// Verifies the granules in scratch memory that change in part, and remembers them by block. False: at least
// one isn't whole, or isn't right.
bool ChunkStore::Impl::learn_blocks(StageOp* op) {
  auto& p = op->p;
  if (p.path != kDeferred || !granule_sums.enabled()) return false;
  p.known_sums = each_partial_granule(*op, [&](uint32_t g) {
    if (!is_whole(*op, g)) return false;
    BlockSums blocks;
    const uint8_t* bytes = p.scratch + (g * kGranuleBytes - p.span_from);
    for (uint32_t i = 0; i < kBlocksOfGranule; i++) blocks[i] = crc32c(bytes + i * kBlock, kBlock);
    if (GranuleSums::combined(blocks) != p.base_sums[g]) return false;
    granule_sums.put(granule_block(*op, g), p.base_sums[g], blocks);
    return true;
  });
  return p.known_sums;
}

// Whole granules that the update wrote in place, with the blocks' checksums from its caller.
void ChunkStore::Impl::remember_written(const StageOp* op) {
  const auto& p = op->p;
  if (op->block_checksums == nullptr || !granule_sums.enabled() || p.place == 0) return;
  if (op->attributes.codec != 0 || write_offset(*op) % kBlock != 0) return;
  const uint32_t from = write_offset(*op), to = from + op->length;
  const auto first = static_cast<uint32_t>(round_up(from, kGranuleBytes) / kGranuleBytes);
  for (uint32_t g = first; (g + 1) * kGranuleBytes <= to; g++) {
    granule_sums.put_written(p.place + uint64_t{g} * kBlocksOfGranule, p.sums[g],
                             op->block_checksums + (g * kGranuleBytes - from) / kBlock);
  }
}

// The granule's checksum with the overlay's blocks in it, which are all whole ones.
uint32_t ChunkStore::Impl::sum_by_blocks(StageOp* op, uint32_t granule) {
  auto& p = op->p;
  BlockSums* known = granule_sums.find(granule_block(*op, granule), p.base_sums[granule]);
  FFS_CHECK(known != nullptr);
  const uint32_t first = granule * kBlocksOfGranule;
  const uint32_t from = std::max(p.overlay_block, first);
  const uint32_t to = std::min(p.overlay_block + p.overlay_blocks, first + kBlocksOfGranule);
  const bool given = op->piece_checksums != nullptr && op->length == kBlock && op->offset % kBlock == 0;
  const bool has_blocks = op->block_checksums != nullptr && op->offset % kBlock == 0;
  const uint32_t by_block = has_blocks ? op->length / static_cast<uint32_t>(kBlock) : 0;  // the whole ones
  uint32_t sum = p.base_sums[granule];
  for (uint32_t b = from; b < to; b++) {
    const uint32_t number = b - p.overlay_block;
    const uint32_t now = given               ? op->piece_checksums[0]
                         : number < by_block ? op->block_checksums[number]
                                             : crc32c(p.overlay + number * kBlock, kBlock);
    sum = GranuleSums::replaced(sum, b - first, (*known)[b - first], now);
    (*known)[b - first] = now;
  }
  granule_sums.changed(known, sum);
  return sum;
}

void ChunkStore::Impl::sum_truncate(StageOp* op) {
  auto& p = op->p;
  uint32_t n = p.new_length;
  if (op->kind != UpdateKind::truncate) return;  // remove, or an empty chunk
  if (n > p.base_length) {
    p.first_changed = p.base_length / kGranuleBytes;
    p.end_changed = granules_of(n);
  } else if (n < p.base_length && n % kGranuleBytes != 0) {
    p.first_changed = n / kGranuleBytes;
    p.end_changed = p.first_changed + 1;
  }
  for (uint32_t g = p.first_changed; g < p.end_changed; g++) {
    uint32_t from = g * kGranuleBytes;
    uint32_t old_length = clamp_to(p.base_length, from, kGranuleBytes);
    uint32_t new_length = clamp_to(n, from, kGranuleBytes);
    if (n > p.base_length) {
      p.sums[g] = crc32c_extend_zeros(old_length > 0 ? p.base_sums[g] : 0, new_length - old_length);
    } else if (p.path == kShrink) {
      p.sums[g] = old_sum(*op, from, n);
    } else {
      p.sums[g] = crc32c_extend_zeros(0, new_length);  // a cut among zeros
    }
  }
}

}  // namespace ffs::engine
