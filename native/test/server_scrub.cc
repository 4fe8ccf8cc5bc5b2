// The scrubber alone, on a simulated disk and clock.
#include <doctest/doctest.h>

#include <set>

#include "engine_harness.h"
#include "server/scrub.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;
using ffs::server::Scrubber;

namespace {

const TargetId kFirst(Harness::kTarget), kSecond(78);

struct World {
  Harness h{71};
  std::vector<std::pair<TargetId, ChunkKey>> damaged;
  std::vector<std::pair<TargetId, ChunkKey>> compared;
  uint32_t ranges = 1;  // of each target
  uint64_t now_us = 5'000'000;
  std::vector<TargetId> targets{kSecond, kFirst};
  std::unique_ptr<Scrubber> scrubber;

  World() {
    h.format();
    h.open();
  }
  ~World() {
    while (scrubber && !scrubber->idle()) h.io->run_once(0);
    scrubber.reset();
  }
  void begin(uint64_t bytes_per_s, uint64_t least_pass_us = 0) {
    Scrubber::Events events;
    events.owner = this;
    events.damaged = [](void* owner, TargetId target, const ChunkKey& key, const Version& version) {
      CHECK(version == v(1));
      static_cast<World*>(owner)->damaged.emplace_back(target, key);
    };
    events.compare = [](void* owner, TargetId target, const ChunkKey& from) -> std::optional<ChunkKey> {
      auto self = static_cast<World*>(owner);
      self->compared.emplace_back(target, from);
      uint64_t n = 0;
      for (const auto& [other, key] : self->compared) n += other == target ? 1 : 0;
      if (n % self->ranges == 0) return std::nullopt;
      return key_of(n);
    };
    scrubber = std::make_unique<Scrubber>(*h.store, bytes_per_s, events, least_pass_us);
  }
  void tick(bool clients_active = false) {
    now_us += 20'000;
    scrubber->tick(now_us, targets, clients_active);
    for (int i = 0; i < 200 && !scrubber->idle(); i++) h.io->run_once(0);
  }
  std::vector<uint8_t> put(TargetId target, uint64_t key, size_t size) {
    auto bytes = random_bytes(size, key + target.value);
    InstallOp op;
    Laid laid(0, bytes);
    bool done = false;
    op.target = target;
    op.key = key_of(key);
    op.version = v(1);
    op.length = static_cast<uint32_t>(size);
    op.data = bytes.empty() ? nullptr : laid.data;
    op.tail_padded = true;
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    h.store->install(&op);
    h.run_until(done);
    REQUIRE(op.error == 0);
    return bytes;
  }
  void flip(const std::vector<uint8_t>& content, size_t at) {
    uint8_t block[4096];
    const size_t from = at / 4096 * 4096;
    for (uint64_t offset = 0; offset < h.io->size_bytes(); offset += 4096) {
      h.io->image().read(offset, block, sizeof block);
      if (std::memcmp(block, content.data() + from, std::min<size_t>(4096, content.size() - from)) != 0)
        continue;
      block[at - from] ^= 1;
      h.io->image().write(offset, block, sizeof block);
      return;
    }
    FAIL("no such content on the disk");
  }
  uint64_t passes() const {
    return std::min(scrubber->counts(kFirst).passes, scrubber->counts(kSecond).passes);
  }
};

}  // namespace

TEST_CASE("scrub: reads everything, finds each flipped bit, compares each target") {
  World w;
  w.ranges = 3;
  std::vector<uint8_t> big = w.put(kFirst, 1, 3'500'000);
  w.put(kFirst, 2, 0);
  std::vector<uint8_t> small = w.put(kFirst, 3, 10);
  w.put(kSecond, 1, 70'000);
  std::vector<uint8_t> other = w.put(kSecond, 9, 131'072);
  w.begin(400'000'000);
  while (w.passes() < 1) w.tick();
  CHECK(w.damaged.empty());
  CHECK(w.scrubber->counts(kFirst).bytes >= 3'500'010);
  CHECK(w.scrubber->counts(kSecond).bytes >= 201'072);
  for (TargetId target : w.targets) {
    std::vector<ChunkKey> from;
    for (const auto& [id, key] : w.compared) {
      if (id == target) from.push_back(key);
    }
    REQUIRE(from.size() >= 3);
    CHECK((from[0] == ChunkKey{} && from[1] == key_of(1) && from[2] == key_of(2)));
  }

  // In the last part of a chunk, in a tiny one, in the last byte; each found in the next pass, once in it.
  w.flip(big, 3'300'000);
  w.flip(small, 9);
  w.flip(other, 131'071);
  const uint64_t first = w.scrubber->counts(kFirst).passes, second = w.scrubber->counts(kSecond).passes;
  while (w.scrubber->counts(kFirst).passes < first + 2 || w.scrubber->counts(kSecond).passes < second + 2)
    w.tick();
  std::set<std::pair<TargetId, ChunkKey>> found(w.damaged.begin(), w.damaged.end());
  CHECK(found == std::set<std::pair<TargetId, ChunkKey>>{
                     {kFirst, key_of(1)}, {kFirst, key_of(3)}, {kSecond, key_of(9)}});
  CHECK(w.scrubber->counts(kFirst).damaged >= 2);
  CHECK(w.scrubber->counts(kSecond).damaged >= 1);
  CHECK(w.h.store->check_consistency() == "");
}

TEST_CASE("scrub: keeps its rate, a quarter of it while clients are served, nothing at 0") {
  World w;
  for (uint64_t i = 0; i < 40; i++) w.put(kFirst, i, 300'000);
  auto read_in = [&](int ticks, bool active) {
    const uint64_t before = w.scrubber->scrubbed_bytes(kFirst);
    for (int i = 0; i < ticks; i++) w.tick(active);
    return w.scrubber->scrubbed_bytes(kFirst) - before;
  };
  w.begin(0);
  CHECK(read_in(200, false) == 0);
  w.begin(1'000'000);
  const uint64_t alone = read_in(200, false);  // four seconds
  CHECK(alone >= 3'000'000);
  CHECK(alone <= 4'400'000);
  const uint64_t beside = read_in(200, true);
  CHECK(beside >= 600'000);
  CHECK(beside <= 1'400'000);
}

TEST_CASE("scrub: a pass begins only now and then; targets that leave are left alone") {
  World w;
  w.put(kFirst, 1, 100'000);
  w.put(kSecond, 1, 100'000);
  w.begin(400'000'000, 60'000'000);
  for (int i = 0; i < 100; i++) w.tick();
  // From a random target on: the first pass may be of the second one alone.
  const uint64_t once = w.scrubber->scrubbed_bytes(kSecond);
  CHECK(once == 100'000);
  for (int i = 0; i < 1'000; i++) w.tick();
  CHECK(w.scrubber->scrubbed_bytes(kSecond) == once);
  w.now_us += 60'000'000;
  for (int i = 0; i < 100; i++) w.tick();
  CHECK(w.scrubber->scrubbed_bytes(kSecond) == 2 * once);
  CHECK(w.scrubber->scrubbed_bytes(kFirst) >= 100'000);

  w.scrubber->forget(kFirst);
  w.targets = {kSecond};
  const uint64_t before = w.scrubber->scrubbed_bytes(kFirst);
  w.now_us += 60'000'000;
  for (int i = 0; i < 100; i++) w.tick();
  CHECK(w.scrubber->scrubbed_bytes(kFirst) == before);
  CHECK(w.scrubber->scrubbed_bytes(kSecond) == 3 * once);
}

TEST_CASE("scrub: chunks that change or go while they are read") {
  World w;
  for (uint64_t i = 0; i < 8; i++) w.put(kFirst, i, 2'500'000);
  w.begin(50'000'000);
  for (int i = 0; i < 30; i++) {
    w.tick();
    const uint64_t key = static_cast<uint64_t>(i) % 8;
    if (i % 2 == 0) {
      bool done = false;
      StoreOp op;
      op.owner = &done;
      op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
      w.h.store->erase(kFirst, key_of(key), &op);
      w.h.run_until(done);
    } else {
      w.put(kFirst, key, 1'200'000);
    }
  }
  while (w.passes() < 2) w.tick();
  CHECK(w.damaged.empty());
}
