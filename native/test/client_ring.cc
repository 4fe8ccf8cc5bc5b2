// The ring against scripted peers (client_peer.h): taking requests, completing them, cancelling, its
// descriptor.
#include <doctest/doctest.h>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

TEST_CASE("prepare refuses bad entries, names them and takes none") {
  Peer peer(well);
  Bench b({&peer}, TransportChoice::kTcp, 8);
  ffs_sqe e[9];
  for (auto& x : e) x = b.sqe(FFS_OP_READ, 1, 4096);
  auto fault = [&](uint32_t count) {
    auto result = b.ring->prepare(e, count);
    CHECK(result.taken == 0);
    return result;
  };
  e[2].iov_offset = (1 << 20) - 4095;
  auto r = fault(4);
  CHECK(r.fault_entry == 2);
  CHECK(std::string(r.fault).find("end of its Iov") != std::string::npos);
  e[2] = b.sqe(FFS_OP_READ, 1, 4096);
  e[1].op = 77;
  CHECK(fault(4).fault_entry == 1);
  e[1] = b.sqe(FFS_OP_READ, 1, 4096);
  e[0].length = (16 << 20) + 1;
  CHECK(fault(1).fault != nullptr);
  e[0] = b.sqe(FFS_OP_READ, 1, 0);
  CHECK(fault(1).fault != nullptr);
  e[0] = b.sqe(FFS_OP_READ, 1, 4096);
  e[0].group = 3;
  CHECK(std::string(fault(2).fault) == "the group is cut off");
  CHECK(std::string(fault(3).fault) == "group must be 0 inside a group");
  e[0].group = 9;
  CHECK(std::string(fault(9).fault) == "the group has more entries than the ring");
  e[0].group = 1;
  e[0].capability = 99;
  CHECK(std::string(fault(1).fault) == "no such capability id");
  e[0] = b.sqe(FFS_OP_READ, 1, 4096);
  int somewhere;
  e[0].iov = reinterpret_cast<ffs_iov*>(&somewhere);
  CHECK(std::string(fault(1).fault) == "iov is no Iov that is open");
  CHECK_FALSE(b.iov->used());
}

TEST_CASE("a full ring takes whole groups only, and goes on after completions are taken") {
  Peer peer(well);
  Bench b({&peer}, TransportChoice::kTcp, 8);
  std::vector<ffs_sqe> e;
  for (int g = 0; g < 4; g++) {
    for (int i = 0; i < 3; i++) {
      e.push_back(b.sqe(FFS_OP_READ, 10 + g, 4096, (g * 3 + i) * 4096, (g * 3 + i) * 4096));
      e.back().group = i == 0 ? 3 : 0;
    }
  }
  CHECK(b.ring->prepare(e.data(), 12).taken == 6);
  CHECK(b.ring->prepare(e.data() + 6, 6).taken == 0);
  auto done = b.complete(2);
  REQUIRE(done.size() == 2);
  for (const auto& c : done) CHECK(c.result == 3 * 4096);
  CHECK(b.ring->prepare(e.data() + 6, 6).taken == 6);
  CHECK(b.complete(2).size() == 2);
  for (uint32_t i = 0; i < 12; i++) {
    const auto expected = pattern(4096, static_cast<uint8_t>(i * 4096));
    CHECK(std::memcmp(b.iov->data() + i * 4096, expected.data(), 4096) == 0);
  }
}

TEST_CASE("a group's result: bytes up to the first short entry, or the first failure in order") {
  Peer peer([](Peer&, net::Connection& c, const Peer::Request& r) {
    static thread_local std::vector<uint8_t> data;
    data.assign(r.read.offset == 8192 ? 100 : r.read.length, 3);
    if (r.read.key[8] == 1 && r.read.offset >= 4096)
      return Peer::fail_read(c, r.id, EIO, Detail::kStaleEpoch);
    Peer::answer_read(c, r.id, data, 16 << 20);
  });
  Bench b({&peer});
  std::vector<ffs_sqe> e;
  for (int i = 0; i < 4; i++) {
    e.push_back(b.sqe(FFS_OP_READ, 1, 4096, i * 4096, i * 4096));
    e.back().group = i == 0 ? 4 : 0;
  }
  REQUIRE(b.ring->prepare(e.data(), 4).taken == 4);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 2 * 4096 + 100);
  for (auto& x : e) x.key[8] = 1;
  REQUIRE(b.ring->prepare(e.data(), 4).taken == 4);
  done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -EIO);
  CHECK(done[0].failed == 3);
  CHECK(done[0].detail == static_cast<uint32_t>(Detail::kStaleEpoch));
  CHECK(done[0].chain == 5);
}

TEST_CASE("replies in any order meet their requests") {
  std::vector<std::pair<uint64_t, uint32_t>> held;
  Peer peer([&held](Peer&, net::Connection& c, const Peer::Request& r) {
    held.emplace_back(r.id, r.read.offset);
    if (held.size() < 16) return;
    std::vector<uint8_t> data;
    for (auto it = held.rbegin(); it != held.rend(); ++it) {
      data = pattern(8192, static_cast<uint8_t>(it->second / 8192));
      Peer::answer_read(c, it->first, data, 16 << 20);
    }
    held.clear();
  });
  Bench b({&peer});
  std::vector<ffs_sqe> e;
  for (uint32_t i = 0; i < 16; i++) e.push_back(b.sqe(FFS_OP_READ, i, 8192, i * 8192, i * 8192));
  REQUIRE(b.ring->prepare(e.data(), 16).taken == 16);
  CHECK(b.complete(16).size() == 16);
  CHECK(b.ring->stats().send_calls <= 4);  // hello, then all requests together
  for (uint32_t i = 0; i < 16; i++) {
    CHECK(std::memcmp(b.iov->data() + i * 8192, pattern(8192, static_cast<uint8_t>(i)).data(), 8192) == 0);
  }
}

TEST_CASE("cancel: prepared, in flight, unknown") {
  Peer peer(mute);
  Bench b({&peer}, TransportChoice::kTcp, 64, 1 << 20, [](ClientOptions& o) { o.try_timeout_ms = 60000; });
  ffs_sqe e[3] = {b.sqe(FFS_OP_READ, 1, 4096), b.sqe(FFS_OP_READ, 1, 4096, 4096),
                  b.sqe(FFS_OP_WRITE, 2, 4096)};
  e[0].group = 2, e[1].group = 0;
  REQUIRE(b.ring->prepare(e, 3).taken == 3);
  CHECK_FALSE(b.ring->cancel(99));
  CHECK(b.ring->cancel(1));  // not yet submitted
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].userdata == 1);
  CHECK(done[0].result == -ECANCELED);
  CHECK(done[0].failed == 2);
  CHECK(b.run_until([&] { return peer.requests > 0; }).empty());
  REQUIRE(peer.requests == 1);
  CHECK(b.ring->cancel(2));
  done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].userdata == 2);
  CHECK(done[0].result == -ECANCELED);
  CHECK_FALSE(b.ring->cancel(2));
  CHECK_FALSE(b.iov->used());
}

TEST_CASE("the ring's descriptor is readable when there is something to do") {
  Peer peer(well);
  Bench b({&peer});
  pollfd entry{b.ring->fd(), POLLIN, 0};
  ffs_sqe e[2] = {b.sqe(FFS_OP_READ, 1, 4096), b.sqe(FFS_OP_READ, 2, 4096, 4096)};
  REQUIRE(b.ring->prepare(e, 2).taken == 2);
  b.ring->submit();
  ffs_cqe out[1];
  uint32_t events = 0, got = 0;
  while (got < 2) {
    REQUIRE(::poll(&entry, 1, 5000) == 1);
    got += b.ring->wait(out, 1, 0, 0, &events);
  }
  CHECK(::poll(&entry, 1, 20) == 0);
}

TEST_CASE("waiting for nothing makes progress too, connecting included") {
  Peer peer(well);
  Bench b({&peer});
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  ffs_cqe out[1];
  uint32_t events = 0, got = 0;
  for (int i = 0; i < 2000 && got == 0; i++) {
    got = b.ring->wait(out, 1, 0, 0, &events);
    ::usleep(1000);
  }
  CHECK(got == 1);
}

TEST_CASE("closing with requests in flight ends them and frees their buffers") {
  Peer peer(mute);
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    Bench b({&peer}, transport);
    const ffs_sqe e[2] = {b.sqe(FFS_OP_READ, 1, 4096), b.sqe(FFS_OP_WRITE, 2, 4096)};
    REQUIRE(b.ring->prepare(e, 2).taken == 2);
    (void)b.complete(1, 100);
    CHECK(b.iov->used());
    CHECK_FALSE(IovRegistry::remove(b.iov.get()).ok());
    b.ring->close();
    CHECK_FALSE(b.iov->used());
  }
}
