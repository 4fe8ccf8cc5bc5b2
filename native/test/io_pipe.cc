// io::PipeCopies: files on tmpfs are read into clients' registered pages by the shard's own thread, through a
// pipe.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "io/pipe_copies.h"
#include "test/io_in_memory.h"

using namespace ffs;
using namespace ffs::io;
using namespace ffs::io::testing;

namespace {

constexpr uint32_t kFileBytes = 16u << 20;

// A file in memory, mapped, and a client's memory: registered, and mapped here no more.
struct World : InMemory {
  World() : InMemory(kFileBytes) {
    void* at = ::mmap(nullptr, kFileBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    REQUIRE(at != MAP_FAILED);
    mapping = static_cast<uint8_t*>(at);
    io->note_mapping(file, mapping, kFileBytes);
    shared.reset(::memfd_create("client", MFD_CLOEXEC));
    REQUIRE(::ftruncate(shared.get(), kFileBytes) == 0);
    memory = static_cast<uint8_t*>(
        ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared.get(), 0));
    auto registered = io->register_region(memory, kFileBytes);
    if (registered.ok()) region = *registered;
    region.foreign = true;
    ::munmap(memory, kFileBytes);
  }
  ~World() {
    if (region.registered()) io->unregister_region(region);
    ::munmap(mapping, kFileBytes);
  }
  bool suits() const {
    if (lies_there() && region.registered()) return true;
    MESSAGE("no io_uring or no registered memory for this user, or /dev/shm is no tmpfs");
    return false;
  }
  void start(Read& read, uint32_t offset, uint32_t to, uint32_t length) {
    InMemory::start(read, offset, memory + to, length, region);
  }
  bool right(uint32_t offset, uint32_t to, uint32_t length) {
    std::vector<uint8_t> got(length);
    REQUIRE(::pread(shared.get(), got.data(), length, to) == static_cast<ssize_t>(length));
    return std::memcmp(got.data(), content.data() + offset, length) == 0;
  }

  Fd shared;
  uint8_t* mapping = nullptr;
  uint8_t* memory = nullptr;
  Region region;
};

}  // namespace

TEST_CASE(
    "a mapped file in memory is read into a client's pages in the same pass, in pieces as a pipe holds") {
  World w;
  if (!w.suits()) return;
  std::vector<Read> reads(4);
  for (uint32_t round = 0; round < 20; round++) {
    const uint32_t lengths[] = {4096, 65536, 1u << 20, (2u << 20) + 8192};
    for (uint32_t i = 0; i < 4; i++) w.start(reads[i], (round + i) * 4096, i << 22, lengths[i]);
    CHECK(w.io->in_flight() == 4);
    w.io->run_once(0);
    CHECK(w.io->in_flight() == 0);
    for (uint32_t i = 0; i < 4; i++) {
      REQUIRE(reads[i].done);
      CHECK(reads[i].op.result == static_cast<int32_t>(lengths[i]));
      CHECK(w.right((round + i) * 4096, i << 22, lengths[i]));
    }
  }
}

TEST_CASE("what is too much for a pass, and the end of the file, go the ordinary way") {
  World w;
  if (!w.suits()) return;
  std::vector<Read> reads(kFileBytes >> 20);
  for (uint32_t i = 0; i < reads.size(); i++) w.start(reads[i], i << 20, i << 20, 1u << 20);
  for (Read& read : reads) CHECK(wait_for(*w.io, read.op) == 1 << 20);
  CHECK(w.right(0, 0, kFileBytes));
  Read whole, end, beyond;
  w.start(whole, 0, 0, kFileBytes);
  CHECK(wait_for(*w.io, whole.op) == static_cast<int32_t>(kFileBytes));
  w.start(end, kFileBytes - 4096, 0, 8192);
  CHECK(wait_for(*w.io, end.op) == 4096);
  w.start(beyond, kFileBytes, 0, 4096);
  CHECK(wait_for(*w.io, beyond.op) == 0);
}

TEST_CASE("pages of the mapping that can't be had are read from the file, and so is the rest of that read") {
  World w;
  if (!w.suits()) return;
  REQUIRE(::mprotect(w.mapping + (1u << 20), 65536, PROT_NONE) == 0);
  Read all, behind;
  w.start(all, 0, 0, 2u << 20);
  w.start(behind, 3u << 20, 3u << 20, 65536);
  CHECK(wait_for(*w.io, all.op) == 2 << 20);
  CHECK(wait_for(*w.io, behind.op) == 65536);
  CHECK(w.right(0, 0, 2u << 20));
  CHECK(w.right(3u << 20, 3u << 20, 65536));
}

TEST_CASE("reads that a pipe leaves off are no part of the line of large reads, which goes on after them") {
  World w;
  if (!w.suits()) return;
  REQUIRE(::mprotect(w.mapping, kFileBytes, PROT_NONE) == 0);
  std::vector<Read> reads(12);
  for (int round = 0; round < 3; round++) {
    for (uint32_t i = 0; i < reads.size(); i++) w.start(reads[i], i << 20, i << 20, 1u << 20);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto done = [](const Read& read) { return read.done; };
    while (!std::all_of(reads.begin(), reads.end(), done) && std::chrono::steady_clock::now() < until)
      w.io->run_once(1000);
    REQUIRE(std::all_of(reads.begin(), reads.end(), done));
    for (const Read& read : reads) CHECK(read.op.result == 1 << 20);
  }
  CHECK(w.right(0, 0, 12u << 20));
}

TEST_CASE("a read whose pages can't be written leaves nothing in the pipe for the next") {
  World w;
  if (!w.suits()) return;
  // The end of the region lies before the end of the read.
  Read bad, good;
  w.start(bad, 0, kFileBytes - 4096, 8192);
  CHECK(wait_for(*w.io, bad.op) == -EFAULT);
  w.start(good, 65536, 0, 65536);
  CHECK(wait_for(*w.io, good.op) == 65536);
  CHECK(w.right(65536, 0, 65536));
}
