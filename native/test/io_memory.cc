// io::MemoryCopies: files on tmpfs are read and written by the shard's own thread, as far as a pass goes.
#include <sys/mman.h>

#include <cstring>

#include "test/io_in_memory.h"

using namespace ffs;
using namespace ffs::io;
using namespace ffs::io::testing;

namespace {

constexpr uint32_t kFileBytes = 4u << 20;

struct World : InMemory {
  World() : InMemory(kFileBytes), memory(kFileBytes + kBlockBytes) {}

  bool suits() const {
    if (lies_there()) return true;
    MESSAGE("no io_uring, or /dev/shm is no tmpfs");
    return false;
  }

  void start(Read& read, uint32_t offset, uint32_t length, Region region = {}) {
    InMemory::start(read, offset, memory.data() + offset, length, region);
  }

  bool right(uint32_t offset, uint32_t length) const {
    return std::memcmp(memory.data() + offset, content.data() + offset, length) == 0;
  }

  std::vector<uint8_t> memory;
};

}  // namespace

TEST_CASE("a file in memory: the first few reads are over after one pass, without another thread") {
  World w;
  if (!w.suits()) return;
  std::vector<Read> reads(MemoryCopies::kMostOps);
  for (int round = 0; round < 100; round++) {
    for (uint32_t i = 0; i < reads.size(); i++) w.start(reads[i], (i + 7) * 65536, kBlockBytes);
    CHECK(w.io->in_flight() == reads.size());
    w.io->run_once(0);
    for (uint32_t i = 0; i < reads.size(); i++) {
      REQUIRE(reads[i].done);
      CHECK(reads[i].op.result == static_cast<int32_t>(kBlockBytes));
      CHECK(w.right((i + 7) * 65536, kBlockBytes));
    }
    CHECK(w.io->in_flight() == 0);
  }
}

TEST_CASE("a file in memory: many reads, large ones, the end of the file and a file that can't be read") {
  World w;
  if (!w.suits()) return;
  std::vector<Read> reads(kFileBytes / 65536);
  for (uint32_t i = 0; i < reads.size(); i++) w.start(reads[i], i * 65536, 65536);
  for (Read& read : reads) CHECK(wait_for(*w.io, read.op) == 65536);
  CHECK(w.right(0, kFileBytes));
  w.memory.assign(w.memory.size(), 0);
  Read whole, more;
  w.start(whole, 0, 1u << 20);
  w.start(more, 2u << 20, 2u << 20);
  CHECK(wait_for(*w.io, whole.op) == 1 << 20);
  CHECK(wait_for(*w.io, more.op) == 2 << 20);
  CHECK(w.right(0, 1u << 20));
  CHECK(w.right(2u << 20, 2u << 20));
  Read end, beyond;
  w.start(end, kFileBytes - kBlockBytes, 2 * kBlockBytes);
  w.start(beyond, kFileBytes, kBlockBytes);
  CHECK(wait_for(*w.io, end.op) == static_cast<int32_t>(kBlockBytes));
  CHECK(wait_for(*w.io, beyond.op) == 0);

  char path[40];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", w.fd.get());
  const Fd written(::open(path, O_WRONLY | O_CLOEXEC));
  REQUIRE(written.valid());
  auto added = w.io->add_file(written.get());
  REQUIRE(added.ok());
  bool done = false;
  Op op;
  op.owner = &done;
  op.done = mark_done;
  w.io->read(&op, *added, 0, w.memory.data(), kBlockBytes);
  CHECK(wait_for(*w.io, op) == -EBADF);
  w.io->remove_file(*added);
}

TEST_CASE(
    "a file in memory: the first few writes and a sync are over after one pass, without another thread") {
  World w;
  if (!w.suits()) return;
  std::vector<Read> ops(MemoryCopies::kMostOps);
  const auto put = [&](Read& write, uint32_t offset, uint32_t length) {
    write.done = false;
    write.op.owner = &write.done;
    write.op.done = mark_done;
    w.io->write(&write.op, w.file, offset, w.content.data() + offset, length);
    CHECK(!write.done);  // never inside the call
  };
  std::vector<uint8_t> got(kFileBytes);
  for (int round = 0; round < 100; round++) {
    for (uint8_t& byte : w.content) byte = static_cast<uint8_t>(byte + 1);
    for (uint32_t i = 0; i + 1 < ops.size(); i++) put(ops[i], (i + 7) * 65536, 2 * kBlockBytes);
    Read& sync = ops.back();
    sync.done = false;
    sync.op.owner = &sync.done;
    sync.op.done = mark_done;
    w.io->datasync(&sync.op, w.file);
    CHECK(!sync.done);
    CHECK(w.io->in_flight() == ops.size());
    w.io->run_once(0);
    CHECK(w.io->in_flight() == 0);
    for (uint32_t i = 0; i < ops.size(); i++) REQUIRE(ops[i].done);
    CHECK(sync.op.result == 0);
    for (uint32_t i = 0; i + 1 < ops.size(); i++) {
      CHECK(ops[i].op.result == static_cast<int32_t>(2 * kBlockBytes));
      const uint32_t offset = (i + 7) * 65536;
      REQUIRE(::pread(w.fd.get(), got.data(), 2 * kBlockBytes, offset) == 2 * kBlockBytes);
      CHECK(std::memcmp(got.data(), w.content.data() + offset, 2 * kBlockBytes) == 0);
    }
  }
  // More than a pass takes: all of it arrives, whoever carries it out.
  std::vector<Read> many(kFileBytes / 65536);
  for (uint32_t i = 0; i < many.size(); i++) put(many[i], i * 65536, 65536);
  for (Read& write : many) CHECK(wait_for(*w.io, write.op) == 65536);
  REQUIRE(::pread(w.fd.get(), got.data(), kFileBytes, 0) == kFileBytes);
  CHECK(got == w.content);
}

TEST_CASE("a file in memory: a write that fails says so") {
  World w;
  if (!w.suits()) return;
  char path[40];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", w.fd.get());
  const Fd readable(::open(path, O_RDONLY | O_CLOEXEC));
  REQUIRE(readable.valid());
  auto added = w.io->add_file(readable.get());
  REQUIRE(added.ok());
  Read write;
  write.op.owner = &write.done;
  write.op.done = mark_done;
  w.io->write(&write.op, *added, 0, w.content.data(), kBlockBytes);
  CHECK(wait_for(*w.io, write.op) == -EBADF);
  w.io->remove_file(*added);
}

// A server must not write a client's memory but through registered pages (docs/wire_format.md, Regions): it
// need not even be mapped.
TEST_CASE("a file in memory: a client's memory is left to the kernel") {
  World w;
  if (!w.suits()) return;
  const Fd shared(::memfd_create("client", MFD_CLOEXEC));
  REQUIRE(::ftruncate(shared.get(), 1 << 20) == 0);
  void* mapped = ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, shared.get(), 0);
  auto region = w.io->register_region(mapped, 1 << 20);
  if (!region.ok()) {
    MESSAGE("no registered memory for this user: " << std::string(region.error().what));
    return;
  }
  region->foreign = true;
  ::munmap(mapped, 1 << 20);
  bool done = false;
  Op op;
  op.owner = &done;
  op.done = mark_done;
  w.io->read(&op, w.file, 8192, static_cast<uint8_t*>(mapped) + 65536, kBlockBytes, *region);
  CHECK(wait_for(*w.io, op) == static_cast<int32_t>(kBlockBytes));
  std::vector<uint8_t> got(kBlockBytes);
  CHECK(::pread(shared.get(), got.data(), kBlockBytes, 65536) == kBlockBytes);
  CHECK(std::memcmp(got.data(), w.content.data() + 8192, kBlockBytes) == 0);
  w.io->unregister_region(*region);
}
