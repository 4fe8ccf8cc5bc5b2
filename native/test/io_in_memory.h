// A file in memory with known content, in an Io: for tests of what goes without other threads there.
#pragma once

#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "base/fd.h"
#include "io/memory_copies.h"

namespace ffs::io::testing {

struct Read {
  Op op;
  bool done = false;
};

struct InMemory {
  explicit InMemory(uint32_t bytes) {
    auto made = Io::create(Options());
    REQUIRE(made.ok());
    io = std::move(*made);
    char path[] = "/dev/shm/ffs-io-XXXXXX";
    fd.reset(::mkostemp(path, O_CLOEXEC));
    REQUIRE(fd.valid());
    ::unlink(path);
    content.resize(bytes);
    for (uint32_t i = 0; i < bytes; i++) content[i] = static_cast<uint8_t>(mix(i));
    REQUIRE(::pwrite(fd.get(), content.data(), bytes, 0) == bytes);
    auto added = io->add_file(fd.get());
    REQUIRE(added.ok());
    file = *added;
  }
  ~InMemory() { io->remove_file(file); }

  // False: neither here nor in a test that expects what only io_uring does.
  bool lies_there() const {
    return io->backend() == Backend::uring && MemoryCopies::lies_in_memory(fd.get());
  }

  static uint32_t mix(uint32_t i) { return (i * 2654435761u) >> 24; }

  void start(Read& read, uint32_t offset, uint8_t* to, uint32_t length, Region region) {
    read.done = false;
    read.op.owner = &read.done;
    read.op.done = mark_done;
    io->read(&read.op, file, offset, to, length, region);
    CHECK(!read.done);  // never inside the call
  }

  std::unique_ptr<Io> io;
  Fd fd;
  File file;
  std::vector<uint8_t> content;
};

}  // namespace ffs::io::testing
