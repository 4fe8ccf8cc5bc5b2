// int8 codes of 16-bit floats: the bound of docs/kv.md, all backends against the plain one, bad values.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/int8.h"
#include "doctest/doctest.h"

namespace ffs {
namespace {

// Independent of the code under test: by the definition of the formats.
double value_of(Float16Kind kind, uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int mantissa_bits = kind == Float16Kind::kBfloat16 ? 7 : 10;
  const int bias = kind == Float16Kind::kBfloat16 ? 127 : 15;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

bool finite(Float16Kind kind, uint16_t bits) {
  const uint16_t top = kind == Float16Kind::kBfloat16 ? 0x7f80 : 0x7c00;
  return (bits & top) != top;
}

std::vector<uint16_t> random_values(Float16Kind kind, size_t count, unsigned seed, uint16_t most) {
  std::mt19937 random(seed);
  std::vector<uint16_t> values(count);
  for (auto& bits : values) {
    do {
      bits = static_cast<uint16_t>(random());
    } while (!finite(kind, bits) || (bits & 0x7fff) > most);
  }
  return values;
}

const Int8Shape kShapes[] = {
    {Float16Kind::kFloat16, 2, 16, 3, 128}, {Float16Kind::kFloat16, 1, 1, 2, 2048},
    {Float16Kind::kFloat16, 3, 5, 2, 7},    {Float16Kind::kFloat16, 1, 1, 1, 1},
    {Float16Kind::kFloat16, 2, 3, 4, 33},
};

}  // namespace

TEST_CASE("int8: half a step and one rounding, for every backend and both formats") {
  size_t count = 0;
  const Int8Backend* backends = int8_backends(&count);
  REQUIRE(count >= 1);
  CHECK(std::string(backends[count - 1].name) == "plain");
  for (const Float16Kind kind : {Float16Kind::kFloat16, Float16Kind::kBfloat16}) {
    const double unit = kind == Float16Kind::kBfloat16 ? std::ldexp(1, -8) : std::ldexp(1, -11);
    const double least = kind == Float16Kind::kBfloat16 ? std::ldexp(1, -134) : std::ldexp(1, -25);
    // Up to 2 in size, up to 65504 or 1e37, and subnormal ones.
    const uint16_t sizes[] = {static_cast<uint16_t>(kind == Float16Kind::kBfloat16 ? 0x4000 : 0x4000),
                              static_cast<uint16_t>(kind == Float16Kind::kBfloat16 ? 0x7cf0 : 0x7bff),
                              static_cast<uint16_t>(kind == Float16Kind::kBfloat16 ? 0x2000 : 0x03ff)};
    unsigned seed = 1;
    for (Int8Shape shape : kShapes) {
      for (const uint16_t most : sizes) {
        shape.kind = kind;
        const size_t values = shape.blocks * shape.outer * shape.heads * shape.inner;
        const auto in = random_values(kind, values, seed++, most);
        std::vector<uint8_t> expected;
        for (size_t b = count; b-- > 0;) {  // plain first
          std::vector<uint8_t> codes(values + 1, 0xee);
          std::vector<float> ranges(2 * shape.blocks * shape.heads);
          std::vector<uint16_t> out(values + 1, 0xeeee);
          REQUIRE(backends[b].encode(shape, in.data(), codes.data(), ranges.data()));
          backends[b].decode(shape, codes.data(), ranges.data(), out.data());
          CHECK(codes[values] == 0xee);
          CHECK(out[values] == 0xeeee);
          if (expected.empty()) expected = codes;
          CHECK(std::memcmp(expected.data(), codes.data(), values) == 0);
          size_t wrong = 0;
          for (size_t i = 0; i < values; i++) {
            const size_t head = i / shape.inner % shape.heads;
            const size_t block = i / (shape.inner * shape.heads * shape.outer);
            const double lowest = ranges[2 * (block * shape.heads + head)];
            const double step = ranges[2 * (block * shape.heads + head) + 1];
            const double largest = std::max(std::fabs(lowest), std::fabs(lowest + 255 * step));
            const double bound = step / 2 + unit * largest * 1.001 + least + largest * std::ldexp(1, -20);
            if (std::fabs(value_of(kind, out[i]) - value_of(kind, in[i])) > bound) wrong++;
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEST_CASE("int8: the ends of a range come back, a constant head exactly, one head leaves others alone") {
  const Int8Shape shape{Float16Kind::kFloat16, 1, 4, 2, 16};
  std::vector<uint16_t> in(128, 0x3c00);               // 1
  for (size_t o = 0; o < 4; o++) in[o * 32] = 0xc900;  // -10, in head 0 only
  in[1] = 0x4900;                                      // 10
  std::vector<uint8_t> codes(128);
  std::vector<float> ranges(4);
  std::vector<uint16_t> out(128);
  REQUIRE(int8_encode(shape, in.data(), codes.data(), ranges.data()));
  int8_decode(shape, codes.data(), ranges.data(), out.data());
  CHECK(ranges[0] == -10.0f);
  CHECK(codes[0] == 0);
  CHECK(codes[1] == 255);
  CHECK(out[0] == 0xc900);
  CHECK(out[1] == 0x4900);
  CHECK(ranges[2] == 1.0f);
  CHECK(ranges[3] == 0.0f);
  for (size_t o = 0; o < 4; o++) CHECK(out[o * 32 + 16] == 0x3c00);
}

TEST_CASE("int8: what isn't finite is refused, wherever it stands") {
  size_t count = 0;
  const Int8Backend* backends = int8_backends(&count);
  for (const Float16Kind kind : {Float16Kind::kFloat16, Float16Kind::kBfloat16}) {
    const uint16_t infinite = kind == Float16Kind::kBfloat16 ? 0x7f80 : 0x7c00;
    for (const uint16_t bad :
         {infinite, static_cast<uint16_t>(infinite | 0x8000), static_cast<uint16_t>(infinite + 1)}) {
      for (const size_t at : {size_t{0}, size_t{20}, size_t{36}}) {  // in the lanes, and in what is left
        for (size_t b = 0; b < count; b++) {
          std::vector<uint16_t> in(37, 0x3c00);
          std::vector<uint8_t> codes(37);
          std::vector<float> ranges(2);
          CHECK(backends[b].encode({kind, 1, 1, 1, 37}, in.data(), codes.data(), ranges.data()));
          in[at] = bad;
          CHECK_FALSE(backends[b].encode({kind, 1, 1, 1, 37}, in.data(), codes.data(), ranges.data()));
        }
      }
    }
  }
  // Each is finite, what lies between them isn't.
  const uint16_t far[2] = {0x7f7f, 0xff7f};
  uint8_t codes[2];
  float ranges[2];
  CHECK_FALSE(int8_encode({Float16Kind::kBfloat16, 1, 1, 1, 2}, far, codes, ranges));
}

}  // namespace ffs
