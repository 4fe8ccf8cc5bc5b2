#include "net/peer_proof.h"

#include <cstddef>
#include <string_view>

namespace ffs::net {

Mac peer_proof(const MacKey& key, Side side, const wire::ServerHello& hello,
               const wire::ServerHelloReply& reply) {
  const std::string_view label = side == Side::kAsker ? "ffs peer 1 asker" : "ffs peer 1 server";
  const uint8_t end = 0;
  return mac_of(
      key, {std::span(reinterpret_cast<const uint8_t*>(label.data()), label.size()), std::span(&end, 1),
            std::span(reinterpret_cast<const uint8_t*>(&hello), sizeof hello),
            std::span(reinterpret_cast<const uint8_t*>(&reply), offsetof(wire::ServerHelloReply, proof))});
}

bool has_nonce(const uint8_t (&nonce)[32]) {
  uint8_t any = 0;
  for (const uint8_t byte : nonce) any = static_cast<uint8_t>(any | byte);
  return any != 0;
}

}  // namespace ffs::net
