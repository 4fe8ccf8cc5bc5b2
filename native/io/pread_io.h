// The fallback backend: a few threads that call pread, pwrite and fdatasync, and epoll for
// readiness (io/io.h is the contract).
#pragma once

#include <memory>
#include <vector>

#include "io/io.h"

namespace ffs::io {

class PreadIo final : public Io {
 public:
  static Result<std::unique_ptr<PreadIo>> create(const Options& options);
  ~PreadIo() override;

  Backend backend() const override { return Backend::pread; }
  Result<File> add_file(int fd) override;
  void remove_file(File file) override;
  void read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) override;
  void write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region region) override;
  void datasync(Op* op, File file) override;
  void discard(Op* op, File file, uint64_t offset, uint64_t length) override;
  void poll_add(Poll* poll, int fd, uint32_t events) override;
  void poll_remove(Poll* poll) override;
  Result<Region> register_region(void* base, size_t length) override;
  void unregister_region(Region region) override;
  int run_once(int64_t timeout_us) override;

 private:
  struct Workers;
  PreadIo() : workers_(nullptr, [](Workers*) {}) {}
  void start(Op* op, OpKind kind, File file, uint64_t offset, uint8_t* memory, uint64_t length);
  void hand_out(Op* op);

  int epoll_fd_ = -1;
  std::vector<int> fds_;
  std::unique_ptr<Workers, void (*)(Workers*)> workers_;
};

}  // namespace ffs::io
