// Memory of a device: over RDMA it moves like any other and no CPU of this side touches it; over anything
// else it is refused by name (docs/rdma.md, Memory of a device).
#include <fcntl.h>

#include "test/transport_world.h"

using namespace ffs;
using namespace ffs::transport::testing;

namespace {

constexpr uint64_t kOffset = 0x3210;  // of the Iov in its dmabuf: in no page's beginning

// In a device's place: pages of a file that the ring has no address of, so that whoever touches them by the
// CPU is ended by the kernel. Software RDMA registers no dmabuf, so they are registered as memory of this
// process, under the addresses that a dmabuf's would have.
struct StandIn : client::Iov {
  static std::unique_ptr<StandIn> create(uint64_t bytes) {
    auto out = std::make_unique<StandIn>();
    const uint64_t whole = (kOffset + bytes + 4095) / 4096 * 4096;
    auto file = net::create_sealed_memfd("device", whole, false);
    REQUIRE(file.ok());
    REQUIRE(out->lie_on_device(file->get(), kOffset, bytes).ok());
    auto mapped = net::map_shared(file->get(), 0, whole, true);
    REQUIRE(mapped.ok());
    out->pages = std::move(*mapped);
    client::IovRegistry::add(out.get());
    return out;
  }
  ~StandIn() override {
    if (client::IovRegistry::alive(serial())) CHECK(client::IovRegistry::remove(this).ok());
  }
  Result<std::unique_ptr<net::rdma::Registration>> register_extent(net::rdma::Adapter& adapter,
                                                                   uint64_t extent) override {
    asked++;
    CHECK(extent == 0);
    CHECK(extent_bytes(extent) == size());
    if (refusal != 0) return Error::of(refusal, "this adapter takes no dmabuf");
    const uint64_t bytes = short_by >= size() ? 1 : size() - short_by;
    return adapter.register_memory(memory(), bytes, remote_address(0), net::rdma::Access::kThere);
  }
  uint8_t* memory() { return pages.data() + kOffset; }

  net::Mapping pages;
  int asked = 0;
  int refusal = 0;
  uint64_t short_by = 0;  // the adapter knows of so much less
};

bool has(TransportChoice choice) {
  const auto all = choices();
  return std::find(all.begin(), all.end(), choice) != all.end();
}

// One bit of what stands on a node's device.
void flip(Node& node, const std::vector<uint8_t>& content, size_t at) {
  Fd device(::open(node.device.c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(device.valid());
  const size_t from = at / 4096 * 4096;
  std::vector<uint8_t> block(4096);
  for (off_t place = 0; (place = ::lseek(device.get(), place, SEEK_DATA)) >= 0; place += 4096) {
    place = place / 4096 * 4096;
    if (::pread(device.get(), block.data(), 4096, place) != 4096) break;
    if (std::memcmp(block.data(), content.data() + from, 4096) != 0) continue;
    block[at - from] ^= 1;
    REQUIRE(::pwrite(device.get(), block.data(), 4096, place) == 4096);
    REQUIRE(::fdatasync(device.get()) == 0);
    return;
  }
  FAIL("no such content on the device");
}

}  // namespace

TEST_CASE("memory of a device over tcp and local: refused with the server and the transport, others go on") {
  for (const TransportChoice choice : {TransportChoice::kTcp, TransportChoice::kLocal}) {
    if (!has(choice)) continue;
    INFO("over ", name_of(choice));
    World w(choice);
    auto device = StandIn::create(1 << 20);
    OpenIov iov(1 << 20);
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 65536, *iov, 0)) == 65536);
    const auto before = w.metrics();
    std::vector<ffs_sqe> entries;
    for (const uint8_t op : {FFS_OP_READ, FFS_OP_WRITE, FFS_OP_CREATE}) {
      entries.push_back(w.sqe(op, op == FFS_OP_READ ? 1 : 2, 0, 65536, *device, 0));
      entries.push_back(w.sqe(FFS_OP_READ, 1, 0, 65536, *iov, 65536));
    }
    // Of a group the failure that comes first tells.
    entries.push_back(w.sqe(FFS_OP_READ, 1, 0, 4096, *iov, 0));
    entries.back().group = 2;
    entries.push_back(w.sqe(FFS_OP_READ, 1, 4096, 4096, *device, 0));
    entries.back().group = 0;
    const auto prepared = w.ring->prepare(entries.data(), static_cast<uint32_t>(entries.size()));
    REQUIRE(prepared.taken == entries.size());
    const auto done = w.collect(entries.size() - 1);
    for (size_t i = 0; i < 7; i++) {
      const ffs_cqe& one = done.at(entries[i].userdata);
      if (i < 6 && i % 2 == 1) {
        CHECK(one.result == 65536);
        CHECK(one.detail == 0);
        continue;
      }
      CHECK(one.result == -EOPNOTSUPP);
      CHECK(one.detail == FFS_DEVICE_TRANSPORT + 256u * static_cast<uint32_t>(choice));
      CHECK(one.value == Cluster::target(0));
      CHECK(one.chain == 1);
    }
    const auto after = w.metrics();
    CHECK(after.updates == before.updates);
    CHECK(after.reads - before.reads == 4);
    CHECK(device->asked == 0);
  }
}

TEST_CASE("keys and lists can't stand in memory of a device") {
  World w(choices().front());
  auto device = StandIn::create(1 << 20);
  for (const uint8_t op : {FFS_OP_EXISTS, FFS_OP_LIST_CHUNKS}) {
    const ffs_sqe one = w.sqe(op, 1, 0, 4, *device, 0);
    const auto prepared = w.ring->prepare(&one, 1);
    CHECK(prepared.taken == 0);
    REQUIRE(prepared.fault != nullptr);
    CHECK(std::string(prepared.fault).find("memory of a device") != std::string::npos);
  }
  client::IovOptions options;  // what is no dmabuf isn't taken for one
  auto file = net::create_sealed_memfd("no-dmabuf", 4096, false);
  options.dmabuf = file->get();
  options.size_bytes = 4096;
  const auto made = client::Iov::create(options);
  REQUIRE_FALSE(made.ok());
  CHECK(made.error().code == EINVAL);
  CHECK(std::string(made.error().what).find("no dmabuf") != std::string::npos);
}

TEST_CASE("memory of a device over rdma: every length and alignment, checked by the server on both ways") {
  if (!has(TransportChoice::kRdma)) return;
  World w(TransportChoice::kRdma);
  auto device = StandIn::create(70u << 20);  // more than an extent of other Iovs
  OpenIov iov(8u << 20);
  const std::tuple<uint32_t, uint32_t, uint64_t> cases[] = {
      {0, 1, 0},        {0, 4096, 4096},     {65530, 20, 77},
      {100, 65537, 12}, {3, 1 << 20, 5},     {0, 4 << 20, (64u << 20) - 12345},
      {4096, 4096, 99}, {65536, 65536, 4096}};
  uint64_t index = 0;
  for (const auto& [offset, length, at] : cases) {
    INFO("write of ", length, " at ", offset, " from ", at);
    const auto data = pattern(length, static_cast<uint32_t>(++index));
    std::memcpy(device->memory() + at, data.data(), length);
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, index, offset, length, *device, at)) == length);
    // The server's own checksums are those of what was there: read into memory that is checked here.
    REQUIRE(w.one(w.sqe(FFS_OP_READ, index, offset, length, *iov, 0)) == length);
    CHECK(std::memcmp(iov.data(), data.data(), length) == 0);
    std::memset(device->memory() + at, 0xEE, length);
    const uint8_t after = device->memory()[at + length];
    REQUIRE(w.one(w.sqe(FFS_OP_READ, index, offset, length, *device, at)) == length);
    CHECK(std::memcmp(device->memory() + at, data.data(), length) == 0);
    CHECK(device->memory()[at + length] == after);
  }
  // Many at once and small, which other memory asks for in one frame.
  std::vector<ffs_sqe> many;
  const auto data = pattern(1 << 20, 77);
  std::memcpy(device->memory(), data.data(), data.size());
  REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 50, 0, 1 << 20, *device, 0)) == 1 << 20);
  std::memset(device->memory(), 0, data.size());
  for (uint32_t i = 0; i < 128; i++)
    many.push_back(w.sqe(FFS_OP_READ, 50, i * 8192, 8192, *device, uint64_t{i} * 8192));
  const auto before = w.ring->stats();
  for (auto& [id, done] : w.run(many)) REQUIRE(done.result == 8192);
  CHECK(std::memcmp(device->memory(), data.data(), data.size()) == 0);
  CHECK(w.ring->stats().rdma_doorbells - before.rdma_doorbells <= 32);
  CHECK(device->asked == 1);
  CHECK(w.ring->stats().bytes_copied == 0);
  CHECK(w.ring->stats().rdma_breaks == 0);
  CHECK(w.one(w.sqe(FFS_OP_READ, 999, 0, 4096, *device, 0)) == -ENOENT);
}

TEST_CASE("memory of a device: damage at rest is found by the server, and another replica gives the bytes") {
  if (!has(TransportChoice::kRdma)) return;
  Cluster::Options options;
  options.nodes = 2;
  World w(TransportChoice::kRdma, options);
  w.node_count = 2;
  w.route();
  auto device = StandIn::create(1 << 20);
  OpenIov iov(1 << 20);
  // Whole granules, and a part of one: both ways the server looks at all that it sends. A chunk for each,
  // since what is found is repaired.
  uint64_t index = 0;
  for (const auto& [offset, length] : {std::pair<uint32_t, uint32_t>{0, 1 << 20}, {299'900, 4096}}) {
    const auto data = pattern(1 << 20, static_cast<uint32_t>(++index));
    std::memcpy(iov.data(), data.data(), data.size());
    REQUIRE(w.one(w.sqe(FFS_OP_WRITE, index, 0, 1 << 20, *iov, 0)) == 1 << 20);
    flip(w.cluster.node(1), data, 300'000);
    ffs_sqe only = w.sqe(FFS_OP_READ, index, offset, length, *device, 0);
    only.target = Cluster::target(1);
    const ffs_cqe refused = w.run({only}).begin()->second;
    CHECK(refused.result == -EIO);
    CHECK(refused.detail == static_cast<uint32_t>(Detail::kCorrupt));
    for (int i = 0; i < 4; i++) {  // whichever is asked first
      std::memset(device->memory(), 0, length);
      REQUIRE(w.one(w.sqe(FFS_OP_READ, index, offset, length, *device, 0)) == length);
      CHECK(std::memcmp(device->memory(), data.data() + offset, length) == 0);
    }
  }
}

TEST_CASE("memory of a device: what the adapter refuses, what the server can't reach, and holes, say so") {
  if (!has(TransportChoice::kRdma)) return;
  World w(TransportChoice::kRdma);
  OpenIov iov(1 << 20);
  REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 65536, *iov, 0)) == 65536);
  const auto fails = [&](const ffs_sqe& entry, uint32_t fault, int code) {
    const ffs_cqe done = w.run({entry}).begin()->second;
    CHECK(done.result == -code);
    CHECK(done.detail == fault + 256 * FFS_TRANSPORT_RDMA);
    CHECK(done.value == Cluster::target(0));
  };
  {
    auto device = StandIn::create(1 << 20);
    device->refusal = ENOMEM;
    fails(w.sqe(FFS_OP_READ, 1, 0, 65536, *device, 0), FFS_DEVICE_REGISTER, ENOMEM);
    fails(w.sqe(FFS_OP_WRITE, 2, 0, 65536, *device, 0), FFS_DEVICE_REGISTER, ENOMEM);
    device->refusal = 0;  // it isn't held against it
    CHECK(w.one(w.sqe(FFS_OP_READ, 1, 0, 65536, *device, 0)) == 65536);
    CHECK(device->asked == 3);
    CHECK(w.ring->stats().rdma_breaks == 0);
    // Holes: short, or all of it. Without the flag they are what they are.
    for (const uint64_t index : {1, 7}) {
      ffs_sqe entry = w.sqe(FFS_OP_READ, index, 0, 131072, *device, 0);
      CHECK(w.one(entry) == (index == 1 ? 65536 : -ENOENT));
      entry.flags = FFS_SQE_ZERO_FILL;
      entry.userdata = ++w.last;
      fails(entry, FFS_DEVICE_HOLE, EOPNOTSUPP);
    }
  }
  for (const uint8_t op : {FFS_OP_READ, FFS_OP_WRITE}) {
    auto device = StandIn::create(1 << 20);
    device->short_by = 1 << 20;
    fails(w.sqe(op, 1, 0, 65536, *device, 65536), FFS_DEVICE_REACH, ENXIO);
  }
  CHECK(w.one(w.sqe(FFS_OP_READ, 1, 0, 65536, *iov, 0)) == 65536);
  CHECK(w.one(w.sqe(FFS_OP_READ, 2, 0, 65536, *iov, 0)) == -ENOENT);
}

// I11, both ways: nobody writes into it late, and nobody takes late what is something else by then.
TEST_CASE("memory of a device: a request that was cancelled or timed out is over") {
  if (!has(TransportChoice::kRdma)) return;
  World w(TransportChoice::kRdma);
  auto device = StandIn::create(2 << 20);
  OpenIov iov(1 << 20);
  const auto data = pattern(1 << 20, 3);
  std::memcpy(device->memory(), data.data(), data.size());
  REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 1 << 20, *device, 0)) == 1 << 20);
  uint64_t ended = 0;
  for (int round = 0; round < 8; round++) {
    const bool cancels = round % 2 == 0, writes = round % 4 >= 2;
    std::memcpy(device->memory() + (1 << 20), data.data(), data.size());
    std::vector<ffs_sqe> entries;
    for (uint32_t i = 0; i < 16; i++) {
      entries.push_back(w.sqe(writes ? FFS_OP_WRITE : FFS_OP_READ, writes ? 100 + i : 1, i * 65536, 65536,
                              *device, (1 << 20) + i * 65536));
      entries.back().timeout_ms = cancels ? 0 : 1;
    }
    REQUIRE(w.ring->prepare(entries.data(), 16).taken == 16);
    w.ring->submit();
    if (cancels) {
      for (const ffs_sqe& entry : entries) (void)w.ring->cancel(entry.userdata);
    }
    for (const auto& [id, one] : w.collect(16)) {
      CHECK((one.result == (cancels ? -ECANCELED : -ETIMEDOUT) || one.result == 65536));
      ended += one.result < 0;
    }
    std::memset(device->memory() + (1 << 20), 0x5A, 1 << 20);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const uint8_t* slices = device->memory() + (1 << 20);
    REQUIRE(std::all_of(slices, slices + (1 << 20), [](uint8_t byte) { return byte == 0x5A; }));
    for (uint32_t i = 0; writes && i < 16; i++) {  // all of it as it was then, or nothing
      const int64_t got = w.one(w.sqe(FFS_OP_READ, 100 + i, i * 65536, 65536, *iov, 0));
      CHECK((got == -ENOENT || got == 65536));
      if (got == 65536) CHECK(std::memcmp(iov.data(), data.data() + i * 65536, 65536) == 0);
    }
  }
  CHECK(ended > 0);
  std::memset(device->memory(), 0, 1 << 20);
  CHECK(w.one(w.sqe(FFS_OP_READ, 1, 0, 1 << 20, *device, 0)) == 1 << 20);
  CHECK(std::memcmp(device->memory(), data.data(), 1 << 20) == 0);
}
