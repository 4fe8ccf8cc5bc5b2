#include "bench/engine_driver.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "bench/floor.h"
#include "engine/chunk_store.h"
#include "io/io.h"

namespace ffs::bench {

namespace {

constexpr TargetId kTarget{1};
constexpr ChainId kChain{1};
constexpr uint64_t kSpace = 1;
constexpr uint64_t kTickNs = 20'000'000;  // a server's
constexpr uint32_t kMaxDepth = 1024;
constexpr uint32_t kMaxBlockBytes = 16u << 20;
constexpr uint32_t kKnownBlockBytes = 1u << 20;  // a server's: up to here it keeps checksums by block
constexpr uint64_t kMaxMemoryBytes = 1ull << 30;

engine::Uuid cluster_id() {
  engine::Uuid id;
  id.fill(0xbe);
  return id;
}

ChunkKey key_of(uint64_t number) {
  return ChunkKey::of_file(kSpace, number);
}

class Driver final : public EngineDriver {
 public:
  explicit Driver(const EngineOptions& options) : options_(options) {}

  ~Driver() override {
    if (store_ != nullptr) (void)store_->close();  // a poisoned store has said so already
    store_.reset();
    forget_memory();
    io_.reset();
    if (made_) ::unlink(options_.path.c_str());
  }

  Status open() {
    if (options_.depth == 0 || options_.depth > kMaxDepth)
      return Error::of(EINVAL, "depth must be from 1 to 1024");
    io::Options io_options;
    if (options_.backend == "pread") {
      io_options.backend = io::Backend::pread;
    } else if (!options_.backend.empty() && options_.backend != "uring" && options_.backend != "auto") {
      return Error::of(EINVAL, "the backend must be auto, uring or pread");
    }
    FFS_TRY(io_, io::Io::create(io_options));
    engine::FormatOptions format;
    format.cluster = cluster_id();
    format.targets = {kTarget};
    format.size_bytes = options_.size_bytes;
    format.max_chunks = options_.max_chunks;
    format.journal_bytes = options_.journal_bytes;
    FFS_TRY_STATUS(engine::ChunkStore::format(*io_, options_.path, format));
    made_ = true;
    for (uint32_t i = 0; i < options_.depth; i++) slots_.push_back(std::make_unique<Slot>(this, i));
    return open_store();
  }

  Status fill(uint64_t first, uint64_t count, uint32_t bytes) override {
    if (count == 0 || bytes == 0 || bytes > kMaxBlockBytes)
      return Error::of(EINVAL, "a chunk has at least a byte and at most 16 MiB");
    if (first != versions_.size()) return Error::of(EINVAL, "chunks are made in the order of their numbers");
    if (!versions_.empty() && bytes != chunk_bytes_) return Error::of(EINVAL, "all chunks are equally long");
    FFS_TRY_STATUS(make_memory(bytes));
    chunk_bytes_ = bytes;
    versions_.resize(first + count, 0);
    alive_.resize(first + count);
    for (uint64_t i = first; i < first + count; i++) alive_[i] = i;
    EngineLoad load;
    load.work = EngineWork::write;
    load.block_bytes = bytes;
    load.depth =
        std::min<uint32_t>(options_.depth, static_cast<uint32_t>(std::min<uint64_t>(count, kMaxDepth)));
    cursor_ = first;
    return drive(load, 0, count);
  }

  Status thin(uint32_t keep) override {
    if (keep == 0 || versions_.empty()) return Error::of(EINVAL, "nothing would be left");
    std::vector<uint64_t> kept, others;
    for (uint64_t i = 0; i < alive_.size(); i++) (i % keep == 0 ? kept : others).push_back(alive_[i]);
    alive_ = std::move(others);
    if (alive_.empty()) return Error::of(EINVAL, "nothing would be removed");
    EngineLoad load;
    load.work = EngineWork::write;
    load.block_bytes = block_bytes_;
    load.depth = options_.depth;
    cursor_ = 0;
    kind_ = engine::UpdateKind::remove;
    Status removed = drive(load, 0, alive_.size());
    kind_ = engine::UpdateKind::replace;
    alive_ = std::move(kept);
    return removed;
  }

  Result<EngineCount> run(const EngineLoad& load, uint32_t duration_ms) override {
    FFS_TRY_STATUS(check(load));
    FFS_TRY_STATUS(make_memory(load.block_bytes));
    const engine::StoreMetrics before = store_->metrics();
    longest_ns_ = 0;
    const uint64_t begin = now_ns();
    FFS_TRY_STATUS(drive(load, begin + duration_ms * 1'000'000ull, UINT64_MAX));
    EngineCount count;
    count.elapsed_ns = now_ns() - begin;
    const engine::StoreMetrics after = store_->metrics();
    count.operations = ended_;
    count.flushes = after.flushes - before.flushes;
    count.journal_bytes = after.journal_bytes - before.journal_bytes;
    count.snapshots = after.snapshots - before.snapshots;
    count.granules_read = after.granules_read - before.granules_read;
    count.moved_bytes = after.moved_bytes - before.moved_bytes;
    count.longest_step_us = after.longest_step_us;
    count.longest_operation_us = longest_ns_ / 1000;
    return count;
  }

  Status reopen() override {
    const Status closed = store_->close();
    store_.reset();
    FFS_TRY_STATUS(closed);
    return open_store();
  }

  EngineFacts facts() const override {
    const engine::Capacity capacity = store_->capacity();
    return {capacity.chunks, options_.size_bytes - capacity.capacity_bytes};
  }

 private:
  struct Slot {
    Slot(Driver* owner, uint32_t slot_number) : driver(owner), number(slot_number) {
      read.owner = stage.owner = this;
      read.done = stage.done = [](engine::StoreOp* op) {
        auto slot = static_cast<Slot*>(op->owner);
        slot->driver->ended(slot, op);
      };
    }
    Driver* driver;
    uint32_t number;
    engine::ReadOp read;
    engine::StageOp stage;
    uint64_t chunk = 0;
    uint64_t started_ns = 0;
    uint32_t sums[kMaxGranules];  // of what it writes
    std::vector<uint32_t> block_sums;
    uint32_t read_sums[kMaxGranules + 2];  // that come with reads
  };

  Status open_store() {
    engine::OpenOptions open;
    open.cluster = cluster_id();
    FFS_TRY(store_, engine::ChunkStore::open(*io_, options_.path, open));
    return ok_status();
  }

  // Two blocks a slot: one to write, with bytes that don't compress and their checksums (which a client
  // computes, and a server on arrival: neither is the engine's), one to read into.
  Status make_memory(uint32_t block_bytes) {
    if (block_bytes == block_bytes_) return ok_status();
    forget_memory();
    const size_t stride = (block_bytes + 4095u) / 4096u * 4096u;
    const size_t bytes = 2 * stride * options_.depth;
    if (bytes > kMaxMemoryBytes) return Error::of(EINVAL, "block and depth want over 1 GiB of memory");
    FFS_TRY_STATUS(memory_.allocate(bytes));
    stride_ = stride;
    block_bytes_ = block_bytes;
    if (io_->backend() == io::Backend::uring) {
      FFS_TRY(region_, io_->register_region(memory_.data(), bytes));
    }
    for (auto& slot : slots_) {
      const uint8_t* block = memory_.data() + slot->number * stride_;
      slot->block_sums.resize(block_bytes / kCrcBlockBytes);
      for (uint32_t at = 0, g = 0; at < block_bytes; at += kGranuleBytes, g++) {
        slot->sums[g] = crc32c_blocks(block + at, std::min(kGranuleBytes, block_bytes - at),
                                      slot->block_sums.data() + at / kCrcBlockBytes);
      }
    }
    return ok_status();
  }

  void forget_memory() {
    if (region_.registered()) io_->unregister_region(region_);
    region_ = {};
    memory_.reset();
    block_bytes_ = 0;
  }

  Status check(const EngineLoad& load) const {
    if (versions_.empty()) return Error::of(EINVAL, "no chunks: fill first");
    if (load.depth == 0 || load.depth > options_.depth)
      return Error::of(EINVAL, "depth must be from 1 to the driver's");
    if (load.block_bytes == 0 || load.block_bytes > chunk_bytes_ || load.block_bytes % 4096 != 0)
      return Error::of(EINVAL, "blocks are multiples of 4096 within a chunk");
    if (load.work == EngineWork::write && load.block_bytes != chunk_bytes_)
      return Error::of(EINVAL, "a write replaces the whole chunk");
    if (load.work == EngineWork::overwrite && load.block_bytes > kGranuleBytes)
      return Error::of(EINVAL, "an overwrite is at most 64 KiB");
    if (load.working_set > alive_.size())
      return Error::of(EINVAL, "a working set of more chunks than there are");
    return ok_status();
  }

  // Keeps load.depth operations in flight until `end_ns` (0: no limit) or `limit` operations have been
  // started, then waits for the last.
  Status drive(const EngineLoad& load, uint64_t end_ns, uint64_t limit) {
    load_ = load;
    chunks_ = load.working_set != 0 ? load.working_set : alive_.size();
    ended_ = started_ = 0;
    limit_ = limit;
    more_ = true;
    error_ = 0;
    pass_ns_ = now_ns();
    for (uint32_t i = 0; i < load.depth && started_ < limit_; i++) start(slots_[i].get());
    while (ended_ < started_) {
      io_->run_once(static_cast<int64_t>(kTickNs / 1000));
      pass_ns_ = now_ns();
      if (end_ns != 0 && pass_ns_ >= end_ns) more_ = false;
      if (pass_ns_ - ticked_ns_ >= kTickNs) {
        ticked_ns_ = pass_ns_;
        store_->tick(pass_ns_ / 1000);
        beside();
      }
    }
    if (error_ != 0) return Error::of(error_, what_ != nullptr ? what_ : "an operation of the engine failed");
    return ok_status();
  }

  void beside() {
    if (load_.beside == EngineBeside::snapshots) store_->start_snapshot();
    if (load_.beside == EngineBeside::compaction && store_->compaction_need() != engine::SpaceNeed::none &&
        io_->background_ops(io::OpClass::compaction) == 0) {
      store_->compact(1u << 20);
    }
  }

  // What the next block is: as the floor's (floor_device.cc), so that both walk the same way.
  uint64_t next_block(uint64_t blocks) {
    if (!load_.random) return cursor_++ % blocks;
    return mix64(++cursor_ * 0x9e3779b97f4a7c15ull) % blocks;
  }

  void start(Slot* slot) {
    started_++;
    slot->started_ns = pass_ns_;
    const uint64_t in_chunk = load_.work == EngineWork::write ? 1 : chunk_bytes_ / load_.block_bytes;
    const uint64_t block = next_block(chunks_ * in_chunk);
    slot->chunk = alive_[block / in_chunk];
    const auto offset = static_cast<uint32_t>(block % in_chunk * load_.block_bytes);
    if (load_.work == EngineWork::read) {
      start_read(slot, offset);
    } else {
      start_update(slot, offset);
    }
  }

  void start_read(Slot* slot, uint32_t offset) {
    engine::ReadOp& op = slot->read;
    op.target = kTarget;
    op.key = key_of(slot->chunk);
    op.offset = offset;
    op.length = load_.block_bytes;
    op.memory = memory_.data() + (options_.depth + slot->number) * stride_;
    op.region = load_.plain ? io::Region{} : region_;
    op.checksums = slot->read_sums;
    store_->read(&op);
  }

  void start_update(Slot* slot, uint32_t offset) {
    engine::StageOp& op = slot->stage;
    op.target = kTarget;
    op.key = key_of(slot->chunk);
    op.base = version_of(versions_[slot->chunk]);
    op.version = version_of(++versions_[slot->chunk]);
    op.kind = load_.work == EngineWork::write ? engine::UpdateKind::replace : engine::UpdateKind::write;
    if (op.kind == engine::UpdateKind::replace) op.kind = kind_;
    op.offset = offset;
    op.length = load_.block_bytes;
    op.data = memory_.data() + slot->number * stride_;
    op.region = load_.plain ? io::Region{} : region_;
    op.tail_padded = load_.block_bytes % 4096 == 0;
    op.piece_checksums = slot->sums;
    op.block_checksums = block_bytes_ <= kKnownBlockBytes ? slot->block_sums.data() : nullptr;
    // A chunk has one update in flight after another; so has a client's channel.
    op.identity = {ClientId(1), slot->number, ++sequence_};
    op.chain = kChain;
    store_->stage(&op);
  }

  static Version version_of(uint64_t update) { return update == 0 ? Version{} : Version{{1, 1}, update}; }

  void ended(Slot* slot, engine::StoreOp* op) {
    ended_++;
    longest_ns_ = std::max(longest_ns_, pass_ns_ - slot->started_ns);
    if (op->error == 0 && op == &slot->stage) {
      // A chain of one: what is staged is committed at once, then answered.
      const Status committed = store_->commit(kTarget, slot->stage.key, slot->stage.version);
      if (!committed.ok()) fail(committed.error().code, committed.error().what);
    } else if (op->error != 0) {
      fail(op->error, op->what);
    } else if (slot->read.read_length != load_.block_bytes) {
      fail(EIO, "a read gave fewer bytes than the chunk has");
    }
    if (more_ && started_ < limit_) start(slot);
  }

  void fail(int error, const char* what) {
    if (error_ == 0) error_ = error, what_ = what;
    more_ = false;
  }

  EngineOptions options_;
  bool made_ = false;
  std::unique_ptr<io::Io> io_;
  std::unique_ptr<engine::ChunkStore> store_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<uint64_t> versions_;  // update numbers, by chunk
  std::vector<uint64_t> alive_;     // chunks that loads are about
  uint32_t chunk_bytes_ = 0;
  BlockMemory memory_;
  size_t stride_ = 0;
  uint32_t block_bytes_ = 0;
  io::Region region_;

  EngineLoad load_;
  engine::UpdateKind kind_ = engine::UpdateKind::replace;  // of writes
  uint64_t chunks_ = 0;
  uint64_t cursor_ = 0;
  uint64_t sequence_ = 0;
  uint64_t started_ = 0, ended_ = 0, limit_ = 0;
  bool more_ = false;
  uint64_t ticked_ns_ = 0;
  uint64_t pass_ns_ = 0;  // the clock after the last pass of the Io
  uint64_t longest_ns_ = 0;
  int error_ = 0;
  const char* what_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<EngineDriver>> open_engine(const EngineOptions& options) {
  auto driver = std::make_unique<Driver>(options);
  FFS_TRY_STATUS(driver->open());
  return std::unique_ptr<EngineDriver>(std::move(driver));
}

}  // namespace ffs::bench
