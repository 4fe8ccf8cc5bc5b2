// What a client knows of the cluster: chains, their members, where each target is. Immutable once
// made; rings hold a snapshot.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "ffs/ffs.h"

namespace ffs::client {

struct Endpoint {  // a shard of a server
  std::string host;
  uint16_t port = 0;
  std::string host_id;
  std::string socket_path;
  std::string name() const { return host + ":" + std::to_string(port); }
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

constexpr uint32_t kNoEndpoint = ~0u;

struct Member {
  TargetId target;
  uint32_t endpoint = kNoEndpoint;  // index; kNoEndpoint: its place isn't known
  bool serving = false;
  bool away = false;  // the manager doesn't hear of its node: not the first choice
};

struct Chain {
  ChainId id;
  ChainVersion version;
  uint32_t member_count = 0;
  bool available = false;  // a serving member is there
  Member members[kMaxReplicas];

  // Where updates enter: the first member that serves, or null. (Serving members stand before syncing
  // and offline ones.)
  const Member* head() const {
    for (uint32_t i = 0; i < member_count; i++) {
      if (members[i].serving) return &members[i];
    }
    return nullptr;
  }
  uint32_t index_of(TargetId target) const {
    for (uint32_t i = 0; i < member_count; i++) {
      if (members[i].target == target) return i;
    }
    return kMaxReplicas;
  }
};

struct Routing {
  uint64_t epoch = 0;
  std::unordered_map<ChainId, Chain> chains;
  std::vector<Endpoint> endpoints;

  const Chain* chain(ChainId id) const {
    auto found = chains.find(id);
    return found == chains.end() ? nullptr : &found->second;
  }
};

// EINVAL names what can't be (an unterminated string, too many members, a port over 65535).
Result<std::shared_ptr<const Routing>> make_routing(uint64_t epoch, const ffs_chain_route* chains,
                                                    uint32_t chain_count, const ffs_target_route* targets,
                                                    uint32_t target_count);

}  // namespace ffs::client
