// The seam between a shard thread and the kernel (docs/disk_format.md says what goes over it).
//
// One Io belongs to one shard thread. Every function may be called by that thread only, except
// `post` and `wake`, which may be called by any. Nothing blocks but `run_once`, the functions
// that say so, and what `wait_for` does at start.
//
// An operation is an intrusive `Op`, owned by the caller, that must stay where it is from the
// call until its `done` function is entered. `done` runs from `run_once` only, never inside the
// call that started the operation; once it is entered the Io has forgotten the op, so `done` may
// reuse or free it. There is no cancelling of reads and writes: a device op that was started
// ends. Memory that an op names must stay valid until `done`.
//
// Three backends: `uring` (io_uring), `pread` (a few threads; where io_uring is refused) and
// `sim` (io/sim.h; memory, deterministic, for crash tests). Their semantics are the same but for
// regions, which only `uring` has. A fourth, `null` (io/null_io.h), is for measuring.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace ffs::io {

constexpr uint32_t kBlockBytes = 4096;  // what O_DIRECT offsets, lengths and addresses align to
constexpr size_t kMaxRegionBytes = 1ull << 30;
constexpr size_t kClientExtentBytes = 64ull << 20;  // foreign regions are registered in such extents

enum class Backend : uint8_t { uring, pread, sim, null };
const char* backend_name(Backend backend);

// A file known to the Io (a registered file on io_uring).
struct File {
  int32_t index = -1;
  bool valid() const { return index >= 0; }
};

// Memory known to the kernel (a registered buffer): reads and writes inside it skip the pinning
// of pages. A default Region means plain memory and is always allowed.
struct Region {
  int32_t index = -1;
  bool foreign = false;  // a client's memory, which no instruction of ours may write
  bool registered() const { return index >= 0; }
};

struct Op;
using Done = void (*)(Op* op);

// What an operation works on; filled by the starting call, read-only for the owner.
enum class OpKind : uint8_t { none, read, write, datasync, discard, deferred, posted, offload };

// Whom a read or write is for. Those of the background are cut into pieces, which stand behind everything of
// clients and start when the Gate says so; without a gate all go alike.
enum class OpClass : uint8_t { client, recovery, compaction, scrub, eviction, dedup };
constexpr size_t kOpClasses = 6;

struct Op {
  Done done = nullptr;    // set by the owner
  void* owner = nullptr;  // free for the owner's use
  // >= 0: bytes moved (read, write), or 0; < 0: -errno. A read is shorter than asked only at the
  // end of the file; a write is whole or an error: the Io goes on after short results by itself.
  int32_t result = 0;

  OpClass op_class = OpClass::client;  // set by the owner before the start

  // For the Io.
  OpKind kind = OpKind::none;
  bool ended = false;      // within a piece: nothing more comes (the end of the file)
  bool at_device = false;  // counts as a large read that the device has
  int16_t file = -1;
  int16_t region = -1;
  uint32_t length = 0;
  uint32_t moved = 0;
  uint32_t piece = 0;  // bytes of the piece that the gate has let through; 0: no piece is under way
  uint64_t offset = 0;
  uint8_t* memory = nullptr;
  Op* next = nullptr;
};

// Readiness of a descriptor (a socket, a listening socket, an eventfd). `ready` runs from
// run_once with the events seen since its last run (POLLIN, POLLOUT, POLLHUP, POLLERR,
// POLLRDHUP; several events are merged). It is edge-triggered: the owner reads or writes until
// EAGAIN. After poll_remove, `ready` is not entered again except once with `removed` true, which
// is the last touch: then the Poll may be freed and the descriptor closed.
struct Poll {
  using Ready = void (*)(Poll* poll);
  Ready ready = nullptr;
  void* owner = nullptr;
  uint32_t events = 0;  // what was seen
  int error = 0;        // a positive errno if polling itself failed (then `removed` is true too)
  bool removed = false;

  // For the Io.
  int fd = -1;
  uint32_t wanted = 0;
  bool armed = false;
  bool removing = false;
  bool queued = false;
  Poll* next = nullptr;
};

// Work for the helper thread: pinning, mmap/munmap, discards, anything that may block.
// `work` runs on the helper thread and returns what becomes op.result; then `done` on the shard.
struct Offload {
  Op op;  // op.done is set by the owner; container_of(op) is this struct (it is the first member)
  int32_t (*work)(Offload* offload) = nullptr;
  Offload* next = nullptr;
};

// Decides when pieces of background operations start. Called by the shard thread, from run_once.
class Gate {
 public:
  struct Piece {
    OpClass op_class = OpClass::client;
    uint32_t bytes = 0;  // 0: nothing starts now; run_once asks again each time
  };
  // wanted: by class, what the first operation in its line still has to move; 0: none waits. The answer names
  // one of them and a multiple of kBlockBytes, or all that it wants.
  virtual Piece next(const std::array<uint32_t, kOpClasses>& wanted) = 0;
  virtual void ended(OpClass op_class, uint32_t bytes) = 0;  // that piece is over, whatever came of it

 protected:
  ~Gate() = default;
};

struct Options {
  // `pread` forces the fallback. `uring` tries io_uring and falls back with a line on stderr that
  // says why (a container without it, an old kernel). `null` needs io_uring.
  Backend backend = Backend::uring;
  uint32_t entries = 1024;  // ops in flight; more than that wait inside the Io, none is refused
  uint32_t max_files = 64;
  uint32_t max_regions = 4096;
  uint32_t pread_threads = 4;
  bool sqpoll = false;
};

class Io {
 public:
  // Creates the backend on the calling thread, which becomes the shard thread.
  static Result<std::unique_ptr<Io>> create(const Options& options);
  virtual ~Io() = default;  // no op may be in flight
  Io(const Io&) = delete;
  Io& operator=(const Io&) = delete;

  virtual Backend backend() const = 0;
  // Why the fallback was taken; empty if it was not.
  const std::string& fallback_reason() const { return fallback_reason_; }

  // --- files. The descriptor stays the caller's: it must be open until remove_file.
  virtual Result<File> add_file(int fd) = 0;
  virtual void remove_file(File file) = 0;  // nothing in flight on it
  // The file lies in memory, and its bytes are mapped there until remove_file: for system calls.
  virtual void note_mapping(File, const uint8_t*, uint64_t /*bytes*/) {}
  // From here on nothing moves beyond that byte of the file, and nothing is flushed. Of `null` only: ENOTSUP.
  virtual Status make_null(File file, uint64_t from);

  // --- device operations. Offsets, lengths and addresses are multiples of kBlockBytes where the
  // file was opened with O_DIRECT. `region` says that [memory, memory + length) lies inside that
  // region; the address is then the one of the mapping it was registered with, which need not be
  // mapped any more if the region is `foreign`.
  virtual void read(Op* op, File file, uint64_t offset, void* memory, uint32_t length,
                    Region region = {}) = 0;
  virtual void write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length,
                     Region region = {}) = 0;
  // Durability of every write that completed before this call.
  virtual void datasync(Op* op, File file) = 0;
  // Gives a range back to the device (a hole in a file, BLKDISCARD on a block device). Runs on
  // the helper thread. Content afterwards: zeros in a file, undefined on a device.
  virtual void discard(Op* op, File file, uint64_t offset, uint64_t length) = 0;

  // The gate must outlive the Io, or be taken out again with null: then all that waits starts.
  void set_gate(Gate* gate) { gate_ = gate; }
  // Operations of a class that were started and aren't over, whether they wait or move.
  uint32_t background_ops(OpClass op_class) const { return background_[index_of(op_class)].ops; }
  // Some piece waits for the gate.
  bool background_waits() const;

  // --- readiness.
  virtual void poll_add(Poll* poll, int fd, uint32_t events) = 0;
  virtual void poll_remove(Poll* poll) = 0;

  // --- regions. Registration pins memory and may take about 1 ms for 64 MiB of populated pages
  // and 100 ms for unpopulated ones: populate on the helper thread first (`offload`, madvise
  // MADV_POPULATE_WRITE). Errors: ENOTSUP (this backend has none), ENOMEM or EPERM (the user's
  // RLIMIT_MEMLOCK), ENOSPC (table full), EINVAL (not page-aligned, over kMaxRegionBytes): the
  // caller then goes without.
  virtual Result<Region> register_region(void* base, size_t length) = 0;
  // No *new* op may name the region afterwards; ops in flight keep their pages until they end.
  virtual void unregister_region(Region region) = 0;

  // --- queues.
  // Runs op->done with `result` in the next pass of run_once.
  void defer(Op* op, int32_t result);
  // The same, from any thread, waking the shard. op->result must be set by the caller.
  void post(Op* op);
  // Makes a sleeping run_once return soon; from any thread, and from signal handlers.
  void wake();
  // Hands `offload` to the helper thread (one a Io, started at first use).
  void offload(Offload* offload);

  // One pass: submits what was prepared (of much data some goes to the kernel when it is started), waits up
  // to `timeout_us` (0: not at all, < 0: until something happens) if nothing is ready, collects completions,
  // then runs the functions that were queued before the running began (those queued by them run in the next
  // pass). Returns how many it ran. Reports of the kernel that can't be attributed to an op end the process.
  virtual int run_once(int64_t timeout_us) = 0;
  // True if the next run_once would run something without waiting.
  bool has_ready() const { return ready_head_ != nullptr; }

  // Device operations started and not yet done.
  uint32_t in_flight() const { return in_flight_; }

 protected:
  Io();
  struct Shared;                          // what `post`, `wake` and the helper thread touch
  void complete(Op* op, int32_t result);  // queues done
  void queue_poll(Poll* poll);
  int run_ready();
  int event_fd() const;    // readable after post and wake
  void take_posted();      // moves posted ops into the ready queue
  bool start_helper();     // under the lock; false: no thread is to be had
  void stop_helper();      // joins the helper thread; derived destructors call it first
  void hand_back(Op* op);  // a finished op, from any thread
  void start_discard(Op* op, int fd, uint64_t offset, uint64_t length);

  // Background operations, for the backends. hold_back: true, the op stands in its line. next_piece: one that
  // is to start now, with op->piece set; null: none. end_piece: its piece is over; end_background: it is.
  bool hold_back(Op* op);
  Op* next_piece();
  void end_piece(Op* op);
  void wait_again(Op* op);  // for its next piece, first in its line
  void end_background(Op* op);
  static int32_t discard_now(int fd, uint64_t offset, uint64_t length);

  struct Line {
    Op* head = nullptr;
    Op* tail = nullptr;
    uint32_t ops = 0;  // waiting or under way
  };
  static constexpr size_t index_of(OpClass op_class) { return static_cast<size_t>(op_class); }

  Gate* gate_ = nullptr;
  std::array<Line, kOpClasses> background_{};
  Op* ready_head_ = nullptr;
  Op* ready_tail_ = nullptr;
  Poll* polls_head_ = nullptr;
  uint32_t in_flight_ = 0;
  std::string fallback_reason_;
  std::unique_ptr<Shared, void (*)(Shared*)> shared_;
};

// Runs the Io until `op` (started by the caller with done == mark_done) is over; returns its
// result. For start-up and tools only: it also runs other completions.
int32_t wait_for(Io& io, Op& op);
void mark_done(Op* op);  // a `done` function for wait_for

}  // namespace ffs::io
