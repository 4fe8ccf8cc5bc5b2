// Many copies as one: what a checkpoint takes from the tensors of a training process
// (docs/guides/checkpoint.md, Memory). Pure, no locks, any thread; blocks until all is copied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs {

struct CopyPiece {
  uint8_t* to;
  const uint8_t* from;
  uint64_t bytes;
};

// By up to `threads` threads, this one among them; fewer where there is little to copy. Nothing may overlap.
void copy_many(const CopyPiece* pieces, size_t count, unsigned threads);

}  // namespace ffs
