// The power fails while chunks are moved and slabs are given away: at each event, and again and again in one
// life of a store (FAULTS S13). Canary mutants show that mistakes would be noticed.
#include <algorithm>
#include <cstdlib>

#include "engine_space.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint32_t kHints[] = {1 << 20, 2 << 20, 4 << 20};  // 16, 8, 4 slots a slab: few chunks make many

void knobs(SpaceStore& s, const Mutants& mutants) {
  s.options.discard = Discard::on;
  s.options.discard_delay_us = 0;
  s.options.compact_eagerly = true;
  s.mutants = mutants;
}

uint32_t some_size(std::mt19937_64& random) {
  return 1 + static_cast<uint32_t>(random() % (random() % 4 == 0 ? 100'000 : 9'000));
}

// The disk after a power cut: of what wasn't durable nothing, all, or a part by the seed.
io::SimImage after_cut(const io::CrashImages& images, int kind, uint64_t seed) {
  return images.crash([&](size_t write, size_t sector) {
    if (kind < 2) return kind == 1;
    return mix64(seed ^ mix64(write * 1'000'003 + sector)) % 2 == 0;
  });
}

struct Outcome {
  std::string wrong;
  uint64_t crashes = 0, moves = 0, discards = 0;
};

// Chunks at rest in sparse slabs; then all is compacted, new chunks take what came free, and the power fails
// at each event of that. What was at rest must be there, what is new whole or not at all.
Outcome crash_while_moving(uint64_t seed, const Mutants& mutants, uint64_t stride) {
  Outcome out;
  SpaceStore s(seed);
  knobs(s, mutants);
  // Without discards the lowest free slab is taken next, often one that was emptied just before.
  if (seed % 2 == 0) s.options.discard = Discard::off;
  const io::SimImage blank = s.sim->image();
  s.format();
  s.open();
  for (uint64_t n = 0; n < 60; n++) FFS_CHECK(s.put(n, some_size(s.random), kHints[n % 3]) == 0);
  for (uint64_t n = 0; n < 60; n++) {
    if (s.random() % 5 < 3) FFS_CHECK(s.remove(n) == 0);
  }
  s.settle();
  const size_t rested = s.sim->log().size();
  const std::map<uint64_t, SpaceChunk> at_rest = s.chunks;
  // The new ones need slabs of their own: those that come free.
  std::vector<std::unique_ptr<SpaceStore::Job>> jobs;
  for (uint64_t n = 100; n < 120; n++) {
    for (uint64_t i = s.random() % 12; i > 0; i--) {
      s.store->compact(1 << 14);
      s.pass();
    }
    jobs.push_back(s.start(UpdateKind::replace, n, some_size(s.random), 8 << 20));
  }
  for (auto& job : jobs) s.end(*job);  // the last ones may find no room
  s.compact_all();
  out.moves = s.store->metrics().moves;
  out.discards = s.store->metrics().discards;
  const std::map<uint64_t, SpaceChunk> at_last = s.chunks;

  io::CrashImages images(blank);
  const auto& log = s.sim->log();
  for (size_t i = 0; i < log.size() && out.wrong.empty(); i++) {
    images.advance(log[i]);
    if (i < rested || (i + seed) % stride != 0) continue;
    const int kind = static_cast<int>(i / stride % 3);
    SpaceStore after(seed + i, after_cut(images, kind, seed * 77 + i));
    knobs(after, {});
    after.mutants.replay_without_verification = mutants.replay_without_verification;
    after.open();
    out.crashes++;
    after.chunks = at_rest;
    for (const auto& [n, chunk] : at_last) {
      ChunkInfo info;
      if (after.store->lookup(TargetId(SpaceStore::kTarget), SpaceStore::key(n), &info))
        after.chunks[n] = chunk;
    }
    out.wrong = after.all_wrong();
    if (out.wrong.empty() && i % 5 == 0) {  // and the rest of its life
      after.compact_all();
      out.wrong = after.all_wrong();
      after.reopen();
      if (out.wrong.empty()) out.wrong = after.all_wrong();
    }
    if (after.sim->misuse() != "") out.wrong = after.sim->misuse();
    if (!out.wrong.empty())
      out.wrong += ", seed " + std::to_string(seed) + ", event " + std::to_string(i) + ", loss " +
                   std::to_string(kind);
  }
  return out;
}

// FFS_SPACE_SEEDS: more of them, for a soak.
uint64_t seeds_asked(uint64_t ordinary) {
  const char* text = std::getenv("FFS_SPACE_SEEDS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : ordinary;
}

bool noticed(const Mutants& mutants) {
  for (uint64_t seed = 1; seed <= 4; seed++) {
    if (!crash_while_moving(seed, mutants, 1).wrong.empty()) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("space: a crash at any event of moves loses nothing and leaves the allocator right") {
  Outcome all;
  const uint64_t seeds = seeds_asked(5);
  for (uint64_t seed = 1; seed <= seeds; seed++) {
    Outcome one = crash_while_moving(seed, {}, seeds == 5 ? 3 : 1);
    CHECK_MESSAGE(one.wrong.empty(), one.wrong);
    all.crashes += one.crashes;
    all.moves += one.moves;
    all.discards += one.discards;
  }
  CHECK(all.crashes > 60);
  CHECK(all.moves > 20);
  CHECK(all.discards > 3);
}

TEST_CASE("space: mutants of moves are noticed") {
  Mutants reuse, discard, unverified;
  reuse.reuse_slot_before_flush = true;
  discard.discard_before_flush = true;
  unverified.replay_without_verification = true;
  CHECK(noticed(reuse));
  CHECK(noticed(discard));
  CHECK(noticed(unverified));
}

namespace {

// Puts, removals and compaction at random; the power fails somewhere in what is going on, and the same store
// goes on from there.
std::string live_and_crash(uint64_t seed, int lives, uint64_t* crashes) {
  std::mt19937_64 random(seed);
  io::SimImage image(300ull << 20);
  std::map<uint64_t, SpaceChunk> known;
  uint64_t next_version = 1;
  bool formatted = false;
  for (int life = 0; life < lives; life++) {
    SpaceStore s(seed * 1000 + static_cast<uint64_t>(life), image);
    knobs(s, {});
    const std::string where = ", seed " + std::to_string(seed) + ", life " + std::to_string(life);
    if (!formatted) s.format();
    formatted = true;
    const io::SimImage start = s.sim->image();
    const size_t skip = s.sim->log().size();
    s.open();
    s.chunks = known;
    s.next_version = next_version;
    if (std::string wrong = s.all_wrong(); !wrong.empty()) return wrong + where;
    // What each key may be after a crash: the states from the last acknowledged on.
    struct State {
      SpaceChunk chunk;  // version 0: gone
      size_t started = 0, acknowledged = SIZE_MAX;
    };
    std::map<uint64_t, std::vector<State>> states;
    for (uint64_t n = 0; n < 40; n++) {
      auto at = known.find(n);
      states[n].push_back({at != known.end() ? at->second : SpaceChunk{}, 0, 0});
    }
    std::vector<std::unique_ptr<SpaceStore::Job>> running;
    auto reap = [&](bool all) {
      for (auto& job : running) {
        if (all) s.run_until(job->finished);
        if (!job->finished) continue;
        FFS_CHECK(s.end(*job) == 0);
        states[job->n].back().acknowledged = s.sim->log().size();
      }
      std::erase_if(running, [](const auto& job) { return job->finished; });
    };
    const uint64_t steps = 20 + random() % 60;
    for (uint64_t step = 0; step < steps; step++) {
      const uint64_t n = random() % 40, what = random() % 8;
      const bool busy =
          std::any_of(running.begin(), running.end(), [&](const auto& job) { return job->n == n; });
      if (what < 2) s.store->compact(1u << (12 + random() % 8));
      if (what >= 2 && !busy && running.size() < 5) {
        const bool remove = what < 5 && s.chunks.count(n) != 0;
        running.push_back(remove ? s.start(UpdateKind::remove, n, 0)
                                 : s.start(UpdateKind::replace, n, some_size(random), kHints[n % 3]));
        states[n].push_back({remove ? SpaceChunk{} : running.back()->after, s.sim->log().size()});
      }
      for (uint64_t i = random() % 6; i > 0; i--) s.pass();
      reap(false);
    }
    reap(random() % 2 == 0);
    // Somewhere after opening, most likely near the end.
    const auto& log = s.sim->log();
    const size_t size = log.size();
    const size_t cut =
        size - (random() % 3 == 0 ? random() % (size - skip) : random() % std::min<size_t>(40, size - skip));
    io::CrashImages images(start);
    for (size_t i = skip; i < cut; i++) images.advance(log[i]);
    image = after_cut(images, static_cast<int>(random() % 3), random());
    if (s.sim->misuse() != "") return s.sim->misuse() + where;
    next_version = s.next_version;
    reap(true);
    // Look at what is there now: each key is in one of the states that the cut allows.
    SpaceStore after(seed, image);
    knobs(after, {});
    after.open();
    known.clear();
    for (const auto& [n, list] : states) {
      ChunkInfo info;
      const bool there = after.store->lookup(TargetId(SpaceStore::kTarget), SpaceStore::key(n), &info);
      size_t least = 0, found = SIZE_MAX;
      for (size_t i = 0; i < list.size(); i++) {
        if (list[i].acknowledged <= cut) least = i;
        const bool same = there ? v(list[i].chunk.version) == info.version : list[i].chunk.version == 0;
        if (same && list[i].started <= cut) found = i;
      }
      if (found == SIZE_MAX || found < least)
        return "chunk " + std::to_string(n) + " is in no state it may be in" + where;
      if (there) known[n] = list[found].chunk;
    }
    after.chunks = known;
    if (std::string wrong = after.all_wrong(); !wrong.empty()) return wrong + " after the crash" + where;
    (*crashes)++;
  }
  return "";
}

}  // namespace

TEST_CASE("space: puts, removals, compaction and crashes at random: the allocator is what the records say") {
  uint64_t crashes = 0;
  const uint64_t seeds = seeds_asked(4);
  for (uint64_t seed = 1; seed <= seeds; seed++) {
    const std::string wrong = live_and_crash(seed, 12, &crashes);
    CHECK_MESSAGE(wrong.empty(), wrong);
  }
  CHECK(crashes >= seeds * 12);
}
