// One target of the simulator: the replica under test, its model store, and what it has under way.
//   sim_events.cc   events from bytes to the replica
//   sim_effects.cc  its effects, on the model store and to bytes
#pragma once

#include <memory>
#include <unordered_map>

#include "base/check.h"
#include "base/cursor.h"
#include "craq/sim.h"
#include "craq/sim_answer.h"
#include "craq/sim_store.h"

namespace ffs::craq::sim {

enum class EventType : uint8_t {
  tick = 1,
  recorded,
  proposed,
  update,
  read,
  set_epoch,
  remove_page,
  last_chunk,
  message,
  disk,
  done,
  connected,
  crash,
  space,
  dump,
  fence,
  lease,
  start,
  damage,
  damaged,
  compare,
  status,
  evict,
  clock,
  touch,
  sample,
};

class Target {
 public:
  explicit Target(const ffs_sim_options& options);

  // One event; false if its bytes make none.
  bool step(Reader in);
  const Bytes& answer() const { return out_; }

 private:
  // A read, fetch, load or copy that is under way.
  struct Started {
    uint8_t kind = 0;
    RequestToken token = 0;
    Outcome outcome = Outcome::ok;  // that it ends with if the event says ok
    Bytes content;
  };

  // A read that the replica let begin at once.
  struct AtOnce {
    ClientRead request;
    ChunkFacts facts;
    ChainVersion judged_in;
  };
  static constexpr OpId kFirstAtOnce = OpId{1} << 62;  // no op of the replica has such a number

  // sim_events.cc
  void restart();
  bool dispatch(EventType type, Reader& in);
  bool configure(Reader& in, bool proposed);
  bool client_update(Reader& in);
  bool client_read(Reader& in);
  bool end_at_once(const AtOnce& read, Outcome outcome, Bytes content);
  bool client_space(Reader& in, EventType type);
  bool message(Reader& in);
  bool disk(Reader& in);
  bool done(Reader& in);
  bool fence(Reader& in);
  bool damage(Reader& in);
  bool damaged(Reader& in);
  bool compare(Reader& in);
  bool evict(Reader& in);
  bool sample(Reader& in);
  bool dump();
  bool put_status();
  template <typename F>
  bool run(F&& event);

  // sim_effects.cc
  BufferRef new_buffer(std::span<const uint8_t> bytes);
  const Bytes& payload(BufferRef ref);
  void fault(const std::string& text);
  void put_record(const Record& r, bool exists);
  void append(Record r);
  void start(OpId op, Started s);
  void send(const PeerHeader& header, char mark, const void* body, size_t size, const Bytes& bytes,
            uint8_t type);
  void execute(const SendUpdate& e);
  void execute(const SendNotice& e);
  void execute(const SendSync& e);
  void execute(const Reply& e);
  void execute(const Fetch& e);
  void execute(const Release& e);
  void execute(const Stage& e);
  void execute(const Commit& e);
  void execute(const Refuse& e);
  void execute(const Read& e);
  void execute(const Load& e);
  void execute(const Copy& e);
  void execute(const Install& e);
  void execute(const Erase& e);
  void execute(const ResetTarget& e);
  void execute(const SetRetry& e);
  void execute(const SetSpaceEpoch& e);
  void execute(const PersistChain& e);
  void execute(const ProposalPersisted& e);
  void execute(const StateChanged& e);
  void execute(const Repaired& e);
  void execute(const Touch& e) { store_.touch(e.key); }
  void execute(const Evicted& e);

  const TargetId self_;
  const ChainId chain_;
  Options options_;
  ModelStore store_;
  std::unique_ptr<Replica> replica_;
  Effects effects_;
  uint64_t now_ms_ = 0;
  Outcome stage_outcome_ = Outcome::ok;
  uint64_t last_buffer_ = 0;
  std::unordered_map<uint64_t, Bytes> buffers_;
  std::unordered_map<OpId, Started> started_;
  std::unordered_map<OpId, AtOnce> at_once_;
  uint64_t last_at_once_ = 0;
  std::unordered_map<RequestToken, Bytes> content_;
  Bytes out_;
};

}  // namespace ffs::craq::sim
