// Reads of a device in memory into clients' pages through a pipe (io/pipe_copies.h).
#include <utility>

#include "io/uring_io.h"

namespace ffs::io {

void UringIo::note_mapping(File file, const uint8_t* base, uint64_t bytes) {
  mapped_[static_cast<size_t>(file.index)] = {base, bytes};
}

// Whether this thread copies it itself, in this pass.
bool UringIo::take_copy(Op* op, File file, bool foreign) {
  const auto index = static_cast<size_t>(file.index);
  if (!in_memory_[index]) return false;
  if (!foreign) return memory_copies_.take(op, descriptor(file));
  const Mapped& mapped = mapped_[index];
  return op->kind == OpKind::read && op->region >= 0 && op->offset <= mapped.bytes &&
         op->length <= mapped.bytes - op->offset && pipe_copies_.take(op);
}

void UringIo::run_pipe_copies() {
  if (pipe_copies_.empty()) return;
  if (io_uring_sq_ready(&ring_) > 0) submit();  // the kernel works meanwhile
  while (Op* op = pipe_copies_.next()) {
    const Mapped& mapped = mapped_[static_cast<size_t>(op->file)];
    while (op->moved < op->length && copy_by_pipe(op, mapped.base + op->offset + op->moved)) {
    }
    if (in_pipe_ != op) end_pipe_copy(op);  // else when the kernel has read the pipe
  }
}

void UringIo::end_pipe_copy(Op* op) {
  if (op->moved < op->length) return wait_in_line(op);  // the ordinary way does the rest
  in_flight_--;
  complete(op, static_cast<int32_t>(op->moved));
}

// A piece of it. False: the ordinary way shall do the rest, or the kernel didn't do it at once.
bool UringIo::copy_by_pipe(Op* op, const uint8_t* from) {
  io_uring_sqe* sqe = in_pipe_ == nullptr && in_kernel_ < limit_ ? entry() : nullptr;
  if (sqe == nullptr) return false;
  const uint32_t put = pipe_copies_.fill(from, op->length - op->moved);
  if (put == 0) {
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data64(sqe, kTagIgnored);
    return false;
  }
  io_uring_prep_read_fixed(sqe, pipe_copies_.source(), op->memory + op->moved, put, 0, op->region);
  io_uring_sqe_set_data64(sqe, kTagPipe);
  in_kernel_++;
  in_pipe_ = op;
  in_pipe_bytes_ = put;
  pipe_copies_.set_busy(true);
  looks_at_pipe_ = true;
  submit();
  collect();
  looks_at_pipe_ = false;
  return in_pipe_ == nullptr;
}

void UringIo::pipe_read(int32_t result) {
  Op* op = std::exchange(in_pipe_, nullptr);
  in_kernel_--;
  pipe_copies_.set_busy(false);
  if (result > 0) op->moved += static_cast<uint32_t>(result);
  if (result != static_cast<int32_t>(in_pipe_bytes_)) pipe_copies_.give_up();
  if (!looks_at_pipe_) end_pipe_copy(op);
}

}  // namespace ffs::io
