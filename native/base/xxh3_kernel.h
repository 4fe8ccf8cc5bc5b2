// xxhash's own code, all of it inlined, for xxh3.cc and xxh3_avx2.cc. It has internal linkage: those files
// are compiled for different processors, and no function of one may be linked in place of the other's.
// (Vectors of 64 bytes were as fast as those of 32.)
#pragma once

#define XXH_INLINE_ALL
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "base/xxh3.h"

namespace {

void hash_one(const uint8_t* from, uint64_t bytes, uint8_t* digest) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(from, bytes));
  static_assert(sizeof(canonical) == ffs::kXxh3Bytes);
  memcpy(digest, &canonical, sizeof(canonical));
}

}  // namespace
