// What the store knows, and how each record changes it. The same functions run when a record is
// queued and when it is replayed, so that memory after recovery can't differ from memory before
// the crash. No I/O, no clocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/flat_map.h"
#include "engine/chunk_store.h"
#include "engine/index.h"
#include "engine/record.h"

namespace ffs::engine {

struct RetryKey {
  uint16_t target = 0;
  ClientId client;
  ChainId chain;
  uint32_t channel = 0;
  friend bool operator==(const RetryKey&, const RetryKey&) = default;
};
struct RetryKeyHash {
  size_t operator()(const RetryKey& k) const {
    return mix64(k.client.value ^
                 mix64(k.chain.value ^ (uint64_t{k.channel} << 32) ^ (uint64_t{k.target} << 16)));
  }
};
struct SpaceKey {
  uint16_t target = 0;
  uint64_t space = 0;
  friend bool operator==(const SpaceKey&, const SpaceKey&) = default;
};
struct SpaceKeyHash {
  size_t operator()(const SpaceKey& k) const { return mix64(k.space ^ mix64(k.target)); }
};
// Told what became unused. In replay nobody listens: places may clash in between then.
class StateListener {
 public:
  // `shared`: by the version that let go of it, which was of that space; others may name it still.
  virtual void slot_unused(uint64_t place, uint8_t place_class, bool shared, const SpaceKey& space) = 0;
  virtual void version_committed(uint32_t chunk) = 0;
  // The committed version of the chunk goes; it is still as it was.
  virtual void version_leaves(uint32_t chunk) = 0;
  virtual void overlay_unused(uint8_t* bytes, uint32_t blocks) = 0;

 protected:
  ~StateListener() = default;
};

// The use of one space, kept up to date by every change of its chunks that the first walk has passed.
struct SpaceAccount {
  uint64_t chunks = 0;
  uint64_t allocated_bytes = 0;
  bool started = false;  // the cursor stands on the last chunk counted
  bool complete = false;
  ChunkKey cursor;
  bool has_passed(const ChunkKey& key) const { return complete || (started && key <= cursor); }
};
struct NumberHash {
  size_t operator()(uint64_t n) const { return mix64(n); }
};

using RetryTable = FlatMap<RetryKey, RetryEntry, RetryKeyHash>;

// A change of the retry table that a record about a chunk implies. Replay of an unflushed tail
// collects them until it is known which records stay.
struct RetryChange {
  RetryKey key;
  RetryEntry entry;
};

class State {
 public:
  State(uint64_t max_chunks, uint32_t target_count, StateListener* listener);

  // --- records about chunks. The text says what contradicts (replay: corruption); null: applied.
  // The overlays' bytes are taken over by the state.
  const char* stage(uint16_t target, const StageRecord& record, std::span<const uint32_t> changed_sums,
                    std::span<const OverlayView> overlays);
  const char* commit(uint16_t target, const ChunkKey& key, const Version& version);
  const char* refuse(uint16_t target, const RefuseRecord& record);
  const char* install(uint16_t target, const StageRecord& record, std::span<const uint32_t> sums);
  void erase(uint16_t target, const ChunkKey& key);
  const char* move(uint16_t target, const MoveRecord& record);
  const char* share(uint16_t target, const ShareRecord& record);
  void drop_pendings(uint32_t chunk);  // the chunk may be gone afterwards
  // Snapshot records; the chunk first, its pendings after it.
  // `in_order`: the chunk comes after all others.
  const char* restore_chunk(uint16_t target, const ChunkView& view, std::span<const OverlayView> overlays,
                            bool in_order = false);
  const char* restore_pending(uint16_t target, const StageView& view, std::span<const OverlayView> overlays);

  // --- tables.
  void set_retry(const RetryKey& key, const RetryEntry& entry);
  void fence(ClientId client);
  void set_space(uint16_t target, uint64_t space, const SpaceEpoch& epoch);
  void expire_spaces(uint16_t target, uint64_t manager_ms);
  void set_chain_state(uint16_t target, std::span<const uint8_t> state);
  void drop_retry(uint16_t target);
  void drop_tables(uint16_t target);  // retry entries, space epochs, chain state

  // --- use.
  void touch(uint32_t chunk, uint32_t stamp);
  void account_spaces(uint16_t target, std::span<const uint64_t> wanted);
  // Goes on with counting, at most `limit` chunks. False: something is left.
  bool step_accounts(uint32_t limit);
  // Bytes of the slots that versions of the chunk name.
  uint64_t allocated_bytes(uint32_t chunk) const;

  // --- writing out.
  // The newest-first chain from `overlay` down to `until` (excluded), oldest first.
  void list_overlays(uint32_t overlay, uint32_t until, std::vector<OverlayView>* out) const;
  size_t chunk_record_bytes(uint32_t chunk) const;  // with its pendings
  // *records counts what was written.
  void encode_chunk_and_pendings(uint32_t chunk, Writer& writer, uint32_t* records) const;
  // What the chunks take in memory, rooms kept free included; the tables are apart.
  uint64_t memory_bytes() const { return index.memory_bytes(); }
  size_t table_bytes() const { return table_bytes_; }
  // Bytes that a snapshot of everything would take in records.
  uint64_t snapshot_bytes() const { return chunk_bytes_ + table_bytes_; }
  // Calls emit(bytes, encode) for each table record: the caller makes room, then encodes.
  template <typename F>
  void for_each_table_record(F emit) const;

  // --- overlays.
  uint32_t add_overlay(uint32_t next, uint32_t first_block, uint32_t blocks, uint8_t* bytes, uint64_t at = 0);
  void ref_overlay(uint32_t overlay);
  void unref_overlay(uint32_t overlay);
  // Forgets the chain from `head` on, which is in the slot now, for all versions of the chunk.
  void trim_overlays(uint32_t chunk, uint32_t head);
  void drop_overlays();  // all, at the end: nothing may be looked at afterwards
  void chain_totals(uint32_t overlay, uint32_t* count, uint32_t* bytes) const;

  // --- finding.
  Image* find_image(uint32_t chunk, const Version& version);  // committed or pending
  Pending* find_pending(uint32_t chunk, const Version& version);
  // The newest version: the last pending one, or the committed one.
  Version newest(uint32_t chunk) const;
  // Blocks of the slot that any version of the chunk ever covered.
  uint32_t slot_high(uint32_t chunk, uint64_t place) const;
  bool slot_shared(uint32_t chunk, const Image& image) const;  // by another version of the chunk
  void erase_if_empty(uint32_t chunk);                         // no version, nothing going on
  // Removes the chunk with all its versions (replay of a tail that is tried again).
  void forget_chunk(uint32_t chunk);

  Index index;
  std::vector<RetryTable> retry;          // by target index
  std::vector<RetryTable> dropped_retry;  // by drop_retry(), for the owner to free: that may take a while
  FlatMap<uint64_t, bool, NumberHash> fenced;
  FlatMap<SpaceKey, SpaceEpoch, SpaceKeyHash> spaces;
  std::vector<std::vector<uint8_t>> chain_states;
  std::vector<TargetUsage> usage;
  FlatMap<SpaceKey, SpaceAccount, SpaceKeyHash> accounts;
  uint32_t now_stamp = 0;  // what new chunks begin with (Access)
  // Where slots may lie, in blocks of the device; anywhere unless it is set.
  uint64_t first_place = 0, end_place = UINT64_MAX;
  uint64_t committed_chunks = 0;
  StateListener* listener;
  std::vector<RetryChange>* deferred_retry = nullptr;  // collects instead of applying

 private:
  class Accounting;
  void retry_change(uint16_t target, ClientId client, ChainId chain, uint32_t channel,
                    const RetryEntry& entry);
  void drop_image(uint32_t chunk, Image& image);
  const char* put_elsewhere(uint16_t target, const MoveRecord& record, bool shared);
  void commit_up_to(uint32_t chunk, size_t at);
  void add_pending(uint32_t chunk, const StageRecord& record, Image image, const Image* base,
                   std::span<const uint32_t> changed_sums, std::span<const OverlayView> overlays);
  void own_overlays(uint32_t chunk, const Pending& pending, std::vector<OverlayView>* out) const;
  void pending_done(uint32_t chunk, const Pending& pending);
  uint32_t chain_overlays(uint32_t base, std::span<const OverlayView> overlays);
  void raise_high(Image& image, std::span<const OverlayView> overlays) const;
  void account_place(uint32_t chunk, const Image& image);
  const Image* base_of(uint32_t chunk, const Version& base) const;
  const char* image_error(uint32_t chunk, const Image& image, std::span<const OverlayView> overlays) const;

  FlatMap<uint64_t, std::vector<uint8_t>, NumberHash> unknown_;  // by chunk number: trailing fields
  std::vector<OverlayView> overlay_scratch_;
  uint64_t chunk_bytes_ = 0;
  uint64_t table_bytes_ = 0;
};

template <typename F>
void State::for_each_table_record(F emit) const {
  for (uint32_t t = 0; t < chain_states.size(); t++) {
    if (chain_states[t].empty()) continue;
    emit(chain_state_bytes(chain_states[t].size()),
         [&](Writer& w) { encode_chain_state(w, static_cast<uint16_t>(t), chain_states[t]); });
  }
  fenced.for_each([&](uint64_t client, bool) {
    emit(simple_bytes<FenceRecord>(),
         [&](Writer& w) { encode_simple(w, RecordType::fence, kDeviceRecord, FenceRecord{client}); });
  });
  spaces.for_each([&](const SpaceKey& key, const SpaceEpoch& epoch) {
    emit(simple_bytes<SpaceEpochRecord>(), [&](Writer& w) {
      encode_simple(w, RecordType::space_epoch, key.target,
                    SpaceEpochRecord{key.space, epoch.least_epoch, epoch.expiry_ms});
    });
  });
  auto emit_retry = [&](const RetryKey& key, const RetryEntry& entry) {
    emit(simple_bytes<RetryRecord>(), [&](Writer& w) {
      RetryRecord record{entry.key,   entry.version,   key.client.value, entry.sequence,
                         key.channel, key.chain.value, entry.error,      static_cast<uint8_t>(entry.state),
                         {}};
      encode_simple(w, RecordType::retry, key.target, record);
    });
  };
  for (const RetryTable& table : retry) table.for_each(emit_retry);
}

}  // namespace ffs::engine
