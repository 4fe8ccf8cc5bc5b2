// Real servers and a real ring in one process, over a transport that the test chooses: what must hold over
// all of them (docs/rdma.md, The tests of all transports).
#pragma once

#include "client/ring.h"
#include "test/server_harness.h"

namespace ffs::transport::testing {

using namespace ffs::server::testing;
using client::TransportChoice;

inline std::string name_of(TransportChoice choice) {
  return choice == TransportChoice::kTcp ? "tcp" : choice == TransportChoice::kLocal ? "local" : "rdma";
}

// tcp, local, and rdma where a device is.
inline std::vector<TransportChoice> choices() {
  std::vector<TransportChoice> out;
  for (const net::Transport one : transports()) out.push_back(static_cast<TransportChoice>(one));
  return out;
}

struct World {
  explicit World(TransportChoice choice, Cluster::Options options = {}, client::ClientOptions more = {})
      : cluster(options) {
    more.transport = choice;
    more.client = ClientId(kClient);
    more.cluster = kCluster;
    more.hedge_percent = 0;
    more.connect_timeout_ms = 5000;
    client = std::make_shared<client::Client>(more, *net::host_id());
    wire::Capability whole{};
    whole.version = 1;
    whole.kind = 2;
    whole.rights = 7;
    whole.client = kClient;
    capability = *client->capabilities().add(&whole, sizeof whole);
    route();
    ring = std::move(*client::Ring::create(client, 1024));
    // A shard registers its memory after its start.
    if (choice == TransportChoice::kRdma) {
      for (uint32_t node = 0; node < options.nodes; node++) {
        TestClient waits(*cluster.node(node).shard, kRdma, kClient + 77);
        waits.ready();
      }
    }
  }
  ~World() {
    if (ring != nullptr) ring->close();
  }

  void route() {
    auto routing = std::make_shared<client::Routing>();
    routing->epoch = ++epoch;
    client::Chain chain;
    chain.id = ChainId(1);
    chain.version = cluster.version();
    chain.available = true;
    for (uint32_t i = 0; i < 8; i++) {
      if (i >= nodes()) break;
      Node& node = cluster.node(i);
      chain.members[i].target = TargetId(Cluster::target(i));
      chain.members[i].serving = true;
      chain.members[i].endpoint = i;
      chain.member_count++;
      routing->endpoints.push_back({"127.0.0.1", node.server == nullptr ? uint16_t{1} : node.shard->port(),
                                    *net::host_id(),
                                    node.server == nullptr ? "" : node.shard->socket_path()});
    }
    routing->chains.emplace(chain.id, chain);
    client->set_routing(routing);
  }
  uint32_t nodes() const { return node_count; }

  ffs_sqe sqe(uint8_t op, uint64_t index, uint32_t offset, uint32_t length, client::Iov& iov, uint64_t at) {
    ffs_sqe e{};
    e.op = op;
    e.chain = 1;
    e.capability = capability;
    e.group = 1;
    const ChunkKey key = ChunkKey::of_file(kSpace, index);
    std::memcpy(e.key, key.bytes.data(), sizeof e.key);
    e.offset = offset;
    e.length = length;
    e.iov = reinterpret_cast<ffs_iov*>(&iov);
    e.iov_offset = at;
    e.space_epoch = 1;
    e.userdata = ++last;
    return e;
  }
  // All of them, by userdata.
  std::map<uint64_t, ffs_cqe> run(const std::vector<ffs_sqe>& entries) {
    const auto prepared = ring->prepare(entries.data(), static_cast<uint32_t>(entries.size()));
    REQUIRE_MESSAGE(prepared.fault == nullptr, std::string(prepared.fault));
    REQUIRE(prepared.taken == entries.size());
    return collect(entries.size());
  }
  std::map<uint64_t, ffs_cqe> collect(size_t count) {
    std::map<uint64_t, ffs_cqe> out;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (out.size() < count) {
      REQUIRE_MESSAGE(std::chrono::steady_clock::now() < until, "no completion within 60 s");
      ffs_cqe done[64];
      uint32_t events = 0;
      const uint32_t got = ring->wait(done, 64, 1, 1000, &events);
      for (uint32_t i = 0; i < got; i++) out[done[i].userdata] = done[i];
      if ((events & FFS_WAIT_NEEDS_ROUTING) != 0) route();
    }
    return out;
  }
  int64_t one(const ffs_sqe& entry) { return run({entry}).begin()->second.result; }

  server::ShardMetrics metrics(uint32_t node = 0) { return cluster.node(node).shard->metrics(); }

  Cluster cluster;
  uint32_t node_count = 1;
  std::shared_ptr<client::Client> client;
  uint32_t capability = 0;
  std::unique_ptr<client::Ring> ring;
  uint64_t epoch = 0;
  uint64_t last = 0;
};

// An Iov that is known to the registry, as those of the C ABI are.
struct OpenIov {
  explicit OpenIov(uint64_t bytes, void* memory = nullptr) {
    client::IovOptions options;
    options.size_bytes = bytes;
    options.memory = memory;
    auto made = client::Iov::create(options);
    REQUIRE(made.ok());
    iov = std::move(*made);
    client::IovRegistry::add(iov.get());
  }
  ~OpenIov() { CHECK(client::IovRegistry::remove(iov.get()).ok()); }
  client::Iov& operator*() { return *iov; }
  uint8_t* data() { return iov->data(); }
  std::unique_ptr<client::Iov> iov;
};

}  // namespace ffs::transport::testing
