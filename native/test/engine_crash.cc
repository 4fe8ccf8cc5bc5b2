// The power fails at every event of a run; canary mutants show that this would be noticed.
// FFS_SOAK_SECONDS: goes on with new seeds for that long.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "engine_crash_run.h"

using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

// Few keys in large slots, which come and go.
CrashOptions space_options(uint64_t seed) {
  CrashOptions options;
  options.seed = seed;
  options.operations = 400;
  options.prefix_stride = 7;
  options.keys = 24;
  options.may_fill = true;
  options.max_bytes = 100'000;
  options.space = true;
  return options;
}

CrashCoverage run(const CrashOptions& options, uint64_t* groups_ahead = nullptr) {
  CrashRun crash_run(options);
  std::string wrong = crash_run.run();
  CHECK_MESSAGE(wrong.empty(), wrong);
  CHECK(crash_run.crashes() > 50);
  if (groups_ahead != nullptr) *groups_ahead += crash_run.metrics().groups_ahead;
  return crash_run.coverage();
}

}  // namespace

// The command that a failure prints: FFS_CRASH='seed=.. operations=..' (engine_crash_run.h).
// FFS_ENGINE_TRACE=1 prints what is done.
TEST_CASE("crash replay of a failure") {
  const char* text = std::getenv("FFS_CRASH");
  if (text == nullptr) return;
  CrashRun crash_run(crash_options_of(text));
  std::string wrong = crash_run.run();
  CHECK_MESSAGE(wrong.empty(), wrong);
  const StoreMetrics m = crash_run.metrics();
  MESSAGE(crash_run.crashes() << " crashes, " << m.moves << " moves, " << m.moves_dropped << " dropped, "
                              << m.slabs_emptied << " slabs emptied, " << m.discards << " discards, "
                              << m.snapshots << " snapshots");
}

TEST_CASE("crash options: what is printed is read back") {
  CrashOptions options;
  options.seed = 12'345'678'901'234;
  options.transfers = options.device.protected_cache = options.mutants.reuse_slot_before_flush = true;
  options.device.sector_bytes = 4096;
  options.max_bytes = 900'000;
  CHECK(text_of(options).find("sector=4096") != std::string::npos);
  CHECK(text_of(crash_options_of(text_of(options))) == text_of(options));
  CHECK(text_of(CrashOptions{}).empty());
}

TEST_CASE("crash at any event: acknowledged updates are there, others whole or not at all") {
  CrashCoverage all;
  uint64_t groups_ahead = 0;
  for (uint64_t seed = 1; seed <= 4; seed++) {
    CrashOptions options;
    options.seed = seed;
    options.device.sector_bytes = seed % 2 == 0 ? 4096 : 512;
    options.ahead = seed > 2;
    options.after = seed == 4;
    CrashCoverage coverage = run(options, &groups_ahead);
    all.in_snapshots += coverage.in_snapshots;
    all.nested += coverage.nested;
    all.recovered_again += coverage.recovered_again;
  }
  CHECK(groups_ahead > 5);
  CHECK(all.in_snapshots > 0);
  CHECK(all.nested > 100);
  CHECK(all.recovered_again > 100);
}

TEST_CASE("crash at any event with installs, erasures, resets and releases") {
  for (uint64_t seed = 1; seed <= 4; seed++) {
    CrashOptions options;
    options.seed = seed;
    options.operations = 80;
    options.transfers = true;
    options.ahead = seed % 2 == 0;
    run(options);
  }
}

TEST_CASE("crash at any event of a device with a protected write cache, which is never flushed") {
  for (uint64_t seed = 201; seed <= 203; seed++) {
    CrashOptions options;
    options.seed = seed;
    options.device.protected_cache = true;
    options.transfers = seed % 2 == 0;
    run(options);
  }
}

TEST_CASE("crash while the journal wraps and snapshots follow each other") {
  CrashOptions options;
  options.seed = 101;
  options.operations = 900;
  options.keys = 12;
  options.prefix_stride = 37;
  CrashRun crash_run(options);
  std::string wrong = crash_run.run();
  CHECK_MESSAGE(wrong.empty(), wrong);
  CHECK(crash_run.metrics().snapshots >= 2);
  CHECK(crash_run.coverage().in_snapshots > 0);
}

TEST_CASE("crash while chunks are moved together and slabs discarded") {
  StoreMetrics all{};
  uint64_t with_discards = 0;
  for (uint64_t seed = 301; seed <= 303; seed++) {
    CrashOptions options = space_options(seed);
    options.transfers = seed % 2 == 0;
    CrashRun crash_run(options);
    std::string wrong = crash_run.run();
    CHECK_MESSAGE(wrong.empty(), wrong);
    all.moves += crash_run.metrics().moves;
    all.discards += crash_run.metrics().discards;
    with_discards += crash_run.coverage().with_discards;
  }
  CHECK(all.moves > 5);
  CHECK(all.discards > 5);
  CHECK(with_discards > 10);
}

// ------------------------------------------------------------------------------ canary mutants

namespace {

// How many of the first seeds notice, with the ordinary operations.
int noticed(const Mutants& mutants, uint64_t operations, bool space = false, bool ahead = false) {
  int count = 0;
  for (uint64_t seed = 1; seed <= 6; seed++) {
    CrashOptions options = space ? space_options(seed) : CrashOptions{};
    options.seed = seed;
    options.operations = operations;
    options.nested = 0;
    options.ahead = options.all_kinds = ahead;
    options.mutants = mutants;
    if (!CrashRun(options).run().empty()) count++;
  }
  return count;
}

}  // namespace

TEST_CASE("crash mutant: acknowledging without a flush is noticed") {
  Mutants mutants;
  mutants.acknowledge_without_flush = true;
  CHECK(noticed(mutants, 30) > 0);
}

TEST_CASE("crash mutant: acknowledging what was written ahead with the flush before is noticed") {
  Mutants mutants;
  mutants.acknowledge_with_earlier_flush = true;
  CHECK(noticed(mutants, 80, false, true) > 0);
}

TEST_CASE("crash mutant: a flush that begins before the data of its records is there is noticed") {
  Mutants mutants;
  mutants.flush_before_data = true;
  CHECK(noticed(mutants, 80, false, true) > 0);
}

TEST_CASE("crash mutant: replay without verification is noticed") {
  Mutants mutants;
  mutants.replay_without_verification = true;
  CHECK(noticed(mutants, 60) > 0);
}

TEST_CASE("crash mutant: reusing a slot before the flush is noticed") {
  Mutants mutants;
  mutants.reuse_slot_before_flush = true;
  CHECK(noticed(mutants, 80) > 0);
}

TEST_CASE("crash mutant: discarding before the record that frees is durable is noticed") {
  Mutants mutants;
  mutants.discard_before_flush = true;
  CHECK(noticed(mutants, 80, true) > 0);
}

TEST_CASE("crash mutant: reusing the slot that a move left before the flush is noticed") {
  Mutants mutants;
  mutants.reuse_slot_before_flush = true;
  CHECK(noticed(mutants, 80, true) > 0);
}

// A device that says that its cache is protected and lies: what `write_cache=protected` must not be set for.
TEST_CASE("crash mutant: no flushes on a device with a volatile cache are noticed") {
  CrashOptions options;
  options.seed = 1;
  options.device.protected_cache = true;
  options.lying_device = true;
  CHECK_FALSE(CrashRun(options).run().empty());
}

// ------------------------------------------------------------------------------ the long search

TEST_CASE("crash soak: new seeds until the time is over") {
  const char* text = std::getenv("FFS_SOAK_SECONDS");
  if (text == nullptr) return;
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::strtol(text, nullptr, 10));
  auto seed = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; seed++, runs++) {
    CrashOptions options;
    options.seed = seed;
    options.operations = runs % 4 == 3 ? 700 : 80;
    options.prefix_stride = runs % 4 == 3 ? 23 : 1;
    options.keys = 3 + seed % 8;
    options.all_kinds = runs % 3 == 0;
    options.transfers = runs % 2 == 0;
    options.device.protected_cache = runs % 5 == 4;
    options.device.sector_bytes = runs % 7 < 3 ? 4096 : 512;
    options.space = seed % 3 == 0;
    options.ahead = runs % 3 != 1;
    options.after = seed % 6 == 1;
    if (seed % 5 == 0) options.max_bytes = 900'000;
    CrashRun crash_run(options);
    std::string wrong = crash_run.run();
    REQUIRE_MESSAGE(wrong.empty(), wrong);
  }
  MESSAGE("soak: " << runs << " runs");
}
