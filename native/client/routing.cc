#include "client/routing.h"

#include <cstring>

namespace ffs::client {

namespace {

template <size_t N>
bool terminated(const char (&text)[N]) {
  return std::memchr(text, '\0', N) != nullptr;
}

Result<Endpoint> make_endpoint(const ffs_target_route& route) {
  if (!terminated(route.host) || !terminated(route.host_id) || !terminated(route.socket_path)) {
    return Error::of(EINVAL, "a string of a target's route isn't terminated");
  }
  if (route.port > 65535) return Error::of(EINVAL, "a target's port is over 65535");
  return Endpoint{route.host, static_cast<uint16_t>(route.port), route.host_id, route.socket_path};
}

}  // namespace

Result<std::shared_ptr<const Routing>> make_routing(uint64_t epoch, const ffs_chain_route* chains,
                                                    uint32_t chain_count, const ffs_target_route* targets,
                                                    uint32_t target_count) {
  auto routing = std::make_shared<Routing>();
  routing->epoch = epoch;
  struct Place {
    uint32_t endpoint;
    bool away;
  };
  std::unordered_map<TargetId, Place> places;
  std::unordered_map<std::string, uint32_t> known;
  for (uint32_t i = 0; i < target_count; i++) {
    FFS_TRY(Endpoint endpoint, make_endpoint(targets[i]));
    const std::string key = endpoint.name() + "|" + endpoint.host_id + "|" + endpoint.socket_path;
    auto [found, fresh] = known.emplace(key, static_cast<uint32_t>(routing->endpoints.size()));
    if (fresh) routing->endpoints.push_back(std::move(endpoint));
    places[TargetId(targets[i].target)] = {found->second, targets[i].away != 0};
  }
  routing->chains.reserve(chain_count);
  for (uint32_t i = 0; i < chain_count; i++) {
    const ffs_chain_route& from = chains[i];
    if (from.member_count > kMaxReplicas) return Error::of(EINVAL, "a chain has more than 8 members");
    Chain chain;
    chain.id = ChainId(from.chain);
    chain.version = {from.term, from.counter};
    chain.member_count = from.member_count;
    for (uint32_t m = 0; m < from.member_count; m++) {
      Member& member = chain.members[m];
      member.target = TargetId(from.members[m]);
      auto place = places.find(member.target);
      if (place != places.end()) member.endpoint = place->second.endpoint, member.away = place->second.away;
      member.serving = from.states[m] == FFS_SERVING && member.endpoint != kNoEndpoint;
      chain.available |= member.serving && !member.away;
    }
    routing->chains[chain.id] = chain;
  }
  return std::shared_ptr<const Routing>(std::move(routing));
}

}  // namespace ffs::client
