// A ring and a queue pair that its server loses without a word (docs/rdma.md, When it breaks).
#include <doctest/doctest.h>

#include "client_answers.h"
#include "net/rdma/verbs_pair.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

namespace {

// A server that goes over to RDMA on its first connection and has its queue pair end at once: what is sent to
// it gets no acknowledgement any more. Its socket stays open and says nothing. Later connections have no
// RDMA.
struct Loses {
  explicit Loses(net::rdma::Adapter& a) : adapter(a) {}
  void operator()(Peer& p, net::Connection& c, const Peer::Request& r) {
    if (r.type != Type::kRdmaOpen) {
      after_break++;
      return well(p, c, r);
    }
    wire::RdmaOpenReply reply{};
    reply.status = ENODEV;
    if (opened++ == 0) {
      auto events = net::rdma::Events::create(adapter);
      REQUIRE(events.ok());
      auto pair = net::rdma::VerbsPair::create(adapter, **events, this, {}, net::rdma::Access::kHere);
      REQUIRE(pair.ok());
      REQUIRE((*pair)->connect(r.rdma.end, 0).ok());
      reply.status = 0;
      reply.end = (*pair)->end();
    }
    c.queue.push(Type::kRdmaOpenReply, r.id, reply);
    (void)Peer::flush(c);
  }
  net::rdma::Adapter& adapter;
  int opened = 0;
  std::atomic<int> after_break{0};
};

}  // namespace

TEST_CASE("a broken queue pair is given up soon, though its socket says nothing and a try may take minutes") {
  auto adapters = net::rdma::Adapters::get("");
  if (!adapters.ok()) {
    MESSAGE("not over rdma: ", std::string(adapters.error().what));
    return;
  }
  for (const uint8_t op : {FFS_OP_READ, FFS_OP_WRITE}) {
    INFO("op ", static_cast<int>(op));
    Loses loses(*(*adapters)->all().front());
    Peer peer(std::ref(loses));
    peer.hello.features = wire::kFeatureRdma;
    Bench b({&peer}, TransportChoice::kAuto, 64, 1 << 20, [](ClientOptions& o) {
      o.connect_timeout_ms = 20000;
      o.try_timeout_ms = 120000;
      o.request_timeout_ms = 240000;
    });
    b.apart = true;
    b.route(2, {&peer});
    const ffs_sqe e = b.sqe(op, 1, 8192, 4096);
    REQUIRE(b.ring->prepare(&e, 1).taken == 1);
    const auto done = b.complete(1, 30000);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 8192);
    const ffs_ring_stats stats = b.ring->stats();
    CHECK(stats.rdma_breaks == 1);
    CHECK(stats.connects == 2);
    CHECK(stats.tcp_links == 1);  // that path isn't trusted for a while
    CHECK(loses.opened == 1);
    CHECK(loses.after_break == 1);
  }
}
