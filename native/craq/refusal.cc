// The story of a refusal: some member has no room. It is told to the last member first, then
// journalled on the way up, so that when the client hears of it no member holds the update.
// docs/craq.md, Refusals.
#include "craq/machine.h"

namespace ffs::craq {

// `p` is refused, and what is built on it falls.
void Replica::Machine::fall(Pending* p, Outcome outcome) {
  if (p->fallen) return;
  p->outcome = outcome;
  p->fallen = true;
  for (Pending* q = ChunkPendings::next(p); q != nullptr; q = ChunkPendings::next(q)) {
    if (q->state == Pending::State::refusing) continue;  // its journal record is on its way
    q->fallen = true;
    q->outcome = Outcome::fell_with_base;
  }
  p->chunk->probe = Version{};
}

// The oldest fallen update of the chunk; all later ones have fallen too.
Pending* Replica::Machine::root(const Chunk* c) const {
  Pending* found = nullptr;
  for (Pending* p = c->pendings.last(); p != nullptr && p->fallen; p = c->pendings.prev(p)) found = p;
  return found;
}

void Replica::Machine::advance_refusal(Chunk* c) {
  Pending* r = root(c);
  if (r == nullptr || c->refusing > 0 || !acts()) return;   // goes on in the next version
  if (c->staging != nullptr && c->staging->fallen) return;  // until the disk is done with it
  // Each by itself, the oldest first: members behind that never got it have to answer for it alike.
  const Pending* told = r;
  while (told != nullptr && told->below_refused) told = ChunkPendings::next(told);
  if (!last() && told != nullptr) {
    r->sent_ms = now_ms_;
    if (!reconciled_ || !successor_reconciled_) return;  // nudged when they are
    Notice n{.type = NoticeType::cancel, .outcome = told->outcome, .key = c->key, .version = told->version()};
    n.identity = told->update.identity;
    return notify(successor(), n);
  }
  if (sync_holds_back_refusal(c, r)) return;
  // Newest first: a crash in between leaves a sequence without holes.
  for (Pending* p = c->pendings.last();; p = c->pendings.prev(p)) {
    if (!p->reached) sync_source_.refused(p->update.identity);
    p->state = Pending::State::refusing;
    c->refusing++;
    OpId op = new_op(Op::Kind::refuse, nullptr, p);
    out_->push_back(Refuse{op, c->key, p->version(), p->update.identity, p->outcome});
    if (p == r) return;
  }
}

void Replica::Machine::refuse_durable(Pending* p, Outcome outcome) {
  Chunk* c = p->chunk;
  FFS_CHECK(c->refusing > 0);
  if (outcome != Outcome::ok) return fail(Reason::device_failed);
  if (--c->refusing > 0) return;
  Version version;
  UpdateIdentity identity;
  Outcome why = Outcome::ok;
  while (Pending* q = c->pendings.last()) {
    if (q->state != Pending::State::refusing) break;
    version = q->version();
    identity = q->update.identity;
    why = q->outcome;
    if (!first()) remember_refused(c, version, identity, why);
    resolve(q, Pending::State::refused);
  }
  if (!first()) send_refusal(c, version, identity, why);
  if (c->unreconciled) settle(c);
  progress(c);  // an older one may have fallen meanwhile
  maybe_send_resent();
}

// From below: all members behind us have dropped it.
void Replica::Machine::refusal_received(const Notice& n) {
  Chunk* c = find_chunk(n.key);
  Pending* p = c != nullptr ? find_pending(c, n.version) : nullptr;
  if (p == nullptr) return;
  if (!p->fallen) fall(p, n.outcome);
  p->below_refused = true;
  advance_refusal(c);
}

// From above: it is refused there. We drop it, and those behind us first.
void Replica::Machine::cancel_received(const Notice& n) {
  Chunk* c = chunk(n.key);
  if (const Tomb* t = tomb_of(c, n.version); t != nullptr) {
    return send_refusal(c, n.version, t->identity, t->outcome);
  }
  if (Pending* p = find_pending(c, n.version); p != nullptr) {
    fall(p, n.outcome);
    return advance_refusal(c);
  }
  if (c->committed.version >= n.version || c->removed >= n.version || n.version < floor_) return;
  // It never came here, so nor to those behind us. Whoever needs no entry in the retry table is told at once.
  const bool older = c->dirty() && c->pendings.last()->version() > n.version;
  if (n.identity.client.value == 0 || older) {
    remember_refused(c, n.version, n.identity, n.outcome);
    return send_refusal(c, n.version, n.identity, n.outcome);
  }
  // The others are journalled here too: this member may lead the chain one day, and has to answer alike.
  Update refused;
  refused.key = n.key;
  refused.version = n.version;
  refused.base = newest(c).version;
  refused.identity = n.identity;
  Pending* p = new_pending(refused, c);
  p->unfounded = true;
  fall(p, n.outcome);
  advance_refusal(c);
}

void Replica::Machine::send_refusal(const Chunk* c, const Version& v, const UpdateIdentity& identity,
                                    Outcome outcome) {
  Notice n{.type = NoticeType::refusal, .outcome = outcome, .key = c->key, .version = v};
  n.identity = identity;
  notify(predecessor(), n);
}

void Replica::Machine::remember_refused(Chunk* c, const Version& v, const UpdateIdentity& identity,
                                        Outcome outcome) {
  if (is(Mutant::forget_refusals) || tomb_of(c, v) != nullptr) return;
  Tomb* t = tomb_pool_.take();
  t->version = v;
  t->identity = identity;
  t->outcome = outcome;
  t->next = c->tombs;
  c->tombs = t;
  keep_in_memory(c, v);
}

const Tomb* Replica::Machine::tomb_of(const Chunk* c, const Version& v) const {
  const Tomb* t = c->tombs;
  while (t != nullptr && t->version != v) t = t->next;
  return t;
}

void Replica::Machine::forget_refused(Chunk* c) {
  while (Tomb* t = c->tombs) {
    c->tombs = t->next;
    tomb_pool_.give(t);
  }
  c->remember_until = Version{};
}

}  // namespace ffs::craq
