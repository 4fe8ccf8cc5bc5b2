#include "engine_crash_model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ffs::engine::testing {

namespace {
const TargetId kTargetId(Harness::kTarget);
constexpr uint32_t kChannelBase = 100;
constexpr uint64_t kClient = 5;
constexpr uint64_t kSpace = 4242;

std::string describe(const Version& version) {
  return std::to_string(version.update);
}
}  // namespace

// One operation that the store has not answered yet.
struct CrashRun::Running {
  enum Kind { update, commit, refusal, read, counter, install, erase, target } kind = update;
  uint64_t key = 0;
  StageOp stage;
  StoreOp plain;
  ReadOp read_op;
  InstallOp install_op;
  std::unique_ptr<Laid> laid;
  ModelVersion version;
  uint64_t value = 0;
  size_t state = 0;  // of the chunk, once queued
  bool queued = false;
  bool dropped = false;   // by a reset or release of the target before its record was queued
  bool may_fail = false;  // its base was dropped so
  bool releases = false;
  std::vector<std::pair<uint64_t, size_t>> states;  // reset, release: (key, state)
  bool done = false;
  size_t done_at = 0;  // length of the log
  CrashRun* run = nullptr;

  static void finished(StoreOp* op) {
    auto self = static_cast<Running*>(op->owner);
    self->done = true;
    self->done_at = self->run->h_.io->log().size();
  }
};

CrashRun::CrashRun(const CrashOptions& options)
    : options_(options), random_(options.seed), h_(options.seed) {}
CrashRun::~CrashRun() {
  h_.settle();
}  // before the memory of its operations goes

void CrashRun::fail(const std::string& text) {
  if (failure_.empty())
    failure_ = "seed " + std::to_string(options_.seed) + " operations " +
               std::to_string(options_.operations) + " keys " + std::to_string(options_.keys) + " stride " +
               std::to_string(options_.prefix_stride) + " largest " + std::to_string(options_.max_bytes) +
               (options_.transfers ? " transfers" : "") + (options_.all_kinds ? " all kinds: " : ": ") + text;
}

void CrashRun::push_state(ModelChunk& chunk, ModelState state, size_t queued_at, bool reset) {
  state.reset = reset;
  state.queued_at = queued_at;
  state.acknowledged_at = SIZE_MAX;
  chunk.states.push_back(std::move(state));
}

// ------------------------------------------------------------------------------ the operations

bool CrashRun::start_update() {
  uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  if (chunk.planned_chain.size() > 5 || chunk.settles) return false;
  auto running = std::make_unique<Running>();
  StageOp& op = running->stage;
  const Bytes& old = chunk.planned.bytes;
  uint32_t old_size = old != nullptr ? static_cast<uint32_t>(old->size()) : 0;
  auto result = std::make_shared<std::vector<uint8_t>>(old != nullptr ? *old : std::vector<uint8_t>{});
  std::vector<uint8_t> data;
  uint64_t choice = random_() % 100;
  auto length_of = [&]() -> uint32_t {
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
  };
  op.offset = 0;
  if (old != nullptr && choice < 8) {
    op.kind = UpdateKind::remove;
    result = nullptr;
  } else if (old != nullptr && choice < 20) {
    op.kind = UpdateKind::truncate;
    uint32_t span = old_size + 70'000;
    op.length = random_() % 4 == 0 ? static_cast<uint32_t>(random_() % 3) * 65536
                                   : static_cast<uint32_t>(random_() % span);
    result->resize(op.length);
  } else {
    bool replace = choice < 40 || old == nullptr;
    op.kind = replace && random_() % 2 == 0 ? UpdateKind::replace : UpdateKind::write;
    op.length = length_of();
    if (op.kind == UpdateKind::write && old != nullptr) {
      switch (random_() % 4) {
        case 0:
          op.offset = 0;
          break;
        case 1:
          op.offset = old_size;
          break;  // append
        case 2:
          op.offset = static_cast<uint32_t>(random_() % (old_size + 1)) / 4096 * 4096;
          break;
        default:
          op.offset = static_cast<uint32_t>(random_() % (old_size + 3000));
          break;
      }
    }
    data = random_bytes(op.length, random_());
    if (op.kind == UpdateKind::replace) {
      *result = data;
    } else {
      if (result->size() < op.offset + op.length) result->resize(op.offset + op.length);
      std::memcpy(result->data() + op.offset, data.data(), data.size());
    }
  }
  running->laid = std::make_unique<Laid>(op.offset, data);
  op.target = kTargetId;
  op.key = key_of(key);
  op.version = v(next_version_++);
  op.base = chunk.planned.version;
  if (old == nullptr && chunk.planned_chain.empty()) op.base = Version{};
  op.data = data.empty() ? nullptr : running->laid->data;
  op.tail_padded = random_() % 4 != 0;
  op.size_hint = random_() % 3 == 0 ? 200'000 : 0;
  op.commit_now = random_() % 5 == 0;
  op.identity = {ClientId(kClient), kChannelBase + static_cast<uint32_t>(key), ++chunk.sequence};
  op.chain = ChainId(3);
  op.owner = running.get();
  op.done = Running::finished;
  running->kind = Running::update;
  running->key = key;
  running->run = this;
  running->version = {op.version, result};
  contents_[op.version] = result;
  chunk.planned = running->version;
  chunk.planned_chain.push_back(running->version);
  chunk.in_flight++;
  if (std::getenv("FFS_ENGINE_TRACE")) {
    std::fprintf(stderr, "%zu: stage key %lu v%lu base %lu kind %d offset %u length %u now %d -> %zd bytes\n",
                 h_.io->log().size(), key, op.version.update, op.base.update, static_cast<int>(op.kind),
                 op.offset, op.length, op.commit_now, result ? static_cast<ssize_t>(result->size()) : -1);
  }
  Running* raw = running.get();
  running_.push_back(std::move(running));
  h_.store->stage(&raw->stage);
  return true;
}

// Which updates have had their records queued since the last look.
void CrashRun::poll_queued(size_t before) {
  for (auto& running : running_) {
    if (running->queued || running->dropped) continue;
    if (running->kind == Running::install && queue_install(*running, before)) continue;
    if (running->kind != Running::update) continue;
    const StageOp& op = running->stage;
    ChunkInfo info;
    PendingInfo pending;
    bool there = h_.store->lookup(kTargetId, op.key, &info);
    bool queued = h_.store->find_pending(kTargetId, op.key, op.version, &pending) ||
                  (there && info.version >= op.version);
    bool removed_now = op.commit_now && op.kind == UpdateKind::remove;
    RetryEntry entry;
    if (!queued && removed_now &&
        h_.store->retry_lookup(kTargetId, op.identity.client, op.chain, op.identity.channel, &entry)) {
      queued = entry.version >= op.version;
    }
    if (!queued) continue;
    running->queued = true;
    ModelChunk& chunk = chunks_[running->key];
    ModelState state = chunk.now();
    state.pendings.push_back(running->version);
    state.retry = RetryEntry{op.identity.sequence, op.key, op.version, RetryState::pending, 0};
    if (op.commit_now) {
      state.retry->state = RetryState::done;
      state.pendings.clear();
      state.committed.reset();
      if (running->version.bytes != nullptr) state.committed = running->version;
      auto& chain = chunk.planned_chain;
      while (!chain.empty() && chain.front().version <= op.version) chain.erase(chain.begin());
      if (chain.empty() && running->version.bytes == nullptr) chunk.planned = {};
    }
    push_state(chunk, state, before);
    running->state = chunk.states.size() - 1;
  }
}

void CrashRun::start_commit() {
  uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  ModelState state = chunk.now();
  if (state.pendings.empty()) return;
  size_t at = random_() % state.pendings.size();
  ModelVersion version = state.pendings[at];
  auto running = std::make_unique<Running>();
  running->kind = Running::commit;
  running->key = key;
  running->run = this;
  running->plain.owner = running.get();
  running->plain.done = Running::finished;
  bool wait = random_() % 2 == 0;
  Status done = h_.store->commit(kTargetId, key_of(key), version.version, wait ? &running->plain : nullptr);
  if (std::getenv("FFS_ENGINE_TRACE"))
    std::fprintf(stderr, "%zu: commit key %lu v%lu\n", h_.io->log().size(), key, version.version.update);
  if (!done.ok()) return fail("commit of a pending version failed");
  state.committed.reset();
  if (version.bytes != nullptr) state.committed = version;
  state.pendings.erase(state.pendings.begin(), state.pendings.begin() + static_cast<ptrdiff_t>(at) + 1);
  if (state.retry && state.retry->version <= version.version && state.retry->state == RetryState::pending) {
    state.retry->state = RetryState::done;
  }
  auto& chain = chunk.planned_chain;
  while (!chain.empty() && chain.front().version <= version.version) chain.erase(chain.begin());
  if (chain.empty() && version.bytes == nullptr && chunk.installs == 0) chunk.planned = {};
  push_state(chunk, state, h_.io->log().size());
  running->state = chunk.states.size() - 1;
  running->queued = true;
  if (wait) running_.push_back(std::move(running));
}

// Refuses the newest pending version, or an update that never came.
void CrashRun::start_refusal() {
  uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  if (chunk.in_flight > 0) return;
  ModelState state = chunk.now();
  auto running = std::make_unique<Running>();
  running->kind = Running::refusal;
  running->key = key;
  running->run = this;
  running->plain.owner = running.get();
  running->plain.done = Running::finished;
  Version version = v(next_version_);
  if (!state.pendings.empty()) {
    version = state.pendings.back().version;
    state.pendings.pop_back();
    chunk.planned_chain.pop_back();
    if (!chunk.planned_chain.empty())
      chunk.planned = chunk.planned_chain.back();
    else
      chunk.planned = state.committed ? *state.committed : ModelVersion{};
  } else {
    next_version_++;
    chunk.sequence++;
  }
  UpdateIdentity identity{ClientId(kClient), kChannelBase + static_cast<uint32_t>(key), chunk.sequence};
  state.retry = RetryEntry{chunk.sequence, key_of(key), version, RetryState::refused, ENOSPC};
  if (std::getenv("FFS_ENGINE_TRACE"))
    std::fprintf(stderr, "%zu: refuse key %lu v%lu\n", h_.io->log().size(), key, version.update);
  h_.store->refuse(kTargetId, key_of(key), version, identity, ChainId(3), ENOSPC, &running->plain);
  push_state(chunk, state, h_.io->log().size());
  running->state = chunk.states.size() - 1;
  running->queued = true;
  running_.push_back(std::move(running));
}

void CrashRun::start_counter() {
  auto running = std::make_unique<Running>();
  running->kind = Running::counter;
  running->run = this;
  running->plain.owner = running.get();
  running->plain.done = Running::finished;
  running->value = ++counter_.value;
  counter_.states.push_back({running->value, h_.io->log().size(), SIZE_MAX});
  running->state = counter_.states.size() - 1;
  Running* raw = running.get();
  running_.push_back(std::move(running));
  uint64_t value = raw->value;
  h_.store->set_chain_state(kTargetId, {reinterpret_cast<const uint8_t*>(&value), sizeof value}, nullptr);
  h_.store->set_space_epoch(kTargetId, kSpace, {value, 0}, &raw->plain);
}

void CrashRun::start_read() {
  uint64_t key = random_() % options_.keys;
  const ModelState& state = chunks_[key].now();
  if (!state.committed) return;
  auto running = std::make_unique<Running>();
  ReadOp& op = running->read_op;
  auto size = static_cast<uint32_t>(state.committed->bytes->size());
  op.target = kTargetId;
  op.key = key_of(key);
  op.offset = static_cast<uint32_t>(random_() % (size + 1));
  if (random_() % 2 == 0) op.offset = op.offset / 4096 * 4096;
  op.length = static_cast<uint32_t>(random_() % (size + 5000));
  if (!state.pendings.empty() && random_() % 2 == 0) {
    const ModelVersion& pending = state.pendings[random_() % state.pendings.size()];
    if (pending.bytes != nullptr) op.at_least = pending.version;
  }
  op.verify_partial = random_() % 2 == 0;
  running->laid = std::make_unique<Laid>(op.offset, std::vector<uint8_t>(op.length, 0xee));
  op.memory = running->laid->data;
  op.owner = running.get();
  op.done = Running::finished;
  running->kind = Running::read;
  running->key = key;
  running->run = this;
  Running* raw = running.get();
  running_.push_back(std::move(running));
  h_.store->read(&raw->read_op);
}

// ------------------------------------------------------------------------------ recovery's operations

// What updates build on once nothing is on the way.
void CrashRun::settle(ModelChunk& chunk) {
  const ModelState& state = chunk.now();
  chunk.settles = chunk.in_flight > 0;
  chunk.planned_chain = state.pendings;
  chunk.planned = {};
  if (state.committed) chunk.planned = *state.committed;
  if (!state.pendings.empty()) chunk.planned = state.pendings.back();
}

// `over_same`: a repair, of the version that is committed with the same bytes. Else another version over
// whatever is there, now and then an older one.
void CrashRun::start_install(bool over_same) {
  uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  const ModelState& state = chunk.now();
  if (installing_ || chunk.settles || (over_same && (!state.committed || chunk.in_flight > 0))) return;
  auto running = std::make_unique<Running>();
  InstallOp& op = running->install_op;
  Bytes bytes;
  if (over_same) {
    bytes = state.committed->bytes;
    op.version = op.only_over = state.committed->version;
    chunk.settles = true;
  } else {
    auto size = static_cast<uint32_t>(random_() % options_.max_bytes);
    if (random_() % 8 == 0) size = 0;
    bytes = std::make_shared<std::vector<uint8_t>>(random_bytes(size, random_()));
    op.version = v(next_version_++);
    // An older one than what is there: a number that nothing was given.
    if (chunk.in_flight == 0 && random_() % 4 == 0) op.version.chain.counter = 0;
  }
  running->laid = std::make_unique<Laid>(0, *bytes);
  op.target = kTargetId;
  op.key = key_of(key);
  op.length = static_cast<uint32_t>(bytes->size());
  op.data = bytes->empty() ? nullptr : running->laid->data;
  op.tail_padded = random_() % 4 != 0;
  op.owner = running.get();
  op.done = Running::finished;
  running->kind = Running::install;
  running->key = key;
  running->run = this;
  running->version = {op.version, bytes};
  contents_[op.version] = bytes;
  if (!over_same) {
    chunk.planned = running->version;
    chunk.planned_chain.clear();
  }
  chunk.in_flight++;
  chunk.installs++;
  installing_ = true;
  installs_seen_ = h_.store->metrics().installed;
  if (std::getenv("FFS_ENGINE_TRACE"))
    std::fprintf(stderr, "%zu: install key %lu v%lu over %lu, %u bytes\n", h_.io->log().size(), key,
                 op.version.update, op.only_over.update, op.length);
  Running* raw = running.get();
  running_.push_back(std::move(running));
  h_.store->install(&raw->install_op);
}

// One install at a time, so that their count says when its record is there.
bool CrashRun::queue_install(Running& running, size_t before) {
  if (h_.store->metrics().installed == installs_seen_) return false;
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
void CrashRun::start_erase() {
  uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  if (chunk.in_flight > 0) return;
  auto running = std::make_unique<Running>();
  running->kind = Running::erase;
  running->key = key;
  running->run = this;
  running->plain.owner = running.get();
  running->plain.done = Running::finished;
  ModelState state = chunk.now();
  state.committed.reset();
  state.pendings.clear();
  push_state(chunk, state, h_.io->log().size());
  settle(chunk);
  running->state = chunk.states.size() - 1;
  running->queued = true;
  if (std::getenv("FFS_ENGINE_TRACE")) std::fprintf(stderr, "%zu: erase key %lu\n", h_.io->log().size(), key);
  Running* raw = running.get();
  running_.push_back(std::move(running));
  h_.store->erase(kTargetId, key_of(key), &raw->plain);
}

void CrashRun::start_reset() {
  auto running = std::make_unique<Running>();
  running->kind = Running::target;
  running->run = this;
  running->plain.owner = running.get();
  running->plain.done = Running::finished;
  if (std::getenv("FFS_ENGINE_TRACE")) std::fprintf(stderr, "%zu: reset\n", h_.io->log().size());
  for (auto& other : running_) {
    if (other->kind != Running::update || other->queued) continue;
    other->dropped |= !other->stage.commit_now;
    other->may_fail = true;
  }
  for (auto& [key, chunk] : chunks_) {
    ModelState state = chunk.now();
    if (!state.pendings.empty() || state.retry) {
      state.pendings.clear();
      state.retry.reset();
      push_state(chunk, state, h_.io->log().size(), true);
      running->states.emplace_back(key, chunk.states.size() - 1);
    }
    settle(chunk);
  }
  Running* raw = running.get();
  running_.push_back(std::move(running));
  h_.store->reset_target(kTargetId, &raw->plain);
}

void CrashRun::start_release() {
  auto running = std::make_unique<Running>();
  running->kind = Running::target;
  running->run = this;
  running->releases = true;
  running->plain.owner = running.get();
  running->plain.done = Running::finished;
  if (std::getenv("FFS_ENGINE_TRACE")) std::fprintf(stderr, "%zu: release\n", h_.io->log().size());
  for (auto& other : running_) {
    bool changes = other->kind == Running::update || other->kind == Running::install;
    other->dropped |= changes && !other->queued;
  }
  for (auto& [key, chunk] : chunks_) {
    push_state(chunk, ModelState{}, h_.io->log().size());
    running->states.emplace_back(key, chunk.states.size() - 1);
    settle(chunk);
  }
  counter_.states.push_back({0, h_.io->log().size(), SIZE_MAX});
  running->state = counter_.states.size() - 1;
  releasing_ = true;
  Running* raw = running.get();
  running_.push_back(std::move(running));
  h_.store->release_target(kTargetId, &raw->plain);
}

void CrashRun::start_transfer() {
  uint64_t choice = random_() % 100;
  if (choice < 45)
    start_install(false);
  else if (choice < 65)
    start_install(true);
  else if (choice < 85)
    start_erase();
  else if (choice < 95)
    start_reset();
  else
    start_release();
}

// Notes the acknowledgement of an operation that has ended; false: it failed.
bool CrashRun::ended(Running& running) {
  int error = running.plain.error;
  const char* what = running.plain.what;
  if (running.kind == Running::update) error = running.stage.error, what = running.stage.what;
  if (running.kind == Running::install) error = running.install_op.error, what = running.install_op.what;
  const bool dropped_base = running.may_fail && error == ESTALE && !running.queued;
  // A repair whose version was replaced by a commit meanwhile.
  const bool late_repair = running.kind == Running::install && error == ECANCELED && !running.queued &&
                           running.install_op.only_over != Version{};
  if (error != 0 && !dropped_base && !late_repair) {
    fail("an operation failed: " + std::to_string(error) + " " + (what ? what : ""));
    return false;
  }
  if (running.kind == Running::counter) {
    counter_.states[running.state].acknowledged_at = running.done_at;
    return true;
  }
  if (running.kind == Running::target) {
    for (const auto& [key, state] : running.states)
      chunks_[key].states[state].acknowledged_at = running.done_at;
    if (running.releases) {
      counter_.states[running.state].acknowledged_at = running.done_at;
      releasing_ = false;
      if (h_.store->usage(kTargetId).allocated_bytes != 0) fail("a released target has slots");
    }
    return true;
  }
  ModelChunk& chunk = chunks_[running.key];
  if (running.kind == Running::install) chunk.installs--, installing_ = false;
  if (running.kind == Running::install || running.kind == Running::update) {
    chunk.in_flight--;
    if (chunk.settles && chunk.in_flight == 0) settle(chunk);
  }
  if (running.dropped || dropped_base || late_repair) {
    if (running.queued) fail("an update that was dropped has its record");
    return true;
  }
  if (!running.queued) {
    fail("an update was acknowledged and isn't there");
    return false;
  }
  chunk.states[running.state].acknowledged_at = running.done_at;
  return true;
}

void CrashRun::step() {
  h_.clock_us += 200;
  if (random_() % 4 == 0) h_.store->tick(h_.clock_us);
  // A record that is seen after the pass may have been queued, and its block started, within it.
  size_t before = h_.io->log().size();
  h_.io->run_once(0);
  poll_queued(before);
  for (auto& running : running_) {
    if (!running->done) continue;
    if (running->kind == Running::read) {
      const ReadOp& op = running->read_op;
      if (op.error != 0) {
        fail("a read failed: " + std::to_string(op.error));
        continue;
      }
      const auto& bytes = *contents_[op.version];
      uint32_t from = std::min(op.offset, static_cast<uint32_t>(bytes.size()));
      size_t expected = std::min<size_t>(op.length, bytes.size() - from);
      if (op.read_length != expected || !std::equal(op.memory, op.memory + expected, bytes.begin() + from)) {
        fail("a read of version " + describe(op.version) + " gave other bytes");
      }
      continue;
    }
    ended(*running);
  }
  std::erase_if(running_, [](const auto& running) { return running->done; });
}

void CrashRun::operate() {
  for (uint64_t started = 0; started < options_.operations && failure_.empty();) {
    if (running_.size() < options_.max_in_flight && random_() % 3 != 0) {
      started++;
      uint64_t choice = random_() % 100;
      if (releasing_)
        h_.store->tick(h_.clock_us);
      else if (options_.transfers && random_() % 5 == 0)
        start_transfer();
      else if (choice < 55)
        start_update();
      else if (choice < 78)
        start_commit();
      else if (choice < 83)
        start_refusal();
      else if (choice < 93)
        start_read();
      else if (choice < 98)
        start_counter();
      else
        h_.store->start_snapshot();
    }
    step();
  }
  for (int i = 0; i < 100'000 && !running_.empty() && failure_.empty(); i++) step();
  if (!running_.empty() && failure_.empty()) fail("operations hang");
}

// ------------------------------------------------------------------------------ judging a crash

bool CrashRun::same(Harness& h, uint64_t key, const ModelState& state, std::string* difference) {
  ChunkInfo info;
  bool there = h.store->lookup(kTargetId, key_of(key), &info);
  Version committed = there ? info.version : Version{};
  if (committed != (state.committed ? state.committed->version : Version{})) return false;
  uint32_t pendings = there ? info.pending_count : 0;
  if (pendings != state.pendings.size()) return false;
  for (uint32_t i = 0; i < pendings; i++) {
    PendingInfo pending;
    if (!h.store->pending_at(kTargetId, key_of(key), i, &pending)) return false;
    if (pending.version != state.pendings[i].version) return false;
  }
  RetryEntry entry;
  uint32_t channel = kChannelBase + static_cast<uint32_t>(key);
  bool has_entry = h.store->retry_lookup(kTargetId, ClientId(kClient), ChainId(3), channel, &entry);
  if (has_entry != state.retry.has_value()) return false;
  if (has_entry && (entry.sequence != state.retry->sequence || entry.state != state.retry->state ||
                    entry.version != state.retry->version || entry.error != state.retry->error)) {
    return false;
  }
  // From here on it must be this state: its bytes must be right.
  auto compare = [&](const ModelVersion& version) {
    if (version.bytes == nullptr) return;
    auto op = std::make_unique<ReadOp>();
    auto size = static_cast<uint32_t>(version.bytes->size());
    Laid laid(0, std::vector<uint8_t>(size + 1));
    bool done = false;
    op->target = kTargetId;
    op->key = key_of(key);
    op->at_least = version.version;
    op->exact_version = true;
    op->length = size + 1;
    op->memory = laid.data;
    op->verify_whole = true;
    op->owner = &done;
    op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    h.store->read(op.get());
    h.run_until(done);
    if (op->error != 0) {
      *difference =
          "reading version " + describe(version.version) + " fails with " + std::to_string(op->error);
    } else if (op->read_length != size || !std::equal(laid.data, laid.data + size, version.bytes->begin())) {
      *difference = "version " + describe(version.version) + " has other bytes";
    }
  };
  if (state.committed) compare(*state.committed);
  for (const ModelVersion& pending : state.pendings) compare(pending);
  return true;
}

std::string CrashRun::check_state(Harness& h, uint64_t key, size_t prefix, ModelState* matched) {
  const ModelChunk& chunk = chunks_[key];
  size_t least = 0, most = 0;
  for (size_t i = 1; i < chunk.states.size(); i++) {
    if (chunk.states[i].acknowledged_at <= prefix) least = i;
    if (chunk.states[i].queued_at <= prefix) most = i;
  }
  for (size_t i = most + 1; i-- > least;) {
    std::string difference;
    if (!same(h, key, chunk.states[i], &difference)) continue;
    *matched = chunk.states[i];
    return difference.empty() ? "" : "chunk " + std::to_string(key) + ": " + difference;
  }
  // Data before a reset may be lost and the reset stays.
  for (size_t i = most; i > least; i--) {
    for (size_t j = i; chunk.states[i].reset && j-- > least;) {
      ModelState emptied = chunk.states[j];
      emptied.pendings.clear();
      emptied.retry.reset();
      std::string difference;
      if (!same(h, key, emptied, &difference)) continue;
      *matched = emptied;
      return difference.empty() ? "" : "chunk " + std::to_string(key) + ": " + difference;
    }
  }
  ChunkInfo info;
  bool there = h.store->lookup(kTargetId, key_of(key), &info);
  std::string expected;
  for (size_t i = least; i <= most; i++) {
    const ModelState& s = chunk.states[i];
    expected += " [" + (s.committed ? describe(s.committed->version) : "none");
    for (const auto& p : s.pendings) expected += " +" + describe(p.version);
    if (s.retry)
      expected +=
          " r" + std::to_string(s.retry->sequence) + "/" + std::to_string(static_cast<int>(s.retry->state));
    expected += "]";
  }
  RetryEntry e;
  if (h.store->retry_lookup(kTargetId, ClientId(kClient), ChainId(3),
                            kChannelBase + static_cast<uint32_t>(key), &e)) {
    expected += " retry is r" + std::to_string(e.sequence) + "/" + std::to_string(static_cast<int>(e.state));
  }
  return expected + " chunk " + std::to_string(key) + " is in no state from " + std::to_string(least) +
         " to " + std::to_string(most) + ": committed " + (there ? describe(info.version) : "none") +
         ", pending " + std::to_string(there ? info.pending_count : 0);
}

std::string CrashRun::check_counters(Harness& h, size_t prefix) {
  size_t least = 0, most = 0;
  for (size_t i = 1; i < counter_.states.size(); i++) {
    if (counter_.states[i].acknowledged_at <= prefix) least = i;
    if (counter_.states[i].queued_at <= prefix) most = i;
  }
  auto possible = [&](uint64_t value) {
    for (size_t i = least; i <= most; i++) {
      if (counter_.states[i].value == value) return true;
    }
    return false;
  };
  uint64_t epoch = h.store->space_epoch(kTargetId, kSpace).least_epoch;
  uint64_t state = 0;
  auto bytes = h.store->chain_state(kTargetId);
  if (bytes.size() == sizeof state) std::memcpy(&state, bytes.data(), sizeof state);
  if (!possible(epoch)) return "the space epoch is " + std::to_string(epoch);
  if (!possible(state)) return "the chain state is " + std::to_string(state);
  return "";
}

std::string CrashRun::check_crash(io::SimImage image, size_t prefix, const char* kind) {
  crashes_++;
  Harness h(options_.seed * 1000 + prefix, std::move(image));
  std::string at = " (power cut after event " + std::to_string(prefix) + ", " + kind + ")";
  Mutants mutants;
  mutants.replay_without_verification = options_.mutants.replay_without_verification;
  if (!h.try_open(mutants).ok()) return "recovery fails: " + ChunkStore::last_open_message() + at;
  std::string wrong = h.store->check_consistency();
  std::map<uint64_t, ModelState> states;
  for (const auto& [key, chunk] : chunks_) {
    if (wrong.empty()) wrong = check_state(h, key, prefix, &states[key]);
  }
  if (wrong.empty()) wrong = check_counters(h, prefix);
  if (!wrong.empty()) return wrong + at;
  if (crashes_ % 5 != 0) return "";
  // A second recovery, from what the first one left, changes nothing.
  h.settle();
  if (!h.try_open().ok()) return "the second recovery fails: " + ChunkStore::last_open_message() + at;
  for (const auto& [key, state] : states) {
    std::string difference;
    if (!same(h, key, state, &difference) || !difference.empty()) {
      return "the second recovery changes chunk " + std::to_string(key) + at;
    }
  }
  return h.store->check_consistency();
}

std::string CrashRun::run() {
  if (options_.transfers) h_.release_step_chunks = 1;
  h_.format();
  io::SimImage start = h_.io->image();
  size_t formatted = h_.io->log().size();
  h_.open(options_.mutants);
  operate();
  metrics_ = h_.store->metrics();
  if (failure_.empty()) {
    std::string wrong = h_.store->check_consistency();
    if (!wrong.empty()) fail(wrong);
  }
  if (!failure_.empty()) return failure_;
  log_ = h_.io->log();
  io::CrashImages crashes(std::move(start));
  std::mt19937_64 random(options_.seed + 1);
  for (size_t at = formatted; at < log_.size(); at++) {
    crashes.advance(log_[at]);
    if (at % options_.prefix_stride != 0) continue;
    uint64_t odds = random() % 5;
    for (int kind = 0; kind < 4; kind++) {
      if (!options_.all_kinds && static_cast<int>(random() % 4) != kind) continue;
      std::vector<bool> writes;
      for (size_t i = 0; i < crashes.loose_writes(); i++) writes.push_back(random() % 5 < odds);
      static const char* names[] = {"nothing unsynced kept", "all kept", "whole writes lost", "sectors lost"};
      std::string wrong = check_crash(crashes.crash([&](size_t write, size_t) {
        if (kind == 0) return false;
        if (kind == 1) return true;
        if (kind == 2) return static_cast<bool>(writes[write]);
        return random() % 5 < odds;
      }),
                                      at + 1, names[kind]);
      if (!wrong.empty()) {
        fail(wrong);
        return failure_;
      }
    }
  }
  return failure_;
}

}  // namespace ffs::engine::testing
