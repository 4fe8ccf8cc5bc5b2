// Signed capabilities, and servers that prove the cluster's secret to each other.
#include <doctest/doctest.h>

#include "net/peer_proof.h"
#include "server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;

namespace {

const SigningKey kOld{3, {1, 1, 2, 3, 5}};
const SigningKey kNew{4, {8, 13, 21}};

Cluster::Options with_secret(std::vector<SigningKey> keys = {kOld}) {
  Cluster::Options options;
  options.secret = true;
  options.keys = std::move(keys);
  return options;
}

wire::Capability capability_of(uint64_t client = kClient) {
  wire::Capability capability{};
  capability.version = 1;
  capability.rights = wire::kRightRead | wire::kRightWrite;
  capability.client = client;
  capability.space = kSpace;
  capability.epoch = 0;
  capability.expiry_ms = 5000;  // the manager's time is 1000
  capability.id = 77;
  return capability;
}

wire::Capability signed_by(const SigningKey& key, wire::Capability capability) {
  capability.key_id = key.id;
  const net::Mac mac = net::capability_mac(key.secret, capability);
  std::memcpy(capability.mac, mac.data(), sizeof capability.mac);
  return capability;
}

// What reading and writing under a handle is answered.
void check_denied(TestClient& client, uint32_t handle, Detail detail) {
  client.base.capability = handle;
  const Answer wrote = client.write(1, 0, pattern(100, 1));
  CHECK(wrote.code() == EACCES);
  CHECK(wrote.detail() == detail);
  const Answer read = client.read(1, 0, 100);
  CHECK(read.code() == EACCES);
  CHECK(read.detail() == detail);
}

void check_good(TestClient& client, uint32_t handle) {
  client.base.capability = handle;
  const auto data = pattern(100, 1);
  CHECK(client.write(1, 0, data).code() == 0);
  CHECK(client.read(1, 0, 100).payload == data);
}

}  // namespace

TEST_CASE("a signed capability with any bit turned over is refused") {
  Cluster cluster(with_secret());
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(client.hello().code() == 0);
  const wire::Capability good = signed_by(kOld, capability_of());
  REQUIRE(client.show(1, good).code() == 0);
  check_good(client, 1);
  for (size_t at = 0; at < sizeof good; at++) {
    uint8_t bytes[sizeof good];
    std::memcpy(bytes, &good, sizeof good);
    bytes[at] ^= static_cast<uint8_t>(1u << (at % 8));
    wire::Capability forged;
    std::memcpy(&forged, bytes, sizeof forged);
    CAPTURE(at);
    const Answer shown = client.show(2, forged);
    CHECK(shown.code() == EACCES);
    const bool key = at >= offsetof(wire::Capability, key_id) && at < offsetof(wire::Capability, reserved2);
    if (forged.version == 0 || forged.client != kClient) {
      CHECK(shown.detail() == Detail::kNoCapability);
      continue;
    }
    CHECK(shown.detail() == (key ? Detail::kUnknownKey : Detail::kForged));
    check_denied(client, 2, key ? Detail::kUnknownKey : Detail::kForged);
  }
  check_good(client, 1);  // none of it has touched the good one
}

TEST_CASE("a genuine capability gives what it says and no more") {
  Cluster cluster(with_secret());
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(client.hello().code() == 0);

  CHECK(client.show(1, capability_of()).detail() == Detail::kUnsigned);
  check_denied(client, 1, Detail::kUnsigned);

  wire::Capability other = capability_of();
  other.space = kSpace + 1;
  REQUIRE(client.show(2, signed_by(kOld, other)).code() == 0);
  check_denied(client, 2, Detail::kOtherSpace);  // replayed for another space

  wire::Capability reading = capability_of();
  reading.rights = wire::kRightRead;
  REQUIRE(client.show(3, signed_by(kOld, reading)).code() == 0);
  client.base.capability = 3;
  const Answer wrote = client.write(1, 0, pattern(100, 1));
  CHECK(wrote.code() == EACCES);
  CHECK(wrote.detail() == Detail::kMissingRight);
  CHECK(client.read(1, 0, 100).code() == ENOENT);

  wire::Capability endless = capability_of();
  endless.expiry_ms = 0;  // no signature is for ever
  REQUIRE(client.show(4, signed_by(kOld, endless)).code() == 0);
  check_denied(client, 4, Detail::kExpired);

  // Another session's, byte for byte.
  TestClient thief(*cluster.node(0).shard, net::Transport::kTcp, kClient + 1);
  REQUIRE(thief.hello().code() == 0);
  CHECK(thief.show(1, signed_by(kOld, capability_of())).detail() == Detail::kNoCapability);
}

TEST_CASE("expiry is judged by what the server last heard of the manager's time") {
  Cluster cluster(with_secret());
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(client.hello().code() == 0);
  REQUIRE(client.show(1, signed_by(kOld, capability_of())).code() == 0);
  check_good(client, 1);
  // Without contact it stays good, however long, also for a connection that comes later.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  TestClient later(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(later.hello().code() == 0);
  REQUIRE(later.show(1, signed_by(kOld, capability_of())).code() == 0);
  check_good(later, 1);
  cluster.pass_time(4500);
  check_denied(client, 1, Detail::kExpired);
  check_denied(later, 1, Detail::kExpired);
  wire::Capability renewed = capability_of();
  renewed.expiry_ms = 60'000;
  REQUIRE(client.show(1, signed_by(kOld, renewed)).code() == 0);
  check_good(client, 1);
}

TEST_CASE("keys: a new one is taken once it is known, an old one until it is gone") {
  Cluster cluster(with_secret());
  Server& server = *cluster.node(0).server;
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(client.hello().code() == 0);
  REQUIRE(client.show(1, signed_by(kOld, capability_of())).code() == 0);
  CHECK(client.show(2, signed_by(kNew, capability_of())).detail() == Detail::kUnknownKey);
  check_denied(client, 2, Detail::kUnknownKey);
  server.set_keys({kOld, kNew});
  check_good(client, 1);
  check_good(client, 2);  // it was shown too early, and needn't be shown again
  server.set_keys({kNew});
  check_denied(client, 1, Detail::kUnknownKey);
  CHECK(client.show(3, signed_by(kOld, capability_of())).detail() == Detail::kUnknownKey);
  check_good(client, 2);
  // The same id with another secret is another key.
  server.set_keys({{kNew.id, {7}}});
  check_denied(client, 2, Detail::kForged);
}

namespace {

// Another server's end of a connection, as far as hello.
struct Stranger : TestClient {
  using TestClient::TestClient;
  wire::ServerHello hello_of(uint64_t node) const {
    wire::ServerHello hello{};
    std::memcpy(hello.hello.cluster, kCluster.data(), 16);
    hello.hello.node = node;
    hello.hello.incarnation = 1;
    hello.hello.role = static_cast<uint8_t>(wire::Role::kServer);
    hello.hello.version_min = hello.hello.version_max = wire::kProtocolVersion;
    std::memset(hello.nonce, 0x11, sizeof hello.nonce);
    return hello;
  }
};

}  // namespace

TEST_CASE("servers with the secret make a chain; whoever can't prove it sends nothing into it") {
  Cluster::Options options = with_secret();
  options.nodes = 2;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  REQUIRE(client.hello().code() == 0);
  REQUIRE(client.show(1, signed_by(kOld, capability_of())).code() == 0);
  check_good(client, 1);  // over both replicas

  const Shard& shard = *cluster.node(0).shard;
  const auto errors = [&] { return cluster.node(0).shard->metrics().frame_errors; };
  const auto send_notice = [&](Stranger& stranger) {
    wire::Notice notice{};
    notice.context.target = Cluster::target(0);
    notice.context.chain = 1;
    notice.from = Cluster::target(1);
    notice.kind = 1;
    stranger.send(Type::kNotice, notice);
  };
  {  // no nonce: a build, or a cluster, without the secret
    Stranger stranger(shard, net::Transport::kTcp);
    const Answer refused = stranger.ask(Type::kHello, stranger.hello_of(2).hello);
    CHECK(refused.code() == EACCES);
    CHECK(refused.detail() == Detail::kUnproved);
  }
  {  // no proof
    Stranger stranger(shard, net::Transport::kTcp);
    CHECK(stranger.ask(Type::kHello, stranger.hello_of(2)).code() == 0);
    const uint64_t before = errors();
    send_notice(stranger);
    CHECK(stranger.closed());
    CHECK(errors() == before + 1);
  }
  for (const bool reflect : {false, true}) {  // a proof under another key; the server's own proof sent back
    Stranger stranger(shard, net::Transport::kTcp);
    const wire::ServerHello hello = stranger.hello_of(2);
    const Answer answer = stranger.ask(Type::kHello, hello);
    REQUIRE(answer.code() == 0);
    CHECK(net::same_mac(net::peer_proof(kPeerKey, net::Side::kServer, hello, answer.server_hello),
                        answer.server_hello.proof));
    wire::PeerProof proof{};
    const net::Mac mac = net::peer_proof({1}, net::Side::kAsker, hello, answer.server_hello);
    std::memcpy(proof.proof, reflect ? answer.server_hello.proof : mac.data(), sizeof proof.proof);
    stranger.send(Type::kPeerProof, proof);
    CHECK(stranger.closed());
  }
  {  // a proof that was good on another connection: its nonce was another one
    Stranger first(shard, net::Transport::kTcp), second(shard, net::Transport::kTcp);
    const wire::ServerHello hello = first.hello_of(2);
    const Answer answer = first.ask(Type::kHello, hello);
    const Answer other = second.ask(Type::kHello, hello);
    CHECK(std::memcmp(answer.server_hello.nonce, other.server_hello.nonce, 32) != 0);
    wire::PeerProof proof{};
    const net::Mac mac = net::peer_proof(kPeerKey, net::Side::kAsker, hello, answer.server_hello);
    std::memcpy(proof.proof, mac.data(), sizeof proof.proof);
    second.send(Type::kPeerProof, proof);
    CHECK(second.closed());
    first.send(Type::kPeerProof, proof);
    send_notice(first);
    CHECK_FALSE(first.closed(100));
  }
  check_good(client, 1);
}

TEST_CASE("a server without the secret isn't talked to by one that has it, nor the other way round") {
  Cluster cluster({});
  Stranger stranger(*cluster.node(0).shard, net::Transport::kTcp);
  const Answer refused = stranger.ask(Type::kHello, stranger.hello_of(2));
  CHECK(refused.code() == EACCES);
  CHECK(refused.detail() == Detail::kUnproved);
}
