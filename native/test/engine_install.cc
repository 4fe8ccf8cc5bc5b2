// Whole versions put over others, and what recovery makes of them.
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

TEST_CASE("install: over nothing, older, the same and newer versions; pendings go, retry entries stay") {
  Harness h(1);
  h.format();
  h.open();
  auto a = random_bytes(300'000, 1), b = random_bytes(70'001, 2), c = random_bytes(10, 3);
  REQUIRE(install(h, 1, v(5), a) == 0);
  CHECK(h.read(1, 0, 400'000).bytes == a);
  REQUIRE(install(h, 1, v(9), b) == 0);
  CHECK(h.read(1, 0, 400'000).version == v(9));
  REQUIRE(write_as(h, 1, v(10), v(9), a, 7) == 0);
  REQUIRE(h.write(1, v(11), v(10), 100, c) == 0);
  REQUIRE(install(h, 1, v(4), c) == 0);  // older
  CHECK(h.pending_count(1) == 0);
  CHECK(h.read(1, 0, 400'000).bytes == c);
  CHECK(retries(h) == 1);
  REQUIRE(install(h, 1, v(4), a) == 0);  // the same version
  CHECK(h.read(1, 0, 400'000).bytes == a);
  REQUIRE(install(h, 2, v(1), {}) == 0);  // empty
  reopen(h);
  CHECK(h.read(1, 0, 400'000).bytes == a);
  CHECK(h.read(2, 0, 10).bytes.empty());
  CHECK(retries(h) == 1);
  // Updates go on from what was installed.
  REQUIRE(h.write(1, v(20), v(4), 300'000, b) == 0);
  REQUIRE(h.commit(1, v(20)));
  a.insert(a.end(), b.begin(), b.end());
  CHECK(h.read(1, 0, 400'000).bytes == a);
  CHECK(h.store->usage(kTarget).chunks == 2);
}

TEST_CASE("install with a condition: only over that version; newer pendings stay and can be committed") {
  Harness h(2);
  h.format();
  h.open();
  auto a = random_bytes(200'000, 1), tail = random_bytes(9'000, 2), over = random_bytes(50, 3);
  CHECK(install(h, 1, v(1), a, v(1)) == ECANCELED);  // nothing there
  REQUIRE(h.write(1, v(1), {}, 0, a, true) == 0);
  CHECK(install(h, 1, v(2), a, v(2)) == ECANCELED);
  CHECK(h.read(1, 0, 400'000).version == v(1));
  REQUIRE(h.write(1, v(2), v(1), 200'000, tail) == 0);  // in place
  REQUIRE(h.write(1, v(3), v(2), 5, over) == 0);        // an overlay
  CHECK(install(h, 1, v(2), a, v(2)) == ECANCELED);     // pending isn't committed
  REQUIRE(install(h, 1, v(1), a, v(1)) == 0);
  CHECK(h.pending_count(1) == 2);
  CHECK(h.store->check_consistency() == "");
  auto second = a;
  second.insert(second.end(), tail.begin(), tail.end());
  auto third = second;
  std::memcpy(third.data() + 5, over.data(), over.size());
  CHECK(h.read(1, 0, 400'000).bytes == a);
  CHECK(h.read(1, 0, 400'000, v(2)).bytes == second);
  CHECK(h.read(1, 0, 400'000, v(3)).bytes == third);
  reopen(h);
  CHECK(h.read(1, 0, 400'000).bytes == a);
  CHECK(h.read(1, 0, 400'000, v(3)).bytes == third);
  REQUIRE(h.commit(1, v(3)));
  CHECK(h.read(1, 0, 400'000).bytes == third);
  reopen(h);
  CHECK(h.read(1, 0, 400'000).bytes == third);
}

TEST_CASE("install: a commit while its bytes are written makes the condition false; nothing is left behind") {
  Harness h(3);
  h.format();
  h.open();
  auto a = random_bytes(200'000, 1), b = random_bytes(1'000'000, 2);
  REQUIRE(h.write(1, v(1), {}, 0, a, true) == 0);
  REQUIRE(h.write(1, v(2), v(1), 0, b) == 0);
  Install op(1, v(1), a, v(1));
  h.store->install(&op);
  REQUIRE_FALSE(op.finished);
  REQUIRE(h.commit(1, v(2)));
  h.run_until(op.finished);
  CHECK(op.error == ECANCELED);
  CHECK(h.read(1, 0, 2'000'000).bytes == b);
  CHECK(waited(h, [&](StoreOp* flush) { h.store->flush(flush); }) == 0);
  CHECK(h.store->check_consistency() == "");
}

TEST_CASE("install keeps what readers have, and codec, tag, flags, expiry") {
  Harness h(4);
  h.format();
  h.open();
  auto a = random_bytes(500'000, 1), b = random_bytes(500'000, 2);
  REQUIRE(h.write(1, v(1), {}, 0, a, true) == 0);
  auto reader = std::make_unique<ReadOp>();
  Laid into(0, std::vector<uint8_t>(500'000));
  bool read_done = false;
  reader->target = kTarget;
  reader->key = key_of(1);
  reader->length = 500'000;
  reader->memory = into.data;
  reader->owner = &read_done;
  reader->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  h.store->read(reader.get());
  Install op(1, v(2), b);
  op.attributes.codec = 3;
  op.attributes.flags = kFlagPinned;
  op.attributes.expiry_ms = 77;
  op.attributes.tag_bytes = 2;
  op.attributes.tag = {0xaa, 0xbb};
  op.logical_length = 2'000'000;
  h.store->install(&op);
  h.run_until(op.finished);
  h.run_until(read_done);
  REQUIRE(op.error == 0);
  REQUIRE(reader->error == 0);
  CHECK(std::memcmp(into.data, a.data(), a.size()) == 0);
  reopen(h);
  ChunkInfo info;
  REQUIRE(h.store->lookup(kTarget, key_of(1), &info));
  CHECK(info.length == 2'000'000);
  CHECK(info.stored_length == 500'000);
  CHECK(info.attributes.codec == 3);
  CHECK(info.attributes.flags == kFlagPinned);
  CHECK(info.attributes.expiry_ms == 77);
  CHECK(info.attributes.tag[1] == 0xbb);
  CHECK(h.read(1, 0, 600'000).bytes == b);
}

TEST_CASE("install and erase wait for the updates before them") {
  Harness h(5);
  h.format();
  h.open();
  auto a = random_bytes(300'000, 1), b = random_bytes(200'000, 2);
  for (int round = 0; round < 4; round++) {
    StageOp first, second;
    Laid laid(0, a);
    bool first_done = false, second_done = false;
    auto fill = [&](StageOp& op, bool& done, uint64_t version, Version base) {
      op.target = kTarget;
      op.key = key_of(1);
      op.version = v(version);
      op.base = base;
      op.kind = UpdateKind::replace;
      op.length = 300'000;
      op.data = laid.data;
      op.tail_padded = true;
      op.owner = &done;
      op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    };
    const auto n = static_cast<uint64_t>(round) * 10;
    fill(first, first_done, n + 1, {});
    h.store->stage(&first);
    Plain erased;
    Install installed(1, v(n + 5), b);
    const bool with_install = round % 2 == 0;
    if (with_install) {
      h.store->install(&installed);
      fill(second, second_done, n + 6, v(n + 5));
    } else {
      h.store->erase(kTarget, key_of(1), &erased);
      fill(second, second_done, n + 6, {});
    }
    h.store->stage(&second);
    h.run_until(second_done);
    h.run_until(first_done);
    h.run_until(with_install ? installed.finished : erased.finished);
    CHECK(first.error == 0);
    CHECK(second.error == 0);
    CHECK(h.pending_count(1) == 1);
    CHECK(h.read(1, 0, 400'000, v(n + 6)).bytes == a);
    CHECK(h.read(1, 0, 400'000).error == (with_install ? 0 : ENOENT));
    CHECK(erase(h, 1) == 0);
    CHECK(erase(h, 1) == 0);  // and again
    CHECK(h.read(1, 0, 400'000, v(n + 6)).error == ENOENT);
    CHECK(h.store->check_consistency() == "");
  }
  CHECK(h.store->usage(kTarget).chunks == 0);
  reopen(h);
  CHECK(h.store->usage(kTarget).allocated_bytes == 0);
}

TEST_CASE("install without room: ENOSPC, the old version stays; over an old one there is room") {
  Harness h(6);
  h.format();
  h.open();
  auto big = random_bytes(3 << 20, 1);
  uint64_t chunks = 0;
  while (install(h, 100 + chunks, v(1), big) == 0) chunks++;
  REQUIRE(chunks > 5);
  const uint64_t free_bytes = h.store->capacity().free_bytes;
  CHECK(install(h, 99, v(1), big) == ENOSPC);
  CHECK(h.store->capacity().free_bytes == free_bytes);
  ChunkInfo info;
  CHECK_FALSE(h.store->lookup(kTarget, key_of(99), &info));
  auto other = random_bytes(3 << 20, 2);
  CHECK(install(h, 100, v(1), other, v(1)) == 0);  // a repair on a full device
  CHECK(h.read(100, 0, 4 << 20).bytes == other);
  CHECK(h.store->check_consistency() == "");
  REQUIRE(erase(h, 101) == 0);
  CHECK(install(h, 99, v(1), big) == 0);
}

TEST_CASE("damage: told from absence, keeps a stage from its base each time, cured by an install") {
  Harness h(7);
  h.format();
  h.open();
  auto a = random_bytes(200'000, 1);
  REQUIRE(h.write(1, v(1), {}, 0, a, true) == 0);
  CHECK(verify(h, 1, v(1), 200'000) == 0);
  CHECK(verify(h, 1, v(2), 200'000) == ENOENT);
  CHECK(verify(h, 2, v(1), 200'000) == ENOENT);
  damage(h, a, 70'000);
  CHECK(verify(h, 1, v(1), 200'000) == EBADMSG);
  CHECK(h.read(1, 66'000, 10).error == EBADMSG);
  CHECK(h.read(1, 0, 65'536).error == 0);
  for (uint64_t n = 2; n < 5; n++) {
    CHECK(h.write(1, v(n), v(1), 70'100, random_bytes(50, n)) == EBADMSG);  // deferred
    CHECK(h.write(1, v(n), v(1), 100, random_bytes(180'000, n)) == 0);      // replaces the damage
    CHECK(h.pending_count(1) == 1);
    REQUIRE(waited(h, [&](StoreOp* op) {
              h.store->refuse(kTarget, key_of(1), v(n), {}, ChainId(3), 1, op);
            }) == 0);
    CHECK(h.truncate(1, v(n), v(1), 80'000) == EBADMSG);                     // a cut
    CHECK(h.write(1, v(n), v(1), 100, random_bytes(66'000, n)) == EBADMSG);  // rebuilt
  }
  CHECK_FALSE(h.store->metrics().poisoned);
  CHECK(h.pending_count(1) == 0);
  CHECK(install(h, 1, v(1), a, v(1)) == 0);
  CHECK(verify(h, 1, v(1), 200'000) == 0);
  auto patch = random_bytes(50, 9);
  REQUIRE(h.write(1, v(9), v(1), 70'100, patch) == 0);
  REQUIRE(h.commit(1, v(9)));
  std::memcpy(a.data() + 70'100, patch.data(), patch.size());
  CHECK(h.read(1, 0, 200'000).bytes == a);
  reopen(h);
  CHECK(verify(h, 1, v(9), 200'000) == 0);
}

TEST_CASE("a device of the version before is opened, and refuses to go back") {
  Harness h(12);
  h.format();
  Superblock super;
  h.io->image().read(kSuperblockOffset[1], reinterpret_cast<uint8_t*>(&super), sizeof super);
  CHECK(super.incompat == kOurIncompat);
  for (uint64_t i = 0; i < 2; i++) {
    h.io->image().read(kSuperblockOffset[i], reinterpret_cast<uint8_t*>(&super), sizeof super);
    super.incompat = 0;
    seal_superblock(&super);
    h.io->image().write(kSuperblockOffset[i], reinterpret_cast<uint8_t*>(&super), sizeof super);
  }
  h.open();
  CHECK(h.store->identity().features_incompat == kOurIncompat);
  auto a = random_bytes(10'000, 1);
  REQUIRE(install(h, 1, v(1), a) == 0);
  reopen(h);
  CHECK(h.read(1, 0, 20'000).bytes == a);
  CHECK(h.store->identity().features_incompat == kOurIncompat);
}

TEST_CASE("recovery of chunks with many small overwrites since the last snapshot") {
  for (int what = 0; what < 4; what++) {
    CAPTURE(what);
    Harness h(static_cast<uint64_t>(13 + what));
    h.format();
    h.open();
    auto model = random_bytes(100'000, 1);
    REQUIRE(h.write(1, v(1), {}, 0, model, true) == 0);
    uint64_t version = 1;
    auto put = [&](bool commit) {
      auto data = random_bytes(3'000, version);
      const uint32_t offset = static_cast<uint32_t>(version * 977 % 90'000);
      REQUIRE(h.write(1, v(version + 1), v(version), offset, data, commit) == 0);
      version++;
      if (commit) std::memcpy(model.data() + offset, data.data(), data.size());
    };
    for (int i = 0; i < 150; i++) {
      put(true);
      if (i % 10 != 0) continue;
      for (int j = 0; j < 20; j++) {  // so that they go into their slot
        h.clock_us += 20'000;
        h.store->tick(h.clock_us);
        for (int k = 0; k < 20; k++) h.io->run_once(0);
      }
    }
    REQUIRE(h.store->metrics().snapshots == 0);
    const uint64_t committed = version;
    if (what >= 1) put(false), put(false);
    // The pendings keep the old slot and all that lies over it.
    if (what >= 2) REQUIRE(install(h, 1, v(committed), model, v(committed)) == 0);
    for (int again = 0; again < 3; again++) {
      h.settle();  // not closed: a crash
      h.open();
      CHECK(h.store->check_consistency() == "");
      CHECK(h.pending_count(1) == (what >= 1 ? 2 : 0));
      CHECK(h.read(1, 0, 200'000).bytes == model);
      if (what == 3) {  // what was replayed fits a snapshot
        h.store->start_snapshot();
        while (h.store->metrics().snapshots == 0) {
          h.clock_us += 1'000;
          h.store->tick(h.clock_us);
          h.io->run_once(0);
        }
      }
    }
    if (what >= 1) {
      REQUIRE(h.commit(1, v(version)));
      for (uint64_t n = committed; n < version; n++) {
        auto data = random_bytes(3'000, n);
        std::memcpy(model.data() + n * 977 % 90'000, data.data(), data.size());
      }
      CHECK(h.read(1, 0, 200'000).bytes == model);
      reopen(h);
      CHECK(h.read(1, 0, 200'000).bytes == model);
    }
  }
}
