// What recovery does to the model's store: whole versions put in and taken out, targets emptied.
#include "engine_model_running.h"

namespace ffs::engine::testing {

// `over_same`: a repair, of the version that is committed with the same bytes. Else another version over
// whatever is there, now and then an older one.
void Model::start_install(bool over_same) {
  const uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  const ModelState& state = chunk.now();
  if (installing_ || chunk.settles || (over_same && (!state.committed.there() || chunk.in_flight > 0)))
    return;
  Running* running = add(Running::install, key);
  InstallOp& op = running->install_op;
  Bytes bytes;
  if (over_same) {
    bytes = state.committed.bytes;
    op.version = op.only_over = state.committed.version;
    chunk.settles = true;
  } else {
    const uint32_t size = random_() % 8 == 0 ? 0 : some_length();
    bytes = std::make_shared<std::vector<uint8_t>>(random_bytes(size, random_()));
    op.version = v(next_version_++);
    // An older one than what is there: a number that nothing was given.
    if (chunk.in_flight == 0 && random_() % 4 == 0) op.version.chain.counter = 0;
  }
  running->laid = std::make_unique<Laid>(0, *bytes);
  op.target = kModelTarget;
  op.key = key_of(key);
  op.length = static_cast<uint32_t>(bytes->size());
  op.data = bytes->empty() ? nullptr : running->laid->data;
  op.tail_padded = random_() % 4 != 0;
  if (options_.space) op.size_hint = some_hint();
  running->version = {op.version, bytes};
  contents_[op.version] = bytes;
  if (!over_same) {
    chunk.planned = running->version;
    chunk.planned_chain.clear();
  }
  chunk.in_flight++;
  chunk.installs++;
  installing_ = true;
  installs_seen_ = store().metrics().installed;
  trace("install", key,
        "v" + describe(op.version) + " over " + describe(op.only_over) + " length " +
            std::to_string(op.length));
  store().install(&op);
}

// One install at a time, so that their count says when its record is there.
bool Model::queue_install(Running& running, size_t before) {
  if (store().metrics().installed == installs_seen_) return false;
  running.queued = true;
  ModelChunk& chunk = chunks_[running.key];
  ModelState state = chunk.now();
  if (running.install_op.only_over.none()) state.pendings.clear();
  state.committed = running.version;
  push_state(chunk, state, before);
  running.state = chunk.states.size() - 1;
  return true;
}

// With nothing on the way for the chunk: then its record is queued at once.
void Model::start_erase() {
  const uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  if (chunk.in_flight > 0) return;
  ModelState state = chunk.now();
  state.committed = {};
  state.pendings.clear();
  push_state(chunk, state, host_->moment());
  settle(chunk);
  Running* running = add(Running::erase, key);
  running->state = chunk.states.size() - 1;
  running->queued = true;
  trace("erase", key);
  store().erase(kModelTarget, key_of(key), &running->plain);
}

void Model::start_reset() {
  for (auto& other : running_) {
    if (other->kind != Running::update || other->queued) continue;
    other->dropped |= !other->stage.commit_now;
    other->may_fail = true;
  }
  Running* running = add(Running::target, 0);
  trace("reset", 0);
  for (auto& [key, chunk] : chunks_) {
    ModelState state = chunk.now();
    if (!state.pendings.empty() || state.retry) {
      state.pendings.clear();
      state.retry.reset();
      push_state(chunk, state, host_->moment(), true);
      running->states.emplace_back(key, chunk.states.size() - 1);
    }
    settle(chunk);
  }
  store().reset_target(kModelTarget, &running->plain);
}

void Model::start_release() {
  for (auto& other : running_) {
    const bool changes = other->kind == Running::update || other->kind == Running::install;
    other->dropped |= changes && !other->queued;
  }
  Running* running = add(Running::target, 0);
  running->releases = true;
  trace("release", 0);
  for (auto& [key, chunk] : chunks_) {
    push_state(chunk, ModelState{}, host_->moment());
    running->states.emplace_back(key, chunk.states.size() - 1);
    settle(chunk);
  }
  counter_.states.push_back({0, host_->moment(), SIZE_MAX});
  running->state = counter_.states.size() - 1;
  releasing_ = true;
  store().release_target(kModelTarget, &running->plain);
}

void Model::start_transfer() {
  const uint64_t choice = random_() % 100;
  if (choice < 45) {
    start_install(false);
  } else if (choice < 65) {
    start_install(true);
  } else if (choice < 85) {
    start_erase();
  } else if (choice < 95) {
    start_reset();
  } else {
    start_release();
  }
}

}  // namespace ffs::engine::testing
