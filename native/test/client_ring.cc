// The ring against scripted peers: real sockets, real frames, a server that does what it should not.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <map>

#include "client_peer.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

namespace {

// Answers every read with the pattern of its offset, every update with success.
void well(Peer&, net::Connection& c, const Peer::Request& r) {
  if (r.type == Type::kRead) {
    static thread_local std::vector<uint8_t> data;
    data = pattern(r.read.length, static_cast<uint8_t>(r.read.offset));
    Peer::answer_read(c, r.id, data, 16 << 20);
  } else if (r.type == Type::kUpdate) {
    Peer::answer_update(c, r.id);
  }
}

void mute(Peer&, net::Connection&, const Peer::Request&) {}

}  // namespace

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
  });
  for (uint32_t i = 0; i < kReads; i++) {
    const ffs_sqe e = b.sqe(FFS_OP_READ, i, 4096, i * 4096, 5);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  }
  const auto done = b.complete(kReads, 20000);
  REQUIRE(done.size() == kReads);
  for (const ffs_cqe& e : done) CHECK(e.result == 4096);
}

TEST_CASE("a read into a region that is taken back: a late writer can't touch the slice any more") {
  std::atomic<uint8_t*> stolen{nullptr};
  std::atomic<bool> mute_now{false};
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (mute_now) {
      if (stolen == nullptr) stolen = p.memory(r.read.bulk);
      return;
    }
    well(p, c, r);
  });
  Bench b({&a}, TransportChoice::kLocal);
  // Registered pages keep the old ones: a private copy of the page by reading through O_DIRECT pins
  // isn't at hand here, so the mapping stands for "another writer" and only the id is checked.
  ffs_sqe e = b.sqe(FFS_OP_READ, 1, 8192, 4096);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  REQUIRE(b.complete(1).size() == 1);  // inline: the region is being registered
  const uint64_t region = b.iov->region(0);
  b.iov->data()[100] = 1;  // outside the slice: must survive
  b.iov->data()[4096] = 2;
  mute_now = true;
  e.timeout_ms = 400;
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -ETIMEDOUT);
  CHECK(eventually([&] { return stolen.load() != nullptr; }));
  CHECK(b.iov->region(0) != region);
  CHECK(b.iov->data()[100] == 1);
  CHECK(b.iov->data()[4096] == 0);
  // The extent is registered anew, the old region goes.
  mute_now = false;
  e.timeout_ms = 0;
  for (int i = 0; i < 3; i++) {
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 8192);
  }
  CHECK(eventually([&] {
    ffs_cqe out[1];
    uint32_t events;
    (void)b.ring->wait(out, 1, 0, 0, &events);
    const auto held = a.hold();
    return a.regions.size() >= 2 && static_cast<size_t>(a.unregistered) == a.regions.size() - 1;
  }));
}

TEST_CASE("a slice that can't be taken back stays in quarantine until the server has answered") {
  net::Connection* silent = nullptr;
  std::vector<uint64_t> ids;
  std::atomic<bool> mute_now{false};
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (!mute_now) return well(p, c, r);
    silent = &c;
    ids.push_back(r.id);
  });
  Bench b({&a}, TransportChoice::kLocal);
  // A memfd that is sealed against writing later on: its pages can't be punched out.
  Fd fd(::memfd_create("quarantine", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(fd.get(), 1 << 20) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  IovOptions options;
  options.fd = fd.get();
  auto iov = std::move(*Iov::create(options));
  REQUIRE(iov->shareable());
  IovRegistry::add(iov.get());
  ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096);
  e.iov = reinterpret_cast<ffs_iov*>(iov.get());
  for (int i = 0; i < 2; i++) {  // the first registers the region
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    REQUIRE(b.complete(1).size() == 1);
  }
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0);
  mute_now = true;
  const auto asked = [&] { return a.hold(), ids.size(); };
  size_t rounds = 0;
  std::vector<ffs_cqe> done;
  // If its try timeout and its deadline are found to be over together, the deadline ends it.
  for (int timeout_ms = 300; timeout_ms < 20000 && (rounds == 0 || done[0].result == -ETIMEDOUT);
       timeout_ms *= 2) {
    e.timeout_ms = static_cast<uint32_t>(timeout_ms);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    CHECK(b.complete(1, 3 * timeout_ms).empty());  // long over its deadline, but the server may write still
    CHECK(iov->used());
    rounds++;
    REQUIRE(eventually([&] { return asked() >= rounds; }));
    REQUIRE(asked() == rounds);  // and it isn't asked anew, nor anybody else
    a.hold(), Peer::fail_read(*silent, ids.back(), ENOENT, Detail::kNone);
    done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK_FALSE(iov->used());
  }
  CHECK(done[0].result == -ENOENT);
  // The same with a cancellation.
  e.timeout_ms = 60000;
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  CHECK(b.run_until([&] { return asked() > rounds; }).empty());
  REQUIRE(asked() == rounds + 1);
  CHECK(b.ring->cancel(1));
  CHECK(b.complete(1, 300).empty());
  a.hold(), Peer::fail_read(*silent, ids.back(), ENOENT, Detail::kNone);
  done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -ECANCELED);
  CHECK(IovRegistry::remove(iov.get()).ok());
}

TEST_CASE("a read into a region is answered in place, with patches put where they belong") {
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (r.read.bulk.kind != static_cast<uint8_t>(wire::BulkKind::kRegion)) return well(p, c, r);
    uint8_t* to = p.memory(r.read.bulk);
    std::memset(to, 7, r.read.length);
    wire::ReadReply reply{};
    reply.bytes = r.read.length;
    reply.chunk_length = 16 << 20;
    reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRegion);
    std::vector<wire::ReadPatch> patches{{0, 3}};
    if (r.read.offset != 0) patches.push_back({r.read.length - 2, 2});
    reply.patch_count = static_cast<uint32_t>(patches.size());
    const std::vector<uint8_t> payload{1, 2, 3, 4, 5};
    c.queue.push(
        Type::kReadReply, r.id, reply,
        net::Bytes(reinterpret_cast<uint8_t*>(patches.data()), patches.size() * sizeof(wire::ReadPatch)),
        net::Bytes(payload.data(), patches.size() == 1 ? 3 : 5));
    Peer::flush(c);
  });
  Bench b({&a}, TransportChoice::kAuto);
  for (uint32_t offset : {0u, 0u, 4096u}) {  // the first registers
    const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 4096, 4096, offset);
    std::memset(b.iov->data(), 0, 3 * 4096);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 4096);
  }
  const uint8_t* at = b.iov->data() + 4096;
  CHECK((at[0] == 1 && at[1] == 2 && at[2] == 3 && at[3] == 7));
  CHECK((at[4093] == 7 && at[4094] == 4 && at[4095] == 5));
  CHECK((at[-1] == 0 && at[4096] == 0));
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
  for (auto transport : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    peer.hold(), seen.clear();
    Bench b({&peer}, transport);
    const ffs_sqe e = b.sqe(FFS_OP_WRITE, 1, 100000);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 100000);
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
  for (const uint8_t op : {FFS_OP_CREATE, FFS_OP_TOUCH}) {
    for (uint32_t detail = 0; detail <= static_cast<uint32_t>(Detail::kReissue); detail++) {
      CAPTURE(int{op});
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
        ffs_sqe e = b.sqe(op, i + 1, op == FFS_OP_CREATE ? 4096 : 0, i * 4096);
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
        CHECK(one.result == (op == FFS_OP_CREATE ? 4096 : 0));
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

TEST_CASE("an expired capability waits to be renewed; a forgotten one is opened anew once") {
  std::atomic<bool> renewed{false};
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    if (!renewed) return Peer::fail_read(c, r.id, EACCES, Detail::kExpired);
    static const std::vector<uint8_t> data(512, 1);
    Peer::answer_read(c, r.id, data, 512);
  });
  Bench b({&peer});
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 512);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  uint32_t events = 0;
  ffs_cqe out[4];
  REQUIRE(b.ring->wait(out, 4, 1, 5000, &events) == 0);
  CHECK((events & FFS_WAIT_NEEDS_CAPABILITY) != 0);
  renewed = true;
  const std::vector<uint8_t> bytes(sizeof(wire::Capability), 2);
  CHECK(b.client->capabilities().renew(b.capability, bytes.data(), 88).ok());
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == 512);
  CHECK(peer.capabilities == 2);
}

TEST_CASE("no capability twice is EACCES") {
  Peer peer([&](Peer&, net::Connection& c, const Peer::Request& r) {
    Peer::fail_read(c, r.id, EACCES, Detail::kNoCapability);
  });
  Bench b({&peer});
  const ffs_sqe e = b.sqe(FFS_OP_READ, 1, 512);
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  CHECK(done[0].result == -EACCES);
  CHECK(peer.requests == 2);
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
