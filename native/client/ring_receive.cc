// Replies (docs/wire_format.md). What a server sends is judged before it is believed: a reply that
// can't be right ends the connection.
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "client/ring.h"

namespace ffs::client {

using wire::Detail;
using wire::Type;

namespace {
constexpr int kReceivesAPass = 64;
constexpr size_t kSmallReceive = 32 * 1024;  // less: the socket is most likely empty
}  // namespace

void Ring::on_ready(Link& link, uint32_t events) {
  if (!link.connected()) return;  // failed by an earlier event of this pass
  if (link.state() == Link::State::kConnecting) {
    auto connected = link.on_connected();
    if (!connected.ok()) return fail_link(link, {Ending::kUnreachable});
    return pump(link);
  }
  if (link.rdma()) return receive_beside(link);
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(link);
  if (link.connected() && (events & EPOLLOUT) != 0) mark_dirty(link);
}

// Receives until the socket is empty, or for a while.
void Ring::receive(Link& link) {
  for (int i = 0; i < kReceivesAPass; i++) {
    stats_.recv_calls++;
    auto got = link.connection().receive();
    if (!got.ok()) {
      if (link.rdma()) {
        if (got.error().code != EAGAIN) return rdma_broke(link);
        if (!link.connection().queue.empty() || link.channel().waits()) mark_dirty(link);
        return;
      }
      if (got.error().code == EAGAIN) return;
      return fail_link(link, {link.ready() ? Ending::kLost : Ending::kUnreachable});
    }
    link.last_receive_ns = now_ns_ = now_ns();
    link.suspect = false;
    link.beaten_sent_ns = 0;
    const net::FrameReader& reader = link.connection().reader;
    if (link.receiving != kNoSlot && reader.in_payload() &&
        link.read_reply.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kInline)) {
      check_arriving(link, slots_[link.receiving], link.read_reply.bytes - reader.payload_left());
    }
    if (!drain_reader(link)) return;
    if (*got < kSmallReceive && !link.connection().reader.in_payload() && !link.rdma()) return;
  }
}

// The socket of a link over RDMA: its end, and before it which request broke the queue pair.
void Ring::receive_beside(Link& link) {
  if (!link.rdma_broken) receive(link);  // what came before
  while (link.connected()) {
    auto got = link.connection().receive_beside(link.beside);
    if (!got.ok() && got.error().code == EAGAIN) return;
    if (!got.ok()) return fail_link(link, {Ending::kLost});
    net::Frame frame;
    net::FrameReader::Next next;
    while ((next = link.beside.next(&frame)) == net::FrameReader::Next::kFrame) {
      const bool good = frame.payload_bytes == 0 && on_frame(link, frame);
      if (!link.connected()) return;
      if (!good) return fail_link(link, {Ending::kLost});
    }
    if (next != net::FrameReader::Next::kNeedMore) return fail_link(link, {Ending::kLost});
  }
}

// Takes all frames that have been received. False: the link has failed.
bool Ring::drain_reader(Link& link) {
  while (true) {
    net::Frame frame;
    switch (link.connection().reader.next(&frame)) {
      case net::FrameReader::Next::kNeedMore:
        return true;
      case net::FrameReader::Next::kPayload:
        on_payload(link);
        if (!link.connected()) return false;
        break;
      case net::FrameReader::Next::kBad:
        fail_link(link, {Ending::kLost});
        return false;
      case net::FrameReader::Next::kFrame: {
        if (link.state() == Link::State::kRdma) {
          auto status = link.on_rdma_reply(frame);
          if (!status.ok()) {
            fail_link(link, {Ending::kHelloRefused, static_cast<uint32_t>(status.error().code)});
            return false;
          }
          if (link.rdma()) watch_channel(link);
          mark_dirty(link);
          break;
        }
        if (!link.ready()) {
          Detail detail;
          auto status = link.on_hello_reply(frame, &detail);
          if (!status.ok()) {
            fail_link(link, {Ending::kHelloRefused, static_cast<uint32_t>(status.error().code), detail});
            return false;
          }
          mark_dirty(link);
          break;
        }
        if (!on_frame(link, frame)) {
          fail_link(link, {Ending::kLost});
          return false;
        }
        if (!link.connected()) return false;
        net::FrameReader& reader = link.connection().reader;
        if (reader.awaits_place()) reader.discard_payload();
        break;
      }
    }
  }
}

// The slot that waits for this answer, or kNoSlot: it's late.
uint32_t Ring::slot_of(uint64_t id) {
  const uint64_t low = id & 0xffffffffu;
  if (low == 0 || low > slots_.size_with_spares()) return kNoSlot;
  const auto index = static_cast<uint32_t>(low - 1);
  const Slot& slot = slots_[index];
  const bool waits = slot.state == SlotState::kInFlight || slot.state == SlotState::kQuarantine;
  return waits && slot.serial == id >> 32 ? index : kNoSlot;
}

// False: the server sent what it must not.
bool Ring::on_frame(Link& link, const net::Frame& frame) {
  if ((frame.request_id & 0xffffffffu) == 0) {
    if (frame.payload_bytes != 0) return false;
    if (frame.type == Type::kReadManyReply) return on_read_many_reply(link, frame);
    mark_dirty(link);
    return link.on_control_reply(frame);
  }
  const uint32_t index = slot_of(frame.request_id);
  if (index == kNoSlot) return true;  // late: nobody waits for it, its payload is thrown away
  Slot& slot = slots_[index];
  if (slot.link != &link) return false;
  if (frees_quarantined(index)) return true;
  switch (frame.type) {
    case Type::kReadReply:
      return slot.sqe.op == FFS_OP_READ && on_read_reply(link, frame, index);
    case Type::kExistsReply:
      return slot.sqe.op == FFS_OP_EXISTS && on_exists_reply(frame, index);
    case Type::kLastChunkReply:
      return slot.sqe.op == FFS_OP_LAST_CHUNK && on_last_chunk_reply(frame, index);
    case Type::kListChunksReply:
      return slot.sqe.op == FFS_OP_LIST_CHUNKS && on_list_chunks_reply(frame, index);
    case Type::kUpdateReply:
      return slot.update && on_update_reply(frame, index);
    default:
      return false;
  }
}

// True: the request was over, and only waited for the server to be through with its slice.
bool Ring::frees_quarantined(uint32_t index) {
  Slot& slot = slots_[index];
  if (slot.state != SlotState::kQuarantine || !slot.ending) return false;
  slots_.remove(index);
  slot.direct_read = false;
  finish(index, slot.result, slot.last_detail, true);
  return true;
}

void Ring::note_epoch(uint64_t routing_epoch) {
  if (routing_epoch <= hinted_epoch_ || routing_epoch <= routing_->epoch) return;
  hinted_epoch_ = routing_epoch;  // asked for once
  events_ |= FFS_WAIT_NEEDS_ROUTING;
}

// --- reads ------------------------------------------------------------------------------------

bool Ring::on_read_reply(Link& link, const net::Frame& frame, uint32_t index) {
  Slot& slot = slots_[index];
  const auto reply = frame.as<wire::ReadReply>();
  note_epoch(reply.routing_epoch);
  if (reply.status != 0) {
    slot.chunk_length = reply.chunk_length;
    if (reply.status == ENOENT && reply.detail == 0 && (slot.sqe.flags & FFS_SQE_ZERO_FILL) != 0) {
      if (slot.on_device) {
        detach(index);
        fail_device(index, FFS_DEVICE_HOLE, EOPNOTSUPP);
        return true;
      }
      link.read_reply = wire::ReadReply{};  // a hole
      link.granule_crcs.clear();
      link.granules = {};
      finish_read(link, index);
      return true;
    }
    detach(index);
    end_try(index, {Ending::kReply, reply.status, static_cast<Detail>(reply.detail), reply.retry_after_ms});
    return true;
  }
  if (reply.bytes > slot.sqe.length) return false;
  if (reply.granule_count > kMaxGranules || reply.patch_count > reply.bytes) return false;
  if (frame.var.size() !=
      size_t{reply.granule_count} * 4 + size_t{reply.patch_count} * sizeof(wire::ReadPatch)) {
    return false;
  }
  const bool over_rdma = reply.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRdma);
  const bool in_region = over_rdma || reply.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion);
  if ((in_region && !slot.direct_read) || over_rdma != (in_region && slot.over_rdma)) return false;
  if (over_rdma && reply.patch_count != 0) return false;
  if (slot.on_device && (!over_rdma || reply.granule_count != 0)) return false;  // nobody could take that
  uint64_t patched = 0;
  link.granule_crcs.resize(reply.granule_count);
  link.granules = {};
  if (reply.granule_count > 0) {
    std::memcpy(link.granule_crcs.data(), frame.var.data(), size_t{reply.granule_count} * 4);
  }
  link.patches.resize(reply.patch_count);
  if (reply.patch_count > 0) {
    std::memcpy(link.patches.data(), frame.var.data() + size_t{reply.granule_count} * 4,
                size_t{reply.patch_count} * sizeof(wire::ReadPatch));
  }
  for (const wire::ReadPatch& patch : link.patches) {
    if (patch.at > reply.bytes || patch.length > reply.bytes - patch.at) return false;
    patched += patch.length;
  }
  if (frame.payload_bytes != (in_region ? patched : reply.bytes)) return false;
  if (!in_region && reply.patch_count != 0) return false;
  if (!in_region) leave_landing(slot);  // it comes here instead
  link.read_reply = reply;
  if (frame.payload_bytes == 0) {
    note_arrival(link, index);
    return true;
  }
  uint8_t* to = slot.data();
  if (in_region && link.patches.size() == 1) to += link.patches[0].at;
  if (in_region && link.patches.size() > 1) {
    if (link.scratch.size() < patched) link.scratch.resize(patched);
    to = link.scratch.data();
  }
  link.receiving = index;
  stats_.bytes_copied += frame.payload_bytes;
  link.connection().reader.place_payload(to);
  return true;
}

// The plain results of many small reads, whose bytes are in place.
bool Ring::on_read_many_reply(Link& link, const net::Frame& frame) {
  const auto many = frame.as<wire::ReadManyReply>();
  note_epoch(many.routing_epoch);
  if (many.count > wire::kMaxReadMany || frame.var.size() != many.count * sizeof(wire::ReadManyResult)) {
    return false;
  }
  for (uint32_t i = 0; i < many.count; i++) {
    wire::ReadManyResult result;
    std::memcpy(&result, frame.var.data() + i * sizeof result, sizeof result);
    const uint32_t index = slot_of(result.request_id);
    if (index == kNoSlot) continue;  // late
    Slot& slot = slots_[index];
    if (slot.link != &link) return false;
    if (frees_quarantined(index)) continue;
    if (slot.sqe.op != FFS_OP_READ || !slot.direct_read || slot.on_device || result.bytes > slot.sqe.length)
      return false;
    wire::ReadReply& reply = link.read_reply;
    reply = wire::ReadReply{};
    reply.bytes = result.bytes;
    reply.chunk_length = reply.logical_length = result.chunk_length;
    link.granule_crcs.clear();
    if (result.granule != wire::kNoGranule) {
      reply.checksum_kind = static_cast<uint8_t>(wire::ChecksumKind::kCrc32c);
      reply.first_granule = result.granule;
      link.granule_crcs.push_back(result.crc);
    }
    note_arrival(link, index);
  }
  return true;
}

void Ring::on_payload(Link& link) {
  const uint32_t index = link.receiving;
  if (index == kNoSlot) return;  // it was thrown away
  Slot& slot = slots_[index];
  if (link.read_reply.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion) && link.patches.size() > 1) {
    const uint8_t* from = link.scratch.data();
    for (const wire::ReadPatch& patch : link.patches) {
      std::memcpy(slot.data() + patch.at, from, patch.length);
      from += patch.length;
    }
  }
  link.receiving = kNoSlot;
  finish_read(link, index);
}

// --- the others -------------------------------------------------------------------------------

bool Ring::on_update_reply(const net::Frame& frame, uint32_t index) {
  Slot& slot = slots_[index];
  const auto reply = frame.as<wire::UpdateReply>();
  note_epoch(reply.routing_epoch);
  slot.chunk_length = reply.chunk_length;
  slot.value = reply.value;
  slot.outcome = {Ending::kReply, reply.status, static_cast<Detail>(reply.detail), reply.retry_after_ms};
  // A refusal can come before the payload is through. The send queue borrows the buffer till then.
  slot.answered_early = slot.payload_queued;
  if (!slot.answered_early) end_update(index);
  return true;
}

void Ring::end_update(uint32_t index) {
  Slot& slot = slots_[index];
  slot.answered_early = false;
  detach(index);
  if (slot.outcome.status != 0) return end_try(index, TryOutcome(slot.outcome));
  const bool data =
      slot.sqe.op == FFS_OP_WRITE || slot.sqe.op == FFS_OP_REPLACE || slot.sqe.op == FFS_OP_CREATE;
  finish(index, data ? slot.sqe.length : 0, Detail::kNone, true);
}

bool Ring::on_exists_reply(const net::Frame& frame, uint32_t index) {
  Slot& slot = slots_[index];
  const auto reply = frame.as<wire::ExistsReply>();
  note_epoch(reply.routing_epoch);
  if (reply.status == 0) {
    if (reply.count != slot.sqe.length ||
        frame.var.size() != size_t{reply.count} * sizeof(wire::ExistsEntry)) {
      return false;
    }
  }
  detach(index);
  if (reply.status == 0) {
    const uint32_t asked = slot.is_hedge() ? slot.hedge_of : index;
    if (slot.is_hedge()) {
      const bool won = win_by_hedge(index);
      release_hedge(index);
      if (!won) return true;
    } else {
      note_latency(*slot.link, slot);
    }
    std::memcpy(slots_[asked].data(), frame.var.data(), frame.var.size());
    finish(asked, reply.count, Detail::kNone, true);
  } else {
    end_try(index, {Ending::kReply, reply.status, static_cast<Detail>(reply.detail)});
  }
  return true;
}

bool Ring::on_last_chunk_reply(const net::Frame& frame, uint32_t index) {
  Slot& slot = slots_[index];
  const auto reply = frame.as<wire::LastChunkReply>();
  detach(index);
  if (reply.status == 0) {
    std::memcpy(slot.sqe.key, reply.key, sizeof slot.sqe.key);
    slot.value = reply.chunks;
    slot.chunk_length = reply.length;
    finish(index, reply.length, Detail::kNone, true);
  } else {
    end_try(index, {Ending::kReply, reply.status, static_cast<Detail>(reply.detail)});
  }
  return true;
}

bool Ring::on_list_chunks_reply(const net::Frame& frame, uint32_t index) {
  Slot& slot = slots_[index];
  const auto reply = frame.as<wire::ListChunksReply>();
  note_epoch(reply.routing_epoch);
  const bool fits =
      reply.count <= slot.sqe.length && frame.var.size() == size_t{reply.count} * sizeof(wire::ListEntry);
  if (reply.status == 0 && !fits) return false;
  detach(index);
  if (reply.status == 0) {
    if (reply.count > 0) std::memcpy(slot.data(), frame.var.data(), frame.var.size());
    slot.value = reply.more;
    finish(index, reply.count, Detail::kNone, true);
  } else {
    end_try(index, {Ending::kReply, reply.status, static_cast<Detail>(reply.detail)});
  }
  return true;
}

}  // namespace ffs::client
