// A device without bytes, for measuring what everything but the device costs (docs/guides/bench.md, Null
// devices). io_uring, but for the files that make_null() names: of those
//
// - all below `from` (the store's own records) is read from and written to the file at once, through the
//   page cache: it outlives the process, not a power cut. Nothing is flushed.
// - beyond it nothing is stored. Writes and discards are over at once; a read leaves the buffer as it is
//   where that holds zeros already, else makes it zeros: whoever writes nothing but zeros gets them back
//   with the right checksums. Whether a block holds zeros is judged by its first and last eight bytes, but
//   for memory that records have passed through, which is always zeroed. A client's memory (Region::foreign)
//   is neither looked at nor written.
//
// Threads as io/io.h. What is over at once runs in the next pass of run_once, like any completion, and
// doesn't wait for a Gate.
#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include "base/fd.h"
#include "io/uring_io.h"

namespace ffs::io {

class NullIo final : public UringIo {
 public:
  // ENOTSUP and others: the kernel refuses io_uring, and there is no fallback.
  static Result<std::unique_ptr<NullIo>> create(const Options& options);

  Backend backend() const override { return Backend::null; }
  Status make_null(File file, uint64_t from) override;
  void remove_file(File file) override;
  void read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) override;
  void write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region region) override;
  void datasync(Op* op, File file) override;
  void discard(Op* op, File file, uint64_t offset, uint64_t length) override;

 private:
  struct Null {
    Fd cached;  // the same file, without O_DIRECT
    uint64_t from = 0;
  };
  NullIo() = default;
  Null* null_of(File file);
  void remember(const void* memory, uint32_t length);
  void make_zeros(uint8_t* memory, uint32_t length) const;
  void end(Op* op, OpKind kind, uint32_t length, int64_t moved);

  std::vector<Null> nulls_;                   // by file index
  std::unordered_set<uintptr_t> of_records_;  // memory that may hold anything, by its address / kPageBytes
};

}  // namespace ffs::io
