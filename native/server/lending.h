// Reads that are sent out of the device's own memory, where that is what it is (docs/architecture.md, Sending
// from memory). What is lent holds its slot, so there is a bound to how much may be lent, and to how long.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/chunk_store.h"

namespace ffs::server {

struct Session;

// Bytes of a read between the store and the socket: a request's until its reply is queued, then the send
// queue's.
struct Lent {
  Lent* next_free = nullptr;
  uint32_t slot = 0;
  Session* session = nullptr;  // whose reader has it; null: the record is free
  engine::Lent from;           // pinned; given back early when there is a copy
  std::unique_ptr<uint8_t[]> copy;
  bool queued = false;
  uint64_t since_us = 0;

  const uint8_t* bytes() const { return copy != nullptr ? copy.get() : from.bytes; }
  // Told from a pool buffer (aligned to 4 KiB) and a payload (lowest bit set) by the second bit.
  static constexpr uint64_t kTokenBit = 2;
  uint64_t token() const { return reinterpret_cast<uint64_t>(this) | kTokenBit; }
};

// What one session may have lent at a time. Further reads of it go through the pool, and wait for that.
constexpr uint64_t kMostLentToOne = 32u << 20;
// A reader that doesn't read may hold neither slots nor the overlays that wait to go into them: after so long
// its bytes are copied. (A socket with a reader takes some 100 MB in that time.)
constexpr uint64_t kMostLentUs = 100'000;
// What is copied for that in a tick of 20 ms: half a millisecond of it.
constexpr uint64_t kCopiedATick = 4u << 20;

// Whether a read may be lent, beside what the session and all of the shard have already. `most_of_all` is
// also the most memory that copies can come to take.
constexpr bool may_lend(uint64_t session_has, uint64_t all_have, uint32_t bytes, uint64_t most_of_all) {
  return session_has + bytes <= kMostLentToOne && all_have + bytes <= most_of_all;
}

constexpr bool lent_too_long(const Lent& lent, uint64_t now_us, uint64_t most_us) {
  return lent.session != nullptr && lent.copy == nullptr && now_us - lent.since_us > most_us;
}

}  // namespace ffs::server
