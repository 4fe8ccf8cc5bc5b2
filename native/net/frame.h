// Frames without I/O (docs/wire_format.md): FrameReader turns received bytes into frames,
// SendQueue turns frames into bytes to send. Neither knows of sockets, threads or clocks; both
// belong to one thread.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/result.h"
#include "ffs/wire.h"

namespace ffs::net {

using Bytes = std::span<const uint8_t>;

// A decoded frame. The spans point into the reader's buffer: they hold until the reader is
// asked for its next frame or given more bytes.
struct Frame {
  wire::Type type{};
  uint16_t flags = 0;
  uint32_t payload_bytes = 0;
  uint64_t request_id = 0;
  Bytes fixed;
  Bytes var;

  // The fixed part as this side knows it: a longer one is cut, what a shorter one lacks is zero.
  // (The reader has refused fixed parts shorter than the type's first version.)
  template <typename T>
  T as() const {
    static_assert(std::is_trivially_copyable_v<T>);
    T out{};
    std::memcpy(&out, fixed.data(), fixed.size() < sizeof(T) ? fixed.size() : sizeof(T));
    return out;
  }
  // The u32 at index i of the variable part; the caller has checked var.size().
  uint32_t var_u32(size_t i) const {
    uint32_t out;
    std::memcpy(&out, var.data() + 4 * i, 4);
    return out;
  }
};

// The least length of a type's fixed part, or 0 for an unknown type.
uint32_t min_fixed_bytes(wire::Type type);
// Whether frames of this type may carry an inline payload.
bool may_carry_payload(wire::Type type);

class FrameReader {
 public:
  enum class Next {
    kNeedMore,  // receive, then ask again
    kFrame,     // `frame` is set; with payload_bytes > 0 say where the payload goes before next()
    kPayload,   // the payload of the frame before is complete in its place (or discarded)
    kBad,       // the stream is broken: close the connection; error() says why
  };

  explicit FrameReader(uint32_t buffer_bytes = 64 * 1024);

  // Frames from now on are of this version (net/version.h).
  void speak(uint8_t version) { version_ = version; }

  // Where the next bytes are to be received: at most two pieces (the rest of a placed payload,
  // then the buffer). 0 pieces: the owner must go on with next() first. Follow with received().
  int slots(iovec out[2]);
  void received(size_t bytes);

  Next next(Frame* frame);
  // After kFrame: where the payload goes. `to` must hold payload_bytes until kPayload is
  // returned or abandon_payload() is called. Copies what the buffer holds of it already.
  void place_payload(uint8_t* to);
  // The same where `to` may turn out not to be there (base/guarded.h). False: all is as before.
  bool place_payload_guarded(uint8_t* to);
  void discard_payload();
  // The rest of a payload that is on its way is thrown away; its place isn't written any more.
  // kPayload still comes.
  void abandon_payload();
  // The frame that next() gave last will be given again (the owner has no room for it now).
  // Only before its payload was placed.
  void unread();

  // True between kFrame with a payload and its place_payload/discard_payload.
  bool awaits_place() const { return state_ == State::kAwaitPlace; }
  bool in_payload() const { return state_ == State::kPayload; }
  // Bytes of the placed payload that are still to come.
  size_t payload_left() const { return state_ == State::kPayload ? payload_left_ : 0; }
  // A placed payload is received in pieces of at most so much, so that what has come can be looked at
  // while it is in the cache. 0: as much as there is.
  void limit_receives(size_t bytes) { receive_limit_bytes_ = bytes; }
  // No part of a frame is buffered.
  bool idle() const { return state_ == State::kHeader && begin_ == end_; }
  // Bytes that a next() could decode without another receive.
  size_t buffered() const { return end_ - begin_; }
  Error error() const { return error_; }

 private:
  enum class State { kHeader, kAwaitPlace, kPayload, kBad };

  Next bad(const char* what);
  void consume_payload_from_buffer();

  std::vector<uint8_t> buffer_;
  uint8_t version_ = wire::kHelloVersion;
  size_t begin_ = 0;  // first byte not yet decoded
  size_t end_ = 0;    // after the last received byte
  size_t frame_begin_ = 0;
  State state_ = State::kHeader;
  uint8_t* payload_to_ = nullptr;  // null: discarded
  size_t payload_left_ = 0;
  size_t receive_limit_bytes_ = 0;
  size_t need_bytes_ = sizeof(wire::FrameHeader);  // of the frame at begin_, as far as is known
  Error error_{};
};

class SendQueue {
 public:
  // Frames queued from now on are of this version (net/version.h).
  void speak(uint8_t version) { version_ = version; }

  // Queues a frame. fixed and var are copied; `payload` is borrowed until its token (not 0) is
  // released by advance() or clear(). A descriptor is borrowed as well, and goes with the
  // frame's first byte (SCM_RIGHTS; only over `local`).
  void push(wire::Type type, uint64_t request_id, Bytes fixed, Bytes var = {}, Bytes payload = {},
            uint64_t token = 0, int fd = -1);
  template <typename T>
  void push(wire::Type type, uint64_t request_id, const T& fixed, Bytes var = {}, Bytes payload = {},
            uint64_t token = 0, int fd = -1) {
    push(type, request_id, Bytes(reinterpret_cast<const uint8_t*>(&fixed), sizeof(T)), var, payload, token,
         fd);
  }

  // The same in parts: a head that announces payload_bytes, then pieces of that many bytes in all.
  void push_head(wire::Type type, uint64_t request_id, Bytes fixed, Bytes var, size_t payload_bytes,
                 int fd = -1);
  // `stays`: nobody changes that memory before the token is released, however long that takes, so it may be
  // sent without a copy.
  void push_piece(Bytes payload, uint64_t token, bool stays = false);
  // The payload of this token, of which some may have been sent, stands elsewhere from now on: the same
  // bytes.
  void move_payload(uint64_t token, const uint8_t* to);

  bool empty() const { return pending_bytes_ == 0; }
  size_t pending_bytes() const { return pending_bytes_; }
  // Of what waits some is memory that its token gives back.
  bool holds_payload() const;
  // The next pieces to send. *fd: a descriptor that must go with them, or -1. A piece with a
  // descriptor always comes first in its gather.
  int gather(iovec* out, int capacity, int* fd) const;
  // Whether a payload that stays, of at least so many bytes, comes next. (Part of it may have been sent.)
  bool large_comes(size_t least_bytes) const;
  // The next pieces that go in one way: such payloads only, or what comes before one. *before_large: one
  // follows.
  int gather_alike(iovec* out, int capacity, int* fd, size_t least_bytes, bool* before_large) const;
  // `bytes` were sent: drops them and appends the tokens of payloads that are through.
  void advance(size_t bytes, std::vector<uint64_t>* released);
  // Drops everything; appends all tokens.
  void clear(std::vector<uint64_t>* released);

 private:
  struct Piece {
    const uint8_t* payload = nullptr;  // null: the bytes stand in arena_ at `at`
    size_t at = 0;
    size_t length = 0;
    uint64_t token = 0;
    int fd = -1;
    bool stays = false;

    bool large(size_t least_bytes) const { return stays && length >= least_bytes; }
  };
  const uint8_t* start(const Piece& piece) const {
    return piece.payload != nullptr ? piece.payload : arena_.data() + piece.at;
  }
  void compact();

  uint8_t version_ = wire::kHelloVersion;
  std::vector<uint8_t> arena_;  // heads of frames
  std::vector<Piece> pieces_;   // from first_ on
  size_t first_ = 0;
  size_t first_sent_ = 0;  // bytes of pieces_[first_] that are sent
  size_t pending_bytes_ = 0;
};

// The number of granule-cut pieces of [offset, offset + length), and the CRCs of the data cut so.
uint32_t piece_count(uint32_t offset, uint32_t length);
void piece_crcs(uint32_t offset, Bytes data, uint32_t* out);

}  // namespace ffs::net
