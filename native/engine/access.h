// Samples of a space's chunks, straight from the index: what ChunkStore::sample gives. For tests of the
// eviction policy, which need a real index and no device.
#pragma once

#include <span>

#include "engine/index.h"

namespace ffs::engine {

// From a random key of the space on, consecutive committed chunks, wrapping inside the space. Returns how
// many. A seed gives the same ones as long as the space stays the same. `shared` of each: its slot may be.
uint32_t sample_space(const Index& index, uint16_t target, uint64_t space, uint64_t seed,
                      std::span<ChunkSample> out);

}  // namespace ffs::engine
