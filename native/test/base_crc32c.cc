#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/crc32c.h"

using namespace ffs;

namespace {

// The definition, bit by bit: the independent peer.
uint32_t slow_crc32c(const uint8_t* bytes, size_t size) {
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < size; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = (crc & 1) ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
  }
  return ~crc;
}

}  // namespace

TEST_CASE("crc32c gives the published values") {
  CHECK(crc32c("123456789", 9) == 0xe3069283u);
  CHECK(crc32c("", 0) == 0u);
  std::vector<uint8_t> zeros(32, 0), ones(32, 0xff), up(32), down(32);
  for (size_t i = 0; i < 32; i++) up[i] = static_cast<uint8_t>(i), down[i] = static_cast<uint8_t>(31 - i);
  // RFC 3720, B.4.
  CHECK(crc32c(zeros.data(), 32) == 0x8a9136aau);
  CHECK(crc32c(ones.data(), 32) == 0x62a8ab43u);
  CHECK(crc32c(up.data(), 32) == 0x46dd794eu);
  CHECK(crc32c(down.data(), 32) == 0x113fdb5cu);
}

TEST_CASE("crc32c extend, combine, zeros and copy agree with the definition") {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; round++) {
    size_t a = random() % 300, b = random() % (round % 10 == 0 ? 70000 : 300);
    std::vector<uint8_t> all(a + b);
    for (auto& byte : all) byte = static_cast<uint8_t>(random());
    uint32_t expected = slow_crc32c(all.data(), all.size());
    uint32_t first = crc32c(all.data(), a), second = crc32c(all.data() + a, b);
    CHECK(crc32c(all.data(), all.size()) == expected);
    CHECK(crc32c_extend(first, all.data() + a, b) == expected);
    CHECK(crc32c_combine(first, second, b) == expected);
    std::vector<uint8_t> copy(all.size());
    CHECK(crc32c_copy(copy.data(), all.data(), all.size()) == expected);
    CHECK(copy == all);
    std::vector<uint32_t> blocks(all.size() / kCrcBlockBytes), copied(blocks.size());
    CHECK(crc32c_blocks(all.data(), all.size(), blocks.data()) == expected);
    std::fill(copy.begin(), copy.end(), uint8_t{0});
    CHECK(crc32c_copy_blocks(copy.data(), all.data(), all.size(), copied.data()) == expected);
    CHECK(copy == all);
    CHECK(copied == blocks);
    for (size_t i = 0; i < blocks.size(); i++)
      CHECK(blocks[i] == crc32c(all.data() + i * kCrcBlockBytes, kCrcBlockBytes));
    const auto n = static_cast<uint32_t>(round % (kMaxCrcShiftBlocks + 1));
    CHECK(crc32c_shift_blocks(first, n) == crc32c_combine(first, 0, uint64_t{n} * kCrcBlockBytes));
    std::memset(all.data() + a, 0, b);
    CHECK(crc32c_extend_zeros(first, b) == crc32c(all.data(), all.size()));
  }
}
