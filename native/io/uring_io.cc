#include "io/uring_io.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

namespace ffs::io {

namespace {

static_assert(alignof(Op) >= 8 && alignof(Poll) >= 8);

// Multishot readiness reports may fill the completion queue faster than ops do.
constexpr uint32_t kCompletionsPerEntry = 4;

// So much that a pass has started goes to the kernel before the pass is over: while the processor is at what
// comes next, the device works already. A system call for each MiB is nothing beside the MiB.
constexpr uint32_t kSubmitBytes = 1u << 20;

// Of large reads so much is at the device at a time, which is enough to keep one busy. The others wait here:
// a device that works through all it has before it says anything would else stand still while whoever asked
// works through all of that (docs/performance.md, Large reads in turns), and small reads stand behind less.
constexpr uint32_t kLargeRead = 256u << 10;
constexpr uint64_t kLargeAtDevice = 4u << 20;

bool is_large(const Op& op) {
  return op.kind == OpKind::read && op.op_class == OpClass::client && op.length >= kLargeRead;
}

}  // namespace

Result<std::unique_ptr<UringIo>> UringIo::create(const Options& options, std::string* reason) {
  std::unique_ptr<UringIo> io(new UringIo);
  FFS_TRY_STATUS(io->open(options, reason));
  return io;
}

Status UringIo::open(const Options& options, std::string* reason) {
  auto refused = [&](const char* step, int error) {
    *reason = std::string(step) + ": " + std::strerror(error);
    return Error::of(error, step);
  };
  io_uring_params wanted{};
  wanted.cq_entries = options.entries * kCompletionsPerEntry;
  wanted.sq_thread_idle = 50;
  const unsigned base =
      IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP | (options.sqpoll ? IORING_SETUP_SQPOLL : 0u);
  const unsigned best =
      options.sqpoll ? IORING_SETUP_SINGLE_ISSUER
                     : IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
  int rc = -EINVAL;
  for (unsigned extra : {best, 0u}) {  // kernels before 6.1 know less
    io_uring_params params = wanted;
    params.flags = base | extra;
    rc = io_uring_queue_init_params(options.entries, &ring_, &params);
    if (rc == 0 || rc != -EINVAL) break;
  }
  if (rc != 0) return refused("io_uring_setup", -rc);
  ring_made_ = true;
  if ((ring_.features & IORING_FEAT_EXT_ARG) == 0) return refused("io_uring without timed waits", ENOSYS);
  rc = io_uring_register_files_sparse(&ring_, options.max_files);
  if (rc != 0) return refused("io_uring registered files", -rc);
  fds_.assign(options.max_files, -1);
  in_memory_.assign(options.max_files, false);
  mapped_.assign(options.max_files, Mapped{});
  limit_ = options.entries;
  if (io_uring_register_buffers_sparse(&ring_, options.max_regions) == 0) {
    regions_available_ = true;
    region_used_.assign(options.max_regions, false);
    for (uint32_t i = options.max_regions; i-- > 0;) free_regions_.push_back(static_cast<int32_t>(i));
  }
  arm_wake();
  return ok_status();
}

UringIo::~UringIo() {
  stop_helper();
  if (!ring_made_) return;
  FFS_CHECK(in_kernel_ == 0 && waiting_head_ == nullptr && large_head_ == nullptr);
  // Kernels before 6.5 let go of a file that was removed up to a second later, and so long a block device
  // would be in use for whoever opens it next; taking the whole table away waits for that.
  (void)io_uring_unregister_files(&ring_);
  io_uring_queue_exit(&ring_);
}

// ------------------------------------------------------------------------------- files, regions

Result<File> UringIo::add_file(int fd) {
  for (size_t i = 0; i < fds_.size(); i++) {
    if (fds_[i] >= 0) continue;
    int rc = io_uring_register_files_update(&ring_, static_cast<unsigned>(i), &fd, 1);
    if (rc != 1) return Error::of(rc < 0 ? -rc : EIO, "registering a file with io_uring");
    fds_[i] = fd;
    in_memory_[i] = MemoryCopies::lies_in_memory(fd);
    return File{static_cast<int32_t>(i)};
  }
  return Error::of(ENFILE, "too many files for one Io: raise max_files");
}

void UringIo::remove_file(File file) {
  int none = -1;
  FFS_CHECK(fds_[static_cast<size_t>(file.index)] >= 0);
  FFS_CHECK(io_uring_register_files_update(&ring_, static_cast<unsigned>(file.index), &none, 1) == 1);
  fds_[static_cast<size_t>(file.index)] = -1;
  mapped_[static_cast<size_t>(file.index)] = Mapped{};
  io_uring_get_events(&ring_);  // lets go of what finished requests still hold
}

Result<Region> UringIo::register_region(void* base, size_t length) {
  if (!regions_available_) return Error::of(ENOTSUP, "this kernel has no sparse table of buffers");
  if (length == 0 || length > kMaxRegionBytes || length % 4096 != 0 ||
      reinterpret_cast<uintptr_t>(base) % 4096 != 0) {
    return Error::of(EINVAL, "a region is whole pages, at most 1 GiB");
  }
  if (free_regions_.empty()) return Error::of(ENOSPC, "too many regions for one Io: raise max_regions");
  int32_t index = free_regions_.back();
  iovec memory{base, length};
  __u64 tag = 0;
  int rc = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &memory, &tag, 1);
  if (rc < 0) return Error::of(-rc, "registering memory with io_uring (RLIMIT_MEMLOCK?)");
  FFS_CHECK(rc == 1);
  free_regions_.pop_back();
  region_used_[static_cast<size_t>(index)] = true;
  return Region{index};
}

void UringIo::unregister_region(Region region) {
  FFS_CHECK(region.registered() && region_used_[static_cast<size_t>(region.index)]);
  iovec nothing{nullptr, 0};
  __u64 tag = 0;
  int rc =
      io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(region.index), &nothing, &tag, 1);
  FFS_CHECK(rc == 1);
  region_used_[static_cast<size_t>(region.index)] = false;
  free_regions_.push_back(region.index);
}

// ------------------------------------------------------------------------------- starting ops

void UringIo::read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) {
  start(op, OpKind::read, file, offset, static_cast<uint8_t*>(memory), length, region);
}

void UringIo::write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region region) {
  auto bytes = static_cast<uint8_t*>(const_cast<void*>(memory));
  start(op, OpKind::write, file, offset, bytes, length, region);
}

void UringIo::datasync(Op* op, File file) {
  start(op, OpKind::datasync, file, 0, nullptr, 0, {});
}

void UringIo::discard(Op* op, File file, uint64_t offset, uint64_t length) {
  start_discard(op, fds_[static_cast<size_t>(file.index)], offset, length);
}

void UringIo::start(Op* op, OpKind kind, File file, uint64_t offset, uint8_t* memory, uint32_t length,
                    Region region) {
  FFS_CHECK(op->done != nullptr && file.valid() && fds_[static_cast<size_t>(file.index)] >= 0);
  op->kind = kind;
  op->file = static_cast<int16_t>(file.index);
  op->region = static_cast<int16_t>(region.index);
  op->offset = offset;
  op->memory = memory;
  op->length = length;
  op->moved = 0;
  op->at_device = false;
  op->next = nullptr;
  in_flight_++;
  if (hold_back(op)) return;
  if (take_copy(op, file, region.foreign) || waits_for_device(op)) return;
  if (waiting_head_ == nullptr && prepare(op)) return;
  wait_in_line(op);
}

void UringIo::wait_in_line(Op* op) {
  op->next = nullptr;
  (waiting_tail_ != nullptr ? waiting_tail_->next : waiting_head_) = op;
  waiting_tail_ = op;
}

void UringIo::to_device(Op* op) {
  op->at_device = true;
  large_bytes_ += op->length;
}

// Not every large read was counted: what a pipe leaves off comes past the line (uring_pipe.cc).
void UringIo::from_device(Op* op) {
  if (std::exchange(op->at_device, false)) large_bytes_ -= op->length;
}

// True: the op stands in the line of large reads.
bool UringIo::waits_for_device(Op* op) {
  if (!is_large(*op)) return false;
  if (large_head_ == nullptr && (large_bytes_ == 0 || large_bytes_ + op->length <= kLargeAtDevice)) {
    to_device(op);
    return false;
  }
  op->next = nullptr;
  (large_tail_ != nullptr ? large_tail_->next : large_head_) = op;
  large_tail_ = op;
  return true;
}

// What the device has room for again goes there at once: it may have nothing to do.
void UringIo::prepare_large() {
  if (large_head_ == nullptr) return;
  while (large_head_ != nullptr) {
    Op* op = large_head_;
    if (large_bytes_ > 0 && large_bytes_ + op->length > kLargeAtDevice) break;
    large_head_ = op->next;
    if (large_head_ == nullptr) large_tail_ = nullptr;
    to_device(op);
    if (waiting_head_ != nullptr || !prepare(op)) wait_in_line(op);
  }
  if (prepared_bytes_ > 0) submit();
}

io_uring_sqe* UringIo::entry() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe != nullptr) return sqe;
  submit();
  return io_uring_get_sqe(&ring_);
}

// What the kernel doesn't take now goes with the next call.
void UringIo::submit() {
  prepared_bytes_ = 0;
  int rc = io_uring_submit(&ring_);
  if (rc < 0 && rc != -EBUSY && rc != -EAGAIN && rc != -EINTR) {
    std::fprintf(stderr, "ffs: io_uring submit: %s\n", std::strerror(-rc));
    FFS_CHECK(false);
  }
}

bool UringIo::prepare(Op* op) {
  if (in_kernel_ >= limit_) return false;
  io_uring_sqe* sqe = entry();
  if (sqe == nullptr) return false;
  uint64_t at = op->offset + op->moved;
  uint8_t* memory = op->memory + op->moved;
  uint32_t left = op->piece > 0 ? op->piece : op->length - op->moved;
  switch (op->kind) {
    case OpKind::read:
      if (op->region >= 0) {
        io_uring_prep_read_fixed(sqe, op->file, memory, left, at, op->region);
      } else {
        io_uring_prep_read(sqe, op->file, memory, left, at);
      }
      break;
    case OpKind::write:
      if (op->region >= 0) {
        io_uring_prep_write_fixed(sqe, op->file, memory, left, at, op->region);
      } else {
        io_uring_prep_write(sqe, op->file, memory, left, at);
      }
      break;
    default:
      FFS_CHECK(op->kind == OpKind::datasync);
      io_uring_prep_fsync(sqe, op->file, IORING_FSYNC_DATASYNC);
      break;
  }
  sqe->flags |= IOSQE_FIXED_FILE;
  io_uring_sqe_set_data64(sqe, reinterpret_cast<uint64_t>(op) | kTagOp);
  in_kernel_++;
  prepared_bytes_ += left;
  if (prepared_bytes_ >= kSubmitBytes) submit();
  return true;
}

void UringIo::prepare_waiting() {
  while (unarmed_ != nullptr) {
    Poll* poll = unarmed_;
    unarmed_ = poll->next;
    poll->next = nullptr;
    arm(poll);
    if (unarmed_ == poll) break;  // still no entry
  }
  while (waiting_head_ != nullptr) {
    Op* op = waiting_head_;
    Op* next = op->next;
    if (!prepare(op)) return;
    waiting_head_ = next;
    if (next == nullptr) waiting_tail_ = nullptr;
  }
}

// Behind what clients have started since the last pass.
void UringIo::prepare_background() {
  while (waiting_head_ == nullptr) {
    Op* piece = next_piece();
    if (piece == nullptr) return;
    if (!prepare(piece)) wait_in_line(piece);
  }
}

// ------------------------------------------------------------------------------- readiness

void UringIo::poll_add(Poll* poll, int fd, uint32_t events) {
  FFS_CHECK(poll->ready != nullptr);
  poll->fd = fd;
  poll->wanted = events;
  poll->events = 0;
  poll->error = 0;
  poll->removed = poll->removing = poll->queued = poll->armed = false;
  arm(poll);
}

void UringIo::arm(Poll* poll) {
  io_uring_sqe* sqe = entry();
  if (sqe == nullptr) {
    poll->next = unarmed_;
    unarmed_ = poll;
    return;
  }
  io_uring_prep_poll_multishot(sqe, poll->fd, poll->wanted);
  io_uring_sqe_set_data64(sqe, reinterpret_cast<uint64_t>(poll) | kTagPoll);
  poll->armed = true;
}

void UringIo::poll_remove(Poll* poll) {
  FFS_CHECK(!poll->removing && !poll->removed);
  poll->removing = true;
  if (!poll->armed) {
    for (Poll** at = &unarmed_; *at != nullptr; at = &(*at)->next) {
      if (*at != poll) continue;
      *at = poll->next;
      break;
    }
    poll->removed = true;
    queue_poll(poll);
    return;
  }
  io_uring_sqe* sqe = entry();
  while (sqe == nullptr) {  // the kernel's completion queue is full: make room
    submit_and_wait(0, 0);
    collect();
    if (!poll->armed) return;  // its last report came just now
    sqe = entry();
  }
  // A cancellation, not a poll removal: that one fails (EALREADY) while a report of the poll is
  // on its way, and the poll would stay for ever.
  io_uring_prep_cancel64(sqe, reinterpret_cast<uint64_t>(poll) | kTagPoll, 0);
  io_uring_sqe_set_data64(sqe, kTagIgnored);
}

void UringIo::poll_event(Poll* poll, const io_uring_cqe& completion) {
  if ((completion.flags & IORING_CQE_F_MORE) == 0) poll->armed = false;
  if (completion.res >= 0) {
    poll->events |= static_cast<uint32_t>(completion.res);
  } else if (!poll->removing && completion.res != -ECANCELED) {
    poll->error = -completion.res;
    poll->removed = poll->removing = true;
  }
  if (!poll->armed) {
    if (poll->removing) {
      poll->removed = true;
    } else {
      arm(poll);  // the kernel ended the series (its queue was full); the readiness stays
    }
  }
  if (poll->removed || !poll->removing) queue_poll(poll);
}

void UringIo::arm_wake() {
  io_uring_sqe* sqe = entry();
  if (sqe == nullptr) return;  // run_once tries again
  io_uring_prep_poll_multishot(sqe, event_fd(), POLLIN);
  io_uring_sqe_set_data64(sqe, kTagWake);
  wake_armed_ = true;
}

// ------------------------------------------------------------------------------- completions

void UringIo::finished(Op* op, int32_t result) {
  in_kernel_--;
  const bool background = op->piece > 0;
  if (background) end_piece(op);
  bool moves = op->kind == OpKind::read || op->kind == OpKind::write;
  if (result == -EINTR || result == -EAGAIN) {
    result = 0;
  } else if (result < 0 || !moves) {
    if (background) end_background(op);
    from_device(op);
    in_flight_--;
    complete(op, result);
    return;
  } else {
    op->moved += static_cast<uint32_t>(result);
    // Nothing more, or an odd piece: the end of the file. Of a write that is a failed device.
    bool ended = result == 0 || op->moved % 512 != 0;
    if (op->moved == op->length || ended) {
      if (background) end_background(op);
      from_device(op);
      in_flight_--;
      bool failed = op->kind == OpKind::write && op->moved != op->length;
      complete(op, failed ? -EIO : static_cast<int32_t>(op->moved));
      return;
    }
  }
  if (background) return wait_again(op);
  op->next = waiting_head_;
  waiting_head_ = op;
  if (waiting_tail_ == nullptr) waiting_tail_ = op;
}

void UringIo::collect_one(const io_uring_cqe& completion) {
  uint64_t data = completion.user_data;
  switch (data & kTagMask) {
    case kTagOp:
      finished(reinterpret_cast<Op*>(data), completion.res);
      break;
    case kTagPipe:
      pipe_read(completion.res);
      break;
    case kTagPoll:
      poll_event(reinterpret_cast<Poll*>(data & ~kTagMask), completion);
      break;
    case kTagWake: {
      uint64_t count;
      ssize_t got = ::read(event_fd(), &count, sizeof count);
      FFS_CHECK(got == sizeof count || errno == EAGAIN);
      if ((completion.flags & IORING_CQE_F_MORE) == 0) wake_armed_ = false;
      break;
    }
    default:
      break;  // the result of a poll removal: the poll's own last report says all
  }
}

void UringIo::collect() {
  unsigned head;
  unsigned count = 0;
  io_uring_cqe* completion;
  io_uring_for_each_cqe(&ring_, head, completion) {
    collect_one(*completion);
    count++;
  }
  io_uring_cq_advance(&ring_, count);
}

void UringIo::submit_and_wait(unsigned wanted, int64_t timeout_us) {
  prepared_bytes_ = 0;
  int rc;
  if (wanted == 0) {
    bool work = io_uring_sq_ready(&ring_) > 0 ||
                (IO_URING_READ_ONCE(*ring_.sq.kflags) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) != 0 ||
                (ring_.flags & IORING_SETUP_TASKRUN_FLAG) == 0;
    if (!work) return;
    rc = io_uring_submit_and_get_events(&ring_);
  } else if (timeout_us < 0) {
    rc = io_uring_submit_and_wait(&ring_, 1);
  } else {
    __kernel_timespec limit{timeout_us / 1000000, (timeout_us % 1000000) * 1000};
    io_uring_cqe* completion;
    rc = io_uring_submit_and_wait_timeout(&ring_, &completion, 1, &limit, nullptr);
  }
  if (rc < 0 && rc != -ETIME && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
    std::fprintf(stderr, "ffs: io_uring enter: %s\n", std::strerror(-rc));
    FFS_CHECK(false);
  }
}

void UringIo::run_memory_copies() {
  run_pipe_copies();
  if (memory_copies_.empty()) return;
  if (io_uring_sq_ready(&ring_) > 0) submit();  // the kernel works meanwhile
  memory_copies_.run([this](Op* op, int32_t result) {
    in_flight_--;
    complete(op, result);
  });
}

int UringIo::run_once(int64_t timeout_us) {
  if (!wake_armed_) arm_wake();
  prepare_waiting();
  prepare_background();
  take_posted();
  run_memory_copies();
  bool ready = has_ready() || polls_head_ != nullptr || io_uring_cq_ready(&ring_) > 0;
  submit_and_wait(ready || timeout_us == 0 ? 0 : 1, timeout_us);
  collect();
  prepare_large();
  take_posted();
  prepare_waiting();
  return run_ready();
}

}  // namespace ffs::io
