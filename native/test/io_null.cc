// io::NullIo: what is beyond the line costs nothing and is zeros, what is below it is kept.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "base/fd.h"
#include "io/io.h"

using namespace ffs;
using namespace ffs::io;

namespace {

constexpr uint64_t kLine = 64u << 10;
constexpr uint32_t kBytes = 3 * kBlockBytes;

struct World {
  World() {
    Options options;
    options.backend = Backend::null;
    auto made = Io::create(options);
    REQUIRE(made.ok());
    io = std::move(*made);
    char path[] = "io_null_XXXXXX";
    fd.reset(::mkostemp(path, O_CLOEXEC));
    REQUIRE(fd.valid());
    ::unlink(path);
    REQUIRE(::ftruncate(fd.get(), 1 << 20) == 0);
    auto added = io->add_file(fd.get());
    REQUIRE(added.ok());
    file = *added;
  }
  ~World() { io->remove_file(file); }

  int32_t run(bool write, uint64_t offset, uint8_t* bytes, uint32_t length, Region region = {}) {
    bool done = false;
    Op op;
    op.owner = &done;
    op.done = mark_done;
    if (write)
      io->write(&op, file, offset, bytes, length, region);
    else
      io->read(&op, file, offset, bytes, length, region);
    CHECK(!done);  // never inside the call
    return wait_for(*io, op);
  }

  Fd fd;
  std::unique_ptr<Io> io;
  File file;
  alignas(kBlockBytes) uint8_t memory[kBytes];
};

}  // namespace

TEST_CASE("a null file keeps what is below its line, and has zeros beyond it") {
  World w;
  CHECK(w.io->backend() == Backend::null);
  REQUIRE(w.io->make_null(w.file, kLine).ok());
  for (const uint64_t offset : {uint64_t{0}, kLine - kBytes, kLine, kLine + (1u << 16)}) {
    CAPTURE(offset);
    std::memset(w.memory, 7, kBytes);
    CHECK(w.run(true, offset, w.memory, kBytes) == int32_t{kBytes});
    std::memset(w.memory, 9, kBytes);
    CHECK(w.run(false, offset, w.memory, kBytes) == int32_t{kBytes});
    const uint8_t wanted = offset < kLine ? 7 : 0;
    CHECK(w.memory[0] == wanted);
    CHECK(w.memory[kBlockBytes + 77] == wanted);
    CHECK(w.memory[kBytes - 1] == wanted);
  }
  uint8_t kept[1];
  REQUIRE(::pread(w.fd.get(), kept, 1, kLine - 1) == 1);
  CHECK(kept[0] == 7);
  REQUIRE(::pread(w.fd.get(), kept, 1, kLine) == 1);
  CHECK(kept[0] == 0);
}

TEST_CASE("a client's memory is left alone") {
  World w;
  REQUIRE(w.io->make_null(w.file, kLine).ok());
  std::memset(w.memory, 9, kBytes);
  CHECK(w.run(false, kLine, w.memory, kBytes, Region{0, true}) == int32_t{kBytes});
  CHECK(w.memory[0] == 9);
}

TEST_CASE("flushes and discards of a null file are over at once") {
  World w;
  REQUIRE(w.io->make_null(w.file, kLine).ok());
  bool done = false;
  Op op;
  op.owner = &done;
  op.done = mark_done;
  w.io->datasync(&op, w.file);
  CHECK(w.io->in_flight() == 0);
  CHECK(wait_for(*w.io, op) == 0);
  done = false;
  w.io->discard(&op, w.file, kLine, 1 << 16);
  CHECK(w.io->in_flight() == 0);
  CHECK(wait_for(*w.io, op) == 0);
}

TEST_CASE("other files of the same Io are what they are, and other backends have no null files") {
  World w;
  std::memset(w.memory, 7, kBytes);
  CHECK(w.run(true, kLine, w.memory, kBytes) == int32_t{kBytes});
  std::memset(w.memory, 9, kBytes);
  CHECK(w.run(false, kLine, w.memory, kBytes) == int32_t{kBytes});
  CHECK(w.memory[0] == 7);
  Options options;
  options.backend = Backend::pread;
  auto other = Io::create(options);
  REQUIRE(other.ok());
  CHECK((*other)->make_null(File{0}, kLine).error().code == ENOTSUP);
}

TEST_CASE("memory that records passed through is zeroed whole") {
  World w;
  REQUIRE(w.io->make_null(w.file, kLine).ok());
  std::memset(w.memory, 0, kBytes);
  w.memory[kBlockBytes / 2] = 7;
  CHECK(w.run(true, 0, w.memory, kBytes) == int32_t{kBytes});
  CHECK(w.run(false, kLine, w.memory, kBytes) == int32_t{kBytes});
  CHECK(w.memory[kBlockBytes / 2] == 0);
}
