// Recovery of a store: the object that lives while one is opened (replay.cc, judge_tail.cc).
#pragma once

#include <bitset>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/store_impl.h"

namespace ffs::engine {

using OrderedKey = std::pair<uint16_t, ChunkKey>;
using Granules = std::bitset<kMaxGranules>;

constexpr uint64_t kMostRecords = 1ull << 59;  // numbered in the life of a store

struct TailRecord {
  uint64_t number = 0;
  std::vector<uint8_t> bytes;
};

struct NumberedRetry {
  uint64_t number;
  RetryChange change;
};

// A slice of the snapshot: the keys up to `last` (or to the end) as of record `number`.
struct Cover {
  OrderedKey last;
  bool to_end = false;
  uint64_t number = 0;
};

struct BlockRef {
  uint64_t offset;
  uint64_t sequence;
  uint64_t first_record;
  uint32_t used_bytes;
  uint32_t record_count;
};

inline unsigned long long number_of(uint64_t n) {
  return n;
}

inline RecordView view_of(const TailRecord& record) {
  RecordView view;
  std::memcpy(&view.header, record.bytes.data(), sizeof view.header);
  view.bytes = record.bytes;
  return view;
}

inline bool about_target(const RecordView& record) {
  auto type = static_cast<RecordType>(record.header.type);
  return type == RecordType::reset_target || type == RecordType::release_target;
}

inline bool about_chunk(uint8_t type, const RecordView& record, OrderedKey* key) {
  switch (static_cast<RecordType>(type)) {
    case RecordType::stage:
    case RecordType::commit:
    case RecordType::refuse:
    case RecordType::install:
    case RecordType::erase:
    case RecordType::move:
    case RecordType::share:
      key->first = record.header.target;
      key->second = record.body().key();  // all begin with it
      return true;
    default:
      return false;
  }
}

// Writes overlays of many chunks into their slots, at start only.
class ApplyBatch {
 public:
  explicit ApplyBatch(ChunkStore::Impl& store) : s_(store) {}
  ~ApplyBatch();
  ApplyBatch(const ApplyBatch&) = delete;
  Status add(uint32_t chunk);
  Status finish();  // waits for all; then they are in their slots (not flushed) and forgotten

 private:
  static constexpr size_t kMostWrites = 128;
  struct Write {
    io::Op op;
    bool done = false;
  };
  Status fetch(uint32_t chunk);
  void write(uint32_t chunk, uint64_t place, uint32_t head);
  ChunkStore::Impl& s_;
  std::deque<Write> writes_;
  std::vector<std::pair<uint32_t, uint32_t>> heads_;  // chunk, overlay
};

class Recovery {
 public:
  explicit Recovery(ChunkStore::Impl& store) : s_(store), super_(store.super) {}
  ~Recovery() { std::free(window_); }
  Recovery(const Recovery&) = delete;

  Status load_snapshot();
  Status scan_journal();
  Status replay_flushed();
  Status judge_tail();
  Status rebuild_allocator();
  JournalPosition head() const { return head_; }
  uint32_t incarnation() const { return incarnation_; }
  bool dropped() const { return dropped_; }

 private:
  Status read_wide(uint64_t offset, uint8_t* memory, uint64_t bytes);
  Result<const uint8_t*> journal_bytes(uint64_t offset, uint64_t bytes);
  bool later_mark_at_least(uint64_t offset, uint64_t travelled, uint64_t sequence, Status* failure);
  Status load_slice(const BlockHeader& header, std::span<const uint8_t> bytes, OrderedKey* last);
  Status apply_snapshot_record(const RecordView& record, OrderedKey* last, bool in_order);
  Status apply(const RecordView& record);
  Status apply_table(const RecordView& record);
  Status apply_about_chunk(const RecordView& record, const OrderedKey& key);
  void apply_to_target(const RecordView& record, uint64_t number, bool in_tail);
  uint64_t cover_of(const OrderedKey& key) const;
  bool covered(const RecordView& record, uint64_t number) const;
  Status collect_tail(const RecordView& record, uint64_t number);
  Status judge_chunk(const OrderedKey& key, const std::vector<TailRecord>& records);
  Status try_state(const OrderedKey& key, const std::vector<uint8_t>& saved,
                   const std::vector<TailRecord>& records, size_t count, bool* right);
  Result<bool> versions_are_right(const OrderedKey& key, const std::vector<TailRecord>& records,
                                  size_t count);
  Result<bool> granules_are_right(const Image& image, const Granules& granules);
  std::span<const OverlayView> take_overlays(const OverlayView* overlays, uint32_t count);
  void give_up_overlays();
  Status corrupt(const char* what, uint64_t offset) {
    return open_error(EBADMSG, "the journal is damaged", "%s, at byte %llu of the device", what,
                      number_of(super_.journal_offset + offset));
  }

  ChunkStore::Impl& s_;
  const Superblock& super_;
  std::vector<Cover> covers_;
  uint64_t tables_number_ = 0;
  uint64_t snapshot_number_ = 0;
  std::vector<BlockRef> blocks_;
  uint64_t mark_ = 0;
  JournalPosition head_;
  uint32_t incarnation_ = 0;
  std::map<OrderedKey, std::vector<TailRecord>> tail_;
  std::vector<TailRecord> tail_tables_;
  std::vector<NumberedRetry> kept_retry_;
  bool dropped_ = false;
  std::vector<OverlayView> taken_;
  std::map<uint64_t, std::vector<uint32_t>>
      right_;  // shared slots: the checksums that they were found to have
  bool first_of_snapshot_ = true;
  bool tables_seen_ = false;
  // The block whose records are being applied, if it stays on the device until overlays are applied.
  const uint8_t* source_ = nullptr;
  uint64_t source_at_ = 0;

  static constexpr uint64_t kWindowBytes = 8ull << 20;
  uint8_t* window_ = nullptr;
  uint64_t window_from_ = 0, window_to_ = 0;
};

}  // namespace ffs::engine
