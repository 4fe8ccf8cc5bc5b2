// Storage servers in this process, as one cluster without a manager, for tests.
#pragma once

#include <doctest/doctest.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"
#include "net/rdma/verbs_pair.h"
#include "net/socket.h"
#include "server/log.h"
#include "server/server.h"

namespace ffs::server::testing {

using wire::Detail;
using wire::Type;

struct TempDir {
  explicit TempDir(const char* base = std::getenv("TMPDIR")) {
    std::string name = std::string(base != nullptr ? base : "/tmp") + "/ffs-server-XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~TempDir() { (void)!std::system(("rm -rf " + path).c_str()); }
  std::string path;
};

constexpr std::array<uint8_t, 16> kCluster = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr uint64_t kClient = 0xC11E;
constexpr uint64_t kSpace = 7;
constexpr net::MacKey kPeerKey = {9, 8, 7, 6, 5};

inline std::vector<uint8_t> pattern(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(size);
  for (size_t i = 0; i + 4 <= size; i += 4) {
    const uint32_t word = static_cast<uint32_t>(random());
    std::memcpy(out.data() + i, &word, 4);
  }
  for (size_t i = size & ~size_t{3}; i < size; i++) out[i] = static_cast<uint8_t>(random());
  return out;
}

// Set up over TCP, then a queue pair (docs/rdma.md).
constexpr auto kRdma = static_cast<net::Transport>(3);

// The transports that this host has: tcp, local, and rdma where a device is. FFS_TEST_TRANSPORTS ("rdma",
// "tcp,local") takes those alone, and says so where there is no device for one.
inline std::vector<net::Transport> transports() {
  const char* wanted = std::getenv("FFS_TEST_TRANSPORTS");
  const auto takes = [wanted](const char* name) {
    return wanted == nullptr ||
           ("," + std::string(wanted) + ",").find("," + std::string(name) + ",") != std::string::npos;
  };
  std::vector<net::Transport> out;
  if (takes("tcp")) out.push_back(net::Transport::kTcp);
  if (takes("local")) out.push_back(net::Transport::kLocal);
  if (takes("rdma")) {
    auto adapters = net::rdma::Adapters::get("");
    if (adapters.ok()) {
      out.push_back(kRdma);
    } else {
      REQUIRE_MESSAGE(wanted == nullptr, "no rdma: ", std::string(adapters.error().what));
      MESSAGE("not over rdma: ", std::string(adapters.error().what));
    }
  }
  REQUIRE_MESSAGE(!out.empty(), "FFS_TEST_TRANSPORTS names none of tcp, local, rdma");
  return out;
}

// One server (a node) with one device and one target, and what the manager would know of it.
struct Node {
  uint64_t number;
  std::string device;
  std::unique_ptr<Server> server;
  Shard* shard = nullptr;
  uint64_t incarnation = 0;
};

// A cluster of nodes that form chains 1, 2, ... of all of them. Member m of chain 1 is node m, target
// 101 + m; chain c is rotated by c - 1: its member m is node (m + c - 1) % nodes, its targets
// are 1000 (c - 1) + 101 + node.
class Cluster {
 public:
  static constexpr uint64_t kLongLeaseMs = 3600 * 1000;
  struct Options {
    uint32_t nodes = 1;
    uint32_t chains = 1;
    uint64_t device_bytes = 512ull << 20;
    size_t pool_bytes = 96u << 20;
    uint32_t max_ops = 1024;
    uint32_t max_sessions = 256;
    io::Backend backend = ffs::testing::chosen_backend();
    uint64_t region_limit_bytes = 256u << 20;
    bool local_peers = true;
    bool in_memory = false;  // devices on a tmpfs
    uint64_t most_lent_us = kMostLentUs;
    net::ZeroCopyMode zero_copy_send = net::ZeroCopyMode::kAuto;
    uint32_t members = 0;  // the chain begins with so many of the nodes; 0: all
    uint32_t failure_timeout_ms = 10000;
    uint64_t scrub_bytes_per_s = 0;
    uint64_t dedup_bytes_per_s = 256u << 20;
    uint32_t sync_share_percent = 25;
    uint64_t lease_ms = kLongLeaseMs;  // at the start; 0: none
    uint64_t manager_ms = 1000;        // the manager's time
    bool secret = false;               // servers prove kPeerKey; capabilities must be signed
    std::vector<SigningKey> keys{};    // told before anything else
  };
  // A member of the chain (of a cluster with one chain).
  struct Place {
    uint32_t node;
    craq::MemberState state = craq::MemberState::serving;
  };
  explicit Cluster(const Options& options)
      : options_(options), dir_(options.in_memory ? "/dev/shm" : std::getenv("TMPDIR")) {
    if (const char* level = std::getenv("FFS_TEST_LOG"))
      set_log_level(static_cast<uint32_t>(std::atoi(level)));
    for (uint32_t i = 0; i < options.nodes; i++) {
      Node node;
      node.number = i + 1;
      node.device = dir_.path + "/device-" + std::to_string(node.number);
      format(node);
      nodes_.push_back(std::move(node));
    }
    for (Node& node : nodes_) start(node);
    if (options.members > 0) {
      for (uint32_t i = 0; i < options.members; i++) places_.push_back({i});
    }
    if (options.lease_ms > 0) lease(options.lease_ms);
    if (places_.empty()) {
      form();
    } else {
      change(places_);
    }
  }

  // The manager's lease, as a server gets it: from now on, for so long.
  void lease(uint64_t lease_ms) {
    for (Node& node : nodes_) {
      if (node.server != nullptr) node.server->lease(clock_ms() + lease_ms);
    }
  }
  // What a manager does to change the members: proposes, waits until all that take part have it durably,
  // records, waits until the serving ones serve.
  void change(std::vector<Place> places) {
    propose(std::move(places));
    record();
  }
  void propose(std::vector<Place> places) {
    places_ = std::move(places);
    version_ = {1, version_.counter + 1};
    configure(true);
    wait_for_places(craq::MemberState::syncing, [&](const TargetReport& report) {
      return report.persisted_here && report.persisted == version_;
    });
  }
  void record() {
    configure(false);
    recorded_ = version_.counter;
    wait_for_places(craq::MemberState::serving, [&](const TargetReport& report) {
      return report.status.serving && report.recorded == version_;
    });
  }
  // The manager's time goes on, by so much more than by itself.
  void pass_time(uint64_t ms) {
    const uint64_t now_ms = clock_ms();
    options_.manager_ms += ms + (now_ms - time_passed_ms_);
    time_passed_ms_ = now_ms;
    configure(false);
  }
  // Until the report of a node's target is so.
  template <typename F>
  void wait_for(uint32_t node, F&& good) {
    for (int i = 0; i < 2000; i++) {
      if (good(nodes_[node].server->report()[0])) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    tell(nodes_[node]);
    REQUIRE_MESSAGE(false, "node ", node, " doesn't come to it within 20 s");
  }
  void stop(uint32_t node) {
    REQUIRE(nodes_[node].server->stop() == 0);
    nodes_[node].server.reset();
  }
  TargetReport report(uint32_t node) { return nodes_[node].server->report()[0]; }

  static uint64_t clock_ms() {
    timespec now;
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1000000;
  }

  static uint64_t target(uint32_t node, uint32_t chain = 1) { return 1000 * (chain - 1) + 101 + node; }
  uint32_t member(uint32_t chain, uint32_t index) const { return (index + chain - 1) % options_.nodes; }
  Node& node(uint32_t index) { return nodes_[index]; }
  const std::string& dir() const { return dir_.path; }
  ChainVersion version() const { return version_; }
  uint32_t counter() const { return recorded_; }  // of the recorded version; any thread

  void start(Node& node) {
    ShardConfig config;
    config.node = NodeId(node.number);
    config.incarnation = ++node.incarnation;
    config.cluster = kCluster;
    config.bind_host = "127.0.0.1";
    config.socket_dir = dir_.path;
    config.pool_bytes = options_.pool_bytes;
    config.max_ops = options_.max_ops;
    config.failure_timeout_ms = options_.failure_timeout_ms;
    config.scrub_bytes_per_s = options_.scrub_bytes_per_s;
    config.dedup_bytes_per_s = options_.dedup_bytes_per_s;
    config.sync_share_percent = options_.sync_share_percent;
    config.max_sessions = options_.max_sessions;
    config.backend = options_.backend;
    config.most_lent_us = options_.most_lent_us;
    config.zero_copy_send = options_.zero_copy_send;
    config.region_limit_bytes = options_.region_limit_bytes;
    config.signed_capabilities = config.peers_prove = options_.secret;
    config.peer_key = kPeerKey;
    node.server = std::make_unique<Server>(config);
    Failure failure;
    node.shard = node.server->add_device(node.device, &failure);
    REQUIRE_MESSAGE(node.shard != nullptr, failure.line);
    node.server->set_keys(options_.keys);
    REQUIRE(node.server->start() == 0);
  }

  // What a manager does at formation and when members return: proposes the next version, waits until
  // all have it durably, records it.
  void form() {
    version_ = {1, version_.counter + 1};
    configure(true);
    wait([&](const TargetReport& report) { return report.persisted_here && report.persisted == version_; });
    configure(false);
    wait([&](const TargetReport& report) { return report.status.serving && report.recorded == version_; });
  }

  void configure(bool proposed) {
    Routing routing;
    routing.epoch = ++epoch_;
    routing.manager_ms = options_.manager_ms;
    for (uint32_t number = 1; number <= options_.chains; number++) {
      ChainRoute chain;
      chain.chain = ChainId(number);
      chain.proposed = proposed;
      chain.config.version = version_;
      chain.config.member_count = places_.empty() ? options_.nodes : static_cast<uint32_t>(places_.size());
      for (uint32_t i = 0; i < chain.config.member_count; i++) {
        const Place place = places_.empty() ? Place{member(number, i)} : places_[i];
        const uint32_t node = place.node;
        chain.config.members[i] = {TargetId(target(node, number)), place.state, nodes_[node].incarnation};
        if (nodes_[node].server == nullptr) continue;
        Route route;
        route.target = TargetId(target(node, number));
        route.node = NodeId(nodes_[node].number);
        route.host = "127.0.0.1";
        route.port = nodes_[node].shard->port();
        route.host_id = options_.local_peers ? *net::host_id() : "elsewhere";
        route.socket_path = nodes_[node].shard->socket_path();
        routing.targets.push_back(route);
      }
      routing.chains.push_back(chain);
    }
    for (Node& node : nodes_) {
      if (node.server != nullptr) node.server->configure(routing);
    }
  }

  template <typename F>
  void wait(F&& good) {
    for (int i = 0; i < 1000; i++) {
      bool all = true;
      for (Node& node : nodes_) {
        for (const TargetReport& report : node.server->report()) all = all && good(report);
      }
      if (all) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    for (Node& node : nodes_) tell(node);
    REQUIRE_MESSAGE(false, "the chain does not form within 10 s");
  }

  // Stops and starts all nodes; the chain leads back.
  void restart() {
    for (Node& node : nodes_) {
      REQUIRE(node.server->stop() == 0);
      node.server.reset();
    }
    for (Node& node : nodes_) start(node);
    lease(kLongLeaseMs);
    form();
  }

 private:
  // Until all places of a state that takes part as much as `least` are so.
  template <typename F>
  void wait_for_places(craq::MemberState least, F&& good) {
    for (const Place& place : places_) {
      if (place.state <= least) wait_for(place.node, good);
    }
  }

  static void tell(Node& node) {
    for (const TargetReport& report : node.server->report()) {
      MESSAGE("target ", report.target.value, " serving ", report.status.serving, " reason ",
              static_cast<int>(report.status.reason), " recorded ", report.recorded.counter, " persisted ",
              report.persisted.counter, " here ", report.persisted_here, " sync of ",
              report.status.sync_target.value, " done ", report.status.sync_done);
    }
  }

  void format(Node& node) {
    auto io = io::Io::create(io::Options{});
    REQUIRE(io.ok());
    engine::FormatOptions format;
    std::memcpy(format.cluster.data(), kCluster.data(), 16);
    for (uint32_t chain = 1; chain <= options_.chains; chain++) {
      format.targets.emplace_back(target(static_cast<uint32_t>(node.number - 1), chain));
    }
    format.size_bytes = options_.device_bytes;
    format.max_chunks = 4096;
    format.sparse = true;
    const Status made = engine::ChunkStore::format(**io, node.device, format);
    REQUIRE_MESSAGE(made.ok(), engine::ChunkStore::last_open_message());
  }

  Options options_;
  TempDir dir_;
  std::vector<Node> nodes_;
  ChainVersion version_;
  std::atomic<uint32_t> recorded_{0};
  std::vector<Place> places_;  // empty: all nodes, in every chain
  uint64_t time_passed_ms_ = clock_ms();
  uint64_t epoch_ = 0;
};

}  // namespace ffs::server::testing
