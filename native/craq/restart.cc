// Chain versions, and how a chain comes back after its members restarted. docs/craq.md, Restart.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

Replica::Machine::Machine(TargetId self, ChainId chain, const StoreView& store, const Options& options)
    : self_(self), chain_(chain), store_(store), options_(options), record_(store.chain_record()) {
  durable_record_ = record_;
  start_floor_ = record_.adopted;
  if (is(Mutant::reuse_versions_after_restart)) start_floor_ = ChainVersion{};
  if (start_floor_ != ChainVersion{}) reason_ = Reason::restarted;
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

void Replica::Machine::proposed(const ChainConfig& config) {
  if (phase_ == Phase::failed || config.version < record_.proposed) return;
  record_.proposed = config.version;
  persist_chain();
}

void Replica::Machine::recorded(const ChainConfig& config) {
  FFS_CHECK(config.member_count <= kMaxReplicas);
  if (phase_ == Phase::failed) return;
  if (config.version <= std::max({config_.version, next_config_.version, start_floor_})) return;
  next_config_ = config;
  bool all_serve = config.member_count > 0;
  bool member = false;
  for (uint32_t i = 0; i < config.member_count; i++) {
    all_serve &= config.members[i].state == MemberState::serving;
    member |= config.members[i].target == self_;
  }
  if (!member || !all_serve) {
    return go_offline(member ? Reason::members_incomplete : Reason::not_a_member);
  }
  set_phase(Phase::persisting, Reason::persisting);
  record_.adopted = config.version;
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
  if (persists_ > 0 || phase_ == Phase::failed) return;
  durable_record_ = record_;
  persisted_here_ = true;
  if (record_.proposed > record_.adopted) out_->push_back(ProposalPersisted{record_.proposed});
  if (phase_ == Phase::persisting) adopt();
}

// From here on we speak in the new version. What we knew of neighbours is void.
void Replica::Machine::adopt() {
  config_ = next_config_;
  my_index_ = 0;
  while (config_.members[my_index_].target != self_) my_index_++;
  counter_ = 0;
  floor_ = Version{};
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
    p->chunk->below_refused = p->journal_only;
    p->chunk->unreconciled = false;
  }
  for (EpochChange* e = epochs_.first(); e != nullptr;) {
    EpochChange* next = epochs_.next(e);
    e->acked = false;
    if (!first()) finish_epoch(e);
    e = next;
  }
  for (Request* r = requests_.first(); r != nullptr; r = requests_.next(r)) {
    if (r->state != Request::State::asking) continue;
    drop_op(r->op);
    r->op = 0;
    r->state = Request::State::judging;
    run_.push(r);
  }
  nudged_ms_ = now_ms_;
  set_phase(Phase::reconciling, Reason::reconciling);
  if (is(Mutant::serve_before_reconcile)) {
    reconciled_ = successor_reconciled_ = true;
    return serve();
  }
  for (Pending* p = order_.first(); p != nullptr && !first(); p = order_.next(p)) {
    if (p->chunk->unreconciled) continue;
    p->chunk->unreconciled = true;
    unreconciled_++;
    notify(predecessor(), Notice{.type = NoticeType::reconcile, .key = p->update.key});
  }
}

// ---- Our pendings become a part of the predecessor's -----------------------------------------

// The successor asks what we hold of a chunk.
void Replica::Machine::reconcile_received(const Notice& n) {
  if (!reconciled_) return;
  const Chunk* c = chunk(n.key);
  Notice answer{.type = NoticeType::reconcile_answer, .key = n.key, .version = c->committed.version};
  answer.flag = !c->committed.version.none();
  for (const Pending* p = c->pendings.first(); p != nullptr && !p->fallen; p = c->pendings.next(p)) {
    answer.other = p->version();
  }
  notify(successor(), answer);
}

// What the predecessor has committed is committed, what it has pending stays, the rest never was.
void Replica::Machine::reconcile_answered(const Notice& n) {
  Chunk* c = find_chunk(n.key);
  if (c == nullptr || !c->unreconciled) return;
  if (c->staging != nullptr || c->refusing > 0) return;  // asked again when the disk is done
  c->unreconciled = false;
  FFS_CHECK(unreconciled_ > 0);
  unreconciled_--;
  Version committed = n.flag ? n.version : Version{};
  Version kept = std::max(committed, n.other);
  if (!n.flag && n.other.none()) {
    // The predecessor has nothing: it has committed our last removal, or never saw any of it.
    for (Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) {
      if (p->removal()) committed = kept = p->version();
    }
  }
  while (Pending* p = c->pendings.last()) {
    if (p->version() <= kept) break;
    drop(p);
  }
  while (Pending* p = c->pendings.first()) {
    if (p->version() > committed || p->fallen || p->disk != Pending::Disk::staged) break;
    commit(p, /*with_stage=*/false);
  }
}

// Given up: nobody has committed it, nor told a client that it was done.
void Replica::Machine::drop(Pending* p) {
  p->outcome = Outcome::dropped;
  if (p->disk == Pending::Disk::staged) {
    OpId op = new_op(Op::Kind::refuse, nullptr, nullptr);
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
  if (!first()) return;
  // A chain of one commits what it has.
  for (Pending* p = order_.first(); p != nullptr;) {
    const bool oldest = ChunkPendings::prev(p) == nullptr;
    if (oldest && p->disk == Pending::Disk::staged && !p->fallen) {
      progress(p->chunk);
      p = order_.first();
    } else {
      p = order_.next(p);
    }
  }
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

void Replica::Machine::serve() {
  set_phase(Phase::serving, Reason::none);
  if (!first()) notify(predecessor(), Notice{.type = NoticeType::ready});
  unpark();
}

// Says again what the neighbours haven't answered. On a new connection all pendings go again.
void Replica::Machine::nudge(bool reconnected) {
  nudged_ms_ = now_ms_;
  if (config_.version == ChainVersion{} || phase_ == Phase::offline || phase_ == Phase::persisting) return;
  if (!reconciled_) {
    for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
      bool oldest = ChunkPendings::prev(p) == nullptr;
      if (!oldest || !p->chunk->unreconciled) continue;
      notify(predecessor(), Notice{.type = NoticeType::reconcile, .key = p->update.key});
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
  set_phase(Phase::offline, reason);
  unpark();
}

// Until restart. What waits for a result waits for its deadline: its outcome is unknown.
void Replica::Machine::fail(Reason reason) {
  if (phase_ == Phase::failed) return;
  set_phase(Phase::failed, reason);
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
  s.waiting = static_cast<uint32_t>(request_pool_.used());
  return s;
}

}  // namespace ffs::craq
