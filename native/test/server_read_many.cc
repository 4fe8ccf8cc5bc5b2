// Many small reads in one frame: each is answered as if it had come alone.
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;

namespace {

wire::ReadManyEntry entry(uint64_t index, uint32_t offset, uint32_t length, uint64_t address,
                          uint64_t space = kSpace) {
  wire::ReadManyEntry out{};
  const ChunkKey key = ChunkKey::of_file(space, index);
  std::memcpy(out.key, key.bytes.data(), sizeof out.key);
  out.offset = offset;
  out.length = length;
  out.address = address;
  return out;
}

struct Fixture {
  explicit Fixture(const Cluster::Options& options = {}) : cluster(options) {
    client = std::make_unique<TestClient>(*cluster.node(0).shard, net::Transport::kLocal);
    client->ready();
    client->base.chain_counter = cluster.version().counter;
  }
  Answer answer(uint64_t id, const wire::ReadManyEntry& asked) {
    return client->take_read(client->wait(id), asked.offset, asked.address);
  }
  Cluster cluster;
  std::unique_ptr<TestClient> client;
};

}  // namespace

TEST_CASE("reads of one frame give the bytes that they would give alone") {
  Fixture f;
  const auto data = pattern(300'000, 5), small = pattern(8192, 6);
  REQUIRE(f.client->write(1, 0, data).code() == 0);
  REQUIRE(f.client->write(2, 0, small).code() == 0);
  // Whole blocks; a whole small chunk (with its checksum); the last granule; an unaligned end, parts of a
  // block: these come as patches; beyond the end.
  const std::vector<wire::ReadManyEntry> asked = {
      entry(1, 0, 4096, 0),           entry(1, 8192, 32768, 32768),   entry(2, 0, 8192, 65536),
      entry(1, 262144, 32768, 98304), entry(1, 299008, 4096, 131072), entry(2, 4096, 4096, 135168),
      entry(1, 100, 200, 139264),     entry(1, 400'000, 4096, 143360)};
  const auto ids = f.client->send_read_many(asked);
  for (size_t i = 0; i < asked.size(); i++) {
    INFO("read ", i);
    const auto& all = asked[i].key[23] == 1 ? data : small;
    const Answer got = f.answer(ids[i], asked[i]);
    REQUIRE(got.code() == 0);
    CHECK(got.read.chunk_length == all.size());
    const size_t begin = std::min<size_t>(asked[i].offset, all.size());
    const size_t size = std::min<size_t>(asked[i].length, all.size() - begin);
    REQUIRE(got.payload.size() == size);
    CHECK(std::equal(got.payload.begin(), got.payload.end(), all.begin() + static_cast<ptrdiff_t>(begin)));
  }
  if (f.client->direct()) {
    CHECK(f.client->together == 5);
  } else {
    CHECK(f.client->together == 0);
  }
}

TEST_CASE("a frame of many reads is one pass of the server, and one frame back") {
  Fixture f;
  if (!f.client->direct()) return;
  const auto data = pattern(1 << 20, 5);
  REQUIRE(f.client->write(1, 0, data).code() == 0);
  std::vector<wire::ReadManyEntry> asked;
  for (uint32_t i = 0; i < 256; i++) asked.push_back(entry(1, i * 4096, 4096, i * 4096));
  std::memset(f.client->region(), 0, 1 << 20);
  for (const uint64_t id : f.client->send_read_many(asked)) REQUIRE(f.client->wait(id).code() == 0);
  CHECK(f.client->together == 256);
  CHECK(std::memcmp(f.client->region(), data.data(), data.size()) == 0);
  CHECK(f.cluster.node(0).shard->metrics().bytes_copied == data.size());  // the write's, once
}

TEST_CASE("a read of a frame that can't be is refused by itself") {
  Fixture f;
  REQUIRE(f.client->write(1, 0, pattern(70000, 5)).code() == 0);
  const std::vector<wire::ReadManyEntry> asked = {
      entry(1, 0, 4096, 0),
      entry(9, 0, 4096, 4096),                      // no such chunk
      entry(1, 0, 0, 4096),                         // nothing
      entry(1, 0, 65536, 4096),                     // too much
      entry(1, 16 << 20, 4096, 4096),               // beyond a chunk
      entry(1, 0, 4096, TestClient::kRegionBytes),  // beyond the region
      entry(1, 0, 4096, UINT64_MAX - 100),          // wraps
      entry(1, 0, 4096, 4096, kSpace + 1),          // another space than the capability's
      entry(1, 4096, 4096, 8192)};
  const uint32_t codes[] = {0, ENOENT, EINVAL, EINVAL, EINVAL, ENXIO, ENXIO, EACCES, 0};
  const auto ids = f.client->send_read_many(asked);
  for (size_t i = 0; i < asked.size(); i++) {
    INFO("read ", i);
    CHECK(f.client->wait(ids[i]).code() == codes[i]);
  }
  const Answer no_region = f.client->wait(f.client->send_read_many({asked[0]}, 999)[0]);
  CHECK(no_region.code() == ENXIO);
  CHECK(no_region.detail() == Detail::kNoRegion);
  f.client->base.target = 4711;
  const Answer elsewhere = f.client->wait(f.client->send_read_many({asked[0]})[0]);
  CHECK(elsewhere.code() == EAGAIN);
  CHECK(elsewhere.detail() == Detail::kWrongTarget);
  f.client->base.target = Cluster::target(0);
  f.client->base.capability = 77;
  const Answer unknown = f.client->wait(f.client->send_read_many({asked[0]})[0]);
  CHECK(unknown.code() == EACCES);
  CHECK(unknown.detail() == Detail::kNoCapability);
}

TEST_CASE("a frame of many reads that says another number than it holds ends the connection") {
  for (const int32_t off_by : {-1, 1}) {
    Fixture f;
    (void)f.client->send_read_many({entry(1, 0, 4096, 0)}, 0, off_by);
    CHECK(f.client->closed());
    CHECK(f.cluster.node(0).shard->metrics().frame_errors == 1);
  }
}

TEST_CASE("blocks with a tag are read the long way") {
  Fixture f;
  const auto data = pattern(8192, 9);
  wire::Update update = f.client->update(wire::UpdateKind::kCreate, 3, 0, 8192);
  update.context.client = update.context.channel = 0;
  update.context.sequence = 0;
  update.tag_bytes = 16;
  std::memset(update.tag, 7, 16);
  REQUIRE(f.client->wait(f.client->send_update(update, data, false)).code() == 0);
  const wire::ReadManyEntry asked = entry(3, 0, 8192, 4096);
  const Answer got = f.answer(f.client->send_read_many({asked})[0], asked);
  REQUIRE(got.code() == 0);
  CHECK(got.read.tag_bytes == 16);
  CHECK(got.payload == data);
  CHECK(f.client->together == 0);
}

TEST_CASE("reads under a newer chain version than the server's wait for it") {
  Fixture f;
  REQUIRE(f.client->write(1, 0, pattern(8192, 5)).code() == 0);
  const wire::ReadManyEntry asked = entry(1, 0, 4096, 0);
  f.client->base.chain_counter++;
  const uint64_t early = f.client->send_read_many({asked})[0];
  f.client->base.chain_counter--;
  CHECK(f.client->wait(f.client->send_read_many({asked})[0]).code() == 0);
  f.cluster.change({{0}});
  CHECK(f.client->wait(early).code() == 0);
}

TEST_CASE("more reads than the shard has records for wait their turn") {
  Cluster::Options options;
  options.max_ops = 4;
  Fixture f(options);
  REQUIRE(f.client->write(1, 0, pattern(1 << 20, 5)).code() == 0);
  std::vector<uint64_t> ids;
  for (uint32_t frame = 0; frame < 32; frame++) {
    std::vector<wire::ReadManyEntry> asked;
    for (uint32_t i = 0; i < 8; i++) asked.push_back(entry(1, (frame * 8 + i) * 4096, 4096, i * 4096));
    for (const uint64_t id : f.client->send_read_many(asked)) ids.push_back(id);
  }
  for (const uint64_t id : ids) REQUIRE(f.client->wait(id).code() == 0);
}
