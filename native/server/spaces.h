// Which spaces of a shard's targets the manager has said something about: quota, time to live, whether they
// may be evicted from; and what is counted of each (docs/craq.md, Eviction). One shard thread; no I/O.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "engine/evict.h"
#include "engine/evict_history.h"

namespace ffs::server {

// What the manager has said of a space on a chain.
struct SpacePolicy {
  uint64_t space = 0;
  ChainId chain;
  bool evictable = false;
  uint64_t quota_bytes = 0;  // of the space on that chain, as allocated on one replica; 0: none
  uint64_t ttl_ms = 0;       // the most that updates get; 0: none
  bool dedup = false;        // equal chunks share a slot
};

// One space on one target. The counters begin with the process.
struct HeldSpace {
  SpacePolicy policy;
  uint64_t hits = 0;  // uses of chunks that were there, at this target
  uint64_t evicted_chunks = 0, evicted_bytes = 0;
  uint64_t expired_chunks = 0;  // removed because they had expired

  // --- the Evictor's
  engine::EvictionPool pool{0};
  engine::EvictionHistory history;
  uint64_t staging_bytes = 0;  // of slots that the store doesn't count yet
  uint64_t leaving_bytes = 0;  // being removed
  // Of spaces whose chunks share slots: what their going frees, and those that lie alone, which go first
  // where a device runs short.
  uint64_t leaving_freed_bytes = 0;
  engine::EvictionPool alone{0};
  uint32_t alone_fruitless = 0;  // chunks sampled in a row of which none lay alone and could go
  uint64_t only_shared_until_us = 0;
  bool above_mark = false;    // until the low mark is reached
  uint64_t wanted_bytes = 0;  // the largest put that the quota had no room for since the last tick
  uint32_t fruitless = 0;     // chunks sampled in a row of which none could go
  uint64_t exhausted_until_us = 0;
  bool expires = true;  // chunks with an expiry have been seen, or may be there
  bool scanning = false;
  bool seen_expiry = false;  // by the scan that is under way
  ChunkKey scan_from;
  uint64_t scan_started_us = 0;
};

// A removal under way.
struct Leaving {
  ChunkKey key;
  uint32_t allocated_bytes = 0;
  uint32_t freed_bytes = 0;  // on this device
  uint32_t last_use = 0;
  bool expired = false;
};

// What another member of a chain has said of its device.
struct MemberRoom {
  TargetId member;
  uint64_t lacking_bytes = 0;
  bool short_of_room = false;
  uint64_t said_us = 0;
};

// What a target holds of a space for which there is a policy.
struct SpaceUse {
  TargetId target;
  uint64_t space = 0;
  uint64_t chunks = 0, bytes = 0;  // committed; as allocated
  uint64_t evicted_chunks = 0, evicted_bytes = 0;
  uint64_t expired_chunks = 0;
  uint64_t hits = 0;
  bool ready = false;                           // chunks and bytes count all of it
  uint64_t shared_chunks = 0, saved_bytes = 0;  // of them: in slots of several; slots that this saves
};

// The spaces of one target for which there are policies, by their ids. Records stay in place while their
// policy stays.
class TargetSpaces {
 public:
  TargetSpaces(TargetId target, ChainId chain) : target_(target), chain_(chain) {}
  TargetId target() const { return target_; }
  ChainId chain() const { return chain_; }
  HeldSpace* find(uint64_t space);  // null: no policy
  std::span<const std::unique_ptr<HeldSpace>> all() const { return spaces_; }
  const std::vector<uint64_t>& ids() const { return ids_; }          // sorted
  std::vector<uint64_t> dedup_ids() const;                           // of those that deduplicate
  bool ids_changed() { return std::exchange(ids_changed_, false); }  // since this was asked last

  bool leads = false;  // its replica is the head of the chain and serves
  std::vector<Leaving> leaving;
  std::vector<MemberRoom> members;

 private:
  friend class Spaces;
  // `policies`: all of the shard, sorted by chain and space.
  void take(std::span<const SpacePolicy> policies);

  TargetId target_;
  ChainId chain_;
  std::vector<std::unique_ptr<HeldSpace>> spaces_;
  std::vector<uint64_t> ids_;
  bool ids_changed_ = false;
};

class Spaces {
 public:
  // Replaces all policies. Of two for one (space, chain) the last counts.
  void set(std::vector<SpacePolicy> policies);
  // The target is in that chain; made if it is new. Points to what stays until drop().
  TargetSpaces* take(TargetId target, ChainId chain);
  void drop(TargetId target);
  const std::map<TargetId, TargetSpaces>& targets() const { return targets_; }
  std::map<TargetId, TargetSpaces>& targets() { return targets_; }

 private:
  std::vector<SpacePolicy> policies_;  // sorted by chain and space
  std::map<TargetId, TargetSpaces> targets_;
};

}  // namespace ffs::server
