// The background reader of a device: reads every committed chunk of every target, in the order of keys, and
// checks it against its checksums; then has the target compared with its predecessor. What it finds is
// the replica's to repair (docs/craq.md, Repair).
//
// Pace: bytes_per_s, one read of at most 1 MiB at a time; a quarter of that while clients are served. A pass
// over a device begins at most every ten seconds. Where it stands isn't kept: a restart begins anew, with
// the target after a random one, so that restarts don't keep it from the later ones for ever.
// The shard's thread only; nothing blocks.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/chunk_store.h"

namespace ffs::server {

class Scrubber {
 public:
  struct Events {
    void* owner = nullptr;
    // That version failed a checksum, or the device couldn't read it. From the end of a read.
    void (*damaged)(void* owner, TargetId target, const ChunkKey& key, const Version& version) = nullptr;
    // Compare from this key on; the key to go on from, or none at the end. From tick().
    std::optional<ChunkKey> (*compare)(void* owner, TargetId target, const ChunkKey& from) = nullptr;
  };
  struct Counts {
    uint64_t bytes = 0;    // checked
    uint64_t damaged = 0;  // chunks found damaged, each time they are
    uint64_t passes = 0;   // over the target, compared as well
  };

  // bytes_per_s 0: does nothing. The store must outlive it; it must be idle() when it goes.
  Scrubber(engine::ChunkStore& store, uint64_t bytes_per_s, const Events& events,
           uint64_t least_pass_us = kLeastPassUs);
  ~Scrubber();
  Scrubber(const Scrubber&) = delete;

  // Every 20 ms or so. `targets`: those to read, in any order; others are left alone.
  void tick(uint64_t now_us, std::span<const TargetId> targets, bool clients_active);
  // The target is to be released: nothing of it is read from now on, until it is named again in tick().
  void forget(TargetId target);
  bool idle() const { return !reading_; }  // no read under way

  Counts counts(TargetId target) const;
  uint64_t scrubbed_bytes(TargetId target) const { return counts(target).bytes; }
  uint64_t scrubbed_bytes() const { return all_bytes_; }  // of all targets that were ever here

  static constexpr uint32_t kPartBytes = 1u << 20;
  static constexpr uint64_t kLeastPassUs = 10'000'000;

 private:
  enum class Phase : uint8_t { resting, reading, comparing };
  struct Part : engine::ReadOp {
    Scrubber* scrubber = nullptr;
  };
  struct Discard final : engine::Sink {
    int put(uint32_t, const uint8_t*, uint32_t) override { return 0; }
  };

  bool listed(TargetId target) const;
  void refill(uint64_t now_us, bool clients_active);
  void next_target();
  void go_on();
  bool next_chunk();
  void read_part();
  void part_read();
  void chunk_over();
  void compare_once();

  engine::ChunkStore& store_;
  const uint64_t bytes_per_s_;
  const Events events_;
  const uint64_t least_pass_us_;
  std::vector<TargetId> targets_;  // sorted
  std::map<TargetId, Counts> counts_;
  uint64_t all_bytes_ = 0;

  Phase phase_ = Phase::resting;
  TargetId target_;  // being read or compared; after a pass: the last one
  ChunkKey cursor_;  // reading: the next chunk; comparing: from there on
  // The chunk that is read, part by part.
  ChunkKey key_;
  Version version_;
  uint32_t length_bytes_ = 0;
  uint32_t at_bytes_ = 0;
  bool in_chunk_ = false;

  bool reading_ = false;
  Part part_;
  Discard nowhere_;
  int64_t tokens_ = 0;  // bytes; below zero after a part
  uint64_t now_us_ = 0;
  uint64_t refilled_us_ = 0;
  uint64_t pass_started_us_ = 0;
  bool ever_started_ = false;
  uint32_t unreadable_ = 0;  // reads in a row that the device failed
};

}  // namespace ffs::server
