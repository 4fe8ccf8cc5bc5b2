// Inside of ChunkStore: one object, its functions in files by what they do:
//   store_open.cc   opening, closing                    store_format.cc making a store, identities
//   format_device.cc files and block devices made ready, grown
//   load_snapshot.cc, replay.cc, judge_tail.cc, replay_apply.cc: recovery
//                    stage.cc, stage_io.cc, stage_record.cc   updates
//   read.cc, lend.cc  reads                             apply.cc         overlays into their slots
//   snapshot.cc     snapshots                           chunk_store.cc  look-ups, small records
//   install.cc      whole versions put in and taken out  release.cc      targets emptied
//   space.cc        updates that wait for a slot         compact.cc, move.cc slabs emptied
//   discard.cc      slabs given back to the device
//   access.cc       access times, use of spaces, samples
//   dedup.cc, dedup_names.cc equal chunks in one slot
#pragma once

#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/flat_map.h"
#include "engine/allocator.h"
#include "engine/chunk_store.h"
#include "engine/compact.h"
#include "engine/dedup.h"
#include "engine/granule_sums.h"
#include "engine/journal.h"
#include "engine/state.h"
#include "io/buffer_pool.h"
#include "io/device_map.h"

namespace ffs::engine {

// Texts with numbers for open, format and identify, by thread (ChunkStore::last_open_message).
Error open_error(int code, const char* what, const char* format, ...) __attribute__((format(printf, 3, 4)));

void set_open_message(std::string message);
void clear_open_message();
// Puts the path before the sentence.
Error open_at_path(const std::string& path, Error error);

Status check_format_options(const FormatOptions& options, uint64_t size_bytes, uint32_t sector_bytes);
// The valid superblock with the higher sequence, or why there is none.
Result<Superblock> choose_superblock(const uint8_t* a, const uint8_t* b, uint64_t device_bytes);
DeviceIdentity identity_of(const Superblock& super);
void seal_superblock(Superblock* super);
uint64_t unix_ms();

enum QueueMode : uint8_t { kUpdateMode = 0, kInstallMode = 1, kEraseMode = 2, kMoveMode = 3 };
enum OpKindOfStore : uint8_t { kPlainOp = 0, kStageKind = 1, kReadKind = 2 };

// A first-in first-out list of ops through StoreOp::next.
struct OpList {
  StoreOp* head = nullptr;
  StoreOp* tail = nullptr;
  size_t count = 0;
  bool empty() const { return head == nullptr; }
  void push(StoreOp* op) {
    op->next = nullptr;
    (tail != nullptr ? tail->next : head) = op;
    tail = op;
    count++;
  }
  // In the order of wait_block; almost always at the end.
  void push_by_block(StoreOp* op) {
    if (tail == nullptr || tail->wait_block <= op->wait_block) return push(op);
    StoreOp** at = &head;
    while ((*at)->wait_block <= op->wait_block) at = &(*at)->next;
    op->next = *at;
    *at = op;
    count++;
  }
  StoreOp* pop() {
    StoreOp* op = head;
    head = op->next;
    if (head == nullptr) tail = nullptr;
    op->next = nullptr;
    count--;
    return op;
  }
};

struct BusyKey {
  uint16_t target = 0;
  ChunkKey key;
  friend bool operator==(const BusyKey&, const BusyKey&) = default;
};
struct BusyKeyHash {
  size_t operator()(const BusyKey& k) const { return ChunkKeyHash{}(k.key) ^ mix64(k.target + 1ull); }
};

// Measures one stretch of the store's own work into `longest_step_us`.
class StepTimer {
 public:
  explicit StepTimer(StoreMetrics& metrics) : metrics_(metrics), start_us_(now()) {}
  ~StepTimer() {
    const uint64_t took = now() - start_us_;
    if (took > metrics_.longest_step_us) metrics_.longest_step_us = took;
  }
  StepTimer(const StepTimer&) = delete;

 private:
  static uint64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000 + static_cast<uint64_t>(time.tv_nsec) / 1'000;
  }
  StoreMetrics& metrics_;
  uint64_t start_us_;
};

struct ChunkStore::Impl final : StateListener, JournalOwner {
  Impl(io::Io& io, io::File file, const OpenOptions& options, const Mutants& mutants);
  ~Impl();

  // --- opening and closing (store_open.cc, replay.cc)
  Status begin_null();
  Status start(uint64_t device_bytes);
  Status recover();
  Status upgrade_format();
  Status close();

  // --- small things (chunk_store.cc)
  int target_index(TargetId target) const;         // -1: not here, or being released
  int slot_of_target(TargetId target) const;       // -1: not here
  void fail_target(StoreOp* op, TargetId target);  // why target_index is -1; op may be null
  void fill_info(uint32_t chunk, ChunkInfo* info) const;
  bool last_at_or_before(TargetId target, ChunkKey from, ChunkInfo* info) const;
  void fill_pending(const Pending& pending, PendingInfo* info) const;
  void fail_later(StoreOp* op, int error, const char* what);
  void finish(StoreOp* op, int error, const char* what);
  void when_durable(StoreOp* op);  // completes with the records appended so far; null: nobody waits
  void when_durable(StoreOp* op, uint64_t block);
  bool table_room(StoreOp* op);  // false: the op fails with ENOSPC
  StoreOp* next_durable();       // of durable_waiters
  bool patience_is_over() const;
  void want_flush();
  void schedule_pump();  // runs pump() in the next pass: waiting ops, applications, the journal
  void pump();
  template <typename Fixed>
  void append_simple(RecordType type, uint16_t target, const Fixed& fixed) {
    Writer writer = journal->append(simple_bytes<Fixed>());
    encode_simple(writer, type, target, fixed);
  }
  void journal_flushed(uint64_t block, uint64_t sync) override;
  void journal_written() override;
  void journal_failed(int error) override;
  bool records_wait() const;
  void release_durable(uint64_t block);
  void poison(int error);
  uint64_t snapshot_limit() const { return super.snapshot_bytes / 2 - 2 * kMaxBlockBytes; }
  std::string check_consistency() const;
  void tick(uint64_t now_us);
  bool idle() const;

  // --- slots: references of I/O in flight (chunk_store.cc)
  struct SlotUse {
    uint32_t refs = 0;
    uint8_t place_class = 0;
    bool dying = false;
  };
  struct Quarantined {
    uint64_t place;
    uint64_t block;  // the journal block whose flush frees it
    uint8_t place_class;
  };
  void ref_slot(uint64_t place);
  void unref_slot(uint64_t place);
  void slot_unused(uint64_t place, uint8_t place_class, bool shared, const SpaceKey& space) override;
  void version_committed(uint32_t chunk) override;
  void version_leaves(uint32_t chunk) override;
  void overlay_unused(uint8_t* bytes, uint32_t blocks) override;
  uint8_t* overlay_memory(uint32_t blocks);
  void quarantine_slot(uint64_t place, uint8_t place_class);
  void release_quarantine(uint64_t flushed_block);

  // --- updates (stage.cc)
  enum class Begin { started, wait, wait_room, wait_apply, failed };
  void stage(StageOp* op);
  void enqueue(StageOp* op);  // its turn among the updates of the chunk
  const char* stage_error(const StageOp& op, int* code) const;
  Begin begin_stage(StageOp* op);
  bool fenced_client(ClientId client) const;
  void arrive(StageOp* op);
  bool names_removal(const StageOp& op, const OpList& before) const;
  bool settle_base(const StageOp& op, Version* base) const;
  Begin plan(StageOp* op, int* code, const char** what);
  Begin plan_room(StageOp* op, const Image* base, uint8_t base_class, int* code, const char** what);
  void choose_path(StageOp* op, const Image* base, uint32_t chunk);
  void plan_span(StageOp* op);
  Begin claim_memory(StageOp* op, uint8_t base_class, int* code, const char** what);
  void begin_io(StageOp* op);
  void read_span(StageOp* op, uint32_t from, uint32_t to);
  void span_ready(StageOp* op);
  bool span_is_right(const StageOp* op) const;
  void build_overlay(StageOp* op);
  bool sums_are_known(const StageOp& op);
  bool learn_blocks(StageOp* op);
  uint32_t sum_by_blocks(StageOp* op, uint32_t granule);
  void remember_written(const StageOp* op);
  void sum_write(StageOp* op, uint32_t limit_from, uint32_t limit_to);
  void sum_truncate(StageOp* op);
  void start_data_writes(StageOp* op);
  void next_piece(StageOp* op);
  void fill_piece(StageOp* op);
  void stage_io_done(StageOp* op, int32_t result);
  Image image_of(StageOp* op, const Image* base) const;
  void prepared(StageOp* op);
  bool still_stands(StageOp* op);
  void record_version(StageOp* op);
  bool goes_beside(const StageOp& op) const;
  bool record_beside(StageOp* op);
  void data_written(StageOp* op, int error);
  void abandon(StageOp* op, int error, const char* what);
  void release_stage(StageOp* op);
  void leave_busy(StageOp* op);
  void leave_queue(StageOp* op);
  void name_place(StageOp* op);
  void retry_waiting();

  // --- room (space.cc)
  void note_room();
  uint64_t allocate_for(StageOp* op, uint8_t place_class, bool update);
  bool take_slot(StageOp* op, uint8_t base_class);
  Begin wait_for_room(StageOp* op, uint8_t base_class, int* code, const char** what);
  void retry_space_waiters();
  void park(StageOp* op, Begin begun);
  bool overlays_will_leave(const StageOp& op, uint32_t chunk) const;
  void retry_apply_waiters();
  Capacity capacity() const;
  bool room_for(uint32_t bytes) const;

  // --- compaction (compact.cc, move.cc)
  struct MoveWork;
  SpaceNeed compaction_need() const;
  void compact(uint32_t max_bytes);
  void step_compaction();
  void begin_round(bool urgent);
  void scan_for_victims();
  void start_moves(bool urgent);
  void end_round();
  MoveWork* move_memory();
  void free_move_memory();
  Begin start_move(uint32_t chunk);
  void move_piece(MoveWork* work);
  void move_io_done(MoveWork* work, int32_t result);
  bool move_is_right(const MoveWork& work) const;
  void record_move(MoveWork* work);
  void end_move(MoveWork* work, bool moved);
  void yield_move(OpList& queue);

  // --- discards (discard.cc)
  struct DiscardJob {
    io::Op op;
    Impl* impl = nullptr;
    uint32_t first = 0, count = 0;  // slabs
  };
  void begin_discards();
  void step_discards(bool at_once);
  void discard_done(DiscardJob* job, int32_t result);
  Status discard_free(uint64_t* discarded_bytes);
  void discard_slot(uint64_t place, uint8_t place_class);  // canary mutant

  // --- whole versions (install.cc)
  struct EraseWork;
  bool condition_holds(const StageOp& op) const;
  void install_prepared(StageOp* op);
  void erase(uint16_t target, const ChunkKey& key, StoreOp* op);
  void erase_now(uint16_t target, const ChunkKey& key);
  void end_dropped(StageOp* op);

  // --- targets (release.cc)
  struct ResetWait {
    StoreOp* op;
    uint16_t target;
    uint64_t ticket;  // updates called before this one
  };
  struct ReleaseJob {
    uint16_t target = 0;
    bool started = false;
    ChunkKey cursor;  // the last chunk that was dropped, once started
    std::vector<StoreOp*> waiters;
  };
  void reset_target(uint16_t target, StoreOp* op);
  void release_target(uint16_t target, StoreOp* op);
  bool updates_on_the_way(uint16_t target, uint64_t before_ticket) const;
  void end_resets();
  void free_dropped_tables();
  void step_release();

  // --- reads (read.cc)
  void begin(ReadOp* op);
  void read(ReadOp* op);
  void describe(ReadOp* op, const Image& image) const;
  const Image* choose_image(const ReadOp& op, uint32_t chunk, bool* pending) const;
  void plan_read(ReadOp* op, const Image& image);
  void skip_direct(ReadOp* op);
  bool begin_read(ReadOp* op);  // false: no scratch memory now
  void read_progress(ReadOp* op);
  void start_read_piece(ReadOp* op);
  void read_piece_done(ReadOp* op);
  bool piece_is_right(const ReadOp& op, uint32_t from, uint32_t to) const;
  void deliver(ReadOp* op, uint32_t from, const uint8_t* bytes, uint32_t size);
  void deliver_zeros(ReadOp* op, uint32_t from, uint32_t to);
  void deliver_overlays(ReadOp* op);
  void end_read(ReadOp* op, bool later);
  void patch(uint32_t overlay, uint32_t from, uint32_t to, uint8_t* memory) const;

  // --- reads in place (lend.cc)
  bool lies_ready(const ReadOp& op, const Image& image) const;
  bool lend(ReadOp* op, Lent* lent);
  void give_back(const Lent& lent);
  bool take_berth(uint32_t bytes, Berth* berth);
  void give_back(Berth* berth);
  bool take_over(StageOp* op);

  // --- overlays into their slots (apply.cc)
  struct ApplyJob {
    Impl* impl = nullptr;
    uint32_t chunk = 0;
    uint32_t head = 0;
    uint64_t place = 0;
    uint64_t sync = 0;
    std::vector<OverlayView> runs;  // what is written, in the order of the blocks
    std::vector<io::Op> writes;
    uint32_t in_flight = 0;
    int error = 0;
  };
  void queue_apply(uint32_t chunk);
  void pump_apply();
  ApplyJob* take_apply_job();
  void start_apply(uint32_t chunk, uint64_t place, uint32_t head);
  void list_apply_runs(uint32_t head, std::vector<OverlayView>* runs);
  void apply_written(ApplyJob* job, int32_t result);
  bool in_chain(uint32_t overlay, uint32_t head) const;
  bool apply_needs_flush() const;
  uint64_t overlay_limit() const;
  bool overlays_will_go() const;
  void apply_synced(uint64_t sync);
  void end_apply(ApplyJob* job);
  Status apply_now(uint32_t chunk);  // recovery (replay_apply.cc)
  Status apply_all_now();

  // --- snapshots (snapshot.cc)
  struct TableSlice {
    uint8_t* memory;
    uint32_t bytes;
  };
  struct SnapshotWriter {
    bool active = false;
    uint64_t id = 0;
    uint32_t area = 0;
    uint64_t offset = 0;  // in the area
    uint32_t slices = 0;
    bool last_encoded = false;  // of the chunks
    bool tables_captured = false;
    bool flushing = false;
    uint64_t wait_block = 0;
    uint64_t wait_sync = 0;
    bool cursor_started = false;  // the cursor stands on the last chunk taken
    uint16_t cursor_target = 0;
    ChunkKey cursor_key;
    std::deque<TableSlice> table_slices;
    uint8_t* chunks_memory = nullptr;  // of the slices of chunks
    uint8_t* written = nullptr;        // the slice of tables in flight
    JournalPosition position;
    Superblock next_super;
    io::Op op;
  };
  void start_snapshot();
  BlockHeader slice_header() const;
  void capture_tables();
  void next_slice();
  uint32_t encode_chunks(uint8_t* block);
  void write_slice(uint8_t* memory, uint32_t bytes);
  void snapshot_progress(uint64_t block, uint64_t sync);
  void snapshot_written();
  void snapshot_failed(int error);
  void abandon_snapshot();
  bool flushes_device() const;

  // --- use, for eviction (access.cc)
  void step_accounts();

  // --- I/O that waits (start and close only)
  Status read_now(uint64_t offset, uint8_t* memory, uint32_t bytes);
  Status write_now(uint64_t offset, const uint8_t* memory, uint32_t bytes);
  Status sync_now();

  io::Io& io;
  io::File file;
  io::Device device;                   // fd -1 if the file is somebody else's
  std::unique_ptr<io::DeviceMap> map;  // of a device that lies in memory
  OpenOptions options;
  Mutants mutants;
  Superblock super{};
  DeviceIdentity identity;
  uint64_t device_bytes_found = 0;   // at opening; the superblock says what is used
  uint64_t journal_found_bytes = 0;  // that opening replayed
  uint32_t incarnation = 0;

  std::unique_ptr<io::BufferPool> scratch;
  std::unique_ptr<io::BufferPool> overlay_pool;
  std::unique_ptr<State> state;
  std::unique_ptr<Journal> journal;
  std::unique_ptr<Allocator> allocator;

  FlatMap<uint64_t, SlotUse, NumberHash> slot_uses{256};
  std::deque<Quarantined> quarantine;
  FlatMap<BusyKey, OpList, BusyKeyHash> busy{256};
  OpList durable_waiters;              // in the order of wait_block
  uint32_t impatient_waiters = 0;      // of them
  std::deque<StageOp*> stage_waiters;  // for memory, journal room or their turn
  std::deque<StageOp*> space_waiters;  // for a slot
  std::deque<StageOp*> apply_waiters;  // until overlays of their chunk, which has many, are in its slot
  uint64_t applied = 0;                // applications that have ended
  OpList read_waiters;                 // for scratch memory
  std::deque<uint32_t> apply_queue;    // chunks
  std::vector<ApplyJob*> apply_waiting_sync;
  std::vector<ApplyJob*> free_apply_jobs, apply_done;
  std::vector<OverlayView> apply_blocks;
  GranuleSums granule_sums;
  std::vector<ResetWait> reset_waits;
  std::vector<ReleaseJob> releases;
  std::vector<bool> releasing;  // by target index
  bool accounts_unfinished = false;
  uint64_t next_ticket = 1;
  uint32_t applying = 0;      // jobs, with those that wait for their flush
  uint32_t apply_writes = 0;  // of them, in flight
  SnapshotWriter snap;
  Compaction compaction;
  Dedup dedup{*this};
  std::vector<MoveWork*> free_moves;
  uint32_t places_held = 0;   // slots that were taken and that no record names yet
  bool slabs_wanted = false;  // while waiters are retried: one before needs a slab
  bool room_came = false;     // since they were retried
  uint64_t last_gain_us = 0;  // when it last did
  uint64_t next_room_check_us = 0;
  bool discarding = false;
  uint32_t discards_in_flight = 0;
  uint32_t burials = 0;  // tables that the helper thread frees
  uint64_t discard_due_us = 0;
  int discard_error = 0;
  uint8_t* super_buffer = nullptr;

  bool poisoned = false;
  bool closing = false;
  bool replaying = true;
  bool records_beside = false;
  bool applied_now = false;         // recovery has written overlays
  uint64_t heap_overlay_bytes = 0;  // of overlays made by replay
  bool flush_wanted = false;
  uint64_t gathered_data_bytes = 0;  // that updates have written whose records came since the last group
  bool pump_scheduled = false;
  io::Op pump_op;
  uint32_t dying_slots = 0;
  uint64_t now_us = 0;
  uint64_t last_snapshot_us = 0;
  uint64_t last_lone_flush_us = 0;
  uint32_t stages_in_flight = 0;
  uint32_t reads_in_flight = 0;
  uint32_t lent_slots = 0;
  uint64_t berth_bytes = 0;   // of slots that are kept for what is on its way
  uint32_t ops_deferred = 0;  // finished, done not yet called
  StoreMetrics counters;
};

}  // namespace ffs::engine
