// Reads into memory that can't be lent go by way of the ring's own (docs/ring.md, Landing).
#include <doctest/doctest.h>

#include "client_answers.h"

using namespace ffs;
using namespace ffs::client;
using namespace ffs::client::testing;

namespace {

bool asks_for_region(const Peer::Request& r) {
  return r.read.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion);
}

std::vector<uint8_t> part_of(const std::vector<uint8_t>& chunk, const wire::Read& read) {
  const uint64_t end = std::min<uint64_t>(chunk.size(), uint64_t{read.offset} + read.length);
  return {chunk.begin() + read.offset, chunk.begin() + static_cast<int64_t>(end)};
}

// Puts what is asked for where it shall be, and says so, with the checksums of the whole granules in it.
void answer(Peer& p, net::Connection& c, const Peer::Request& r, const std::vector<uint8_t>& chunk,
            const std::vector<uint32_t>& crcs) {
  const std::vector<uint8_t> data = part_of(chunk, r.read);
  const auto first = static_cast<uint32_t>((r.read.offset + kGranuleBytes - 1) / kGranuleBytes);
  const uint64_t end = r.read.offset + data.size();
  const uint64_t last = end == chunk.size() ? crcs.size() : end / kGranuleBytes;
  const std::vector<uint32_t> whole(crcs.begin() + first, crcs.begin() + static_cast<int64_t>(last));
  if (!asks_for_region(r)) {
    return Peer::answer_read(c, r.id, data, static_cast<uint32_t>(chunk.size()), whole, first);
  }
  std::memcpy(p.memory(r.read.bulk), data.data(), data.size());
  wire::ReadReply reply{};
  reply.bytes = static_cast<uint32_t>(data.size());
  reply.chunk_length = static_cast<uint32_t>(chunk.size());
  reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRegion);
  reply.granule_count = static_cast<uint32_t>(whole.size());
  reply.first_granule = first;
  reply.checksum_kind = 1;
  c.queue.push(Type::kReadReply, r.id, reply,
               net::Bytes(reinterpret_cast<const uint8_t*>(whole.data()), whole.size() * 4));
  Peer::flush(c);
}

// Memory that somebody else has made, and an Iov over it.
struct Foreign {
  std::vector<uint8_t> bytes;
  std::unique_ptr<Iov> iov;
  explicit Foreign(size_t size) : bytes(size) {
    IovOptions options;
    options.memory = bytes.data();
    options.size_bytes = size;
    iov = std::move(*Iov::create(options));
    IovRegistry::add(iov.get());
  }
  ~Foreign() { FFS_CHECK(IovRegistry::remove(iov.get()).ok()); }
  ffs_sqe sqe(Bench& b, uint64_t userdata, uint32_t length, uint64_t at = 0, uint32_t offset = 0) const {
    ffs_sqe e = b.sqe(FFS_OP_READ, userdata, length, at, offset);
    e.iov = reinterpret_cast<ffs_iov*>(iov.get());
    return e;
  }
};

ffs_cqe one(Bench& b, const ffs_sqe& e) {
  REQUIRE(b.ring->prepare(&e, 1).taken == 1);
  const auto done = b.complete(1);
  REQUIRE(done.size() == 1);
  return done[0];
}

// No try ends before its answer, however busy the machine is.
void patient(ClientOptions& o) {
  o.try_timeout_ms = 60000;
  o.request_timeout_ms = 60000;
  o.hedge_percent = 0;
}

// The first read goes through the socket while the server is told of the memory.
void introduce(Bench& b, const Foreign& foreign) {
  CHECK(one(b, foreign.sqe(b, 1, Landing::kLeastBytes)).result == Landing::kLeastBytes);
  CHECK(b.ring->stats().bytes_landed == 0);
}

// Two servers that hold a chunk of 16 MiB, know the ring's memory, and answer when they are told to.
struct TwoServers {
  struct Held {
    Peer* peer;
    net::Connection* connection;
    Peer::Request request;
  };
  const std::vector<uint8_t> chunk = pattern(16 << 20, 3);
  const std::vector<uint32_t> crcs = granules(chunk);
  std::atomic<bool> hold_back{false};
  std::vector<Held> waiting[2];
  Peer a{script(0)};
  Peer z{script(1)};
  Peer* peers[2] = {&a, &z};
  Bench b{{&a, &z}, TransportChoice::kLocal, 64, 1 << 20, patient};
  Foreign foreign{3 * chunk.size()};

  TwoServers() {
    for (const size_t peer : {0, 1}) {
      for (int i = 0; i < 2; i++) {
        b.submit_to(peer, foreign.sqe(b, 1, Landing::kLeastBytes));
        REQUIRE(b.complete(1).size() == 1);
      }
    }
    hold_back = true;
  }
  std::function<void(Peer&, net::Connection&, const Peer::Request&)> script(int number) {
    return [this, number](Peer& p, net::Connection& c, const Peer::Request& r) {
      if (!hold_back) return answer(p, c, r, chunk, crcs);
      waiting[number].push_back({&p, &c, r});
    };
  }
  // How many requests it holds.
  size_t asked(int number) { return peers[number]->hold(), waiting[number].size(); }
  void answer_first(int number) {
    const auto held = peers[number]->hold();
    const Held h = waiting[number].front();
    waiting[number].erase(waiting[number].begin());
    answer(*h.peer, *h.connection, h.request, chunk, crcs);
  }
};

}  // namespace

TEST_CASE("reads into memory of somebody else land in the ring's and come out whole") {
  const std::vector<uint8_t> chunk = pattern(5 * kGranuleBytes + 4096, 3);
  const std::vector<uint32_t> crcs = granules(chunk);
  std::atomic<bool> inline_now{false};
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    Peer::Request asked = r;
    if (inline_now) asked.read.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
    answer(p, c, asked, chunk, crcs);
  });
  const auto length = static_cast<uint32_t>(chunk.size());
  Foreign foreign(2 * chunk.size());
  SUBCASE("over the Unix socket") {
    Bench b({&a}, TransportChoice::kLocal, 64, 1 << 20, patient);
    introduce(b, foreign);
    const uint64_t copied = b.ring->stats().bytes_copied;
    // All of it to an odd address; a range that begins and ends inside of granules; more than there is.
    CHECK(one(b, foreign.sqe(b, 1, length, 777)).result == length);
    CHECK(std::equal(chunk.begin(), chunk.end(), foreign.bytes.begin() + 777));
    std::fill(foreign.bytes.begin(), foreign.bytes.end(), uint8_t{1});
    CHECK(one(b, foreign.sqe(b, 1, 3 * kGranuleBytes, 100, 12288)).result == 3 * kGranuleBytes);
    CHECK(std::equal(chunk.begin() + 12288, chunk.begin() + 12288 + 3 * kGranuleBytes,
                     foreign.bytes.begin() + 100));
    CHECK((foreign.bytes[99] == 1 && foreign.bytes[100 + 3 * kGranuleBytes] == 1));
    CHECK(one(b, foreign.sqe(b, 1, kGranuleBytes, 0, length - 4096)).result == 4096);
    CHECK(std::equal(chunk.end() - 4096, chunk.end(), foreign.bytes.begin()));
    CHECK(b.ring->stats().bytes_landed == length + 3 * kGranuleBytes + 4096);
    CHECK(b.ring->stats().bytes_copied == copied);
    // What isn't whole pages, and what is small, comes through the socket.
    CHECK(one(b, foreign.sqe(b, 1, length - 1)).result == length - 1);
    CHECK(one(b, foreign.sqe(b, 1, 4096)).result == 4096);
    CHECK(b.ring->stats().bytes_copied == copied + length - 1 + 4096);
    // A server may answer through the socket all the same: then nothing lands.
    const uint64_t landed = b.ring->stats().bytes_landed;
    std::fill(foreign.bytes.begin(), foreign.bytes.end(), uint8_t{1});
    inline_now = true;
    CHECK(one(b, foreign.sqe(b, 1, length, 777)).result == length);
    CHECK(std::equal(chunk.begin(), chunk.end(), foreign.bytes.begin() + 777));
    CHECK(b.ring->stats().bytes_landed == landed);
  }
  SUBCASE("a place in an Iov of ours that isn't at a page") {
    Bench b({&a}, TransportChoice::kLocal, 64, 1 << 20, patient);
    introduce(b, foreign);
    CHECK(one(b, b.sqe(FFS_OP_READ, 1, length, 24)).result == length);
    CHECK(b.ring->stats().bytes_landed == length);
    CHECK(std::equal(chunk.begin(), chunk.end(), b.iov->data() + 24));
  }
  SUBCASE("over TCP straight into it") {
    Bench b({&a}, TransportChoice::kTcp, 64, 1 << 20, patient);
    introduce(b, foreign);
    CHECK(one(b, foreign.sqe(b, 1, length, 777)).result == length);
    CHECK(std::equal(chunk.begin(), chunk.end(), foreign.bytes.begin() + 777));
    CHECK(b.ring->stats().bytes_landed == 0);
  }
}

TEST_CASE("bytes that don't match their checksums where they landed aren't delivered") {
  const std::vector<uint8_t> chunk = pattern(3 * kGranuleBytes, 3);
  const std::vector<uint32_t> crcs = granules(chunk);
  std::vector<uint8_t> wrong = chunk;
  wrong[2 * kGranuleBytes + 5] ^= 1;
  std::atomic<bool> damage{false};
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    answer(p, c, r, damage ? wrong : chunk, crcs);
  });
  Bench b({&a}, TransportChoice::kLocal, 64, 1 << 20, patient);
  Foreign foreign(chunk.size());
  introduce(b, foreign);
  damage = true;
  const ffs_cqe done = one(b, foreign.sqe(b, 1, 3 * kGranuleBytes));
  CHECK(done.result == -EIO);
  CHECK(b.ring->stats().damaged > 0);
  damage = false;
  CHECK(one(b, foreign.sqe(b, 1, 3 * kGranuleBytes)).result == 3 * kGranuleBytes);
  CHECK(foreign.bytes == chunk);
}

TEST_CASE("a server that is late with a read that lands can't reach its memory any more") {
  const std::vector<uint8_t> chunk = pattern(2 * kGranuleBytes, 3);
  const std::vector<uint32_t> crcs = granules(chunk);
  std::atomic<bool> mute_now{false};
  uint8_t* stolen = nullptr;
  Peer a([&](Peer& p, net::Connection& c, const Peer::Request& r) {
    if (!mute_now) return answer(p, c, r, chunk, crcs);
    if (asks_for_region(r)) stolen = p.memory(r.read.bulk);
  });
  Bench b({&a}, TransportChoice::kLocal, 64, 1 << 20, patient);
  Foreign foreign(chunk.size());
  introduce(b, foreign);
  CHECK(one(b, foreign.sqe(b, 1, 2 * kGranuleBytes)).result == 2 * kGranuleBytes);
  std::fill(foreign.bytes.begin(), foreign.bytes.end(), uint8_t{9});
  mute_now = true;
  ffs_sqe e = foreign.sqe(b, 1, 2 * kGranuleBytes);
  e.timeout_ms = 100;
  CHECK(one(b, e).result == -ETIMEDOUT);
  {
    const auto held = a.hold();
    REQUIRE(stolen != nullptr);
    CHECK(a.regions.size() == 1);
  }
  // The pages were punched out: the peer, who maps the file, finds none of its own there.
  CHECK(std::all_of(stolen, stolen + 2 * kGranuleBytes, [](uint8_t byte) { return byte == 0; }));
  CHECK(std::all_of(foreign.bytes.begin(), foreign.bytes.end(), [](uint8_t byte) { return byte == 9; }));
  // And its memory is told of under another id before a read lands again.
  mute_now = false;
  for (int i = 0; i < 3; i++) {
    CHECK(one(b, foreign.sqe(b, 1, 2 * kGranuleBytes)).result == 2 * kGranuleBytes);
    CHECK(foreign.bytes == chunk);
  }
  const auto held = a.hold();
  CHECK(a.regions.size() == 2);
  CHECK(a.regions[0].first != a.regions[1].first);
  CHECK(b.ring->stats().bytes_landed >= 4 * kGranuleBytes);
}

TEST_CASE("reads that find no room where they land wait for it, in order, whatever server they go to") {
  TwoServers w;
  Bench& b = w.b;
  const auto& chunk = w.chunk;
  Foreign& foreign = w.foreign;
  constexpr uint32_t kSmall = 1 << 20, kWhole = 16 << 20;
  b.submit_to(0, foreign.sqe(b, 1, kSmall));
  CHECK(b.run_until([&] { return w.asked(0) == 1; }).empty());
  b.submit_to(1, foreign.sqe(b, 2, kWhole, kWhole));                 // needs all of it
  b.submit_to(0, foreign.sqe(b, 3, kSmall, 2ull * kWhole, kSmall));  // would fit beside the first
  CHECK(b.complete(1, 100).empty());
  CHECK(w.asked(0) == 1);
  CHECK(w.asked(1) == 0);
  w.answer_first(0);
  REQUIRE(b.complete(1).size() == 1);
  CHECK(b.run_until([&] { return w.asked(1) == 1; }).empty());
  CHECK(b.complete(1, 50).empty());
  CHECK(w.asked(0) == 0);
  w.answer_first(1);
  REQUIRE(b.complete(1).size() == 1);
  CHECK(b.run_until([&] { return w.asked(0) == 1; }).empty());
  w.answer_first(0);
  REQUIRE(b.complete(1).size() == 1);
  CHECK(std::equal(chunk.begin(), chunk.begin() + kSmall, foreign.bytes.begin()));
  CHECK(std::equal(chunk.begin(), chunk.end(), foreign.bytes.begin() + kWhole));
  CHECK(std::equal(chunk.begin() + kSmall, chunk.begin() + 2 * kSmall, foreign.bytes.begin() + 2ll * kWhole));
  // A read that waits for room can be given up, and lets the next one pass.
  b.submit_to(0, foreign.sqe(b, 1, kSmall));
  CHECK(b.run_until([&] { return w.asked(0) == 1; }).empty());
  b.submit_to(1, foreign.sqe(b, 2, kWhole, kWhole));
  b.submit_to(0, foreign.sqe(b, 3, kSmall, 2ull * kWhole, kSmall));
  CHECK(b.complete(1, 50).empty());
  CHECK(b.ring->cancel(2));
  const auto cancelled = b.complete(1);
  REQUIRE(cancelled.size() == 1);
  CHECK(cancelled[0].result == -ECANCELED);
  CHECK(b.run_until([&] { return w.asked(0) == 2; }).empty());
  w.answer_first(0);
  w.answer_first(0);
  CHECK(b.complete(2).size() == 2);
}

TEST_CASE("of reads that land at most 8 MiB are at one server, and others don't wait for them") {
  TwoServers w;
  constexpr uint32_t kPart = 4 << 20;
  for (uint32_t i = 0; i < 4; i++) w.b.submit_to(0, w.foreign.sqe(w.b, i, kPart, i * kPart, i * kPart));
  CHECK(w.b.run_until([&] { return w.asked(0) == 2; }).empty());
  w.b.submit_to(1, w.foreign.sqe(w.b, 9, kPart, 4ull * kPart));
  CHECK(w.b.run_until([&] { return w.asked(1) == 1; }).empty());
  CHECK(w.b.complete(1, 50).empty());
  CHECK(w.asked(0) == 2);
  w.answer_first(0);
  REQUIRE(w.b.complete(1).size() == 1);
  CHECK(w.b.run_until([&] { return w.asked(0) == 2; }).empty());
  w.answer_first(0);
  REQUIRE(w.b.complete(1).size() == 1);
  CHECK(w.b.run_until([&] { return w.asked(0) == 2; }).empty());
  w.answer_first(0);
  w.answer_first(0);
  w.answer_first(1);
  CHECK(w.b.complete(3).size() == 3);
  const auto same = [&](uint32_t to, uint32_t from) {
    return std::equal(w.chunk.begin() + from, w.chunk.begin() + from + kPart, w.foreign.bytes.begin() + to);
  };
  for (uint32_t i = 0; i < 4; i++) CHECK(same(i * kPart, i * kPart));
  CHECK(same(4 * kPart, 0));
}

TEST_CASE("ranges of one chunk that were read of two versions of it aren't given out together") {
  const std::vector<uint8_t> chunk = pattern(2 * kGranuleBytes, 3);
  std::atomic<bool> changes{false};
  Peer a([&](Peer&, net::Connection& c, const Peer::Request& r) {
    wire::ReadReply reply{};
    reply.bytes = r.read.length;
    reply.chunk_length = static_cast<uint32_t>(chunk.size());
    reply.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
    reply.version = {1, 1, changes && r.read.offset > 0 ? 8u : 7u};
    c.queue.push(Type::kReadReply, r.id, reply, {}, net::Bytes(chunk.data() + r.read.offset, r.read.length));
    Peer::flush(c);
  });
  Bench b({&a}, TransportChoice::kTcp, 64, 1 << 20, patient);
  Foreign foreign(chunk.size());
  for (const bool now : {false, true, false}) {
    changes = now;
    ffs_sqe both[2] = {foreign.sqe(b, 1, kGranuleBytes),
                       foreign.sqe(b, 1, kGranuleBytes, kGranuleBytes, kGranuleBytes)};
    both[0].group = 2;
    both[1].group = 0;
    REQUIRE(b.ring->prepare(both, 2).taken == 2);
    auto done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == (now ? -EAGAIN : 2 * int64_t{kGranuleBytes}));
    ffs_sqe behind[3] = {both[0], both[0], both[1]};  // behind a read of another chunk
    behind[0].group = 3;
    behind[1].group = 0;
    behind[0].key[7] = 11;
    REQUIRE(b.ring->prepare(behind, 3).taken == 3);
    done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == (now ? -EAGAIN : 3 * int64_t{kGranuleBytes}));
    both[1].key[7] = 10;  // another chunk has versions of its own
    REQUIRE(b.ring->prepare(both, 2).taken == 2);
    done = b.complete(1);
    REQUIRE(done.size() == 1);
    CHECK(done[0].result == 2 * int64_t{kGranuleBytes});
  }
}
