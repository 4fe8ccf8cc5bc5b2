// The simulated backend: a disk in memory, for crash tests. Deterministic: the same seed and the
// same calls give the same order of completions.
//
// Fault model (docs/faults.md, Limits of the tests). Writes and discards complete in any order and reach the
// cache when they complete. Volatile cache: a flush makes durable what had completed before the flush was
// started; when the power fails, every sector of a write that isn't durable (in the cache or still in flight)
// may be there or not, by itself; a sector is never torn. Protected cache: what completed is durable, only
// what is in flight may be lost or torn. A discarded range holds zeros or garbage, piece by piece; like
// writes, discards that aren't durable may have happened or not. Nothing else is lost or changed unless a
// test damages the image or asks for a fault that the device doesn't report (SimFault).
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "io/io.h"

namespace ffs::io {

// The content of a disk: sparse, unwritten parts are zeros. Copying shares pages until they change.
class SimImage {
 public:
  explicit SimImage(uint64_t size_bytes)
      : size_bytes_(size_bytes), extents_((size_bytes + kExtentBytes - 1) / kExtentBytes) {}
  uint64_t size_bytes() const { return size_bytes_; }
  void read(uint64_t offset, uint8_t* memory, size_t size) const;
  void write(uint64_t offset, const uint8_t* memory, size_t size);
  void flip(uint64_t offset, uint8_t mask);  // bits of one byte
  // What a discard may leave: zeros, or garbage drawn from the seed. Whole pages of 4096 bytes.
  void discard(uint64_t offset, uint64_t size, std::optional<uint64_t> garbage_seed);
  bool operator==(const SimImage& other) const;

 private:
  using Page = std::array<uint8_t, 4096>;
  struct Extent {
    std::array<std::shared_ptr<Page>, 64> pages;  // null: zeros
  };
  static constexpr uint64_t kExtentBytes = 64 * 4096;
  std::shared_ptr<Page>& slot(uint64_t page);  // for writing

  uint64_t size_bytes_;
  std::vector<std::shared_ptr<Extent>> extents_;  // null: zeros
};

struct SimDevice {
  uint32_t sector_bytes = 512;   // what is never torn
  bool protected_cache = false;  // what completed is durable
  bool in_order = false;  // ends one thing after another, first come first served; else the seed chooses
};

// What happened on the disk, in order.
struct SimEvent {
  enum Kind : uint8_t {
    write_started,
    write_done,
    sync_started,
    sync_done,
    discard_started,
    discard_done
  } kind;
  uint64_t id = 0;  // of the op, the same in both events
  uint64_t offset = 0;
  std::shared_ptr<std::vector<uint8_t>> bytes;  // write_started
  uint64_t length = 0;                          // discard_started
};

// One thing that the device does wrong without saying so.
struct SimFault {
  enum Kind : uint8_t {
    none,
    lost_write,         // acknowledged, never there
    torn_write,         // only its first half is there
    misdirected_write,  // lands where something else was written
    flipped_write,      // a bit changes on the way to the device
    flipped_read,       // a bit changes on the way back, once
  } kind = none;
  uint64_t skip = 0;  // so many ops that it could have struck are spared
  // Only what begins in this part of the device, and is misdirected within it.
  uint64_t from = 0, to = UINT64_MAX;
};

// Where the device's content isn't what the program believes, since which event.
struct SimDamage {
  uint64_t offset;
  uint64_t length;
  size_t event;
};

class SimIo final : public Io {
 public:
  SimIo(SimImage image, uint64_t seed, SimDevice device = {});
  ~SimIo() override;

  File disk() const { return File{0}; }
  uint64_t size_bytes() const { return image_.size_bytes(); }
  const SimDevice& device() const { return device_; }
  // What reads see: everything that completed.
  const SimImage& image() const { return image_; }
  SimImage& image() { return image_; }
  const std::vector<SimEvent>& log() const { return log_; }
  void stop_logging() { logging_ = false; }  // long runs that nobody crashes
  uint64_t syncs() const { return syncs_; }  // that were asked for
  uint64_t discards() const { return discards_; }

  // The n-th write or flush from now on (1: the next) fails with EIO.
  void fail_write_after(uint64_t count) { fail_write_ = count; }
  void fail_sync_after(uint64_t count) { fail_sync_ = count; }
  // From now on reads of this part of the device fail with EIO.
  void fail_reads(uint64_t from, uint64_t to) { bad_from_ = from, bad_to_ = to; }
  void inject(const SimFault& fault) { fault_ = fault; }
  // A bit of what is at rest changes.
  void rot(uint64_t offset, uint8_t mask);
  bool struck() const { return struck_; }                           // the fault or rot has happened
  const std::vector<SimDamage>& damage() const { return damage_; }  // by it, at rest
  // The first thing that no program may ask of a device: a write over one that is in flight, anything
  // over a discard in flight. Empty: none.
  const std::string& misuse() const { return misuse_; }

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
    uint64_t length;
    std::shared_ptr<std::vector<uint8_t>> bytes;   // as they were given
    uint64_t lands;                                // where
    std::shared_ptr<std::vector<uint8_t>> landed;  // what; the same but for faults
  };
  void start(Op* op, OpKind kind, uint64_t offset, void* memory, uint64_t length);
  void watch(OpKind kind, uint64_t offset, uint64_t length);
  bool strikes(SimFault::Kind first, SimFault::Kind last, uint64_t offset);
  void misdo(Running* running);
  void finish(size_t index);
  void note(SimEvent event) {
    if (logging_) log_.push_back(std::move(event));
  }

  SimImage image_;
  SimDevice device_;
  std::mt19937_64 random_;
  std::vector<Running> running_;
  std::vector<SimEvent> log_;
  uint64_t next_id_ = 1;
  bool logging_ = true;
  uint64_t syncs_ = 0;
  uint64_t discards_ = 0;
  uint64_t fail_write_ = 0;
  uint64_t fail_sync_ = 0;
  uint64_t bad_from_ = 0, bad_to_ = 0;
  SimFault fault_;
  bool struck_ = false;
  std::vector<SimDamage> damage_;
  std::vector<uint64_t> written_;  // some places, for writes that go astray
  std::string misuse_;
};

// The disk after a power cut, for any prefix of a log. Moves forward only.
class CrashImages {
 public:
  explicit CrashImages(SimImage start, SimDevice device = {}) : device_(device), durable_(std::move(start)) {}
  void advance(const SimEvent& event);
  // `keep(write, sector)` says whether a sector that isn't durable made it. Writes and discards are numbered
  // from 0 in the order in which they reach the disk; a discard has pieces of 64 KiB in place of sectors.
  template <typename Keep>
  SimImage crash(Keep keep) const {
    SimImage image = durable_;
    for (size_t i = 0; i < loose_.size(); i++) {
      const uint64_t step = loose_[i].bytes != nullptr ? device_.sector_bytes : kDiscardPieceBytes;
      for (uint64_t at = 0; at < loose_[i].length; at += step) {
        if (keep(i, static_cast<size_t>(at / step))) put(image, loose_[i], at, step);
      }
    }
    return image;
  }
  size_t loose_writes() const { return loose_.size(); }
  // Whether something that isn't durable begins in this part of the disk.
  bool loose_within(uint64_t from, uint64_t to) const;
  bool loose_discards() const;

 private:
  static constexpr uint64_t kDiscardPieceBytes = 65536;
  struct Loose {
    uint64_t id;
    uint64_t offset;
    uint64_t length;
    std::shared_ptr<std::vector<uint8_t>> bytes;  // null: a discard
    bool completed = false;
    uint64_t completed_at = 0;  // number of the event
  };
  static void put(SimImage& image, const Loose& loose, uint64_t at, uint64_t size);
  void done(uint64_t id);

  SimDevice device_;
  SimImage durable_;
  std::vector<Loose> loose_;            // in the order of completion for those completed
  std::map<uint64_t, uint64_t> syncs_;  // id -> number of the event that started it
  uint64_t events_ = 0;
};

}  // namespace ffs::io
