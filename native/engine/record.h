// Records of journal blocks and snapshot slices: bytes <-> structs (docs/disk_format.md, Blocks of
// records). Decoders are bounds-checked; what they give points into the block.
#pragma once

#include <cstdint>
#include <span>

#include "base/cursor.h"
#include "engine/chunk_store.h"
#include "engine/format.h"
#include "engine/index.h"

namespace ffs::engine {

struct OverlayView {
  uint32_t first_block = 0;
  uint32_t blocks = 0;
  const uint8_t* bytes = nullptr;
  uint64_t at = 0;  // replay: byte of the device where they stand, if `bytes` is null
};

constexpr uint32_t kMaxChainOverlays = 32;  // over one chunk, all versions together
constexpr uint32_t kMaxChainBytes = 128 * 1024;

// A record found in a block: its header and a reader over what follows it.
struct RecordView {
  RecordHeader header;
  std::span<const uint8_t> bytes;  // the whole record
  Reader body() const { return Reader(bytes.subspan(sizeof(RecordHeader))); }
};

// The next record; false at the end or if it is damaged (then reader.ok() is false).
bool next_record(Reader& reader, RecordView* record);

// The fixed part of a record, as far as this program knows it, and a reader after it.
template <typename Fixed>
bool fixed_part(const RecordView& record, Fixed* fixed, Reader* after) {
  Reader body = record.body();
  if (record.header.fixed_bytes < sizeof(Fixed)) return false;
  *fixed = body.value<Fixed>();
  body.skip(record.header.fixed_bytes - sizeof(Fixed));
  *after = body;
  return body.ok();
}

struct StageView {
  StageRecord fixed;
  std::span<const uint32_t> sums;  // changed granules (stage), all (pending)
  uint32_t overlay_count = 0;
  OverlayView overlays[kMaxChainOverlays];
};
bool decode_stage(const RecordView& record, StageView* view);

struct ChunkView {
  ChunkRecord fixed;
  std::span<const uint32_t> sums;
  uint32_t overlay_count = 0;
  OverlayView overlays[kMaxChainOverlays];
  std::span<const uint8_t> unknown;  // trailing bytes of a longer fixed part
};
bool decode_chunk(const RecordView& record, ChunkView* view);

size_t stage_bytes(uint32_t sums, std::span<const OverlayView> overlays);
size_t chunk_bytes(uint32_t sums, std::span<const OverlayView> overlays, size_t unknown);

// Encoders write one record; the writer must have room.
void encode_stage(Writer& writer, RecordType type, uint16_t target, const StageRecord& fixed,
                  std::span<const uint32_t> sums, std::span<const OverlayView> overlays);
void encode_chunk(Writer& writer, uint16_t target, const ChunkRecord& fixed, std::span<const uint32_t> sums,
                  std::span<const OverlayView> overlays, std::span<const uint8_t> unknown);

template <typename Fixed>
constexpr size_t simple_bytes() {
  return pad8(sizeof(RecordHeader) + sizeof(Fixed));
}

template <typename Fixed>
void encode_simple(Writer& writer, RecordType type, uint16_t target, const Fixed& fixed) {
  RecordHeader header{};
  header.bytes = static_cast<uint32_t>(simple_bytes<Fixed>());
  header.type = static_cast<uint8_t>(type);
  header.version = 1;
  header.target = target;
  header.fixed_bytes = sizeof(Fixed);
  writer.value(header);
  writer.value(fixed);
  writer.zeros(header.bytes - sizeof header - sizeof fixed);
}

inline size_t chain_state_bytes(size_t bytes) {
  return pad8(sizeof(RecordHeader) + sizeof(ChainStateRecord) + bytes);
}
void encode_chain_state(Writer& writer, uint16_t target, std::span<const uint8_t> state);

DiskImage to_disk(const Image& image);
// False if the fields contradict each other (lengths, class, tag, kind).
bool from_disk(const DiskImage& disk, Image* image);

// Seals a block: fills the header's fields that depend on the content and the checksum.
void seal_block(uint8_t* block, BlockHeader header);
// The header at `block`, if its magic and store are right and its checksum holds within `available` bytes.
bool check_block(const uint8_t* block, size_t available, uint32_t magic, uint64_t store_id,
                 BlockHeader* header);

}  // namespace ffs::engine
