// int8.h for processors with AVX-512 (F, BW, VL; compiled for them: CMakeLists.txt).
#include <immintrin.h>

#include "base/int8_kernel.h"

namespace {

struct Avx512 {
  using Floats = __m512;
  static constexpr unsigned kLanes = 16;
  static Floats all(float x) { return _mm512_set1_ps(x); }
  static Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats most(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }
  template <bool kBfloat>
  static Floats widen(const uint8_t* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (!kBfloat) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  template <bool kBfloat>
  static void narrow(uint8_t* at, Floats x) {
    __m256i bits;
    if constexpr (kBfloat) {
      const __m512i wide = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
      const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(0x7fff)), odd);
      bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
    } else {
      bits = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bits);
  }
  static void store_codes(uint8_t* to, Floats x) {
    const __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32(x), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(whole));
  }
  static Floats load_codes(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
};

}  // namespace

extern const ffs::Int8Backend ffs_int8_avx512_backend;
const ffs::Int8Backend ffs_int8_avx512_backend{"avx512", encode_any<Avx512>, decode_any<Avx512>};
