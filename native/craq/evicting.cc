// Chunks that are removed to make room, or because they have expired. The server chooses; here is whether it
// may be, and the removal, which goes down the chain like any other. docs/craq.md, Eviction.
#include "craq/machine.h"

namespace ffs::craq {

// By this member's view of the manager's time: members may differ by as much as their last contact with it.
bool Replica::Machine::expired(const ChunkFacts& facts) const {
  return !facts.version.none() && facts.attributes.expired(store_.manager_ms()) &&
         !is(Mutant::expired_is_there);
}

Outcome Replica::Machine::room_for(const ClientUpdate& u) const {
  if (!carries_payload(u.kind) && u.kind != UpdateKind::truncate) return Outcome::ok;
  return store_.admit(u.key, u.kind, u.length_bytes, numbered_bytes_);
}

// Everything is checked in the step that numbers the removal: what comes later finds it pending, and waits
// for it (a create) or asks what is committed (a read).
EvictionAnswer Replica::Machine::evict(const EvictionOrder& order) {
  if (!serving() || !first() || !leased()) return EvictionAnswer::not_head;
  if (pending_count_ >= options_.max_pendings / 2) return EvictionAnswer::busy;
  const Chunk* known = find_chunk(order.key);
  const bool in_use = known != nullptr && (known->dirty() || known->refusing > 0 || !known->turn.empty());
  if (in_use && !is(Mutant::evict_beside_pendings)) return EvictionAnswer::changed;
  const ChunkFacts facts = known != nullptr ? newest(known) : store_.committed(order.key);
  if (facts.version.none()) return EvictionAnswer::changed;
  const bool as_chosen =
      facts.version == order.version &&
      (order.expired ? facts.attributes.expired(store_.manager_ms())
                     : !facts.attributes.pinned() && store_.last_access(order.key) == order.last_access);
  if (!as_chosen && !is(Mutant::evict_whatever_happened)) return EvictionAnswer::changed;
  ClientUpdate removal;
  removal.key = order.key;
  removal.kind = UpdateKind::remove;
  removal.space_epoch = least_epoch(order.key.space());
  Pending* p = number(removal, chunk(order.key));
  p->eviction = true;
  begin_update(p);
  return EvictionAnswer::ordered;
}

}  // namespace ffs::craq
