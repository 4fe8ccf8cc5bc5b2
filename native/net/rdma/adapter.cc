#if FFS_HAVE_VERBS
#include "net/rdma/adapter.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

#include "net/rdma/verbs.h"

namespace ffs::net::rdma {

namespace {

constexpr uint8_t kMostReads = 16;
std::atomic<uint32_t> next_index{0};

std::string line_of(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// The kernel tells the type of an address in sysfs: "IB/RoCE v1" or "RoCE v2".
GidType gid_type(const std::string& device, int port, int index, bool ethernet) {
  if (!ethernet) return GidType::kInfiniband;
  const std::string type = line_of("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) +
                                   "/gid_attrs/types/" + std::to_string(index));
  return type == "RoCE v2" ? GidType::kRoceV2 : GidType::kRoceV1;
}

int numa_node_of(const std::string& device) {
  const std::string line = line_of("/sys/class/infiniband/" + device + "/device/numa_node");
  return line.empty() ? -1 : std::atoi(line.c_str());
}

int access_flags(Access access) {
  return IBV_ACCESS_LOCAL_WRITE |
         (access == Access::kThere ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ : 0);
}

PortFacts facts_of(const Verbs& v, ibv_context* context, const std::string& device, uint8_t number,
                   const ibv_port_attr& attributes) {
  PortFacts port;
  port.device = device;
  port.port = number;
  port.active = attributes.state == IBV_PORT_ACTIVE;
  port.ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
  port.active_mtu = static_cast<uint8_t>(attributes.active_mtu);
  port.lid = attributes.lid;
  port.numa_node = numa_node_of(device);
  for (int i = 0; i < attributes.gid_tbl_len; i++) {
    ibv_gid gid;
    if (v.query_gid(context, number, i, &gid) != 0) continue;
    GidFacts facts;
    facts.index = i;
    std::memcpy(facts.gid.data(), gid.raw, sizeof gid.raw);
    if (facts.gid == Gid{}) continue;
    facts.type = gid_type(device, number, i, port.ethernet);
    port.gids.push_back(facts);
  }
  return port;
}

// The socket's own address, as a GID has it.
Gid address_of(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  Gid out{};
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return out;
  if (storage.ss_family == AF_INET) {
    out[10] = out[11] = 0xff;
    std::memcpy(out.data() + 12, &reinterpret_cast<sockaddr_in*>(&storage)->sin_addr, 4);
  } else if (storage.ss_family == AF_INET6) {
    std::memcpy(out.data(), &reinterpret_cast<sockaddr_in6*>(&storage)->sin6_addr, 16);
  }
  return out;
}

}  // namespace

int numa_node_here() {
  unsigned int cpu = 0, node = 0;
  return ::getcpu(&cpu, &node) == 0 ? static_cast<int>(node) : -1;
}

// --- memory ---------------------------------------------------------------------------------------

Registration::~Registration() {
  if (process_ == ::getpid()) (void)verbs_->dereg_mr(mr_);
}

Result<std::unique_ptr<Registration>> Adapter::register_memory(void* memory, size_t bytes, uint64_t address,
                                                               Access access) {
  ibv_mr* mr = verbs->reg_mr(pd, memory, bytes, address, static_cast<unsigned int>(access_flags(access)));
  if (mr == nullptr) {
    return Error::of(errno != 0 ? errno : ENOMEM,
                     "registering memory for RDMA: RLIMIT_MEMLOCK of this user may be too small (ulimit -l)");
  }
  return std::make_unique<Registration>(verbs, mr, mr->lkey, mr->rkey);
}

Result<std::unique_ptr<Registration>> Adapter::register_dmabuf(int fd, uint64_t offset, size_t bytes,
                                                               uint64_t address, Access access) {
  if (verbs->reg_dmabuf_mr == nullptr) {
    return Error::of(ENOTSUP, "this libibverbs can't register device memory: it wants rdma-core 34");
  }
  errno = 0;
  ibv_mr* mr = verbs->reg_dmabuf_mr(pd, offset, bytes, address, fd, access_flags(access));
  if (mr == nullptr) {
    const int code = errno == EOPNOTSUPP || errno == ENOSYS || errno == 0 ? ENOTSUP : errno;
    return Error::of(code, "this RDMA adapter or kernel can't register device memory (dmabuf)");
  }
  return std::make_unique<Registration>(verbs, mr, mr->lkey, mr->rkey);
}

// --- finding them ---------------------------------------------------------------------------------

Result<std::unique_ptr<Adapters>> Adapters::open(const std::string& wanted_text, std::string* who) {
  FFS_TRY(const std::vector<Wanted> wanted, parse_wanted(wanted_text));
  FFS_TRY(const Verbs* v, load_verbs());
  int count = 0;
  ibv_device** list = v->get_device_list(&count);
  if (list == nullptr || count == 0) {
    if (list != nullptr) v->free_device_list(list);
    return Error::of(ENODEV, "this host has no RDMA device");
  }
  auto out = std::make_unique<Adapters>();
  for (int i = 0; i < count; i++) {
    const std::string device = v->get_device_name(list[i]);
    ibv_context* context = v->open_device(list[i]);
    if (context == nullptr) continue;
    ibv_device_attr attributes{};
    const bool known = v->query_device(context, &attributes) == 0;
    bool kept = false;
    for (int number = 1; known && number <= attributes.phys_port_cnt; number++) {
      int gid_index = -1;
      bool asked = wanted.empty();
      for (const Wanted& one : wanted) {
        if (one.device != device || (one.port >= 0 && one.port != number)) continue;
        asked = true;
        gid_index = one.gid_index;
      }
      ibv_port_attr port{};
      if (!asked || v->query_port(context, static_cast<uint8_t>(number), &port) != 0) continue;
      auto adapter = std::make_unique<Adapter>();
      adapter->port_ = facts_of(*v, context, device, static_cast<uint8_t>(number), port);
      const GidFacts* gid = choose_gid(adapter->port_, gid_index);
      if (!adapter->port_.active || gid == nullptr) continue;
      adapter->gid_ = *gid;
      adapter->verbs = v;
      adapter->context = context;
      adapter->pd = v->alloc_pd(context);
      if (adapter->pd == nullptr) continue;
      adapter->most_message_bytes = port.max_msg_sz;
      adapter->reads_in = static_cast<uint8_t>(std::min<int>(attributes.max_qp_rd_atom, kMostReads));
      adapter->reads_out = static_cast<uint8_t>(std::min<int>(attributes.max_qp_init_rd_atom, kMostReads));
      adapter->index_ = next_index++;
      out->adapters_.push_back(std::move(adapter));
      kept = true;
    }
    if (!kept) (void)v->close_device(context);
  }
  v->free_device_list(list);
  if (out->adapters_.empty()) {
    return Error::of(ENODEV, wanted.empty()
                                 ? "no port of this host's RDMA devices is active and has an address"
                                 : "no port that was asked for is there, active and with an address");
  }
  if (who != nullptr) {
    for (const auto& adapter : out->adapters_) *who += (who->empty() ? "" : ", ") + adapter->name();
  }
  return out;
}

Result<const Adapters*> Adapters::get(const std::string& wanted, std::string* who) {
  struct Known {
    std::unique_ptr<Adapters> adapters;
    Error error{};
    std::string who;
  };
  static std::mutex mutex;
  // A child of fork has none of its parent's: they are left alone and found anew.
  static std::map<std::pair<pid_t, std::string>, Known>* const known =
      new std::map<std::pair<pid_t, std::string>, Known>;
  std::lock_guard lock(mutex);
  auto [found, added] = known->try_emplace({::getpid(), wanted});
  Known& entry = found->second;
  if (added) {
    auto opened = open(wanted, &entry.who);
    if (opened.ok()) {
      entry.adapters = std::move(*opened);
    } else {
      entry.error = opened.error();
    }
  }
  if (who != nullptr) *who = entry.who;
  if (entry.adapters == nullptr) return entry.error;
  return entry.adapters.get();
}

Adapter* Adapters::pick(int socket, int numa_node, int ethernet) const {
  static std::atomic<uint32_t> turn{0};
  std::vector<Candidate> candidates;
  for (const auto& adapter : adapters_) candidates.push_back({&adapter->port(), &adapter->gid()});
  Place place;
  place.address = address_of(socket);
  place.numa_node = numa_node;
  place.ethernet = ethernet;
  const int best = choose_port(candidates, place, turn++);
  return best < 0 ? nullptr : adapters_[static_cast<size_t>(best)].get();
}

// --- events ---------------------------------------------------------------------------------------

Result<std::unique_ptr<Events>> Events::create(Adapter& adapter) {
  ibv_comp_channel* channel = adapter.verbs->create_comp_channel(adapter.context);
  if (channel == nullptr) return Error::of(errno, "creating an RDMA completion channel");
  const int flags = ::fcntl(channel->fd, F_GETFL);
  if (flags < 0 || ::fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    const int code = errno;
    (void)adapter.verbs->destroy_comp_channel(channel);
    return Error::of(code, "setting an RDMA completion channel not to block");
  }
  return std::unique_ptr<Events>(new Events(adapter.verbs, channel));
}

Events::~Events() {
  if (process_ == ::getpid()) (void)verbs_->destroy_comp_channel(channel_);
}

int Events::fd() const {
  return channel_->fd;
}

void Events::take(std::vector<void*>* owners) {
  ibv_cq* queue = nullptr;
  void* owner = nullptr;
  while (verbs_->get_cq_event(channel_, &queue, &owner) == 0) {
    verbs_->ack_cq_events(queue, 1);
    owners->push_back(owner);
  }
}

}  // namespace ffs::net::rdma
#endif
