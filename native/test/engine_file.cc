// The engine on a real file through the real backends: formats, opens, refuses what it must.
// FFS_ENGINE_BENCH=path of a directory: also prints engine against raw O_DIRECT (never asserted).
#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backend.h"
#include "engine/chunk_store.h"
#include "engine/format.h"
#include "engine_harness.h"
#include "io/buffer_pool.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

struct FileStore {
  std::string path;
  std::unique_ptr<io::Io> io;
  std::unique_ptr<ChunkStore> store;
  std::string last_message;

  FileStore(io::Backend backend, const std::string& directory) {
    static int count = 0;
    path = directory + "/ffs-engine-test." + std::to_string(::getpid()) + "." + std::to_string(count++);
    ::unlink(path.c_str());
    io::Options options;
    options.backend = backend;
    auto made = io::Io::create(options);
    REQUIRE(made.ok());
    io = std::move(made.value());
  }
  ~FileStore() {
    store.reset();
    ::unlink(path.c_str());
  }
  FormatOptions options(uint64_t size, bool sparse) const {
    FormatOptions o = Harness::format_options();
    o.size_bytes = size;
    o.sparse = sparse;
    return o;
  }
  Status open(Uuid cluster = Harness::cluster()) {
    OpenOptions o;
    o.cluster = cluster;
    auto opened = ChunkStore::open(*io, path, o);
    if (!opened.ok()) {
      last_message = ChunkStore::last_open_message();
      return opened.error();
    }
    store = std::move(opened.value());
    return ok_status();
  }
  void overwrite(uint64_t offset, const void* bytes, size_t size) const {
    int fd = ::open(path.c_str(), O_WRONLY);
    REQUIRE(::pwrite(fd, bytes, size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size));
    ::close(fd);
  }
};

constexpr uint64_t kSmall = 256ull << 20;

int put(FileStore& f, uint64_t key, Version version, Version base, const std::vector<uint8_t>& bytes) {
  auto op = std::make_unique<StageOp>();
  Laid laid(0, bytes);
  bool done = false;
  op->target = TargetId(Harness::kTarget);
  op->key = key_of(key);
  op->version = version;
  op->base = base;
  op->kind = UpdateKind::replace;
  op->length = static_cast<uint32_t>(bytes.size());
  op->data = laid.data;
  op->tail_padded = true;
  op->commit_now = true;
  op->owner = &done;
  op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  f.store->stage(op.get());
  while (!done) f.io->run_once(-1);
  return op->error;
}

std::vector<uint8_t> get(FileStore& f, uint64_t key, uint32_t length) {
  auto op = std::make_unique<ReadOp>();
  Laid laid(0, std::vector<uint8_t>(length));
  bool done = false;
  op->target = TargetId(Harness::kTarget);
  op->key = key_of(key);
  op->length = length;
  op->memory = laid.data;
  op->verify_whole = true;
  op->owner = &done;
  op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  f.store->read(op.get());
  while (!done) f.io->run_once(-1);
  REQUIRE(op->error == 0);
  return {laid.data, laid.data + op->read_length};
}

}  // namespace

TEST_CASE("a store on a file survives closing, and opening by the other backend") {
  FileStore f(ffs::testing::chosen_backend(), ".");
  DeviceIdentity made;
  REQUIRE(ChunkStore::format(*f.io, f.path, f.options(kSmall, true), &made).ok());
  CHECK(made.max_chunks == kSmall / (256 * 1024));
  REQUIRE_MESSAGE(f.open().ok(), f.last_message);
  auto data = random_bytes(1'500'000, 5);
  CHECK(put(f, 1, v(1), {}, data) == 0);
  CHECK(get(f, 1, 2'000'000) == data);
  CHECK(f.store->close().ok());
  f.store.reset();
  auto identity = ChunkStore::identify(f.path);
  REQUIRE(identity.ok());
  CHECK(identity->targets.size() == 2);
  CHECK(identity->device == made.device);
  f.io.reset();
  io::Options options;
  options.backend = io::Backend::pread;
  auto fallback = io::Io::create(options);
  REQUIRE(fallback.ok());
  f.io = std::move(fallback.value());
  REQUIRE_MESSAGE(f.open().ok(), f.last_message);
  CHECK(get(f, 1, 2'000'000) == data);
  CHECK(put(f, 1, v(2), v(1), random_bytes(10, 6)) == 0);
  f.store.reset();  // as after a crash
  REQUIRE_MESSAGE(f.open().ok(), f.last_message);
  CHECK(get(f, 1, 100) == random_bytes(10, 6));
}

TEST_CASE("devices that must be refused are refused, each with its own error") {
  FileStore f(ffs::testing::chosen_backend(), ".");
  FormatOptions options = f.options(kSmall, true);
  CHECK(f.open().error().code == ENOENT);
  options.size_bytes = 64ull << 20;
  CHECK(ChunkStore::format(*f.io, f.path, options).error().code == ENOSPC);
  CHECK(ChunkStore::last_open_message().find("at least") != std::string::npos);
  CHECK(::access(f.path.c_str(), F_OK) != 0);  // nothing half made
  options = f.options(kSmall, true);
  options.cluster = Uuid{};
  CHECK(ChunkStore::format(*f.io, f.path, options).error().code == EINVAL);
  options = f.options(kSmall, true);
  options.targets.push_back(options.targets[0]);
  CHECK(ChunkStore::format(*f.io, f.path, options).error().code == EINVAL);
  CHECK(ChunkStore::format(*f.io, "/dev/null", f.options(0, true)).error().code == EINVAL);
  CHECK(::access(f.path.c_str(), F_OK) != 0);

  REQUIRE(io::make_device_file(f.path, kSmall, true, false).ok());
  CHECK(f.open().error().code == EMEDIUMTYPE);
  REQUIRE(ChunkStore::format(*f.io, f.path, f.options(0, true)).ok());
  CHECK(ChunkStore::format(*f.io, f.path, f.options(0, true)).error().code == EEXIST);
  CHECK(ChunkStore::format(*f.io, f.path, f.options(kSmall, true)).error().code == EEXIST);
  Uuid other = Harness::cluster();
  other[5] = 1;
  CHECK(f.open(other).error().code == EXDEV);
  REQUIRE_MESSAGE(f.open().ok(), f.last_message);
  FileStore second(ffs::testing::chosen_backend(), ".");
  std::string own = std::exchange(second.path, f.path);
  CHECK(second.open().error().code == EBUSY);
  second.path = own;
  f.store.reset();

  // One damaged superblock is survived, two are not.
  uint64_t garbage = 0x123456789abcdef;
  f.overwrite(kSuperblockOffset[1] + 100, &garbage, sizeof garbage);
  REQUIRE_MESSAGE(f.open().ok(), f.last_message);
  f.store.reset();
  f.overwrite(kSuperblockOffset[0] + 100, &garbage, sizeof garbage);
  f.overwrite(kSuperblockOffset[1] + 100, &garbage, sizeof garbage);
  CHECK(f.open().error().code == EBADMSG);
  CHECK(ChunkStore::last_open_message().find("both superblocks") != std::string::npos);

  // A feature of a later version.
  FormatOptions again = f.options(0, true);
  again.overwrite = true;
  REQUIRE(ChunkStore::format(*f.io, f.path, again).ok());
  Superblock super;
  int fd = ::open(f.path.c_str(), O_RDONLY);
  REQUIRE(::pread(fd, &super, sizeof super, static_cast<off_t>(kSuperblockOffset[1])) == sizeof super);
  ::close(fd);
  super.incompat = uint64_t{1} << 40;  // of no version yet
  super.sequence += 2;
  super.crc = 0;
  super.crc = crc32c(&super, sizeof super);
  f.overwrite(kSuperblockOffset[1], &super, sizeof super);
  CHECK(f.open().error().code == ENOTSUP);
  CHECK(ChunkStore::last_open_message().find("written by ffs") != std::string::npos);
  REQUIRE(::truncate(f.path.c_str(), kSmall / 2) == 0);
  super.incompat = 0;
  super.crc = 0;
  super.crc = crc32c(&super, sizeof super);
  f.overwrite(kSuperblockOffset[1], &super, sizeof super);
  CHECK(f.open().error().code == ENOSPC);
}

TEST_CASE("what isn't blank isn't formatted unless that is asked for") {
  // Where an ext4 superblock, a partition table, an old superblock's copy and a GPT's copy would stand.
  for (uint64_t at : {uint64_t{1080}, uint64_t{510}, uint64_t{64 * 1024 + 7}, uint64_t{kSmall} - 512}) {
    FileStore f(ffs::testing::chosen_backend(), ".");
    FormatOptions options = f.options(kSmall, true);
    REQUIRE(io::make_device_file(f.path, kSmall, true, false).ok());
    const uint16_t mark = 0xef53;
    f.overwrite(at, &mark, sizeof mark);
    options.size_bytes = 0;
    Status refused = ChunkStore::format(*f.io, f.path, options);
    REQUIRE(!refused.ok());
    CHECK(refused.error().code == EEXIST);
    const std::string said = ChunkStore::last_open_message();
    CHECK(said.find(at == 1080 ? "ext2/3/4" : "isn't blank") != std::string::npos);
    CHECK(f.open().error().code == EMEDIUMTYPE);  // and nothing was written
    options.overwrite = true;
    CHECK(ChunkStore::format(*f.io, f.path, options).ok());
  }
}

// ------------------------------------------------------------------------------ for tests/crash

namespace {

std::vector<uint8_t> worker_bytes(uint64_t key, uint64_t version) {
  uint64_t seed = mix64(key * 1'000'003 + version);
  return random_bytes(1 + seed % 200'000, seed);
}

constexpr uint64_t kWorkers = 6;

// One writer of tests/crash/test_engine_kill.py and tests/guest: replaces nothing else than `key`.
struct Worker {
  FileStore* f;
  uint64_t key = 0, version = 0;
  uint64_t* failed = nullptr;
  StageOp op;
  std::unique_ptr<Laid> laid;

  void next() {
    auto bytes = worker_bytes(key, version + 1);
    laid = std::make_unique<Laid>(0, bytes);
    op.target = TargetId(Harness::kTarget);
    op.key = key_of(key);
    op.base = v(version);
    op.version = v(++version);
    op.kind = UpdateKind::replace;
    op.length = static_cast<uint32_t>(bytes.size());
    op.data = laid->data;
    op.tail_padded = true;
    op.commit_now = true;
    op.owner = this;
    op.done = [](StoreOp* o) {
      auto self = static_cast<Worker*>(o->owner);
      char line[64];
      int length = o->error != 0
                       ? std::snprintf(line, sizeof line, "failed %lu %d\n", self->key, o->error)
                       : std::snprintf(line, sizeof line, "ack %lu %lu\n", self->key, self->version);
      REQUIRE(::write(1, line, static_cast<size_t>(length)) == length);
      if (o->error == 0) return self->next();
      if (++*self->failed == kWorkers)
        ::_exit(9);  // as a server that gives its device up; nothing is flushed
    };
    f->store->stage(&op);
  }
};

}  // namespace

// FFS_ENGINE_WORKER=path: opens (or makes) the store there, checks "key version" lines of standard
// input against it, says "verified", then writes until it is killed, or every writer's update has failed.
TEST_CASE("worker") {
  const char* path = std::getenv("FFS_ENGINE_WORKER");
  if (path == nullptr) return;
  FileStore f(std::getenv("FFS_ENGINE_PREAD") ? io::Backend::pread : io::Backend::uring, ".");
  std::string own = std::exchange(f.path, path);
  if (::access(path, F_OK) != 0) REQUIRE(ChunkStore::format(*f.io, path, f.options(kSmall, true)).ok());
  Status opened = f.open();
  REQUIRE_MESSAGE(opened.ok(), ChunkStore::last_open_message());
  uint64_t key, least, verified = 0;
  while (std::scanf("%lu %lu", &key, &least) == 2) {
    ChunkInfo info;
    REQUIRE(f.store->lookup(TargetId(Harness::kTarget), key_of(key), &info));
    REQUIRE(info.version >= v(least));
    REQUIRE(get(f, key, 300'000) == worker_bytes(key, info.version.update));
    verified++;
  }
  REQUIRE(f.store->check_consistency() == "");
  std::printf("verified %lu\n", verified);
  std::fflush(stdout);
  std::vector<std::unique_ptr<Worker>> workers;
  uint64_t failed = 0;
  for (uint64_t k = 0; k < kWorkers; k++) {
    auto worker = std::make_unique<Worker>();
    worker->f = &f;
    worker->failed = &failed;
    worker->key = k;
    ChunkInfo info;
    if (f.store->lookup(TargetId(Harness::kTarget), key_of(k), &info)) worker->version = info.version.update;
    worker->next();
    workers.push_back(std::move(worker));
  }
  for (;;) f.io->run_once(10'000);
}

// ------------------------------------------------------------------------------ the bench

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Bench {
  FileStore f;
  std::unique_ptr<io::BufferPool> pool;
  io::File raw;
  int raw_fd = -1;
  static constexpr uint64_t kBytes = 3ull << 30;
  static constexpr uint32_t kChunk = 1 << 20;
  static constexpr uint64_t kChunks = 512;
  static constexpr uint64_t kRawOffset = 1536ull << 20;  // in the data region, far from the chunks
  uint64_t version = 1;
  std::vector<uint64_t> versions = std::vector<uint64_t>(kChunks, 0);

  explicit Bench(const std::string& directory) : f(io::Backend::uring, directory) {
    REQUIRE(ChunkStore::format(*f.io, f.path, f.options(kBytes, false)).ok());
    REQUIRE_MESSAGE(f.open().ok(), f.last_message);
    io::BufferPool::Options options;
    options.arena_bytes = 64 << 20;
    options.populate = true;
    auto made = io::BufferPool::create(f.io.get(), options);
    REQUIRE(made.ok());
    pool = std::move(made.value());
    raw_fd = ::open(f.path.c_str(), O_RDWR | O_DIRECT);
    raw = *f.io->add_file(raw_fd);
  }

  // Keeps `depth` operations going for `seconds`; start(slot) begins one; returns operations a second.
  struct Slot {
    StageOp stage;
    ReadOp read;
    io::Op op;
    uint8_t* buffer;
    Bench* bench;
    std::function<void(Slot*)>* start;
    uint64_t number = 0;
  };
  std::vector<std::unique_ptr<Slot>> slots;
  uint64_t finished = 0;
  uint64_t next = 0;
  bool stopping = false;
  uint32_t running = 0;
  std::function<void(Slot*)> start;

  void ended(Slot* slot) {
    finished++;
    running--;
    if (!stopping) running++, start(slot);
  }
  double run(uint32_t depth, double seconds, std::function<void(Slot*)> how) {
    start = std::move(how);
    while (slots.size() < depth) {
      auto slot = std::make_unique<Slot>();
      slot->buffer = pool->allocate(kChunk);
      slot->bench = this;
      std::memset(slot->buffer, static_cast<int>(slots.size()), kChunk);
      slots.push_back(std::move(slot));
    }
    finished = 0;
    stopping = false;
    auto begun = Clock::now();
    for (uint32_t i = 0; i < depth; i++) running++, start(slots[i].get());
    while (running > 0) {
      f.io->run_once(1000);
      if (!stopping && seconds_since(begun) > seconds) stopping = true;
    }
    return static_cast<double>(finished) / seconds_since(begun);
  }

  void raw_read(Slot* slot, uint64_t offset, uint32_t size) {
    slot->op.owner = slot;
    slot->op.done = [](io::Op* op) {
      auto s = static_cast<Slot*>(op->owner);
      s->bench->ended(s);
    };
    f.io->read(&slot->op, raw, kRawOffset + offset, slot->buffer, size, pool->region_of(slot->buffer));
  }
  void engine_read(Slot* slot, uint64_t chunk, uint32_t offset, uint32_t size) {
    ReadOp& op = slot->read;
    op.target = TargetId(Harness::kTarget);
    op.key = key_of(chunk);
    op.offset = offset;
    op.length = size;
    op.memory = slot->buffer;
    op.region = pool->region_of(slot->buffer);
    op.owner = slot;
    op.done = [](StoreOp* o) {
      REQUIRE(o->error == 0);
      auto s = static_cast<Slot*>(o->owner);
      s->bench->ended(s);
    };
    f.store->read(&op);
  }
  void engine_write(Slot* slot, uint64_t chunk) {
    StageOp& op = slot->stage;
    op.target = TargetId(Harness::kTarget);
    op.key = key_of(chunk);
    op.base = v(versions[chunk]);
    op.version = v(++version);
    versions[chunk] = version;
    op.kind = UpdateKind::replace;
    op.length = kChunk;
    op.data = slot->buffer;
    op.region = pool->region_of(slot->buffer);
    op.tail_padded = true;
    static uint32_t sums[16];  // given by the client in real life
    for (auto& sum : sums) sum = 1;
    op.piece_checksums = sums;
    op.commit_now = true;
    op.owner = slot;
    op.done = [](StoreOp* o) {
      REQUIRE(o->error == 0);
      auto s = static_cast<Slot*>(o->owner);
      s->bench->ended(s);
    };
    f.store->stage(&op);
  }
  uint64_t unsynced = 0;
  std::vector<Slot*> waiting_sync;
  bool syncing = false;
  io::Op sync;
  // The floor: one flush for each 16 writes, the writers wait for it.
  void raw_write(Slot* slot) {
    slot->op.owner = slot;
    slot->op.done = [](io::Op* op) {
      auto s = static_cast<Slot*>(op->owner);
      Bench* b = s->bench;
      b->waiting_sync.push_back(s);
      if (b->waiting_sync.size() < 16 && !b->stopping) return;
      if (b->waiting_sync.size() < b->running) return;
      b->sync.owner = b;
      b->sync.done = [](io::Op* o) {
        auto self = static_cast<Bench*>(o->owner);
        auto all = std::exchange(self->waiting_sync, {});
        for (Slot* w : all) self->ended(w);
      };
      b->f.io->datasync(&b->sync, b->raw);
    };
    f.io->write(&slot->op, raw, kRawOffset + (next++ % 512) * kChunk, slot->buffer, kChunk,
                pool->region_of(slot->buffer));
  }
};

void report(const char* name, const std::vector<double>& engine, const std::vector<double>& raw, double scale,
            const char* unit) {
  std::vector<double> ratios;
  for (size_t i = 0; i < engine.size(); i++) ratios.push_back(engine[i] / raw[i]);
  std::vector<double> e = engine, r = raw;
  std::sort(ratios.begin(), ratios.end());
  std::sort(e.begin(), e.end());
  std::sort(r.begin(), r.end());
  size_t m = ratios.size() / 2;
  std::printf("%-24s engine %8.1f raw %8.1f %s  ratio %.3f\n", name, e[m] * scale, r[m] * scale, unit,
              ratios[m]);
}

}  // namespace

TEST_CASE("bench") {
  const char* directory = std::getenv("FFS_ENGINE_BENCH");
  if (directory == nullptr) return;
  Bench b(directory);
  uint64_t next = 0;
  for (uint64_t i = 0; i < Bench::kChunks; i++) b.versions[i] = 0;
  double filled = 0;
  b.run(16, 60, [&](Bench::Slot* slot) {
    b.engine_write(slot, next++ % Bench::kChunks);
    if (next >= Bench::kChunks) b.stopping = true;
  });
  (void)filled;
  std::vector<double> engine, raw;
  auto compare = [&](const char* name, double scale, const char* unit, uint32_t depth, auto engine_op,
                     auto raw_op) {
    engine.clear(), raw.clear();
    for (int i = 0; i < 15; i++) {
      engine.push_back(b.run(depth, 0.2, engine_op));
      raw.push_back(b.run(depth, 0.2, raw_op));
    }
    report(name, engine, raw, scale, unit);
  };
  uint64_t random = 1;
  auto draw = [&] { return random = mix64(random + 0x9e3779b97f4a7c15ull); };
  compare(
      "read-1m-seq-qd16", 1.048576, "MB/s", 16,
      [&](Bench::Slot* s) { b.engine_read(s, next++ % Bench::kChunks, 0, Bench::kChunk); },
      [&](Bench::Slot* s) { b.raw_read(s, (next++ % Bench::kChunks) * Bench::kChunk, Bench::kChunk); });
  compare(
      "read-4k-rand-qd32", 0.001, "kIOPS", 32,
      [&](Bench::Slot* s) {
        b.engine_read(s, draw() % Bench::kChunks, static_cast<uint32_t>(draw() % 256) * 4096, 4096);
      },
      [&](Bench::Slot* s) { b.raw_read(s, draw() % (Bench::kChunks * 256) * 4096, 4096); });
  StoreMetrics before = b.f.store->metrics();
  compare(
      "write-1m-seq-qd16", 1.048576, "MB/s", 16,
      [&](Bench::Slot* s) { b.engine_write(s, next++ % Bench::kChunks); },
      [&](Bench::Slot* s) { b.raw_write(s); });
  StoreMetrics after = b.f.store->metrics();
  std::printf("updates a flush %.1f\n", static_cast<double>(after.staged - before.staged) /
                                            static_cast<double>(after.flushes - before.flushes));
  b.f.io->remove_file(b.raw);
  ::close(b.raw_fd);
  for (auto& slot : b.slots) b.pool->release(slot->buffer);
  b.pool.reset();
  CHECK(b.f.store->close().ok());
}
