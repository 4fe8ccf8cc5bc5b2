// The loops of int8.h over a vector type V, for int8_plain.cc, int8_avx2.cc and int8_avx512.cc. All of it has
// internal linkage and nothing else is included: those files are compiled for different processors, and no
// function of one may be linked in place of another's.
#pragma once

#include <stdint.h>
#include <string.h>

#include "base/int8.h"

namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float widen_bfloat16(uint16_t bits) {
  return float_of_bits(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t narrow_bfloat16(float value) {
  const uint32_t bits = bits_of_float(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to nearest, ties to even
}

inline float widen_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return float_of_bits(sign | rest | 0x7f800000u);  // infinite, not a number
  // The exponent is rebased by a product, which takes subnormals along.
  return float_of_bits(sign | bits_of_float(float_of_bits(rest) * 5.192296858534828e33f));  // 2^112
}

inline uint16_t narrow_float16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // subnormal: the sum rounds to multiples of 2^-24
    const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

template <bool kBfloat>
inline float widen(uint16_t bits) {
  return kBfloat ? widen_bfloat16(bits) : widen_float16(bits);
}

template <bool kBfloat>
inline uint16_t narrow(float value) {
  return kBfloat ? narrow_bfloat16(value) : narrow_float16(value);
}

inline uint16_t load16(const uint8_t* at) {
  uint16_t bits;
  memcpy(&bits, at, 2);
  return bits;
}

inline void store16(uint8_t* at, uint16_t bits) {
  memcpy(at, &bits, 2);
}

struct Span {
  float lowest, highest;
  float taint;  // 0 if all values are finite
};

// The lanes of V first, what is left one by one. `row` bytes lie between two pieces of `inner` values.
template <class V, bool kBfloat>
Span span_of(const uint8_t* values, uint64_t outer, uint64_t row, uint64_t inner) {
  const float first = widen<kBfloat>(load16(values));
  typename V::Floats low = V::all(first), high = low, taint = V::all(0.0f);
  Span span{first, first, 0.0f};
  for (uint64_t o = 0; o < outer; o++) {
    const uint8_t* piece = values + o * row;
    uint64_t i = 0;
    for (; i + V::kLanes <= inner; i += V::kLanes) {
      const typename V::Floats x = V::template widen<kBfloat>(piece + 2 * i);
      low = V::least(low, x);
      high = V::most(high, x);
      taint = V::add(taint, V::times(x, V::all(0.0f)));
    }
    for (; i < inner; i++) {
      const float x = widen<kBfloat>(load16(piece + 2 * i));
      span.lowest = x < span.lowest ? x : span.lowest;
      span.highest = x > span.highest ? x : span.highest;
      span.taint += x * 0.0f;
    }
  }
  float lows[V::kLanes], highs[V::kLanes], taints[V::kLanes];
  V::store(lows, low);
  V::store(highs, high);
  V::store(taints, taint);
  for (unsigned lane = 0; lane < V::kLanes; lane++) {
    span.lowest = lows[lane] < span.lowest ? lows[lane] : span.lowest;
    span.highest = highs[lane] > span.highest ? highs[lane] : span.highest;
    span.taint += taints[lane];
  }
  return span;
}

inline uint8_t code_of(float x, float lowest, float inverse) {
  const float scaled = (x - lowest) * inverse;
  const float whole = scaled + 12582912.0f - 12582912.0f;  // 1.5 x 2^23: rounds to nearest, ties to even
  return static_cast<uint8_t>(whole < 0.0f ? 0.0f : whole > 255.0f ? 255.0f : whole);
}

template <class V, bool kBfloat>
bool encode(const ffs::Int8Shape& shape, const void* values, uint8_t* codes, float* ranges) {
  const uint64_t row = shape.heads * shape.inner;
  for (uint64_t block = 0; block < shape.blocks; block++) {
    for (uint64_t head = 0; head < shape.heads; head++) {
      const uint64_t begin = block * shape.outer * row + head * shape.inner;
      const uint8_t* from = static_cast<const uint8_t*>(values) + 2 * begin;
      const Span span = span_of<V, kBfloat>(from, shape.outer, 2 * row, shape.inner);
      const float width = span.highest - span.lowest;
      if (!(span.taint == 0.0f) || !(width * 0.0f == 0.0f)) return false;
      const float step = width / 255.0f;
      // A width so small that its step has no inverse: all values are the lowest then.
      const float inverse = width > 1e-35f ? 255.0f / width : 0.0f;
      ranges[2 * (block * shape.heads + head)] = span.lowest;
      ranges[2 * (block * shape.heads + head) + 1] = inverse > 0.0f ? step : 0.0f;
      for (uint64_t o = 0; o < shape.outer; o++) {
        const uint8_t* piece = from + o * 2 * row;
        uint8_t* to = codes + begin + o * row;
        uint64_t i = 0;
        for (; i + V::kLanes <= shape.inner; i += V::kLanes) {
          const typename V::Floats x = V::template widen<kBfloat>(piece + 2 * i);
          V::store_codes(to + i, V::times(V::minus(x, V::all(span.lowest)), V::all(inverse)));
        }
        for (; i < shape.inner; i++) {
          to[i] = code_of(widen<kBfloat>(load16(piece + 2 * i)), span.lowest, inverse);
        }
      }
    }
  }
  return true;
}

template <class V, bool kBfloat>
void decode(const ffs::Int8Shape& shape, const uint8_t* codes, const float* ranges, void* values) {
  uint8_t* to = static_cast<uint8_t*>(values);
  for (uint64_t piece = 0; piece < shape.blocks * shape.outer * shape.heads; piece++) {
    const uint64_t head = piece % shape.heads, block = piece / (shape.heads * shape.outer);
    const float lowest = ranges[2 * (block * shape.heads + head)];
    const float step = ranges[2 * (block * shape.heads + head) + 1];
    const uint64_t begin = piece * shape.inner;
    uint64_t i = 0;
    for (; i + V::kLanes <= shape.inner; i += V::kLanes) {
      const typename V::Floats x =
          V::add(V::times(V::load_codes(codes + begin + i), V::all(step)), V::all(lowest));
      V::template narrow<kBfloat>(to + 2 * (begin + i), x);
    }
    for (; i < shape.inner; i++) {
      const float x = static_cast<float>(codes[begin + i]) * step + lowest;
      store16(to + 2 * (begin + i), narrow<kBfloat>(x));
    }
  }
}

template <class V>
bool encode_any(const ffs::Int8Shape& shape, const void* values, uint8_t* codes, float* ranges) {
  return shape.kind == ffs::Float16Kind::kBfloat16 ? encode<V, true>(shape, values, codes, ranges)
                                                   : encode<V, false>(shape, values, codes, ranges);
}

template <class V>
void decode_any(const ffs::Int8Shape& shape, const uint8_t* codes, const float* ranges, void* values) {
  shape.kind == ffs::Float16Kind::kBfloat16 ? decode<V, true>(shape, codes, ranges, values)
                                            : decode<V, false>(shape, codes, ranges, values);
}

}  // namespace
