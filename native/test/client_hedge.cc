// Late reads: who is asked, whose answer counts, and that nobody's late answer touches a buffer.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>

#include "client_peer.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

namespace {

constexpr uint32_t kBytes = 8192;

void well(Peer&, net::Connection& c, const Peer::Request& r) {
  if (r.type != Type::kRead) return Peer::answer_update(c, r.id);
  static thread_local std::vector<uint8_t> data;
  data = pattern(r.read.length, static_cast<uint8_t>(r.read.offset >> 12));
  Peer::answer_read(c, r.id, data, 16 << 20);
}

// A replica that can be made to say nothing, and remembers whom it owes an answer.
struct Moody {
  std::atomic<bool> mute{false};
  std::vector<std::pair<net::Connection*, Peer::Request>> owed;
  Peer peer{[this](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (!mute) return well(p, c, r);
    owed.emplace_back(&c, r);
  }};
};

struct HedgeBench : Bench {
  HedgeBench(const std::vector<Peer*>& peers, TransportChoice transport, uint32_t percent = 5,
             uint32_t try_timeout_ms = 60000)
      : Bench(peers, transport, 64, 1 << 20, [&](ClientOptions& o) {
          o.request_timeout_ms = 120000;
          o.try_timeout_ms = try_timeout_ms;
          o.connect_timeout_ms = 60000;
          o.hedge_percent = percent;
          o.hedge_after_ms = 100;
        }) {}
  ffs_cqe read(uint32_t offset, uint64_t at = 0, uint64_t target = 0) {
    ffs_sqe e = sqe(FFS_OP_READ, 1, kBytes, at, offset);
    e.target = target;
    FFS_CHECK(ring->prepare(&e, 1).taken == 1);
    auto done = complete(1, 60000);
    REQUIRE(done.size() == 1);
    return done[0];
  }
  // Both are connected, regions are registered, and neither owes anything: reads that name their
  // replica aren't hedged.
  void warm_up() {
    for (uint64_t target : {100, 101, 100, 101, 100, 101}) CHECK(read(0, 0, target).result == kBytes);
    CHECK(ring->stats().hedges == 0);
  }
  bool holds(uint32_t offset, uint64_t at = 0) {
    return std::memcmp(iov->data() + at, pattern(kBytes, static_cast<uint8_t>(offset >> 12)).data(),
                       kBytes) == 0;
  }
  // A read that the mute `moody`, the first replica, is asked, and that the other one answers.
  void make_late(Moody& moody) {
    submit_to(0, sqe(FFS_OP_READ, 1, kBytes, 0, 4096 * 7));
    auto done = complete(1, 60000);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == kBytes);
    CHECK(holds(4096 * 7));
    REQUIRE(eventually([&] { return moody.peer.hold(), !moody.owed.empty(); }));
  }
};

}  // namespace

TEST_CASE("a replica that stopped: the read is answered by another one long before the try timeout") {
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    Moody moody;
    Peer other(well);
    HedgeBench b({&moody.peer, &other}, transport);
    b.warm_up();
    moody.mute = true;
    b.make_late(moody);  // would take a minute without the second try
    const auto& stats = b.ring->stats();
    CHECK(stats.hedges == 1);
    CHECK(stats.hedge_wins == 1);
    CHECK(stats.retries == 0);
    // It is asked no more while it is silent.
    const int asked = moody.peer.requests;
    for (int i = 0; i < 10; i++) CHECK(b.read(4096 * 3).result == kBytes);
    CHECK(moody.peer.requests == asked);
    CHECK(stats.hedges == 1);
    // Its answer, when it comes, touches nothing; from then on it is asked again.
    std::memset(b.iov->data(), 0x55, 1 << 20);
    const std::vector<uint8_t> junk(kBytes, 0xee);
    {
      const auto held = moody.peer.hold();
      moody.mute = false;
      for (auto& [connection, request] : moody.owed) {
        Peer::answer_read(*connection, request.id, junk, 16 << 20);
      }
    }
    ffs_cqe out[4];
    uint32_t events = 0;
    for (int i = 0; i < 20; i++) {
      CHECK(b.ring->wait(out, 4, 0, 5, &events) == 0);
      ::usleep(1000);
    }
    CHECK(std::count(b.iov->data(), b.iov->data() + (1 << 20), 0x55) == 1 << 20);
    constexpr uint64_t kElsewhere = (1 << 20) - kBytes;
    CHECK(eventually([&] {
      CHECK(b.read(4096 * 3, kElsewhere).result == kBytes);
      if (moody.peer.requests > asked) return true;
      ::usleep(20000);  // it was slow: that fades
      return false;
    }));
    // Since it answered one behind it, the late answer has come, too.
    CHECK(b.read(4096 * 3, kElsewhere, 100).result == kBytes);
    CHECK(static_cast<uint64_t>(std::count(b.iov->data(), b.iov->data() + kElsewhere, 0x55)) == kElsewhere);
  }
}

// Case 25: the registered pages, as a stopped server's device writes them, aren't the Iov's any more.
TEST_CASE("case 25: a server that was stopped writes into a slice that was taken back and used again") {
  Moody moody;
  Peer other(well);
  HedgeBench b({&moody.peer, &other}, TransportChoice::kLocal);
  b.warm_up();
  moody.mute = true;
  b.make_late(moody);
  Peer::Request late;
  {
    const auto held = moody.peer.hold();
    late = moody.owed[0].second;
  }
  REQUIRE(late.read.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion));
  // Under its new id the extent isn't what the server was given.
  CHECK(b.iov->region(0) != late.read.bulk.region);
  // The slice is used again: for a write, and for a read that the other one answers.
  std::memset(b.iov->data(), 0x11, kBytes);
  CHECK(b.iov->data()[0] == 0x11);
  CHECK(b.read(4096 * 5).result == kBytes);
  CHECK(b.holds(4096 * 5));
}

TEST_CASE("the request's own replica answers first: the second try is dropped") {
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    Moody moody, second;
    HedgeBench b({&moody.peer, &second.peer}, transport);
    b.warm_up();
    moody.mute = second.mute = true;
    const ffs_sqe e = b.sqe(FFS_OP_READ, 1, kBytes, 0, 4096 * 9);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    const auto owed = [](Moody& m) { return m.peer.hold(), m.owed.size(); };
    CHECK(b.run_until([&] { return owed(moody) + owed(second) == 2; }).empty());
    REQUIRE(owed(moody) == 1);
    REQUIRE(owed(second) == 1);
    CHECK(b.ring->stats().hedges == 1);
    // Request ids of second tries lie behind those of the entries.
    const bool moody_first = (moody.owed[0].second.id & 0xffffffff) <= 64;
    Moody& own = moody_first ? moody : second;
    Moody& late = moody_first ? second : moody;
    const auto good = pattern(kBytes, 9);
    own.peer.hold(), Peer::answer_read(*own.owed[0].first, own.owed[0].second.id, good, 16 << 20);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == kBytes);
    CHECK(b.holds(4096 * 9));
    CHECK(b.ring->stats().hedge_wins == 0);
    std::memset(b.iov->data(), 0x55, kBytes);
    // The next request takes the same slot: the late answer isn't for it.
    const ffs_sqe next = b.sqe(FFS_OP_READ, 2, kBytes, 4 * kBytes, 4096 * 3);
    REQUIRE(b.ring->prepare(&next, 1).taken == 1);
    const std::vector<uint8_t> junk(kBytes, 0xee);
    late.peer.hold(), Peer::answer_read(*late.owed[0].first, late.owed[0].second.id, junk, 16 << 20);
    for (int i = 0; i < 10; i++) CHECK(b.complete(1, 5).empty());
    CHECK(std::count(b.iov->data(), b.iov->data() + kBytes, 0x55) == kBytes);
    CHECK(b.ring->cancel(2));
    CHECK(b.complete(1).size() == 1);
    CHECK(std::count(b.iov->data(), b.iov->data() + kBytes, 0x55) == kBytes);
    moody.mute = second.mute = false;
    std::memset(b.iov->data(), 0x55, 8 * kBytes);
    // Both have answered one behind it, so the late answer has come.
    for (uint64_t target : {100, 101}) CHECK(b.read(0, 8 * kBytes, target).result == kBytes);
    CHECK(std::count(b.iov->data(), b.iov->data() + 8 * kBytes, 0x55) == 8 * kBytes);
  }
}

TEST_CASE("a second try that fails leaves the request where it was; one that both miss is a miss") {
  Moody moody;
  std::atomic<int> asked{0};
  std::atomic<int> status{EIO};
  std::atomic<Detail> detail{Detail::kCorrupt};
  std::atomic<bool> bad{false};
  Peer other([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (!bad) return well(p, c, r);
    asked++;
    Peer::fail_read(c, r.id, status, detail);
  });
  HedgeBench b({&moody.peer, &other}, TransportChoice::kTcp, 100);
  b.warm_up();
  struct Row {
    int status;
    Detail detail;
    bool ends;
  };
  for (const Row row : {Row{EIO, Detail::kCorrupt, false}, Row{EAGAIN, Detail::kNotServing, false},
                        Row{EACCES, Detail::kExpired, false}, Row{ENOSPC, Detail::kNone, false},
                        Row{ENOENT, Detail::kNone, true}, Row{ENODATA, Detail::kTagMismatch, true}}) {
    CAPTURE(row.status);
    for (uint64_t target : {100, 101}) CHECK(b.read(0, 0, target).result == kBytes);  // both are well
    status = row.status, detail = row.detail, bad = true, moody.mute = true, asked = 0;
    moody.peer.hold(), moody.owed.clear();
    const uint64_t hedges = b.ring->stats().hedges;
    b.submit_to(0, b.sqe(FFS_OP_READ, 1, kBytes, 0, 4096 * 9));
    auto done = b.run_until([&] { return asked > 0; });
    CHECK(b.ring->stats().hedges == hedges + 1);
    if (done.empty() && !row.ends) done = b.complete(1, 100);
    if (row.ends) {
      if (done.empty()) done = b.complete(1);
      REQUIRE(done.size() == 1);
      CHECK(done[0].result == -row.status);
      bad = false, moody.mute = false;
      continue;
    }
    // It waits for the mute one, whose answer is taken.
    CHECK(done.empty());
    {
      const auto held = moody.peer.hold();
      moody.mute = false, bad = false;
      for (auto& [connection, request] : moody.owed) well(moody.peer, *connection, request);
    }
    done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == kBytes);
    CHECK(b.holds(4096 * 9));
  }
  CHECK(b.ring->stats().damaged >= 1);
}

TEST_CASE("the request's own try fails while a second one is under way: the second one's answer counts") {
  Moody moody, second;
  HedgeBench b({&moody.peer, &second.peer}, TransportChoice::kTcp);
  b.warm_up();
  for (const bool well_then : {true, false}) {
    moody.mute = second.mute = true;
    moody.peer.hold(), moody.owed.clear();
    second.peer.hold(), second.owed.clear();
    const ffs_sqe e = b.sqe(FFS_OP_READ, 1, kBytes, 0, 4096 * 9);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    const auto owed = [](Moody& m) { return m.peer.hold(), m.owed.size(); };
    CHECK(b.run_until([&] { return owed(moody) + owed(second) == 2; }).empty());
    REQUIRE((owed(moody) == 1 && owed(second) == 1));
    const bool moody_first = (moody.owed[0].second.id & 0xffffffff) <= 64;
    Moody& own = moody_first ? moody : second;
    Moody& other = moody_first ? second : moody;
    own.peer.hold(), Peer::fail_read(*own.owed[0].first, own.owed[0].second.id, EAGAIN, Detail::kNotServing);
    CHECK(b.complete(1, 50).empty());
    CHECK(owed(other) == 1);  // not asked twice
    own.mute = false;
    {
      const auto held = other.peer.hold();
      other.mute = false;
      if (well_then) {
        well(other.peer, *other.owed[0].first, other.owed[0].second);
      } else {
        Peer::fail_read(*other.owed[0].first, other.owed[0].second.id, EAGAIN, Detail::kNotServing);
      }
    }
    auto done = b.complete(1);  // or anew, when both have refused
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == kBytes);
    CHECK(b.holds(4096 * 9));
  }
}

TEST_CASE("second tries are bounded: a burst, then a share of the reads") {
  // Both replicas answer late, never silent for long enough to be left.
  std::atomic<int> reads{0};
  const auto slow = [&](Peer& p, net::Connection& c, const Peer::Request& r) {
    reads++;
    ::usleep(120000);
    well(p, c, r);
  };
  Peer a(slow), other(slow);
  HedgeBench b({&a, &other}, TransportChoice::kTcp, 5);
  constexpr int kReads = 40;
  for (int i = 0; i < kReads; i++) CHECK(b.read(0).result == kBytes);
  CHECK(b.ring->stats().hedges <= 16 + kReads * 5 / 100 + 1);
  // And none where they are off.
  HedgeBench off({&a, &other}, TransportChoice::kTcp, 0);
  for (int i = 0; i < 5; i++) CHECK(off.read(0).result == kBytes);
  CHECK(off.ring->stats().hedges == 0);
}

TEST_CASE("writes are never hedged, nor reads of one replica, nor those that name their replica") {
  Moody moody;
  Peer other(well);
  HedgeBench b({&moody.peer, &other}, TransportChoice::kTcp, 100);
  b.warm_up();
  moody.mute = true;
  ffs_sqe e[2] = {b.sqe(FFS_OP_WRITE, 1, kBytes), b.sqe(FFS_OP_READ, 2, kBytes, kBytes)};
  e[1].target = 100;
  REQUIRE(b.ring->prepare(e, 2).taken == 2);
  CHECK(b.complete(1, 300).empty());
  CHECK(b.ring->stats().hedges == 0);
  CHECK(b.ring->cancel(1));
  CHECK(b.ring->cancel(2));
  CHECK(b.complete(2).size() == 2);
}

TEST_CASE("cancel, deadline and close with a second try under way") {
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    uint32_t timeout_ms = 600;
    for (int ending = 0; ending < 3;) {
      CAPTURE(ending);
      Moody moody, second;
      HedgeBench b({&moody.peer, &second.peer}, transport);
      b.warm_up();
      moody.mute = second.mute = true;
      ffs_sqe e = b.sqe(FFS_OP_READ, 1, kBytes);
      if (ending == 1) e.timeout_ms = timeout_ms;
      REQUIRE(b.ring->prepare(&e, 1).taken == 1);
      auto done = b.run_until([&] { return b.ring->stats().hedges > 0; });
      if (ending == 1 && b.ring->stats().hedges == 0) {  // this thread didn't run until it was over
        REQUIRE(done.size() == 1);
        REQUIRE((timeout_ms *= 2) < 60000);
        continue;
      }
      REQUIRE(b.ring->stats().hedges == 1);
      CHECK((ending == 1 || done.empty()));
      if (ending == 0) CHECK(b.ring->cancel(1));
      if (ending == 2) {
        b.ring->close();
      } else {
        if (done.empty()) done = b.complete(1, 60000);
        REQUIRE(done.size() == 1);
        CHECK(done[0].result == (ending == 0 ? -ECANCELED : -ETIMEDOUT));
      }
      CHECK_FALSE(b.iov->used());
      ending++;
    }
  }
}

TEST_CASE("lookups of many keys are hedged too") {
  const auto answer = [](Peer&, net::Connection& c, const Peer::Request& r) {
    if (r.type == Type::kRead) {
      static thread_local std::vector<uint8_t> data;
      data = pattern(r.read.length, 0);
      return Peer::answer_read(c, r.id, data, 16 << 20);
    }
    const size_t keys = r.var.size() / sizeof(wire::ExistsKey);
    std::vector<wire::ExistsEntry> entries(keys, {1, 77});
    wire::ExistsReply reply{};
    reply.count = static_cast<uint32_t>(keys);
    c.queue.push(Type::kExistsReply, r.id, reply,
                 net::Bytes(reinterpret_cast<const uint8_t*>(entries.data()), keys * sizeof entries[0]));
    (void)Peer::flush(c);
  };
  std::atomic<bool> mute{false};
  std::atomic<int> unanswered{0};
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (mute) {
      unanswered++;
    } else {
      answer(p, c, r);
    }
  });
  Peer other(answer);
  HedgeBench b({&a, &other}, TransportChoice::kTcp);
  b.warm_up();
  mute = true;
  std::memset(b.iov->data(), 0, 4096);
  b.submit_to(0, b.sqe(FFS_OP_EXISTS, 1, 3));
  auto done = b.complete(1, 60000);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 3);
  wire::ExistsEntry entry[3];
  std::memcpy(entry, b.iov->data(), sizeof entry);
  for (const auto& x : entry) CHECK((x.state == 1 && x.length == 77));
  CHECK(eventually([&] { return unanswered > 0; }));
  CHECK(b.ring->stats().hedge_wins == 1);
}

TEST_CASE("damage that a read found is told to the server that has it") {
  const auto good = pattern(kGranuleBytes, 1);
  auto bad = good;
  bad[5] ^= 1;
  std::atomic<int> told{0};
  Peer a([&](Peer&, net::Connection& c, const Peer::Request& r) {
    if ((r.read.flags & wire::kReadVerifyWhole) != 0) {
      told++;
      return Peer::fail_read(c, r.id, EIO, Detail::kCorrupt);
    }
    Peer::answer_read(c, r.id, bad, static_cast<uint32_t>(bad.size()), granules(good));
  });
  Peer other([&](Peer&, net::Connection& c, const Peer::Request& r) {
    CHECK((r.read.flags & wire::kReadVerifyWhole) == 0);
    Peer::answer_read(c, r.id, good, static_cast<uint32_t>(good.size()), granules(good));
  });
  HedgeBench b({&a, &other}, TransportChoice::kTcp);
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, kGranuleBytes);
  // (Late bad data, of a read that the other one has answered meanwhile, isn't looked at.)
  CHECK(eventually([&] {
    b.submit_to(0, e);
    auto done = b.complete(1, 60000);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == kGranuleBytes);
    CHECK(std::memcmp(b.iov->data(), good.data(), good.size()) == 0);
    (void)b.complete(1, 5);
    return told > 0;
  }));
  CHECK(b.ring->stats().damaged >= 1);
}

// A second try has memory of its own, so nothing arrives for it but through the socket; an answer without
// bytes does too.
TEST_CASE("both answers in one pass, that of the second try without bytes and with checksums") {
  Moody first, second;
  HedgeBench b({&first.peer, &second.peer}, TransportChoice::kTcp);
  b.warm_up();
  first.mute = second.mute = true;
  b.submit_to(0, b.sqe(FFS_OP_READ, 1, kBytes, 0, 4096 * 7));
  ffs_cqe out[4];
  uint32_t events = 0;
  REQUIRE(eventually([&] {
    CHECK(b.ring->wait(out, 4, 0, 5, &events) == 0);
    const auto held = first.peer.hold();
    const auto also = second.peer.hold();
    return !first.owed.empty() && !second.owed.empty();
  }));
  CHECK(b.ring->stats().hedges == 1);
  {
    const auto held = second.peer.hold();
    Peer::answer_read(*second.owed[0].first, second.owed[0].second.id, {}, 0, {1});
  }
  ::usleep(20000);  // it stands before the other one
  const std::vector<uint8_t> data = pattern(kBytes, 7);
  {
    const auto held = first.peer.hold();
    Peer::answer_read(*first.owed[0].first, first.owed[0].second.id, data, 16 << 20);
  }
  ::usleep(20000);
  const auto done = b.complete(1, 60000);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result >= 0);  // either answer will do
  b.ring->close();
}
