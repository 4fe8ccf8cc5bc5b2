// Replicas that are silent, late, lost, damaged or lie: the ring against scripted peers.
#include <doctest/doctest.h>

#include <tuple>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

TEST_CASE("a silent replica: the read turns to another, the late answer is thrown away") {
  net::Connection* silent = nullptr;
  uint64_t late_id = 0;
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (late_id == 0) {
      silent = &c, late_id = r.id;
      return;
    }
    well(p, c, r);
  });
  Peer other(well);
  Bench b({&a, &other});
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096, 0, 5);
  b.submit_to(0, e);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 4096);
  REQUIRE(eventually([&] { return a.hold(), silent != nullptr; }));
  CHECK(b.ring->stats().retries + b.ring->stats().hedge_wins >= 1);
  std::memset(b.iov->data(), 0x55, 4096);
  const std::vector<uint8_t> junk(4096, 0xee);
  a.hold(), Peer::answer_read(*silent, late_id, junk, 16 << 20);
  ffs_cqe out[4];
  uint32_t events;
  CHECK(b.ring->wait(out, 4, 0, 0, &events) == 0);
  for (int i = 0; i < 20; i++) (void)b.ring->wait(out, 4, 0, 5, &events), ::usleep(1000);
  for (int i = 0; i < 4096; i++) REQUIRE(b.iov->data()[i] == 0x55);
}

TEST_CASE("replicas that are all slower than a try may be: the read waits longer and longer, and ends well") {
  const auto slow = [](Peer& p, net::Connection& c, const Peer::Request& r) {
    ::usleep(400000);
    well(p, c, r);
  };
  Peer a(slow);
  Peer other(slow);
  Bench b({&a, &other}, TransportChoice::kTcp, 64, 1 << 20, [](ClientOptions& o) {
    o.request_timeout_ms = 60000;
    o.hedge_percent = 0;
  });
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096, 0, 5);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  const auto done = b.complete(1, 70000);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 4096);
  CHECK(b.ring->stats().retries >= 2);
}

TEST_CASE("a server that answers, but not all in time: what it was asked isn't thrown away to ask it again") {
  constexpr uint32_t kReads = 120;
  Peer a([](Peer& p, net::Connection& c, const Peer::Request& r) {
    ::usleep(25000);
    well(p, c, r);
  });
  Bench b({&a}, TransportChoice::kTcp, 128, 1 << 20, [](ClientOptions& o) {
    o.hedge_percent = 0;
    o.try_timeout_ms = 600;
    o.request_timeout_ms = 60000;
  });
  for (uint32_t i = 0; i < kReads; i++) {
    const ffs_sqe e = b.sqe(FFS_OP_READ, i, 4096, i * 4096, 5);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  }
  const auto done = b.complete(kReads, 70000);
  REQUIRE(done.size() == kReads);
  for (const ffs_cqe& e : done) CHECK(e.result == 4096);
}

TEST_CASE("damage: another replica answers; damage everywhere is EIO") {
  const auto good = pattern(2 * kGranuleBytes, 1);
  auto bad = good;
  bad[kGranuleBytes + 5] ^= 1;
  std::atomic<bool> all_bad{false};
  std::atomic<int> lies{0};
  auto serve = [&](bool damaged) {
    return [&, damaged](Peer&, net::Connection& c, const Peer::Request& r) {
      const bool lie = damaged || all_bad;
      lies += lie;
      Peer::answer_read(c, r.id, lie ? bad : good, static_cast<uint32_t>(good.size()), granules(good));
    };
  };
  Peer a(serve(true)), other(serve(false));
  Bench b({&a, &other});
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 2 * kGranuleBytes);
  for (int i = 0; i < 4; i++) {
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 2 * kGranuleBytes);
    CHECK(std::memcmp(b.iov->data(), good.data(), good.size()) == 0);
  }
  CHECK(lies > 0);
  all_bad = true;
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -EIO);
  CHECK(done[0].detail == static_cast<uint32_t>(Detail::kCorrupt));
}

TEST_CASE("a lost connection: updates are sent again with the same identity") {
  std::vector<wire::Context> seen;
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    seen.push_back(r.update.context);
    if (seen.size() <= 2) return c.socket.reset();
    Peer::answer_update(c, r.id);
  });
  // A create of 64 KiB isn't offered first.
  for (auto [op, transport, length] : {std::tuple{FFS_OP_WRITE, TransportChoice::kTcp, 100000u},
                                       std::tuple{FFS_OP_WRITE, TransportChoice::kLocal, 100000u},
                                       std::tuple{FFS_OP_CREATE, TransportChoice::kTcp, 65536u},
                                       std::tuple{FFS_OP_CREATE, TransportChoice::kLocal, 65536u}}) {
    peer.hold(), seen.clear();
    Bench b({&peer}, transport);
    const ffs_sqe e = b.sqe(op, 1, length);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == length);
    auto held = peer.hold();
    REQUIRE(seen.size() == 3);
    for (const auto& context : seen) {
      CHECK(context.client == 7);
      CHECK(context.channel == seen[0].channel);
      CHECK(context.sequence == seen[0].sequence);
    }
    CHECK(seen[0].channel != 0);
    held.unlock();
    // The next one on the channel has a higher sequence.
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    REQUIRE(b.complete(1).size() == 1);
    held.lock();
    CHECK(seen[3].channel == seen[0].channel);
    CHECK(seen[3].sequence == seen[0].sequence + 1);
  }
}

TEST_CASE("garbage and lies end the connection, not the request") {
  for (int kind = 0; kind < 5; kind++) {
    CAPTURE(kind);
    std::atomic<int> turn{0};
    Peer peer([&](Peer& p, net::Connection& c, const Peer::Request& r) {
      if (turn++ > 0) return well(p, c, r);
      const std::vector<uint8_t> junk(64, 0xab);
      wire::ReadReply reply{};
      reply.bytes = r.read.length;
      switch (kind) {
        case 0:
          CHECK(::write(c.socket.get(), junk.data(), junk.size()) == 64);
          return;
        case 1:  // more than was asked for
          reply.bytes = r.read.length + 1;
          c.queue.push(Type::kReadReply, r.id, reply);
          break;
        case 2:  // without its payload
          reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
          c.queue.push(Type::kReadReply, r.id, reply);
          break;
        case 3:  // into a region that was never named
          reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRegion);
          c.queue.push(Type::kReadReply, r.id, reply);
          break;
        case 4:
          c.queue.push(Type::kUpdateReply, r.id, wire::UpdateReply{});
          break;
      }
      Peer::flush(c);
    });
    Bench b({&peer});
    const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 4096);
    CHECK(peer.connections == 2);
  }
}

TEST_CASE("a server of another cluster is an error at once, and no data") {
  Peer peer(well);
  peer.hold(), peer.hello.cluster[3] = 1;
  Bench b({&peer});
  const ffs_sqe e[2] = {b.sqe(FFS_OP_READ, 1, 4096), b.sqe(FFS_OP_WRITE, 2, 4096)};
  REQUIRE(b.ring->prepare(e, 2).taken == 2);
  auto done = b.complete(2);
  REQUIRE(done.size() == 2);
  for (const auto& c : done) {
    CHECK(c.result == -EPROTO);
    CHECK(c.detail == static_cast<uint32_t>(Detail::kWrongCluster));
  }
}

TEST_CASE("a server that accepts and says nothing, or isn't there: another replica, else the deadline") {
  Peer dumb(well), other(well);
  dumb.hold(), dumb.answer_hello = false;
  {
    Bench b({&dumb, &other}, TransportChoice::kAuto);
    const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096);
    for (int i = 0; i < 3; i++) {
      REQUIRE(b.ring->prepare(&e, 1).taken == 1);
      auto done = b.complete(1);
      REQUIRE(done.size() == 1);
      CHECK(done[0].result == 4096);
    }
  }
  other.stop();
  Bench b({&other}, TransportChoice::kAuto);
  ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096);
  e.timeout_ms = 300;
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  uint32_t events = 0;
  auto done = b.complete(1, 20000, &events);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -ETIMEDOUT);
  CHECK((events & FFS_WAIT_NEEDS_ROUTING) != 0);
}
