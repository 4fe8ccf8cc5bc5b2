// How two servers prove the cluster's secret to each other (docs/wire_format.md, Between servers). Pure.
//
//     the one that connects                       the other
//     hello(role server, nonce)            ->
//                                          <-     hello reply(nonce, its proof)
//     peer proof                           ->
//
// A proof is an HMAC over both frames, so over role, cluster, nodes, incarnations, versions and both nonces,
// under a key that is derived from the secret; whose proof it is stands in a label. Nothing of it can be
// replayed, reflected or mixed with another connection's.
#pragma once

#include "ffs/wire.h"
#include "net/mac.h"

namespace ffs::net {

enum class Side : uint8_t { kAsker, kServer };

// reply.proof is not looked at.
Mac peer_proof(const MacKey& key, Side side, const wire::ServerHello& hello,
               const wire::ServerHelloReply& reply);
bool has_nonce(const uint8_t (&nonce)[32]);  // not all zero

}  // namespace ffs::net
