// What a replica sees of its target in the chunk store (craq/store_view.h), and the two small
// encodings between them: attributes, and the chain record. One shard thread.
#pragma once

#include "craq/store_view.h"
#include "engine/chunk_store.h"

namespace ffs::server {

craq::Attributes to_craq(const engine::Attributes& from, uint32_t logical_length);
engine::Attributes to_engine(const craq::Attributes& from);
engine::RetryEntry to_engine(const craq::RetryEntry& entry);

// A version byte and three zeros, the chain's id, then proposed and adopted (term, counter each).
constexpr size_t kChainRecordBytes = 24;
std::array<uint8_t, kChainRecordBytes> encode_chain_record(ChainId chain, const craq::ChainRecord& record);
// False: not one of ours.
bool decode_chain_record(std::span<const uint8_t> bytes, ChainId* chain, craq::ChainRecord* record);

class Evictor;
class TargetSpaces;

// A chunk's stamps as one number (craq's last_access).
constexpr uint64_t access_token(const engine::Access& access) {
  return uint64_t{access.last} << 32 | access.previous;
}

class EngineView final : public craq::StoreView {
 public:
  // What the evictor knows of the target's spaces; it, and they, outlive the view.
  EngineView(const engine::ChunkStore& store, TargetId target, ChainId chain, Evictor& evictor,
             TargetSpaces* spaces)
      : store_(store), target_(target), chain_(chain), evictor_(evictor), spaces_(spaces) {}

  craq::ChunkFacts committed(const ChunkKey& key) const override;
  void each_pending(craq::PendingVisitor& visitor) const override;
  std::optional<craq::RetryEntry> retry(ClientId client, uint32_t channel) const override;
  bool fenced(ClientId client) const override;
  uint64_t least_epoch(uint64_t space) const override;
  craq::ChainRecord chain_record() const override;
  craq::Outcome admit(const ChunkKey& key, craq::UpdateKind kind, uint32_t length_bytes,
                      uint64_t unseen_bytes) const override;
  bool makes_room(const ChunkKey& key) const override;
  uint64_t manager_ms() const override;
  uint64_t last_access(const ChunkKey& key) const override;
  std::optional<ChunkKey> first_committed(uint64_t space, const ChunkKey* after) const override;
  std::optional<ChunkKey> last_committed(uint64_t space) const override;
  std::optional<craq::ChunkDigest> digest_at_or_after(const ChunkKey& key) const override;
  uint64_t chunk_count() const override;
  void each_retry(craq::RetryVisitor& visitor) const override;
  void each_space_epoch(craq::SpaceEpochVisitor& visitor) const override;

 private:
  const engine::ChunkStore& store_;
  TargetId target_;
  ChainId chain_;
  Evictor& evictor_;
  TargetSpaces* spaces_;
};

// The next key in order; false above the last of all.
bool key_successor(ChunkKey* key);
bool key_predecessor(ChunkKey* key);

}  // namespace ffs::server
