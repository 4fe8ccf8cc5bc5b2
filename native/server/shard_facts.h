// What a shard is told, and what it tells: its configuration, routing, counters, reports. Plain structs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "craq/replica.h"
#include "engine/chunk_store.h"
#include "io/io.h"
#include "net/mac.h"
#include "net/rdma/channel.h"
#include "net/zero_copy.h"
#include "server/lending.h"
#include "server/peers.h"

namespace ffs::server {

struct ShardConfig {
  uint32_t number = 0;
  NodeId node;
  uint64_t incarnation = 0;
  std::array<uint8_t, 16> cluster{};
  std::string device_path;
  engine::WriteCache write_cache = engine::WriteCache::automatic;
  engine::Discard discard = engine::Discard::automatic;
  bool null_data = false;  // a device for measuring, which keeps no bytes (io/null_io.h)
  std::string bind_host;   // numeric
  uint16_t port = 0;       // 0: any
  std::string socket_dir;  // empty: no `local`
  io::Backend backend = io::Backend::uring;
  size_t pool_bytes = 256u << 20;
  uint64_t region_limit_bytes = 8ull << 30;  // a client
  uint32_t max_sessions = 1024;
  uint32_t max_ops = 4096;
  std::string tcp_congestion = "cubic?";
  uint32_t failure_timeout_ms = 10000;  // peer leases are a fifth of it
  uint32_t sync_share_percent = 25;     // of the device, for recovery while clients are served
  uint64_t scrub_bytes_per_s = 0;       // 0: no scrub
  uint64_t dedup_bytes_per_s = 0;       // compared to find equal chunks; 0: none are looked for
  uint32_t evict_reserve_percent = 2;   // of the device, that evictions keep free
  bool signed_capabilities = false;     // only signed ones are taken
  bool peers_prove = false;             // servers prove `peer_key` to each other
  net::MacKey peer_key{};
  std::string rdma;                     // devices (net/rdma/adapter.h); empty: all there are; "off": none
  uint8_t rdma_traffic_class = 0;       // of what goes out over RDMA
  uint64_t most_lent_us = kMostLentUs;  // tests make it longer
  net::ZeroCopyMode zero_copy_send = net::ZeroCopyMode::kAuto;
  int news_fd = -1;  // an eventfd, written when a report has news; the server's
};

struct ShardMetrics {
  uint64_t reads = 0, read_bytes = 0, updates = 0, update_bytes = 0, forwards = 0, refusals = 0, errors = 0;
  uint64_t flushes = 0, journal_bytes = 0, long_steps = 0, longest_step_us = 0;
  uint64_t sessions = 0, regions = 0, region_bytes = 0, pool_bytes = 0, pool_used_bytes = 0, ops_waiting = 0;
  uint64_t bytes_copied = 0, crc_failures = 0, frame_errors = 0;
  uint64_t memory_reads = 0, memory_read_copies = 0, memory_lent_bytes = 0, memory_writes = 0;  // lending.h
  uint64_t zero_copy_sends = 0, zero_copy_copied = 0;  // net/zero_copy.h
  // Of the background: bytes by class, how long it waited for its share or behind clients, bytes a second
  // that it may take beside them now. Of clients' reads: those that were slower beside it than they are
  // without.
  std::array<uint64_t, io::kOpClasses> background_bytes{};
  uint64_t background_held_us = 0, background_rate = 0, slow_reads = 0, longest_read_us = 0;
  uint64_t scrubbed_bytes = 0;  // of all targets that were here
  uint64_t rdma_sessions = 0, rdma_breaks = 0;
  net::rdma::ChannelCounters rdma;  // of all sessions that were here
  engine::StoreMetrics store;
  engine::Capacity capacity;
};

struct TargetReport {
  TargetId target;
  ChainId chain;
  bool has_chain = false;
  ChainVersion recorded;   // acts in it
  ChainVersion persisted;  // on the device: the newest proposed or adopted
  bool persisted_here = false;
  bool poisoned = false;
  craq::ReplicaStatus status;  // the rest as the replica says it
  uint64_t scrubbed_bytes = 0;
  engine::TargetUsage usage;
  engine::Capacity capacity;
};

struct ChainRoute {
  ChainId chain;
  craq::ChainConfig config;
  bool proposed = false;
};

struct Routing {
  uint64_t epoch = 0;
  uint64_t manager_ms = 0;
  std::vector<ChainRoute> chains;
  std::vector<Route> targets;
};

// A failure with a line for people.
struct Failure {
  int code = 0;
  std::string line;
};

}  // namespace ffs::server
