// Background work beside clients, in real servers: it is held back, it goes on, and all of it is counted.
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using craq::MemberState;

namespace {

constexpr uint32_t kChunkBytes = 1u << 20;

uint64_t bytes_of(const ShardMetrics& metrics, io::OpClass op_class) {
  return metrics.background_bytes[static_cast<size_t>(op_class)];
}

void client_of(TestClient& client, Cluster& cluster, uint32_t node) {
  client.base.target = Cluster::target(node);
  client.base.chain_counter = cluster.version().counter;
  client.ready();
}

// A chain of nodes 0 and 1 with `count` chunks, that node 2 joins.
struct World {
  std::unique_ptr<Cluster> cluster;
  std::vector<std::vector<uint8_t>> chunks;

  World(io::Backend backend, uint64_t count) {
    Cluster::Options options;
    options.nodes = 3;
    options.members = 2;
    options.backend = backend;
    options.sync_share_percent = 20;
    cluster = std::make_unique<Cluster>(options);
    TestClient head(*cluster->node(0).shard, net::Transport::kTcp);
    client_of(head, *cluster, 0);
    for (uint64_t i = 0; i < count; i++) {
      chunks.push_back(pattern(kChunkBytes - static_cast<uint32_t>(i), static_cast<uint32_t>(i)));
      REQUIRE(head.write(i, 0, chunks.back()).code() == 0);
    }
  }
  ShardMetrics metrics(uint32_t node) { return cluster->node(node).shard->metrics(); }
  bool filled() {
    const auto status = cluster->report(1).status;
    return status.sync_done && status.sync_target == TargetId(Cluster::target(2));
  }
};

}  // namespace

TEST_CASE("isolation: a member is filled beside a client's reads, held back, and comes to its end") {
  for (const io::Backend backend : {io::Backend::uring, io::Backend::pread}) {
    World w(backend, 6);
    TestClient reader(*w.cluster->node(1).shard, net::Transport::kLocal);
    client_of(reader, *w.cluster, 1);
    for (int i = 0; i < 50; i++) REQUIRE(reader.read(0, 0, 4096).code() == 0);
    w.cluster->propose({{0}, {1}, {2, MemberState::syncing}});
    w.cluster->record();
    uint64_t reads = 0;
    for (; !w.filled(); reads++) {
      reader.base.chain_counter = w.cluster->counter();
      const Answer answer = reader.read(reads % 6, 4096 * static_cast<uint32_t>(reads % 100), 4096);
      REQUIRE((answer.code() == 0 || answer.code() == EAGAIN));
    }
    const ShardMetrics source = w.metrics(1), target = w.metrics(2);
    CHECK(reads > 0);
    CHECK(source.background_held_us > 0);
    CHECK(source.longest_read_us > 0);
    CHECK(bytes_of(source, io::OpClass::recovery) >= 5 * kChunkBytes);
    CHECK(bytes_of(target, io::OpClass::recovery) >= 5 * kChunkBytes);
    CHECK(bytes_of(w.metrics(0), io::OpClass::recovery) == 0);
    CHECK(bytes_of(source, io::OpClass::client) == 0);
    w.cluster->change({{0}, {1}, {2}});
    TestClient last(*w.cluster->node(2).shard, net::Transport::kTcp);
    client_of(last, *w.cluster, 2);
    for (uint64_t i = 0; i < w.chunks.size(); i++) {
      const Answer answer = last.read(i, 0, static_cast<uint32_t>(w.chunks[i].size()));
      CHECK(answer.code() == 0);
      CHECK(answer.payload == w.chunks[i]);
    }
  }
}

TEST_CASE("isolation: a server stops while pieces wait for their share") {
  World w(io::Backend::uring, 8);
  TestClient reader(*w.cluster->node(1).shard, net::Transport::kLocal);
  client_of(reader, *w.cluster, 1);
  REQUIRE(reader.read(0, 0, 4096).code() == 0);
  w.cluster->propose({{0}, {1}, {2, MemberState::syncing}});
  w.cluster->record();
  while (bytes_of(w.metrics(1), io::OpClass::recovery) == 0) {
    reader.base.chain_counter = w.cluster->counter();
    (void)reader.read(0, 0, 4096);
  }
  w.cluster->stop(1);
  w.cluster->stop(2);
}

TEST_CASE("isolation: the scrubber's bytes are counted as its own, and never fewer") {
  Cluster::Options options;
  options.nodes = 1;
  options.scrub_bytes_per_s = 400'000'000;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(client, cluster, 0);
  for (uint64_t i = 0; i < 4; i++)
    REQUIRE(client.write(i, 0, pattern(300'000, static_cast<uint32_t>(i))).code() == 0);
  cluster.restart();  // a pass begins at once then
  uint64_t before = 0;
  for (int i = 0; i < 2000 && before < 1'200'000; i++) {
    const ShardMetrics now = cluster.node(0).shard->metrics();
    REQUIRE(now.scrubbed_bytes >= before);
    before = now.scrubbed_bytes;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const ShardMetrics end = cluster.node(0).shard->metrics();
  CHECK(end.scrubbed_bytes >= 1'200'000);
  CHECK(bytes_of(end, io::OpClass::scrub) >= end.scrubbed_bytes);
  CHECK(bytes_of(end, io::OpClass::recovery) == 0);
  CHECK(end.capacity.chunks == 4);
  CHECK(end.store.memory_bytes > 0);
}
