#include "craq/sim_store.h"

#include <algorithm>

namespace ffs::craq::sim {

void ModelState::set_retry(const Record& r, const UpdateIdentity& who, const Version& version,
                           RetryState state, Outcome outcome) {
  if (who.client.value == 0) return;
  retry[{who.client.value, who.channel}] = RetryEntry{who.sequence, r.update.key, version, state, outcome};
}

void ModelState::stage(const Record& r, ModelChunk& c) {
  const Update& u = r.update;
  ModelVersion v;
  v.facts = r.after;
  v.content = r.content;
  v.version = u.version;
  v.removal = u.kind == UpdateKind::remove;
  v.identity = u.identity;
  v.space_epoch = u.space_epoch;
  c.pendings.push_back(v);
  set_retry(r, u.identity, u.version, RetryState::pending, Outcome::ok);
}

std::string ModelState::commit(const Record& r) {
  auto at = chunks.find(r.update.key);
  if (at == chunks.end()) return "commit of an unknown chunk";
  ModelChunk& c = at->second;
  bool found = false;
  for (const ModelVersion& p : c.pendings) found |= p.version == r.update.version;
  if (!found) return "commit of what isn't pending";
  while (!c.pendings.empty() && c.pendings.front().version <= r.update.version) {
    c.committed = c.pendings.front();
    c.pendings.erase(c.pendings.begin());
    set_retry(r, c.committed.identity, c.committed.version, RetryState::done, Outcome::ok);
  }
  return {};
}

void ModelState::install(const Record& r) {
  ModelChunk& c = chunks[r.update.key];
  const bool repair = !r.update.base.none();  // over the very version: what is pending above stays
  if (!repair) c.pendings.clear();
  c.committed = ModelVersion{.facts = r.after, .content = r.content, .version = r.update.version};
}

std::string ModelState::apply(const Record& r) {
  if (r.outcome != Outcome::ok) return {};
  const Update& u = r.update;
  switch (r.kind) {
    case RecordKind::stage:
      stage(r, chunks[u.key]);
      break;
    case RecordKind::commit:
      if (std::string wrong = commit(r); !wrong.empty()) return wrong;
      break;
    case RecordKind::refuse: {
      auto& pendings = chunks[u.key].pendings;
      pendings.erase(std::remove_if(pendings.begin(), pendings.end(),
                                    [&](const ModelVersion& p) { return p.version == u.version; }),
                     pendings.end());
      set_retry(r, u.identity, u.version, RetryState::refused, r.refusal);
      break;
    }
    case RecordKind::epoch:
      epochs[r.space] = std::max(epochs[r.space], r.epoch);
      break;
    case RecordKind::chain:
      if (r.chain.adopted < chain.adopted) return "the adopted chain version went back";
      if (r.chain.proposed < chain.proposed) return "the proposed chain version went back";
      chain = r.chain;
      break;
    case RecordKind::fence:
      fenced.insert(r.space);
      for (auto at = retry.begin(); at != retry.end();) {
        at = at->first.first == r.space ? retry.erase(at) : std::next(at);
      }
      break;
    case RecordKind::install:
      install(r);
      break;
    case RecordKind::erase:
      chunks.erase(u.key);
      break;
    case RecordKind::reset:
      for (auto& [key, c] : chunks) c.pendings.clear();
      std::erase_if(chunks, [](const auto& at) { return at.second.committed.facts.version.none(); });
      retry.clear();
      break;
    case RecordKind::set_retry:
      retry[{u.identity.client.value, u.identity.channel}] = r.retry;
      break;
  }
  // Like the engine, the model forgets a chunk that is neither committed nor pending.
  if (auto at = chunks.find(u.key); at != chunks.end()) {
    if (at->second.pendings.empty() && at->second.committed.facts.version.none()) chunks.erase(at);
  }
  return {};
}

std::string ModelStore::append(Record record) {
  std::string wrong = now_.apply(record);
  tail_.push_back(std::move(record));
  return wrong;
}

std::string ModelStore::content_after(const Update& u, const Bytes& payload, bool keep_attributes,
                                      Record* record) const {
  ModelVersion base;
  bool newest_is_removal = false;
  if (auto at = now_.chunks.find(u.key); at != now_.chunks.end()) {
    const ModelChunk& c = at->second;
    base = c.pendings.empty() ? c.committed : c.pendings.back();
    newest_is_removal = !c.pendings.empty() && base.removal;
    if (base.version >= u.version) return "stage of an old version";
  }
  const bool absent = base.facts.version.none();
  if (u.base_absent != absent) return "base_absent is wrong";
  if (newest_is_removal && u.base != base.version) return "the base isn't the newest version";
  if (!absent && u.base != base.version) return "the base isn't the newest version";
  if (keep_attributes && absent) return "no attributes to keep";
  const bool reads_base = u.kind == UpdateKind::write || u.kind == UpdateKind::truncate;
  if (reads_base && base.damaged) record->outcome = Outcome::corrupt;
  record->after.version = u.version;
  record->after.attributes = keep_attributes ? base.facts.attributes : u.attributes;
  Bytes& content = record->content;
  content = base.content;
  switch (u.kind) {
    case UpdateKind::write:
      if (payload.size() != u.length_bytes) return "payload of the wrong length";
      content.resize(std::max<size_t>(content.size(), u.offset_bytes + payload.size()));
      std::copy(payload.begin(), payload.end(), content.begin() + u.offset_bytes);
      break;
    case UpdateKind::truncate:
      content.resize(u.length_bytes);
      break;
    case UpdateKind::remove:
      content.clear();
      record->after = ChunkFacts{};
      break;
    case UpdateKind::replace:
    case UpdateKind::create:
      if (payload.size() != u.length_bytes) return "payload of the wrong length";
      content = payload;
      break;
  }
  record->after.length_bytes = static_cast<uint32_t>(content.size());
  return {};
}

const ModelVersion* ModelStore::find(const ChunkKey& key, const Version& version) const {
  auto at = now_.chunks.find(key);
  if (at == now_.chunks.end()) return nullptr;
  if (at->second.committed.facts.version == version) return &at->second.committed;
  for (const ModelVersion& p : at->second.pendings) {
    if (p.version == version) return &p;
  }
  return nullptr;
}

bool ModelStore::make_durable(Record* record) {
  if (tail_.empty()) return false;
  *record = std::move(tail_.front());
  tail_.erase(tail_.begin());
  durable_.apply(*record);
  return true;
}

void ModelStore::crash(size_t keep) {
  for (size_t i = 0; i < std::min(keep, tail_.size()); i++) durable_.apply(tail_[i]);
  tail_.clear();
  uses_.clear();
  now_ = durable_;
}

void ModelStore::wipe() {
  tail_.clear();
  durable_ = now_ = ModelState{};
}

void ModelStore::damage(const ChunkKey& key, bool silent) {
  for (ModelState* state : {&durable_, &now_}) {
    auto at = state->chunks.find(key);
    if (at == state->chunks.end() || at->second.committed.facts.version.none()) continue;
    ModelVersion& v = at->second.committed;
    if (silent) {
      for (uint8_t& byte : v.content) byte ^= 0x55;
    } else {
      v.damaged = true;
    }
  }
}

ChunkFacts ModelStore::committed(const ChunkKey& key) const {
  auto at = now_.chunks.find(key);
  return at == now_.chunks.end() ? ChunkFacts{} : at->second.committed.facts;
}

void ModelStore::each_pending(PendingVisitor& visitor) const {
  for (const auto& [key, c] : now_.chunks) {
    for (const ModelVersion& p : c.pendings) {
      PendingFacts facts;
      facts.key = key;
      facts.chunk = p.facts;
      facts.chunk.version = p.version;
      facts.removal = p.removal;
      facts.identity = p.identity;
      facts.space_epoch = p.space_epoch;
      visitor.visit(facts);
    }
  }
}

std::optional<RetryEntry> ModelStore::retry(ClientId client, uint32_t channel) const {
  auto at = now_.retry.find({client.value, channel});
  if (at == now_.retry.end()) return std::nullopt;
  return at->second;
}

uint64_t ModelStore::least_epoch(uint64_t space) const {
  auto at = now_.epochs.find(space);
  return at == now_.epochs.end() ? 0 : at->second;
}

uint64_t ModelStore::last_access(const ChunkKey& key) const {
  auto at = uses_.find(key);
  return at == uses_.end() ? 0 : at->second;
}

std::optional<ChunkKey> ModelStore::first_committed(uint64_t space, const ChunkKey* after) const {
  auto at =
      after != nullptr ? now_.chunks.upper_bound(*after) : now_.chunks.lower_bound(ChunkKey::of(space, {}));
  for (; at != now_.chunks.end() && at->first.space() == space; ++at) {
    if (!at->second.committed.facts.version.none()) return at->first;
  }
  return std::nullopt;
}

std::optional<ChunkKey> ModelStore::last_committed(uint64_t space) const {
  std::optional<ChunkKey> found;
  for (std::optional<ChunkKey> key = first_committed(space, nullptr); key.has_value();
       key = first_committed(space, &*key)) {
    found = key;
  }
  return found;
}

std::optional<ChunkDigest> ModelStore::digest_at_or_after(const ChunkKey& key) const {
  for (auto at = now_.chunks.lower_bound(key); at != now_.chunks.end(); ++at) {
    const ModelVersion& c = at->second.committed;
    if (c.facts.version.none()) continue;
    uint64_t digest = 1469598103934665603u;  // FNV-1a
    const auto mix = [&](const void* from, size_t size) {
      for (size_t i = 0; i < size; i++) {
        digest = (digest ^ static_cast<const uint8_t*>(from)[i]) * 1099511628211u;
      }
    };
    mix(&c.facts.version, sizeof c.facts.version);
    mix(c.facts.attributes.tag.data(), c.facts.attributes.tag_bytes);
    mix(c.content.data(), c.content.size());
    return ChunkDigest{at->first, c.facts, digest};
  }
  return std::nullopt;
}

uint64_t ModelStore::chunk_count() const {
  uint64_t count = 0;
  for (const auto& [key, c] : now_.chunks) count += c.committed.facts.version.none() ? 0 : 1;
  return count;
}

void ModelStore::each_retry(RetryVisitor& visitor) const {
  for (const auto& [who, entry] : now_.retry) visitor.visit(ClientId{who.first}, who.second, entry);
}

void ModelStore::each_space_epoch(SpaceEpochVisitor& visitor) const {
  for (const auto& [space, epoch] : now_.epochs) visitor.visit(space, epoch);
}

}  // namespace ffs::craq::sim
