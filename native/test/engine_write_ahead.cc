// While one group of the journal is being flushed the records of large updates go to the device already
// (docs/disk_format.md, Journal): when, when not, and what becomes of them if the device fails.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

// Keeps `depth` updates in flight, each of a chunk of its own, until `count` were started.
struct Loop {
  Loop(Harness& harness, uint32_t depth, uint32_t bytes, bool overwrite)
      : h(harness), kind(overwrite ? UpdateKind::write : UpdateKind::replace), payload(bytes, 0x11) {
    for (uint32_t i = 0; i < depth; i++) slots.push_back(std::make_unique<Slot>(this, i));
  }

  struct Slot {
    Slot(Loop* owner, uint64_t number) : loop(owner), chunk(number), laid(0, owner->payload) {
      op.target = TargetId(Harness::kTarget);
      op.key = key_of(number);
      op.data = laid.data;
      op.length = static_cast<uint32_t>(loop->payload.size());
      op.tail_padded = true;
      op.owner = this;
      op.done = [](StoreOp* o) { static_cast<Slot*>(o->owner)->ended(); };
    }
    void start() {
      loop->started++;
      op.kind = loop->kind;
      op.commit_now = !loop->commits;
      op.base = acknowledged;
      op.version = v(++version);
      loop->h.store->stage(&op);
    }
    void ended() {
      loop->ended++;
      if (op.error == 0) {
        acknowledged = op.version;
        if (loop->commits) CHECK(loop->h.store->commit(op.target, op.key, op.version).ok());
        if (loop->started < loop->count) start();
      } else {
        loop->errors.push_back(op.error);
      }
    }
    Loop* loop;
    uint64_t chunk;
    uint64_t version = 0;
    Version acknowledged;
    Laid laid;
    StageOp op;
  };

  void run(uint32_t updates) {
    count = started + updates;
    for (auto& slot : slots)
      if (slot->op.error == 0) slot->start();
    for (int i = 0; ended < started; i++) {
      FFS_CHECK(i < 1'000'000);
      if (ticks) h.store->tick(h.clock_us += 100);
      h.io->run_once(0);
    }
  }

  Harness& h;
  UpdateKind kind;
  std::vector<uint8_t> payload;
  std::vector<std::unique_ptr<Slot>> slots;
  bool commits = false;  // by records of their own, as the head of a chain does
  bool ticks = true;     // else nothing happens but for what ends
  std::vector<int> errors;
  uint64_t started = 0, ended = 0, count = 0;
};

}  // namespace

TEST_CASE("records of large updates are written while a flush is under way, those of small ones gather") {
  for (bool small : {false, true}) {
    CAPTURE(small);
    Harness h(21);
    h.write_ahead_bytes = 128 * 1024;
    h.format();
    h.open();
    Loop chunks(h, 16, 64 * 1024, false);
    chunks.run(16);
    h.settle_records();
    const StoreMetrics before = h.store->metrics();
    Loop small_ones(h, 16, 4096, true);
    for (size_t i = 0; i < 16; i++) {
      small_ones.slots[i]->version = chunks.slots[i]->version;
      small_ones.slots[i]->acknowledged = chunks.slots[i]->acknowledged;
    }
    (small ? small_ones : chunks).run(200);
    CHECK((small ? small_ones : chunks).errors.empty());
    const StoreMetrics after = h.store->metrics();
    const uint64_t ahead = after.groups_ahead - before.groups_ahead;
    if (small) {
      CHECK(ahead == 0);
    } else {
      CHECK(ahead > 5);
      // Each of them has two updates of 64 KiB or more.
      CHECK(after.journal_blocks - before.journal_blocks <= 150);
    }
  }
}

// What a disk does that ends everything in the order of its arrival: the journal's block stands right behind
// the data that was started with it.
TEST_CASE("what comes together is made durable by one flush, and nothing is flushed for nobody") {
  constexpr uint32_t kDepth = 16;
  constexpr uint64_t kRounds = 20;
  for (const bool beside : {true, false}) {
    CAPTURE(beside);
    io::SimDevice device;
    device.in_order = true;
    Harness h(22, device);
    h.records_beside_data = beside;
    h.format();
    h.open();
    Loop loop(h, kDepth, 64 * 1024, false);
    loop.commits = true;
    loop.run(kDepth);
    h.settle_records();
    const StoreMetrics before = h.store->metrics();
    loop.ticks = false;
    loop.run(kDepth * kRounds);
    CHECK(loop.errors.empty());
    const StoreMetrics after = h.store->metrics();
    const uint64_t flushes = after.flushes - before.flushes, ahead = after.groups_ahead - before.groups_ahead;
    // After the data: a flush begins while the next records are written, the device would stand still else.
    if (!beside) CHECK(ahead >= kRounds);
    CHECK(flushes <= (beside ? kRounds : 2 * kRounds));
    // All are acknowledged. What their commits wrote can wait for company, or for the next tick.
    for (int i = 0; i < 100; i++) h.io->run_once(0);
    CHECK(h.store->metrics().flushes == after.flushes);
  }
}

TEST_CASE("a device that fails at any write or flush ends all updates, and what was acknowledged stays") {
  uint64_t ahead = 0, poisonings = 0;
  for (bool flush : {true, false}) {
    for (uint64_t nth = 1; nth <= (flush ? 8u : 40u); nth++) {
      CAPTURE(flush);
      CAPTURE(nth);
      Harness h(1000 + nth);
      h.write_ahead_bytes = 4096;
      h.format();
      h.open();
      Loop loop(h, 6, 8 * 1024, false);
      loop.run(30);
      REQUIRE(loop.errors.empty());
      ahead += h.store->metrics().groups_ahead;
      flush ? h.io->fail_sync_after(nth) : h.io->fail_write_after(nth);
      loop.run(60);
      const bool poisoned = h.store->metrics().poisoned;
      poisonings += poisoned;
      if (flush) CHECK(poisoned);
      CHECK_FALSE(loop.errors.empty());
      if (!poisoned) CHECK(loop.errors.size() == 1);  // a write of data: its update alone
      h.settle();
      h.open();
      CHECK(h.store->check_consistency() == "");
      for (const auto& slot : loop.slots) {
        const ReadResult result = h.read(slot->chunk, 0, 8 * 1024);
        REQUIRE(result.error == 0);
        CHECK_FALSE(result.version < slot->acknowledged);
        CHECK(result.bytes == loop.payload);
      }
    }
  }
  CHECK(ahead > 100);
  CHECK(poisonings > 15);
}
