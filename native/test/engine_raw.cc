// The engine on block devices as they are: loop devices with direct I/O, of 512 and 4096-byte sectors, by
// both backends. Root only; elsewhere the cases say so.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/chunk_store.h"
#include "engine/device_check.h"
#include "engine_harness.h"
#include "io/device.h"
#include "loop_device.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint64_t kMiB = 1ull << 20;
constexpr uint64_t kSize = 256 * kMiB;

std::string file_path(uint32_t sector) {
  return ffs::testing::fast_directory() + "/ffs-raw-test." + std::to_string(::getpid()) + "." +
         std::to_string(sector);
}

struct RawStore {
  std::string path;
  std::unique_ptr<io::Io> io;
  std::unique_ptr<ChunkStore> store;

  RawStore(const std::string& device, io::Backend backend) : path(device) {
    io::Options options;
    options.backend = backend;
    auto made = io::Io::create(options);
    REQUIRE(made.ok());
    io = std::move(made.value());
  }
  ~RawStore() { store.reset(); }
  void open(WriteCache write_cache = WriteCache::automatic) {
    OpenOptions options;
    options.cluster = Harness::cluster();
    options.write_cache = write_cache;
    auto opened = ChunkStore::open(*io, path, options);
    if (!opened.ok()) FAIL(ChunkStore::last_open_message());
    store = std::move(opened.value());
  }
  int stage(uint64_t key, uint64_t version, uint64_t base, UpdateKind kind, uint32_t offset,
            const std::vector<uint8_t>& bytes) {
    auto op = std::make_unique<StageOp>();
    Laid laid(offset, bytes);
    bool done = false;
    op->target = TargetId(Harness::kTarget);
    op->key = key_of(key);
    op->version = v(version);
    op->base = v(base);
    op->kind = kind;
    op->offset = offset;
    op->length = static_cast<uint32_t>(bytes.size());
    op->data = laid.data;
    op->tail_padded = true;
    op->commit_now = true;
    op->owner = &done;
    op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->stage(op.get());
    while (!done) io->run_once(-1);
    return op->error;
  }
  std::vector<uint8_t> get(uint64_t key, uint32_t offset, uint32_t length) {
    auto op = std::make_unique<ReadOp>();
    Laid laid(offset, std::vector<uint8_t>(length));
    bool done = false;
    op->target = TargetId(Harness::kTarget);
    op->key = key_of(key);
    op->offset = offset;
    op->length = length;
    op->memory = laid.data;
    op->verify_whole = op->verify_partial = true;
    op->owner = &done;
    op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->read(op.get());
    while (!done) io->run_once(-1);
    REQUIRE(op->error == 0);
    return {laid.data, laid.data + op->read_length};
  }
};

uint64_t allocated(const Fd& file) {
  struct stat status;
  REQUIRE(::fstat(file.get(), &status) == 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

// Without a device the case ends, and says why.
bool skipped(const ffs::testing::LoopDevice& loop) {
  if (loop.valid()) return false;
  MESSAGE("skipped: " << loop.why_not());
  return true;
}

}  // namespace

TEST_CASE(
    "a block device: discarded at format, written and read whole and in part, a crash, the other backend") {
  for (uint32_t sector : {512u, 4096u}) {
    CAPTURE(sector);
    ffs::testing::LoopDevice loop(file_path(sector), kSize, sector);
    if (skipped(loop)) return;
    const std::vector<uint8_t> old(8 * kMiB, 'o');
    {
      Fd device(::open(loop.path().c_str(), O_WRONLY | O_CLOEXEC));
      REQUIRE(::pwrite(device.get(), old.data(), old.size(), 100 * kMiB) == static_cast<ssize_t>(old.size()));
      REQUIRE(::fsync(device.get()) == 0);
    }
    const uint64_t before = allocated(loop.file());
    RawStore f(loop.path(), io::Backend::uring);
    FormatOptions options = Harness::format_options();
    options.sector_bytes = sector == 512 ? 4096 : 512;
    options.overwrite = true;
    CHECK(ChunkStore::format(*f.io, f.path, options).error().code == EINVAL);  // not the device's sectors
    options.sector_bytes = 0;
    options.overwrite = false;
    CHECK(ChunkStore::format(*f.io, f.path, options).error().code == EEXIST);
    options.overwrite = true;
    DeviceIdentity made;
    REQUIRE_MESSAGE(ChunkStore::format(*f.io, f.path, options, &made).ok(), ChunkStore::last_open_message());
    CHECK(made.sector_bytes == sector);
    CHECK(made.size_bytes == kSize);
    auto facts = io::describe_device(f.path);
    REQUIRE(facts.ok());
    CHECK((facts->block_device && facts->sector_bytes == sector));
    if (facts->discard_bytes > 0) CHECK(allocated(loop.file()) + 4 * kMiB < before + 9 * kMiB);

    f.open();
    CHECK(ChunkStore::format(*f.io, f.path, options).error().code == EBUSY);  // whatever is asked for
    const auto whole = random_bytes(1'200'000, sector);
    REQUIRE(f.stage(1, 1, 0, UpdateKind::replace, 0, whole) == 0);
    REQUIRE(f.stage(2, 1, 0, UpdateKind::replace, 0, random_bytes(777, 2)) == 0);
    REQUIRE(f.stage(1, 2, 1, UpdateKind::write, 4097, random_bytes(513, 3)) == 0);
    auto wanted = whole;
    const auto patch = random_bytes(513, 3);
    std::copy(patch.begin(), patch.end(), wanted.begin() + 4097);
    CHECK(f.get(1, 0, 2'000'000) == wanted);
    CHECK(f.get(1, 5001, 70'000) == std::vector<uint8_t>(wanted.begin() + 5001, wanted.begin() + 75'001));
    f.store.reset();  // as after a crash
    f.io.reset();

    RawStore g(loop.path(), io::Backend::pread);
    g.open(WriteCache::is_protected);
    CHECK_FALSE(g.store->cache_mode().flushes);
    CHECK(g.get(1, 0, 2'000'000) == wanted);
    CHECK(g.get(2, 0, 1000) == random_bytes(777, 2));
    const uint64_t flushes = g.store->metrics().flushes;
    REQUIRE(g.stage(2, 2, 1, UpdateKind::replace, 0, random_bytes(9000, 4)) == 0);
    CHECK(g.store->metrics().flushes >= flushes);
    REQUIRE(g.store->close().ok());
    g.store.reset();
    CheckOptions check;
    check.data = true;
    const CheckReport report = check_device(loop.path(), check);
    CHECK_MESSAGE(report.verdict == Verdict::clean, report.reason);
    CHECK(report.data_bytes == 1'200'000 + 9000);
    CHECK(report.state.device.block_device);
  }
}

TEST_CASE("a read-only block device is refused as such before anything is written, and can be looked at") {
  ffs::testing::LoopDevice loop(file_path(512), kSize, 512);
  if (skipped(loop)) return;
  RawStore f(loop.path(), io::Backend::uring);
  REQUIRE(ChunkStore::format(*f.io, f.path, Harness::format_options()).ok());
  struct ReadOnly {  // of the number, whoever has it next
    Fd device;
    int set(int yes) const { return ::ioctl(device.get(), BLKROSET, &yes); }
    ~ReadOnly() { (void)set(0); }
  } read_only{Fd(::open(loop.path().c_str(), O_RDONLY | O_CLOEXEC))};
  REQUIRE(read_only.set(1) == 0);
  OpenOptions options;
  options.cluster = Harness::cluster();
  CHECK(ChunkStore::open(*f.io, f.path, options).error().code == EROFS);
  const std::string said = ChunkStore::last_open_message();
  CHECK(said.starts_with(loop.path() + ": the device is read-only"));
  CHECK(said.find(loop.path(), 1) == std::string::npos);
  FormatOptions again = Harness::format_options();
  again.overwrite = true;
  CHECK(ChunkStore::format(*f.io, f.path, again).error().code == EROFS);
  CHECK(check_device(loop.path(), {}).verdict == Verdict::clean);
}

TEST_CASE("a block device that has another size at the next start") {
  ffs::testing::LoopDevice loop(file_path(4096), kSize, 4096);
  if (skipped(loop)) return;
  RawStore f(loop.path(), io::Backend::uring);
  REQUIRE(ChunkStore::format(*f.io, f.path, Harness::format_options()).ok());
  f.open();
  REQUIRE(f.stage(1, 1, 0, UpdateKind::replace, 0, random_bytes(300'000, 1)) == 0);
  f.store.reset();
  REQUIRE(loop.resize(kSize + 64 * kMiB));
  f.open();
  CHECK(f.store->unused_bytes() == 64 * kMiB);
  CHECK(ChunkStore::grow(f.path, kSize + 128 * kMiB).error().code == EBUSY);
  f.store.reset();
  CHECK(ChunkStore::grow(f.path, kSize + 128 * kMiB).error().code == EINVAL);  // a size is for files
  REQUIRE(ChunkStore::grow(f.path).ok());
  f.open();
  CHECK(f.store->unused_bytes() == 0);
  CHECK(f.get(1, 0, 400'000) == random_bytes(300'000, 1));
  REQUIRE(f.store->close().ok());
  f.store.reset();
  REQUIRE(loop.resize(kSize));
  OpenOptions options;
  options.cluster = Harness::cluster();
  CHECK(ChunkStore::open(*f.io, f.path, options).error().code == ENOSPC);
  CHECK(ChunkStore::last_open_message().find(std::to_string(kSize + 64 * kMiB)) != std::string::npos);
}
