// The part of ffs.h that needs no handle.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/copy_many.h"
#include "base/crc32c.h"
#include "base/int8.h"
#include "base/xxh3.h"
#include "capi/error.h"
#include "capi/options.h"
#include "ffs/ffs.h"
#include "net/socket.h"
#include "net/version.h"

namespace {

// EINVAL says what is wrong with a shape; `bytes` becomes the number of values.
int shape_of(const ffs_int8_shape* given, ffs::Int8Shape* shape) {
  ffs_int8_shape s;
  if (!ffs::capi::take_options(given, &s)) return ffs::capi::fail(EINVAL, "int8: a shape is needed");
  if (s.dtype != FFS_FLOAT16 && s.dtype != FFS_BFLOAT16) {
    return ffs::capi::fail(EINVAL, "int8: dtype %u: give FFS_FLOAT16 or FFS_BFLOAT16", s.dtype);
  }
  uint64_t values = 2;
  for (const uint64_t factor : {s.blocks, s.outer, s.heads, s.inner}) {
    if (factor == 0 || __builtin_mul_overflow(values, factor, &values)) {
      return ffs::capi::fail(EINVAL, "int8: a shape of no values, or of more than there is memory");
    }
  }
  *shape = {static_cast<ffs::Float16Kind>(s.dtype), s.blocks, s.outer, s.heads, s.inner};
  return 0;
}

}  // namespace

extern "C" {

int ffs_abi_version(void) {
  return 1;
}

int ffs_last_error(char* out, size_t capacity) {
  const char* line = ffs::capi::last_error();
  const size_t length = std::strlen(line);
  if (out != nullptr && capacity > 0) {
    const size_t copied = std::min(length, capacity - 1);
    std::memcpy(out, line, copied);
    out[copied] = '\0';
  }
  return static_cast<int>(length);
}

uint32_t ffs_crc32c(uint32_t seed, const void* data, size_t length) {
  return ffs::crc32c_extend(seed, data, length);
}

uint32_t ffs_copy_crc32c(void* to, const void* from, size_t length) {
  return ffs::crc32c_copy(to, from, length);
}

int ffs_copy_many(const ffs_copy_piece* pieces, size_t count, uint32_t threads) {
  static_assert(sizeof(ffs_copy_piece) == sizeof(ffs::CopyPiece));
  for (size_t i = 0; i < count; i++) {
    if (pieces[i].bytes > 0 && (pieces[i].to == 0 || pieces[i].from == 0)) {
      return ffs::capi::fail(EINVAL, "copy_many: piece %zu has no address", i);
    }
  }
  ffs::copy_many(reinterpret_cast<const ffs::CopyPiece*>(pieces), count, threads);
  return 0;
}

int ffs_xxh3_many(const ffs_hash_piece* pieces, size_t count, uint8_t* digests) {
  static_assert(sizeof(ffs_hash_piece) == sizeof(ffs::HashPiece));
  for (size_t i = 0; i < count; i++) {
    if (digests == nullptr || (pieces[i].bytes > 0 && pieces[i].from == 0)) {
      return ffs::capi::fail(EINVAL, "xxh3_many: piece %zu has no address", i);
    }
  }
  ffs::xxh3_many(reinterpret_cast<const ffs::HashPiece*>(pieces), count, digests);
  return 0;
}

const char* ffs_xxh3_backend(void) {
  return ffs::xxh3_backend();
}

int ffs_int8_encode(const ffs_int8_shape* shape, const void* values, uint8_t* codes, float* ranges) {
  ffs::Int8Shape s;
  if (const int code = shape_of(shape, &s); code != 0) return code;
  if (ffs::int8_encode(s, values, codes, ranges)) return 0;
  return ffs::capi::fail(ERANGE, "int8: a value isn't finite: keep this block as it is");
}

int ffs_int8_decode_block(const ffs_int8_shape* shape, uint64_t keys, const void* coded, void* block) {
  ffs::Int8Shape s;
  if (const int code = shape_of(shape, &s); code != 0) return code;
  const uint8_t* codes = static_cast<const uint8_t*>(coded) + keys;
  const uint64_t values = s.blocks * s.outer * s.heads * s.inner;
  std::memcpy(block, coded, keys);
  ffs::int8_decode(s, codes, reinterpret_cast<const float*>(codes + values),
                   static_cast<uint8_t*>(block) + keys);
  return 0;
}

const char* ffs_int8_backend(void) {
  return ffs::int8_backend();
}

int ffs_set_protocol_versions(uint32_t least, uint32_t most) {
  if (least == 0 || least > most || most > UINT8_MAX) {
    return ffs::capi::fail(EINVAL, "protocol versions %u to %u: give 1 to 255, least first", least, most);
  }
  ffs::net::set_spoken_versions({static_cast<uint8_t>(least), static_cast<uint8_t>(most)});
  return 0;
}

int ffs_host_id(char* out, size_t capacity) {
  auto id = ffs::net::host_id();
  if (!id.ok()) return ffs::capi::fail(id.error(), "host id");
  if (out == nullptr || capacity <= id->size()) {
    return ffs::capi::fail(ENOBUFS, "host id: give a buffer of at least %zu bytes", id->size() + 1);
  }
  std::memcpy(out, id->c_str(), id->size() + 1);
  return 0;
}

}  // extern "C"
