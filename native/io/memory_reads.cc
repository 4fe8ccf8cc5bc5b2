#include "io/memory_reads.h"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

namespace ffs::io {

bool MemoryReads::lies_in_memory(int fd) {
  struct statfs facts {};
  return ::fstatfs(fd, &facts) == 0 && facts.f_type == TMPFS_MAGIC;
}

bool MemoryReads::take(Op* op, int fd) {
  if (count_ == kMostOps || op->length > kMostBytes - bytes_) return false;
  reads_[count_++] = {op, fd};
  bytes_ += op->length;
  return true;
}

int32_t MemoryReads::copy(const Read& read) {
  const Op& op = *read.op;
  uint32_t moved = 0;
  while (moved < op.length) {
    const ssize_t got =
        ::pread(read.fd, op.memory + moved, op.length - moved, static_cast<off_t>(op.offset + moved));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -errno;
    if (got == 0) break;  // the end of the file
    moved += static_cast<uint32_t>(got);
  }
  return static_cast<int32_t>(moved);
}

}  // namespace ffs::io
