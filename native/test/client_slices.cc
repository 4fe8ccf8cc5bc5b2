// Slices that servers write into: they are taken back, or wait in quarantine (docs/ring.md, Buffers).
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

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
