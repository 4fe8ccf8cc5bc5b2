// What a request keeps through its tries: its identity, and the capability that it goes under.
#include <doctest/doctest.h>

#include <map>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

TEST_CASE("an update whose outcome is unknown retires its channel") {
  Peer peer(mute);
  Bench b({&peer});
  // Connected, so that it is sent before its time is over.
  const ffs_sqe first = b.sqe(FFS_OP_READ, 2, 4096, 4096);
  REQUIRE(b.ring->prepare(&first, 1).taken == 1);
  CHECK(b.run_until([&] { return peer.requests > 0; }).empty());
  CHECK(b.ring->cancel(2));
  REQUIRE(b.complete(1).size() == 1);
  ffs_sqe e = b.sqe(FFS_OP_WRITE, 1, 100);
  e.timeout_ms = 300;
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -ETIMEDOUT);
  CHECK(done[0].detail == static_cast<uint32_t>(Detail::kDeadline));
  CHECK(b.client->channels().acquire(ChainId(5), now_ns() / 1000000).number == 2);
  const uint64_t much_later = now_ns() / 1000000 + ChannelAllocator::kRestMs;
  const Channel again = b.client->channels().acquire(ChainId(5), much_later);
  CHECK(again.number == 1);
  CHECK(again.sequence == 2);
}

TEST_CASE("a reissue goes out under a new sequence") {
  std::vector<uint64_t> sequences;
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    sequences.push_back(r.update.context.sequence);
    if (sequences.size() == 1) return Peer::answer_update(c, r.id, EAGAIN, Detail::kReissue);
    Peer::answer_update(c, r.id);
  });
  Bench b({&peer});
  const ffs_sqe e = b.sqe(FFS_OP_WRITE, 1, 100);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 100);
  const auto held = peer.hold();
  REQUIRE(sequences.size() == 2);
  CHECK(sequences[1] == sequences[0] + 1);
}

TEST_CASE("whatever an update without an identity is answered, it is sent again as it was, or ends") {
  constexpr uint32_t kRequests = 20;
  for (const uint8_t op : {FFS_OP_TOUCH}) {
    for (uint32_t detail = 0; detail <= static_cast<uint32_t>(Detail::kReissue); detail++) {
      CAPTURE(detail);
      std::map<uint64_t, uint32_t> tries;  // by the request's userdata
      bool identified = false;
      Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
        identified |= r.update.context.channel != 0 || r.update.context.sequence != 0;
        const bool first = ++tries[r.update.context.trace_id] == 1;
        Peer::answer_update(c, r.id, first ? EAGAIN : 0, first ? static_cast<Detail>(detail) : Detail::kNone);
      });
      Bench b({&peer});
      for (uint32_t i = 0; i < kRequests; i++) {
        ffs_sqe e = b.sqe(op, i + 1, 0, i * 4096);
        // What waits for routing or a capability ends so.
        e.timeout_ms = static_cast<Detail>(detail) == Detail::kReissue ? 20000 : 50;
        REQUIRE(b.ring->prepare(&e, 1).taken == 1);
      }
      const auto done = b.complete(kRequests);
      REQUIRE(done.size() == kRequests);
      const auto held = peer.hold();
      CHECK_FALSE(identified);
      if (static_cast<Detail>(detail) != Detail::kReissue) continue;
      for (const ffs_cqe& one : done) {
        CHECK(one.result == 0);
        CHECK(tries[one.userdata] == 2);
      }
    }
  }
}

TEST_CASE("stale routing: the request waits, asks for newer routing, and goes on with the same identity") {
  std::vector<wire::Context> seen;
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    seen.push_back(r.update.context);
    if (r.update.context.chain_counter < 2)
      return Peer::answer_update(c, r.id, EAGAIN, Detail::kStaleRouting);
    Peer::answer_update(c, r.id);
  });
  Bench b({&peer});
  const ffs_sqe e = b.sqe(FFS_OP_WRITE, 1, 100);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  uint32_t events = 0;
  ffs_cqe out[4];
  REQUIRE(b.ring->wait(out, 4, 1, 5000, &events) == 0);
  CHECK((events & FFS_WAIT_NEEDS_ROUTING) != 0);
  b.route(2, {&peer});
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 100);
  const auto held = peer.hold();
  CHECK(seen.back().sequence == seen.front().sequence);
  CHECK(seen.back().channel == seen.front().channel);
}

namespace {

// A peer that is slow because the machine is busy isn't connected to anew, nor asked again: those tries would
// be counted as well.
void patiently(ClientOptions& o) {
  o.connect_timeout_ms = o.try_timeout_ms = o.request_timeout_ms = 60000;
}

}  // namespace

TEST_CASE("an expired capability waits to be renewed; a forgotten one is opened anew once") {
  std::atomic<bool> renewed{false};
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    if (!renewed) return Peer::fail_read(c, r.id, EACCES, Detail::kExpired);
    static const std::vector<uint8_t> data(512, 1);
    Peer::answer_read(c, r.id, data, 512);
  });
  Bench b({&peer}, TransportChoice::kTcp, 64, 1 << 20, patiently);
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 512);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  uint32_t events = 0;
  ffs_cqe out[4];
  REQUIRE(b.ring->wait(out, 4, 1, 60000, &events) == 0);
  CHECK((events & FFS_WAIT_NEEDS_CAPABILITY) != 0);
  renewed = true;
  const std::vector<uint8_t> bytes(sizeof(wire::Capability), 2);
  CHECK(b.client->capabilities().renew(b.capability, bytes.data(), 88).ok());
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 512);
  CHECK(peer.capabilities.load() == 2);
}

TEST_CASE("no capability twice is EACCES") {
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    Peer::fail_read(c, r.id, EACCES, Detail::kNoCapability);
  });
  Bench b({&peer}, TransportChoice::kTcp, 64, 1 << 20, patiently);
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 512);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -EACCES);
  CHECK(peer.requests == 2);
}
