// Between the words of the wire (ffs/wire.h) and those of the replica (craq/messages.h).
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "craq/replica.h"
#include "ffs/wire.h"

namespace ffs::server {

inline ChunkKey key_of(const uint8_t (&bytes)[24]) {
  ChunkKey key;
  std::memcpy(key.bytes.data(), bytes, sizeof bytes);
  return key;
}

inline wire::WireVersion to_wire(const Version& version) {
  return {version.chain.term, version.chain.counter, version.update};
}
inline wire::WireVersion to_wire(const ChainVersion& version) {
  return {version.term, version.counter, 0};
}
inline Version from_wire(const wire::WireVersion& version) {
  return {{version.term, version.counter}, version.update};
}

// What a client is told: errno and detail. `reading`: the answer to a read or lookup.
struct Told {
  int status;
  wire::Detail detail;
};
Told told(craq::Outcome outcome, bool reading);

craq::Attributes attributes_of(const wire::Update& update);
wire::Forward forward_of(const craq::SendUpdate& send);
// False: a kind or length that no member of ours would send.
bool update_of(const wire::Forward& forward, craq::PeerHeader* header, craq::Update* update);
wire::Notice notice_of(const craq::SendNotice& send);
bool notice_of(const wire::Notice& notice, craq::PeerHeader* header, craq::Notice* out);
wire::Sync sync_of(const craq::SendSync& send);
craq::PeerHeader header_of(const wire::Sync& sync);
// A report of uses; its keys are `var`. False: a count that doesn't fit, or too many.
bool used_keys(const wire::Used& used, std::span<const uint8_t> var, std::vector<ChunkKey>* keys);
// What an operation of the store came to.
craq::Outcome outcome_of(int error);
craq::Outcome outcome_of_stage(int error);  // of an update's
// Whether a notice must follow the updates before it in order, or goes by the lane that never waits.
bool follows_updates(craq::NoticeType type);

}  // namespace ffs::server
