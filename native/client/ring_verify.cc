// What a read's answer has to pass before it is the request's result.
#include <cerrno>
#include <cstring>

#include "client/ring.h"

namespace ffs::client {

using wire::Detail;

// A reply that comes through the socket: what is there of it is still in the processor's cache.
void Ring::check_arriving(Link& link, const Slot& slot, uint64_t arrived) {
  if (!client_->options().checksums) return;
  check_granules(link.read_reply, link.granule_crcs.data(), link.granule_crcs.size(), slot.sqe.offset,
                 slot.data(), arrived, &link.granules);
}

void Ring::finish_read(Link& link, uint32_t index) {
  note_latency(link, slots_[index]);
  detach(index);
  check_arriving(link, slots_[index], link.read_reply.bytes);
  judge(link, index, link.read_reply, link.granules.sound);
}

// The server has put the data into the slice. It is verified at the end of the pass, after whatever the ring
// can send now that the server has room: a device that has given all it was asked for stands still until
// then.
void Ring::note_arrival(Link& link, uint32_t index) {
  // A second try isn't kept: the request may end without it before the pass does.
  const bool later = !link.granule_crcs.empty() && client_->options().checksums && !slots_[index].is_hedge();
  if (!later) return finish_read(link, index);
  note_latency(link, slots_[index]);
  detach(index);
  slots_[index].state = SlotState::kArrived;
  const auto first = static_cast<uint32_t>(arrived_crcs_.size());
  arrived_crcs_.insert(arrived_crcs_.end(), link.granule_crcs.begin(), link.granule_crcs.end());
  arrived_.push_back({index, first, static_cast<uint32_t>(link.granule_crcs.size()), &link, link.read_reply});
}

void Ring::judge_arrived() {
  for (const Arrived& a : arrived_) {
    Slot& slot = slots_[a.index];
    GranuleCheck check;
    const uint32_t* crcs = arrived_crcs_.data() + a.first_crc;
    if (slot.lands()) {
      copy_granules(a.reply, crcs, a.crc_count, slot.sqe.offset, slot.data(), slot.slice(), &check);
      note_landed(slot, a.reply.bytes);
    } else {
      check_granules(a.reply, crcs, a.crc_count, slot.sqe.offset, slot.data(), a.reply.bytes, &check);
    }
    judge(*a.link, a.index, a.reply, check.sound);
  }
  arrived_.clear();
  arrived_crcs_.clear();
}

// All of the data is in the slice.
void Ring::note_landed(Slot& slot, uint64_t bytes) {
  stats_.bytes_landed += bytes;
  leave_landing(slot);
}

// The slot stands in no list.
void Ring::judge(Link& link, uint32_t index, const wire::ReadReply& reply, bool sound) {
  Slot& slot = slots_[index];
  if (sound && slot.lands()) {  // patched, or without checksums
    std::memcpy(slot.slice(), slot.place, reply.bytes);
    note_landed(slot, reply.bytes);
  }
  if (!sound) {
    report_damage(link, index);
    return end_try(index, {Ending::kBadData, EIO, Detail::kCorrupt});
  }
  if (slot.is_hedge()) {
    const uint32_t asked = slot.hedge_of;
    const bool won = win_by_hedge(index);
    if (won && reply.bytes > 0) std::memcpy(slots_[asked].data(), slot.place, reply.bytes);
    release_hedge(index);
    if (won) deliver(asked, reply);
    return;
  }
  deliver(index, reply);
}

// The reply's data is in the request's slice.
void Ring::deliver(uint32_t index, const wire::ReadReply& reply) {
  Slot& slot = slots_[index];
  slot.direct_read = false;
  slot.chunk_length = reply.chunk_length;
  slot.value = reply.logical_length;
  slot.version = reply.version;
  slot.sqe.codec = reply.codec;
  slot.sqe.tag_bytes = reply.tag_bytes;
  std::memcpy(slot.sqe.tag, reply.tag, sizeof slot.sqe.tag);
  int64_t result = reply.bytes;
  if ((slot.sqe.flags & FFS_SQE_ZERO_FILL) != 0 && reply.bytes < slot.sqe.length) {
    if (slot.on_device) return fail_device(index, FFS_DEVICE_HOLE, EOPNOTSUPP);
    std::memset(slot.data() + reply.bytes, 0, slot.sqe.length - reply.bytes);
    result = slot.sqe.length;
  }
  finish(index, result, Detail::kNone, true);
}

}  // namespace ffs::client
