// int8.h for processors with AVX2 and F16C (compiled for them: CMakeLists.txt).
#include <immintrin.h>

#include "base/int8_kernel.h"

namespace {

struct Avx2 {
  using Floats = __m256;
  static constexpr unsigned kLanes = 8;
  static Floats all(float x) { return _mm256_set1_ps(x); }
  static Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats most(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static void store(float* to, Floats a) { _mm256_storeu_ps(to, a); }
  template <bool kBfloat>
  static Floats widen(const uint8_t* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    if constexpr (!kBfloat) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  template <bool kBfloat>
  static void narrow(uint8_t* at, Floats x) {
    __m128i bits;
    if constexpr (kBfloat) {
      const __m256i wide = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
      const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7fff)), odd);
      const __m256i half = _mm256_srli_epi32(sum, 16);
      bits = _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    } else {
      bits = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), bits);
  }
  static void store_codes(uint8_t* to, Floats x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }
  static Floats load_codes(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  }
};

}  // namespace

extern const ffs::Int8Backend ffs_int8_avx2_backend;
const ffs::Int8Backend ffs_int8_avx2_backend{"avx2", encode_any<Avx2>, decode_any<Avx2>};
