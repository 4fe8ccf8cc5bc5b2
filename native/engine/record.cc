#include "engine/record.h"

#include <cstring>

#include "base/crc32c.h"

namespace ffs::engine {

bool next_record(Reader& reader, RecordView* record) {
  if (reader.left() == 0) return false;
  Reader peek = reader;
  record->header = peek.value<RecordHeader>();
  uint32_t bytes = record->header.bytes;
  if (!peek.ok() || bytes % 8 != 0 || bytes < sizeof(RecordHeader) + record->header.fixed_bytes) {
    reader.fail();
    return false;
  }
  record->bytes = reader.bytes(bytes);
  return reader.ok();
}

namespace {

bool decode_sums(Reader& reader, uint32_t count, std::span<const uint32_t>* sums) {
  auto bytes = reader.bytes(pad8(count * sizeof(uint32_t)));
  if (!reader.ok() || count > kMaxGranules) return false;
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(uint32_t) != 0) return false;
  *sums = {reinterpret_cast<const uint32_t*>(bytes.data()), count};
  return true;
}

bool decode_overlays(Reader& reader, uint32_t count, OverlayView* overlays) {
  if (count > kMaxChainOverlays) return false;
  for (uint32_t i = 0; i < count; i++) {
    auto disk = reader.value<DiskOverlay>();
    constexpr uint64_t limit = kMaxChunkBytes / kBlock;
    if (!reader.ok() || disk.blocks == 0 || uint64_t{disk.first_block} + disk.blocks > limit) return false;
    overlays[i] = {disk.first_block, disk.blocks, nullptr};
  }
  for (uint32_t i = 0; i < count; i++) overlays[i].bytes = reader.bytes(overlays[i].blocks * kBlock).data();
  return reader.ok();
}

void encode_tail(Writer& writer, std::span<const uint32_t> sums, std::span<const OverlayView> overlays) {
  writer.bytes(sums.data(), sums.size_bytes());
  writer.zeros(pad8(sums.size_bytes()) - sums.size_bytes());
  for (const auto& overlay : overlays) writer.value(DiskOverlay{overlay.first_block, overlay.blocks});
  for (const auto& overlay : overlays) {
    FFS_CHECK(overlay.bytes != nullptr);
    writer.bytes(overlay.bytes, overlay.blocks * kBlock);
  }
}

size_t tail_bytes(uint32_t sums, std::span<const OverlayView> overlays) {
  size_t bytes = pad8(sums * sizeof(uint32_t));
  for (const auto& overlay : overlays) bytes += sizeof(DiskOverlay) + overlay.blocks * kBlock;
  return bytes;
}

RecordHeader header_of(RecordType type, uint16_t target, size_t bytes, size_t fixed_bytes) {
  RecordHeader header{};
  header.bytes = static_cast<uint32_t>(bytes);
  header.type = static_cast<uint8_t>(type);
  header.version = 1;
  header.target = target;
  header.fixed_bytes = static_cast<uint16_t>(fixed_bytes);
  return header;
}

}  // namespace

bool decode_stage(const RecordView& record, StageView* view) {
  Reader after(nullptr, 0);
  if (!fixed_part(record, &view->fixed, &after)) return false;
  view->overlay_count = view->fixed.overlay_count;
  return decode_sums(after, view->fixed.changed_granules, &view->sums) &&
         decode_overlays(after, view->overlay_count, view->overlays);
}

bool decode_chunk(const RecordView& record, ChunkView* view) {
  Reader after(nullptr, 0);
  if (!fixed_part(record, &view->fixed, &after)) return false;
  view->unknown = record.bytes.subspan(sizeof(RecordHeader) + sizeof(ChunkRecord),
                                       record.header.fixed_bytes - sizeof(ChunkRecord));
  view->overlay_count = view->fixed.overlay_count;
  return decode_sums(after, view->fixed.image.granules, &view->sums) &&
         decode_overlays(after, view->overlay_count, view->overlays);
}

size_t stage_bytes(uint32_t sums, std::span<const OverlayView> overlays) {
  return sizeof(RecordHeader) + sizeof(StageRecord) + tail_bytes(sums, overlays);
}

size_t chunk_bytes(uint32_t sums, std::span<const OverlayView> overlays, size_t unknown) {
  return sizeof(RecordHeader) + sizeof(ChunkRecord) + pad8(unknown) + tail_bytes(sums, overlays);
}

void encode_stage(Writer& writer, RecordType type, uint16_t target, const StageRecord& fixed,
                  std::span<const uint32_t> sums, std::span<const OverlayView> overlays) {
  FFS_CHECK(sums.size() == fixed.changed_granules && overlays.size() == fixed.overlay_count);
  size_t bytes = stage_bytes(static_cast<uint32_t>(sums.size()), overlays);
  writer.value(header_of(type, target, bytes, sizeof fixed));
  writer.value(fixed);
  encode_tail(writer, sums, overlays);
}

void encode_chunk(Writer& writer, uint16_t target, const ChunkRecord& fixed, std::span<const uint32_t> sums,
                  std::span<const OverlayView> overlays, std::span<const uint8_t> unknown) {
  FFS_CHECK(sums.size() == fixed.image.granules && overlays.size() == fixed.overlay_count);
  size_t bytes = chunk_bytes(static_cast<uint32_t>(sums.size()), overlays, unknown.size());
  writer.value(header_of(RecordType::chunk, target, bytes, sizeof fixed + pad8(unknown.size())));
  writer.value(fixed);
  writer.bytes(unknown.data(), unknown.size());
  writer.zeros(pad8(unknown.size()) - unknown.size());
  encode_tail(writer, sums, overlays);
}

void encode_chain_state(Writer& writer, uint16_t target, std::span<const uint8_t> state) {
  size_t bytes = chain_state_bytes(state.size());
  writer.value(header_of(RecordType::chain_state, target, bytes, sizeof(ChainStateRecord)));
  writer.value(ChainStateRecord{static_cast<uint32_t>(state.size()), 0});
  writer.bytes(state.data(), state.size());
  writer.zeros(bytes - sizeof(RecordHeader) - sizeof(ChainStateRecord) - state.size());
}

DiskImage to_disk(const Image& image) {
  DiskImage disk{};
  disk.version = image.version;
  disk.place = image.place;
  disk.stored_length = image.stored;
  disk.logical_length = image.logical;
  disk.expiry_ms = image.expiry_ms;
  disk.place_class = image.place == 0 ? kNoClass : static_cast<uint8_t>(image.place_class);
  disk.codec = image.codec;
  disk.flags = image.flags;
  disk.role = image.role;
  disk.tag_bytes = image.tag_bytes;
  disk.kind = static_cast<uint8_t>(image.kind_number);
  disk.granules = static_cast<uint16_t>(image.granules());
  std::memcpy(disk.tag, image.tag.data(), kMaxTagBytes);
  return disk;
}

bool from_disk(const DiskImage& disk, Image* image) {
  const bool has_place = disk.place != 0;
  const uint32_t counted = disk.codec == 0 ? disk.logical_length : disk.stored_length;
  const bool right =
      disk.kind >= 1 && disk.kind <= 4 && disk.tag_bytes <= kMaxTagBytes && disk.role <= kMaxRole &&
      !disk.version.none() && disk.stored_length <= kMaxChunkBytes && counted <= kMaxChunkBytes &&
      (disk.codec != 0 || disk.stored_length <= disk.logical_length) &&
      disk.granules == granules_of(counted) && has_place == (disk.place_class < kClasses) &&
      has_place == (disk.stored_length > 0) &&
      (!has_place ||
       (disk.stored_length <= slot_bytes(disk.place_class) && disk.place < 1ull << kPlaceBits)) &&
      (disk.kind != static_cast<uint8_t>(UpdateKind::remove) || (!has_place && disk.logical_length == 0));
  if (!right) return false;
  image->version = disk.version;
  image->place = disk.place;
  image->place_class = has_place ? disk.place_class : 0;
  image->stored = disk.stored_length;
  image->logical = disk.logical_length;
  image->kind_number = disk.kind;
  Attributes attributes{disk.expiry_ms, disk.flags, disk.role, disk.codec, disk.tag_bytes, {}};
  std::memcpy(attributes.tag.data(), disk.tag, kMaxTagBytes);
  image->set_attributes(attributes);
  image->flags = disk.flags;
  return true;
}

void seal_block(uint8_t* block, BlockHeader header) {
  header.crc = 0;
  std::memcpy(block, &header, sizeof header);
  header.crc = crc32c(block, header.used_bytes);
  std::memcpy(block + offsetof(BlockHeader, crc), &header.crc, sizeof header.crc);
}

bool check_block(const uint8_t* block, size_t available, uint32_t magic, uint64_t store_id,
                 BlockHeader* header) {
  if (available < sizeof *header) return false;
  std::memcpy(header, block, sizeof *header);
  if (header->magic != magic || header->store_id != store_id) return false;
  if (header->used_bytes < sizeof *header || header->used_bytes > kMaxBlockBytes) return false;
  if (header->used_bytes > available || header->span_blocks * kBlock < header->used_bytes) return false;
  BlockHeader unsealed = *header;
  unsealed.crc = 0;
  uint32_t crc = crc32c(&unsealed, sizeof unsealed);
  crc = crc32c_extend(crc, block + sizeof *header, header->used_bytes - sizeof *header);
  return crc == header->crc;
}

}  // namespace ffs::engine
