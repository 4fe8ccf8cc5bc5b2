// Large reads stand in a line before the device (docs/performance.md, Large reads in turns); small ones
// don't.
#include <doctest/doctest.h>

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "io/device.h"
#include "io/io.h"

using namespace ffs;
using namespace ffs::io;

namespace {

constexpr uint32_t kMiB = 1 << 20;

// Reads of a pipe: they are at the device, so to speak, until somebody writes or closes its other end.
struct World {
  std::unique_ptr<Io> io;
  Fd from, to;
  File pipe;
  std::vector<int> over;      // in the order in which they ended
  std::vector<int32_t> gave;  // what each gave

  World() {
    auto made = Io::create(Options{});
    REQUIRE(made.ok());
    io = std::move(*made);
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    from.reset(ends[0]), to.reset(ends[1]);
    pipe = *io->add_file(from.get());
  }
  ~World() { io->remove_file(pipe); }

  struct Read {
    Op op;
    World* world = nullptr;
    int number = 0;
    std::vector<uint8_t> memory;
  };
  void start(Read& read, int number, uint32_t bytes) {
    read.world = this, read.number = number;
    read.memory.resize(bytes);
    read.op.owner = &read;
    read.op.done = [](Op* op) {
      auto* self = static_cast<Read*>(op->owner);
      self->world->over.push_back(self->number);
      self->world->gave.push_back(op->result);
    };
    io->read(&read.op, pipe, 0, read.memory.data(), bytes);
  }
};

}  // namespace

TEST_CASE("of large reads 4 MiB are at the device, the next ones go when there is room, in order") {
  World w;
  if (w.io->backend() != Backend::uring) return;
  std::vector<World::Read> reads(11);
  for (int i = 0; i < 10; i++) w.start(reads[static_cast<size_t>(i)], i, kMiB);
  w.start(reads[10], 10, 64 << 10);  // goes beside them
  w.io->run_once(0);
  CHECK(w.over.empty());
  CHECK(w.io->in_flight() == 11);
  REQUIRE(::write(w.to.get(), "odd", 3) == 3);  // ends one of those that are there
  while (w.over.empty()) w.io->run_once(-1);
  REQUIRE(w.over.size() == 1);
  CHECK((w.over[0] < 4 || w.over[0] == 10));
  CHECK(w.gave[0] == 3);
  w.to.reset();
  std::vector<size_t> in_a_pass;
  while (w.over.size() < reads.size()) {
    const size_t before = w.over.size();
    w.io->run_once(-1);
    if (w.over.size() > before) in_a_pass.push_back(w.over.size() - before);
  }
  // All that is there ends at once, and no more of it is there than that.
  CHECK(*std::max_element(in_a_pass.begin(), in_a_pass.end()) <= 5);
  CHECK(std::count(w.gave.begin(), w.gave.end(), 0) == 10);
  std::vector<int> large;
  std::copy_if(w.over.begin(), w.over.end(), std::back_inserter(large),
               [](int n) { return n >= 4 && n < 10; });
  CHECK(large == std::vector<int>{4, 5, 6, 7, 8, 9});
  CHECK(w.io->in_flight() == 0);
}

TEST_CASE("a read that is larger than all that may be at the device goes alone") {
  World w;
  if (w.io->backend() != Backend::uring) return;
  std::vector<World::Read> reads(3);
  w.start(reads[0], 0, 16 * kMiB);
  w.start(reads[1], 1, 16 * kMiB);
  w.start(reads[2], 2, kMiB);
  w.io->run_once(0);
  REQUIRE(::write(w.to.get(), std::string(1024, 'x').data(), 1024) == 1024);  // goes on after a part
  for (int i = 0; i < 3; i++) w.io->run_once(0);
  CHECK(w.over.empty());
  w.to.reset();
  while (w.over.size() < 3) w.io->run_once(-1);
  CHECK(w.over == std::vector<int>{0, 1, 2});
  CHECK(w.gave == std::vector<int32_t>{1024, 0, 0});
}
