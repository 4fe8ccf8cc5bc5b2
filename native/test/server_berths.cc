// New chunks whose bytes are put into their slot of a device on tmpfs as they come (docs/architecture.md,
// Receiving into memory): what is stored, and that nothing of what comes to nothing is seen or keeps its
// slot.
#include <fcntl.h>
#include <poll.h>
#include <sys/statvfs.h>

#include "base/fd.h"
#include "io/memory_copies.h"
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

namespace {

constexpr uint64_t kDevice = 256u << 20;
constexpr auto kBoth = {net::Transport::kTcp, net::Transport::kLocal};

bool suits() {
  char path[] = "/dev/shm/ffs-berths-XXXXXX";
  Fd fd(::mkostemp(path, O_CLOEXEC | O_DIRECT));
  struct statvfs facts {};
  const bool good = fd.valid() && io::MemoryCopies::lies_in_memory(fd.get()) &&
                    ::fstatvfs(fd.get(), &facts) == 0 && facts.f_bavail * facts.f_frsize > 2 * kDevice;
  if (fd.valid()) ::unlink(path);
  if (!good) MESSAGE("/dev/shm is no tmpfs with room");
  return good;
}

Cluster::Options in_memory(uint32_t nodes = 1) {
  Cluster::Options options;
  options.in_memory = true;
  options.nodes = nodes;
  options.device_bytes = kDevice;
  return options;
}

struct World {
  explicit World(const Cluster::Options& options = in_memory()) : cluster(options) {}
  const Shard& shard() { return *cluster.node(0).shard; }
  ShardMetrics metrics() { return cluster.node(0).shard->metrics(); }
  uint64_t free_bytes() { return metrics().capacity.free_bytes; }

  std::unique_ptr<TestClient> client(net::Transport transport = net::Transport::kTcp) {
    auto made = std::make_unique<TestClient>(shard(), transport);
    made->ready();
    made->base.chain_counter = cluster.version().counter;
    return made;
  }
  template <typename F>
  void wait_for(F&& good) {
    for (int i = 0; i < 2000; i++) {
      if (good()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    REQUIRE_MESSAGE(false, "it doesn't come to that within 10 s");
  }

  Cluster cluster;
};

// As a KV client's: it needs no entry in the retry table.
wire::Update creation(TestClient& client, uint64_t index, const std::vector<uint8_t>& data) {
  auto update = client.update(UpdateKind::kCreate, index, 0, static_cast<uint32_t>(data.size()));
  update.context.client = update.context.sequence = 0;
  update.context.channel = 0;
  return update;
}

Answer create(TestClient& client, uint64_t index, const std::vector<uint8_t>& data) {
  const auto update = creation(client, index, data);
  return client.wait(client.send_update(update, data, !client.lends()));
}

// The frame of a create, payload and all, as bytes.
std::vector<uint8_t> frame_of(TestClient& client, uint64_t index, const std::vector<uint8_t>& data,
                              uint64_t id) {
  auto update = creation(client, index, data);
  update.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
  update.bulk.length = update.length;
  std::vector<uint32_t> crcs(net::piece_count(0, update.length));
  net::piece_crcs(0, data, crcs.data());
  net::SendQueue queue;
  queue.speak(wire::kProtocolVersion);
  queue.push(wire::Type::kUpdate, id, update,
             net::Bytes(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4), data);
  std::vector<uint8_t> bytes;
  iovec pieces[8];
  int fd;
  const int count = queue.gather(pieces, 8, &fd);
  for (int i = 0; i < count; i++) {
    const auto* from = static_cast<const uint8_t*>(pieces[i].iov_base);
    bytes.insert(bytes.end(), from, from + pieces[i].iov_len);
  }
  return bytes;
}

// Bytes of a frame from there on, however many calls that takes; less if the connection ends.
void send_part(TestClient& client, const std::vector<uint8_t>& bytes, size_t from, size_t size) {
  const int fd = client.connection().socket.get();
  while (size > 0) {
    pollfd one{fd, POLLOUT, 0};
    REQUIRE(::poll(&one, 1, 10000) == 1);
    const ssize_t sent = ::send(fd, bytes.data() + from, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN) continue;
    if (sent < 0) return;
    from += static_cast<size_t>(sent);
    size -= static_cast<size_t>(sent);
  }
}

}  // namespace

TEST_CASE("berths: new chunks of one copy go into their slots at once, others and other updates do not") {
  if (!suits()) return;
  World w;
  for (const auto transport : kBoth) {
    auto client = w.client(transport);
    auto other = w.client();
    uint64_t index = 100 * static_cast<uint64_t>(transport);
    for (const uint32_t length :
         {1u, 100u, 4096u, 65536u, 65537u, 262144u, 1000000u, 1u << 20, (4u << 20) + 5000, 16u << 20}) {
      const auto data = pattern(length, length + static_cast<uint32_t>(transport));
      const uint64_t before = w.metrics().memory_writes;
      REQUIRE(create(*client, ++index, data).code() == 0);
      CHECK(w.metrics().memory_writes == before + 1);
      CHECK(other->read(index, 0, 16u << 20).payload == data);
      const uint64_t id =
          other->send_read(index, 0, length, true, 0, wire::kReadWantChecksums | wire::kReadVerifyWhole);
      CHECK(other->take_read(other->wait(id), 0, 0).payload == data);  // as it is at rest
      CHECK(create(*client, index, pattern(length, 5)).code() == EEXIST);
      if (length > 10) {  // overwritten like any other
        auto changed = data;
        const auto patch = pattern(10, 3);
        std::copy(patch.begin(), patch.end(), changed.begin());
        REQUIRE(client->write(index, 0, patch).code() == 0);
        CHECK(other->read(index, 0, 16u << 20).payload == changed);
      }
    }
    const uint64_t before = w.metrics().memory_writes;
    REQUIRE(client->write(++index, 0, pattern(1 << 20, 1)).code() == 0);
    CHECK(w.metrics().memory_writes == before);
  }
  w.cluster.restart();
  for (const auto transport : kBoth) {
    auto client = w.client();
    const uint64_t index = 100 * static_cast<uint64_t>(transport) + 8;
    auto data = pattern(1u << 20, (1u << 20) + static_cast<uint32_t>(transport));
    const auto patch = pattern(10, 3);
    std::copy(patch.begin(), patch.end(), data.begin());
    CHECK(client->read(index, 0, 16u << 20).payload == data);
  }
  World pair(in_memory(2));
  auto client = pair.client();
  REQUIRE(create(*client, 1, pattern(1 << 20, 1)).code() == 0);
  CHECK(pair.metrics().memory_writes == 0);
  CHECK(client->read(1, 0, 1 << 20).payload == pattern(1 << 20, 1));
}

TEST_CASE("berths: bytes that don't match their checksums are nothing, wherever they are wrong") {
  if (!suits()) return;
  World w;
  constexpr uint32_t kLength = (1u << 20) + 1000;
  for (const auto transport : kBoth) {
    auto client = w.client(transport);
    const uint64_t index = 10 * static_cast<uint64_t>(transport);
    const auto data = pattern(kLength, 1);
    for (const uint32_t wrong : {0u, 8u, 16u}) {
      const uint64_t before = w.free_bytes(), failures = w.metrics().crc_failures;
      std::vector<uint32_t> crcs(net::piece_count(0, kLength));
      net::piece_crcs(0, data, crcs.data());
      crcs[wrong] ^= 1;
      const auto update = client->update(UpdateKind::kCreate, index, 0, kLength);
      const Answer answer = client->wait(client->send_update_with(update, data, crcs, !client->lends()));
      CHECK(answer.code() == EBADMSG);
      CHECK(answer.detail() == Detail::kChecksum);
      CHECK(w.metrics().crc_failures == failures + 1);
      CHECK(w.free_bytes() == before);
      CHECK(client->read(index, 0, kLength).code() == ENOENT);
    }
    CHECK(create(*client, index, data).code() == 0);
    CHECK(client->read(index, 0, kLength).payload == data);
  }
}

TEST_CASE("berths: whoever dies in the middle leaves no chunk and no slot behind") {
  if (!suits()) return;
  World w;
  const auto data = pattern(4u << 20, 1), other = pattern(4u << 20, 2);
  const uint64_t before = w.free_bytes();
  auto witness = w.client();
  for (const size_t part : {size_t{1000}, size_t{70000}, size_t{3} << 20, data.size()}) {
    auto client = w.client();
    const auto bytes = frame_of(*client, 1, data, 77);
    const size_t sent = std::min(part, bytes.size() - 1);
    send_part(*client, bytes, 0, sent);
    w.wait_for([&] { return w.free_bytes() < before; });  // it has its slot
    CHECK(witness->read(1, 0, 4u << 20).code() == ENOENT);
    client->disconnect();
    w.wait_for([&] { return w.free_bytes() == before; });
    CHECK(witness->read(1, 0, 4u << 20).code() == ENOENT);
  }
  // Somebody else was faster: the first one's bytes stand.
  auto slow = w.client();
  const auto bytes = frame_of(*slow, 1, data, 78);
  send_part(*slow, bytes, 0, bytes.size() - 100000);
  w.wait_for([&] { return w.free_bytes() < before; });
  REQUIRE(create(*witness, 1, other).code() == 0);
  const uint64_t both = w.free_bytes();
  send_part(*slow, bytes, bytes.size() - 100000, 100000);
  CHECK(slow->wait(78).code() == EEXIST);
  CHECK(witness->read(1, 0, 4u << 20).payload == other);
  w.wait_for([&] { return w.free_bytes() > both; });
  const uint64_t one = w.free_bytes();
  // And the server that ends meanwhile.
  send_part(*slow, frame_of(*slow, 2, data, 79), 0, 1u << 20);
  w.wait_for([&] { return w.free_bytes() < one; });
  w.cluster.restart();
  auto after = w.client();
  CHECK(after->read(1, 0, 4u << 20).payload == other);
  CHECK(after->read(2, 0, 4u << 20).code() == ENOENT);
  CHECK(w.free_bytes() == one);
}

TEST_CASE("berths: those who send and don't go on have but a part of the room, and a full device is full") {
  if (!suits()) return;
  Cluster::Options options = in_memory();
  options.pool_bytes = 256u << 20;
  World w(options);
  const auto data = pattern(16u << 20, 1);
  const uint64_t before = w.free_bytes();
  std::vector<std::unique_ptr<TestClient>> idle;
  for (int i = 0; i < 3; i++) {
    idle.push_back(w.client());
    const auto bytes = frame_of(*idle.back(), 100 + static_cast<uint64_t>(i), data, 77);
    send_part(*idle.back(), bytes, 0, 100000);
  }
  auto client = w.client();
  w.wait_for([&] { return w.free_bytes() < before && w.metrics().pool_used_bytes > 0; });
  CHECK(w.free_bytes() >= before - (32u << 20));  // one has a slot, of a class that then keeps one in reserve
  // All the rest can be filled, by whichever way there is.
  int stored = 0;
  uint32_t code = 0;
  const auto block = pattern(1u << 20, 2);
  while ((code = create(*client, 1000 + static_cast<uint64_t>(stored), block).code()) == 0) stored++;
  CHECK(code == ENOSPC);
  const auto placed = static_cast<int>(w.metrics().memory_writes);
  CHECK(placed > 10);  // while there is room to spare
  CHECK(placed < stored);
  for (int i = 0; i < stored; i += 7) {
    CHECK(client->read(1000 + static_cast<uint64_t>(i), 0, 1u << 20).payload == block);
  }
}

// The first bytes of a payload come with its head, and are copied from there: by the process, not by a system
// call.
TEST_CASE("berths: a device that was cut before a block came takes it the ordinary way") {
  if (!suits()) return;
  for (const auto transport : kBoth) {
    for (const uint32_t length : {5000u, 60000u, 4u << 20}) {
      World w;
      const auto data = pattern(length, 1);
      auto client = w.client(transport);
      REQUIRE(create(*client, 1, data).code() == 0);
      const uint64_t before = w.metrics().memory_writes, free = w.free_bytes();
      const std::string device = w.cluster.node(0).device;
      REQUIRE(::truncate(device.c_str(), 1 << 20) == 0);
      const auto update = creation(*client, 2, data);
      const uint64_t id = client->send_update(update, data, /*inline_data=*/true);
      CHECK(client->wait(id).code() == 0);  // a file grows again where it is written
      CHECK(w.metrics().memory_writes == before);
      CHECK(client->read(2, 0, length).payload == data);
      CHECK(w.free_bytes() < free);
    }
  }
}

TEST_CASE("berths: a device that was cut ends the connection or the try, not the server") {
  if (!suits()) return;
  for (const auto transport : kBoth) {
    World w;
    const auto data = pattern(4u << 20, 1);
    auto client = w.client(transport);
    REQUIRE(create(*client, 1, data).code() == 0);
    const std::string device = w.cluster.node(0).device;
    if (transport == net::Transport::kTcp) {
      const auto bytes = frame_of(*client, 2, data, 77);
      const uint64_t before = w.free_bytes();
      send_part(*client, bytes, 0, 1u << 20);
      w.wait_for([&] { return w.free_bytes() < before; });
      REQUIRE(::truncate(device.c_str(), 1 << 20) == 0);
      send_part(*client, bytes, 1u << 20, 1u << 20);
      CHECK(client->closed());
    } else {
      REQUIRE(::truncate(device.c_str(), 1 << 20) == 0);
      const Answer answer = create(*client, 2, data);
      CHECK(answer.code() == EBADMSG);  // to be sent again
    }
    REQUIRE(::truncate(device.c_str(), kDevice) == 0);
    auto again = w.client(transport);
    const uint64_t before = w.metrics().memory_writes;
    CHECK(create(*again, 2, data).code() == 0);
    CHECK(again->read(2, 0, 4u << 20).payload == data);
    CHECK(w.metrics().memory_writes == before);  // the ordinary way, from then on
  }
}
