// Looking into a device without changing it: what `ffs device inspect` and `ffs device check` say.
//
// The device is opened for reading, alone, and recovered over an Io whose writes stay in memory
// (io/shadow_io.h): what is judged is what an opening would make of it. These functions block, for as long as
// recovery, or the reading of all data, takes; any thread, one device each.
#pragma once

#include <string>
#include <vector>

#include "engine/allocator.h"
#include "engine/chunk_store.h"
#include "io/device.h"

namespace ffs::engine {

struct TargetState {
  TargetId target;
  TargetUsage usage;
  uint64_t pending_versions = 0;
  uint64_t retry_entries = 0;
  uint64_t space_epochs = 0;
  uint32_t chain_state_bytes = 0;
};

struct DeviceState {
  // From the superblock, also of a device in use.
  DeviceIdentity identity;
  bool superblock_whole[2] = {};  // the copies
  io::Device device;              // as found now; closed
  CacheMode cache;                // that `auto` would choose

  // From recovery in memory, else `why_not` says why there is none (in use, damaged).
  bool recovered = false;
  std::string why_not;
  Allocator::ClassUse classes[kClasses] = {};
  uint64_t free_slabs = 0;
  uint64_t used_bytes = 0;  // slots
  Capacity capacity;
  uint64_t journal_used_bytes = 0;  // what an opening replays
  std::vector<TargetState> targets;
};

// Errors: what identify() says. A device in use or damaged is no error: see why_not.
Result<DeviceState> survey_device(const std::string& path);

enum class Verdict : uint8_t { clean, damaged, unjudged };

struct Problem {
  enum class Kind : uint8_t { recovery, clash, accounts, content } kind = Kind::recovery;
  // Of a chunk (clash, content).
  TargetId target;
  ChunkKey key;
  Version version;
  bool pending = false;
  std::string text;
};

struct CheckOptions {
  bool data = false;    // read all slots and compare all checksums
  uint32_t depth = 32;  // chunks that are read at the same time
  uint32_t max_problems = 1000;
};

struct CheckReport {
  Verdict verdict = Verdict::unjudged;
  std::string reason;              // unjudged: why
  std::vector<Problem> problems;   // the first max_problems
  uint64_t problem_count = 0;      // of all
  std::vector<std::string> notes;  // not right, and harmless
  uint64_t chunks = 0;             // committed
  uint64_t pending_versions = 0;
  uint64_t data_bytes = 0;  // compared with their checksums
  DeviceState state;
};

CheckReport check_device(const std::string& path, const CheckOptions& options);

}  // namespace ffs::engine
