// What a chunk store says of itself: room, counters, who the device is, what spaces take and their chunks as
// eviction sees them (chunk_store.h).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"

namespace ffs::engine {

using Uuid = std::array<uint8_t, 16>;

struct Capacity {
  uint64_t capacity_bytes = 0;  // room for chunks
  uint64_t free_bytes = 0;      // what new chunks may still take
  uint64_t max_chunks = 0;
  uint64_t chunks = 0;
};

struct TargetUsage {
  uint64_t chunks = 0;
  uint64_t logical_bytes = 0;    // sum of lengths of committed versions
  uint64_t allocated_bytes = 0;  // slots that belong to this target
};

struct StoreMetrics {
  uint64_t flushes = 0;
  uint64_t journal_blocks = 0;
  uint64_t groups_ahead = 0;        // that were written while the one before was being flushed
  uint64_t journal_bytes = 0;       // written since open
  uint64_t journal_used_bytes = 0;  // since the start of the last snapshot
  uint64_t journal_size_bytes = 0;
  uint64_t snapshots = 0;        // completed since open
  uint64_t snapshot_age_us = 0;  // since the last completed one; since open if none
  uint64_t staged = 0, committed = 0, refused = 0, reads = 0;
  uint64_t installed = 0, erased = 0;
  uint64_t bytes_read = 0, bytes_written = 0;
  uint64_t rebuilds = 0, deferred = 0, in_place = 0, fresh = 0;  // updates by path
  uint64_t granules_read = 0;                                    // to verify them before a small overwrite
  uint64_t overlay_bytes = 0;
  uint64_t checksum_errors = 0;
  uint64_t waiting = 0;          // ops that wait for room inside the store
  uint64_t longest_step_us = 0;  // of waking waiters, ending a flush, or writing a slice, without returning
  bool poisoned = false;
  uint64_t moves = 0, moved_bytes = 0;  // by compaction
  uint64_t moves_dropped = 0;           // an update waited, a granule was bad
  uint64_t slabs_emptied = 0;
  uint64_t free_slabs = 0;
  uint64_t discards = 0, discarded_bytes = 0, discard_failures = 0;
  uint64_t discards_due_bytes = 0;  // freed slabs that weren't discarded yet
  uint64_t waiting_for_room = 0;    // of `waiting`: updates that find no slot now
  // Content deduplication since open; what it saves now, in slots.
  uint64_t dedup_compared_bytes = 0, dedup_differ = 0;  // checksums equal, bytes not
  uint64_t dedup_shared = 0, dedup_shared_bytes = 0;
  uint64_t shared_chunks = 0, saved_bytes = 0;
  uint64_t memory_bytes = 0;  // for the chunks and the map of slots (docs/operations.md, Memory)
};

// What compaction would do good for. soon: few slabs are free and some could be. urgent: updates wait for a
// slot, and the store compacts by itself from now on.
enum class SpaceNeed : uint8_t { none, soon, urgent };

struct DeviceIdentity {
  Uuid cluster{};
  Uuid device{};
  std::vector<TargetId> targets;
  uint64_t size_bytes = 0;
  uint64_t max_chunks = 0;
  uint32_t format_version = 0;
  uint64_t created_ms = 0;  // Unix time of the format
  uint64_t journal_bytes = 0;
  uint32_t sector_bytes = 0;
  uint64_t features_compat = 0, features_ro_compat = 0, features_incompat = 0;
  std::string written_by;  // program version that formatted it
  uint64_t superblock_sequence = 0;
  uint64_t slabs = 0;
  uint64_t snapshot_id = 0;  // 0: none yet
  uint64_t snapshot_ms = 0;  // Unix time of its completion; 0: unknown
  uint64_t snapshot_used_bytes = 0;
  uint64_t snapshot_area_bytes = 0;
};

struct SpaceStats {
  uint64_t chunks = 0;
  uint64_t bytes = 0;
  bool complete = false;  // false: `next` is where to go on
  ChunkKey next;
};

// When a chunk was used, by the manager's clock: stamps of 64 ms, 1 is the time of the format, 0 unknown
// (docs/disk_format.md, Access times).
struct Access {
  uint32_t last = 0;
  uint32_t previous = 0;  // the use before that; 0: none, or unknown
  friend constexpr bool operator==(const Access&, const Access&) = default;
};

constexpr uint32_t kStampMs = 64;
constexpr uint32_t kCorrelatedStamps = 32;  // uses within about two seconds count as one

// What the chunks of a space take on a target. Pending versions count in bytes, not in chunks.
struct SpaceUse {
  uint64_t chunks = 0;
  uint64_t allocated_bytes = 0;  // slots
  bool ready = false;            // false: not asked for, or its chunks are still being counted
  // Of them: chunks whose slot others name as well, and the slots that there would be without (of all chunks
  // that share, also while others are being counted).
  uint64_t shared_chunks = 0;
  uint64_t saved_bytes = 0;
};

// A committed chunk as eviction sees it.
struct ChunkSample {
  ChunkKey key;
  Version version;
  uint32_t allocated_bytes = 0;  // its slot, as if nobody shared it
  Access access;
  bool pinned = false;
  uint64_t expiry_ms = 0;
  bool shared = false;  // others name its slot: it isn't free when this one goes
};

}  // namespace ffs::engine
