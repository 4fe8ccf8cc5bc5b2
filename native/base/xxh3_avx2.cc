// XXH3 in vectors of 32 bytes. Compiled with -mavx2, called where the processor has that (xxh3.cc).
#define XXH_VECTOR XXH_AVX2
#include "base/xxh3_kernel.h"

extern const ffs::Xxh3Backend ffs_xxh3_avx2_backend;
const ffs::Xxh3Backend ffs_xxh3_avx2_backend = {"avx2", hash_one};
