// XXH3 with 128 bits, of many pieces: the hash of checkpoints (docs/guides/checkpoint.md, Hashes). Pure, no
// locks, any thread. Vectorised for what the processor has, found out once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs {

struct HashPiece {
  const uint8_t* from;  // not looked at where there are no bytes
  uint64_t bytes;
};

inline constexpr size_t kXxh3Bytes = 16;

// Seed 0; kXxh3Bytes a piece, in the order that xxhash calls canonical (the high half first, big endian).
void xxh3_many(const HashPiece* pieces, size_t count, uint8_t* digests);
const char* xxh3_backend();

// The same by backend; for tests. Those that the processor lacks are left out of xxh3_backends().
struct Xxh3Backend {
  const char* name;
  void (*hash)(const uint8_t* from, uint64_t bytes, uint8_t* digest);
};
// Best first; the last, "plain", is always there. `count` backends.
const Xxh3Backend* xxh3_backends(size_t* count);

}  // namespace ffs
