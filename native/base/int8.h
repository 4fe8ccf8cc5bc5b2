// int8 codes of 16-bit floats, a linear range for each head of a block (docs/kv.md, int8 values): what
// KV-cache values shrink to. Pure, no locks, any thread. Vectorised for what the processor has, found out
// once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs {

enum class Float16Kind : uint32_t { kFloat16 = 1, kBfloat16 = 2 };

// [blocks][outer][heads][inner] values; a range covers the outer x inner values of one head of one block.
struct Int8Shape {
  Float16Kind kind;
  uint64_t blocks, outer, heads, inner;
};

// `ranges`: (lowest, step) of each head. False: a value isn't finite, or a range is beyond float.
bool int8_encode(const Int8Shape& shape, const void* values, uint8_t* codes, float* ranges);
void int8_decode(const Int8Shape& shape, const uint8_t* codes, const float* ranges, void* values);
const char* int8_backend();

// The same by backend; for tests. Those that the processor lacks are left out of int8_backends().
struct Int8Backend {
  const char* name;
  bool (*encode)(const Int8Shape&, const void*, uint8_t*, float*);
  void (*decode)(const Int8Shape&, const uint8_t*, const float*, void*);
};
// Best first; the last, "plain", is always there. `count` backends.
const Int8Backend* int8_backends(size_t* count);

}  // namespace ffs
