// Whole devices: what a store wrote, damaged, and mostly sealed again with right checksums, so that the
// damage reaches what is behind them. Opening must end, in an error or in a store that is consistent, can be
// closed and opened again; nothing is touched outside the device, no memory is asked for by what a damaged
// field says.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/check.h"
#include "engine/store_impl.h"
#include "fuzz/fuzz.h"
#include "io/sim.h"

using namespace ffs;
using namespace ffs::engine;

// Nothing here needs more memory at once.
#ifdef __SANITIZE_ADDRESS__
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=512";
}
#else
__attribute__((noinline)) void* operator new(size_t size) {
  FFS_CHECK(size < 512u << 20);
  void* memory = std::malloc(size);
  FFS_CHECK(memory != nullptr);
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
#endif

namespace {

constexpr uint64_t kDeviceBytes = 260ull << 20;
constexpr TargetId kTargets[] = {TargetId(11), TargetId(12)};

Uuid cluster_id() {
  Uuid id{};
  id[0] = 5;
  return id;
}

std::unique_ptr<ChunkStore> open(io::SimIo& io) {
  OpenOptions options;
  options.cluster = cluster_id();
  options.scratch_bytes = options.overlay_bytes = 16u << 20;
  options.replay_overlay_bytes = 8u << 10;  // most of them stay on the device
  auto opened = ChunkStore::open_file(io, io.disk(), io.size_bytes(), options);
  return opened.ok() ? std::move(opened.value()) : nullptr;
}

// A store at work.
class Work {
 public:
  explicit Work(io::SimIo& io)
      : io_(io), memory_(static_cast<uint8_t*>(std::aligned_alloc(kBlock, 1u << 20))) {
    FormatOptions format;
    format.cluster = cluster_id();
    format.targets.assign(std::begin(kTargets), std::end(kTargets));
    format.max_chunks = 200;
    FFS_CHECK(ChunkStore::format_file(io, io.disk(), io.size_bytes(), 512, format).ok());
    store = open(io);
    FFS_CHECK(store != nullptr);
    for (size_t i = 0; i < 1u << 20; i++) memory_[i] = static_cast<uint8_t>(mix64(i / 100));
  }
  ~Work() { std::free(memory_); }

  void write(uint64_t key, uint64_t version, uint64_t base, uint32_t offset, uint32_t length,
             bool commit_now) {
    StageOp op;
    op.kind = UpdateKind::write;
    op.offset = offset;
    op.length = length;
    op.data = memory_ + offset % kBlock;
    op.commit_now = commit_now;
    stage(op, key, version, base);
  }
  void stage(StageOp& op, uint64_t key, uint64_t version, uint64_t base) {
    op.target = kTargets[key % 2];
    op.key = key_of(key);
    op.version = v(version);
    op.base = v(base);
    op.identity = {ClientId(9 + key), 1, version};
    op.chain = ChainId(3);
    begin(op);
    store->stage(&op);
    wait(op);
  }
  void commit(uint64_t key, uint64_t version) {
    FFS_CHECK(store->commit(kTargets[key % 2], key_of(key), v(version)).ok());
  }
  void install(uint64_t key, uint64_t version, uint64_t only_over) {
    InstallOp op;
    op.target = kTargets[key % 2];
    op.key = key_of(key);
    op.version = v(version);
    op.only_over = v(only_over);
    op.length = 70'000;
    op.data = memory_;
    begin(op);
    store->install(&op);
    wait(op);
  }
  template <typename F>
  void plain(F call) {
    StoreOp op;
    begin(op);
    call(&op);
    wait(op);
  }
  void snapshot() {
    const uint64_t before = store->metrics().snapshots;
    for (store->start_snapshot(); store->metrics().snapshots == before;) pass();
  }
  static ChunkKey key_of(uint64_t key) { return ChunkKey::of_file(1 + key / 8, key); }
  static Version v(uint64_t update) { return update == 0 ? Version{} : Version{{1, 1}, update}; }

  std::unique_ptr<ChunkStore> store;

 private:
  void begin(StoreOp& op) {
    done_ = false;
    op.owner = &done_;
    op.done = [](StoreOp* over) { *static_cast<bool*>(over->owner) = true; };
  }
  void wait(StoreOp& op) {
    while (!done_) pass();
    FFS_CHECK(op.error == 0);
  }
  void pass() {
    store->tick(now_us_ += 100);
    io_.run_once(0);
  }
  io::SimIo& io_;
  uint8_t* memory_;
  bool done_ = false;
  uint64_t now_us_ = 1'000;
};

// A device with a snapshot and, behind it, a journal with records of all types; not closed.
io::SimImage busy_device() {
  io::SimIo io(io::SimImage(kDeviceBytes), 1);
  Work work(io);
  for (uint64_t key = 0; key < 24; key++) work.write(key, 1, 0, 0, 3'000 + 9'000 * (key % 9), true);
  work.write(2, 2, 1, 4'096, 8'192, false);  // overlays, pending and committed
  work.write(2, 3, 2, 100, 300, false);
  work.write(3, 2, 1, 0, 4'096, true);
  work.snapshot();
  for (uint64_t key = 0; key < 10; key++)
    work.write(key, 5, key == 2 ? 3 : key == 3 ? 2 : 1, 512, 5'000, false);
  for (uint64_t key = 0; key < 6; key++) work.commit(key, 5);
  StageOp cut;
  cut.kind = UpdateKind::truncate;
  cut.length = 70'000;
  work.stage(cut, 8, 6, 5);
  StageOp removal;
  removal.kind = UpdateKind::remove;
  removal.commit_now = true;
  work.stage(removal, 10, 2, 1);
  work.install(11, 7, 0);
  work.install(12, 2, 1);
  ChunkStore& store = *work.store;
  work.plain([&](StoreOp* op) {
    store.refuse(kTargets[1], Work::key_of(7), Work::v(5), {ClientId(16), 1, 5}, ChainId(3), 28, op);
  });
  work.plain([&](StoreOp* op) { store.erase(kTargets[1], Work::key_of(13), op); });
  work.plain([&](StoreOp* op) { store.fence(ClientId(20), op); });
  work.plain([&](StoreOp* op) { store.set_space_epoch(kTargets[0], 2, {3, 4}, op); });
  work.plain([&](StoreOp* op) { store.expire_space_epochs(kTargets[0], 5, op); });
  const uint8_t state[] = {1, 2, 3};
  work.plain([&](StoreOp* op) { store.set_chain_state(kTargets[0], state, op); });
  work.plain([&](StoreOp* op) { store.retry_set(kTargets[0], ClientId(5), ChainId(1), 2, {}, op); });
  work.plain([&](StoreOp* op) { store.reset_target(kTargets[1], op); });
  work.write(9, 9, 1, 9'000, 3'000, true);
  io::SimImage image = io.image();
  work.store.reset();
  return image;
}

const io::SimImage& base_device() {
  static const io::SimImage image = busy_device();
  return image;
}

// The blocks with a checksum of their own.
struct Block {
  uint64_t offset;
  uint32_t magic;  // 0: a superblock
};

Superblock superblock_of(const io::SimImage& image) {
  uint8_t blocks[2 * kBlock];
  for (int i = 0; i < 2; i++) image.read(kSuperblockOffset[i], blocks + i * kBlock, kBlock);
  auto super = choose_superblock(blocks, blocks + kBlock, kDeviceBytes);
  FFS_CHECK(super.ok());
  return super.value();
}

std::vector<Block> blocks_of(const io::SimImage& image) {
  const Superblock super = superblock_of(image);
  std::vector<Block> blocks;
  for (uint64_t offset : kSuperblockOffset) blocks.push_back({offset, 0});
  auto add = [&](uint64_t from, uint64_t bytes, uint32_t magic) {
    for (uint64_t at = 0; at < bytes; at += kBlock) {
      BlockHeader header;
      image.read(from + at, reinterpret_cast<uint8_t*>(&header), sizeof header);
      if (header.magic == magic && header.store_id == super.store_id) blocks.push_back({from + at, magic});
    }
  };
  add(super.snapshot_offset[super.snapshot_area], super.snapshot_used, kSnapshotMagic);
  add(super.journal_offset + super.replay_offset, super.journal_bytes - super.replay_offset, kJournalMagic);
  return blocks;
}

void seal(io::SimImage& image, const Block& block) {
  std::vector<uint8_t> bytes(block.magic == 0 ? kBlock : kMaxBlockBytes);
  image.read(block.offset, bytes.data(), bytes.size());
  if (block.magic == 0) {
    Superblock super;
    std::memcpy(&super, bytes.data(), sizeof super);
    seal_superblock(&super);
    std::memcpy(bytes.data(), &super, sizeof super);
    image.write(block.offset, bytes.data(), kBlock);
    return;
  }
  BlockHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.used_bytes < sizeof header || header.used_bytes > kMaxBlockBytes) return;
  seal_block(bytes.data(), header);
  image.write(block.offset, bytes.data(), sizeof header);
}

// Changes of 8 bytes each: the block, where in it, what.
void damage(io::SimImage& image, const uint8_t* data, size_t size) {
  static const std::vector<Block> blocks = blocks_of(base_device());
  for (; size >= 8; data += 8, size -= 8) {
    uint16_t where;
    uint32_t value;
    std::memcpy(&where, data + 2, sizeof where);
    std::memcpy(&value, data + 4, sizeof value);
    const Block& block = blocks[data[0] % blocks.size()];
    // Mostly the fields at the beginning, or those of the first records.
    const uint64_t at =
        block.offset + (data[1] & 1 ? where % 320 : where % (block.magic == 0 ? kBlock : 16'384));
    static const uint64_t ends[] = {0,      1,       0x7f,       0x80,       0xff,      0x1000,
                                    0xffff, 0x10000, 0x7fffffff, 0xffffffff, UINT64_MAX};
    uint64_t number = value;
    if (data[1] & 2) number = ends[value % std::size(ends)];
    const size_t width = size_t{1} << (data[1] >> 2 & 3);
    uint64_t old = 0;
    image.read(at, reinterpret_cast<uint8_t*>(&old), width);
    if ((data[1] >> 4 & 3) == 1) number = old ^ (1ull << (value % 64));
    if ((data[1] >> 4 & 3) == 2) number = old + (value % 9) - 4;
    image.write(at, reinterpret_cast<const uint8_t*>(&number), width);
    if (data[1] < 0xe0) seal(image, block);
  }
}

void use(ChunkStore& store, io::SimIo& io) {
  const std::string wrong = store.check_consistency();
  if (!wrong.empty()) std::fprintf(stderr, "inconsistent: %s\n", wrong.c_str());
  FFS_CHECK(wrong.empty());
  std::vector<ChunkSample> samples(8);
  for (TargetId target : store.identity().targets) {
    ChunkInfo info;
    for (ChunkKey key{}; store.first_at_or_after(target, key, &info);) {
      (void)chunk_digest(info);
      key = info.key;
      if (++key.bytes[23] == 0) break;
    }
    (void)store.sample(target, 2, 1, samples);
  }
  for (int i = 0; i < 50; i++) {
    store.tick(1'000'000 + static_cast<uint64_t>(i) * 100);
    io.run_once(0);
  }
}

// How many devices could be opened: a fuzzer that only ever breaks them shows little.
struct Count {
  uint64_t runs = 0, opened = 0;
  ~Count() {
    std::printf("%llu of %llu devices opened\n", static_cast<unsigned long long>(opened),
                static_cast<unsigned long long>(runs));
  }
} count;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  alarm(60);  // a hang
  count.runs++;
  io::SimImage image = base_device();
  damage(image, data, std::min<size_t>(size, 8 * 24));
  io::SimIo io(std::move(image), 1);
  io.stop_logging();
  for (int round = 0; round < 2; round++) {
    std::unique_ptr<ChunkStore> store = open(io);
    if (store == nullptr) {
      if (round != 0) {
        std::fprintf(stderr, "again: %s\nchanges:", ChunkStore::last_open_message().c_str());
        for (size_t i = 0; i < size; i++) std::fprintf(stderr, " %02x", data[i]);
        std::fprintf(stderr, "\n");
      }
      FFS_CHECK(round == 0);  // what was opened and closed can be opened
      break;
    }
    if (round == 0) count.opened++;
    use(*store, io);
    FFS_CHECK(store->close().ok());
  }
  alarm(0);
  return 0;
}

std::vector<std::vector<uint8_t>> ffs::fuzz::seeds() {
  // Random changes, and none.
  std::vector<std::vector<uint8_t>> seeds(1);
  for (uint64_t i = 1; i < 400; i++) {
    std::vector<uint8_t> changes(8 * (1 + i % 3));
    for (size_t b = 0; b < changes.size(); b++) changes[b] = static_cast<uint8_t>(mix64(i * 1'000 + b));
    for (size_t b = 1; b < changes.size(); b += 8) changes[b] &= 0x7f;  // sealed
    seeds.push_back(changes);
  }
  return seeds;
}
