#include "base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>
#include <cstring>

// Lines that will be written are fetched as such; a processor that doesn't know that instruction skips it.
#if defined(__x86_64__)
#define FFS_PREFETCHES __attribute__((target("prfchw")))
#else
#define FFS_PREFETCHES
#endif

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

// kShifts[k][i][b]: byte b at position i of a checksum, 2^k blocks further left.
using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;
constexpr ShiftTable make_shift_table(uint32_t power) {
  ShiftTable table{};
  for (uint32_t i = 0; i < 4; i++) {
    for (uint32_t bit = 0; bit < 8; bit++) table[i][1u << bit] = multiply(power, 1u << (8 * i + bit));
    for (uint32_t b = 1; b < 256; b++) table[i][b] = table[i][b & (b - 1)] ^ table[i][b & -b];
  }
  return table;
}
static_assert(kCrcBlockBytes == 1u << 12);  // kPowers[12]
constexpr std::array<ShiftTable, 4> kShifts{make_shift_table(kPowers[12]), make_shift_table(kPowers[13]),
                                            make_shift_table(kPowers[14]), make_shift_table(kPowers[15])};

// Of a copy with its checksum: what stays in the first-level cache between the two passes, and how far ahead
// both sides are fetched meanwhile. The checksum touches no new memory, which would stand still else.
constexpr size_t kCopyPieceBytes = 2048;
constexpr size_t kAheadBytes = 4096;
constexpr size_t kLineBytes = 64;
static_assert(kCrcBlockBytes % kCopyPieceBytes == 0);

// Copies `size` bytes, at most a piece, of `left` that follow each other; the checksum of the copy. Of the
// copy, not of the source: a source that its owner changes meanwhile can't make the stored bytes differ from
// their checksum.
FFS_PREFETCHES uint32_t copy_piece(uint32_t state, uint8_t* to, const uint8_t* from, size_t size,
                                   size_t left) {
  std::memcpy(to, from, size);
  const size_t end = std::min(left, kAheadBytes + size);
  for (size_t at = kAheadBytes; at < end; at += kLineBytes) {
    __builtin_prefetch(from + at, 0);
    __builtin_prefetch(to + at, 1);
  }
  return raw_update(state, to, size);
}

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

uint32_t crc32c_shift_blocks(uint32_t crc, uint32_t blocks) {
  for (size_t k = 0; k < kShifts.size(); k++) {
    if ((blocks >> k & 1) == 0) continue;
    const ShiftTable& t = kShifts[k];
    crc = t[0][crc & 255] ^ t[1][crc >> 8 & 255] ^ t[2][crc >> 16 & 255] ^ t[3][crc >> 24];
  }
  return crc;
}

uint32_t crc32c_blocks(const void* bytes, size_t size, uint32_t* blocks) {
  auto at = static_cast<const uint8_t*>(bytes);
  uint32_t sum = 0;
  for (; size >= kCrcBlockBytes; at += kCrcBlockBytes, size -= kCrcBlockBytes) {
    *blocks = crc32c(at, kCrcBlockBytes);
    sum = crc32c_shift_blocks(sum, 1) ^ *blocks++;
  }
  return crc32c_extend(sum, at, size);
}

uint32_t crc32c_copy_blocks(void* destination, const void* source, size_t size, uint32_t* blocks) {
  auto to = static_cast<uint8_t*>(destination);
  auto from = static_cast<const uint8_t*>(source);
  uint32_t sum = 0;
  while (size >= kCrcBlockBytes) {
    uint32_t state = ~0u;
    for (size_t done = 0; done < kCrcBlockBytes; done += kCopyPieceBytes) {
      state = copy_piece(state, to + done, from + done, kCopyPieceBytes, size - done);
    }
    *blocks = ~state;
    sum = crc32c_shift_blocks(sum, 1) ^ *blocks++;
    to += kCrcBlockBytes;
    from += kCrcBlockBytes;
    size -= kCrcBlockBytes;
  }
  return crc32c_copy_extend(sum, to, from, size);
}

uint32_t crc32c_copy_extend(uint32_t crc, void* destination, const void* source, size_t size) {
  auto to = static_cast<uint8_t*>(destination);
  auto from = static_cast<const uint8_t*>(source);
  uint32_t state = ~crc;
  while (size > 0) {
    const size_t part = std::min(size, kCopyPieceBytes);
    state = copy_piece(state, to, from, part, size);
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
