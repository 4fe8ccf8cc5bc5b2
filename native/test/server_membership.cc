// Servers whose chain changes under load: members that go, come, are filled from empty and take over; leases;
// damage at rest. The manager is played by the harness.
#include <fcntl.h>

#include <thread>

#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using craq::MemberState;
using wire::Detail;
using wire::UpdateKind;

namespace {

// Writes to a few chunks until it is stopped, from a thread of its own, at whoever is head. What was
// acknowledged last is what must be there at the end.
class Writer {
 public:
  Writer(Cluster& cluster, uint64_t first, uint64_t count)
      : cluster_(cluster), first_(first), contents_(count), thread_([this] { run(); }) {}
  ~Writer() { stop(); }
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }
  uint64_t writes() const { return writes_; }
  const std::vector<uint8_t>& content(uint64_t i) const { return contents_[i]; }
  uint64_t index(uint64_t i) const { return first_ + i; }
  uint64_t count() const { return contents_.size(); }

 private:
  void run() {
    TestClient client(*cluster_.node(0).shard, net::Transport::kTcp, kClient + 1);
    client.ready();
    for (uint32_t n = 0; !stopping_; n++) {
      const uint64_t i = n % contents_.size();
      std::vector<uint8_t> data = pattern(20000 + n % 50000, n);
      wire::Update update = client.update(n % 5 == 4 ? UpdateKind::kRemove : UpdateKind::kReplace, first_ + i,
                                          0, static_cast<uint32_t>(n % 5 == 4 ? 0 : data.size()));
      if (n % 5 == 4) data.clear();
      update.context.channel = 100 + static_cast<uint32_t>(i);
      while (true) {
        client.base.chain_counter = update.context.chain_counter = cluster_.counter();
        const Answer answer = client.wait(client.send_update(update, data, true));
        if (answer.code() == 0 || (data.empty() && answer.code() == ENOENT)) break;
        if (answer.code() != EAGAIN) FAIL("a write ends with ", answer.code());
        if (stopping_) return unknown(i);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      contents_[i] = std::move(data);
      writes_++;
    }
  }
  void unknown(uint64_t i) { contents_[i] = {0xFF}; }

  Cluster& cluster_;
  uint64_t first_;
  std::vector<std::vector<uint8_t>> contents_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> writes_{0};
  std::thread thread_;
};

void client_of(TestClient& client, Cluster& cluster, uint32_t node) {
  client.ready();
  client.base.target = Cluster::target(node);
  client.base.chain_counter = cluster.version().counter;
}

// Reads until the replica answers (it may wait for a lease after a change).
Answer read_when_serving(TestClient& client, uint64_t index, uint32_t length) {
  for (int i = 0; i < 2000; i++) {
    Answer answer = client.read(index, 0, length);
    if (answer.code() != EAGAIN) return answer;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  FAIL("never answered");
  return {};
}

void check_chunk(TestClient& client, uint64_t index, const std::vector<uint8_t>& content) {
  const Answer answer = read_when_serving(client, index, 8 << 20);
  if (content.empty()) {
    CHECK(answer.code() == ENOENT);
  } else {
    REQUIRE(answer.code() == 0);
    CHECK_MESSAGE(answer.payload == content, "chunk ", index, " has ", answer.payload.size(),
                  " bytes of version ", answer.read.version.counter, ".", answer.read.version.update,
                  ", not ", content.size());
  }
}

}  // namespace

TEST_CASE("every member has a pool for what may still come down to it, the head too") {
  // An old predecessor of a head sends on in the version before; there was no pool for that.
  for (uint32_t serving = 1; serving <= kMaxReplicas; serving++) {
    craq::ChainConfig config;
    config.member_count = serving;
    for (uint32_t i = 0; i < serving; i++) config.members[i] = {TargetId{10 + i}, MemberState::serving, 1};
    for (uint32_t i = 0; i < serving; i++) {
      const uint32_t behind = members_behind(config, TargetId{10 + i});
      CHECK(behind + 1 < std::max(serving, 2u));
      if (i > 0) CHECK(behind == serving - 1 - i);
    }
    CHECK(members_behind(config, TargetId{99}) == 0);
  }
}

TEST_CASE("a member is filled from empty while writes flow, and takes part") {
  Cluster::Options options;
  options.nodes = 3;
  options.members = 2;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  std::vector<std::vector<uint8_t>> kept;
  for (uint64_t i = 0; i < 60; i++) {
    kept.push_back(pattern(1 + i * 7919, static_cast<uint32_t>(i)));
    REQUIRE(head.write(1000 + i, 0, kept.back()).code() == 0);
  }
  kept.push_back(pattern(5 << 20, 99));
  REQUIRE(head.write(1060, 0, kept.back()).code() == 0);
  Writer writer(cluster, 1, 8);
  cluster.change({{0}, {1}, {2, MemberState::syncing}});
  cluster.wait_for(1, [&](const TargetReport& report) {
    return report.status.sync_done && report.status.sync_target == TargetId(Cluster::target(2));
  });
  CHECK(cluster.report(2).status.state == MemberState::syncing);
  const uint64_t before = writer.writes();
  while (writer.writes() < before + 50) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  cluster.change({{0}, {1}, {2}});
  const uint64_t after = writer.writes();
  while (writer.writes() < after + 50) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  writer.stop();
  for (uint32_t node = 0; node < 3; node++) {
    TestClient reader(*cluster.node(node).shard, net::Transport::kTcp);
    client_of(reader, cluster, node);
    for (uint64_t i = 0; i < kept.size(); i++) check_chunk(reader, 1000 + i, kept[i]);
    for (uint64_t i = 0; i < writer.count(); i++) {
      if (writer.content(i) != std::vector<uint8_t>{0xFF}) {
        check_chunk(reader, writer.index(i), writer.content(i));
      }
    }
  }
}

TEST_CASE("a target that was filled leads its chain alone") {
  Cluster::Options options;
  options.nodes = 2;
  options.members = 1;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  const auto data = pattern(300000, 5);
  for (uint64_t i = 0; i < 20; i++) REQUIRE(head.write(i, 0, data).code() == 0);
  cluster.change({{0}, {1, MemberState::syncing}});
  cluster.wait_for(0, [](const TargetReport& report) { return report.status.sync_done; });
  cluster.change({{0}, {1}});
  cluster.stop(0);
  cluster.change({{1}, {0, MemberState::offline}});
  TestClient heir(*cluster.node(1).shard, net::Transport::kTcp);
  client_of(heir, cluster, 1);
  for (uint64_t i = 0; i < 20; i++) check_chunk(heir, i, data);
  CHECK(heir.write(5, 0, pattern(100, 6)).code() == 0);
}

TEST_CASE("a write that waits for a tail that is gone ends when the chain goes on without it") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  REQUIRE(head.write(1, 0, pattern(5000, 1)).code() == 0);
  cluster.stop(2);
  const auto data = pattern(5000, 2);
  const uint64_t waiting = head.send_update(head.update(UpdateKind::kWrite, 1, 0, 5000), data, true);
  head.flush();
  cluster.change({{0}, {1}, {2, MemberState::offline}});
  CHECK(head.wait(waiting).code() == 0);
  for (uint32_t node = 0; node < 2; node++) {
    TestClient reader(*cluster.node(node).shard, net::Transport::kTcp);
    client_of(reader, cluster, node);
    check_chunk(reader, 1, data);
  }
}

TEST_CASE("without the manager's lease members serve by each other's, and alone they don't") {
  Cluster::Options options;
  options.nodes = 2;
  options.failure_timeout_ms = 1000;
  options.lease_ms = 1;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  const auto data = pattern(5000, 1);
  for (uint32_t node = 0; node < 2; node++) {
    cluster.wait_for(node, [](const TargetReport& report) { return report.status.leased; });
  }
  CHECK(head.write(1, 0, data).code() == 0);
  check_chunk(head, 1, data);
  cluster.stop(1);
  cluster.wait_for(0, [](const TargetReport& report) { return !report.status.leased; });
  const Answer read = head.read(1, 0, 5000);
  CHECK(read.code() == EAGAIN);
  CHECK(read.detail() == Detail::kNotServing);
  const Answer write = head.write(1, 0, data);
  CHECK(write.code() == EAGAIN);
  CHECK(write.detail() == Detail::kNotServing);
  CHECK(head.wait(head.send(Type::kLastChunk,
                            [&] {
                              wire::LastChunk last{};
                              last.context = head.context();
                              last.space = kSpace;
                              return last;
                            }()))
            .code() == EAGAIN);
  cluster.lease(Cluster::kLongLeaseMs);  // the manager's alone will do
  CHECK(head.read(1, 0, 5000).payload == data);
}

TEST_CASE("a target that is released drops what it holds and can join another chain") {
  Cluster::Options options;
  options.nodes = 2;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  for (uint64_t i = 0; i < 20; i++) REQUIRE(head.write(i, 0, pattern(90000, 3)).code() == 0);
  REQUIRE(cluster.report(1).usage.chunks == 20);
  cluster.change({{0}});
  CHECK(cluster.report(1).chain == ChainId(1));
  CHECK_FALSE(cluster.report(1).status.serving);
  Server& server = *cluster.node(1).server;
  CHECK(server.release_target(TargetId(999)) == ENOENT);
  CHECK(server.release_target(TargetId(Cluster::target(1))) == 0);
  CHECK(server.release_target(TargetId(Cluster::target(1))) == 0);  // again changes nothing
  cluster.wait_for(1, [](const TargetReport& report) { return report.chain == ChainId(); });
  CHECK(cluster.report(1).usage.chunks == 0);
  CHECK(cluster.report(1).persisted == ChainVersion{});
  uint64_t news;
  while (::read(server.news_fd(), &news, sizeof news) == sizeof news) {
  }
  CHECK(server.release_target(TargetId(Cluster::target(1))) == 0);  // and again is no news
  pollfd any{server.news_fd(), POLLIN, 0};
  CHECK(::poll(&any, 1, 300) == 0);
  head.base.chain_counter = cluster.version().counter;
  REQUIRE(head.write(3, 0, pattern(100, 4)).code() == 0);

  Routing other;
  other.epoch = 1000;
  ChainRoute chain;
  chain.chain = ChainId(7);
  chain.config.version = {5, 1};
  chain.config.member_count = 1;
  chain.config.members[0] = {TargetId(Cluster::target(1)), MemberState::serving, 1};
  for (const bool proposed : {true, false}) {
    chain.proposed = proposed;
    other.chains = {chain};
    server.configure(other);
    cluster.wait_for(1, [&](const TargetReport& report) {
      return proposed ? report.persisted == chain.config.version : report.status.serving;
    });
  }
  TestClient moved(*cluster.node(1).shard, net::Transport::kTcp);
  moved.ready();
  moved.base.target = Cluster::target(1);
  moved.base.chain = 7;
  moved.base.chain_term = 5;
  moved.base.chain_counter = 1;
  CHECK(moved.read(3, 0, 100).code() == ENOENT);
  CHECK(moved.write(3, 0, pattern(100, 5)).code() == 0);
}

TEST_CASE("a released target is free again after a restart too") {
  Cluster::Options options;
  options.nodes = 2;
  Cluster cluster(options);
  cluster.change({{0}});
  cluster.stop(1);
  cluster.start(cluster.node(1));
  CHECK(cluster.report(1).chain == ChainId(1));
  CHECK(cluster.node(1).server->release_target(TargetId(Cluster::target(1))) == 0);
  cluster.wait_for(1, [](const TargetReport& report) { return report.chain == ChainId(); });
}

TEST_CASE("requests that wait in a target that is released are answered") {
  Cluster::Options options;
  options.nodes = 2;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  cluster.stop(1);  // so that writes wait
  std::vector<uint64_t> waiting;
  for (uint64_t i = 0; i < 10; i++) {
    wire::Update update = head.update(UpdateKind::kWrite, i, 0, 70000);
    update.context.channel = static_cast<uint32_t>(10 + i);
    waiting.push_back(head.send_update(update, pattern(70000, 1), true));
  }
  head.flush();
  cluster.wait_for(0, [](const TargetReport& report) { return report.status.pendings == 10; });
  CHECK(cluster.node(0).server->release_target(TargetId(Cluster::target(0))) == 0);
  for (const uint64_t id : waiting) {
    const Answer answer = head.wait(id);
    CHECK(answer.code() == EAGAIN);
    CHECK(answer.detail() == Detail::kWrongTarget);
  }
  cluster.wait_for(0, [](const TargetReport& report) { return report.chain == ChainId(); });
  ShardMetrics metrics;
  REQUIRE(cluster.node(0).server->metrics(0, &metrics));
  CHECK(metrics.pool_used_bytes == 0);
}

namespace {

// Two nodes, the second one stopped; the head's buffers for updates are all with pending ones, and more wait.
struct FullHead {
  FullHead() : cluster(options()), head(*cluster.node(0).shard, net::Transport::kLocal) {
    client_of(head, cluster, 0);
    cluster.stop(1);
    const auto data = pattern(kBytes, 1);
    for (uint32_t i = 0; i < kUpdates; i++) {
      wire::Update update = head.update(UpdateKind::kReplace, i, 0, kBytes);
      update.context.channel = 10 + i;
      ids.push_back(head.send_update(update, data, false));
    }
    head.flush();
    cluster.wait_for(0, [&](const TargetReport&) { return metrics().ops_waiting >= 10; });
  }
  static Cluster::Options options() {
    Cluster::Options options;
    options.nodes = 2;
    options.pool_bytes = 48u << 20;
    options.failure_timeout_ms = 1000;
    return options;
  }
  ShardMetrics metrics() {
    ShardMetrics metrics;
    REQUIRE(cluster.node(0).server->metrics(0, &metrics));
    return metrics;
  }
  void release() {
    CHECK(cluster.node(0).server->release_target(TargetId(Cluster::target(0))) == 0);
    cluster.wait_for(0, [](const TargetReport& report) { return report.chain == ChainId(); });
    for (const uint64_t id : ids) CHECK(head.wait(id).code() == EAGAIN);
    CHECK(metrics().pool_used_bytes == 0);
    CHECK(metrics().ops_waiting == 0);
  }

  static constexpr uint32_t kBytes = 1 << 20, kUpdates = 60;
  Cluster cluster;
  TestClient head;
  std::vector<uint64_t> ids;
};

}  // namespace

TEST_CASE("a server stops while updates wait for buffers") {
  FullHead full;
  CHECK(full.cluster.node(0).server->stop() == 0);
}

TEST_CASE("a target is released while its updates wait for buffers that its pendings hold") {
  FullHead full;
  full.release();
}

TEST_CASE("a head that is left out gives back its buffers, to others and to what waits for them") {
  FullHead full;
  full.cluster.start(full.cluster.node(1));
  full.cluster.lease(Cluster::kLongLeaseMs);
  full.cluster.change({{1}, {0, MemberState::offline}});
  full.cluster.wait_for(0, [&](const TargetReport&) {
    return full.metrics().pool_used_bytes == 0 && full.metrics().ops_waiting == 0;
  });
  full.release();
}

namespace {

// Flips a bit of a chunk's content on a node's device: of the block at `block` of what begins like `content`.
void damage(Cluster& cluster, uint32_t node, const std::vector<uint8_t>& content, size_t block) {
  const Fd device(::open(cluster.node(node).device.c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(device.valid());
  const off_t size = ::lseek(device.get(), 0, SEEK_END);
  std::vector<uint8_t> bytes(4096);
  for (off_t at = 0; at < size;) {
    const off_t data = ::lseek(device.get(), at, SEEK_DATA);  // the file is sparse
    if (data < 0) break;
    const off_t hole = ::lseek(device.get(), data, SEEK_HOLE);
    for (at = data / 4096 * 4096; at < hole; at += 4096) {
      REQUIRE(::pread(device.get(), bytes.data(), bytes.size(), at) == 4096);
      if (std::memcmp(bytes.data(), content.data(), bytes.size()) != 0) continue;
      const off_t place = at + static_cast<off_t>(block) * 4096 + 77;
      uint8_t byte;
      REQUIRE(::pread(device.get(), &byte, 1, place) == 1);
      REQUIRE(byte == content[block * 4096 + 77]);
      byte ^= 0x10;
      REQUIRE(::pwrite(device.get(), &byte, 1, place) == 1);
      REQUIRE(::fsync(device.get()) == 0);
      return;
    }
  }
  FAIL("the content isn't on the device");
}

}  // namespace

TEST_CASE("damage that a read meets is answered as such and repaired from another replica") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  for (uint32_t node = 0; node < 3; node++) {
    const uint64_t index = 10 + node;
    const auto data = pattern(300000, 40 + node);
    REQUIRE(head.write(index, 0, data).code() == 0);
    damage(cluster, node, data, 30);
    TestClient reader(*cluster.node(node).shard, net::Transport::kTcp);
    client_of(reader, cluster, node);
    const Answer bad = reader.wait(reader.send_read(index, 0, 300000, true, 0, wire::kReadVerifyWhole));
    CHECK(bad.code() == EIO);
    CHECK(bad.detail() == Detail::kCorrupt);
    cluster.wait_for(node, [](const TargetReport& report) {
      return report.status.repaired == 1 && report.status.damaged == 0;
    });
    check_chunk(reader, index, data);
  }
}

TEST_CASE("an update of a damaged chunk waits for its repair") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  for (uint32_t node = 0; node < 3; node++) {
    const uint64_t index = 10 + node;
    auto data = pattern(300000, 50 + node);
    REQUIRE(head.write(index, 0, data).code() == 0);
    damage(cluster, node, data, 30);
    const auto piece = pattern(100, 1);
    REQUIRE(head.write(index, 30 * 4096 + 200, piece).code() == 0);  // in the damaged granule
    std::copy(piece.begin(), piece.end(), data.begin() + 30 * 4096 + 200);
    for (uint32_t reader_node = 0; reader_node < 3; reader_node++) {
      TestClient reader(*cluster.node(reader_node).shard, net::Transport::kTcp);
      client_of(reader, cluster, reader_node);
      check_chunk(reader, index, data);
    }
  }
}

TEST_CASE("the scrubber finds damage that nobody reads, and has it repaired") {
  Cluster::Options options;
  options.nodes = 2;
  options.scrub_bytes_per_s = 1ull << 30;
  Cluster cluster(options);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  client_of(head, cluster, 0);
  const auto data = pattern(300000, 60);
  REQUIRE(head.write(1, 0, data).code() == 0);
  REQUIRE(head.write(2, 0, pattern(300000, 61)).code() == 0);
  damage(cluster, 1, data, 30);
  cluster.wait_for(
      1, [](const TargetReport& report) { return report.status.repaired == 1 && report.scrubbed_bytes > 0; });
  TestClient reader(*cluster.node(1).shard, net::Transport::kTcp);
  client_of(reader, cluster, 1);
  check_chunk(reader, 1, data);
}

TEST_CASE("news of a target wakes whoever sends reports") {
  Cluster cluster({});
  const int fd = cluster.node(0).server->news_fd();
  auto readable = [fd](int timeout_ms) {
    pollfd one{fd, POLLIN, 0};
    return ::poll(&one, 1, timeout_ms) == 1;
  };
  auto rearm = [fd] {
    uint64_t count;
    return ::read(fd, &count, sizeof count) == sizeof count;
  };
  CHECK(readable(0));  // it formed a chain
  while (readable(200)) CHECK(rearm());
  CHECK_FALSE(rearm());
  cluster.change({{0}});
  CHECK(readable(10000));
}
