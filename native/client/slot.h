// A request on its way: one slot of a ring's table. Slots stand in at most one list at a time,
// which says where they are (free, queued for a connection, in flight on it, parked, ...).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "client/channels.h"
#include "client/iov.h"
#include "client/landing.h"
#include "client/retry.h"
#include "ffs/ffs.h"

namespace ffs::client {

class Link;

constexpr uint32_t kNoSlot = ~0u;

enum class SlotState : uint8_t {
  kFree,
  kPrepared,    // taken, not submitted
  kBacklog,     // submitted, and behind the bound of what may be at servers
  kQueued,      // in a link's queue, not sent
  kInFlight,    // sent, unanswered
  kArrived,     // its data is in its slice, and not verified yet
  kParked,      // waits for a time, for routing or for a capability
  kQuarantine,  // over, but a server may still write into its slice
  kFinished,    // waits for the rest of its group
};

struct SlotList {
  uint32_t head = kNoSlot;
  uint32_t tail = kNoSlot;
  uint32_t count = 0;
  bool empty() const { return count == 0; }
};

struct Slot {
  ffs_sqe sqe{};

  SlotList* list = nullptr;
  uint32_t prev = kNoSlot;
  uint32_t next = kNoSlot;
  SlotState state = SlotState::kFree;

  bool update = false;
  bool on_device = false;       // its slice is memory of a device, which this side can't touch
  bool payload_queued = false;  // its payload is borrowed by the link's send queue
  bool answered_early = false;  // with `outcome`, which counts once the payload is through
  bool direct_read = false;     // this try's data goes straight into the slice
  bool over_rdma = false;       // this try's data goes over RDMA
  bool unchecked = false;       // this try's server takes bytes out of the slice that no checksum guards
  bool rdma_refused = false;    // a server couldn't reach its memory so: inline from now on
  bool lost_try = false;        // update: an earlier try went unanswered
  bool wanted = false;   // create: a server that was offered its bytes wants them (docs/ring.md, Offers)
  bool offered = false;  // create: its offer is the present try, or the last; `summed` is of its bytes
  bool capability_sent_again = false;
  bool parked_for_routing = false;
  bool parked_for_capability = false;
  bool ending = false;  // quarantine: finish with `result`, else `outcome` decides
  bool granule_damage = false;
  bool waits_for_hedge = false;  // parked: its own try has ended, the second replica's hasn't
  bool waits_for_budget = false;
  bool paid = false;  // the budget has paid for the next try

  uint8_t tried = 0;      // members asked in this round, by index in the chain
  uint8_t unsound = 0;    // members that showed damage
  ChainVersion masks_of;  // the chain version that the two masks belong to
  ChainVersion sent_in;   // the chain version of the last try that was sent
  uint32_t serial = 0;    // of the try; half of the request id
  uint32_t attempt = 0;   // tries so far
  uint32_t late = 0;      // tries that try_timeout_ms ended
  uint32_t bad_data_count = 0;
  uint32_t summed = 0;  // bytes, of whose checksums the ring has those that are computed

  Link* link = nullptr;
  TargetId target;
  Channel channel;
  uint64_t region = 0;  // that this try names, 0: inline
  uint64_t deadline_ns = 0;
  uint64_t try_deadline_ns = 0;
  uint64_t sent_ns = 0;
  uint64_t resume_ns = 0;
  uint64_t hedge_ns = ~0ull;        // a second replica is asked then
  uint64_t hedge_after_ns = 0;      // so long after the read was sent
  uint64_t unavailable_ns = ~0ull;  // the chain has been down for too long then
  uint64_t parked_epoch = 0;        // routing epoch / capability issue that didn't help
  TryOutcome outcome;               // the last
  wire::Detail last_detail = wire::Detail::kNone;

  // Groups: the head counts those that are left; members are linked in entry order.
  uint32_t group_head = kNoSlot;
  uint32_t group_next = kNoSlot;
  uint32_t group_left = 0;

  // Hedged reads: the second replica's try is a slot of its own, with memory of its own.
  uint32_t hedge = kNoSlot;     // this request's second try
  uint32_t hedge_of = kNoSlot;  // this is the second try of that request
  uint8_t* place = nullptr;     // where data goes instead of the Iov

  uint64_t landing = Landing::kNowhere;  // this try's data goes there first; `place` is its address

  int64_t result = 0;
  uint32_t detail = 0;
  uint32_t chunk_length = 0;
  uint64_t value = 0;
  wire::WireVersion version{};  // of what a read has delivered; zero: not told

  uint8_t* data() const { return place != nullptr ? place : slice(); }
  uint8_t* slice() const {
    return sqe.iov == nullptr || on_device ? nullptr : iov()->data() + sqe.iov_offset;
  }
  // Both have delivered of one chunk, of two versions of it.
  bool differs_from(const Slot& other) const {
    return sqe.op == FFS_OP_READ && other.sqe.op == FFS_OP_READ && version.update != 0 &&
           other.version.update != 0 && std::memcmp(sqe.key, other.sqe.key, sizeof sqe.key) == 0 &&
           std::memcmp(&version, &other.version, sizeof version) != 0;
  }
  bool lands() const { return landing != Landing::kNowhere; }
  uint64_t end_ns() const { return deadline_ns < unavailable_ns ? deadline_ns : unavailable_ns; }
  bool is_hedge() const { return hedge_of != kNoSlot; }
  Iov* iov() const { return reinterpret_cast<Iov*>(sqe.iov); }
};

class SlotTable {
 public:
  // `spare` slots stand behind the entries, for second tries.
  SlotTable(uint32_t entries, uint32_t spare) : entries_(entries), slots_(entries + spare) {
    for (uint32_t i = 0; i < entries; i++) push(free_, i);
    for (uint32_t i = entries; i < entries + spare; i++) push(spare_, i);
  }
  Slot& operator[](uint32_t index) { return slots_[index]; }
  uint32_t size() const { return entries_; }
  uint32_t size_with_spares() const { return static_cast<uint32_t>(slots_.size()); }
  SlotList& spare_list() { return spare_; }
  SlotList& free_list() { return free_; }
  uint32_t free_count() const { return free_.count; }

  void push(SlotList& list, uint32_t index) {
    Slot& slot = slots_[index];
    FFS_CHECK(slot.list == nullptr);
    slot.list = &list;
    slot.prev = list.tail;
    slot.next = kNoSlot;
    (list.tail == kNoSlot ? list.head : slots_[list.tail].next) = index;
    list.tail = index;
    list.count++;
  }
  void push_front(SlotList& list, uint32_t index) {
    Slot& slot = slots_[index];
    FFS_CHECK(slot.list == nullptr);
    slot.list = &list;
    slot.prev = kNoSlot;
    slot.next = list.head;
    (list.head == kNoSlot ? list.tail : slots_[list.head].prev) = index;
    list.head = index;
    list.count++;
  }
  void remove(uint32_t index) {
    Slot& slot = slots_[index];
    FFS_CHECK(slot.list != nullptr);
    SlotList& list = *slot.list;
    (slot.prev == kNoSlot ? list.head : slots_[slot.prev].next) = slot.next;
    (slot.next == kNoSlot ? list.tail : slots_[slot.next].prev) = slot.prev;
    list.count--;
    slot.list = nullptr;
    slot.prev = slot.next = kNoSlot;
  }

 private:
  uint32_t entries_;
  std::vector<Slot> slots_;
  SlotList free_;
  SlotList spare_;
};

inline uint64_t request_id(uint32_t index, const Slot& slot) {
  return (static_cast<uint64_t>(slot.serial) << 32) | (index + 1);
}

}  // namespace ffs::client
