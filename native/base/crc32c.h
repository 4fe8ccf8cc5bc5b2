// CRC32C (Castagnoli), the checksum of every granule, journal block and frame. Values are the
// standard ones: crc32c("123456789") == 0xe3069283 (docs/disk_format.md, Checksums).
// All functions are pure, never block and may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs {

// The checksum of `size` bytes.
uint32_t crc32c(const void* bytes, size_t size);

// The checksum of (what `crc` covers) followed by `size` more bytes. crc32c_extend(0, b, n) ==
// crc32c(b, n): the checksum of nothing is 0.
uint32_t crc32c_extend(uint32_t crc, const void* bytes, size_t size);

// The checksum of (what `crc` covers) followed by `size` zero bytes, without touching memory.
uint32_t crc32c_extend_zeros(uint32_t crc, uint64_t size);

// The checksum of A followed by B, from the checksums of each and the length of B.
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// By blocks of 4096 bytes, the unit of device I/O: a whole checksum follows from those of its blocks, and
// from the old one if a block changes. From a table, a tenth of what crc32c_combine takes.
constexpr uint32_t kCrcBlockBytes = 4096;
constexpr uint32_t kMaxCrcShiftBlocks = 15;

// What `crc` becomes as the left operand of a combination with `blocks` blocks behind it (at most
// kMaxCrcShiftBlocks): crc32c_combine(a, b, 4096 * n) == crc32c_shift_blocks(a, n) ^ b.
uint32_t crc32c_shift_blocks(uint32_t crc, uint32_t blocks);

// As crc32c and crc32c_copy, and blocks[i] becomes the checksum of block number i of the bytes; what is
// left at the end has none.
uint32_t crc32c_blocks(const void* bytes, size_t size, uint32_t* blocks);
uint32_t crc32c_copy_blocks(void* destination, const void* source, size_t size, uint32_t* blocks);

// Copies `size` bytes (which must not overlap) and returns their checksum, in one pass over
// pieces that stay in the nearest cache.
uint32_t crc32c_copy(void* destination, const void* source, size_t size);

// The same, going on from `crc`.
uint32_t crc32c_copy_extend(uint32_t crc, void* destination, const void* source, size_t size);

}  // namespace ffs
