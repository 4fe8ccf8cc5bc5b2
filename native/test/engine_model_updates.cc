// What clients do to the model's store: updates, commits, refusals, reads, small tables.
#include <algorithm>
#include <cerrno>

#include "base/crc32c.h"
#include "engine_model_running.h"

namespace ffs::engine::testing {

// Decides kind, place and bytes of an update over `old`.
void Model::shape_update(StageOp& op, const Bytes& old, std::shared_ptr<std::vector<uint8_t>>* result,
                         std::vector<uint8_t>* data) {
  const uint32_t old_size = old != nullptr ? static_cast<uint32_t>(old->size()) : 0;
  const uint64_t choice = random_() % 100;
  op.offset = 0;
  if (old != nullptr && choice < (options_.space ? 18u : 8u)) {
    op.kind = UpdateKind::remove;
    *result = nullptr;
    return;
  }
  if (old != nullptr && choice < 25) {
    op.kind = UpdateKind::truncate;
    const uint32_t span = std::min(old_size + 70'000, kMaxChunkBytes);
    op.length = random_() % 4 == 0 ? static_cast<uint32_t>(random_() % 3) * 65536
                                   : static_cast<uint32_t>(random_() % span);
    (*result)->resize(op.length);
    return;
  }
  const bool replace = choice < 40 || old == nullptr;
  op.kind = replace && random_() % 2 == 0 ? UpdateKind::replace : UpdateKind::write;
  op.length = some_length();
  if (op.kind == UpdateKind::write && old != nullptr) {
    switch (random_() % 4) {
      case 0:
        break;
      case 1:
        op.offset = old_size;  // append
        break;
      case 2:
        op.offset = static_cast<uint32_t>(random_() % (old_size + 1)) / 4096 * 4096;
        break;
      default:
        op.offset = static_cast<uint32_t>(random_() % (old_size + 3000));
        break;
    }
    if (op.offset >= kMaxChunkBytes) op.offset = 0;
    op.length = std::min(op.length, kMaxChunkBytes - op.offset);
  }
  if (options_.dedup && random_() % 4 != 0) {  // one of a few contents
    const uint64_t content = random_() % 3;
    op.kind = UpdateKind::replace;
    op.offset = 0;
    op.length = 65'536 + static_cast<uint32_t>(content) * 30'000;
    *data = random_bytes(op.length, 900 + content);
    **result = *data;
    return;
  }
  *data = random_bytes(op.length, random_());
  if (op.kind == UpdateKind::replace) {
    **result = *data;
    return;
  }
  if ((*result)->size() < op.offset + op.length) (*result)->resize(op.offset + op.length);
  std::memcpy((*result)->data() + op.offset, data->data(), data->size());
}

void Model::start_update() {
  const uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  if (chunk.planned_chain.size() > 5 || chunk.settles) return;
  const Bytes& old = chunk.planned.bytes;
  auto result = std::make_shared<std::vector<uint8_t>>(old != nullptr ? *old : std::vector<uint8_t>{});
  std::vector<uint8_t> data;
  Running* running = add(Running::update, key);
  StageOp& op = running->stage;
  shape_update(op, old, &result, &data);
  running->laid = std::make_unique<Laid>(op.offset, data);
  op.target = kModelTarget;
  op.key = key_of(key);
  op.version = v(next_version_++);
  op.base = chunk.planned.version;
  if (old == nullptr && chunk.planned_chain.empty()) op.base = Version{};
  op.data = data.empty() ? nullptr : running->laid->data;
  op.tail_padded = random_() % 4 != 0;
  if (op.offset % kCrcBlockBytes == 0 &&
      op.version.update % 2 == 0)  // no draw: old seeds stay what they were
    op.block_checksums = running->laid->block_sums(data.size());
  op.size_hint = some_hint();
  op.commit_now = random_() % (options_.space ? 2 : 5) == 0;
  op.identity = {ClientId(kModelClient), kModelChannel + static_cast<uint32_t>(key), ++chunk.sequence};
  op.chain = ChainId(3);
  running->version = {op.version, result};
  contents_[op.version] = result;
  chunk.planned = running->version;
  chunk.planned_chain.push_back(running->version);
  chunk.in_flight++;
  trace("stage", key,
        "v" + describe(op.version) + " base " + describe(op.base) + " kind " +
            std::to_string(static_cast<int>(op.kind)) + " offset " + std::to_string(op.offset) + " length " +
            std::to_string(op.length) + (op.commit_now ? " now" : ""));
  store().stage(&op);
}

void Model::start_commit() {
  const uint64_t key = random_() % options_.keys;
  const size_t count = chunks_[key].now().pendings.size();
  if (count > 0) commit_up_to(key, random_() % count, random_() % 2 == 0);
}

// Its record is queued, its data isn't there.
bool Model::arriving(uint64_t key, const ModelVersion& version) {
  PendingInfo info;
  return store().find_pending(kModelTarget, key_of(key), version.version, &info) && info.arriving;
}

void Model::commit_up_to(uint64_t key, size_t at, bool wait) {
  ModelChunk& chunk = chunks_[key];
  if (arriving(key, chunk.now().pendings[at])) {
    const Version version = chunk.now().pendings[at].version;
    if (store().commit(kModelTarget, key_of(key), version).error().code != EBUSY)
      return fail("a version was committed whose data isn't there");
    if (at-- == 0) return;
  }
  ModelState state = chunk.now();
  const ModelVersion version = state.pendings[at];
  Running* running = wait ? add(Running::commit, key) : nullptr;
  trace("commit", key, "v" + describe(version.version));
  Status done = store().commit(kModelTarget, key_of(key), version.version, wait ? &running->plain : nullptr);
  if (!done.ok()) return fail("commit of a pending version failed");
  state.committed = {};
  if (version.bytes != nullptr) state.committed = version;
  state.pendings.erase(state.pendings.begin(), state.pendings.begin() + static_cast<ptrdiff_t>(at) + 1);
  if (state.retry && state.retry->version <= version.version && state.retry->state == RetryState::pending) {
    state.retry->state = RetryState::done;
  }
  auto& chain = chunk.planned_chain;
  while (!chain.empty() && chain.front().version <= version.version) chain.erase(chain.begin());
  if (chain.empty() && version.bytes == nullptr && chunk.installs == 0) chunk.planned = {};
  push_state(chunk, state, host_->moment());
  if (!wait) return;
  running->state = chunk.states.size() - 1;
  running->queued = true;
}

// Only chunks without pending versions are moved.
void Model::start_compaction() {
  commit_some();
  store().compact(1u << (16 + random_() % 8));
}

// The same goes for sharing.
void Model::start_dedup() {
  commit_some();
  store().dedup(1u << (16 + random_() % 8));
}

void Model::commit_some() {
  for (uint64_t key = 0; key < options_.keys && random_() % 16 != 0; key++) {
    const size_t count = chunks_[key].now().pendings.size();
    if (count > 0) commit_up_to(key, count - 1, false);
  }
}

// Refuses the newest pending version, also one whose data is on the way, or an update that never came.
void Model::start_refusal() {
  const uint64_t key = random_() % options_.keys;
  ModelChunk& chunk = chunks_[key];
  if (chunk.in_flight > 0) {
    Running* arrives = nullptr;
    for (auto& running : running_) {
      if (running->kind == Running::update && running->key == key && running->queued && !running->done &&
          !chunk.now().pendings.empty() && chunk.now().pendings.back().version == running->version.version &&
          arriving(key, running->version))
        arrives = running.get();
    }
    if (arrives == nullptr || chunk.in_flight > 1) return;
    arrives->refused = true;
  }
  ModelState state = chunk.now();
  Version version = v(next_version_);
  if (!state.pendings.empty()) {
    version = state.pendings.back().version;
    state.pendings.pop_back();
    chunk.planned_chain.pop_back();
    if (!chunk.planned_chain.empty()) {
      chunk.planned = chunk.planned_chain.back();
    } else {
      chunk.planned = state.committed;
    }
  } else {
    next_version_++;
    chunk.sequence++;
  }
  UpdateIdentity identity{ClientId(kModelClient), kModelChannel + static_cast<uint32_t>(key), chunk.sequence};
  state.retry = RetryEntry{chunk.sequence, key_of(key), version, RetryState::refused, ENOSPC};
  trace("refuse", key, "v" + describe(version));
  push_state(chunk, state, host_->moment());
  Running* running = add(Running::refusal, key);
  running->state = chunk.states.size() - 1;
  running->queued = true;
  store().refuse(kModelTarget, key_of(key), version, identity, ChainId(3), ENOSPC, &running->plain);
}

void Model::start_counter() {
  const uint64_t value = ++counter_.value;
  counter_.states.push_back({value, host_->moment(), SIZE_MAX});
  Running* running = add(Running::counter, 0);
  running->state = counter_.states.size() - 1;
  store().set_chain_state(kModelTarget, {reinterpret_cast<const uint8_t*>(&value), sizeof value}, nullptr);
  store().set_space_epoch(kModelTarget, kModelSpace, {value, 0}, &running->plain);
}

void Model::start_fence() {
  const uint64_t client = next_fenced_++;
  fences_.push_back({client, host_->moment(), SIZE_MAX});
  Running* running = add(Running::fence, 0);
  running->state = fences_.size() - 1;
  store().fence(ClientId(client), &running->plain);
}

void Model::start_read() {
  const uint64_t key = random_() % options_.keys;
  const ModelState& state = chunks_[key].now();
  if (!state.committed.there()) return;
  Running* running = add(Running::read, key);
  ReadOp& op = running->read_op;
  const auto size = static_cast<uint32_t>(state.committed.bytes->size());
  op.target = kModelTarget;
  op.key = key_of(key);
  op.offset = static_cast<uint32_t>(random_() % (size + 1));
  if (random_() % 2 == 0) op.offset = op.offset / 4096 * 4096;
  op.length = static_cast<uint32_t>(random_() % (size + 5000));
  if (!state.pendings.empty() && random_() % 2 == 0) {
    const ModelVersion& pending = state.pendings[random_() % state.pendings.size()];
    if (pending.bytes != nullptr) op.at_least = pending.version;
    running->unread = arriving(key, pending);
  }
  // Against damage: what the range covers in part is checked by the store, whole granules here, as a client
  // does.
  op.verify_partial = host_->damaged() || random_() % 2 == 0;
  op.verify_whole = random_() % 4 == 0;
  running->laid = std::make_unique<Laid>(op.offset, std::vector<uint8_t>(op.length, 0xee));
  store().touch(kModelTarget, op.key, static_cast<uint32_t>(random_()));  // snapshots keep the stamps
  running->sums.resize(op.length / kGranuleBytes + 2);
  op.checksums = running->sums.data();
  op.memory = running->laid->data;
  store().read(&op);
}

void Model::check_read(const Running& running) {
  const ReadOp& op = running.read_op;
  if (op.error == EBADMSG && host_->damaged()) {
    unreadable_++;
    return;
  }
  if (running.unread && op.error == ENOENT) return;
  if (running.unread && op.pending) return fail("a read gave a version whose data wasn't there");
  if (op.error != 0) return fail("a read failed: " + std::to_string(op.error));
  for (uint32_t i = 0; i < op.granule_count; i++) {
    const uint32_t from = (op.first_granule + i) * kGranuleBytes - op.offset;
    const uint32_t to = std::min(from + kGranuleBytes, op.read_length);
    if (crc32c(op.memory + from, to - from) == op.checksums[i]) continue;
    if (!host_->damaged()) fail("a read gave other bytes than its checksum says");
    unreadable_++;
    return;
  }
  const auto& bytes = *contents_[op.version];
  const uint32_t from = std::min(op.offset, static_cast<uint32_t>(bytes.size()));
  const size_t expected = std::min<size_t>(op.length, bytes.size() - from);
  // A read that was under way when the device went wrong may not have been checked.
  const bool unchecked = host_->damaged() && !op.verify_partial;
  if (op.read_length != expected ||
      (!unchecked && !std::equal(op.memory, op.memory + expected, bytes.begin() + from))) {
    fail("a read of version " + describe(op.version) + " of chunk " + std::to_string(running.key) +
         " gave other bytes");
  }
}

}  // namespace ffs::engine::testing
