#include "io/pipe_copies.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ffs::io {

namespace {
constexpr int kPipeBytes = 1 << 20;  // the most that an ordinary user may have
}  // namespace

bool PipeCopies::open() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return false;
  read_end_.reset(ends[0]);
  write_end_.reset(ends[1]);
  int bytes = ::fcntl(ends[1], F_SETPIPE_SZ, kPipeBytes);
  if (bytes < 0) bytes = ::fcntl(ends[1], F_GETPIPE_SZ);
  // A place for each page.
  capacity_ = bytes > 0 ? static_cast<uint32_t>(bytes) / kBlockBytes * kBlockBytes : 0;
  return capacity_ > 0;
}

bool PipeCopies::take(Op* op) {
  if (given_up_ || busy_ || count_ == kMostOps || op->length > kMostBytes - bytes_) return false;
  if (!read_end_.valid() && !open()) {
    give_up();
    return false;
  }
  bytes_ += op->length;
  taken_[count_++] = op;
  return true;
}

Op* PipeCopies::next() {
  if (first_ < count_) return taken_[first_++];
  first_ = count_ = bytes_ = 0;
  return nullptr;
}

uint32_t PipeCopies::fill(const uint8_t* from, uint32_t length) {
  if (given_up_ || busy_) return 0;
  iovec piece{const_cast<uint8_t*>(from), std::min(length, capacity_)};
  ssize_t put;
  do {
    put = ::vmsplice(write_end_.get(), &piece, 1, SPLICE_F_NONBLOCK);
  } while (put < 0 && errno == EINTR);
  return put > 0 ? static_cast<uint32_t>(put) : 0;
}

// What is in it belongs to nobody.
void PipeCopies::give_up() {
  read_end_.reset();
  write_end_.reset();
  given_up_ = true;
}

}  // namespace ffs::io
