// Devices as files: what may be formatted, how a store grows, and what looking into one without writing says.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/cursor.h"
#include "base/fd.h"
#include "engine/chunk_store.h"
#include "engine/device_check.h"
#include "engine/format.h"
#include "engine/record.h"
#include "engine_harness.h"
#include "loop_device.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint64_t kMiB = 1ull << 20;
constexpr uint64_t kSize = 256 * kMiB;
constexpr io::Backend kBackends[] = {io::Backend::uring, io::Backend::pread};

struct DeviceFile {
  std::string path;
  std::unique_ptr<io::Io> io;
  std::unique_ptr<ChunkStore> store;

  explicit DeviceFile(io::Backend backend = io::Backend::uring) {
    static int count = 0;
    path = ffs::testing::fast_directory() + "/ffs-device-test." + std::to_string(::getpid()) + "." +
           std::to_string(count++);
    ::unlink(path.c_str());
    io::Options options;
    options.backend = backend;
    auto made = io::Io::create(options);
    REQUIRE(made.ok());
    io = std::move(made.value());
  }
  ~DeviceFile() {
    store.reset();
    ::unlink(path.c_str());
  }
  static FormatOptions options(uint64_t size = kSize) {
    FormatOptions o = Harness::format_options();
    o.size_bytes = size;
    o.sparse = true;
    return o;
  }
  Status format(const FormatOptions& o = options()) { return ChunkStore::format(*io, path, o); }
  Status open() {
    OpenOptions o;
    o.cluster = Harness::cluster();
    auto opened = ChunkStore::open(*io, path, o);
    if (!opened.ok()) return opened.error();
    store = std::move(opened.value());
    return ok_status();
  }
  void must_open() {
    Status opened = open();
    if (!opened.ok()) FAIL(ChunkStore::last_open_message());
  }
  void close() {
    REQUIRE(store->close().ok());
    store.reset();
  }
  int stage(uint64_t key, uint64_t version, uint64_t base, UpdateKind kind, uint32_t offset,
            const std::vector<uint8_t>& bytes, bool commit) {
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
    op->commit_now = commit;
    op->identity = {ClientId(5), static_cast<uint32_t>(key), version};
    op->chain = ChainId(1);
    op->owner = &done;
    op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->stage(op.get());
    while (!done) io->run_once(-1);
    return op->error;
  }
  int put(uint64_t key, uint64_t version, uint64_t base, const std::vector<uint8_t>& bytes) {
    return stage(key, version, base, UpdateKind::replace, 0, bytes, true);
  }
  std::vector<uint8_t> get(uint64_t key) {
    auto op = std::make_unique<ReadOp>();
    Laid laid(0, std::vector<uint8_t>(kMaxChunkBytes));
    bool done = false;
    op->target = TargetId(Harness::kTarget);
    op->key = key_of(key);
    op->length = kMaxChunkBytes;
    op->memory = laid.data;
    op->verify_whole = true;
    op->owner = &done;
    op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->read(op.get());
    while (!done) io->run_once(-1);
    REQUIRE(op->error == 0);
    return {laid.data, laid.data + op->read_length};
  }
  std::vector<uint8_t> bytes(uint64_t offset, size_t size) const {
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::vector<uint8_t> out(size);
    REQUIRE(::pread(fd.get(), out.data(), size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size));
    return out;
  }
  void write(uint64_t offset, const void* memory, size_t size) const {
    Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    REQUIRE(::pwrite(fd.get(), memory, size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size));
  }
  // CRC of all that isn't a hole.
  uint32_t sum() const {
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::vector<uint8_t> memory(kMiB);
    uint32_t crc = 0;
    for (off_t at = 0; (at = ::lseek(fd.get(), at, SEEK_DATA)) >= 0;) {
      const off_t end = ::lseek(fd.get(), at, SEEK_HOLE);
      while (at < end) {
        const ssize_t got = ::pread(fd.get(), memory.data(),
                                    std::min<size_t>(memory.size(), static_cast<size_t>(end - at)), at);
        REQUIRE(got > 0);
        crc = crc32c_extend(crc, memory.data(), static_cast<size_t>(got));
        at += got;
      }
    }
    return crc;
  }
  // Where these bytes stand, at a multiple of 4096.
  uint64_t find(const std::vector<uint8_t>& wanted) const {
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::vector<uint8_t> block(4096);
    for (off_t at = 0; (at = ::lseek(fd.get(), at, SEEK_DATA)) >= 0; at += 4096) {
      REQUIRE(::pread(fd.get(), block.data(), 4096, at) > 0);
      if (std::memcmp(block.data(), wanted.data(), 4096) == 0) return static_cast<uint64_t>(at);
    }
    FAIL("the content isn't on the device");
    return 0;
  }
  // Chunks of three classes, one with a deferred write on it, one with a version that pends.
  void fill() {
    REQUIRE(put(1, 1, 0, random_bytes(5000, 1)) == 0);
    REQUIRE(put(2, 1, 0, random_bytes(200'000, 2)) == 0);
    REQUIRE(put(3, 1, 0, random_bytes(1'000'000, 3)) == 0);
    REQUIRE(stage(3, 2, 1, UpdateKind::write, 70'000, random_bytes(3000, 4), true) == 0);
    REQUIRE(stage(2, 2, 1, UpdateKind::write, 0, random_bytes(150'000, 5), false) == 0);
  }
};

CheckReport check(const DeviceFile& file, bool data = true) {
  CheckOptions options;
  options.data = data;
  options.depth = 3;
  return check_device(file.path, options);
}

std::string text_of(const CheckReport& report) {
  std::string out = report.reason;
  for (const Problem& problem : report.problems) out += "[" + problem.text + "]";
  return out;
}

}  // namespace

TEST_CASE("a device that holds anything is refused by its name, and taken by force without a trace of it") {
  for (io::Backend backend : kBackends) {
    DeviceFile f(backend);
    const uint8_t ext[2] = {0x53, 0xef};
    f.write(1080, ext, 2);
    REQUIRE(::truncate(f.path.c_str(), static_cast<off_t>(kSize)) == 0);
    FormatOptions options = DeviceFile::options(0);
    const uint32_t before = f.sum();
    CHECK(f.format(options).error().code == EEXIST);
    CHECK(ChunkStore::last_open_message().find("ext2/3/4") != std::string::npos);
    CHECK(f.sum() == before);
    // Far away from all superblocks.
    f.write(1080, "\0\0", 2);
    const std::vector<uint8_t> stranger(2 * kMiB, 'x');
    f.write(200 * kMiB, stranger.data(), stranger.size());
    CHECK(f.format(options).error().code == EEXIST);
    CHECK(ChunkStore::last_open_message().find("isn't blank") != std::string::npos);
    f.write(4096, "EFI PART", 8);
    // Asked what it is, by somebody who took it for a store.
    CHECK(survey_device(f.path).error().code == EMEDIUMTYPE);
    CHECK(ChunkStore::last_open_message().find("it holds a GPT") != std::string::npos);
    CHECK(check(f).reason.find("it holds a GPT") != std::string::npos);
    options.overwrite = true;
    REQUIRE(f.format(options).ok());
    CHECK(f.bytes(4096, 8) == std::vector<uint8_t>(8, 0));
    f.must_open();
    CHECK(f.put(1, 1, 0, random_bytes(10'000, 1)) == 0);
    f.close();
    // An ffs store is somebody's too, and says whose.
    options.overwrite = false;
    CHECK(f.format(options).error().code == EEXIST);
    CHECK(ChunkStore::last_open_message().find("of this cluster") != std::string::npos);
    CHECK(ChunkStore::last_open_message().find("2 targets") != std::string::npos);
    options.cluster[3] ^= 1;
    CHECK(f.format(options).error().code == EEXIST);
    CHECK(ChunkStore::last_open_message().find("of another cluster, cluster 09000000") != std::string::npos);
    f.must_open();
    CHECK(f.get(1) == random_bytes(10'000, 1));
  }
}

TEST_CASE("looking only refuses what formatting would, and writes nothing") {
  DeviceFile f;
  FormatOptions options = DeviceFile::options(0);
  options.only_look = true;
  f.write(129, "\0", 1);
  CHECK(f.format(options).error().code == ENOSPC);
  CHECK(ChunkStore::last_open_message().find(" 130 bytes") != std::string::npos);
  REQUIRE(::truncate(f.path.c_str(), static_cast<off_t>(kSize)) == 0);
  const uint32_t blank = f.sum();
  CHECK(f.format(options).ok());
  CHECK(f.sum() == blank);
  CHECK(survey_device(f.path).error().code == EMEDIUMTYPE);
  CHECK(ChunkStore::last_open_message().find("it is blank") != std::string::npos);
  f.write(4096, "EFI PART", 8);
  CHECK(f.format(options).error().code == EEXIST);
  // A file that is yet to be made isn't.
  REQUIRE(::unlink(f.path.c_str()) == 0);
  options.size_bytes = kMiB;
  CHECK(f.format(options).error().code == ENOSPC);
  options.size_bytes = kSize;
  CHECK(f.format(options).ok());
  CHECK(::access(f.path.c_str(), F_OK) != 0);
}

TEST_CASE(
    "a device that has grown is used as before until it is told to grow, one that has shrunk is refused") {
  for (io::Backend backend : kBackends) {
    DeviceFile f(backend);
    REQUIRE(f.format().ok());
    f.must_open();
    f.fill();
    CHECK(f.store->unused_bytes() == 0);
    const uint64_t capacity = f.store->capacity().capacity_bytes;
    const bool once = backend == io::Backend::uring;  // what takes long and has nothing of the backend
    if (once) CHECK(ChunkStore::grow(f.path).error().code == EBUSY);
    f.store.reset();  // as after a crash: growing mustn't need a clean end
    CHECK(ChunkStore::grow(f.path).error().code == EINVAL);
    REQUIRE(::truncate(f.path.c_str(), static_cast<off_t>(kSize + 40 * kMiB)) == 0);
    f.must_open();
    CHECK(f.store->unused_bytes() == 40 * kMiB);
    CHECK(f.store->capacity().capacity_bytes == capacity);
    f.store.reset();
    auto grown = ChunkStore::grow(f.path);
    REQUIRE_MESSAGE(grown.ok(), ChunkStore::last_open_message());
    CHECK(grown->size_bytes == kSize + 40 * kMiB);
    f.must_open();
    CHECK(f.store->unused_bytes() == 0);
    CHECK(f.store->capacity().capacity_bytes >= capacity + 32 * kMiB);
    CHECK(f.get(1) == random_bytes(5000, 1));
    f.close();
    grown = ChunkStore::grow(f.path, kSize + 100 * kMiB);  // lengthens the file
    REQUIRE_MESSAGE(grown.ok(), ChunkStore::last_open_message());
    f.must_open();
    // Beyond where the device once ended.
    uint64_t key = 100;
    while (once && f.put(key, 1, 0, random_bytes(4'000'000, key)) == 0) key++;
    if (once) CHECK((key - 100) * 4 * kMiB > capacity);
    for (uint64_t k = 100; k < key; k += 7) CHECK(f.get(k) == random_bytes(4'000'000, k));
    f.close();
    CHECK(check(f).verdict == Verdict::clean);
    REQUIRE(::truncate(f.path.c_str(), static_cast<off_t>(kSize)) == 0);
    CHECK(f.open().error().code == ENOSPC);
    const std::string message = ChunkStore::last_open_message();
    CHECK(message.find(std::to_string(kSize)) != std::string::npos);
    CHECK(message.find(std::to_string(kSize + 100 * kMiB)) != std::string::npos);
    CHECK(check(f).verdict == Verdict::damaged);
  }
}

TEST_CASE("looking into a device after a crash says what an opening finds, and writes nothing") {
  DeviceFile f;
  REQUIRE(f.format().ok());
  f.must_open();
  f.fill();
  bool done = false;
  StoreOp epoch;
  epoch.owner = &done;
  epoch.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  f.store->set_space_epoch(TargetId(Harness::kTarget), 3, {7, 0}, &epoch);
  while (!done) f.io->run_once(-1);
  f.store.reset();
  const uint32_t before = f.sum();
  auto state = survey_device(f.path);
  REQUIRE(state.ok());
  REQUIRE_MESSAGE(state->recovered, state->why_not);
  CHECK((state->superblock_whole[0] && state->superblock_whole[1]));
  CHECK(state->journal_used_bytes > 0);
  CHECK(state->capacity.chunks == 3);
  REQUIRE(state->targets.size() == 2);
  CHECK(state->targets[0].usage.chunks == 3);
  CHECK(state->targets[0].usage.logical_bytes == 5000 + 200'000 + 1'000'000);
  CHECK(state->targets[0].pending_versions == 1);
  CHECK(state->targets[0].retry_entries == 3);
  CHECK(state->targets[0].space_epochs == 1);
  CHECK(state->targets[1].usage.chunks == 0);
  CHECK(state->classes[1].slots_used == 1);  // 5000 bytes: 8 KiB
  CHECK(state->classes[6].slots_used == 2);  // 200000 bytes, committed and pending: 256 KiB
  CHECK(state->classes[8].slots_used == 1);  // 1 MiB
  CHECK(state->used_bytes == (8 + 2 * 256 + 1024) * 1024);
  CHECK(state->free_slabs + 3 == state->identity.slabs);
  const CheckReport report = check(f);
  CHECK_MESSAGE(report.verdict == Verdict::clean, text_of(report));
  CHECK(report.chunks == 3);
  CHECK(report.pending_versions == 1);
  CHECK(report.data_bytes == 5000 + 2 * 200'000 + 1'000'000);
  CHECK(f.sum() == before);
  // In use: the superblock is told, the rest isn't judged.
  f.must_open();
  state = survey_device(f.path);
  REQUIRE(state.ok());
  CHECK_FALSE(state->recovered);
  CHECK(state->why_not.find("in use") != std::string::npos);
  CHECK(check(f).verdict == Verdict::unjudged);
  CHECK(f.get(2) == random_bytes(200'000, 2));
  f.close();
  state = survey_device(f.path);
  REQUIRE(state.ok());
  CHECK(state->identity.snapshot_id > 0);
  CHECK(state->identity.snapshot_ms >= state->identity.created_ms);
}

TEST_CASE(
    "a check names damaged content by chunk, version and granule, and the rest of the damage by its place") {
  DeviceFile f;
  REQUIRE(f.format().ok());
  f.must_open();
  f.fill();
  f.close();
  CHECK(check(f).verdict == Verdict::clean);
  // One bit in granule 2 of chunk 2 as committed, one in its pending version.
  auto flip = [&](uint64_t at) {
    auto byte = f.bytes(at, 1);
    byte[0] ^= 0x10;
    f.write(at, byte.data(), 1);
  };
  const auto committed = random_bytes(200'000, 2);
  const auto pending = random_bytes(150'000, 5);
  flip(f.find(committed) + 2 * kGranuleBytes + 77);
  flip(f.find(pending) + 5);
  CHECK(check(f, false).verdict == Verdict::clean);  // contents weren't read
  CheckReport report = check(f);
  CHECK(report.verdict == Verdict::damaged);
  REQUIRE(report.problem_count == 2);
  for (const Problem& problem : report.problems) {
    CHECK(problem.kind == Problem::Kind::content);
    CHECK(problem.target == TargetId(Harness::kTarget));
    CHECK(problem.key == key_of(2));
    CHECK(problem.version == v(problem.pending ? 2 : 1));
    CHECK(problem.text.find(problem.pending ? "granules 0" : "granules 2") != std::string::npos);
  }
  CHECK(report.problems[0].pending != report.problems[1].pending);
  // One copy of the superblock is enough, and is said. Format wrote the other one.
  const uint8_t junk[64] = {1, 2, 3};
  f.write(kSuperblockOffset[1], junk, sizeof junk);
  report = check(f, false);
  CHECK(report.verdict == Verdict::clean);
  REQUIRE(report.notes.size() == 1);
  CHECK(report.notes[0].find("byte 65536") != std::string::npos);
  // The snapshot: recovery refuses it and says where.
  Superblock super;
  std::memcpy(&super, f.bytes(kSuperblockOffset[0], sizeof super).data(), sizeof super);
  REQUIRE(super.snapshot_area <= 1);
  flip(super.snapshot_offset[super.snapshot_area] + 200);
  report = check(f, false);
  CHECK(report.verdict == Verdict::damaged);
  REQUIRE(report.problems.size() == 1);
  CHECK(report.problems[0].kind == Problem::Kind::recovery);
  CHECK(report.problems[0].text.find("snapshot") != std::string::npos);
  f.write(kSuperblockOffset[0], junk, sizeof junk);
  CHECK(check(f).verdict == Verdict::unjudged);  // nothing says that it is ffs's
}

TEST_CASE("a check lists every slot that two chunks name, where an opening refuses at the first") {
  DeviceFile f;
  REQUIRE(f.format().ok());
  f.must_open();
  for (uint64_t key = 1; key <= 4; key++) REQUIRE(f.put(key, 1, 0, random_bytes(60'000, key)) == 0);
  f.close();
  Superblock super, other;
  std::memcpy(&super, f.bytes(kSuperblockOffset[0], sizeof super).data(), sizeof super);
  std::memcpy(&other, f.bytes(kSuperblockOffset[1], sizeof other).data(), sizeof other);
  if (other.sequence > super.sequence) super = other;
  // Chunks 2 and 3 get the slot of chunk 1 in the snapshot's first slice.
  const uint64_t at = super.snapshot_offset[super.snapshot_area];
  auto slice = f.bytes(at, kMaxBlockBytes);
  BlockHeader header;
  std::memcpy(&header, slice.data(), sizeof header);
  REQUIRE(header.magic == kSnapshotMagic);
  uint64_t place = 0;
  uint32_t offset = sizeof header, changed = 0;
  while (offset < header.used_bytes) {
    RecordHeader record;
    std::memcpy(&record, slice.data() + offset, sizeof record);
    ChunkRecord fixed;
    std::memcpy(&fixed, slice.data() + offset + sizeof record, sizeof fixed);
    if (record.type == static_cast<uint8_t>(RecordType::chunk)) {
      if (place == 0) place = fixed.image.place;
      if (fixed.key == key_of(2) || fixed.key == key_of(3)) fixed.image.place = place, changed++;
      std::memcpy(slice.data() + offset + sizeof record, &fixed, sizeof fixed);
    }
    offset += record.bytes;
  }
  REQUIRE(changed == 2);
  header.crc = 0;
  std::memcpy(slice.data(), &header, sizeof header);
  header.crc = crc32c(slice.data(), header.used_bytes);
  std::memcpy(slice.data(), &header, sizeof header);
  f.write(at, slice.data(), slice.size());
  CHECK(f.open().error().code == EBADMSG);
  const CheckReport report = check(f, false);
  CHECK(report.verdict == Verdict::damaged);
  REQUIRE_MESSAGE(report.problem_count == 2, text_of(report));
  CHECK(report.problems[0].kind == Problem::Kind::clash);
  CHECK(report.problems[0].key == key_of(2));
  CHECK(report.problems[1].key == key_of(3));
  CHECK(report.problems[0].text.find(std::to_string(place * kBlock)) != std::string::npos);
  // Their contents don't fit either.
  CHECK(check(f).problem_count == 4);
}

TEST_CASE("how a write cache is treated follows the kernel, the operator, and what can be kept") {
  io::Device device;
  device.block_device = true;
  device.volatile_cache = false;
  CHECK_FALSE(choose_cache_mode(device, WriteCache::automatic).flushes);
  CHECK(choose_cache_mode(device, WriteCache::is_volatile).flushes);
  device.volatile_cache = true;
  CHECK(choose_cache_mode(device, WriteCache::automatic).flushes);
  CHECK_FALSE(choose_cache_mode(device, WriteCache::is_protected).flushes);
  CHECK_FALSE(choose_cache_mode(device, WriteCache::is_protected).overruled);
  device.block_device = false;
  device.sparse = true;
  CHECK(choose_cache_mode(device, WriteCache::is_protected).flushes);
  CHECK(choose_cache_mode(device, WriteCache::is_protected).overruled);
}
