// Random updates on a simulated disk beside a plain model, then the power fails at every place of
// the I/O log. What the model says may be there after a crash:
//   a chunk   is in the state after one of its records, not older than its last acknowledged one,
//             not newer than its last queued one, whole: versions, bytes, pending ones, retry entry;
//   a table   likewise.
// For tests only.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine_harness.h"

namespace ffs::engine::testing {

using Bytes = std::shared_ptr<const std::vector<uint8_t>>;  // null: removed

struct ModelVersion {
  Version version;
  Bytes bytes;
};

// After one record about a chunk.
struct ModelState {
  std::optional<ModelVersion> committed;
  std::vector<ModelVersion> pendings;
  std::optional<RetryEntry> retry;
  bool reset = false;                 // by reset_target(), which stays even if data before it is lost
  size_t queued_at = 0;               // length of the log when the record was queued
  size_t acknowledged_at = SIZE_MAX;  // and when it was known durable
};

struct ModelChunk {
  std::vector<ModelState> states{ModelState{}};  // the first: nothing
  ModelVersion planned;                          // the newest version, also if its record isn't queued yet
  std::vector<ModelVersion> planned_chain;       // all that are pending or on the way, oldest first
  uint64_t sequence = 0;
  int in_flight = 0;
  int installs = 0;      // of those in flight
  bool settles = false;  // what comes next is known when nothing is in flight
  const ModelState& now() const { return states.back(); }
};

// A counter that is stored as chain state and as space epoch; 0: neither is there.
struct ModelCounter {
  struct State {
    uint64_t value = 0;
    size_t queued_at = 0;
    size_t acknowledged_at = SIZE_MAX;
  };
  uint64_t value = 0;
  std::vector<State> states{State{}};
};

struct CrashOptions {
  uint64_t seed = 1;
  uint64_t operations = 60;
  uint64_t keys = 5;
  uint64_t max_in_flight = 5;
  uint32_t max_bytes = 150'000;
  uint64_t prefix_stride = 1;  // crash at every n-th event
  bool transfers = false;      // installs, erasures, resets, releases as well
  bool all_kinds = false;      // each prefix with every kind of loss, else one kind by turns
  Mutants mutants;
};

class CrashRun {
 public:
  explicit CrashRun(const CrashOptions& options);
  ~CrashRun();
  // Runs the operations, then all crashes. Empty, or what went wrong first, with the seed.
  std::string run();
  uint64_t crashes() const { return crashes_; }
  StoreMetrics metrics() const { return metrics_; }

 private:
  struct Running;
  void operate();
  void step();
  void poll_queued(size_t before);
  bool start_update();
  void start_commit();
  void start_refusal();
  void start_read();
  void start_counter();
  void start_transfer();
  void start_install(bool over_same);
  void start_erase();
  void start_reset();
  void start_release();
  bool queue_install(Running& running, size_t before);
  bool ended(Running& running);
  void settle(ModelChunk& chunk);
  void push_state(ModelChunk& chunk, ModelState state, size_t queued_at, bool reset = false);
  std::string check_crash(io::SimImage image, size_t prefix, const char* kind);
  std::string check_state(Harness& h, uint64_t key, size_t prefix, ModelState* matched);
  std::string check_counters(Harness& h, size_t prefix);
  bool same(Harness& h, uint64_t key, const ModelState& state, std::string* difference);
  void fail(const std::string& text);

  CrashOptions options_;
  std::mt19937_64 random_;
  Harness h_;
  std::map<uint64_t, ModelChunk> chunks_;
  std::map<Version, Bytes> contents_;
  ModelCounter counter_;
  std::deque<std::unique_ptr<Running>> running_;
  uint64_t next_version_ = 1;
  uint64_t installs_seen_ = 0;
  bool installing_ = false;
  bool releasing_ = false;
  uint64_t crashes_ = 0;
  std::string failure_;
  StoreMetrics metrics_;
  std::vector<io::SimEvent> log_;
};

}  // namespace ffs::engine::testing
