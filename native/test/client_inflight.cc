// A ring's bound of what is at servers, and what waits behind it (docs/ring.md, In flight).
#include <doctest/doctest.h>

#include <mutex>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

namespace {

// Holds reads back until told to answer. What it counts is touched under Peer::hold of all its peers, or by
// them, under `between`.
struct Holding {
  struct Held {
    net::Connection* connection;
    uint64_t id;
    uint32_t offset;
  };
  std::vector<Held> held;
  std::vector<uint32_t> seen;  // offsets, in order
  size_t most = 0;
  std::mutex between;

  void operator()(Peer&, net::Connection& c, const Peer::Request& r) {
    const std::lock_guard lock(between);
    seen.push_back(r.read.offset);
    held.push_back({&c, r.id, r.read.offset});
    most = std::max(most, held.size());
  }
  void answer(size_t count) {
    const std::lock_guard lock(between);
    for (size_t i = 0; i < count && !held.empty(); i++) {
      const std::vector<uint8_t> data = pattern(4096, 1);
      Peer::answer_read(*held.front().connection, held.front().id, data, 16 << 20);
      held.erase(held.begin());
    }
  }
};

std::vector<ffs_sqe> reads(Bench& b, uint32_t count) {
  std::vector<ffs_sqe> out;
  for (uint32_t i = 0; i < count; i++) out.push_back(b.sqe(FFS_OP_READ, i, 4096, i * 4096, i * 4096));
  return out;
}

}  // namespace

TEST_CASE("no more are at servers than the bound, in order, and all complete") {
  Holding holding;
  Peer a(std::ref(holding)), other(std::ref(holding));
  Bench b({&a, &other}, TransportChoice::kTcp, 64, 1 << 20,
          [](ClientOptions& o) { o.try_timeout_ms = 60000, o.hedge_percent = 0; });
  b.bound(3);
  const auto e = reads(b, 20);
  REQUIRE(b.ring->prepare(e.data(), 20).taken == 20);
  CHECK(b.ring->submit() == 20);
  std::vector<ffs_cqe> done;
  const uint64_t until = now_ns() + 60'000'000'000;
  while (done.size() < 20 && now_ns() < until) {
    ffs_cqe out[64];
    uint32_t events = 0;
    const uint32_t got = b.ring->wait(out, 64, 0, 0, &events);
    done.insert(done.end(), out, out + got);
    const auto first = a.hold(), second = other.hold();
    if (holding.held.size() == 3 || holding.seen.size() >= 18) holding.answer(1);
  }
  CHECK(done.size() == 20);
  CHECK(holding.most == 3);
}

TEST_CASE("what waits behind the bound goes out before the caller sees what came") {
  Holding holding;
  Peer a(std::ref(holding));
  Bench b({&a}, TransportChoice::kTcp, 64, 1 << 20, [](ClientOptions& o) { o.try_timeout_ms = 60000; });
  b.bound(1);
  const auto e = reads(b, 2);
  REQUIRE(b.ring->prepare(e.data(), 2).taken == 2);
  const auto asked = [&] { return a.hold(), holding.seen.size(); };
  CHECK(b.run_until([&] { return asked() == 1; }).empty());
  a.hold(), holding.answer(1);
  CHECK(b.complete(1).size() == 1);
  CHECK(eventually([&] { return asked() == 2; }));  // nobody has called the ring since
  a.hold(), holding.answer(1);
  CHECK(b.complete(1).size() == 1);
}

TEST_CASE("behind the bound: the deadline, a cancellation and closing end requests that were never sent") {
  Holding holding;
  Peer a(std::ref(holding));
  Bench b({&a}, TransportChoice::kTcp, 64, 1 << 20, [](ClientOptions& o) { o.try_timeout_ms = 60000; });
  b.bound(1);
  auto e = reads(b, 4);
  e[1].timeout_ms = 1000;
  REQUIRE(b.ring->prepare(e.data(), 4).taken == 4);
  CHECK(b.run_until([&] { return a.hold(), holding.seen.size() == 1; }).empty());
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].userdata == 1);
  CHECK(done[0].result == -ETIMEDOUT);
  CHECK(b.ring->cancel(2));
  done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].userdata == 2);
  CHECK(done[0].result == -ECANCELED);
  b.ring->close();
  CHECK_FALSE(b.iov->used());
  CHECK((a.hold(), holding.seen) == std::vector<uint32_t>{0});
}

TEST_CASE("requests that waited for routing go on within the bound") {
  Holding holding;
  Peer a(std::ref(holding));
  Bench b({&a}, TransportChoice::kTcp, 64, 1 << 20, [](ClientOptions& o) { o.try_timeout_ms = 60000; });
  b.bound(2);
  b.route(2, {&a}, {FFS_OFFLINE});
  const auto e = reads(b, 10);
  REQUIRE(b.ring->prepare(e.data(), 10).taken == 10);
  CHECK(b.complete(1, 60).empty());
  b.route(3, {&a});
  std::vector<ffs_cqe> done;
  const uint64_t until = now_ns() + 60'000'000'000;
  while (done.size() < 10 && now_ns() < until) {
    ffs_cqe out[64];
    uint32_t events = 0;
    const uint32_t got = b.ring->wait(out, 64, 1, 5, &events);
    done.insert(done.end(), out, out + got);
    const auto held = a.hold();
    holding.answer(1);
  }
  CHECK(done.size() == 10);
  CHECK(holding.most == 2);
}

TEST_CASE("a failed read goes on, and doesn't lose its room for the others") {
  std::atomic<int> failures{0};
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (failures++ % 2 == 0) return Peer::fail_read(c, r.id, EBUSY, Detail::kBusy, 1);
    well(p, c, r);
  });
  Bench b({&a});
  b.bound(2);
  const auto e = reads(b, 12);
  REQUIRE(b.ring->prepare(e.data(), 12).taken == 12);
  const auto done = b.complete(12);
  REQUIRE(done.size() == 12);
  for (const ffs_cqe& cqe : done) CHECK(cqe.result == 4096);
}

TEST_CASE("a bound above the entries is refused by name") {
  Peer a(well);
  Bench b({&a});
  auto ring = Ring::create(b.client, 8, 9);
  REQUIRE_FALSE(ring.ok());
  CHECK(ring.error().code == EINVAL);
}

TEST_CASE("damage in place: another replica answers, whatever else came with it") {
  const auto good = pattern(2 * kGranuleBytes, 1);
  const auto serve = [&](bool damaged) {
    return [&, damaged](Peer& p, net::Connection& c, const Peer::Request& r) {
      if (r.read.bulk.kind != static_cast<uint8_t>(wire::BulkKind::kRegion))
        return Peer::answer_read(c, r.id, good, static_cast<uint32_t>(good.size()), granules(good));
      uint8_t* to = p.memory(r.read.bulk);
      std::memcpy(to, good.data(), good.size());
      if (damaged) to[kGranuleBytes + 5] ^= 1;
      const auto crcs = granules(good);
      wire::ReadReply reply{};
      reply.bytes = reply.chunk_length = static_cast<uint32_t>(good.size());
      reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRegion);
      reply.granule_count = 2;
      reply.checksum_kind = static_cast<uint8_t>(wire::ChecksumKind::kCrc32c);
      c.queue.push(Type::kReadReply, r.id, reply,
                   net::Bytes(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4));
      Peer::flush(c);
    };
  };
  Peer a(serve(true)), other(serve(false));
  Bench b({&a, &other}, TransportChoice::kLocal);
  b.bound(2);
  // Until the damaged one is asked once its region is registered.
  const uint64_t until = now_ns() + 60'000'000'000;
  while (b.ring->stats().damaged == 0 && now_ns() < until) {
    std::vector<ffs_sqe> e;
    for (uint32_t i = 0; i < 6; i++)
      e.push_back(b.sqe(FFS_OP_READ, i, 2 * kGranuleBytes, i * 2 * kGranuleBytes));
    REQUIRE(b.ring->prepare(e.data(), 6).taken == 6);
    const auto done = b.complete(6);
    REQUIRE(done.size() == 6);
    for (const ffs_cqe& cqe : done) {
      CHECK(cqe.result == 2 * kGranuleBytes);
      CHECK(std::memcmp(b.iov->data() + cqe.userdata * 2 * kGranuleBytes, good.data(), good.size()) == 0);
    }
  }
  CHECK(b.ring->stats().damaged > 0);
}
