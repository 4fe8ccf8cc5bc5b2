// A chunk store on one device: the durable half of every replica whose target lives there
// (docs/disk_format.md).
//
// Threads: one shard thread, the one that owns the Io. Nothing here is called from another.
// Blocking: `format`, `open` and `close` run the Io until they are done; nothing else blocks.
// Operations are intrusive: the caller owns the op, fills the fields marked "in", and must keep it
// (and the memory that it names) in place until its `done` is entered. `done` runs from
// Io::run_once, never inside the starting call, and may start further operations. Ops that find
// no room (journal, scratch memory, another update of the same chunk) wait inside the store in
// the order of their arrival; waiting is never turned into an error.
//
// Errors are positive errno numbers in `op.error` (0: success) with a static text in `op.what`:
//   ENOENT    no such chunk or version          EEXIST   that version is there already
//   ESTALE    base is neither committed nor pending, or it was dropped meanwhile
//   ENOSPC    no room on the device (max_chunks and snapshot room count too); nothing is changed
//   EINVAL    a bad argument                    EBADMSG  a granule failed its checksum
//   EBUSY     a chunk has 64 pending versions already, or the target is being released
//   ECANCELED an install whose condition doesn't hold; nothing is changed
//   EIO       the device failed, or the store is poisoned (`metrics().poisoned`): a write or flush
//             of the journal failed, so that nothing can be promised until a restart
//
// Versions and identities are never invented here: they are the caller's (docs/craq.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "engine/store_report.h"
#include "io/device.h"
#include "io/io.h"

namespace ffs::engine {

constexpr uint32_t kMaxTargets = 128;  // a device
constexpr uint32_t kMaxChainStateBytes = 4096;
constexpr uint32_t kDeferredBytes = 64 * 1024;  // larger overwrites are copy-on-write

// ---------------------------------------------------------------------------------- vocabulary

enum class UpdateKind : uint8_t {
  write = 1,     // bytes [offset, offset + length) of the chunk become `data`; bytes between the
                 // base's end and `offset` become zeros; creates the chunk if base is none
  truncate = 2,  // the chunk becomes `length` bytes: cut, or extended with zeros
  remove = 3,    // the chunk ceases to exist
  replace = 4,   // the whole chunk becomes `data` (create-if-absent, whole writes, transfers)
};

constexpr uint8_t kFlagPinned = 1;      // not evicted
constexpr uint8_t kFlagSharedSlot = 2;  // of versions in the store only: callers never see it

// What a version carries besides its bytes. `tag`: up to 16 bytes set at creation (a KV block
// keeps the second half of its key there). `expiry`: manager time in ms, 0 = none.
struct Attributes {
  uint64_t expiry_ms = 0;
  uint8_t flags = 0;
  uint8_t role = 0;   // 0: data; 1 is kept for parity
  uint8_t codec = 0;  // 0: plain. Another codec's bytes are opaque: only `replace` may carry them
  uint8_t tag_bytes = 0;
  std::array<uint8_t, kMaxTagBytes> tag{};
};

// A committed chunk. `length` is what a reader sees; `stored_length` bytes are on the device
// (fewer after an extension with zeros; the encoded size if codec != 0).
struct ChunkInfo {
  ChunkKey key;
  Version version;  // none: the chunk has only pending versions
  uint32_t length = 0;
  uint32_t stored_length = 0;
  Attributes attributes;
  // CRC32C by granule of 64 KiB, the last one over what is left. Points into the store; valid
  // until the next call of a non-const function or of run_once.
  std::span<const uint32_t> checksums;
  uint32_t pending_count = 0;
};

// A version that is staged and not yet committed or refused, oldest first.
struct PendingInfo {
  Version version;
  Version base;
  UpdateKind kind = UpdateKind::write;
  uint32_t write_offset = 0;  // as given (write, replace)
  uint32_t write_length = 0;
  uint32_t length = 0;  // of the chunk in this version; 0 for remove
  uint32_t stored_length = 0;
  Attributes attributes;
  UpdateIdentity identity;
  ChainId chain;
  uint64_t space_epoch = 0;
  bool durable = false;                 // its StageOp has completed
  bool arriving = false;                // its data isn't on the device: it can't be read or committed yet
  std::span<const uint32_t> checksums;  // like ChunkInfo's
};

enum class RetryState : uint8_t { pending = 1, done = 2, refused = 3 };

struct RetryEntry {
  uint64_t sequence = 0;
  ChunkKey key;
  Version version;
  RetryState state = RetryState::pending;
  uint32_t error = 0;  // of a refusal: the positive code that the client is given
};

struct SpaceEpoch {
  uint64_t least_epoch = 0;  // updates that carry less are refused by the caller
  uint64_t expiry_ms = 0;    // manager time after which the entry may be dropped; 0: never
};

// ---------------------------------------------------------------------------------- operations

class ChunkStore;
class ApplyBatch;
class Recovery;
struct StoreOp;
using StoreDone = void (*)(StoreOp* op);

// The base of all ops, and by itself the op of `refuse`, `fence`, `flush` and the like.
struct StoreOp {
  StoreDone done = nullptr;  // in; may be null where a function says so
  void* owner = nullptr;     // free for the owner's use
  int error = 0;             // out
  const char* what = nullptr;
  // In: whom its reads and writes of data are for (io/io.h, Gate). Records are always of clients.
  io::OpClass op_class = io::OpClass::client;

  // For the store.
  uint8_t store_kind = 0;
  void* store = nullptr;
  StoreOp* next = nullptr;
  uint64_t wait_block = 0;
  io::Op io;
};

// Where the bytes of a read go that the device can't deliver directly: the ends of unaligned
// ranges, zeros, small updates that are still in the journal. Called on the shard thread, in any
// order; what a later call puts at the same place replaces the earlier. `at` counts from the start
// of the read. Returns 0 or a positive errno, which becomes the op's.
struct Sink {
  virtual int put(uint32_t at, const uint8_t* bytes, uint32_t size) = 0;

 protected:
  ~Sink() = default;
};

struct ReadOp : StoreOp {
  // in
  TargetId target;
  ChunkKey key;
  // none: the committed version. Else: the newest committed version if it is at least this, else
  // the pending version of exactly this number, else ENOENT (docs/craq.md, A read).
  Version at_least;
  bool exact_version = false;  // only `at_least` itself, committed or pending, else ENOENT
  uint32_t offset = 0;         // in the chunk; at or past its end: 0 bytes, no error
  uint32_t length = 0;         // cut at the end of the chunk
  // Destination of byte `offset`. Whole blocks of 4 KiB go straight from the device if
  // `memory - offset` is a multiple of 4096; the rest is copied. With a `sink`, `memory` is never
  // touched by the processor (it may be unmapped) and is used for device reads into `region`
  // only, so without a registered region everything goes through the sink. With neither region nor
  // sink, memory is plain memory or a pool buffer.
  uint8_t* memory = nullptr;
  io::Region region;
  Sink* sink = nullptr;
  bool verify_partial = false;  // granules that the range covers in part are read whole and checked
  bool verify_whole = false;    // whole granules are checked too (scrub; costs a pass over the bytes
                                // through scratch memory)
  // Room for (length / 64 KiB + 2) checksums, or null.
  uint32_t* checksums = nullptr;

  // out
  Version version;
  bool pending = false;  // the version read is a pending one
  uint32_t chunk_length = 0;
  uint32_t readable_length = 0;  // where reads end: with codec != 0 the stored length
  uint32_t read_length = 0;
  Attributes attributes;
  // checksums[i] is that of granule (first_granule + i), for the granules wholly inside the range
  // (the chunk's last granule counts as whole if the range reaches the chunk's end).
  uint32_t first_granule = 0;
  uint32_t granule_count = 0;

  // For the store.
  struct Private {
    uint64_t place = 0;    // referenced until the end
    uint32_t overlay = 0;  // referenced until the end
    uint32_t stored = 0, readable = 0;
    uint32_t from = 0, to = 0;                // the range, cut at the chunk's end
    uint32_t direct_from = 0, direct_to = 0;  // of it, what the device delivers by itself
    uint32_t next = 0, scratch_end = 0;       // of the rest, what is still to come
    uint32_t piece_from = 0, piece_to = 0;    // being read into scratch memory
    uint32_t scratch_bytes = 0;
    uint8_t* scratch = nullptr;
    bool verify = false;
    uint8_t in_flight = 0;
    io::Op io2;
    uint32_t sums[kMaxGranules];
  } p;
};

// Bytes of a version where they lie on a device in memory; the slot stays the version's meanwhile.
struct Lent {
  const uint8_t* bytes = nullptr;  // for system calls only (io/device_map.h)
  uint32_t length = 0;
  uint64_t offset = 0;  // on the device
  uint64_t place = 0;   // the slot
};

// A slot of a device in memory, for the bytes of a new chunk that are on their way.
struct Berth {
  uint8_t* bytes = nullptr;  // for system calls, and under base/guarded.h; null: there is none
  uint32_t length = 0;
  uint64_t place = 0;  // the slot
  uint8_t place_class = 0;
  bool taken_over = false;  // by an update: it is a version's now
};

struct StageOp : StoreOp {
  // in
  TargetId target;
  ChunkKey key;
  Version version;  // above the committed and every pending version of the chunk
  Version base;     // committed, or pending (staged or being staged before); none: no chunk
  UpdateKind kind = UpdateKind::write;
  uint32_t offset = 0;  // write
  uint32_t length = 0;  // write, replace: bytes of data; truncate: the new length
  // The bytes, valid and unchanged until `done`. They go to the device without a copy if
  // `data - offset` is a multiple of 4096 (replace: `data` itself) and, where the end isn't,
  // `tail_padded` says that the bytes up to the next multiple of 4096 are the caller's, readable
  // and zero. Otherwise the store copies what it must. It never writes into `data`.
  const uint8_t* data = nullptr;
  io::Region region;  // if data lies in registered memory
  // Where data lies already, or null: a replace that can makes that slot its own instead of writing. Valid
  // until `done`; it is given back all the same.
  Berth* berth = nullptr;
  bool tail_padded = false;
  // CRC32C of each piece of the data, cut at the chunk's granule boundaries (the first and the
  // last piece may be short). The caller has checked them against the bytes. Null: the store
  // computes them, which touches the bytes.
  const uint32_t* piece_checksums = nullptr;
  // CRC32C of each whole block of 4096 bytes of the data, where `offset` is a multiple of 4096; checked as
  // well. Null: not known. With them small overwrites of what was written a short while ago read nothing.
  const uint32_t* block_checksums = nullptr;
  Attributes attributes;         // of the new version...
  bool keep_attributes = false;  // ...or the base's
  uint32_t logical_length = 0;   // replace with codec != 0: the decoded length
  uint32_t size_hint = 0;        // the chunk is likely to grow to this: choose the slot for it
  UpdateIdentity identity;       // client 0: no retry entry
  ChainId chain;
  uint64_t space_epoch = 0;  // remembered with the pending version; not judged here
  bool commit_now = false;   // durable and committed by one record; earlier pendings are
                             // committed with it
  // For the store.
  struct Private {
    uint8_t path = 0;
    uint8_t place_class = 0xff;
    bool new_place = false;  // `place` was allocated for this update
    bool in_place = false;   // it is the berth
    bool verify_span = false;
    bool known_sums = false;  // of the granules that change in part, by block
    bool holds_base = false;
    bool base_is_removal = false;
    bool refused = false;  // by refuse(), before its record was queued
    bool dropped = false;  // with its target's pendings, or its target
    bool beside = false;   // its record is queued, its data is on the way
    uint8_t mode = 0;      // what goes through the queue of a chunk: update, install, erase
    uint64_t ticket = 0;   // in the order of the calls
    Version only_over;     // install
    bool reading = false;
    bool crowded = false;         // rebuilt only because the chunk has as many overlays as it may have
    bool waited = false;          // for commits of them, long enough
    uint64_t applied = 0;         // when it began to wait for them
    uint64_t apply_until_us = 0;  // then it waits for commits no longer; 0: it hasn't begun
    bool yielded = false;         // a move: its chunk's turn is an update's now
    bool room_update = false;     // what it waits for when there is no slot
    uint8_t room_class = 0;
    uint64_t room_since_us = 0;  // 0: it doesn't
    uint64_t room_block = 0;
    uint8_t in_flight = 0;
    uint16_t target_index = 0;
    uint64_t record_block = 0;  // beside: where the record is
    uint64_t place = 0;
    uint64_t base_place = 0;    // referenced until the end
    uint32_t base_overlay = 0;  // referenced until the end
    uint32_t base_stored = 0, base_length = 0;
    uint32_t stored = 0, new_length = 0;
    uint32_t first_changed = 0, end_changed = 0;  // granules
    uint32_t span_from = 0, span_to = 0;          // bytes of the base that are read
    uint32_t at = 0;                              // rebuild: the current piece
    uint8_t* scratch = nullptr;
    uint8_t* overlay = nullptr;
    uint32_t overlay_block = 0, overlay_blocks = 0;
    io::Op io2;
    uint32_t sums[kMaxGranules];  // of the new version
    uint32_t base_sums[kMaxGranules];
  } p;
};

// Recovery and repair: a whole version that comes from another replica.
struct InstallOp : StoreOp {
  // in
  TargetId target;
  ChunkKey key;
  Version version;
  // None: the version becomes the committed one whatever is there (older, the same, newer, nothing), and
  // all pending versions are dropped. Else, for repairs: only if the committed version is exactly this
  // one when the bytes are durable (else ECANCELED), and pending versions above `version` stay. Retry
  // entries stay as they are in both cases.
  Version only_over;
  uint32_t length = 0;  // bytes of data; with a codec the encoded ones
  // The bytes and their checksums: as in StageOp, with offset 0.
  const uint8_t* data = nullptr;
  io::Region region;
  bool tail_padded = false;
  const uint32_t* piece_checksums = nullptr;
  Attributes attributes;
  uint32_t logical_length = 0;  // with codec != 0: the decoded length
  uint32_t size_hint = 0;

  StageOp p;  // for the store
};

class RetryVisitor {
 public:
  virtual void visit(ClientId client, ChainId chain, uint32_t channel, const RetryEntry& entry) = 0;

 protected:
  ~RetryVisitor() = default;
};

class SpaceEpochVisitor {
 public:
  virtual void visit(uint64_t space, const SpaceEpoch& epoch) = 0;

 protected:
  ~SpaceEpochVisitor() = default;
};

// What replicas compare: over key, version, length, attributes and content checksums, the same wherever
// the same is stored, however it is stored (docs/disk_format.md, Digest of a chunk). Part of the wire
// contract between servers: a change of it needs another message type.
uint64_t chunk_digest(const ChunkInfo& info);

// ---------------------------------------------------------------------------------- the store

struct FormatOptions {
  Uuid cluster{};  // all zero is refused
  Uuid device{};   // all zero: drawn at random
  std::vector<TargetId> targets;
  uint64_t size_bytes = 0;     // file: size to make (0: it exists); block device: 0 = all of it
  uint64_t max_chunks = 0;     // 0: size / 256 KiB
  uint64_t journal_bytes = 0;  // 0: chosen (at least one snapshot long)
  uint32_t sector_bytes = 0;   // 0: the device's; else a block device must have these
  bool sparse = false;         // a file: don't write it through once
  bool overwrite = false;      // format whatever is there (else EEXIST if it isn't blank)
  bool only_look = false;      // refuse what would be refused, and write nothing
  bool null_data = false;      // a file: keeps records only, no chunk's bytes (docs/guides/bench.md); sparse
};

// Whether what the device has completed is lost by a power cut until it is flushed. automatic: as the kernel
// says. is_protected: it isn't (capacitors, battery), so no flush is sent (docs/faults.md, Write caches).
enum class WriteCache : uint8_t { automatic, is_volatile, is_protected };

// What was chosen for an open store.
struct CacheMode {
  bool flushes = true;     // acknowledgements wait for a flush of the device
  bool overruled = false;  // is_protected was asked for and isn't possible here
  const char* why = "";
};
CacheMode choose_cache_mode(const io::Device& device, WriteCache asked);

// Whether freed slabs are given back to the device. automatic: where the device can do it (io/device.h).
enum class Discard : uint8_t { automatic, off, on };

// Recovery found the slot of a chunk to be another's already, or none of the device's.
struct SlotClash {
  TargetId target;
  ChunkKey key;
  uint64_t place = 0;  // device block of 4 KiB
  uint8_t place_class = 0;
};

struct OpenOptions {
  Uuid cluster{};  // refused with EXDEV if the device belongs to another
  WriteCache write_cache = WriteCache::automatic;
  Discard discard = Discard::automatic;
  bool null_data = false;  // the device is one that was formatted so, and the Io is io::NullIo; else EINVAL
  size_t scratch_bytes = 64u << 20;          // the store's own buffers: journal, snapshots, bounces
  size_t overlay_bytes = 16u << 20;          // small updates that wait to be applied in place
  size_t replay_overlay_bytes = 64u << 20;   // of them in memory while the journal is replayed; the rest is
                                             // fetched from the device when it is applied
  uint32_t max_apply_in_flight = 64;         // writes
  uint32_t granule_sums = 64 * 1024;         // granules whose checksums are kept by block; 80 bytes each
  uint32_t release_step_chunks = 128;        // of release_target(), in one pass: well under a millisecond
  uint64_t write_ahead_bytes = 256 * 1024;   // of data, whose records don't wait for the flush under way
  bool records_beside_data = true;           // else after it, as on sparse files always
  uint64_t patient_flush_bytes = 16u << 20;  // of data that recovery has put in: it is flushed together
  uint64_t discard_delay_us = 500'000;       // freed slabs wait so long for their neighbours
  uint32_t max_slot_names = 65535;           // chunks that lie in one slot
  uint64_t dedup_rest_us = 10'000'000;       // between two walks over all chunks (dedup.h)
  bool compact_eagerly = false;              // for tests: empties whatever slab it can, however much is free
  // For offline checks of a copy: clashes are listed here instead of refusing the device.
  std::vector<SlotClash>* clashes = nullptr;
};

// Canary mutants, for the crash tests only: each takes one rule out (docs/faults.md).
struct Mutants {
  bool acknowledge_without_flush = false;
  bool acknowledge_with_earlier_flush = false;
  bool flush_before_data = false;
  bool replay_without_verification = false;
  bool reuse_slot_before_flush = false;
  bool discard_before_flush = false;
  bool move_ignores_waiters = false;
  bool free_shared_with_first_name = false;
};

class ChunkStore {
 public:
  // Makes a store on a file or block device. Errors: EINVAL (options, a path that is neither; no
  // targets), ENOSPC (device too small; `minimum_size_bytes` is the least), EEXIST (it isn't blank: the text
  // of last_open_message names what it holds; see overwrite), EBUSY (in use, always refused), and those
  // of io/device.h. Nothing half made: the superblocks are written last. A block device is discarded whole
  // first, and with `overwrite` no signature of what it held before is left. On return max_chunks and size
  // are in *made, if not null.
  static Status format(io::Io& io, const std::string& path, const FormatOptions& options,
                       DeviceIdentity* made = nullptr);
  // The same on an opened device (the simulated one).
  static Status format_file(io::Io& io, io::File file, uint64_t size_bytes, uint32_t sector_bytes,
                            const FormatOptions& options, DeviceIdentity* made = nullptr);
  static uint64_t minimum_size_bytes(uint64_t max_chunks = 0);

  // Who a device is, without opening a store: reads the superblocks. For a scan, also of a device in use.
  static Result<DeviceIdentity> identify(const std::string& path);
  // Takes in what a device or file has beyond its store, after it has grown, as slabs; the journal and
  // max_chunks stay. `size_bytes`, if not 0, is what a file is lengthened to first. The store must not be
  // open. Errors: those of open(); EINVAL: nothing to take in (the text has the numbers).
  static Result<DeviceIdentity> grow(const std::string& path, uint64_t size_bytes = 0);

  // Opens and recovers. Errors, each with its own text: EBUSY (in use), EXDEV (another cluster),
  // EMEDIUMTYPE (no ffs superblock), ENOTSUP (an unknown incompatible feature; the text of
  // `last_open_message` names the version that wrote it), EBADMSG (damaged: which part, at which
  // offset), ENOSPC (the device is smaller than its superblock says).
  static Result<std::unique_ptr<ChunkStore>> open(io::Io& io, const std::string& path,
                                                  const OpenOptions& options);
  static Result<std::unique_ptr<ChunkStore>> open_file(io::Io& io, io::File file, uint64_t size_bytes,
                                                       const OpenOptions& options,
                                                       const Mutants& mutants = {});
  // A sentence on why the last open, format or identify of this thread failed, with the numbers and
  // offsets that a static text can't hold.
  static const std::string& last_open_message();

  // Writes a last snapshot and releases the device. No op may be outstanding. A poisoned store
  // is only released (EIO). Destruction without close is a crash: recovery will replay.
  Status close();
  ~ChunkStore();

  // --- looking up; synchronous.
  // False if there is neither a committed nor a pending version.
  bool lookup(TargetId target, const ChunkKey& key, ChunkInfo* info) const;
  // Pending version number `index` (0 is the oldest) of the chunk.
  bool pending_at(TargetId target, const ChunkKey& key, uint32_t index, PendingInfo* info) const;
  bool find_pending(TargetId target, const ChunkKey& key, const Version& version, PendingInfo* info) const;

  // --- updates.
  // Completes when data and record are durable. The pending version is visible to lookup from
  // the moment its record is queued (durable == false until then; while `arriving`, reads of it end with
  // ENOENT). A data write that fails after that poisons the store (docs/disk_format.md, Journal). ENOSPC and
  // the other refusals leave nothing behind; the caller tells the retry table by `refuse`. Updates of one
  // chunk take effect in the order of the calls. Also sets the retry entry: pending (done if commit_now).
  void stage(StageOp* op);

  // Makes a pending version the committed one (versions below it are committed with it: their
  // retry entries become done). Takes effect in memory at once; its record goes with the next
  // group. `op` (may be null) completes when it is durable. ENOENT if the version isn't pending
  // and isn't the committed one (committing twice is allowed), EBUSY while it is arriving.
  Status commit(TargetId target, const ChunkKey& key, const Version& version, StoreOp* op = nullptr);

  // Drops a pending version if it is there, journals the refusal and sets the retry entry to
  // refused with `code` (> 0), also for an update that was never staged. Later pending versions
  // that were built on it must be named by further calls, before or after; until then they stay
  // listed and can be read. An update of that version whose stage() is still on its way ends with ESTALE.
  // Completes when durable.
  void refuse(TargetId target, const ChunkKey& key, const Version& version, const UpdateIdentity& identity,
              ChainId chain, uint32_t code, StoreOp* op);

  // --- recovery and repair.
  // Makes a whole version the committed one: see InstallOp. Completes when data and record are durable.
  // Takes its turn among the updates of the chunk; readers that have the old version keep it. The
  // condition is judged at the end as well. A refusal (ENOSPC, ECANCELED, ..) leaves nothing behind.
  void install(InstallOp* op);
  // The chunk and its pending versions cease to exist, after the updates of it that are on their way; no
  // error if there is none. Retry entries stay. Completes when durable.
  void erase(TargetId target, const ChunkKey& key, StoreOp* op);
  // Drops all pending versions and all retry entries of the target, at once in memory and by one record;
  // what is set afterwards stays. An update that is still on its way is dropped with them: its stage()
  // completes without an error, like one that was durable just before (a commit_now or an install takes
  // effect). Completes when that is durable and the updates that were on their way have ended.
  void reset_target(TargetId target, StoreOp* op);
  // Drops all that there is of a target: chunks, pending versions, retry entries, space epochs, chain
  // state. It is empty for all look-ups at once; memory and slots come back in steps. Until it completes all
  // updates of the target fail with EBUSY, and those on their way end without an error and without a trace.
  // Completes when all is durable and free again. A crash in between: all of it or nothing. May be
  // repeated at any time, also while one is going on.
  void release_target(TargetId target, StoreOp* op);

  // --- reading. The version read is pinned until `done`. ENOENT: that version isn't here; EBADMSG: it is,
  // damaged. A base that is damaged fails stage() with EBADMSG, each time anew until an install() has
  // repaired it; neither poisons the store.
  void read(ReadOp* op);
  // Where the device lies in memory: says where the bytes are instead of reading them. What the op says is
  // set as by a read that has ended; `done` isn't called, and memory, region and sink aren't used. The slot
  // is pinned until give_back(), however long that takes: overlays wait that long to go into it, so it must
  // not be long. False, and nothing has happened: the device doesn't lie in memory, or the range must be put
  // together or verified, or there is nothing to send. read() knows what to do then.
  bool lend(ReadOp* op, Lent* lent);
  void give_back(const Lent& lent);
  // The bytes, read by a system call. 0 or a positive errno.
  int copy_lent(const Lent& lent, uint8_t* to) const;
  // Where the device lies in memory: a slot for a chunk of so many bytes, before there is an update of it. It
  // is nobody else's until give_back(), even if an update took it over and its version is gone again. False:
  // the device doesn't lie in memory, or it has no room to spare for what may come to nothing.
  bool take_berth(uint32_t bytes, Berth* berth);
  void give_back(Berth* berth);

  // --- the retry table.
  bool retry_lookup(TargetId target, ClientId client, ChainId chain, uint32_t channel,
                    RetryEntry* entry) const;
  // All entries of the target. The visitor must not call the store.
  void each_retry(TargetId target, RetryVisitor& visitor) const;
  // Copies an entry (recovery of a replica). Durable on completion; op may be null. Client 0, for which
  // there are no entries: EINVAL.
  void retry_set(TargetId target, ClientId client, ChainId chain, uint32_t channel, const RetryEntry& entry,
                 StoreOp* op);
  // Drops the client's entries on all targets, and makes none for it from then on. Durable on
  // completion. Whether a fenced client's update is refused is judged where it arrives from the
  // client (the head), by `fenced`: stage() takes what a predecessor forwards, or a chain would jam.
  void fence(ClientId client, StoreOp* op);
  bool fenced(ClientId client) const;

  // --- space epochs. set: raises (never lowers) the least epoch; durable on completion.
  void set_space_epoch(TargetId target, uint64_t space, const SpaceEpoch& epoch, StoreOp* op);
  SpaceEpoch space_epoch(TargetId target, uint64_t space) const;             // {0, 0} if there is none
  void each_space_epoch(TargetId target, SpaceEpochVisitor& visitor) const;  // must not call the store
  // Drops entries whose expiry is at or before `manager_ms`.
  void expire_space_epochs(TargetId target, uint64_t manager_ms, StoreOp* op);

  // --- chain state: an opaque blob of at most kMaxChainStateBytes; durable on completion.
  void set_chain_state(TargetId target, std::span<const uint8_t> state, StoreOp* op);
  std::span<const uint8_t> chain_state(TargetId target) const;  // empty if never set

  // --- order. Chunks with a committed version only; keys compare as bytes.
  bool first_at_or_after(TargetId target, const ChunkKey& key, ChunkInfo* info) const;
  // The same with its digest.
  bool digest_at_or_after(TargetId target, const ChunkKey& key, ChunkInfo* info, uint64_t* digest) const;
  // The last one with a key below `key` (of any space of the target).
  bool last_before(TargetId target, const ChunkKey& key, ChunkInfo* info) const;
  // The last chunk of the space, committed.
  bool last_of_space(TargetId target, uint64_t space, ChunkInfo* info) const;
  // Chunks with pending versions, at or after `key` (for resending after a chain change).
  bool first_pending_at_or_after(TargetId target, const ChunkKey& key, ChunkKey* found) const;
  // Counts committed chunks of the keys [from, to], at most `limit` of them a call.
  SpaceStats range_stats(TargetId target, const ChunkKey& from, const ChunkKey& to, uint32_t limit) const;

  // --- use, for eviction. In memory; snapshots save the stamps, so a crash loses the latest ones.
  // The stamp of a manager time; 0 for 0. The other way: the beginning of the stamp's 64 ms, 0 for 0.
  uint32_t stamp_of(uint64_t manager_ms) const;
  uint64_t time_of(uint32_t stamp) const;
  // The chunk was used then. Nothing for an absent chunk, an earlier use than the last known, or stamp 0.
  // A use within kCorrelatedStamps of the last one belongs to it: it doesn't become a new one.
  void touch(TargetId target, const ChunkKey& key, uint32_t stamp);
  // A chunk begins with {stamp of its first commit, 0}, by the time that tick() was given last.
  Access access(TargetId target, const ChunkKey& key) const;
  // The chunk, which has had one use so far, was used before that as well (it was evicted meanwhile). Nothing
  // if that isn't another use than the one that is known.
  void used_before(TargetId target, const ChunkKey& key, uint32_t stamp);
  // Names the spaces of the target whose use is counted, instead of those named before. The chunks of a
  // new one are counted in steps (tick, run_once); until then space_use().ready is false.
  void account_spaces(TargetId target, std::span<const uint64_t> spaces);
  SpaceUse space_use(TargetId target, uint64_t space) const;
  // Neighbours in key order from a random place of the space on (by `seed`), wrapping inside the space;
  // each chunk once. Returns how many: fewer than out.size() if the space has no more. Costs about a
  // microsecond for each chunk.
  uint32_t sample(TargetId target, uint64_t space, uint64_t seed, std::span<ChunkSample> out) const;

  // --- the rest.
  // Completes when everything before it is durable.
  void flush(StoreOp* op);
  // Call at least every 100 ms with a monotonic clock: makes lone commit records durable (within
  // 20 ms or so), goes on with snapshots and in-place application. `manager_ms`: the manager's time, 0 if
  // unknown; new chunks get their access stamps from it.
  void tick(uint64_t now_us, uint64_t manager_ms = 0);
  // The manager's time was heard: chunks that come before the next tick are stamped with it, too. 0: not
  // known.
  void set_manager_time(uint64_t manager_ms);
  // True if nothing is in flight and nothing waits.
  bool idle() const;

  const DeviceIdentity& identity() const;
  CacheMode cache_mode() const;
  // How many bytes the device has beyond what the superblock says (ChunkStore::grow takes them in).
  uint64_t unused_bytes() const;
  bool has_target(TargetId target) const;
  Capacity capacity() const;
  TargetUsage usage(TargetId target) const;
  // Whether a new chunk of so many bytes can be stored, at once or after compaction.
  bool room_for(uint32_t bytes) const;

  // --- compaction: chunks of sparse slabs move into others of their class, so that whole slabs are free
  // for any class. Nothing of a chunk changes; readers keep the old slot; an update that comes takes its turn
  // at once.
  SpaceNeed compaction_need() const;  // cheap
  // Grants moves of so many more bytes, which run by themselves from then on, two at a time. Returns at
  // once; does nothing where nothing is to be gained.
  void compact(uint32_t max_bytes);
  // --- content deduplication: equal chunks of a space lie in one slot (docs/disk_format.md, Shared slots).
  // Names the spaces of the target for which it is wanted, instead of those named before; what is shared
  // stays so.
  void dedup_spaces(TargetId target, std::span<const uint64_t> spaces);
  bool dedup_has_work() const;  // cheap
  // Grants so many more bytes of comparing, which runs by itself from then on, two chunks at a time.
  void dedup(uint32_t max_bytes);
  // Gives all free slabs back to the device. Blocks (tools). *discarded_bytes may be null.
  Status discard_free(uint64_t* discarded_bytes);
  StoreMetrics metrics() const;

  // For tests: every slot is owned by exactly the versions that the index names, counters agree.
  // Returns an empty string or what is wrong. Blocks nothing, walks everything.
  std::string check_consistency() const;
  // For tests: starts a snapshot now if none is being written.
  void start_snapshot();

 private:
  friend class Recovery;
  friend class ApplyBatch;
  friend class OfflineStore;
  friend class Dedup;
  struct Impl;
  explicit ChunkStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ffs::engine
