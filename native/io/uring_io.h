// The io_uring backend (io/io.h is the contract).
#pragma once

#include <liburing.h>

#include <memory>
#include <string>
#include <vector>

#include "io/io.h"
#include "io/memory_copies.h"
#include "io/pipe_copies.h"

namespace ffs::io {

class UringIo : public Io {
 public:
  // On failure *reason says which step the kernel refused.
  static Result<std::unique_ptr<UringIo>> create(const Options& options, std::string* reason);
  ~UringIo() override;

  Backend backend() const override { return Backend::uring; }
  Result<File> add_file(int fd) override;
  void remove_file(File file) override;
  void note_mapping(File file, const uint8_t* base, uint64_t bytes) override;
  void read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) override;
  void write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region region) override;
  void datasync(Op* op, File file) override;
  void discard(Op* op, File file, uint64_t offset, uint64_t length) override;
  void poll_add(Poll* poll, int fd, uint32_t events) override;
  void poll_remove(Poll* poll) override;
  Result<Region> register_region(void* base, size_t length) override;
  void unregister_region(Region region) override;
  int run_once(int64_t timeout_us) override;

 protected:
  UringIo() = default;
  Status open(const Options& options, std::string* reason);
  int descriptor(File file) const { return fds_[static_cast<size_t>(file.index)]; }

 private:
  // Ops and Polls are aligned, so that the low bits of user_data say what it points to.
  static constexpr uint64_t kTagMask = 7;
  static constexpr uint64_t kTagOp = 0;
  static constexpr uint64_t kTagPoll = 1;
  static constexpr uint64_t kTagWake = 2;
  static constexpr uint64_t kTagIgnored = 3;
  static constexpr uint64_t kTagPipe = 4;  // in_pipe_
  struct Discard;
  void start(Op* op, OpKind kind, File file, uint64_t offset, uint8_t* memory, uint32_t length,
             Region region);
  bool prepare(Op* op);  // false: no free entry in the submission queue
  void prepare_waiting();
  void prepare_background();
  void wait_in_line(Op* op);
  void to_device(Op* op);
  void from_device(Op* op);
  bool waits_for_device(Op* op);
  void prepare_large();
  io_uring_sqe* entry();  // submits to make room; null if the kernel takes none now
  void submit();
  void arm(Poll* poll);
  void arm_wake();
  void collect();
  void collect_one(const io_uring_cqe& completion);
  void finished(Op* op, int32_t result);
  void poll_event(Poll* poll, const io_uring_cqe& completion);
  void run_memory_copies();
  bool take_copy(Op* op, File file, bool foreign);
  void run_pipe_copies();
  bool copy_by_pipe(Op* op, const uint8_t* from);
  void pipe_read(int32_t result);
  void end_pipe_copy(Op* op);
  void submit_and_wait(unsigned wanted, int64_t timeout_us);

  io_uring ring_{};
  bool ring_made_ = false;
  uint32_t limit_ = 0;
  uint32_t in_kernel_ = 0;       // device ops that the kernel has
  uint64_t prepared_bytes_ = 0;  // of ops that it was given no call for yet
  Op* waiting_head_ = nullptr;   // ops beyond limit_
  Op* waiting_tail_ = nullptr;
  uint64_t large_bytes_ = 0;  // of large reads that the kernel has
  Op* large_head_ = nullptr;  // those beyond kLargeAtDevice
  Op* large_tail_ = nullptr;
  Poll* unarmed_ = nullptr;      // polls that found no entry
  MemoryCopies memory_copies_;   // of this pass
  std::vector<int> fds_;         // by file index, -1: free
  std::vector<bool> in_memory_;  // by file index: the file is on a tmpfs
  struct Mapped {
    const uint8_t* base = nullptr;
    uint64_t bytes = 0;
  };
  std::vector<Mapped> mapped_;  // by file index
  PipeCopies pipe_copies_;      // of this pass
  Op* in_pipe_ = nullptr;       // the read that the kernel has of the pipe
  uint32_t in_pipe_bytes_ = 0;
  bool looks_at_pipe_ = false;  // who put them there
  std::vector<int32_t> free_regions_;
  std::vector<bool> region_used_;
  bool regions_available_ = false;
  bool wake_armed_ = false;
};

}  // namespace ffs::io
