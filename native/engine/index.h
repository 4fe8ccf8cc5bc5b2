// The chunks of a store in memory: found by hash, walked in the order (target, key). Records live
// in paged arenas and name each other by number (0: none), so nothing moves while the store grows. A
// chunk of 1 MiB takes 112 bytes for its record with the links of the order, 64 for its checksums and 5
// to 9 in the hash: 192 at most is the promise (docs/operations.md, Memory). Shard thread only; no I/O.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "base/ids.h"
#include "engine/arena.h"
#include "engine/chunk_hash.h"
#include "engine/chunk_store.h"
#include "engine/format.h"

namespace ffs::engine {

// Whole blocks that lie over a slot (docs/disk_format.md, overlay). A version names its newest
// one; `next` is older. Chains are shared between versions, so counted.
struct Overlay {
  uint32_t next = 0;
  uint32_t refs = 0;
  uint32_t first_block = 0;
  uint32_t blocks = 0;
  uint8_t* bytes = nullptr;  // null (in replay only): still on the device, from byte `at` on
  uint64_t at = 0;

  uint32_t& free_link() { return next; }
};

// What is narrower here than on the wire or the device is refused, or cut (expiry), before it gets here.
struct Image {
  Version version;
  uint64_t place : kPlaceBits = 0;
  uint64_t place_class : 4 = 0;  // says nothing without a place
  // Blocks of the slot from here on belong to no version, also not to a dropped one: appends may
  // write there without asking anybody.
  uint64_t high_blocks : 13 = 0;
  uint64_t kind_number : 3 = static_cast<uint64_t>(UpdateKind::write);
  uint64_t role : kRoleBits = 0;
  uint64_t expiry_ms : kExpiryBits = 0;
  uint64_t codec : 8 = 0;
  uint64_t flags : 8 = 0;
  std::array<uint8_t, kMaxTagBytes> tag{};
  uint32_t stored : 25 = 0;
  uint32_t tag_bytes : 5 = 0;
  uint32_t logical = 0;
  uint32_t sums = 0;
  uint32_t overlay = 0;

  UpdateKind kind() const { return static_cast<UpdateKind>(kind_number); }
  uint32_t granules() const { return granules_of(codec == 0 ? logical : stored); }
  Attributes attributes() const {
    return {expiry_ms,
            static_cast<uint8_t>(flags & ~uint64_t{kFlagSharedSlot}),
            static_cast<uint8_t>(role),
            static_cast<uint8_t>(codec),
            static_cast<uint8_t>(tag_bytes),
            tag};
  }
  void set_attributes(const Attributes& attributes) {
    expiry_ms = std::min(attributes.expiry_ms, kMaxExpiryMs);
    flags = attributes.flags & ~uint32_t{kFlagSharedSlot};  // says something of the slot only
    role = attributes.role & kMaxRole;
    codec = attributes.codec;
    tag_bytes = attributes.tag_bytes & 31;
    tag = attributes.tag;
  }
};
static_assert(sizeof(Image) == 64 && std::is_trivially_copyable_v<Image>);
static_assert(kMaxChunkBytes < 1u << 25 && kMaxChunkBytes / kBlock < 1u << 13 && kClasses < 16);

struct Pending {
  Image image;
  Version base;
  UpdateIdentity identity;
  ChainId chain;
  uint64_t space_epoch = 0;
  uint32_t write_offset = 0;
  uint32_t write_length = 0;
  bool durable = false;
  bool arriving = false;  // its data is still being written; always the newest of its chunk
};

// What only a chunk with activity has.
struct Live {
  std::vector<Pending> pendings;  // oldest first
  bool applying = false;          // its overlays are being written in place
  bool apply_queued = false;
  uint64_t apply_block = 0;  // the journal block that must be flushed first
  uint32_t apply_head = 0;   // of the overlays that go into the slot; referenced while apply_queued
  uint32_t chunk = 0;        // whose it is; 0: nobody's
  uint32_t next_free = 0;

  uint32_t& free_link() { return next_free; }
};

struct Chunk {
  ChunkKey key;
  Image image;  // version none: nothing committed
  uint32_t left = 0;
  uint32_t right = 0;
  uint32_t live = 0;
  Access access;
  uint16_t target = 0;
  bool used = false;

  uint32_t& free_link() { return left; }
};
static_assert(sizeof(Chunk) == 112);

class Index {
 public:
  explicit Index(uint64_t max_chunks);

  uint32_t find(uint16_t target, const ChunkKey& key) const;  // 0: absent
  uint32_t insert(uint16_t target, const ChunkKey& key);      // must be absent
  // The same for one that comes after all others, without the search for its place in the order.
  uint32_t append(uint16_t target, const ChunkKey& key);
  void erase(uint32_t chunk);

  Chunk& operator[](uint32_t chunk) { return chunks_[chunk]; }
  const Chunk& operator[](uint32_t chunk) const { return chunks_[chunk]; }
  uint32_t size() const { return chunks_.live(); }
  // Above every number ever given out: [1, end) can be walked in memory order. A number that isn't in
  // use has no place.
  uint32_t end() const { return chunks_.end(); }
  uint32_t live_count() const { return lives_.live(); }

  // The first chunk with (target, key) >= the given one; `strictly`: >. 0: none.
  uint32_t lower_bound(uint16_t target, const ChunkKey& key, bool strictly) const;
  // The last chunk with (target, key) <= the given one; 0: none.
  uint32_t floor(uint16_t target, const ChunkKey& key) const;

  // f(chunk) from the first chunk with (target, key) >= the given one on (`strictly`: >), in order, until
  // it returns false. f doesn't change the tree.
  template <typename F>
  void walk(uint16_t target, const ChunkKey& key, bool strictly, F f) const;

  Live& live(uint32_t chunk);  // made if absent
  Live* live_if(uint32_t chunk) { return chunks_[chunk].live ? &lives_[chunks_[chunk].live] : nullptr; }
  const Live* live_if(uint32_t chunk) const { return const_cast<Index*>(this)->live_if(chunk); }
  void drop_live_if_idle(uint32_t chunk);
  // f(chunk) for every chunk with activity, in no order. f may drop the activity of that chunk.
  template <typename F>
  void each_live(F f) {
    for (uint32_t i = 1; i < lives_.end(); i++) {
      if (lives_[i].chunk != 0) f(lives_[i].chunk);
    }
  }

  // f(chunk) for every chunk, in no order. f may erase that chunk.
  template <typename F>
  void each(F f) {
    for (uint32_t i = 1; i < chunks_.end(); i++) {
      if (chunks_[i].used) f(i);
    }
  }
  // Of everything here, rooms kept free included.
  uint64_t memory_bytes() const;

  SumArena sums;
  Arena<Overlay, 256> overlays;

 private:
  uint64_t hash_of(uint16_t target, const ChunkKey& key) const;
  uint64_t hash_of(uint32_t chunk) const { return hash_of(chunks_[chunk].target, chunks_[chunk].key); }
  auto hasher() const {
    return [this](uint32_t chunk) { return hash_of(chunk); };
  }
  int compare(uint16_t target, const ChunkKey& key, const Chunk& chunk) const;
  uint64_t priority(uint32_t chunk) const { return mix64(hash_of(chunk)); }
  uint32_t add(uint16_t target, const ChunkKey& key);
  void tree_insert(uint32_t chunk);
  void tree_erase(uint32_t chunk);
  void split(uint32_t tree, const Chunk& at, uint32_t* less, uint32_t* more);

  // Far above what the order's random shape gives to 2^32 chunks.
  static constexpr uint32_t kMaxDepth = 256;

  Arena<Chunk> chunks_;
  Arena<Live, 64> lives_;
  ChunkHash hash_;
  std::array<uint64_t, 3> secret_;  // of the hash: nobody can choose keys that collide
  std::vector<uint32_t> spine_;     // the way from the root to the last chunk; empty: not known
  uint32_t root_ = 0;
  mutable uint32_t last_found_ = 0;  // by find(); 0: nothing
};

template <typename F>
void Index::walk(uint16_t target, const ChunkKey& key, bool strictly, F f) const {
  uint32_t path[kMaxDepth];  // those above that come after, the next one last
  uint32_t depth = 0;
  auto push = [&](uint32_t chunk) {
    FFS_CHECK(depth < kMaxDepth);
    path[depth++] = chunk;
  };
  for (uint32_t at = root_; at != 0;) {
    const int order = compare(target, key, chunks_[at]);
    const bool comes = order < 0 || (order == 0 && !strictly);
    if (comes) push(at);
    at = comes ? chunks_[at].left : chunks_[at].right;
  }
  while (depth > 0) {
    const uint32_t next = path[--depth];
    if (!f(next)) return;
    for (uint32_t at = chunks_[next].right; at != 0; at = chunks_[at].left) push(at);
  }
}

}  // namespace ffs::engine
