// ffs_server_*: the storage server's handle (server/server.h).
#include <time.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "capi/error.h"
#include "capi/options.h"
#include "ffs/ffs.h"
#include "server/log.h"
#include "server/server.h"
#include "server/wire_craq.h"

struct ffs_server {
  explicit ffs_server(const ffs::server::ShardConfig& config) : server(config) {}
  ffs::server::Server server;
};

namespace {

using ffs::capi::fail;

// Peer leases, a fifth of it, must span some ticks of the shards.
constexpr uint32_t kLeastFailureTimeoutMs = 250;

// ffs.h's states to the replica's. False: no such state.
bool state_of(uint8_t state, ffs::craq::MemberState* out) {
  switch (state) {
    case FFS_OFFLINE:
      *out = ffs::craq::MemberState::offline;
      return true;
    case FFS_SERVING:
      *out = ffs::craq::MemberState::serving;
      return true;
    case FFS_SYNCING:
      *out = ffs::craq::MemberState::syncing;
      return true;
    case FFS_WAITING:
      *out = ffs::craq::MemberState::waiting;
      return true;
    case FFS_LAST_SERVING:
      *out = ffs::craq::MemberState::last_serving;
      return true;
    default:
      return false;
  }
}

uint32_t state_number(const ffs::craq::ReplicaStatus& status) {
  if (status.serving) return FFS_SERVING;
  switch (status.state) {
    case ffs::craq::MemberState::syncing:
      return FFS_SYNCING;
    case ffs::craq::MemberState::waiting:
      return FFS_WAITING;
    case ffs::craq::MemberState::last_serving:
      return FFS_LAST_SERVING;
    case ffs::craq::MemberState::serving:  // in its chain, but not now (status.reason)
    case ffs::craq::MemberState::offline:
      return FFS_OFFLINE;
  }
  return FFS_OFFLINE;
}

// Why a sync doesn't get on, as an errno.
uint32_t failure_number(ffs::craq::Outcome outcome) {
  if (outcome == ffs::craq::Outcome::ok) return 0;
  return static_cast<uint32_t>(ffs::server::told(outcome, true).status);
}

template <size_t N>
std::string text_of(const char (&field)[N]) {
  return std::string(field, ::strnlen(field, N));
}

}  // namespace

extern "C" {

int ffs_server_create(const ffs_server_options* given, ffs_server** out) {
  ffs_server_options options{};
  if (out == nullptr || !ffs::capi::take_options(given, &options)) {
    return fail(EINVAL, "server: options (with struct_size) and a result are needed");
  }
  ffs::server::ShardConfig config;
  config.node = ffs::NodeId(options.node);
  config.incarnation = options.incarnation;
  std::memcpy(config.cluster.data(), options.cluster, config.cluster.size());
  config.bind_host = options.bind_host != nullptr ? options.bind_host : "127.0.0.1";
  config.socket_dir = options.socket_dir != nullptr ? options.socket_dir : "";
  const std::string backend = options.io_backend != nullptr ? options.io_backend : "auto";
  if (backend == "pread") {
    config.backend = ffs::io::Backend::pread;
  } else if (backend != "auto" && backend != "uring") {
    return fail(EINVAL, "server: io_backend is \"%s\"; \"auto\", \"uring\" or \"pread\"", backend.c_str());
  }
  if (options.pool_bytes != 0) config.pool_bytes = options.pool_bytes;
  if (options.region_limit_bytes != 0) config.region_limit_bytes = options.region_limit_bytes;
  if (options.max_sessions != 0) config.max_sessions = options.max_sessions;
  if (options.max_ops != 0) config.max_ops = options.max_ops;
  if (options.tcp_congestion != nullptr) config.tcp_congestion = options.tcp_congestion;
  if (options.failure_timeout_ms != 0) config.failure_timeout_ms = options.failure_timeout_ms;
  if (options.sync_share_percent != 0) config.sync_share_percent = options.sync_share_percent;
  config.scrub_bytes_per_s = options.scrub_bytes_per_s;
  config.dedup_bytes_per_s = options.dedup_bytes_per_s;
  if (config.failure_timeout_ms < kLeastFailureTimeoutMs) {
    return fail(EINVAL, "server: failure_timeout_ms is %u; at least %u", options.failure_timeout_ms,
                kLeastFailureTimeoutMs);
  }
  if (config.sync_share_percent > 100) {
    return fail(EINVAL, "server: sync_share_percent is %u; at most 100", options.sync_share_percent);
  }
  if (options.rdma != nullptr) config.rdma = options.rdma;
  if (options.rdma_traffic_class > 255) {
    return fail(EINVAL, "server: rdma_traffic_class is %u; 0 to 255", options.rdma_traffic_class);
  }
  config.rdma_traffic_class = static_cast<uint8_t>(options.rdma_traffic_class);
  switch (options.zero_copy_send) {
    case FFS_ZERO_COPY_AUTO:
      config.zero_copy_send = ffs::net::ZeroCopyMode::kAuto;
      break;
    case FFS_ZERO_COPY_OFF:
      config.zero_copy_send = ffs::net::ZeroCopyMode::kOff;
      break;
    case FFS_ZERO_COPY_ON:
      config.zero_copy_send = ffs::net::ZeroCopyMode::kOn;
      break;
    default:
      return fail(EINVAL, "server: zero_copy_send is %u; 0 (auto), 1 (off) or 2 (on)",
                  options.zero_copy_send);
  }
  if (auto wanted = ffs::net::rdma::parse_wanted(config.rdma); !wanted.ok()) {
    return fail(wanted.error(), "server: rdma");
  }
  if (options.peer_key != nullptr) {
    config.peers_prove = config.signed_capabilities = true;
    std::memcpy(config.peer_key.data(), options.peer_key, config.peer_key.size());
  }
  if (options.max_ops > 65536) return fail(EINVAL, "server: max_ops is %u; at most 65536", options.max_ops);
  ffs::server::set_log_level(options.log_level);
  auto made = std::make_unique<ffs_server>(config);
  if (made->server.news_fd() < 0) return fail(EMFILE, "server: no descriptor is left for its news");
  *out = made.release();
  return 0;
}

int ffs_server_add_device(ffs_server* server, const char* path, const ffs_device_options* given,
                          ffs_shard_info* out) {
  ffs_device_options options{};
  if (server == nullptr || path == nullptr || out == nullptr ||
      (given != nullptr && !ffs::capi::take_options(given, &options))) {
    return fail(EINVAL, "add device: a server, a path, options (with struct_size) and a result are needed");
  }
  if (options.write_cache > 2 || options.discard > 2) {
    return fail(EINVAL, "add device %s: write_cache is %u, discard is %u; 0 to 2", path, options.write_cache,
                options.discard);
  }
  ffs::server::Server::DeviceOptions choices;
  choices.write_cache = static_cast<ffs::engine::WriteCache>(options.write_cache);
  choices.discard = static_cast<ffs::engine::Discard>(options.discard);
  choices.null_data = options.null_data != 0;
  ffs::server::Failure failure;
  ffs::server::Shard* shard = server->server.add_device(path, choices, &failure);
  if (shard == nullptr) {
    const int code = failure.code == EMEDIUMTYPE ? ENOMEDIUM : failure.code == EXDEV ? EPROTO : failure.code;
    if (failure.line.starts_with(path)) return fail(code, "device %s", failure.line.c_str());
    return fail(code, "device %s: %s", path,
                failure.line.empty() ? std::strerror(code) : failure.line.c_str());
  }
  *out = ffs_shard_info{};
  out->shard = shard->number();
  out->port = shard->port();
  std::strncpy(out->socket_path, shard->socket_path().c_str(), sizeof out->socket_path - 1);
  out->target_count = static_cast<uint32_t>(std::min<size_t>(shard->targets().size(), 64));
  for (uint32_t i = 0; i < out->target_count; i++) out->targets[i] = shard->targets()[i].value;
  return 0;
}

int ffs_server_start(ffs_server* server) {
  if (server == nullptr) return fail(EINVAL, "start: no server");
  const int code = server->server.start();
  if (code == EALREADY) return fail(code, "start: the server runs already");
  return code == 0 ? 0 : fail(code, "start: add a device first; a stopped server doesn't start again");
}

int ffs_server_configure(ffs_server* server, uint64_t routing_epoch, uint64_t manager_ms,
                         const ffs_chain_route* chains, uint32_t chain_count, const ffs_target_route* targets,
                         uint32_t target_count) {
  if (server == nullptr || (chains == nullptr && chain_count > 0) ||
      (targets == nullptr && target_count > 0)) {
    return fail(EINVAL, "configure: a server, chains and targets are needed");
  }
  ffs::server::Routing routing;
  routing.epoch = routing_epoch;
  routing.manager_ms = manager_ms;
  for (uint32_t i = 0; i < chain_count; i++) {
    const ffs_chain_route& from = chains[i];
    ffs::server::ChainRoute chain;
    chain.chain = ffs::ChainId(from.chain);
    chain.proposed = from.proposed != 0;
    chain.config.version = {from.term, from.counter};
    chain.config.member_count = from.member_count;
    if (from.member_count == 0 || from.member_count > ffs::kMaxReplicas) {
      return fail(EINVAL, "configure: chain %u has %u members; 1 to 8", from.chain, from.member_count);
    }
    for (uint32_t k = 0; k < from.member_count; k++) {
      chain.config.members[k].target = ffs::TargetId(from.members[k]);
      chain.config.members[k].incarnation = from.incarnations[k];
      if (!state_of(from.states[k], &chain.config.members[k].state)) {
        return fail(EINVAL, "configure: chain %u: state %u is none", from.chain, from.states[k]);
      }
    }
    routing.chains.push_back(chain);
  }
  for (uint32_t i = 0; i < target_count; i++) {
    const ffs_target_route& from = targets[i];
    ffs::server::Route route;
    route.target = ffs::TargetId(from.target);
    route.node = ffs::NodeId(from.node);
    route.host = text_of(from.host);
    route.host_id = text_of(from.host_id);
    route.socket_path = text_of(from.socket_path);
    if (from.port == 0 || from.port > 65535) {
      return fail(EINVAL, "configure: target %llu has port %u", static_cast<unsigned long long>(from.target),
                  from.port);
    }
    route.port = static_cast<uint16_t>(from.port);
    routing.targets.push_back(route);
  }
  server->server.configure(routing);
  return 0;
}

uint64_t ffs_clock_ms(void) {
  timespec now;
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1000000;
}

int ffs_server_lease(ffs_server* server, uint64_t until_ms) {
  if (server == nullptr) return fail(EINVAL, "lease: no server");
  server->server.lease(until_ms);
  return 0;
}

int ffs_server_set_keys(ffs_server* server, const ffs_signing_key* keys, uint32_t count) {
  constexpr uint32_t kMostKeys = 8;
  if (server == nullptr || (keys == nullptr && count > 0) || count > kMostKeys) {
    return fail(EINVAL, "set keys: a server and at most %u keys are needed", kMostKeys);
  }
  std::vector<ffs::server::SigningKey> all(count);
  for (uint32_t i = 0; i < count; i++) {
    if (keys[i].id == 0) return fail(EINVAL, "set keys: a key's id isn't 0");
    all[i].id = keys[i].id;
    std::memcpy(all[i].secret.data(), keys[i].secret, sizeof keys[i].secret);
  }
  server->server.set_keys(all);
  return 0;
}

int ffs_server_set_spaces(ffs_server* server, const ffs_space_policy* policies, uint32_t count) {
  if (server == nullptr || (policies == nullptr && count > 0)) {
    return fail(EINVAL, "set spaces: a server and policies are needed");
  }
  std::vector<ffs::server::SpacePolicy> all;
  all.reserve(count);
  for (uint32_t i = 0; i < count; i++) {
    const ffs_space_policy& from = policies[i];
    if ((from.flags & ~static_cast<uint32_t>(FFS_SPACE_EVICTABLE | FFS_SPACE_DEDUP)) != 0) {
      return fail(EINVAL,
                  "set spaces: space %llu has flags 0x%x; FFS_SPACE_EVICTABLE and FFS_SPACE_DEDUP are known",
                  static_cast<unsigned long long>(from.space), from.flags);
    }
    all.push_back({from.space, ffs::ChainId(from.chain), (from.flags & FFS_SPACE_EVICTABLE) != 0,
                   from.quota_bytes, from.ttl_ms, (from.flags & FFS_SPACE_DEDUP) != 0});
  }
  server->server.set_spaces(all);
  return 0;
}

int ffs_server_space_use(ffs_server* server, ffs_space_use* out, uint32_t capacity) {
  if (server == nullptr || (out == nullptr && capacity > 0)) {
    return fail(EINVAL, "space use: a server and room are needed");
  }
  const auto all = server->server.space_use();
  for (size_t i = 0; i < all.size() && i < capacity; i++) {
    const ffs::server::SpaceUse& from = all[i];
    out[i] = ffs_space_use{
        from.target.value,  from.space,      from.chunks,         from.bytes,           from.evicted_chunks,
        from.evicted_bytes, from.hits,       from.expired_chunks, from.ready ? 1u : 0u, 0,
        from.shared_chunks, from.saved_bytes};
  }
  return static_cast<int>(std::min<size_t>(all.size(), INT32_MAX));
}

int ffs_server_release_target(ffs_server* server, uint64_t target) {
  if (server == nullptr) return fail(EINVAL, "release: no server");
  const int code = server->server.release_target(ffs::TargetId(target));
  if (code == 0) return 0;
  return fail(code, "release: target %llu isn't on a device of this server",
              static_cast<unsigned long long>(target));
}

int ffs_server_news_fd(ffs_server* server) {
  if (server == nullptr) return fail(EINVAL, "news: no server");
  return server->server.news_fd();
}

int ffs_server_report(ffs_server* server, ffs_target_report* out, uint32_t capacity) {
  if (server == nullptr || (out == nullptr && capacity > 0))
    return fail(EINVAL, "report: a server and room are needed");
  const auto reports = server->server.report();
  uint32_t count = 0;
  for (const auto& from : reports) {
    if (count == capacity) break;
    ffs_target_report& to = out[count++];
    to = ffs_target_report{};
    to.target = from.target.value;
    to.chain = from.chain.value;
    to.recorded_term = from.recorded.term;
    to.recorded_counter = from.recorded.counter;
    to.persisted_term = from.persisted.term;
    to.persisted_counter = from.persisted.counter;
    to.persisted_here = from.persisted_here ? 1 : 0;
    const ffs::craq::ReplicaStatus& status = from.status;
    to.state = state_number(status);
    to.poisoned = from.poisoned ? 1 : 0;
    to.reason = static_cast<uint32_t>(status.reason);
    to.leased = status.leased ? 1 : 0;
    to.suspect = status.suspect.value;
    to.sync_target = status.sync_target.value;
    to.sync_done = status.sync_done ? 1 : 0;
    to.sync_failure = failure_number(status.sync_failure);
    to.sync_chunks_total = status.sync_chunks_total;
    to.sync_chunks_compared = status.sync_chunks_compared;
    to.sync_chunks_sent = status.sync_chunks_sent;
    to.sync_bytes_sent = status.sync_bytes_sent;
    to.damaged = status.damaged;
    to.repaired = status.repaired;
    to.scrubbed_bytes = from.scrubbed_bytes;
    to.used_bytes = from.usage.allocated_bytes;
    to.chunks = from.usage.chunks;
    to.capacity_bytes = from.capacity.capacity_bytes;
    to.free_bytes = from.capacity.free_bytes;
  }
  return static_cast<int>(count);
}

static void background_metrics(const ffs::server::ShardMetrics& from, ffs_shard_metrics* out) {
  const auto bytes = [&](ffs::io::OpClass op_class) {
    return from.background_bytes[static_cast<size_t>(op_class)];
  };
  out->recovery_bytes = bytes(ffs::io::OpClass::recovery);
  out->compaction_bytes = bytes(ffs::io::OpClass::compaction);
  out->scrub_bytes = bytes(ffs::io::OpClass::scrub);
  out->eviction_bytes = bytes(ffs::io::OpClass::eviction);
  out->background_held_us = from.background_held_us;
  out->background_rate = from.background_rate;
  out->slow_reads = from.slow_reads;
  out->longest_read_us = from.longest_read_us;
  out->scrubbed_bytes = from.scrubbed_bytes;
  out->rdma_sessions = from.rdma_sessions;
  out->rdma_breaks = from.rdma_breaks;
  out->rdma_sends = from.rdma.sends;
  out->rdma_writes = from.rdma.writes;
  out->rdma_reads = from.rdma.reads;
  out->rdma_credit_sends = from.rdma.credit_sends;
  out->rdma_bytes = from.rdma.bulk_bytes;
  out->rdma_doorbells = from.rdma.doorbells;
  out->rdma_completions = from.rdma.completions;
  out->rdma_receives = from.rdma.receives;
  out->memory_reads = from.memory_reads;
  out->memory_read_copies = from.memory_read_copies;
  out->memory_lent_bytes = from.memory_lent_bytes;
  out->zero_copy_sends = from.zero_copy_sends;
  out->zero_copy_copied = from.zero_copy_copied;
  out->memory_writes = from.memory_writes;
}

static void store_metrics(const ffs::server::ShardMetrics& from, ffs_shard_metrics* out) {
  const ffs::engine::StoreMetrics& store = from.store;
  out->capacity_bytes = from.capacity.capacity_bytes;
  out->free_bytes = from.capacity.free_bytes;
  out->max_chunks = from.capacity.max_chunks;
  out->chunks = from.capacity.chunks;
  out->chunk_memory_bytes = store.memory_bytes;
  out->journal_used_bytes = store.journal_used_bytes;
  out->journal_size_bytes = store.journal_size_bytes;
  out->snapshots = store.snapshots;
  out->snapshot_age_us = store.snapshot_age_us;
  out->overlay_bytes = store.overlay_bytes;
  out->checksum_errors = store.checksum_errors;
  out->free_slabs = store.free_slabs;
  out->slabs_emptied = store.slabs_emptied;
  out->moves = store.moves;
  out->moved_bytes = store.moved_bytes;
  out->moves_dropped = store.moves_dropped;
  out->waiting_for_room = store.waiting_for_room;
  out->discards = store.discards;
  out->discarded_bytes = store.discarded_bytes;
  out->discard_failures = store.discard_failures;
  out->discards_due_bytes = store.discards_due_bytes;
  out->dedup_bytes = store.dedup_compared_bytes;
  out->dedup_shared = store.dedup_shared;
  out->dedup_differ = store.dedup_differ;
  out->shared_chunks = store.shared_chunks;
  out->saved_bytes = store.saved_bytes;
}

int ffs_server_metrics(ffs_server* server, uint32_t shard, ffs_shard_metrics* out) {
  if (server == nullptr || out == nullptr) return fail(EINVAL, "metrics: a server and a result are needed");
  ffs::server::ShardMetrics from;
  if (!server->server.metrics(shard, &from)) return fail(ENOENT, "metrics: there is no shard %u", shard);
  *out = ffs_shard_metrics{from.reads,         from.read_bytes,   from.updates,         from.update_bytes,
                           from.forwards,      from.refusals,     from.errors,          from.flushes,
                           from.journal_bytes, from.long_steps,   from.longest_step_us, from.sessions,
                           from.regions,       from.region_bytes, from.pool_bytes,      from.pool_used_bytes,
                           from.ops_waiting,   from.bytes_copied, from.crc_failures,    from.frame_errors};
  background_metrics(from, out);
  store_metrics(from, out);
  return 0;
}

int ffs_server_fence(ffs_server* server, uint64_t client) {
  if (server == nullptr || client == 0) return fail(EINVAL, "fence: a server and a client are needed");
  const int code = server->server.fence(ffs::ClientId(client));
  return code == 0
             ? 0
             : fail(code, "fence of client %llu: a device failed", static_cast<unsigned long long>(client));
}

int ffs_server_stop(ffs_server* server) {
  if (server == nullptr) return fail(EINVAL, "stop: no server");
  const int code = server->server.stop();
  return code == 0 ? 0 : fail(code, "stop: a device was left to recovery (%s)", std::strerror(code));
}

void ffs_server_destroy(ffs_server* server) {
  delete server;
}

}  // extern "C"
