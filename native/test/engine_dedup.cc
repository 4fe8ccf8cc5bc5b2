// Equal chunks of a space in one slot: who names it, when it is free, what stays true of each chunk.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "engine/format.h"
#include "engine/scale.h"
#include "engine_harness.h"
#include "engine_space.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint32_t kSize = 200'000;  // a slot of 256 KiB
constexpr uint64_t kSlot = 256 * 1024;
const TargetId kOurTarget(Harness::kTarget);

struct Store : Harness {
  explicit Store(uint64_t number, bool wanted = true) : Harness(number) {
    format();
    start(wanted);
  }
  void start(bool wanted = true, const Mutants& mutants = {}) {
    open(mutants);
    const uint64_t space = key_of(0).space();
    if (wanted) store->dedup_spaces(kOurTarget, {&space, 1});
  }
  void put(uint64_t key, uint64_t version, const std::vector<uint8_t>& bytes) {
    StageOp op;
    op.key = key_of(key);
    op.version = v(version);
    ChunkInfo info;
    if (store->lookup(kOurTarget, op.key, &info)) op.base = info.version;
    op.kind = UpdateKind::replace;
    op.length = static_cast<uint32_t>(bytes.size());
    op.commit_now = true;
    REQUIRE(stage(op, bytes, 0) == 0);
  }
  void drop(uint64_t key) {
    bool done = false;
    StoreOp op;
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->erase(kOurTarget, key_of(key), &op);
    run_until(done);
    REQUIRE(op.error == 0);
  }
  // Of that version, by another replica's bytes.
  void repair(uint64_t key, uint64_t version, const std::vector<uint8_t>& bytes) {
    Laid laid(0, bytes);
    InstallOp op;
    bool done = false;
    op.target = kOurTarget;
    op.key = key_of(key);
    op.version = op.only_over = v(version);
    op.length = static_cast<uint32_t>(bytes.size());
    op.data = laid.data;
    op.tail_padded = true;
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->install(&op);
    run_until(done);
    REQUIRE(op.error == 0);
  }
  // Until all that can be compared was.
  void share() {
    for (int i = 0; i < 200'000 && store->dedup_has_work(); i++) {
      store->dedup(1u << 20);
      clock_us += 10'000;
      store->tick(clock_us);
      io->run_once(0);
    }
    REQUIRE_FALSE(store->dedup_has_work());
    settle_records();
    REQUIRE(store->check_consistency().empty());
  }
  // Slots are free when the records that freed them are durable.
  uint64_t used() {
    settle_records();
    return before_free - store->capacity().free_bytes;
  }
  void note_free() {
    settle_records();
    before_free = store->capacity().free_bytes;
  }
  void reopen() {
    close();
    start();
  }
  SpaceUse use() {
    const uint64_t space = key_of(0).space();
    store->account_spaces(kOurTarget, {&space, 1});
    for (int i = 0; i < 100; i++) io->run_once(0);
    return store->space_use(kOurTarget, space);
  }
  std::vector<uint8_t> bytes(uint64_t key) {
    const ReadResult result = read(key, 0, 2 * kSize);
    REQUIRE(result.error == 0);
    return result.bytes;
  }
  uint64_t before_free = 0;
};

// Other bytes with the same CRC: a multiple of the polynomial is added (bits in the order of the CRC).
void forge(std::vector<uint8_t>* bytes) {
  const uint64_t polynomial = 0x11edc6f41;
  for (int bit = 0; bit < 33; bit++) {
    if ((polynomial >> (32 - bit) & 1) != 0) (*bytes)[100 + bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
}

}  // namespace

TEST_CASE("dedup: equal chunks of a space lie in one slot, which goes with the last of them") {
  Store h(1);
  const auto a = random_bytes(kSize, 1), b = random_bytes(kSize, 2);
  h.note_free();
  for (uint64_t key = 1; key <= 4; key++) h.put(key, key, a);
  h.put(5, 5, b);
  h.put(101, 6, a);  // of another space
  CHECK(h.used() >= 6 * kSlot);
  const uint64_t six = h.used();
  h.share();
  CHECK(h.store->metrics().dedup_shared == 3);
  CHECK(six - h.used() == 3 * kSlot);
  CHECK(h.store->usage(kOurTarget).allocated_bytes == 6 * kSlot);  // each as if it were alone
  SpaceUse use = h.use();
  CHECK(use.ready);
  CHECK(use.chunks == 5);
  CHECK(use.allocated_bytes == 5 * kSlot);
  CHECK(use.shared_chunks == 4);
  CHECK(use.saved_bytes == 3 * kSlot);
  CHECK((h.store->identity().features_incompat & kIncompatShared) != 0);
  for (int opening = 0; opening < 2; opening++) {
    for (uint64_t key = 1; key <= 4; key++) CHECK(h.bytes(key) == a);
    h.reopen();
    CHECK(h.use().shared_chunks == 4);
    CHECK((h.store->identity().features_incompat & kIncompatShared) != 0);
  }
  h.note_free();
  for (uint64_t key = 1; key <= 4; key++) {
    CHECK(h.store->capacity().free_bytes == h.before_free);
    h.drop(key);
    h.settle_records();
    CHECK(h.store->check_consistency().empty());
    for (uint64_t other = key + 1; other <= 4; other++) CHECK(h.bytes(other) == a);
  }
  h.settle_records();
  CHECK(h.store->capacity().free_bytes == h.before_free + kSlot);
  CHECK(h.use().shared_chunks == 0);
  CHECK(h.use().saved_bytes == 0);
  CHECK(h.bytes(5) == b);
  CHECK(h.bytes(101) == a);
}

TEST_CASE(
    "dedup: what doesn't ask for it, and small chunks, stay alone; a device without has no feature bit") {
  Store h(2, false);
  const auto a = random_bytes(kSize, 1), small = random_bytes(60'000, 2);
  for (uint64_t key = 1; key <= 3; key++) h.put(key, key, a);
  CHECK_FALSE(h.store->dedup_has_work());
  const uint64_t space = key_of(0).space();
  for (uint64_t key = 4; key <= 6; key++) h.put(key, key, small);
  for (uint64_t key = 1; key <= 3; key++) h.drop(key);
  h.store->dedup_spaces(kOurTarget, {&space, 1});
  h.share();
  CHECK(h.store->metrics().dedup_shared == 0);
  CHECK((h.store->identity().features_incompat & kIncompatShared) == 0);
  // Asked for later, also by what was there before.
  h.put(7, 7, a);
  h.reopen();
  h.put(8, 8, a);
  h.share();
  CHECK(h.store->metrics().dedup_shared == 1);
}

TEST_CASE("dedup: checksums that are equal by design don't make chunks equal") {
  Store h(3);
  const auto honest = random_bytes(kSize, 1);
  auto forged = honest;
  forge(&forged);
  h.put(1, 1, forged);  // it came first
  h.put(2, 2, honest);
  h.put(3, 3, honest);
  ChunkInfo one, two;
  REQUIRE(h.store->lookup(kOurTarget, key_of(1), &one));
  REQUIRE(h.store->lookup(kOurTarget, key_of(2), &two));
  REQUIRE(std::equal(one.checksums.begin(), one.checksums.end(), two.checksums.begin()));
  h.share();
  CHECK(h.store->metrics().dedup_differ >= 1);
  CHECK(h.store->metrics().dedup_shared == 1);  // it doesn't keep the honest ones apart either
  CHECK(h.bytes(1) == forged);
  CHECK(h.bytes(2) == honest);
  CHECK(h.bytes(3) == honest);
}

TEST_CASE("dedup: no update writes into a shared slot") {
  Store h(4);
  const auto a = random_bytes(kSize, 1), more = random_bytes(4096, 2);
  for (uint64_t key = 1; key <= 6; key++) h.put(key, key, a);
  h.share();
  REQUIRE(h.store->metrics().dedup_shared == 5);
  REQUIRE(h.write(1, v(11), v(1), 8192, more, true) == 0);   // over old bytes
  REQUIRE(h.write(2, v(12), v(2), kSize, more, true) == 0);  // behind them
  REQUIRE(h.truncate(3, v(13), v(3), 70'000) == 0);          // these keep the slot
  REQUIRE(h.truncate(4, v(14), v(4), 300'000) == 0);
  CHECK(h.store->check_consistency().empty());
  REQUIRE(h.commit(3, v(13)));
  REQUIRE(h.commit(4, v(14)));
  REQUIRE(h.write(3, v(23), v(13), 70'000, more, true) == 0);
  CHECK(h.store->metrics().deferred == 0);
  CHECK(h.store->metrics().in_place == 0);
  auto over = a, behind = a, cut = a, longer = a;
  std::copy(more.begin(), more.end(), over.begin() + 8192);
  behind.insert(behind.end(), more.begin(), more.end());
  cut.resize(70'000);
  cut.insert(cut.end(), more.begin(), more.end());
  longer.resize(300'000);
  for (int opening = 0; opening < 2; opening++) {
    CHECK(h.bytes(1) == over);
    CHECK(h.bytes(2) == behind);
    CHECK(h.bytes(3) == cut);
    CHECK(h.bytes(4) == longer);
    CHECK(h.bytes(5) == a);
    CHECK(h.bytes(6) == a);
    CHECK(h.store->check_consistency().empty());
    h.reopen();
  }
}

TEST_CASE("dedup: a damaged slot damages all who name it; a repair takes one out, and damage never spreads") {
  Store h(5);
  const auto a = random_bytes(kSize, 1);
  for (uint64_t key = 1; key <= 3; key++) h.put(key, key, a);
  h.share();
  REQUIRE(h.store->metrics().dedup_shared == 2);
  // Where it lies: the only copy of the first bytes that chunk 1 is read from.
  h.close();
  io::SimImage image = h.io->image();
  std::vector<uint8_t> block(4096);
  Superblock super;
  image.read(kSuperblockOffset[0], reinterpret_cast<uint8_t*>(&super), sizeof super);
  uint32_t found = 0;
  for (uint64_t at = super.data_offset; at < super.data_offset + super.slab_count * kSlabBytes; at += kSlot) {
    image.read(at, block.data(), block.size());
    if (!std::equal(block.begin(), block.end(), a.begin())) continue;
    found++;  // what was given up still has its bytes
    block[7] ^= 1;
    h.io->image().write(at, block.data(), block.size());
  }
  CHECK(found >= 1);
  h.start();
  const auto verified = [&](uint64_t key) { return h.read(key, 10, 5000).error; };  // a part of a granule
  for (uint64_t key = 1; key <= 3; key++) CHECK(verified(key) == EBADMSG);
  h.repair(2, 2, a);
  const uint64_t errors = h.store->metrics().checksum_errors;
  h.share();  // their checksums are equal still
  CHECK(h.store->metrics().checksum_errors > errors);
  CHECK(h.store->metrics().dedup_shared == 0);
  CHECK(h.use().shared_chunks == 2);
  CHECK(h.bytes(2) == a);
  CHECK(verified(1) == EBADMSG);
  CHECK(verified(3) == EBADMSG);
  h.repair(1, 1, a);
  h.share();  // with the other that is right
  CHECK(h.store->metrics().dedup_shared == 1);
  h.repair(3, 3, a);
  h.share();
  CHECK(h.use().shared_chunks == 3);
  for (uint64_t key = 1; key <= 3; key++) CHECK(h.bytes(key) == a);
}

TEST_CASE("dedup: when the one that stood for others has gone, new ones still find them") {
  Store h(7);
  const auto a = random_bytes(kSize, 1);
  for (uint64_t key = 1; key <= 3; key++) h.put(key, key, a);
  h.share();
  for (uint64_t key = 1; key <= 2; key++) h.drop(key);
  h.put(4, 4, a);
  h.share();
  CHECK(h.use().shared_chunks == 2);
  CHECK(h.bytes(3) == a);
  CHECK(h.bytes(4) == a);
}

TEST_CASE("dedup: a slot has so many names and no more") {
  Harness plain(8);
  Store h(8);
  h.close();
  h.max_slot_names = 3;
  h.start();
  const auto a = random_bytes(kSize, 1);
  for (uint64_t key = 1; key <= 8; key++) h.put(key, key, a);
  h.share();
  // Three, three, two.
  CHECK(h.use().saved_bytes == 5 * kSlot);
  for (uint64_t key = 1; key <= 8; key++) CHECK(h.bytes(key) == a);
  h.reopen();
  CHECK(h.use().saved_bytes == 5 * kSlot);
}

TEST_CASE("dedup: replicas that share differently have the same digests") {
  Store shares(9), doesnt(10, false);
  const auto a = random_bytes(kSize, 1);
  for (Store* h : {&shares, &doesnt}) {
    for (uint64_t key = 1; key <= 3; key++) h->put(key, key, a);
  }
  shares.share();
  REQUIRE(shares.store->metrics().dedup_shared == 2);
  for (uint64_t key = 1; key <= 3; key++) {
    ChunkInfo one, other;
    uint64_t digests[2];
    REQUIRE(shares.store->digest_at_or_after(kOurTarget, key_of(key), &one, &digests[0]));
    REQUIRE(doesnt.store->digest_at_or_after(kOurTarget, key_of(key), &other, &digests[1]));
    CHECK(digests[0] == digests[1]);
    CHECK(one.version == other.version);
    CHECK(one.attributes.flags == 0);  // what goes to other replicas says nothing of slots
  }
}

TEST_CASE("dedup: a shared slot is moved once, with all its names") {
  SpaceStore s(11);
  s.options.discard = Discard::on;
  s.options.compact_eagerly = true;
  s.options.dedup_rest_us = 0;
  s.format();
  s.open();
  const uint64_t space = SpaceStore::key(0).space();
  std::vector<uint64_t> shared;
  for (uint64_t n = 0; n < 40; n++) {
    s.same_seed = n % 8 == 3 ? 7777 : 0;
    if (s.same_seed != 0) shared.push_back(n);
    REQUIRE(s.put(n, 900'000) == 0);
  }
  s.store->dedup_spaces(TargetId(SpaceStore::kTarget), {&space, 1});
  for (int i = 0; i < 100'000 && s.store->dedup_has_work(); i++) {
    s.store->dedup(4 << 20);
    s.pass();
  }
  s.settle();
  REQUIRE(s.store->metrics().dedup_shared == shared.size() - 1);
  // Holes everywhere, then few chunks in many slabs.
  for (uint64_t n = 0; n < 40; n++) {
    if (n % 8 != 3 && n % 5 != 0) REQUIRE(s.remove(n) == 0);
  }
  s.settle();
  const StoreMetrics before = s.store->metrics();
  s.compact_all();
  const StoreMetrics after = s.store->metrics();
  CHECK(after.moves > before.moves);
  CHECK(after.saved_bytes == (shared.size() - 1) << 20);  // nobody was left behind
  CHECK(s.store->check_consistency().empty());
  CHECK(s.all_wrong().empty());
  s.reopen();
  CHECK(s.store->metrics().saved_bytes == (shared.size() - 1) << 20);
  CHECK(s.store->check_consistency().empty());
  CHECK(s.all_wrong().empty());
}

TEST_CASE("dedup: samples say which chunks free nothing when they go") {
  Store h(12);
  const auto a = random_bytes(kSize, 1), b = random_bytes(kSize, 2);
  h.put(1, 1, a);
  h.put(2, 2, a);
  h.put(3, 3, b);
  h.share();
  ChunkSample samples[8];
  auto sharing = [&] {
    std::set<uint64_t> found;
    const uint32_t count = h.store->sample(kOurTarget, key_of(0).space(), 1, samples);
    for (uint32_t i = 0; i < count; i++) {
      CHECK(samples[i].allocated_bytes == kSlot);
      if (samples[i].shared) found.insert(samples[i].version.update);
    }
    return found;
  };
  CHECK(sharing() == std::set<uint64_t>{1, 2});
  h.drop(1);
  CHECK(sharing().empty());
}

TEST_CASE("dedup: the chunks of a space that deduplicates fit their 224 bytes of memory") {
  const char* asked = std::getenv("FFS_SCALE_CHUNKS");
  const uint64_t chunks = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 20'000;
  const char* folder = std::getenv("TMPDIR");
  const std::string path =
      std::string(folder != nullptr ? folder : "/tmp") + "/ffs_scale_dedup_" + std::to_string(getpid());
  for (ScaleContents contents : {ScaleContents::compared, ScaleContents::shared_by_two}) {
    auto io = io::Io::create(io::Options{});
    REQUIRE(io.ok());
    auto report = measure_scale(*io.value(), path, chunks, contents);
    if (!report.ok()) FAIL(report.error().what << ": " << ChunkStore::last_open_message());
    std::printf("%s\n", report.value().json().c_str());
    CHECK(report.value().memory_bytes <= 224 * chunks);
    CHECK(report.value().memory_bytes >= 184 * chunks);
    CHECK(report.value().longest_step_us > 0);
    if (chunks >= 100'000) CHECK(report.value().resident_bytes <= 224 * chunks);
  }
}
