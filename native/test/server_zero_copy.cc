// Replies that go out of the server's buffers without a copy: what is held, for how long, and what becomes of
// it when a connection or the server ends.
#include "test/server_reader.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;

namespace {

constexpr uint32_t kChunk = ReaderWorld::kChunk;
constexpr uint64_t kReads = 24;  // more than sockets take

Cluster::Options options_with(net::ZeroCopyMode mode) {
  Cluster::Options options;
  options.zero_copy_send = mode;
  options.pool_bytes = 128u << 20;
  return options;
}

struct World : ReaderWorld {
  explicit World(net::ZeroCopyMode mode = net::ZeroCopyMode::kOn)
      : ReaderWorld(options_with(mode), net::Transport::kTcp, kReads) {}
  // On a device in memory they are sent out of that instead.
  bool suits() {
    if (metrics().memory_reads == 0) return true;
    MESSAGE("TMPDIR is a tmpfs: its reads are lent");
    return false;
  }
  // Replies are on their way; how many connections there are. 0: they go another way.
  uint64_t sends() {
    ask();
    wait_for([](const ShardMetrics& now) { return now.zero_copy_sends + now.memory_reads > 0; });
    if (!suits()) return 0;
    CHECK(metrics().pool_used_bytes > 0);
    return metrics().sessions;
  }
  void ended(uint64_t sessions) {
    wait_for([&](const ShardMetrics& now) { return now.sessions == sessions - 1; });
    wait_for([](const ShardMetrics& now) { return now.pool_used_bytes == 0; });
  }
};

}  // namespace

TEST_CASE("zero copy: replies are right, and their buffers come back") {
  World w;
  for (int turn = 0; turn < 3; turn++) {
    w.ask();
    w.read_all();
  }
  if (!w.suits()) return;
  w.wait_for([](const ShardMetrics& now) { return now.pool_used_bytes == 0; });
  CHECK(w.metrics().zero_copy_sends >= kReads);
  // Errors and small reads between large ones.
  const uint64_t large = w.reader.send_read(1, 0, kChunk, true);
  const uint64_t small = w.reader.send_read(2, 4096, 4096, true);
  const uint64_t missing = w.reader.send_read(999, 0, kChunk, true);
  w.reader.flush();
  CHECK(w.reader.take_read(w.reader.wait(large), 0, 0).payload == w.content[0]);
  CHECK(w.reader.wait(small).payload ==
        std::vector<uint8_t>(w.content[1].begin() + 4096, w.content[1].begin() + 8192));
  CHECK(w.reader.wait(missing).code() == ENOENT);
  w.wait_for([](const ShardMetrics& now) { return now.pool_used_bytes == 0; });
}

TEST_CASE("zero copy: to this host replies are copied by default") {
  World w(net::ZeroCopyMode::kAuto);
  w.ask();
  w.read_all();
  CHECK(w.metrics().zero_copy_sends == 0);
}

TEST_CASE("zero copy: what a connection had comes back when it ends, in the middle of a reply too") {
  World w;
  const uint64_t sessions = w.sends();
  if (sessions == 0) return;
  w.reader.disconnect();
  w.ended(sessions);
  CHECK(w.writer.read(1, 0, kChunk).payload == w.content[0]);
}

TEST_CASE("zero copy: what a connection had comes back when the server ends it") {
  World w;
  const uint64_t sessions = w.sends();
  if (sessions == 0) return;
  const uint8_t garbage[64] = {1, 2, 3};
  w.reader.send_raw(garbage, sizeof garbage);
  w.ended(sessions);
  CHECK(w.metrics().frame_errors == 1);
}

TEST_CASE("zero copy: a server stops while a reader doesn't read") {
  World w;
  w.ask();
  w.wait_for([](const ShardMetrics& now) { return now.zero_copy_sends + now.memory_reads > 0; });
  CHECK(w.cluster.node(0).server->stop() == 0);
  w.cluster.node(0).server.reset();
}
