// Device operations on files that lie in memory (tmpfs). io_uring can't start those at once: it hands each to
// a thread of the kernel's, which costs two switches of threads for a copy of a few microseconds, and writers
// of one file wait for each other there. So the shard's thread copies the first few of a pass itself; what is
// beyond that is worth another thread.
//
// Only from and to this process's own memory: a client's is touched through registered pages alone
// (docs/wire_format.md, Regions). Pages of the file that were swapped out hold the thread up.
#pragma once

#include <array>
#include <cstdint>

#include "io/io.h"

namespace ffs::io {

class MemoryCopies {
 public:
  static constexpr uint32_t kMostReadBytes = 512u << 10;  // of a pass; a larger read goes to the kernel
  static constexpr uint32_t kMostWriteBytes = 1u << 20;
  static constexpr uint32_t kMostOps = 8;

  static bool lies_in_memory(int fd);

  // Takes a read, write or datasync (which is nothing to wait for there) for this pass. False: it is too
  // much, the kernel shall do it.
  bool take(Op* op, int fd);
  bool empty() const { return count_ == 0; }
  // Carries out what was taken and hands each op to `then` with its result (io.h, Op).
  template <typename Then>
  void run(Then then) {
    for (uint32_t i = 0; i < count_; i++) then(taken_[i].op, carry_out(taken_[i]));
    count_ = read_bytes_ = write_bytes_ = 0;
  }

 private:
  struct Taken {
    Op* op = nullptr;
    int fd = -1;
  };
  static int32_t carry_out(const Taken& taken);
  static int32_t copy(const Op& op, int fd);

  std::array<Taken, kMostOps> taken_{};
  uint32_t count_ = 0;
  uint32_t read_bytes_ = 0;
  uint32_t write_bytes_ = 0;
};

}  // namespace ffs::io
