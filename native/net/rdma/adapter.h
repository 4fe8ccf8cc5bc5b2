// Adapters: the ports of this host's RDMA devices, opened once a process, and memory that they know
// (docs/rdma.md). Registration blocks: pages are brought in and pinned, about a tenth of a second for a GiB
// that is there already. Any thread, unless said.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "net/rdma/choose.h"
#include "net/rdma/pair.h"

struct ibv_context;
struct ibv_pd;
struct ibv_mr;
struct ibv_comp_channel;

namespace ffs::net::rdma {

struct Verbs;

// Memory that a device may touch. Ends with the object, when no queue pair works on it any more. (A child of
// fork only forgets it.)
class Registration {
 public:
  Registration(const Verbs* verbs, ibv_mr* mr, uint32_t local_key, uint32_t remote_key)
      : verbs_(verbs), mr_(mr), local_key_(local_key), remote_key_(remote_key) {}
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  uint32_t local_key() const { return local_key_; }
  uint32_t remote_key() const { return remote_key_; }

 private:
  const Verbs* verbs_;
  ibv_mr* mr_;
  uint32_t local_key_, remote_key_;
  pid_t process_ = ::getpid();
};

enum class Access : uint8_t {
  kHere,   // this process's work requests only
  kThere,  // the other side may read and write it by its key
};

class Adapter {
 public:
  // [memory, memory + bytes) under addresses from `address` on, which lies as far into a page as `memory`.
  // ENOMEM: mostly RLIMIT_MEMLOCK.
  Result<std::unique_ptr<Registration>> register_memory(void* memory, size_t bytes, uint64_t address,
                                                        Access access);
  // The same of a device's memory, exported as a dmabuf: [offset, offset + bytes) of it. ENOTSUP: the
  // library, the kernel or the adapter has no such thing.
  Result<std::unique_ptr<Registration>> register_dmabuf(int fd, uint64_t offset, size_t bytes,
                                                        uint64_t address, Access access);

  const PortFacts& port() const { return port_; }
  const GidFacts& gid() const { return gid_; }
  std::string name() const { return port_.device + ":" + std::to_string(port_.port); }
  uint32_t index() const { return index_; }  // in the process

  // For verbs_pair.cc.
  const Verbs* verbs = nullptr;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  uint32_t most_message_bytes = 0;  // that one work request moves
  uint8_t reads_in = 0, reads_out = 0;

 private:
  friend class Adapters;
  PortFacts port_;
  GidFacts gid_;
  uint32_t index_ = 0;
};

class Adapters {
 public:
  // Those that `wanted` names ("": all with an active port and an address), opened at the first call and kept
  // for ever. ENOSYS: no libibverbs; ENODEV: no such device, or no port is active; EINVAL; ENOTSUP: this
  // build has no RDMA. *who (if not null): a line for people.
  static Result<const Adapters*> get(const std::string& wanted, std::string* who = nullptr);
  // For a connection over `socket` (connected) on a NUMA node; null: none fits. ethernet: choose.h, Place.
  Adapter* pick(int socket, int numa_node, int ethernet = -1) const;
  const std::vector<std::unique_ptr<Adapter>>& all() const { return adapters_; }

 private:
  static Result<std::unique_ptr<Adapters>> open(const std::string& wanted, std::string* who);
  std::vector<std::unique_ptr<Adapter>> adapters_;
};

// The NUMA node that this thread runs on; -1: unknown.
int numa_node_here();

// The reports of completion queues, on one descriptor (not blocking). One thread.
class Events {
 public:
  static Result<std::unique_ptr<Events>> create(Adapter& adapter);
  ~Events();
  int fd() const;
  // The owners (VerbsPair::create) of the queues that have reported since; each is to be armed anew.
  void take(std::vector<void*>* owners);
  ibv_comp_channel* channel() const { return channel_; }

 private:
  Events(const Verbs* verbs, ibv_comp_channel* channel) : verbs_(verbs), channel_(channel) {}
  const Verbs* verbs_;
  ibv_comp_channel* channel_;
  pid_t process_ = ::getpid();
};

}  // namespace ffs::net::rdma
