// A test's server: real sockets that speak net's frames, one thread, which does with each request
// what the test's script says. It keeps no chunks: what it answers is the script's business.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "base/ids.h"
#include "client/ring.h"
#include "net/shared_memory.h"
#include "net/socket.h"

namespace ffs::client::testing {

using wire::Detail;
using wire::Type;

struct Peer {
  // A request as the script sees it.
  struct Request {
    uint64_t id = 0;
    Type type{};
    wire::Read read{};
    wire::Update update{};
    wire::LastChunk last{};
    wire::RdmaOpen rdma{};
    std::vector<uint8_t> var;
    std::vector<uint8_t> payload;  // inline, or copied out of the region
    int connection = 0;            // number, from 1
  };
  // What a script may do: answer now or later, say nothing, close, send junk.
  using Script = std::function<void(Peer&, net::Connection&, const Request&)>;

  struct Region {
    net::Mapping memory;
    uint64_t client_region = 0;
  };

  std::string directory;
  std::string path;
  uint16_t port = 0;
  Script script;
  wire::HelloReply hello{};
  bool answer_hello = true;
  uint64_t region_value = 1;
  std::atomic<int> connections{0};
  std::atomic<int> requests{0};
  std::atomic<int> capabilities{0};
  std::atomic<int> unregistered{0};
  std::atomic<bool> refuse_capability{false};
  std::vector<std::pair<uint64_t, net::Mapping>> regions;

  explicit Peer(Script s) : script(std::move(s)) {
    char name[] = "/tmp/ffs-peer-XXXXXX";
    directory = ::mkdtemp(name);
    path = directory + "/sock";
    local_ = std::move(*net::listen_local(path.c_str()));
    tcp_ = std::move(*net::listen_tcp("127.0.0.1", 0, nullptr));
    port = *net::bound_port(tcp_);
    hello.version = wire::kProtocolVersion;
    thread_ = std::thread([this] { serve(); });
  }
  ~Peer() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    stop_ = true;
    thread_.join();
    local_.reset();
    tcp_.reset();
    ::unlink(path.c_str());
    ::rmdir(directory.c_str());
  }
  // What the script shares with the test is touched under this, by both.
  std::unique_lock<std::recursive_mutex> hold() { return std::unique_lock(mutex_); }

  uint8_t* memory(const wire::BulkRef& bulk) {
    for (auto& [id, mapping] : regions) {
      if (id == bulk.region) return mapping.data() + bulk.address;
    }
    return nullptr;
  }

  static void answer_read(net::Connection& c, uint64_t id, const std::vector<uint8_t>& data,
                          uint32_t chunk_length, const std::vector<uint32_t>& crcs = {},
                          uint32_t first_granule = 0) {
    wire::ReadReply reply{};
    reply.bytes = static_cast<uint32_t>(data.size());
    reply.chunk_length = chunk_length;
    reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
    reply.granule_count = static_cast<uint32_t>(crcs.size());
    reply.first_granule = first_granule;
    reply.checksum_kind = crcs.empty() ? 0 : 1;
    c.queue.push(Type::kReadReply, id, reply,
                 net::Bytes(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4), net::Bytes(data),
                 0);
    (void)flush(c);
  }
  static void fail_read(net::Connection& c, uint64_t id, int status, Detail detail,
                        uint32_t retry_after_ms = 0) {
    wire::ReadReply reply{};
    reply.status = static_cast<uint32_t>(status);
    reply.detail = static_cast<uint32_t>(detail);
    reply.retry_after_ms = retry_after_ms;
    c.queue.push(Type::kReadReply, id, reply);
    (void)flush(c);
  }
  static void answer_update(net::Connection& c, uint64_t id, int status = 0, Detail detail = Detail::kNone,
                            uint64_t value = 0) {
    wire::UpdateReply reply{};
    reply.status = static_cast<uint32_t>(status);
    reply.detail = static_cast<uint32_t>(detail);
    reply.value = value;
    c.queue.push(Type::kUpdateReply, id, reply);
    (void)flush(c);
  }
  // Sends all, waiting for room (payloads of pushes must live until then).
  static bool flush(net::Connection& c) {
    std::vector<uint64_t> tokens;
    while (true) {
      auto sent = c.flush(&tokens);
      if (!sent.ok()) return false;
      if (*sent) return true;
      pollfd entry{c.socket.get(), POLLOUT, 0};
      ::poll(&entry, 1, 1000);
    }
  }

 private:
  struct Session {
    std::unique_ptr<net::Connection> connection;
    int number = 0;
    bool said_hello = false;
    Request request;  // whose payload is on its way
    bool in_payload = false;
  };

  void serve() {
    std::vector<Session> sessions;
    while (!stop_) {
      std::vector<pollfd> entries{{local_.get(), POLLIN, 0}, {tcp_.get(), POLLIN, 0}};
      for (auto& s : sessions) entries.push_back({s.connection->socket.get(), POLLIN, 0});
      ::poll(entries.data(), entries.size(), 5);
      const auto held = hold();
      accept(local_, net::Transport::kLocal, &sessions);
      accept(tcp_, net::Transport::kTcp, &sessions);
      for (auto& s : sessions) {
        if (s.connection->socket.valid() && !pump(s)) s.connection->socket.reset();
      }
      std::erase_if(sessions, [](const Session& s) { return !s.connection->socket.valid(); });
    }
  }
  void accept(const Fd& listener, net::Transport transport, std::vector<Session>* sessions) {
    auto fd = net::accept_connection(listener, transport);
    if (!fd.ok()) return;
    Session session;
    session.connection = std::make_unique<net::Connection>(std::move(*fd), transport);
    session.number = ++connections;
    sessions->push_back(std::move(session));
  }
  bool pump(Session& s) {
    while (true) {
      auto got = s.connection->receive();
      if (!got.ok()) return got.error().code == EAGAIN;
      while (true) {
        net::Frame frame;
        const auto next = s.connection->reader.next(&frame);
        if (next == net::FrameReader::Next::kNeedMore) break;
        if (next == net::FrameReader::Next::kBad) return false;
        if (next == net::FrameReader::Next::kPayload) {
          s.in_payload = false;
          run(s);
        } else {
          take(s, frame);
        }
        if (!s.connection->socket.valid()) return false;
      }
    }
  }
  void take(Session& s, const net::Frame& frame) {
    net::Connection& c = *s.connection;
    if (frame.type == Type::kHello) {
      if (!answer_hello) return;
      wire::HelloReply reply = hello;
      c.queue.push(Type::kHelloReply, frame.request_id, reply);
      (void)flush(c);
      return;
    }
    if (frame.type == Type::kOpenCapability) {
      capabilities++;
      c.queue.push(Type::kOpenCapabilityReply, frame.request_id,
                   wire::StatusReply{refuse_capability ? 1u : 0u, 0, 0});
      (void)flush(c);
      return;
    }
    if (frame.type == Type::kCloseCapability) return;
    if (frame.type == Type::kRegisterRegion) {
      const auto region = frame.as<wire::RegisterRegion>();
      Fd fd = std::move(c.descriptors.front());
      c.descriptors.pop_front();
      regions.emplace_back(region.region,
                           std::move(*net::map_shared(fd.get(), region.offset, region.size, true)));
      c.queue.push(Type::kRegisterRegionReply, frame.request_id, wire::StatusReply{0, 0, region_value});
      (void)flush(c);
      return;
    }
    if (frame.type == Type::kUnregisterRegion) {
      unregistered++;
      c.queue.push(Type::kUnregisterRegionReply, frame.request_id, wire::StatusReply{0, 0, 0});
      (void)flush(c);
      return;
    }
    Request& r = s.request;
    r = Request{};
    r.id = frame.request_id;
    r.type = frame.type;
    r.connection = s.number;
    r.var.assign(frame.var.begin(), frame.var.end());
    if (frame.type == Type::kRead) r.read = frame.as<wire::Read>();
    if (frame.type == Type::kRdmaOpen) r.rdma = frame.as<wire::RdmaOpen>();
    if (frame.type == Type::kLastChunk) r.last = frame.as<wire::LastChunk>();
    if (frame.type == Type::kUpdate) {
      r.update = frame.as<wire::Update>();
      if (r.update.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion)) {
        const uint8_t* from = memory(r.update.bulk);
        r.payload.assign(from, from + r.update.bulk.length);
      }
    }
    if (frame.payload_bytes > 0) {
      r.payload.resize(frame.payload_bytes);
      s.in_payload = true;
      c.reader.place_payload(r.payload.data());
      return;  // kPayload comes
    }
    run(s);
  }
  void run(Session& s) {
    requests++;
    script(*this, *s.connection, s.request);
  }

  std::recursive_mutex mutex_;
  Fd local_, tcp_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// A client, an Iov and a ring with chains over the given peers.
struct Bench {
  std::shared_ptr<Client> client;
  std::unique_ptr<Iov> iov;
  std::unique_ptr<Ring> ring;
  uint32_t capability = 0;
  std::vector<Peer*> members;  // of the present routing
  uint64_t epoch = 0;
  uint32_t counter = 0;
  bool apart = false;  // the peers of routes that are given from now on are on another host

  explicit Bench(
      const std::vector<Peer*>& replicas, TransportChoice transport = TransportChoice::kTcp,
      uint32_t entries = 64, uint64_t iov_bytes = 1 << 20,
      const std::function<void(ClientOptions&)>& choose = [](ClientOptions&) {}) {
    ClientOptions options;
    options.transport = transport;
    options.client = ClientId(7);
    options.request_timeout_ms = 10000;
    options.try_timeout_ms = 150;
    options.connect_timeout_ms = 500;
    choose(options);
    client = std::make_shared<Client>(options, *net::host_id());
    route(1, replicas);
    const std::vector<uint8_t> bytes(sizeof(wire::Capability), 1);
    capability = *client->capabilities().add(bytes.data(), static_cast<uint32_t>(bytes.size()));
    IovOptions iov_options;
    iov_options.size_bytes = iov_bytes;
    iov = std::move(*Iov::create(iov_options));
    IovRegistry::add(iov.get());
    ring = std::move(*Ring::create(client, entries));
  }
  ~Bench() {
    ring->close();
    FFS_CHECK(IovRegistry::remove(iov.get()).ok());
  }

  // The ring anew, with a bound of what is at servers.
  void bound(uint32_t inflight) {
    ring->close();
    ring = std::move(*Ring::create(client, 64, inflight));
  }

  // Chain 5 over these; `counter` of its version is the epoch unless given.
  void route(uint64_t new_epoch, const std::vector<Peer*>& replicas, const std::vector<uint8_t>& states = {},
             const std::vector<bool>& away = {}, uint32_t new_counter = 0, uint64_t first_target = 100) {
    members = replicas;
    epoch = new_epoch;
    counter = new_counter != 0 ? new_counter : static_cast<uint32_t>(new_epoch);
    std::vector<ffs_target_route> targets(replicas.size());
    ffs_chain_route chain{};
    chain.chain = 5;
    chain.term = 1;
    chain.counter = counter;
    chain.member_count = static_cast<uint32_t>(replicas.size());
    for (size_t i = 0; i < replicas.size(); i++) {
      targets[i].target = chain.members[i] = first_target + i;
      chain.states[i] = i < states.size() ? states[i] : uint8_t{FFS_SERVING};
      targets[i].away = i < away.size() && away[i];
      targets[i].port = replicas[i]->port;
      std::snprintf(targets[i].host, sizeof targets[i].host, "127.0.0.1");
      std::snprintf(targets[i].host_id, sizeof targets[i].host_id, "%s",
                    apart ? "elsewhere" : client->host_id().c_str());
      std::snprintf(targets[i].socket_path, sizeof targets[i].socket_path, "%s", replicas[i]->path.c_str());
    }
    client->set_routing(
        *make_routing(epoch, &chain, 1, targets.data(), static_cast<uint32_t>(targets.size())));
  }

  ffs_sqe sqe(uint8_t op, uint64_t userdata, uint32_t length, uint64_t iov_offset = 0, uint32_t offset = 0) {
    ffs_sqe e{};
    e.op = op;
    e.chain = 5;
    e.capability = capability;
    e.group = 1;
    e.key[7] = 9;
    e.offset = offset;
    e.length = length;
    e.iov = reinterpret_cast<ffs_iov*>(iov.get());
    e.iov_offset = iov_offset;
    e.userdata = userdata;
    return e;
  }
  // Submits a read that chooses its replica, so that it chooses this one, whatever latencies were
  // measured: the others count as away for that moment. (All must be serving and at 100 and up.)
  void submit_to(size_t replica, const ffs_sqe& e) {
    std::vector<bool> away(members.size(), true);
    away[replica] = false;
    route(epoch, members, {}, away, counter);
    FFS_CHECK(ring->prepare(&e, 1).taken == 1);
    FFS_CHECK(ring->submit() == 1);
    route(epoch, members, {}, {}, counter);
  }
  // Runs the ring until the condition holds or a request is complete (or a minute is over).
  template <typename Condition>
  std::vector<ffs_cqe> run_until(Condition holds) {
    std::vector<ffs_cqe> done;
    const uint64_t until = now_ns() + 60'000'000'000;
    while (done.empty() && !holds() && now_ns() < until) done = complete(1, 1);
    return done;
  }
  // Waits until `count` requests are complete (or `give_up_ms` are over).
  std::vector<ffs_cqe> complete(uint32_t count, int give_up_ms = 20000, uint32_t* events_seen = nullptr) {
    std::vector<ffs_cqe> all;
    const uint64_t until = now_ns() + static_cast<uint64_t>(give_up_ms) * 1000000;
    while (all.size() < count && now_ns() < until) {
      ffs_cqe out[64];
      uint32_t events = 0;
      const uint32_t got = ring->wait(out, 64, 1, 50, &events);
      if (events_seen != nullptr) *events_seen |= events;
      all.insert(all.end(), out, out + got);
    }
    return all;
  }
};

// Waits for the condition, a minute at most.
template <typename Condition>
bool eventually(Condition holds) {
  const uint64_t until = now_ns() + 60'000'000'000;
  while (!holds()) {
    if (now_ns() > until) return false;
    ::usleep(1000);
  }
  return true;
}

inline std::vector<uint8_t> pattern(size_t bytes, uint8_t seed) {
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i < bytes; i++) out[i] = static_cast<uint8_t>(mix64(i * 131 + seed));
  return out;
}

inline std::vector<uint32_t> granules(const std::vector<uint8_t>& chunk) {
  std::vector<uint32_t> out(net::piece_count(0, static_cast<uint32_t>(chunk.size())));
  net::piece_crcs(0, net::Bytes(chunk), out.data());
  return out;
}

}  // namespace ffs::client::testing
