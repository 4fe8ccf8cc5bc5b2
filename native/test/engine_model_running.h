// One operation of the model that the store has not answered yet.
#pragma once

#include "engine_model.h"

namespace ffs::engine::testing {

inline const TargetId kModelTarget(Harness::kTarget);
constexpr uint32_t kModelChannel = 100;  // and the key
constexpr uint64_t kModelClient = 5;
constexpr uint64_t kModelSpace = 4242;

inline std::string describe(const Version& version) {
  return std::to_string(version.update);
}

struct Model::Running {
  enum Kind { update, commit, refusal, read, counter, fence, install, erase, target } kind = update;
  uint64_t key = 0;
  StageOp stage;
  StoreOp plain;
  ReadOp read_op;
  InstallOp install_op;
  std::unique_ptr<Laid> laid;
  std::vector<uint32_t> sums;  // read
  ModelVersion version;
  uint64_t value = 0;
  size_t state = 0;  // of the chunk, once queued
  bool queued = false;
  bool dropped = false;   // by a reset or release of the target before its record was queued
  bool may_fail = false;  // what it builds on was dropped so, or failed
  bool releases = false;
  bool refused = false;  // while its data was on the way
  bool unread = false;   // read: of a version whose data wasn't there when it began
  std::vector<std::pair<uint64_t, size_t>> states;  // reset, release: (key, state)
  bool done = false;
  size_t done_at = 0;
  Host* host = nullptr;

  static void finished(StoreOp* op) {
    auto self = static_cast<Running*>(op->owner);
    self->done = true;
    self->done_at = self->host->moment();
  }
  const StoreOp& op() const {
    if (kind == update) return stage;
    if (kind == install) return install_op;
    if (kind == read) return read_op;
    return plain;
  }
};

}  // namespace ffs::engine::testing
