// The engine on a simulated disk: each operation once, by hand.
#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>

#include "base/crc32c.h"
#include "engine/chunk_store.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

TEST_CASE("a write is there after it is acknowledged, and after reopening") {
  Harness h(1);
  h.format();
  h.open();
  auto data = random_bytes(300'000, 7);
  REQUIRE(h.write(1, v(1), Version{}, 0, data) == 0);
  CHECK(h.pending_count(1) == 1);
  CHECK(h.read(1, 0, 400'000).error == ENOENT);
  REQUIRE(h.commit(1, v(1)));
  CHECK(h.read(1, 0, 400'000).bytes == data);
  h.close();
  h.open();
  CHECK(h.read(1, 0, 400'000).bytes == data);
  CHECK(h.store->check_consistency() == "");
}

TEST_CASE("every path of a write gives the model's bytes and right checksums") {
  Harness h(2);
  h.format();
  h.open();
  std::vector<uint8_t> model;
  uint64_t version = 0;
  auto put = [&](uint32_t offset, uint32_t length) {
    auto data = random_bytes(length, 100 + version);
    if (model.size() < offset + length) model.resize(offset + length);
    std::memcpy(model.data() + offset, data.data(), length);
    Version base = version == 0 ? Version{} : v(version);
    version++;
    REQUIRE(h.write(5, v(version), base, offset, data) == 0);
    REQUIRE(h.commit(5, v(version)));
    auto got = h.read(5, 0, kMaxChunkBytes);
    REQUIRE(got.error == 0);
    REQUIRE(got.bytes == model);
    REQUIRE(h.store->check_consistency() == "");
  };
  auto cut = [&](uint32_t length) {
    model.resize(length);
    REQUIRE(h.truncate(5, v(version + 1), v(version), length) == 0);
    version++;
    REQUIRE(h.commit(5, v(version)));
    auto got = h.read(5, 0, kMaxChunkBytes);
    REQUIRE(got.error == 0);
    REQUIRE(got.bytes == model);
  };
  put(0, 100'000);       // fresh
  put(100'000, 20'000);  // append with a shared block
  put(120'000, 500);     // inside the last block or next to it
  put(4096, 4096);       // aligned overwrite
  put(65'000, 1'000);    // over a granule's edge
  put(10, 100'000);      // large overwrite: rebuilt
  put(300'000, 10);      // a gap of zeros
  put(262'144, 65'536);  // a whole granule, growing
  cut(200'000);
  put(200'000, 100'000);  // append below what the slot held
  cut(65'536);
  cut(500'000);          // zeros
  put(400'000, 30'000);  // into the zeros
  put(500'000, 4096);
  cut(450'001);
  put(449'000, 5'000);
  cut(0);
  put(0, 10);
  auto metrics = h.store->metrics();
  CHECK(metrics.fresh > 0);
  CHECK(metrics.in_place > 0);
  CHECK(metrics.deferred > 0);
  CHECK(metrics.rebuilds > 0);
  h.close();
  h.open();
  CHECK(h.read(5, 0, kMaxChunkBytes).bytes == model);
}
