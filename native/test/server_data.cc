// A shard served in this process: data in and out, over all transports, one replica and three.
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

namespace {

// Every operation against a plain model of one chunk's bytes.
void work_with_chunks(Cluster& cluster, net::Transport transport, uint32_t members, uint64_t first_index) {
  TestClient head(*cluster.node(0).shard, transport);
  head.ready();
  head.base.chain_counter = cluster.version().counter;
  TestClient reader(*cluster.node(members - 1).shard, transport);
  reader.ready();
  reader.base.target = Cluster::target(members - 1);
  reader.base.chain_counter = cluster.version().counter;
  std::vector<uint8_t> model;
  const uint64_t index = first_index;

  CHECK(head.read(index, 0, 4096).code() == ENOENT);
  // (offset, length): whole granules, cut ones, unaligned ends, holes, one byte, large
  const std::pair<uint32_t, uint32_t> writes[] = {
      {0, 1 << 20}, {0, 100},        {65530, 20}, {1 << 20, 65536}, {1200000, 77},
      {4096, 4096}, {3 << 20, 1000}, {1, 300000}, {70000, 1},       {5 << 20, 1 << 20}};
  uint32_t seed = 1;
  for (const auto& [offset, length] : writes) {
    INFO("write of ", length, " at ", offset);
    const auto data = pattern(length, seed++);
    const Answer wrote = head.write(index, offset, data);
    REQUIRE(wrote.code() == 0);
    CHECK(wrote.update.value == length);
    if (model.size() < offset + length) model.resize(offset + length, 0);
    std::copy(data.begin(), data.end(), model.begin() + offset);
    CHECK(wrote.update.chunk_length == model.size());
    for (TestClient* client : {&head, &reader}) {
      const Answer got = client->read(index, 0, static_cast<uint32_t>(model.size()));
      REQUIRE(got.code() == 0);
      CHECK(got.read.chunk_length == model.size());
      CHECK(got.payload == model);
      const uint32_t part = offset / 2 + 3;
      const Answer cut = client->read(index, part, 70000);
      REQUIRE(cut.code() == 0);
      const size_t expected = part >= model.size() ? 0 : std::min<size_t>(70000, model.size() - part);
      REQUIRE(cut.payload.size() == expected);
      CHECK(std::equal(cut.payload.begin(), cut.payload.end(), model.begin() + part));
    }
  }
  for (const uint32_t length : {2000000u, 65536u, 4097u, 5000000u, 0u}) {
    INFO("truncate to ", length);
    REQUIRE(head.change(UpdateKind::kTruncate, index, length).code() == 0);
    model.resize(length, 0);
    const Answer got = reader.read(index, 0, 6 << 20);
    REQUIRE(got.code() == 0);
    CHECK(got.payload == model);
  }
  const auto content = pattern(200000, 77);
  REQUIRE(
      head.wait(head.send_update(head.update(UpdateKind::kReplace, index, 0, 200000), content, !head.lends()))
          .code() == 0);
  CHECK(reader.read(index, 0, 1 << 20).payload == content);
  REQUIRE(head.change(UpdateKind::kRemove, index).code() == 0);
  CHECK(reader.read(index, 0, 4096).code() == ENOENT);
  CHECK(head.read(index, 0, 4096).code() == ENOENT);
  if (transport == net::Transport::kLocal && head.direct()) CHECK(head.direct_reads > 0);
}

}  // namespace

TEST_CASE("one replica serves all kinds of updates and reads over all transports") {
  Cluster cluster({});
  uint64_t index = 0;
  for (const auto transport : transports()) work_with_chunks(cluster, transport, 1, index++);
}

TEST_CASE("three replicas serve all kinds of updates and reads over all transports") {
  for (const bool local_peers : {true, false}) {
    Cluster::Options options;
    options.nodes = 3;
    options.local_peers = local_peers;
    Cluster cluster(options);
    uint64_t index = 0;
    for (const auto transport : transports()) work_with_chunks(cluster, transport, 3, index++);
    CHECK(cluster.node(1).server->report()[0].status.serving);
  }
}

TEST_CASE("the fallback without io_uring serves the same") {
  Cluster::Options options;
  options.backend = io::Backend::pread;
  Cluster cluster(options);
  for (const auto transport : transports()) work_with_chunks(cluster, transport, 1, 1);
}

TEST_CASE("create-if-absent: first put wins, tags differ, exists says so") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  for (const auto transport : transports()) {
    TestClient client(*cluster.node(0).shard, transport);
    client.ready();
    const uint64_t index = 500 + 100 * static_cast<uint64_t>(transport);
    const bool inline_data = !client.lends();
    auto create = [&](const std::vector<uint8_t>& data, uint8_t tag) {
      wire::Update update = client.update(UpdateKind::kCreate, index, 0, static_cast<uint32_t>(data.size()));
      update.context.client = 0;
      update.context.channel = 0;
      update.context.sequence = 0;
      update.tag_bytes = 16;
      std::memset(update.tag, tag, 16);
      return client.wait(client.send_update(update, data, inline_data));
    };
    const auto first = pattern(100000, 1), second = pattern(5000, 2);
    // One that comes again under its identity is told what it was told first: it stored the block, nobody
    // else.
    wire::Update mine =
        client.update(UpdateKind::kCreate, index + 50, 0, static_cast<uint32_t>(second.size()));
    for (int i = 0; i < 2; i++) {
      CHECK(client.wait(client.send_update(mine, second, inline_data)).code() == 0);
    }
    mine.context.sequence = client.update(UpdateKind::kCreate, 0, 0, 0).context.sequence;
    CHECK(client.wait(client.send_update(mine, second, inline_data)).code() == EEXIST);
    auto offer = [&](uint8_t tag, const std::vector<uint8_t>& payload = {}) {
      wire::Update update = client.update(UpdateKind::kCreate, index, 0, 100000);
      update.context.client = 0;
      update.context.channel = 0;
      update.context.sequence = 0;
      update.flags = wire::kUpdateOffer;
      update.tag_bytes = 16;
      std::memset(update.tag, tag, 16);
      return client.wait(client.send_update(update, payload, true));
    };
    for (int i = 0; i < 2; i++) {  // the first changed nothing
      CHECK(offer(7).code() == EAGAIN);
      CHECK(offer(7).detail() == Detail::kWanted);
    }
    CHECK(client.read(index, 0, 1 << 20).code() == ENOENT);
    CHECK(offer(7, second).code() == EINVAL);  // an offer has no bytes
    CHECK(create(first, 7).code() == 0);
    const Answer again = create(second, 7);
    CHECK(again.code() == EEXIST);
    CHECK(again.detail() == Detail::kNone);
    CHECK(again.update.value == first.size());
    const Answer other = create(second, 8);
    CHECK(other.code() == EEXIST);
    CHECK(other.detail() == Detail::kTagMismatch);
    CHECK(offer(7).code() == EEXIST);
    CHECK(offer(7).update.value == first.size());
    CHECK(offer(8).detail() == Detail::kTagMismatch);
    CHECK(client.read(index, 0, 1 << 20).payload == first);

    wire::Exists exists{};
    exists.context = client.context();
    exists.count = 3;
    wire::ExistsKey keys[3]{};
    for (uint64_t i = 0; i < 3; i++) {
      const ChunkKey key = ChunkKey::of_file(kSpace, i == 2 ? 999 : index);
      std::memcpy(keys[i].key, key.bytes.data(), 24);
      keys[i].tag_bytes = 16;
      std::memset(keys[i].tag, i == 1 ? 9 : 7, 16);
    }
    const Answer answer =
        client.ask(Type::kExists, exists, net::Bytes(reinterpret_cast<const uint8_t*>(keys), sizeof keys));
    REQUIRE(answer.code() == 0);
    REQUIRE(answer.var.size() == 3 * sizeof(wire::ExistsEntry));
    wire::ExistsEntry entries[3];
    std::memcpy(entries, answer.var.data(), sizeof entries);
    CHECK(entries[0].state == 1);
    CHECK(entries[0].length == first.size());
    CHECK(entries[1].state == 2);
    CHECK(entries[2].state == 0);
    // A read that compares the tag: a miss, no data.
    wire::Read read{};
    read.context = client.context();
    std::memcpy(read.key, keys[0].key, 24);
    read.length = read.bulk.length = 4096;
    read.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
    read.flags = wire::kReadCompareTag;
    read.tag_bytes = 16;
    std::memset(read.tag, 9, 16);
    const Answer miss = client.ask(Type::kRead, read);
    CHECK(miss.code() == ENODATA);
    CHECK(miss.detail() == Detail::kTagMismatch);
  }
}

TEST_CASE("last chunk, space epoch, removal of a space by pages") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  client.ready();
  wire::LastChunk ask{};
  ask.context = client.context();
  ask.space = kSpace;
  CHECK(client.ask(Type::kLastChunk, ask).code() == ENOENT);
  for (uint64_t i = 0; i < 150; i++) REQUIRE(client.write(i, 0, pattern(100 + i, 1)).code() == 0);
  Answer last = client.ask(Type::kLastChunk, ask);
  CHECK(last.code() == 0);
  CHECK(last.last.length == 249);
  CHECK(last.last.chunks == 150);
  CHECK(std::memcmp(last.last.key, ChunkKey::of_file(kSpace, 149).bytes.data(), 24) == 0);

  // Pages go only once nothing can be written any more.
  auto remove_page = [&] {
    wire::Update page = client.update(UpdateKind::kRemoveRange, 0, 0, 0);
    page.context.space_epoch = UINT64_MAX;
    return client.wait(client.send_update(page, {}, true));
  };
  CHECK(remove_page().code() == EINVAL);
  wire::Update epoch = client.update(UpdateKind::kSpaceEpoch, 0, 0, 0);
  epoch.context.space_epoch = UINT64_MAX;
  REQUIRE(client.wait(client.send_update(epoch, {}, true)).code() == 0);
  const Answer late = client.write(3, 0, pattern(10, 1));
  CHECK(late.code() == ESTALE);
  CHECK(late.detail() == Detail::kStaleEpoch);
  CHECK(client.read(3, 0, 100).code() == ESTALE);
  uint64_t removed = 0;
  for (int page = 0; page < 10; page++) {
    const Answer answer = remove_page();
    REQUIRE(answer.code() == 0);
    CHECK(answer.update.value <= 64);
    removed += answer.update.value;
    if (answer.update.value == 0) break;
  }
  CHECK(removed == 150);
  CHECK(client.ask(Type::kLastChunk, ask).code() == ENOENT);
}

TEST_CASE("chunks are listed by pages in the order of their keys, of one space, or of all") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  TestClient client(*cluster.node(0).shard, net::Transport::kTcp);
  client.ready();
  auto list = [&](TestClient& asker, uint64_t space, uint64_t from, uint32_t count, uint32_t flags) {
    wire::ListChunks ask{};
    ask.context = asker.context();
    std::memcpy(ask.key, ChunkKey::of_file(space, from).bytes.data(), 24);
    ask.count = count;
    ask.flags = flags;
    return asker.ask(Type::kListChunks, ask);
  };
  auto entry = [](const Answer& answer, size_t i) {
    wire::ListEntry out;
    REQUIRE(answer.var.size() >= (i + 1) * sizeof out);
    std::memcpy(&out, answer.var.data() + i * sizeof out, sizeof out);
    return out;
  };
  CHECK(list(client, kSpace, 0, 10, 0).list.count == 0);
  for (uint64_t i = 0; i < 10; i++) REQUIRE(client.write(3 * i, 0, pattern(100 + i, 1)).code() == 0);
  Answer page = list(client, kSpace, 4, 5, 0);
  REQUIRE(page.code() == 0);
  CHECK(page.list.count == 5);
  CHECK(page.list.more == 1);
  for (size_t i = 0; i < 5; i++) {
    CHECK(std::memcmp(entry(page, i).key, ChunkKey::of_file(kSpace, 3 * (i + 2)).bytes.data(), 24) == 0);
    CHECK(entry(page, i).length == 102 + i);
    CHECK(entry(page, i).flags == 0);
  }
  page = list(client, kSpace, 19, wire::kMaxListEntries, 0);
  CHECK(page.list.count == 3);
  CHECK(page.list.more == 0);
  CHECK(list(client, kSpace, 28, 1, 0).list.count == 0);
  CHECK(list(client, kSpace, 0, 0, 0).code() == EINVAL);
  CHECK(list(client, kSpace, 0, wire::kMaxListEntries + 1, 0).code() == EINVAL);
  CHECK(list(client, kSpace, 0, 1, 4).code() == EINVAL);

  // Over all spaces, with a capability for the cluster alone.
  CHECK(list(client, 0, 0, 10, wire::kListAllSpaces).code() == EACCES);
  REQUIRE(client.open(1, 2, 0).code() == 0);
  for (uint64_t space : {kSpace + 5, kSpace + 9}) {
    for (uint64_t i = 0; i < 2; i++) {
      wire::Update write = client.update(UpdateKind::kWrite, i, 0, 10);
      std::memcpy(write.key, ChunkKey::of_file(space, i).bytes.data(), 24);
      REQUIRE(client.wait(client.send_update(write, pattern(10, 2), true)).code() == 0);
    }
  }
  page = list(client, 0, 0, wire::kMaxListEntries, wire::kListAllSpaces);
  CHECK(page.list.count == 14);
  CHECK(std::memcmp(entry(page, 13).key, ChunkKey::of_file(kSpace + 9, 1).bytes.data(), 24) == 0);
  page = list(client, 0, 0, 2, wire::kListAllSpaces | wire::kListSpacesOnly);
  REQUIRE(page.list.count == 2);
  CHECK(page.list.more == 1);
  CHECK(std::memcmp(entry(page, 1).key, ChunkKey::of_file(kSpace + 5, 0).bytes.data(), 24) == 0);
  page = list(client, kSpace + 6, 0, 2, wire::kListAllSpaces | wire::kListSpacesOnly);
  CHECK(page.list.count == 1);
  CHECK(page.list.more == 0);
  REQUIRE(client.open(1, 0, kSpace, 4).code() == 0);
  CHECK(list(client, kSpace, 0, 2, 0).code() == EACCES);
  REQUIRE(client.open(1, 0, kSpace, 2).code() == 0);
  CHECK(list(client, kSpace, 0, 2, 0).list.count == 2);
  REQUIRE(client.open(1, 0, kSpace, 3).code() == 0);

  // A removal under the right to write; what is gone isn't listed.
  wire::Update removal = client.update(UpdateKind::kRemove, 3, 0, 0);
  REQUIRE(client.wait(client.send_update(removal, {}, true)).code() == 0);
  page = list(client, kSpace, 0, 2, wire::kListSpacesOnly);
  CHECK(page.list.count == 1);
  CHECK(entry(page, 0).length == 100);
  page = list(client, kSpace, 1, 1, 0);
  CHECK(std::memcmp(entry(page, 0).key, ChunkKey::of_file(kSpace, 6).bytes.data(), 24) == 0);

  // A write that must not touch what is there.
  wire::Update beyond = client.update(UpdateKind::kWrite, 6, 50, 100);
  beyond.flags = wire::kUpdateBeyondEnd;
  const Answer kept = client.wait(client.send_update(beyond, pattern(100, 9), true));
  CHECK(kept.code() == EEXIST);
  CHECK(kept.update.value == 102);
  beyond = client.update(UpdateKind::kWrite, 6, 102, 100);
  beyond.flags = wire::kUpdateBeyondEnd;
  CHECK(client.wait(client.send_update(beyond, pattern(100, 9), true)).code() == 0);
  CHECK(client.read(6, 0, 300).payload.size() == 202);
  beyond = client.update(UpdateKind::kRemove, 6, 0, 0);
  beyond.flags = wire::kUpdateBeyondEnd;
  CHECK(client.wait(client.send_update(beyond, {}, true)).code() == EINVAL);
  wire::Update existing = client.update(UpdateKind::kWrite, 777, 0, 10);
  existing.flags = wire::kUpdateNeedExisting;
  CHECK(client.wait(client.send_update(existing, pattern(10, 9), true)).code() == ENOENT);
}

TEST_CASE("data survives a stop and a start; the chain leads back") {
  Cluster::Options options;
  options.nodes = 3;
  Cluster cluster(options);
  const auto data = pattern(1 << 20, 5);
  {
    TestClient client(*cluster.node(0).shard, net::Transport::kLocal);
    client.ready();
    for (uint64_t i = 0; i < 20; i++) REQUIRE(client.write(i, 0, data).code() == 0);
    REQUIRE(client.write(3, 12345, pattern(77, 8)).code() == 0);
  }
  auto expected = data;
  const auto patch = pattern(77, 8);
  std::copy(patch.begin(), patch.end(), expected.begin() + 12345);
  for (int round = 0; round < 2; round++) {
    cluster.restart();
    for (uint32_t member = 0; member < 3; member++) {
      TestClient client(*cluster.node(member).shard, net::Transport::kLocal);
      client.ready();
      client.base.target = Cluster::target(member);
      client.base.chain_counter = cluster.version().counter;
      for (uint64_t i = 0; i < 20; i++)
        CHECK(client.read(i, 0, 1 << 20).payload == (i == 3 ? expected : data));
    }
  }
}
