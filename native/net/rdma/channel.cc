#include "net/rdma/channel.h"

#include <algorithm>
#include <cstring>

namespace ffs::net::rdma {

namespace {

constexpr uint32_t kPollBatch = 32;
constexpr uint32_t kMostReposts = 4;  // receive buffers that one call posts anew
constexpr int kGatherPieces = 64;
// IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR: the other side refused the address, the
// key or the length. (verbs_pair.cc asserts the numbers.)
constexpr uint32_t kRemoteFaults[] = {9, 10, 11};

}  // namespace

void ChannelCounters::add(const ChannelCounters& other) {
  doorbells += other.doorbells;
  sends += other.sends;
  inline_sends += other.inline_sends;
  credit_sends += other.credit_sends;
  writes += other.writes;
  reads += other.reads;
  bulk_bytes += other.bulk_bytes;
  completions += other.completions;
  receives += other.receives;
}

uint64_t channel_memory_bytes(const Shape& shape) {
  return 2ull * shape.receives * shape.message_bytes;
}

Channel::Channel(std::unique_ptr<Pair> pair, const Shape& shape, uint8_t* memory, uint32_t local_key,
                 uint32_t their_receives, uint32_t their_message_bytes)
    : pair_(std::move(pair)),
      shape_(shape),
      memory_(memory),
      local_key_(local_key),
      most_message_bytes_(std::min(shape.message_bytes, their_message_bytes)),
      credits_(their_receives, shape.receives),
      postings_(shape.depth, shape.most_bytes),
      completions_(kPollBatch) {
  FFS_CHECK(most_message_bytes_ > 0);
  for (uint32_t i = 0; i < shape.receives; i++) free_slots_.push_back(static_cast<int32_t>(i));
  messages_.reserve(shape.receives);
}

Channel::~Channel() = default;

// --- bulk -----------------------------------------------------------------------------------------

void Channel::write(const uint8_t* from, uint32_t local_key, uint64_t to, uint32_t remote_key,
                    uint32_t length, uint64_t token, uint64_t tag) {
  FFS_CHECK(length > 0);
  Work work;
  work.kind = WorkKind::kWrite;
  work.memory = const_cast<uint8_t*>(from);
  work.length = length;
  work.local_key = local_key;
  work.remote = to;
  work.remote_key = remote_key;
  counters_.bulk_bytes += length;
  postings_.add(work, token, tag);
}

void Channel::read(uint8_t* to, uint32_t local_key, uint64_t from, uint32_t remote_key, uint32_t length,
                   uint64_t token, uint64_t tag) {
  FFS_CHECK(length > 0);
  Work work;
  work.kind = WorkKind::kRead;
  work.memory = to;
  work.length = length;
  work.local_key = local_key;
  work.remote = from;
  work.remote_key = remote_key;
  counters_.bulk_bytes += length;
  postings_.add(work, token, tag);
}

// --- sending --------------------------------------------------------------------------------------

// Posts what waits, as far as there is room: one doorbell.
Status Channel::ring() {
  const auto batch = postings_.batch();
  if (batch.empty()) return ok_status();
  counters_.doorbells++;
  for (const Work& work : batch) {
    counters_.sends += work.kind == WorkKind::kSend;
    counters_.inline_sends += work.kind == WorkKind::kSend && work.inlined;
    counters_.writes += work.kind == WorkKind::kWrite;
    counters_.reads += work.kind == WorkKind::kRead;
  }
  auto posted = pair_->post(batch);
  postings_.posted();
  if (!posted.ok()) return breaks(posted.error().code, posted.error().what);
  return ok_status();
}

// One message of the queue's bytes. False: none can go now.
bool Channel::add_message(SendQueue& queue, size_t most_bytes, size_t* taken) {
  if (!credits_.can_send() || !postings_.has_room() || free_slots_.empty()) return false;
  const int32_t slot = free_slots_.back();
  uint8_t* const to = memory_ + (size_t{shape_.receives} + static_cast<size_t>(slot)) * shape_.message_bytes;
  iovec pieces[kGatherPieces];
  int descriptor = -1;
  const int count = queue.gather(pieces, kGatherPieces, &descriptor);
  FFS_CHECK(descriptor < 0);
  size_t bytes = 0;
  const size_t most = std::min<size_t>(most_message_bytes_, most_bytes);
  for (int i = 0; i < count && bytes < most; i++) {
    const size_t length = std::min(pieces[i].iov_len, most - bytes);
    std::memcpy(to + bytes, pieces[i].iov_base, length);
    bytes += length;
  }
  Entry entry;
  entry.work.kind = WorkKind::kSend;
  entry.work.memory = to;
  entry.work.length = static_cast<uint32_t>(bytes);
  entry.work.local_key = local_key_;
  entry.work.immediate = credits_.take();
  entry.work.inlined = bytes <= shape_.inline_bytes;
  // Its bytes are taken when it is posted, which is before the next message is made from this slot only if
  // there is one message a batch: so the slot stays taken until then, and an inline one comes back at once.
  entry.slot = entry.work.inlined ? -1 : slot;
  free_slots_.pop_back();
  if (entry.work.inlined) freed_slots_.push_back(slot);
  postings_.add_message(entry);
  *taken = bytes;
  return true;
}

Result<bool> Channel::flush(SendQueue& queue, std::vector<uint64_t>* released, size_t most_bytes) {
  if (broken_) return Error::of(EPIPE, fault_);
  while (true) {
    bool full = false;
    while (!queue.empty() && most_bytes > 0) {
      size_t bytes = 0;
      if (!add_message(queue, most_bytes, &bytes)) {
        full = true;
        break;
      }
      most_bytes -= bytes;
      queue.advance(bytes, released);
    }
    FFS_TRY_STATUS(ring());
    free_slots_.insert(free_slots_.end(), freed_slots_.begin(), freed_slots_.end());
    const bool more_room = !freed_slots_.empty();
    freed_slots_.clear();
    if (queue.empty() || most_bytes == 0) break;
    if (full && !(more_room && credits_.can_send() && postings_.has_room())) return false;
  }
  if (credits_.must_tell()) FFS_TRY_STATUS(tell_credits());
  return queue.empty() && !postings_.waits();
}

Status Channel::tell_credits() {
  if (!postings_.has_room()) return ok_status();  // the next flush or completion comes to it
  Entry entry;
  entry.work.kind = WorkKind::kSend;
  entry.work.memory = memory_;
  entry.work.local_key = local_key_;
  entry.work.inlined = true;
  entry.work.immediate = credits_.take();
  postings_.add_message(entry);
  counters_.credit_sends++;
  return ring();
}

// --- receiving ------------------------------------------------------------------------------------

Error Channel::breaks(int code, const char* why) {
  broken_ = true;
  if (fault_ == nullptr) fault_ = why != nullptr ? why : "the RDMA connection is broken";
  return Error::of(code, fault_);
}

Status Channel::take(const Completion& completion) {
  if (completion.fault != 0) {
    const bool first = !broken_;
    (void)breaks(EPIPE, pair_->fault_name(completion.fault));
    if (!completion.received && first) {
      for (const uint32_t fault : kRemoteFaults) remote_access_ = remote_access_ || fault == completion.fault;
      (void)postings_.failed(completion.number, &culprit_, &ended_, &freed_slots_);
      free_slots_.insert(free_slots_.end(), freed_slots_.begin(), freed_slots_.end());
      freed_slots_.clear();
    }
    return ok_status();
  }
  if (!completion.received) {
    counters_.completions++;
    postings_.ended(completion.number, &ended_, &freed_slots_);
    free_slots_.insert(free_slots_.end(), freed_slots_.begin(), freed_slots_.end());
    freed_slots_.clear();
    return ok_status();
  }
  counters_.receives++;
  if (completion.number >= shape_.receives || completion.bytes > shape_.message_bytes) {
    return breaks(EPROTO, "a message came in no buffer of this connection");
  }
  if (!credits_.told(completion.immediate)) {
    return breaks(EPROTO, "the other side gives back more receive buffers than it has");
  }
  const auto buffer = static_cast<uint32_t>(completion.number);
  if (completion.bytes == 0) return repost(buffer);
  if (first_ == messages_.size()) messages_.clear(), first_ = 0;
  messages_.push_back({buffer, completion.bytes, 0});
  return ok_status();
}

// Some together; few enough that the other always has half of them ready or on their way.
Status Channel::repost(uint32_t buffer) {
  used_buffers_.push_back(buffer);
  if (used_buffers_.size() < std::min(kMostReposts, shape_.receives / 4)) return ok_status();
  auto posted = pair_->post_receives(used_buffers_);
  if (!posted.ok()) return breaks(posted.error().code, posted.error().what);
  credits_.posted(static_cast<uint32_t>(used_buffers_.size()));
  used_buffers_.clear();
  return ok_status();
}

// What was received before a break is still given; receive() tells of the break after it.
Status Channel::poll() {
  if (pair_ == nullptr) return Error::of(EPIPE, "the RDMA connection has ended");
  while (true) {
    const int count = pair_->poll(completions_);
    if (count < 0) return breaks(EIO, "polling the completion queue failed");
    for (int i = 0; i < count; i++) {
      FFS_TRY_STATUS(take(completions_[static_cast<size_t>(i)]));
    }
    if (static_cast<size_t>(count) < completions_.size()) break;
  }
  if (broken_) return Error::of(EPIPE, fault_);
  // What waited for room or for credits to be told.
  if (postings_.waits()) FFS_TRY_STATUS(ring());
  if (credits_.must_tell()) FFS_TRY_STATUS(tell_credits());
  return ok_status();
}

Result<size_t> Channel::receive(FrameReader& reader) {
  if (first_ == messages_.size()) (void)poll();
  if (first_ == messages_.size()) {
    if (broken_) return Error::of(EPIPE, fault_);
    return Error::of(EAGAIN, "receiving");
  }
  Message& message = messages_[first_];
  iovec pieces[2];
  const int count = reader.slots(pieces);
  if (count == 0) return Error::of(EBUSY, "the reader has no room");
  const uint8_t* from = memory_ + size_t{message.buffer} * shape_.message_bytes;
  size_t got = 0;
  for (int i = 0; i < count; i++) {
    const size_t length = std::min<size_t>(pieces[i].iov_len, message.bytes - message.taken);
    std::memcpy(pieces[i].iov_base, from + message.taken, length);
    message.taken += static_cast<uint32_t>(length);
    got += length;
  }
  reader.received(got);
  if (message.taken == message.bytes) {
    const uint32_t buffer = message.buffer;
    first_++;
    if (!broken_) (void)repost(buffer);
  }
  if (!broken_ && credits_.must_tell() && first_ == messages_.size()) (void)tell_credits();
  return got;
}

Result<bool> Channel::arm() {
  if (broken_) return true;
  if (!armed_) {
    // An end, or the owner would look again and again.
    if (auto asked = pair_->arm(); !asked.ok()) return breaks(asked.error().code, asked.error().what);
    armed_ = true;
    (void)poll();
  }
  return readable() || !ended_.empty();
}

// --- ending ---------------------------------------------------------------------------------------

void Channel::end() {
  pair_.reset();
  messages_.clear();  // their memory goes with the pair
  first_ = 0;
}

void Channel::abandon(std::vector<Ended>* out) {
  FFS_CHECK(pair_ == nullptr);
  broken_ = true;
  if (fault_ == nullptr) fault_ = "the RDMA connection has ended";
  for (const Ended& ended : ended_) out->push_back(ended);
  ended_.clear();
  postings_.abandon(out);
}

}  // namespace ffs::net::rdma
