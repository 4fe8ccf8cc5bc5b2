// What a shard answers to requests that are wrong, repeated, too many, or cut off.
#include <dirent.h>
#include <linux/memfd.h>

#include "net/version.h"
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

namespace {

size_t open_descriptors() {
  size_t count = 0;
  DIR* dir = ::opendir("/proc/self/fd");
  while (::readdir(dir) != nullptr) count++;
  ::closedir(dir);
  return count;
}

size_t resident_kib() {
  FILE* file = std::fopen("/proc/self/status", "r");
  char line[256];
  size_t kib = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "VmRSS: %zu kB", &kib) == 1) break;
  }
  std::fclose(file);
  return kib;
}

}  // namespace

TEST_CASE(
    "hello: a foreign cluster and an unknown version are refused, frames before it end the connection") {
  Cluster cluster({});
  for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
    auto other = kCluster;
    other[0] ^= 1;
    TestClient foreign(*cluster.node(0).shard, transport);
    const Answer refused = foreign.hello(other);
    CHECK(refused.code() == EPROTO);
    CHECK(refused.detail() == Detail::kWrongCluster);
    CHECK(foreign.closed());
    TestClient newer(*cluster.node(0).shard, transport);
    CHECK(newer.hello(kCluster, 9).detail() == Detail::kVersion);
    CHECK(newer.closed());
    TestClient rude(*cluster.node(0).shard, transport);
    rude.send(Type::kPing, wire::StatusReply{});
    CHECK(rude.closed());
  }
}

TEST_CASE("broken frames end their connection and no other") {
  Cluster cluster({});
  TestClient good(*cluster.node(0).shard, net::Transport::kTcp);
  good.ready();
  REQUIRE(good.write(1, 0, pattern(5000, 1)).code() == 0);
  const uint8_t garbage[64] = {1, 2, 3};
  wire::FrameHeader oversize{};
  oversize.magic = wire::kMagic;
  oversize.version = wire::kProtocolVersion;
  oversize.type = static_cast<uint8_t>(Type::kUpdate);
  oversize.fixed_bytes = sizeof(wire::Update);
  oversize.payload_bytes = wire::kMaxPayloadBytes + 1;
  for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
    TestClient junk(*cluster.node(0).shard, transport);
    REQUIRE(junk.hello().code() == 0);
    junk.send_raw(garbage, sizeof garbage);
    CHECK(junk.closed());
    TestClient large(*cluster.node(0).shard, transport);
    REQUIRE(large.hello().code() == 0);
    large.send_raw(&oversize, sizeof oversize);
    CHECK(large.closed());
    TestClient cut(*cluster.node(0).shard, transport);
    cut.ready();
    cut.send_raw(&oversize, 17);  // half a header, then gone
    cut.disconnect();
    TestClient half(*cluster.node(0).shard, transport);
    half.ready();
    half.send_update(half.update(UpdateKind::kWrite, 2, 0, 8 << 20), pattern(8 << 20, 1), true);
    half.flush();  // some of the payload
    half.disconnect();
    TestClient posing(*cluster.node(0).shard, transport);
    posing.ready();
    posing.send(Type::kNotice, wire::Notice{});
    CHECK(posing.closed());
  }
  CHECK(good.read(1, 0, 5000).payload == pattern(5000, 1));
  CHECK(cluster.node(0).shard->metrics().frame_errors >= 4);
}

TEST_CASE("capabilities: none, other space, missing right, other client, expired, closed") {
  Cluster cluster({});
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(client.hello().code() == 0);
  const auto data = pattern(100, 1);
  auto denied = [&](uint32_t handle, Detail detail) {
    client.base.capability = handle;
    const Answer wrote = client.write(1, 0, data);
    CHECK(wrote.code() == EACCES);
    CHECK(wrote.detail() == detail);
  };
  denied(1, Detail::kNoCapability);
  REQUIRE(client.open(2, 0, kSpace + 1).code() == 0);
  denied(2, Detail::kOtherSpace);
  REQUIRE(client.open(3, 0, kSpace, wire::kRightRead).code() == 0);
  denied(3, Detail::kMissingRight);
  CHECK(client.read(1, 0, 10).code() == ENOENT);           // reading is allowed by it
  REQUIRE(client.open(4, 0, kSpace, 7, 999).code() == 0);  // the manager's time was 1000
  denied(4, Detail::kExpired);
  REQUIRE(client.open(4, 0, kSpace, 7, 5000).code() == 0);  // renewed
  client.base.capability = 4;
  CHECK(client.write(1, 0, data).code() == 0);
  REQUIRE(client.open(5, 2, 0).code() == 0);  // a cluster capability: any space
  client.base.capability = 5;
  CHECK(client.write(1, 0, data).code() == 0);
  wire::OpenCapability close{};
  close.handle = 5;
  client.send(Type::kCloseCapability, close);
  denied(5, Detail::kNoCapability);
  // A capability of another session isn't taken.
  TestClient thief(*cluster.node(0).shard, net::Transport::kTcp, kClient + 1);
  REQUIRE(thief.hello().code() == 0);
  wire::Capability stolen{};
  stolen.version = 1;
  stolen.client = kClient;
  stolen.rights = 7;
  wire::OpenCapability open{};
  open.handle = 1;
  CHECK(thief
            .ask(Type::kOpenCapability, open,
                 net::Bytes(reinterpret_cast<const uint8_t*>(&stolen), sizeof stolen))
            .code() == EACCES);
  CHECK(thief.ask(Type::kOpenCapability, open, net::Bytes(reinterpret_cast<const uint8_t*>(&stolen), 40))
            .code() == EINVAL);
}

TEST_CASE("a build that speaks a newer version works with one that doesn't") {
  Cluster cluster({});
  net::set_spoken_versions({1, 2});
  for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
    TestClient older(*cluster.node(0).shard, transport);
    CHECK(older.hello(kCluster, 1).hello.version == 1);
    CHECK(older.open().code() == 0);
    TestClient newer(*cluster.node(0).shard, transport);
    REQUIRE(newer.hello(kCluster, 1, 2).hello.version == 2);
    newer.speak(2);
    CHECK(newer.open().code() == 0);
    TestClient newest(*cluster.node(0).shard, transport);
    CHECK(newest.hello(kCluster, 3, 4).detail() == Detail::kVersion);
    TestClient fickle(*cluster.node(0).shard, transport);  // goes on in another version than was chosen
    REQUIRE(fickle.hello(kCluster, 1, 2).hello.version == 2);
    fickle.send(Type::kPing, wire::StatusReply{});
    CHECK(fickle.closed());
  }
  net::set_spoken_versions({wire::kProtocolVersion, wire::kProtocolVersion});
}

TEST_CASE("requests for another target, chain or chain version say what to do") {
  Cluster::Options options;
  options.nodes = 2;
  Cluster cluster(options);
  TestClient client(*cluster.node(1).shard, net::Transport::kTcp);
  client.ready();
  CHECK(client.write(1, 0, pattern(10, 1)).detail() == Detail::kWrongTarget);  // target 101 lives elsewhere
  CHECK(client.read(1, 0, 10).detail() == Detail::kWrongTarget);
  client.base.target = Cluster::target(1);
  CHECK(client.write(1, 0, pattern(10, 1)).detail() == Detail::kNotHead);
  client.base.chain = 99;
  CHECK(client.read(1, 0, 10).detail() == Detail::kWrongTarget);
  client.base.chain = 1;
  client.base.chain_counter = 0;
  const Answer old = client.read(1, 0, 10);  // reads are answered, with the newer version as a hint
  CHECK(old.code() == ENOENT);
  CHECK(old.read.chain.counter == 1);
  TestClient head(*cluster.node(0).shard, net::Transport::kTcp);
  head.ready();
  head.base.chain_counter = 0;
  const Answer stale = head.write(1, 0, pattern(10, 1));
  CHECK(stale.code() == EAGAIN);
  CHECK(stale.detail() == Detail::kStaleRouting);
  CHECK(stale.update.chain.counter == 1);
}

TEST_CASE("a request that contradicts itself is EINVAL and changes nothing") {
  Cluster cluster({});
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  client.ready();
  auto bad = [&](wire::Update update, const std::vector<uint8_t>& data) {
    const Answer answer = client.wait(client.send_update(update, data, true));
    CHECK(answer.code() == EINVAL);
    CHECK(answer.detail() == Detail::kBadFrame);
  };
  const auto data = pattern(1000, 1);
  bad(client.update(UpdateKind::kWrite, 1, kMaxChunkBytes - 999, 1000), data);  // over the largest chunk
  bad(client.update(UpdateKind::kWrite, 1, 0, 999), data);                      // length isn't the payload's
  bad(client.update(UpdateKind::kReplace, 1, 1, 1000), data);                   // a whole chunk at an offset
  bad(client.update(static_cast<UpdateKind>(99), 1, 0, 0), {});
  wire::Update flags = client.update(UpdateKind::kWrite, 1, 0, 1000);
  flags.flags = 1u << 20;
  bad(flags, data);
  wire::Update tag = client.update(UpdateKind::kWrite, 1, 0, 1000);
  tag.tag_bytes = 17;
  bad(tag, data);
  CHECK(client.wait(client.send_update_with(client.update(UpdateKind::kWrite, 1, 0, 1000), data, {}, true))
            .code() == EINVAL);  // checksums announced and absent
  wire::Read read{};
  read.context = client.context();
  read.length = 4096;
  CHECK(client.ask(Type::kRead, read).code() == EINVAL);  // no place for the data
  CHECK(client.read(1, 0, 10).code() == ENOENT);
}

TEST_CASE("a payload that doesn't match its checksums is refused, and right when sent again") {
  Cluster cluster({});
  for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
    TestClient client(*cluster.node(0).shard, transport);
    client.ready();
    const auto data = pattern(200000, 1);
    const auto kind = UpdateKind::kWrite;
    const wire::Update update = client.update(kind, 10, 0, 200000);
    std::vector<uint32_t> crcs(net::piece_count(0, 200000));
    net::piece_crcs(0, data, crcs.data());
    crcs[2] ^= 1;
    const bool inline_data = transport == net::Transport::kTcp;
    const Answer wrong = client.wait(client.send_update_with(update, data, crcs, inline_data));
    CHECK(wrong.code() == EBADMSG);
    CHECK(wrong.detail() == Detail::kChecksum);
    CHECK(client.wait(client.send_update(update, data, inline_data)).code() == 0);  // the same identity
    CHECK(client.read(10, 0, 200000).payload == data);
    // Without checksums the server computes them.
    wire::Update plain = client.update(kind, 11, 100, 200000);
    plain.context.checksum_kind = 0;
    CHECK(client.wait(client.send_update_with(plain, data, {}, inline_data)).code() == 0);
    const Answer got = client.read(11, 0, 300000);
    CHECK(std::equal(data.begin(), data.end(), got.payload.begin() + 100));
  }
  CHECK(cluster.node(0).shard->metrics().crc_failures == 2);
}

TEST_CASE("a repeated update is answered from the retry table and not applied again") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  client.ready();
  const auto a = pattern(5000, 1), b = pattern(5000, 2);
  const wire::Update first = client.update(UpdateKind::kWrite, 1, 0, 5000);
  const Answer once = client.wait(client.send_update(first, a, true));
  REQUIRE(once.code() == 0);
  wire::Update second = client.update(UpdateKind::kWrite, 1, 0, 5000);
  second.context.channel = 2;
  second.context.sequence = 1;
  REQUIRE(client.wait(client.send_update(second, b, true)).code() == 0);
  // The retry of the first comes on another connection, after the second.
  TestClient again(*cluster.node(0).shard, net::Transport::kLocal);
  again.ready();
  const Answer twice = again.wait(again.send_update(first, a, true));
  CHECK(twice.code() == 0);
  CHECK(std::memcmp(&twice.update.version, &once.update.version, sizeof once.update.version) == 0);
  CHECK(client.read(1, 0, 5000).payload == b);
  // Also after a restart of all.
  cluster.restart();
  TestClient later(*cluster.node(0).shard, net::Transport::kTcp);
  later.ready();
  later.base.chain_counter = cluster.version().counter;
  wire::Update repeated = first;
  repeated.context.chain_counter = cluster.version().counter;
  CHECK(later.wait(later.send_update(repeated, a, true)).code() == 0);
  CHECK(later.read(1, 0, 5000).payload == b);
  // An older sequence of a channel that has moved on is refused.
  wire::Update older = repeated;
  older.context.sequence = 0;
  const Answer old = later.wait(later.send_update(older, a, true));
  CHECK(old.code() == EINVAL);
  CHECK(old.detail() == Detail::kOldSequence);
  // A fenced client is refused.
  for (uint32_t i = 0; i < 3; i++) REQUIRE(cluster.node(i).server->fence(ClientId(kClient)) == 0);
  const Answer fenced = later.write(1, 0, a);
  CHECK(fenced.code() == ESTALE);
  CHECK(fenced.detail() == Detail::kFenced);
  // Also one that names no client, and so has no entry in the retry table.
  wire::Update nameless = first;
  nameless.context.chain_counter = cluster.version().counter;
  nameless.context.client = nameless.context.channel = nameless.context.sequence = 0;
  for (const UpdateKind kind : {UpdateKind::kWrite, UpdateKind::kCreate, UpdateKind::kReplace}) {
    nameless.kind = static_cast<uint8_t>(kind);
    const Answer unnamed = later.wait(later.send_update(nameless, a, true));
    CHECK(unnamed.code() == ESTALE);
    CHECK(unnamed.detail() == Detail::kFenced);
  }
}

TEST_CASE("regions: seals, sizes, limits, sharing, draining") {
  Cluster::Options options;
  options.region_limit_bytes = 48u << 20;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kLocal);
  client.ready();  // 32 MiB
  Fd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), 1 << 20) == 0);
  CHECK(client.register_region(1000, unsealed.get(), 0, 1 << 20).code() == EPERM);
  auto memory = net::create_sealed_memfd("test", 128u << 20, false);
  REQUIRE(memory.ok());
  CHECK(client.register_region(1000, memory->get(), 0, 256u << 20).code() == EINVAL);  // over 64 MiB
  CHECK(client.register_region(1000, memory->get(), 100u << 20, 32u << 20).code() == ERANGE);
  CHECK(client.register_region(1000, memory->get(), 5, 4096).code() == EINVAL);
  CHECK(client.register_region(1000, memory->get(), 0, 0).code() == EINVAL);
  CHECK(client.register_region(1000, -1, 0, 4096).code() == EINVAL);  // no descriptor
  CHECK(client.register_region(1000, memory->get(), 0, 32u << 20).code() == EDQUOT);
  CHECK(client.register_region(1000, memory->get(), 0, 8u << 20).code() == 0);
  CHECK(client.register_region(1000, memory->get(), 0, 8u << 20).code() == EEXIST);  // here already
  TestClient same(*cluster.node(0).shard, net::Transport::kLocal);
  REQUIRE(same.hello().code() == 0);
  CHECK(same.register_region(1000, memory->get(), 4096, 8u << 20).code() == EEXIST);  // another extent
  CHECK(same.register_region(1000, memory->get(), 0, 8u << 20).code() == 0);          // shared
  CHECK(cluster.node(0).shard->metrics().region_bytes == (40u << 20));
  CHECK(client.unregister_region(1000).code() == 0);
  CHECK(client.unregister_region(1000).code() == ENXIO);
  CHECK(cluster.node(0).shard->metrics().region_bytes == (40u << 20));
  same.disconnect();
  for (int i = 0; i < 500 && cluster.node(0).shard->metrics().regions > 1; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(cluster.node(0).shard->metrics().region_bytes == (32u << 20));

  REQUIRE(client.write(1, 0, pattern(1 << 20, 3)).code() == 0);
  // Reads and writes that reach outside, or name what isn't there.
  CHECK(client.wait(client.send_read(1, 0, 4096, false, TestClient::kRegionBytes - 4095)).detail() ==
        Detail::kNoRegion);
  CHECK(client.wait(client.send_read(1, 0, 4096, false, UINT64_MAX - 10)).detail() == Detail::kNoRegion);
  // Reads under way when the region goes: each is answered, then the end of the region is.
  std::vector<uint64_t> reads;
  for (int i = 0; i < 64; i++) reads.push_back(client.send_read(1, 0, 1 << 20, false, (i % 16) << 20));
  const uint64_t gone = client.send(Type::kUnregisterRegion, wire::UnregisterRegion{client.region_id()});
  const uint64_t late = client.send_read(1, 0, 4096, false, 0);
  CHECK(client.wait(late).detail() == Detail::kNoRegion);
  CHECK(client.wait(gone).code() == 0);
  std::memset(client.region(), 0x55, TestClient::kRegionBytes);
  for (const uint64_t read : reads) CHECK(client.wait(read).code() == 0);
  for (uint64_t at = 0; at < TestClient::kRegionBytes; at += 4096) REQUIRE(client.region()[at] == 0x55);
}

TEST_CASE("32 writers with small pools wait and none fails (S7)") {
  Cluster::Options options;
  options.nodes = 3;
  options.pool_bytes = 1;  // the least: one arena of 16 MiB a use
  options.max_ops = 8;
  Cluster cluster(options);
  std::vector<std::thread> writers;
  std::atomic<int> failures{0};
  for (uint64_t writer = 0; writer < 32; writer++) {
    writers.emplace_back([&, writer] {
      const auto transport = writer % 2 == 0 ? net::Transport::kTcp : net::Transport::kLocal;
      TestClient client(*cluster.node(0).shard, transport, kClient + writer);
      client.ready();
      const auto data = pattern(2 << 20, static_cast<uint32_t>(writer));
      for (int round = 0; round < 3; round++) {
        std::vector<uint64_t> ids;
        for (uint64_t i = 0; i < 4; i++) {
          wire::Update update = client.update(UpdateKind::kReplace, writer * 4 + i, 0, 2 << 20);
          update.context.channel = static_cast<uint32_t>(i + 1);
          update.context.deadline_ms = 0;
          ids.push_back(client.send_update(update, data, transport == net::Transport::kTcp));
        }
        for (const uint64_t id : ids) failures += client.wait(id).code() == 0 ? 0 : 1;
      }
      failures += client.read(writer * 4, 0, 2 << 20).payload == data ? 0 : 1;
    });
  }
  for (auto& writer : writers) writer.join();
  CHECK(failures == 0);
  CHECK(cluster.node(0).shard->metrics().errors == 0);
}

TEST_CASE("clients that stop in the middle of a payload hold no buffer for long; a slow one isn't ended") {
  constexpr uint32_t kBytes = 2 << 20;
  Cluster::Options options;
  options.pool_bytes = 1;            // the least: one arena of 16 MiB a use
  options.failure_timeout_ms = 500;  // nothing for twice as long, and it is over
  Cluster cluster(options);
  const Shard& shard = *cluster.node(0).shard;
  const auto data = pattern(kBytes, 5);
  std::vector<uint64_t> released;
  std::vector<std::unique_ptr<TestClient>> stopped;
  uint64_t last_id = 0;
  const auto begin = [&](uint64_t number) {
    auto client = std::make_unique<TestClient>(shard, net::Transport::kTcp, kClient + number);
    client->ready();
    client->base.chain_counter = cluster.version().counter;
    last_id = client->send_update(client->update(UpdateKind::kReplace, number, 0, kBytes), data, true);
    (void)client->connection().flush(&released, kBytes / 4);
    return client;
  };
  const auto slow = begin(1);
  const uint64_t slow_id = last_id;
  for (uint64_t number = 2; number <= 10; number++) stopped.push_back(begin(number));
  TestClient writer(shard, net::Transport::kTcp, kClient + 20);
  writer.ready();
  writer.base.chain_counter = cluster.version().counter;
  std::vector<uint64_t> ids;  // more than there is room for beside those
  for (uint64_t i = 0; i < 2; i++) {
    wire::Update update = writer.update(UpdateKind::kReplace, 30 + i, 0, kBytes);
    update.context.channel = static_cast<uint32_t>(i + 1);
    update.context.deadline_ms = 0;
    ids.push_back(writer.send_update(update, data, true));
  }
  std::atomic<bool> written{false};
  std::thread others([&] {
    for (const uint64_t id : ids) CHECK(writer.wait(id).code() == 0);
    written = true;
  });
  // A little at a time, for longer than somebody may send nothing, and as long as the others wait.
  for (int i = 0; i < 8 || !written; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    (void)slow->connection().flush(&released, 64 << 10);
  }
  others.join();
  // Those that stood in line for a buffer got theirs late, and end late.
  for (int i = 0; i < 1000 && cluster.node(0).shard->metrics().sessions > 2; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    (void)slow->connection().flush(&released, 4096);
  }
  CHECK(cluster.node(0).shard->metrics().sessions == 2);
  CHECK(slow->wait(slow_id).code() == 0);
  CHECK(writer.read(1, 0, kBytes).payload == data);
  CHECK(writer.read(2, 0, kBytes).code() == ENOENT);
}

// Every node is head of some chains and in the middle and at the end of others: full pools must not
// wait for each other in a circle.
TEST_CASE("many writers over chains in all directions with small pools all finish") {
  // With 64 MiB the heads' pools hold more than those behind them.
  static const std::pair<uint32_t, size_t> settings[] = {{3, 1}, {3, 64u << 20}, {5, 64u << 20}};
  for (const auto& [nodes, pool_bytes] : settings) {
    Cluster::Options options;
    options.nodes = nodes;
    options.chains = 2 * nodes;
    options.pool_bytes = pool_bytes;
    Cluster cluster(options);
    std::vector<std::thread> writers;
    std::atomic<int> failures{0};
    for (uint32_t chain = 1; chain <= options.chains; chain++) {
      writers.emplace_back([&, chain] {
        const uint32_t head = cluster.member(chain, 0);
        const auto transport = chain % 2 == 0 ? net::Transport::kTcp : net::Transport::kLocal;
        TestClient client(*cluster.node(head).shard, transport, kClient + chain);
        client.ready();
        client.base.chain = chain;
        client.base.target = Cluster::target(head, chain);
        const auto data = pattern(1 << 20, chain);
        std::vector<uint64_t> ids;
        for (uint32_t i = 0; i < 40; i++) {
          wire::Update update = client.update(UpdateKind::kCreate, 1000 * chain + i, 0, 1 << 20);
          update.context.client = 0;
          ids.push_back(client.send_update(update, data, transport == net::Transport::kTcp));
        }
        for (const uint64_t id : ids) failures += client.wait(id).code() == 0 ? 0 : 1;
      });
    }
    for (auto& writer : writers) writer.join();
    CHECK(failures == 0);
  }
}

TEST_CASE("sessions over the limit wait in line") {
  Cluster::Options options;
  options.max_sessions = 4;
  Cluster cluster(options);
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < 8; i++) {
    clients.push_back(std::make_unique<TestClient>(*cluster.node(0).shard, net::Transport::kLocal));
  }
  for (int i = 0; i < 4; i++) REQUIRE(clients[static_cast<size_t>(i)]->hello().code() == 0);
  CHECK(cluster.node(0).shard->metrics().sessions == 4);
  for (int i = 0; i < 4; i++) clients[static_cast<size_t>(i)].reset();
  for (int i = 4; i < 8; i++) REQUIRE(clients[static_cast<size_t>(i)]->hello().code() == 0);
}

TEST_CASE("thousands of connections leave nothing behind (S4, S15)") {
  Cluster cluster({});
  auto round = [&](int connections, bool with_regions) {
    for (int i = 0; i < connections; i++) {
      TestClient client(*cluster.node(0).shard, i % 2 == 0 ? net::Transport::kLocal : net::Transport::kTcp);
      REQUIRE(client.hello().code() == 0);
      if (i % 20 == 0 && with_regions) {
        client.open();
        auto memory = net::create_sealed_memfd("test", 1 << 20, false);
        client.register_region(TestClient::next_region()++, memory->get(), 0, 1 << 20);
        client.send_read(1, 0, 100, true);
        client.flush();  // and gone
      }
    }
    for (int i = 0; i < 500 && cluster.node(0).shard->metrics().sessions > 0; i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    for (int i = 0; i < 500 && cluster.node(0).shard->metrics().regions > 0; i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  round(200, true);  // what grows once has grown
  const size_t descriptors = open_descriptors();
  const size_t resident = resident_kib();
  round(2000, true);
  const ShardMetrics metrics = cluster.node(0).shard->metrics();
  CHECK(metrics.sessions == 0);
  CHECK(metrics.regions == 0);
  CHECK(metrics.region_bytes == 0);
  CHECK(metrics.pool_used_bytes == 0);
  for (int i = 0; i < 500 && open_descriptors() > descriptors; i++) {  // another thread lets go of memory
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(open_descriptors() <= descriptors);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  (void)resident;  // a sanitizer keeps freed memory
#else
  CHECK(resident_kib() < resident + 16 * 1024);
#endif
}

TEST_CASE("a stopped member: writes wait for it, clean reads go on, the server stops all the same") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  client.ready();
  const auto data = pattern(100000, 1);
  REQUIRE(client.write(1, 0, data).code() == 0);
  REQUIRE(cluster.node(2).server->stop() == 0);
  CHECK(client.read(1, 0, 100000).payload == data);
  wire::Update update = client.update(UpdateKind::kWrite, 2, 0, 100000);
  update.context.deadline_ms = 300;
  const Answer answer = client.wait(client.send_update(update, data, true));
  CHECK(answer.code() == ETIMEDOUT);
  CHECK(answer.detail() == Detail::kDeadline);
  CHECK(cluster.node(0).server->stop() == 0);
  CHECK(cluster.node(1).server->stop() == 0);
  CHECK(cluster.node(1).server->stop() == 0);  // twice
}
