// What goes wrong on the way of data, over each transport: nobody but the one who was to blame is hurt, and a
// request that is over touches its buffer never again.
#include <csignal>

#include "test/transport_world.h"

using namespace ffs;
using namespace ffs::transport::testing;

namespace {

struct Reads {
  explicit Reads(World& w) : world(w), iov(4u << 20) {
    const auto data = pattern(1 << 20, 3);
    std::memcpy(iov.data(), data.data(), data.size());
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);
    content = data;
  }
  std::vector<ffs_sqe> many(uint32_t count, uint64_t at = 1 << 20) {
    std::vector<ffs_sqe> out;
    for (uint32_t i = 0; i < count; i++) {
      out.push_back(world.sqe(FFS_OP_READ, 1, i % 16 * 65536, 65536, *iov, at + i % 16 * 65536));
    }
    return out;
  }
  World& world;
  OpenIov iov;
  std::vector<uint8_t> content;
};

}  // namespace

// A client that names memory which it hasn't registered, or more of it than there is.
TEST_CASE("a wrong key, address or length ends in an error for its request, and others go on") {
  for (const net::Transport transport : transports()) {
    INFO("over ", name_of(static_cast<TransportChoice>(transport)));
    Cluster cluster({});
    TestClient good(*cluster.node(0).shard, transport, kClient + 1);
    good.ready();
    good.base.client = kClient + 1;
    const auto data = pattern(1 << 20, 9);
    REQUIRE(good.write(1, 0, data).code() == 0);
    const auto breaks_before = cluster.node(0).shard->metrics().rdma_breaks;
    int faults = 0;
    for (const bool update : {false, true}) {
      for (const int fault : {0, 1}) {  // a key that nobody has; an address beyond the end
        TestClient bad(*cluster.node(0).shard, transport);
        bad.ready();
        const uint64_t at = fault == 1 ? TestClient::kRegionBytes - 4096 : 4096;
        if (fault == 0) bad.name_region(bad.region_id() + 0x7700);
        const auto kind =  // TCP has no memory to name: who names some all the same, is told so
            bad.lends() ? bad.lent_kind() : (fault == 0 ? wire::BulkKind::kRegion : wire::BulkKind::kRdma);
        uint64_t id = 0;
        if (update) {
          wire::Update wrong = bad.update(wire::UpdateKind::kWrite, 2, 0, 65536);
          const auto bytes = pattern(65536, 4);
          std::vector<uint32_t> crcs(1);
          net::piece_crcs(0, bytes, crcs.data());
          wrong.bulk = {};
          wrong.bulk.length = 65536;
          wrong.bulk.kind = static_cast<uint8_t>(kind);
          wrong.bulk.region = bad.region_id();
          wrong.bulk.address = at;
          id = bad.send(Type::kUpdate, wrong,
                        net::Bytes(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4));
        } else {
          id = bad.send_read(1, 0, 65536, kind, at);
        }
        INFO((update ? 1 : 0), " (update), fault ", fault);
        const Answer answer = transport == kRdma ? bad.wait_beside(id) : bad.wait(id);
        const bool contradicts = transport == net::Transport::kTcp && kind == wire::BulkKind::kRdma;
        CHECK(answer.code() == (contradicts ? EINVAL : ENXIO));
        CHECK(answer.detail() == (contradicts ? Detail::kBadFrame : Detail::kNoRegion));
        faults++;
        // Another connection was never touched.
        CHECK(good.read(1, 0, 1 << 20).payload == data);
        CHECK(good.read(2, 0, 65536).code() == ENOENT);
      }
    }
    const auto metrics = cluster.node(0).shard->metrics();
    if (transport == kRdma) CHECK(metrics.rdma_breaks - breaks_before == static_cast<uint64_t>(faults));
    CHECK(metrics.ops_waiting == 0);
  }
}

TEST_CASE("a server that dies in the middle of transfers: requests end, and go on when it is back") {
  for (const TransportChoice choice : choices()) {
    INFO("over ", name_of(choice));
    client::ClientOptions options;
    options.request_timeout_ms = 60000;
    options.try_timeout_ms = 1000;
    World w(choice, {}, options);
    Reads reads(w);
    const auto entries = reads.many(256);
    const auto prepared = w.ring->prepare(entries.data(), 256);
    REQUIRE(prepared.taken == 256);
    w.ring->submit();
    w.cluster.stop(0);
    w.cluster.start(w.cluster.node(0));
    w.cluster.lease(Cluster::kLongLeaseMs);
    w.cluster.form();
    w.route();
    for (auto& [id, done] : w.collect(256)) REQUIRE(done.result == 65536);
    CHECK(std::memcmp(reads.iov.data() + (1 << 20), reads.content.data(), 1 << 20) == 0);
  }
}

TEST_CASE("a client that dies in the middle of transfers leaves nothing at the server, and others go on") {
  for (const net::Transport transport : transports()) {
    INFO("over ", name_of(static_cast<TransportChoice>(transport)));
    Cluster cluster({});
    TestClient good(*cluster.node(0).shard, transport, kClient + 1);
    good.ready();
    const auto data = pattern(1 << 20, 9);
    REQUIRE(good.write(1, 0, data).code() == 0);
    for (uint32_t round = 0; round < 4; round++) {
      TestClient dies(*cluster.node(0).shard, transport, kClient + 2 + round);
      dies.ready();
      uint64_t first = 0;
      for (uint32_t i = 0; i < 8; i++) {
        const bool update = i % 2 == round % 2;
        const uint64_t id = update
                                ? dies.send_update(dies.update(wire::UpdateKind::kWrite, 10 + i, 0, 1 << 20),
                                                   data, !dies.lends(), uint64_t{i} << 20)
                                : dies.send_read(1, 0, 1 << 20, !dies.lends(), uint64_t{i} << 20);
        if (first == 0) first = id;
      }
      dies.flush();
      if (round >= 2) (void)dies.wait(first);  // the others are under way
    }
    CHECK(good.read(1, 0, 1 << 20).payload == data);
    const auto quiet = [&] {
      const auto metrics = cluster.node(0).shard->metrics();
      return metrics.sessions == 1 && metrics.pool_used_bytes == 0 && metrics.ops_waiting == 0;
    };
    for (int i = 0; i < 3000 && !quiet(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(quiet());
    CHECK(good.read(1, 0, 1 << 20).payload == data);
  }
}

// I11: after the library has said that a request is over its slice is the caller's, whatever a server does
// late.
TEST_CASE("a request that was cancelled or timed out never touches its buffer again") {
  for (const TransportChoice choice : choices()) {
    INFO("over ", name_of(choice));
    World w(choice);
    Reads reads(w);
    for (int round = 0; round < 8; round++) {
      const bool cancels = round % 2 == 0;
      auto entries = reads.many(16);
      for (ffs_sqe& entry : entries) entry.timeout_ms = cancels ? 0 : 1;
      REQUIRE(w.ring->prepare(entries.data(), 16).taken == 16);
      w.ring->submit();
      if (cancels) {
        for (const ffs_sqe& entry : entries) (void)w.ring->cancel(entry.userdata);
      }
      const auto done = w.collect(16);
      // The buffers are used for something else at once.
      std::memset(reads.iov.data() + (1 << 20), 0x5A, 1 << 20);
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      const uint8_t* slices = reads.iov.data() + (1 << 20);
      const bool untouched =
          std::all_of(slices, slices + (1 << 20), [](uint8_t byte) { return byte == 0x5A; });
      REQUIRE(untouched);
      for (const auto& [id, one] : done) {
        CHECK((one.result == (cancels ? -ECANCELED : -ETIMEDOUT) || one.result == 65536));
      }
    }
    // And the ring goes on.
    for (auto& [id, done] : w.run(reads.many(16))) REQUIRE(done.result == 65536);
    CHECK(std::memcmp(reads.iov.data() + (1 << 20), reads.content.data(), 1 << 20) == 0);
  }
}
