// What all backends share: the ready queue, posting from other threads, the helper thread.
#include "io/io.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

#include "base/threads.h"
#include "io/null_io.h"
#include "io/pread_io.h"
#include "io/uring_io.h"

namespace ffs::io {

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::uring:
      return "uring";
    case Backend::pread:
      return "pread";
    case Backend::sim:
      return "sim";
    case Backend::null:
      return "null";
  }
  return "?";
}

struct Io::Shared {
  int event_fd = -1;
  std::mutex mutex;
  Op* posted_head = nullptr;
  Op* posted_tail = nullptr;
  std::atomic<bool> any_posted{false};

  std::condition_variable work_arrived;
  Offload* work_head = nullptr;
  Offload* work_tail = nullptr;
  bool stopping = false;
  std::thread helper;

  ~Shared() {
    if (event_fd >= 0) ::close(event_fd);
  }
};

Io::Io() : shared_(new Shared, [](Shared* shared) { delete shared; }) {
  shared_->event_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  FFS_CHECK(shared_->event_fd >= 0);
}

int Io::event_fd() const {
  return shared_->event_fd;
}

void Io::complete(Op* op, int32_t result) {
  op->result = result;
  op->next = nullptr;
  if (ready_tail_ != nullptr) {
    ready_tail_->next = op;
  } else {
    ready_head_ = op;
  }
  ready_tail_ = op;
}

void Io::queue_poll(Poll* poll) {
  if (poll->queued) return;
  poll->queued = true;
  poll->next = nullptr;
  Poll** at = &polls_head_;
  while (*at != nullptr) at = &(*at)->next;
  *at = poll;
}

void Io::defer(Op* op, int32_t result) {
  op->kind = OpKind::deferred;
  complete(op, result);
}

void Io::post(Op* op) {
  op->kind = OpKind::posted;
  hand_back(op);
}

void Io::hand_back(Op* op) {
  {
    std::lock_guard lock(shared_->mutex);
    op->next = nullptr;
    if (shared_->posted_tail != nullptr) {
      shared_->posted_tail->next = op;
    } else {
      shared_->posted_head = op;
    }
    shared_->posted_tail = op;
    shared_->any_posted.store(true, std::memory_order_release);
  }
  wake();
}

void Io::wake() {
  uint64_t one = 1;
  ssize_t written = ::write(shared_->event_fd, &one, sizeof one);
  // EAGAIN: the counter is full, so a wake-up is pending anyway.
  FFS_CHECK(written == sizeof one || errno == EAGAIN);
}

void Io::take_posted() {
  if (!shared_->any_posted.load(std::memory_order_acquire)) return;
  Op* op;
  {
    std::lock_guard lock(shared_->mutex);
    op = shared_->posted_head;
    shared_->posted_head = shared_->posted_tail = nullptr;
    shared_->any_posted.store(false, std::memory_order_release);
  }
  while (op != nullptr) {
    Op* next = op->next;
    if (op->piece > 0) {  // of the fallback's threads; io_uring ends its pieces by itself
      end_piece(op);
      if (op->result >= 0 && !op->ended && op->moved < op->length) {
        wait_again(op);
        op = next;
        continue;
      }
      end_background(op);
    }
    if (op->kind != OpKind::posted) in_flight_--;
    complete(op, op->result);
    op = next;
  }
}

// ------------------------------------------------------------------------------- the background

bool Io::hold_back(Op* op) {
  op->piece = 0;
  op->ended = false;
  if (op->op_class == OpClass::client || gate_ == nullptr) return false;
  if (op->kind != OpKind::read && op->kind != OpKind::write) return false;
  Line& line = background_[index_of(op->op_class)];
  line.ops++;
  op->next = nullptr;
  (line.tail != nullptr ? line.tail->next : line.head) = op;
  line.tail = op;
  return true;
}

bool Io::background_waits() const {
  for (const Line& line : background_) {
    if (line.head != nullptr) return true;
  }
  return false;
}

Op* Io::next_piece() {
  std::array<uint32_t, kOpClasses> wanted{};
  Gate::Piece piece;
  for (size_t i = 0; i < kOpClasses; i++) {
    const Op* first = background_[i].head;
    if (first == nullptr) continue;
    wanted[i] = first->length - first->moved;
    piece = {static_cast<OpClass>(i), wanted[i]};
  }
  if (piece.bytes == 0) return nullptr;
  if (gate_ != nullptr) piece = gate_->next(wanted);
  if (piece.bytes == 0) return nullptr;
  Line& line = background_[index_of(piece.op_class)];
  Op* op = line.head;
  FFS_CHECK(op != nullptr && piece.bytes <= op->length - op->moved);
  line.head = op->next;
  if (line.head == nullptr) line.tail = nullptr;
  op->next = nullptr;
  op->piece = piece.bytes;
  return op;
}

void Io::end_piece(Op* op) {
  if (gate_ != nullptr) gate_->ended(op->op_class, op->piece);
  op->piece = 0;
}

void Io::wait_again(Op* op) {
  Line& line = background_[index_of(op->op_class)];
  op->next = line.head;
  line.head = op;
  if (line.tail == nullptr) line.tail = op;
}

void Io::end_background(Op* op) {
  FFS_CHECK(background_[index_of(op->op_class)].ops > 0);
  background_[index_of(op->op_class)].ops--;
}

int Io::run_ready() {
  int ran = 0;
  Poll* poll = polls_head_;
  polls_head_ = nullptr;
  Op* op = ready_head_;
  ready_head_ = ready_tail_ = nullptr;
  while (poll != nullptr) {
    Poll* next = poll->next;
    poll->queued = false;
    // Removed while it waited here: the final call comes when the kernel has let go.
    if (!poll->removing || poll->removed) {
      poll->ready(poll);
      ran++;
    }
    poll = next;
  }
  while (op != nullptr) {
    Op* next = op->next;
    op->done(op);
    ran++;
    op = next;
  }
  return ran;
}

void Io::offload(Offload* offload) {
  Shared* shared = shared_.get();
  offload->op.kind = OpKind::offload;
  offload->next = nullptr;
  in_flight_++;
  std::unique_lock lock(shared->mutex);
  FFS_CHECK(!shared->stopping);
  if (!shared->helper.joinable() && !start_helper()) {
    // Without a helper nothing is queued. Doing it here may block, but it is done.
    lock.unlock();
    offload->op.result = offload->work(offload);
    hand_back(&offload->op);
    return;
  }
  if (shared->work_tail != nullptr) {
    shared->work_tail->next = offload;
  } else {
    shared->work_head = offload;
  }
  shared->work_tail = offload;
  shared->work_arrived.notify_one();
}

// False: no thread is to be had, by a limit of processes or of memory. The next offload tries again.
bool Io::start_helper() {
  Shared* shared = shared_.get();
  auto helper = start_thread([this, shared] {
    for (;;) {
      Offload* work;
      {
        std::unique_lock held(shared->mutex);
        shared->work_arrived.wait(held, [&] { return shared->stopping || shared->work_head != nullptr; });
        work = shared->work_head;
        if (work == nullptr) return;
        shared->work_head = work->next;
        if (shared->work_head == nullptr) shared->work_tail = nullptr;
      }
      work->op.result = work->work(work);
      hand_back(&work->op);
    }
  });
  if (!helper.ok()) return false;
  shared->helper = std::move(*helper);
  return true;
}

void Io::stop_helper() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->work_arrived.notify_all();
  if (shared_->helper.joinable()) shared_->helper.join();
}

namespace {
struct Discard {
  Offload offload;
  Io* io;
  Op* op;
  int fd;
  uint64_t offset, length;
};
}  // namespace

void Io::start_discard(Op* op, int fd, uint64_t offset, uint64_t length) {
  op->kind = OpKind::discard;
  auto discard = new Discard{{}, this, op, fd, offset, length};
  discard->offload.work = [](Offload* work) {
    auto self = reinterpret_cast<Discard*>(work);
    return discard_now(self->fd, self->offset, self->length);
  };
  discard->offload.op.done = [](Op* done) {
    auto self = reinterpret_cast<Discard*>(done);
    self->io->complete(self->op, done->result);
    delete self;
  };
  offload(&discard->offload);
}

int32_t Io::discard_now(int fd, uint64_t offset, uint64_t length) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return -errno;
  if (S_ISBLK(status.st_mode)) {
    uint64_t range[2] = {offset, length};
    return ::ioctl(fd, BLKDISCARD, range) == 0 ? 0 : -errno;
  }
  int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(length)) == 0 ? 0 : -errno;
}

Status Io::make_null(File, uint64_t) {
  return Error::of(ENOTSUP, "this backend has no null devices");
}

Result<std::unique_ptr<Io>> Io::create(const Options& options) {
  std::string reason;
  if (options.backend == Backend::null) {
    FFS_TRY(auto null, NullIo::create(options));
    return std::unique_ptr<Io>(std::move(null));
  }
  if (options.backend == Backend::uring) {
    auto ring = UringIo::create(options, &reason);
    if (ring.ok()) return std::unique_ptr<Io>(std::move(ring.value()));
    std::fprintf(stderr, "ffs: io: using pread/pwrite threads: %s\n", reason.c_str());
  } else if (options.backend == Backend::sim) {
    return Error::of(EINVAL, "the simulated backend is made by SimIo");
  }
  auto fallback = PreadIo::create(options);
  if (!fallback.ok()) return fallback.error();
  fallback.value()->fallback_reason_ = reason;
  return std::unique_ptr<Io>(std::move(fallback.value()));
}

void mark_done(Op* op) {
  *static_cast<bool*>(op->owner) = true;
}

int32_t wait_for(Io& io, Op& op) {
  FFS_CHECK(op.done == mark_done);
  auto done = static_cast<bool*>(op.owner);
  while (!*done) io.run_once(-1);
  return op.result;
}

}  // namespace ffs::io
