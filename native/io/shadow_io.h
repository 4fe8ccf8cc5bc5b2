// An Io that writes nothing: what is written through it stays in memory and is what later reads return,
// over what the device holds. Recovery run over it is exactly the one of an opening, and the device
// stays as it is (ffs device inspect, ffs device check).
//
// Threads and blocking as io/io.h. Memory grows by each distinct block that is written: for tools. Reads go
// to `under`, at its depth; those that touch a written block are patched when they end. Discards do nothing.
// No readiness of descriptors: poll_add is a bug.
#pragma once

#include <array>
#include <memory>
#include <unordered_map>

#include "io/io.h"

namespace ffs::io {

class ShadowIo final : public Io {
 public:
  explicit ShadowIo(Io& under) : under_(under) {}  // outlives this
  ~ShadowIo() override;

  Backend backend() const override { return under_.backend(); }
  Result<File> add_file(int fd) override { return under_.add_file(fd); }
  void remove_file(File file) override { under_.remove_file(file); }
  void read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) override;
  void write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region region) override;
  void datasync(Op* op, File file) override;
  void discard(Op* op, File file, uint64_t offset, uint64_t length) override;
  void poll_add(Poll* poll, int fd, uint32_t events) override;
  void poll_remove(Poll* poll) override;
  Result<Region> register_region(void* base, size_t length) override {
    return under_.register_region(base, length);
  }
  void unregister_region(Region region) override { under_.unregister_region(region); }
  int run_once(int64_t timeout_us) override;

  uint64_t written_bytes() const { return blocks_.size() * kBlockBytes; }

 private:
  struct Patched;
  using Block = std::array<uint8_t, kBlockBytes>;
  bool touches(uint64_t offset, uint32_t length) const;
  void patch(uint64_t offset, uint8_t* memory, uint32_t length) const;

  Io& under_;
  std::unordered_map<uint64_t, std::unique_ptr<Block>> blocks_;  // by offset / kBlockBytes
};

}  // namespace ffs::io
