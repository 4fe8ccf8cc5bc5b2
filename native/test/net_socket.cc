// Connections over both transports: bytes, descriptors, ends; and the seals of shared memory.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "net/shared_memory.h"
#include "net/socket.h"

using namespace ffs;
using namespace ffs::net;
using wire::Type;

namespace {

struct TempDir {
  TempDir() {
    char name[] = "/tmp/ffs-net-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~TempDir() { (void)!std::system(("rm -rf " + path).c_str()); }
  std::string path;
};

void wait_for(int fd, short events) {
  pollfd one{fd, events, 0};
  REQUIRE(::poll(&one, 1, 5000) == 1);
}

struct Pair {
  TempDir dir;
  Fd listener;
  Connection client, server;
};

void connect(Pair& pair, Transport transport) {
  const std::string path = pair.dir.path + "/s";
  auto listener =
      transport == Transport::kTcp ? listen_tcp("127.0.0.1", 0, "cubic?") : listen_local(path.c_str());
  REQUIRE(listener.ok());
  pair.listener = std::move(*listener);
  auto socket = transport == Transport::kTcp ? connect_tcp("127.0.0.1", *bound_port(pair.listener), "cubic?")
                                             : connect_local(path.c_str());
  REQUIRE(socket.ok());
  pair.client = Connection(std::move(*socket), transport);
  wait_for(pair.listener.get(), POLLIN);
  auto accepted = accept_connection(pair.listener, transport);
  REQUIRE(accepted.ok());
  pair.server = Connection(std::move(*accepted), transport);
  wait_for(pair.client.socket.get(), POLLOUT);
  REQUIRE(connect_result(pair.client.socket).ok());
  CHECK(accept_connection(pair.listener, transport).error().code == EAGAIN);
}

size_t count_descriptors() {
  size_t count = 0;
  for (int fd = 0; fd < 1024; fd++) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("a large payload crosses, however small the sockets' buffers") {
  for (const auto transport : {Transport::kTcp, Transport::kLocal}) {
    Pair pair;
    connect(pair, transport);
    std::vector<uint8_t> payload(wire::kMaxPayloadBytes);
    for (size_t i = 0; i < payload.size(); i++) payload[i] = static_cast<uint8_t>(i * 7 + i / 251);
    pair.client.queue.push(Type::kUpdate, 1, wire::Update{}, {}, payload, 55);
    pair.client.queue.push(Type::kPing, 2, wire::StatusReply{});
    std::vector<uint64_t> released;
    std::vector<uint8_t> place(payload.size());
    bool payload_done = false, ping_done = false;
    while (!ping_done) {
      REQUIRE(pair.client.flush(&released).ok());
      Frame frame;
      switch (pair.server.reader.next(&frame)) {
        case FrameReader::Next::kFrame:
          if (frame.type == Type::kPing)
            ping_done = true;
          else
            pair.server.reader.place_payload(place.data());
          break;
        case FrameReader::Next::kPayload:
          payload_done = true;
          break;
        case FrameReader::Next::kNeedMore: {
          auto got = pair.server.receive();
          if (!got.ok()) REQUIRE(got.error().code == EAGAIN);
          break;
        }
        default:
          REQUIRE(false);
      }
    }
    CHECK(payload_done);
    CHECK(place == payload);
    CHECK(released == std::vector<uint64_t>{55});
    pair.client.socket.reset();
    wait_for(pair.server.socket.get(), POLLIN);
    CHECK(pair.server.receive().error().code == EPIPE);
  }
}

TEST_CASE("descriptors arrive in the order of their frames") {
  Pair pair;
  connect(pair, Transport::kLocal);
  std::vector<Fd> memory;
  for (uint64_t i = 0; i < 3; i++) {
    auto fd = create_sealed_memfd("test", 4096 * (i + 1), false);
    REQUIRE(fd.ok());
    memory.push_back(std::move(*fd));
    pair.client.queue.push(Type::kPing, i, wire::StatusReply{});
    pair.client.queue.push(Type::kRegisterRegion, 100 + i, wire::RegisterRegion{i, 4096, 0, 0, 0}, {}, {}, 0,
                           memory.back().get());
  }
  std::vector<uint64_t> released;
  REQUIRE(*pair.client.flush(&released));
  uint64_t regions = 0;
  while (regions < 3) {
    Frame frame;
    const auto next = pair.server.reader.next(&frame);
    if (next == FrameReader::Next::kNeedMore) {
      REQUIRE(pair.server.receive().ok());
    } else if (frame.type == Type::kRegisterRegion) {
      REQUIRE(!pair.server.descriptors.empty());
      const Fd fd = std::move(pair.server.descriptors.front());
      pair.server.descriptors.pop_front();
      CHECK(check_sealed(fd.get(), 0, 4096 * (regions + 1)).ok());
      CHECK(check_sealed(fd.get(), 0, 4096 * (regions + 2)).error().code == ERANGE);
      regions++;
    }
  }
  CHECK(pair.server.descriptors.empty());
}

TEST_CASE("a flood of descriptors is refused and leaves none open") {
  const size_t before = count_descriptors();
  {
    Pair pair;
    connect(pair, Transport::kLocal);
    auto memory = create_sealed_memfd("test", 4096, false);
    std::vector<uint64_t> released;
    bool refused = false;
    for (int i = 0; i < 200 && !refused; i++) {
      pair.client.queue.push(Type::kRegisterRegion, 1, wire::RegisterRegion{}, {}, {}, 0, memory->get());
      REQUIRE(pair.client.flush(&released).ok());
      auto got = pair.server.receive();
      if (!got.ok() && got.error().code == EBUSY) {
        Frame frame;
        while (pair.server.reader.next(&frame) == FrameReader::Next::kFrame) {
        }
        got = pair.server.receive();
      }
      if (!got.ok() && got.error().code == EPROTO) refused = true;
    }
    CHECK(refused);
  }
  CHECK(count_descriptors() == before);
}

TEST_CASE("shared memory must be sealed") {
  Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), 8192) == 0);
  CHECK(check_sealed(unsealed.get(), 0, 4096).error().code == EPERM);
  REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(check_sealed(unsealed.get(), 0, 4096).error().code == EPERM);
  REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_GROW) == 0);
  CHECK(check_sealed(unsealed.get(), 0, 4096).ok());
  CHECK(check_sealed(unsealed.get(), 4096, 4096).ok());
  CHECK(check_sealed(unsealed.get(), 4096, 8192).error().code == ERANGE);
  CHECK(check_sealed(unsealed.get(), UINT64_MAX, 4096).error().code == ERANGE);
  CHECK(check_sealed(unsealed.get(), 0, 0).error().code == ERANGE);
  Fd file(::open("/proc/self/exe", O_RDONLY));
  CHECK(check_sealed(file.get(), 0, 4096).error().code == EINVAL);
  CHECK(create_sealed_memfd("test", 0, false).error().code == EINVAL);
  CHECK(create_sealed_memfd("test", 4096, true).error().code == EINVAL);
}

namespace {

std::string congestion_of(const Fd& socket) {
  char name[32] = {};
  socklen_t length = sizeof name;
  REQUIRE(::getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0);
  return name;
}

std::vector<std::string> words_of(const char* path) {
  std::ifstream file(path);
  return {std::istream_iterator<std::string>(file), std::istream_iterator<std::string>()};
}

}  // namespace

TEST_CASE("the congestion control is the one that was named, at both ends") {
  auto plain = listen_tcp("127.0.0.1", 0, "");
  REQUIRE(plain.ok());
  const std::string system = congestion_of(*plain);
  const std::string other = system == "reno" ? "cubic" : "reno";
  for (const std::string& name : {other, other + "?", std::string(), std::string("no-such-algorithm?")}) {
    const std::string expected = name.starts_with(other) ? other : system;
    auto listener = listen_tcp("127.0.0.1", 0, name.c_str());
    REQUIRE(listener.ok());
    auto client = connect_tcp("127.0.0.1", *bound_port(*listener), name.c_str());
    REQUIRE(client.ok());
    wait_for(listener->get(), POLLIN);
    auto accepted = accept_connection(*listener, Transport::kTcp);
    REQUIRE(accepted.ok());
    CHECK(congestion_of(*client) == expected);
    CHECK(congestion_of(*accepted) == expected);
  }
  CHECK(connect_tcp("127.0.0.1", 1, "no-such-algorithm").error().code == ENOENT);
}

// A host whose default is BBR allows its users no cubic: a wish for it must not keep them from connecting.
TEST_CASE("an ordinary user whom the kernel allows few congestion controls gets the system's") {
  const auto allowed = words_of("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  std::string forbidden;
  for (const auto& name : words_of("/proc/sys/net/ipv4/tcp_available_congestion_control")) {
    if (std::find(allowed.begin(), allowed.end(), name) == allowed.end()) forbidden = name;
  }
  if (forbidden.empty() || ::geteuid() != 0) {
    MESSAGE("every congestion control is allowed, or this user can't become another one");
    return;
  }
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
    if (listen_tcp("127.0.0.1", 0, forbidden.c_str()).error().code != EPERM) ::_exit(1);
    auto listener = listen_tcp("127.0.0.1", 0, (forbidden + "?").c_str());
    if (!listener.ok()) ::_exit(2);
    ::_exit(connect_tcp("127.0.0.1", *bound_port(*listener), (forbidden + "?").c_str()).ok() ? 0 : 3);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("addresses that can't be are refused in words") {
  CHECK(connect_tcp("localhost", 1, nullptr).error().code == EINVAL);
  CHECK(listen_tcp("127.0.0.1", 0, "no-such-algorithm").error().code == ENOENT);
  CHECK(connect_local("").error().code == ENAMETOOLONG);
  CHECK(connect_local(std::string(108, 'x').c_str()).error().code == ENAMETOOLONG);
  TempDir dir;
  const std::string path = dir.path + "/s";
  CHECK(connect_local(path.c_str()).error().code == ENOENT);
  auto first = listen_local(path.c_str());
  REQUIRE(first.ok());
  CHECK(listen_local(path.c_str()).error().code == EADDRINUSE);
  first->reset();
  CHECK(listen_local(path.c_str()).ok());  // a dead socket file is replaced
  REQUIRE(::unlink(path.c_str()) == 0);
  Fd plain(::open(path.c_str(), O_CREAT | O_WRONLY, 0600));
  CHECK(listen_local(path.c_str()).error().code == EEXIST);
  auto id = host_id();
  REQUIRE(id.ok());
  CHECK(*id == *host_id());
  CHECK(id->size() < 96);
}
