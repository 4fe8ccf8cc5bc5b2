// Snapshots: everything that the journal before some place says, written in slices while updates
// go on (docs/disk_format.md, Snapshots).
#include <cstdlib>
#include <cstring>

#include "engine/store_impl.h"

namespace ffs::engine {

void ChunkStore::Impl::start_snapshot() {
  if (snap.active || poisoned || replaying) return;
  snap.active = true;
  snap.id = super.snapshot_id + 1;
  snap.area = super.snapshot_area == 0 ? 1 : 0;
  snap.offset = 0;
  snap.slices = 0;
  snap.last_encoded = snap.flushing = false;
  snap.cursor_started = snap.tables_captured = false;
  snap.cursor_target = 0;
  snap.cursor_key = ChunkKey{};
  snap.op.owner = this;
  snap.op.done = [](io::Op* op) {
    auto impl = static_cast<Impl*>(op->owner);
    if (op->result < 0) {
      impl->snapshot_failed(-op->result);
    } else {
      impl->next_slice();
    }
  };
  snap.chunks_memory = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kMaxBlockBytes));
  FFS_CHECK(snap.chunks_memory != nullptr);
  journal->begin_snapshot();
  next_slice();
}

BlockHeader ChunkStore::Impl::slice_header() const {
  BlockHeader header{};
  header.magic = kSnapshotMagic;
  header.store_id = super.store_id;
  header.sequence = snap.slices;
  header.mark = snap.id;
  header.first_record = journal->last_record();
  header.incarnation = incarnation;
  return header;
}

// The tables are small and have no order to go on in: they are taken in one step, after all chunks,
// so that a record whose effect on the tables is missing has its effect on its chunk missing too.
void ChunkStore::Impl::capture_tables() {
  FFS_CHECK(snap.table_slices.empty());
  snap.tables_captured = true;
  uint8_t* block = nullptr;
  uint32_t used = 0, records = 0;
  auto close_slice = [&] {
    BlockHeader header = slice_header();
    header.sequence = snap.slices + snap.table_slices.size();
    header.used_bytes = used;
    header.span_blocks = static_cast<uint32_t>(round_up(used, kBlock) / kBlock);
    header.record_count = records;
    header.flags = kSliceHasTables;
    std::memset(block + used, 0, round_up(used, kBlock) - used);
    seal_block(block, header);
    snap.table_slices.push_back({block, static_cast<uint32_t>(round_up(used, kBlock))});
    block = nullptr;
  };
  auto open_slice = [&] {
    block = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kMaxBlockBytes));
    FFS_CHECK(block != nullptr);
    used = sizeof(BlockHeader);
    records = 0;
  };
  open_slice();  // also without a record: its header says as of when there is none
  state->for_each_table_record([&](size_t bytes, auto encode) {
    if (used + bytes > kMaxBlockBytes) {
      close_slice();
      open_slice();
    }
    Writer writer(block + used, bytes);
    encode(writer);
    FFS_CHECK(writer.ok() && writer.left() == 0);
    used += static_cast<uint32_t>(bytes);
    records++;
  });
  close_slice();
}

void ChunkStore::Impl::next_slice() {
  StepTimer timer(counters);
  std::free(std::exchange(snap.written, nullptr));
  if (poisoned || closing) {
    abandon_snapshot();
    return;
  }
  if (snap.last_encoded && !snap.tables_captured) capture_tables();
  if (!snap.table_slices.empty()) {
    TableSlice slice = snap.table_slices.front();
    snap.table_slices.pop_front();
    snap.written = slice.memory;
    write_slice(slice.memory, slice.bytes);
    return;
  }
  if (snap.last_encoded) {
    std::free(std::exchange(snap.chunks_memory, nullptr));
    snap.flushing = true;
    snap.wait_block = journal->last_block();
    snap.wait_sync = journal->next_sync();
    journal->kick(true);
    return;
  }
  write_slice(snap.chunks_memory, encode_chunks(snap.chunks_memory));
}

// Chunks in order from the cursor on, as many as fit and as a step may take.
uint32_t ChunkStore::Impl::encode_chunks(uint8_t* block) {
  constexpr uint32_t kSliceChunks = 512;
  BlockHeader header = slice_header();
  uint32_t used = sizeof header, chunks = 0;
  bool full = false;
  auto take = [&](uint32_t chunk) {
    const Chunk& c = state->index[chunk];
    if (releasing[c.target]) {  // its chunks are gone: on with the next target
      snap.cursor_started = false;
      snap.cursor_target = static_cast<uint16_t>(c.target + 1);
      snap.cursor_key = ChunkKey{};
      return false;
    }
    const size_t bytes = state->chunk_record_bytes(chunk);
    if (used + bytes > kMaxBlockBytes || chunks == kSliceChunks) {
      full = true;
      return false;
    }
    Writer writer(block + used, bytes);
    state->encode_chunk_and_pendings(chunk, writer, &header.record_count);
    FFS_CHECK(writer.ok() && writer.left() == 0);
    used += static_cast<uint32_t>(bytes);
    chunks++;
    snap.cursor_started = true;
    snap.cursor_target = c.target;
    snap.cursor_key = c.key;
    return true;
  };
  while (!full && !snap.last_encoded) {
    bool ended = true;
    state->index.walk(snap.cursor_target, snap.cursor_key, snap.cursor_started,
                      [&](uint32_t chunk) { return ended = take(chunk); });
    snap.last_encoded = ended;
  }
  if (snap.last_encoded) header.flags = kSliceIsLast;
  FFS_CHECK(header.record_count > 0 || snap.last_encoded);  // a chunk's records fit a slice
  header.used_bytes = used;
  auto bytes = static_cast<uint32_t>(round_up(used, kBlock));
  header.span_blocks = bytes / static_cast<uint32_t>(kBlock);
  std::memset(block + used, 0, bytes - used);
  seal_block(block, header);
  return bytes;
}

void ChunkStore::Impl::write_slice(uint8_t* memory, uint32_t bytes) {
  FFS_CHECK(snap.offset + bytes <= super.snapshot_bytes);  // snapshot_limit() keeps room
  uint64_t at = super.snapshot_offset[snap.area] + snap.offset;
  snap.offset += bytes;
  snap.slices++;
  io.write(&snap.op, file, at, memory, bytes);
}

// The slices and the records that they show are durable: the superblock may name them.
void ChunkStore::Impl::snapshot_progress(uint64_t block, uint64_t sync) {
  if (!snap.active || !snap.flushing) return;
  if (closing) return abandon_snapshot();
  // A full ring holds back records without data (stage() stops long before); they are in the slices.
  bool journal_done = block >= snap.wait_block || journal->stuck();
  if (sync < snap.wait_sync || !journal_done) {
    if (!journal->busy()) journal->kick(true);
    return;
  }
  snap.flushing = false;
  snap.position = journal->snapshot_position();
  snap.next_super = super;
  Superblock& next = snap.next_super;
  next.sequence++;
  next.snapshot_id = snap.id;
  next.snapshot_used = snap.offset;
  next.snapshot_area = snap.area;
  next.snapshot_slices = snap.slices;
  next.replay_offset = snap.position.offset;
  next.replay_block = snap.position.block;
  next.replay_record = snap.position.record;
  next.replay_incarnation = incarnation;
  next.snapshot_ms = unix_ms();
  if (dedup.wants_feature()) next.incompat |= kIncompatShared;
  seal_superblock(&next);
  std::memcpy(super_buffer, &next, sizeof next);
  snap.op.done = [](io::Op* op) {
    auto impl = static_cast<Impl*>(op->owner);
    if (op->result < 0) return impl->snapshot_failed(-op->result);
    op->done = [](io::Op* sync_op) {
      auto self = static_cast<Impl*>(sync_op->owner);
      if (sync_op->result < 0) return self->snapshot_failed(-sync_op->result);
      self->snapshot_written();
    };
    if (impl->flushes_device()) {
      impl->io.datasync(op, impl->file);
    } else {
      impl->io.defer(op, 0);
    }
  };
  io.write(&snap.op, file, kSuperblockOffset[next.sequence & 1], super_buffer, kBlock);
}

void ChunkStore::Impl::snapshot_written() {
  super = snap.next_super;
  identity.features_incompat = super.incompat;
  snap.active = false;
  journal->cut(snap.position);
  counters.snapshots++;
  last_snapshot_us = now_us;
  want_flush();
}

void ChunkStore::Impl::snapshot_failed(int error) {
  abandon_snapshot();
  poison(error);
}

void ChunkStore::Impl::abandon_snapshot() {
  std::free(std::exchange(snap.chunks_memory, nullptr));
  std::free(std::exchange(snap.written, nullptr));
  for (TableSlice& slice : snap.table_slices) std::free(slice.memory);
  snap.table_slices.clear();
  snap.active = snap.flushing = false;
}

}  // namespace ffs::engine
