#include "base/int8.h"

#include "base/int8_kernel.h"

#if defined(__x86_64__)
extern const ffs::Int8Backend ffs_int8_avx2_backend;
extern const ffs::Int8Backend ffs_int8_avx512_backend;
#endif

namespace {

struct Plain {
  using Floats = float;
  static constexpr unsigned kLanes = 1;
  static float all(float x) { return x; }
  static float least(float a, float b) { return a < b ? a : b; }
  static float most(float a, float b) { return a > b ? a : b; }
  static float add(float a, float b) { return a + b; }
  static float minus(float a, float b) { return a - b; }
  static float times(float a, float b) { return a * b; }
  static void store(float* to, float a) { *to = a; }
  template <bool kBfloat>
  static float widen(const uint8_t* at) {
    return ::widen<kBfloat>(load16(at));
  }
  template <bool kBfloat>
  static void narrow(uint8_t* at, float x) {
    store16(at, ::narrow<kBfloat>(x));
  }
  static void store_codes(uint8_t* to, float x) { *to = code_of(x, 0.0f, 1.0f); }
  static float load_codes(const uint8_t* at) { return static_cast<float>(*at); }
};

struct Backends {
  ffs::Int8Backend all[3];
  size_t count = 0;
};

Backends find() {
  Backends found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    found.all[found.count++] = ffs_int8_avx512_backend;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    found.all[found.count++] = ffs_int8_avx2_backend;
  }
#endif
  found.all[found.count++] = {"plain", encode_any<Plain>, decode_any<Plain>};
  return found;
}

const Backends& backends() {
  static const Backends found = find();
  return found;
}

}  // namespace

namespace ffs {

bool int8_encode(const Int8Shape& shape, const void* values, uint8_t* codes, float* ranges) {
  return backends().all[0].encode(shape, values, codes, ranges);
}

void int8_decode(const Int8Shape& shape, const uint8_t* codes, const float* ranges, void* values) {
  backends().all[0].decode(shape, codes, ranges, values);
}

const char* int8_backend() {
  return backends().all[0].name;
}

const Int8Backend* int8_backends(size_t* count) {
  *count = backends().count;
  return backends().all;
}

}  // namespace ffs
