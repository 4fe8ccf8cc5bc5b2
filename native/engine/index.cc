#include "engine/index.h"

#include <sys/random.h>

#include <cstring>

namespace ffs::engine {

// ------------------------------------------------------------------------------ hash

Index::Index(uint64_t max_chunks) : hash_(max_chunks) {
  if (getrandom(secret_.data(), sizeof secret_, 0) != sizeof secret_) secret_ = {1, 2, 3};
}

uint64_t Index::hash_of(uint16_t target, const ChunkKey& key) const {
  uint64_t parts[3];
  std::memcpy(parts, key.bytes.data(), sizeof parts);
  uint64_t hash = mix64(parts[2] ^ secret_[0]);
  hash = mix64(hash ^ parts[1] ^ secret_[1]);
  return mix64(hash ^ parts[0] ^ secret_[2] ^ mix64(target + 1ull));
}

int Index::compare(uint16_t target, const ChunkKey& key, const Chunk& chunk) const {
  if (target != chunk.target) return target < chunk.target ? -1 : 1;
  return std::memcmp(key.bytes.data(), chunk.key.bytes.data(), key.bytes.size());
}

uint32_t Index::find(uint16_t target, const ChunkKey& key) const {
  auto is_it = [&](uint32_t number) {
    const Chunk& chunk = chunks_[number];
    return chunk.target == target && chunk.key == key;
  };
  // A step of an update asks for its chunk again and again.
  if (last_found_ != 0 && chunks_[last_found_].used && is_it(last_found_)) return last_found_;
  return last_found_ = hash_.find(hash_of(target, key), is_it);
}

uint32_t Index::add(uint16_t target, const ChunkKey& key) {
  const uint32_t number = chunks_.add();
  Chunk& chunk = chunks_[number];
  chunk = Chunk{};
  chunk.key = key;
  chunk.target = target;
  chunk.used = true;
  hash_.insert(hash_of(target, key), number, hasher());
  return number;
}

uint32_t Index::insert(uint16_t target, const ChunkKey& key) {
  const uint32_t number = add(target, key);
  tree_insert(number);
  return number;
}

void Index::erase(uint32_t number) {
  Chunk& chunk = chunks_[number];
  FFS_CHECK(chunk.used && chunk.live == 0);
  tree_erase(number);
  hash_.erase(hash_of(number), number, hasher());
  chunk.used = false;
  chunks_.remove(number);
}

uint64_t Index::memory_bytes() const {
  uint64_t bytes = chunks_.memory_bytes() + lives_.memory_bytes() + hash_.memory_bytes() +
                   sums.memory_bytes() + overlays.memory_bytes();
  for (uint32_t i = 1; i < lives_.end(); i++) bytes += lives_[i].pendings.capacity() * sizeof(Pending);
  return bytes;
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

uint32_t Index::append(uint16_t target, const ChunkKey& key) {
  if (spine_.empty()) {
    for (uint32_t at = root_; at != 0; at = chunks_[at].right) spine_.push_back(at);
  }
  FFS_CHECK(spine_.empty() || compare(target, key, chunks_[spine_.back()]) > 0);
  const uint32_t number = add(target, key);
  const uint64_t own = priority(number);
  uint32_t below = 0;
  while (!spine_.empty() && priority(spine_.back()) < own) {
    below = spine_.back();
    spine_.pop_back();
  }
  chunks_[number].left = below;
  (spine_.empty() ? root_ : chunks_[spine_.back()].right) = number;
  spine_.push_back(number);
  return number;
}

void Index::tree_insert(uint32_t number) {
  spine_.clear();
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
  spine_.clear();
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
