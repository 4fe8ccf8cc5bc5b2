// What a ring must do over each transport: data in and out, and what it costs over RDMA.
#include "test/transport_world.h"

using namespace ffs;
using namespace ffs::transport::testing;

TEST_CASE("data of every length and alignment comes back over each transport") {
  for (const TransportChoice choice : choices()) {
    INFO("over ", name_of(choice));
    World w(choice);
    OpenIov iov(40u << 20);
    // (offset in the chunk, length, place in the Iov)
    const std::tuple<uint32_t, uint32_t, uint64_t> cases[] = {
        {0, 1, 0},       {0, 4096, 4096},       {4096, 4096, 8192},  {0, 4097, 1},
        {65530, 20, 77}, {0, 65536, 12288},     {100, 65537, 12289}, {0, 1 << 20, 1 << 20},
        {3, 1 << 20, 5}, {0, 5 << 20, 8 << 20}, {0, 16 << 20, 4096}, {1, (16 << 20) - 1, 4097}};
    uint64_t index = 0;
    for (const auto& [offset, length, at] : cases) {
      // Emulated processors take a second each: one of the longest will do.
      if (std::getenv("FFS_GUEST") != nullptr && length > (1u << 20) && offset == 0) continue;
      INFO("write of ", length, " at ", offset, " from ", at);
      const auto data = pattern(length, static_cast<uint32_t>(++index));
      std::memcpy(iov.data() + at, data.data(), length);
      REQUIRE(w.one(w.sqe(FFS_OP_WRITE, index, offset, length, *iov, at)) == length);
      std::memset(iov.data(), 0xEE, 40u << 20);
      REQUIRE(w.one(w.sqe(FFS_OP_READ, index, offset, length, *iov, at)) == length);
      CHECK(std::memcmp(iov.data() + at, data.data(), length) == 0);
      CHECK((at == 0 || iov.data()[at - 1] == 0xEE));
      CHECK(iov.data()[at + length] == 0xEE);
      // A part, over the end: short.
      const uint32_t half = length / 2;
      const uint64_t to = at > 100 ? at - 100 : at + 100;
      const uint32_t wanted = std::min(length, (16u << 20) - offset - half);
      CHECK(w.one(w.sqe(FFS_OP_READ, index, offset + half, wanted, *iov, to)) ==
            static_cast<int64_t>(length - half));
      CHECK(std::memcmp(iov.data() + to, data.data() + half, length - half) == 0);
    }
    CHECK(w.one(w.sqe(FFS_OP_READ, 999, 0, 4096, *iov, 0)) == -ENOENT);
    const ffs_ring_stats stats = w.ring->stats();
    CHECK(stats.tcp_links == (choice == TransportChoice::kTcp));
    CHECK(stats.local_links == (choice == TransportChoice::kLocal));
    CHECK(stats.rdma_links == (choice == TransportChoice::kRdma));
    if (choice == TransportChoice::kRdma) {
      CHECK(stats.bytes_copied == 0);
      CHECK(stats.rdma_breaks == 0);
      CHECK(w.metrics().rdma_breaks == 0);
    }
  }
}

TEST_CASE("memory of somebody else and many requests at once, over each transport") {
  for (const TransportChoice choice : choices()) {
    INFO("over ", name_of(choice));
    World w(choice);
    std::vector<uint8_t> memory(8u << 20);
    OpenIov theirs(memory.size(), memory.data());
    OpenIov ours(8u << 20);
    for (OpenIov* iov : {&theirs, &ours}) {
      const auto data = pattern(8u << 20, 5);
      std::memcpy(iov->data(), data.data(), data.size());
      std::vector<ffs_sqe> writes, reads;
      for (uint32_t i = 0; i < 512; i++) {
        writes.push_back(w.sqe(FFS_OP_WRITE, 1 + i / 64, i % 64 * 16384, 16384, **iov, uint64_t{i} * 16384));
      }
      for (auto& [id, done] : w.run(writes)) REQUIRE(done.result == 16384);
      std::memset(iov->data(), 0, 8u << 20);
      for (uint32_t i = 0; i < 512; i++) {
        reads.push_back(w.sqe(FFS_OP_READ, 1 + i / 64, i % 64 * 16384, 16384, **iov, uint64_t{i} * 16384));
      }
      for (auto& [id, done] : w.run(reads)) REQUIRE(done.result == 16384);
      CHECK(std::memcmp(iov->data(), data.data(), data.size()) == 0);
    }
    if (choice == TransportChoice::kRdma) CHECK(w.ring->stats().bytes_copied == 0);
  }
}

// Issue: work requests and completions an operation, counted.
TEST_CASE("over RDMA a MiB costs one write and one small message, a batch one doorbell") {
  for (const TransportChoice choice : choices()) {
    if (choice != TransportChoice::kRdma) continue;
    World w(choice);
    OpenIov iov(4u << 20);
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);
    REQUIRE(w.one(w.sqe(FFS_OP_READ, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);

    auto before = w.metrics();
    auto ring_before = w.ring->stats();
    REQUIRE(w.one(w.sqe(FFS_OP_READ, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);
    auto after = w.metrics();
    auto ring_after = w.ring->stats();
    CHECK(after.rdma.writes - before.rdma.writes == 1);
    CHECK(after.rdma.sends - before.rdma.sends == 1);
    CHECK(after.rdma.inline_sends - before.rdma.inline_sends == 1);
    CHECK(after.rdma.reads == before.rdma.reads);
    CHECK(after.rdma.doorbells - before.rdma.doorbells == 1);
    CHECK(after.rdma.bulk_bytes - before.rdma.bulk_bytes == 1 << 20);
    CHECK(ring_after.rdma_sends - ring_before.rdma_sends == 1);
    CHECK(ring_after.rdma_inline_sends - ring_before.rdma_inline_sends == 1);
    CHECK(ring_after.rdma_doorbells - ring_before.rdma_doorbells == 1);
    CHECK(ring_after.rdma_receives - ring_before.rdma_receives == 1);

    before = w.metrics();
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);
    after = w.metrics();
    CHECK(after.rdma.reads - before.rdma.reads == 1);
    CHECK(after.rdma.sends - before.rdma.sends == 1);
    CHECK(after.rdma.writes == before.rdma.writes);

    before = w.metrics();
    ring_before = w.ring->stats();
    std::vector<ffs_sqe> batch;
    for (uint32_t i = 0; i < 16; i++) batch.push_back(w.sqe(FFS_OP_READ, 1, i * 4096, 4096, *iov, i * 4096));
    for (auto& [id, done] : w.run(batch)) REQUIRE(done.result == 4096);
    after = w.metrics();
    ring_after = w.ring->stats();
    CHECK(ring_after.rdma_doorbells - ring_before.rdma_doorbells == 1);
    CHECK(ring_after.rdma_sends - ring_before.rdma_sends == 1);
    CHECK(after.rdma.writes - before.rdma.writes == 16);
    CHECK(after.rdma.doorbells - before.rdma.doorbells <= 16);
    // Selective reports: fewer than work requests.
    CHECK(after.rdma.completions - before.rdma.completions <= after.rdma.doorbells - before.rdma.doorbells);
  }
}

// Over `local` slices are taken back, and their extent is registered anew with adapters: what was pinned for
// the pages of before isn't for ever.
TEST_CASE("over RDMA a slice that was taken back leaves no registration behind") {
  for (const TransportChoice choice : choices()) {
    if (choice != TransportChoice::kRdma) continue;
    World w(choice);
    OpenIov iov(4u << 20);
    const auto data = pattern(1 << 20, 5);
    std::memcpy(iov.data(), data.data(), data.size());
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);
    for (int round = 0; round < 5; round++) {
      REQUIRE((*iov).take_back(1 << 20, 1 << 20));
      REQUIRE(w.one(w.sqe(FFS_OP_READ, 1, 0, 1 << 20, *iov, 1 << 20)) == 1 << 20);
      CHECK(std::memcmp(iov.data() + (1 << 20), data.data(), data.size()) == 0);
      CHECK((*iov).registrations() <= 2);  // the last one goes with the next
    }
    CHECK(w.ring->stats().rdma_breaks == 0);
    CHECK(w.ring->stats().bytes_copied == 0);
  }
}
