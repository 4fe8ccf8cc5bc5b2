// The index and what eviction asks of it: against models, with restarts.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <unordered_map>

#include "engine/allocator.h"
#include "engine/record.h"
#include "engine/state.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

using Entry = std::pair<uint16_t, ChunkKey>;

ChunkKey random_key(std::mt19937_64& random, uint64_t spaces) {
  std::array<uint8_t, 16> key{};
  for (auto& byte : key) byte = static_cast<uint8_t>(random());
  return ChunkKey::of(1 + random() % spaces, key);
}

std::vector<uint32_t> in_order(const Index& index, const Entry& from, bool strictly) {
  std::vector<uint32_t> found;
  index.walk(from.first, from.second, strictly, [&](uint32_t chunk) {
    found.push_back(chunk);
    return true;
  });
  return found;
}

}  // namespace

// docs/operations.md, Memory: counted by what the index and the map of slots say of themselves, rooms that
// they keep free included, at every size on the way and after long changes.
TEST_CASE("index: a chunk takes at most 192 bytes with 16 checksums, and what its size needs with others") {
  struct Size {
    uint32_t granules;
    uint8_t place_class;
    uint64_t most_bytes;
  };
  for (const Size size : {Size{16, 8, 192}, Size{1, 0, 132}, Size{4, 6, 144}, Size{256, 12, 1'184}}) {
    CAPTURE(size.granules);
    constexpr uint32_t kChunks = 60'000, kFrom = 20'000;
    std::mt19937_64 random(size.granules);
    Index index(kChunks);
    const uint32_t slab_chunks = 1u << (12 - size.place_class);
    Allocator allocator(1 << 20, kChunks / slab_chunks + 1);
    std::vector<Entry> there;
    auto add = [&] {
      const Entry key{random() % 2, random_key(random, 8)};
      Chunk& chunk = index[index.insert(key.first, key.second)];
      chunk.image.sums = index.sums.add(size.granules);
      const uint64_t place = allocator.allocate(size.place_class, Allocator::Asker::update);
      REQUIRE(place != 0);
      chunk.image.place = place;
      there.push_back(key);
    };
    // Arenas grow by pages: one of chunks, one of checksums and a part of the hash may have just begun.
    constexpr uint64_t kPages = 1024 * sizeof(Chunk) + 65536 + 4096;
    uint64_t most_over = 0;
    while (there.size() < kChunks) {
      add();
      // The map of slots is made for the whole device at once: its share counts.
      const uint64_t map_bytes = allocator.memory_bytes() * there.size() / kChunks;
      const uint64_t bytes = index.memory_bytes() + map_bytes,
                     allowed = size.most_bytes * there.size() + kPages;
      if (there.size() >= kFrom && bytes > allowed) most_over = std::max(most_over, bytes - allowed);
    }
    CHECK(most_over == 0);
    CHECK(index.memory_bytes() >= (112 + 4 * size.granules) * uint64_t{kChunks});  // it counts all of it
    const uint64_t full = index.memory_bytes();
    for (uint32_t step = 0; step < kChunks; step++) {
      std::swap(there[random() % there.size()], there.back());
      const uint32_t chunk = index.find(there.back().first, there.back().second);
      index.sums.remove(index[chunk].image.sums, size.granules);
      allocator.free(index[chunk].image.place, size.place_class);
      index.erase(chunk);
      there.pop_back();
      add();
    }
    CHECK(index.memory_bytes() <= full + full / 100);  // segments of the hash may split once more
    CHECK(index.memory_bytes() + allocator.memory_bytes() <= size.most_bytes * kChunks + kPages);
  }
}

TEST_CASE("index: hash and order agree with a map over random changes") {
  for (uint64_t seed = 1; seed <= 3; seed++) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    Index index(4'000);
    std::map<Entry, uint32_t> model;
    if (seed == 3) {  // begun by appending, as from a snapshot, then changed
      std::set<Entry> keys;
      while (keys.size() < 5'000) keys.insert({random() % 3, random_key(random, 4)});
      for (const Entry& key : keys) model[key] = index.append(key.first, key.second);
    }
    for (int step = 0; step < 20'000; step++) {
      const Entry key{random() % 3, random_key(random, 4)};
      if (model.empty() || random() % 5 < 3) {
        if (model.contains(key)) continue;
        const bool last = model.empty() || model.rbegin()->first < key;
        model[key] = last ? index.append(key.first, key.second) : index.insert(key.first, key.second);
      } else {
        auto at = model.lower_bound(key);
        if (at == model.end()) at = model.begin();
        REQUIRE(index.find(at->first.first, at->first.second) == at->second);
        index.erase(at->second);
        REQUIRE(index.find(at->first.first, at->first.second) == 0);
        model.erase(at);
      }
      if (step % 100 != 0) continue;
      const Entry probe = random() % 2 != 0 && !model.empty() ? model.begin()->first : key;
      auto at = model.lower_bound(probe);
      REQUIRE(index.lower_bound(probe.first, probe.second, false) == (at != model.end() ? at->second : 0));
      auto above = model.upper_bound(probe);
      REQUIRE(index.lower_bound(probe.first, probe.second, true) ==
              (above != model.end() ? above->second : 0));
      REQUIRE(index.floor(probe.first, probe.second) ==
              (above != model.begin() ? std::prev(above)->second : 0));
    }
    REQUIRE(index.size() == model.size());
    std::vector<uint32_t> all;
    for (const auto& [key, number] : model) all.push_back(number);
    CHECK(in_order(index, {0, ChunkKey{}}, false) == all);
    const auto middle = std::next(model.begin(), static_cast<ptrdiff_t>(model.size() / 2));
    all.assign(1, middle->second);
    for (auto at = std::next(middle); at != model.end(); ++at) all.push_back(at->second);
    CHECK(in_order(index, middle->first, false) == all);
    all.erase(all.begin());
    CHECK(in_order(index, middle->first, true) == all);
    size_t counted = 0;
    index.each([&](uint32_t) { counted++; });
    CHECK(counted == model.size());
  }
}

TEST_CASE("index: the hash goes on with more numbers than it was made for") {
  std::mt19937_64 random(4);
  ChunkHash hash(10);
  std::unordered_map<uint32_t, uint64_t> model;
  auto hash_of = [&](uint32_t number) { return model.at(number); };
  for (uint32_t number = 1; number < 5'000; number++) {
    model[number] = random();
    hash.insert(model[number], number, hash_of);
  }
  for (uint32_t number = 1; number < 5'000; number += 3) {
    hash.erase(model[number], number, hash_of);
    model.erase(number);
  }
  for (uint32_t number = 1; number < 5'000; number++) {
    if (!model.contains(number)) continue;
    REQUIRE(hash.find(model[number], [&](uint32_t other) { return other == number; }) == number);
    REQUIRE(hash.find(~model[number], [&](uint32_t other) { return model.at(other) == ~model[number]; }) ==
            0);
  }
}

TEST_CASE("index: runs of checksums don't overlap and are used again") {
  std::mt19937_64 random(5);
  SumArena sums;
  struct Run {
    uint32_t handle, count, mark;
  };
  std::vector<Run> runs;
  for (uint32_t step = 0; step < 20'000; step++) {
    if (runs.size() < 500 || random() % 2 == 0) {
      // Around powers of two.
      const uint32_t two = 1u << (random() % 9);
      const auto count = std::min<uint32_t>(kMaxGranules, std::max<uint32_t>(1, two + random() % 3 - 1));
      Run run{sums.add(count), count, step};
      std::fill_n(sums.at(run.handle, count), count, step);
      runs.push_back(run);
    } else {
      const size_t at = random() % runs.size();
      const Run run = runs[at];
      const uint32_t* numbers = sums.at(run.handle, run.count);
      REQUIRE(std::all_of(numbers, numbers + run.count, [&](uint32_t n) { return n == run.mark; }));
      sums.remove(run.handle, run.count);
      runs.erase(runs.begin() + static_cast<ptrdiff_t>(at));
    }
  }
  const uint64_t memory = sums.memory_bytes();
  for (const Run& run : runs) sums.remove(run.handle, run.count);
  for (Run& run : runs) run.handle = sums.add(run.count);
  CHECK(sums.memory_bytes() == memory);
  CHECK(sums.add(0) == 0);
}

TEST_CASE("index: a snapshot whose chunks stand out of order is refused by the order") {
  State state(64, 1, nullptr);
  auto restore = [&](uint64_t number, bool in_order) {
    ChunkView view;
    view.fixed = ChunkRecord{};
    view.fixed.key = key_of(number);
    view.fixed.image.version = v(1);
    view.fixed.image.kind = 1;
    view.fixed.image.place_class = kNoClass;
    return state.restore_chunk(0, view, {}, in_order);
  };
  CHECK(restore(5, true) == nullptr);
  CHECK(restore(6, true) == nullptr);
  CHECK(restore(3, false) == nullptr);
  CHECK(restore(6, false) != nullptr);
  CHECK(restore(9, true) == nullptr);
  CHECK(state.index.size() == 4);
}

// ------------------------------------------------------------------------------ use

TEST_CASE("use: a chunk begins with the time of its first commit; later uses push the earlier ones back") {
  Harness h(11);
  h.format();
  h.open();
  const TargetId target(Harness::kTarget);
  const uint64_t created = h.store->identity().created_ms;
  CHECK(h.store->stamp_of(0) == 0);
  CHECK(h.store->stamp_of(1) == 1);
  CHECK(h.store->stamp_of(created + 63) == 1);
  CHECK(h.store->stamp_of(created + 64) == 2);
  CHECK(h.store->stamp_of(UINT64_MAX) == UINT32_MAX);
  CHECK(h.store->time_of(2) == created + 64);
  CHECK(h.store->time_of(0) == 0);
  REQUIRE(h.write(1, v(1), Version{}, 0, random_bytes(5'000, 1)) == 0);
  h.store->touch(target, key_of(1), 50);  // pending only: nothing to use
  REQUIRE(h.commit(1, v(1)));
  CHECK(h.store->access(target, key_of(1)).last == 0);  // nobody has said what time it is
  h.store->tick(h.clock_us, created + 64 * 999);
  REQUIRE(h.write(2, v(1), Version{}, 0, random_bytes(5'000, 1), true) == 0);
  auto is = [&](uint64_t key, uint32_t last, uint32_t previous) {
    const Access a = h.store->access(target, key_of(key));
    return a.last == last && a.previous == previous;
  };
  CHECK(is(2, 1'000, 0));
  h.store->set_manager_time(created + 64 * 1'499);  // heard between two ticks: it holds for the next chunk
  REQUIRE(h.write(3, v(1), Version{}, 0, random_bytes(5'000, 1), true) == 0);
  CHECK(is(3, 1'500, 0));
  h.store->touch(target, key_of(2), 1'000 + kCorrelatedStamps);  // the same use
  CHECK(is(2, 1'000 + kCorrelatedStamps, 0));
  h.store->touch(target, key_of(2), 1'000);  // heard late
  CHECK(is(2, 1'000 + kCorrelatedStamps, 0));
  h.store->touch(target, key_of(2), 2'000);
  CHECK(is(2, 2'000, 1'000 + kCorrelatedStamps));
  h.store->touch(target, key_of(1), 3'000);  // the first known
  CHECK(is(1, 3'000, 0));
  h.store->touch(target, key_of(7), 3'000);
  h.store->touch(TargetId(4711), key_of(2), 3'000);
  CHECK(is(7, 0, 0));
  // An overwrite is the same chunk; one that is removed and made again isn't.
  REQUIRE(h.write(2, v(2), v(1), 0, random_bytes(9'000, 2), true) == 0);
  CHECK(is(2, 2'000, 1'000 + kCorrelatedStamps));
  h.close();  // with a snapshot
  h.open();
  CHECK(is(1, 3'000, 0));
  CHECK(is(2, 2'000, 1'000 + kCorrelatedStamps));
  h.store->tick(h.clock_us, created + 64 * 4'999);
  REQUIRE(h.remove(2, v(3), v(2)) == 0);
  REQUIRE(h.commit(2, v(3)));
  CHECK(is(2, 0, 0));
  REQUIRE(h.write(2, v(4), Version{}, 0, random_bytes(9'000, 2), true) == 0);
  CHECK(is(2, 5'000, 0));
  CHECK(h.store->check_consistency() == "");
}

namespace {

uint64_t count_chunks(const ChunkStore& store, TargetId target, uint64_t space) {
  uint64_t chunks = 0;
  ChunkInfo info;
  ChunkKey from = ChunkKey::of(space, {});
  for (; store.first_at_or_after(target, from, &info) && info.key.space() == space; chunks++) {
    from = info.key;
    for (size_t i = from.bytes.size(); i-- > 0 && ++from.bytes[i] == 0;) {
    }
  }
  return chunks;
}

}  // namespace

TEST_CASE("use: what named spaces take stays right over random updates, releases and restarts") {
  for (uint64_t seed = 21; seed <= 22; seed++) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    Harness h(seed);
    h.format();
    h.open();
    const TargetId target(Harness::kTarget);
    std::map<uint64_t, uint64_t> versions;  // by key number; space = 1 + number / 100
    std::map<uint64_t, bool> there;
    const uint64_t spaces[] = {1, 2, 9};
    bool named = false;
    for (int step = 0; step < 400; step++) {
      const uint64_t key = random() % 300;
      const uint64_t next = versions[key] + 1;
      const Version base = there[key] ? v(versions[key]) : Version{};
      const auto size = static_cast<uint32_t>(1 + random() % 60'000);
      if (there[key] && random() % 4 == 0) {
        REQUIRE(h.remove(key, v(next), base) == 0);
        REQUIRE(h.commit(key, v(next)));
        there[key] = false;
      } else {
        const bool staged_only = random() % 8 == 0;
        const int error = h.write(key, v(next), base, 0, random_bytes(size, next), !staged_only);
        REQUIRE(error == 0);
        if (staged_only) {
          REQUIRE(h.commit(key, v(next)));
        }
        there[key] = true;
      }
      versions[key] = next;
      if (step == 100) {
        h.store->account_spaces(target, spaces);
        CHECK_FALSE(h.store->space_use(target, 1).ready);
        named = true;
      }
      if (step == 250) {
        h.close();
        h.open();
        CHECK_FALSE(h.store->space_use(target, 1).ready);
        h.store->account_spaces(target, std::span(spaces).first(2));
      }
      if (!named || step % 20 != 19) continue;
      for (uint64_t space : {1, 2, 3}) {
        const SpaceUse use = h.store->space_use(target, space);
        CHECK(use.ready == (space != 3));
        if (use.ready) CHECK(use.chunks == count_chunks(*h.store, target, space));
      }
      // Spaces 1 and 2 and the unnamed third are all that there is.
      uint64_t bytes = 0;
      std::vector<ChunkSample> samples(400);
      for (uint64_t space : {1, 2, 3}) {
        const uint32_t count = h.store->sample(target, space, random(), samples);
        uint64_t own = 0;
        for (uint32_t i = 0; i < count; i++) own += samples[i].allocated_bytes;
        if (space != 3) CHECK(h.store->space_use(target, space).allocated_bytes == own);
        bytes += own;
      }
      CHECK(bytes == h.store->usage(target).allocated_bytes);
    }
    StoreOp op;
    bool done = false;
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    h.store->release_target(target, &op);
    h.run_until(done);
    CHECK(h.store->space_use(target, 1).chunks == 0);
    CHECK(h.store->space_use(target, 1).allocated_bytes == 0);
    CHECK(h.store->check_consistency() == "");
  }
}

TEST_CASE("use: pending versions count in bytes, and counting in steps misses no change") {
  State state(5'000, 1, nullptr);
  std::mt19937_64 random(31);
  auto add = [&](uint64_t number, uint64_t version, uint8_t place_class, bool commit) {
    StageRecord record{};
    record.key = ChunkKey::of_file(5, number);
    record.image.version = v(version);
    record.image.place = (number * 16 + version) << 12;
    record.image.place_class = place_class;
    record.image.stored_length = record.image.logical_length = 4'096;
    record.image.granules = record.changed_granules = 1;
    record.image.kind = static_cast<uint8_t>(UpdateKind::replace);
    record.flags = commit ? kStageCommitNow : 0;
    const uint32_t sum = 0;
    REQUIRE(state.stage(0, record, {&sum, 1}, {}) == nullptr);
  };
  for (uint64_t i = 0; i < 2'000; i++) add(i * 2, 1, 0, true);
  const uint64_t space = 5;
  state.account_spaces(0, {&space, 1});
  for (bool complete = false; !complete;) {
    complete = state.step_accounts(7);
    // Before, at and behind the cursor.
    const uint64_t number = random() % 4'001;
    const uint32_t chunk = state.index.find(0, ChunkKey::of_file(5, number));
    if (chunk == 0) {
      add(number, 1, 1, random() % 2 == 0);
    } else if (random() % 2 == 0) {
      state.erase(0, ChunkKey::of_file(5, number));
    } else if (state.newest(chunk).update < 9) {
      add(number, state.newest(chunk).update + 1, 2, random() % 2 == 0);
    }
  }
  const SpaceAccount* account = state.accounts.find({0, 5});
  REQUIRE(account != nullptr);
  CHECK(account->chunks == state.usage[0].chunks);
  CHECK(account->allocated_bytes == state.usage[0].allocated_bytes);
  CHECK(account->chunks != state.index.size());  // some are only pending
}

TEST_CASE("use: samples are neighbours from anywhere in the space, each once, of that space only") {
  Harness h(41);
  h.format();
  h.open();
  const TargetId target(Harness::kTarget);
  h.store->tick(h.clock_us, h.store->identity().created_ms + 6'400);
  for (uint64_t key = 100; key < 150; key++)
    REQUIRE(h.write(key, v(1), Version{}, 0, random_bytes(4'096 + key, key), true) == 0);
  REQUIRE(h.write(99, v(1), Version{}, 0, random_bytes(10, 1), true) == 0);
  REQUIRE(h.write(200, v(1), Version{}, 0, random_bytes(10, 1), true) == 0);
  REQUIRE(h.write(160, v(1), Version{}, 0, random_bytes(10, 1)) == 0);  // pending only
  std::vector<ChunkSample> out(20);
  std::map<uint64_t, int> first;
  for (uint64_t seed = 0; seed < 2'000; seed++) {
    REQUIRE(h.store->sample(target, 2, seed, out) == 20);
    std::set<ChunkKey> keys;
    for (size_t i = 0; i < out.size(); i++) {
      REQUIRE(out[i].key.space() == 2);
      keys.insert(out[i].key);
      const uint8_t number = out[i].key.bytes[23];
      REQUIRE(number < 50);
      if (i > 0) REQUIRE(number == (out[i - 1].key.bytes[23] + 1) % 50);
    }
    REQUIRE(keys.size() == out.size());
    first[out[0].key.bytes[23]]++;
  }
  CHECK(first.size() >= 45);  // everywhere: 2000 draws of 50, or of 61 with the pending one's range
  out.resize(100);
  CHECK(h.store->sample(target, 2, 7, out) == 50);
  CHECK(out[0].version == v(1));
  CHECK(out[0].allocated_bytes == 8'192);
  CHECK(out[0].access.last == 101);
  CHECK_FALSE(out[0].pinned);
  CHECK(h.store->sample(target, 1, 7, out) == 1);
  CHECK(h.store->sample(target, 77, 7, out) == 0);
  CHECK(h.store->sample(TargetId(5), 2, 7, out) == 0);
  CHECK(h.store->sample(target, 2, 7, {}) == 0);
}

// ------------------------------------------------------------------------------ replay

TEST_CASE("replay: small updates that stay on the device until they are applied come out the same") {
  for (size_t budget : {size_t{0}, size_t{20'000}, size_t{64} << 20}) {
    CAPTURE(budget);
    Harness h(51);
    h.format();
    h.open();
    std::vector<std::vector<uint8_t>> committed(12), newest(12);
    for (uint64_t key = 0; key < 12; key++) {
      committed[key] = random_bytes(200'000, key);
      REQUIRE(h.write(key, v(1), Version{}, 0, committed[key], true) == 0);
    }
    std::mt19937_64 random(52);
    for (uint64_t version = 2; version < 8; version++) {
      for (uint64_t key = 0; key < 12; key++) {
        const auto offset = static_cast<uint32_t>(random() % 190'000);
        const auto bytes = random_bytes(1 + random() % 9'000, random());
        const bool last = version == 7;  // stays pending
        REQUIRE(h.write(key, v(version), v(version - 1), offset, bytes, !last) == 0);
        newest[key] = committed[key];
        std::copy(bytes.begin(), bytes.end(), newest[key].begin() + offset);
        if (!last) committed[key] = newest[key];
      }
      if (version == 3) {  // some stand in a snapshot
        h.store->start_snapshot();
        while (h.store->metrics().snapshots == 0) {
          h.store->tick(h.clock_us += 100);
          h.io->run_once(0);
        }
      }
    }
    io::SimImage crashed = h.io->image();
    Harness again(53, std::move(crashed));
    OpenOptions options;
    options.cluster = Harness::cluster();
    options.replay_overlay_bytes = budget;
    auto opened = ChunkStore::open_file(*again.io, again.io->disk(), again.io->size_bytes(), options);
    REQUIRE_MESSAGE(opened.ok(), ChunkStore::last_open_message());
    again.store = std::move(opened.value());
    for (uint64_t key = 0; key < 12; key++) {
      CHECK(again.read(key, 0, kMaxChunkBytes).bytes == committed[key]);
      CHECK(again.read(key, 0, kMaxChunkBytes, v(7)).bytes == newest[key]);
    }
    CHECK(again.store->check_consistency() == "");
    for (uint64_t key = 0; key < 12; key++) REQUIRE(again.commit(key, v(7)));
    again.close();
    again.open();
    for (uint64_t key = 0; key < 12; key++) CHECK(again.read(key, 0, kMaxChunkBytes).bytes == newest[key]);
  }
}
