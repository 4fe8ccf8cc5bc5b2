// What a ring does when the routing changes, and about chains that are down (docs/ring.md, Routing).
#include <algorithm>
#include <cerrno>

#include "client/ring.h"

namespace ffs::client {

using wire::Detail;

namespace {

constexpr uint64_t kMsNs = 1000000;
// A request of a chain that has been down for long still asks the members that should serve: the
// manager may be the one who doesn't hear of them.
constexpr uint64_t kLastTryMs = 250;

}  // namespace

void Ring::take_news() {
  const bool rung = waker_->rung();
  if (rung) waker_->quiet();
  adopt_routing();
  if (rung) resume_parked(false);  // a capability may be a newer one
}

void Ring::adopt_routing() {
  if (client_->routing_generation() == routing_generation_) return;
  routing_ = client_->routing(&routing_generation_);
  last_chain_ = nullptr;
  link_by_endpoint_.assign(routing_->endpoints.size(), nullptr);
  leave_old_places();
  watch_chains();
  resume_parked(true);
}

// Whether a request that is on its way to a place belongs there under the present routing.
bool Ring::fits_routing(const Slot& slot) {
  const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
  if (chain == nullptr || (slot.sqe.target != 0 && !slot.update)) return true;
  const Member* member = nullptr;
  if (chooses_replica(slot)) {
    const uint32_t i = chain->index_of(slot.target);
    if (i < kMaxReplicas && chain->members[i].serving) member = &chain->members[i];
  } else {
    member = chain->head();
    // None serves: it may have been the last one, and answer still.
    if (member == nullptr) return true;
  }
  return member != nullptr && member->target == slot.target && link_of(*member) == slot.link;
}

// Requests whose replica doesn't serve any more go on at once, with the same identity.
void Ring::leave_old_places() {
  std::vector<uint32_t> leaving;
  for (size_t l = 0; l < links_.size(); l++) {  // fits_routing may add links
    for (const SlotList* list : {&links_[l]->in_flight, &links_[l]->waiting}) {
      for (uint32_t i = list->head; i != kNoSlot; i = slots_[i].next) {
        if (!fits_routing(slots_[i])) leaving.push_back(i);
      }
    }
  }
  for (const uint32_t i : leaving) {
    Slot& slot = slots_[i];
    const bool in_flight = slot.state == SlotState::kInFlight;
    if (!in_flight && slot.state != SlotState::kQueued) continue;  // moved by an earlier one
    if (slot.list == nullptr || fits_routing(slot)) continue;
    // The rest of its payload may not be sent any more, so the frame can't be finished.
    if (slot.payload_queued) {
      fail_link(*slot.link, {Ending::kLost});
      continue;
    }
    detach(i);
    if (slot.is_hedge()) {
      end_hedge(i, {Ending::kLost});
      continue;
    }
    if (in_flight) stats_.retries++;
    slot.lost_try |= in_flight && slot.update;
    slot.attempt = std::min(slot.attempt, 1u);
    slot.tried = 0;
    if (!slice_is_free(i, !in_flight)) {
      quarantine(i, false, 0, {Ending::kLost});
    } else {
      go_on(i);
    }
  }
}

// --- chains that are down ---------------------------------------------------------------------

// The request needs a chain of which routing says that no serving member is there: it ends when that
// has been so for too long.
void Ring::watch_chain(Slot& slot, const Chain& chain) {
  if (slot.unavailable_ns != ~0ull) return;
  const uint64_t since_ns = client_->first_needed_ns(chain.id, now_ns_);
  slot.unavailable_ns = since_ns + client_->options().unavailable_timeout_ms * kMsNs;
  if (chain.head() != nullptr) {
    slot.unavailable_ns = std::max(slot.unavailable_ns, now_ns_ + kLastTryMs * kMsNs);
  }
  note_timer(slot.unavailable_ns);
}

void Ring::watch_chains() {
  if (outstanding() == 0) return;
  for (uint32_t i = 0; i < slots_.size(); i++) {
    Slot& slot = slots_[i];
    if (slot.state == SlotState::kFree || slot.state == SlotState::kFinished ||
        slot.state == SlotState::kPrepared) {
      continue;
    }
    const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
    if (chain == nullptr || chain->available) {
      slot.unavailable_ns = ~0ull;
    } else {
      watch_chain(slot, *chain);
    }
  }
}

// Its time is over: the request's own, or its chain has been down for too long.
void Ring::expire(uint32_t index) {
  Slot& slot = slots_[index];
  const bool unavailable = slot.unavailable_ns <= now_ns_ && slot.unavailable_ns < slot.deadline_ns;
  if (unavailable) return give_up(index, -EHOSTDOWN, Detail::kNotServing);
  give_up(index, -ETIMEDOUT, slot.last_detail);
}

}  // namespace ffs::client
