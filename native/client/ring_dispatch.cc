// Where requests go, and what happens when a try ends (docs/ring.md, Retries and Buffers).
#include <algorithm>
#include <bit>

#include "client/ring.h"

namespace ffs::client {

using wire::Detail;

namespace {

constexpr uint64_t kMsNs = 1000000;
constexpr uint64_t kQuarantineRetryMs = 100;
constexpr uint64_t kCapabilityRetryMs = 1000;
constexpr uint64_t kBudgetLookMs = 50;
// Costs of a replica beside the bytes that it has in flight: which counts more.
constexpr uint64_t kRemoteCost = 1ull << 20;
constexpr uint64_t kBeatenCost = 1ull << 46;
constexpr uint64_t kDownCost = 1ull << 48;
constexpr uint64_t kAwayCost = 1ull << 49;
constexpr uint64_t kSuspectCost = 1ull << 50;
// Each doubling of a replica's latency over a millisecond counts as so many bytes in flight there.
constexpr uint32_t kLatencyUnitBit = 20;
constexpr uint32_t kLatencyCostBit = 18;
constexpr uint64_t kLatencyFadeNs = 100 * kMsNs;  // a latency that isn't renewed halves in this time

uint64_t latency_cost(const Link& link, uint64_t now_ns) {
  const uint64_t halvings = (now_ns - std::min(now_ns, link.latency_at_ns)) / kLatencyFadeNs;
  const uint64_t latency_ns = halvings >= 40 ? 0 : link.latency_ns >> halvings;
  return static_cast<uint64_t>(std::bit_width(latency_ns >> kLatencyUnitBit)) << kLatencyCostBit;
}

}  // namespace

bool chooses_replica(const Slot& slot) {
  return (slot.sqe.op == FFS_OP_READ || slot.sqe.op == FFS_OP_EXISTS) && slot.sqe.target == 0;
}

Link* Ring::link_of(const Member& member) {
  FFS_CHECK(member.endpoint != kNoEndpoint);
  Link*& link = link_by_endpoint_[member.endpoint];
  if (link != nullptr) return link;
  const Endpoint& endpoint = routing_->endpoints[member.endpoint];
  for (const auto& known : links_) {
    if (known->endpoint() == endpoint) return link = known.get();
  }
  links_.push_back(std::make_unique<Link>(*client_, endpoint));
  return link = links_.back().get();
}

uint64_t Ring::cost_of(const Member& member) {
  const Link* link = link_of(member);
  uint64_t cost = link->load_bytes + latency_cost(*link, now_ns_);
  if (link->suspect) cost += kSuspectCost;
  if (member.away) cost += kAwayCost;
  if (link->rdma_broken || (!link->ready() && link->failures > 0)) cost += kDownCost;
  if (link->beaten_sent_ns != 0) cost += kBeatenCost;
  if (link->endpoint().host_id != client_->host_id()) cost += kRemoteCost;
  return cost;
}

// Nothing is known against it.
bool Ring::is_well(const Member& member) {
  const Link* link = link_of(member);
  return !member.away && !link->suspect && !link->rdma_broken && link->beaten_sent_ns == 0 &&
         (link->ready() || link->failures == 0);
}

// The serving replica to ask next: the cheapest one that this round hasn't asked and that hasn't
// shown damage. Null: none is left.
const Member* Ring::choose_replica(const Chain& chain, Slot& slot) {
  if (slot.masks_of != chain.version) slot.masks_of = chain.version, slot.tried = slot.unsound = 0;
  const Member* best = nullptr;
  uint64_t best_cost = 0;
  for (uint32_t n = 0; n < chain.member_count; n++) {
    const uint32_t i = (n + turn_) % chain.member_count;
    const Member& member = chain.members[i];
    if (!member.serving || ((slot.tried | slot.unsound) >> i & 1) != 0) continue;
    const uint64_t cost = cost_of(member);
    if (best == nullptr || cost < best_cost) best = &member, best_cost = cost;
  }
  turn_++;
  return best;
}

// The chain of a request, or null. Requests that follow each other are often of the same.
const Chain* Ring::chain_of(const Slot& slot) {
  const ChainId id(slot.sqe.chain);
  if (last_chain_ != nullptr && last_chain_->id == id) return last_chain_;
  return last_chain_ = routing_->chain(id);
}

// Sends the request on its way, from no list. It comes to stand in a link's queue or is parked.
void Ring::dispatch(uint32_t index) {
  Slot& slot = slots_[index];
  FFS_CHECK(slot.list == nullptr);
  const Chain* chain = chain_of(slot);
  if (chain == nullptr) {
    slot.last_detail = Detail::kStaleRouting;
    return park(index, backoff_ms(++slot.attempt), true, false);
  }
  const Member* member = nullptr;
  if (slot.sqe.target != 0 && !slot.update) {
    const uint32_t i = chain->index_of(TargetId(slot.sqe.target));
    if (i == kMaxReplicas || chain->members[i].endpoint == kNoEndpoint) {
      return finish(index, -EHOSTUNREACH, Detail::kWrongTarget, true);
    }
    member = &chain->members[i];
  } else if (slot.update || slot.sqe.op == FFS_OP_LAST_CHUNK || slot.sqe.op == FFS_OP_LIST_CHUNKS) {
    member = chain->head();  // it knows of all pendings
  } else {
    member = choose_replica(*chain, slot);
  }
  if (!chain->available) watch_chain(slot, *chain);
  if (member == nullptr) {
    slot.last_detail = Detail::kNotServing;
    if (slot.unavailable_ns <= now_ns_) return finish(index, -EHOSTDOWN, Detail::kNotServing, !slot.lost_try);
    return park(index, backoff_ms(++slot.attempt), true, false);
  }
  const bool needs_identity = slot.update && slot.sqe.op != FFS_OP_TOUCH;
  if (needs_identity && slot.channel.number == 0) {
    slot.channel = client_->channels().acquire(ChainId(slot.sqe.chain), now_ns_ / kMsNs);
  }
  enqueue(index, *link_of(*member), member->target);
}

void Ring::enqueue(uint32_t index, Link& link, TargetId target) {
  Slot& slot = slots_[index];
  slot.link = &link;
  slot.target = target;
  slot.state = SlotState::kQueued;
  link.load_bytes += slot.sqe.length;
  at_servers_ += !slot.is_hedge();
  stats_.max_inflight = std::max<uint64_t>(stats_.max_inflight, at_servers_);
  slots_.push(link.waiting, index);
  mark_dirty(link);
}

// Takes a queued, in-flight, parked or prepared slot out of its list. An answer to the present
// try isn't recognised any more.
void Ring::detach(uint32_t index) {
  Slot& slot = slots_[index];
  slots_.remove(index);
  if (slot.state == SlotState::kQueued || slot.state == SlotState::kInFlight) {
    slot.link->load_bytes -= slot.sqe.length;
    at_servers_ -= !slot.is_hedge();
    mark_dirty(*slot.link);
  }
  if (slot.state == SlotState::kInFlight) {
    slot.link->inflight_bytes -= slot.sqe.length;
    slot.serial++;
    if (slot.link->receiving == index) {
      if (slot.link->connected() && slot.link->connection().reader.in_payload()) {
        slot.link->connection().reader.abandon_payload();
      }
      slot.link->receiving = kNoSlot;
    }
  }
}

// --- waiting for better times -----------------------------------------------------------------

void Ring::park(uint32_t index, uint64_t after_ms, bool for_routing, bool for_capability) {
  Slot& slot = slots_[index];
  slot.state = SlotState::kParked;
  slot.resume_ns = now_ns_ + jittered_ns(after_ms);
  slot.waits_for_hedge = slot.waits_for_budget = false;
  slot.parked_for_routing = for_routing;
  slot.parked_for_capability = for_capability;
  slot.parked_epoch = for_capability ? client_->capabilities().issue(slot.sqe.capability) : routing_->epoch;
  if (for_routing) events_ |= FFS_WAIT_NEEDS_ROUTING;
  if (for_capability) events_ |= FFS_WAIT_NEEDS_CAPABILITY;
  slots_.push(parked_, index);
  note_timer(std::min(slot.resume_ns, slot.end_ns()));
}

// From half of the pause to all of it, so that requests that fell together don't come back together.
uint64_t Ring::jittered_ns(uint64_t after_ms) {
  random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
  const uint64_t half_ns = after_ms * kMsNs / 2;
  return half_ns + (half_ns == 0 ? 0 : random_ % half_ns);
}

// A request that was already sent under this version of its chain is a retry that the budget pays
// for. False: the budget is out.
bool Ring::pays_for_retry(Slot& slot) {
  const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
  if (chain == nullptr || slot.sent_in != chain->version || retry_budget_.spend(now_ns_)) return true;
  if (!slot.waits_for_budget) stats_.budget_waits++;
  slot.waits_for_budget = true;
  slot.resume_ns = now_ns_ + jittered_ns(kBudgetLookMs);
  budget_waiters_++;
  note_timer(slot.resume_ns);
  return false;
}

// A read is late at a server that has answered others lately. Another replica is asked if there is one
// that is well, and the budget pays; else the answer is waited for. Thrown away, it would be work for
// nothing, and asked for again more of it.
bool Ring::is_waited_for(Slot& slot) {
  if (slot.is_hedge()) return false;
  if (!chooses_replica(slot)) return true;
  if (second_replica(slot) == nullptr) {
    slot.tried = 0;  // who was late before may be well when this one is late again
    return true;
  }
  slot.paid = retry_budget_.spend(now_ns_);
  return !slot.paid;
}

bool Ring::may_resume(Slot& slot, bool routing_changed) {
  if (routing_changed && slot.parked_for_routing && routing_->epoch > slot.parked_epoch) {
    const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
    // Its own chain has changed, or it never found a place: this is what it waits for.
    if (chain != nullptr && slot.sent_in != chain->version) {
      slot.attempt = std::min(slot.attempt, 1u);
      return true;
    }
  }
  if (slot.parked_for_capability && client_->capabilities().issue(slot.sqe.capability) != slot.parked_epoch) {
    return true;
  }
  const bool due = slot.resume_ns <= now_ns_;
  return (due || (slot.waits_for_budget && retry_budget_.available(now_ns_))) && pays_for_retry(slot);
}

void Ring::resume_parked(bool routing_changed) {
  budget_waiters_ = 0;
  moving_.clear();
  for (uint32_t i = parked_.head; i != kNoSlot; i = slots_[i].next) {
    Slot& slot = slots_[i];
    if (may_resume(slot, routing_changed)) {
      moving_.push_back(i);
    } else {
      budget_waiters_ += slot.waits_for_budget;
    }
  }
  const std::vector<uint32_t> moving = moving_;
  for (const uint32_t i : moving) {
    if (slots_[i].list != &parked_) continue;
    slots_.remove(i);
    slots_[i].tried = 0;  // a new round
    go_on(i);
  }
}

// --- a try has ended --------------------------------------------------------------------------

// The slot is in no list; its try ended so. May the slice be used again? If not, the slot waits.
void Ring::end_try(uint32_t index, const TryOutcome& outcome) {
  Slot& slot = slots_[index];
  FFS_CHECK(slot.list == nullptr);
  if (slot.is_hedge()) return end_hedge(index, outcome);
  const bool answered = outcome.ending == Ending::kReply || outcome.ending == Ending::kBadData;
  if (!slice_is_free(index, answered)) return quarantine(index, false, 0, outcome);
  act(index, outcome);
}

// A replica whose data is damaged isn't asked again under this chain version.
void Ring::note_damage(Slot& slot, TargetId target, const TryOutcome& outcome) {
  if (outcome.detail != Detail::kCorrupt && outcome.ending != Ending::kBadData) return;
  stats_.damaged++;
  const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
  if (chain == nullptr || slot.masks_of != chain->version) return;
  const uint32_t i = chain->index_of(target);
  if (i < kMaxReplicas) slot.unsound |= static_cast<uint8_t>(1u << i);
}

// Which replicas are left to ask after this try.
void Ring::note_members(Slot& slot, const TryOutcome& outcome, Situation* s) {
  const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
  if (!slot.update) note_damage(slot, slot.target, outcome);
  if (chain == nullptr || !chooses_replica(slot)) return;
  const uint32_t i = chain->index_of(slot.target);
  if (slot.masks_of == chain->version && i < kMaxReplicas) slot.tried |= static_cast<uint8_t>(1u << i);
  for (uint32_t m = 0; m < chain->member_count; m++) {
    const bool sound = chain->members[m].serving && (slot.unsound >> m & 1) == 0;
    s->sound_left |= sound;
    s->untried_left |= sound && (slot.tried >> m & 1) == 0;
  }
}

void Ring::act(uint32_t index, const TryOutcome& outcome) {
  Slot& slot = slots_[index];
  Situation s;
  s.update = slot.update;
  s.identified = slot.channel.number != 0;
  s.attempt = slot.attempt;
  s.capability_sent_again = slot.capability_sent_again;
  s.data_sent = slot.wanted;
  if (outcome.detail == Detail::kChecksum) slot.bad_data_count++;
  s.bad_data_count = slot.bad_data_count;
  if (outcome.detail != Detail::kNone && outcome.detail != Detail::kWanted) slot.last_detail = outcome.detail;
  if (slot.update && !certainly_not_applied(outcome) && outcome.ending != Ending::kReply)
    slot.lost_try = true;
  note_members(slot, outcome, &s);
  const Decision d = decide(s, outcome);
  if (d.next != Next::kComplete && d.next != Next::kSendData) {
    stats_.retries++;
    if (slot.hedge != kNoSlot) {  // the second replica has been asked already
      park(index, client_->options().try_timeout_ms, d.next == Next::kAwaitRouting, false);
      slot.waits_for_hedge = true;
      return;
    }
  }
  switch (d.next) {
    case Next::kComplete:
      return finish(index, -static_cast<int64_t>(d.status), d.detail,
                    outcome.ending == Ending::kReply || !slot.lost_try);
    case Next::kOtherReplica:
      if (outcome.ending == Ending::kTryTimeout && !slot.link->suspect && !slot.paid &&
          !retry_budget_.spend(now_ns_)) {
        return park(index, kBudgetLookMs, false, false);  // slow servers aren't helped by more requests
      }
      return go_on(index);
    case Next::kAgain:
      return park(index, d.after_ms, false, false);
    case Next::kAwaitRouting:
      return park(index, d.after_ms, true, false);
    case Next::kAwaitCapability:
      return park(index, kCapabilityRetryMs, false, true);
    case Next::kSendData:
      slot.wanted = true;
      slot.attempt--;  // it is the same try still
      return go_on(index);
    case Next::kSendCapability:
      slot.capability_sent_again = true;
      if (slot.link->ready()) slot.link->forget_capability(slot.sqe.capability);
      slot.tried = 0;
      return go_on(index);
    case Next::kRegister:
      slot.rdma_refused |= slot.over_rdma;
      if (slot.link->ready()) slot.link->forget_region(slot.region);
      slot.tried = 0;
      return go_on(index);
    case Next::kReissue:
      slot.channel = client_->channels().reissue(ChainId(slot.sqe.chain), slot.channel);
      slot.lost_try = false;
      return park(index, d.after_ms, false, false);
  }
}

// A server that hasn't answered may still write into a slice that it was given: the slice is taken
// back from it. False: that can't be done now.
bool Ring::slice_is_free(uint32_t index, bool answered) {
  Slot& slot = slots_[index];
  if ((slot.direct_read || slot.unchecked) && slot.over_rdma && !answered) {
    // Only the end of the queue pair makes sure. What else is on the link is asked again on a new one, as
    // this one would be if it still stood there.
    FFS_CHECK(slot.list == nullptr);
    if (slot.link->connected()) fail_link(*slot.link, {Ending::kLost});
    slot.direct_read = slot.unchecked = false;
    return true;
  }
  const auto take_back = [&] {
    return slot.lands() ? landing_.take_back(slot.landing, slot.sqe.length)
                        : slot.iov()->take_back(slot.sqe.iov_offset, slot.sqe.length);
  };
  if (slot.direct_read && !answered && !take_back()) return false;
  leave_landing(slot);
  slot.direct_read = slot.unchecked = false;
  return true;
}

void Ring::quarantine(uint32_t index, bool ending, int64_t result, const TryOutcome& outcome) {
  Slot& slot = slots_[index];
  slot.state = SlotState::kQuarantine;
  slot.ending = ending;
  slot.result = result;
  slot.outcome = outcome;
  slot.serial--;  // an answer to the try that just ended frees the slice, so it must be recognised
  slots_.push(quarantine_, index);
  note_timer(now_ns_ + kQuarantineRetryMs * kMsNs);
}

// Ends a request at our own wish (deadline, cancel), wherever it is.
void Ring::give_up(uint32_t index, int64_t result, Detail detail) {
  Slot& slot = slots_[index];
  const bool was_sent = slot.state == SlotState::kInFlight;
  const bool known = !slot.lost_try && !(slot.update && was_sent);
  Link* const link = slot.link;
  const bool payload_queued = slot.payload_queued;
  detach(index);
  if (!slice_is_free(index, false)) {
    slot.last_detail = detail;
    return quarantine(index, true, result, {});
  }
  finish(index, result, slot.update && !known && result == -ETIMEDOUT ? Detail::kDeadline : detail, known);
  // The rest of its payload may not be sent any more, so the frame can't be finished.
  if (payload_queued) fail_link(*link, {Ending::kLost});
}

// --- timers -----------------------------------------------------------------------------------

void Ring::run_timers() {
  next_timer_ns_ = ~0ull;
  for (size_t i = 0; i < links_.size(); i++) check_link_timers(*links_[i]);
  for (size_t i = 0; i < links_.size(); i++) check_try_timers(*links_[i]);
  check_parked();
  check_backlog();
  check_quarantine();
}

void Ring::check_link_timers(Link& link) {
  if (link.rdma_broken) {
    if (link.broken_until_ns <= now_ns_) return fail_link(link, {Ending::kLost});
    note_timer(link.broken_until_ns);
  }
  if (link.state() == Link::State::kConnecting || link.state() == Link::State::kHello ||
      link.state() == Link::State::kRdma) {
    if (link.connect_deadline_ns <= now_ns_) {
      fail_link(link, {Ending::kUnreachable});
    } else {
      note_timer(link.connect_deadline_ns);
    }
  }
  if (link.state() == Link::State::kIdle && !link.waiting.empty()) {
    if (link.retry_ns <= now_ns_) {
      mark_dirty(link);
    } else {
      note_timer(link.retry_ns);
    }
  }
}

void Ring::check_try_timers(Link& link) {
  std::vector<uint32_t> late;  // rare
  bool silent = false;         // asked a try_timeout ago, and nothing came since
  bool updates = false;
  for (uint32_t i = link.in_flight.head; i != kNoSlot; i = slots_[i].next) {
    Slot& slot = slots_[i];
    updates |= slot.update;
    if (slot.try_deadline_ns <= now_ns_) {
      const uint64_t timeout_ns = client_->options().try_timeout_ms * kMsNs;
      const uint64_t since_ns = slot.update ? slot.sent_ns : std::max(slot.sent_ns, now_ns_ - timeout_ns);
      const bool heard = link.last_receive_ns >= since_ns;
      silent |= !heard;
      slot.late += !slot.update;
      if (!slot.update && !(heard && is_waited_for(slot))) {
        late.push_back(i);
        continue;
      }
      slot.try_deadline_ns = now_ns_ + timeout_ns;
    }
    if (slot.end_ns() <= now_ns_) {
      late.push_back(i);
    } else {
      note_timer(std::min(slot.end_ns(), slot.try_deadline_ns));
    }
  }
  link.suspect |= silent;
  for (uint32_t i = link.waiting.head; i != kNoSlot; i = slots_[i].next) {
    if (slots_[i].end_ns() <= now_ns_ || (silent && chooses_replica(slots_[i]))) {
      late.push_back(i);
    } else {
      note_timer(slots_[i].end_ns());
    }
  }
  for (const uint32_t i : late) {
    Slot& slot = slots_[i];
    if (slot.list != &link.waiting && slot.list != &link.in_flight) continue;  // moved by an earlier one
    if (slot.end_ns() <= now_ns_ && !slot.is_hedge()) {
      expire(i);
    } else {
      detach(i);
      end_try(i, {Ending::kTryTimeout});
    }
  }
  // An update waits for its answer, but a server that says nothing at all is asked anew.
  if (silent && updates && link.ready()) fail_link(link, {Ending::kLost});
}

void Ring::check_parked() {
  std::vector<uint32_t> late;
  for (uint32_t i = parked_.head; i != kNoSlot; i = slots_[i].next) {
    if (slots_[i].end_ns() <= now_ns_) late.push_back(i);
  }
  for (const uint32_t i : late) expire(i);
  resume_parked(false);
  for (uint32_t i = parked_.head; i != kNoSlot; i = slots_[i].next) {
    note_timer(std::min(slots_[i].resume_ns, slots_[i].end_ns()));
  }
}

void Ring::check_backlog() {
  for (uint32_t i = backlog_.head; i != kNoSlot;) {
    const uint32_t next = slots_[i].next;
    if (slots_[i].end_ns() <= now_ns_) {
      expire(i);
    } else {
      note_timer(slots_[i].end_ns());
    }
    i = next;
  }
}

void Ring::check_quarantine() {
  moving_.clear();
  for (uint32_t i = quarantine_.head; i != kNoSlot; i = slots_[i].next) moving_.push_back(i);
  for (const uint32_t i : moving_) {
    Slot& slot = slots_[i];
    if (slot.link->receiving == i) continue;  // its answer is coming
    if (!slice_is_free(i, false)) continue;
    slots_.remove(i);
    if (slot.ending) {
      finish(i, slot.result, slot.last_detail, true);
    } else {
      act(i, slot.outcome);
    }
  }
  if (!quarantine_.empty()) note_timer(now_ns_ + kQuarantineRetryMs * kMsNs);
}

}  // namespace ffs::client
