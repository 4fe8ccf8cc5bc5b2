// A reader that asks for chunks 1 ... reads and doesn't look at what comes, and somebody who writes, for
// tests of what replies hold meanwhile.
#pragma once

#include "test/server_harness.h"

namespace ffs::server::testing {

struct ReaderWorld {
  static constexpr uint32_t kChunk = 1 << 20;

  ReaderWorld(const Cluster::Options& options, net::Transport transport, uint64_t reads)
      : cluster(options), reader(shard(), transport), writer(shard(), net::Transport::kTcp) {
    for (TestClient* client : {&reader, &writer}) {
      client->ready();
      client->base.chain_counter = cluster.version().counter;
    }
    for (uint64_t i = 1; i <= reads; i++) {
      content.push_back(pattern(kChunk, static_cast<uint32_t>(i)));
      REQUIRE(writer.write(i, 0, content.back()).code() == 0);
    }
  }
  const Shard& shard() { return *cluster.node(0).shard; }
  ShardMetrics metrics() { return cluster.node(0).shard->metrics(); }
  template <typename F>
  void wait_for(F&& good) {
    for (int i = 0; i < 2000; i++) {
      if (good(metrics())) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    REQUIRE_MESSAGE(false, "it doesn't come to that within 20 s");
  }
  void ask() {
    for (uint64_t i = 1; i <= content.size(); i++)
      ids.push_back(reader.send_read(i, 0, kChunk, /*inline_data=*/true));
    reader.flush();
  }
  void read_all() {
    for (uint64_t i = 0; i < content.size(); i++) {
      const Answer answer = reader.take_read(reader.wait(ids[i]), 0, 0);
      REQUIRE(answer.code() == 0);
      CHECK(answer.payload == content[i]);
    }
    ids.clear();
  }

  Cluster cluster;
  TestClient reader, writer;
  std::vector<std::vector<uint8_t>> content;
  std::vector<uint64_t> ids;
};

}  // namespace ffs::server::testing
