#include "base/crc32c.h"

#include <isa-l/crc.h>

#include <array>
#include <cstring>

namespace ffs {

namespace {

// ISA-L's crc32_iscsi neither inverts its start nor its result; the standard value does both.
uint32_t raw_update(uint32_t state, const void* bytes, size_t size) {
  auto at = const_cast<unsigned char*>(static_cast<const unsigned char*>(bytes));
  while (size > 0) {  // its length is an int
    int part = size > (1u << 30) ? (1 << 30) : static_cast<int>(size);
    state = crc32_iscsi(at, part, state);
    at += part;
    size -= static_cast<size_t>(part);
  }
  return state;
}

// Polynomial arithmetic over GF(2), bits reflected: bit 31 is x^0. The checksum register after n
// more zero bytes is the register times x^(8n) modulo P.
constexpr uint32_t kPolynomial = 0x82f63b78;

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// powers[k] = x^(8 * 2^k) mod P.
constexpr std::array<uint32_t, 64> make_powers() {
  std::array<uint32_t, 64> powers{};
  uint32_t p = 1u << 30;                           // x^1
  for (int i = 0; i < 3; i++) p = multiply(p, p);  // x^8
  for (auto& power : powers) {
    power = p;
    p = multiply(p, p);
  }
  return powers;
}
constexpr std::array<uint32_t, 64> kPowers = make_powers();

uint32_t shift_zeros(uint32_t state, uint64_t size) {
  for (int k = 0; size != 0; k++, size >>= 1) {
    if (size & 1) state = multiply(kPowers[static_cast<size_t>(k)], state);
  }
  return state;
}

constexpr size_t kCopyPieceBytes = 8192;  // stays in the first-level cache between the two passes

}  // namespace

uint32_t crc32c_extend(uint32_t crc, const void* bytes, size_t size) {
  return ~raw_update(~crc, bytes, size);
}

uint32_t crc32c(const void* bytes, size_t size) {
  return crc32c_extend(0, bytes, size);
}

uint32_t crc32c_extend_zeros(uint32_t crc, uint64_t size) {
  return ~shift_zeros(~crc, size);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  // The inversions at the seam cancel: crc(A B) = crc(A) * x^(8 |B|) + crc(B).
  return shift_zeros(crc_a, size_b) ^ crc_b;
}

uint32_t crc32c_copy_extend(uint32_t crc, void* destination, const void* source, size_t size) {
  auto to = static_cast<uint8_t*>(destination);
  auto from = static_cast<const uint8_t*>(source);
  uint32_t state = ~crc;
  while (size > 0) {
    size_t part = size < kCopyPieceBytes ? size : kCopyPieceBytes;
    std::memcpy(to, from, part);
    // Of the copy, not of the source: a source that its owner changes meanwhile can't make the
    // stored bytes differ from their checksum.
    state = raw_update(state, to, part);
    to += part;
    from += part;
    size -= part;
  }
  return ~state;
}

uint32_t crc32c_copy(void* destination, const void* source, size_t size) {
  return crc32c_copy_extend(0, destination, source, size);
}

}  // namespace ffs
