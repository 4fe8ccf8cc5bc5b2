// The writing half of the journal: records gather in blocks, a group of blocks is written at once,
// one flush makes it durable, meanwhile the next group gathers (docs/disk_format.md, Journal). That one
// may be written before the flush is over, on request; its own flush begins when the other has ended.
// Shard thread only. Never waits; when the ring is full, sealed blocks stay in memory.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/format.h"
#include "engine/record.h"
#include "io/buffer_pool.h"
#include "io/io.h"

namespace ffs::engine {

class JournalOwner {
 public:
  // All records in blocks up to `block`, and all data whose writes had completed when flush number
  // `sync` began, are durable.
  virtual void journal_flushed(uint64_t block, uint64_t sync) = 0;
  // A group is written and being flushed: the next one may be written now (may_write_ahead).
  virtual void journal_written() = 0;
  virtual void journal_failed(int error) = 0;  // once; nothing more becomes durable

 protected:
  ~JournalOwner() = default;
};

// A place in the journal: where the next block goes, and the numbers that it and its first record have.
struct JournalPosition {
  uint64_t offset = 0;  // in the region
  uint64_t block = 1;
  uint64_t record = 1;
};

class Journal {
 public:
  struct Config {
    io::Io* io = nullptr;
    io::File file;
    io::BufferPool* scratch = nullptr;
    JournalOwner* owner = nullptr;
    uint64_t region_offset = 0;
    uint64_t region_bytes = 0;
    uint64_t store_id = 0;
    uint32_t incarnation = 0;
    bool flush = true;  // false: the device has no volatile cache
  };
  // `tail`: where replay would start; `head`: where writing goes on. The blocks before head.block are
  // all flushed.
  Journal(const Config& config, const JournalPosition& tail, const JournalPosition& head);
  ~Journal();
  Journal(const Journal&) = delete;

  // Room for one record of `bytes` (at most kMaxBlockBytes - 64), to be filled before anything else
  // is called. Numbers it.
  Writer append(size_t bytes);
  uint64_t last_record() const { return next_record_ - 1; }
  // The block of the last appended record, or the last one flushed.
  uint64_t last_block() const {
    if (gathering_.empty()) return last_taken_;
    return gathering_.back().sequence - (gathering_.back().records == 0 ? 1 : 0);
  }
  uint64_t flushed_block() const { return flushed_; }
  uint64_t taken_block() const { return last_taken_; }  // the last one of the groups that are on their way
  // The number of the first flush that begins after now.
  uint64_t next_sync() const { return syncs_started_ + 1; }

  // Starts a group if none is being written, or waits for its flush, and there is something to write;
  // `even_if_empty`: a flush without blocks.
  void kick(bool even_if_empty);
  // A group is on its way: being written, waiting for its flush, or being flushed.
  bool busy() const { return pending_ || syncing_ || writes_in_flight_ > 0; }
  // One is being flushed, and kick() would write the next meanwhile.
  bool may_write_ahead() const { return syncing_ && !pending_ && writes_in_flight_ == 0; }
  // There are records, but no room in the ring until it is cut.
  bool stuck() const;
  bool anything_gathered() const { return last_block() > last_taken_; }

  // Starts a new block, so that the next record is its first; returns where replay would start for it.
  // Its offset is known later: snapshot_position().
  JournalPosition begin_snapshot();
  JournalPosition snapshot_position() const;
  // The journal before `tail` isn't needed any more.
  void cut(const JournalPosition& tail);

  uint64_t used_bytes() const { return (head_ + region_bytes() - tail_) % region_bytes(); }
  uint64_t region_bytes() const { return config_.region_bytes; }
  uint64_t gathered_bytes() const { return gathered_bytes_; }
  bool failed() const { return failed_; }

  uint64_t flushes = 0;
  uint64_t groups_ahead = 0;
  uint64_t blocks_written = 0;
  uint64_t bytes_written = 0;
  bool acknowledge_without_flush = false;       // canary mutants
  bool acknowledge_with_earlier_flush = false;  // what was written ahead, when the flush before it ends

 private:
  struct Block {
    uint8_t* memory = nullptr;
    bool pooled = false;
    uint32_t used = 0;
    uint32_t records = 0;
    uint64_t sequence = 0;
    uint64_t first_record = 0;
  };
  struct Write {
    io::Op op;
    Journal* journal = nullptr;
  };

  void new_block();
  void release(Block& block);
  bool place(const Block& block, uint64_t* offset, uint64_t* padding) const;
  void start_write(uint8_t* memory, uint64_t offset, uint32_t length);
  void write_padding(uint64_t offset, uint64_t bytes, uint64_t sequence, uint64_t record);
  void write_done(io::Op* op);
  void begin_sync();
  void sync_done(int32_t result);
  void drop(std::vector<Block>& blocks);
  void fail(int error);

  Config config_;
  std::vector<Block> gathering_;
  std::vector<Block> writing_;  // of the group that is pending
  std::vector<Block> flushing_;
  std::vector<Write*> free_writes_;
  io::Op sync_op_;
  uint8_t* padding_block_ = nullptr;
  uint64_t tail_;
  uint64_t head_;
  uint64_t next_block_;
  uint64_t next_record_;
  uint64_t last_taken_;  // by a group
  uint64_t flushed_;
  uint64_t gathered_bytes_ = 0;
  uint64_t syncs_started_ = 0;
  uint64_t sync_block_ = 0;  // up to here the flush that is under way makes durable
  uint32_t writes_in_flight_ = 0;
  bool pending_ = false;  // a group whose flush hasn't begun
  bool syncing_ = false;
  bool failed_ = false;
  int write_error_ = 0;
  // Where the block that a snapshot begins with was placed.
  uint64_t snapshot_block_ = 0;
  uint64_t snapshot_record_ = 0;
  uint64_t snapshot_offset_ = 0;
  bool snapshot_placed_ = false;
};

}  // namespace ffs::engine
