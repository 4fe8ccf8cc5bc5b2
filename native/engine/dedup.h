// Equal blocks of a space kept once (docs/disk_format.md, Shared slots): who names a shared slot, which
// chunks may be equal, and the worker that reads two of them, compares their bytes and has the second lie in
// the slot of the first. Everything of it that concerns other files goes through here.
//
// Candidates cost no reads: chunks of one space whose lengths, codec, class and checksums are equal. A table
// from a mix of these to one chunk of each content is filled as chunks are committed, and by a walk over all
// chunks after opening and when a chunk that stood for others has gone. Nothing is looked for on the path of
// a put. Shard thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/flat_map.h"
#include "engine/allocator.h"
#include "engine/chunk_store.h"
#include "engine/segment_map.h"
#include "engine/state.h"

namespace ffs::engine {

constexpr uint32_t kMaxSlotNames = 65535;
constexpr uint32_t kLeastSharedBytes = 64 * 1024;  // chunks that may lie beside others aren't worth it

// The chunks of one space that share slots.
struct SpaceSharing {
  uint64_t chunks = 0;       // in slots that others name as well
  uint64_t saved_bytes = 0;  // slots that there would be without
};

class Dedup {
 public:
  explicit Dedup(ChunkStore::Impl& store);
  ~Dedup();
  Dedup(const Dedup&) = delete;

  // --- names. Of shared slots only: those whose chunks have kFlagSharedSlot.
  uint32_t names(uint64_t place) const;
  // A version leaves the slot, or moves into another. True: nobody names it any more.
  bool drop_name(uint64_t place, uint8_t place_class, const SpaceKey& space);
  // Recovery: a version names it. False: it is another's, or none of the device's.
  bool claim(Allocator& allocator, uint64_t place, uint8_t place_class, const SpaceKey& space);
  SpaceSharing sharing(const SpaceKey& space) const;
  SpaceSharing sharing() const;  // of all spaces
  // `named`: the slots of all versions that have the flag, once for each chunk. Leaves each once, sorted.
  std::string check(std::vector<std::pair<uint64_t, uint8_t>>* named) const;

  // --- what the state tells
  void committed(uint32_t chunk);
  void leaves(uint32_t chunk, const Image& image);  // the committed version; its checksums are still there

  // --- compaction
  void begin_round() { moved_ = decltype(moved_)(); }
  // Its slot has been copied already for another chunk: it follows by a record alone.
  bool follow(uint32_t chunk);
  // The bytes of the chunk's slot are in `place` as well: writes the record. True: it was one of several
  // names.
  bool move(uint32_t chunk, uint64_t place);

  // --- work
  void set_spaces(uint16_t target, std::span<const uint64_t> spaces);
  bool has_work() const;
  void grant(uint32_t bytes);
  void step();  // from the pump
  void stop() { stopped_ = true; }
  uint32_t in_flight() const { return work_ != nullptr ? 1 : 0; }
  bool wants_feature() const { return wants_feature_; }  // the superblock's next copy names it
  size_t memory_bytes() const;

 private:
  struct Work;
  static uint64_t mix_of(const Index& index, const Chunk& chunk);
  bool wanted(const Chunk& chunk) const;
  bool at_rest(uint32_t chunk) const;
  bool may_be_equal(const Chunk& a, const Chunk& b) const;
  bool next_chunk(uint32_t* chunk);
  void begin_walk();
  void consider(uint32_t chunk);
  void start(uint32_t kept, uint32_t chunk);
  bool feature_is_there();
  void read_piece();
  void piece_read(int32_t result);
  bool piece_is_right(const uint8_t* bytes) const;
  bool unchanged(bool which) const;
  void end_work(bool equal);
  void share(uint32_t kept, uint32_t chunk);
  void record(uint32_t chunk, uint64_t place);
  void add_name(uint64_t place, uint8_t place_class, const SpaceKey& space);
  SpaceKey space_of(uint32_t chunk) const;

  ChunkStore::Impl& s_;
  SegmentMap<uint16_t> names_;                       // by place
  FlatMap<uint64_t, bool, NumberHash> freed_early_;  // by the mutant
  FlatMap<SpaceKey, SpaceSharing, SpaceKeyHash> sharing_;
  FlatMap<uint64_t, uint64_t, NumberHash> moved_;  // in this round of compaction: old place, new place

  FlatMap<SpaceKey, bool, SpaceKeyHash> spaces_;
  SegmentMap<uint32_t> table_;  // mix of what can be compared without reading: one chunk of each
  std::deque<uint32_t> queue_;  // chunks that were committed a short while ago
  uint32_t cursor_ = 0;         // of the walk, in the order of memory; 0: none is under way
  bool walk_wanted_ = false;
  uint64_t next_walk_us_ = 0;
  uint32_t waits_ = 0;        // a chunk whose comparison could not begin: for memory, journal room
  int64_t budget_bytes_ = 0;  // granted and not spent; below zero after a large chunk
  bool stopped_ = false;
  bool wants_feature_ = false;
  std::unique_ptr<Work> work_;
};

}  // namespace ffs::engine
