// The chunks of a store in memory: found by hash, walked in the order (target, key). Records live
// in paged arenas and point to each other by number (0: none), so nothing moves while the store
// grows and a chunk of up to 1 MiB takes about 190 bytes. Shard thread only; no I/O.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/ids.h"
#include "engine/chunk_store.h"
#include "engine/format.h"

namespace ffs::engine {

// Items of one type by number, in pages that never move. Number 0 is never given out.
template <typename T, uint32_t kPageItems = 1024>
class Arena {
 public:
  uint32_t add() {
    if (free_.empty()) {
      if (used_ == pages_.size() * kPageItems) pages_.push_back(std::make_unique<T[]>(kPageItems));
      return used_++;
    }
    uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  void remove(uint32_t index) { free_.push_back(index); }
  T& operator[](uint32_t index) { return pages_[index / kPageItems][index % kPageItems]; }
  const T& operator[](uint32_t index) const { return pages_[index / kPageItems][index % kPageItems]; }
  uint32_t end() const { return used_; }  // above every number ever given out
  uint32_t live() const { return used_ - 1 - static_cast<uint32_t>(free_.size()); }

  Arena() {
    pages_.push_back(std::make_unique<T[]>(kPageItems));
    used_ = 1;
  }

 private:
  std::vector<std::unique_ptr<T[]>> pages_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;
};

// Granule checksums: runs of 1, 2, 4 .. 256 numbers.
class SumArena {
 public:
  uint32_t add(uint32_t count);  // 0 for count 0
  void remove(uint32_t handle, uint32_t count);
  uint32_t* at(uint32_t handle, uint32_t count);
  const uint32_t* at(uint32_t handle, uint32_t count) const {
    return const_cast<SumArena*>(this)->at(handle, count);
  }

 private:
  static constexpr uint32_t kOrders = 9;
  static constexpr uint32_t kPageNumbers = 16384;
  struct Order {
    std::vector<std::unique_ptr<uint32_t[]>> pages;
    std::vector<uint32_t> free;
    uint32_t used = 1;
  };
  Order orders_[kOrders];
};

// Whole blocks that lie over a slot (docs/disk_format.md, overlay). A version names its newest
// one; `next` is older. Chains are shared between versions, so counted.
struct Overlay {
  uint32_t next = 0;
  uint32_t refs = 0;
  uint32_t first_block = 0;
  uint32_t blocks = 0;
  uint8_t* bytes = nullptr;
};

struct Image {
  Version version;
  uint64_t place = 0;
  uint64_t expiry_ms = 0;
  std::array<uint8_t, kMaxTagBytes> tag{};
  uint32_t stored = 0;
  uint32_t logical = 0;
  uint32_t sums = 0;
  uint32_t overlay = 0;
  // Blocks of the slot from here on belong to no version, also not to a dropped one: appends may
  // write there without asking anybody.
  uint16_t high_blocks = 0;
  uint8_t place_class = kNoClass;
  uint8_t codec = 0;
  uint8_t flags = 0;
  uint8_t role = 0;
  uint8_t tag_bytes = 0;
  UpdateKind kind = UpdateKind::write;

  uint32_t granules() const { return granules_of(codec == 0 ? logical : stored); }
  Attributes attributes() const { return {expiry_ms, flags, role, codec, tag_bytes, tag}; }
};
static_assert(sizeof(Image) == 72);

struct Pending {
  Image image;
  Version base;
  UpdateIdentity identity;
  ChainId chain;
  uint64_t space_epoch = 0;
  uint32_t write_offset = 0;
  uint32_t write_length = 0;
  bool durable = false;
};

// What only a chunk with activity has.
struct Live {
  std::vector<Pending> pendings;  // oldest first
  bool applying = false;          // its overlays are being written in place
  bool apply_queued = false;
  uint64_t apply_block = 0;  // the journal block that must be flushed first
  uint32_t chunk = 0;        // whose it is; 0: nobody's
};

struct Chunk {
  ChunkKey key;
  Image image;  // version none: nothing committed
  uint32_t left = 0;
  uint32_t right = 0;
  uint32_t live = 0;
  Access access;
  uint16_t target = 0;
  uint16_t reserved = 0;
};
static_assert(sizeof(Chunk) == 120);

class Index {
 public:
  explicit Index(uint64_t max_chunks);

  uint32_t find(uint16_t target, const ChunkKey& key) const;  // 0: absent
  uint32_t insert(uint16_t target, const ChunkKey& key);      // must be absent
  void erase(uint32_t chunk);

  Chunk& operator[](uint32_t chunk) { return chunks_[chunk]; }
  const Chunk& operator[](uint32_t chunk) const { return chunks_[chunk]; }
  uint32_t size() const { return size_; }

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

  SumArena sums;
  Arena<Overlay, 256> overlays;

 private:
  struct Bucket {
    uint32_t chunk = 0;
    uint32_t hash = 0;
  };
  static uint64_t hash_of(uint16_t target, const ChunkKey& key);
  int compare(uint16_t target, const ChunkKey& key, const Chunk& chunk) const;
  uint64_t priority(uint32_t chunk) const {
    return mix64(hash_of(chunks_[chunk].target, chunks_[chunk].key));
  }
  // Far above what the tree's random shape gives to 2^32 chunks.
  static constexpr uint32_t kMaxDepth = 256;
  void grow();
  void tree_insert(uint32_t chunk);
  void tree_erase(uint32_t chunk);
  void split(uint32_t tree, const Chunk& at, uint32_t* less, uint32_t* more);

  Arena<Chunk> chunks_;
  Arena<Live, 64> lives_;
  std::vector<Bucket> buckets_;
  uint64_t mask_ = 0;
  uint32_t size_ = 0;
  uint32_t root_ = 0;
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
