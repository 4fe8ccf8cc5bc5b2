// What recovery reads from a device: superblocks, block headers, records. Any bytes: nothing outside
// them may be touched, and what is accepted must be applied to the state without breaking it.
// (Checksums keep such bytes away in life; a bug that wrote them, or a patient attacker, would not.)
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "engine/recovery.h"
#include "fuzz/fuzz.h"

using namespace ffs;
using namespace ffs::engine;

namespace {

ChunkKey some_key() {
  return ChunkKey::of_file(7, 3);
}

struct Copies {
  std::vector<OverlayView> list;
  Copies(const OverlayView* overlays, uint32_t count) : list(overlays, overlays + count) {
    for (OverlayView& o : list) {
      auto bytes = static_cast<uint8_t*>(std::aligned_alloc(kBlock, o.blocks * kBlock));
      FFS_CHECK(bytes != nullptr);
      std::memcpy(bytes, o.bytes, o.blocks * kBlock);
      o.bytes = bytes;
    }
  }
  // The state takes the bytes over only if it accepts the record.
  void after(const char* wrong) const {
    if (wrong == nullptr) return;
    for (const OverlayView& o : list) std::free(const_cast<uint8_t*>(o.bytes));
  }
};

void release(State& state, uint16_t target) {
  state.drop_tables(target);
  ChunkKey at{};
  for (bool strictly = false;; strictly = true) {
    const uint32_t chunk = state.index.lower_bound(target, at, strictly);
    if (chunk == 0 || state.index[chunk].target != target) return;
    at = state.index[chunk].key;
    state.forget_chunk(chunk);
  }
}

void apply(State& state, const RecordView& record) {
  const uint16_t target = record.header.target & 1;
  Reader after(nullptr, 0);
  StageView stage;
  ChunkView chunk;
  CommitRecord commit;
  RefuseRecord refuse;
  RetryRecord retry;
  FenceRecord fence;
  EraseRecord erase;
  switch (static_cast<RecordType>(record.header.type)) {
    case RecordType::stage:
    case RecordType::pending:
      if (decode_stage(record, &stage)) {
        Copies copies(stage.overlays, stage.overlay_count);
        const bool pending = record.header.type == static_cast<uint8_t>(RecordType::pending);
        copies.after(pending ? state.restore_pending(target, stage, copies.list)
                             : state.stage(target, stage.fixed, stage.sums, copies.list));
      }
      break;
    case RecordType::chunk:
      if (decode_chunk(record, &chunk)) {
        Copies copies(chunk.overlays, chunk.overlay_count);
        copies.after(state.restore_chunk(target, chunk, copies.list));
      }
      break;
    case RecordType::install:
      if (decode_stage(record, &stage) && stage.overlay_count == 0)
        (void)state.install(target, stage.fixed, stage.sums);
      break;
    case RecordType::erase:
      if (fixed_part(record, &erase, &after)) state.erase(target, erase.key);
      break;
    case RecordType::reset_target:
      state.index.each_live([&](uint32_t number) {
        if (state.index[number].target == target) state.drop_pendings(number);
      });
      state.drop_retry(target);
      break;
    case RecordType::release_target:
      release(state, target);
      break;
    case RecordType::commit:
      if (fixed_part(record, &commit, &after)) (void)state.commit(target, commit.key, commit.version);
      break;
    case RecordType::refuse:
      if (fixed_part(record, &refuse, &after)) (void)state.refuse(target, refuse);
      break;
    case RecordType::retry:
      if (fixed_part(record, &retry, &after)) {
        state.set_retry({target, ClientId(retry.client), ChainId(retry.chain), retry.channel},
                        {retry.sequence, retry.key, retry.version, RetryState::pending, retry.code});
      }
      break;
    case RecordType::fence:
      if (fixed_part(record, &fence, &after)) state.fence(ClientId(fence.client));
      break;
    default:
      break;
  }
}

// Every chunk of the state can be encoded, and its size is what was promised.
void encode_all(State& state) {
  ChunkKey at{};
  std::vector<uint32_t> all;
  for (uint16_t target = 0; target < 2; target++) {
    bool strictly = false;
    for (at = ChunkKey{};; strictly = true) {
      const uint32_t chunk = state.index.lower_bound(target, at, strictly);
      if (chunk == 0 || state.index[chunk].target != target) break;
      at = state.index[chunk].key;
      std::vector<uint8_t> bytes(state.chunk_record_bytes(chunk));
      Writer writer(bytes.data(), bytes.size());
      uint32_t records = 0;
      state.encode_chunk_and_pendings(chunk, writer, &records);
      FFS_CHECK(writer.ok() && writer.left() == 0);
      all.push_back(chunk);
    }
  }
  for (uint32_t chunk : all) state.forget_chunk(chunk);
  FFS_CHECK(state.committed_chunks == 0 && state.index.size() == 0);
  FFS_CHECK(state.usage[0].allocated_bytes == 0 && state.usage[0].logical_bytes == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  if (data[0] % 8 == 0) {
    std::vector<uint8_t> a(kBlock), b(kBlock);
    std::memcpy(a.data(), data + 1, std::min<size_t>(size - 1, kBlock));
    Superblock super;
    std::memcpy(&super, a.data(), sizeof super);
    seal_superblock(&super);
    std::memcpy(a.data(), &super, sizeof super);
    (void)choose_superblock(a.data(), b.data(), 1ull << 40);
    BlockHeader header;
    (void)check_block(data + 1, size - 1, kJournalMagic, super.store_id, &header);
    return 0;
  }
  // Records stand at multiples of 8 in a block.
  std::vector<uint64_t> aligned((size + 7) / 8);
  auto bytes = reinterpret_cast<uint8_t*>(aligned.data());
  std::memcpy(bytes, data + 1, size - 1);
  State state(64, 2, nullptr);
  Reader reader(bytes, size - 1);
  RecordView record;
  while (next_record(reader, &record)) apply(state, record);
  encode_all(state);
  return 0;
}

std::vector<std::vector<uint8_t>> ffs::fuzz::seeds() {
  std::vector<uint8_t> bytes(16 * 1024);
  bytes[0] = 1;
  Writer w(bytes.data() + 1, bytes.size() - 1);
  std::vector<uint8_t> block(kBlock, 0x33);
  const OverlayView overlay{0, 1, block.data()};
  const uint32_t sums[2] = {1, 2};
  ChunkRecord chunk{};
  chunk.key = some_key();
  chunk.image.version = {{1, 1}, 5};
  chunk.image.place = 4096;
  chunk.image.place_class = 5;
  chunk.image.stored_length = chunk.image.logical_length = 100'000;
  chunk.image.kind = 1;
  chunk.image.granules = 2;
  chunk.overlay_count = 1;
  encode_chunk(w, 0, chunk, sums, {&overlay, 1}, {});
  StageRecord stage{};
  stage.key = some_key();
  stage.base = chunk.image.version;
  stage.image = chunk.image;
  stage.image.version.update = 6;
  stage.client = 9;
  stage.first_changed = 1;
  stage.changed_granules = 1;
  stage.overlay_count = 1;
  encode_stage(w, RecordType::stage, 0, stage, {sums, 1}, {&overlay, 1});
  encode_simple(w, RecordType::commit, 0, CommitRecord{some_key(), stage.image.version});
  RefuseRecord refuse{};
  refuse.key = some_key();
  refuse.version = {{1, 1}, 7};
  refuse.client = 9;
  encode_simple(w, RecordType::refuse, 0, refuse);
  encode_simple(w, RecordType::fence, kDeviceRecord, FenceRecord{9});
  StageRecord install = stage;
  install.image.kind = static_cast<uint8_t>(UpdateKind::replace);
  install.image.version.update = 5;
  install.first_changed = 0;
  install.changed_granules = 2;
  install.overlay_count = 0;
  install.flags = kStageCommitNow | kInstallKeepsPendings;
  encode_stage(w, RecordType::install, 0, install, sums, {});
  encode_simple(w, RecordType::reset_target, 0, TargetRecord{});
  encode_simple(w, RecordType::erase, 0, EraseRecord{some_key()});
  encode_simple(w, RecordType::release_target, 1, TargetRecord{});
  FFS_CHECK(w.ok());
  bytes.resize(1 + w.size());
  std::vector<uint8_t> super(1 + kBlock);
  std::memcpy(super.data() + 1, kSuperblockMagic, sizeof kSuperblockMagic);
  super[1 + offsetof(Superblock, format_version)] = 1;
  return {bytes, super};
}
