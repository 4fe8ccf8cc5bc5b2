// A full device from which chunks are being removed: what is written meanwhile waits for the room that comes
// (server/evict.h, admit), which nothing but removals brings in these tests.
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

namespace {

constexpr uint32_t kChunk = 4u << 20;

struct Full {
  explicit Full(uint32_t nodes) : cluster(options(nodes)), data(pattern(kChunk, 1)) {
    auto client = this->client();
    REQUIRE(client->write(4999, 0, pattern(100, 1)).code() == 0);  // small chunks have a slab of their own
    while ((code = write(*client, count)) == 0) count++;
    REQUIRE(count > 20);
  }
  static Cluster::Options options(uint32_t nodes) {
    Cluster::Options options;
    options.nodes = nodes;
    options.device_bytes = 256ull << 20;
    options.in_memory = true;  // removals follow each other without a slow disk between them
    return options;
  }
  std::unique_ptr<TestClient> client() {
    auto made =
        std::make_unique<TestClient>(*cluster.node(0).shard, net::Transport::kTcp, kClient + clients++);
    made->ready();
    made->base.chain_counter = cluster.version().counter;
    return made;
  }
  // As a client that sends again what it is told to.
  uint32_t write(TestClient& client, uint64_t index) {
    while (true) {
      const Answer answer = client.write(index, 0, data);
      if (answer.detail() != Detail::kReissue) return answer.code();
      std::this_thread::sleep_for(std::chrono::milliseconds(answer.update.retry_after_ms));
    }
  }

  uint64_t clients = 0;
  Cluster cluster;
  std::vector<uint8_t> data;
  uint64_t count = 0;
  uint32_t code = 0;
};

}  // namespace

TEST_CASE("writes to a full device wait while chunks are removed from it, and are refused when none are") {
  Full w(2);
  CHECK(w.code == ENOSPC);
  auto remover = w.client(), writer = w.client();
  REQUIRE(remover->change(UpdateKind::kRemove, 0).code() == 0);
  std::thread removing([&] {
    for (uint64_t index = 1; index < 6; index++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      CHECK(remover->change(UpdateKind::kRemove, index).code() == 0);
    }
  });
  for (uint64_t index = 1000; index < 1006; index++) CHECK(w.write(*writer, index) == 0);
  removing.join();
  for (uint64_t index = 1000; index < 1006; index++) {
    CHECK(writer->read(index, 0, kChunk).payload == w.data);
  }
  CHECK(w.write(*writer, 2000) == ENOSPC);  // the removals are over
}

TEST_CASE("a write to a full device isn't kept waiting for ever by removals that bring no room") {
  Full w(1);
  auto remover = w.client(), writer = w.client();
  std::atomic<bool> over{false}, begun{false};
  std::thread removing([&] {
    const std::vector<uint8_t> small(100, 3);
    for (uint64_t index = 5000; !over; index = index == 5000 ? 5001 : 5000) {
      CHECK(remover->write(index, 0, small).code() == 0);
      CHECK(remover->change(UpdateKind::kRemove, index).code() == 0);
      begun = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  while (!begun) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(w.write(*writer, 2000) == ENOSPC);
  over = true;
  removing.join();
}
