// More in flight than all pools hold, over all chains at once, by the ways that clients take: it must
// all finish.
#include "test/server_harness.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

TEST_CASE("eight clients write large chunks over all chains at once, again and again") {
  Cluster::Options options;
  options.nodes = 3;
  options.chains = 6;
  options.pool_bytes = 64u << 20;
  options.region_limit_bytes = 1ull << 30;
  options.device_bytes = 2048ull << 20;
  Cluster cluster(options);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 8; thread++) {
    threads.emplace_back([&, thread] {
      std::vector<std::unique_ptr<TestClient>> clients;
      for (uint32_t node = 0; node < 3; node++) {
        clients.push_back(std::make_unique<TestClient>(*cluster.node(node).shard, net::Transport::kLocal,
                                                       kClient + thread));
        clients.back()->ready();
      }
      const auto data = pattern(4 << 20, static_cast<uint32_t>(thread));
      for (int round = 0; round < 2; round++) {
        std::vector<std::pair<TestClient*, uint64_t>> ids;
        for (uint32_t i = 0; i < 15; i++) {
          const uint32_t chain = 1 + i % 6;
          const uint32_t head = cluster.member(chain, 0);
          TestClient& client = *clients[head];
          client.base.chain = chain;
          client.base.target = Cluster::target(head, chain);
          wire::Update update = client.update(UpdateKind::kWrite, thread * 100 + i, 0, 4 << 20);
          update.context.channel = 1 + i;
          ids.emplace_back(&client, client.send_update(update, data, false, (i / 3) * (4u << 20)));
          client.flush();
        }
        for (auto& [client, id] : ids) failures += client->wait(id).code() == 0 ? 0 : 1;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failures == 0);
}
