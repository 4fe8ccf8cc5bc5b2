// The scheduler of background work, on a clock that is counted here.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "server/background.h"

using namespace ffs;
using ffs::io::OpClass;
using ffs::server::Background;

namespace {

constexpr uint32_t kChunk = 1u << 20;
constexpr uint32_t kMiB = 1u << 20;

Background::Wanted wants(std::initializer_list<OpClass> classes, uint32_t bytes = kChunk) {
  Background::Wanted wanted{};
  for (OpClass op_class : classes) wanted[static_cast<size_t>(op_class)] = bytes;
  return wanted;
}

// A device that moves `device_bytes_per_s`, a client that reads one page after another, and classes that
// always have something to do. A read takes 100 us, and as much longer as `slower` says beside a piece.
struct World {
  Background background;
  uint64_t now_us = 10'000'000;
  uint64_t device_bytes = 0;
  double device_bytes_per_us = 1000;
  bool clients = true;
  bool clients_wait = false;
  std::function<uint64_t(uint32_t piece_bytes)> slower = [](uint32_t) { return 0; };
  std::mt19937_64 random{7};
  uint64_t longest_without_piece_us = 0;
  uint64_t slow_reads = 0, reads = 0;
  uint64_t slower_once = 0;
  uint32_t largest_piece = 0, most_in_flight = 0;

  explicit World(uint32_t percent) : background(percent) {
    background.observe(0, now_us - 5'000'000);
    for (int i = 1; i <= 10; i++) {
      device_bytes += 400'000'000;  // 1 GB/s
      background.observe(device_bytes, now_us - 5'000'000 + static_cast<uint64_t>(i) * 400'000);
    }
  }

  // One after another: a read, and pieces beside it as they may start; each takes its time at the device.
  void run(const Background::Wanted& wanted, uint64_t for_us) {
    const uint64_t end_us = now_us + for_us;
    uint64_t last_us = now_us;
    uint64_t piece_ends_us = 0;
    Background::Piece flying;
    if (clients) background.client_served(now_us);
    while (now_us < end_us) {
      uint32_t beside = 0;
      while (true) {
        const Background::Piece piece = background.next(wanted, clients_wait, now_us);
        if (piece.bytes == 0) break;
        largest_piece = std::max(largest_piece, piece.bytes);
        most_in_flight = std::max(most_in_flight, background.in_flight());
        if (!clients) {
          background.ended(piece.op_class, piece.bytes, now_us);
          now_us += static_cast<uint64_t>(piece.bytes / device_bytes_per_us);
          last_us = now_us;
          if (now_us >= end_us) return;
          continue;
        }
        FFS_CHECK(flying.bytes == 0 || now_us < piece_ends_us);
        flying = piece;
        beside = piece.bytes;
        piece_ends_us = now_us + static_cast<uint64_t>(piece.bytes / device_bytes_per_us);
        longest_without_piece_us = std::max(longest_without_piece_us, now_us - last_us);
        last_us = now_us;
      }
      if (!clients) {
        now_us += 1000;
        continue;
      }
      if (flying.bytes > 0) beside = flying.bytes;
      const uint64_t usual = 90 + random() % 20;
      const uint64_t took = usual + (beside > 0 ? slower(beside) : 0);
      now_us += took;
      if (flying.bytes > 0 && now_us >= piece_ends_us) {
        background.ended(flying.op_class, flying.bytes, piece_ends_us);
        flying = {};
      }
      reads++;
      if (took > 220) slow_reads++;
      background.client_read(4096, 0, took, now_us);
    }
    if (flying.bytes > 0) background.ended(flying.op_class, flying.bytes, now_us);
  }
  uint64_t total() const {
    uint64_t sum = 0;
    for (size_t i = 0; i < io::kOpClasses; i++) sum += background.bytes(static_cast<OpClass>(i));
    return sum;
  }
};

}  // namespace

TEST_CASE("background: large pieces fill an idle device, within a bound") {
  for (const bool long_quiet : {false, true}) {
    Background background(25);
    background.client_served(1'000'000);
    const uint64_t now_us = 1'000'000 + (long_quiet ? Background::kLongQuietUs : Background::kActiveUs);
    const uint32_t most = long_quiet ? Background::kQuietBytes : Background::kIdleBytes;
    uint32_t begun = 0;
    while (true) {
      const auto piece = background.next(wants({OpClass::recovery}), false, now_us);
      if (piece.bytes == 0) break;
      CHECK(piece.bytes == Background::kPieceBytes);
      CHECK(piece.op_class == OpClass::recovery);
      begun++;
    }
    CHECK(begun == most / Background::kPieceBytes);
    background.ended(OpClass::recovery, Background::kPieceBytes, now_us);
    CHECK(background.next(wants({OpClass::recovery}, 4096), false, now_us).bytes == 4096);
    for (uint32_t i = 1; i < begun; i++) background.ended(OpClass::recovery, Background::kPieceBytes, now_us);
    // And small ones within a bound of their number.
    for (begun = 1; background.next(wants({OpClass::recovery}, 4096), false, now_us).bytes > 0;) begun++;
    CHECK(begun == Background::kIdlePieces);
  }
}

TEST_CASE(
    "background: beside clients one small piece at a time, until the last has been served for a while") {
  Background background(100);
  const auto wanted = wants({OpClass::recovery});
  uint64_t now_us = 5'000'000;
  background.client_served(now_us);
  CHECK(background.clients_active(now_us + Background::kActiveUs - 1));
  CHECK_FALSE(background.clients_active(now_us + Background::kActiveUs));
  const auto piece = background.next(wanted, false, now_us);
  CHECK(piece.bytes == Background::kSmallPieceBytes);
  CHECK(background.next(wanted, false, now_us + 100'000).bytes == 0);
  background.ended(piece.op_class, piece.bytes, now_us + 100'000);
  CHECK(background.next(wanted, false, now_us + 100'000).bytes == Background::kSmallPieceBytes);
  now_us += Background::kActiveUs;
  CHECK(background.next(wanted, false, now_us).bytes == Background::kPieceBytes);
}

TEST_CASE("background: keeps to the share of what the device has moved when clients feel nothing") {
  for (const uint32_t percent : {10u, 25u, 50u}) {
    CAPTURE(percent);
    World w(percent);
    REQUIRE(w.background.device_bytes_per_s() == 1'000'000'000);
    w.run(wants({OpClass::recovery}), 4'000'000);
    const uint64_t before = w.total();
    w.run(wants({OpClass::recovery}), 4'000'000);
    const uint64_t moved = w.total() - before, allowed = uint64_t{40'000'000} * percent;
    CHECK(moved <= allowed * 103 / 100);
    CHECK(moved >= allowed * 85 / 100);  // it also pauses now and then, and pieces end between reads
    CHECK(w.background.felt_reads() * 1000 <= w.reads);
    CHECK(w.largest_piece == Background::kSmallPieceBytes);
    CHECK(w.most_in_flight == 1);
  }
}

TEST_CASE("background: gives way when clients feel it, down to a least share that always moves") {
  World w(50);
  w.slower = [](uint32_t bytes) { return bytes / 100; };  // a device on which every piece hurts
  w.run(wants({OpClass::recovery}), 3'000'000);
  const uint64_t before = w.total();
  w.longest_without_piece_us = 0;
  w.run(wants({OpClass::recovery}), 10'000'000);
  const uint64_t moved = w.total() - before;
  CHECK(moved < 10 * 80'000'000ull);  // of 500 MB/s
  CHECK(moved > 10 * 35'000'000ull);  // a tenth is left to it
  CHECK(w.longest_without_piece_us < 150'000);
  CHECK(w.background.felt_reads() > 0);
  // And comes back when it hurts no more.
  w.slower = [](uint32_t) { return 0; };
  w.run(wants({OpClass::recovery}), 3'000'000);
  CHECK(w.background.rate_bytes_per_s() > 400'000'000);
}

TEST_CASE("background: reads between pieces that come seldom count as well") {
  World w(1);  // 10 MB/s: a piece every 6 ms, or 15
  w.slower = [](uint32_t) { return 1000; };
  w.run(wants({OpClass::recovery}), 5'000'000);
  w.slower = [](uint32_t) { return 0; };
  w.run(wants({OpClass::recovery}), 2'000'000);
  CHECK(w.background.rate_bytes_per_s() > 9'000'000);
  // One piece a second by a slow read of it: far below one read in 200, so the share stays.
  for (int i = 0; i < 20; i++) {
    w.slower = [&w](uint32_t) { return std::exchange(w.slower_once, 0); };
    w.slower_once = 1000;
    w.run(wants({OpClass::recovery}), 1'000'000);
  }
  CHECK(w.background.rate_bytes_per_s() > 9'000'000);
}

TEST_CASE("background: holds the share at which few reads are slow") {
  World w(50);
  // Now and then a piece is slow at the device, so that how many reads meet one depends on the rate.
  w.slower = [&w](uint32_t) { return w.random() % 20 == 0 ? 1000 : 0; };
  w.run(wants({OpClass::recovery}), 10'000'000);
  w.slow_reads = w.reads = 0;
  const uint64_t before = w.total();
  w.run(wants({OpClass::recovery}), 20'000'000);
  CHECK(w.slow_reads * 100 <= w.reads);            // p99 is what it was
  CHECK(w.total() - before > 20 * 50'000'000ull);  // and more than the least is moved
  CHECK(w.total() - before < 20 * 250'000'000ull);
}

TEST_CASE("background: what reads of a kind take is learnt apart, and from quiet times only") {
  Background background(50);
  uint64_t now_us = 10'000'000;
  // Pages take 100 us, whole chunks 900 us: a chunk that takes 1 ms beside a piece isn't felt, a page is.
  for (int i = 0; i < 400; i++) {
    background.client_read(4096, 0, 95 + static_cast<uint64_t>(i % 10), now_us += 1000);
    background.client_read(kMiB, 0, 890 + static_cast<uint64_t>(i % 20), now_us += 1000);
  }
  const auto wanted = wants({OpClass::recovery});
  auto piece = background.next(wanted, false, now_us);
  REQUIRE(piece.bytes > 0);
  background.client_read(kMiB, 0, 1000, now_us += 1000);
  CHECK(background.felt_reads() == 0);
  background.client_read(4096, 0, 1000, now_us += 1000);
  CHECK(background.felt_reads() == 1);
  // Sixteen pages at a time take longer than one: nothing is known of them, so nobody is blamed.
  for (int i = 0; i < 100; i++) background.client_read(4096, 16, 1000, now_us += 100);
  CHECK(background.felt_reads() == 1);
  background.ended(piece.op_class, piece.bytes, now_us);
}

TEST_CASE("background: pauses to see what reads take, also where it runs from the first moment on") {
  World w(50);
  w.slower = [](uint32_t bytes) { return bytes / 100; };
  w.run(wants({OpClass::recovery}), 2'000'000);  // nothing was known when it began
  CHECK(w.background.felt_reads() > 0);
  CHECK(w.background.rate_bytes_per_s() < 150'000'000);
}

TEST_CASE("background: classes that wait have turns by their weights, and none starves") {
  for (const bool clients : {true, false}) {
    CAPTURE(clients);
    World w(25);
    w.clients = clients;
    const auto all = wants({OpClass::recovery, OpClass::compaction, OpClass::scrub});
    w.run(all, 4'000'000);
    const double recovery = static_cast<double>(w.background.bytes(OpClass::recovery));
    CHECK(w.background.bytes(OpClass::compaction) == doctest::Approx(recovery / 2).epsilon(0.05));
    CHECK(w.background.bytes(OpClass::scrub) == doctest::Approx(recovery / 8).epsilon(0.05));
    CHECK(w.background.bytes(OpClass::client) == 0);
  }
  // Who wanted nothing for long has saved nothing up.
  World w(25);
  w.run(wants({OpClass::recovery}), 4'000'000);
  const uint64_t before = w.background.bytes(OpClass::recovery);
  w.run(wants({OpClass::recovery, OpClass::scrub}), 1'000'000);
  CHECK(w.background.bytes(OpClass::scrub) < w.background.bytes(OpClass::recovery) - before);
}

TEST_CASE("background: the scrubber keeps its rate beside a recovery that clients hold down") {
  World w(25);
  w.slower = [](uint32_t bytes) { return bytes / 100; };
  w.run(wants({OpClass::recovery, OpClass::scrub}), 10'000'000);
  const uint64_t before = w.background.bytes(OpClass::scrub);
  w.run(wants({OpClass::recovery, OpClass::scrub}), 10'000'000);
  CHECK(w.background.bytes(OpClass::scrub) - before > 10'000'000);  // 1 MB/s is what it takes by default
}

TEST_CASE("background: compaction that updates wait for goes first, and isn't held back") {
  Background background(25);
  uint64_t now_us = 5'000'000;
  background.client_served(now_us);
  const auto both = wants({OpClass::recovery, OpClass::compaction});
  const auto first = background.next(both, false, now_us);
  background.ended(first.op_class, first.bytes, now_us);
  REQUIRE(background.next(both, true, now_us + 1000).bytes == 0);  // clients wait; but for ...
  background.set_urgent(OpClass::compaction, true);
  const uint32_t urgent = Background::kUrgentBytes / Background::kUrgentPieceBytes;
  for (uint32_t i = 0; i < urgent; i++) {
    const auto piece = background.next(both, true, now_us);
    CHECK(piece.op_class == OpClass::compaction);
    CHECK(piece.bytes == Background::kUrgentPieceBytes);
  }
  CHECK(background.next(both, true, now_us).bytes == 0);
  background.set_urgent(OpClass::compaction, false);
  for (uint32_t i = 0; i < urgent; i++)
    background.ended(OpClass::compaction, Background::kUrgentPieceBytes, now_us);
  CHECK(background.next(both, false, now_us + 200'000).op_class == OpClass::recovery);
}

TEST_CASE("background: requests that wait go first, but whoever always has some leaves a least share") {
  World w(25);
  w.clients_wait = true;
  w.run(wants({OpClass::recovery}), 4'000'000);
  CHECK(w.total() > 4 * 15'000'000ull);
  CHECK(w.total() < 4 * 60'000'000ull);
  CHECK(w.longest_without_piece_us < 150'000);
}

TEST_CASE("background: work that isn't cut in pieces takes its share as well") {
  Background background(25);
  uint64_t now_us = 5'000'000;
  for (int i = 0; i < 100; i++) CHECK(background.take(OpClass::eviction, kMiB, now_us));  // nobody is served
  background.client_served(now_us);
  CHECK(background.take(OpClass::eviction, kMiB, now_us));
  CHECK_FALSE(background.take(OpClass::eviction, 4096, now_us));
  CHECK(background.wait_us(now_us) > 1000);
  for (int i = 0; i < 100; i++) background.client_served(now_us += 2000);
  CHECK(background.take(OpClass::eviction, 4096, now_us));
  CHECK(background.bytes(OpClass::eviction) == 101 * kMiB + 4096);
}

TEST_CASE(
    "background: what the device has been seen to move is forgotten slowly, within what any device does") {
  Background background(25);
  uint64_t now_us = 1'000'000;
  background.observe(0, now_us);
  CHECK(background.device_bytes_per_s() == 100u << 20);
  background.observe(1'000'000'000, now_us += 1'000'000);
  CHECK(background.device_bytes_per_s() == 1'000'000'000);
  background.observe(1'000'000'000, now_us += 1'000'000);  // idle
  CHECK(background.device_bytes_per_s() > 990'000'000);
  for (int i = 0; i < 10'000; i++) background.observe(1'000'000'000, now_us += 1'000'000);
  CHECK(background.device_bytes_per_s() == 100u << 20);
}
