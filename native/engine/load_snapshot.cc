// The snapshot, read ahead and put into the state as it comes (docs/disk_format.md, Snapshots). Its chunks
// stand in the order of the index, which is built from them without a search.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "engine/recovery.h"

namespace ffs::engine {

namespace {

// A range of the device in order, with several reads in flight.
class ReadAhead {
 public:
  ReadAhead(io::Io& io, io::File file, uint64_t from, uint64_t bytes) : io_(io), file_(file) {
    at_ = next_ = from;
    end_ = from + bytes;
    for (Piece& piece : pieces_) {
      piece.memory = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kLeadBytes + kPieceBytes));
      FFS_CHECK(piece.memory != nullptr);
      start(piece);
    }
  }
  ~ReadAhead() {
    for (Piece& piece : pieces_) {
      if (piece.bytes > 0) io::wait_for(io_, piece.op);
      std::free(piece.memory);
    }
  }
  ReadAhead(const ReadAhead&) = delete;

  uint64_t at() const { return at_; }  // on the device

  // What comes next: a whole slice, if one is there. Valid until the next call.
  Result<std::span<const uint8_t>> front() {
    while (have_.size() < kLeadBytes && pieces_[take_].bytes > 0) FFS_TRY_STATUS(take());
    return have_;
  }
  void skip(uint64_t bytes) {
    FFS_CHECK(bytes <= have_.size());
    have_ = have_.subspan(bytes);
    at_ += bytes;
  }

 private:
  static constexpr uint32_t kLeadBytes = kMaxBlockBytes;
  static constexpr uint32_t kPieceBytes = 1u << 20;
  struct Piece {
    io::Op op;
    bool done = false;
    uint32_t bytes = 0;  // being read, or read and not yet taken
    uint8_t* memory = nullptr;
  };

  void start(Piece& piece) {
    piece.bytes = static_cast<uint32_t>(std::min<uint64_t>(kPieceBytes, end_ - next_));
    if (piece.bytes == 0) return;
    piece.done = false;
    piece.op.owner = &piece.done;
    piece.op.done = io::mark_done;
    io_.read(&piece.op, file_, next_, piece.memory + kLeadBytes, piece.bytes);
    next_ += piece.bytes;
  }

  // Goes on to the next piece; what is left of the one before is moved in front of it.
  Status take() {
    Piece& piece = pieces_[take_];
    const int32_t rc = io::wait_for(io_, piece.op);
    const uint32_t bytes = std::exchange(piece.bytes, 0);
    if (rc != static_cast<int32_t>(bytes)) {
      return open_error(rc < 0 ? -rc : EIO, "reading the device", "%u bytes at byte %llu", bytes,
                        number_of(at_ + have_.size()));
    }
    uint8_t* begin = piece.memory + kLeadBytes - have_.size();
    if (!have_.empty()) std::memcpy(begin, have_.data(), have_.size());
    have_ = {begin, have_.size() + bytes};
    // The piece before is empty now.
    if (taken_any_) start(pieces_[(take_ + pieces_.size() - 1) % pieces_.size()]);
    taken_any_ = true;
    take_ = (take_ + 1) % pieces_.size();
    return ok_status();
  }

  io::Io& io_;
  io::File file_;
  uint64_t at_, next_, end_;
  std::array<Piece, 5> pieces_;
  size_t take_ = 0;
  bool taken_any_ = false;
  std::span<const uint8_t> have_;
};

}  // namespace

// ------------------------------------------------------------------------------ overlays

// Bytes for the state to take over. Those of the snapshot and of flushed records stay where they are, beyond
// a budget: most are overwritten by later records, and the others are fetched when they are applied.
std::span<const OverlayView> Recovery::take_overlays(const OverlayView* overlays, uint32_t count) {
  taken_.assign(overlays, overlays + count);
  for (OverlayView& o : taken_) {
    const uint64_t size = o.blocks * kBlock;
    if (source_ != nullptr && s_.heap_overlay_bytes + size > s_.options.replay_overlay_bytes) {
      o.at = source_at_ + static_cast<uint64_t>(o.bytes - source_);
      o.bytes = nullptr;
      continue;
    }
    auto bytes = static_cast<uint8_t*>(std::aligned_alloc(kBlock, size));
    FFS_CHECK(bytes != nullptr);
    std::memcpy(bytes, o.bytes, size);
    s_.heap_overlay_bytes += size;
    o.bytes = bytes;
  }
  return taken_;
}

// The state hasn't taken them.
void Recovery::give_up_overlays() {
  for (const OverlayView& o : taken_) s_.overlay_unused(const_cast<uint8_t*>(o.bytes), o.blocks);
  taken_.clear();
}

// ------------------------------------------------------------------------------ the slices

Status Recovery::apply_snapshot_record(const RecordView& record, OrderedKey* last, bool in_order) {
  auto type = static_cast<RecordType>(record.header.type);
  if (type != RecordType::chunk && type != RecordType::pending) return apply_table(record);
  if (record.header.target >= super_.target_count)
    return open_error(EBADMSG, "the snapshot is damaged", "a chunk of no target");
  const char* wrong = "a record doesn't parse";
  const bool chunk = type == RecordType::chunk;
  ChunkView view;
  StageView stage;
  if (chunk ? decode_chunk(record, &view) : decode_stage(record, &stage)) {
    const OrderedKey key{record.header.target, chunk ? view.fixed.key : stage.fixed.key};
    // Pending versions follow the committed one of their chunk.
    const bool fits = !in_order || first_of_snapshot_ || (chunk ? key > *last : key >= *last);
    taken_.clear();
    if (!fits) {
      wrong = "chunks stand out of order";
    } else if (chunk) {
      wrong = s_.state->restore_chunk(key.first, view, take_overlays(view.overlays, view.overlay_count),
                                      in_order);
    } else {
      wrong = s_.state->restore_pending(key.first, stage, take_overlays(stage.overlays, stage.overlay_count));
    }
    if (wrong != nullptr) give_up_overlays();
    *last = key;
    first_of_snapshot_ = false;
  }
  if (wrong == nullptr) return ok_status();
  return open_error(EBADMSG, "the snapshot is damaged", "%s, snapshot %llu", wrong,
                    number_of(super_.snapshot_id));
}

Status Recovery::load_slice(const BlockHeader& header, std::span<const uint8_t> bytes, OrderedKey* last) {
  Reader reader(bytes);
  RecordView record;
  uint32_t count = 0;
  for (; next_record(reader, &record); count++) FFS_TRY_STATUS(apply_snapshot_record(record, last, true));
  if (!reader.ok() || count != header.record_count) {
    return open_error(EBADMSG, "the snapshot is damaged", "records of slice %llu",
                      number_of(header.sequence));
  }
  snapshot_number_ = std::max(snapshot_number_, header.first_record);
  if ((header.flags & kSliceHasTables) != 0) {
    tables_number_ = header.first_record;
    tables_seen_ = true;
  } else {
    covers_.push_back({*last, (header.flags & kSliceIsLast) != 0, header.first_record});
  }
  return ok_status();
}

Status Recovery::load_snapshot() {
  if (super_.snapshot_area == kNoArea) return ok_status();
  if (super_.snapshot_area > 1 || super_.snapshot_used > super_.snapshot_bytes ||
      super_.snapshot_used % kBlock != 0)
    return open_error(EBADMSG, "the superblock is damaged", "it names a snapshot that can't be");
  ReadAhead stream(s_.io, s_.file, super_.snapshot_offset[super_.snapshot_area], super_.snapshot_used);
  OrderedKey last;
  for (uint32_t i = 0; i < super_.snapshot_slices; i++) {
    const uint64_t at = stream.at();
    FFS_TRY(std::span<const uint8_t> bytes, stream.front());
    if (bytes.empty()) return open_error(EBADMSG, "the snapshot is damaged", "it ends before slice %u", i);
    BlockHeader header;
    if (!check_block(bytes.data(), bytes.size(), kSnapshotMagic, super_.store_id, &header) ||
        header.mark != super_.snapshot_id || header.sequence != i || header.first_record >= kMostRecords ||
        header.span_blocks * kBlock > bytes.size()) {
      return open_error(EBADMSG, "the snapshot is damaged", "slice %u at byte %llu", i, number_of(at));
    }
    source_ = bytes.data();
    source_at_ = at;
    Status loaded =
        load_slice(header, bytes.subspan(sizeof header, header.used_bytes - sizeof header), &last);
    source_ = nullptr;
    FFS_TRY_STATUS(loaded);
    stream.skip(header.span_blocks * kBlock);
  }
  if (covers_.empty() || !covers_.back().to_end || !tables_seen_)
    return open_error(EBADMSG, "the snapshot is damaged", "its last slice is missing");
  return ok_status();
}

// ------------------------------------------------------------------------------ what it covers

// The last record whose effect on this chunk the snapshot shows.
uint64_t Recovery::cover_of(const OrderedKey& key) const {
  auto cover = std::lower_bound(covers_.begin(), covers_.end(), key,
                                [](const Cover& c, const OrderedKey& k) { return !c.to_end && c.last < k; });
  return cover != covers_.end() ? cover->number : 0;
}

// Whether the snapshot shows all of the record's effect already.
bool Recovery::covered(const RecordView& record, uint64_t number) const {
  OrderedKey key;
  if (about_chunk(record.header.type, record, &key)) return number <= cover_of(key);
  // What a record about a target does to each chunk is judged chunk by chunk. Tables come last.
  if (about_target(record)) return false;
  return number <= tables_number_;
}

}  // namespace ffs::engine
