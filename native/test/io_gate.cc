// Background operations: cut into pieces, behind what clients started, when the gate lets them.
#include <doctest/doctest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "io/buffer_pool.h"
#include "io/device.h"
#include "io/io.h"

using namespace ffs;
using namespace ffs::io;

namespace {

constexpr uint32_t kKiB = 1024;

// Lets at most `allowed` bytes through, `piece` at a time, one at a time; notes who was let through.
struct TestGate final : Gate {
  uint64_t allowed = 0;
  uint32_t piece = 64 * kKiB;
  uint32_t under_way = 0;
  std::vector<Piece> let_through;
  std::vector<uint32_t> clients_done;  // how many client operations were over then
  const int* client_count = nullptr;

  Piece next(const std::array<uint32_t, kOpClasses>& wanted) override {
    for (OpClass op_class : {OpClass::compaction, OpClass::recovery, OpClass::scrub}) {
      const uint32_t wants = wanted[static_cast<size_t>(op_class)];
      if (wants == 0 || allowed == 0 || under_way > 0) continue;
      const Piece chosen{op_class, static_cast<uint32_t>(std::min<uint64_t>({wants, piece, allowed}))};
      allowed -= chosen.bytes;
      under_way = chosen.bytes;
      let_through.push_back(chosen);
      if (client_count != nullptr) clients_done.push_back(static_cast<uint32_t>(*client_count));
      return chosen;
    }
    return {};
  }
  void ended(OpClass op_class, uint32_t bytes) override {
    CHECK(bytes == under_way);
    CHECK(op_class == let_through.back().op_class);
    under_way = 0;
  }
};

struct World {
  std::string path = "ffs-io-gate." + std::to_string(::getpid());
  Device device;
  std::unique_ptr<Io> io;
  File file;
  TestGate gate;
  std::unique_ptr<BufferPool> pool;

  explicit World(Backend backend) {
    ::unlink(path.c_str());
    REQUIRE(make_device_file(path, 8 << 20, true, false).ok());
    auto opened = open_device(path);
    REQUIRE(opened.ok());
    device = opened.value();
    Options options;
    options.backend = backend;
    auto made = Io::create(options);
    REQUIRE(made.ok());
    io = std::move(made.value());
    file = *io->add_file(device.fd);
    BufferPool::Options pool_options;
    pool_options.arena_bytes = 16 << 20;
    pool = std::move(*BufferPool::create(io.get(), pool_options));
    io->set_gate(&gate);
  }
  ~World() {
    io->set_gate(nullptr);
    pool.reset();
    io.reset();
    close_device(device);
    ::unlink(path.c_str());
  }
  void passes(int count) {
    for (int i = 0; i < count; i++) io->run_once(1000);
  }
};

struct Counted {
  Op op;
  int done = 0;
  Counted() {
    op.owner = this;
    op.done = [](Op* over) { static_cast<Counted*>(over->owner)->done++; };
  }
};

}  // namespace

TEST_CASE("a background write goes in pieces when the gate says so, and is whole and over once") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    World w(backend);
    uint8_t* bytes = w.pool->allocate(1 << 20);
    uint8_t* back = w.pool->allocate(1 << 20);
    std::mt19937_64 random(5);
    for (int i = 0; i < 1 << 20; i++) bytes[i] = static_cast<uint8_t>(random());

    Counted write;
    write.op.op_class = OpClass::recovery;
    w.io->write(&write.op, w.file, 1 << 20, bytes, 1 << 20, w.pool->region_of(bytes));
    w.passes(5);
    CHECK(w.gate.let_through.empty());
    CHECK(write.done == 0);
    CHECK(w.io->background_waits());
    CHECK(w.io->background_ops(OpClass::recovery) == 1);
    CHECK(w.io->in_flight() == 1);

    w.gate.allowed = 512 * kKiB;
    while (w.gate.let_through.size() < 8 || w.gate.under_way > 0) w.passes(1);
    w.passes(5);
    CHECK(write.done == 0);
    w.gate.allowed = 1 << 20;
    while (write.done == 0) w.passes(1);
    CHECK(write.done == 1);
    CHECK(write.op.result == 1 << 20);
    CHECK(w.gate.let_through.size() == 16);
    CHECK(w.io->background_ops(OpClass::recovery) == 0);
    CHECK(w.io->in_flight() == 0);
    CHECK_FALSE(w.io->background_waits());

    Counted read;
    read.op.op_class = OpClass::scrub;
    w.gate.allowed = 1 << 20;
    w.gate.piece = 100 * kKiB;
    w.io->read(&read.op, w.file, 1 << 20, back, 1 << 20, w.pool->region_of(back));
    while (read.done == 0) w.passes(1);
    CHECK(read.op.result == 1 << 20);
    CHECK(std::memcmp(bytes, back, 1 << 20) == 0);
    w.pool->release(bytes);
    w.pool->release(back);
  }
}

TEST_CASE("what clients start goes before pieces that waited, in each pass") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    World w(backend);
    uint8_t* memory = w.pool->allocate(4 << 20);
    std::memset(memory, 7, 4 << 20);
    std::vector<Counted> background(3);
    for (size_t i = 0; i < background.size(); i++) {
      background[i].op.op_class = OpClass::recovery;
      w.io->write(&background[i].op, w.file, i << 20, memory + (i << 20), 1 << 20, w.pool->region_of(memory));
    }
    w.passes(3);
    // A client's reads overtake all of them though they came first: no piece is under way yet.
    uint8_t* pages = w.pool->allocate(64 * kKiB);
    std::vector<Counted> reads(16);
    for (size_t i = 0; i < reads.size(); i++) {
      w.io->read(&reads[i].op, w.file, (4 << 20) + i * 4096, pages + i * 4096, 4096,
                 w.pool->region_of(pages));
    }
    const auto all_read = [&] {
      return std::all_of(reads.begin(), reads.end(), [](const Counted& read) { return read.done == 1; });
    };
    while (!all_read()) w.passes(1);
    CHECK(w.gate.let_through.empty());

    // Between two pieces of one operation a read goes as well, and another class goes before its rest.
    w.gate.allowed = 64 * kKiB;
    while (w.gate.let_through.empty() || w.gate.under_way > 0) w.passes(1);
    Counted other;
    other.op.op_class = OpClass::compaction;
    w.io->write(&other.op, w.file, 5 << 20, memory, 64 * kKiB, w.pool->region_of(memory));
    w.gate.allowed = 64 * kKiB;
    while (other.done == 0) w.passes(1);
    for (const Counted& op : background) CHECK(op.done == 0);
    w.gate.allowed = 8 << 20;
    while (background[2].done == 0) w.passes(1);
    CHECK(background[0].done == 1);
    CHECK(background[1].done == 1);
    CHECK(w.gate.let_through[1].op_class == OpClass::compaction);
    w.pool->release(memory);
    w.pool->release(pages);
  }
}

TEST_CASE("without a gate, or once it is taken out, background operations go like any other") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    World w(backend);
    uint8_t* memory = w.pool->allocate(1 << 20);
    std::memset(memory, 9, 1 << 20);
    std::vector<Counted> ops(4);
    for (size_t i = 0; i < ops.size(); i++) {
      ops[i].op.op_class = i % 2 == 0 ? OpClass::scrub : OpClass::recovery;
      w.io->write(&ops[i].op, w.file, i << 20, memory, 1 << 20, w.pool->region_of(memory));
      if (i == 1) {  // one piece of one of them is under way when it goes
        w.gate.allowed = 64 * kKiB;
        w.passes(1);
        w.io->set_gate(nullptr);
      }
    }
    while (w.io->in_flight() > 0) w.passes(1);
    for (const Counted& op : ops) {
      CHECK(op.done == 1);
      CHECK(op.op.result == 1 << 20);
    }
    w.pool->release(memory);
  }
}

TEST_CASE("a background read that meets the end of the file ends there; one that fails, once") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    World w(backend);
    uint8_t* memory = w.pool->allocate(1 << 20);
    w.gate.allowed = 64 << 20;
    Counted read;
    read.op.op_class = OpClass::scrub;
    w.io->read(&read.op, w.file, (8 << 20) - 96 * kKiB, memory, 512 * kKiB, w.pool->region_of(memory));
    while (read.done == 0) w.passes(1);
    CHECK(read.done == 1);
    CHECK(read.op.result == 96 * kKiB);
    Counted bad;
    bad.op.op_class = OpClass::scrub;
    w.io->read(&bad.op, w.file, 0, reinterpret_cast<void*>(4096), 512 * kKiB);  // no such memory
    while (bad.done == 0) w.passes(1);
    CHECK(bad.done == 1);
    CHECK(bad.op.result == -EFAULT);
    CHECK(w.io->in_flight() == 0);
    CHECK(w.io->background_ops(OpClass::scrub) == 0);
    w.pool->release(memory);
  }
}
