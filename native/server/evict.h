// Makes room on a shard's device, and takes expired chunks out: chooses chunks of the spaces whose chains are
// led from here (docs/craq.md, Eviction), and has their removal ordered by the head's replica.
//
// When. A space above 99 % of its quota on this chain goes down to 98 %. A device with less than its reserve
// free goes up to a little more than that, the same for what other members of a chain report of theirs. Puts
// that find no room wait for it in the replica (admit, makes_room). Expired chunks are looked for in
// the order of keys, a few each tick, so that each goes within a bounded time.
//
// How much at once. At most kInFlight removals of a target are under way, and a step looks at a bounded
// number of chunks. One shard thread; no I/O of its own; nothing blocks.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "craq/replica.h"
#include "engine/chunk_store.h"
#include "server/spaces.h"

namespace ffs::server {

class Evictor {
 public:
  struct Events {
    void* owner = nullptr;
    // Has the replica remove it, if it still may.
    craq::EvictionAnswer (*order)(void* owner, TargetId target, const craq::EvictionOrder& order) = nullptr;
    // Whether removals that nobody waits for may go on now.
    bool (*ahead)(void* owner, uint32_t removals) = nullptr;
  };
  Evictor(engine::ChunkStore& store, Spaces& spaces, uint32_t reserve_percent, const Events& events)
      : store_(store), spaces_(spaces), reserve_percent_(reserve_percent), events_(events) {}

  // The clock of all that follows: monotonic, and the manager's (0: not known).
  void set_time(uint64_t now_us, uint64_t manager_ms) {
    now_us_ = now_us;
    manager_ms_ = manager_ms;
  }
  // Some work, if there is any. `tick`: every 20 ms or so, the others when a removal has ended.
  void step(bool tick);
  // An eviction of that target has ended.
  void evicted(TargetSpaces& target, const ChunkKey& key, craq::Outcome outcome);
  // Removals have ended since this was asked last, so puts that wait may find room.
  bool made_room() { return std::exchange(made_room_, false); }

  // --- for the replica of a head (craq/store_view.h). makes_room is about the update that admit refused
  // last.
  craq::Outcome admit(TargetSpaces* target, const ChunkKey& key, uint32_t length_bytes,
                      uint64_t unseen_bytes);
  bool makes_room() const { return refused_waits_; }
  uint64_t manager_ms() const { return manager_ms_; }

  // --- what the shard sees
  // A client removes, or has removed, chunks of a chain that is led from here: of no matter to evictions.
  void removing() { removed_us_ = now_us_; }
  // The bytes of an update are on their way into a slot, until `stored`.
  void staging(TargetSpaces* target, const ChunkKey& key, uint32_t length_bytes);
  void stored(TargetSpaces* target, const ChunkKey& key, uint32_t length_bytes);
  // A chunk was committed at the head: one that was evicted before is known as used again.
  void committed(TargetSpaces& target, const ChunkKey& key);
  // A member of the target's chain says what its device lacks.
  void member_lacks(TargetSpaces& target, TargetId member, uint64_t bytes, bool short_of_room);
  // A member refused an update of `space` for lack of room: whether its client is to send it again, since
  // evictions will make some. `block`: it is a KV block, whose space's policy may not have come yet.
  bool will_make_room(TargetSpaces* target, uint64_t space, bool block, uint32_t length_bytes);
  // What this device lacks: bytes up to its high mark; short_of_room: puts into evictable spaces wait.
  uint64_t lacking_bytes() const { return lacking_bytes_; }
  bool short_of_room() const { return short_of_room_; }

 private:
  static constexpr uint32_t kInFlight = 64;  // of a target
  static constexpr uint32_t kSamplesAStep = 24 * 16;
  static constexpr uint32_t kScanAStep = 128;         // chunks looked at for their expiry
  static constexpr uint32_t kFruitless = 4096;        // chunks sampled in vain: there is nothing to evict
  static constexpr uint32_t kAllShared = 512;         // chunks sampled, none alone: those that share go too
  static constexpr uint64_t kScanRestUs = 5'000'000;  // between two scans of a space, from start to start
  static constexpr uint64_t kRetryUs = 200'000;       // a space with nothing to evict is looked at again
  static constexpr uint64_t kReportUs = 3'000'000;    // what a member has said counts for so long
  static constexpr uint64_t kSettleUs = 100'000;      // a removed chunk's slot is free by then

  void look_at_device();
  uint64_t device_need(const TargetSpaces& target) const;
  // Until so much is leaving: as counted for the space, and as freed on this device.
  struct Need {
    uint64_t bytes = 0, freed_bytes = 0;
    bool met(const HeldSpace& held) const {
      return held.leaving_bytes >= bytes && held.leaving_freed_bytes >= freed_bytes;
    }
  };
  Need need(TargetSpaces& target, HeldSpace& held, uint64_t device_need, bool* waited_for);
  void evict(TargetSpaces& target, HeldSpace& held, const Need& need, bool waited_for);
  bool alone_first(const TargetSpaces& target, const HeldSpace& held, const Need& need) const;
  uint32_t feed_alone(HeldSpace& held, std::span<engine::ChunkSample> samples);
  craq::EvictionAnswer order(TargetSpaces& target, HeldSpace& held, const engine::Victim& victim);
  craq::Outcome refuse(craq::Outcome outcome, bool waits);
  bool more_goes();
  void scan(TargetSpaces& target, HeldSpace& held);
  bool holds_evictable(const TargetSpaces& target) const;
  bool exhausted(const HeldSpace& held) const { return now_us_ < held.exhausted_until_us; }

  engine::ChunkStore& store_;
  Spaces& spaces_;
  const uint32_t reserve_percent_;
  const Events events_;
  uint64_t now_us_ = 0;
  uint64_t manager_ms_ = 0;
  uint32_t samples_left_ = 0;  // of this step
  uint32_t scans_left_ = 0;
  bool made_room_ = false;
  bool refused_waits_ = false;
  std::vector<engine::ChunkSample> samples_;

  // The device, by the last look at it.
  bool below_reserve_ = false;  // until the high mark is reached
  uint64_t lacking_bytes_ = 0;
  bool short_of_room_ = false;
  uint64_t removed_us_ = 0;          // the last time that somebody removed chunks; 0: nobody did
  uint64_t refused_since_us_ = 0;    // while chunks are being removed; 0: nobody was
  uint64_t evictable_bytes_ = 0;     // of the spaces that are led from here and aren't exhausted
  uint64_t wanted_bytes_ = 0;        // the largest put that the device had no room for since the last tick
  uint64_t settling_bytes_[2] = {};  // removed in this half of kSettleUs, and in the one before
  uint64_t settling_us_ = 0;
};

}  // namespace ffs::server
