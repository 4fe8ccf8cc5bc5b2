#include "engine/index.h"

#include <bit>

namespace ffs::engine {

// ------------------------------------------------------------------------------ SumArena

namespace {
uint32_t order_of(uint32_t count) {
  return static_cast<uint32_t>(std::bit_width(std::bit_ceil(count)) - 1);
}
}  // namespace

uint32_t SumArena::add(uint32_t count) {
  if (count == 0) return 0;
  FFS_CHECK(count <= kMaxGranules);
  Order& order = orders_[order_of(count)];
  if (!order.free.empty()) {
    uint32_t handle = order.free.back();
    order.free.pop_back();
    return handle;
  }
  uint32_t per_page = kPageNumbers >> order_of(count);
  if (order.used / per_page >= order.pages.size()) {
    order.pages.push_back(std::make_unique<uint32_t[]>(kPageNumbers));
  }
  return order.used++;
}

void SumArena::remove(uint32_t handle, uint32_t count) {
  if (handle != 0) orders_[order_of(count)].free.push_back(handle);
}

uint32_t* SumArena::at(uint32_t handle, uint32_t count) {
  if (handle == 0) return nullptr;
  uint32_t order = order_of(count);
  uint32_t per_page = kPageNumbers >> order;
  return &orders_[order].pages[handle / per_page][(handle % per_page) << order];
}

// ------------------------------------------------------------------------------ hash

Index::Index(uint64_t max_chunks) {
  // Sized at start, so that no step has to rehash.
  uint64_t buckets = std::bit_ceil(max_chunks < 512 ? 1024 : max_chunks * 2);
  buckets_.resize(buckets);
  mask_ = buckets - 1;
}

uint64_t Index::hash_of(uint16_t target, const ChunkKey& key) {
  return ChunkKeyHash{}(key) ^ mix64(target + 1ull);
}

int Index::compare(uint16_t target, const ChunkKey& key, const Chunk& chunk) const {
  if (target != chunk.target) return target < chunk.target ? -1 : 1;
  return std::memcmp(key.bytes.data(), chunk.key.bytes.data(), key.bytes.size());
}

uint32_t Index::find(uint16_t target, const ChunkKey& key) const {
  uint64_t hash = hash_of(target, key);
  for (uint64_t i = hash & mask_;; i = (i + 1) & mask_) {
    const Bucket& bucket = buckets_[i];
    if (bucket.chunk == 0) return 0;
    if (bucket.hash != static_cast<uint32_t>(hash >> 32)) continue;
    const Chunk& chunk = chunks_[bucket.chunk];
    if (chunk.target == target && chunk.key == key) return bucket.chunk;
  }
}

void Index::grow() {
  std::vector<Bucket> old(buckets_.size() * 2);
  old.swap(buckets_);
  mask_ = buckets_.size() - 1;
  for (const Bucket& bucket : old) {
    if (bucket.chunk == 0) continue;
    const Chunk& chunk = chunks_[bucket.chunk];
    uint64_t i = hash_of(chunk.target, chunk.key) & mask_;
    while (buckets_[i].chunk != 0) i = (i + 1) & mask_;
    buckets_[i] = bucket;
  }
}

uint32_t Index::insert(uint16_t target, const ChunkKey& key) {
  // Chunks with only pending versions may exceed max_chunks a little.
  if ((size_ + 1ull) * 4 > buckets_.size() * 3) grow();
  uint32_t number = chunks_.add();
  Chunk& chunk = chunks_[number];
  chunk = Chunk{};
  chunk.key = key;
  chunk.target = target;
  uint64_t hash = hash_of(target, key);
  uint64_t i = hash & mask_;
  while (buckets_[i].chunk != 0) i = (i + 1) & mask_;
  buckets_[i] = {number, static_cast<uint32_t>(hash >> 32)};
  size_++;
  tree_insert(number);
  return number;
}

void Index::erase(uint32_t number) {
  Chunk& chunk = chunks_[number];
  FFS_CHECK(chunk.live == 0);
  tree_erase(number);
  uint64_t hole = hash_of(chunk.target, chunk.key) & mask_;
  while (buckets_[hole].chunk != number) hole = (hole + 1) & mask_;
  for (uint64_t i = hole;;) {
    i = (i + 1) & mask_;
    if (buckets_[i].chunk == 0) break;
    const Chunk& other = chunks_[buckets_[i].chunk];
    uint64_t home = hash_of(other.target, other.key) & mask_;
    if (((i - home) & mask_) >= ((i - hole) & mask_)) {
      buckets_[hole] = buckets_[i];
      hole = i;
    }
  }
  buckets_[hole] = {};
  size_--;
  chunks_.remove(number);
}

Live& Index::live(uint32_t number) {
  Chunk& chunk = chunks_[number];
  if (chunk.live == 0) {
    chunk.live = lives_.add();
    Live& live = lives_[chunk.live];
    live.pendings.clear();  // keeps its room
    live.applying = live.apply_queued = false;
    live.chunk = number;
  }
  return lives_[chunk.live];
}

void Index::drop_live_if_idle(uint32_t number) {
  Chunk& chunk = chunks_[number];
  if (chunk.live == 0) return;
  const Live& live = lives_[chunk.live];
  if (!live.pendings.empty() || live.applying || live.apply_queued) return;
  lives_[chunk.live].chunk = 0;
  lives_.remove(chunk.live);
  chunk.live = 0;
}

// ------------------------------------------------------------------------------ order: a treap
// A binary search tree by (target, key) that is a heap by a hash of the key: its expected depth is
// logarithmic whatever the order of insertions, and a node needs two numbers.

void Index::split(uint32_t tree, const Chunk& at, uint32_t* less, uint32_t* more) {
  while (tree != 0) {
    Chunk& node = chunks_[tree];
    if (compare(at.target, at.key, node) > 0) {
      *less = tree;
      less = &node.right;
      tree = node.right;
    } else {
      *more = tree;
      more = &node.left;
      tree = node.left;
    }
  }
  *less = *more = 0;
}

void Index::tree_insert(uint32_t number) {
  Chunk& chunk = chunks_[number];
  uint64_t own = priority(number);
  uint32_t* link = &root_;
  while (*link != 0 && priority(*link) >= own) {
    Chunk& node = chunks_[*link];
    link = compare(chunk.target, chunk.key, node) < 0 ? &node.left : &node.right;
  }
  uint32_t below = *link;
  *link = number;
  split(below, chunk, &chunk.left, &chunk.right);
}

void Index::tree_erase(uint32_t number) {
  Chunk& chunk = chunks_[number];
  uint32_t* link = &root_;
  while (*link != number) {
    Chunk& node = chunks_[*link];
    link = compare(chunk.target, chunk.key, node) < 0 ? &node.left : &node.right;
  }
  uint32_t left = chunk.left, right = chunk.right;
  while (left != 0 && right != 0) {
    if (priority(left) >= priority(right)) {
      *link = left;
      link = &chunks_[left].right;
      left = *link;
    } else {
      *link = right;
      link = &chunks_[right].left;
      right = *link;
    }
  }
  *link = left != 0 ? left : right;
}

uint32_t Index::lower_bound(uint16_t target, const ChunkKey& key, bool strictly) const {
  uint32_t best = 0;
  for (uint32_t at = root_; at != 0;) {
    const Chunk& node = chunks_[at];
    int order = compare(target, key, node);
    if (order < 0 || (order == 0 && !strictly)) {
      best = at;
      at = node.left;
    } else {
      at = node.right;
    }
  }
  return best;
}

uint32_t Index::floor(uint16_t target, const ChunkKey& key) const {
  uint32_t best = 0;
  for (uint32_t at = root_; at != 0;) {
    const Chunk& node = chunks_[at];
    if (compare(target, key, node) >= 0) {
      best = at;
      at = node.right;
    } else {
      at = node.left;
    }
  }
  return best;
}

}  // namespace ffs::engine
