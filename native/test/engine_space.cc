// Space: what a full device still takes, compaction, room that agrees with what can be written, on the
// simulated disk. FAULTS S13, S25.
#include <algorithm>

#include "engine_space.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint64_t kMiB = 1 << 20;

uint32_t slot32(uint8_t c) {
  return static_cast<uint32_t>(slot_bytes(c));
}

// Leaves `slabs` free slabs besides the one that is kept for overwrites of whole slabs.
void leave_slabs(SpaceStore& s, uint64_t from, uint64_t slabs) {
  while (s.store->metrics().free_slabs > slabs + 1) REQUIRE(s.put(from++, 16 * kMiB) == 0);
}

void shuffle(SpaceStore& s, std::vector<uint64_t>* keys) {
  std::shuffle(keys->begin(), keys->end(), s.random);
}

}  // namespace

TEST_CASE("space: of each class, a full device took what it promised and still takes changes") {
  for (uint8_t c = 0; c < kClasses; c++) {
    CAPTURE(int{c});
    SpaceStore s(100 + c);
    s.sim->stop_logging();
    s.format(12'000);
    s.open();
    const bool small = c <= 3;  // of small slots only two slabs, or it takes long
    if (small) leave_slabs(s, 100'000, 2);
    REQUIRE(s.put(0, slot32(c)) == 0);  // the class is in use: its reserve is no room any more
    s.settle();
    const uint64_t promised = s.free_bytes();
    CHECK(promised > 0);
    const uint64_t took = s.fill(1, slot32(c) - 100);
    CHECK(took * slot_bytes(c) == promised);
    s.settle();
    CHECK(s.free_bytes() == 0);
    CHECK_FALSE(s.store->room_for(slot32(c)));
    CHECK(s.store->check_consistency() == "");

    std::vector<uint64_t> keys;
    for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
    shuffle(s, &keys);
    keys.resize(std::min<size_t>(keys.size(), 12));
    std::vector<std::unique_ptr<SpaceStore::Job>> together;
    for (uint64_t n : keys) together.push_back(s.start(UpdateKind::replace, n, s.chunks[n].size));
    for (auto& job : together) CHECK(s.end(*job) == 0);
    for (uint64_t n : keys)
      CHECK(s.put(n, s.chunks[n].size / 2 + 1) == 0);  // smaller: in a slot of the same class
    for (uint64_t n : keys) CHECK(s.truncate(n, s.chunks[n].size / 3) == 0);
    for (uint64_t n : keys) CHECK(s.wrong(n) == "");
    CHECK(s.put(50'000, slot32(c)) == ENOSPC);
    CHECK(s.remove(keys[0]) == 0);
    CHECK(s.remove(keys[1]) == 0);
    s.settle();
    CHECK(s.put(50'000, slot32(c)) == 0);
    CHECK(s.store->check_consistency() == "");
    s.reopen();
    CHECK(s.store->check_consistency() == "");
    CHECK(s.wrong(50'000) == "");
  }
}

TEST_CASE("space: with mixed classes each still has its overwrites when the device is full") {
  SpaceStore s(7, 400 * kMiB);
  s.sim->stop_logging();
  s.format(30'000);
  s.open();
  uint64_t n = 0;
  std::map<uint64_t, uint8_t> class_of;
  bool full[kClasses] = {};
  for (uint64_t left = kClasses; left > 0;) {
    const auto c = static_cast<uint8_t>(s.random() % kClasses);
    if (full[c]) continue;
    for (uint64_t i = 0; i < (c < 4 ? 60 : 1); i++) {
      const int error = s.put(n, slot32(c));
      if (error == 0) class_of[n++] = c;
      if (error == 0) continue;
      REQUIRE(error == ENOSPC);
      full[c] = true, left--;
      break;
    }
  }
  s.settle();
  CHECK(s.free_bytes() == 0);
  for (uint8_t c = 0; c < kClasses; c++) CHECK_FALSE(s.store->room_for(slot32(c)));
  for (int round = 0; round < 3; round++) {
    std::vector<std::unique_ptr<SpaceStore::Job>> together;
    for (uint64_t k = static_cast<uint64_t>(round); k < n; k += 7)
      together.push_back(s.start(UpdateKind::replace, k, s.chunks[k].size));
    for (auto& job : together) CHECK(s.end(*job) == 0);
  }
  for (uint8_t c = 0; c < kClasses; c++) CHECK(s.put(90'000 + c, slot32(c)) == ENOSPC);
  CHECK(s.all_wrong() == "");
  for (uint64_t k = 0; k < n; k++) CHECK(s.remove(k) == 0);
  s.settle();
  CHECK(s.free_bytes() == s.store->capacity().capacity_bytes);
}

TEST_CASE("space: half of the small chunks removed at random, then large ones: taken after compaction") {
  for (uint32_t large : {uint32_t{1} << 20, uint32_t{16} << 20}) {
    CAPTURE(large);
    SpaceStore s(11 + large);
    s.sim->stop_logging();
    s.format(12'000);
    s.open();
    const uint64_t small = s.fill(0, 64 << 10);
    REQUIRE(small > 2000);
    std::vector<uint64_t> keys;
    for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
    shuffle(s, &keys);
    keys.resize(keys.size() / 2);
    for (uint64_t n : keys) REQUIRE(s.remove(n) == 0);
    s.settle();
    const uint64_t promised = s.free_bytes();
    CHECK(promised >= small / 2 * (64 << 10) - 16 * kMiB);
    CHECK(s.store->metrics().free_slabs <= 1);
    const uint64_t took = s.fill(20'000, large) * large;
    const uint64_t more =
        s.fill(30'000, 64 << 10) * (64 << 10);  // what is left of the last slab of the small ones
    s.settle();
    CHECK(s.free_bytes() == 0);
    CHECK(took + more + large == promised);  // one slot of the class that came into use is kept
    const StoreMetrics m = s.store->metrics();
    MESSAGE("moved " << m.moves << " chunks, " << (m.moved_bytes >> 20) << " MiB, to place " << (took >> 20)
                     << " MiB; longest step " << m.longest_step_us << " us");
    CHECK(m.moves > 0);
    CHECK(m.moved_bytes <= took);  // the sparsest first: less than what was gained
    CHECK(m.slabs_emptied >= took / kSlabBytes);
    CHECK(s.all_wrong() == "");
    s.reopen();
    CHECK(s.all_wrong() == "");
  }
}

TEST_CASE("space: fill, delete, fill again for ten rounds: nothing grows") {
  SpaceStore s(13);
  s.sim->stop_logging();
  s.format(3'000);
  s.open();
  uint64_t took = 0, memory = 0;
  for (int round = 0; round < 10; round++) {
    CAPTURE(round);
    const uint64_t now = s.fill(0, 256 << 10);
    if (round == 0) took = now;
    CHECK(now == took);
    std::vector<uint64_t> keys;
    for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
    shuffle(s, &keys);
    for (uint64_t n : keys) REQUIRE(s.remove(n) == 0);
    s.settle();
    const StoreMetrics m = s.store->metrics();
    if (round == 1 || round == 5) memory = m.memory_bytes;  // after a full round since opening
    if (round > 1) CHECK(m.memory_bytes == memory);
    CHECK(s.store->capacity().chunks == 0);
    CHECK(s.free_bytes() == s.store->capacity().capacity_bytes);
    CHECK(s.store->usage(TargetId(SpaceStore::kTarget)).allocated_bytes == 0);
    CHECK(s.store->check_consistency() == "");
    if (round == 4) s.reopen();
    CHECK(m.journal_used_bytes <= m.journal_size_bytes * 3 / 4);
  }
}

TEST_CASE("space: updates wait for compaction, others pass them, an update takes a chunk from a move") {
  SpaceStore s(17);
  s.sim->stop_logging();
  s.format(12'000);
  s.open();
  const uint64_t small = s.fill(0, 5000, 1 << 20);  // in slots of 1 MiB
  REQUIRE(small > 100);
  std::vector<uint64_t> keys;
  for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
  shuffle(s, &keys);
  for (size_t i = 0; i < keys.size() / 2; i++) REQUIRE(s.remove(keys[i]) == 0);
  keys.erase(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(keys.size() / 2));
  s.settle();
  auto large = s.start(UpdateKind::replace, 60'000, 16 * kMiB);
  s.pass();
  CHECK_FALSE(large->finished);
  CHECK(s.store->compaction_need() == SpaceNeed::urgent);
  CHECK(s.store->metrics().waiting_for_room == 1);
  // Overwrites of all that may be moved, removals, puts that need no slab: none waits for the large one.
  std::vector<std::unique_ptr<SpaceStore::Job>> others;
  for (size_t i = 0; i < keys.size(); i++) {
    others.push_back(i % 5 == 0
                         ? s.start(UpdateKind::remove, keys[i], 0)
                         : s.start(UpdateKind::replace, keys[i], 4000 + static_cast<uint32_t>(i), 1 << 20));
    s.pass();
  }
  for (auto& job : others) CHECK(s.end(*job) == 0);
  CHECK(s.end(*large) == 0);
  CHECK(s.all_wrong() == "");
  CHECK(s.store->metrics().waiting_for_room == 0);
}

namespace {

// Moves begin, then an update comes to each chunk that still has its turn taken. How many moves fell.
uint64_t moves_that_yield(bool mutant) {
  SpaceStore s(19);
  s.sim->stop_logging();
  s.options.compact_eagerly = true;
  s.mutants.move_ignores_waiters = mutant;
  s.format();
  s.open();
  for (uint64_t n = 0; n < 40; n++) REQUIRE(s.put(n, 900'000) == 0);
  for (uint64_t n = 0; n < 40; n++) {
    if (n % 16 > 3) REQUIRE(s.remove(n) == 0);
  }
  s.settle();
  s.store->compact(8 << 20);
  for (int i = 0; i < 3; i++) s.pass();  // some pieces are on their way
  std::vector<std::unique_ptr<SpaceStore::Job>> jobs;
  std::vector<uint64_t> there;
  for (const auto& [n, chunk] : s.chunks) there.push_back(n);
  for (uint64_t n : there) jobs.push_back(s.start(UpdateKind::replace, n, 5000));
  for (auto& job : jobs) CHECK(s.end(*job) == 0);
  CHECK(s.all_wrong() == "");
  return s.store->metrics().moves_dropped;
}

}  // namespace

TEST_CASE("space: a move gives up its turn to an update; ignoring it is noticed") {
  CHECK(moves_that_yield(false) > 0);
  CHECK(moves_that_yield(true) == 0);
}

TEST_CASE("space: compaction in the background stays within what it is granted") {
  SpaceStore s(23);
  s.sim->stop_logging();
  s.options.compact_eagerly = true;
  s.format();
  s.open();
  for (uint64_t n = 0; n < 64; n++) REQUIRE(s.put(n, 900'000) == 0);
  for (uint64_t n = 0; n < 64; n++) {
    if (n % 16 > 5) REQUIRE(s.remove(n) == 0);
  }
  s.settle();
  CHECK(s.store->compaction_need() == SpaceNeed::soon);
  for (int i = 0; i < 1000; i++) s.pass();
  CHECK(s.store->metrics().moves == 0);  // nobody asked
  s.store->compact(1);                   // one chunk's worth: the last move may go over
  for (int i = 0; i < 1000; i++) s.pass();
  CHECK(s.store->metrics().moves == 1);
  s.compact_all();
  CHECK(s.store->metrics().free_slabs == s.store->capacity().capacity_bytes / kSlabBytes - 2);
  CHECK(s.store->compaction_need() == SpaceNeed::none);
  CHECK(s.all_wrong() == "");
  s.store->compact(1 << 20);  // nothing to gain
  s.settle();
  s.reopen();
  CHECK(s.all_wrong() == "");
}

TEST_CASE("space: a damaged chunk stays where it is, the others go") {
  SpaceStore s(29);
  s.sim->stop_logging();
  s.options.compact_eagerly = true;
  s.format();
  s.open();
  for (uint64_t n = 0; n < 32; n++) REQUIRE(s.put(n, 100'000, 1 << 20) == 0);
  s.settle();
  for (uint64_t n = 0; n < 32; n++) {
    if (n != 3 && n < 16) REQUIRE(s.remove(n) == 0);
    if (n >= 19) REQUIRE(s.remove(n) == 0);
  }
  s.settle();
  // The bytes of chunk 3, wherever they are: its second granule.
  std::vector<uint8_t> want(8192), page(8192);
  std::vector<uint8_t> whole(100'000);
  fill_pattern(whole.data(), 100'000, s.chunks[3].seed);
  std::memcpy(want.data(), whole.data() + 65536, 8192);
  uint64_t found = 0;
  for (uint64_t at = 0; at + 8192 <= s.sim->size_bytes(); at += 4096) {
    s.sim->image().read(at, page.data(), page.size());
    if (page != want) continue;
    s.sim->image().flip(at + 17, 4);
    found++;
  }
  REQUIRE(found == 1);
  const std::string before = s.wrong(3);
  REQUIRE(before.find("error") != std::string::npos);
  for (int i = 0; i < 200; i++) {
    s.store->compact(1 << 20);
    s.pass();
  }
  s.settle();
  CHECK(s.store->metrics().moves_dropped > 0);
  CHECK(s.wrong(3) == before);
  for (uint64_t n : {16, 17, 18}) CHECK(s.wrong(n) == "");
  CHECK(s.store->check_consistency() == "");
  s.put(3, 100'000);  // repaired
  s.compact_all();
  CHECK(s.all_wrong() == "");
}

TEST_CASE("space: batches of removals with missing and repeated keys") {
  SpaceStore s(31);
  s.sim->stop_logging();
  s.options.compact_eagerly = true;
  s.format();
  s.open();
  for (int round = 0; round < 6; round++) {
    for (uint64_t n = 0; n < 60; n++) REQUIRE(s.put(n, 6000, 2 << 20) == 0);
    std::vector<std::unique_ptr<SpaceStore::Job>> jobs;
    std::map<uint64_t, uint64_t> removed;
    s.store->compact(1 << 20);
    for (int i = 0; i < 80; i++) {
      const uint64_t n = s.random() % 90;  // some are repeated, some were never there
      auto job = s.start(UpdateKind::remove, n, 0);
      if (removed.count(n) != 0) job->op.base = Version{};
      removed[n]++;
      jobs.push_back(std::move(job));
      if (i % 7 == 0) s.pass();
    }
    for (auto& job : jobs) {
      s.run_until(job->finished);
      // A removal of what isn't there is one as well, or finds its base gone.
      CHECK((job->op.error == 0 || job->op.error == ESTALE));
      s.chunks.erase(job->n);
    }
    s.settle();
    CHECK(s.all_wrong() == "");
    for (const auto& [n, times] : removed) CHECK(s.wrong(n) == "");
  }
}

TEST_CASE("space: nothing is discarded before it may be, nor handed out while it is") {
  SpaceStore s(37);
  s.options.discard = Discard::on;
  s.options.discard_delay_us = 0;
  s.options.compact_eagerly = true;
  s.sim->stop_logging();
  s.format(3'000);
  s.open();
  for (int round = 0; round < 4; round++) {
    s.fill(0, 300'000);
    std::vector<uint64_t> keys;
    for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
    shuffle(s, &keys);
    std::vector<std::unique_ptr<SpaceStore::Job>> jobs;
    for (size_t i = 0; i < keys.size() * 3 / 4; i++) {
      jobs.push_back(s.start(UpdateKind::remove, keys[i], 0));
      if (i % 9 == 0) jobs.push_back(s.start(UpdateKind::replace, 50'000 + i, 4 * kMiB));
      if (i % 16 == 0) s.pass();
    }
    uint64_t refused = 0;  // at first there is no room yet
    for (auto& job : jobs) refused += s.end(*job) != 0;
    CHECK(refused < 6);
    CHECK(s.all_wrong() == "");
    s.settle();
    while (!s.chunks.empty()) REQUIRE(s.remove(s.chunks.begin()->first) == 0);
    for (int i = 0; i < 100; i++) s.pass();
    s.settle();
    CHECK(s.free_bytes() == s.store->capacity().capacity_bytes);
  }
  CHECK(s.sim->misuse() == "");
  const StoreMetrics m = s.store->metrics();
  CHECK(m.discards > 4);
  CHECK(m.discarded_bytes >= 4 * (s.store->capacity().capacity_bytes / 2));
  CHECK(m.discard_failures == 0);
  uint64_t bytes = 0;
  CHECK(s.store->discard_free(&bytes).ok());
  CHECK(bytes == s.store->capacity().capacity_bytes);
  CHECK(s.put(1, 100'000) == 0);
  CHECK(s.all_wrong() == "");
}

TEST_CASE("space: a large retry table is dropped at once, its memory by the helper thread") {
  SpaceStore s(41);
  s.sim->stop_logging();
  s.format(20'000);
  s.open();
  constexpr uint64_t kEntries = 6'000;
  const TargetId mine(SpaceStore::kTarget), other(78);
  for (uint64_t i = 0; i < kEntries; i++) {
    RetryEntry entry{i + 1, SpaceStore::key(i), v(1), RetryState::done, 0};
    s.store->retry_set(mine, ClientId(i + 1), ChainId(3), 0, entry, nullptr);
    if (i % 100 == 0) s.store->retry_set(other, ClientId(i + 1), ChainId(3), 0, entry, nullptr);
    if (i % 500 == 0) s.pass();
  }
  RetryEntry found;
  for (int round = 0; round < 2; round++) {
    bool done = false;
    StoreOp op;
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    s.store->reset_target(mine, &op);
    CHECK_FALSE(s.store->retry_lookup(mine, ClientId(1), ChainId(3), 0, &found));
    s.store->retry_set(mine, ClientId(9), ChainId(3), 0, {7, SpaceStore::key(9), v(2), RetryState::done, 0},
                       nullptr);
    s.run_until(done);
    CHECK(op.error == 0);
    CHECK(s.store->retry_lookup(mine, ClientId(9), ChainId(3), 0, &found));
    CHECK(found.sequence == 7);
    CHECK_FALSE(s.store->retry_lookup(mine, ClientId(kEntries), ChainId(3), 0, &found));
    CHECK(s.store->retry_lookup(other, ClientId(101), ChainId(3), 0, &found));
    CHECK(s.store->check_consistency() == "");
    if (round == 0) s.reopen();
  }
  s.reopen();
  CHECK(s.store->retry_lookup(mine, ClientId(9), ChainId(3), 0, &found));
  CHECK(s.store->retry_lookup(other, ClientId(101), ChainId(3), 0, &found));
}

TEST_CASE("space: an overwrite waits for the commit that frees the slot it needs, but not for ever") {
  for (bool commits : {true, false}) {
    CAPTURE(commits);
    SpaceStore s(43);
    s.sim->stop_logging();
    s.format();
    s.open();
    REQUIRE(s.fill(0, 8 << 20) > 10);
    s.settle();
    // The reserve goes to a version that stays pending.
    auto pending = s.start(UpdateKind::replace, 0, 8 << 20, 0, false);
    s.run_until(pending->finished);
    REQUIRE(pending->op.error == 0);
    auto waits = s.start(UpdateKind::replace, 1, 8 << 20);
    for (int i = 0; i < 2'000; i++) s.pass();  // 0.2 s
    CHECK_FALSE(waits->finished);
    CHECK(s.store->metrics().waiting_for_room == 1);
    CHECK(s.remove(2) == 0);  // others go on; this one gives its slot
    CHECK(s.end(*waits) == 0);
    auto again = s.start(UpdateKind::replace, 3, 8 << 20, 0, false);
    s.run_until(again->finished);
    REQUIRE(again->op.error == 0);
    auto last = s.start(UpdateKind::replace, 4, 8 << 20);
    for (int i = 0; i < 2'000; i++) s.pass();
    CHECK_FALSE(last->finished);
    if (commits)
      REQUIRE(s.store->commit(TargetId(SpaceStore::kTarget), SpaceStore::key(3), again->op.version).ok());
    if (commits) s.chunks[3] = again->after;
    const uint64_t since_us = s.clock_us;
    CHECK(s.end(*last) == (commits ? 0 : ENOSPC));
    CHECK(s.clock_us - since_us < 10'000'000);
    CHECK(s.wrong(3) == "");
    CHECK(s.wrong(4) == "");
    CHECK(s.store->check_consistency() == "");
  }
}

TEST_CASE("space: what is free says when max_chunks is reached") {
  SpaceStore s(47);
  s.sim->stop_logging();
  s.format(20);
  s.open();
  CHECK(s.free_bytes() > 0);
  for (uint64_t n = 0; n < 20; n++) {
    CHECK(s.store->room_for(4096));
    CHECK(s.put(n, 4096) == 0);
  }
  CHECK(s.free_bytes() == 0);
  CHECK_FALSE(s.store->room_for(4096));
  CHECK(s.put(20, 4096) == ENOSPC);
  CHECK(s.put(3, 4096) == 0);
  CHECK(s.remove(5) == 0);
  CHECK(s.free_bytes() == kMaxChunkBytes);  // of one more
  CHECK(s.put(20, 4096) == 0);
  CHECK(s.all_wrong() == "");
}

TEST_CASE("space: where nothing may be moved, a new chunk is refused soon, and taken when that is over") {
  SpaceStore s(53);
  s.sim->stop_logging();
  s.format();
  s.open();
  REQUIRE(s.fill(0, 5000, 1 << 20) > 100);
  std::vector<uint64_t> keys;
  for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
  for (uint64_t n : keys) {
    if (n % 2 == 0) REQUIRE(s.remove(n) == 0);
  }
  s.settle();
  std::vector<std::unique_ptr<SpaceStore::Job>> pending;
  for (const auto& [n, chunk] : s.chunks) {
    pending.push_back(s.start(UpdateKind::truncate, n, 4000, 0, false));
    s.run_until(pending.back()->finished);
    REQUIRE(pending.back()->op.error == 0);
  }
  CHECK(s.store->room_for(16 * kMiB));  // by the slots
  for (int i = 0; i < 3; i++) {
    const uint64_t since_us = s.clock_us;
    CHECK(s.put(90'000, 16 * kMiB) == ENOSPC);
    CHECK(s.clock_us - since_us < (i == 0 ? 6'000'000 : 1'000'000));
  }
  CHECK(s.store->metrics().moves == 0);
  for (auto& job : pending) {
    REQUIRE(s.store->commit(TargetId(SpaceStore::kTarget), SpaceStore::key(job->n), job->op.version).ok());
    s.chunks[job->n] = job->after;
  }
  CHECK(s.put(90'000, 16 * kMiB) == 0);
  CHECK(s.all_wrong() == "");
}
