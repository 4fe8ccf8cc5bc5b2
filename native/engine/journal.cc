#include "engine/journal.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace ffs::engine {

Journal::Journal(const Config& config, const JournalPosition& tail, const JournalPosition& head)
    : config_(config),
      tail_(tail.offset),
      head_(head.offset),
      next_block_(head.block),
      next_record_(head.record),
      last_taken_(head.block - 1),
      flushed_(head.block - 1) {
  padding_block_ = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kBlock));
  FFS_CHECK(padding_block_ != nullptr);
  sync_op_.owner = this;
  sync_op_.done = [](io::Op* op) { static_cast<Journal*>(op->owner)->sync_done(op->result); };
}

Journal::~Journal() {
  FFS_CHECK(!busy());
  for (Block& block : gathering_) release(block);
  for (Write* write : free_writes_) delete write;
  std::free(padding_block_);
}

// ------------------------------------------------------------------------------ gathering

void Journal::new_block() {
  Block block;
  block.memory = config_.scratch->allocate(kMaxBlockBytes);
  block.pooled = block.memory != nullptr;
  if (!block.pooled) {
    // Scratch memory is all in use by updates that wait for this journal: never wait for them.
    block.memory = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kMaxBlockBytes));
    FFS_CHECK(block.memory != nullptr);
  }
  block.used = sizeof(BlockHeader);
  block.sequence = next_block_++;
  block.first_record = next_record_;
  gathering_.push_back(block);
  gathered_bytes_ += kBlock;
}

// What is written is small as a rule; a block of the largest size isn't kept for it until it is flushed.
void Journal::shrink(Block& block, uint32_t length) {
  constexpr uint32_t kSmall = 32 * 1024;
  if (length > kSmall) return;
  uint8_t* memory = config_.scratch->allocate(length);
  if (memory == nullptr) return;
  std::memcpy(memory, block.memory, length);
  release(block);
  block.memory = memory;
  block.pooled = true;
}

void Journal::release(Block& block) {
  if (block.pooled) {
    config_.scratch->release(block.memory);
  } else {
    std::free(block.memory);
  }
}

Writer Journal::append(size_t bytes) {
  FFS_CHECK(bytes % 8 == 0 && bytes <= kMaxBlockBytes - sizeof(BlockHeader));
  if (gathering_.empty() || gathering_.back().used + bytes > kMaxBlockBytes) new_block();
  Block& block = gathering_.back();
  uint8_t* at = block.memory + block.used;
  gathered_bytes_ += round_up(block.used + bytes, kBlock) - round_up(block.used, kBlock);
  block.used += static_cast<uint32_t>(bytes);
  block.records++;
  next_record_++;
  return Writer(at, bytes);
}

Journal::Block* Journal::find(uint64_t sequence) {
  if (!on_way_.empty() && sequence <= last_taken_) {
    const uint64_t first = on_way_.front().sequence;
    return sequence >= first ? &on_way_[sequence - first] : nullptr;
  }
  if (gathering_.empty() || sequence <= last_taken_) return nullptr;
  return &gathering_[sequence - gathering_.front().sequence];
}

void Journal::expect_data() {
  FFS_CHECK(!gathering_.empty() && gathering_.back().records > 0);
  gathering_.back().data++;
  gathering_.back().had_data = true;
}

void Journal::data_arrived(uint64_t sequence) {
  if (failed_) return;
  Block* block = find(sequence);
  if (flush_before_data && block == nullptr) return;
  FFS_CHECK(block != nullptr && block->data > 0);
  block->data--;
  begin_sync();
}

JournalPosition Journal::begin_snapshot() {
  // Left empty, the block is not written until a record comes.
  if (gathering_.empty() || gathering_.back().records > 0) new_block();
  snapshot_block_ = gathering_.back().sequence;
  snapshot_record_ = next_record_;
  snapshot_placed_ = false;
  return {0, snapshot_block_, snapshot_record_};
}

JournalPosition Journal::snapshot_position() const {
  if (snapshot_placed_) return {snapshot_offset_, snapshot_block_, snapshot_record_};
  // The block is still in memory; so are all from the first gathered one, which comes next.
  FFS_CHECK(!gathering_.empty());
  return {head_, gathering_.front().sequence, gathering_.front().first_record};
}

// Records with data always find room: their owner sees to that. (A snapshot goes by this: what it shows of
// them must be flushed.)
bool Journal::stuck() const {
  uint64_t offset, padding;
  for (const Block& block : gathering_) {
    if (block.had_data) return false;
  }
  return !busy() && anything_gathered() && !place(gathering_.front(), &offset, &padding);
}

void Journal::cut(const JournalPosition& tail) {
  tail_ = tail.offset;
}

// ------------------------------------------------------------------------------ writing a group

// Where the block goes, or false if the ring has no room. One block stays free, so that a full ring
// differs from an empty one.
bool Journal::place(const Block& block, uint64_t* offset, uint64_t* padding) const {
  uint64_t span = round_up(block.used, kBlock);
  uint64_t to_end = config_.region_bytes - head_;
  *padding = span > to_end ? to_end : 0;
  *offset = *padding != 0 ? 0 : head_;
  return used_bytes() + *padding + span + kBlock <= config_.region_bytes;
}

void Journal::write_padding(uint64_t offset, uint64_t bytes, uint64_t sequence, uint64_t record) {
  std::memset(padding_block_, 0, kBlock);
  BlockHeader header{};
  header.magic = kJournalMagic;
  header.store_id = config_.store_id;
  header.sequence = sequence;
  header.mark = flushed_;
  header.first_record = record;
  header.used_bytes = sizeof header;
  header.span_blocks = static_cast<uint32_t>(bytes / kBlock);
  header.incarnation = config_.incarnation;
  header.flags = kBlockIsPadding;
  seal_block(padding_block_, header);
  padding_in_flight_ = true;
  start_write(sequence, padding_block_, offset, kBlock);
}

void Journal::kick(bool even_if_empty) {
  if (failed_) return;
  size_t taken = 0;
  kicks_++;
  for (; taken < gathering_.size(); taken++) {
    Block& block = gathering_[taken];
    if (block.records == 0) break;  // begun by a snapshot; always the last
    uint64_t offset, padding;
    if (!place(block, &offset, &padding) || (padding != 0 && padding_in_flight_)) break;
    if (block.sequence == snapshot_block_) {
      snapshot_offset_ = head_;
      snapshot_placed_ = true;
    }
    const auto length = static_cast<uint32_t>(round_up(block.used, kBlock));
    std::memset(block.memory + block.used, 0, length - block.used);
    BlockHeader header{};
    header.magic = kJournalMagic;
    header.store_id = config_.store_id;
    header.sequence = block.sequence;
    header.mark = flushed_;
    header.first_record = block.first_record;
    header.used_bytes = block.used;
    header.span_blocks = length / kBlock;
    header.record_count = block.records;
    header.incarnation = config_.incarnation;
    seal_block(block.memory, header);
    shrink(block, length);
    block.writes = padding != 0 ? 2 : 1;
    block.kick = kicks_;
    on_way_.push_back(block);
    if (padding != 0) write_padding(head_, padding, block.sequence, block.first_record);
    start_write(block.sequence, block.memory, offset, length);
    head_ = (offset + length) % config_.region_bytes;
    last_taken_ = block.sequence;
    gathered_bytes_ -= length;
    blocks_written++;
    bytes_written += length;
  }
  gathering_.erase(gathering_.begin(), gathering_.begin() + static_cast<ptrdiff_t>(taken));
  if (taken > 0 && syncing_) groups_ahead++;
  if (even_if_empty && on_way_.size() == flushing_) {
    flush_wanted_ = true;
    begin_sync();
  }
}

void Journal::start_write(uint64_t block, uint8_t* memory, uint64_t offset, uint32_t length) {
  Write* write;
  if (free_writes_.empty()) {
    write = new Write;
    write->journal = this;
    write->op.owner = write;
    write->op.done = [](io::Op* op) { static_cast<Write*>(op->owner)->journal->write_done(op); };
  } else {
    write = free_writes_.back();
    free_writes_.pop_back();
  }
  write->block = block;
  writes_in_flight_++;
  io::Region region = config_.scratch->region_of(memory);
  config_.io->write(&write->op, config_.file, config_.region_offset + offset, memory, length, region);
}

void Journal::write_done(io::Op* op) {
  auto write = static_cast<Write*>(op->owner);
  free_writes_.push_back(write);
  writes_in_flight_--;
  if (op->memory == padding_block_) padding_in_flight_ = false;
  if (failed_) return drop_if_failed();
  if (op->result < 0) return fail(-op->result);
  Block* block = find(write->block);
  FFS_CHECK(block != nullptr && block->writes > 0);
  block->writes--;
  begin_sync();
}

// From the front: what a flush that begins now would make durable.
size_t Journal::complete_blocks() const {
  size_t complete = 0;
  for (; complete < on_way_.size(); complete++) {
    const Block& block = on_way_[complete];
    if (block.writes > 0 || (block.data > 0 && !flush_before_data)) break;
  }
  return complete;
}

// If there is something to flush and nothing is being flushed.
void Journal::begin_sync() {
  if (syncing_ || failed_) return;
  const size_t complete = complete_blocks();
  if (complete == 0 && !(flush_wanted_ && on_way_.empty())) return;
  // What was written together is flushed together: many small updates fill several blocks.
  if (complete > 0 && complete < on_way_.size()) {
    const Block& next = on_way_[complete];
    if (next.data == 0 && next.kick == on_way_[complete - 1].kick) return;
  }
  flush_wanted_ = false;
  syncing_ = true;
  flushing_ = complete;
  sync_block_ = complete > 0 ? on_way_[complete - 1].sequence : flushed_;
  syncs_started_++;
  if (!config_.flush || acknowledge_without_flush) {
    config_.io->defer(&sync_op_, 0);
  } else {
    flushes++;
    config_.io->datasync(&sync_op_, config_.file);
  }
  config_.owner->journal_written();
}

void Journal::sync_done(int32_t result) {
  syncing_ = false;
  if (failed_) return drop_if_failed();  // meanwhile
  if (result < 0) return fail(-result);
  for (; flushing_ > 0; flushing_--) {
    release(on_way_.front());
    on_way_.pop_front();
  }
  flushed_ = std::max(flushed_, sync_block_);
  if (acknowledge_with_earlier_flush) flushed_ = last_taken_;
  const uint64_t sync = syncs_started_;
  begin_sync();  // before what the owner starts now, so as not to stand behind it in the device
  config_.owner->journal_flushed(flushed_, sync);
}

// What is being written stays until it is.
void Journal::drop_if_failed() {
  if (!failed_ || writes_in_flight_ > 0) return;
  for (Block& block : on_way_) release(block);
  on_way_.clear();
  flushing_ = 0;
}

void Journal::stop() {
  failed_ = true;
  flush_wanted_ = false;
  drop_if_failed();
}

void Journal::fail(int error) {
  stop();
  config_.owner->journal_failed(error);
}

}  // namespace ffs::engine
