// A store on a simulated disk with calls that wait. For tests only.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "engine/chunk_store.h"
#include "io/sim.h"

namespace ffs::engine::testing {

inline Version v(uint64_t n) {
  return n == 0 ? Version{} : Version{{1, 1}, n};
}
inline ChunkKey key_of(uint64_t n) {
  return ChunkKey::of_file(1 + n / 100, n % 100);
}

inline std::vector<uint8_t> random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(size);
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t drawn = random();
    std::memcpy(bytes.data() + at, &drawn, std::min<size_t>(8, size - at));
  }
  return bytes;
}

// Aligned memory with the data at `offset` modulo 4096 and zeros after it, as a server lays it out.
struct Laid {
  uint8_t* memory;
  uint8_t* data;
  Laid(uint32_t offset, const std::vector<uint8_t>& bytes) {
    uint32_t lead = offset % 4096;
    size_t size = (lead + bytes.size() + 4095) / 4096 * 4096 + 4096;
    memory = static_cast<uint8_t*>(std::aligned_alloc(4096, size));
    std::memset(memory, 0, size);
    data = memory + lead;
    if (!bytes.empty()) std::memcpy(data, bytes.data(), bytes.size());
  }
  ~Laid() { std::free(memory); }
  Laid(const Laid&) = delete;
  // What a caller that has checked the bytes by block gives with them.
  const uint32_t* block_sums(size_t size) {
    sums.resize(size / kCrcBlockBytes);
    crc32c_blocks(data, size, sums.data());
    return sums.data();
  }
  std::vector<uint32_t> sums;
};

struct ReadResult {
  int error = 0;
  Version version;
  bool pending = false;
  std::vector<uint8_t> bytes;
};

struct Harness {
  static constexpr uint64_t kDiskBytes = 300ull << 20;
  static constexpr uint64_t kTarget = 77;

  explicit Harness(uint64_t seed_, io::SimDevice device = {})
      : Harness(seed_, io::SimImage(kDiskBytes), device) {}
  Harness(uint64_t seed_, io::SimImage image, io::SimDevice device = {})
      : seed(seed_), io(std::make_unique<io::SimIo>(std::move(image), seed_, device)) {}
  ~Harness() { settle(); }

  static Uuid cluster() {
    Uuid id{};
    id[0] = 9;
    return id;
  }
  static FormatOptions format_options() {
    FormatOptions options;
    options.cluster = cluster();
    options.targets = {TargetId(kTarget), TargetId(78)};
    return options;
  }
  void format() {
    FormatOptions options = format_options();
    options.max_chunks = max_chunks;
    options.journal_bytes = journal_bytes;
    Status made =
        ChunkStore::format_file(*io, io->disk(), io->size_bytes(), io->device().sector_bytes, options);
    REQUIRE(made.ok());
  }
  Status try_open(const Mutants& mutants = {}) {
    OpenOptions options;
    options.cluster = cluster();
    options.scratch_bytes = 16u << 20;
    options.overlay_bytes = 16u << 20;
    options.granule_sums = granule_sums;
    options.write_ahead_bytes = write_ahead_bytes;
    options.records_beside_data = records_beside_data;
    options.release_step_chunks = release_step_chunks;
    options.dedup_rest_us = 0;
    options.max_slot_names = max_slot_names;
    options.write_cache = io->device().protected_cache ? WriteCache::is_protected : WriteCache::is_volatile;
    if (space) {
      options.discard = Discard::on;
      options.discard_delay_us = 0;
      options.compact_eagerly = true;
    }
    auto opened = ChunkStore::open_file(*io, io->disk(), io->size_bytes(), options, mutants);
    if (!opened.ok()) return opened.error();
    store = std::move(opened.value());
    return ok_status();
  }
  void open(const Mutants& mutants = {}) {
    Status opened = try_open(mutants);
    if (!opened.ok()) FAIL("open: " << ChunkStore::last_open_message() << " seed " << seed);
  }
  void close() {
    Status closed = store->close();
    REQUIRE(closed.ok());
    store.reset();
  }
  // Lets everything in flight end.
  void settle() {
    for (int i = 0; store != nullptr && i < 100'000 && !store->idle(); i++) {
      clock_us += 100;
      store->tick(clock_us);
      io->run_once(0);
    }
    for (int i = 0; i < 1000 && (io->in_flight() > 0 || io->has_ready()); i++) io->run_once(0);
    store.reset();
  }
  // Until nothing is in flight, lone records and overlays on their way included.
  void settle_records() {
    for (int i = 0; i < 100'000; i++) {
      clock_us += 10'000;
      store->tick(clock_us);
      io->run_once(0);
      if (store->idle() && store->metrics().overlay_bytes == 0) return;
    }
    FAIL("the store doesn't come to rest, seed " << seed);
  }
  void run_until(const bool& done) {
    for (int i = 0; !done; i++) {
      FFS_CHECK(i < 1'000'000);
      clock_us += 100;
      store->tick(clock_us);
      io->run_once(0);
    }
  }

  int stage(StageOp& op, const std::vector<uint8_t>& bytes, uint32_t lead) {
    Laid laid(lead, bytes);
    bool done = false;
    op.target = TargetId(kTarget);
    op.data = laid.data;
    op.tail_padded = true;
    if (known_by_block && lead % kCrcBlockBytes == 0) op.block_checksums = laid.block_sums(bytes.size());
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->stage(&op);
    run_until(done);
    return op.error;
  }
  int write(uint64_t key, Version version, Version base, uint32_t offset, const std::vector<uint8_t>& bytes,
            bool commit_now = false) {
    auto op = std::make_unique<StageOp>();
    op->key = key_of(key);
    op->version = version;
    op->base = base;
    op->kind = UpdateKind::write;
    op->offset = offset;
    op->length = static_cast<uint32_t>(bytes.size());
    op->commit_now = commit_now;
    return stage(*op, bytes, offset);
  }
  int truncate(uint64_t key, Version version, Version base, uint32_t length) {
    auto op = std::make_unique<StageOp>();
    op->key = key_of(key);
    op->version = version;
    op->base = base;
    op->kind = UpdateKind::truncate;
    op->length = length;
    return stage(*op, {}, 0);
  }
  int remove(uint64_t key, Version version, Version base) {
    auto op = std::make_unique<StageOp>();
    op->key = key_of(key);
    op->version = version;
    op->base = base;
    op->kind = UpdateKind::remove;
    return stage(*op, {}, 0);
  }
  bool commit(uint64_t key, Version version) {
    return store->commit(TargetId(kTarget), key_of(key), version).ok();
  }
  uint32_t pending_count(uint64_t key) const {
    ChunkInfo info;
    return store->lookup(TargetId(kTarget), key_of(key), &info) ? info.pending_count : 0;
  }

  struct VectorSink final : Sink {
    std::vector<uint8_t>* bytes;
    int put(uint32_t at, const uint8_t* from, uint32_t size) override {
      REQUIRE(at + size <= bytes->size());
      std::memcpy(bytes->data() + at, from, size);
      return 0;
    }
  };

  // Reads into aligned memory or a sink by turns, and checks the checksums that come back.
  ReadResult read(uint64_t key, uint32_t offset, uint32_t length, Version at_least = {}, bool verify = true) {
    auto op = std::make_unique<ReadOp>();
    std::vector<uint32_t> sums(length / kGranuleBytes + 2);
    Laid laid(offset, std::vector<uint8_t>(length, 0xee));
    std::vector<uint8_t> sunk(length);
    VectorSink sink;
    sink.bytes = &sunk;
    bool use_sink = ++reads % 3 == 0;
    bool done = false;
    op->target = TargetId(kTarget);
    op->key = key_of(key);
    op->at_least = at_least;
    op->offset = offset;
    op->length = length;
    op->memory = use_sink ? nullptr : laid.data;
    op->sink = use_sink ? &sink : nullptr;
    op->checksums = sums.data();
    op->verify_partial = verify;
    op->owner = &done;
    op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    store->read(op.get());
    run_until(done);
    ReadResult result;
    result.error = op->error;
    if (op->error != 0) return result;
    result.version = op->version;
    result.pending = op->pending;
    const uint8_t* bytes = use_sink ? sunk.data() : laid.data;
    result.bytes.assign(bytes, bytes + op->read_length);
    for (uint32_t i = 0; i < op->granule_count; i++) {
      uint32_t from = (op->first_granule + i) * kGranuleBytes - offset;
      uint32_t to = std::min(from + kGranuleBytes, op->read_length);
      CHECK(crc32c(bytes + from, to - from) == sums[i]);
    }
    return result;
  }

  uint64_t seed;
  std::unique_ptr<io::SimIo> io;
  std::unique_ptr<ChunkStore> store;
  uint64_t clock_us = 1000;
  uint64_t reads = 0;
  uint32_t release_step_chunks = 128;
  uint32_t max_slot_names = 65535;
  uint32_t granule_sums = 1024;
  uint64_t write_ahead_bytes = OpenOptions{}.write_ahead_bytes;
  bool records_beside_data = true;
  bool known_by_block = false;  // updates bring the checksums of their blocks
  uint64_t max_chunks = 0;
  uint64_t journal_bytes = 0;
  bool space = false;  // discards at once, compacts whatever it can
};

}  // namespace ffs::engine::testing
