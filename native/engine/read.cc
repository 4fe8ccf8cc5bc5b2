// Reads. Whole blocks go from the device straight to where the caller wants them; the rest (ends
// that aren't on block boundaries, granules to verify, overlays, zeros) passes through scratch
// memory and the sink. Both run at the same time; overlays are laid on when both are done.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "engine/store_impl.h"

namespace ffs::engine {

namespace {

constexpr uint32_t kPieceBytes = 256 * 1024;  // whole granules
constexpr uint32_t kZeroBytes = 64 * 1024;
alignas(4096) const uint8_t kZeros[kZeroBytes] = {};

uint32_t align_up(uint32_t n, uint32_t unit) {
  return (n + unit - 1) / unit * unit;
}
uint32_t align_down(uint32_t n, uint32_t unit) {
  return n / unit * unit;
}
constexpr uint32_t kBlock32 = static_cast<uint32_t>(kBlock);

bool takes_device_reads(const ReadOp& op) {
  if (op.memory == nullptr || (op.sink != nullptr && !op.region.registered())) return false;
  return (reinterpret_cast<uintptr_t>(op.memory) - op.offset) % kBlock == 0;
}

}  // namespace

// Lays the overlays over bytes [from, to) of the chunk, which stand at `memory`.
void ChunkStore::Impl::patch(uint32_t overlay, uint32_t from, uint32_t to, uint8_t* memory) const {
  if (overlay == 0) return;
  std::vector<OverlayView> list;
  state->list_overlays(overlay, 0, &list);
  for (const OverlayView& o : list) {
    uint32_t o_from = o.first_block * kBlock32, o_to = o_from + o.blocks * kBlock32;
    uint32_t begin = std::max(from, o_from), end = std::min(to, o_to);
    if (begin < end) std::memcpy(memory + (begin - from), o.bytes + (begin - o_from), end - begin);
  }
}

// What a read says before anything is known of it.
void ChunkStore::Impl::begin(ReadOp* op) {
  op->store_kind = kReadKind;
  op->store = this;
  op->error = 0;
  op->what = nullptr;
  op->read_length = op->granule_count = op->first_granule = op->chunk_length = op->readable_length = 0;
  op->pending = false;
  op->version = Version{};
  auto& p = op->p;
  p.place = 0;
  p.overlay = 0;
  p.scratch = nullptr;
  p.in_flight = 0;
}

void ChunkStore::Impl::read(ReadOp* op) {
  begin(op);
  auto& p = op->p;
  if (slot_of_target(op->target) < 0) return fail_later(op, EINVAL, "no such target on this device");
  int index = target_index(op->target);
  uint32_t chunk = index >= 0 ? state->index.find(static_cast<uint16_t>(index), op->key) : 0;
  const Image* image = chunk != 0 ? choose_image(*op, chunk, &op->pending) : nullptr;
  if (image == nullptr || image->kind() == UpdateKind::remove)
    return fail_later(op, ENOENT, "no such chunk or version");
  if (op->memory == nullptr && op->sink == nullptr && op->length > 0) {
    return fail_later(op, EINVAL, "a read without a destination");
  }
  counters.reads++;
  describe(op, *image);
  plan_read(op, *image);
  reads_in_flight++;
  if (p.place != 0) ref_slot(p.place);
  state->ref_overlay(p.overlay);
  const bool waits = !read_waiters.empty() && p.next < p.scratch_end;
  if (waits || !begin_read(op)) {
    read_waiters.push(op);
  } else if (p.in_flight == 0 && p.next >= p.scratch_end) {
    end_read(op, true);  // needs no device; `done` isn't for the starting call
  } else {
    read_progress(op);
  }
}

const Image* ChunkStore::Impl::choose_image(const ReadOp& op, uint32_t chunk, bool* pending) const {
  const Image& committed = state->index[chunk].image;
  *pending = false;
  if (op.at_least.none()) return committed.version.none() ? nullptr : &committed;
  bool enough = op.exact_version ? committed.version == op.at_least : committed.version >= op.at_least;
  if (enough) return &committed;
  const Pending* found = state->find_pending(chunk, op.at_least);
  if (found != nullptr && found->arriving) found = nullptr;
  *pending = found != nullptr;
  return found != nullptr ? &found->image : nullptr;
}

// The version, the range as far as there are bytes, and the checksums of its whole granules.
void ChunkStore::Impl::describe(ReadOp* op, const Image& image) const {
  auto& p = op->p;
  op->version = image.version;
  op->chunk_length = image.logical;
  op->attributes = image.attributes();
  p.readable = op->readable_length = image.codec == 0 ? image.logical : image.stored;
  uint32_t from = std::min(op->offset, p.readable);
  uint32_t to = from + std::min(op->length, p.readable - from);
  op->read_length = to - from;
  p.from = from;
  p.to = to;
  uint32_t granules = image.granules();
  op->first_granule = align_up(from, kGranuleBytes) / kGranuleBytes;
  uint32_t end_granule = to == p.readable ? granules : to / kGranuleBytes;
  op->granule_count = end_granule > op->first_granule && to > from ? end_granule - op->first_granule : 0;
  if (op->checksums != nullptr && op->granule_count > 0) {
    const uint32_t* sums = state->index.sums.at(image.sums, granules);
    std::memcpy(op->checksums, sums + op->first_granule, op->granule_count * sizeof(uint32_t));
  }
}

// Splits the range: [direct_from, direct_to) comes by one device read; what lies before and after
// it (as far as bytes are stored) goes through scratch memory in pieces; the rest is zeros.
void ChunkStore::Impl::plan_read(ReadOp* op, const Image& image) {
  auto& p = op->p;
  p.stored = image.stored;
  p.place = image.place;
  p.overlay = image.overlay;
  const uint32_t from = p.from, to = p.to, granules = image.granules();
  bool verify = op->verify_partial || op->verify_whole;
  if (verify && granules > 0)
    std::memcpy(p.sums, state->index.sums.at(image.sums, granules), granules * sizeof(uint32_t));

  uint32_t stored_to = std::clamp(p.stored, from, to);
  // What must go through scratch memory at either end is a part of a block, or of a granule to verify.
  uint32_t unit = op->verify_partial ? kGranuleBytes : kBlock32;
  p.direct_from = align_up(from, unit);
  bool to_end = op->verify_partial && to == p.readable;  // the last granule is whole
  p.direct_to = to_end ? align_down(stored_to, kBlock32) : align_down(stored_to, unit);
  if (op->verify_whole || !takes_device_reads(*op) || p.direct_to <= p.direct_from)
    p.direct_from = p.direct_to = from;
  if (p.direct_from == p.direct_to) p.direct_from = p.direct_to = from;
  p.verify = verify;
  p.next = from;
  p.scratch_end = stored_to;
  skip_direct(op);
}

// `next` moves over what the device read delivers.
void ChunkStore::Impl::skip_direct(ReadOp* op) {
  auto& p = op->p;
  if (p.direct_to > p.direct_from && p.next >= p.direct_from && p.next < p.direct_to) p.next = p.direct_to;
}

bool ChunkStore::Impl::begin_read(ReadOp* op) {
  auto& p = op->p;
  if (p.next < p.scratch_end) {
    // Beside a device read only the ends come this way, each within one block or granule.
    uint32_t unit = p.verify ? kGranuleBytes : kBlock32;
    uint32_t all = align_up(p.scratch_end, unit) - align_down(p.next, unit);
    p.scratch_bytes = p.direct_to > p.direct_from ? unit : std::min(all, kPieceBytes);
    p.scratch = scratch->allocate(p.scratch_bytes);
    if (p.scratch == nullptr) return false;
  }
  auto done = [](io::Op* io_op) {
    auto read_op = static_cast<ReadOp*>(io_op->owner);
    auto impl = static_cast<Impl*>(read_op->store);
    const bool piece = io_op == &read_op->p.io2;
    const auto& done_p = read_op->p;
    const uint32_t asked =
        piece ? done_p.piece_to - done_p.piece_from : done_p.direct_to - done_p.direct_from;
    if (io_op->result < 0 && read_op->error == 0)
      read_op->error = -io_op->result, read_op->what = "the device failed";
    if (io_op->result >= 0 && static_cast<uint32_t>(io_op->result) < asked && read_op->error == 0)
      read_op->error = EIO, read_op->what = "the device ends before the chunk does";
    if (piece) impl->read_piece_done(read_op);
    read_op->p.in_flight--;
    impl->read_progress(read_op);
  };
  op->io.owner = p.io2.owner = op;
  op->io.op_class = p.io2.op_class = op->op_class;
  op->io.done = p.io2.done = done;
  p.piece_from = p.piece_to = 0;
  if (p.direct_to > p.direct_from) {
    p.in_flight++;
    uint8_t* memory = op->memory + (p.direct_from - op->offset);
    io.read(&op->io, file, p.place * kBlock + p.direct_from, memory, p.direct_to - p.direct_from, op->region);
  }
  return true;
}

void ChunkStore::Impl::read_progress(ReadOp* op) {
  auto& p = op->p;
  bool piece_running = p.in_flight > 0 && p.piece_to > p.piece_from;
  if (!piece_running && op->error == 0 && p.next < p.scratch_end) start_read_piece(op);
  if (p.in_flight == 0) end_read(op, false);
}

void ChunkStore::Impl::start_read_piece(ReadOp* op) {
  auto& p = op->p;
  uint32_t unit = p.verify ? kGranuleBytes : kBlock32;
  p.piece_from = align_down(p.next, unit);
  uint32_t limit = p.direct_to > p.direct_from && p.next < p.direct_from ? p.direct_from : p.scratch_end;
  uint32_t to = std::min(align_up(limit, unit), align_up(p.stored, kBlock32));
  p.piece_to = std::min(to, p.piece_from + p.scratch_bytes);
  p.in_flight++;
  io.read(&p.io2, file, p.place * kBlock + p.piece_from, p.scratch, p.piece_to - p.piece_from,
          scratch->region_of(p.scratch));
}

void ChunkStore::Impl::read_piece_done(ReadOp* op) {
  auto& p = op->p;
  uint32_t from = p.piece_from, to = p.piece_to;
  p.piece_from = p.piece_to = 0;
  if (op->error != 0) return;
  patch(p.overlay, from, to, p.scratch);
  if (p.verify && !piece_is_right(*op, from, to)) {
    counters.checksum_errors++;
    op->error = EBADMSG;
    op->what = "a granule fails its checksum";
    return;
  }
  uint32_t limit = p.direct_to > p.direct_from && p.next < p.direct_from ? p.direct_from : p.scratch_end;
  uint32_t end = std::min(to, limit);
  deliver(op, p.next, p.scratch + (p.next - from), end - p.next);
  p.next = end;
  skip_direct(op);
}

// Granules of the piece, which begins at a granule.
bool ChunkStore::Impl::piece_is_right(const ReadOp& op, uint32_t from, uint32_t to) const {
  const auto& p = op.p;
  for (uint32_t g = from; g < to; g += kGranuleBytes) {
    uint32_t end = std::min(g + kGranuleBytes, p.readable);
    uint32_t stored_end = std::min(end, p.stored);
    uint32_t sum = crc32c_extend_zeros(crc32c(p.scratch + (g - from), stored_end - g), end - stored_end);
    if (sum != p.sums[g / kGranuleBytes]) return false;
  }
  return true;
}

void ChunkStore::Impl::deliver(ReadOp* op, uint32_t from, const uint8_t* bytes, uint32_t size) {
  if (op->sink == nullptr) {
    std::memcpy(op->memory + (from - op->offset), bytes, size);
    return;
  }
  int error = op->sink->put(from - op->offset, bytes, size);
  if (error != 0 && op->error == 0) op->error = error, op->what = "the destination refused the bytes";
}

void ChunkStore::Impl::deliver_zeros(ReadOp* op, uint32_t from, uint32_t to) {
  if (op->sink == nullptr) {
    if (to > from) std::memset(op->memory + (from - op->offset), 0, to - from);
    return;
  }
  while (from < to && op->error == 0) {
    uint32_t size = std::min(to - from, kZeroBytes);
    deliver(op, from, kZeros, size);
    from += size;
  }
}

// Over the part that the device delivered.
void ChunkStore::Impl::deliver_overlays(ReadOp* op) {
  auto& p = op->p;
  if (p.overlay == 0 || p.direct_to <= p.direct_from) return;
  std::vector<OverlayView> list;
  state->list_overlays(p.overlay, 0, &list);
  for (const OverlayView& o : list) {
    uint32_t o_from = o.first_block * kBlock32, o_to = o_from + o.blocks * kBlock32;
    uint32_t begin = std::max(p.direct_from, o_from), end = std::min(p.direct_to, o_to);
    if (begin < end) deliver(op, begin, o.bytes + (begin - o_from), end - begin);
  }
}

void ChunkStore::Impl::end_read(ReadOp* op, bool later) {
  auto& p = op->p;
  if (op->error == 0) {
    deliver_overlays(op);
    uint32_t zeros_from = std::clamp(p.stored, p.from, p.to);
    deliver_zeros(op, zeros_from, p.to);
  }
  if (p.scratch != nullptr) {
    scratch->release(p.scratch);
    p.scratch = nullptr;
    if (!stage_waiters.empty() || !read_waiters.empty()) schedule_pump();
  }
  if (p.place != 0) unref_slot(p.place);
  state->unref_overlay(p.overlay);
  reads_in_flight--;
  if (op->error != 0) op->read_length = op->granule_count = 0;
  counters.bytes_read += op->read_length;
  if (later) {
    fail_later(op, op->error, op->what);
  } else {
    finish(op, op->error, op->what);
  }
}

}  // namespace ffs::engine
