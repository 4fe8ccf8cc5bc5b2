#include "server/store_view.h"

#include "base/cursor.h"
#include "server/evict.h"

namespace ffs::server {

namespace {

constexpr uint8_t kRecordVersion = 1;

// The replica's length is of the bytes that it moves: with a codec, as many as are stored.
template <typename Info>
craq::ChunkFacts facts_of(const Info& info) {
  craq::ChunkFacts facts;
  facts.version = info.version;
  facts.length_bytes = info.attributes.codec != 0 ? info.stored_length : info.length;
  facts.attributes = to_craq(info.attributes, info.length);
  return facts;
}

craq::RetryEntry retry_of(const engine::RetryEntry& entry) {
  craq::RetryEntry out;
  out.sequence = entry.sequence;
  out.key = entry.key;
  out.version = entry.version;
  out.state = static_cast<craq::RetryState>(entry.state);
  out.outcome = static_cast<craq::Outcome>(entry.error);
  return out;
}

}  // namespace

engine::RetryEntry to_engine(const craq::RetryEntry& entry) {
  engine::RetryEntry out;
  out.sequence = entry.sequence;
  out.key = entry.key;
  out.version = entry.version;
  out.state = static_cast<engine::RetryState>(entry.state);
  out.error = static_cast<uint32_t>(entry.outcome);
  return out;
}

craq::Attributes to_craq(const engine::Attributes& from, uint32_t logical_length) {
  craq::Attributes to;
  to.tag = from.tag;
  to.tag_bytes = from.tag_bytes;
  to.codec = from.codec;
  to.role = from.role;
  to.checksum_kind = 1;
  to.flags = from.flags;
  to.logical_length_bytes = from.codec != 0 ? logical_length : 0;
  to.expiry_ms = from.expiry_ms;
  return to;
}

engine::Attributes to_engine(const craq::Attributes& from) {
  engine::Attributes to;
  to.tag = from.tag;
  to.tag_bytes = from.tag_bytes;
  to.codec = from.codec;
  to.role = from.role;
  to.flags = static_cast<uint8_t>(from.flags);
  to.expiry_ms = from.expiry_ms;
  return to;
}

std::array<uint8_t, kChainRecordBytes> encode_chain_record(ChainId chain, const craq::ChainRecord& record) {
  std::array<uint8_t, kChainRecordBytes> bytes{};
  Writer out(bytes);
  out.u32(kRecordVersion);
  out.u32(chain.value);
  out.value(record.proposed);
  out.value(record.adopted);
  FFS_CHECK(out.ok() && out.left() == 0);
  return bytes;
}

bool decode_chain_record(std::span<const uint8_t> bytes, ChainId* chain, craq::ChainRecord* record) {
  Reader in(bytes);
  const uint32_t version = in.u32();
  *chain = ChainId(in.u32());
  record->proposed = in.value<ChainVersion>();
  record->adopted = in.value<ChainVersion>();
  return in.ok() && version == kRecordVersion;
}

craq::ChunkFacts EngineView::committed(const ChunkKey& key) const {
  engine::ChunkInfo info;
  if (!store_.lookup(target_, key, &info) || info.version.none()) return {};
  return facts_of(info);
}

void EngineView::each_pending(craq::PendingVisitor& visitor) const {
  ChunkKey key{};
  ChunkKey found;
  while (store_.first_pending_at_or_after(target_, key, &found)) {
    engine::PendingInfo info;
    for (uint32_t i = 0; store_.pending_at(target_, found, i, &info); i++) {
      craq::PendingFacts facts;
      facts.key = found;
      facts.chunk = facts_of(info);
      facts.removal = info.kind == engine::UpdateKind::remove;
      facts.identity = info.identity;
      facts.space_epoch = info.space_epoch;
      visitor.visit(facts);
    }
    key = found;
    if (!key_successor(&key)) return;
  }
}

std::optional<craq::RetryEntry> EngineView::retry(ClientId client, uint32_t channel) const {
  engine::RetryEntry entry;
  if (!store_.retry_lookup(target_, client, chain_, channel, &entry)) return std::nullopt;
  return retry_of(entry);
}

bool EngineView::fenced(ClientId client) const {
  return store_.fenced(client);
}

uint64_t EngineView::least_epoch(uint64_t space) const {
  return store_.space_epoch(target_, space).least_epoch;
}

craq::ChainRecord EngineView::chain_record() const {
  ChainId chain;
  craq::ChainRecord record;
  const auto bytes = store_.chain_state(target_);
  if (bytes.empty()) return {};
  // Another chain's record (a target that was moved) says nothing about this one.
  if (!decode_chain_record(bytes, &chain, &record) || chain != chain_) return {};
  return record;
}

// Updates of a chunk that is there, of its size or of a part, have their room whatever is full
// (engine/chunk_store.h); the store says if one hasn't.
craq::Outcome EngineView::admit(const ChunkKey& key, craq::UpdateKind kind, uint32_t length_bytes,
                                uint64_t unseen_bytes) const {
  if (kind == craq::UpdateKind::remove || kind == craq::UpdateKind::truncate) return craq::Outcome::ok;
  engine::ChunkInfo info;
  const bool there = store_.lookup(target_, key, &info) && !info.version.none();
  if (there && (kind == craq::UpdateKind::write || length_bytes <= info.stored_length))
    return craq::Outcome::ok;
  return evictor_.admit(spaces_, key, length_bytes, unseen_bytes);
}

bool EngineView::makes_room(const ChunkKey&) const {
  return evictor_.makes_room();
}

uint64_t EngineView::manager_ms() const {
  return evictor_.manager_ms();
}

uint64_t EngineView::last_access(const ChunkKey& key) const {
  return access_token(store_.access(target_, key));
}

std::optional<ChunkKey> EngineView::first_committed(uint64_t space, const ChunkKey* after) const {
  ChunkKey from = ChunkKey::of(space, {});
  if (after != nullptr) {
    from = *after;
    if (!key_successor(&from)) return std::nullopt;
  }
  engine::ChunkInfo info;
  if (!store_.first_at_or_after(target_, from, &info) || info.key.space() != space) return std::nullopt;
  return info.key;
}

std::optional<ChunkKey> EngineView::last_committed(uint64_t space) const {
  engine::ChunkInfo info;
  if (!store_.last_of_space(target_, space, &info)) return std::nullopt;
  return info.key;
}

bool key_successor(ChunkKey* key) {
  for (size_t i = key->bytes.size(); i > 0; i--) {
    if (++key->bytes[i - 1] != 0) return true;
  }
  return false;
}

bool key_predecessor(ChunkKey* key) {
  for (size_t i = key->bytes.size(); i > 0; i--) {
    if (key->bytes[i - 1]-- != 0) return true;
  }
  return false;
}

std::optional<craq::ChunkDigest> EngineView::digest_at_or_after(const ChunkKey& key) const {
  engine::ChunkInfo info;
  craq::ChunkDigest out;
  if (!store_.digest_at_or_after(target_, key, &info, &out.digest)) return std::nullopt;
  out.key = info.key;
  out.chunk = facts_of(info);
  return out;
}

uint64_t EngineView::chunk_count() const {
  return store_.usage(target_).chunks;
}

void EngineView::each_retry(craq::RetryVisitor& visitor) const {
  struct Here final : engine::RetryVisitor {
    Here(ChainId chain, craq::RetryVisitor& to) : chain_(chain), to_(to) {}
    void visit(ClientId client, ChainId chain, uint32_t channel, const engine::RetryEntry& entry) override {
      if (chain == chain_) to_.visit(client, channel, retry_of(entry));
    }
    ChainId chain_;
    craq::RetryVisitor& to_;
  } here(chain_, visitor);
  store_.each_retry(target_, here);
}

void EngineView::each_space_epoch(craq::SpaceEpochVisitor& visitor) const {
  struct Here final : engine::SpaceEpochVisitor {
    explicit Here(craq::SpaceEpochVisitor& to) : to_(to) {}
    void visit(uint64_t space, const engine::SpaceEpoch& epoch) override {
      to_.visit(space, epoch.least_epoch);
    }
    craq::SpaceEpochVisitor& to_;
  } here(visitor);
  store_.each_space_epoch(target_, here);
}

}  // namespace ffs::server
