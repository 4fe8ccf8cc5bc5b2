// The simulated backend: a disk in memory, for crash tests. Deterministic: the same seed and the
// same calls give the same order of completions.
//
// Fault model. A write reaches the volatile cache when it completes. A flush makes durable what had
// completed before the flush was started. When the power fails, every 512-byte sector of a write
// that isn't durable (in the cache or still in flight) may be there or not, by itself; a sector is
// never torn. Writes complete in any order. Nothing is lost or changed otherwise, unless a test
// damages the image.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "io/io.h"

namespace ffs::io {

// The content of a disk: sparse, unwritten parts are zeros. Copying shares pages until they change.
class SimImage {
 public:
  explicit SimImage(uint64_t size_bytes) : size_bytes_(size_bytes) {}
  uint64_t size_bytes() const { return size_bytes_; }
  void read(uint64_t offset, uint8_t* memory, size_t size) const;
  void write(uint64_t offset, const uint8_t* memory, size_t size);
  bool operator==(const SimImage& other) const;

 private:
  using Page = std::array<uint8_t, 4096>;
  uint64_t size_bytes_;
  std::map<uint64_t, std::shared_ptr<Page>> pages_;
};

// What happened on the disk, in order.
struct SimEvent {
  enum Kind : uint8_t { write_started, write_done, sync_started, sync_done } kind;
  uint64_t id = 0;  // of the op, the same in both events
  uint64_t offset = 0;
  std::shared_ptr<std::vector<uint8_t>> bytes;  // write_started
};

class SimIo final : public Io {
 public:
  SimIo(SimImage image, uint64_t seed);
  ~SimIo() override;

  File disk() const { return File{0}; }
  uint64_t size_bytes() const { return image_.size_bytes(); }
  // What reads see: everything that completed.
  const SimImage& image() const { return image_; }
  SimImage& image() { return image_; }
  const std::vector<SimEvent>& log() const { return log_; }
  void stop_logging() { logging_ = false; }  // long runs that nobody crashes

  // The n-th write or flush from now on (1: the next) fails with EIO.
  void fail_write_after(uint64_t count) { fail_write_ = count; }
  void fail_sync_after(uint64_t count) { fail_sync_ = count; }

  Backend backend() const override { return Backend::sim; }
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
  // Completes some of the ops in flight, chosen by the seed. Waiting for nothing is a hang of the
  // program under test and ends the process.
  int run_once(int64_t timeout_us) override;

 private:
  struct Running {
    Op* op;
    uint64_t id;
    std::shared_ptr<std::vector<uint8_t>> bytes;
  };
  void start(Op* op, OpKind kind, uint64_t offset, void* memory, uint32_t length);
  void finish(size_t index);
  void note(SimEvent event) {
    if (logging_) log_.push_back(std::move(event));
  }

  SimImage image_;
  std::mt19937_64 random_;
  std::vector<Running> running_;
  std::vector<SimEvent> log_;
  uint64_t next_id_ = 1;
  bool logging_ = true;
  uint64_t fail_write_ = 0;
  uint64_t fail_sync_ = 0;
};

// The disk after a power cut, for any prefix of a log. Moves forward only.
class CrashImages {
 public:
  explicit CrashImages(SimImage start) : durable_(std::move(start)) {}
  void advance(const SimEvent& event);
  // `keep(write, sector)` says whether a sector that isn't durable made it. Writes are numbered
  // from 0 in the order in which they were started.
  template <typename Keep>
  SimImage crash(Keep keep) const {
    SimImage image = durable_;
    for (size_t i = 0; i < loose_.size(); i++) {
      const auto& bytes = *loose_[i].bytes;
      for (size_t at = 0; at < bytes.size(); at += 512) {
        if (keep(i, at / 512)) image.write(loose_[i].offset + at, bytes.data() + at, 512);
      }
    }
    return image;
  }
  size_t loose_writes() const { return loose_.size(); }

 private:
  struct Loose {
    uint64_t id;
    uint64_t offset;
    std::shared_ptr<std::vector<uint8_t>> bytes;
    bool completed = false;
    uint64_t completed_at = 0;  // number of the event
  };
  SimImage durable_;
  std::vector<Loose> loose_;            // in the order of completion for those completed
  std::map<uint64_t, uint64_t> syncs_;  // id -> number of the event that started it
  uint64_t events_ = 0;
};

}  // namespace ffs::io
