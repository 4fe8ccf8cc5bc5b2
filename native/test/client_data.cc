// Data on its way: checksums, holes, offers, the bound of bytes in flight.
#include <doctest/doctest.h>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

TEST_CASE("a large create is offered first: what is there costs no transfer, what isn't comes after it") {
  struct Seen {
    int offers = 0, whole = 0;
    size_t bytes = 0;
  } seen;
  Peer peer([&seen](Peer& p, net::Connection& c, const Peer::Request& r) {
    const auto lock = p.hold();
    const bool offer = (r.update.flags & wire::kUpdateOffer) != 0;
    CHECK(r.payload.size() == (offer ? 0 : r.update.length));
    CHECK(r.var.size() == (offer ? 0 : (r.update.length + 65535) / 65536 * 4));
    seen.offers += offer;
    seen.whole += !offer;
    seen.bytes += r.payload.size();
    if (r.update.key[8] == 1) return Peer::answer_update(c, r.id, EEXIST, Detail::kNone, r.update.length);
    if (offer) return Peer::answer_update(c, r.id, EAGAIN, Detail::kWanted);
    Peer::answer_update(c, r.id);
  });
  peer.hello.features = wire::kFeatureOffer;
  Bench b({&peer});
  const auto create = [&](uint32_t length, uint8_t known, const Seen& expected, int64_t result) {
    {
      const auto lock = peer.hold();
      seen = {};
    }
    ffs_sqe e = b.sqe(FFS_OP_CREATE, 1, length);
    e.key[8] = known;
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    const auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == result);
    const auto lock = peer.hold();
    CHECK(seen.offers == expected.offers);
    CHECK(seen.whole == expected.whole);
    CHECK(seen.bytes == expected.bytes);
  };
  create(65537, 1, {1, 0, 0}, -EEXIST);
  create(65537, 0, {1, 1, 65537}, 65537);
  create(65536, 1, {0, 1, 65536}, -EEXIST);  // a small one goes at once
  CHECK(b.ring->stats().retries == 0);
  peer.stop();
  Peer older([&seen](Peer& p, net::Connection& c, const Peer::Request& r) {
    const auto lock = p.hold();
    seen.offers += (r.update.flags & wire::kUpdateOffer) != 0;
    Peer::answer_update(c, r.id);
  });
  b.route(2, {&older});
  create(65537, 0, {0, 0, 0}, 65537);
}

// Its owner changes the bytes while the answer to the offer is on its way, so one can tell when checksums
// were computed.
TEST_CASE("checksums of what was offered are computed while its answer is awaited, and serve once") {
  constexpr uint32_t kLength = (4u << 16) + 1000;
  Bench* bench = nullptr;
  int stale = 0, whole = 0;
  Peer peer([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if ((r.update.flags & wire::kUpdateOffer) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than anybody looks
      for (uint32_t i = 0; i < kLength; i += 997) bench->iov->data()[i] ^= 1;
      return Peer::answer_update(c, r.id, EAGAIN, Detail::kWanted);
    }
    const auto lock = p.hold();
    REQUIRE(r.var.size() == net::piece_count(0, kLength) * 4);
    std::vector<uint32_t> sent(r.var.size() / 4), right(sent.size());
    std::memcpy(sent.data(), r.var.data(), r.var.size());
    net::piece_crcs(0, r.payload, right.data());
    whole++;
    if (sent == right) return Peer::answer_update(c, r.id);
    for (size_t i = 0; i < sent.size(); i++) stale += sent[i] != right[i];
    Peer::answer_update(c, r.id, EBADMSG, Detail::kChecksum);
  });
  peer.hello.features = wire::kFeatureOffer;
  Bench b({&peer});
  bench = &b;
  const ffs_sqe e = b.sqe(FFS_OP_CREATE, 1, kLength);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  const auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == kLength);
  const auto lock = peer.hold();
  // A crowded machine looks for no answer, so nothing is computed ahead there.
  CHECK((stale > 0 ? whole == 2 : whole == 1));
  if (stale == 0) MESSAGE("nothing was computed ahead: is the machine busy?");
}

TEST_CASE("holes and short chunks read as zeros where asked") {
  Peer peer([](Peer&, net::Connection& c, const Peer::Request& r) {
    if (r.read.offset == 0) return Peer::fail_read(c, r.id, ENOENT, Detail::kNone);
    static const std::vector<uint8_t> some(10, 9);
    Peer::answer_read(c, r.id, some, r.read.offset + 10);
  });
  Bench b({&peer});
  std::memset(b.iov->data(), 0x77, 3 * 4096);
  ffs_sqe e[3] = {b.sqe(FFS_OP_READ, 1, 4096), b.sqe(FFS_OP_READ, 2, 4096, 4096, 4096),
                  b.sqe(FFS_OP_READ, 3, 4096)};
  e[0].flags = e[1].flags = FFS_SQE_ZERO_FILL;
  REQUIRE(b.ring->prepare(e, 3).taken == 3);
  auto done = b.complete(3);
  REQUIRE(done.size() == 3);
  for (const auto& c : done) CHECK(c.result == (c.userdata == 3 ? -ENOENT : 4096));
  for (int i = 0; i < 4096; i++) REQUIRE(b.iov->data()[i] == 0);
  for (int i = 0; i < 4096; i++) REQUIRE(b.iov->data()[4096 + i] == (i < 10 ? 9 : 0));
  CHECK(b.iov->data()[8192] == 0x77);
}

TEST_CASE("what is written arrives, with its checksums, over both transports and by region") {
  std::vector<std::vector<uint8_t>> payloads;
  std::vector<uint8_t> kinds;
  std::atomic<bool> sums_right{true};
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    payloads.push_back(r.payload);
    kinds.push_back(r.update.bulk.kind);
    std::vector<uint32_t> sums(net::piece_count(r.update.offset, r.update.length));
    net::piece_crcs(r.update.offset, net::Bytes(r.payload), sums.data());
    if (r.var.size() != sums.size() * 4 || std::memcmp(r.var.data(), sums.data(), r.var.size()) != 0)
      sums_right = false;
    Peer::answer_update(c, r.id);
  });
  const auto data = pattern(300001, 4);
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    Bench b({&peer}, transport);
    std::memcpy(b.iov->data() + 77, data.data(), data.size());
    for (int i = 0; i < 2; i++) {
      const ffs_sqe e = b.sqe(FFS_OP_WRITE, 1, static_cast<uint32_t>(data.size()), 77, 1000);
      REQUIRE(b.ring->prepare(&e, 1).taken == 1);
      auto done = b.complete(1);
      REQUIRE(done.size() == 1);
      CHECK(done[0].result == static_cast<int64_t>(data.size()));
      const auto held = peer.hold();
      CHECK(payloads.back() == data);
    }
  }
  CHECK(sums_right);
  const auto held = peer.hold();
  CHECK(kinds == std::vector<uint8_t>{1, 1, 1, 2});
}

TEST_CASE("in-flight bytes of a server are bounded, and nothing is lost behind the bound") {
  std::atomic<int> open{0}, most{0};
  std::vector<std::pair<net::Connection*, uint64_t>> held;
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    open++;
    most = std::max(most.load(), open.load());
    held.emplace_back(&c, r.id);
    if (held.size() < 2) return;
    static const std::vector<uint8_t> data(65536, 1);
    for (auto& [connection, id] : held) open--, Peer::answer_read(*connection, id, data, 65536);
    held.clear();
  });
  Bench b({&peer});
  ClientOptions options = b.client->options();
  options.inflight_bytes = 2 * 65536;
  options.try_timeout_ms = 5000;
  auto client = std::make_shared<Client>(options, b.client->host_id());
  uint64_t generation;
  client->set_routing(b.client->routing(&generation));
  const std::vector<uint8_t> bytes(88, 1);
  REQUIRE(*client->capabilities().add(bytes.data(), 88) == b.capability);
  auto ring = std::move(*Ring::create(client, 16));
  std::vector<ffs_sqe> e;
  for (uint32_t i = 0; i < 10; i++) e.push_back(b.sqe(FFS_OP_READ, i, 65536, i * 65536));
  REQUIRE(ring->prepare(e.data(), 10).taken == 10);
  uint32_t got = 0, events = 0;
  ffs_cqe out[16];
  for (int i = 0; i < 400 && got < 10; i++) got += ring->wait(out, 16, 1, 50, &events);
  CHECK(got == 10);
  CHECK(most == 2);
  ring->close();
}

TEST_CASE("large updates go out one after another as they are summed, small ones together") {
  Peer peer([](Peer& p, net::Connection& c, const Peer::Request& r) {
    const auto lock = p.hold();
    Peer::answer_update(c, r.id, 0, Detail::kNone, r.update.length);
  });
  Bench b({&peer}, TransportChoice::kLocal);
  const auto sends_of = [&b](uint32_t length) {
    std::vector<ffs_sqe> e;
    for (uint32_t i = 0; i < 4; i++) e.push_back(b.sqe(FFS_OP_WRITE, i, length, i * length, i * length));
    REQUIRE(b.ring->prepare(e.data(), 4).taken == 4);
    const uint64_t before = b.ring->stats().send_calls;
    CHECK(b.ring->submit() == 4);
    const uint64_t sends = b.ring->stats().send_calls - before;
    CHECK(b.complete(4).size() == 4);
    return sends;
  };
  (void)sends_of(4096);  // the connection and the region come to be
  CHECK(sends_of(4096) == 1);
  CHECK(sends_of(128u << 10) == 2);
  CHECK(sends_of(256u << 10) == 4);
}
