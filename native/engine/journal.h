// The writing half of the journal: records gather in blocks, blocks are written on request, also while a
// flush is under way, and the next flush makes all of them durable up to the first that isn't complete:
// written, with the data of all its records (docs/disk_format.md, Journal). Shard thread only. Never waits;
// when the ring is full, sealed blocks stay in memory.
#pragma once

#include <cstdint>
#include <deque>
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
  // Blocks are written and being flushed; the next ones may be written now.
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
  uint64_t taken_block() const { return last_taken_; }  // the last one that is on its way, or flushed
  // The number of the first flush that begins after now.
  uint64_t next_sync() const { return syncs_started_ + 1; }

  // The data of the record that was appended last isn't on the device yet: nothing from its block on is
  // flushed before data_arrived() of it.
  void expect_data();
  void data_arrived(uint64_t block);
  // The data that a record tells of won't come. Nothing more is flushed; the owner isn't told.
  void stop();

  // Writes what has gathered, as far as there is room; its flush begins by itself. `even_if_empty`: there
  // will be a flush, also without blocks.
  void kick(bool even_if_empty);
  // Blocks are on their way: being written, waiting for data or for their flush, or being flushed.
  bool busy() const { return !on_way_.empty() || flush_wanted_ || syncing_ || writes_in_flight_ > 0; }
  // Nothing is on its way but what is being flushed.
  bool only_flushes() const { return syncing_ && on_way_.size() == flushing_; }
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
  bool acknowledge_without_flush = false;  // canary mutants
  bool flush_before_data = false;
  bool acknowledge_with_earlier_flush = false;  // what was written ahead, when the flush before it ends

 private:
  struct Block {
    uint8_t* memory = nullptr;
    bool pooled = false;
    uint32_t used = 0;
    uint32_t records = 0;
    uint64_t sequence = 0;
    uint64_t first_record = 0;
    uint64_t kick = 0;    // the call that it was taken by
    uint32_t writes = 0;  // in flight: its own, and that of the padding before it
    uint32_t data = 0;    // records whose data isn't on the device
    bool had_data = false;
  };
  struct Write {
    io::Op op;
    Journal* journal = nullptr;
    uint64_t block = 0;
  };

  void new_block();
  void shrink(Block& block, uint32_t length);
  void release(Block& block);
  Block* find(uint64_t sequence);
  bool place(const Block& block, uint64_t* offset, uint64_t* padding) const;
  void start_write(uint64_t block, uint8_t* memory, uint64_t offset, uint32_t length);
  void write_padding(uint64_t offset, uint64_t bytes, uint64_t sequence, uint64_t record);
  void write_done(io::Op* op);
  size_t complete_blocks() const;
  void begin_sync();
  void sync_done(int32_t result);
  void drop_if_failed();
  void fail(int error);

  Config config_;
  std::vector<Block> gathering_;
  std::deque<Block> on_way_;  // taken and not known to be flushed
  size_t flushing_ = 0;       // of them, from the front: what the flush under way is for
  std::vector<Write*> free_writes_;
  io::Op sync_op_;
  uint8_t* padding_block_ = nullptr;
  uint64_t tail_;
  uint64_t head_;
  uint64_t next_block_;
  uint64_t next_record_;
  uint64_t last_taken_;  // by kick()
  uint64_t flushed_;
  uint64_t gathered_bytes_ = 0;
  uint64_t syncs_started_ = 0;
  uint64_t sync_block_ = 0;  // up to here the flush that is under way makes durable
  uint64_t kicks_ = 0;
  uint32_t writes_in_flight_ = 0;
  bool padding_in_flight_ = false;  // there is one buffer for it
  bool flush_wanted_ = false;       // without blocks
  bool syncing_ = false;
  bool failed_ = false;
  // Where the block that a snapshot begins with was placed.
  uint64_t snapshot_block_ = 0;
  uint64_t snapshot_record_ = 0;
  uint64_t snapshot_offset_ = 0;
  bool snapshot_placed_ = false;
};

}  // namespace ffs::engine
