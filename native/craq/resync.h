// Recovery: the last serving member of a chain (SyncSource) fills the syncing one (SyncTarget), and from a
// certain point on keeps it in step. docs/craq.md, Recovery. Both are parts of a Replica's machine and know
// of it what SyncHost says; no disks, sockets or clocks here either.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "craq/replica.h"
#include "craq/sync_wire.h"

namespace ffs::craq {

enum class SyncPart : uint8_t { source, target, repair };  // whose operation it is

// What of a chunk is to be sent to the syncing member.
struct Wanted {
  ChunkFacts chunk;                // version none: it is to be erased
  Version version;                 // of the pending update that this is, or chunk.version
  bool pending = false;            // not committed here yet, but certain to be
  std::optional<RetryItem> retry;  // goes with a pending one
};

// The machine, as its parts for recovery and repair see it. Calls into it may call back into the part.
class SyncHost {
 public:
  virtual const StoreView& store() const = 0;
  virtual const ChainConfig& config() const = 0;
  virtual uint32_t path_count() const = 0;  // serving members, the first ones of config()
  virtual TargetId self() const = 0;
  virtual uint64_t now_ms() const = 0;
  virtual bool is(Mutant m) const = 0;

  // The end of an effect with that op comes to the part's completed().
  virtual OpId new_sync_op(SyncPart part) = 0;
  virtual void emit(Effect effect) = 0;
  virtual void send_sync(TargetId to, const SyncMessage& m, BufferRef payload) = 0;
  virtual void device_failed() = 0;

  // store() shows all that was committed and refused so far (effects of this event may not be executed).
  virtual bool store_is_current() const = 0;
  virtual ChunkFacts committed_now(const ChunkKey& key) const = 0;

  // For the source. in_step: the oldest pending version, if every serving member has it.
  virtual Wanted wanted(const ChunkKey& key, bool in_step) const = 0;
  virtual void reached_target(const ChunkKey& key, const Version& version) = 0;
  virtual void epoch_reached_target(uint64_t space, uint64_t epoch) = 0;
  virtual void sync_gave_up() = 0;  // what waited for the target goes on
  virtual void sync_news() = 0;     // the status has changed
  virtual void source_damaged(const ChunkKey& key, const Version& version) = 0;

  // For the target. True when nothing is under way at the disk and all pendings are forgotten.
  virtual bool forget_pendings() = 0;
  virtual void chunk_replaced(const ChunkKey& key) = 0;  // the store's facts of it have changed

  // For repair. The facts of that version, if it is committed or durably pending here.
  virtual std::optional<ChunkFacts> held_version(const ChunkKey& key, const Version& version) const = 0;
  virtual void repair_ended(const ChunkKey& key, const Version& version, bool ok) = 0;
  // A pending version that can't be read here, and its payload (taken over by the host): ok, or absent for
  // now, if no other member has it.
  virtual bool wants_payload(const ChunkKey& key, const Version& version) const = 0;
  virtual void obtained(const ChunkKey& key, const Version& version, Outcome outcome, BufferRef payload) = 0;

 protected:
  ~SyncHost() = default;
};

// ---- Ranges of chunks ---------------------------------------------------------------------------

// The key after `key`; false if there is none.
bool next_key(ChunkKey* key);
constexpr ChunkKey last_key() {
  ChunkKey k;
  k.bytes.fill(0xff);
  return k;
}

struct RangeDigest {
  uint32_t count = 0;
  uint64_t digest = 0;
  ChunkKey last;  // `to`, or the last chunk's key if there are more than `limit`
};
// Of the committed chunks in [from, to], of the first `limit` at most.
RangeDigest digest_range(const StoreView& store, const ChunkKey& from, const ChunkKey& to, uint32_t limit);

// Answers a question about a range with `same` or `list`.
void answer_compare(SyncHost& host, TargetId asker, const SyncMessage& question);

// ---- The source ---------------------------------------------------------------------------------

class SyncSource {
 public:
  SyncSource(SyncHost& host, const Options& options) : host_(host), options_(options) {}

  // A chain version in which this is the last serving member and `target` is syncing.
  void start(TargetId target, uint64_t own_incarnation, uint64_t target_incarnation);
  void stop();
  // This member isn't sure to be the source any more: nothing is sent, and nothing kept for that. What was
  // held back for the target stays so until stop().
  void suspend();
  bool active() const { return state_ != State::off; }

  // From now on a commit, a refusal or an epoch is passed on only after the target has it.
  bool waits() const { return in_step_ && !host_.is(Mutant::no_wait_in_step); }
  // A proposal would make that member serving: may it become durable here? Not while a transfer is under
  // way, and none begins from now on: what commits wait for goes to the member as an update, once the version
  // is recorded. Else it might crash as a serving one with a chunk whose retry entry it hasn't journalled
  // yet.
  bool may_promote(TargetId target, uint64_t incarnation) {
    if (state_ != State::done || target != target_ || incarnation != session_.target_incarnation)
      return false;
    promoting_ = true;
    return transfers_.empty() && backlog_.empty() && todo_.empty();
  }
  // That proposal is no more: there is another one.
  void promotion_over() { promoting_ = false; }

  // What the machine tells. `reached`: the target has it already.
  void committed(const ChunkKey& key, const UpdateIdentity& who, bool reached);
  void refused(const UpdateIdentity& who);
  void epoch_set(uint64_t space, uint64_t epoch);
  // In step: this is all that the machine waits for; reached_target() or epoch_reached_target() follows.
  void want(const ChunkKey& key, const Version& version);
  void want_refusal(const ChunkKey& key, const Version& version, const RetryItem& entry);

  // Events.
  void arrived(const SyncMessage& m);
  void completed(OpId op, Outcome outcome, BufferRef payload);
  void repaired(const ChunkKey& key, bool ok);
  void connected();
  void tick();
  void pump();  // at the end of every event: begins what can begin

  void fill(ReplicaStatus* status) const;

 private:
  enum class State : uint8_t { off, suspended, pausing, beginning, copying, done };

  struct Transfer {
    enum class State : uint8_t { copying, sent, resting };
    State state = State::copying;
    Wanted wanted;
    bool urgent = false;          // a commit waits for it
    bool owed = false;            // the target lacks what is committed here
    bool again = false;           // something newer was committed meanwhile
    bool wanted_pending = false;  // a commit waits for what comes after it
    uint64_t number = 0;          // sent
    uint64_t rest_until_ms = 0;   // resting
    BufferRef payload;
  };
  struct Outgoing {  // a message that isn't answered
    SyncKind kind = SyncKind::begin;
    ChunkKey key;                // chunk, erase
    std::vector<uint8_t> items;  // retries, epochs
    bool refusals = false;       // retries that the machine waits for:
    std::vector<std::pair<ChunkKey, Version>> waiting;
    uint64_t first_ms = 0, sent_ms = 0;
    uint32_t tries = 0;
  };
  struct Range {  // of the walk: [from, to] is left of it, [from, asked_to] was asked about
    ChunkKey from, to, asked_to;
    uint32_t asked_count = 0;
    uint64_t question = 0;  // 0: to be asked (again)
    uint64_t first_ms = 0, sent_ms = 0;
    uint32_t tries = 0;
  };
  struct Refusal {
    ChunkKey key;
    Version version;
    RetryItem entry;
  };

  // resync_source.cc
  void begin();
  void begun();
  void void_session();
  void give_up(Outcome why, uint64_t pause_ms);
  uint64_t floor() const;
  bool may_send() const;
  uint64_t send_new(Outgoing out);
  void send(uint64_t number, Outgoing& out);
  void ended(uint64_t number, Outcome outcome);
  void owe_retry(ClientId client, uint32_t channel);
  void send_retries();
  void send_refusals();
  void send_epochs();
  void advance();
  bool all_there() const;
  void set_failure(Outcome why);
  void resend(bool all);

  // resync_transfer.cc
  bool covered(const ChunkKey& key) const { return walk_done_ || key < walk_from_; }
  void send_urgent();
  void send_backlog();
  void begin_transfer(const ChunkKey& key, bool urgent, bool owed);
  void send_chunk(const ChunkKey& key, Transfer& t);
  void copied(const ChunkKey& key, Outcome outcome, BufferRef payload);
  void transfer_ended(const ChunkKey& key, Outcome outcome);
  void follow_up(const ChunkKey& key);
  Transfer take_transfer(const ChunkKey& key);
  void damaged_here(const ChunkKey& key);
  void rest(Transfer& t, uint64_t pause_ms);
  void wake_resting();

  // resync_walk.cc
  void walk();
  void ask(Range& range);
  void range_answered(const SyncMessage& m);
  void compare_list(const Range& range, const SyncMessage& m);
  void advance_range(size_t index, const ChunkKey& upto);

  SyncHost& host_;
  const Options& options_;
  State state_ = State::off;
  TargetId target_;
  SyncSession session_;
  bool in_step_ = false;
  bool promoting_ = false;  // what commits wait for is sent no more
  uint64_t pause_until_ms_ = 0;
  uint64_t begun_ms_ = 0;  // the attempt
  uint64_t heard_ms_ = 0;
  Outcome failure_ = Outcome::ok;

  uint64_t next_number_ = 1;
  std::map<uint64_t, Outgoing> outgoing_;  // by number
  std::unordered_map<OpId, ChunkKey> copies_;

  std::unordered_map<ChunkKey, Transfer, ChunkKeyHash> transfers_;
  uint32_t background_ = 0;  // of them not urgent
  std::deque<ChunkKey> urgent_;
  std::unordered_set<ChunkKey, ChunkKeyHash> urgent_keys_;
  std::deque<ChunkKey> todo_;   // found by the walk, which waits when it is long
  std::set<ChunkKey> backlog_;  // changed behind the walk
  bool todo_next_ = true;
  std::set<ChunkKey> damaged_;  // committed chunks without a good copy here, as yet

  std::deque<std::pair<ClientId, uint32_t>> channels_;  // whose entries are to be sent, each once:
  std::set<std::pair<uint64_t, uint32_t>> channels_known_;
  std::deque<EpochItem> epochs_;
  std::deque<Refusal> refusals_;
  bool retries_under_way_ = false, epochs_under_way_ = false, refusals_under_way_ = false;

  ChunkKey walk_from_;
  bool walk_done_ = false;
  std::vector<Range> ranges_;
  uint64_t last_question_ = 0;

  uint64_t compared_ = 0, sent_ = 0, sent_bytes_ = 0, total_ = 0;
};

// ---- The target ---------------------------------------------------------------------------------

class SyncTarget {
 public:
  explicit SyncTarget(SyncHost& host) : host_(host) {}

  // A chain version in which this member is syncing.
  void start(TargetId source, uint64_t source_incarnation, uint64_t own_incarnation);
  // What is under way at the disk ends by itself; busy() until then.
  void stop();
  bool active() const { return active_; }
  bool busy() const { return disk_ops_ > 0; }

  // Takes over `payload`.
  void arrived(TargetId from, const SyncMessage& m, BufferRef payload, PayloadState payload_state);
  void completed(OpId op, Outcome outcome);
  void pump();

 private:
  struct Taken {  // a number that came
    SyncKind kind = SyncKind::begin;
    bool ended = false;
    Outcome outcome = Outcome::ok;
    uint32_t ops = 0;  // under way
    bool fetching = false;
    ChunkKey key;
    ChunkFacts chunk;
    BufferRef payload;
    std::optional<RetryItem> retry;
    bool urgent = false;
  };
  struct Op {
    uint64_t number = 0;  // 0: of a session that is over
    bool fetch = false;
    bool has_channel = false;
    std::pair<uint64_t, uint32_t> channel;
    std::optional<ChunkKey> replaces;
    // Of a session that is over:
    BufferRef payload;
    std::optional<RetryItem> retry;
  };
  struct Channel {  // entries on their way to the disk
    RetryEntry newest;
    uint32_t ops = 0;
  };

  bool of_session(const SyncMessage& m);
  void begin_attempt(uint32_t attempt, uint64_t number);
  void take(const SyncMessage& m, BufferRef payload, PayloadState payload_state);
  void take_chunk(const SyncMessage& m, Taken& taken, PayloadState payload_state);
  void install(uint64_t number, Taken& taken);
  void set_retry(uint64_t number, Taken* taken, const RetryItem& item);
  void answer(uint64_t number);
  void answer(uint64_t number, Progress progress, Outcome outcome);
  OpId disk_op(uint64_t number, Taken* taken);
  void forget(uint64_t number);
  void fetched(uint64_t number, Outcome outcome);
  void release(BufferRef payload);
  void void_numbers();

  SyncHost& host_;
  bool active_ = false;
  TargetId source_;
  SyncSession session_;
  bool reset_ = false;      // begin has taken effect
  bool reset_due_ = false;  // it waits until the disk is quiet
  uint64_t begin_number_ = 0;
  uint64_t floor_ = 0;
  std::map<uint64_t, Taken> taken_;
  std::unordered_map<OpId, Op> ops_;
  std::map<std::pair<uint64_t, uint32_t>, Channel> channels_;
  uint32_t disk_ops_ = 0;
};

}  // namespace ffs::craq
