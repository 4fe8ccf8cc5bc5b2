// Records that are written beside their data (docs/disk_format.md, Journal): what goes to the device when,
// who sees the version before its data is there, and what becomes of it if the data never comes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "engine/format.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint32_t kBytes = 128 * 1024;

// An update that is started and waited for by hand.
struct Update {
  Update(Harness& harness, uint64_t number, Version version, Version base, uint32_t bytes, uint64_t seed)
      : h(harness), chunk(number), payload(random_bytes(bytes, seed)), laid(0, payload) {
    op.target = TargetId(Harness::kTarget);
    op.key = key_of(number);
    op.version = version;
    op.base = base;
    op.kind = UpdateKind::replace;
    op.length = bytes;
    op.data = laid.data;
    op.tail_padded = true;
    op.identity = {ClientId(5), static_cast<uint32_t>(number), version.update};
    op.chain = ChainId(3);
    op.owner = this;
    op.done = [](StoreOp* o) { static_cast<Update*>(o->owner)->done = true; };
  }
  void start() { h.store->stage(&op); }
  bool arriving() const {
    PendingInfo info;
    return h.store->find_pending(op.target, op.key, op.version, &info) && info.arriving;
  }
  Harness& h;
  uint64_t chunk;
  std::vector<uint8_t> payload;
  Laid laid;
  StageOp op;
  bool done = false;
};

Superblock layout(Harness& h) {
  Superblock super;
  h.io->image().read(0, reinterpret_cast<uint8_t*>(&super), sizeof super);
  return super;
}

// How often the power was cut at what place of the log with the data missing, and what was found.
std::string crash_everywhere(Harness& h, const io::SimImage& start, const Update& update, size_t from,
                             size_t acknowledged, uint64_t* lost) {
  io::CrashImages crashes(start);
  for (size_t i = 0; i < h.io->log().size(); i++) {
    crashes.advance(h.io->log()[i]);
    if (i < from) continue;
    for (const bool keep : {true, false}) {
      Harness cut(7, crashes.crash([&](size_t, size_t) { return keep; }));
      if (!cut.try_open().ok()) return ChunkStore::last_open_message();
      const ReadResult read = cut.read(update.chunk, 0, kBytes, update.op.version);
      if (read.error == ENOENT) {
        (*lost)++;
        if (i >= acknowledged) return "what was acknowledged is gone after event " + std::to_string(i);
      } else if (read.error != 0 || read.bytes != update.payload) {
        return "wrong bytes after event " + std::to_string(i);
      }
      if (const std::string wrong = cut.store->check_consistency(); !wrong.empty()) return wrong;
    }
  }
  return "";
}

}  // namespace

TEST_CASE("a record is written beside its data, and the flush waits for both, whichever comes first") {
  bool data_last = false, record_last = false;
  for (uint64_t seed = 1; seed <= 12; seed++) {
    CAPTURE(seed);
    Harness h(seed);
    h.format();
    h.open();
    h.settle_records();
    const uint64_t data_from = layout(h).data_offset;
    const size_t before = h.io->log().size();
    Update update(h, 1, v(1), {}, kBytes, seed);
    update.start();
    h.run_until(update.done);
    REQUIRE(update.op.error == 0);
    size_t data_started = 0, data_done = 0, record_started = 0, record_done = 0, flushed = 0, flushes = 0;
    for (size_t i = before; i < h.io->log().size(); i++) {
      const io::SimEvent& event = h.io->log()[i];
      const bool data = event.offset >= data_from;
      if (event.kind == io::SimEvent::write_started) (data ? data_started : record_started) = i;
      if (event.kind == io::SimEvent::write_done) (data ? data_done : record_done) = i;
      if (event.kind == io::SimEvent::sync_started) flushed = i, flushes++;
    }
    CHECK(flushes == 1);
    CHECK(std::max(data_started, record_started) < std::min(data_done, record_done));
    CHECK(flushed > std::max(data_done, record_done));
    (data_done > record_done ? data_last : record_last) = true;
  }
  CHECK(data_last);
  CHECK(record_last);
}

TEST_CASE("a version whose data is on its way isn't read, committed or built upon") {
  Harness h(40);
  h.format();
  h.open();
  Update first(h, 1, v(1), {}, kBytes, 1);
  first.start();
  h.run_until(first.done);
  REQUIRE(h.commit(1, v(1)));
  Update second(h, 1, v(2), v(1), kBytes, 2), third(h, 1, v(3), v(2), kBytes, 3);
  second.start();
  third.start();
  REQUIRE(second.arriving());
  CHECK(h.pending_count(1) == 1);  // the third has to wait
  CHECK(h.store->commit(second.op.target, second.op.key, v(2)).error().code == EBUSY);
  ReadOp early;
  bool read = false;
  early.target = second.op.target;
  early.key = second.op.key;
  early.at_least = v(2);
  early.length = kBytes;
  Laid into(0, std::vector<uint8_t>(kBytes));
  early.memory = into.data;
  early.owner = &read;
  early.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  h.store->read(&early);
  CHECK(h.read(1, 0, kBytes).bytes == first.payload);  // the committed one all the while
  h.run_until(read);
  CHECK(early.error == ENOENT);
  h.run_until(second.done);
  h.run_until(third.done);
  CHECK(second.op.error == 0);
  CHECK(third.op.error == 0);
  CHECK_FALSE(third.arriving());
  CHECK(h.read(1, 0, kBytes, v(2)).bytes == second.payload);
  CHECK(h.read(1, 0, kBytes, v(3)).bytes == third.payload);
}

TEST_CASE("an update that is refused while its data is on the way keeps its slot until the write has ended") {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    CAPTURE(seed);
    Harness h(seed);
    h.format();
    h.open();
    Update refused(h, 1, v(1), {}, kBytes, 1);
    refused.start();
    REQUIRE(refused.arriving());
    StoreOp refusal;
    bool refusal_done = false;
    refusal.owner = &refusal_done;
    refusal.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    h.store->refuse(refused.op.target, refused.op.key, v(1), refused.op.identity, refused.op.chain, ENOSPC,
                    &refusal);
    CHECK(h.pending_count(1) == 0);
    CHECK(h.store->check_consistency() == "");
    std::vector<std::unique_ptr<Update>> others;
    for (uint64_t i = 0; i < 8; i++) {
      others.push_back(std::make_unique<Update>(h, 2 + i, v(1), Version{}, kBytes, 10 + i));
      others.back()->start();
      h.io->run_once(0);
    }
    h.run_until(refused.done);
    h.run_until(refusal_done);
    CHECK(refused.op.error == ESTALE);
    CHECK(refusal.error == 0);
    for (const auto& other : others) h.run_until(other->done);
    CHECK(h.io->misuse() == "");
    h.settle_records();
    CHECK(h.store->check_consistency() == "");
    h.settle();
    h.open();
    CHECK(h.pending_count(1) == 0);
    RetryEntry entry;
    REQUIRE(h.store->retry_lookup(refused.op.target, ClientId(5), ChainId(3), 1, &entry));
    CHECK(entry.state == RetryState::refused);
    for (const auto& other : others) CHECK(h.read(other->chunk, 0, kBytes, v(1)).bytes == other->payload);
  }
}

TEST_CASE("the power fails with the record on the device and the data not, and the other way round") {
  for (uint64_t seed = 1; seed <= 4; seed++) {
    CAPTURE(seed);
    Harness h(seed);
    h.format();
    h.open();
    h.settle_records();
    const io::SimImage start = h.io->image();
    Harness run(seed, start);
    run.open();
    const size_t from = run.io->log().size();
    Update update(run, 1, v(1), {}, kBytes, seed);
    update.start();
    run.run_until(update.done);
    uint64_t lost = 0;
    CHECK(crash_everywhere(run, start, update, from, run.io->log().size() - 1, &lost) == "");
    CHECK(lost > 4);
  }
}

TEST_CASE(
    "a device that takes the record and not the data is poisoned, and the version is gone after a restart") {
  for (const bool unreadable : {false, true}) {
    for (uint64_t seed = 1; seed <= 4; seed++) {
      CAPTURE(unreadable);
      CAPTURE(seed);
      io::SimDevice device;
      device.in_order = true;
      Harness h(seed, device);
      h.format();
      const io::SimImage start = h.io->image();
      h.open();
      Update good(h, 1, v(1), {}, kBytes, 1);
      good.start();
      h.run_until(good.done);
      REQUIRE(h.commit(1, v(1)));
      h.settle_records();
      Update bad(h, 1, v(2), v(1), kBytes, 2), beside(h, 2, v(1), {}, kBytes, 3);
      const size_t from = h.io->log().size();
      h.io->fail_write_after(1);
      bad.start();
      beside.start();
      h.run_until(bad.done);
      h.run_until(beside.done);
      CHECK(bad.op.error == EIO);
      CHECK(beside.op.error == EIO);  // its record may stand behind the other's
      CHECK(h.store->metrics().poisoned);
      CHECK(h.read(1, 0, kBytes).bytes == good.payload);
      uint64_t failed_at = 0;
      for (size_t i = from; i < h.io->log().size() && failed_at == 0; i++) {
        if (h.io->log()[i].kind == io::SimEvent::write_started) failed_at = h.io->log()[i].offset;
      }
      // Nothing says that the record was flushed, also if the power fails.
      uint64_t lost = 0;
      CHECK(crash_everywhere(h, start, bad, from, SIZE_MAX, &lost) == "");
      CHECK(lost > 0);
      h.settle();
      REQUIRE(failed_at >= layout(h).data_offset);
      if (unreadable) h.io->fail_reads(failed_at, failed_at + 4096);
      h.open();
      CHECK(h.pending_count(1) == 0);
      CHECK(h.read(1, 0, kBytes).bytes == good.payload);
      h.io->fail_reads(0, 0);
      CHECK(h.write(1, v(3), v(1), 0, good.payload) == 0);
      CHECK(h.store->check_consistency() == "");
    }
  }
}

TEST_CASE("what is larger than 4 MiB has its record after its data, so that small ones don't wait for it") {
  io::SimDevice device;
  device.in_order = true;
  Harness h(50, device);
  h.format();
  h.open();
  Update large(h, 1, v(1), {}, (4u << 20) + 4096, 1), most(h, 2, v(1), {}, 4u << 20, 2);
  large.start();
  CHECK_FALSE(
      h.store->find_pending(large.op.target, large.op.key, v(1), std::make_unique<PendingInfo>().get()));
  most.start();
  CHECK(most.arriving());
  h.run_until(large.done);
  h.run_until(most.done);
  CHECK(large.op.error == 0);
  CHECK(most.op.error == 0);
}
