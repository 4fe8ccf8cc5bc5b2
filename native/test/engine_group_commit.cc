// One flush serves all that wait for it, a lone update waits for none but its own; small overwrites find
// their checksums by block and go into their slots while more come (docs/disk_format.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/granule_sums.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint32_t kBlock32 = 4096;

struct Overwrite {
  explicit Overwrite(uint64_t chunk, Version version, Version base, uint32_t offset,
                     const std::vector<uint8_t>& bytes)
      : laid(offset, bytes) {
    op.target = TargetId(Harness::kTarget);
    op.key = key_of(chunk);
    op.version = version;
    op.base = base;
    op.offset = offset;
    op.length = static_cast<uint32_t>(bytes.size());
    op.data = laid.data;
    op.tail_padded = true;
    op.owner = this;
    op.done = [](StoreOp* o) { static_cast<Overwrite*>(o->owner)->done = true; };
  }
  StageOp op;
  Laid laid;
  bool done = false;
};

// `count` chunks of `bytes` each, committed as version 1.
void make_chunks(Harness& h, uint64_t count, uint32_t bytes) {
  for (uint64_t i = 0; i < count; i++) {
    REQUIRE(h.write(i, v(1), Version{}, 0, std::vector<uint8_t>(bytes, static_cast<uint8_t>(i)), true) == 0);
  }
}

void run_until_all(Harness& h, const std::vector<std::unique_ptr<Overwrite>>& ops) {
  for (const auto& overwrite : ops) {
    h.run_until(overwrite->done);
    REQUIRE(overwrite->op.error == 0);
  }
}

}  // namespace

TEST_CASE("a lone small update is acknowledged after one flush of its own") {
  Harness h(11);
  h.format();
  h.open();
  make_chunks(h, 1, 128 * 1024);
  for (uint64_t n = 2; n < 6; n++) {
    const uint64_t before = h.store->metrics().flushes;
    Overwrite one(0, v(n), v(n - 1), 8192, std::vector<uint8_t>(kBlock32, 9));
    h.store->stage(&one.op);
    // No tick: its flush begins without any timer.
    for (int i = 0; !one.done && i < 100'000; i++) h.io->run_once(0);
    REQUIRE(one.done);
    CHECK(h.store->metrics().flushes == before + 1);
    REQUIRE(h.commit(0, v(n)));
    h.settle_records();
  }
}

TEST_CASE("small updates that come together share one flush, and those that come meanwhile the next") {
  constexpr uint64_t kOps = 64;
  Harness h(12);
  h.format();
  h.open();
  make_chunks(h, kOps, 64 * 1024);
  h.settle_records();
  const std::vector<uint8_t> block(kBlock32, 7);
  for (bool together : {true, false}) {
    const uint64_t base = together ? 1 : 2;
    std::vector<std::unique_ptr<Overwrite>> ops;
    const StoreMetrics before = h.store->metrics();
    for (uint64_t i = 0; i < kOps; i++) {
      ops.push_back(std::make_unique<Overwrite>(i, v(base + 1), v(base), 16 * 1024, block));
      h.store->stage(&ops.back()->op);
      if (!together) h.io->run_once(0);
    }
    run_until_all(h, ops);
    const StoreMetrics after = h.store->metrics();
    const uint64_t flushes = after.flushes - before.flushes;
    MESSAGE("64 updates " << std::string(together ? "together: " : "one a pass: ") << flushes << " flushes, "
                          << after.journal_blocks - before.journal_blocks << " journal blocks");
    CHECK(flushes <= (together ? 4 : kOps / 2));  // a flush of the simulated device takes few passes
    // Packed: about 62 records with 4 KiB of data are in a full block, never one block a record.
    CHECK(after.journal_blocks - before.journal_blocks <= flushes + 2);
    for (uint64_t i = 0; i < kOps; i++) REQUIRE(h.commit(i, v(base + 1)));
    h.settle_records();
  }
}

TEST_CASE(
    "small updates that fill two blocks of the journal share one flush, whichever block is written first") {
  constexpr uint64_t kOps = 100;
  for (uint64_t seed = 1; seed <= 8; seed++) {
    CAPTURE(seed);
    Harness h(seed);
    h.known_by_block = true;  // nothing is read before
    h.format();
    h.open();
    make_chunks(h, kOps, 64 * 1024);
    h.settle_records();
    const StoreMetrics before = h.store->metrics();
    std::vector<std::unique_ptr<Overwrite>> ops;
    for (uint64_t i = 0; i < kOps; i++) {
      ops.push_back(std::make_unique<Overwrite>(i, v(2), v(1), 16 * 1024, std::vector<uint8_t>(kBlock32, 7)));
      h.store->stage(&ops.back()->op);
    }
    for (const auto& op : ops) {
      for (int i = 0; !op->done && i < 100'000; i++) h.io->run_once(0);
      REQUIRE(op->done);
    }
    const StoreMetrics after = h.store->metrics();
    CHECK(after.journal_blocks - before.journal_blocks == 2);
    CHECK(after.flushes - before.flushes == 1);
  }
}

TEST_CASE("a chunk under constant small overwrites is never rebuilt, and its overlays stay few") {
  Harness h(13);
  h.format();
  h.open();
  make_chunks(h, 1, 1 << 20);
  std::vector<uint8_t> expected(1 << 20, 0);
  uint64_t most = 0;
  for (uint64_t n = 2; n < 300; n++) {
    const uint32_t offset = static_cast<uint32_t>(mix64(n) % 256) * kBlock32;
    const std::vector<uint8_t> block(kBlock32, static_cast<uint8_t>(n));
    std::copy(block.begin(), block.end(), expected.begin() + offset);
    REQUIRE(h.write(0, v(n), v(n - 1), offset, block) == 0);
    REQUIRE(h.commit(0, v(n)));
    most = std::max(most, h.store->metrics().overlay_bytes);
  }
  CHECK(h.store->metrics().rebuilds == 0);
  CHECK(h.store->metrics().deferred == 298);
  CHECK(most <= 16 * kBlock32);
  const ReadResult result = h.read(0, 0, 1 << 20);
  CHECK(result.error == 0);
  CHECK(result.bytes == expected);
}

TEST_CASE("overwrites of any alignment keep checksums right, with few granules remembered and with many") {
  for (uint32_t remembered : {0u, 4u, 1024u}) {
    const uint64_t seed = 14;
    CAPTURE(remembered);
    CAPTURE(seed);
    Harness h(seed);
    h.granule_sums = remembered;
    h.known_by_block = true;
    h.format();
    h.open();
    constexpr uint32_t kBytes = 5 * 64 * 1024 + 5000;  // the last granule isn't a whole one
    make_chunks(h, 1, kBytes);
    std::vector<uint8_t> expected(kBytes, 0);
    for (uint64_t n = 2; n < 200; n++) {
      uint64_t draw = mix64(seed * 1000 + n);
      uint32_t length = 1 + static_cast<uint32_t>(draw % 20'000);
      uint32_t offset = static_cast<uint32_t>((draw >> 20) % (kBytes - length));
      h.known_by_block = n % 4 != 0;
      if (n % 3 != 0) offset = offset / kBlock32 * kBlock32, length = (length / kBlock32 + 1) * kBlock32;
      length = std::min(length, kBytes - offset);
      std::vector<uint8_t> bytes(length);
      for (uint32_t i = 0; i < length; i++) bytes[i] = static_cast<uint8_t>(mix64(draw + i));
      std::copy(bytes.begin(), bytes.end(), expected.begin() + offset);
      REQUIRE(h.write(0, v(n), v(n - 1), offset, bytes) == 0);
      REQUIRE(h.commit(0, v(n)));
      if (n % 16 != 0) continue;
      const ReadResult result = h.read(0, 0, kBytes);  // verifies every granule
      CHECK(result.error == 0);
      REQUIRE(result.bytes == expected);
    }
  }
}

TEST_CASE("overwrites of what was just written with checksums by block read nothing, and bless no damage") {
  Harness h(15);
  h.known_by_block = true;
  h.format();
  h.open();
  constexpr uint32_t kBytes = 3 * kGranuleBytes + 5000;
  std::vector<uint8_t> expected(kBytes);
  for (uint32_t i = 0; i < kBytes; i++) expected[i] = static_cast<uint8_t>(mix64(i));
  uint64_t n = 1;
  auto overwrite = [&](uint32_t block, uint32_t blocks) {
    n++;
    const std::vector<uint8_t> bytes(blocks * kBlock32, static_cast<uint8_t>(n));
    std::copy(bytes.begin(), bytes.end(), expected.begin() + block * kBlock32);
    REQUIRE(h.write(0, v(n), v(n - 1), block * kBlock32, bytes, true) == 0);
  };
  REQUIRE(h.write(0, v(1), Version{}, 0, expected, true) == 0);
  const uint64_t before = h.store->metrics().granules_read;
  for (uint32_t block : {0u, 15u, 16u, 40u}) overwrite(block, 1);
  overwrite(14, 4);
  overwrite(33, 15);
  CHECK(h.store->metrics().granules_read == before);
  CHECK(h.read(0, 0, kBytes).bytes == expected);  // verifies every granule
  // Of the last granule, which isn't a whole one, nothing is known.
  overwrite(48, 1);
  CHECK(h.store->metrics().granules_read == before + 1);
  h.settle_records();

  // Damage beside what is overwritten stays visible: in the same granule, in a block that no update brought.
  std::vector<uint8_t> page(kBlock32);
  uint64_t at = 0;
  for (; at < h.io->size_bytes(); at += kBlock32) {
    h.io->image().read(at, page.data(), kBlock32);
    if (std::equal(page.begin(), page.end(), expected.begin() + 20 * kBlock32)) break;
  }
  REQUIRE(at < h.io->size_bytes());
  page[0] ^= 1;
  h.io->image().write(at, page.data(), 1);
  overwrite(22, 1);
  CHECK(h.store->metrics().granules_read == before + 1);
  CHECK(h.read(0, kGranuleBytes + 100, 10).error == EBADMSG);
  CHECK(h.read(0, 0, kGranuleBytes).error == 0);
}

TEST_CASE(
    "a chunk that is overwritten again and again waits for its overlays, and copies itself only for pending "
    "ones") {
  Harness h(16);
  h.format();
  h.open();
  make_chunks(h, 2, 512 * 1024);
  std::vector<uint8_t> expected(512 * 1024, 0);
  uint64_t last = 1;
  // Half of them two blocks long, and some that begin within a block.
  for (uint64_t round = 0; round < 6; round++) {
    std::vector<std::unique_ptr<Overwrite>> ops;
    for (uint32_t i = 0; i < 48; i++, last++) {
      const uint64_t draw = mix64(round * 100 + i);
      const uint32_t offset = draw % 100 * kBlock32 + (i % 8 == 7 ? 100 : 0);
      const std::vector<uint8_t> bytes(kBlock32 * (1 + draw / 100 % 2), static_cast<uint8_t>(draw >> 20));
      std::copy(bytes.begin(), bytes.end(), expected.begin() + offset);
      ops.push_back(std::make_unique<Overwrite>(0, v(last + 1), v(last), offset, bytes));
      ops.back()->op.commit_now = true;
      h.store->stage(&ops.back()->op);
    }
    run_until_all(h, ops);
    CHECK(h.read(0, 0, 512 * 1024).bytes == expected);
  }
  CHECK(h.store->metrics().rebuilds == 0);
  CHECK(h.store->metrics().waiting == 0);

  // None of these is committed: nothing of them may go into the slot, so one is rebuilt instead of waiting
  // for ever.
  Version base = v(1);
  for (uint64_t n = 2; n < 52; n++, base = v(n - 1))
    REQUIRE(h.write(1, v(n), base, static_cast<uint32_t>(n) * kBlock32, std::vector<uint8_t>(kBlock32, 9)) ==
            0);
  CHECK(h.store->metrics().rebuilds > 0);
  REQUIRE(h.commit(1, v(51)));
  CHECK(h.read(1, 30 * kBlock32, 100).bytes == std::vector<uint8_t>(100, 9));
}

TEST_CASE("granules that were written once push out none that an overwrite has used") {
  GranuleSums sums(16);  // four sets
  BlockSums blocks;
  for (uint32_t i = 0; i < kBlocksOfGranule; i++) blocks[i] = 2000 + i;
  const uint32_t sum = GranuleSums::combined(blocks);
  for (uint64_t i = 1; i <= 4; i++) sums.put(i * 16, sum, blocks);
  sums.put_written(1600, sum, blocks.data());
  REQUIRE(sums.find(1600, sum) != nullptr);  // used from now on
  for (uint64_t i = 1; i <= 1000; i++) sums.put_written(16'000 + i * 16, sum, blocks.data());
  for (uint64_t i = 1; i <= 4; i++) CHECK(sums.find(i * 16, sum) != nullptr);
  CHECK(sums.find(1600, sum) != nullptr);
  uint32_t known = 0;  // the newest are there, as far as there is room
  for (uint64_t i = 1; i <= 1000; i++) known += sums.find(16'000 + i * 16, sum) != nullptr;
  CHECK(known == 11);
  // Of another content of the same place.
  sums.put_written(1600, sum + 1, blocks.data());
  CHECK(sums.find(1600, sum) == nullptr);
  CHECK(sums.find(1600, sum + 1) != nullptr);
}

TEST_CASE("an overwrite of a granule that is known by block reads nothing, one of another content does") {
  GranuleSums sums(16);
  BlockSums blocks;
  for (uint32_t i = 0; i < kBlocksOfGranule; i++) blocks[i] = 1000 + i;
  const uint32_t sum = GranuleSums::combined(blocks);
  CHECK(sums.find(4096, sum) == nullptr);
  sums.put(4096, sum, blocks);
  BlockSums* known = sums.find(4096, sum);
  REQUIRE(known != nullptr);
  CHECK(sums.find(4096, sum + 1) == nullptr);
  CHECK(sums.find(4112, sum) == nullptr);
  BlockSums changed = blocks;
  changed[5] = 77;
  const uint32_t now = GranuleSums::replaced(sum, 5, blocks[5], 77);
  CHECK(now == GranuleSums::combined(changed));
  (*known)[5] = 77;
  sums.changed(known, now);
  CHECK(sums.find(4096, sum) == nullptr);
  CHECK(sums.find(4096, now) != nullptr);
  // The least recently used goes: more granules than there is room for in any set.
  for (uint64_t block = 8192; block < 8192 + 16 * 4096; block += 16) sums.put(block, sum, blocks);
  CHECK(sums.find(8192 + 16 * 4096 - 16, sum) != nullptr);
  CHECK(sums.find(4096, now) == nullptr);
}
