// The loop of the model: operations are started at random, and their answers are noted.
#include "engine_model.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "engine_model_running.h"

namespace ffs::engine::testing {

Model::Model(const ModelOptions& options) : options_(options), random_(options.seed) {}
Model::~Model() = default;

// FFS_ENGINE_TRACE prints what is done, with the moment, to follow a failing seed.
void Model::trace(const char* what, uint64_t key, const std::string& more) const {
  static const bool wanted = std::getenv("FFS_ENGINE_TRACE") != nullptr;
  if (!wanted) return;
  std::fprintf(stderr, "%zu: %s key %lu %s\n", host_->moment(), what, key, more.c_str());
}

Model::Running* Model::add(int kind, uint64_t key) {
  running_.push_back(std::make_unique<Running>());
  Running* running = running_.back().get();
  running->kind = static_cast<Running::Kind>(kind);
  running->key = key;
  running->host = host_;
  for (StoreOp* op :
       {&running->plain, static_cast<StoreOp*>(&running->stage), static_cast<StoreOp*>(&running->read_op),
        static_cast<StoreOp*>(&running->install_op)}) {
    op->owner = running;
    op->done = Running::finished;
  }
  return running;
}

void Model::push_state(ModelChunk& chunk, ModelState state, size_t queued_at, bool reset) {
  state.reset = reset;
  state.queued_at = queued_at;
  state.acknowledged_at = SIZE_MAX;
  chunk.states.push_back(std::move(state));
}

uint32_t Model::some_length() {
  if (options_.huge && random_() % 4 == 0) {
    const uint32_t mebi = 1 + static_cast<uint32_t>(random_() % 16);
    return (mebi << 20) - (random_() % 2 == 0 ? 0 : static_cast<uint32_t>(random_() % 70'000));
  }
  switch (random_() % 5) {
    case 0:
      return 1 + static_cast<uint32_t>(random_() % 600);
    case 1:
      return 4096 * (1 + static_cast<uint32_t>(random_() % 4));
    case 2:
      return 65536;
    default:
      return 1 + static_cast<uint32_t>(random_() % options_.max_bytes);
  }
}

// What slot is asked for. Large ones for small chunks: so there are slabs to empty and to discard.
uint32_t Model::some_hint() {
  if (options_.space) return random_() % 4 == 0 ? 4u << 20 : 8u << 20;
  return random_() % 3 == 0 ? 200'000 : 0;
}

// ------------------------------------------------------------------------------ the loop

void Model::start_one() {
  const uint64_t choice = random_() % 100;
  if (releasing_) {
    host_->tick();
  } else if (options_.dedup && random_() % 4 == 0) {
    start_dedup();
  } else if (options_.space && random_() % 8 == 0) {
    start_compaction();
  } else if (options_.transfers && random_() % 5 == 0) {
    start_transfer();
  } else if (choice < 55) {
    start_update();
  } else if (choice < 78) {
    start_commit();
  } else if (choice < 83) {
    start_refusal();
  } else if (choice < 93) {
    start_read();
  } else if (choice < 97) {
    start_counter();
  } else if (choice < 98) {
    start_fence();
  } else {
    store().start_snapshot();
  }
}

void Model::operate(Host& host, uint64_t operations, bool leave_running) {
  host_ = &host;
  const uint64_t space = key_of(0).space();  // of all keys below 100
  if (options_.dedup) store().dedup_spaces(kModelTarget, {&space, 1});
  for (uint64_t started = 0; started < operations && failure_.empty();) {
    if (running_.size() < options_.max_in_flight && random_() % 3 != 0) {
      started++;
      start_one();
    }
    step();
  }
  if (leave_running) return;
  for (int i = 0; i < 1'000'000 && !running_.empty() && failure_.empty(); i++) step();
  if (!running_.empty() && failure_.empty()) fail("operations hang");
}

void Model::step() {
  if (random_() % 4 == 0) host_->tick();
  // A record that is seen after the pass may have been queued, and its block started, within it.
  const size_t before = host_->moment();
  host_->pass();
  poll_queued(before);
  for (auto& running : running_) {
    if (!running->done) continue;
    if (running->kind == Running::read) {
      check_read(*running);
    } else {
      ended(*running);
    }
  }
  std::erase_if(running_, [](const auto& running) { return running->done; });
}

void Model::forget_running() {
  running_.clear();
  installing_ = releasing_ = false;
}

// Which updates have had their records queued since the last look.
void Model::poll_queued(size_t before) {
  for (auto& running : running_) {
    if (running->queued || running->dropped) continue;
    if (running->kind == Running::install && queue_install(*running, before)) continue;
    if (running->kind != Running::update) continue;
    const StageOp& op = running->stage;
    if (op.error != 0) continue;  // it has failed, its answer is on its way: what is there now is of others
    ChunkInfo info;
    PendingInfo pending;
    bool there = store().lookup(kModelTarget, op.key, &info);
    bool queued = store().find_pending(kModelTarget, op.key, op.version, &pending) ||
                  (there && info.version >= op.version);
    // A removal that was committed, by this update or one behind it, leaves the retry entry alone.
    const bool removed_now = op.commit_now && op.kind == UpdateKind::remove;
    RetryEntry entry;
    if (!queued && (removed_now || !there) &&
        store().retry_lookup(kModelTarget, op.identity.client, op.chain, op.identity.channel, &entry)) {
      queued = entry.version >= op.version && (removed_now || entry.state == RetryState::done);
    }
    if (queued) note_queued(*running, before);
  }
}

void Model::note_queued(Running& running, size_t before) {
  const StageOp& op = running.stage;
  running.queued = true;
  ModelChunk& chunk = chunks_[running.key];
  ModelState state = chunk.now();
  state.pendings.push_back(running.version);
  state.retry = RetryEntry{op.identity.sequence, op.key, op.version, RetryState::pending, 0};
  if (op.commit_now) {
    state.retry->state = RetryState::done;
    state.pendings.clear();
    state.committed = {};
    if (running.version.bytes != nullptr) state.committed = running.version;
    auto& chain = chunk.planned_chain;
    while (!chain.empty() && chain.front().version <= op.version) chain.erase(chain.begin());
    if (chain.empty() && running.version.bytes == nullptr) chunk.planned = {};
  }
  push_state(chunk, state, before);
  running.state = chunk.states.size() - 1;
}

// ------------------------------------------------------------------------------ answers

// The update leaves nothing; those behind it may find that what they build on isn't there.
void Model::note_failed(Running& running) {
  ModelChunk& chunk = chunks_[running.key];
  for (auto& other : running_) {
    if (other->key == running.key && !other->queued) other->may_fail = true;
  }
  chunk.settles = true;
  if (chunk.in_flight == 0) settle(chunk);
}

// Notes the answer of an operation that has ended; false: it is wrong.
bool Model::ended(Running& running) {
  const int error = running.op().error;
  answers_[error]++;
  const bool changes = running.kind == Running::update || running.kind == Running::install;
  const bool removes = running.kind == Running::update && running.stage.kind == UpdateKind::remove;
  const bool full = error == ENOSPC && options_.may_fill && changes && !removes && !running.queued;
  const bool damaged = error == EBADMSG && host_->damaged() && changes && !running.queued;
  const bool baseless = error == ESTALE && running.may_fail && !running.queued;
  // A repair whose version was replaced by a commit meanwhile.
  const bool late_repair = error == ECANCELED && running.kind == Running::install && !running.queued &&
                           running.install_op.only_over != Version{};
  const bool refused = error == ESTALE && running.refused;
  const bool fails = full || damaged || baseless || late_repair || refused;
  if (running.refused && !refused) fail("an update that was refused is acknowledged");
  if (error != 0 && !fails) {
    const char* what = running.op().what;
    fail("an operation failed: " + std::to_string(error) + " " + (what ? what : ""));
    return false;
  }
  if (running.kind == Running::counter) {
    counter_.states[running.state].acknowledged_at = running.done_at;
    return true;
  }
  if (running.kind == Running::fence) {
    fences_[running.state].acknowledged_at = running.done_at;
    return true;
  }
  if (running.kind == Running::target) {
    for (const auto& [key, state] : running.states)
      chunks_[key].states[state].acknowledged_at = running.done_at;
    if (running.releases) {
      counter_.states[running.state].acknowledged_at = running.done_at;
      releasing_ = false;
      if (store().usage(kModelTarget).allocated_bytes != 0) fail("a released target has slots");
    }
    return true;
  }
  ModelChunk& chunk = chunks_[running.key];
  if (running.kind == Running::install) chunk.installs--, installing_ = false;
  if (changes) {
    chunk.in_flight--;
    if (chunk.settles && chunk.in_flight == 0) settle(chunk);
  }
  if (full || damaged || (fails && !refused && running.kind == Running::update)) note_failed(running);
  if (running.dropped || fails) {
    if (running.queued && !refused) fail("an update that was dropped has its record");
    return true;
  }
  if (!running.queued) {
    fail("an update was acknowledged and isn't there");
    return false;
  }
  chunk.states[running.state].acknowledged_at = running.done_at;
  return true;
}

// What updates build on once nothing is on the way.
void Model::settle(ModelChunk& chunk) {
  const ModelState& state = chunk.now();
  chunk.settles = chunk.in_flight > 0;
  chunk.planned_chain = state.pendings;
  chunk.planned = {};
  if (state.committed.there()) chunk.planned = state.committed;
  if (!state.pendings.empty()) chunk.planned = state.pendings.back();
}

}  // namespace ffs::engine::testing
