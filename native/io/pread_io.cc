#include "io/pread_io.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/threads.h"

namespace ffs::io {

static_assert(POLLIN == EPOLLIN && POLLOUT == EPOLLOUT && POLLERR == EPOLLERR && POLLHUP == EPOLLHUP);

// The threads and their queue. They know descriptors by op->file only through `fds`, which a
// thread reads while it holds the mutex.
struct PreadIo::Workers {
  PreadIo* io;
  std::mutex mutex;
  std::condition_variable arrived;
  Op* head = nullptr;
  Op* tail = nullptr;
  bool stopping = false;
  std::vector<std::thread> threads;

  static int32_t move_all(int fd, Op* op) {
    const uint32_t end = op->piece > 0 ? op->moved + op->piece : op->length;
    while (op->moved < end) {
      uint8_t* at = op->memory + op->moved;
      size_t left = end - op->moved;
      auto offset = static_cast<off_t>(op->offset + op->moved);
      ssize_t rc = op->kind == OpKind::read ? ::pread(fd, at, left, offset) : ::pwrite(fd, at, left, offset);
      if (rc < 0 && errno == EINTR) continue;
      if (rc < 0) return -errno;
      op->moved += static_cast<uint32_t>(rc);
      op->ended = rc == 0 || op->moved % 512 != 0;
      if (op->ended) break;
    }
    if (op->kind == OpKind::write && op->moved != end) return -EIO;
    return static_cast<int32_t>(op->moved);
  }

  void run() {
    for (;;) {
      Op* op;
      int fd;
      {
        std::unique_lock lock(mutex);
        arrived.wait(lock, [&] { return stopping || head != nullptr; });
        if (head == nullptr) return;
        op = head;
        head = op->next;
        if (head == nullptr) tail = nullptr;
        fd = io->fds_[static_cast<size_t>(op->file)];
      }
      if (op->kind == OpKind::datasync) {
        op->result = ::fdatasync(fd) == 0 ? 0 : -errno;
      } else {
        op->result = move_all(fd, op);
      }
      io->hand_back(op);
    }
  }
};

Result<std::unique_ptr<PreadIo>> PreadIo::create(const Options& options) {
  std::unique_ptr<PreadIo> io(new PreadIo);
  io->epoll_fd_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (io->epoll_fd_ < 0) return Error::of(errno, "epoll_create1");
  epoll_event event{EPOLLIN, {nullptr}};
  if (::epoll_ctl(io->epoll_fd_, EPOLL_CTL_ADD, io->event_fd(), &event) != 0) {
    return Error::of(errno, "epoll_ctl of the wake-up descriptor");
  }
  io->fds_.assign(options.max_files, -1);
  io->workers_ = {new Workers{io.get(), {}, {}, nullptr, nullptr, false, {}}, [](Workers* w) { delete w; }};
  for (uint32_t i = 0; i < options.pread_threads; i++) {
    FFS_TRY(auto thread, start_thread([workers = io->workers_.get()] { workers->run(); }));
    io->workers_->threads.push_back(std::move(thread));
  }
  return io;
}

PreadIo::~PreadIo() {
  stop_helper();
  if (workers_ != nullptr) {
    {
      std::lock_guard lock(workers_->mutex);
      workers_->stopping = true;
    }
    workers_->arrived.notify_all();
    for (auto& thread : workers_->threads) thread.join();
  }
  FFS_CHECK(in_flight_ == 0);
  if (epoll_fd_ >= 0) ::close(epoll_fd_);
}

Result<File> PreadIo::add_file(int fd) {
  std::lock_guard lock(workers_->mutex);
  for (size_t i = 0; i < fds_.size(); i++) {
    if (fds_[i] >= 0) continue;
    fds_[i] = fd;
    return File{static_cast<int32_t>(i)};
  }
  return Error::of(ENFILE, "too many files for one Io: raise max_files");
}

void PreadIo::remove_file(File file) {
  std::lock_guard lock(workers_->mutex);
  FFS_CHECK(fds_[static_cast<size_t>(file.index)] >= 0);
  fds_[static_cast<size_t>(file.index)] = -1;
}

void PreadIo::start(Op* op, OpKind kind, File file, uint64_t offset, uint8_t* memory, uint64_t length) {
  FFS_CHECK(op->done != nullptr && file.valid());
  op->kind = kind;
  op->file = static_cast<int16_t>(file.index);
  op->offset = offset;
  op->memory = memory;
  op->length = static_cast<uint32_t>(length);
  op->moved = 0;
  in_flight_++;
  FFS_CHECK(fds_[static_cast<size_t>(file.index)] >= 0);
  if (!hold_back(op)) hand_out(op);
}

void PreadIo::hand_out(Op* op) {
  op->next = nullptr;
  {
    std::lock_guard lock(workers_->mutex);
    if (workers_->tail != nullptr) {
      workers_->tail->next = op;
    } else {
      workers_->head = op;
    }
    workers_->tail = op;
  }
  workers_->arrived.notify_one();
}

void PreadIo::read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region) {
  start(op, OpKind::read, file, offset, static_cast<uint8_t*>(memory), length);
}

void PreadIo::write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region) {
  start(op, OpKind::write, file, offset, static_cast<uint8_t*>(const_cast<void*>(memory)), length);
}

void PreadIo::datasync(Op* op, File file) {
  start(op, OpKind::datasync, file, 0, nullptr, 0);
}

void PreadIo::discard(Op* op, File file, uint64_t offset, uint64_t length) {
  start_discard(op, fds_[static_cast<size_t>(file.index)], offset, length);
}

void PreadIo::poll_add(Poll* poll, int fd, uint32_t events) {
  FFS_CHECK(poll->ready != nullptr);
  poll->fd = fd;
  poll->wanted = events;
  poll->events = 0;
  poll->error = 0;
  poll->removed = poll->removing = poll->queued = false;
  epoll_event event{events | EPOLLET, {poll}};
  if (::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    poll->error = errno;
    poll->removed = poll->removing = true;
    queue_poll(poll);
  }
}

void PreadIo::poll_remove(Poll* poll) {
  FFS_CHECK(!poll->removing && !poll->removed);
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, poll->fd, nullptr);
  poll->removing = poll->removed = true;
  queue_poll(poll);
}

Result<Region> PreadIo::register_region(void*, size_t) {
  return Error::of(ENOTSUP, "the pread backend has no registered memory");
}

void PreadIo::unregister_region(Region) {
  FFS_CHECK(false);
}

int PreadIo::run_once(int64_t timeout_us) {
  take_posted();
  while (Op* piece = next_piece()) hand_out(piece);
  bool ready = has_ready() || polls_head_ != nullptr;
  epoll_event events[64];
  timespec limit{0, 0};
  if (!ready && timeout_us > 0) limit = {timeout_us / 1000000, (timeout_us % 1000000) * 1000};
  const timespec* wait = !ready && timeout_us < 0 ? nullptr : &limit;
  int count = ::epoll_pwait2(epoll_fd_, events, 64, wait, nullptr);
  FFS_CHECK(count >= 0 || errno == EINTR);
  for (int i = 0; i < count; i++) {
    auto poll = static_cast<Poll*>(events[i].data.ptr);
    if (poll == nullptr) {
      uint64_t posts;
      ssize_t got = ::read(event_fd(), &posts, sizeof posts);
      FFS_CHECK(got == sizeof posts || errno == EAGAIN);
      continue;
    }
    poll->events |= events[i].events;
    queue_poll(poll);
  }
  take_posted();
  return run_ready();
}

}  // namespace ffs::io
