// What a store may hold after a restart, by the model.
#include <algorithm>
#include <cerrno>
#include <set>

#include "base/crc32c.h"
#include "engine_model_running.h"

namespace ffs::engine::testing {

namespace {

// A whole version as its readers get it, everything verified.
struct WholeRead {
  ReadOp op;
  Laid laid;
  bool done = false;
  WholeRead(Host& h, TargetId target, const ChunkKey& key, const Version& version, uint32_t size)
      : laid(0, std::vector<uint8_t>(size + 1)) {
    op.target = target;
    op.key = key;
    op.at_least = version;
    op.exact_version = true;
    op.length = size + 1;
    op.memory = laid.data;
    op.verify_whole = op.verify_partial = true;
    op.owner = &done;
    op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
    h.store().read(&op);
    h.run_until(done);
  }
};

}  // namespace

bool Model::same_retry(Host& h, uint64_t key, const ModelState& state) {
  RetryEntry entry;
  const uint32_t channel = kModelChannel + static_cast<uint32_t>(key);
  bool has_entry = h.store().retry_lookup(kModelTarget, ClientId(kModelClient), ChainId(3), channel, &entry);
  if (has_entry != state.retry.has_value()) return false;
  return !has_entry || (entry.sequence == state.retry->sequence && entry.state == state.retry->state &&
                        entry.version == state.retry->version && entry.error == state.retry->error);
}

std::string Model::compare_bytes(Host& h, uint64_t key, const ModelVersion& version) {
  if (version.bytes == nullptr) return "";
  const auto size = static_cast<uint32_t>(version.bytes->size());
  WholeRead read(h, kModelTarget, key_of(key), version.version, size);
  if (read.op.error == EBADMSG && h.damaged()) {
    unreadable_++;
    return "";
  }
  if (read.op.error != 0) {
    return "reading version " + describe(version.version) + " fails with " + std::to_string(read.op.error);
  }
  if (read.op.read_length != size ||
      !std::equal(read.laid.data, read.laid.data + size, version.bytes->begin()))
    return "version " + describe(version.version) + " has other bytes";
  return "";
}

// Whether it is this state by its versions; then its bytes must be right, or `difference` says so.
bool Model::same(Host& h, uint64_t key, const ModelState& state, std::string* difference) {
  ChunkInfo info;
  bool there = h.store().lookup(kModelTarget, key_of(key), &info);
  Version committed = there ? info.version : Version{};
  if (committed != (state.committed.version)) return false;
  uint32_t pendings = there ? info.pending_count : 0;
  if (pendings != state.pendings.size()) return false;
  for (uint32_t i = 0; i < pendings; i++) {
    PendingInfo pending;
    if (!h.store().pending_at(kModelTarget, key_of(key), i, &pending)) return false;
    if (pending.version != state.pendings[i].version) return false;
  }
  if (!same_retry(h, key, state)) return false;
  if (state.committed.there()) *difference = compare_bytes(h, key, state.committed);
  for (const ModelVersion& pending : state.pendings) {
    if (difference->empty()) *difference = compare_bytes(h, key, pending);
  }
  if (!difference->empty()) *difference = "chunk " + std::to_string(key) + ": " + *difference;
  return true;
}

std::string Model::judge_chunk(Host& h, uint64_t key, size_t moment, size_t trusted, ModelState* matched) {
  const ModelChunk& chunk = chunks_[key];
  size_t least = 0, most = 0;
  for (size_t i = 1; i < chunk.states.size(); i++) {
    if (chunk.states[i].acknowledged_at <= std::min(moment, trusted)) least = i;
    if (chunk.states[i].queued_at <= moment) most = i;
  }
  std::string difference;
  for (size_t i = most + 1; i-- > least;) {
    if (!same(h, key, chunk.states[i], &difference)) continue;
    *matched = chunk.states[i];
    return difference;
  }
  // Data before a reset may be lost and the reset stays.
  for (size_t i = most; i > least; i--) {
    for (size_t j = i; chunk.states[i].reset && j-- > least;) {
      ModelState emptied = chunk.states[j];
      emptied.pendings.clear();
      emptied.retry.reset();
      if (!same(h, key, emptied, &difference)) continue;
      *matched = emptied;
      return difference;
    }
  }
  return explain(h, key, least, most);
}

std::string Model::explain(Host& h, uint64_t key, size_t least, size_t most) {
  auto retry_text = [](const RetryEntry& entry) {
    return " r" + std::to_string(entry.sequence) + "/" + std::to_string(static_cast<int>(entry.state));
  };
  std::string text = "chunk " + std::to_string(key) + " is in no state from " + std::to_string(least) +
                     " to " + std::to_string(most) + ":";
  for (size_t i = least; i <= most; i++) {
    const ModelState& state = chunks_[key].states[i];
    text += " [" + (state.committed.there() ? describe(state.committed.version) : "none");
    for (const auto& pending : state.pendings) text += " +" + describe(pending.version);
    if (state.retry) text += retry_text(*state.retry);
    text += "]";
  }
  ChunkInfo info;
  bool there = h.store().lookup(kModelTarget, key_of(key), &info);
  text += " but is [" + (there ? describe(info.version) : "none");
  PendingInfo pending;
  for (uint32_t i = 0; there && h.store().pending_at(kModelTarget, key_of(key), i, &pending); i++)
    text += " +" + describe(pending.version);
  RetryEntry entry;
  if (h.store().retry_lookup(kModelTarget, ClientId(kModelClient), ChainId(3),
                             kModelChannel + static_cast<uint32_t>(key), &entry)) {
    text += retry_text(entry);
  }
  return text + "]";
}

std::string Model::judge_counters(Host& h, size_t moment, size_t trusted, Recovered* found) {
  size_t least = 0, most = 0;
  for (size_t i = 1; i < counter_.states.size(); i++) {
    if (counter_.states[i].acknowledged_at <= std::min(moment, trusted)) least = i;
    if (counter_.states[i].queued_at <= moment) most = i;
  }
  auto possible = [&](uint64_t value) {
    for (size_t i = least; i <= most; i++) {
      if (counter_.states[i].value == value) return true;
    }
    return false;
  };
  found->epoch = h.store().space_epoch(kModelTarget, kModelSpace).least_epoch;
  found->chain_state = 0;
  auto bytes = h.store().chain_state(kModelTarget);
  if (bytes.size() == sizeof found->chain_state)
    std::memcpy(&found->chain_state, bytes.data(), sizeof found->chain_state);
  if (!possible(found->epoch)) return "the space epoch is " + std::to_string(found->epoch);
  if (!possible(found->chain_state)) return "the chain state is " + std::to_string(found->chain_state);
  return "";
}

std::string Model::judge_fences(Host& h, size_t moment, size_t trusted) {
  for (const ModelFence& fence : fences_) {
    const bool fenced = h.store().fenced(ClientId(fence.client));
    if (fenced && fence.queued_at > moment) return "a client is fenced that wasn't";
    if (!fenced && fence.acknowledged_at <= std::min(moment, trusted))
      return "client " + std::to_string(fence.client) + " isn't fenced any more";
  }
  return "";
}

std::string Model::judge(Host& host, size_t moment, Recovered* found, size_t trusted) {
  std::string wrong = host.store().check_consistency();
  for (const auto& [key, chunk] : chunks_) {
    if (wrong.empty()) wrong = judge_chunk(host, key, moment, trusted, &found->chunks[key]);
  }
  if (wrong.empty()) wrong = judge_counters(host, moment, trusted, found);
  return wrong;
}

std::string Model::compare(Host& host, const Recovered& before) {
  for (const auto& [key, state] : before.chunks) {
    std::string difference;
    if (!same(host, key, state, &difference)) return "chunk " + std::to_string(key) + " is another";
    if (!difference.empty()) return difference;
  }
  return host.store().check_consistency();
}

void Model::resume(const Recovered& found) {
  forget_running();
  for (auto& [key, chunk] : chunks_) {
    chunk.states = {found.chunks.at(key)};
    chunk.states.back().reset = false;
    chunk.states.back().queued_at = chunk.states.back().acknowledged_at = 0;
    chunk.in_flight = chunk.installs = 0;
    settle(chunk);
  }
  fences_.clear();
  for (uint64_t client : found.fenced) fences_.push_back({client, 0, 0});
  // Two records: one of them may be older.
  const auto [least, most] = std::minmax(found.epoch, found.chain_state);
  counter_.states = {{least, 0, 0}, {most, 0, SIZE_MAX}};
}

// ------------------------------------------------------------------------------ export

namespace {

struct RetryText final : RetryVisitor {
  std::set<std::string> lines;
  void visit(ClientId client, ChainId chain, uint32_t channel, const RetryEntry& e) override {
    lines.insert("retry " + std::to_string(client.value) + " " + std::to_string(chain.value) + " " +
                 std::to_string(channel) + ": " + std::to_string(e.sequence) + " v" +
                 std::to_string(e.version.update) + " " + std::to_string(static_cast<int>(e.state)) + " " +
                 std::to_string(e.error) + "\n");
  }
};

struct SpaceText final : SpaceEpochVisitor {
  std::set<std::string> lines;
  void visit(uint64_t space, const SpaceEpoch& e) override {
    lines.insert("space " + std::to_string(space) + ": " + std::to_string(e.least_epoch) + " " +
                 std::to_string(e.expiry_ms) + "\n");
  }
};

std::string text_of(const Attributes& a) {
  return " expiry " + std::to_string(a.expiry_ms) + " flags " + std::to_string(a.flags) + " role " +
         std::to_string(a.role) + " codec " + std::to_string(a.codec) + " tag " +
         std::to_string(crc32c(a.tag.data(), a.tag_bytes));
}

std::string bytes_text(Host& host, TargetId target, const ChunkKey& key, const Version& version,
                       uint32_t stored_or_length) {
  WholeRead read(host, target, key, version, stored_or_length);
  if (read.op.error != 0) return " unreadable " + std::to_string(read.op.error);
  return " bytes " + std::to_string(read.op.read_length) + "/" +
         std::to_string(crc32c(read.laid.data, read.op.read_length));
}

std::string version_text(const Version& version) {
  return std::to_string(version.chain.term) + "." + std::to_string(version.chain.counter) + "." +
         std::to_string(version.update);
}

}  // namespace

std::string export_state(Host& host, TargetId target) {
  ChunkStore& store = host.store();
  std::string text;
  std::set<ChunkKey> keys;
  auto after = [](ChunkKey key) {
    for (size_t i = key.bytes.size(); i-- > 0 && ++key.bytes[i] == 0;) {
    }
    return key;
  };
  ChunkInfo info;
  for (ChunkKey at{}; store.first_at_or_after(target, at, &info); at = after(info.key)) keys.insert(info.key);
  ChunkKey pending_key;
  for (ChunkKey at{}; store.first_pending_at_or_after(target, at, &pending_key); at = after(pending_key))
    keys.insert(pending_key);
  for (const ChunkKey& key : keys) {
    for (uint8_t byte : key.bytes)
      text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
    if (!store.lookup(target, key, &info)) return "a listed chunk isn't there";
    if (!info.version.none()) {
      const uint32_t size = info.attributes.codec == 0 ? info.length : info.stored_length;
      text += " committed " + version_text(info.version) + " " + std::to_string(info.length) + "/" +
              std::to_string(info.stored_length) + text_of(info.attributes) + " sums " +
              std::to_string(crc32c(reinterpret_cast<const uint8_t*>(info.checksums.data()),
                                    info.checksums.size_bytes()));
      text += bytes_text(host, target, key, info.version, size);
    }
    PendingInfo pending;
    for (uint32_t i = 0; store.pending_at(target, key, i, &pending); i++) {
      text += "\n  pending " + version_text(pending.version) + " over " + version_text(pending.base) +
              " kind " + std::to_string(static_cast<int>(pending.kind)) + " " +
              std::to_string(pending.length) + "/" + std::to_string(pending.stored_length) +
              text_of(pending.attributes) + " epoch " + std::to_string(pending.space_epoch);
      const uint32_t size = pending.attributes.codec == 0 ? pending.length : pending.stored_length;
      if (pending.kind != UpdateKind::remove) text += bytes_text(host, target, key, pending.version, size);
    }
    text += "\n";
  }
  RetryText retry;
  store.each_retry(target, retry);
  for (const auto& line : retry.lines) text += line;
  SpaceText spaces;
  store.each_space_epoch(target, spaces);
  for (const auto& line : spaces.lines) text += line;
  text += "chain state";
  for (uint8_t byte : store.chain_state(target)) text += " " + std::to_string(byte);
  return text + "\n";
}

}  // namespace ffs::engine::testing
