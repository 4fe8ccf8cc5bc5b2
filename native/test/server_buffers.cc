// The lines for buffers: order, priorities, and memory that is registered as it comes into use.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "server/buffers.h"

using namespace ffs;
using namespace ffs::server;

namespace {

struct World {
  std::unique_ptr<io::Io> io;
  std::unique_ptr<Buffers> buffers;
  std::vector<uint8_t*> held;
  std::vector<int> served;

  World() {
    auto made = io::Io::create({});
    REQUIRE(made.ok());
    io = std::move(*made);
    auto split = Buffers::create(*io, 64u << 20);
    REQUIRE(split.ok());
    buffers = std::move(*split);
    while (uint8_t* buffer = buffers->try_allocate(BufferUse::kRead, 16u << 20)) held.push_back(buffer);
    REQUIRE(!held.empty());
  }
  ~World() {
    buffers->stop_pinning();
    while (buffers->pinning()) io->run_once(1000);
    for (uint8_t* buffer : held) buffers->release(buffer);
    buffers.reset();
  }
  // One waiter after another gets the memory and gives it back.
  void serve_all() {
    while (buffers->waiting() > 0) {
      buffers->release(held.back());
      held.pop_back();
      buffers->serve_waiters();
    }
  }
};

struct Waiter {
  BufferWaiter line;
  World* world = nullptr;
  int number = 0;
};

void wait(World& world, Waiter& waiter, int number, uint8_t priority, uint64_t turn = 0) {
  waiter.world = &world;
  waiter.number = number;
  waiter.line.owner = &waiter;
  waiter.line.priority = priority;
  waiter.line.turn = turn;
  waiter.line.ready = [](BufferWaiter* line, uint8_t* buffer) {
    auto self = static_cast<Waiter*>(line->owner);
    self->world->served.push_back(self->number);
    self->world->held.push_back(buffer);
  };
  REQUIRE(world.buffers->allocate_or_wait(BufferUse::kRead, 16u << 20, &waiter.line) == nullptr);
}

}  // namespace

TEST_CASE("buffers: by priority, and among equals first come, first served") {
  World world;
  std::vector<Waiter> waiters(6);
  const uint8_t priorities[] = {100, 0, 255, 100, 0, 7};
  for (int i = 0; i < 6; i++) wait(world, waiters[static_cast<size_t>(i)], i, priorities[i]);
  world.buffers->cancel(&waiters[3].line);
  world.serve_all();
  CHECK(world.served == std::vector<int>{1, 4, 5, 0, 2});
}

TEST_CASE("buffers: who was overtaken often enough is overtaken no more") {
  World world;
  std::vector<Waiter> waiters(Buffers::kMostOvertaken + 10);
  wait(world, waiters[0], 0, 200);
  for (size_t i = 1; i < waiters.size(); i++) wait(world, waiters[i], static_cast<int>(i), 0);
  world.serve_all();
  REQUIRE(world.served.size() == waiters.size());
  CHECK(world.served[Buffers::kMostOvertaken] == 0);
  CHECK(world.served[Buffers::kMostOvertaken + 1] == Buffers::kMostOvertaken + 1);
}

TEST_CASE(
    "buffers: among equals those whose turn is first, however long others wait; not ahead of a priority") {
  World world;
  std::vector<Waiter> waiters(Buffers::kMostOvertaken + 10);
  const int last = static_cast<int>(waiters.size()) - 1;
  wait(world, waiters[0], 0, 1, 9);
  for (int i = 1; i < last; i++)
    wait(world, waiters[static_cast<size_t>(i)], i, 1, 3 + static_cast<uint64_t>(i % 2));
  wait(world, waiters[static_cast<size_t>(last)], last, 0, 100);
  world.serve_all();
  REQUIRE(world.served.size() == waiters.size());
  CHECK(world.served.front() == last);
  CHECK(world.served.back() == 0);
  for (size_t i = 2; i + 1 < world.served.size(); i++) {
    const int before = world.served[i - 1], after = world.served[i];
    CHECK((before % 2 == after % 2 ? before < after : before % 2 == 0));
  }
}

TEST_CASE("buffers: memory is registered when it has come into use, not before") {
  World world;
  CHECK_FALSE(world.buffers->pool(BufferUse::kRead).registered());
  CHECK_FALSE(world.buffers->region_of(world.held[0]).registered());
  if (world.io->backend() != io::Backend::uring) return;
  do {
    world.buffers->pin_used();
    world.io->run_once(1000);
  } while (world.buffers->pinning());
  if (world.buffers->pool(BufferUse::kRead).registration_error() != 0)
    return;  // this user may not pin so much
  for (uint8_t* buffer : world.held) CHECK(world.buffers->region_of(buffer).registered());
  CHECK_FALSE(world.buffers->pool(BufferUse::kTail).registered());
}
