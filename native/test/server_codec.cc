// Chunks with a codec: what is stored, sent and copied is as long as it was sent, what clients are told of is
// the logical length.
#include <cerrno>
#include <thread>

#include "server/wire_craq.h"
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using craq::MemberState;
using wire::UpdateKind;

namespace {

constexpr uint64_t kIndex = 7;
constexpr uint32_t kStored = 70000;  // more than a granule
constexpr uint32_t kLogical = 200000;

void ready(TestClient& client, const Cluster& cluster, uint32_t node) {
  client.ready();
  client.base.target = Cluster::target(node);
  client.base.chain_counter = cluster.version().counter;
}

wire::Update encoded(TestClient& client, UpdateKind kind, uint32_t stored, uint32_t logical) {
  wire::Update update = client.update(kind, kIndex, 0, stored);
  update.codec = 1;
  update.logical_length = logical;
  return update;
}

// By all members: the bytes as they were sent, and their lengths.
void check_read(Cluster& cluster, uint32_t nodes, const std::vector<uint8_t>& data, uint32_t logical) {
  for (uint32_t node = 0; node < nodes; node++) {
    for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
      INFO("node ", node);
      TestClient client(*cluster.node(node).shard, transport);
      ready(client, cluster, node);
      const Answer got = client.read(kIndex, 0, 1 << 20);
      REQUIRE(got.code() == 0);
      CHECK(got.payload == data);
      CHECK(got.read.codec == 1);
      CHECK(got.read.chunk_length == data.size());
      CHECK(got.read.logical_length == logical);
    }
  }
}

}  // namespace

TEST_CASE("codec: an encoded chunk is replaced or removed as a whole, anything else is EINVAL") {
  Cluster::Options options;
  options.nodes = 2;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  ready(head, cluster, 0);
  const auto data = pattern(kStored, 1), part = pattern(100, 2);
  const auto refused = [&](const wire::Update& update, const std::vector<uint8_t>& bytes) {
    const Answer answer = head.wait(head.send_update(update, bytes, true));
    CHECK(answer.code() == EINVAL);
    for (uint32_t node = 0; node < 2; node++) CHECK(cluster.report(node).status.serving);
  };
  refused(encoded(head, UpdateKind::kWrite, 100, 200), part);  // none begins so
  REQUIRE(head.wait(head.send_update(encoded(head, UpdateKind::kReplace, kStored, kLogical), data, true))
              .code() == 0);
  refused(head.update(UpdateKind::kWrite, kIndex, 100, 100), part);
  refused(head.update(UpdateKind::kWrite, kIndex, 0, kStored), data);
  refused(head.update(UpdateKind::kTruncate, kIndex, 0, 100), {});
  refused(encoded(head, UpdateKind::kWrite, 100, 200), part);
  refused(encoded(head, UpdateKind::kTruncate, 100, 100), {});
  refused(encoded(head, UpdateKind::kReplace, 100, kMaxChunkBytes + 1), part);
  ShardMetrics metrics;
  REQUIRE(cluster.node(0).server->metrics(0, &metrics));
  CHECK(metrics.refusals == 0);  // the head has judged them: none was numbered, and none came to a disk
  check_read(cluster, 2, data, kLogical);

  const auto plain = pattern(500, 3);
  REQUIRE(
      head.wait(head.send_update(head.update(UpdateKind::kReplace, kIndex, 0, 500), plain, true)).code() ==
      0);
  REQUIRE(head.write(kIndex, 100, part).code() == 0);
  REQUIRE(head.wait(head.send_update(encoded(head, UpdateKind::kReplace, kStored, kLogical), data, true))
              .code() == 0);
  check_read(cluster, 2, data, kLogical);
  REQUIRE(head.change(UpdateKind::kRemove, kIndex).code() == 0);
  REQUIRE(head.write(kIndex, 0, part).code() == 0);
}

TEST_CASE("codec: clients are told the logical length, before and after a restart") {
  Cluster::Options options;
  options.nodes = 2;
  Cluster cluster(options);
  for (int round = 0; round < 2; round++) {
    INFO("round ", round);
    if (round == 1) cluster.restart();
    TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
    ready(head, cluster, 0);
    const auto data = pattern(kStored, 1);
    if (round == 0) {
      const Answer put =
          head.wait(head.send_update(encoded(head, UpdateKind::kReplace, kStored, kLogical), data, true));
      REQUIRE(put.code() == 0);
      CHECK(put.update.chunk_length == kLogical);
    }
    const Answer again =
        head.wait(head.send_update(encoded(head, UpdateKind::kCreate, kStored, kLogical), data, true));
    CHECK(again.code() == EEXIST);
    CHECK(again.update.value == kLogical);
    CHECK(again.update.chunk_length == kLogical);
    wire::LastChunk last{};
    last.context = head.context();
    last.space = kSpace;
    CHECK(head.ask(Type::kLastChunk, last).last.length == kLogical);
    wire::Exists exists{};
    exists.context = head.context();
    exists.count = 1;
    wire::ExistsKey key{};
    const ChunkKey of = ChunkKey::of_file(kSpace, kIndex);
    std::memcpy(key.key, of.bytes.data(), sizeof key.key);
    const Answer there =
        head.ask(Type::kExists, exists, net::Bytes(reinterpret_cast<const uint8_t*>(&key), sizeof key));
    REQUIRE(there.var.size() == sizeof(wire::ExistsEntry));
    wire::ExistsEntry entry;
    std::memcpy(&entry, there.var.data(), sizeof entry);
    CHECK(entry.state == 1);
    CHECK(entry.length == kLogical);
    check_read(cluster, 2, data, kLogical);
  }
}

TEST_CASE("codec: what is pending at a restart goes down the chain as it is stored") {
  for (const uint32_t stored : {kStored, 0u}) {
    INFO("stored ", stored);
    Cluster::Options options;
    options.nodes = 2;
    options.failure_timeout_ms = 1000;
    Cluster cluster(options);
    const auto data = pattern(stored, 1);
    {
      TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
      ready(head, cluster, 0);
      cluster.stop(1);
      head.send_update(encoded(head, UpdateKind::kReplace, stored, kLogical), data, true);
      head.flush();
      cluster.wait_for(0, [](const TargetReport& report) { return report.status.pendings == 1; });
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // until it is durable
    }
    cluster.stop(0);
    cluster.start(cluster.node(0));
    cluster.start(cluster.node(1));
    cluster.lease(Cluster::kLongLeaseMs);
    cluster.form();
    cluster.wait_for(0, [](const TargetReport& report) { return report.status.pendings == 0; });
    check_read(cluster, 2, data, kLogical);
  }
}

TEST_CASE("codec: a member is filled with encoded chunks, an empty one too") {
  for (const uint32_t stored : {kStored, 0u}) {
    INFO("stored ", stored);
    Cluster::Options options;
    options.nodes = 2;
    options.members = 1;
    Cluster cluster(options);
    const auto data = pattern(stored, 1);
    TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
    ready(head, cluster, 0);
    REQUIRE(head.wait(head.send_update(encoded(head, UpdateKind::kReplace, stored, kLogical), data, true))
                .code() == 0);
    cluster.change({{0}, {1, MemberState::syncing}});
    cluster.wait_for(0, [](const TargetReport& report) { return report.status.sync_done; });
    cluster.change({{0}, {1}});
    check_read(cluster, 2, data, kLogical);
  }
}

TEST_CASE("codec: what a store has against an update isn't its device's failure") {
  CHECK(outcome_of_stage(0) == craq::Outcome::ok);
  CHECK(outcome_of_stage(EINVAL) == craq::Outcome::invalid);
  for (const int error : {ESTALE, EEXIST, EBUSY})
    CHECK(outcome_of_stage(error) == craq::Outcome::fell_with_base);
  CHECK(outcome_of_stage(ENOSPC) == craq::Outcome::no_space);
  CHECK(outcome_of_stage(EBADMSG) == craq::Outcome::corrupt);
  CHECK(outcome_of_stage(EIO) == craq::Outcome::io_error);
}
