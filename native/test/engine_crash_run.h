// Random operations on a simulated disk, then the power fails at every place of the I/O log: with all kinds
// of loss of what wasn't durable, again during the recovery from that, and again during that one. For tests
// only.
#pragma once

#include <cstdint>
#include <string>

#include "engine_model.h"

namespace ffs::engine::testing {

struct CrashOptions : ModelOptions {
  uint64_t operations = 60;
  uint64_t prefix_stride = 1;  // crash at every n-th event
  bool all_kinds = false;      // each prefix with every kind of loss, else one kind by turns
  uint32_t nested = 3;         // so many crashes of recoveries within each other, for some of the prefixes
  bool after = false;          // records are written after their data, else beside it
  bool ahead = false;  // every group of the journal with data is written while the one before is flushed
  io::SimDevice device;
  bool lying_device = false;  // its cache is volatile, whatever it says
  Mutants mutants;
};

// Both ways, for the command that repeats a failure: "seed=7 operations=60 ...".
std::string text_of(const CrashOptions& options);
CrashOptions crash_options_of(const std::string& text);

struct CrashCoverage {
  uint64_t crashes = 0;
  uint64_t in_snapshots = 0;   // something of a snapshot wasn't durable
  uint64_t with_discards = 0;  // a discard wasn't
  uint64_t nested = 0;         // during a recovery
  uint64_t recovered_again = 0;
};

class CrashRun {
 public:
  explicit CrashRun(const CrashOptions& options) : options_(options), model_(options) {}
  // Runs the operations, then all crashes. Empty, or what went wrong first, with the command that repeats it.
  std::string run();
  const CrashCoverage& coverage() const { return coverage_; }
  uint64_t crashes() const { return coverage_.crashes; }
  StoreMetrics metrics() const { return metrics_; }

 private:
  std::string operate(Harness& h, SimHost& host);
  std::string crash_everywhere(const std::vector<io::SimEvent>& log, io::SimImage start, size_t from);
  std::string check(io::SimImage image, size_t prefix, const std::string& how, uint32_t depth);
  std::string check_again(Harness& h, const io::SimImage& start, const Recovered& found);
  std::string crash_recovery(Harness& h, const io::SimImage& start, size_t prefix, const std::string& how,
                             uint32_t depth);
  io::SimDevice truth() const {
    return {options_.device.sector_bytes, options_.device.protected_cache && !options_.lying_device};
  }
  io::SimImage lose(const io::CrashImages& crashes, uint64_t kind);

  CrashOptions options_;
  Model model_;
  std::mt19937_64 random_;
  CrashCoverage coverage_;
  StoreMetrics metrics_;
};

}  // namespace ffs::engine::testing
