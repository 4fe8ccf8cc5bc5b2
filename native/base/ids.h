// Distinct types for identifiers and versions: a target id can't be passed where a chain id
// is meant. Versions order lexicographically (docs/craq.md, Versions).
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace ffs {

template <typename Tag, typename Int>
struct Id {
  Int value = 0;
  constexpr Id() = default;
  constexpr explicit Id(Int v) : value(v) {}
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using TargetId = Id<struct TargetTag, uint64_t>;
using ChainId = Id<struct ChainTag, uint32_t>;
using ClientId = Id<struct ClientTag, uint64_t>;  // a client session, unique for ever
using NodeId = Id<struct NodeTag, uint64_t>;

// (manager term, counter): grows at every change of a chain's membership or roles.
struct ChainVersion {
  uint32_t term = 0;
  uint32_t counter = 0;
  friend constexpr auto operator<=>(const ChainVersion&, const ChainVersion&) = default;
};

// A chunk's version: the chain version in which the head numbered it, then the head's counter
// in that chain version. Zero means "no version" (the chunk does not exist).
struct Version {
  ChainVersion chain;
  uint64_t update = 0;
  friend constexpr auto operator<=>(const Version&, const Version&) = default;
  constexpr bool none() const { return *this == Version{}; }
};
static_assert(sizeof(ChainVersion) == 8);
static_assert(sizeof(Version) == 16);

// 24 bytes: space (big endian) then key, compared as bytes, so that the keys of one space are
// contiguous and a file's chunk indexes (big endian in the last 8 bytes of `key`) are in order.
struct ChunkKey {
  std::array<uint8_t, 24> bytes{};

  static constexpr ChunkKey of(uint64_t space, const std::array<uint8_t, 16>& key) {
    ChunkKey k;
    for (int i = 0; i < 8; i++) k.bytes[i] = static_cast<uint8_t>(space >> (8 * (7 - i)));
    for (int i = 0; i < 16; i++) k.bytes[8 + i] = key[i];
    return k;
  }
  // The key of chunk `index` of file `inode`: 8 zero bytes, then the index in big endian.
  static constexpr ChunkKey of_file(uint64_t inode, uint64_t index) {
    std::array<uint8_t, 16> key{};
    for (int i = 0; i < 8; i++) key[8 + i] = static_cast<uint8_t>(index >> (8 * (7 - i)));
    return of(inode, key);
  }
  constexpr uint64_t space() const {
    uint64_t s = 0;
    for (int i = 0; i < 8; i++) s = (s << 8) | bytes[i];
    return s;
  }
  friend constexpr auto operator<=>(const ChunkKey&, const ChunkKey&) = default;
};
static_assert(sizeof(ChunkKey) == 24);

inline uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

struct ChunkKeyHash {
  size_t operator()(const ChunkKey& k) const {
    uint64_t a, b, c;
    std::memcpy(&a, k.bytes.data(), 8);
    std::memcpy(&b, k.bytes.data() + 8, 8);
    std::memcpy(&c, k.bytes.data() + 16, 8);
    return mix64(a ^ mix64(b ^ mix64(c)));
  }
};

// Who asked for an update: the key of the retry table (docs/craq.md, At most once). client == 0
// marks updates that need no entry (create-if-absent, evictions, collection).
struct UpdateIdentity {
  ClientId client;
  uint32_t channel = 0;
  uint64_t sequence = 0;
  friend constexpr bool operator==(const UpdateIdentity&, const UpdateIdentity&) = default;
};

constexpr uint32_t kGranuleBytes = 64 * 1024;
constexpr uint32_t kMaxChunkBytes = 16 * 1024 * 1024;
constexpr uint32_t kMaxGranules = kMaxChunkBytes / kGranuleBytes;
constexpr uint32_t kMaxTagBytes = 16;
constexpr uint32_t kMaxReplicas = 8;

}  // namespace ffs

template <typename Tag, typename Int>
struct std::hash<ffs::Id<Tag, Int>> {
  size_t operator()(const ffs::Id<Tag, Int>& id) const { return ffs::mix64(id.value); }
};
