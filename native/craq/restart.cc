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

// ---- A new chain version is ours ---------------------------------------------------------------

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
  shortest_grant_ms_ = UINT64_MAX;
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
    p->below_refused = false;
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
    commit(p);
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
    for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
      p->sent = false;
      if (p->version() == p->chunk->probe) p->chunk->probed = false;
    }
  }
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (!p->sent && !p->fallen) send_ready(p->chunk);
    if (p->fallen && root(p->chunk) == p) advance_refusal(p->chunk);
  }
  maybe_send_resent();
}

}  // namespace ffs::craq
