// A client that reads slowly: what a full socket holds up goes on, and afterwards costs nothing.
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;

namespace {

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// How often the shard's thread went to sleep.
uint64_t sleeps_of_shard() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, word;
    std::ifstream(task.path() / "comm") >> name;
    if (name != "ffs-shard-0") continue;
    std::ifstream status(task.path() / "status");
    while (status >> word && word != "voluntary_ctxt_switches:") {
    }
    uint64_t count = 0;
    status >> count;
    return count;
  }
  FAIL("there is no thread of the shard");
  return 0;
}

int bytes_in(int socket) {
  int bytes = 0;
  REQUIRE(::ioctl(socket, FIONREAD, &bytes) == 0);
  return bytes;
}

}  // namespace

// The wish to hear of room in the socket stayed after it was first full, and a Unix socket tells of room
// whenever its peer has read: each of a client's reads woke its server for nothing, for ever.
TEST_CASE("a socket that was full goes on each time, and wakes nobody any more once all is sent") {
  Cluster cluster({});
  TestClient client(*cluster.node(0).shard, net::Transport::kLocal);
  client.ready();
  client.base.chain_counter = cluster.version().counter;
  const auto data = pattern(1 << 20, 5);
  REQUIRE(client.write(1, 0, data).code() == 0);
  const int socket = client.connection().socket.get();
  for (int turn = 0; turn < 3; turn++) {
    std::vector<uint64_t> ids;
    for (int i = 0; i < 4; i++) ids.push_back(client.send_read(1, 0, 1 << 20, /*inline_data=*/true));
    client.flush();
    for (int before = -1, now = 0; now != before || now == 0; sleep_ms(2))
      before = std::exchange(now, bytes_in(socket));
    for (const uint64_t id : ids) {
      const Answer answer = client.take_read(client.wait(id), 0, 0);
      REQUIRE(answer.code() == 0);
      REQUIRE(answer.payload == data);
    }
  }
  constexpr uint64_t kReplies = 40;
  bool quiet = false;
  for (int attempt = 0; attempt < 10 && !quiet; attempt++) {  // the server wakes up by itself, now and then
    for (uint64_t i = 0, before = 0; i < kReplies; i++) {
      client.send_read(1, 0, 128, /*inline_data=*/true);
      client.flush();
      while (static_cast<uint64_t>(bytes_in(socket)) == before) sleep_ms(1);
      before = static_cast<uint64_t>(bytes_in(socket));
    }
    sleep_ms(5);
    const int each = bytes_in(socket) / static_cast<int>(kReplies);
    const uint64_t begin = sleeps_of_shard();
    std::vector<uint8_t> bytes(static_cast<size_t>(each));
    for (uint64_t i = 0; i < kReplies; i++) {
      REQUIRE(::recv(socket, bytes.data(), bytes.size(), 0) == each);
      sleep_ms(1);
    }
    quiet = sleeps_of_shard() - begin < kReplies / 2;
  }
  CHECK(quiet);
}

// Replies that nobody takes stand in the pool that all reads share.
TEST_CASE("clients that don't read hold no buffer for long; one that reads slowly isn't ended") {
  constexpr uint32_t kBytes = 4 << 20;
  Cluster::Options options;
  options.pool_bytes = 1;            // the least: one arena of 16 MiB a use
  options.failure_timeout_ms = 500;  // nothing for twice as long, and it is over
  Cluster cluster(options);
  const Shard& shard = *cluster.node(0).shard;
  const auto data = pattern(kBytes, 5);
  const auto begin = [&](uint64_t number, int buffer_bytes) {
    auto client = std::make_unique<TestClient>(shard, net::Transport::kTcp, kClient + number);
    const int socket = client->connection().socket.get();
    REQUIRE(::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes) == 0);
    client->ready();
    client->base.chain_counter = cluster.version().counter;
    return client;
  };
  auto reader = begin(1, 1 << 20);
  REQUIRE(reader->write(1, 0, data).code() == 0);
  auto slow = begin(2, 64 << 10);
  const uint64_t slow_id = slow->send_read(1, 0, kBytes, true);
  slow->flush();
  std::vector<std::unique_ptr<TestClient>> stopped;
  for (uint64_t number = 3; number <= 6; number++) {
    stopped.push_back(begin(number, 64 << 10));
    for (int i = 0; i < 4; i++) stopped.back()->send_read(1, 0, kBytes, true);
    stopped.back()->flush();
  }
  sleep_ms(100);
  const uint64_t id = reader->send_read(1, 0, kBytes, true);
  reader->flush();
  std::atomic<bool> served{false};
  std::thread others([&] {
    CHECK(reader->take_read(reader->wait(id), 0, 0).payload == data);
    served = true;
  });
  // A little at a time, for longer than somebody may take nothing, and as long as the others wait.
  for (int i = 0; i < 15 || !served; i++) {
    sleep_ms(100);
    CHECK_FALSE(slow->closed(/*turns=*/1));
  }
  others.join();
  CHECK(slow->take_read(slow->wait(slow_id), 0, 0).payload == data);
  const auto sessions = [&] { return cluster.node(0).shard->metrics().sessions; };
  for (int i = 0; i < 500 && sessions() > 2; i++) sleep_ms(10);
  CHECK(sessions() == 2);
}
