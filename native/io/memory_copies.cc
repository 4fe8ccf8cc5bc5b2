#include "io/memory_copies.h"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

namespace ffs::io {

bool MemoryCopies::lies_in_memory(int fd) {
  struct statfs facts {};
  return ::fstatfs(fd, &facts) == 0 && facts.f_type == TMPFS_MAGIC;
}

bool MemoryCopies::take(Op* op, int fd) {
  if (count_ == kMostOps) return false;
  if (op->kind == OpKind::read) {
    if (op->length > kMostReadBytes - read_bytes_) return false;
    read_bytes_ += op->length;
  } else if (op->kind == OpKind::write) {
    if (op->length > kMostWriteBytes - write_bytes_) return false;
    write_bytes_ += op->length;
  }
  taken_[count_++] = {op, fd};
  return true;
}

int32_t MemoryCopies::carry_out(const Taken& taken) {
  if (taken.op->kind != OpKind::datasync) return copy(*taken.op, taken.fd);
  return ::fdatasync(taken.fd) == 0 ? 0 : -errno;
}

int32_t MemoryCopies::copy(const Op& op, int fd) {
  const bool writes = op.kind == OpKind::write;
  uint32_t moved = 0;
  while (moved < op.length) {
    const auto at = static_cast<off_t>(op.offset + moved);
    const ssize_t got = writes ? ::pwrite(fd, op.memory + moved, op.length - moved, at)
                               : ::pread(fd, op.memory + moved, op.length - moved, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -errno;
    if (got == 0) break;  // the end of the file
    moved += static_cast<uint32_t>(got);
  }
  if (writes && moved < op.length) return -EIO;
  return static_cast<int32_t>(moved);
}

}  // namespace ffs::io
