// What the replica sees of its target's store: facts that are in memory, answered at once.
// Implemented by the server over the engine's index, and by the simulator over a model.
//
// What it shows: an effect of the replica (Stage, Commit, Refuse, SetSpaceEpoch, PersistChain)
// may be visible from the moment that the server has executed it, and must be from its
// completion on; Commit and Refuse are visible at once. The replica calls these functions only
// from within its own event functions. None blocks; none fails.
#pragma once

#include <optional>

#include "craq/messages.h"

namespace ffs::craq {

// One version of a chunk. `version` none: the chunk doesn't exist.
struct ChunkFacts {
  Version version;
  uint32_t length_bytes = 0;  // of its bytes as they are stored, sent and copied, encoded or not
  Attributes attributes;
  uint32_t logical_bytes() const {
    return attributes.codec != 0 ? attributes.logical_length_bytes : length_bytes;
  }
};

// A version that is durable and not committed. After a start this is all that is known of it,
// so it must all be in the journal: the replica resends it as a whole chunk (or a removal).
struct PendingFacts {
  ChunkKey key;
  ChunkFacts chunk;  // as of this version; chunk.version is never none
  bool removal = false;
  UpdateIdentity identity;
  uint64_t space_epoch = 0;
};

enum class RetryState : uint8_t { pending = 1, done = 2, refused = 3 };

struct RetryEntry {
  uint64_t sequence = 0;
  ChunkKey key;
  Version version;
  RetryState state = RetryState::pending;
  Outcome outcome = Outcome::ok;  // of a refusal; Outcome::dropped counts as no entry
};

// The chain state that this target has made durable.
struct ChainRecord {
  ChainVersion proposed;  // the newest proposal; zero = none
  ChainVersion adopted;   // the newest recorded version adopted; zero = never in a chain
};

class PendingVisitor {
 public:
  virtual void visit(const PendingFacts& pending) = 0;

 protected:
  ~PendingVisitor() = default;
};

class RetryVisitor {
 public:
  virtual void visit(ClientId client, uint32_t channel, const RetryEntry& entry) = 0;

 protected:
  ~RetryVisitor() = default;
};

class SpaceEpochVisitor {
 public:
  virtual void visit(uint64_t space, uint64_t epoch) = 0;

 protected:
  ~SpaceEpochVisitor() = default;
};

// A committed chunk for comparison: `digest` is over version, length, attributes and the checksums of all
// granules, the same on every replica that holds the same.
struct ChunkDigest {
  ChunkKey key;
  ChunkFacts chunk;
  uint64_t digest = 0;
};

class StoreView {
 public:
  // Committed state; version none when there is no such chunk.
  virtual ChunkFacts committed(const ChunkKey& key) const = 0;

  // Every pending version of this target, those of one chunk in the order of their versions.
  // Called once, at construction.
  virtual void each_pending(PendingVisitor& visitor) const = 0;

  // The retry table of this target's chain.
  virtual std::optional<RetryEntry> retry(ClientId client, uint32_t channel) const = 0;
  virtual bool fenced(ClientId client) const = 0;

  // The least epoch accepted in a space; 0 when none was set.
  virtual uint64_t least_epoch(uint64_t space) const = 0;

  virtual ChainRecord chain_record() const = 0;

  // Would an update of length_bytes fit now, beside others of unseen_bytes that were numbered in this very
  // event (their Stage hasn't been executed; each counted as 4 KiB at least)? ok, no_space or over_quota.
  // Asked by the head before it numbers an update; a hint: Stage may fail all the same.
  virtual Outcome admit(const ChunkKey& key, UpdateKind kind, uint32_t length_bytes,
                        uint64_t unseen_bytes) const = 0;
  // Whether evictions will make room for what admit() refuses now: then it waits.
  virtual bool makes_room(const ChunkKey&) const { return false; }

  // --- eviction (docs/craq.md, Eviction)
  // The manager's time, ms, as far as it is known here; 0: not. What has expired by it is absent for clients.
  virtual uint64_t manager_ms() const { return 0; }
  // Changes with each use of the chunk that this target knows of.
  virtual uint64_t last_access(const ChunkKey&) const { return 0; }

  // The first key of a space above `after` (nullptr: the first of all) and the last key of a
  // space, among the committed chunks.
  virtual std::optional<ChunkKey> first_committed(uint64_t space, const ChunkKey* after) const = 0;
  virtual std::optional<ChunkKey> last_committed(uint64_t space) const = 0;

  // The first committed chunk at or after a key, of any space, in the order of keys.
  virtual std::optional<ChunkDigest> digest_at_or_after(const ChunkKey& key) const = 0;
  virtual uint64_t chunk_count() const = 0;  // committed, of this target

  // All of this target's retry table (of this chain), and of its least space epochs.
  virtual void each_retry(RetryVisitor& visitor) const = 0;
  virtual void each_space_epoch(SpaceEpochVisitor& visitor) const = 0;

 protected:
  ~StoreView() = default;
};

}  // namespace ffs::craq
