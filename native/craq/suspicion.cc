// A neighbour that owes an answer and isn't heard of: the manager, which hears of both, may have the chain
// go on without it. Owing alone says little: whoever is behind it may be the cause. So a neighbour
// that owes is asked whether it is there, by asking it for a lease. docs/craq.md, Members.
#include "craq/machine.h"

namespace ffs::craq {

void Replica::Machine::heard_from(TargetId target) {
  if (!first() && target == predecessor()) above_.heard_ms = now_ms_;
  if (!last() && target == successor()) below_.heard_ms = now_ms_;
}

void Replica::Machine::watch_neighbours() {
  // After a long pause messages wait to be read: they come before the judgement.
  const bool slept = now_ms_ - watched_ms_ >= options_.suspect_ms / 4;
  watched_ms_ = now_ms_;
  if (slept) above_.heard_ms = below_.heard_ms = now_ms_;
  suspect_ = TargetId{};
  if (options_.suspect_ms == 0 || !acts() || !on_path()) return;
  if (!first() && silent(above_, predecessor(), owes_above())) suspect_ = predecessor();
  if (!last() && silent(below_, successor(), owes_below())) suspect_ = successor();
}

bool Replica::Machine::silent(Watched& neighbour, TargetId target, bool owes) {
  if (!owes) neighbour.heard_ms = now_ms_;
  const uint64_t silence_ms = now_ms_ - neighbour.heard_ms;
  const bool ask =
      silence_ms >= options_.suspect_ms / 4 && now_ms_ - neighbour.asked_ms >= options_.resend_ms;
  if (ask) {
    neighbour.asked_ms = now_ms_;
    notify(target, Notice{.type = NoticeType::lease_ask, .number = now_ms_});
  }
  return silence_ms >= options_.suspect_ms;
}

bool Replica::Machine::owes_above() const {
  return !reconciled_ || !resent_received_;
}

bool Replica::Machine::owes_below() const {
  if (!reconciled_) return false;
  if (!successor_reconciled_ || !successor_ready_) return true;
  for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (p->fallen || (p->sent && !p->acked)) return true;
  }
  for (const EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (!e->acked) return true;
  }
  return false;
}

}  // namespace ffs::craq
