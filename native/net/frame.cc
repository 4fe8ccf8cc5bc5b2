#include "net/frame.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/guarded.h"
#include "base/ids.h"

namespace ffs::net {

using wire::FrameHeader;
using wire::Type;

namespace {

constexpr size_t kHeaderBytes = sizeof(FrameHeader);
constexpr size_t kMaxHeadBytes = kHeaderBytes + wire::kMaxFixedBytes + wire::kMaxVarBytes;
// While a payload is received, this much of what follows is taken along: whole small frames, but
// not so much of the next payload that copying it to its place would cost.
constexpr size_t kSpillBytes = 4096;

// The checksum of a frame's head, as if its field were zero.
uint32_t head_crc(FrameHeader header, Bytes fixed, Bytes var) {
  header.frame_crc = 0;
  uint32_t crc = crc32c(&header, sizeof header);
  crc = crc32c_extend(crc, fixed.data(), fixed.size());
  return crc32c_extend(crc, var.data(), var.size());
}

// Why a header can't be one of ours, or null.
const char* header_fault(const FrameHeader& header, uint8_t version) {
  if (header.magic != wire::kMagic) return "a frame does not begin with the magic FFS1";
  if (header.version != version) return "a frame has another protocol version than hello chose";
  if (header.fixed_bytes > wire::kMaxFixedBytes) return "a frame's fixed part is over 1024 bytes";
  if (header.var_bytes > wire::kMaxVarBytes) return "a frame's variable part is over 256 KiB";
  if (header.payload_bytes > wire::kMaxPayloadBytes) return "a frame's payload is over 16 MiB";
  const uint32_t least = min_fixed_bytes(static_cast<Type>(header.type));
  if (least == 0) return "a frame has an unknown type";
  if (header.fixed_bytes < least) return "a frame's fixed part is shorter than its type's";
  if (header.payload_bytes != 0 && !may_carry_payload(static_cast<Type>(header.type))) {
    return "a frame of this type carries no payload";
  }
  return nullptr;
}

}  // namespace

uint32_t min_fixed_bytes(Type type) {
  switch (type) {
    case Type::kHello:
      return sizeof(wire::Hello);
    case Type::kHelloReply:
      return sizeof(wire::HelloReply);
    case Type::kOpenCapability:
      return sizeof(wire::OpenCapability);
    case Type::kOpenCapabilityReply:
      return sizeof(wire::StatusReply);
    case Type::kCloseCapability:
      return sizeof(wire::OpenCapability);
    case Type::kRegisterRegion:
      return sizeof(wire::RegisterRegion);
    case Type::kRegisterRegionReply:
      return sizeof(wire::StatusReply);
    case Type::kUnregisterRegion:
      return sizeof(wire::UnregisterRegion);
    case Type::kUnregisterRegionReply:
      return sizeof(wire::StatusReply);
    case Type::kPing:
      return sizeof(wire::StatusReply);
    case Type::kPong:
      return sizeof(wire::StatusReply);
    case Type::kPeerProof:
      return sizeof(wire::PeerProof);
    case Type::kRdmaOpen:
      return sizeof(wire::RdmaOpen);
    case Type::kRdmaOpenReply:
      return sizeof(wire::RdmaOpenReply);
    case Type::kRead:
      return sizeof(wire::Read);
    case Type::kReadReply:
      return sizeof(wire::ReadReply);
    case Type::kUpdate:
      return sizeof(wire::Update);
    case Type::kUpdateReply:
      return sizeof(wire::UpdateReply);
    case Type::kExists:
      return sizeof(wire::Exists);
    case Type::kExistsReply:
      return sizeof(wire::ExistsReply);
    case Type::kLastChunk:
      return sizeof(wire::LastChunk);
    case Type::kLastChunkReply:
      return sizeof(wire::LastChunkReply);
    case Type::kListChunks:
      return sizeof(wire::ListChunks);
    case Type::kListChunksReply:
      return sizeof(wire::ListChunksReply);
    case Type::kReadMany:
      return sizeof(wire::ReadMany);
    case Type::kReadManyReply:
      return sizeof(wire::ReadManyReply);
    case Type::kForward:
      return sizeof(wire::Forward);
    case Type::kNotice:
      return sizeof(wire::Notice);
    case Type::kSync:
      return sizeof(wire::Sync);
    case Type::kUsed:
      return sizeof(wire::Used);
  }
  return 0;
}

bool may_carry_payload(Type type) {
  return type == Type::kUpdate || type == Type::kForward || type == Type::kReadReply || type == Type::kSync;
}

// --- FrameReader ----------------------------------------------------------------------------

FrameReader::FrameReader(uint32_t buffer_bytes) : buffer_(std::max<size_t>(buffer_bytes, 2 * kSpillBytes)) {}

int FrameReader::slots(iovec out[2]) {
  if (state_ == State::kBad || state_ == State::kAwaitPlace) return 0;
  int count = 0;
  size_t room_wanted = buffer_.size();
  if (state_ == State::kPayload) {
    if (payload_left_ == 0) return 0;
    FFS_CHECK(begin_ == end_);  // place_payload and next() take what is buffered first
    begin_ = end_ = 0;
    if (payload_to_ != nullptr) {
      if (receive_limit_bytes_ != 0 && payload_left_ > receive_limit_bytes_) {
        out[0] = {payload_to_, receive_limit_bytes_};
        return 1;
      }
      out[count++] = {payload_to_, payload_left_};
      room_wanted = kSpillBytes;
    }
  } else if (end_ - begin_ >= need_bytes_) {
    return 0;  // a whole head is there: next() first
  }
  if (begin_ == end_) begin_ = end_ = 0;
  const bool tight = buffer_.size() - end_ < kSpillBytes || buffer_.size() - begin_ < need_bytes_;
  if (begin_ > 0 && tight) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (state_ == State::kHeader && buffer_.size() < need_bytes_) buffer_.resize(need_bytes_);
  out[count++] = {buffer_.data() + end_, std::min(room_wanted, buffer_.size() - end_)};
  return count;
}

void FrameReader::received(size_t bytes) {
  if (state_ == State::kPayload && payload_to_ != nullptr) {
    const size_t taken = std::min(bytes, payload_left_);
    payload_to_ += taken;
    payload_left_ -= taken;
    bytes -= taken;
  }
  end_ += bytes;
  FFS_CHECK(end_ <= buffer_.size());
}

FrameReader::Next FrameReader::bad(const char* what) {
  state_ = State::kBad;
  error_ = Error::of(EPROTO, what);
  return Next::kBad;
}

void FrameReader::consume_payload_from_buffer() {
  const size_t taken = std::min(end_ - begin_, payload_left_);
  if (payload_to_ != nullptr && taken > 0) {
    std::memcpy(payload_to_, buffer_.data() + begin_, taken);
    payload_to_ += taken;
  }
  begin_ += taken;
  payload_left_ -= taken;
}

FrameReader::Next FrameReader::next(Frame* frame) {
  if (state_ == State::kBad) return Next::kBad;
  FFS_CHECK(state_ != State::kAwaitPlace);
  if (state_ == State::kPayload) {
    consume_payload_from_buffer();
    if (payload_left_ > 0) return Next::kNeedMore;
    state_ = State::kHeader;
    return Next::kPayload;
  }
  const size_t have = end_ - begin_;
  need_bytes_ = kHeaderBytes;
  if (have < kHeaderBytes) return Next::kNeedMore;
  FrameHeader header;
  std::memcpy(&header, buffer_.data() + begin_, kHeaderBytes);
  if (const char* fault = header_fault(header, version_)) return bad(fault);
  need_bytes_ = kHeaderBytes + header.fixed_bytes + header.var_bytes;
  FFS_CHECK(need_bytes_ <= kMaxHeadBytes);
  if (have < need_bytes_) return Next::kNeedMore;

  const uint8_t* at = buffer_.data() + begin_ + kHeaderBytes;
  frame->type = static_cast<Type>(header.type);
  frame->flags = header.flags;
  frame->payload_bytes = header.payload_bytes;
  frame->request_id = header.request_id;
  frame->fixed = Bytes(at, header.fixed_bytes);
  frame->var = Bytes(at + header.fixed_bytes, header.var_bytes);
  if (head_crc(header, frame->fixed, frame->var) != header.frame_crc) {
    return bad("a frame's checksum does not match");
  }
  frame_begin_ = begin_;
  begin_ += need_bytes_;
  need_bytes_ = kHeaderBytes;
  payload_left_ = header.payload_bytes;
  if (payload_left_ > 0) state_ = State::kAwaitPlace;
  return Next::kFrame;
}

void FrameReader::place_payload(uint8_t* to) {
  FFS_CHECK(state_ == State::kAwaitPlace);
  state_ = State::kPayload;
  payload_to_ = to;
  consume_payload_from_buffer();
}

bool FrameReader::place_payload_guarded(uint8_t* to) {
  FFS_CHECK(state_ == State::kAwaitPlace);
  const size_t here = std::min(end_ - begin_, payload_left_);
  const uint8_t* from = buffer_.data() + begin_;
  if (here > 0 && !touch([=] { std::memcpy(to, from, here); })) return false;
  begin_ += here;
  payload_left_ -= here;
  place_payload(to + here);
  return true;
}

void FrameReader::discard_payload() {
  place_payload(nullptr);
}

void FrameReader::abandon_payload() {
  FFS_CHECK(state_ == State::kPayload);
  payload_to_ = nullptr;
}

void FrameReader::unread() {
  FFS_CHECK(state_ == State::kAwaitPlace || state_ == State::kHeader);
  need_bytes_ = begin_ - frame_begin_;
  begin_ = frame_begin_;
  payload_left_ = 0;
  state_ = State::kHeader;
}

// --- SendQueue ------------------------------------------------------------------------------

void SendQueue::push(Type type, uint64_t request_id, Bytes fixed, Bytes var, Bytes payload, uint64_t token,
                     int fd) {
  push_head(type, request_id, fixed, var, payload.size(), fd);
  if (!payload.empty()) {
    push_piece(payload, token);
  } else if (token != 0) {
    pieces_.back().token = token;
  }
}

void SendQueue::push_piece(Bytes payload, uint64_t token, bool stays) {
  pieces_.push_back({payload.data(), 0, payload.size(), token, -1, stays});
  pending_bytes_ += payload.size();
}

void SendQueue::move_payload(uint64_t token, const uint8_t* to) {
  for (size_t i = first_; i < pieces_.size(); i++) {
    if (pieces_[i].token != token) continue;
    FFS_CHECK(pieces_[i].payload != nullptr);
    pieces_[i].payload = to;
    return;
  }
  FFS_CHECK(false && "no payload of this token waits");
}

void SendQueue::push_head(Type type, uint64_t request_id, Bytes fixed, Bytes var, size_t payload_bytes,
                          int fd) {
  FFS_CHECK(fixed.size() <= wire::kMaxFixedBytes && var.size() <= wire::kMaxVarBytes);
  FFS_CHECK(payload_bytes <= wire::kMaxPayloadBytes);
  FrameHeader header{};
  header.magic = wire::kMagic;
  header.version = version_;
  header.type = static_cast<uint8_t>(type);
  header.fixed_bytes = static_cast<uint32_t>(fixed.size());
  header.var_bytes = static_cast<uint32_t>(var.size());
  header.payload_bytes = static_cast<uint32_t>(payload_bytes);
  header.request_id = request_id;
  header.frame_crc = head_crc(header, fixed, var);

  compact();
  const size_t at = arena_.size();
  const size_t length = kHeaderBytes + fixed.size() + var.size();
  arena_.resize(at + length);
  std::memcpy(arena_.data() + at, &header, kHeaderBytes);
  std::memcpy(arena_.data() + at + kHeaderBytes, fixed.data(), fixed.size());
  if (!var.empty()) std::memcpy(arena_.data() + at + kHeaderBytes + fixed.size(), var.data(), var.size());
  pending_bytes_ += length;

  // Heads that lie side by side are one piece, unless the earlier or this one has a say of its own.
  const bool joins = pieces_.size() > first_ && pieces_.back().payload == nullptr && pieces_.back().fd < 0 &&
                     pieces_.back().token == 0 && fd < 0 && pieces_.back().at + pieces_.back().length == at;
  if (joins) {
    pieces_.back().length += length;
  } else {
    pieces_.push_back({nullptr, at, length, 0, fd, false});
  }
}

// Takes back the room of what is sent: all of it when the queue is empty, else when it is most
// of the arena (so that a queue that never runs empty stays bounded).
void SendQueue::compact() {
  if (first_ == pieces_.size()) {
    pieces_.clear();
    arena_.clear();
    first_ = 0;
    first_sent_ = 0;
    return;
  }
  if (first_ < 64 || first_ < pieces_.size() / 2) return;
  pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<ptrdiff_t>(first_));
  first_ = 0;
  size_t cut = arena_.size();
  for (const Piece& piece : pieces_) {
    if (piece.payload != nullptr) continue;
    cut = piece.at;
    break;
  }
  arena_.erase(arena_.begin(), arena_.begin() + static_cast<ptrdiff_t>(cut));
  for (Piece& piece : pieces_) {
    if (piece.payload == nullptr) piece.at -= cut;
  }
}

int SendQueue::gather(iovec* out, int capacity, int* fd) const {
  *fd = -1;
  int count = 0;
  for (size_t i = first_; i < pieces_.size() && count < capacity; i++) {
    const Piece& piece = pieces_[i];
    const size_t sent = i == first_ ? first_sent_ : 0;
    if (piece.fd >= 0 && sent == 0) {
      if (count > 0) break;
      *fd = piece.fd;
    }
    out[count++] = {const_cast<uint8_t*>(start(piece)) + sent, piece.length - sent};
    if (*fd >= 0) break;  // the descriptor goes with its own frame only
  }
  return count;
}

bool SendQueue::holds_payload() const {
  return std::any_of(pieces_.begin() + static_cast<ptrdiff_t>(first_), pieces_.end(),
                     [](const Piece& piece) { return piece.token != 0; });
}

bool SendQueue::large_comes(size_t least_bytes) const {
  return first_ < pieces_.size() && pieces_[first_].large(least_bytes);
}

int SendQueue::gather_alike(iovec* out, int capacity, int* fd, size_t least_bytes, bool* before_large) const {
  const bool large = large_comes(least_bytes);
  const int count = gather(out, capacity, fd);
  int alike = 0;
  while (alike < count && pieces_[first_ + static_cast<size_t>(alike)].large(least_bytes) == large) alike++;
  *before_large = !large && alike < count;
  return alike;
}

void SendQueue::advance(size_t bytes, std::vector<uint64_t>* released) {
  FFS_CHECK(bytes <= pending_bytes_);
  pending_bytes_ -= bytes;
  while (bytes > 0) {
    const Piece& piece = pieces_[first_];
    const size_t left = piece.length - first_sent_;
    if (bytes < left) {
      first_sent_ += bytes;
      return;
    }
    bytes -= left;
    if (piece.token != 0) released->push_back(piece.token);
    first_++;
    first_sent_ = 0;
  }
}

void SendQueue::clear(std::vector<uint64_t>* released) {
  for (size_t i = first_; i < pieces_.size(); i++) {
    if (pieces_[i].token != 0) released->push_back(pieces_[i].token);
  }
  pieces_.clear();
  arena_.clear();
  first_ = first_sent_ = pending_bytes_ = 0;
}

// --- granule pieces ---------------------------------------------------------------------------

uint32_t piece_count(uint32_t offset, uint32_t length) {
  if (length == 0) return 0;
  const uint64_t last = static_cast<uint64_t>(offset) + length - 1;
  return static_cast<uint32_t>(last / kGranuleBytes - offset / kGranuleBytes + 1);
}

void piece_crcs(uint32_t offset, Bytes data, uint32_t* out) {
  size_t at = 0;
  while (at < data.size()) {
    const size_t in_granule = kGranuleBytes - (offset + at) % kGranuleBytes;
    const size_t length = std::min(in_granule, data.size() - at);
    *out++ = crc32c(data.data() + at, length);
    at += length;
  }
}

}  // namespace ffs::net
