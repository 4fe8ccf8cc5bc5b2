// Which port, which address, which parameters: the decisions of setting an RDMA connection up
// (docs/rdma.md, Setting up). Pure; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "ffs/wire.h"

namespace ffs::net::rdma {

using Gid = std::array<uint8_t, 16>;

enum class GidType : uint8_t { kInfiniband, kRoceV1, kRoceV2 };

struct GidFacts {
  int index = 0;
  Gid gid{};
  GidType type = GidType::kInfiniband;
};

struct PortFacts {
  std::string device;
  uint8_t port = 1;
  bool active = false;
  bool ethernet = false;
  uint8_t active_mtu = 0;  // 1: 256 .. 5: 4096 bytes
  uint16_t lid = 0;
  int numa_node = -1;  // -1: unknown
  std::vector<GidFacts> gids;
};

// "NAME[:PORT[:GID INDEX]]", several with commas between them. EINVAL.
struct Wanted {
  std::string device;
  int port = -1;  // any
  int gid_index = -1;
};
Result<std::vector<Wanted>> parse_wanted(const std::string& text);

// Null: the port has no address that can be used. `index` >= 0: that one.
const GidFacts* choose_gid(const PortFacts& port, int index = -1);

// What a connection's end wants of a port.
struct Place {
  Gid address{};  // of the socket's own end, IPv4 mapped; zero: unknown
  int numa_node = -1;
  int ethernet = -1;  // 0 or 1: only such ports
};
struct Candidate {
  const PortFacts* port = nullptr;
  const GidFacts* gid = nullptr;
};
// The best of them, or -1: none is active with an address and of the kind. Equals take turns by `turn`.
int choose_port(std::span<const Candidate> ports, const Place& place, uint32_t turn);

// What both ends of a queue pair are set to. EINVAL: the other's values can't be.
struct Agreement {
  uint8_t mtu = 0;
  uint8_t reads_from_them = 0;  // RDMA READs that we may have under way
};
Result<Agreement> agree(const wire::RdmaEnd& ours, const wire::RdmaEnd& theirs);

}  // namespace ffs::net::rdma
