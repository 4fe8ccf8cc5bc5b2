// What most scripted peers do.
#pragma once

#include "client_peer.h"

namespace ffs::client::testing {

// Answers every read with the pattern of its offset, every update with success.
inline void well(Peer&, net::Connection& c, const Peer::Request& r) {
  if (r.type == Type::kRead) {
    static thread_local std::vector<uint8_t> data;
    data = pattern(r.read.length, static_cast<uint8_t>(r.read.offset));
    Peer::answer_read(c, r.id, data, 16 << 20);
  } else if (r.type == Type::kUpdate) {
    Peer::answer_update(c, r.id);
  }
}

inline void mute(Peer&, net::Connection&, const Peer::Request&) {}

}  // namespace ffs::client::testing
