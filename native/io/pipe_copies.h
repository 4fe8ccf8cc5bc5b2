// Reads of a device in memory into registered memory of clients, by the shard's own thread. Those pages may
// be written through io_uring alone (docs/wire_format.md, Regions), and a read of a file on tmpfs goes to a
// thread of the kernel's there. A read of a pipe doesn't: so pages of the device are put into a pipe, by
// reference, and the ring reads that at once. One copy, and no other thread.
#pragma once

#include <array>
#include <cstdint>

#include "base/fd.h"
#include "io/io.h"

namespace ffs::io {

class PipeCopies {
 public:
  // Of a pass; what is beyond that is worth another thread.
  static constexpr uint32_t kMostBytes = 4u << 20;
  static constexpr uint32_t kMostOps = 8;

  // Takes a read for this pass. False: it is too much, or there is no pipe. The first makes it.
  bool take(Op* op);
  bool empty() const { return count_ == 0; }
  Op* next();  // null: that was all of this pass

  // Puts up to so many bytes from there into the pipe, which must be empty. How many; 0: they can't be had.
  uint32_t fill(const uint8_t* from, uint32_t length);
  int source() const { return read_end_.get(); }
  // The kernel hasn't read it yet, or couldn't read what was put in.
  void set_busy(bool busy) { busy_ = busy; }
  bool busy() const { return busy_; }
  void give_up();

 private:
  bool open();

  Fd read_end_, write_end_;
  uint32_t capacity_ = 0;
  bool busy_ = false, given_up_ = false;
  std::array<Op*, kMostOps> taken_{};
  uint32_t count_ = 0, first_ = 0;
  uint32_t bytes_ = 0;
};

}  // namespace ffs::io
