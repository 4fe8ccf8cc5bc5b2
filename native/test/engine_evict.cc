// The eviction policy: its order, its pool, what it remembers of evicted chunks, and a replay of public
// request traces (tests/data/traces) against exact LRU-2, which forgets no chunk that it has ever seen.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "engine/access.h"
#include "engine/evict.h"
#include "engine/evict_history.h"
#include "engine/state.h"

using namespace ffs;
using namespace ffs::engine;

namespace {

constexpr uint64_t kSpace = 7;
constexpr uint16_t kTarget = 0;

ChunkKey key_of(uint64_t id) {
  // Like a KV block's: the hash says where it lies.
  std::array<uint8_t, 16> bytes;
  const uint64_t high = mix64(id + 1), low = mix64(id ^ 0x5bd1e995);
  std::memcpy(bytes.data(), &high, 8);
  std::memcpy(bytes.data() + 8, &low, 8);
  return ChunkKey::of(kSpace, bytes);
}

ChunkSample sample(uint64_t id, Access access, uint64_t expiry_ms = 0, bool pinned = false) {
  return {key_of(id), Version{{1, 1}, id + 1}, 4096, access, pinned, expiry_ms};
}

// --- traces ------------------------------------------------------------------------------------------

struct Request {
  uint64_t at_ms = 0;
  std::vector<uint32_t> blocks;
};

std::vector<Request> read_trace(const std::string& name) {
  const std::string file = "tests/data/traces/" + name + ".trace";
  std::string path;
  for (const std::string up : {"", "../", "../../", "../../../"}) {
    if (path.empty() && std::ifstream(up + file).good()) path = up + file;
  }
  const std::string here = __FILE__;
  if (path.empty()) path = here.substr(0, here.rfind("native/test/")) + file;
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), "no trace ", path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  size_t at = 0;
  const auto number = [&] {
    uint64_t value = 0;
    for (uint32_t shift = 0;; shift += 7) {
      FFS_CHECK(at < bytes.size());
      const auto byte = static_cast<uint8_t>(bytes[at++]);
      value |= uint64_t{byte & 0x7fu} << shift;
      if ((byte & 0x80) == 0) return value;
    }
  };
  const auto difference = [&] {
    const uint64_t value = number();
    return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
  };
  std::vector<Request> requests;
  int64_t at_ms = 0;
  while (at < bytes.size()) {
    at_ms += difference();
    Request request{static_cast<uint64_t>(at_ms), {}};
    int64_t block = 0;
    for (uint64_t runs = number(); runs > 0; runs--) {
      block += difference();
      for (uint64_t count = number(); count > 0; count--) {
        request.blocks.push_back(static_cast<uint32_t>(block++));
      }
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

uint64_t unique_blocks(const std::vector<Request>& trace) {
  std::set<uint32_t> seen;
  for (const Request& request : trace) seen.insert(request.blocks.begin(), request.blocks.end());
  return seen.size();
}

// --- replay ------------------------------------------------------------------------------------------

// A cache over the engine's own index and stamps. Who goes is for `victim` to say.
class Cache {
 public:
  Cache(uint64_t capacity_bytes, bool mixed_sizes)
      : state_(1u << 19, 1, nullptr), capacity_bytes_(capacity_bytes), mixed_(mixed_sizes) {}
  virtual ~Cache() = default;

  bool holds(uint32_t block) const { return state_.index.find(kTarget, key_of(block)) != 0; }
  uint64_t bytes() const { return bytes_; }
  uint64_t block_bytes(uint32_t block) const {
    return mixed_ ? uint64_t{4096} << (mix64(block) % 9) : 4096;  // 4 KiB to 1 MiB
  }

  void use(uint32_t block, uint32_t stamp) {
    uint32_t chunk = state_.index.find(kTarget, key_of(block));
    if (chunk != 0) {
      used(block, state_.index[chunk].access, false);
      state_.touch(chunk, stamp);
    } else {
      while (bytes_ + block_bytes(block) > capacity_bytes_) evict(stamp);
      chunk = state_.index.insert(kTarget, key_of(block));
      state_.index[chunk].image.version = Version{{1, 1}, block + 1};
      const uint32_t before = recall(block, stamp);
      const bool another = before != 0 && stamp > before + kCorrelatedStamps;
      state_.index[chunk].access = {stamp, another ? before : 0};
      bytes_ += block_bytes(block);
    }
    used(block, state_.index[chunk].access, true);
  }

 protected:
  virtual Version victim() = 0;
  virtual void used(uint32_t, Access, bool) {}
  virtual void remember(uint32_t block, uint32_t last, uint32_t now) = 0;
  virtual uint32_t recall(uint32_t block, uint32_t now) = 0;  // when a block that was evicted was used last

  State state_;

 private:
  void evict(uint32_t now) {
    const auto block = static_cast<uint32_t>(victim().update - 1);
    const uint32_t chunk = state_.index.find(kTarget, key_of(block));
    FFS_CHECK(chunk != 0);
    used(block, state_.index[chunk].access, false);
    remember(block, state_.index[chunk].access.last, now);
    state_.index[chunk].image.version = Version{};
    state_.index.erase(chunk);
    bytes_ -= block_bytes(block);
  }
  const uint64_t capacity_bytes_;
  const bool mixed_;
  uint64_t bytes_ = 0;
};

class Sampled final : public Cache {
 public:
  using Cache::Cache;

 private:
  // As the server's worker does it: fresh samples for each victim; one that was used since is passed over.
  Version victim() override {
    std::array<ChunkSample, EvictionPool::kSamples> samples;
    for (;;) {
      const uint32_t count = sample_space(state_.index, kTarget, kSpace, pool_.next_seed(), samples);
      pool_.feed(std::span(samples).first(count), 0);
      Victim victim;
      while (pool_.take(&victim)) {
        const uint32_t chunk = state_.index.find(kTarget, victim.key);
        if (chunk != 0 && state_.index[chunk].access == victim.access) return victim.version;
      }
    }
  }
  void remember(uint32_t block, uint32_t last, uint32_t now) override {
    history_.fit(state_.index.size());
    history_.remember(key_of(block), last, now);
  }
  uint32_t recall(uint32_t block, uint32_t now) override { return history_.recall(key_of(block), now); }

  EvictionPool pool_{42};
  EvictionHistory history_;
};

class Exact final : public Cache {
 public:
  using Cache::Cache;

 private:
  using Entry = std::pair<EvictionRank, uint32_t>;
  Version victim() override { return Version{{1, 1}, order_.begin()->second + 1}; }
  void used(uint32_t block, Access access, bool now) override {
    const Entry entry{rank_of(sample(block, access), 0, 0), block};
    if (now) {
      order_.insert(entry);
    } else {
      order_.erase(entry);
    }
  }
  void remember(uint32_t block, uint32_t last, uint32_t) override { history_[block] = last; }
  uint32_t recall(uint32_t block, uint32_t) override {
    const auto at = history_.find(block);
    return at != history_.end() ? at->second : 0;
  }
  std::set<Entry> order_;
  std::unordered_map<uint32_t, uint32_t> history_;
};

// The share of blocks that a request found as a whole prefix.
template <typename Policy>
double hit_ratio(const std::vector<Request>& trace, uint64_t capacity_bytes, bool mixed = false) {
  Policy cache(capacity_bytes, mixed);
  uint64_t hits = 0, blocks = 0;
  for (const Request& request : trace) {
    const auto stamp = static_cast<uint32_t>(request.at_ms / kStampMs + 1);
    blocks += request.blocks.size();
    for (uint32_t block : request.blocks) {
      if (!cache.holds(block)) break;
      hits++;
    }
    for (uint32_t block : request.blocks) cache.use(block, stamp);
    FFS_CHECK(cache.bytes() <= capacity_bytes);
  }
  return static_cast<double>(hits) / static_cast<double>(blocks);
}

}  // namespace

TEST_CASE(
    "expired chunks go first, then those of unknown age, then those used once, then by the use before the "
    "last") {
  const uint64_t now_ms = 1000;
  const ChunkSample expired = sample(1, {90, 80}, 1000), unknown = sample(2, {});
  const ChunkSample once_long_ago = sample(3, {10, 0}), once = sample(4, {20, 0});
  const ChunkSample twice_long_ago = sample(5, {30, 5}), twice = sample(6, {31, 6});
  const ChunkSample live = sample(7, {40, 39}, 1001);
  EvictionPool pool(1);
  CHECK(pool.feed(std::vector{twice, once, live, unknown, twice_long_ago, expired, once_long_ago}, now_ms) ==
        7);
  Victim victim;
  for (const ChunkSample* next :
       {&expired, &unknown, &once_long_ago, &once, &twice_long_ago, &twice, &live}) {
    REQUIRE(pool.take(&victim));
    CHECK(victim.key == next->key);
    CHECK(victim.expired == (next == &expired));
  }
  CHECK_FALSE(pool.take(&victim));
}

TEST_CASE("a pinned chunk is no candidate until it has expired") {
  EvictionPool pool(1);
  CHECK(pool.feed(std::vector{sample(1, {1, 0}, 0, true), sample(2, {1, 0}, 50, true)}, 49) == 0);
  CHECK(pool.empty());
  CHECK(pool.feed(std::vector{sample(1, {1, 0}, 0, true), sample(2, {1, 0}, 50, true)}, 50) == 1);
  Victim victim;
  REQUIRE(pool.take(&victim));
  CHECK(victim.key == key_of(2));
  CHECK(victim.expired);
}

TEST_CASE("chunks of unknown age go in a random order, another one by another seed") {
  const auto order = [](uint64_t seed) {
    EvictionPool pool(seed);
    std::vector<ChunkSample> all;
    for (uint64_t id = 0; id < 32; id++) all.push_back(sample(id, {}));
    pool.feed(all, 0);
    std::vector<uint64_t> taken;
    Victim victim;
    while (pool.take(&victim)) taken.push_back(victim.version.update);
    return taken;
  };
  CHECK(order(1).size() == 32);
  CHECK(order(1) == order(1));
  CHECK(order(1) != order(2));
  CHECK_FALSE(std::is_sorted(order(1).begin(), order(1).end()));
}

TEST_CASE(
    "the pool keeps the best candidates of all samples, and forgets what it knew of a chunk seen anew") {
  EvictionPool pool(1);
  for (uint64_t id = 0; id < 1000; id++)
    pool.feed(std::vector{sample(id, {static_cast<uint32_t>(2000 - id), 0})}, 0);
  pool.feed(std::vector{sample(999, {5000, 1001})}, 0);  // used again
  Victim victim;
  uint32_t taken = 0;
  for (uint64_t id = 998; pool.take(&victim); id--, taken++) {
    if (victim.key == key_of(999)) break;
    CHECK(victim.key == key_of(id));
  }
  CHECK(taken == EvictionPool::kCandidates - 1);
}

TEST_CASE("the history knows evicted chunks for a while, to about a second, and forgets the oldest first") {
  EvictionHistory history;
  CHECK(history.recall(key_of(1), 100) == 0);
  history.remember(key_of(1), 50, 100);  // no room was made: nothing is kept
  CHECK(history.recall(key_of(1), 100) == 0);
  history.fit(1000);
  CHECK(history.memory_bytes() == history.entries() * 4);
  const uint32_t start = 1u << 30;  // the units have wrapped often by then
  uint32_t now = start;
  for (uint64_t id = 0; id < 4 * history.entries(); id++) {
    history.remember(key_of(id), now, now + 1);
    now++;
  }
  uint32_t newest = 0, wrong = 0, oldest = 0;
  for (uint64_t id = 4 * history.entries() - history.entries() / 4; id < 4 * history.entries(); id++) {
    const uint32_t used = history.recall(key_of(id), now);
    newest += used != 0 ? 1 : 0;
    const uint32_t right = start + static_cast<uint32_t>(id);
    wrong += used != 0 && (used > right + 16 || used + 16 < right) ? 1 : 0;
  }
  for (uint64_t id = 0; id < history.entries() / 4; id++)
    oldest += history.recall(key_of(id), now) != 0 ? 1 : 0;
  CHECK(newest > history.entries() / 4 * 95 / 100);
  CHECK(oldest < history.entries() / 4 / 50);  // others under the same fingerprint
  CHECK(wrong < history.entries() / 4 / 50);
  CHECK(history.recall(key_of(4 * history.entries() - 1), now) == 0);  // told once
}

TEST_CASE(
    "the history grows with its space: four times as many chunks at first, twice as many of very many") {
  EvictionHistory history;
  history.fit(1);
  CHECK(history.entries() == 16384);
  history.fit(5000);
  CHECK(history.entries() == 16384);
  history.fit(50000);
  CHECK(history.entries() == 200000);
  history.fit(1000000);
  CHECK(history.memory_bytes() == 8 * 1000000);
}

TEST_CASE("on public traces the sampled policy hits as often as exact LRU-2, within two points") {
  for (const std::string name : {"conversation", "synthetic"}) {
    const std::vector<Request> trace = read_trace(name);
    const uint64_t blocks = unique_blocks(trace);
    CHECK(blocks == (name == "conversation" ? 182790 : 43924));
    for (const uint64_t percent : {1, 5, 10, 25, 50}) {
      const uint64_t capacity_bytes = blocks * percent / 100 * 4096;
      const double exact = hit_ratio<Exact>(trace, capacity_bytes);
      const double sampled = hit_ratio<Sampled>(trace, capacity_bytes);
      std::printf("%s, %2u%% of all blocks: exact LRU-2 %.3f, sampled %.3f\n", name.c_str(),
                  static_cast<unsigned>(percent), exact, sampled);
      CHECK(std::abs(exact - sampled) < 0.02);
    }
  }
}

TEST_CASE("capacity is in bytes: blocks of mixed sizes stay below it and hit as with exact LRU-2") {
  const std::vector<Request> trace = read_trace("synthetic");
  const uint64_t capacity_bytes = uint64_t{43924} * 4096 * (511.0 / 9) / 10;  // a tenth of all
  const double exact = hit_ratio<Exact>(trace, capacity_bytes, true);
  const double sampled = hit_ratio<Sampled>(trace, capacity_bytes, true);
  std::printf("synthetic, mixed sizes, 10%% of all bytes: exact LRU-2 %.3f, sampled %.3f\n", exact, sampled);
  CHECK(std::abs(exact - sampled) < 0.02);
}
