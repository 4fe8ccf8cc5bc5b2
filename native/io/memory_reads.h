// Reads of files that lie in memory (tmpfs). io_uring can't start those at once: it hands each to a thread of
// the kernel's, which costs two switches of threads for a copy of a few microseconds. So the shard's thread
// copies the first few of a pass itself; what is beyond that is worth another thread.
//
// Only into this process's own memory: a client's is written through registered pages alone
// (docs/wire_format.md, Regions). Pages of the file that were swapped out hold the thread up.
#pragma once

#include <array>
#include <cstdint>

#include "io/io.h"

namespace ffs::io {

class MemoryReads {
 public:
  static constexpr uint32_t kMostBytes = 512u << 10;  // of a pass; a larger read goes to the kernel
  static constexpr uint32_t kMostOps = 8;

  static bool lies_in_memory(int fd);

  // Takes a read for this pass. False: it is too much, the kernel shall do it.
  bool take(Op* op, int fd);
  bool empty() const { return count_ == 0; }
  // Carries out what was taken and hands each op to `then` with its result (io.h, Op).
  template <typename Then>
  void run(Then then) {
    for (uint32_t i = 0; i < count_; i++) then(reads_[i].op, copy(reads_[i]));
    count_ = bytes_ = 0;
  }

 private:
  struct Read {
    Op* op = nullptr;
    int fd = -1;
  };
  static int32_t copy(const Read& read);

  std::array<Read, kMostOps> reads_{};
  uint32_t count_ = 0;
  uint32_t bytes_ = 0;
};

}  // namespace ffs::io
