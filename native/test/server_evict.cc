// Eviction in a chain of servers: quotas, devices that fill, times to live, pins, what other replicas saw.
#include <deque>

#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

namespace {

constexpr uint64_t kMiB = 1u << 20;

uint64_t unix_ms() {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1000000;
}

Cluster::Options cluster_of(uint32_t nodes) {
  Cluster::Options options;
  options.nodes = nodes;
  options.manager_ms = unix_ms() + 60'000;
  return options;
}

SpacePolicy policy(uint64_t quota_bytes, uint64_t ttl_ms = 0, bool evictable = true) {
  return {kSpace, ChainId(1), evictable, quota_bytes, ttl_ms};
}

void set(Cluster& cluster, uint32_t nodes, const SpacePolicy& one) {
  for (uint32_t i = 0; i < nodes; i++) cluster.node(i).server->set_spaces({one});
}

SpaceUse use_of(Cluster& cluster, uint32_t node) {
  const auto all = cluster.node(node).server->space_use();
  REQUIRE(all.size() == 1);
  return all[0];
}

template <typename F>
void wait_for_use(Cluster& cluster, uint32_t node, F&& good) {
  for (int i = 0; i < 2000; i++) {
    if (good(use_of(cluster, node))) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const SpaceUse use = use_of(cluster, node);
  REQUIRE_MESSAGE(false, "chunks ", use.chunks, " bytes ", use.bytes, " evicted ", use.evicted_chunks,
                  " expired ", use.expired_chunks, " ready ", use.ready);
}

// Spread like hashes, as the keys of KV blocks are.
ChunkKey key_of(uint64_t index) {
  std::array<uint8_t, 16> bytes;
  const uint64_t high = mix64(index + 1), low = mix64(high);
  std::memcpy(bytes.data(), &high, 8);
  std::memcpy(bytes.data() + 8, &low, 8);
  return ChunkKey::of(kSpace, bytes);
}

// A client of KV blocks at one member.
class Blocks {
 public:
  Blocks(Cluster& cluster, uint32_t node) : client_(*cluster.node(node).shard, net::Transport::kTcp) {
    client_.ready();
    client_.base.target = Cluster::target(node);
    client_.base.chain_counter = cluster.version().counter;
  }
  // `same`: the bytes of that one.
  uint64_t send_put(uint64_t index, uint32_t bytes, uint32_t flags = 0, uint64_t expiry_ms = 0,
                    uint64_t same = UINT64_MAX) {
    wire::Update update = client_.update(UpdateKind::kCreate, index, 0, bytes);
    update.context.client = 0;
    update.context.channel = 0;
    update.context.sequence = 0;
    update.flags = flags;
    update.expiry_ms = expiry_ms;
    std::memcpy(update.key, key_of(index).bytes.data(), 24);
    return client_.send_update(update, content(same != UINT64_MAX ? same : index, bytes), true);
  }
  uint32_t put(uint64_t index, uint32_t bytes, uint32_t flags = 0, uint64_t expiry_ms = 0) {
    return wait(send_put(index, bytes, flags, expiry_ms));
  }
  uint32_t wait(uint64_t id) { return client_.wait(id).code(); }
  // Puts [from, to), `depth` at a time; how many didn't end with success. Where another member's device was
  // full it puts again, as the client library does.
  uint32_t put_all(uint64_t from, uint64_t to, uint32_t bytes, uint32_t depth = 8) {
    uint32_t failed = 0;
    std::deque<std::pair<uint64_t, uint64_t>> sent;  // index, request
    for (uint64_t index = from; index < to || !sent.empty();) {
      if (index < to && sent.size() < depth) {
        sent.emplace_back(index, send_put(index, bytes));
        index++;
        continue;
      }
      const Answer answer = client_.wait(sent.front().second);
      const uint32_t code = answer.code();
      const uint64_t put = sent.front().first;
      sent.pop_front();
      if (code == EAGAIN && answer.detail() == Detail::kReissue) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        sent.emplace_back(put, send_put(put, bytes));
        continue;
      }
      if (code != 0) MESSAGE("a put ends with errno ", code);
      failed += code != 0 ? 1 : 0;
    }
    return failed;
  }
  // 0, or the errno. The bytes are checked.
  uint32_t get(uint64_t index, uint32_t bytes, bool touch) {
    wire::Read read{};
    read.context = client_.context();
    std::memcpy(read.key, key_of(index).bytes.data(), 24);
    read.length = read.bulk.length = bytes;
    read.flags = wire::kReadWantChecksums | (touch ? static_cast<uint32_t>(wire::kReadTouch) : 0);
    read.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
    const Answer answer = client_.take_read(client_.ask(Type::kRead, read), 0, 0);
    if (answer.code() == 0) CHECK(answer.payload == content(index, bytes));
    return answer.code();
  }
  bool exists(uint64_t index) {
    wire::ExistsKey key{};
    std::memcpy(key.key, key_of(index).bytes.data(), 24);
    wire::Exists ask{};
    ask.context = client_.context();
    ask.count = 1;
    const Answer answer =
        client_.ask(Type::kExists, ask, net::Bytes(reinterpret_cast<const uint8_t*>(&key), sizeof key));
    REQUIRE(answer.code() == 0);
    wire::ExistsEntry entry;
    std::memcpy(&entry, answer.var.data(), sizeof entry);
    return entry.state == 1;
  }
  uint32_t remove(uint64_t index) {
    wire::Update update = client_.update(UpdateKind::kRemove, index, 0, 0);
    std::memcpy(update.key, key_of(index).bytes.data(), 24);
    return client_.wait(client_.send_update(update, {}, true)).code();
  }
  TestClient& client() { return client_; }

 private:
  static std::vector<uint8_t> content(uint64_t index, uint32_t bytes) {
    std::vector<uint8_t> data(bytes, static_cast<uint8_t>(index));
    std::memcpy(data.data(), &index, std::min<size_t>(sizeof index, bytes));
    return data;
  }
  TestClient client_;
};

uint32_t count_present(Blocks& blocks, uint64_t from, uint64_t to) {
  uint32_t present = 0;
  for (uint64_t index = from; index < to; index++) present += blocks.exists(index) ? 1 : 0;
  return present;
}

}  // namespace

TEST_CASE("blocks of mixed sizes stay below the quota in bytes, on all replicas, and no put fails (K21)") {
  constexpr uint64_t kQuota = 8 * kMiB;
  Cluster cluster(cluster_of(3));
  set(cluster, 3, policy(kQuota));
  Blocks head(cluster, 0);
  const uint32_t sizes[] = {4096, 1u << 20, 70'000, 12'288, 300'000, 512, 1u << 18};
  uint64_t put_bytes = 0, most = 0;
  std::deque<uint64_t> sent;
  for (uint64_t index = 0; index < 160 || !sent.empty();) {
    if (index < 160 && sent.size() < 6) {
      const uint32_t bytes = sizes[index % std::size(sizes)];
      put_bytes += bytes;
      sent.push_back(head.send_put(index++, bytes));
      continue;
    }
    REQUIRE(head.wait(sent.front()) == 0);
    sent.pop_front();
    most = std::max(most, use_of(cluster, 0).bytes);
  }
  CHECK(put_bytes > 4 * kQuota);
  CHECK(most <= kQuota);
  CHECK(most > kQuota / 4 * 3);                // it is used, too
  for (uint32_t node = 0; node < 3; node++) {  // the head may still be evicting: all follow it
    wait_for_use(cluster, node, [&](const SpaceUse& now) {
      return now.chunks == use_of(cluster, 0).chunks && now.bytes <= kQuota * 99 / 100;
    });
  }
  const SpaceUse use = use_of(cluster, 0);
  CHECK(use.evicted_chunks + use.chunks == 160);
  CHECK(use.evicted_bytes > kQuota);
  CHECK(use_of(cluster, 1).evicted_chunks == 0);  // the head's to count
  Blocks tail(cluster, 2);
  CHECK(count_present(tail, 0, 160) == use.chunks);
}

TEST_CASE("hot blocks outlive a scan over cold ones, also if another replica served them (K22)") {
  constexpr uint32_t kBytes = 64 * 1024;
  constexpr uint64_t kHot = 32, kQuotaBlocks = 128;
  for (const bool touch : {true, false}) {
    CAPTURE(touch);
    Cluster cluster(cluster_of(3));
    set(cluster, 3, policy(kQuotaBlocks * kBytes));
    Blocks head(cluster, 0), middle(cluster, 1), tail(cluster, 2);
    REQUIRE(head.put_all(0, kHot, kBytes) == 0);
    cluster.pass_time(10'000);
    for (uint64_t index = 0; index < kHot; index++) {
      Blocks& reader = index % 3 == 0 ? head : index % 3 == 1 ? middle : tail;
      REQUIRE(reader.get(index, kBytes, touch) == 0);
    }
    CHECK(use_of(cluster, 2).hits == (touch ? kHot / 3 : 0));
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // members report each second
    cluster.pass_time(10'000);
    REQUIRE(head.put_all(1000, 1000 + 5 * kQuotaBlocks, kBytes) == 0);
    const uint32_t present = count_present(tail, 0, kHot);
    if (touch) {
      CHECK(present == kHot);
    } else {
      CHECK(present < kHot / 2);  // nothing said that they were wanted
    }
    CHECK(use_of(cluster, 0).bytes <= kQuotaBlocks * kBytes);
  }
}

TEST_CASE("a full device makes room by evictions, for blocks and for files, without an error (K23)") {
  Cluster::Options options = cluster_of(2);
  options.device_bytes = 288 * kMiB;
  Cluster cluster(options);
  set(cluster, 2, policy(0));
  Blocks head(cluster, 0);
  const uint64_t capacity = cluster.report(0).capacity.capacity_bytes;
  const uint64_t blocks = capacity * 3 / 2 / (2 * kMiB);
  REQUIRE(head.put_all(0, blocks, 2 * kMiB) == 0);
  const SpaceUse use = use_of(cluster, 0);
  CHECK(use.evicted_chunks > blocks / 4);
  CHECK(use.bytes > capacity / 2);
  CHECK(head.exists(blocks - 1));
  // A file beside them, of another size.
  TestClient& client = head.client();
  for (uint64_t index = 0; index < 8; index++) {
    REQUIRE(client.open(2, 0, kSpace + 1).code() == 0);
    const ChunkKey key = ChunkKey::of_file(kSpace + 1, index);
    Answer answer;
    do {  // as the client library does it where another member's device was full
      wire::Update update = client.update(UpdateKind::kWrite, index, 0, 4 * kMiB);
      update.context.capability = 2;
      std::memcpy(update.key, key.bytes.data(), 24);
      answer = client.wait(client.send_update(update, pattern(4 * kMiB, 1), true));
      if (answer.code() == EAGAIN) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    } while (answer.code() == EAGAIN && answer.detail() == Detail::kReissue);
    REQUIRE(answer.code() == 0);
  }
}

TEST_CASE("a device that runs short gives up blocks that lie alone before those that share a slot") {
  // Told to stop, a space looks for no more equal blocks; those that share go on sharing.
  bool told_to_stop = false;
  SUBCASE("of a space that deduplicates") {}
  SUBCASE("of a space that did") {
    told_to_stop = true;
  }
  Cluster::Options options = cluster_of(1);
  options.device_bytes = 288 * kMiB;
  Cluster cluster(options);
  SpacePolicy one = policy(0);
  one.dedup = true;
  set(cluster, 1, one);
  Blocks head(cluster, 0);
  constexpr uint64_t kEqual = 24;
  for (uint64_t index = 0; index < kEqual; index++)
    REQUIRE(head.wait(head.send_put(index, 2 * kMiB, 0, 0, 7777)) == 0);
  wait_for_use(cluster, 0, [](const SpaceUse& use) { return use.saved_bytes == (kEqual - 1) * 2 * kMiB; });
  CHECK(use_of(cluster, 0).shared_chunks == kEqual);
  CHECK(use_of(cluster, 0).bytes == kEqual * 2 * kMiB);
  if (told_to_stop) {
    set(cluster, 1, policy(0));
    REQUIRE(head.wait(head.send_put(kEqual, 2 * kMiB, 0, 0, 7777)) == 0);
  }
  cluster.pass_time(10'000);  // they are the longest unused
  const uint64_t blocks = cluster.report(0).capacity.capacity_bytes * 3 / 2 / (2 * kMiB);
  REQUIRE(head.put_all(1000, 1000 + blocks, 2 * kMiB) == 0);
  CHECK(use_of(cluster, 0).evicted_chunks > blocks / 4);
  CHECK(count_present(head, 0, kEqual) == kEqual);
  CHECK(use_of(cluster, 0).shared_chunks == kEqual);
}

TEST_CASE("a full device makes room for a block whose own chain has nothing to evict: others have") {
  Cluster::Options options = cluster_of(2);
  options.device_bytes = 288 * kMiB;
  options.chains = 2;
  Cluster cluster(options);
  set(cluster, 2, policy(0));  // of chain 1; of chain 2 the servers know nothing yet
  Blocks head(cluster, 0);
  const uint64_t blocks = cluster.report(0).capacity.capacity_bytes * 3 / 2 / (2 * kMiB);
  REQUIRE(head.put_all(0, blocks, 2 * kMiB) == 0);
  Blocks other(cluster, cluster.member(2, 0));
  other.client().base.target = Cluster::target(cluster.member(2, 0), 2);
  other.client().base.chain = 2;
  uint32_t again = 0;
  // As many as still leave chain 1 something: without a policy these stay.
  for (uint64_t index = blocks; index < blocks + blocks / 3; index++) {
    CAPTURE(index);
    Answer answer;
    do {  // as the client library does it
      answer = other.client().wait(other.send_put(index, 2 * kMiB));
      if (answer.code() == EAGAIN) std::this_thread::sleep_for(std::chrono::milliseconds(20)), again++;
    } while (answer.code() == EAGAIN && answer.detail() == Detail::kReissue);
    REQUIRE(answer.code() == 0);
  }
  CHECK(again > 0);
  CHECK(use_of(cluster, 0).evicted_chunks > blocks / 2);
}

TEST_CASE("blocks are gone for clients when their time is over, and soon from the device") {
  Cluster cluster(cluster_of(3));
  for (const bool evictable : {true, false}) {
    const uint64_t at = evictable ? 0 : 100;
    set(cluster, 3, policy(0, 0, evictable));
    Blocks head(cluster, 0), tail(cluster, 2);
    CHECK(head.put(at + 2, 5000, 0, unix_ms() + 3'600'000) == 0);  // before there was a ttl: its own is kept
    set(cluster, 3, policy(0, 60'000, evictable));
    CHECK(head.put(at + 1, 5000) == 0);
    CHECK(head.put(at + 3, 5000, wire::kUpdatePin) == 0);  // a pin doesn't keep it from that
    CHECK(tail.get(at + 1, 5000, false) == 0);
    cluster.pass_time(61'000);
    for (Blocks* blocks : {&head, &tail}) {
      CHECK(blocks->get(at + 1, 5000, false) == ENOENT);
      CHECK_FALSE(blocks->exists(at + 1));
      CHECK_FALSE(blocks->exists(at + 3));
      CHECK(blocks->get(at + 2, 5000, false) == 0);
    }
    CHECK(head.put(at + 1, 7000) == 0);  // as if it had never been there
    CHECK(tail.get(at + 1, 7000, false) == 0);
    CHECK(head.put(at + 1, 7000) == EEXIST);
    const uint64_t left = evictable ? 2 : 3;
    for (uint32_t node = 0; node < 3; node++) {
      wait_for_use(cluster, node, [&](const SpaceUse& use) { return use.chunks == left; });
    }
  }
  // One is replaced by the put, unless the sweep came to it before that.
  const uint64_t expired = use_of(cluster, 0).expired_chunks;
  CHECK(expired >= 3);
  CHECK(expired <= 4);
  CHECK(use_of(cluster, 0).evicted_chunks == 0);
}

TEST_CASE("of a block's own expiry and its space's time to live the earlier one counts") {
  Cluster cluster(cluster_of(2));
  const auto in_s = [](uint64_t s) {
    return unix_ms() + 60'000 + s * 1000;
  };  // as the manager's time is ahead
  Blocks head(cluster, 0), tail(cluster, 1);
  REQUIRE(head.put(1, 5000, 0, in_s(100)) == 0);  // before the servers know of the space at all
  set(cluster, 2, policy(0, 200'000));
  REQUIRE(head.put(2, 5000, 0, in_s(100)) == 0);
  REQUIRE(head.put(3, 5000, 0, in_s(3600)) == 0);
  REQUIRE(head.put(4, 5000) == 0);
  CHECK(count_present(tail, 1, 5) == 4);
  cluster.pass_time(150'000);
  CHECK(count_present(tail, 1, 3) == 0);
  CHECK(count_present(tail, 3, 5) == 2);
  cluster.pass_time(100'000);
  CHECK(count_present(tail, 1, 5) == 0);
  wait_for_use(cluster, 1, [](const SpaceUse& use) { return use.chunks == 0; });
  CHECK(use_of(cluster, 0).expired_chunks == 4);
}

TEST_CASE("pinned blocks stay: others go for them, and where only they are left a put gets EDQUOT") {
  constexpr uint32_t kBytes = 128 * 1024;
  Cluster cluster(cluster_of(2));
  set(cluster, 2, policy(32 * kBytes));
  Blocks head(cluster, 0);
  REQUIRE(head.put_all(100, 132, kBytes) == 0);
  for (uint64_t index = 0; index < 31; index++) REQUIRE(head.put(index, kBytes, wire::kUpdatePin) == 0);
  CHECK(count_present(head, 0, 31) == 31);
  CHECK(count_present(head, 100, 132) <= 1);
  uint32_t code = 0;
  for (uint64_t index = 200; index < 203 && code == 0; index++)
    code = head.put(index, kBytes, wire::kUpdatePin);
  CHECK(code == EDQUOT);
  CHECK(head.put(300, kBytes) == EDQUOT);
  CHECK(head.remove(5) == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(head.put(301, kBytes) == 0);
  CHECK(head.put(302, 64 * kBytes) == EDQUOT);  // more than the quota: nothing could make room
}

TEST_CASE("a share of few blocks takes any number of puts at a time, while all that it holds is on its way") {
  constexpr uint32_t kBytes = 256 * 1024;
  Cluster cluster(cluster_of(3));
  Blocks head(cluster, 0);
  uint64_t index = 0;
  for (const uint64_t blocks : {1, 2, 3}) {
    CAPTURE(blocks);
    set(cluster, 3, policy(blocks * kBytes));
    CHECK(head.put_all(index, index + 100, kBytes, 16) == 0);
    index += 100;
    CHECK(use_of(cluster, 0).bytes <= blocks * kBytes);
  }
}

TEST_CASE("a share that only pinned blocks fill lets go of the others as soon as there are some") {
  constexpr uint32_t kBytes = 128 * 1024;
  Cluster cluster(cluster_of(2));
  set(cluster, 2, policy(4 * kBytes));
  Blocks head(cluster, 0);
  for (uint64_t index = 0; index < 4; index++) REQUIRE(head.put(index, kBytes, wire::kUpdatePin) == 0);
  REQUIRE(head.put(10, kBytes) == EDQUOT);  // it has been looked through
  REQUIRE(head.remove(0) == 0);
  uint32_t code = EDQUOT;
  for (int i = 0; i < 1000 && code == EDQUOT; i++) code = head.put(11, kBytes);
  REQUIRE(code == 0);
  CHECK(head.put_all(20, 60, kBytes, 1) == 0);
  CHECK(count_present(head, 1, 4) == 3);
}

TEST_CASE("a space that isn't evictable keeps what it has: over its quota a put gets EDQUOT") {
  constexpr uint32_t kBytes = 128 * 1024;
  Cluster cluster(cluster_of(2));
  set(cluster, 2, policy(8 * kBytes, 0, false));
  Blocks head(cluster, 0);
  REQUIRE(head.put_all(0, 8, kBytes) == 0);
  CHECK(head.put(8, kBytes) == EDQUOT);
  CHECK(count_present(head, 0, 8) == 8);
  set(cluster, 2, policy(9 * kBytes, 0, false));
  CHECK(head.put(8, kBytes) == 0);
  CHECK(use_of(cluster, 0).evicted_chunks == 0);
}

TEST_CASE("a smaller quota is reached by itself; the next head goes on where the last one was stopped") {
  constexpr uint32_t kBytes = 32 * 1024;
  Cluster cluster(cluster_of(3));
  set(cluster, 3, policy(512 * kBytes));
  {
    Blocks head(cluster, 0);
    REQUIRE(head.put_all(0, 500, kBytes) == 0);
  }
  set(cluster, 3, policy(64 * kBytes));
  cluster.stop(0);
  cluster.change({{1}, {2}});
  wait_for_use(cluster, 1, [&](const SpaceUse& use) { return use.bytes <= 64 * kBytes; });
  wait_for_use(cluster, 2, [&](const SpaceUse& use) { return use.bytes <= 64 * kBytes; });
  Blocks head(cluster, 1);
  REQUIRE(head.put_all(1000, 1200, kBytes) == 0);
  CHECK(use_of(cluster, 1).bytes <= 64 * kBytes);
}

TEST_CASE("after a clean restart the hot blocks are known still") {
  constexpr uint32_t kBytes = 64 * 1024;
  Cluster cluster(cluster_of(1));
  set(cluster, 1, policy(128 * kBytes));
  {
    Blocks head(cluster, 0);
    REQUIRE(head.put_all(0, 32, kBytes) == 0);
    cluster.pass_time(10'000);
    for (uint64_t index = 0; index < 32; index++) REQUIRE(head.get(index, kBytes, true) == 0);
    cluster.pass_time(10'000);
  }
  cluster.restart();
  set(cluster, 1, policy(128 * kBytes));
  Blocks head(cluster, 0);
  REQUIRE(head.put_all(1000, 1400, kBytes) == 0);
  CHECK(count_present(head, 0, 32) == 32);
}
