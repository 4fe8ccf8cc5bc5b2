// Sharing at random among equal contents, with restarts, and with the power failing at every event.
#include <doctest/doctest.h>

#include "engine_crash_run.h"

using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

CrashOptions dedup_options(uint64_t seed) {
  CrashOptions options;
  options.seed = seed;
  options.space = seed % 2 == 0;
  options.operations = options.space ? 350 : 150;
  options.prefix_stride = options.space ? 11 : 5;
  options.keys = 10;
  options.dedup = true;
  options.transfers = seed % 3 == 0;
  options.may_fill = options.space;
  options.ahead = seed % 4 == 1;
  options.nested = 1;
  return options;
}

}  // namespace

TEST_CASE("crash while equal chunks come to share slots: each is what it was acknowledged to be") {
  StoreMetrics all{};
  for (uint64_t seed = 401; seed <= 406; seed++) {
    CrashRun crash_run(dedup_options(seed));
    std::string wrong = crash_run.run();
    CHECK_MESSAGE(wrong.empty(), wrong);
    all.dedup_shared += crash_run.metrics().dedup_shared;
    all.moves += crash_run.metrics().moves;
  }
  CHECK(all.dedup_shared > 30);
  CHECK(all.moves > 3);
}

TEST_CASE("crash mutant: freeing a shared slot with its first name is noticed") {
  int count = 0;
  for (uint64_t seed = 401; seed <= 406; seed++) {
    CrashOptions options = dedup_options(seed);
    options.nested = 0;
    options.mutants.free_shared_with_first_name = true;
    if (!CrashRun(options).run().empty()) count++;
  }
  CHECK(count > 0);
}
