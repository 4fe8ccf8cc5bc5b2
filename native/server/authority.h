// Which capabilities are genuine (docs/wire_format.md, open_capability): the keys that are valid, and what
// is wrong with one. A shard has its own; one thread.
#pragma once

#include <vector>

#include "ffs/wire.h"
#include "net/mac.h"

namespace ffs::server {

struct SigningKey {
  uint32_t id = 0;
  net::MacKey secret{};
};

class Authority {
 public:
  // `signed_only`: false on a cluster without a secret (loopback development), where capabilities are taken
  // as they are.
  explicit Authority(bool signed_only) : signed_only_(signed_only) {}

  void set_keys(const std::vector<SigningKey>& keys) { keys_ = keys; }

  // kNone: genuine. Else kUnsigned, kUnknownKey or kForged.
  wire::Detail fault(const wire::Capability& capability) const {
    if (!signed_only_) return wire::Detail::kNone;
    if (capability.key_id == 0) return wire::Detail::kUnsigned;
    for (const SigningKey& key : keys_) {
      if (key.id != capability.key_id) continue;
      const bool genuine = net::same_mac(net::capability_mac(key.secret, capability), capability.mac);
      return genuine ? wire::Detail::kNone : wire::Detail::kForged;
    }
    return wire::Detail::kUnknownKey;
  }

 private:
  bool signed_only_;
  std::vector<SigningKey> keys_;  // two or three
};

// A capability as a connection has opened it.
struct OpenedCapability {
  wire::Capability capability{};
  wire::Detail fault = wire::Detail::kNone;
};

}  // namespace ffs::server
