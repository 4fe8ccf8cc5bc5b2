// RDMA without a device: credits, posting, choosing a port and an address, and a channel over a pair in
// memory that fails where it is told to (docs/rdma.md).
#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <random>

#include "net/rdma/channel.h"
#include "net/rdma/choose.h"

using namespace ffs;
using namespace ffs::net;
using namespace ffs::net::rdma;

namespace {

// Two of them carry each other's messages; what is posted happens when the other polls.
struct FakePair : Pair {
  FakePair* other = nullptr;
  Shape shape;
  uint8_t* memory = nullptr;
  std::deque<uint32_t> receives;
  std::deque<Completion> done;
  std::vector<std::vector<Work>> batches;
  uint64_t fail_number = 0;  // of the work that the other's memory refuses
  bool broken = false;
  uint64_t empty_receives = 0;  // messages that met no buffer: credits must make this impossible

  Status post(std::span<const Work> work) override {
    batches.emplace_back(work.begin(), work.end());
    for (const Work& one : work) {
      if (broken) {
        done.push_back({false, 5, one.number});
        continue;
      }
      if (one.number == fail_number) {
        done.push_back({false, 10, one.number});
        broken = other->broken = true;
        continue;
      }
      if (one.kind == WorkKind::kSend) {
        if (other->receives.empty()) {
          empty_receives++;
          return Error::of(EIO, "no receive buffer");
        }
        const uint32_t buffer = other->receives.front();
        other->receives.pop_front();
        std::memcpy(other->memory + size_t{buffer} * other->shape.message_bytes, one.memory, one.length);
        other->done.push_back({true, 0, buffer, one.length, one.immediate});
      } else if (one.kind == WorkKind::kWrite) {
        std::memcpy(reinterpret_cast<uint8_t*>(one.remote), one.memory, one.length);
      } else {
        std::memcpy(one.memory, reinterpret_cast<uint8_t*>(one.remote), one.length);
      }
      if (one.signalled) done.push_back({false, 0, one.number});
    }
    return ok_status();
  }
  Status post_receives(std::span<const uint32_t> buffers) override {
    receives.insert(receives.end(), buffers.begin(), buffers.end());
    return ok_status();
  }
  int poll(std::span<Completion> out) override {
    size_t count = 0;
    while (count < out.size() && !done.empty()) {
      out[count++] = done.front();
      done.pop_front();
    }
    return static_cast<int>(count);
  }
  bool arms = true;
  Status arm() override { return arms ? ok_status() : Status(Error::of(EIO, "it can't be armed")); }
  const char* fault_name(uint32_t) const override { return "a fault of the test"; }
};

struct Ends {
  explicit Ends(Shape shape = {}) {
    for (int i = 0; i < 2; i++) {
      memory[i].resize(channel_memory_bytes(shape));
      auto pair = std::make_unique<FakePair>();
      pairs[i] = pair.get();
      pair->shape = shape;
      pair->memory = memory[i].data();
      for (uint32_t buffer = 0; buffer < shape.receives; buffer++) pair->receives.push_back(buffer);
      channels[i] = std::make_unique<Channel>(std::move(pair), shape, memory[i].data(), 1, shape.receives,
                                              shape.message_bytes);
    }
    pairs[0]->other = pairs[1];
    pairs[1]->other = pairs[0];
  }
  std::vector<uint8_t> memory[2];
  FakePair* pairs[2];
  std::unique_ptr<Channel> channels[2];
  FrameReader readers[2];
  SendQueue queues[2];
  std::vector<uint64_t> released;
};

PortFacts port_with(std::vector<GidFacts> gids, bool ethernet = true) {
  PortFacts port;
  port.device = "rocep1";
  port.active = true;
  port.ethernet = ethernet;
  port.gids = std::move(gids);
  return port;
}

GidFacts gid_of(int index, GidType type, std::initializer_list<int> bytes) {
  GidFacts out;
  out.index = index;
  out.type = type;
  size_t at = 0;
  for (const int byte : bytes) out.gid[at++] = static_cast<uint8_t>(byte);
  return out;
}

const auto kV4 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
const auto kV6 = {0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
const auto kLinkLocal = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, 1};

wire::RdmaEnd some_end() {
  wire::RdmaEnd end{};
  end.queue_pair = 17;
  end.first_packet = 1000;
  end.gid[15] = 1;
  end.mtu = 5;
  end.ethernet = 1;
  end.reads_in = end.reads_out = 16;
  end.receives = 32;
  end.message_bytes = 8192;
  return end;
}

}  // namespace

TEST_CASE("a message takes a credit, the last one is kept to tell of credits") {
  Credits credits(4, 4);
  for (int i = 0; i < 3; i++) {
    REQUIRE(credits.can_send());
    CHECK(credits.take() == 0);
  }
  CHECK(!credits.can_send());
  CHECK(!credits.must_tell());
  credits.posted(1);
  CHECK(!credits.must_tell());
  credits.posted(1);
  CHECK(credits.must_tell());
  CHECK(credits.take() == 2);
  CHECK(!credits.must_tell());
  CHECK(credits.told(4));
  CHECK(!credits.told(1));  // more than it ever had
}

TEST_CASE("work reports its end as seldom as memory and room allow") {
  Postings postings(16, 1 << 20);
  uint8_t memory[8];
  Work write;
  write.kind = WorkKind::kWrite;
  write.memory = memory;
  write.length = 8;
  for (uint64_t i = 1; i <= 3; i++) postings.add(write, i, 100 + i);
  Entry message;
  postings.add_message(message);
  auto batch = postings.batch();
  REQUIRE(batch.size() == 4);
  CHECK(!batch[0].signalled);
  CHECK(!batch[2].signalled);
  CHECK(batch[3].signalled);  // one report for all
  postings.posted();
  std::vector<Ended> ended;
  std::vector<int32_t> slots;
  postings.ended(4, &ended, &slots);
  REQUIRE(ended.size() == 3);
  CHECK(ended[2].token == 3);
  CHECK(ended[2].tag == 103);
  CHECK(postings.under_way() == 0);

  // Messages whose memory is free already: a report when half of the queue is silent.
  int reports = 0;
  for (int i = 0; i < 8; i++) {
    postings.add_message(message);
    reports += postings.batch()[0].signalled;
    postings.posted();
  }
  CHECK(reports == 1);

  // Each read reports, since somebody waits for it.
  Postings others(16, 4);
  Work read = write;
  read.kind = WorkKind::kRead;
  others.add(read, 9, 0);  // longer than one request may be: two
  batch = others.batch();
  REQUIRE(batch.size() == 2);
  CHECK(batch[1].memory == memory + 4);
  CHECK(batch[1].length == 4);
  CHECK((batch[0].signalled && batch[1].signalled));
}

TEST_CASE("no more is posted than the queue holds, in order") {
  Postings postings(4, 1 << 20);
  uint8_t memory[1];
  Work write;
  write.kind = WorkKind::kWrite;
  write.memory = memory;
  write.length = 1;
  for (uint64_t i = 1; i <= 10; i++) postings.add(write, i, 0);
  std::vector<Ended> ended;
  std::vector<int32_t> slots;
  uint64_t next = 1;
  while (ended.size() < 10) {
    const auto batch = postings.batch();
    REQUIRE(batch.size() <= 4);
    REQUIRE(!batch.empty());
    CHECK(batch.front().number == next);
    CHECK(batch.back().signalled);  // else nothing would tell of room
    next += batch.size();
    if (next <= 10) CHECK(!postings.has_room());
    postings.posted();
    postings.ended(next - 1, &ended, &slots);
  }
  for (size_t i = 0; i < 10; i++) CHECK(ended[i].token == i + 1);
}

TEST_CASE("a failure names its work, and what stood before it has ended well") {
  Postings postings(16, 1 << 20);
  uint8_t memory[1];
  Work write;
  write.kind = WorkKind::kWrite;
  write.memory = memory;
  write.length = 1;
  for (uint64_t i = 1; i <= 5; i++) postings.add(write, i, 10 * i);
  (void)postings.batch();
  postings.posted();
  std::vector<Ended> ended;
  std::vector<int32_t> slots;
  Ended culprit;
  REQUIRE(postings.failed(3, &culprit, &ended, &slots));
  CHECK(culprit.tag == 30);
  CHECK(ended.size() == 2);
  ended.clear();
  postings.abandon(&ended);
  REQUIRE(ended.size() == 3);
  for (const Ended& one : ended) CHECK(!one.good);
  CHECK(!postings.failed(3, &culprit, &ended, &slots));
}

TEST_CASE("frames of any size go both ways at once, and no message meets an empty receive queue") {
  for (const uint32_t receives : {4u, 5u, 32u}) {
    Shape shape;
    shape.receives = receives;
    shape.message_bytes = 256;
    shape.depth = 16;
    shape.inline_bytes = receives == 5 ? 0 : 64;
    Ends ends(shape);
    std::mt19937 random(receives);
    uint64_t sent[2] = {0, 0}, got[2] = {0, 0};
    std::vector<uint8_t> places[2] = {std::vector<uint8_t>(20000), std::vector<uint8_t>(20000)};
    std::vector<uint8_t> bytes(100000);
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
    int quiet = 0;
    while (got[0] < 300 || got[1] < 300) {
      REQUIRE(++quiet < 100000);
      for (int i = 0; i < 2; i++) {
        if (random() % 3 == 0 && sent[i] < 300) {
          wire::StatusReply pong{};
          pong.value = ++sent[i];
          const size_t length = random() % 4 == 0 ? random() % 20000 : 0;
          if (length > 0) {
            wire::ReadReply reply{};
            reply.bytes = static_cast<uint32_t>(length);
            reply.expiry_ms = sent[i];
            ends.queues[i].push(wire::Type::kReadReply, 0, reply, {}, Bytes(bytes.data(), length), 1);
          } else {
            ends.queues[i].push(wire::Type::kPong, 0, pong);
          }
        }
        REQUIRE(ends.channels[i]->flush(ends.queues[i], &ends.released).ok());
        if (random() % 2 == 0) continue;  // the other is faster than this one
        while (true) {
          Frame frame;
          const auto next = ends.readers[i].next(&frame);
          if (next == FrameReader::Next::kFrame && frame.payload_bytes > 0) {
            CHECK(frame.as<wire::ReadReply>().expiry_ms == ++got[i]);
            ends.readers[i].place_payload(places[i].data());
          } else if (next == FrameReader::Next::kFrame) {
            CHECK(frame.as<wire::StatusReply>().value == ++got[i]);
          } else if (next == FrameReader::Next::kNeedMore) {
            auto more = ends.channels[i]->receive(ends.readers[i]);
            if (!more.ok()) {
              REQUIRE(more.error().code == EAGAIN);
              break;
            }
          } else {
            REQUIRE(next == FrameReader::Next::kPayload);
          }
        }
      }
    }
    for (int i = 0; i < 2; i++) {
      CHECK(ends.pairs[i]->empty_receives == 0);
      CHECK(ends.channels[i]->counters().completions < ends.channels[i]->counters().sends);
      ends.channels[i]->end();
    }
  }
}

TEST_CASE("what is written goes before the frame that tells of it, with one doorbell") {
  Ends ends;
  std::vector<uint8_t> from(1 << 20, 7), to(1 << 20);
  Channel& server = *ends.channels[0];
  server.write(from.data(), 1, reinterpret_cast<uint64_t>(to.data()), 2, 1 << 20, 55, 66);
  ends.queues[0].push(wire::Type::kPong, 3, wire::StatusReply{});
  REQUIRE(*server.flush(ends.queues[0], &ends.released));
  CHECK(to == from);
  REQUIRE(ends.pairs[0]->batches.size() == 1);
  REQUIRE(ends.pairs[0]->batches[0].size() == 2);
  CHECK(ends.pairs[0]->batches[0][0].kind == WorkKind::kWrite);
  CHECK(ends.pairs[0]->batches[0][1].kind == WorkKind::kSend);
  CHECK(server.counters().doorbells == 1);
  REQUIRE(server.poll().ok());
  REQUIRE(server.ended().size() == 1);
  CHECK(server.ended()[0].token == 55);
  CHECK(server.ended()[0].good);
}

TEST_CASE("a key that the other refuses breaks the pair and is known by its request; all tokens come back") {
  Ends ends;
  std::vector<uint8_t> memory(4096), there(4096);
  Channel& server = *ends.channels[0];
  for (uint64_t i = 1; i <= 4; i++) {
    server.write(memory.data(), 1, reinterpret_cast<uint64_t>(there.data()), 2, 4096, i, 100 + i);
  }
  ends.pairs[0]->fail_number = 3;
  REQUIRE(server.flush(ends.queues[0], &ends.released).ok());
  CHECK(!server.poll().ok());
  CHECK(server.broken());
  CHECK(server.by_remote_access());
  CHECK(server.culprit().tag == 103);
  CHECK(server.culprit().kind == WorkKind::kWrite);
  CHECK(server.receive(ends.readers[0]).error().code == EPIPE);
  CHECK(server.flush(ends.queues[0], &ends.released).error().code == EPIPE);
  server.end();
  std::vector<Ended> left;
  server.abandon(&left);
  REQUIRE(left.size() == 4);
  int good = 0;
  for (const Ended& one : left) good += one.good;
  CHECK(good == 2);
}

TEST_CASE("a message that gives back more buffers than there are breaks the channel") {
  Ends ends;
  ends.pairs[0]->done.push_back({true, 0, 0, 4, 1});
  CHECK(!ends.channels[0]->poll().ok());
  CHECK(ends.channels[0]->broken());
  Ends others;
  others.pairs[0]->done.push_back({true, 0, 999, 4, 0});
  CHECK(!others.channels[0]->poll().ok());
}

TEST_CASE("a completion queue that can't be armed breaks the channel: nobody looks at it for ever") {
  Ends ends;
  auto armed = ends.channels[0]->arm();
  REQUIRE(armed.ok());
  CHECK_FALSE(*armed);
  ends.channels[0]->disarmed();
  ends.pairs[0]->arms = false;
  CHECK_FALSE(ends.channels[0]->arm().ok());
  CHECK(ends.channels[0]->broken());
  CHECK(ends.channels[0]->receive(ends.readers[0]).error().code == EPIPE);
}

TEST_CASE("of a port's addresses a routed one with IPv4 is taken, a link's own last") {
  const auto v1 = gid_of(0, GidType::kRoceV1, kV4);
  const auto local = gid_of(1, GidType::kRoceV2, kLinkLocal);
  const auto v6 = gid_of(2, GidType::kRoceV2, kV6);
  const auto v4 = gid_of(3, GidType::kRoceV2, kV4);
  CHECK(choose_gid(port_with({v1, local, v6, v4}))->index == 3);
  CHECK(choose_gid(port_with({v1, local, v6}))->index == 2);
  CHECK(choose_gid(port_with({v1, local}))->index == 1);
  CHECK(choose_gid(port_with({v1}))->index == 0);
  CHECK(choose_gid(port_with({v1, v4}), 0)->index == 0);  // asked for
  CHECK(choose_gid(port_with({v1, v4}), 7) == nullptr);
  CHECK(choose_gid(port_with({gid_of(0, GidType::kRoceV2, {})})) == nullptr);
  CHECK(choose_gid(port_with({gid_of(0, GidType::kInfiniband, kLinkLocal)}, false))->index == 0);
}

TEST_CASE(
    "the port is the one that the socket goes over, else one of the same NUMA node, else they take turns") {
  auto first = port_with({gid_of(0, GidType::kRoceV2, kV6)});
  auto second = port_with({gid_of(0, GidType::kRoceV2, kV4)});
  auto third = port_with({gid_of(0, GidType::kInfiniband, kLinkLocal)}, false);
  first.numa_node = 0;
  second.numa_node = 1;
  const Candidate all[] = {{&first, &first.gids[0]}, {&second, &second.gids[0]}, {&third, &third.gids[0]}};
  Place place;
  place.address = second.gids[0].gid;
  place.numa_node = 0;
  CHECK(choose_port(all, place, 0) == 1);
  place.address = {};
  CHECK(choose_port(all, place, 1) == 0);
  place.numa_node = -1;
  CHECK(choose_port(all, place, 1) == 1);
  place.ethernet = 0;
  CHECK(choose_port(all, place, 0) == 2);
  third.active = false;
  CHECK(choose_port(all, place, 0) == -1);
}

TEST_CASE("two ends agree on the smaller MTU and on reads; what can't be is refused") {
  wire::RdmaEnd ours = some_end(), theirs = some_end();
  theirs.mtu = 3;
  theirs.reads_in = 4;
  auto agreed = agree(ours, theirs);
  REQUIRE(agreed.ok());
  CHECK(agreed->mtu == 3);
  CHECK(agreed->reads_from_them == 4);
  const auto refuses = [&](auto&& spoil) {
    wire::RdmaEnd wrong = some_end();
    spoil(wrong);
    return !agree(ours, wrong).ok();
  };
  CHECK(refuses([](auto& end) { end.queue_pair = 0; }));
  CHECK(refuses([](auto& end) { end.queue_pair = 1 << 24; }));
  CHECK(refuses([](auto& end) { end.first_packet = 1 << 24; }));
  CHECK(refuses([](auto& end) { end.mtu = 0; }));
  CHECK(refuses([](auto& end) { end.mtu = 6; }));
  CHECK(refuses([](auto& end) { end.ethernet = 0; }));
  CHECK(refuses([](auto& end) { end.gid[15] = 0; }));
  CHECK(refuses([](auto& end) { end.receives = 3; }));
  CHECK(refuses([](auto& end) { end.receives = 1 << 20; }));
  CHECK(refuses([](auto& end) { end.message_bytes = 255; }));
  CHECK(refuses([](auto& end) { end.message_bytes = 1 << 30; }));
}

TEST_CASE("devices are named with port and address index") {
  auto parsed = parse_wanted("mlx5_0,mlx5_1:2,rxe0:1:3");
  REQUIRE(parsed.ok());
  REQUIRE(parsed->size() == 3);
  CHECK((*parsed)[0].port == -1);
  CHECK((*parsed)[1].port == 2);
  CHECK((*parsed)[2].gid_index == 3);
  CHECK(parse_wanted("")->empty());
  for (const char* wrong : {":1", "a:", "a:0", "a:x", "a:1:", "a:1:-2", "a,,b", "a:300"}) {
    INFO(std::string(wrong));
    CHECK(!parse_wanted(wrong).ok());
  }
}
