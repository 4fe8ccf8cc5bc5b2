// Lanes to another server, of which a listener of the test plays the part: it says hello, then it reads, or
// not.
#include "server/peers.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <deque>
#include <filesystem>

#include <doctest/doctest.h>
#include "net/version.h"

using namespace ffs;
using namespace ffs::server;

namespace {

constexpr uint64_t kStallMs = 1000;
constexpr TargetId kTarget(7);

struct OtherServer {
  explicit OtherServer(net::Transport over) : transport(over) {
    if (transport == net::Transport::kLocal) {
      path = directory.path + "/sock";
      listener = std::move(*net::listen_local(path.c_str()));
      return;
    }
    listener = std::move(*net::listen_tcp("127.0.0.1", 0, ""));
    sockaddr_in address{};
    socklen_t length = sizeof address;
    REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
    port = ntohs(address.sin_port);
  }
  // Takes who knocks and answers hello; of what follows at most so many bytes are read.
  void serve(size_t most_bytes) {
    for (auto next = net::accept_connection(listener, transport); next.ok();
         next = net::accept_connection(listener, transport)) {
      connections.emplace_back(net::Connection(std::move(*next), transport), false);
    }
    for (auto& [connection, greeted] : connections) {
      if (greeted) {
        std::vector<uint8_t> bytes(std::max<size_t>(most_bytes, 1));
        if (most_bytes > 0) {
          (void)!::recv(connection.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
        }
        continue;
      }
      net::Frame frame;
      if (connection.reader.next(&frame) == net::FrameReader::Next::kNeedMore) {
        if (!connection.receive().ok()) continue;
        if (connection.reader.next(&frame) != net::FrameReader::Next::kFrame) continue;
      }
      REQUIRE(frame.type == wire::Type::kHello);
      wire::HelloReply reply{};
      reply.version = net::spoken_versions().most;
      connection.queue.push(wire::Type::kHelloReply, 0, reply);
      std::vector<uint64_t> released;
      REQUIRE(connection.flush(&released).ok());
      greeted = true;
    }
  }

  struct Directory {
    Directory() {
      char name[] = "/tmp/ffs-peers-XXXXXX";
      path = ::mkdtemp(name);
    }
    ~Directory() { std::filesystem::remove_all(path); }
    std::string path;
  };
  net::Transport transport;
  Directory directory;
  std::string path;
  Fd listener;
  uint16_t port = 0;
  std::deque<std::pair<net::Connection, bool>> connections;
};

struct World {
  explicit World(net::Transport transport = net::Transport::kTcp) : other(transport) {
    auto made = io::Io::create({});
    REQUIRE(made.ok());
    io = std::move(*made);
    Peers::Events events;
    events.owner = this;
    events.connected = [](void* owner, TargetId) { static_cast<World*>(owner)->connected++; };
    events.released = [](void* owner, uint64_t) { static_cast<World*>(owner)->released++; };
    Peers::Identity identity;
    identity.host_id = "here";
    peers = std::make_unique<Peers>(*io, identity, events, kStallMs);
    Route route;
    route.target = kTarget;
    route.host = "127.0.0.1";
    route.port = other.port;
    route.host_id = "here";
    route.socket_path = other.path;
    peers->set_routes({route}, 2, now_ms);
    connect();
  }
  ~World() {
    peers->close();
    while (!peers->drained()) io->run_once(1000);
  }
  void connect() {
    const int before = connected;
    for (int i = 0; i < 5000 && connected == before; i++) turn(0, 1);
    REQUIRE(connected == before + 1);
  }
  // One pass, after so many milliseconds of the lanes' clock.
  void turn(size_t read_bytes, uint64_t ms = 20) {
    now_ms += ms;
    peers->flush(SIZE_MAX);
    io->run_once(1000);
    other.serve(read_bytes);
    peers->tick(now_ms);
  }
  void push(size_t count) {
    for (size_t i = 0; i < count; i++) {
      net::SendQueue* lane = peers->lane(kTarget, kLaneSync);
      REQUIRE(lane != nullptr);
      wire::Sync sync{};
      sync.payload_length = static_cast<uint32_t>(payload.size());
      lane->push(wire::Type::kSync, 0, sync, {}, payload, 1);
    }
  }

  OtherServer other;
  std::unique_ptr<io::Io> io;
  std::unique_ptr<Peers> peers;
  std::vector<uint8_t> payload = std::vector<uint8_t>(1 << 20, 9);
  uint64_t now_ms = 1'000'000;
  int connected = 0;
  size_t released = 0;
};

}  // namespace

TEST_CASE("peers: a server that takes nothing for a while holds no buffers, and is dialled again") {
  World w;
  w.push(64);  // more than sockets hold
  for (uint64_t ms = 0; ms + 100 < kStallMs; ms += 20) w.turn(0);
  CHECK(w.released < 64);
  CHECK(w.peers->lane(kTarget, kLaneSync) != nullptr);
  for (uint64_t ms = 0; ms < 3 * kStallMs && w.released < 64; ms += 20)
    w.turn(0);  // sockets may grow at first
  CHECK(w.released == 64);
  CHECK(w.peers->lane(kTarget, kLaneFree) != nullptr);  // nothing stood there
  w.connect();
  CHECK(w.peers->lane(kTarget, kLaneSync) != nullptr);
}

TEST_CASE("peers: a slow server is waited for, and so is one that stood still together with this one") {
  World w;
  w.push(64);
  for (uint64_t ms = 0; ms < 3 * kStallMs; ms += 100) w.turn(256 << 10, 100);
  CHECK(w.released > 0);
  CHECK(w.released < 64);
  CHECK(w.connected == 1);
  w.turn(0, 10 * kStallMs);
  w.turn(0);
  CHECK(w.peers->lane(kTarget, kLaneSync) != nullptr);
  w.peers->close();
}

// A Unix socket tells of room whenever its peer has read.
TEST_CASE("peers: once all is sent, a server that reads wakes nobody, also after the socket was full") {
  World w(net::Transport::kLocal);
  for (int round = 0; round < 3; round++) {
    const size_t before = w.released;
    w.push(8);  // more than the socket holds
    for (int i = 0; i < 5000 && w.released < before + 8; i++) w.turn(256 << 10, 1);
    REQUIRE(w.released == before + 8);
    for (int i = 0; i < 100; i++) w.turn(1 << 20, 1);
    w.payload.resize(1000);
    int wake_ups = 0;
    for (int i = 0; i < 20; i++) {
      w.push(1);
      w.peers->flush(SIZE_MAX);
      while (w.io->run_once(0) > 0) w.peers->flush(SIZE_MAX);
      w.other.serve(1 << 20);
      wake_ups += w.io->run_once(2000);
    }
    CHECK(wake_ups == 0);
    w.payload.resize(1 << 20);
  }
}
