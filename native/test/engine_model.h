// Random operations on a store beside a plain model. The store may lie on a simulated disk or on a file
// (Host). What the model says may be there after a crash:
//   a chunk   is in the state after one of its records, not older than its last acknowledged one,
//             not newer than its last queued one, whole: versions, bytes, pending ones, retry entry;
//   a table   likewise.
// For tests only.
//   engine_model.cc            the loop, answers           engine_model_judge.cc  what a store may hold
//   engine_model_updates.cc    what clients do             engine_model_transfers.cc  what recovery does
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

// An open store and what it runs on.
class Host {
 public:
  virtual ~Host() = default;
  virtual ChunkStore& store() = 0;
  virtual void pass() = 0;            // one pass of the Io
  virtual void tick() = 0;            // lets time go by
  virtual size_t moment() const = 0;  // grows with all that happens on the device
  virtual bool damaged() const = 0;   // the device has done wrong unnoticed
  void run_until(const bool& done) {
    for (int i = 0; !done; i++) {
      FFS_CHECK(i < 10'000'000);
      tick();
      pass();
    }
  }
};

class SimHost final : public Host {
 public:
  explicit SimHost(Harness& h) : h_(h) {}
  ChunkStore& store() override { return *h_.store; }
  void pass() override { h_.io->run_once(0); }
  void tick() override { h_.store->tick(h_.clock_us += h_.space ? 50'000 : 200); }
  size_t moment() const override { return h_.io->log().size(); }
  bool damaged() const override { return h_.io->struck(); }

 private:
  Harness& h_;
};

using Bytes = std::shared_ptr<const std::vector<uint8_t>>;  // null: removed

struct ModelVersion {
  Version version;
  Bytes bytes;
  bool there() const { return !version.none(); }
};

// After one record about a chunk.
struct ModelState {
  ModelVersion committed;  // there() is false: none
  std::vector<ModelVersion> pendings;
  std::optional<RetryEntry> retry;
  bool reset = false;                 // by reset_target(), which stays even if data before it is lost
  size_t queued_at = 0;               // the moment when the record was queued
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

// A client that is fenced, each once.
struct ModelFence {
  uint64_t client = 0;
  size_t queued_at = 0;
  size_t acknowledged_at = SIZE_MAX;
};

struct ModelOptions {
  uint64_t seed = 1;
  uint64_t keys = 5;
  uint64_t max_in_flight = 5;
  uint32_t max_bytes = 150'000;
  bool transfers = false;  // installs, erasures, resets, releases as well
  bool space = false;      // slabs come free, are emptied by moves and discarded
  bool huge = false;       // now and then chunks of up to 16 MiB
  bool may_fill = false;   // ENOSPC is an answer
  bool dedup = false;      // equal contents, which come to share slots
};

// What a store turned out to hold after a restart.
struct Recovered {
  std::map<uint64_t, ModelState> chunks;
  uint64_t epoch = 0, chain_state = 0;
  std::vector<uint64_t> fenced;
};

class Model {
 public:
  explicit Model(const ModelOptions& options);
  ~Model();  // nothing may be in flight: let the store of the last host come to rest before

  // Starts so many operations, beginning with none in flight, and lets them end unless `leave_running`.
  void operate(Host& host, uint64_t operations, bool leave_running = false);
  // Empty, or what went wrong first.
  const std::string& failure() const { return failure_; }
  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = text;
  }
  // Forgets what is in flight; its store must have come to rest.
  void forget_running();

  // Whether a store holds what it may after a crash at `moment`; empty, or what is wrong. A device that does
  // wrong unnoticed may lose what was acknowledged after `trusted`; what it holds reads as it should or not
  // at all.
  std::string judge(Host& host, size_t moment, Recovered* found, size_t trusted = SIZE_MAX);
  // The same state as before, byte for byte.
  std::string compare(Host& host, const Recovered& before);
  // Goes on from what was found; moments begin anew.
  void resume(const Recovered& found);

  uint64_t answered(int error) const {
    auto found = answers_.find(error);
    return found == answers_.end() ? 0 : found->second;
  }
  uint64_t unreadable() const { return unreadable_; }  // reads that damage made impossible

 private:
  struct Running;
  Running* add(int kind, uint64_t key);
  void trace(const char* what, uint64_t key, const std::string& more = "") const;
  ChunkStore& store() { return host_->store(); }
  void start_one();
  void step();
  void poll_queued(size_t before);
  void note_queued(Running& running, size_t before);
  bool ended(Running& running);
  void note_failed(Running& running);
  void push_state(ModelChunk& chunk, ModelState state, size_t queued_at, bool reset = false);
  void settle(ModelChunk& chunk);
  uint32_t some_length();
  uint32_t some_hint();
  // engine_model_updates.cc
  void start_update();
  void shape_update(StageOp& op, const Bytes& old, std::shared_ptr<std::vector<uint8_t>>* result,
                    std::vector<uint8_t>* data);
  void start_commit();
  bool arriving(uint64_t key, const ModelVersion& version);
  void commit_up_to(uint64_t key, size_t at, bool wait);
  void start_compaction();
  void commit_some();
  void start_dedup();
  void start_refusal();
  void start_read();
  void check_read(const Running& running);
  void start_counter();
  void start_fence();
  // engine_model_transfers.cc
  void start_transfer();
  void start_install(bool over_same);
  bool queue_install(Running& running, size_t before);
  void start_erase();
  void start_reset();
  void start_release();
  // engine_model_judge.cc
  bool same(Host& h, uint64_t key, const ModelState& state, std::string* difference);
  bool same_retry(Host& h, uint64_t key, const ModelState& state);
  std::string compare_bytes(Host& h, uint64_t key, const ModelVersion& version);
  std::string judge_chunk(Host& h, uint64_t key, size_t moment, size_t trusted, ModelState* matched);
  std::string judge_counters(Host& h, size_t moment, size_t trusted, Recovered* found);
  std::string judge_fences(Host& h, size_t moment, size_t trusted);
  std::string explain(Host& h, uint64_t key, size_t least, size_t most);

  ModelOptions options_;
  std::mt19937_64 random_;
  Host* host_ = nullptr;
  std::map<uint64_t, ModelChunk> chunks_;
  std::map<Version, Bytes> contents_;
  ModelCounter counter_;
  std::vector<ModelFence> fences_;
  uint64_t next_fenced_ = 1000;
  std::deque<std::unique_ptr<Running>> running_;
  uint64_t next_version_ = 1;
  uint64_t installs_seen_ = 0;
  bool installing_ = false;
  bool releasing_ = false;
  std::map<int, uint64_t> answers_;
  uint64_t unreadable_ = 0;
  std::string failure_;
};

// All that a store holds of the target, as text: chunks with the checksums of their bytes as they are read,
// pending versions, tables. For comparing two stores byte for byte.
std::string export_state(Host& host, TargetId target = TargetId(Harness::kTarget));

}  // namespace ffs::engine::testing
