// The structures of tests/golden/disk/, built by the engine's encoders and compared byte by byte.
// The Python reader of the same files knows nothing of this code (tests/unit/test_disk_format.py).
// FFS_WRITE_GOLDEN=1 writes them anew: only for a new structure, never to make a test pass.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "engine/record.h"
#include "engine/store_impl.h"

using namespace ffs;
using namespace ffs::engine;

namespace {

constexpr uint64_t kStoreId = 0x1122334455667788;

std::string golden_path(const std::string& name) {
  const std::string file = "tests/golden/disk/" + name + ".hex";
  for (const std::string up : {"", "../", "../../", "../../../"}) {
    if (std::ifstream(up + file).good()) return up + file;
  }
  const std::string here = __FILE__;
  return here.substr(0, here.rfind("native/test/")) + file;
}

// Rows of 32 bytes as "offset: hex"; rows of zeros are left out; the first line says the size.
void write_golden(const std::string& name, const std::vector<uint8_t>& bytes) {
  std::ofstream out(golden_path(name));
  REQUIRE(out.good());
  out << "size: " << bytes.size() << "\n";
  for (size_t at = 0; at < bytes.size(); at += 32) {
    std::string hex;
    bool zero = true;
    for (size_t i = at; i < std::min(at + 32, bytes.size()); i++) {
      char pair[3];
      std::snprintf(pair, sizeof pair, "%02x", bytes[i]);
      hex += pair;
      zero &= bytes[i] == 0;
    }
    if (!zero) out << at << ": " << hex << "\n";
  }
}

std::vector<uint8_t> read_golden(const std::string& name) {
  std::ifstream in(golden_path(name));
  REQUIRE_MESSAGE(in.good(), "no golden file ", name);
  std::vector<uint8_t> bytes;
  std::string line;
  while (std::getline(in, line)) {
    size_t colon = line.find(": ");
    std::string text = line.substr(colon + 2);
    if (line.substr(0, colon) == "size") {
      bytes.resize(std::stoul(text));
      continue;
    }
    size_t at = std::stoul(line.substr(0, colon));
    REQUIRE(at + text.size() / 2 <= bytes.size());
    for (size_t i = 0; i < text.size(); i += 2) {
      bytes[at + i / 2] = static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16));
    }
  }
  return bytes;
}

void compare(const std::string& name, const std::vector<uint8_t>& built) {
  if (std::getenv("FFS_WRITE_GOLDEN") != nullptr) write_golden(name, built);
  std::vector<uint8_t> stored = read_golden(name);
  REQUIRE(stored.size() == built.size());
  for (size_t i = 0; i < stored.size(); i++) {
    REQUIRE_MESSAGE(stored[i] == built[i], name << " differs at byte " << i);
  }
}

ChunkKey golden_key() {
  return ChunkKey::of_file(0x0102030405060708, 9);
}
Version golden_version(uint64_t update) {
  return {{3, 4}, update};
}

DiskImage golden_image(uint64_t update) {
  DiskImage image{};
  image.version = golden_version(update);
  image.place = 0x5000;
  image.stored_length = 100'000;
  image.logical_length = 131'072;
  image.expiry_ms = 1'700'000'000'123;
  image.place_class = 5;
  image.flags = kFlagPinned;
  image.tag_bytes = 16;
  image.kind = static_cast<uint8_t>(UpdateKind::write);
  image.granules = 2;
  for (uint8_t i = 0; i < 16; i++) image.tag[i] = static_cast<uint8_t>(0xa0 + i);
  return image;
}

StageRecord golden_stage(uint64_t update) {
  StageRecord stage{};
  stage.key = golden_key();
  stage.base = golden_version(update - 1);
  stage.image = golden_image(update);
  stage.client = 0xc11e47;
  stage.sequence = 41;
  stage.channel = 6;
  stage.chain = 7;
  stage.space_epoch = 2;
  stage.write_offset = 65'536;
  stage.write_length = 4'096;
  stage.first_changed = 1;
  stage.changed_granules = 1;
  stage.overlay_count = 1;
  return stage;
}

std::vector<uint8_t> overlay_block() {
  std::vector<uint8_t> block(kBlock);
  for (size_t i = 0; i < block.size(); i++) block[i] = static_cast<uint8_t>(i * 7 + i / 256);
  return block;
}

std::vector<uint8_t> sealed(Writer& writer, BlockHeader header, std::vector<uint8_t>& memory) {
  REQUIRE(writer.ok());
  header.store_id = kStoreId;
  header.used_bytes = static_cast<uint32_t>(sizeof header + writer.size());
  header.span_blocks = static_cast<uint32_t>(round_up(header.used_bytes, kBlock) / kBlock);
  header.incarnation = 12;
  seal_block(memory.data(), header);
  memory.resize(header.span_blocks * kBlock);
  return memory;
}

}  // namespace

TEST_CASE("golden: superblock") {
  Superblock super{};
  std::memcpy(super.magic, kSuperblockMagic, sizeof super.magic);
  super.format_version = 1;
  super.sequence = 7;
  super.compat = 0x10;
  for (uint8_t i = 0; i < 16; i++) super.cluster[i] = i, super.device[i] = static_cast<uint8_t>(0xf0 + i);
  super.store_id = kStoreId;
  super.created_ms = 1'700'000'000'000;
  super.size_bytes = 1ull << 30;
  super.sector_bytes = 512;
  super.slab_bytes = kSlabBytes;
  super.max_chunks = 4096;
  super.journal_offset = kJournalOffset;
  super.journal_bytes = 32ull << 20;
  super.snapshot_offset[0] = 33ull << 20;
  super.snapshot_offset[1] = 51ull << 20;
  super.snapshot_bytes = 18ull << 20;
  super.data_offset = 69ull << 20;
  super.slab_count = 59;
  super.snapshot_id = 3;
  super.snapshot_used = 12'288;
  super.snapshot_area = 1;
  super.snapshot_slices = 3;
  super.replay_offset = 40'960;
  super.replay_block = 1'001;
  super.replay_record = 5'005;
  super.replay_incarnation = 12;
  std::strncpy(super.written_by, "ffs 0.1.0", sizeof super.written_by);
  super.target_count = 2;
  super.targets[0] = 101;
  super.targets[1] = 0xffeeddccbbaa9988;
  seal_superblock(&super);
  std::vector<uint8_t> bytes(sizeof super);
  std::memcpy(bytes.data(), &super, sizeof super);
  compare("superblock", bytes);
  std::vector<uint8_t> stored = read_golden("superblock");
  std::vector<uint8_t> other(kBlock);
  auto chosen = choose_superblock(stored.data(), other.data(), 1ull << 30);
  REQUIRE(chosen.ok());
  CHECK(identity_of(*chosen).targets[1].value == 0xffeeddccbbaa9988);
}

TEST_CASE("golden: a journal block with each record") {
  std::vector<uint8_t> memory(kMaxBlockBytes);
  Writer writer(memory.data() + sizeof(BlockHeader), memory.size() - sizeof(BlockHeader));
  std::vector<uint8_t> block = overlay_block();
  uint32_t sum = 0x89abcdef;
  OverlayView overlay{16, 1, block.data()};
  encode_simple(writer, RecordType::opened, kDeviceRecord, OpenedRecord{12, 0, 1'700'000'000'456});
  encode_stage(writer, RecordType::stage, 1, golden_stage(22), {&sum, 1}, {&overlay, 1});
  encode_simple(writer, RecordType::commit, 1, CommitRecord{golden_key(), golden_version(22)});
  encode_simple(writer, RecordType::refuse, 1,
                RefuseRecord{golden_key(), golden_version(23), 0xc11e47, 42, 6, 7, 28, 0});
  encode_simple(writer, RecordType::retry, 0,
                RetryRecord{golden_key(), golden_version(21), 0xc11e48, 43, 8, 9, 0, 2, {}});
  encode_simple(writer, RecordType::fence, kDeviceRecord, FenceRecord{0xc11e49});
  encode_simple(writer, RecordType::space_epoch, 0, SpaceEpochRecord{0x77, 5, 1'700'000'100'000});
  encode_simple(writer, RecordType::expire_spaces, 0, ExpireSpacesRecord{1'600'000'000'000});
  encode_chain_state(writer, 1, {reinterpret_cast<const uint8_t*>("chain"), 5});
  BlockHeader header{};
  header.magic = kJournalMagic;
  header.sequence = 1'001;
  header.mark = 1'000;
  header.first_record = 5'005;
  header.record_count = 9;
  compare("journal_block", sealed(writer, header, memory));

  std::vector<uint8_t> stored = read_golden("journal_block");
  auto* aligned = static_cast<uint8_t*>(std::aligned_alloc(kBlock, stored.size()));
  std::memcpy(aligned, stored.data(), stored.size());
  BlockHeader found;
  REQUIRE(check_block(aligned, stored.size(), kJournalMagic, kStoreId, &found));
  Reader reader(aligned + sizeof found, found.used_bytes - sizeof found);
  RecordView record;
  std::vector<int> types;
  while (next_record(reader, &record)) {
    types.push_back(record.header.type);
    StageView view;
    if (record.header.type != static_cast<uint8_t>(RecordType::stage)) continue;
    REQUIRE(decode_stage(record, &view));
    CHECK(view.sums[0] == 0x89abcdef);
    CHECK(view.overlays[0].first_block == 16);
    CHECK(std::memcmp(view.overlays[0].bytes, block.data(), kBlock) == 0);
    Image image;
    CHECK(from_disk(view.fixed.image, &image));
    CHECK(image.version == golden_version(22));
  }
  CHECK(reader.ok());
  CHECK(types == std::vector<int>{9, 1, 2, 3, 4, 5, 6, 7, 8});
  // Any flipped bit is noticed.
  for (size_t at = 0; at < found.used_bytes; at += 97) {
    aligned[at] ^= 0x20;
    BlockHeader damaged;
    CHECK_FALSE(check_block(aligned, stored.size(), kJournalMagic, kStoreId, &damaged));
    aligned[at] ^= 0x20;
  }
  std::free(aligned);
}

TEST_CASE("golden: the records of recovery") {
  std::vector<uint8_t> memory(kMaxBlockBytes);
  Writer writer(memory.data() + sizeof(BlockHeader), memory.size() - sizeof(BlockHeader));
  const uint32_t sums[2] = {0x01234567, 0x89abcdef};
  StageRecord install{};
  install.key = golden_key();
  install.base = golden_version(22);  // a repair: only over this version
  install.image = golden_image(22);
  install.image.kind = static_cast<uint8_t>(UpdateKind::replace);
  install.image.stored_length = 131'072;
  install.write_length = 131'072;
  install.changed_granules = 2;
  install.flags = kStageCommitNow | kInstallKeepsPendings;
  encode_stage(writer, RecordType::install, 1, install, sums, {});
  encode_simple(writer, RecordType::erase, 1, EraseRecord{golden_key()});
  encode_simple(writer, RecordType::reset_target, 1, TargetRecord{});
  encode_simple(writer, RecordType::release_target, 0, TargetRecord{});
  BlockHeader header{};
  header.magic = kJournalMagic;
  header.sequence = 1'002;
  header.mark = 1'001;
  header.first_record = 5'014;
  header.record_count = 4;
  compare("journal_recovery", sealed(writer, header, memory));

  State state(64, 2, nullptr);
  std::vector<uint64_t> aligned(memory.size() / 8);
  std::memcpy(aligned.data(), memory.data(), memory.size());
  auto bytes = reinterpret_cast<const uint8_t*>(aligned.data());
  Reader reader(bytes + sizeof(BlockHeader), writer.size());
  RecordView record;
  REQUIRE(next_record(reader, &record));
  StageView view;
  REQUIRE(decode_stage(record, &view));
  REQUIRE(state.install(1, view.fixed, view.sums) == nullptr);
  CHECK(state.index[state.index.find(1, golden_key())].image.version == golden_version(22));
  CHECK(state.usage[1].logical_bytes == 131'072);
}

TEST_CASE("golden: a chunk that moved") {
  std::vector<uint8_t> memory(kMaxBlockBytes);
  Writer writer(memory.data() + sizeof(BlockHeader), memory.size() - sizeof(BlockHeader));
  encode_simple(writer, RecordType::move, 1, MoveRecord{golden_key(), golden_version(22), 0x6000, 5, {}});
  BlockHeader header{};
  header.magic = kJournalMagic;
  header.sequence = 1'003;
  header.mark = 1'002;
  header.first_record = 5'018;
  header.record_count = 1;
  compare("journal_move", sealed(writer, header, memory));
}

TEST_CASE("golden: a chunk that shares its slot") {
  std::vector<uint8_t> memory(kMaxBlockBytes);
  Writer writer(memory.data() + sizeof(BlockHeader), memory.size() - sizeof(BlockHeader));
  encode_simple(writer, RecordType::share, 1,
                ShareRecord{golden_key(), golden_version(22), 0x6000, 5, kShareStays, {}});
  BlockHeader header{};
  header.magic = kJournalMagic;
  header.sequence = 1'003;
  header.mark = 1'002;
  header.first_record = 5'018;
  header.record_count = 1;
  compare("journal_share", sealed(writer, header, memory));
}

TEST_CASE("golden: the digest of a chunk, as docs/disk_format.md has it") {
  const uint32_t sums[3] = {0x01234567, 0x89abcdef, 0x0badcafe};
  ChunkInfo info;
  info.key = golden_key();
  info.version = golden_version(22);
  info.length = 140'000;
  info.stored_length = 100'000;  // the rest are zeros: doesn't count
  info.attributes.expiry_ms = 1'700'000'000'123;
  info.attributes.flags = kFlagPinned | kFlagSharedSlot;
  info.attributes.tag_bytes = 3;
  info.attributes.tag = {1, 2, 3, 99};  // 99 isn't part of it
  info.checksums = sums;
  CHECK(chunk_digest(info) == 0xd28b5f883ae05290);
  info.attributes.codec = 2;  // then the encoded length counts
  info.checksums = std::span(sums).first(2);
  CHECK(chunk_digest(info) == 0x0b7067fb1f5886b5);
}

TEST_CASE("golden: a snapshot slice") {
  std::vector<uint8_t> memory(kMaxBlockBytes);
  Writer writer(memory.data() + sizeof(BlockHeader), memory.size() - sizeof(BlockHeader));
  std::vector<uint8_t> block = overlay_block();
  uint32_t sums[2] = {0x01234567, 0x89abcdef};
  OverlayView overlay{3, 1, block.data()};
  ChunkRecord chunk{};
  chunk.key = golden_key();
  chunk.image = golden_image(21);
  chunk.accessed = 0x01020304;
  chunk.accessed_before = 0x01020300;
  chunk.overlay_count = 1;
  uint8_t later[8] = {1, 2, 3, 4, 5, 6, 7, 8};  // a field that a later version added
  encode_chunk(writer, 1, chunk, sums, {&overlay, 1}, later);
  StageRecord pending = golden_stage(22);
  pending.first_changed = 0;
  pending.changed_granules = 2;
  pending.overlay_count = 0;
  encode_stage(writer, RecordType::pending, 1, pending, sums, {});
  BlockHeader header{};
  header.magic = kSnapshotMagic;
  header.sequence = 2;
  header.mark = 3;
  header.first_record = 5'017;
  header.record_count = 2;
  header.flags = kSliceIsLast;
  compare("snapshot_slice", sealed(writer, header, memory));

  std::vector<uint8_t> stored = read_golden("snapshot_slice");
  Reader reader(stored.data() + sizeof(BlockHeader), writer.size());
  RecordView record;
  REQUIRE(next_record(reader, &record));
  ChunkView view;
  REQUIRE(decode_chunk(record, &view));
  CHECK(view.sums[1] == 0x89abcdef);
  CHECK(view.unknown.size() == 8);
  CHECK(view.unknown[7] == 8);
  CHECK(view.fixed.accessed == 0x01020304);
  CHECK(view.fixed.accessed_before == 0x01020300);
}
