#include "net/rdma/choose.h"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace ffs::net::rdma {

namespace {

constexpr uint32_t kMostReceives = 4096;
constexpr uint32_t kLeastMessageBytes = 256, kMostMessageBytes = 1u << 20;
constexpr uint32_t kLeastReceives = 4;

bool is_zero(const Gid& gid) {
  return std::all_of(gid.begin(), gid.end(), [](uint8_t byte) { return byte == 0; });
}

bool is_mapped_v4(const Gid& gid) {
  return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
         gid[10] == 0xff && gid[11] == 0xff;
}

bool is_link_local(const Gid& gid) {
  if (is_mapped_v4(gid)) return gid[12] == 169 && gid[13] == 254;
  return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

// The greater the better; 0: not at all. Routed RoCE with an IPv4 address first: that is what switches are
// set up for, and what people see in `ip addr`.
int worth(const GidFacts& gid, bool ethernet) {
  if (is_zero(gid.gid)) return 0;
  if (!ethernet) return gid.type == GidType::kInfiniband ? 1 : 0;
  if (gid.type == GidType::kInfiniband) return 0;
  int value = 1;
  if (gid.type == GidType::kRoceV2) value += 8;
  if (!is_link_local(gid.gid)) value += 4;
  if (is_mapped_v4(gid.gid)) value += 2;
  return value;
}

bool parse_number(std::string_view text, int most, int* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && *out >= 0 && *out <= most;
}

}  // namespace

Result<std::vector<Wanted>> parse_wanted(const std::string& text) {
  std::vector<Wanted> out;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find(',', at), text.size());
    std::string_view one = std::string_view(text).substr(at, end - at);
    at = end + 1;
    Wanted wanted;
    const size_t first = one.find(':');
    wanted.device = one.substr(0, first);
    bool good = !wanted.device.empty();
    if (first != std::string_view::npos) {
      one.remove_prefix(first + 1);
      const size_t second = one.find(':');
      good = good && parse_number(one.substr(0, second), 255, &wanted.port) && wanted.port > 0;
      if (second != std::string_view::npos) {
        good = good && parse_number(one.substr(second + 1), 65535, &wanted.gid_index);
      }
    }
    if (!good)
      return Error::of(EINVAL, "RDMA devices are named NAME[:PORT[:GID INDEX]], with commas between them");
    out.push_back(wanted);
  }
  return out;
}

const GidFacts* choose_gid(const PortFacts& port, int index) {
  const GidFacts* best = nullptr;
  int best_worth = 0;
  for (const GidFacts& gid : port.gids) {
    const int value = worth(gid, port.ethernet);
    if (index >= 0 && gid.index == index) return value > 0 ? &gid : nullptr;
    if (index < 0 && value > best_worth) best = &gid, best_worth = value;
  }
  return best;
}

int choose_port(std::span<const Candidate> ports, const Place& place, uint32_t turn) {
  int best = -1;
  int best_worth = -1;
  for (size_t n = 0; n < ports.size(); n++) {
    const size_t i = (n + turn) % ports.size();
    const Candidate& one = ports[i];
    if (!one.port->active || one.gid == nullptr) continue;
    if (place.ethernet >= 0 && one.port->ethernet != (place.ethernet == 1)) continue;
    int value = 0;
    // The card that the socket goes over reaches the other end.
    if (!is_zero(place.address)) {
      for (const GidFacts& gid : one.port->gids) value |= gid.gid == place.address ? 2 : 0;
    }
    if (place.numa_node >= 0 && one.port->numa_node == place.numa_node) value |= 1;
    if (value > best_worth) best = static_cast<int>(i), best_worth = value;
  }
  return best;
}

Result<Agreement> agree(const wire::RdmaEnd& ours, const wire::RdmaEnd& theirs) {
  Gid gid;
  std::memcpy(gid.data(), theirs.gid, gid.size());
  if (theirs.queue_pair == 0 || theirs.queue_pair > 0xffffff || theirs.first_packet > 0xffffff) {
    return Error::of(EINVAL, "the other end's queue pair can't be");
  }
  if (theirs.mtu < 1 || theirs.mtu > 5) return Error::of(EINVAL, "the other end's MTU can't be");
  if (theirs.ethernet != ours.ethernet) {
    return Error::of(EINVAL, "one end is on Ethernet, the other on InfiniBand");
  }
  if (is_zero(gid) && (theirs.ethernet != 0 || theirs.lid == 0)) {
    return Error::of(EINVAL, "the other end has no address");
  }
  if (theirs.receives < kLeastReceives || theirs.receives > kMostReceives ||
      theirs.message_bytes < kLeastMessageBytes || theirs.message_bytes > kMostMessageBytes) {
    return Error::of(EINVAL, "the other end's receive buffers can't be");
  }
  Agreement out;
  out.mtu = std::min(ours.mtu, theirs.mtu);
  out.reads_from_them = std::min(ours.reads_out, theirs.reads_in);
  return out;
}

}  // namespace ffs::net::rdma
