// How a store does with very many chunks: what they take in memory, how long it takes to open, how long
// its own steps are. For tests and `ffs bench engine`.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "io/io.h"

namespace ffs::engine {

enum class ScaleContents : uint8_t {
  plain,          // all different; nobody asks
  compared,       // all different, in a space that deduplicates: each is known by its checksums
  shared_by_two,  // such a space, in which each slot is that of two chunks
};

struct ScaleReport {
  uint64_t chunks = 0;
  uint64_t device_bytes = 0;
  uint64_t snapshot_bytes = 0;
  uint64_t open_us = 0;      // wall clock
  uint64_t open_cpu_us = 0;  // of the process
  // Of all arenas (StoreMetrics.memory_bytes), and what the process has more resident than with the same
  // store without chunks.
  uint64_t memory_bytes = 0;
  uint64_t resident_bytes = 0;
  uint64_t snapshot_us = 0;  // writing one while nothing else goes on
  uint64_t close_us = 0;
  uint64_t longest_step_us = 0;      // StoreMetrics.longest_step_us, snapshot included
  uint64_t longest_pass_cpu_us = 0;  // processor time of one run_once while the snapshot is written

  std::string json() const;  // one line
};

// Makes a sparse file at `path` (it must not exist; it is removed afterwards) for `chunks` chunks of 1 MiB
// with 16 checksums each, which stand in its snapshot and were never written, and opens, snapshots and closes
// it. Blocks; takes seconds for a million. Errors: those of format and open, EEXIST.
Result<ScaleReport> measure_scale(io::Io& io, const std::string& path, uint64_t chunks,
                                  ScaleContents contents = ScaleContents::plain);

}  // namespace ffs::engine
