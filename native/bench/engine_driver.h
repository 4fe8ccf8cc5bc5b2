// The chunk engine without a server: one thread, an Io and a store of its own, operations kept in flight
// as a shard keeps them (docs/guides/bench.md, ffs bench engine). The thread that makes a driver is
// its shard thread. All functions block.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace ffs::bench {

struct EngineOptions {
  std::string path;            // of a file, made and formatted here; its directory must exist
  std::string backend;         // "", "uring", "pread"
  uint64_t size_bytes = 0;     // of the file
  uint64_t max_chunks = 0;     // 0: the engine's default for the size
  uint64_t journal_bytes = 0;  // 0: the engine's default
  uint32_t depth = 64;         // operations in flight, at most
};

enum class EngineWork : uint32_t { read = 0, write = 1, overwrite = 2 };
enum class EngineBeside : uint32_t { nothing = 0, snapshots = 1, compaction = 2 };

struct EngineLoad {
  EngineWork work = EngineWork::read;
  uint32_t block_bytes = 0;  // write: of the whole chunk
  uint32_t depth = 1;
  bool random = false;       // else in the order of the keys, from where the last run ended
  uint64_t working_set = 0;  // chunks that it touches, from the first; 0: all
  bool plain = false;        // the caller's memory isn't registered with the Io (a server's is)
  EngineBeside beside = EngineBeside::nothing;
};

struct EngineCount {
  uint64_t operations = 0;
  uint64_t elapsed_ns = 0;
  uint64_t flushes = 0;  // all of these: during the run
  uint64_t journal_bytes = 0;
  uint64_t snapshots = 0;
  uint64_t moved_bytes = 0;           // by compaction
  uint64_t granules_read = 0;         // to verify them before small overwrites
  uint64_t longest_step_us = 0;       // of the store, since it was opened
  uint64_t longest_operation_us = 0;  // from its start to its end
};

struct EngineFacts {
  uint64_t chunks = 0;
  uint64_t data_offset = 0;  // on the device, to within a slab: chunks lie from here on
};

class EngineDriver {
 public:
  virtual ~EngineDriver() = default;
  // Chunks number first .. first + count - 1, of `bytes` each.
  virtual Status fill(uint64_t first, uint64_t count, uint32_t bytes) = 0;
  // Removes all chunks but every `keep`-th: the rest lie thinly in their slabs, for compaction.
  virtual Status thin(uint32_t keep) = 0;
  virtual Result<EngineCount> run(const EngineLoad& load, uint32_t duration_ms) = 0;
  // Closes the store and opens it again: its counters start anew.
  virtual Status reopen() = 0;
  virtual EngineFacts facts() const = 0;
};

Result<std::unique_ptr<EngineDriver>> open_engine(const EngineOptions& options);

}  // namespace ffs::bench
