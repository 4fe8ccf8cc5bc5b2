// Recovery (docs/disk_format.md, Journal and Snapshots): the snapshot (load_snapshot.cc), then the journal,
// then the judgement of its unflushed tail (judge_tail.cc), then the map of free slots.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "engine/recovery.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ the journal's blocks

// In pieces that are all in flight together.
Status Recovery::read_wide(uint64_t offset, uint8_t* memory, uint64_t bytes) {
  constexpr uint64_t kPieceBytes = 1u << 20;
  struct Piece {
    io::Op op;
    bool done = false;
  };
  Piece pieces[kWindowBytes / kPieceBytes];
  FFS_CHECK(bytes <= kWindowBytes);
  uint64_t failed_at = UINT64_MAX;
  int32_t failure = 0;
  auto size_at = [&](uint64_t at) { return static_cast<uint32_t>(std::min(kPieceBytes, bytes - at)); };
  for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
    Piece& piece = pieces[at / kPieceBytes];
    piece.op.owner = &piece.done;
    piece.op.done = io::mark_done;
    s_.io.read(&piece.op, s_.file, offset + at, memory + at, size_at(at));
  }
  for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
    const int32_t rc = io::wait_for(s_.io, pieces[at / kPieceBytes].op);
    if (rc != static_cast<int32_t>(size_at(at)) && failed_at == UINT64_MAX) failed_at = at, failure = rc;
  }
  if (failed_at == UINT64_MAX) return ok_status();
  return open_error(failure < 0 ? -failure : EIO, "reading the device", "%u bytes at byte %llu",
                    size_at(failed_at), number_of(offset + failed_at));
}

Result<const uint8_t*> Recovery::journal_bytes(uint64_t offset, uint64_t bytes) {
  if (window_ == nullptr) {
    window_ = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kWindowBytes));
    FFS_CHECK(window_ != nullptr);
  }
  if (offset < window_from_ || offset + bytes > window_to_) {
    uint64_t to = std::min(offset + kWindowBytes, super_.journal_bytes);
    window_from_ = window_to_ = 0;
    FFS_TRY_STATUS(read_wide(super_.journal_offset + offset, window_, to - offset));
    window_from_ = offset;
    window_to_ = to;
  }
  return static_cast<const uint8_t*>(window_ + (offset - window_from_));
}

bool Recovery::later_mark_at_least(uint64_t offset, uint64_t travelled, uint64_t sequence, Status* failure) {
  for (; travelled < super_.journal_bytes;
       travelled += kBlock, offset = (offset + kBlock) % super_.journal_bytes) {
    uint64_t available = std::min<uint64_t>(kMaxBlockBytes, super_.journal_bytes - offset);
    auto bytes = journal_bytes(offset, available);
    if (!bytes.ok()) {
      *failure = bytes.error();
      return false;
    }
    BlockHeader header;
    if (check_block(bytes.value(), available, kJournalMagic, super_.store_id, &header) &&
        header.mark >= sequence && header.mark < header.sequence && header.incarnation >= incarnation_)
      return true;
  }
  return false;
}

// Finds the end of the journal. Afterwards blocks_ are those to replay and mark_ divides them.
Status Recovery::scan_journal() {
  uint64_t offset = super_.replay_offset, travelled = 0;
  uint64_t expected = super_.replay_block;
  incarnation_ = super_.replay_incarnation;
  head_ = {offset, expected, super_.replay_record};
  mark_ = expected - 1;
  uint32_t lowest = super_.replay_incarnation;
  while (travelled < super_.journal_bytes) {
    uint64_t available = std::min<uint64_t>(kMaxBlockBytes, super_.journal_bytes - offset);
    FFS_TRY(const uint8_t* bytes, journal_bytes(offset, available));
    BlockHeader header;
    bool valid = check_block(bytes, available, kJournalMagic, super_.store_id, &header) &&
                 header.sequence == expected && header.mark < expected && header.incarnation >= lowest &&
                 header.first_record >= head_.record && header.first_record < kMostRecords;
    uint64_t span = valid ? header.span_blocks * kBlock : 0;
    bool padding = valid && (header.flags & kBlockIsPadding) != 0;
    if (valid && (padding ? offset + span != super_.journal_bytes : offset + span > super_.journal_bytes))
      valid = false;
    if (!valid) {
      Status failure = ok_status();
      if (later_mark_at_least(offset, travelled, expected, &failure)) {
        return corrupt("a block is bad and a later one says that it was flushed", offset);
      }
      FFS_TRY_STATUS(failure);
      break;
    }
    lowest = header.incarnation;
    incarnation_ = header.incarnation;
    mark_ = std::max(mark_, header.mark);
    travelled += span;
    offset = (offset + span) % super_.journal_bytes;
    if (padding) continue;  // a crash may have left it without the block that it makes room for
    blocks_.push_back({offset, expected, header.first_record, header.used_bytes, header.record_count});
    blocks_.back().offset = (offset + super_.journal_bytes - span) % super_.journal_bytes;
    expected++;
    head_ = {offset, expected, header.first_record + header.record_count};
  }
  head_.record = std::max(head_.record, snapshot_number_ + 1);
  return ok_status();
}

// ------------------------------------------------------------------------------ replay

Status Recovery::apply_table(const RecordView& record) {
  auto damaged = [] { return open_error(EBADMSG, "a record is damaged", "a table record doesn't parse"); };
  Reader after(nullptr, 0);
  uint16_t target = record.header.target;
  State& state = *s_.state;
  auto type = static_cast<RecordType>(record.header.type);
  bool of_device = type == RecordType::fence || type == RecordType::opened;
  if (!of_device && target >= super_.target_count) return damaged();
  switch (type) {
    case RecordType::retry: {
      RetryRecord fixed;
      if (!fixed_part(record, &fixed, &after) || fixed.state < 1 || fixed.state > 3) return damaged();
      state.set_retry(
          {target, ClientId(fixed.client), ChainId(fixed.chain), fixed.channel},
          {fixed.sequence, fixed.key, fixed.version, static_cast<RetryState>(fixed.state), fixed.code});
      return ok_status();
    }
    case RecordType::fence: {
      FenceRecord fixed;
      if (!fixed_part(record, &fixed, &after)) return damaged();
      state.fence(ClientId(fixed.client));
      return ok_status();
    }
    case RecordType::space_epoch: {
      SpaceEpochRecord fixed;
      if (!fixed_part(record, &fixed, &after)) return damaged();
      state.set_space(target, fixed.space, {fixed.least_epoch, fixed.expiry_ms});
      return ok_status();
    }
    case RecordType::expire_spaces: {
      ExpireSpacesRecord fixed;
      if (!fixed_part(record, &fixed, &after)) return damaged();
      state.expire_spaces(target, fixed.manager_ms);
      return ok_status();
    }
    case RecordType::chain_state: {
      ChainStateRecord fixed;
      if (!fixed_part(record, &fixed, &after) || fixed.bytes > kMaxChainStateBytes) return damaged();
      auto bytes = after.bytes(fixed.bytes);
      if (!after.ok()) return damaged();
      state.set_chain_state(target, bytes);
      return ok_status();
    }
    case RecordType::reset_target:
    case RecordType::release_target: {  // of the tables; the chunks: apply_to_target
      TargetRecord fixed;
      if (!fixed_part(record, &fixed, &after)) return damaged();
      if (type == RecordType::reset_target) {
        state.drop_retry(target);
      } else {
        state.drop_tables(target);
      }
      return ok_status();
    }
    case RecordType::opened:
      return ok_status();
    default:
      return open_error(EBADMSG, "a record is damaged", "unknown record type %u", record.header.type);
  }
}

Status Recovery::apply(const RecordView& record) {
  OrderedKey key;
  return about_chunk(record.header.type, record, &key) ? apply_about_chunk(record, key) : apply_table(record);
}

Status Recovery::apply_about_chunk(const RecordView& record, const OrderedKey& key) {
  State& state = *s_.state;
  auto [target, chunk_key] = key;
  auto type = static_cast<RecordType>(record.header.type);
  const char* wrong = "a record doesn't parse";
  Reader after(nullptr, 0);
  if (target >= super_.target_count) {
    wrong = "a record of no target";
  } else if (type == RecordType::stage) {
    StageView view;
    if (decode_stage(record, &view)) {
      wrong = state.stage(target, view.fixed, view.sums, take_overlays(view.overlays, view.overlay_count));
      if (wrong != nullptr) give_up_overlays();
    }
  } else if (type == RecordType::install) {
    StageView view;
    if (decode_stage(record, &view) && view.overlay_count == 0)
      wrong = state.install(target, view.fixed, view.sums);
  } else if (type == RecordType::erase) {
    EraseRecord fixed;
    if (fixed_part(record, &fixed, &after)) state.erase(target, chunk_key), wrong = nullptr;
  } else if (type == RecordType::move) {
    MoveRecord fixed;
    if (fixed_part(record, &fixed, &after)) wrong = state.move(target, fixed);
  } else if (type == RecordType::share) {
    ShareRecord fixed;
    if (fixed_part(record, &fixed, &after)) wrong = state.share(target, fixed);
  } else if (type == RecordType::commit) {
    CommitRecord fixed;
    if (fixed_part(record, &fixed, &after)) wrong = state.commit(target, fixed.key, fixed.version);
  } else {
    RefuseRecord fixed;
    if (fixed_part(record, &fixed, &after)) wrong = state.refuse(target, fixed);
  }
  if (wrong == nullptr) return ok_status();
  return open_error(EBADMSG, "the journal is damaged", "%s", wrong);
}

// What a record about a target does to its chunks. In the tail a release leaves nothing to judge; a reset
// is judged with the other records of the chunks that have some there (judge_tail.cc).
void Recovery::apply_to_target(const RecordView& record, uint64_t number, bool in_tail) {
  State& state = *s_.state;
  const uint16_t target = record.header.target;
  const bool release = record.header.type == static_cast<uint8_t>(RecordType::release_target);
  auto from = tail_.lower_bound({target, ChunkKey{}});
  auto to = target == UINT16_MAX ? tail_.end() : tail_.lower_bound({static_cast<uint16_t>(target + 1), {}});
  if (in_tail && release) tail_.erase(from, to);
  if (in_tail && !release) {
    for (auto at = from; at != to; ++at)
      at->second.push_back({number, {record.bytes.begin(), record.bytes.end()}});
  }
  if (!release) {
    state.index.each_live([&](uint32_t chunk) {
      const Chunk& c = state.index[chunk];
      const OrderedKey key{c.target, c.key};
      if (c.target != target || cover_of(key) >= number) return;
      if (!in_tail || !tail_.contains(key)) state.drop_pendings(chunk);
    });
    return;
  }
  ChunkKey at{};
  for (bool strictly = false;; strictly = true) {
    const uint32_t chunk = state.index.lower_bound(target, at, strictly);
    if (chunk == 0 || state.index[chunk].target != target) return;
    at = state.index[chunk].key;
    if (cover_of({target, at}) < number) state.forget_chunk(chunk);
  }
}

Status Recovery::collect_tail(const RecordView& record, uint64_t number) {
  OrderedKey key;
  TailRecord tail{number, {record.bytes.begin(), record.bytes.end()}};
  if (about_chunk(record.header.type, record, &key)) {
    tail_[key].push_back(std::move(tail));
    return ok_status();
  }
  if (about_target(record)) {
    if (record.header.target >= super_.target_count)
      return open_error(EBADMSG, "the journal is damaged", "a record of no target");
    apply_to_target(record, number, true);
  }
  if (number > tables_number_) tail_tables_.push_back(std::move(tail));
  return ok_status();
}

// Applies what is known to be flushed and collects the rest.
Status Recovery::replay_flushed() {
  for (const BlockRef& block : blocks_) {
    FFS_TRY(const uint8_t* bytes, journal_bytes(block.offset, block.used_bytes));
    Reader reader(bytes + sizeof(BlockHeader), block.used_bytes - sizeof(BlockHeader));
    source_ = bytes;
    source_at_ = super_.journal_offset + block.offset;
    RecordView record;
    uint64_t number = block.first_record;
    uint32_t count = 0;
    for (; next_record(reader, &record); number++, count++) {
      if (covered(record, number)) continue;
      if (block.sequence <= mark_) {
        std::vector<RetryChange> known;
        s_.state->deferred_retry = number <= tables_number_ ? &known : nullptr;
        const bool target_wide = about_target(record) && record.header.target < super_.target_count;
        if (target_wide) apply_to_target(record, number, false);
        Status applied = target_wide && number <= tables_number_ ? ok_status() : apply(record);
        s_.state->deferred_retry = nullptr;
        if (!applied.ok()) {
          std::string numbers = ChunkStore::last_open_message();
          return open_error(EBADMSG, "the journal is damaged", "%s (block at byte %llu)", numbers.c_str(),
                            number_of(super_.journal_offset + block.offset));
        }
        continue;
      }
      FFS_TRY_STATUS(collect_tail(record, number));
    }
    source_ = nullptr;
    if (!reader.ok() || count != block.record_count)
      return corrupt("a record of a block doesn't parse", block.offset);
  }
  return ok_status();
}

// ------------------------------------------------------------------------------ all of it

// A device of an earlier version: older programs won't know the records that may stand in it from now on.
Status ChunkStore::Impl::upgrade_format() {
  if ((super.incompat & kOurIncompat) == kOurIncompat) return ok_status();
  super.incompat |= kOurIncompat;
  super.sequence++;
  seal_superblock(&super);
  std::memcpy(super_buffer, &super, sizeof super);
  FFS_TRY_STATUS(write_now(kSuperblockOffset[super.sequence & 1], super_buffer, kBlock));
  FFS_TRY_STATUS(sync_now());
  identity = identity_of(super);
  return ok_status();
}

Status ChunkStore::Impl::recover() {
  // What a dead process left in the device's cache is made durable before anything is built on it.
  FFS_TRY_STATUS(sync_now());
  Recovery recovery(*this);
  FFS_TRY_STATUS(recovery.load_snapshot());
  FFS_TRY_STATUS(recovery.scan_journal());
  FFS_TRY_STATUS(recovery.replay_flushed());
  FFS_TRY_STATUS(recovery.judge_tail());
  FFS_TRY_STATUS(recovery.rebuild_allocator());
  FFS_TRY_STATUS(apply_all_now());

  FFS_TRY_STATUS(upgrade_format());

  if (recovery.incarnation() == UINT32_MAX)
    return open_error(EBADMSG, "the journal is damaged", "it was opened 2^32 times");
  incarnation = recovery.incarnation() + 1;
  Journal::Config config;
  config.io = &io;
  config.file = file;
  config.scratch = scratch.get();
  config.owner = this;
  config.region_offset = super.journal_offset;
  config.region_bytes = super.journal_bytes;
  config.store_id = super.store_id;
  config.incarnation = incarnation;
  config.flush = flushes_device();
  JournalPosition tail{super.replay_offset, super.replay_block, super.replay_record};
  journal = std::make_unique<Journal>(config, tail, recovery.head());
  journal->acknowledge_without_flush = mutants.acknowledge_without_flush;
  journal->acknowledge_with_earlier_flush = mutants.acknowledge_with_earlier_flush;
  journal->flush_before_data = mutants.flush_before_data;
  // Of a sparse file the room may run out at any write of data. That is an answer there, not a failure.
  records_beside = options.records_beside_data && !device.sparse;
  journal_found_bytes = journal->used_bytes();
  replaying = false;
  // No later replay may meet what was dropped; and there must be room to write.
  if (recovery.dropped() || journal->used_bytes() > journal->region_bytes() / 2) {
    start_snapshot();
    while (snap.active) io.run_once(-1);
    if (poisoned) return open_error(EIO, "the device failed", "writing a snapshot after recovery");
  }
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  uint64_t unix_ms = static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1000000;
  append_simple(RecordType::opened, kDeviceRecord, OpenedRecord{incarnation, 0, unix_ms});
  uint64_t opened_block = journal->last_block();
  journal->kick(false);
  while (journal->busy() || pump_scheduled) io.run_once(-1);
  if (poisoned || journal->flushed_block() < opened_block)
    return open_error(EIO, "the device failed", "writing the journal at opening");
  return ok_status();
}

}  // namespace ffs::engine
