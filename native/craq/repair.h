// Repair: a version that is damaged on this target is fetched from another serving member and put in its
// place. And comparison with the predecessor, on behalf of the scrubber. docs/craq.md, Repair.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "craq/resync.h"

namespace ffs::craq {

class Repairer {
 public:
  Repairer(SyncHost& host, const Options& options) : host_(host), options_(options) {}

  // That version is damaged here. Nothing happens if it isn't the committed one (any more). `only`: no
  // other member is asked. The end comes as repair_ended(), unless a newer version is committed before.
  void damaged(const ChunkKey& key, const Version& version, TargetId only = {});
  // The payload of a version that is pending, and damaged, here: it comes as obtained().
  void obtain(const ChunkKey& key, const Version& version);
  // See Replica::on_compare; `predecessor` is asked.
  std::optional<ChunkKey> compare(const ChunkKey& from, TargetId predecessor);
  // Members, or their roles, have changed: what was asked is void.
  void chain_changed();

  // Takes over `payload`.
  void arrived(TargetId from, const SyncMessage& m, BufferRef payload, PayloadState payload_state);
  // `payload`: of Copy.
  void completed(OpId op, Outcome outcome, BufferRef payload);
  void tick();
  void pump();

  uint64_t damaged_count() const { return jobs_.size(); }
  uint64_t repaired_count() const { return repaired_; }

 private:
  struct Job {
    enum class State : uint8_t { queued, asking, fetching, installing, resting };
    State state = State::queued;
    Version version;
    bool hand_over = false;  // not to be installed
    TargetId only;
    TargetId asked;
    uint32_t tried = 0;  // members, by their index in the configuration
    uint32_t asks = 0;   // of `asked`
    uint64_t id = 0;     // of the question
    uint64_t since_ms = 0;
    BufferRef payload;
    ChunkFacts chunk;
    bool reported = false;  // that nobody has it
  };
  struct Served {  // a copy that another member has asked for
    TargetId to;
    uint64_t id = 0;
    ChunkKey key;
    ChunkFacts chunk;
  };
  struct Question {  // about a range
    uint64_t id = 0;
    TargetId asked;
    ChunkKey from, last;
  };

  using Name = std::pair<ChunkKey, Version>;
  using Jobs = std::map<Name, Job>;
  void add(const ChunkKey& key, const Job& job);
  bool needed(const ChunkKey& key, const Job& job) const;
  void set_state(Jobs::iterator at, Job::State state);
  Jobs::iterator drop(Jobs::iterator at);
  std::optional<uint32_t> next_member(const Job& job) const;
  void ask(Jobs::iterator at);
  void ask_next(Jobs::iterator at);
  void nobody_has_it(Jobs::iterator at);
  void fetched(TargetId from, const SyncMessage& m, BufferRef payload, PayloadState payload_state);
  void install(Jobs::iterator at);
  void hand_over(Jobs::iterator at);
  void installed(Jobs::iterator at, Outcome outcome);
  void serve(TargetId to, const SyncMessage& m);
  void served(const Served& s, Outcome outcome, BufferRef payload);
  void listed(TargetId from, const SyncMessage& m);
  bool ask_range(const ChunkKey& from, const ChunkKey& to, TargetId predecessor, ChunkKey* last);
  void release(BufferRef& payload);

  SyncHost& host_;
  const Options& options_;
  Jobs jobs_;
  std::set<Name> active_;   // asking, fetching or installing
  std::deque<Name> queue_;  // queued; some may have ceased to be
  Name looked_at_;
  uint64_t last_id_ = 0;
  uint64_t repaired_ = 0;
  std::unordered_map<OpId, Name> ops_;  // fetches and installs
  std::unordered_map<OpId, Served> copies_;
  std::deque<Question> questions_;
};

}  // namespace ffs::craq
