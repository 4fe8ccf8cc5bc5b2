// The power fails at every event of a run; canary mutants show that this would be noticed.
// FFS_SOAK_SECONDS: goes on with new seeds for that long.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "engine_crash_model.h"

using namespace ffs::engine;
using namespace ffs::engine::testing;

TEST_CASE("crash at any event: acknowledged updates are there, others whole or not at all") {
  uint64_t first = 1, seeds = 6;
  if (const char* text = std::getenv("FFS_ENGINE_SEED")) first = std::strtoull(text, nullptr, 10), seeds = 1;
  for (uint64_t seed = first; seed < first + seeds; seed++) {
    CrashOptions options;
    options.seed = seed;
    // To repeat a failure of the soak: operations, keys, stride, all kinds (0 or 1), largest write.
    if (const char* text = std::getenv("FFS_ENGINE_OPTIONS")) {
      int all = 0;
      REQUIRE(std::sscanf(text, "%lu %lu %lu %d %u", &options.operations, &options.keys,
                          &options.prefix_stride, &all, &options.max_bytes) == 5);
      options.all_kinds = all != 0;
    }
    CrashRun run(options);
    std::string wrong = run.run();
    CHECK_MESSAGE(wrong.empty(), wrong);
    CHECK(run.crashes() > 50);
  }
}

TEST_CASE("crash while the journal wraps and snapshots follow each other") {
  CrashOptions options;
  options.seed = 101;
  options.operations = 900;
  options.keys = 12;
  options.prefix_stride = 37;
  CrashRun run(options);
  std::string wrong = run.run();
  CHECK_MESSAGE(wrong.empty(), wrong);
  CHECK(run.metrics().snapshots >= 2);
}

namespace {

// How many of the seeds notice.
int noticed(const Mutants& mutants, uint64_t operations) {
  int count = 0;
  for (uint64_t seed = 1; seed <= 6; seed++) {
    CrashOptions options;
    options.seed = seed;
    options.operations = operations;
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
    if (seed % 5 == 0) options.max_bytes = 900'000;
    CrashRun run(options);
    std::string wrong = run.run();
    REQUIRE_MESSAGE(wrong.empty(), wrong);
  }
  MESSAGE("soak: " << runs << " runs");
}
