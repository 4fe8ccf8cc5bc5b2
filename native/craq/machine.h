// The inside of Replica: its records, and the functions by chapter. One class in several files:
//   events.cc   the way in
//   replica.cc  the story of a write, in order
//   arrival.cc  that of an update at the next member
//   resend.cc   what is sent once more
//   refusal.cc  the story of an update that some member refuses
//   reading.cc  reads, and lookups that read
//   members.cc  who is a member: proposals, recorded versions, phases
//   restart.cc  how a chain goes on in a new version
//   lease.cc    who may answer clients, and for how long
//   suspicion.cc  neighbours that owe an answer
//   resync_hooks.cc where recovery and repair (resync.h, repair.h) touch all that
//   evicting.cc chunks removed to make room
//   requests.cc requests that wait: deadlines, resends; space epochs, removal of a space
//   records.cc  the records: made, found, remembered, freed
// docs/craq.md is what it follows. Included by craq/*.cc only.
#pragma once

#include "craq/pool.h"
#include "craq/repair.h"
#include "craq/replica.h"
#include "craq/resync.h"

namespace ffs::craq {

struct Chunk;
struct Pending;
struct EpochChange;

// A client's request that isn't answered yet.
struct Request {
  enum class State : uint8_t {
    judging,       // in the run list
    parked,        // until the replica serves, or something changes (judged again at each tick too)
    wants_room,    // for a free pending
    wants_turn,    // in the queue of a chunk
    wants_result,  // attached to a pending update
    fetching,      // payload on its way here
    asking,        // the last member was asked
    reading,       // disk
    setting_epoch,
    removing_page,
    answered,  // replied to already; some queue still holds the record
  };
  std::variant<ClientUpdate, ClientRead, ClientSetSpaceEpoch, ClientRemovePage, ClientLastChunk> body;
  State state = State::judging;
  bool fetched = false;
  OpId op = 0;               // of Fetch, Read or the question
  uint64_t asked_ms = 0;     // of the question
  ChunkFacts chunk;          // read: what the disk reads
  ChainVersion judged_in;    // read: chain version before the disk read
  uint32_t vanished = 0;     // read: how often the version was gone when the disk came to it
  uint32_t outstanding = 0;  // remove page: removals under way
  Reply reply;               // remove page: as it grows
  Request* queue_next = nullptr;
  Link<Request> all;
  Request* next_free = nullptr;

  RequestToken token() const {
    return std::visit([](const auto& b) { return b.token; }, body);
  }
  ChainVersion chain_version() const {
    return std::visit([](const auto& b) { return b.chain_version; }, body);
  }
  Outcome authority() const {
    return std::visit([](const auto& b) { return b.authority; }, body);
  }
  uint64_t deadline_ms() const {
    return std::visit([](const auto& b) { return b.deadline_ms; }, body);
  }
};

// First in, first out, through Request::queue_next.
struct RequestQueue {
  Request* first = nullptr;
  Request* last = nullptr;
  bool empty() const { return first == nullptr; }
  void push(Request* r) {
    r->queue_next = nullptr;
    (last != nullptr ? last->queue_next : first) = r;
    last = r;
  }
  Request* pop() {
    Request* r = first;
    if (r == nullptr) return nullptr;
    first = r->queue_next;
    if (first == nullptr) last = nullptr;
    r->queue_next = nullptr;
    return r;
  }
};

// An update that isn't committed here.
struct Pending {
  enum class Disk : uint8_t { fetching, queued, staging, staged };
  enum class State : uint8_t { alive, refusing, done, refused };
  Update update;     // as it is sent on; its payload is our reference
  ChunkFacts after;  // the chunk as of this version (version none: removed)
  Chunk* chunk = nullptr;
  Disk disk = Disk::queued;
  State state = State::alive;
  bool held = false;           // all before us have it
  bool acked = false;          // the successor has committed it
  bool sent = false;           // in this chain version
  Fate fate = Fate::unasked;   // with the predecessor, while reconciling
  bool loaded = false;         // only in the store: is sent as a whole chunk
  bool fallen = false;         // refused, or built on what was
  bool unfounded = false;      // fallen, and what it is built on didn't come here
  bool below_refused = false;  // the members behind have journalled that it has fallen, and dropped it
  bool reached = false;        // the syncing member has it, or its refusal
  bool base_damaged = false;   // can't be staged until that is repaired
  bool eviction = false;       // ordered by on_evict
  bool obtaining = false;      // damaged here: another member is asked for the payload
  Outcome outcome = Outcome::ok;
  uint64_t sent_ms = 0;
  uint64_t repeated_ms = 0;  // because the successor said `missing`; 0 = never
  OpId fetch_op = 0;
  OpId load_op = 0;
  RequestQueue waiters;     // clients that wait for the result
  Request* page = nullptr;  // the removal of a space that this is a part of
  Link<Pending> in_chunk;   // by version
  Link<Pending> in_order;   // all pendings of the target, by version
  Pending* hash_next = nullptr;
  Pending* next_free = nullptr;

  bool removal() const { return update.kind == UpdateKind::remove; }
  Version version() const { return update.version; }
};
using ChunkPendings = List<Pending, &Pending::in_chunk>;
using OrderedPendings = List<Pending, &Pending::in_order>;

// A `held` that overtook its update: it travels where nothing waits for a buffer, updates don't.
struct EarlyHeld {
  ChunkKey key;
  Version version;
};

// A refused version, remembered until the floor has passed it.
struct Tomb {
  Version version;
  UpdateIdentity identity;
  Outcome outcome = Outcome::ok;
  Tomb* next = nullptr;
  Tomb* next_free = nullptr;
};

// A chunk that something is going on with. `committed` is our own copy of the store's facts, since
// effects of this event may not have been executed.
struct Chunk {
  ChunkKey key;
  ChunkFacts committed;
  Version removed;  // the removal that was committed last; none if unknown or a chunk is there
  ChunkPendings pendings;
  uint32_t pending_count = 0;
  RequestQueue turn;
  Pending* staging = nullptr;
  uint32_t refusing = 0;      // Refuse effects under way
  bool absent_above = false;  // the predecessor has no such chunk
  bool unreconciled = false;  // the predecessor's answer is awaited
  bool probed = false;        // since the chain changed
  Version probe;              // the removal that the successor was asked about; none: go on
  bool retired = false;       // in the list of records that may be freed
  Tomb* tombs = nullptr;
  Version remember_until;  // tombs and `removed` are kept while the floor isn't above
  Link<Chunk> memory;      // chunks with something to remember
  Chunk* hash_next = nullptr;
  Chunk* retired_next = nullptr;
  Chunk* next_free = nullptr;

  bool dirty() const { return !pendings.empty(); }
};

// The least epoch of a space on its way to all members.
struct EpochChange {
  uint64_t space = 0;
  uint64_t epoch = 0;
  bool durable = false;
  bool acked = false;  // by the successor
  bool sent = false;   // in this chain version
  uint64_t sent_ms = 0;
  OpId op = 0;
  RequestQueue waiters;
  Link<EpochChange> all;
  EpochChange* next_free = nullptr;
};

// What an OpId stands for.
struct Op {
  enum class Kind : uint8_t {
    fetch_for_request,
    fetch,
    stage,
    refuse,
    drop,
    read,
    question,
    load,
    epoch,
    chain,
    retry,
    sync_source,
    sync_target,
    repair
  };
  Kind kind = Kind::stage;
  Request* request = nullptr;  // or null: nobody waits any more
  Pending* pending = nullptr;
  EpochChange* epoch = nullptr;
  OpId id = 0;
  Op* hash_next = nullptr;
  Op* next_free = nullptr;
};

struct ChunkTraits {
  using Key = ChunkKey;
  static const Key& key(const Chunk& c) { return c.key; }
  static size_t hash(const Key& k) { return ChunkKeyHash{}(k); }
};
struct ChannelKey {
  ClientId client;
  uint32_t channel = 0;
  friend bool operator==(const ChannelKey&, const ChannelKey&) = default;
};
struct ChannelTraits {
  using Key = ChannelKey;
  static Key key(const Pending& p) { return {p.update.identity.client, p.update.identity.channel}; }
  static size_t hash(const Key& k) { return mix64(k.client.value ^ mix64(k.channel)); }
};
struct OpTraits {
  using Key = OpId;
  static Key key(const Op& op) { return op.id; }
  static size_t hash(const Key& k) { return mix64(k); }
};

constexpr bool carries_payload(UpdateKind kind) {
  return kind != UpdateKind::truncate && kind != UpdateKind::remove;
}

// What the smallest chunk takes.
constexpr uint32_t kLeastSlotBytes = 4096;

// A lease that this member has granted to another one.
struct Grant {
  TargetId target;
  uint64_t until_ms = 0;
};

// What is known of a neighbour's being there.
struct Watched {
  uint64_t heard_ms = 0;  // a message of it, or the last moment at which it owed none
  uint64_t asked_ms = 0;
};

// restart.cc. The serving members of a configuration stand first: so many there are.
uint32_t path_of(const ChainConfig& config);
uint32_t index_of(const ChainConfig& config, TargetId target);  // member_count if it isn't named
bool serves(const ChainConfig& config, TargetId target);
bool syncs(const ChainConfig& config, TargetId target);

class Replica::Machine final : public SyncHost {
 public:
  Machine(TargetId self, ChainId chain, const StoreView& store, const Options& options, uint64_t now_ms);

  // Every event: begin, the handler, finish.
  void begin(uint64_t now_ms, Effects& out);
  void finish();
  template <typename Body>
  void client_request(const Body& body, uint64_t now_ms, Effects& out) {
    begin(now_ms, out);
    Request* r = new_request();
    r->body = body;
    admit_request(r);
    finish();
  }

  // events.cc. update_arrived: false if the message changes nothing.
  bool update_arrived(const PeerHeader& header, const Update& u, PayloadState payload_state);
  void notice_arrived(const PeerHeader& header, const Notice& n);
  void completed(OpId id, Outcome outcome, BufferRef payload);

  // replica.cc: a write
  void admit_request(Request* r);
  Request* new_request();
  void judge(Request* r);
  void judge_update(Request* r, const ClientUpdate& u);
  void update_received(const Update& u, PayloadState payload_state);
  void held_received(const Notice& n);
  void ack_received(const Notice& n);
  void missing_received(const Notice& n);
  void fetched_for_request(Request* r, Outcome outcome);
  void fetched(Pending* p, Outcome outcome);
  void staged(Pending* p, Outcome outcome);
  void loaded(Pending* p, Outcome outcome, BufferRef payload);

  // refusal.cc
  void refusal_received(const Notice& n);
  void cancel_received(const Notice& n);
  void refuse_durable(Pending* p, Outcome outcome);

  // reading.cc
  void judge_read(Request* r, const ClientRead& read);
  bool read_at_once(const ClientRead& read, uint64_t now_ms, ChunkFacts* facts, ChainVersion* judged_in);
  bool read_stands(const ChainVersion& judged_in, uint64_t now_ms);
  void judge_last_chunk(Request* r, const ClientLastChunk& last);
  void query_received(const PeerHeader& header, const Notice& n);
  void answer_received(const Notice& n);
  void read_done(Request* r, Outcome outcome);

  // lease.cc
  void lease_received(uint64_t until_ms);
  void lease_asked(TargetId from, const Notice& n);
  void lease_granted(TargetId from, const Notice& n);

  // restart.cc
  void proposed(const ChainConfig& config);
  void recorded(const ChainConfig& config);
  void chain_persisted(Outcome outcome);
  void reconcile_received(const Notice& n);
  void reconcile_answered(const Notice& n);
  void reconciled_received();
  void resent_received();
  void ready_received();
  void invite_received();
  void load_pendings();

  // requests.cc
  void judge_set_space_epoch(Request* r, const ClientSetSpaceEpoch& set);
  void judge_remove_page(Request* r, const ClientRemovePage& page);
  void space_epoch_received(const Notice& n);
  void space_epoch_acked(const Notice& n);
  void epoch_durable(EpochChange* e, Outcome outcome);
  void peer_connected(TargetId target);
  void tick();

  // evicting.cc
  EvictionAnswer evict(const EvictionOrder& order);

  // resync_hooks.cc
  void sync_arrived(const PeerHeader& header, std::span<const uint8_t> bytes, BufferRef payload,
                    PayloadState payload_state);
  void damaged(const ChunkKey& key, const Version& version) { repairer_.damaged(key, version); }
  std::optional<ChunkKey> compare(const ChunkKey& from);

  ReplicaStatus status() const;

  // SyncHost (resync_hooks.cc)
  const StoreView& store() const override { return store_; }
  const ChainConfig& config() const override { return config_; }
  uint32_t path_count() const override { return path_count_; }
  TargetId self() const override { return self_; }
  uint64_t now_ms() const override { return now_ms_; }
  bool is(Mutant m) const override { return options_.mutant == m; }
  OpId new_sync_op(SyncPart part) override;
  void emit(Effect effect) override { out_->push_back(std::move(effect)); }
  void send_sync(TargetId to, const SyncMessage& m, BufferRef payload) override;
  void device_failed() override { fail(Reason::device_failed); }
  bool store_is_current() const override;
  ChunkFacts committed_now(const ChunkKey& key) const override;
  Wanted wanted(const ChunkKey& key, bool in_step) const override;
  void reached_target(const ChunkKey& key, const Version& version) override;
  void epoch_reached_target(uint64_t space, uint64_t epoch) override;
  void sync_gave_up() override;
  void sync_news() override;
  void source_damaged(const ChunkKey& key, const Version& version) override;
  bool forget_pendings() override;
  void chunk_replaced(const ChunkKey& key) override;
  std::optional<ChunkFacts> held_version(const ChunkKey& key, const Version& version) const override;
  void repair_ended(const ChunkKey& key, const Version& version, bool ok) override;
  bool wants_payload(const ChunkKey& key, const Version& version) const override;
  void obtained(const ChunkKey& key, const Version& version, Outcome outcome, BufferRef payload) override;

 private:
  enum class Phase : uint8_t { offline, persisting, reconciling, resuming, serving, syncing, failed };

  // --- roles
  bool speaks_to_us(const PeerHeader& header) const;
  bool serving() const { return phase_ == Phase::serving; }
  // Clean chunks at least: a member that served, and goes on serving in the version that comes, has
  // had every committed version staged first.
  bool answers_reads() const {
    return serving() || (keeps_serving_ && (phase_ == Phase::persisting || phase_ == Phase::reconciling ||
                                            phase_ == Phase::resuming));
  }
  // What is committed here is the chunk's value, whatever is pending.
  bool decides() const { return last() && serving(); }
  // The path of updates: the serving members of config_, which stand first. The others aren't on it.
  bool on_path() const { return my_index_ < path_count_; }
  bool first() const { return my_index_ == 0; }
  bool last() const { return my_index_ + 1 == path_count_; }
  TargetId predecessor() const { return config_.members[my_index_ - 1].target; }
  TargetId successor() const { return config_.members[my_index_ + 1].target; }
  TargetId last_member() const { return config_.members[path_count_ - 1].target; }
  // Behind the path, and filled by its last member; zero = none.
  TargetId syncing_member() const;
  // Acts in config_: takes its messages and speaks in it.
  bool acts() const {
    return phase_ == Phase::reconciling || phase_ == Phase::resuming || phase_ == Phase::serving ||
           phase_ == Phase::syncing;
  }

  // --- replica.cc
  bool chain_allows(Request* r, bool head_only);
  bool chain_version_allows(Request* r, bool head_only);
  bool retry_table_allows(Request* r, const ClientUpdate& u);
  uint64_t least_epoch(uint64_t space) const;
  bool turn_allows(Request* r, const ClientUpdate& u, Chunk* c);
  Pending* number(const ClientUpdate& u, Chunk* c);
  void remember_held(const Notice& n);
  bool held_came_early(const ChunkKey& key, const Version& version);
  void begin_update(Pending* p);
  Pending* new_pending(const Update& u, Chunk* c);
  static ChunkFacts facts_after(const Update& u, const ChunkFacts& base);
  const ChunkFacts& newest(const Chunk* c) const;
  void send_ready(Chunk* c);
  void probe(Chunk* c);
  void send(Pending* p);
  void send_again(Chunk* c, const Version& above);
  bool load_first(Pending* p);
  enum class Fit : uint8_t { accept, missing, diverged, done, refused_base };
  Fit fit(const Update& u, Chunk* c, const Tomb** refused) const;
  bool known_already(const Update& u, Chunk* c);
  bool lacks_entry(const Update& u, const Chunk* c);
  void stage_next(Chunk* c);
  void let_go(Pending* p);
  void send_held(Pending* p);
  void progress(Chunk* c);
  void commit(Pending* p);
  void resolve(Pending* p, Pending::State state);
  void wake(Chunk* c);
  Version floor() const;
  void floor_received(const Version& v);
  void drop_unstaged(Pending* p);

  // --- evicting.cc
  bool expired(const ChunkFacts& facts) const;
  Outcome room_for(const ClientUpdate& u) const;

  // --- refusal.cc
  void fall(Pending* p, Outcome outcome);
  Pending* root(const Chunk* c) const;
  void advance_refusal(Chunk* c);
  void remember_refused(Chunk* c, const Version& v, const UpdateIdentity& identity, Outcome outcome);
  const Tomb* tomb_of(const Chunk* c, const Version& v) const;
  void send_refusal(const Chunk* c, const Version& v, const UpdateIdentity& identity, Outcome outcome);

  // --- reading.cc
  void finish_read(Request* r, const ClientRead& read, const ChunkFacts& facts);
  void ask(Request* r, const ClientRead& read);
  void judge_anew(Request* r);
  void judge_askers();

  // --- lease.cc
  bool leased() const;
  bool lease_allows(Request* r);
  void ask_leases();
  bool grant(TargetId to);
  bool granted_outside(const ChainConfig& config) const;
  uint64_t held_for_ms(uint64_t granted_ms) const;

  // --- suspicion.cc
  void heard_from(TargetId target);
  void watch_neighbours();
  bool silent(Watched& neighbour, TargetId target, bool owes);
  bool owes_above() const;
  bool owes_below() const;

  // --- restart.cc
  bool meant_for_us(const ChainConfig& config) const;
  void persist_proposal();
  void persist_recorded();
  void stand_down();
  void outgrown_by(const ChainConfig& config);
  bool poisoned() const { return phase_ == Phase::failed && reason_ == Reason::device_failed; }
  void adopt();
  void forget_neighbours();
  void begin_reconciling();
  void go_offline(Reason reason);
  void fail(Reason reason);
  void set_phase(Phase phase, Reason reason);
  void persist_chain();
  void become_reconciled();
  void maybe_send_resent();
  void maybe_serve();
  void serve();
  void drop(Pending* p);
  void ask_fate(const Chunk* c);
  Fate fate_here(const Notice& n);
  void settle(Chunk* c);
  void nudge(bool reconnected);

  // --- requests.cc
  void reply(Request* r, Outcome outcome, const ChunkFacts& chunk = {});
  void reply(Request* r, const Reply& prepared);
  void forget(Request* r);
  void park(Request* r);
  void unpark();
  void run();
  void expire();
  void send_epoch(EpochChange* e);
  void finish_epoch(EpochChange* e);
  void forget_epoch(EpochChange* e);
  void answer_epoch(EpochChange* e, Outcome outcome);
  void page_removed(Request* r, Outcome outcome);
  void page_step(Request* r);
  void resend_old();

  // --- resync_hooks.cc
  void adopt_sync();
  void start_sync_source();
  bool may_promote(const ChainConfig& config);
  bool sync_holds_back(const Pending* p);
  bool sync_holds_back_refusal(const Chunk* c, Pending* oldest);
  bool sync_holds_back(const EpochChange* e);
  void finish_durable_epochs();
  void base_damaged(Pending* p);
  void repair_base(Chunk* c);
  void pump_sync();

  // --- records
  Chunk* find_chunk(const ChunkKey& key) const { return chunks_.find(key); }
  Chunk* chunk(const ChunkKey& key);  // makes a record if there is none
  void retire(Chunk* c);
  void keep_in_memory(Chunk* c, const Version& until);
  void forget_refused(Chunk* c);
  Pending* find_pending(const Chunk* c, const Version& v) const;
  OpId new_op(Op::Kind kind, Request* r, Pending* p, EpochChange* e = nullptr);
  void drop_op(OpId id);
  void release(BufferRef& payload);
  void notify(TargetId to, const Notice& n);
  PeerHeader header_to(TargetId to) const { return {chain_, config_.version, self_, to}; }

  const TargetId self_;
  const ChainId chain_;
  const StoreView& store_;
  const Options options_;

  uint64_t now_ms_ = 0;
  Effects* out_ = nullptr;
  size_t out_begin_ = 0;  // what this event adds to *out_ begins here

  // The chain. config_ is the adopted version; zero = none in this incarnation.
  ChainConfig config_;
  ChainConfig next_config_;           // recorded, being made durable
  ChainConfig proposal_;              // the newest one of this incarnation
  bool proposal_waits_ = false;       // it isn't being made durable yet
  bool recorded_waits_ = false;       // the same of next_config_
  bool keeps_serving_ = false;        // has served in this incarnation, and without a break since
  uint64_t start_hold_until_ms_ = 0;  // of the leases of the last incarnation
  // Leases. The manager's; the peers' in config_, by index; those that this member has granted, in whatever
  // version. outgrown_by_: the newest version made durable here that names a serving member that the
  // adopted one doesn't.
  uint64_t manager_lease_until_ms_ = 0;
  std::array<uint64_t, kMaxReplicas> peer_lease_until_ms_{};
  uint64_t leases_asked_ms_ = 0;
  uint64_t shortest_grant_ms_ = UINT64_MAX;  // in config_
  std::array<Grant, 2 * kMaxReplicas> grants_{};
  ChainVersion outgrown_by_;
  Watched above_;
  Watched below_;
  uint64_t watched_ms_ = 0;
  TargetId suspect_;
  // The newest ones; an older one that is lost comes again (resend.cc). Void with the chain version.
  std::array<EarlyHeld, 64> early_held_;
  uint32_t early_held_count_ = 0;  // of valid entries
  uint32_t early_held_next_ = 0;   // overwritten next
  ChainVersion start_floor_;       // adopted by an earlier incarnation: never again
  ChainVersion start_proposed_;    // made durable by it; may go on without us: nothing older is adopted
  ChainRecord record_;             // being made durable
  ChainRecord durable_record_;
  bool persisted_here_ = false;
  uint32_t persists_ = 0;    // PersistChain effects under way
  uint32_t my_index_ = 0;    // in config_
  uint32_t path_count_ = 0;  // serving members of config_
  Phase phase_ = Phase::offline;
  Reason reason_ = Reason::no_configuration;
  uint64_t counter_ = 0;               // of the head, in config_.version
  Version floor_;                      // from the predecessor
  uint32_t unreconciled_ = 0;          // chunks
  uint32_t drops_ = 0;                 // Refuse effects of dropped pendings under way
  bool reconciled_ = false;            // our pendings are a part of the predecessor's
  bool successor_reconciled_ = false;  // the same, of the successor
  bool resent_received_ = false;
  bool successor_ready_ = false;
  uint64_t nudged_ms_ = 0;

  HashIndex<Chunk, ChunkTraits> chunks_;
  HashIndex<Pending, ChannelTraits> channels_;
  HashIndex<Op, OpTraits> ops_;
  OrderedPendings order_;
  List<Chunk, &Chunk::memory> memory_;
  List<Request, &Request::all> requests_;
  List<EpochChange, &EpochChange::all> epochs_;
  RequestQueue run_;
  RequestQueue parked_;
  RequestQueue room_;
  uint32_t pending_count_ = 0;
  uint64_t numbered_bytes_ = 0;  // of payloads, in this event
  uint64_t next_deadline_ms_ = 0;
  OpId last_op_ = 0;

  // Resolved in this event; freed at the next, so that requests judged now find them.
  Pending* retired_pendings_ = nullptr;
  Chunk* retired_chunks_ = nullptr;

  SyncSource sync_source_{*this, options_};
  SyncTarget sync_target_{*this};
  Repairer repairer_{*this, options_};

  Pool<Chunk> chunk_pool_;
  Pool<Pending> pending_pool_;
  Pool<Request> request_pool_;
  Pool<Tomb> tomb_pool_;
  Pool<EpochChange> epoch_pool_;
  Pool<Op> op_pool_;
};

}  // namespace ffs::craq
