// Servers that go, chains that change, chains that are down: where requests go on, under which
// identity, how often, and when they end.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "client_peer.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

namespace {

constexpr uint32_t kBytes = 8192;
constexpr uint8_t kServing = FFS_SERVING, kSyncing = FFS_SYNCING, kOffline = FFS_OFFLINE;

void well(Peer&, net::Connection& c, const Peer::Request& r) {
  if (r.type != Type::kRead) return Peer::answer_update(c, r.id);
  static thread_local std::vector<uint8_t> data;
  data = pattern(r.read.length, 1);
  Peer::answer_read(c, r.id, data, 16 << 20);
}

// Notes what it is asked; says nothing while `mute`, refuses while `refuse`.
struct Server {
  std::atomic<bool> mute{false};
  std::atomic<bool> refuse{false};
  std::vector<wire::Context> seen;
  std::vector<std::pair<net::Connection*, Peer::Request>> owed;
  Peer peer{[this](Peer& p, net::Connection& c, const Peer::Request& r) {
    seen.push_back(r.type == Type::kRead ? r.read.context : r.update.context);
    if (mute) {
      owed.emplace_back(&c, r);
    } else if (refuse && r.type == Type::kRead) {
      Peer::fail_read(c, r.id, EAGAIN, Detail::kNotServing, 20);
    } else if (refuse) {
      Peer::answer_update(c, r.id, EAGAIN, Detail::kNotServing);
    } else {
      well(p, c, r);
    }
  }};
  size_t count() { return peer.hold(), seen.size(); }
};

// No timeout of a test helps: only what is tested does.
void patient(ClientOptions& o) {
  o.request_timeout_ms = 120000;
  o.try_timeout_ms = 60000;
  o.connect_timeout_ms = 60000;
  o.hedge_percent = 0;
}

struct PatientBench : Bench {
  explicit PatientBench(const std::vector<Peer*>& peers, TransportChoice transport = TransportChoice::kTcp,
                        uint32_t unavailable_timeout_ms = 200)
      : Bench(peers, transport, 64, 1 << 20, [&](ClientOptions& o) {
          patient(o);
          o.unavailable_timeout_ms = unavailable_timeout_ms;
        }) {}
  // Who isn't woken finds its time over.
  ffs_sqe brief(ffs_sqe e) {
    e.timeout_ms = 20000;
    return e;
  }
  void prepare(const ffs_sqe& e) { REQUIRE(ring->prepare(&e, 1).taken == 1); }
  ffs_cqe one(const ffs_sqe& e) {
    prepare(e);
    auto done = complete(1, 60000);
    REQUIRE(done.size() == 1);
    return done[0];
  }
};

// Waits in the ring, in this thread, while another thread does something a little after the
// condition holds.
template <typename Condition, typename Work>
std::vector<ffs_cqe> wait_while(Bench& b, Condition holds, Work work) {
  std::thread other([&] {
    CHECK(eventually(holds));
    ::usleep(100000);
    work();
  });
  std::vector<ffs_cqe> all;
  ffs_cqe out[64];
  uint32_t events = 0;
  while (all.empty()) {
    const uint32_t got = b.ring->wait(out, 64, 1, 60000, &events);
    all.insert(all.end(), out, out + got);
  }
  other.join();
  return all;
}

}  // namespace

TEST_CASE("new routing ends a wait at once: the update goes to the new head with the same identity") {
  Server old_head, next;
  PatientBench b({&old_head.peer, &next.peer});
  old_head.mute = true;
  b.prepare(b.brief(b.sqe(FFS_OP_WRITE, 1, kBytes)));
  auto done = wait_while(
      b, [&] { return old_head.count() == 1; },
      [&] {
        b.route(2, {&old_head.peer, &next.peer}, {kOffline, kServing});
      });
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == kBytes);
  REQUIRE(old_head.count() == 1);
  REQUIRE(next.count() == 1);
  CHECK(next.seen[0].target == 101);
  CHECK(next.seen[0].chain_counter == 2);
  CHECK(next.seen[0].channel == old_head.seen[0].channel);
  CHECK(next.seen[0].sequence == old_head.seen[0].sequence);
  // The old head's late answer isn't taken for one.
  old_head.peer.hold(), Peer::answer_update(*old_head.owed[0].first, old_head.owed[0].second.id, ENOSPC);
  CHECK(b.complete(1, 100).empty());
}

TEST_CASE("an update whose payload is half sent to a stopped head goes on at the new one") {
  Server next;
  Peer stopped(well);
  PatientBench b({&stopped, &next.peer});
  CHECK(b.one(b.sqe(FFS_OP_WRITE, 1, kBytes)).result == kBytes);
  std::atomic<bool> stands{false}, go_on{false};
  std::thread stop([&] {  // its thread can't run: it reads nothing more
    const auto held = stopped.hold();
    stands = true;
    while (!go_on) ::usleep(1000);
  });
  REQUIRE(eventually([&] { return stands.load(); }));
  IovOptions options;
  options.size_bytes = 64 << 20;
  auto iov = std::move(*Iov::create(options));
  IovRegistry::add(iov.get());
  for (uint32_t i = 0; i < 4; i++) {
    ffs_sqe e = b.sqe(FFS_OP_REPLACE, i, 16 << 20);
    e.iov = reinterpret_cast<ffs_iov*>(iov.get());
    e.iov_offset = uint64_t{i} << 24;
    e.key[8] = static_cast<uint8_t>(i);
    b.prepare(e);
  }
  ffs_cqe out[4];
  uint32_t events = 0;
  CHECK(b.ring->wait(out, 4, 1, 100, &events) == 0);
  b.route(2, {&next.peer}, {}, {}, 0, 101);
  auto done = b.complete(4, 60000);
  CHECK(done.size() == 4);
  for (const auto& c : done) CHECK(c.result == 16 << 20);
  CHECK(next.count() == 4);
  go_on = true;
  stop.join();
  CHECK(IovRegistry::remove(iov.get()).ok());
}

TEST_CASE(
    "a read at a replica that doesn't serve any more goes elsewhere; one at a replica that does stays") {
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    Server gone, stays, third;
    PatientBench b({&gone.peer, &stays.peer}, transport);
    for (int i = 0; i < 8; i++) CHECK(b.one(b.sqe(FFS_OP_READ, 1, kBytes)).result == kBytes);
    gone.mute = stays.mute = true;
    const size_t at_gone = gone.count(), at_stays = stays.count();
    constexpr size_t left = 4;
    for (uint64_t i = 0; i < 8; i++) b.submit_to(i % 2, b.sqe(FFS_OP_READ, i, kBytes, i * kBytes));
    const auto asked = [&] { return gone.count() + stays.count() == at_gone + at_stays + 8; };
    CHECK(b.run_until(asked).empty());
    REQUIRE(asked());
    REQUIRE(gone.count() == at_gone + left);
    // A new version of the chain, with a syncing member that mustn't be asked.
    b.route(2, {&gone.peer, &stays.peer, &third.peer}, {kOffline, kServing, kSyncing});
    stays.mute = false;
    auto done = b.complete(static_cast<uint32_t>(left));
    CHECK(done.size() == left);
    for (const auto& c : done) CHECK(c.result == kBytes);
    CHECK(b.complete(1, 100).empty());
    {
      const auto held = stays.peer.hold();
      for (auto& [connection, request] : stays.owed) well(stays.peer, *connection, request);
    }
    CHECK(b.complete(static_cast<uint32_t>(8 - left)).size() == 8 - left);
    CHECK(gone.count() == at_gone + left);
    CHECK(third.count() == 0);
  }
}

TEST_CASE("an update at a head that stays head waits for its answer, whatever else changes") {
  Server head, other;
  PatientBench b({&head.peer, &other.peer});
  head.mute = true;
  b.prepare(b.sqe(FFS_OP_WRITE, 1, kBytes));
  CHECK(b.run_until([&] { return head.count() == 1; }).empty());
  b.route(2, {&head.peer, &other.peer}, {kServing, kOffline});
  b.route(3, {&head.peer, &other.peer}, {kServing, kSyncing});
  CHECK(b.complete(1, 100).empty());
  CHECK(head.count() == 1);
  head.peer.hold(), Peer::answer_update(*head.owed[0].first, head.owed[0].second.id);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == kBytes);
  CHECK(other.count() == 0);
}

TEST_CASE("requests wait in the routing for a chain that isn't known yet, and go on when it is") {
  Server head;
  PatientBench b({});
  b.prepare(b.sqe(FFS_OP_WRITE, 1, kBytes));
  auto done = wait_while(
      b, [] { return true; }, [&] { b.route(2, {&head.peer}); });
  REQUIRE(done.size() == 1);
  // (It had no members: no replica of it was there, which ends requests after a while.)
  CHECK((done[0].result == kBytes || done[0].result == -EHOSTDOWN));
}

TEST_CASE(
    "a chain that is down: a distinct error after a while, at once from then on, success when it is back") {
  Server a, c;
  PatientBench b({&a.peer, &c.peer});
  struct Row {
    std::vector<uint8_t> states;
    std::vector<bool> away;
  };
  uint64_t epoch = 1;
  for (const Row& row : {Row{{kOffline, kOffline}, {}}, Row{{kServing, kOffline}, {true, false}},
                         Row{{kServing, kServing}, {true, true}}, Row{{kSyncing, kOffline}, {}}}) {
    a.mute = c.mute = true;
    b.route(++epoch, {&a.peer, &c.peer}, row.states, row.away);
    const uint64_t before = b.ring->stats().unavailable;
    b.prepare(b.sqe(FFS_OP_READ, 1, kBytes));
    b.prepare(b.sqe(FFS_OP_WRITE, 2, kBytes, kBytes));
    auto done = b.complete(2, 60000);
    REQUIRE(done.size() == 2);
    for (const auto& x : done) {
      CHECK(x.result == -EHOSTDOWN);
      CHECK(x.detail == static_cast<uint32_t>(Detail::kNotServing));
      CHECK(x.chain == 5);
    }
    CHECK(b.one(b.sqe(FFS_OP_READ, 1, kBytes)).result == -EHOSTDOWN);
    CHECK(b.ring->stats().unavailable == before + 3);
    CHECK_FALSE(b.iov->used());
    a.mute = c.mute = false;
    b.route(++epoch, {&a.peer, &c.peer}, {kServing, kServing});
    CHECK(b.one(b.sqe(FFS_OP_READ, 1, kBytes)).result == kBytes);
    CHECK(b.one(b.sqe(FFS_OP_WRITE, 1, kBytes)).result == kBytes);
  }
}

TEST_CASE("a chain that comes back in time: requests that waited go on") {
  Server a;
  PatientBench b({&a.peer}, TransportChoice::kTcp, 60000);
  b.route(2, {&a.peer}, {kOffline});
  b.prepare(b.sqe(FFS_OP_WRITE, 1, kBytes));
  CHECK(b.complete(1, 30).empty());
  b.route(3, {&a.peer});
  b.prepare(b.sqe(FFS_OP_READ, 2, kBytes, kBytes));
  auto done = b.complete(2, 60000);
  REQUIRE(done.size() == 2);
  for (const auto& x : done) CHECK(x.result == kBytes);
}

TEST_CASE("members of which the manager doesn't hear are asked last, but asked") {
  Server away, here;
  PatientBench b({&away.peer, &here.peer}, TransportChoice::kTcp, 60000);
  b.route(2, {&away.peer, &here.peer}, {}, {true, false});
  for (int i = 0; i < 16; i++) CHECK(b.one(b.sqe(FFS_OP_READ, 1, kBytes)).result == kBytes);
  CHECK(away.count() == 0);
  CHECK(b.one(b.sqe(FFS_OP_WRITE, 1, kBytes)).result == kBytes);  // it is the head
  CHECK(away.count() == 1);
  b.route(3, {&away.peer, &here.peer}, {}, {true, true});
  CHECK(b.one(b.sqe(FFS_OP_READ, 1, kBytes)).result == kBytes);
}

TEST_CASE("a server that refuses is asked again within the budget, and all go on when it serves") {
  Server a;
  a.refuse = true;
  PatientBench b({&a.peer});
  constexpr uint32_t kRequests = 64;
  for (uint32_t i = 0; i < kRequests; i++) {
    b.prepare(b.sqe(i % 2 ? FFS_OP_READ : FFS_OP_WRITE, i, 4096, i * 4096));
  }
  const uint64_t began = now_ns();
  ffs_cqe out[64];
  uint32_t events = 0, seen = 0;
  while (now_ns() - began < 1'500'000'000) {
    CHECK(b.ring->wait(out, 64, 1, 50, &events) == 0);
    seen |= events;
  }
  CHECK((seen & FFS_WAIT_NEEDS_ROUTING) != 0);
  const double seconds = static_cast<double>(now_ns() - began) / 1e9;
  // Once each, the burst, then 20 a second (and 15 in 100 of what was submitted).
  CHECK(static_cast<double>(a.count()) <= kRequests + kRequests + 20 * seconds + kRequests * 0.15 + 2);
  CHECK(b.ring->stats().budget_waits > 0);
  a.refuse = false;
  const size_t before = a.count();
  auto done = b.complete(kRequests, 60000);
  CHECK(done.size() == kRequests);
  for (const auto& c : done) CHECK(c.result == 4096);
  CHECK(a.count() <= before + kRequests);
  // An identity went through all its tries.
  std::map<uint32_t, uint64_t> sequences;
  for (const auto& context : a.seen) {
    if (context.channel == 0) continue;
    const auto [entry, fresh] = sequences.emplace(context.channel, context.sequence);
    CHECK(entry->second == context.sequence);
  }
  CHECK(sequences.size() == kRequests / 2);
}

TEST_CASE("the budget doesn't hold up those whose chain has changed") {
  Server old_head, next;
  old_head.refuse = true;
  PatientBench b({&old_head.peer, &next.peer});
  for (uint32_t i = 0; i < 64; i++) b.prepare(b.sqe(FFS_OP_WRITE, i, 4096, i * 4096));
  CHECK(b.run_until([&] { return b.ring->stats().budget_waits > 0; }).empty());
  CHECK(b.ring->stats().budget_waits > 0);
  const size_t asked = next.count();
  b.route(2, {&old_head.peer, &next.peer}, {kOffline, kServing});
  ffs_cqe out[64];
  uint32_t events = 0;
  uint32_t got = 0;
  while (got < 64) got += b.ring->wait(out, 64, 64 - got, 60000, &events);
  CHECK(next.count() == asked + 64);
}

// Case 17: a batch in which some chunks committed and others didn't.
TEST_CASE("case 17: only the failures of a batch are sent again, each with its own channel and sequence") {
  std::map<uint32_t, std::vector<uint64_t>> tries;  // by channel
  std::map<uint32_t, uint8_t> chunk_of;
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    const uint32_t channel = r.update.context.channel;
    tries[channel].push_back(r.update.context.sequence);
    const uint8_t chunk = r.update.key[23];
    const auto [entry, fresh] = chunk_of.emplace(channel, chunk);
    CHECK(entry->second == chunk);
    const bool first = tries[channel].size() == 1;
    if (first && chunk % 4 == 1) return Peer::answer_update(c, r.id, EAGAIN, Detail::kReissue);
    if (first && chunk % 4 == 2) return Peer::answer_update(c, r.id, EAGAIN, Detail::kBusy);
    if (chunk == 7) return Peer::answer_update(c, r.id, ENOSPC);
    Peer::answer_update(c, r.id);
  });
  PatientBench b({&peer});
  std::vector<ffs_sqe> batch;
  for (uint32_t i = 0; i < 12; i++) {
    batch.push_back(b.sqe(FFS_OP_WRITE, 3, 4096, i * 4096));
    batch.back().group = i == 0 ? 12 : 0;
    batch.back().key[23] = static_cast<uint8_t>(i);
  }
  REQUIRE(b.ring->prepare(batch.data(), 12).taken == 12);
  auto done = b.complete(1, 60000);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -ENOSPC);
  CHECK(done[0].failed == 1);
  const auto held = peer.hold();
  REQUIRE(tries.size() == 12);
  for (const auto& [channel, sequences] : tries) {
    const uint8_t chunk = chunk_of[channel];
    CAPTURE(int{chunk});
    REQUIRE(sequences.size() == (chunk % 4 == 1 || chunk % 4 == 2 ? 2 : 1));
    if (chunk % 4 == 1) CHECK(sequences[1] == sequences[0] + 1);
    if (chunk % 4 == 2) CHECK(sequences[1] == sequences[0]);
  }
}

// Case 17 again, with a head that goes in the middle of it.
TEST_CASE("case 17: a head that dies half way through a batch: what it didn't answer goes to the next one") {
  std::vector<wire::Context> at_old;
  Peer old_head([&](Peer&, net::Connection& c, const Peer::Request& r) {
    at_old.push_back(r.update.context);
    if (at_old.size() <= 5) return Peer::answer_update(c, r.id);
    if (at_old.size() == 8) c.socket.reset();
  });
  Server next;
  PatientBench b({&old_head, &next.peer});
  std::vector<ffs_sqe> batch;
  for (uint32_t i = 0; i < 8; i++) {
    batch.push_back(b.sqe(FFS_OP_WRITE, 3, 4096, i * 4096));
    batch.back().group = i == 0 ? 8 : 0;
    batch.back().key[23] = static_cast<uint8_t>(i);
  }
  REQUIRE(b.ring->prepare(batch.data(), 8).taken == 8);
  CHECK(b.run_until([&] { return old_head.hold(), at_old.size() == 8; }).empty());
  b.route(2, {&old_head, &next.peer}, {kOffline, kServing});
  auto done = b.complete(1, 60000);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 8 * 4096);
  CHECK(next.count() == 3);
  const auto held = old_head.hold();
  for (const auto& context : next.seen) {
    const bool same = std::any_of(at_old.begin() + 5, at_old.end(), [&](const wire::Context& c) {
      return c.channel == context.channel && c.sequence == context.sequence;
    });
    CHECK(same);
  }
}

TEST_CASE("a renewed capability wakes who waits for it") {
  std::atomic<bool> renewed{false};
  Peer peer([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (!renewed) return Peer::answer_update(c, r.id, EACCES, Detail::kExpired);
    well(p, c, r);
  });
  PatientBench b({&peer});
  b.prepare(b.brief(b.sqe(FFS_OP_WRITE, 1, kBytes)));
  auto done = wait_while(
      b, [&] { return peer.requests > 0; },
      [&] {
        renewed = true;
        const std::vector<uint8_t> bytes(sizeof(wire::Capability), 2);
        CHECK(b.client->capabilities().renew(b.capability, bytes.data(), 88).ok());
        b.client->wake();
      });
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == kBytes);
}

TEST_CASE("routing that changes under many rings: each sees it, none misses one, descriptors stay quiet") {
  Server a, c;
  PatientBench b({&a.peer, &c.peer});
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (uint64_t epoch = 2; !stop; epoch++) {
      b.route(epoch, {&a.peer, &c.peer}, {kServing, epoch % 3 == 0 ? kOffline : kServing});
      ::usleep(300);
    }
  });
  std::vector<std::thread> workers;
  std::atomic<int> failures{0};
  for (int w = 0; w < 3; w++) {
    workers.emplace_back([&, w] {
      auto ring = std::move(*Ring::create(b.client, 16));
      for (int i = 0; i < 200; i++) {
        const ffs_sqe e = b.sqe(i % 2 ? FFS_OP_READ : FFS_OP_WRITE, 1, 4096, (w + 1) * 8192);
        uint32_t events = 0;
        ffs_cqe out[1];
        if (ring->prepare(&e, 1).taken != 1) failures++;
        for (int k = 0; ring->wait(out, 1, 1, 60000, &events) == 0; k++) failures += k > 1000;
        failures += out[0].result != 4096;
      }
      ring->close();
    });
  }
  for (auto& worker : workers) worker.join();
  stop = true;
  changer.join();
  CHECK(failures == 0);
  b.route(1'000'000, {&a.peer, &c.peer});
  ffs_cqe out[1];
  uint32_t events = 0;
  pollfd entry{b.ring->fd(), POLLIN, 0};
  CHECK(::poll(&entry, 1, 5000) == 1);
  (void)b.ring->wait(out, 1, 0, 0, &events);
  CHECK(::poll(&entry, 1, 50) == 0);
}
