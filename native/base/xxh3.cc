#include "base/xxh3.h"

#include "base/xxh3_kernel.h"

#if defined(__x86_64__)
extern const ffs::Xxh3Backend ffs_xxh3_avx2_backend;
#endif

namespace {

struct Backends {
  ffs::Xxh3Backend all[2];
  size_t count = 0;
};

Backends find() {
  Backends found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.all[found.count++] = ffs_xxh3_avx2_backend;
#endif
  found.all[found.count++] = {"plain", hash_one};
  return found;
}

const Backends& backends() {
  static const Backends found = find();
  return found;
}

}  // namespace

namespace ffs {

void xxh3_many(const HashPiece* pieces, size_t count, uint8_t* digests) {
  const Xxh3Backend& best = backends().all[0];
  for (size_t i = 0; i < count; i++) best.hash(pieces[i].from, pieces[i].bytes, digests + i * kXxh3Bytes);
}

const char* xxh3_backend() {
  return backends().all[0].name;
}

const Xxh3Backend* xxh3_backends(size_t* count) {
  *count = backends().count;
  return backends().all;
}

}  // namespace ffs
