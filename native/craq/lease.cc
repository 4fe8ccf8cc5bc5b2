// Who may answer clients: the holder of a lease from the manager, or of one from every other serving
// member. And the other side of it: what this member has granted is waited out before it makes a
// version durable that goes on without the holder. docs/craq.md, Leases.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

// The holder counts from asking and allows for clocks that run differently; the granter from answering.
// Each has its own length until the last of them was restarted with a new one: the shorter one holds.
uint64_t Replica::Machine::held_for_ms(uint64_t granted_ms) const {
  const uint64_t lease_ms = std::min(options_.peer_lease_ms, granted_ms);
  return lease_ms - lease_ms / 16;
}

// ---- The holder's side --------------------------------------------------------------------------

bool Replica::Machine::leased() const {
  if (options_.peer_lease_ms == 0 || now_ms_ < manager_lease_until_ms_) return true;
  if (!on_path()) return false;
  // A version that isn't adopted here may have a member that this one can't ask, and that leads by now.
  if (outgrown_by_ > config_.version && !is(Mutant::lone_without_persisted_check)) return false;
  for (uint32_t i = 0; i < path_count_; i++) {
    if (i != my_index_ && now_ms_ >= peer_lease_until_ms_[i]) return false;
  }
  return true;  // the only serving member needs nobody's: nobody else may lead
}

// False: the request was answered.
bool Replica::Machine::lease_allows(Request* r) {
  if (leased()) return true;
  Reply no;
  no.outcome = Outcome::offline;
  no.reason = Reason::no_lease;
  reply(r, no);
  return false;
}

void Replica::Machine::lease_received(uint64_t until_ms) {
  const bool before = leased();
  manager_lease_until_ms_ = std::max(manager_lease_until_ms_, until_ms);
  if (!before && leased()) unpark();
}

// The manager's lease is asked for every quarter of the failure timeout, five peer leases: less than
// half of it left means that the manager doesn't answer.
void Replica::Machine::ask_leases() {
  const uint64_t lease_ms = options_.peer_lease_ms;
  if (lease_ms == 0 || !acts() || !on_path() || manager_lease_until_ms_ > now_ms_ + lease_ms * 5 / 2) return;
  if (leases_asked_ms_ != 0 && now_ms_ - leases_asked_ms_ < std::min(lease_ms, shortest_grant_ms_) / 3)
    return;
  leases_asked_ms_ = now_ms_;
  for (uint32_t i = 0; i < path_count_; i++) {
    if (i != my_index_)
      notify(config_.members[i].target, Notice{.type = NoticeType::lease_ask, .number = now_ms_});
  }
}

void Replica::Machine::lease_granted(TargetId from, const Notice& n) {
  const uint32_t i = index_of(config_, from);
  if (i >= path_count_ || n.outcome != Outcome::ok || n.number > now_ms_) return;
  const bool before = leased();
  shortest_grant_ms_ = std::min(shortest_grant_ms_, n.other.update);
  peer_lease_until_ms_[i] = std::max(peer_lease_until_ms_[i], n.number + held_for_ms(n.other.update));
  if (!before && leased()) unpark();
}

// ---- The granter's side -------------------------------------------------------------------------

// Also the answer to whoever wants to know that this member is here (suspicion.cc): then without a grant.
void Replica::Machine::lease_asked(TargetId from, const Notice& n) {
  if (index_of(config_, from) >= path_count_) return;
  Notice answer{.type = NoticeType::lease_grant, .number = n.number};
  answer.other.update = options_.peer_lease_ms;
  if (!grant(from)) answer.outcome = Outcome::offline;
  notify(from, answer);
}

bool Replica::Machine::grant(TargetId to) {
  if (proposal_.version > config_.version && !serves(proposal_, to)) return false;
  Grant* slot = nullptr;
  for (Grant& g : grants_) {
    if (g.target == to) {
      slot = &g;
      break;
    }
    if (now_ms_ >= g.until_ms) slot = &g;
  }
  if (slot == nullptr) return false;
  *slot = Grant{to, now_ms_ + options_.peer_lease_ms};
  return true;
}

// Does a lease granted by this member still hold for a target that `config` leaves out?
bool Replica::Machine::granted_outside(const ChainConfig& config) const {
  return std::any_of(grants_.begin(), grants_.end(),
                     [&](const Grant& g) { return now_ms_ < g.until_ms && !serves(config, g.target); });
}

}  // namespace ffs::craq
