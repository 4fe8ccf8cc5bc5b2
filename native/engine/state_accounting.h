// Keeps the counters of a State right over a change of one chunk: for its functions only.
#pragma once

#include "engine/state.h"

namespace ffs::engine {

// Keeps chunk_bytes_, the counters of the target and committed_chunks right over a change of one chunk.
class State::Accounting {
 public:
  Accounting(State& state, uint32_t chunk) : state_(state), chunk_(chunk) { count(-1); }
  ~Accounting() { count(1); }
  Accounting(const Accounting&) = delete;

 private:
  void count(int sign) {
    const Chunk& chunk = state_.index[chunk_];
    state_.chunk_bytes_ += static_cast<uint64_t>(sign) * state_.chunk_record_bytes(chunk_);
    if (!state_.accounts.empty()) count_space(chunk, sign);
    if (chunk.image.version.none()) return;
    TargetUsage& usage = state_.usage[chunk.target];
    usage.chunks += static_cast<uint64_t>(sign);
    usage.logical_bytes += static_cast<uint64_t>(sign) * chunk.image.logical;
    state_.committed_chunks += static_cast<uint64_t>(sign);
  }
  void count_space(const Chunk& chunk, int sign) {
    SpaceAccount* account = state_.accounts.find({chunk.target, chunk.key.space()});
    if (account == nullptr || !account->has_passed(chunk.key)) return;
    account->allocated_bytes += static_cast<uint64_t>(sign) * state_.allocated_bytes(chunk_);
    if (!chunk.image.version.none()) account->chunks += static_cast<uint64_t>(sign);
  }
  State& state_;
  uint32_t chunk_;
};

}  // namespace ffs::engine
