// What is sent once more: because the successor lacks what an update is built on, or because the chain
// has a new version. docs/craq.md, When the base isn't there, and Changes.
#include "craq/machine.h"

namespace ffs::craq {

// The successor lacks what an update is built on: it gets all above its newest again, in order.
void Replica::Machine::missing_received(const Notice& n) {
  Chunk* c = find_chunk(n.key);
  Pending* lacking = c != nullptr ? find_pending(c, n.version) : nullptr;
  if (lacking == nullptr) return;
  // It says so of every update behind the gap: one answer is enough.
  if (lacking->repeated_ms != 0 && now_ms_ - lacking->repeated_ms < options_.resend_ms / 4) return;
  c->probe = Version{};
  send_again(c, n.other);
  maybe_send_resent();
}

void Replica::Machine::send_again(Chunk* c, const Version& above) {
  for (Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) {
    if (p->version() <= above) continue;
    p->sent = false;
    p->repeated_ms = now_ms_;
  }
  send_ready(c);
}

// After a restart the payload is only in the store. True if `p` has to wait for it.
bool Replica::Machine::load_first(Pending* p) {
  if (!p->loaded || p->removal() || p->after.length_bytes == 0) return false;
  if (p->update.payload != kNoBuffer) return false;
  if (p->obtaining || phase_ == Phase::offline) return true;
  if (p->load_op == 0) {
    p->load_op = new_op(Op::Kind::load, nullptr, p);
    out_->push_back(Load{p->load_op, p->update.key, p->version(), p->after.length_bytes});
  }
  return true;
}

void Replica::Machine::loaded(Pending* p, Outcome outcome, BufferRef payload) {
  p->load_op = 0;
  if (phase_ == Phase::offline) return release(payload);  // loaded again when it is to be sent
  if (outcome == Outcome::corrupt) {
    release(payload);
    p->obtaining = true;
    return repairer_.obtain(p->update.key, p->version());
  }
  if (outcome != Outcome::ok) return fail(Reason::device_failed);
  p->update.payload = payload;
  send_ready(p->chunk);
  maybe_send_resent();
}

// After a restart the successor may have committed a removal that is pending here, and forgotten
// the chunk. What led to that removal must not be done, still less refused, a second time: so the
// last removal goes first, and the rest when the answer is `missing` (or nothing is left).
void Replica::Machine::probe(Chunk* c) {
  c->probed = true;
  c->probe = Version{};
  Pending* removal = c->pendings.last();
  while (removal != nullptr && !(removal->removal() && removal->version().chain < config_.version)) {
    removal = c->pendings.prev(removal);
  }
  if (removal == nullptr || removal == c->pendings.first() || removal->fallen) return;
  c->probe = removal->version();
  send(removal);
}

}  // namespace ffs::craq
