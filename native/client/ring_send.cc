// Links: connecting, failing, and the frames of requests (docs/wire_format.md).
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "client/ring.h"
#include "net/frame.h"

namespace ffs::client {

using wire::Detail;
using wire::Type;

namespace {

// So much is encoded ahead of what the socket took.
constexpr size_t kSendAheadBytes = 1u << 20;
// Of updates so much goes through checksums before it is sent: the server copies it while the next is summed.
constexpr size_t kSumAheadBytes = 256u << 10;
constexpr uint64_t kMsNs = 1000000;
constexpr uint64_t kBrokenMs = 1000;  // that a server gets to say why
// Creates of more bytes are offered before they go through a socket: a round trip, where they are there
// already.
constexpr uint32_t kOfferAboveBytes = 64u << 10;

net::Bytes bytes_of(const std::vector<uint32_t>& words, uint32_t count) {
  return {reinterpret_cast<const uint8_t*>(words.data()), size_t{count} * sizeof(uint32_t)};
}

wire::UpdateKind kind_of(uint8_t op) {
  switch (op) {
    case FFS_OP_WRITE:
      return wire::UpdateKind::kWrite;
    case FFS_OP_TRUNCATE:
      return wire::UpdateKind::kTruncate;
    case FFS_OP_REMOVE:
      return wire::UpdateKind::kRemove;
    case FFS_OP_REPLACE:
      return wire::UpdateKind::kReplace;
    case FFS_OP_CREATE:
      return wire::UpdateKind::kCreate;
    case FFS_OP_SPACE_EPOCH:
      return wire::UpdateKind::kSpaceEpoch;
    case FFS_OP_REMOVE_RANGE:
      return wire::UpdateKind::kRemoveRange;
    default:
      break;
  }
  FFS_CHECK(op == FFS_OP_TOUCH);
  return wire::UpdateKind::kTouch;
}

bool carries_data(uint8_t op) {
  return op == FFS_OP_WRITE || op == FFS_OP_REPLACE || op == FFS_OP_CREATE;
}

// A read that a frame of many may hold.
bool goes_with_others(const ffs_sqe& sqe) {
  return sqe.length <= wire::kMaxReadManyBytes && (sqe.flags & ~FFS_SQE_ZERO_FILL) == 0;
}

}  // namespace

// --- links ------------------------------------------------------------------------------------

void Ring::mark_dirty(Link& link) {
  if (link.dirty) return;
  link.dirty = true;
  dirty_.push_back(&link);
}

void Ring::pump_dirty() {
  while (start_backlog(), !dirty_.empty()) {  // failing links make others dirty
    Link* link = dirty_.back();
    dirty_.pop_back();
    link->dirty = false;
    const bool was_next = lands_next_ == link;
    if (was_next) lands_next_ = nullptr;
    pump(*link);
    if (was_next && lands_next_ == nullptr) wake_waiting_links();
  }
}

void Ring::watch(Link& link) {
  epoll_event event{EPOLLOUT, {&link}};
  link.wants_write = true;
  FFS_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.connection().socket.get(), &event) == 0);
}

void Ring::want_write(Link& link, bool on) {
  if (link.wants_write == on) return;
  epoll_event event{on ? EPOLLIN | EPOLLOUT : EPOLLIN, {&link}};
  FFS_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.connection().socket.get(), &event) == 0);
  link.wants_write = on;
}

// Brings the link forward: connects if there is a reason to, sends what may be sent.
void Ring::pump(Link& link) {
  if (link.state() == Link::State::kIdle) {
    if (link.waiting.empty()) return;
    if (link.retry_ns > now_ns_) return note_timer(link.retry_ns);
    auto started = link.start(now_ns_);
    if (!started.ok())
      return fail_link(link, {Ending::kUnreachable, static_cast<uint32_t>(started.error().code)});
    stats_.connects++;
    note_timer(link.connect_deadline_ns);
    return watch(link);
  }
  if (link.state() == Link::State::kConnecting || link.rdma_broken) return;
  net::SendQueue& queue = link.connection().queue;
  const uint64_t bound = client_->options().inflight_bytes;
  while (true) {
    size_t summed = 0;
    while (link.ready() && !link.waiting.empty() && queue.pending_bytes() < kSendAheadBytes &&
           summed < kSumAheadBytes) {
      const uint32_t index = link.waiting.head;
      if (slots_[index].update && carries_data(slots_[index].sqe.op)) summed += slots_[index].sqe.length;
      if (link.inflight_bytes > 0 && link.inflight_bytes + slots_[index].sqe.length > bound) break;
      if (!finds_place(link, slots_[index])) break;
      if (!send_request(link, index)) break;
    }
    link.push_reads();
    if (queue.empty()) break;
    stats_.send_calls++;
    auto sent = link.connection().flush(&tokens_);
    release_tokens();
    if (!sent.ok() && link.rdma()) return rdma_broke(link);
    if (!sent.ok()) return fail_link(link, {Ending::kLost});
    if (!*sent && link.rdma()) return;  // credits or completions bring it on
    if (!*sent) return want_write(link, true);
  }
  want_write(link, false);
}

void Ring::release_tokens() {
  for (const uint64_t token : tokens_) {
    const auto index = static_cast<uint32_t>(token - 1);
    slots_[index].payload_queued = false;
    if (slots_[index].answered_early) end_update(index);
  }
  tokens_.clear();
}

// The connection is over. Everything on it ends its try so; what was never sent counts as
// unreachable.
void Ring::fail_link(Link& link, const TryOutcome& outcome) {
  const bool was_ready = link.ready();
  if (link.connected()) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.connection().socket.get(), nullptr);
  if (link.rdma_watched) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.rdma_fd(), nullptr);
    link.rdma_watched = false;
    channels_--;
  }
  if (link.state() == Link::State::kRdma) link.distrust_rdma(now_ns_);
  const bool was_local =
      link.connected() ? link.local() : client_->options().transport != TransportChoice::kTcp;
  link.disconnect(&tokens_);
  release_tokens();
  uint64_t pause_ms = 0;
  if (was_ready) {
    link.local_refused = false;
  } else {
    // Automatic choice: what can't be had over the Unix socket may be had over TCP.
    if (client_->options().transport == TransportChoice::kAuto && was_local && !link.local_refused &&
        !link.endpoint().socket_path.empty() && link.endpoint().host_id == client_->host_id() &&
        outcome.ending == Ending::kUnreachable && link.failures == 0) {
      link.local_refused = true;
    } else {
      link.local_refused = false;
      pause_ms = backoff_ms(++link.failures + 1);
    }
  }
  link.retry_ns = now_ns_ + pause_ms * kMsNs;
  std::vector<std::pair<uint32_t, bool>> moved;  // rare
  for (uint32_t i = link.in_flight.head; i != kNoSlot; i = slots_[i].next) moved.emplace_back(i, true);
  for (uint32_t i = link.waiting.head; i != kNoSlot; i = slots_[i].next) moved.emplace_back(i, false);
  for (const auto& [index, sent] : moved) {
    // A second try may have gone with its request.
    if (slots_[index].list != &link.in_flight && slots_[index].list != &link.waiting) continue;
    detach(index);
    if (!sent) slots_[index].attempt++;
    end_try(index, sent || outcome.ending != Ending::kLost ? outcome : TryOutcome{Ending::kUnreachable});
  }
}

// --- channels ---------------------------------------------------------------------------------

// The link has gone over to RDMA.
void Ring::watch_channel(Link& link) {
  epoll_event event{EPOLLIN, {nullptr}};
  event.data.u64 = reinterpret_cast<uint64_t>(&link) | 1;
  FFS_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.rdma_fd(), &event) == 0);
  link.rdma_watched = true;
  channels_++;
}

// Before this thread sleeps. True: something has come already.
bool Ring::arm_channels() {
  bool found = false;
  for (const auto& link : links_) {
    if (!link->rdma() || link->rdma_broken) continue;
    auto more = link->channel().arm();
    found = found || !more.ok() || *more;
  }
  return found;
}

// The queue pair is lost. The server knows who was to blame, if anybody was, and says so over the socket
// before it closes it; then all that is on the link is asked again.
void Ring::rdma_broke(Link& link) {
  if (link.rdma_broken) return;
  link.rdma_broken = true;
  stats_.rdma_breaks++;
  if (!link.channel().heard()) link.distrust_rdma(now_ns_);
  link.broken_until_ns = now_ns_ + kBrokenMs * kMsNs;
  note_timer(link.broken_until_ns);
}

// --- landing ----------------------------------------------------------------------------------

// Whether the read goes by way of the ring's own memory: its slice can't be lent to this server, and that
// can.
bool Ring::lands(Link& link, const Slot& slot) {
  const ffs_sqe& sqe = slot.sqe;
  if (sqe.op != FFS_OP_READ || slot.is_hedge() || slot.on_device) return false;
  if (!link.ready() || !link.local() || link.rdma()) return false;
  if (sqe.length < Landing::kLeastBytes || sqe.length % kPageBytes != 0) return false;
  if (slot.iov()->direct_slice(sqe.iov_offset, sqe.length)) return false;
  return landing_.iov() != nullptr && link.region(*landing_.iov(), 0, kPageBytes, true) != 0;
}

// False: the read waits for room there.
bool Ring::finds_place(Link& link, Slot& slot) {
  if (!lands(link, slot)) return true;
  if (link.landing_bytes > 0 && link.landing_bytes + slot.sqe.length > Landing::kBytesALink) return false;
  if (lands_next_ != nullptr && lands_next_ != &link) return false;
  lands_next_ = nullptr;
  slot.landing = landing_.take(slot.sqe.length);
  if (!slot.lands()) {
    lands_next_ = &link;
    return false;
  }
  slot.place = landing_.data(slot.landing);
  link.landing_bytes += slot.sqe.length;
  return true;
}

// No server can write to the slot's place any more.
void Ring::leave_landing(Slot& slot) {
  if (!slot.lands()) return;
  landing_.give(slot.landing, slot.sqe.length);
  slot.link->landing_bytes -= slot.sqe.length;
  slot.landing = Landing::kNowhere;
  slot.place = nullptr;
  slot.direct_read = false;
  wake_waiting_links();
}

void Ring::wake_waiting_links() {
  for (const auto& link : links_) {
    if (!link->waiting.empty()) mark_dirty(*link);
  }
}

// --- requests ---------------------------------------------------------------------------------

wire::Context Ring::context_of(const Slot& slot, uint32_t handle, const Chain* chain) {
  wire::Context context{};
  context.target = slot.target.value;
  context.chain = slot.sqe.chain;
  context.capability = handle;
  if (chain != nullptr) {
    context.chain_term = chain->version.term;
    context.chain_counter = chain->version.counter;
  }
  if (slot.channel.number != 0) {
    context.client = client_->options().client.value;
    context.channel = slot.channel.number;
    context.sequence = slot.channel.sequence;
  }
  const uint64_t left_ms = slot.deadline_ns > now_ns_ ? (slot.deadline_ns - now_ns_) / kMsNs : 0;
  context.deadline_ms = static_cast<uint32_t>(std::clamp<uint64_t>(left_ms, 1, ~0u));
  context.space_epoch = slot.sqe.space_epoch;
  context.trace_id = slot.sqe.userdata;
  context.routing_epoch = routing_->epoch;
  context.priority = slot.sqe.priority;
  context.checksum_kind = static_cast<uint8_t>(client_->options().checksums ? wire::ChecksumKind::kCrc32c
                                                                            : wire::ChecksumKind::kNone);
  return context;
}

// Moves a waiting slot into flight. False: it ended instead.
bool Ring::send_request(Link& link, uint32_t index) {
  Slot& slot = slots_[index];
  auto handle = link.capability(slot.sqe.capability);
  if (!handle.ok()) {
    detach(index);
    if (slot.is_hedge()) return release_hedge(index), false;
    finish(index, -handle.error().code, Detail::kNone, !slot.lost_try);
    return false;
  }
  if (slot.on_device && refuses_device(link, index)) return false;
  slots_.remove(index);
  slots_.push(link.in_flight, index);
  slot.state = SlotState::kInFlight;
  slot.serial++;
  slot.attempt++;
  slot.sent_ns = now_ns_;
  const Chain* chain = chain_of(slot);
  if (chain != nullptr) slot.sent_in = chain->version;
  const uint32_t replicas = chain != nullptr ? chain->member_count : 1;
  slot.try_deadline_ns =
      now_ns_ + patience_ms(client_->options().try_timeout_ms, slot.late, replicas) * kMsNs;
  slot.paid = false;
  slot.region = 0;
  slot.direct_read = false;
  slot.over_rdma = false;
  slot.unchecked = false;
  slot.answered_early = false;
  link.inflight_bytes += slot.sqe.length;
  note_timer(slot.try_deadline_ns);
  slot.hedge_ns = ~0ull;
  if (slot.sqe.op == FFS_OP_READ) {
    push_read(link, index, *handle, chain);
    if (chain != nullptr) arm_hedge(slot, *chain);
    return true;
  }
  const wire::Context context = context_of(slot, *handle, chain);
  switch (slot.sqe.op) {
    case FFS_OP_EXISTS:
      push_exists(link, index, context);
      break;
    case FFS_OP_LAST_CHUNK:
      push_last_chunk(link, index, context);
      break;
    case FFS_OP_LIST_CHUNKS:
      push_list_chunks(link, index, context);
      break;
    default:
      push_update(link, index, context);
      break;
  }
  if (chain != nullptr && !slot.update) arm_hedge(slot, *chain);
  return true;
}

void Ring::push_read(Link& link, uint32_t index, uint32_t handle, const Chain* chain) {
  Slot& slot = slots_[index];
  const ffs_sqe& sqe = slot.sqe;
  if (slot.lands()) {
    slot.region = link.region(*landing_.iov(), slot.landing, sqe.length, true);
    if (slot.region == 0) leave_landing(slot);
  } else if (!slot.is_hedge() && !(link.rdma() && slot.rdma_refused)) {
    slot.region = link.region(*slot.iov(), sqe.iov_offset, sqe.length, true);
  }
  slot.direct_read = slot.region != 0;
  slot.over_rdma = slot.direct_read && link.rdma();
  if (slot.direct_read && !slot.lands() && !slot.on_device && link.takes_read_many() &&
      goes_with_others(sqe)) {
    if (!link.joins_reads(slot)) link.begin_reads(slot, context_of(slot, handle, chain));
    link.add_read(slot, request_id(index, slot));
    return;
  }
  wire::Read read{};
  read.context = context_of(slot, handle, chain);
  std::memcpy(read.key, sqe.key, sizeof read.key);
  read.offset = sqe.offset;
  read.length = sqe.length;
  // What this side can't read it can't check: the server does, before it sends.
  constexpr uint32_t kAtServer = wire::kReadVerifyPartial | wire::kReadVerifyWhole;
  if (client_->options().checksums) read.flags |= slot.on_device ? kAtServer : wire::kReadWantChecksums;
  if ((sqe.flags & FFS_SQE_VERIFY) != 0) read.flags |= wire::kReadVerifyPartial;
  if ((sqe.flags & FFS_SQE_COMPARE_TAG) != 0) read.flags |= wire::kReadCompareTag;
  if ((sqe.flags & FFS_SQE_TOUCH) != 0) read.flags |= wire::kReadTouch;
  read.tag_bytes = sqe.tag_bytes;
  std::memcpy(read.tag, sqe.tag, sizeof read.tag);
  read.bulk.length = sqe.length;
  read.bulk.kind = static_cast<uint8_t>(slot.over_rdma     ? wire::BulkKind::kRdma
                                        : slot.direct_read ? wire::BulkKind::kRegion
                                                           : wire::BulkKind::kInline);
  if (slot.direct_read) {
    read.bulk.region = slot.region;
    read.bulk.address = slot.over_rdma ? slot.iov()->remote_address(sqe.iov_offset)
                        : slot.lands() ? slot.landing
                                       : sqe.iov_offset % kExtentBytes;
  }
  link.connection().queue.push(Type::kRead, request_id(index, slot), read);
}

// The server is asked for the same bytes again, to be compared with its checksums at rest: if they
// differ there too, its replica is repaired. Nobody waits for this answer: the try has ended, so it
// comes late.
void Ring::report_damage(Link& link, uint32_t index) {
  const Slot& slot = slots_[index];
  if (!link.ready()) return;  // it failed since the answer came
  auto handle = link.capability(slot.sqe.capability);
  if (!handle.ok()) return;  // dropped: nothing more may be asked under it
  wire::Read read{};
  read.context = context_of(slot, *handle, routing_->chain(ChainId(slot.sqe.chain)));
  read.context.priority = 255;
  std::memcpy(read.key, slot.sqe.key, sizeof read.key);
  read.offset = slot.sqe.offset;
  read.length = slot.sqe.length;
  read.flags = wire::kReadVerifyWhole;
  read.bulk.length = slot.sqe.length;
  read.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
  Slot ended = slot;
  ended.serial--;
  link.connection().queue.push(Type::kRead, request_id(index, ended), read);
  mark_dirty(link);
}

void Ring::push_update(Link& link, uint32_t index, const wire::Context& context) {
  Slot& slot = slots_[index];
  const ffs_sqe& sqe = slot.sqe;
  wire::Update update{};
  update.context = context;
  std::memcpy(update.key, sqe.key, sizeof update.key);
  update.kind = static_cast<uint8_t>(kind_of(sqe.op));
  update.codec = sqe.codec;
  update.tag_bytes = sqe.tag_bytes;
  if ((sqe.flags & FFS_SQE_PIN) != 0) update.flags |= wire::kUpdatePin;
  if ((sqe.flags & FFS_SQE_UNPIN) != 0) update.flags |= wire::kUpdateUnpin;
  if ((sqe.flags & FFS_SQE_NEED_EXISTING) != 0) update.flags |= wire::kUpdateNeedExisting;
  if ((sqe.flags & FFS_SQE_BEYOND_END) != 0) update.flags |= wire::kUpdateBeyondEnd;
  update.offset = sqe.offset;
  update.length = sqe.length;
  update.logical_length = sqe.logical_length;
  update.expiry_ms = sqe.expiry_ms;
  std::memcpy(update.tag, sqe.tag, sizeof update.tag);
  if (!carries_data(sqe.op)) {
    link.connection().queue.push(Type::kUpdate, request_id(index, slot), update);
    return;
  }
  // Without checksums a server could take bytes that their owner changed after giving up. Those of a device's
  // memory this side can't compute: the server does when it has the bytes, and the end of the queue pair sees
  // to it that it gets none later (slice_is_free).
  const bool checksums = client_->options().checksums && !slot.on_device;
  slot.unchecked = slot.on_device;
  if (slot.on_device) update.context.checksum_kind = static_cast<uint8_t>(wire::ChecksumKind::kNone);
  if ((checksums || slot.on_device) && !(link.rdma() && slot.rdma_refused)) {
    slot.region = link.region(*slot.iov(), sqe.iov_offset, sqe.length, false);
    slot.over_rdma = slot.region != 0 && link.rdma();
  }
  if (sqe.op == FFS_OP_CREATE && sqe.length > kOfferAboveBytes && slot.region == 0 && !slot.wanted &&
      link.takes_offers()) {
    update.flags |= wire::kUpdateOffer;
    slot.offered = true;
    slot.summed = 0;
    summing_ = index;
    link.connection().queue.push(Type::kUpdate, request_id(index, slot), update);
    return;
  }
  const net::Bytes data(slot.data(), sqe.length);
  const uint32_t pieces = checksums ? sum_payload(index) : 0;
  update.bulk.length = sqe.length;
  update.bulk.kind = static_cast<uint8_t>(slot.over_rdma     ? wire::BulkKind::kRdma
                                          : slot.region != 0 ? wire::BulkKind::kRegion
                                                             : wire::BulkKind::kInline);
  if (slot.region != 0) {
    update.bulk.region = slot.region;
    update.bulk.address =
        slot.over_rdma ? slot.iov()->remote_address(sqe.iov_offset) : sqe.iov_offset % kExtentBytes;
    link.connection().queue.push(Type::kUpdate, request_id(index, slot), update, bytes_of(crcs_, pieces));
  } else {
    slot.payload_queued = true;
    link.connection().queue.push(Type::kUpdate, request_id(index, slot), update, bytes_of(crcs_, pieces),
                                 data, index + 1);
  }
}

// A granule's checksum of the create that was offered last, while its answer is looked for. In small steps:
// if the bytes are there already, nobody needs them.
void Ring::sum_ahead() {
  if (summing_ == kNoSlot || !client_->options().checksums) return;
  Slot& slot = slots_[summing_];
  if (slot.state != SlotState::kInFlight || !slot.offered || slot.summed == slot.sqe.length) return;
  const uint32_t length = std::min(kGranuleBytes, slot.sqe.length - slot.summed);
  net::piece_crcs(slot.summed, {slot.data() + slot.summed, length},
                  offered_crcs_.data() + slot.summed / kGranuleBytes);
  slot.summed += length;
}

// The checksums of the request's bytes to crcs_; how many. What was computed ahead serves once: after a try
// that failed by them, all are computed anew.
uint32_t Ring::sum_payload(uint32_t index) {
  Slot& slot = slots_[index];
  const uint32_t ahead = slot.offered && summing_ == index ? slot.summed : 0;
  slot.offered = false;
  std::copy_n(offered_crcs_.begin(), net::piece_count(0, ahead), crcs_.begin());
  net::piece_crcs(slot.sqe.offset + ahead, {slot.data() + ahead, slot.sqe.length - ahead},
                  crcs_.data() + net::piece_count(0, ahead));
  return net::piece_count(slot.sqe.offset, slot.sqe.length);
}

void Ring::push_exists(Link& link, uint32_t index, const wire::Context& context) {
  Slot& slot = slots_[index];
  wire::Exists exists{};
  exists.context = context;
  exists.count = slot.sqe.length;
  if ((slot.sqe.flags & FFS_SQE_TOUCH) != 0) exists.flags |= wire::kReadTouch;
  const uint8_t* keys = slot.is_hedge() ? slots_[slot.hedge_of].data() : slot.data();
  link.connection().queue.push(Type::kExists, request_id(index, slot), exists,
                               net::Bytes(keys, size_t{exists.count} * sizeof(wire::ExistsKey)));
}

void Ring::push_last_chunk(Link& link, uint32_t index, const wire::Context& context) {
  Slot& slot = slots_[index];
  wire::LastChunk last{};
  last.context = context;
  ChunkKey key;
  std::memcpy(key.bytes.data(), slot.sqe.key, key.bytes.size());
  last.space = key.space();
  link.connection().queue.push(Type::kLastChunk, request_id(index, slot), last);
}

void Ring::push_list_chunks(Link& link, uint32_t index, const wire::Context& context) {
  Slot& slot = slots_[index];
  wire::ListChunks list{};
  list.context = context;
  std::memcpy(list.key, slot.sqe.key, sizeof list.key);
  list.count = slot.sqe.length;
  if ((slot.sqe.flags & FFS_LIST_ALL_SPACES) != 0) list.flags |= wire::kListAllSpaces;
  if ((slot.sqe.flags & FFS_LIST_SPACES_ONLY) != 0) list.flags |= wire::kListSpacesOnly;
  link.connection().queue.push(Type::kListChunks, request_id(index, slot), list);
}

}  // namespace ffs::client
