// Reads that are late: a second replica is asked, into memory of the ring's own, and the first good
// answer counts (docs/ring.md, Hedged reads).
#include <algorithm>
#include <cerrno>

#include "client/ring.h"

namespace ffs::client {

using wire::Detail;

namespace {

constexpr uint64_t kMsNs = 1000000;
constexpr uint64_t kFloorNs = 1 * kMsNs;
// A slice that a server writes into itself must be taken back from it before another answer counts,
// and its extent registered anew: that costs more than a late answer.
constexpr uint64_t kDirectFloorNs = 25 * kMsNs;
// Over RDMA it costs the queue pair: all that is on it is asked again.
constexpr uint64_t kRdmaFloorNs = 100 * kMsNs;
constexpr uint64_t kLookAgainNs = 5 * kMsNs;
constexpr uint64_t kMostHedgeBytes = 64ull << 20;
constexpr size_t kKeepBytes = 256 * 1024;  // of memory for the next second try
constexpr uint32_t kStreamBytes = 256 * 1024;
constexpr uint64_t kSilentNs = 50 * kMsNs;  // nothing for so long, and beaten: reads leave the server
constexpr uint32_t kMostLooks = 1024;
constexpr uint32_t kSmallBytes = 128 * 1024;
constexpr uint32_t kSmoothing = 8;

uint32_t moved_bytes(const Slot& slot) {
  return slot.sqe.op == FFS_OP_EXISTS ? slot.sqe.length * uint32_t{sizeof(wire::ExistsKey)} : slot.sqe.length;
}

}  // namespace

// A read has been sent: when will it be late?
void Ring::arm_hedge(Slot& slot, const Chain& chain) {
  const ClientOptions& o = client_->options();
  if (o.hedge_percent == 0 || chain.member_count < 2 || !chooses_replica(slot)) return;
  // A second answer would have to go into the same slice: no CPU can copy it there.
  if (slot.is_hedge() || slot.hedge != kNoSlot || slot.on_device) return;
  hedge_budget_.earn(1, o.hedge_percent);
  uint64_t after_ns = o.hedge_after_ms * kMsNs;
  if (after_ns == 0) {
    after_ns = latencies_.hedge_after_ns(moved_bytes(slot),
                                         slot.over_rdma     ? kRdmaFloorNs
                                         : slot.direct_read ? kDirectFloorNs
                                                            : kFloorNs,
                                         o.try_timeout_ms * kMsNs / 2);
  }
  slot.hedge_after_ns = after_ns;
  slot.hedge_ns = now_ns_ + after_ns;
  next_hedge_ns_ = std::min(next_hedge_ns_, slot.hedge_ns);
}

// Looks for late reads. Slots stand in flight in the order in which they were sent, so only the
// first of them are looked at.
void Ring::run_hedges() {
  next_hedge_ns_ = ~0ull;
  for (size_t l = 0; l < links_.size(); l++) {
    Link& link = *links_[l];
    const bool silent = link.beaten_sent_ns != 0 && link.beaten_sent_ns + kSilentNs <= now_ns_;
    link.suspect |= silent;
    if (link.beaten_sent_ns != 0 && !silent) {
      next_hedge_ns_ = std::min(next_hedge_ns_, link.beaten_sent_ns + kSilentNs);
    }
    moving_.clear();
    uint32_t looks = 0;
    for (uint32_t i = link.in_flight.head; i != kNoSlot && looks < kMostLooks; i = slots_[i].next, looks++) {
      const Slot& slot = slots_[i];
      const bool leaves = silent && slot.sent_ns + kSilentNs <= now_ns_ && slot.hedge_ns != ~0ull;
      if (leaves || slot.hedge_ns <= now_ns_) {
        moving_.push_back(i);
      } else {
        next_hedge_ns_ = std::min(next_hedge_ns_, slot.hedge_ns);
      }
    }
    if (silent) {
      for (uint32_t i = link.waiting.head; i != kNoSlot; i = slots_[i].next) {
        if (chooses_replica(slots_[i]) && !slots_[i].is_hedge()) moving_.push_back(i);
      }
    }
    const std::vector<uint32_t> late = moving_;
    for (const uint32_t i : late) {
      if (slots_[i].list != &link.in_flight && slots_[i].list != &link.waiting) continue;
      silent ? leave(i) : hedge(i);
    }
  }
  // What was put off is looked at again soon, but not at every turn.
  next_hedge_ns_ = std::max(next_hedge_ns_, now_ns_ + kFloorNs);
}

// The replica that a second try could go to: one that is there and isn't late itself. Null: none.
const Member* Ring::second_replica(Slot& slot) {
  const Chain* chain = routing_->chain(ChainId(slot.sqe.chain));
  if (chain == nullptr) return nullptr;
  if (slot.masks_of != chain->version) slot.masks_of = chain->version, slot.tried = slot.unsound = 0;
  const uint8_t tried = slot.tried;
  const uint32_t here = chain->index_of(slot.target);
  if (here < kMaxReplicas) slot.tried |= static_cast<uint8_t>(1u << here);
  const Member* member = choose_replica(*chain, slot);
  slot.tried = tried;
  return member != nullptr && is_well(*member) ? member : nullptr;
}

// The server says nothing: the read goes elsewhere, as after a try timeout.
void Ring::leave(uint32_t index) {
  Slot& slot = slots_[index];
  slot.hedge_ns = ~0ull;
  if (slot.hedge != kNoSlot || second_replica(slot) == nullptr) return;
  const Ending ending = slot.state == SlotState::kInFlight ? Ending::kTryTimeout : Ending::kUnreachable;
  detach(index);
  end_try(index, {ending});
}

void Ring::hedge(uint32_t index) {
  Slot& slot = slots_[index];
  const Link& link = *slot.link;
  // A long read whose server is sending just now isn't late: the wire is full.
  const uint32_t bytes = moved_bytes(slot);
  const bool streams = link.receiving == index ||
                       (bytes >= kStreamBytes && link.last_receive_ns + slot.hedge_after_ns / 2 > now_ns_);
  const Member* member = streams ? nullptr : second_replica(slot);
  if (!streams && member == nullptr) {
    slot.hedge_ns = ~0ull;
    return;
  }
  if (streams || slots_.spare_list().empty() || hedge_bytes_ + bytes > kMostHedgeBytes ||
      !hedge_budget_.spend(now_ns_)) {
    slot.hedge_ns = now_ns_ + std::max(kLookAgainNs, slot.hedge_after_ns / 2);
    next_hedge_ns_ = std::min(next_hedge_ns_, slot.hedge_ns);
    return;
  }
  slot.hedge_ns = ~0ull;
  const uint32_t second = slots_.spare_list().head;
  slots_.remove(second);
  Slot& s = slots_[second];
  const uint32_t serial = s.serial;
  s = Slot{};
  s.serial = serial;
  s.sqe = slot.sqe;
  s.deadline_ns = slot.deadline_ns;
  s.hedge_of = index;
  if (slot.sqe.op == FFS_OP_READ) {
    std::vector<uint8_t>& memory = hedge_memory_[second - slots_.size()];
    if (memory.size() < bytes) memory.resize(bytes);
    s.place = memory.data();
  }
  hedge_bytes_ += bytes;
  slot.hedge = second;
  stats_.hedges++;
  const Chain& chain = *routing_->chain(ChainId(slot.sqe.chain));
  for (const TargetId target : {slot.target, member->target}) {
    if (const uint32_t i = chain.index_of(target); i < kMaxReplicas)
      slot.tried |= static_cast<uint8_t>(1u << i);
  }
  enqueue(second, *link_of(*member), member->target);
}

// The second try has ended without data. It stands in no list.
void Ring::end_hedge(uint32_t second, const TryOutcome& outcome) {
  Slot& s = slots_[second];
  const uint32_t index = s.hedge_of;
  Slot& slot = slots_[index];
  const bool answer =
      outcome.ending == Ending::kReply && ((outcome.status == ENOENT && outcome.detail == Detail::kNone) ||
                                           outcome.detail == Detail::kTagMismatch);
  if (answer && win_by_hedge(second)) {
    release_hedge(second);
    return finish(index, -static_cast<int64_t>(outcome.status), outcome.detail, true);
  }
  note_damage(slot, s.target, outcome);
  const bool waited_for = slot.list == &parked_ && slot.waits_for_hedge;
  if (waited_for) slot.target = s.target, slot.link = s.link;
  release_hedge(second);
  if (!waited_for) return;
  slots_.remove(index);
  act(index, outcome);
}

// The second try has a good answer. If the request's slice can be had, the request's own try ends and
// the caller puts the answer into the slice, releases the second try and finishes the request. The
// second try stands in no list.
bool Ring::win_by_hedge(uint32_t second) {
  const uint32_t index = slots_[second].hedge_of;
  Slot& slot = slots_[index];
  const bool in_flight = slot.state == SlotState::kInFlight;
  if (!in_flight && slot.state != SlotState::kQueued && slot.state != SlotState::kParked) return false;
  // Over RDMA the slice is had by the end of the queue pair, which ends the tries of all that stand on it:
  // this one has left then. A slice that isn't had otherwise leaves the request where it is.
  const bool over_rdma = in_flight && slot.over_rdma;
  if (over_rdma) detach(index);
  if (!slice_is_free(index, !in_flight)) return false;
  if (in_flight) {
    Link& beaten = *slot.link;
    note_latency(beaten, slot);  // it took at least so long
    if (beaten.last_receive_ns < slot.sent_ns && beaten.beaten_sent_ns == 0) {
      beaten.beaten_sent_ns = slot.sent_ns;
      next_hedge_ns_ = std::min(next_hedge_ns_, slot.sent_ns + kSilentNs);
    }
  }
  if (!over_rdma) detach(index);
  stats_.hedge_wins++;
  return true;
}

// From no list. The request that it was for goes on without it.
void Ring::release_hedge(uint32_t second) {
  Slot& s = slots_[second];
  FFS_CHECK(s.list == nullptr && s.is_hedge());
  Slot& slot = slots_[s.hedge_of];
  slot.hedge = kNoSlot;
  if (slot.list == &parked_ && slot.waits_for_hedge) slot.resume_ns = now_ns_, note_timer(now_ns_);
  hedge_bytes_ -= moved_bytes(s);
  s.serial++;  // whatever still comes for it is late
  s.hedge_of = kNoSlot;
  s.place = nullptr;
  s.state = SlotState::kFree;
  std::vector<uint8_t>& memory = hedge_memory_[second - slots_.size()];
  if (memory.size() > kKeepBytes) std::vector<uint8_t>().swap(memory);
  slots_.push(slots_.spare_list(), second);
}

// The request has its answer: its second try isn't needed any more.
void Ring::drop_hedge(uint32_t index) {
  const uint32_t second = slots_[index].hedge;
  if (slots_[second].list != nullptr) detach(second);
  release_hedge(second);
}

// A read was answered now, or is known to take longer.
void Ring::note_latency(Link& link, const Slot& slot) {
  const uint64_t latency_ns = now_ns_ - slot.sent_ns;
  if (!slot.is_hedge()) latencies_.add(moved_bytes(slot), latency_ns);
  if (slot.sqe.length > kSmallBytes) return;
  link.latency_ns = link.latency_at_ns == 0
                        ? latency_ns
                        : link.latency_ns - link.latency_ns / kSmoothing + latency_ns / kSmoothing;
  link.latency_at_ns = now_ns_;
}

}  // namespace ffs::client
