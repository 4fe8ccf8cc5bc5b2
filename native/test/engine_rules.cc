// Rules of the store, each by hand on the simulated disk.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "engine/format.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

const TargetId kTarget(Harness::kTarget);

struct Plain : StoreOp {
  bool finished = false;
  Plain() {
    owner = &finished;
    done = [](StoreOp* op) { *static_cast<bool*>(op->owner) = true; };
  }
};

void wait(Harness& h, Plain& op) {
  h.run_until(op.finished);
}

}  // namespace

TEST_CASE("several pending versions: each is readable, commits and refusals keep their order") {
  Harness h(21);
  h.format();
  h.open();
  auto a = random_bytes(70'000, 1), b = random_bytes(5'000, 2), c = random_bytes(100, 3);
  REQUIRE(h.write(1, v(1), {}, 0, a, true) == 0);
  REQUIRE(h.write(1, v(2), v(1), 4096, b) == 0);
  REQUIRE(h.write(1, v(3), v(2), 70'000, c) == 0);
  std::vector<uint8_t> second = a;
  std::memcpy(second.data() + 4096, b.data(), b.size());
  std::vector<uint8_t> third = second;
  third.insert(third.end(), c.begin(), c.end());
  CHECK(h.read(1, 0, 100'000).bytes == a);
  auto dirty = h.read(1, 0, 100'000, v(2));
  CHECK(dirty.pending);
  CHECK(dirty.bytes == second);
  CHECK(h.read(1, 0, 100'000, v(3)).bytes == third);
  CHECK(h.read(1, 0, 100'000, v(4)).error == ENOENT);
  PendingInfo info;
  REQUIRE(h.store->pending_at(kTarget, key_of(1), 1, &info));
  CHECK(info.version == v(3));
  CHECK(info.base == v(2));
  CHECK(info.durable);
  CHECK(info.write_offset == 70'000);
  CHECK(info.length == 70'100);

  // The last is refused, another takes its place over the same blocks.
  Plain refusal;
  h.store->refuse(kTarget, key_of(1), v(3), {ClientId(9), 1, 4}, ChainId(2), ENOSPC, &refusal);
  wait(h, refusal);
  CHECK(refusal.error == 0);
  RetryEntry entry;
  REQUIRE(h.store->retry_lookup(kTarget, ClientId(9), ChainId(2), 1, &entry));
  CHECK(entry.state == RetryState::refused);
  CHECK(entry.error == ENOSPC);
  auto d = random_bytes(90'000, 4);
  REQUIRE(h.write(1, v(5), v(2), 70'000, d) == 0);
  std::vector<uint8_t> fifth = second;
  fifth.insert(fifth.end(), d.begin(), d.end());
  CHECK(h.read(1, 0, 200'000, v(5)).bytes == fifth);
  REQUIRE(h.commit(1, v(5)));
  CHECK(h.commit(1, v(5)));  // once more
  CHECK_FALSE(h.commit(1, v(2)));
  CHECK(h.pending_count(1) == 0);
  CHECK(h.read(1, 0, 200'000).bytes == fifth);
  CHECK(h.read(1, 0, 200'000, v(2)).version == v(5));  // at least
  h.close();
  h.open();
  CHECK(h.read(1, 0, 200'000).bytes == fifth);
}

TEST_CASE("an update that is refused while it is being staged doesn't come back") {
  Harness h(33);
  h.format();
  h.open();
  auto data = random_bytes(100'000, 1);
  Laid laid(0, data);
  StageOp op, built;
  int left = 2;
  for (StageOp* o : {&op, &built}) {
    o->target = kTarget;
    o->key = key_of(1);
    o->kind = UpdateKind::replace;
    o->length = 100'000;
    o->data = laid.data;
    o->identity = {ClientId(4), o == &op ? 1u : 2u, 7};
    o->owner = &left;
    o->done = [](StoreOp* done) { --*static_cast<int*>(done->owner); };
  }
  op.version = v(1);
  built.version = v(2);
  built.base = v(1);
  h.store->stage(&op);
  h.store->stage(&built);
  Plain refusal;
  h.store->refuse(kTarget, key_of(1), v(1), op.identity, ChainId(0), ENOSPC, &refusal);
  wait(h, refusal);
  for (int i = 0; left > 0 && i < 10'000; i++) h.io->run_once(0);
  CHECK(op.error == ESTALE);
  CHECK(built.error == ESTALE);
  ChunkInfo info;
  CHECK_FALSE(h.store->lookup(kTarget, key_of(1), &info));
  RetryEntry entry;
  REQUIRE(h.store->retry_lookup(kTarget, ClientId(4), ChainId(0), 1, &entry));
  CHECK(entry.state == RetryState::refused);
  CHECK(h.store->check_consistency() == "");
}

TEST_CASE("updates that contradict what is there are refused and change nothing") {
  Harness h(22);
  h.format();
  h.open();
  auto data = random_bytes(1'000, 1);
  REQUIRE(h.write(1, v(5), {}, 0, data, true) == 0);
  CHECK(h.write(1, v(5), v(5), 0, data) == EEXIST);
  CHECK(h.write(1, v(4), v(5), 0, data) == ESTALE);
  CHECK(h.write(1, v(6), v(3), 0, data) == ESTALE);
  CHECK(h.write(1, v(6), {}, 0, data) == ESTALE);
  CHECK(h.write(1, v(6), v(5), kMaxChunkBytes, data) == EINVAL);
  CHECK(h.write(1, Version{}, v(5), 0, data) == EINVAL);
  CHECK(h.write(1, v(6), v(5), 0, {}) == EINVAL);
  CHECK(h.truncate(1, v(6), v(5), kMaxChunkBytes + 1) == EINVAL);
  auto op = std::make_unique<StageOp>();
  op->key = key_of(1);
  op->version = v(6);
  op->base = v(5);
  op->kind = UpdateKind::write;
  op->length = 1'000;
  op->attributes.codec = 3;
  CHECK(h.stage(*op, data, 0) == EINVAL);
  CHECK(h.read(1, 0, 2'000).bytes == data);
  CHECK(h.pending_count(1) == 0);
  // Removal of nothing, creation after a removal.
  REQUIRE(h.remove(2, v(1), {}) == 0);
  REQUIRE(h.commit(2, v(1)));
  CHECK(h.read(2, 0, 10).error == ENOENT);
  REQUIRE(h.write(2, v(2), {}, 0, data, true) == 0);
  REQUIRE(h.remove(2, v(3), v(2)) == 0);
  CHECK(h.read(2, 0, 2'000).bytes == data);
  REQUIRE(h.write(2, v(4), v(3), 0, data) == 0);
  REQUIRE(h.commit(2, v(3)));
  CHECK(h.read(2, 0, 10).error == ENOENT);
  REQUIRE(h.commit(2, v(4)));
  CHECK(h.read(2, 0, 2'000).bytes == data);
  CHECK(h.store->check_consistency() == "");
}

TEST_CASE("an encoded chunk is stored and returned as it is") {
  Harness h(23);
  h.format();
  h.open();
  auto data = random_bytes(70'001, 1);
  auto op = std::make_unique<StageOp>();
  op->key = key_of(1);
  op->version = v(1);
  op->kind = UpdateKind::replace;
  op->length = 70'001;
  op->attributes.codec = 3;
  op->attributes.tag_bytes = 16;
  op->attributes.tag.fill(0x5a);
  op->attributes.expiry_ms = 123;
  op->attributes.flags = kFlagPinned;
  op->logical_length = 1'000'000;
  op->commit_now = true;
  REQUIRE(h.stage(*op, data, 0) == 0);
  CHECK(h.truncate(1, v(2), v(1), 10) == EINVAL);
  for (int round = 0; round < 2; round++) {
    auto got = h.read(1, 0, 2'000'000);
    CHECK(got.bytes == data);
    ChunkInfo info;
    REQUIRE(h.store->lookup(kTarget, key_of(1), &info));
    CHECK(info.length == 1'000'000);
    CHECK(info.stored_length == 70'001);
    CHECK(info.attributes.codec == 3);
    CHECK(info.attributes.tag[15] == 0x5a);
    CHECK(info.attributes.expiry_ms == 123);
    CHECK(info.attributes.flags == kFlagPinned);
    CHECK(info.checksums.size() == 2);
    h.close();
    h.open();
  }
}

TEST_CASE("retry entries, fences, space epochs and chain state outlive restarts") {
  Harness h(24);
  h.format();
  h.open();
  auto stage = [&](uint64_t key, uint64_t version, uint64_t client, uint64_t sequence, bool now) {
    auto op = std::make_unique<StageOp>();
    op->key = key_of(key);
    op->version = v(version);
    op->kind = UpdateKind::replace;
    auto data = random_bytes(10, 1);
    op->length = 10;
    op->identity = {ClientId(client), 4, sequence};
    op->chain = ChainId(6);
    op->commit_now = now;
    return h.stage(*op, data, 0);
  };
  REQUIRE(stage(1, 1, 50, 7, false) == 0);
  REQUIRE(stage(2, 1, 51, 8, true) == 0);
  auto state_of = [&](uint64_t client) {
    RetryEntry entry;
    if (!h.store->retry_lookup(kTarget, ClientId(client), ChainId(6), 4, &entry)) return 0;
    return static_cast<int>(entry.state);
  };
  CHECK(state_of(50) == 1);
  CHECK(state_of(51) == 2);
  Plain epoch, lower, gone, chain, fence;
  h.store->set_space_epoch(kTarget, 9, {5, 1000}, &epoch);
  h.store->set_space_epoch(kTarget, 9, {3, 500}, &lower);
  h.store->set_space_epoch(kTarget, 10, {2, 100}, &gone);
  h.store->expire_space_epochs(kTarget, 100, nullptr);
  std::vector<uint8_t> blob(4096, 0x77);
  h.store->set_chain_state(kTarget, blob, &chain);
  h.store->fence(ClientId(51), &fence);
  for (Plain* op : {&epoch, &lower, &gone, &chain, &fence}) wait(h, *op);
  Plain too_long;
  std::vector<uint8_t> longer(4097);
  h.store->set_chain_state(kTarget, longer, &too_long);
  wait(h, too_long);
  CHECK(too_long.error == EINVAL);
  for (int round = 0; round < 3; round++) {
    CHECK(state_of(50) == (round == 0 ? 1 : 2));
    CHECK(state_of(51) == 0);
    CHECK(h.store->fenced(ClientId(51)));
    // A forwarded update of a fenced client is taken, and leaves no entry.
    CHECK(stage(3 + static_cast<uint64_t>(round), 1, 51, 9, true) == 0);
    CHECK(state_of(51) == 0);
    CHECK(h.store->space_epoch(kTarget, 9).least_epoch == 5);
    CHECK(h.store->space_epoch(kTarget, 9).expiry_ms == 1000);
    CHECK(h.store->space_epoch(kTarget, 10).least_epoch == 0);
    CHECK(std::ranges::equal(h.store->chain_state(kTarget), blob));
    CHECK(h.store->chain_state(TargetId(78)).empty());
    if (round == 0) REQUIRE(h.commit(1, v(1)));
    if (round == 1) {
      h.store.reset();  // a crash
    } else {
      h.close();
    }
    h.open();
  }
}

TEST_CASE("chunks come in the order of their keys, by target") {
  Harness h(25);
  h.format();
  h.open();
  auto data = random_bytes(10, 1);
  for (uint64_t key : {305, 7, 120, 8, 299, 150, 101}) REQUIRE(h.write(key, v(key), {}, 0, data, true) == 0);
  REQUIRE(h.write(160, v(1), {}, 0, data) == 0);  // only pending
  std::vector<uint64_t> found;
  ChunkInfo info;
  ChunkKey at{};
  while (h.store->first_at_or_after(kTarget, at, &info)) {
    found.push_back(info.version.update);
    at = info.key;
    at.bytes[23]++;
  }
  CHECK(found == std::vector<uint64_t>{7, 8, 101, 120, 150, 299, 305});
  REQUIRE(h.store->last_of_space(kTarget, 2, &info));
  CHECK(info.version == v(150));
  CHECK_FALSE(h.store->last_of_space(kTarget, 5, &info));
  CHECK_FALSE(h.store->last_of_space(TargetId(78), 2, &info));
  REQUIRE(h.store->last_before(kTarget, key_of(120), &info));
  CHECK(info.version == v(101));
  CHECK_FALSE(h.store->last_before(kTarget, key_of(7), &info));
  ChunkKey pending;
  REQUIRE(h.store->first_pending_at_or_after(kTarget, key_of(120), &pending));
  CHECK(pending == key_of(160));
  SpaceStats stats = h.store->range_stats(kTarget, key_of(100), key_of(199), 100);
  CHECK(stats.complete);
  CHECK(stats.chunks == 3);
  CHECK(stats.bytes == 30);
  stats = h.store->range_stats(kTarget, key_of(0), key_of(999), 2);
  CHECK_FALSE(stats.complete);
  CHECK(stats.next == key_of(101));
}

TEST_CASE("a full device refuses, keeps room for overwrites, and gives room back") {
  Harness h(26);
  h.io->stop_logging();
  h.format();
  h.open();
  auto data = random_bytes(8 << 20, 1);
  uint64_t count = 0;
  int error = 0;
  while ((error = h.write(count, v(1), {}, 0, data, true)) == 0) count++;
  CHECK(error == ENOSPC);
  CHECK(count > 10);
  CHECK(h.read(count, 0, 10).error == ENOENT);
  for (uint64_t key = 0; key < count; key++) REQUIRE(h.write(key, v(2), v(1), 0, data, true) == 0);
  CHECK(h.store->check_consistency() == "");
  for (int round = 0; round < 3; round++) {  // S25: fill, delete, fill again
    for (uint64_t key = 0; key < count; key++) {
      REQUIRE(h.remove(key, v(10 + 10 * static_cast<uint64_t>(round)),
                       v(2 + 10 * static_cast<uint64_t>(round))) == 0);
      REQUIRE(h.commit(key, v(10 + 10 * static_cast<uint64_t>(round))));
    }
    CHECK(h.store->usage(kTarget).allocated_bytes == 0);
    for (uint64_t key = 0; key < count; key++) {
      REQUIRE(h.write(key, v(12 + 10 * static_cast<uint64_t>(round)), {}, 0, data, true) == 0);
    }
  }
  CHECK(h.store->usage(kTarget).chunks == count);
  CHECK(h.store->usage(kTarget).logical_bytes == count * data.size());
}

TEST_CASE("max_chunks is a limit of its own") {
  Harness h(27);
  FormatOptions options = Harness::format_options();
  options.max_chunks = 5;
  REQUIRE(ChunkStore::format_file(*h.io, h.io->disk(), h.io->size_bytes(), 512, options).ok());
  h.open();
  for (uint64_t key = 0; key < 5; key++) REQUIRE(h.write(key, v(1), {}, 0, {1, 2, 3}, true) == 0);
  CHECK(h.write(6, v(1), {}, 0, {1, 2, 3}, true) == ENOSPC);
  CHECK(h.write(1, v(2), v(1), 0, {1, 2, 3}, true) == 0);
  REQUIRE(h.remove(2, v(2), v(1)) == 0);
  REQUIRE(h.commit(2, v(2)));
  CHECK(h.write(6, v(1), {}, 0, {1, 2, 3}, true) == 0);
}

TEST_CASE("a failed flush or journal write poisons the store until it is opened again") {
  for (bool flush : {true, false}) {
    Harness h(28);
    h.format();
    h.open();
    auto data = random_bytes(5'000, 1);
    REQUIRE(h.write(1, v(1), {}, 0, data, true) == 0);
    if (flush) {
      h.io->fail_sync_after(1);
    } else {
      h.io->fail_write_after(2);  // the data goes first
    }
    CHECK(h.write(2, v(1), {}, 0, data, true) == EIO);
    CHECK(h.store->metrics().poisoned);
    CHECK(h.write(3, v(1), {}, 0, data, true) == EIO);
    CHECK_FALSE(h.store->commit(kTarget, key_of(2), v(9)).ok());
    Plain op;
    h.store->flush(&op);
    wait(h, op);
    CHECK(op.error == EIO);
    CHECK(h.read(1, 0, 10'000).bytes == data);  // reads go on
    CHECK(h.store->close().error().code == EIO);
    h.store.reset();
    h.open();
    CHECK_FALSE(h.store->metrics().poisoned);
    CHECK(h.read(1, 0, 10'000).bytes == data);
    CHECK(h.write(3, v(1), {}, 0, data, true) == 0);
  }
}

TEST_CASE("a failed data write fails its update alone where the record comes after the data") {
  Harness h(29);
  h.records_beside_data = false;
  h.format();
  h.open();
  auto data = random_bytes(5'000, 1);
  h.io->fail_write_after(1);
  CHECK(h.write(1, v(1), {}, 0, data, true) == EIO);
  CHECK_FALSE(h.store->metrics().poisoned);
  CHECK(h.write(1, v(2), {}, 0, data, true) == 0);
  CHECK(h.read(1, 0, 10'000).bytes == data);
}

TEST_CASE("rot on the device is found by reads that verify and never built upon") {
  Harness h(30);
  h.format();
  h.open();
  auto data = random_bytes(200'000, 1);
  REQUIRE(h.write(1, v(1), {}, 0, data, true) == 0);
  // Find the bytes on the disk and flip one in the second granule.
  std::vector<uint8_t> page(4096);
  uint64_t at = 0;
  for (; at < h.io->size_bytes(); at += 4096) {
    h.io->image().read(at, page.data(), page.size());
    if (std::memcmp(page.data(), data.data(), 4096) == 0) break;
  }
  REQUIRE(at < h.io->size_bytes());
  uint8_t flipped = static_cast<uint8_t>(data[70'000] ^ 1);
  h.io->image().write(at + 70'000, &flipped, 1);
  CHECK(h.read(1, 69'000, 10).error == EBADMSG);
  CHECK(h.read(1, 0, 60'000).error == 0);
  CHECK(h.read(1, 140'000, 60'000).error == 0);
  CHECK(h.write(1, v(2), v(1), 68'000, random_bytes(100, 2)) == EBADMSG);  // deferred, keeps rotten bytes
  CHECK(h.write(1, v(2), v(1), 1'000, random_bytes(190'000, 2)) == 0);     // replaces that granule whole
  REQUIRE(h.commit(1, v(2)));
  CHECK(h.read(1, 69'000, 10).error == 0);
  CHECK(h.store->metrics().checksum_errors == 2);
}

TEST_CASE("a hole in the flushed part of the journal is corruption, with its offset") {
  Harness h(31);
  h.format();
  h.open();
  for (uint64_t key = 0; key < 8; key++)
    REQUIRE(h.write(key, v(1), {}, 0, random_bytes(100, key), true) == 0);
  h.store.reset();
  uint8_t garbage[512];
  std::memset(garbage, 0x5a, sizeof garbage);
  h.io->image().write(kJournalOffset + 3 * kBlock, garbage, sizeof garbage);
  Status opened = h.try_open();
  REQUIRE_FALSE(opened.ok());
  CHECK(opened.error().code == EBADMSG);
  CHECK(ChunkStore::last_open_message().find(std::to_string(kJournalOffset + 3 * kBlock)) !=
        std::string::npos);
}

TEST_CASE("many updates of one chunk at once take effect in their order") {
  Harness h(32);
  h.format();
  h.open();
  constexpr int kOps = 40;
  std::vector<std::unique_ptr<StageOp>> ops;
  std::vector<std::unique_ptr<Laid>> memory;
  std::vector<uint8_t> model(1'000);
  int left = kOps;
  for (int i = 0; i < kOps; i++) {
    auto op = std::make_unique<StageOp>();
    auto data = random_bytes(700, static_cast<uint64_t>(i));
    op->offset = static_cast<uint32_t>(i * 31);
    if (model.size() < op->offset + data.size()) model.resize(op->offset + data.size());
    std::memcpy(model.data() + op->offset, data.data(), data.size());
    memory.push_back(std::make_unique<Laid>(op->offset, data));
    op->target = kTarget;
    op->key = key_of(1);
    op->version = v(static_cast<uint64_t>(i) + 1);
    op->base = v(static_cast<uint64_t>(i));
    op->kind = UpdateKind::write;
    op->length = 700;
    op->data = memory.back()->data;
    op->owner = &left;
    op->done = [](StoreOp* o) {
      CHECK(o->error == 0);
      --*static_cast<int*>(o->owner);
    };
    h.store->stage(op.get());
    ops.push_back(std::move(op));
  }
  for (int i = 0; left > 0 && i < 100'000; i++) {  // none is committed: time must pass until one is rebuilt
    h.store->tick(h.clock_us += 100);
    h.io->run_once(0);
  }
  REQUIRE(left == 0);
  model.resize(39 * 31 + 700);
  CHECK(h.pending_count(1) == kOps);
  CHECK(h.read(1, 0, 5'000, v(kOps)).bytes == model);
  REQUIRE(h.commit(1, v(kOps)));
  CHECK(h.read(1, 0, 5'000).bytes == model);
  CHECK(h.store->metrics().flushes < kOps);  // one flush for many
}
