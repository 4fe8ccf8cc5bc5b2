// The simulator's model of a chunk store: plain maps, and a journal whose tail isn't durable yet.
// It also checks that the replica keeps the contract of replica.h. Tests only; not for speed.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "craq/replica.h"

namespace ffs::craq::sim {

using Bytes = std::vector<uint8_t>;

enum class RecordKind : uint8_t {
  stage = 1,
  commit = 3,
  refuse,
  epoch,
  chain,
  fence,
  install,
  erase,
  reset,
  set_retry,
};

struct Record {
  RecordKind kind = RecordKind::stage;
  OpId op = 0;  // 0: no completion
  Outcome outcome = Outcome::ok;
  Update update;  // stage; key, version, identity of the others
  ChunkFacts after;
  Bytes content;
  Outcome refusal = Outcome::ok;
  uint64_t space = 0;
  uint64_t epoch = 0;
  ChainRecord chain;
  RetryEntry retry;
};

struct ModelVersion {
  ChunkFacts facts;  // version none: removed
  Bytes content;
  Version version;
  bool removal = false;
  UpdateIdentity identity;
  uint64_t space_epoch = 0;
  bool damaged = false;  // at rest: reads, copies and stages on it end with corrupt
};

struct ModelChunk {
  ModelVersion committed;
  std::vector<ModelVersion> pendings;
};

// What records add up to.
struct ModelState {
  std::map<ChunkKey, ModelChunk> chunks;
  std::map<std::pair<uint64_t, uint32_t>, RetryEntry> retry;
  std::map<uint64_t, uint64_t> epochs;
  std::set<uint64_t> fenced;
  ChainRecord chain;

  // An empty string, or what is wrong with the record.
  std::string apply(const Record& record);

 private:
  void stage(const Record& record, ModelChunk& c);
  std::string commit(const Record& record);
  void install(const Record& record);
  void set_retry(const Record& record, const UpdateIdentity& who, const Version& version, RetryState state,
                 Outcome outcome);
};

class ModelStore final : public StoreView {
 public:
  // --- effects
  std::string append(Record record);  // visible at once
  // The content that `u` makes of its base, and the outcome corrupt if that is damaged; an error text if
  // the base isn't the newest.
  std::string content_after(const Update& u, const Bytes& payload, bool keep_attributes,
                            Record* record) const;
  // Null if there is no such version, committed or pending.
  const ModelVersion* find(const ChunkKey& key, const Version& version) const;

  // The next record that becomes durable; false if there is none.
  bool make_durable(Record* record);
  void crash(size_t keep);
  void wipe();  // a new device
  // Damages the committed version of a chunk at rest, if there is one; silent: as if its checksums had been
  // computed over the damage, so that only a comparison with another replica can tell.
  void damage(const ChunkKey& key, bool silent);
  size_t undurable() const { return tail_.size(); }
  const ModelState& state() const { return now_; }

  // The chunk was used. Not journalled: a crash forgets it.
  void touch(const ChunkKey& key) { uses_[key] = ++last_use_; }

  Outcome admit_outcome = Outcome::ok;
  bool evicts = false;  // what admit refuses waits
  uint64_t manager_time_ms = 0;

  // --- StoreView
  ChunkFacts committed(const ChunkKey& key) const override;
  void each_pending(PendingVisitor& visitor) const override;
  std::optional<RetryEntry> retry(ClientId client, uint32_t channel) const override;
  bool fenced(ClientId client) const override { return now_.fenced.count(client.value) != 0; }
  uint64_t least_epoch(uint64_t space) const override;
  ChainRecord chain_record() const override { return now_.chain; }
  Outcome admit(const ChunkKey&, UpdateKind, uint32_t, uint64_t) const override { return admit_outcome; }
  bool makes_room(const ChunkKey&) const override { return evicts; }
  uint64_t manager_ms() const override { return manager_time_ms; }
  uint64_t last_access(const ChunkKey& key) const override;
  std::optional<ChunkKey> first_committed(uint64_t space, const ChunkKey* after) const override;
  std::optional<ChunkKey> last_committed(uint64_t space) const override;
  std::optional<ChunkDigest> digest_at_or_after(const ChunkKey& key) const override;
  uint64_t chunk_count() const override;
  void each_retry(RetryVisitor& visitor) const override;
  void each_space_epoch(SpaceEpochVisitor& visitor) const override;

 private:
  ModelState durable_;
  ModelState now_;
  std::vector<Record> tail_;  // appended, not durable
  std::map<ChunkKey, uint64_t> uses_;
  uint64_t last_use_ = 0;
};

}  // namespace ffs::craq::sim
