// Targets emptied, reset and compared: by hand and with power cuts.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine/format.h"
#include "engine/store_impl.h"
#include "engine_transfer.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

TEST_CASE("reset: pendings and retry entries of one target go, all else stays") {
  Harness h(8);
  h.format();
  h.open();
  auto a = random_bytes(100'000, 1), b = random_bytes(3'000, 2);
  REQUIRE(write_as(h, 1, v(1), {}, a, 1) == 0);
  REQUIRE(h.commit(1, v(1)));
  REQUIRE(write_as(h, 1, v(2), v(1), b, 2) == 0);
  REQUIRE(h.write(1, v(3), v(2), 3'000, b) == 0);
  REQUIRE(write_as(h, 2, v(1), {}, b, 3) == 0);  // a chunk of only a pending version
  REQUIRE(write_as(h, 1, v(1), {}, b, 4, kOther) == 0);
  CHECK(retries(h) == 3);
  StageOp on_the_way;
  Laid laid(0, a);
  bool stage_done = false;
  on_the_way.target = kTarget;
  on_the_way.key = key_of(9);
  on_the_way.version = v(4);
  on_the_way.kind = UpdateKind::replace;
  on_the_way.length = 100'000;
  on_the_way.data = laid.data;
  on_the_way.tail_padded = true;
  on_the_way.identity = {ClientId(5), 9, 1};
  on_the_way.chain = ChainId(3);
  on_the_way.owner = &stage_done;
  on_the_way.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  h.store->stage(&on_the_way);
  Plain op;
  h.store->reset_target(kTarget, &op);
  CHECK(h.pending_count(1) == 0);  // at once
  CHECK(retries(h) == 0);
  // What is set after the call stays.
  RetryEntry entry{8, key_of(1), v(1), RetryState::done, 0};
  h.store->retry_set(kTarget, ClientId(6), ChainId(3), 1, entry, nullptr);
  h.run_until(op.finished);
  CHECK(stage_done);  // before the reset's end
  CHECK(on_the_way.error == 0);
  ChunkInfo info;
  CHECK_FALSE(h.store->lookup(kTarget, key_of(9), &info));
  auto check = [&] {
    CHECK(h.read(1, 0, 200'000).bytes == a);
    CHECK(h.pending_count(1) == 0);
    CHECK_FALSE(h.store->lookup(kTarget, key_of(2), &info));
    CHECK(retries(h) == 1);
    CHECK(retries(h, kOther) == 1);
    PendingInfo pending;
    CHECK(h.store->find_pending(kOther, key_of(1), v(1), &pending));
    CHECK(h.store->check_consistency() == "");
  };
  check();
  reopen(h);
  check();
  CHECK(waited(h, [&](StoreOp* o) { h.store->retry_set(kTarget, ClientId(0), ChainId(3), 1, entry, o); }) ==
        EINVAL);
  CHECK(retries(h) == 1);
  CHECK(reset(h) == 0);
  CHECK(retries(h) == 0);
  CHECK(reset(h, TargetId(4711)) == EINVAL);
}

TEST_CASE("release: the target is empty at once, its space comes back, others keep theirs") {
  Harness h(9);
  h.release_step_chunks = 3;
  h.format();
  h.open();
  auto a = random_bytes(20'000, 1);
  for (uint64_t i = 0; i < 100; i++) REQUIRE(install(h, i, v(1), a) == 0);
  REQUIRE(write_as(h, 5, v(2), v(1), a, 2) == 0);
  REQUIRE(write_as(h, 5, v(1), {}, a, 2, kOther) == 0);
  const uint8_t state[3] = {1, 2, 3};
  for (TargetId target : {kTarget, kOther}) {
    h.store->set_chain_state(target, state, nullptr);
    h.store->set_space_epoch(target, 44, {9, 0}, nullptr);
  }
  Spaces spaces;
  h.store->each_space_epoch(kTarget, spaces);
  CHECK(spaces.epochs == std::map<uint64_t, uint64_t>{{44, 9}});
  // One update of each kind on the way.
  StageOp stage;
  Laid laid(0, a);
  bool stage_done = false;
  stage.target = kTarget;
  stage.key = key_of(200);
  stage.version = v(4);
  stage.kind = UpdateKind::replace;
  stage.length = 20'000;
  stage.data = laid.data;
  stage.tail_padded = stage.commit_now = true;
  stage.owner = &stage_done;
  stage.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  h.store->stage(&stage);
  Install late(7, v(3), a);
  h.store->install(&late);
  Plain op, again;
  h.store->release_target(kTarget, &op);
  h.store->release_target(kTarget, &again);
  ChunkInfo info;
  CHECK_FALSE(h.store->lookup(kTarget, key_of(1), &info));
  CHECK_FALSE(h.store->first_at_or_after(kTarget, ChunkKey{}, &info));
  CHECK(h.store->chain_state(kTarget).empty());
  CHECK(h.store->space_epoch(kTarget, 44).least_epoch == 0);
  CHECK(h.store->has_target(kTarget));
  CHECK(install(h, 300, v(1), a) == EBUSY);
  CHECK(reset(h) == EBUSY);
  CHECK(h.read(1, 0, 10).error == ENOENT);
  CHECK_FALSE(op.finished);
  h.run_until(op.finished);
  h.run_until(again.finished);
  CHECK(stage_done);
  CHECK(late.finished);
  CHECK((op.error == 0 && again.error == 0 && stage.error == 0 && late.error == 0));
  auto check = [&] {
    CHECK(h.store->usage(kTarget).chunks == 0);
    CHECK(h.store->usage(kTarget).allocated_bytes == 0);
    CHECK(h.store->capacity().chunks == 0);
    // The chunk of the other target, and the slot that is kept for its updates.
    CHECK(h.store->capacity().capacity_bytes - h.store->capacity().free_bytes == 2 * slot_bytes(3));
    CHECK(retries(h) == 0);
    CHECK(retries(h, kOther) == 1);
    CHECK(h.store->chain_state(kOther).size() == 3);
    CHECK(h.store->space_epoch(kOther, 44).least_epoch == 9);
    CHECK(h.store->check_consistency() == "");
  };
  check();
  reopen(h);
  check();
  CHECK(release(h) == 0);
  CHECK(install(h, 300, v(1), a) == 0);  // and the target is a target again
  CHECK(h.read(300, 0, 30'000).bytes == a);
  reopen(h);
  CHECK(h.read(300, 0, 30'000).bytes == a);
}

TEST_CASE("release: updates that wait for room don't keep it waiting") {
  Harness h(10);
  h.release_step_chunks = 1;
  h.format();
  h.open();
  auto big = random_bytes(3 << 20, 1);
  uint64_t chunks = 0;
  while (install(h, 100 + chunks, v(1), big) == 0) chunks++;
  Plain op;
  h.store->release_target(kTarget, &op);
  // Of the other target: finds room as the first one's comes back, instead of ENOSPC.
  Install waits(1, v(1), big);
  waits.target = kOther;
  h.store->install(&waits);
  h.run_until(waits.finished);
  CHECK(waits.error == 0);
  h.run_until(op.finished);
  CHECK(op.error == 0);
  CHECK(h.store->check_consistency() == "");
}

TEST_CASE("digest: of the content, not of how it is stored") {
  Harness h(11);
  h.format();
  h.open();
  auto a = random_bytes(150'000, 1), tail = random_bytes(40'000, 2), over = random_bytes(700, 3);
  // Written in pieces, extended with zeros, with an overlay; then the same as one piece.
  REQUIRE(h.write(1, v(1), {}, 0, a, true) == 0);
  REQUIRE(h.write(1, v(2), v(1), 150'000, tail, true) == 0);
  REQUIRE(h.write(1, v(3), v(2), 66'000, over, true) == 0);
  REQUIRE(h.truncate(1, v(4), v(3), 400'000) == 0);
  REQUIRE(h.commit(1, v(4)));
  auto whole = a;
  whole.insert(whole.end(), tail.begin(), tail.end());
  std::memcpy(whole.data() + 66'000, over.data(), over.size());
  whole.resize(400'000);
  const uint64_t pieces = digest_of(h, 1);
  REQUIRE(erase(h, 1) == 0);
  REQUIRE(install(h, 1, v(4), whole) == 0);
  CHECK(digest_of(h, 1) == pieces);
  reopen(h);
  CHECK(digest_of(h, 1) == pieces);
  // Anything that differs shows.
  auto differs = [&](const char* what, auto change) {
    ChunkInfo info;
    REQUIRE(h.store->lookup(kTarget, key_of(1), &info));
    std::vector<uint32_t> sums(info.checksums.begin(), info.checksums.end());
    info.checksums = sums;
    REQUIRE(chunk_digest(info) == pieces);
    change(info, sums);
    CHECK_MESSAGE(chunk_digest(info) != pieces, what);
  };
  using Sums = std::vector<uint32_t>;
  differs("key", [](ChunkInfo& i, Sums&) { i.key.bytes[23]++; });
  differs("term", [](ChunkInfo& i, Sums&) { i.version.chain.term++; });
  differs("counter", [](ChunkInfo& i, Sums&) { i.version.chain.counter++; });
  differs("update", [](ChunkInfo& i, Sums&) { i.version.update++; });
  differs("length", [](ChunkInfo& i, Sums&) { i.length++; });
  differs("flags", [](ChunkInfo& i, Sums&) { i.attributes.flags |= kFlagPinned; });
  differs("codec", [](ChunkInfo& i, Sums&) { i.attributes.codec = 1; });
  differs("role", [](ChunkInfo& i, Sums&) { i.attributes.role = 1; });
  differs("expiry", [](ChunkInfo& i, Sums&) { i.attributes.expiry_ms++; });
  differs("tag length", [](ChunkInfo& i, Sums&) { i.attributes.tag_bytes = 1; });
  differs("a checksum", [](ChunkInfo&, Sums& s) { s.back() ^= 1; });
  differs("two checksums", [](ChunkInfo&, Sums& s) { std::swap(s[0], s[1]); });
  differs("granules", [](ChunkInfo& i, Sums& s) { i.checksums = std::span(s).first(s.size() - 1); });
  // What doesn't belong to the content doesn't.
  ChunkInfo info;
  REQUIRE(h.store->lookup(kTarget, key_of(1), &info));
  info.stored_length = 1;
  info.attributes.tag[5] = 9;
  info.attributes.flags |= kFlagSharedSlot;
  CHECK(chunk_digest(info) == pieces);
}

// ------------------------------------------------------------------------------ crashes

namespace {

// Every crash of what the store has done since `start`, with random losses; `check` judges each.
template <typename Check>
void each_crash(Harness& h, io::SimImage start, size_t from, uint64_t stride, Check check) {
  const std::vector<io::SimEvent> log = h.io->log();
  io::CrashImages crashes(std::move(start));
  std::mt19937_64 random(h.seed);
  for (size_t at = from; at < log.size(); at++) {
    crashes.advance(log[at]);
    if (at % stride != 0) continue;
    for (int round = 0; round < 4; round++) {
      std::vector<bool> kept;
      for (size_t i = 0; i < crashes.loose_writes(); i++) kept.push_back(round == 0 || random() % 2 == 0);
      Harness after(h.seed + at, crashes.crash([&](size_t write, size_t) -> bool { return kept[write]; }));
      after.open();
      CAPTURE(at);
      REQUIRE(after.store->check_consistency() == "");
      check(after, at);
      after.close();  // what recovery left opens again, and says the same
      after.open();
      check(after, at);
    }
  }
}

size_t pendings(Harness& h, TargetId target = kTarget) {
  size_t count = 0;
  ChunkKey at{}, found;
  while (h.store->first_pending_at_or_after(target, at, &found)) {
    count++;
    at = found;
    at.bytes[23]++;
    if (at.bytes[23] == 0) at.bytes[22]++;
  }
  return count;
}

// `count` chunks without bytes, every 50th with a pending version and a retry entry.
void fill(Harness& h, uint64_t count, TargetId target) {
  std::vector<std::unique_ptr<Install>> ops;
  for (uint64_t i = 0; i < count; i++) {
    ops.push_back(std::make_unique<Install>(i, v(1), std::vector<uint8_t>{}));
    ops.back()->target = target;
    h.store->install(ops.back().get());
  }
  for (auto& op : ops) h.run_until(op->finished);
  for (auto& op : ops) REQUIRE(op->error == 0);
  for (uint64_t i = 0; i < count; i += 50) {
    REQUIRE(write_as(h, i, v(2), v(1), random_bytes(100, i), static_cast<uint32_t>(i), target) == 0);
  }
}

}  // namespace

TEST_CASE("crash: a reset is whole, also when data before it is lost") {
  for (uint64_t seed = 1; seed <= 10; seed++) {
    Harness h(seed);
    h.format();
    h.open();
    auto a = random_bytes(100'000, 1), b = random_bytes(3'000, 2);
    for (uint64_t key = 1; key <= 3; key++) {
      REQUIRE(h.write(key, v(1), {}, 0, a, true) == 0);
      REQUIRE(write_as(h, key, v(2), v(1), b, static_cast<uint32_t>(key)) == 0);
    }
    for (int i = 0; i < 2; i++) REQUIRE(waited(h, [&](StoreOp* op) { h.store->flush(op); }) == 0);
    REQUIRE(waited(h, [&](StoreOp* op) { h.store->set_space_epoch(kTarget, 1, {1, 0}, op); }) == 0);
    REQUIRE(waited(h, [&](StoreOp* op) { h.store->set_space_epoch(kTarget, 1, {2, 0}, op); }) == 0);
    io::SimImage start = h.io->image();
    const size_t from = h.io->log().size();
    const uint64_t installed = h.store->metrics().installed;
    Install repair(1, v(1), a, v(1));
    h.store->install(&repair);
    while (h.store->metrics().installed == installed) h.io->run_once(0);
    Plain op;
    h.store->reset_target(kTarget, &op);
    h.run_until(op.finished);
    const size_t acknowledged = h.io->log().size();
    REQUIRE(waited(h, [&](StoreOp* o) { h.store->set_space_epoch(kTarget, 1, {3, 0}, o); }) == 0);
    each_crash(h, std::move(start), from, 1, [&](Harness& after, size_t at) {
      const size_t left = pendings(after);
      CHECK(left == retries(after));
      CHECK((left == 0 || (left == 3 && at < acknowledged)));
      for (uint64_t key = 1; key <= 3; key++) CHECK(after.read(key, 0, 200'000).bytes == a);
    });
  }
}

TEST_CASE("crash with many chunks: snapshots of several slices meet a reset and a release") {
  constexpr uint64_t kMany = 5'000;
  for (int what = 0; what < 4; what++) {
    CAPTURE(what);
    const bool releases = what % 2 == 0, snapshot_first = what / 2 == 0;
    Harness h(static_cast<uint64_t>(50 + what));
    h.release_step_chunks = 400;
    h.max_chunks = 8'000;
    h.format();
    h.open();
    fill(h, kMany, kTarget);
    REQUIRE(write_as(h, 1, v(1), {}, random_bytes(10, 1), 1, kOther) == 0);
    h.close();
    h.open();
    io::SimImage start = h.io->image();
    const size_t from = h.io->log().size();
    if (snapshot_first) {
      h.store->start_snapshot();
      // Some slices are written before, others after.
      for (size_t i = from; i + 2 > h.io->log().size();) h.io->run_once(0);
    }
    Plain op;
    if (releases) {
      h.store->release_target(kTarget, &op);
    } else {
      h.store->reset_target(kTarget, &op);
    }
    if (!snapshot_first) {
      for (int i = 0; i < 3; i++) h.io->run_once(0);
      h.store->start_snapshot();
    }
    h.run_until(op.finished);
    REQUIRE(op.error == 0);
    const size_t acknowledged = h.io->log().size();
    // The chunk comes back; the snapshot that is under way must not lose it.
    REQUIRE(install(h, 7, v(9), random_bytes(50, 7)) == 0);
    const size_t came_back = h.io->log().size();
    for (int i = 0; i < 5'000 && h.store->metrics().snapshots == 0; i++) {
      h.clock_us += 1'000;
      h.store->tick(h.clock_us);
      h.io->run_once(0);
    }
    REQUIRE(h.store->metrics().snapshots == 1);
    each_crash(h, std::move(start), from, 1, [&](Harness& after, size_t at) {
      const uint64_t chunks = after.store->usage(kTarget).chunks;
      const bool old = chunks == kMany && after.read(7, 0, 100).version == v(1);
      const bool seven = after.read(7, 0, 100).version == v(9);
      const size_t left = pendings(after);
      CHECK(left == retries(after));
      CHECK(retries(after, kOther) == 1);
      CHECK(pendings(after, kOther) == 1);
      CHECK((left == 0 || left == kMany / 50));
      if (at >= acknowledged) CHECK(left == 0);
      if (at >= came_back) CHECK(seven);
      if (releases) {
        CHECK((old ? left > 0 : chunks == (seven ? 1 : 0)));
        if (at >= acknowledged) CHECK_FALSE(old);
      } else {
        CHECK(chunks == kMany);
        CHECK((old || seven));
      }
    });
  }
}

TEST_CASE("crash: a chunk that comes back after a release is in the snapshot that began before it") {
  constexpr uint64_t kMany = 10'000;
  Harness h(60);
  h.release_step_chunks = 1'000;
  h.max_chunks = 12'000;
  h.format();
  h.open();
  fill(h, kMany, kTarget);  // several slices, before those of the other target
  fill(h, 30, kOther);
  h.close();
  h.open();
  io::SimImage start = h.io->image();
  const size_t from = h.io->log().size();
  h.store->start_snapshot();
  Plain op;
  h.store->release_target(kOther, &op);
  while (h.store->usage(kOther).chunks > 0) h.io->run_once(0);
  Install back(7, v(9), {});
  back.target = kOther;
  h.store->install(&back);
  h.run_until(back.finished);
  const size_t came_back = h.io->log().size();
  for (int i = 0; i < 5'000 && h.store->metrics().snapshots == 0; i++) h.io->run_once(0);
  REQUIRE(h.store->metrics().snapshots == 1);
  h.run_until(op.finished);
  REQUIRE(waited(h, [&](StoreOp* o) { h.store->set_space_epoch(kTarget, 1, {3, 0}, o); }) == 0);
  bool seen = false;
  each_crash(h, std::move(start), from, 1, [&](Harness& after, size_t at) {
    ChunkInfo info;
    const uint64_t chunks = after.store->usage(kOther).chunks;
    const bool seven = after.store->lookup(kOther, key_of(7), &info) && info.version == v(9);
    CHECK((chunks == 30 || chunks == (seven ? 1 : 0)));
    if (at >= came_back) CHECK(seven);
    CHECK(after.store->usage(kTarget).chunks == kMany);
    seen |= at >= came_back;
  });
  CHECK(seen);
}
