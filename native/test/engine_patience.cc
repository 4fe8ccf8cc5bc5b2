// Flushes for what recovery puts in: it waits for more to come, and holds nobody else up.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

struct Install : InstallOp {
  bool finished = false;
  Laid laid;
  Install(uint64_t chunk, const std::vector<uint8_t>& bytes, io::OpClass whose) : laid(0, bytes) {
    target = TargetId(Harness::kTarget);
    key = key_of(chunk);
    version = v(1);
    length = static_cast<uint32_t>(bytes.size());
    data = laid.data;
    tail_padded = true;
    op_class = whose;
    owner = &finished;
    done = [](StoreOp* op) { *static_cast<bool*>(op->owner) = true; };
  }
};

using Installs = std::vector<std::unique_ptr<Install>>;

void install(Harness& h, Installs& ops, const std::vector<uint8_t>& bytes, io::OpClass whose) {
  ops.push_back(std::make_unique<Install>(ops.size(), bytes, whose));
  h.store->install(ops.back().get());
  h.io->run_once(0);
}

// Without any tick.
void run(Harness& h, const Installs& ops) {
  for (const auto& op : ops) {
    for (int i = 0; !op->finished && i < 100'000; i++) h.io->run_once(0);
    REQUIRE(op->finished);
    CHECK(op->error == 0);
  }
}

void make(Harness& h) {
  h.format();
  h.open();
  h.settle_records();
}

}  // namespace

TEST_CASE("what recovery puts in, one a pass, shares its flushes") {
  const std::vector<uint8_t> bytes(128 * 1024, 5);
  uint64_t flushes[2];
  for (const bool recovery : {false, true}) {
    Harness h(31);
    make(h);
    const uint64_t before = h.store->metrics().flushes;
    Installs ops;
    for (int i = 0; i < 48; i++)
      install(h, ops, bytes, recovery ? io::OpClass::recovery : io::OpClass::client);
    run(h, ops);
    flushes[recovery ? 1 : 0] = h.store->metrics().flushes - before;
  }
  MESSAGE("48 installs, one a pass: " << flushes[0] << " flushes; in recovery " << flushes[1]);
  CHECK(flushes[1] <= 2);
  CHECK(flushes[0] > 2 * flushes[1]);
}

TEST_CASE("what recovery puts in is flushed when there is enough of it, also while more comes") {
  Harness h(32);
  make(h);
  const std::vector<uint8_t> bytes(2u << 20, 5);
  Installs ops;
  for (int i = 0; i < 24; i++) install(h, ops, bytes, io::OpClass::recovery);
  for (int more = 0; !ops.front()->finished && more < 60; more++) {
    install(h, ops, bytes, io::OpClass::recovery);
  }
  CHECK(ops.front()->finished);
  CHECK_FALSE(ops.back()->finished);
  run(h, ops);
}

TEST_CASE("whoever else waits for a flush gets it at once, with what recovery has put in") {
  Harness h(33);
  make(h);
  const std::vector<uint8_t> bytes(128 * 1024, 5);
  Installs ops;
  for (int i = 0; i < 32; i++) install(h, ops, bytes, io::OpClass::recovery);
  CHECK_FALSE(ops.front()->finished);
  Install urgent(1000, bytes, io::OpClass::client);
  h.store->install(&urgent);
  for (int more = 0; !urgent.finished && more < 60; more++) install(h, ops, bytes, io::OpClass::recovery);
  CHECK(urgent.finished);
  CHECK(ops.front()->finished);
  CHECK_FALSE(ops.back()->finished);
  run(h, ops);
}
