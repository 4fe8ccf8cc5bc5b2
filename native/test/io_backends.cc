// The two real backends do the same things: the same cases over both.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/buffer_pool.h"
#include "io/device.h"
#include "io/io.h"

using namespace ffs;
using namespace ffs::io;

namespace {

std::unique_ptr<Io> make(Backend backend) {
  Options options;
  options.backend = backend;
  options.entries = 16;
  auto io = Io::create(options);
  REQUIRE(io.ok());
  return std::move(io.value());
}

struct TempFile {
  std::string path;
  Device device;
  explicit TempFile(uint64_t size) {
    path = "ffs-io-test." + std::to_string(::getpid());
    ::unlink(path.c_str());
    REQUIRE(make_device_file(path, size, true, false).ok());
    auto opened = open_device(path);
    REQUIRE(opened.ok());
    device = opened.value();
  }
  ~TempFile() {
    close_device(device);
    ::unlink(path.c_str());
  }
};

struct Counted {
  Op op;
  int* left;
};

void count_down(Op* op) {
  --*static_cast<Counted*>(op->owner)->left;
}

}  // namespace

TEST_CASE("what is written is read, with more ops than entries, in plain and pool memory") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    auto io = make(backend);
    TempFile temp(4 << 20);
    auto file = io->add_file(temp.device.fd);
    REQUIRE(file.ok());
    BufferPool::Options options;
    options.arena_bytes = 16 << 20;
    auto pool = BufferPool::create(io.get(), options);
    REQUIRE(pool.ok());
    uint8_t* memory = (*pool)->allocate(1 << 20);
    uint8_t* back = (*pool)->allocate(1 << 20);
    std::mt19937_64 random(3);
    for (int i = 0; i < 1 << 20; i++) memory[i] = static_cast<uint8_t>(random());
    std::vector<Counted> ops(256);
    int left = 256;
    for (int i = 0; i < 256; i++) {
      auto& counted = ops[static_cast<size_t>(i)];
      counted.left = &left;
      counted.op.owner = &counted;
      counted.op.done = count_down;
      io->write(&counted.op, *file, static_cast<uint64_t>(i) * 4096, memory + i * 4096, 4096,
                (*pool)->region_of(memory));
    }
    CHECK(left == 256);  // nothing completes inside the call
    while (left > 0) io->run_once(-1);
    for (auto& counted : ops) CHECK(counted.op.result == 4096);
    bool done = false;
    Op op;
    op.owner = &done;
    op.done = mark_done;
    io->datasync(&op, *file);
    CHECK(wait_for(*io, op) == 0);
    done = false;
    io->read(&op, *file, 0, back, 1 << 20, (*pool)->region_of(back));
    CHECK(wait_for(*io, op) == 1 << 20);
    CHECK(std::memcmp(memory, back, 1 << 20) == 0);
    done = false;
    io->read(&op, *file, (4 << 20) - 4096, back, 8192, (*pool)->region_of(back));
    CHECK(wait_for(*io, op) == 4096);  // cut at the end of the file
    done = false;
    io->discard(&op, *file, 4096, 8192);
    CHECK(wait_for(*io, op) == 0);
    done = false;
    io->read(&op, *file, 4096, back, 4096);
    CHECK(wait_for(*io, op) == 4096);
    CHECK(back[0] == 0);
    (*pool)->release(memory);
    (*pool)->release(back);
    pool.value().reset();
    io->remove_file(*file);
  }
}

// The device must not idle while the shard goes through what a pass has brought.
TEST_CASE("what moves much data is on its way before the pass that started it is over") {
  constexpr uint32_t kBytes = 1 << 20;
  for (Backend backend : {Backend::uring, Backend::pread}) {
    const std::string name = backend_name(backend);
    CAPTURE(name);
    auto io = make(backend);
    TempFile temp(kBytes);
    auto file = io->add_file(temp.device.fd);
    REQUIRE(file.ok());
    std::unique_ptr<uint8_t, decltype(&std::free)> memory(
        static_cast<uint8_t*>(std::aligned_alloc(4096, 2 * kBytes)), std::free);
    std::memset(memory.get(), 0x5a, kBytes);
    uint8_t* back = memory.get() + kBytes;
    int left = 1;
    Counted counted;
    counted.left = &left;
    counted.op.owner = &counted;
    counted.op.done = count_down;
    io->write(&counted.op, *file, 0, memory.get(), kBytes);
    // Nothing runs the Io, so only a call made by write() itself can have brought it there.
    bool there = false;
    for (int i = 0; i < 5000 && !there; i++) {
      REQUIRE(::pread(temp.device.fd, back, kBytes, 0) == kBytes);
      there = std::memcmp(memory.get(), back, kBytes) == 0;
      if (!there) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(there);
    CHECK(left == 1);
    while (left > 0) io->run_once(-1);
    CHECK(counted.op.result == static_cast<int32_t>(kBytes));
    io->remove_file(*file);
  }
}

TEST_CASE("readiness, posts from other threads and the helper thread wake a sleeping shard") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    auto io = make(backend);
    int fds[2];
    REQUIRE(::pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0);
    struct Seen {
      int events = 0;
      bool removed = false;
    } seen;
    Poll poll;
    poll.owner = &seen;
    poll.ready = [](Poll* p) {
      auto s = static_cast<Seen*>(p->owner);
      if (p->removed) {
        s->removed = true;
        return;
      }
      s->events++;
      char bytes[16];
      while (::read(p->fd, bytes, sizeof bytes) > 0) {
      }
      p->events = 0;
    };
    io->poll_add(&poll, fds[0], POLLIN);
    io->run_once(0);
    CHECK(seen.events == 0);
    for (int i = 1; i <= 3; i++) {
      std::thread writer([&] { CHECK(::write(fds[1], "x", 1) == 1); });
      while (seen.events < i) io->run_once(-1);
      writer.join();
    }
    Poll other;
    other.owner = &seen;
    other.ready = poll.ready;
    io->poll_add(&other, fds[1], POLLOUT);  // ready at once
    for (int i = 0; seen.events < 4 && i < 100; i++) io->run_once(1000);
    CHECK(seen.events == 4);
    io->poll_remove(&other);
    while (!seen.removed) io->run_once(1000);
    seen.removed = false;
    io->poll_remove(&poll);
    while (!seen.removed) io->run_once(1000);
    CHECK(::write(fds[1], "x", 1) == 1);
    io->run_once(0);
    CHECK(seen.events == 4);

    bool posted = false;
    Op op;
    op.owner = &posted;
    op.done = mark_done;
    op.result = 5;
    std::thread poster([&] { io->post(&op); });
    while (!posted) io->run_once(-1);
    poster.join();
    CHECK(op.result == 5);

    bool worked = false;
    Offload offload;
    offload.op.owner = &worked;
    offload.op.done = mark_done;
    offload.work = [](Offload*) -> int32_t { return 42; };
    io->offload(&offload);
    while (!worked) io->run_once(-1);
    CHECK(offload.op.result == 42);
    CHECK(io->in_flight() == 0);
    ::close(fds[0]);
    ::close(fds[1]);
  }
}

TEST_CASE("a foreign region takes reads after it was unmapped") {
  auto io = make(Backend::uring);
  if (io->backend() != Backend::uring) return;
  TempFile temp(1 << 20);
  auto file = io->add_file(temp.device.fd);
  REQUIRE(file.ok());
  int fd = ::memfd_create("client", MFD_CLOEXEC);
  REQUIRE(::ftruncate(fd, 1 << 20) == 0);
  void* mapped = ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  auto region = io->register_region(mapped, 1 << 20);
  if (!region.ok()) {
    MESSAGE("no registered memory for this user: " << std::string(region.error().what));
    return;
  }
  region->foreign = true;
  std::vector<uint8_t> pattern(4096, 0xab);
  CHECK(::pwrite(fd, pattern.data(), 4096, 0) == 4096);
  bool done = false;
  Op op;
  op.owner = &done;
  op.done = mark_done;
  io->write(&op, *file, 8192, mapped, 4096, *region);
  CHECK(wait_for(*io, op) == 4096);
  ::munmap(mapped, 1 << 20);
  done = false;
  io->read(&op, *file, 8192, static_cast<uint8_t*>(mapped) + 65536, 4096, *region);
  CHECK(wait_for(*io, op) == 4096);
  std::vector<uint8_t> got(4096);
  CHECK(::pread(fd, got.data(), 4096, 65536) == 4096);
  CHECK(got == pattern);
  // Outside the region the kernel refuses.
  done = false;
  io->read(&op, *file, 0, static_cast<uint8_t*>(mapped) + (1 << 20), 4096, *region);
  CHECK(wait_for(*io, op) == -EFAULT);
  io->unregister_region(*region);
  CHECK(io->register_region(reinterpret_cast<void*>(4096 + 1), 4096).error().code == EINVAL);
  io->remove_file(*file);
  ::close(fd);
}

TEST_CASE("devices: in use, missing, of the wrong kind, there already") {
  TempFile temp(1 << 20);
  CHECK(open_device(temp.path).error().code == EBUSY);
  CHECK(open_device("no/such/device").error().code == ENOENT);
  CHECK(open_device("/").error().code == ENODEV);
  CHECK(make_device_file(temp.path, 1 << 20, true, false).error().code == EEXIST);
  CHECK(make_device_file(temp.path, 1 << 20, true, true).error().code == EBUSY);
  CHECK(make_device_file("other", 1000, true, false).error().code == EINVAL);
  CHECK(::access("other", F_OK) != 0);
}

TEST_CASE("the buffer pool gives aligned pieces, refuses by null and joins what comes back") {
  BufferPool::Options options;
  options.arena_bytes = 32 << 20;
  auto made = BufferPool::create(nullptr, options);
  REQUIRE(made.ok());
  BufferPool& pool = **made;
  CHECK(pool.largest_free() == kMaxBufferBytes);
  std::mt19937_64 random(11);
  struct Piece {
    uint8_t* at;
    size_t size;
  };
  std::vector<Piece> pieces;
  size_t used = 0;
  bool refused = false;
  for (int round = 0; round < 20'000; round++) {
    if (!pieces.empty() && random() % 2 == 0) {
      size_t i = random() % pieces.size();
      for (size_t at = 0; at < pieces[i].size; at += 4096)
        REQUIRE(pieces[i].at[at] == static_cast<uint8_t>(pieces[i].size >> 12));
      used -= pieces[i].size;
      pool.release(pieces[i].at);
      pieces[i] = pieces.back();
      pieces.pop_back();
      continue;
    }
    size_t bytes = 1 + random() % (1u << (random() % 24 + 1));
    bytes = std::min<size_t>(bytes, kMaxBufferBytes);
    uint8_t* at = pool.allocate(bytes);
    if (at == nullptr) {
      refused = true;
      REQUIRE(pool.largest_free() < BufferPool::rounded(bytes));
      continue;
    }
    size_t size = BufferPool::rounded(bytes);
    REQUIRE(reinterpret_cast<uintptr_t>(at) % 4096 == 0);
    for (size_t page = 0; page < size; page += 4096) at[page] = static_cast<uint8_t>(size >> 12);
    used += size;
    pieces.push_back({at, size});
    REQUIRE(pool.free_bytes() == pool.arena_bytes() - used);
  }
  CHECK(refused);
  for (const Piece& piece : pieces) pool.release(piece.at);
  CHECK(pool.free_bytes() == pool.arena_bytes());
  CHECK(pool.largest_free() == kMaxBufferBytes);
}
