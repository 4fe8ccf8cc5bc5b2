// The share of a device that recovery may take, on a clock that is counted here.
#include <doctest/doctest.h>

#include "server/share.h"

using namespace ffs::server;

namespace {

constexpr uint32_t kChunk = 1u << 20;

// Bytes that begin within a second, with every transfer over by the next step and steps of 1 ms.
uint64_t moved_in_a_second(SyncShare& share, uint64_t* now_us, bool clients) {
  uint64_t moved = 0;
  for (int step = 0; step < 1000; step++) {
    *now_us += 1000;
    if (clients) share.client_served(*now_us);
    uint32_t begun = 0;
    while (begun < 100 && share.begin(kChunk, *now_us)) begun++;
    for (uint32_t i = 0; i < begun; i++) share.ended(kChunk);
    moved += uint64_t{begun} * kChunk;
  }
  return moved;
}

}  // namespace

TEST_CASE("recovery has the device to itself while no client is served, within a window") {
  SyncShare share(25);
  uint64_t now_us = 1000000;
  uint32_t begun = 0;
  while (share.begin(kChunk, now_us)) begun++;
  CHECK(begun == 32);
  share.ended(kChunk);
  CHECK(share.begin(kChunk, now_us));
  CHECK_FALSE(share.begin(kChunk, now_us));
}

TEST_CASE("one transfer that is larger than the window goes alone") {
  SyncShare share(25);
  CHECK(share.begin(64u << 20, 1000000));
  CHECK_FALSE(share.begin(1, 1000000));
  share.ended(64u << 20);
  CHECK(share.in_flight() == 0);
  CHECK(share.begin(1, 1000000));
}

TEST_CASE("while clients are served recovery keeps to its share of what the device has moved") {
  for (const uint32_t percent : {10u, 25u, 100u}) {
    SyncShare share(percent);
    uint64_t now_us = 1000000, bytes = 0;
    share.observe(0, now_us);
    for (int i = 0; i < 10; i++) {  // 1 GB/s
      now_us += 250000;
      bytes += 250'000'000;
      share.observe(bytes, now_us);
    }
    REQUIRE(share.bytes_per_s() == 1'000'000'000);
    (void)moved_in_a_second(share, &now_us, true);
    const uint64_t moved = moved_in_a_second(share, &now_us, true);
    const uint64_t wanted = uint64_t{10'000'000} * percent;
    CHECK(moved > wanted * 9 / 10);
    CHECK(moved < wanted * 11 / 10 + kChunk);
  }
}

TEST_CASE("only one transfer is under way while clients are served, and all again soon after the last") {
  SyncShare share(100);
  uint64_t now_us = 5000000;
  share.client_served(now_us);
  CHECK(share.clients_active(now_us + 9999));
  CHECK_FALSE(share.clients_active(now_us + 10000));
  REQUIRE(share.begin(4096, now_us));
  CHECK_FALSE(share.begin(4096, now_us));
  CHECK(share.begin(4096, now_us + 10000));
}

TEST_CASE("what the device has been seen to move is forgotten slowly, and never below what any device does") {
  SyncShare share(25);
  uint64_t now_us = 1000000;
  share.observe(0, now_us);
  share.observe(1'000'000'000, now_us += 1000000);
  CHECK(share.bytes_per_s() == 1'000'000'000);
  share.observe(1'000'000'000, now_us += 1000000);  // nothing asked for
  CHECK(share.bytes_per_s() > 990'000'000);
  for (int i = 0; i < 10000; i++) share.observe(1'000'000'000, now_us += 1000000);
  CHECK(share.bytes_per_s() == 100u << 20);
}
