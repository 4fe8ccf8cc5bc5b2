// ffs_client_*, ffs_iov_*, ffs_ring_*: checks of arguments, one thread at a time in a ring, no use
// of a parent's ring in a child of fork. Everything else is native/client.
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <memory>

#include "capi/error.h"
#include "capi/ring_table.h"
#include "client/fork.h"
#include "client/ring.h"
#include "ffs/ffs.h"

using ffs::capi::fail;
using ffs::capi::RingPlace;
using ffs::capi::RingTable;
using ffs::client::Client;
using ffs::client::ClientOptions;
using ffs::client::Iov;
using ffs::client::IovOptions;
using ffs::client::IovRegistry;
using ffs::client::Ring;

struct ffs_client {
  std::shared_ptr<Client> client;
};

namespace {

// A ring's functions are for one thread at a time and for the process that made it.
class Entry {
 public:
  explicit Entry(ffs_ring* ring) : place_(RingTable::find(ring)) {
    if (place_ == nullptr) {
      error_ = gone(ring);
    } else if (place_->process.load(std::memory_order_relaxed) != ffs::client::process_generation()) {
      error_ = fail(EOWNERDEAD, "the ring belongs to the parent process: make a new one after fork");
    } else if (place_->inside.exchange(true, std::memory_order_acquire)) {
      error_ = fail(EBUSY, "another thread is inside the ring: give each thread its own");
    } else if (entered_ = RingTable::is_of(*place_, ring); !entered_) {
      place_->inside.store(false, std::memory_order_release);
      error_ = gone(ring);
    }
  }
  ~Entry() {
    if (entered_) place_->inside.store(false, std::memory_order_release);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  static int gone(ffs_ring* ring) {
    if (ring == nullptr) return fail(EINVAL, "ring: the handle is NULL");
    return fail(EBADF, "the ring was destroyed");
  }
  bool ok() const { return entered_; }
  int error() const { return error_; }
  RingPlace& place() const { return *place_; }
  Ring* operator->() const { return place_->ring.get(); }

 private:
  RingPlace* place_;
  bool entered_ = false;
  int error_ = 0;
};

// The caller's struct may be shorter (an older caller): what it lacks is zero.
template <typename T>
bool take_options(const T* from, T* out) {
  *out = T{};
  if (from == nullptr || from->struct_size < sizeof(uint32_t)) return false;
  std::memcpy(out, from, from->struct_size < sizeof(T) ? from->struct_size : sizeof(T));
  return true;
}

Iov* iov_of(ffs_iov* iov) {
  return reinterpret_cast<Iov*>(iov);
}

}  // namespace

extern "C" {

// ---- client ----------------------------------------------------------------------------------

int ffs_client_create(const ffs_client_options* options, ffs_client** out) {
  ffs_client_options given;
  if (!take_options(options, &given) || out == nullptr)
    return fail(EINVAL, "client: options and out are needed");
  if (given.client == 0) return fail(EINVAL, "client: a session id from the metadata service is needed");
  if (given.transport > FFS_TRANSPORT_RDMA)
    return fail(EINVAL, "client: there is no transport %u", given.transport);
  ClientOptions o;
  o.transport = static_cast<ffs::client::TransportChoice>(given.transport);
  o.client = ffs::ClientId(given.client);
  std::memcpy(o.cluster.data(), given.cluster, o.cluster.size());
  if (given.connect_timeout_ms != 0) o.connect_timeout_ms = given.connect_timeout_ms;
  if (given.request_timeout_ms != 0) o.request_timeout_ms = given.request_timeout_ms;
  if (given.try_timeout_ms != 0) o.try_timeout_ms = given.try_timeout_ms;
  if (given.inflight_bytes != 0) o.inflight_bytes = given.inflight_bytes;
  if (given.tcp_congestion != nullptr) o.congestion = given.tcp_congestion;
  if (given.unavailable_timeout_ms != 0) o.unavailable_timeout_ms = given.unavailable_timeout_ms;
  if (given.hedge_percent != 0) o.hedge_percent = given.hedge_percent > 100 ? 0 : given.hedge_percent;
  o.hedge_after_ms = given.hedge_after_ms;
  o.checksums = given.checksum == 0;
  if (given.rdma != nullptr) o.rdma = given.rdma;
  if (given.rdma_traffic_class > 255) {
    return fail(EINVAL, "client: rdma_traffic_class is %u; 0 to 255", given.rdma_traffic_class);
  }
  o.rdma_traffic_class = static_cast<uint8_t>(given.rdma_traffic_class);
  if (given.transport == FFS_TRANSPORT_RDMA) {
    auto adapters = ffs::net::rdma::Adapters::get(o.rdma);
    if (!adapters.ok()) return fail(adapters.error(), "client: transport rdma");
  } else if (o.rdma != "off") {
    auto wanted = ffs::net::rdma::parse_wanted(o.rdma);
    if (!wanted.ok()) return fail(wanted.error(), "client: rdma");
  }
  auto host = ffs::net::host_id();
  if (!host.ok()) return fail(host.error(), "client");
  *out = new ffs_client{std::make_shared<Client>(std::move(o), std::move(*host))};
  return 0;
}

void ffs_client_destroy(ffs_client* client) {
  delete client;
}

int ffs_client_set_routing(ffs_client* client, uint64_t routing_epoch, const ffs_chain_route* chains,
                           uint32_t chain_count, const ffs_target_route* targets, uint32_t target_count) {
  if (client == nullptr || (chains == nullptr && chain_count > 0) ||
      (targets == nullptr && target_count > 0)) {
    return fail(EINVAL, "set routing: a pointer is NULL");
  }
  auto routing = ffs::client::make_routing(routing_epoch, chains, chain_count, targets, target_count);
  if (!routing.ok()) return fail(routing.error(), "set routing");
  client->client->set_routing(std::move(*routing));
  return 0;
}

int ffs_client_add_capability(ffs_client* client, const void* bytes, uint32_t length) {
  if (client == nullptr) return fail(EINVAL, "add capability: the handle is NULL");
  auto id = client->client->capabilities().add(bytes, length);
  return id.ok() ? static_cast<int>(*id) : fail(id.error(), "add capability");
}

int ffs_client_renew_capability(ffs_client* client, uint32_t id, const void* bytes, uint32_t length) {
  if (client == nullptr) return fail(EINVAL, "renew capability: the handle is NULL");
  auto status = client->client->capabilities().renew(id, bytes, length);
  if (status.ok()) client->client->wake();
  return status.ok() ? 0 : fail(status.error(), "renew capability " + std::to_string(id));
}

int ffs_client_drop_capability(ffs_client* client, uint32_t id) {
  if (client == nullptr) return fail(EINVAL, "drop capability: the handle is NULL");
  auto status = client->client->capabilities().drop(id);
  return status.ok() ? 0 : fail(status.error(), "drop capability " + std::to_string(id));
}

// ---- iov -------------------------------------------------------------------------------------

int ffs_iov_create(const ffs_iov_options* options, ffs_iov** out) {
  ffs_iov_options given;
  if (!take_options(options, &given) || out == nullptr)
    return fail(EINVAL, "iov: options and out are needed");
  IovOptions o;
  o.size_bytes = given.size_bytes;
  o.numa_node = given.numa_node;
  o.huge_pages = (given.flags & FFS_IOV_HUGEPAGES) != 0;
  o.fd = given.fd;
  o.memory = given.memory;
  auto iov = Iov::create(o);
  if (!iov.ok()) return fail(iov.error(), "iov of " + std::to_string(given.size_bytes) + " bytes");
  IovRegistry::add(iov->get());
  *out = reinterpret_cast<ffs_iov*>(iov->release());
  return 0;
}

int ffs_iov_import_dmabuf(const ffs_dmabuf_options* options, ffs_iov** out) {
  ffs_dmabuf_options given;
  if (!take_options(options, &given) || out == nullptr)
    return fail(EINVAL, "iov of a dmabuf: options and out are needed");
  if (given.fd < 0) return fail(EBADF, "iov of a dmabuf: %d is no descriptor", given.fd);
  IovOptions o;
  o.dmabuf = given.fd;
  o.dmabuf_offset = given.offset;
  o.size_bytes = given.size_bytes;
  auto iov = Iov::create(o);
  if (!iov.ok()) {
    return fail(iov.error(), "iov of " + std::to_string(given.size_bytes) + " bytes at " +
                                 std::to_string(given.offset) + " of a dmabuf");
  }
  IovRegistry::add(iov->get());
  *out = reinterpret_cast<ffs_iov*>(iov->release());
  return 0;
}

void* ffs_iov_data(ffs_iov* iov) {
  return iov_of(iov)->data();
}
uint64_t ffs_iov_size(ffs_iov* iov) {
  return iov_of(iov)->size();
}
int ffs_iov_fd(ffs_iov* iov) {
  return iov_of(iov)->fd();
}

int ffs_iov_destroy(ffs_iov* iov) {
  if (iov == nullptr) return 0;
  auto status = IovRegistry::remove(iov_of(iov));
  if (!status.ok()) return fail(status.error(), "iov");
  delete iov_of(iov);
  return 0;
}

// ---- ring ------------------------------------------------------------------------------------

int ffs_ring_create(ffs_client* client, const ffs_ring_options* options, ffs_ring** out) {
  ffs_ring_options given;
  if (client == nullptr || !take_options(options, &given) || out == nullptr) {
    return fail(EINVAL, "ring: client, options and out are needed");
  }
  auto ring = Ring::create(client->client, given.entries, given.inflight);
  if (!ring.ok()) return fail(ring.error(), "ring of " + std::to_string(given.entries) + " entries");
  *out = RingTable::add(std::move(*ring));
  return *out != nullptr ? 0 : fail(EMFILE, "ring: this process has 65536 of them");
}

int ffs_ring_destroy(ffs_ring* ring) {
  if (ring == nullptr) return 0;
  RingPlace* place = RingTable::find(ring);
  if (place != nullptr &&
      place->process.load(std::memory_order_relaxed) != ffs::client::process_generation()) {
    // A thread that was inside isn't in this process.
    place->ring->abandon();
    RingTable::leave(*place);
    place->inside.store(false, std::memory_order_release);
    return 0;
  }
  Entry entry(ring);
  if (!entry.ok()) return entry.error();
  entry->close();
  RingTable::leave(entry.place());
  return 0;
}

int ffs_ring_prepare(ffs_ring* ring, const ffs_sqe* entries, uint32_t count) {
  Entry entry(ring);
  if (!entry.ok()) return entry.error();
  if (entries == nullptr && count > 0) return fail(EINVAL, "prepare: entries is NULL");
  const auto result = entry->prepare(entries, count);
  if (result.fault != nullptr)
    return fail(EINVAL, "request %u of %u: %s", result.fault_entry, count, result.fault);
  return static_cast<int>(result.taken);
}

int ffs_ring_submit(ffs_ring* ring) {
  Entry entry(ring);
  return entry.ok() ? static_cast<int>(entry->submit()) : entry.error();
}

int ffs_ring_wait(ffs_ring* ring, ffs_cqe* out, uint32_t capacity, uint32_t min, int32_t timeout_ms,
                  uint32_t* events) {
  Entry entry(ring);
  if (!entry.ok()) return entry.error();
  if (events == nullptr || (out == nullptr && capacity > 0))
    return fail(EINVAL, "wait: out or events is NULL");
  return static_cast<int>(entry->wait(out, capacity, min, timeout_ms, events));
}

int ffs_ring_cancel(ffs_ring* ring, uint64_t userdata) {
  Entry entry(ring);
  if (!entry.ok()) return entry.error();
  if (!entry->cancel(userdata)) return fail(ENOENT, "cancel: no request has the userdata %" PRIu64, userdata);
  return 0;
}

int ffs_ring_fd(ffs_ring* ring) {
  RingPlace* place = RingTable::find(ring);
  if (place == nullptr) return Entry::gone(ring);
  const int fd = place->fd.load(std::memory_order_acquire);
  return RingTable::is_of(*place, ring) ? fd : Entry::gone(ring);
}

int ffs_ring_get_stats(ffs_ring* ring, ffs_ring_stats* out) {
  Entry entry(ring);
  if (!entry.ok()) return entry.error();
  if (out == nullptr) return fail(EINVAL, "stats: out is NULL");
  *out = entry->stats();
  return 0;
}

}  // extern "C"
