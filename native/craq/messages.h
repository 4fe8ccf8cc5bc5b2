// The words of the protocol: outcomes, update kinds, and the two messages that members of a
// chain send each other. Plain structs, trivially copyable; the wire form of each is the
// server's business (docs/wire_format.md), its meaning is docs/craq.md, Messages.
#pragma once

#include "base/ids.h"

namespace ffs::craq {

// Names a payload (bytes and their granule checksums) that the server owns. Opaque: the
// replica never looks inside. 0 = no payload. See replica.h, Buffers.
struct BufferRef {
  uint64_t value = 0;
  friend constexpr bool operator==(const BufferRef&, const BufferRef&) = default;
};
constexpr BufferRef kNoBuffer{};

// What a request or a disk operation came to. The numbers are on the wire and in the journal:
// never reuse one. docs/craq.md, Outcomes, says what a client does with each.
enum class Outcome : uint16_t {
  ok = 0,
  existed = 1,            // create-if-absent: committed already, with the same tag
  absent = 2,             // no such chunk in committed state
  tag_differs = 3,        // create: another block holds the key; get with a tag: a miss
  stale_chain = 4,        // older chain version: refresh routing, send again, same sequence
  not_head = 5,           // an update came to a member that isn't the head: refresh routing
  offline = 6,            // this target serves nothing now; Reply::reason says why
  denied = 7,             // the server's authority check failed
  fenced = 8,             // the client's session is over
  old_sequence = 9,       // a later sequence of that channel was seen
  stale_epoch = 10,       // older than the least epoch accepted in the space
  no_space = 11,          // a refusal: ENOSPC at some member
  over_quota = 12,        // a refusal: EDQUOT at some member
  fell_with_base = 13,    // an earlier pending update was refused: reissue under a new sequence
  condition_failed = 14,  // `expected` isn't the committed version
  invalid = 15,           // a range or argument that can't be
  timed_out = 16,         // the deadline ended the wait; the update itself may go on
  bad_checksum = 17,      // the payload doesn't match its checksums: send it again
  io_error = 18,          // the device failed
  dropped = 19,           // journal only: given up in recovery, as if it had never come
  corrupt = 20,           // at rest, on this replica: ask another
  wanted = 21,            // a create that was offered without its bytes would take them: send it
};

// What an update does to a chunk. Numbers are on the wire and in the journal.
enum class UpdateKind : uint8_t {
  write = 1,     // bytes at an offset; what is below the offset and wasn't there reads as zeros
  truncate = 2,  // length_bytes is the new length; longer than now: zeros
  remove = 3,
  replace = 4,  // the payload is the whole new chunk
  create = 5,   // replace on condition that no chunk is committed under the key
};

// What a chunk is given at its creation (or by `replace`), stored and returned with reads.
constexpr uint32_t kPinned = 1;  // Attributes::flags: isn't evicted

struct Attributes {
  std::array<uint8_t, kMaxTagBytes> tag{};
  uint8_t tag_bytes = 0;
  uint8_t codec = 0;
  uint8_t role = 0;
  uint8_t checksum_kind = 0;
  uint32_t flags = 0;
  uint32_t logical_length_bytes = 0;  // before the codec; 0 when codec is 0
  uint64_t expiry_ms = 0;             // manager time; 0 = never
  friend constexpr bool operator==(const Attributes&, const Attributes&) = default;
  constexpr bool pinned() const { return (flags & kPinned) != 0; }
  constexpr bool expired(uint64_t manager_ms) const { return expiry_ms != 0 && expiry_ms <= manager_ms; }
  constexpr bool same_tag(const Attributes& o) const { return tag_bytes == o.tag_bytes && tag == o.tag; }
};

// Stands before every message between members. A receiver drops a message whose chain or `to`
// isn't its own, whose sender isn't the neighbour (or the asker) it must come from, or whose
// chain version isn't the one it has adopted.
struct PeerHeader {
  ChainId chain;
  ChainVersion chain_version;
  TargetId from;
  TargetId to;
};

// An update on its way down the chain, to the next member only.
struct Update {
  ChunkKey key;
  Version version;
  Version base;   // the version that it applies on; none = the chunk doesn't exist
  Version floor;  // every version below is resolved (committed or refused) at the sender
  UpdateIdentity identity;
  uint64_t space_epoch = 0;
  UpdateKind kind = UpdateKind::write;
  uint32_t offset_bytes = 0;
  uint32_t length_bytes = 0;  // of the payload; truncate: the new length; remove: 0
  Attributes attributes;
  bool base_absent = false;      // `base` is none or a removal
  bool base_committed = false;   // the sender has committed `base`: the receiver must have it
  bool removal_follows = false;  // this or a later pending update of the chunk is a removal
  bool held = false;             // the sender and all before it have it durably
  BufferRef payload;             // the receiver's own reference, set by its server
};

// Every other message between members. One struct for all types: docs/craq.md, Messages, has
// the table of the fields that each type uses; the others are zero.
enum class NoticeType : uint8_t {
  held = 1,               // down: key, version: sender and all before it have it and what is below
  ack = 2,                // up: key, version: committed, and all before it in the chunk
  refusal = 3,            // up: key, version, identity, outcome
  cancel = 4,             // down: key, version, identity, outcome: refused above, drop it
  missing = 5,            // up: key, version (that can't apply), other (newest that I have), flag
  query = 6,              // to the last: key, number (of the question)
  answer = 7,             // from the last: key, number, version (committed), flag (chunk exists)
  space_epoch = 8,        // down: key (its space), number (epoch)
  space_epoch_ack = 9,    // up: the same: durable here and below
  reconcile = 10,         // up: key, version, identity: what became of that pending of mine?
  reconcile_answer = 11,  // down: key, version, number (Fate), flag (chunk exists or will)
  reconciled = 12,        // up: my pendings are a part of yours; send yours
  resent = 13,            // down: all my pendings went before this
  ready = 14,             // up: I serve, and all behind me
  invite = 15,            // down: I can answer `reconcile` now
  lease_ask = 16,         // to another serving member: number (the asker's clock)
  lease_grant = 17,       // back: number (repeated), other.update (for so many ms)
};

// What a member knows of a version that its successor has pending.
enum class Fate : uint8_t { unasked = 0, unknown = 1, pending = 2, committed = 3 };

struct Notice {
  NoticeType type = NoticeType::held;
  bool flag = false;
  Outcome outcome = Outcome::ok;
  ChunkKey key;
  Version version;
  Version other;
  UpdateIdentity identity;
  uint64_t number = 0;
};

}  // namespace ffs::craq
