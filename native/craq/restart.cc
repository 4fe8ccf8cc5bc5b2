// Chain versions, and how a chain goes on after each change of its members. docs/craq.md, Members; Changes.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

Replica::Machine::Machine(TargetId self, ChainId chain, const StoreView& store, const Options& options,
                          uint64_t now_ms)
    : self_(self), chain_(chain), store_(store), options_(options), record_(store.chain_record()) {
  durable_record_ = record_;
  start_floor_ = record_.adopted;
  if (is(Mutant::reuse_versions_after_restart)) start_floor_ = ChainVersion{};
  if (start_floor_ != ChainVersion{}) reason_ = Reason::restarted;
  // What else the last incarnation has made durable isn't known, nor what it has granted.
  start_proposed_ = record_.proposed;
  if (record_.proposed > record_.adopted) outgrown_by_ = record_.proposed;
  const bool may_have_granted = record_.adopted != ChainVersion{} && !is(Mutant::no_start_hold);
  if (may_have_granted) start_hold_until_ms_ = now_ms + options_.peer_lease_ms;
  load_pendings();
}

// What is durable and not committed. Its base is what lies below it.
void Replica::Machine::load_pendings() {
  class Loader final : public PendingVisitor {
   public:
    explicit Loader(Machine& m) : m_(m) {}
    void visit(const PendingFacts& facts) override {
      Chunk* c = m_.chunk(facts.key);
      const Pending* below = c->pendings.last();
      Update u;
      u.key = facts.key;
      u.version = facts.chunk.version;
      u.base = below != nullptr ? below->version() : c->committed.version;
      u.base_absent = m_.newest(c).version.none();
      u.identity = facts.identity;
      u.space_epoch = facts.space_epoch;
      u.kind = facts.removal ? UpdateKind::remove : UpdateKind::replace;
      u.length_bytes = facts.removal ? 0 : facts.chunk.length_bytes;
      u.attributes = facts.chunk.attributes;
      FFS_CHECK(u.version > u.base && !u.version.none());
      Pending* p = m_.new_pending(u, c);
      p->disk = Pending::Disk::staged;
      p->loaded = true;
    }

   private:
    Machine& m_;
  } loader(*this);
  store_.each_pending(loader);
}

// ---- A new chain version --------------------------------------------------------------------

uint32_t path_of(const ChainConfig& config) {
  uint32_t count = 0;
  while (count < config.member_count && config.members[count].state == MemberState::serving) count++;
  return count;
}

uint32_t index_of(const ChainConfig& config, TargetId target) {
  uint32_t index = 0;
  while (index < config.member_count && config.members[index].target != target) index++;
  return index;
}

bool serves(const ChainConfig& config, TargetId target) {
  return index_of(config, target) < path_of(config);
}

bool syncs(const ChainConfig& config, TargetId target) {
  const uint32_t i = index_of(config, target);
  return i < config.member_count && config.members[i].state == MemberState::syncing;
}

TargetId Replica::Machine::syncing_member() const {
  if (path_count_ >= config_.member_count) return TargetId{};
  const Member& behind = config_.members[path_count_];
  return behind.state == MemberState::syncing ? behind.target : TargetId{};
}

// A target that restarted may be told what its last incarnation was meant to take part in.
bool Replica::Machine::meant_for_us(const ChainConfig& config) const {
  if (!serves(config, self_) && !syncs(config, self_)) return true;
  const uint64_t named = config.members[index_of(config, self_)].incarnation;
  return options_.incarnation == 0 || named == options_.incarnation;
}

void Replica::Machine::proposed(const ChainConfig& config) {
  const ChainVersion decided = std::max({config_.version, next_config_.version, start_floor_});
  if (poisoned() || config.version <= decided || !meant_for_us(config)) return;
  if (config.version < std::max(record_.proposed, proposal_.version)) return;
  if (config.version == proposal_.version) {
    const bool durable = !proposal_waits_ && persists_ == 0;
    if (durable) out_->push_back(ProposalPersisted{config.version});
    return;
  }
  // What is durable here tells the manager which versions this target has been a part of: one that has no
  // part in the chain keeps no proposal that leaves it out.
  const bool takes_part = serves(next_config_, self_);
  if (!takes_part && !serves(config, self_) && !syncs(config, self_)) return;
  proposal_ = config;
  proposal_waits_ = true;
  const bool left_out = takes_part && !serves(config, self_);
  if (left_out && !is(Mutant::keep_serving_when_left_out)) stand_down();
  persist_proposal();
}

// The chain may go on without this member as soon as this proposal is durable here.
void Replica::Machine::stand_down() {
  recorded_waits_ = false;
  if (phase_ != Phase::offline && phase_ != Phase::failed) go_offline(Reason::left_out);
}

// Once it is durable here, the chain may go on without those that it leaves out: not before the leases
// are over that they may hold from this member, in this incarnation or the last one. Tried at each tick.
void Replica::Machine::persist_proposal() {
  if (!proposal_waits_ || now_ms_ < start_hold_until_ms_ || poisoned() || !may_promote(proposal_)) return;
  if (granted_outside(proposal_) && !is(Mutant::persist_without_waiting_for_leases)) return;
  proposal_waits_ = false;
  record_.proposed = proposal_.version;
  outgrown_by(proposal_);
  persist_chain();
}

void Replica::Machine::outgrown_by(const ChainConfig& config) {
  for (uint32_t i = 0; i < path_of(config); i++) {
    if (!serves(config_, config.members[i].target)) outgrown_by_ = std::max(outgrown_by_, config.version);
  }
}

void Replica::Machine::recorded(const ChainConfig& config) {
  FFS_CHECK(config.member_count <= kMaxReplicas);
  if (poisoned() || config.version < start_proposed_ || !meant_for_us(config)) return;
  if (config.version <= std::max({config_.version, next_config_.version, start_floor_})) return;
  next_config_ = config;
  const uint32_t path = path_of(config);
  const bool filled = syncs(config, self_);
  recorded_waits_ = false;
  if (proposal_.version <= config.version) proposal_waits_ = false;
  if (phase_ == Phase::failed && !filled) return;  // diverged: only a sync cures it
  if (path == 0) return go_offline(Reason::members_incomplete);
  if (!serves(config, self_) && !filled) return go_offline(Reason::not_a_member);
  const bool left_out = proposal_.version > config.version && !serves(proposal_, self_);
  if (left_out && !filled && !is(Mutant::keep_serving_when_left_out)) return go_offline(Reason::left_out);
  recorded_waits_ = true;
  if (filled || phase_ == Phase::failed) keeps_serving_ = false;
  if (now_ms_ < start_hold_until_ms_) return go_offline(Reason::start_hold);
  persist_recorded();
}

// Made durable, then adopted.
void Replica::Machine::persist_recorded() {
  if (!recorded_waits_ || now_ms_ < start_hold_until_ms_ || poisoned()) return;
  recorded_waits_ = false;
  set_phase(Phase::persisting, Reason::persisting);
  outgrown_by(next_config_);
  record_.adopted = next_config_.version;
  persist_chain();
}

void Replica::Machine::persist_chain() {
  persists_++;
  out_->push_back(PersistChain{new_op(Op::Kind::chain, nullptr, nullptr), record_});
}

void Replica::Machine::chain_persisted(Outcome outcome) {
  FFS_CHECK(persists_ > 0);
  persists_--;
  if (outcome != Outcome::ok) return fail(Reason::device_failed);
  if (persists_ > 0) return;
  durable_record_ = record_;
  persisted_here_ = true;
  if (record_.proposed > record_.adopted) out_->push_back(ProposalPersisted{record_.proposed});
  if (phase_ == Phase::persisting) adopt();
}

// From here on we speak in the new version. What we knew of neighbours is void.
void Replica::Machine::adopt() {
  config_ = next_config_;
  path_count_ = path_of(config_);
  my_index_ = index_of(config_, self_);
  forget_neighbours();
  adopt_sync();
  if (!on_path()) {
    set_phase(Phase::syncing, Reason::syncing);
    return unpark();  // to be told so
  }
  begin_reconciling();
}

void Replica::Machine::forget_neighbours() {
  counter_ = 0;
  peer_lease_until_ms_ = {};
  leases_asked_ms_ = 0;
  floor_ = Version{};
  early_held_count_ = early_held_next_ = 0;
  while (Chunk* c = memory_.first()) {
    memory_.remove(c);
    c->removed = Version{};
    forget_refused(c);
    retire(c);
  }
  reconciled_ = successor_reconciled_ = resent_received_ = successor_ready_ = false;
  unreconciled_ = 0;
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    p->held = first();
    p->acked = p->sent = false;
    p->fate = Fate::unasked;
    p->chunk->below_refused = false;
    p->chunk->unreconciled = p->chunk->probed = false;
    p->chunk->probe = Version{};
  }
  for (EpochChange* e = epochs_.first(); e != nullptr;) {
    EpochChange* next = epochs_.next(e);
    e->acked = e->sent = false;
    if (!first()) answer_epoch(e, Outcome::stale_chain);  // the head may not have it
    if (!on_path()) forget_epoch(e);
    e = next;
  }
  judge_askers();
  nudged_ms_ = above_.heard_ms = below_.heard_ms = now_ms_;
}

void Replica::Machine::begin_reconciling() {
  set_phase(Phase::reconciling, Reason::reconciling);
  if (is(Mutant::serve_before_reconcile)) {
    reconciled_ = successor_reconciled_ = true;
    return serve();
  }
  for (Pending* p = order_.first(); p != nullptr && !first(); p = order_.next(p)) {
    if (p->chunk->unreconciled) continue;
    p->chunk->unreconciled = true;
    unreconciled_++;
    ask_fate(p->chunk);
  }
}

// ---- Our pendings become a part of the predecessor's -----------------------------------------

void Replica::Machine::ask_fate(const Chunk* c) {
  for (const Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) {
    if (p->fate != Fate::unasked) continue;
    Notice n{.type = NoticeType::reconcile, .key = c->key, .version = p->version()};
    n.identity = p->update.identity;
    notify(predecessor(), n);
  }
}

// The successor asks what became of one of its pendings.
void Replica::Machine::reconcile_received(const Notice& n) {
  if (!reconciled_) return;
  Notice answer{.type = NoticeType::reconcile_answer, .key = n.key, .version = n.version};
  answer.number = static_cast<uint64_t>(fate_here(n));
  const Chunk* c = chunk(n.key);
  answer.flag = !c->committed.version.none() || (c->dirty() && !c->pendings.first()->fallen);
  notify(successor(), answer);
}

Fate Replica::Machine::fate_here(const Notice& n) {
  const Chunk* c = chunk(n.key);
  if (const Pending* p = find_pending(c, n.version); p != nullptr) {
    return p->fallen ? Fate::unknown : Fate::pending;
  }
  if (c->committed.version >= n.version) return Fate::committed;
  // What isn't pending below a pending version was committed, and removed since.
  const Pending* oldest = c->pendings.first();
  if (oldest != nullptr && !oldest->unfounded && oldest->version() > n.version) return Fate::committed;
  if (n.identity.client.value == 0) return Fate::unknown;
  // Committed and removed since: the retry table knows. A later sequence means that this one ended,
  // and a refused one would have been dropped below before it ended here.
  std::optional<RetryEntry> entry = store_.retry(n.identity.client, n.identity.channel);
  if (!entry.has_value()) return Fate::unknown;
  const bool done = entry->sequence == n.identity.sequence && entry->version == n.version &&
                    entry->state == RetryState::done;
  return done || entry->sequence > n.identity.sequence ? Fate::committed : Fate::unknown;
}

void Replica::Machine::reconcile_answered(const Notice& n) {
  Chunk* c = find_chunk(n.key);
  if (c == nullptr || !c->unreconciled) return;
  Pending* asked = find_pending(c, n.version);
  if (asked == nullptr || n.number > static_cast<uint64_t>(Fate::committed)) return;
  asked->fate = static_cast<Fate>(n.number);
  c->absent_above = !n.flag;
  settle(c);
}

// All fates are known: what the predecessor has committed is committed, what it has pending stays,
// the rest never was.
void Replica::Machine::settle(Chunk* c) {
  if (c->staging != nullptr || c->refusing > 0) return;  // comes again when the disk is done
  Pending* committed = nullptr;
  Pending* kept = nullptr;
  for (Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) {
    if (p->fate == Fate::unasked) return;
    if (p->fate == Fate::committed) committed = p;
    if (p->fate != Fate::unknown) kept = p;
  }
  if (c->absent_above && kept == committed) {
    // A removal of the collection's leaves no retry entry, but it leaves no chunk above either.
    const ChunkFacts& left = committed != nullptr ? committed->after : c->committed;
    Pending* p = committed != nullptr ? c->pendings.next(committed) : c->pendings.first();
    while (p != nullptr && !p->removal()) p = c->pendings.next(p);
    if (!left.version.none() && p != nullptr) committed = kept = p;
  }
  if (is(Mutant::commit_unknown_pendings)) committed = kept = c->pendings.last();
  c->unreconciled = false;
  FFS_CHECK(unreconciled_ > 0);
  unreconciled_--;
  const Version commit_to = committed != nullptr ? committed->version() : Version{};
  while (c->pendings.last() != kept) drop(c->pendings.last());
  while (Pending* p = c->pendings.first()) {
    if (p->version() > commit_to || p->fallen || p->disk != Pending::Disk::staged) break;
    commit(p, /*with_stage=*/false);
  }
}

// Given up: nobody has committed it, nor told a client that it was done. Durable before we are
// reconciled, so that it can't come back once the chain has gone on without it.
void Replica::Machine::drop(Pending* p) {
  p->outcome = Outcome::dropped;
  if (p->disk == Pending::Disk::staged) {
    drops_++;
    OpId op = new_op(Op::Kind::drop, nullptr, nullptr);
    out_->push_back(Refuse{op, p->update.key, p->version(), p->update.identity, Outcome::dropped});
  }
  resolve(p, Pending::State::refused);
}

void Replica::Machine::become_reconciled() {
  reconciled_ = true;
  set_phase(Phase::resuming, Reason::resuming);
  if (!first()) notify(predecessor(), Notice{.type = NoticeType::reconciled});
  if (!last()) {
    notify(successor(), Notice{.type = NoticeType::invite});
    return;
  }
  // The last member needs no answer from below: a chain of one commits what it has, and what was
  // refused while there was a successor is journalled.
  for (Pending* p = order_.first(); p != nullptr;) {
    const bool oldest = ChunkPendings::prev(p) == nullptr;
    if (oldest && p->held && p->disk == Pending::Disk::staged && !p->fallen) {
      progress(p->chunk);
      p = order_.first();
    } else {
      if (p->fallen && root(p->chunk) == p) advance_refusal(p->chunk);
      p = order_.next(p);
    }
  }
  finish_durable_epochs();
  start_sync_source();
}

void Replica::Machine::invite_received() {
  if (phase_ == Phase::reconciling || !resent_received_) nudge(false);
}

// ---- The pendings come down, `ready` goes up --------------------------------------------------

void Replica::Machine::reconciled_received() {
  successor_reconciled_ = true;
  if (!reconciled_) return;
  nudge(false);
}

void Replica::Machine::maybe_send_resent() {
  if (last() || !reconciled_ || !successor_reconciled_ || successor_ready_) return;
  if (!first() && !resent_received_) return;
  for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (!p->sent && !p->fallen) return;  // its payload is being loaded
  }
  bool epochs_known = true;
  for (EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (!e->sent) send_epoch(e);
    epochs_known &= e->acked;
  }
  if (!epochs_known) return;
  notify(successor(), Notice{.type = NoticeType::resent});
}

void Replica::Machine::resent_received() {
  if (!reconciled_) return;
  resent_received_ = true;
  if (serving()) {
    notify(predecessor(), Notice{.type = NoticeType::ready});
  } else {
    maybe_send_resent();
  }
}

void Replica::Machine::ready_received() {
  successor_ready_ = true;
}

void Replica::Machine::maybe_serve() {
  if (phase_ != Phase::resuming || (!first() && !resent_received_)) return;
  if (last() ? !order_.empty() : !successor_ready_) return;
  serve();
}

// The last member serves by now, too, and answers what it couldn't before.
void Replica::Machine::serve() {
  keeps_serving_ = true;
  set_phase(Phase::serving, Reason::none);
  if (!first()) notify(predecessor(), Notice{.type = NoticeType::ready});
  judge_askers();
  unpark();
}

// Says again what the neighbours haven't answered. On a new connection all pendings go again.
void Replica::Machine::nudge(bool reconnected) {
  nudged_ms_ = now_ms_;
  if (!acts() || !on_path()) return;
  if (!reconciled_) {
    for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
      if (ChunkPendings::prev(p) == nullptr && p->chunk->unreconciled) ask_fate(p->chunk);
    }
    return;
  }
  if (!first() && !resent_received_) notify(predecessor(), Notice{.type = NoticeType::reconciled});
  if (last()) return;
  if (!successor_reconciled_) return notify(successor(), Notice{.type = NoticeType::invite});
  if (reconnected) {
    for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) p->sent = false;
  }
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (!p->sent && !p->fallen) send_ready(p->chunk);
    if (p->fallen && root(p->chunk) == p) advance_refusal(p->chunk);
  }
  maybe_send_resent();
}

// ---- Phases -----------------------------------------------------------------------------------

void Replica::Machine::set_phase(Phase phase, Reason reason) {
  if (phase == phase_ && reason == reason_) return;
  phase_ = phase;
  reason_ = reason;
  out_->push_back(StateChanged{serving(), reason, config_.version});
}

void Replica::Machine::go_offline(Reason reason) {
  keeps_serving_ = false;
  set_phase(Phase::offline, reason);
  judge_askers();
  unpark();
}

// Until restart, or until it is synced. What waits for a result waits for its deadline: its outcome is
// unknown.
void Replica::Machine::fail(Reason reason) {
  if (poisoned()) return;
  keeps_serving_ = false;
  set_phase(Phase::failed, reason);
  judge_askers();
  unpark();
}

ReplicaStatus Replica::Machine::status() const {
  ReplicaStatus s;
  s.serving = serving();
  s.reason = reason_;
  s.chain_version = config_.version;
  s.persisted = durable_record_;
  s.persisted_here = persisted_here_;
  s.member_count = config_.member_count;
  s.my_index = my_index_;
  s.pendings = pending_count_;
  s.leased = leased();
  s.suspect = suspect_;
  s.waiting = static_cast<uint32_t>(request_pool_.used());
  const bool acting = phase_ != Phase::offline && phase_ != Phase::failed && path_count_ > 0;
  if (acting && on_path()) s.state = MemberState::serving;
  if (acting && !on_path()) s.state = MemberState::syncing;
  if (phase_ != Phase::offline && phase_ != Phase::failed) sync_source_.fill(&s);
  s.damaged = repairer_.damaged_count();
  s.repaired = repairer_.repaired_count();
  return s;
}

}  // namespace ffs::craq
