// Lengths, offsets and counts of the disk format around powers of two (S14 of docs/faults.md): each
// computation against a plain one in wider numbers.
#include <doctest/doctest.h>

#include <cstring>
#include <set>
#include <vector>

#include "engine/allocator.h"
#include "engine/record.h"
#include "engine/state.h"
#include "engine/store_impl.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

// 0, 1, 2^k - 1, 2^k, 2^k + 1 for all k, up to `most`, and `most`.
std::vector<uint64_t> boundaries(uint64_t most) {
  std::set<uint64_t> values{0, most};
  for (int k = 0; k < 64; k++) {
    for (uint64_t value : {(1ull << k) - 1, 1ull << k, (1ull << k) + 1}) {
      if (value <= most) values.insert(value);
    }
  }
  return {values.begin(), values.end()};
}

DiskImage image_of(uint32_t length, uint8_t place_class) {
  DiskImage image{};
  image.version = v(3);
  image.place = length > 0 ? 4'096 : 0;
  image.place_class = length > 0 ? place_class : kNoClass;
  image.stored_length = image.logical_length = length;
  image.kind = static_cast<uint8_t>(UpdateKind::write);
  image.granules = static_cast<uint16_t>((uint64_t{length} + 65'535) / 65'536);
  return image;
}

}  // namespace

TEST_CASE("boundaries: pads, granules and classes") {
  for (uint64_t n : boundaries(1ull << 62)) {
    CHECK(pad8(n) % 8 == 0);
    CHECK(pad8(n) - n < 8);
    for (uint64_t unit : {uint64_t{1}, kBlock, uint64_t{kGranuleBytes}, kSlabBytes}) {
      CHECK(round_up(n, unit) % unit == 0);
      CHECK(round_up(n, unit) - n < unit);
    }
  }
  for (uint64_t n : boundaries(kMaxChunkBytes)) {
    const uint32_t granules = granules_of(static_cast<uint32_t>(n));
    CHECK(uint64_t{granules} * kGranuleBytes >= n);
    CHECK((granules == 0) == (n == 0));
    if (n > 0) CHECK(uint64_t{granules - 1} * kGranuleBytes < n);
    if (n == 0) continue;
    const uint8_t place_class = Allocator::class_for(n);
    CHECK(place_class < kClasses);
    CHECK(slot_bytes(place_class) >= n);
    if (place_class > 0) CHECK(slot_bytes(place_class) / 2 < n);
  }
}

TEST_CASE(
    "boundaries: every length of a chunk passes memory and the device's form unchanged, or is refused") {
  for (uint64_t n : boundaries(UINT32_MAX)) {
    const auto length = static_cast<uint32_t>(n);
    const uint8_t least = n == 0 ? 0 : Allocator::class_for(std::min<uint64_t>(n, kSlabBytes));
    Image image;
    const bool taken = from_disk(image_of(length, least), &image);
    CHECK(taken == (n <= kMaxChunkBytes));
    if (!taken) continue;
    const DiskImage again = to_disk(image);
    const DiskImage first = image_of(length, least);
    CHECK(std::memcmp(&again, &first, sizeof first) == 0);
    DiskImage wrong = first;  // one granule more or less than the length has
    wrong.granules++;
    CHECK_FALSE(from_disk(wrong, &image));
    if (n > 0 && least > 0) {
      wrong = first;  // a slot too small
      wrong.place_class--;
      CHECK_FALSE(from_disk(wrong, &image));
    }
    // Encoded: the decoded length is anybody's.
    DiskImage coded = image_of(1, 0);
    coded.codec = 7;
    coded.logical_length = length;
    REQUIRE(from_disk(coded, &image));
    CHECK(to_disk(image).logical_length == length);
  }
  for (uint64_t n : boundaries(UINT64_MAX)) {
    Image image;
    DiskImage disk = image_of(1, 0);
    disk.expiry_ms = n;
    REQUIRE(from_disk(disk, &image));
    CHECK(uint64_t{image.expiry_ms} == std::min(n, kMaxExpiryMs));
    disk = image_of(1, 0);
    disk.place = n;
    const bool right = n > 0 && n < 1ull << kPlaceBits;
    CHECK(from_disk(disk, &image) == right);
    if (right) CHECK(uint64_t{image.place} == n);
    disk = image_of(1, 0);
    disk.version.update = n;
    REQUIRE(from_disk(disk, &image));
    CHECK(image.version.update == n);
  }
  for (uint32_t n = 0; n < 256; n++) {
    Image image;
    DiskImage disk = image_of(1, 0);
    disk.role = static_cast<uint8_t>(n);
    CHECK(from_disk(disk, &image) == (n <= kMaxRole));
    disk = image_of(1, 0);
    disk.tag_bytes = static_cast<uint8_t>(n);
    CHECK(from_disk(disk, &image) == (n <= kMaxTagBytes));
    disk = image_of(1, 0);
    disk.place_class = static_cast<uint8_t>(n);
    CHECK(from_disk(disk, &image) == (n < kClasses));
    disk = image_of(1, 0);
    disk.kind = static_cast<uint8_t>(n);
    CHECK(from_disk(disk, &image) == (n == 1 || n == 2 || n == 4));
    disk = image_of(1, 0);
    disk.flags = disk.codec = static_cast<uint8_t>(n);
    REQUIRE(from_disk(disk, &image));
    CHECK(to_disk(image).flags == n);
    CHECK(to_disk(image).codec == n);
  }
}

TEST_CASE("boundaries: records of every count of checksums and overlays have the size they were promised") {
  std::vector<uint8_t> overlay_bytes(16 * kBlock, 0x5a);
  std::vector<uint64_t> memory(kMaxBlockBytes / 8);
  auto bytes = reinterpret_cast<uint8_t*>(memory.data());
  for (uint64_t sums_count : boundaries(kMaxGranules)) {
    for (uint32_t overlay_count : {0u, 1u, 2u, 3u, 16u, 31u, kMaxChainOverlays}) {
      for (size_t unknown : {0u, 1u, 7u, 8u, 9u, 255u, 256u}) {
        const auto count = static_cast<uint32_t>(sums_count);
        std::vector<uint32_t> sums(count);
        for (uint32_t i = 0; i < count; i++) sums[i] = i * 0x01010101;
        std::vector<OverlayView> overlays;
        for (uint32_t i = 0; i < overlay_count; i++)
          overlays.push_back({i * 17, i == 0 ? 1u : 1u + i % 2, overlay_bytes.data()});
        std::vector<uint8_t> extra(unknown, 0x77);
        ChunkRecord fixed{};
        fixed.key = key_of(3);
        fixed.image.granules = static_cast<uint16_t>(count);
        fixed.overlay_count = static_cast<uint16_t>(overlay_count);
        const size_t promised = chunk_bytes(count, overlays, unknown);
        CHECK(promised % 8 == 0);
        REQUIRE(promised < kMaxBlockBytes);
        for (size_t room : {promised, promised - 1}) {
          Writer writer(bytes, room);
          encode_chunk(writer, 1, fixed, sums, overlays, extra);
          CHECK(writer.ok() == (room == promised));
        }
        Reader reader(bytes, promised);
        RecordView record;
        // The last try had no room: encode again.
        Writer writer(bytes, promised);
        encode_chunk(writer, 1, fixed, sums, overlays, extra);
        REQUIRE(next_record(reader, &record));
        ChunkView view;
        REQUIRE(decode_chunk(record, &view));
        CHECK(std::equal(view.sums.begin(), view.sums.end(), sums.begin(), sums.end()));
        REQUIRE(view.overlay_count == overlay_count);
        for (uint32_t i = 0; i < overlay_count; i++) {
          CHECK(view.overlays[i].first_block == overlays[i].first_block);
          CHECK(view.overlays[i].blocks == overlays[i].blocks);
          CHECK(view.overlays[i].bytes + overlays[i].blocks * kBlock <= bytes + promised);
        }
        CHECK(view.unknown.size() == pad8(unknown));
        // Cut anywhere near an end it is refused, not read past.
        for (size_t cut : {size_t{1}, size_t{7}, size_t{8}, promised / 2, promised - 1}) {
          Reader shorter(bytes, promised - cut);
          CHECK_FALSE(next_record(shorter, &record));
          CHECK((promised == cut || !shorter.ok()));
        }
      }
    }
  }
}

TEST_CASE("boundaries: record headers with any length or fixed size never lead outside the block") {
  std::vector<uint64_t> memory(512);
  auto bytes = reinterpret_cast<uint8_t*>(memory.data());
  for (uint64_t length : boundaries(UINT32_MAX)) {
    for (uint64_t fixed_bytes : boundaries(UINT16_MAX)) {
      RecordHeader header{};
      header.bytes = static_cast<uint32_t>(length);
      header.fixed_bytes = static_cast<uint16_t>(fixed_bytes);
      header.type = static_cast<uint8_t>(RecordType::chunk);
      std::memcpy(bytes, &header, sizeof header);
      Reader reader(bytes, memory.size() * 8);
      RecordView record;
      const bool taken = next_record(reader, &record);
      CHECK(taken ==
            (length % 8 == 0 && length >= sizeof header + fixed_bytes && length <= memory.size() * 8));
      if (!taken) continue;
      CHECK(record.bytes.size() == length);
      ChunkView chunk;
      StageView stage;
      EraseRecord erase;
      Reader after(nullptr, 0);
      (void)decode_chunk(record, &chunk);
      (void)decode_stage(record, &stage);
      CHECK(fixed_part(record, &erase, &after) == (fixed_bytes >= sizeof erase));
    }
  }
}

TEST_CASE("boundaries: block headers with any used size or span") {
  std::vector<uint8_t> block(kMaxBlockBytes + 8);
  for (uint64_t used : boundaries(UINT32_MAX)) {
    for (uint64_t span : {uint64_t{0}, uint64_t{1}, used / kBlock, used / kBlock + 1, uint64_t{UINT32_MAX}}) {
      BlockHeader header{};
      header.magic = kJournalMagic;
      header.store_id = 5;
      header.used_bytes = static_cast<uint32_t>(used);
      header.span_blocks = static_cast<uint32_t>(span);
      const bool fits = used >= sizeof header && used <= kMaxBlockBytes;
      std::memcpy(block.data(), &header, sizeof header);
      if (fits) seal_block(block.data(), header);
      BlockHeader found;
      for (size_t available :
           {size_t{0}, sizeof header - 1, sizeof header, used - 1, used, size_t{kMaxBlockBytes}}) {
        if (available > kMaxBlockBytes) continue;
        const bool right = fits && used <= available && span * kBlock >= used;
        CHECK(check_block(block.data(), available, kJournalMagic, 5, &found) == right);
      }
    }
  }
}

TEST_CASE("boundaries: a superblock with any size, offset or count is refused, or makes sense") {
  Harness h(61);
  h.format();
  uint8_t blocks[2 * kBlock];
  for (int i = 0; i < 2; i++) h.io->image().read(kSuperblockOffset[i], blocks + i * kBlock, kBlock);
  auto chosen = choose_superblock(blocks, blocks + kBlock, Harness::kDiskBytes);
  REQUIRE(chosen.ok());
  const Superblock good = chosen.value();
  constexpr size_t fields[] = {
      offsetof(Superblock, size_bytes),         offsetof(Superblock, journal_offset),
      offsetof(Superblock, journal_bytes),      offsetof(Superblock, snapshot_offset),
      offsetof(Superblock, snapshot_offset[1]), offsetof(Superblock, snapshot_bytes),
      offsetof(Superblock, data_offset),        offsetof(Superblock, slab_count),
      offsetof(Superblock, snapshot_used),      offsetof(Superblock, replay_offset),
      offsetof(Superblock, replay_block),       offsetof(Superblock, replay_record),
  };
  auto judge = [&](Superblock super) {
    seal_superblock(&super);
    std::vector<uint8_t> a(kBlock), b(kBlock);
    std::memcpy(a.data(), &super, sizeof super);
    auto judged = choose_superblock(a.data(), b.data(), Harness::kDiskBytes);
    if (!judged.ok()) return;
    const Superblock& s = judged.value();
    using Wide = long double;  // exact enough: all are below 2^64
    CHECK(Wide(s.journal_offset) + Wide(s.journal_bytes) + 2 * Wide(s.snapshot_bytes) <= Wide(s.data_offset));
    CHECK(Wide(s.data_offset) + Wide(s.slab_count) * Wide(kSlabBytes) <= Wide(s.size_bytes));
    CHECK(s.size_bytes <= Harness::kDiskBytes);
    CHECK(s.snapshot_used <= s.snapshot_bytes);
    CHECK(s.replay_offset < s.journal_bytes);
    CHECK(s.replay_block > 0);
  };
  for (uint64_t n : boundaries(UINT64_MAX)) {
    for (size_t field : fields) {
      Superblock super = good;
      std::memcpy(reinterpret_cast<uint8_t*>(&super) + field, &n, sizeof n);
      judge(super);
    }
    // Sums that wrap around: everything after the journal, or the snapshots, shifted to fit.
    Superblock super = good;
    super.journal_bytes = n;
    super.snapshot_offset[0] = super.journal_offset + n;
    super.snapshot_offset[1] = super.snapshot_offset[0] + super.snapshot_bytes;
    super.data_offset = super.snapshot_offset[1] + super.snapshot_bytes;
    judge(super);
    super.journal_bytes = good.journal_bytes - 2 * n;
    super.snapshot_offset[0] = super.journal_offset + super.journal_bytes;
    super.snapshot_bytes = good.snapshot_bytes + n;
    super.snapshot_offset[1] = super.snapshot_offset[0] + super.snapshot_bytes;
    super.data_offset = super.snapshot_offset[1] + super.snapshot_bytes;
    judge(super);
  }
}

TEST_CASE("boundaries: slots at the ends of slabs and of the device") {
  constexpr uint64_t kSlabs = 3;
  const uint64_t data = 5ull << 20;
  for (uint8_t place_class = 0; place_class < kClasses; place_class++) {
    const uint64_t slots = kSlabBytes / slot_bytes(place_class);
    for (uint64_t slab = 0; slab < kSlabs; slab++) {
      for (uint64_t slot : {uint64_t{0}, slots / 2, slots - 1}) {
        const uint64_t place = (data + slab * kSlabBytes + slot * slot_bytes(place_class)) / kBlock;
        Allocator allocator(data, kSlabs);
        CHECK(allocator.claim(place, place_class));
        CHECK(allocator.in_use(place, place_class));
        CHECK_FALSE(allocator.claim(place, place_class));
        if (place_class > 0) CHECK_FALSE(allocator.claim(place + 1, place_class));
        CHECK(allocator.used_bytes() == slot_bytes(place_class));
        allocator.free(place, place_class);
        CHECK(allocator.used_bytes() == 0);
      }
    }
    Allocator allocator(data, kSlabs);
    const uint64_t end = (data + kSlabs * kSlabBytes) / kBlock;
    for (uint64_t place : boundaries(UINT64_MAX)) {
      const uint64_t blocks = 1ull << place_class;
      const bool inside = place >= data / kBlock && place < end && place + blocks <= end;
      const bool right = inside && (place - data / kBlock) % blocks == 0;
      CHECK(allocator.claim(place, place_class) == right);
      if (right) allocator.free(place, place_class);
    }
    CHECK_FALSE(allocator.claim(end, place_class));
    CHECK_FALSE(allocator.claim(data / kBlock - 1, place_class));
  }
}

TEST_CASE("boundaries: chunks of every length are read back, also extended by one byte and cut by one") {
  Harness h(62);
  h.format();
  h.open();
  uint64_t key = 1;
  for (uint64_t n : boundaries(kMaxChunkBytes)) {
    if (n == 0 || (n > 300'000 && n < kMaxChunkBytes - 1)) continue;
    const auto length = static_cast<uint32_t>(n);
    auto data = random_bytes(length, n);
    REQUIRE(h.write(key, v(1), Version{}, 0, data, true) == 0);
    CHECK(h.read(key, 0, kMaxChunkBytes).bytes == data);
    if (length < kMaxChunkBytes) {
      REQUIRE(h.write(key, v(2), v(1), length, {0x42}, true) == 0);
      data.push_back(0x42);
      CHECK(h.read(key, 0, kMaxChunkBytes).bytes == data);
      REQUIRE(h.truncate(key, v(3), v(2), length) == 0);
      REQUIRE(h.commit(key, v(3)));
      data.pop_back();
      CHECK(h.read(key, 0, kMaxChunkBytes).bytes == data);
    } else {
      CHECK(h.write(key, v(2), v(1), length, {0x42}, true) == EINVAL);
    }
    CHECK(h.read(key, length - 1, 5).bytes == std::vector<uint8_t>{data.back()});
    CHECK(h.read(key, length, 5).bytes.empty());
    REQUIRE(h.remove(key, v(4), length < kMaxChunkBytes ? v(3) : v(1)) == 0);
    REQUIRE(h.commit(key, v(4)));
    key++;
  }
  CHECK(h.store->check_consistency() == "");
}
