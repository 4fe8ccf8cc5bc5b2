// The codec: frames cut anywhere, payloads into their place, broken streams, queues.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/crc32c.h"
#include "base/ids.h"
#include "net/frame.h"

using namespace ffs;
using namespace ffs::net;
using wire::Type;
using Next = FrameReader::Next;

namespace {

std::vector<uint8_t> bytes_of_queue(SendQueue& queue) {
  std::vector<uint8_t> out;
  std::vector<uint64_t> released;
  while (!queue.empty()) {
    iovec pieces[4];
    int fd;
    const int count = queue.gather(pieces, 4, &fd);
    size_t total = 0;
    for (int i = 0; i < count; i++) {
      const auto* from = static_cast<const uint8_t*>(pieces[i].iov_base);
      out.insert(out.end(), from, from + pieces[i].iov_len);
      total += pieces[i].iov_len;
    }
    queue.advance(total, &released);
  }
  return out;
}

// Feeds at most `at_most` bytes where the reader wants them; returns how many.
size_t feed(FrameReader& reader, const std::vector<uint8_t>& bytes, size_t from, size_t at_most) {
  iovec slots[2];
  const int count = reader.slots(slots);
  size_t fed = 0;
  for (int i = 0; i < count; i++) {
    const size_t piece = std::min({slots[i].iov_len, at_most - fed, bytes.size() - from - fed});
    std::memcpy(slots[i].iov_base, bytes.data() + from + fed, piece);
    fed += piece;
    if (piece < slots[i].iov_len) break;
  }
  reader.received(fed);
  return fed;
}

std::vector<uint8_t> pattern(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(size);
  for (auto& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

Next read_one(std::vector<uint8_t> bytes) {
  FrameReader reader;
  feed(reader, bytes, 0, bytes.size());
  Frame frame;
  return reader.next(&frame);
}

std::vector<uint8_t> ping() {
  SendQueue queue;
  queue.push(Type::kPing, 7, wire::StatusReply{});
  return bytes_of_queue(queue);
}

void set_crc(std::vector<uint8_t>& bytes) {
  wire::FrameHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.frame_crc = 0;
  std::memcpy(bytes.data(), &header, sizeof header);
  header.frame_crc = crc32c(bytes.data(), sizeof header + header.fixed_bytes + header.var_bytes);
  std::memcpy(bytes.data(), &header, sizeof header);
}

}  // namespace

TEST_CASE("frames come out whole however the stream is cut") {
  const uint32_t seed = 20240601;
  INFO("seed ", seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; round++) {
    SendQueue queue;
    struct Sent {
      uint64_t id;
      std::vector<uint8_t> payload;
      std::vector<uint8_t> var;
    };
    std::vector<Sent> sent;
    const int frames = 1 + static_cast<int>(random() % 6);
    for (int i = 0; i < frames; i++) {
      Sent one{random(), {}, pattern(4 * (random() % 50), random())};
      if (random() % 2 == 0) one.payload = pattern(1 + random() % 200000, random());
      sent.push_back(std::move(one));
    }
    for (const Sent& one : sent) queue.push(Type::kUpdate, one.id, wire::Update{}, one.var, one.payload);
    const auto bytes = bytes_of_queue(queue);
    FrameReader reader(8192);
    size_t at = 0, index = 0;
    std::vector<uint8_t> place;
    while (index < sent.size()) {
      Frame frame;
      const Next next = reader.next(&frame);
      if (next == Next::kNeedMore) {
        REQUIRE(at < bytes.size());
        const size_t most = random() % 3 == 0 ? 1 + random() % 7 : 1 + random() % 100000;
        at += feed(reader, bytes, at, most);
      } else if (next == Next::kFrame) {
        CHECK(frame.request_id == sent[index].id);
        CHECK(std::equal(frame.var.begin(), frame.var.end(), sent[index].var.begin(), sent[index].var.end()));
        REQUIRE(frame.payload_bytes == sent[index].payload.size());
        if (frame.payload_bytes == 0) {
          index++;
        } else if (random() % 8 == 0) {
          reader.unread();  // no room now: the same frame comes again
        } else {
          place.assign(frame.payload_bytes, 0);
          reader.place_payload(place.data());
        }
      } else {
        REQUIRE(next == Next::kPayload);
        CHECK(place == sent[index].payload);
        index++;
      }
    }
    CHECK(at == bytes.size());
    CHECK(reader.idle());
  }
}

TEST_CASE("a payload goes straight to its place, and an abandoned one nowhere") {
  SendQueue queue;
  const auto payload = pattern(1 << 20, 1);
  queue.push(Type::kUpdate, 1, wire::Update{}, {}, payload);
  queue.push(Type::kPing, 2, wire::StatusReply{});
  const auto bytes = bytes_of_queue(queue);
  FrameReader reader(8192);
  size_t at = feed(reader, bytes, 0, 4000);
  Frame frame;
  REQUIRE(reader.next(&frame) == Next::kFrame);
  std::vector<uint8_t> place(payload.size());
  reader.place_payload(place.data());
  REQUIRE(reader.next(&frame) == Next::kNeedMore);
  iovec slots[2];
  REQUIRE(reader.slots(slots) == 2);
  const size_t copied = 4000 - sizeof(wire::FrameHeader) - sizeof(wire::Update);
  CHECK(slots[0].iov_base == place.data() + copied);
  CHECK(slots[0].iov_len == payload.size() - copied);
  at += feed(reader, bytes, at, 100000);
  const std::vector<uint8_t> before = place;
  reader.abandon_payload();
  while (at < bytes.size()) {
    Next next = reader.next(&frame);
    if (next == Next::kNeedMore) at += feed(reader, bytes, at, 50000);
  }
  CHECK(place == before);
  // The rest: end of the payload, then the ping.
  Next next = reader.next(&frame);
  if (next == Next::kPayload) next = reader.next(&frame);
  CHECK(next == Next::kFrame);
  CHECK(frame.type == Type::kPing);
}

TEST_CASE("each field that breaks the stream is seen") {
  CHECK(read_one(ping()) == Next::kFrame);
  for (const size_t at : {size_t{0}, size_t{4}, size_t{5}, size_t{20}, size_t{24}, size_t{40}}) {
    INFO("flipped byte ", at);
    auto bytes = ping();
    bytes[at] ^= 0x40;
    CHECK(read_one(bytes) == Next::kBad);
  }
  auto changed = [](size_t at, uint32_t value) {
    auto bytes = ping();
    std::memcpy(bytes.data() + at, &value, 4);
    return bytes;
  };
  CHECK(read_one(changed(8, wire::kMaxFixedBytes + 1)) == Next::kBad);
  CHECK(read_one(changed(12, wire::kMaxVarBytes + 1)) == Next::kBad);
  CHECK(read_one(changed(16, wire::kMaxPayloadBytes + 1)) == Next::kBad);
  CHECK(read_one(changed(16, 1)) == Next::kBad);  // a ping has no payload
  auto shorter = changed(8, sizeof(wire::StatusReply) - 4);
  set_crc(shorter);
  CHECK(read_one(shorter) == Next::kBad);
}

TEST_CASE("a longer fixed part is read as far as it is known") {
  struct Newer {
    wire::StatusReply known;
    uint64_t added;
  } newer{{1, 2, 3}, 4};
  SendQueue queue;
  queue.push(Type::kPing, 1, newer);
  const auto bytes = bytes_of_queue(queue);
  FrameReader reader;
  feed(reader, bytes, 0, bytes.size());
  Frame frame;
  REQUIRE(reader.next(&frame) == Next::kFrame);
  CHECK(frame.as<wire::StatusReply>().value == 3);
  CHECK(reader.idle());
}

TEST_CASE("a send queue that never runs empty stays bounded and releases in order") {
  SendQueue queue;
  std::vector<uint64_t> released;
  const auto payload = pattern(100, 3);
  uint64_t pushed = 0;
  std::vector<uint8_t> stream, expected;
  SendQueue single;
  for (int round = 0; round < 5000; round++) {
    queue.push(Type::kUpdate, static_cast<uint64_t>(round), wire::Update{}, {}, payload, ++pushed);
    single.push(Type::kUpdate, static_cast<uint64_t>(round), wire::Update{}, {}, payload);
    const auto one = bytes_of_queue(single);
    expected.insert(expected.end(), one.begin(), one.end());
    if (round < 3) continue;
    iovec pieces[3];
    int fd;
    const int count = queue.gather(pieces, 3, &fd);
    REQUIRE(count > 0);
    size_t total = 0;
    for (int i = 0; i < count; i++) {
      const auto* from = static_cast<const uint8_t*>(pieces[i].iov_base);
      const size_t part = std::min<size_t>(pieces[i].iov_len, one.size() - total);
      stream.insert(stream.end(), from, from + part);
      total += part;
    }
    queue.advance(total, &released);
    REQUIRE(queue.pending_bytes() <= 5 * one.size());
  }
  REQUIRE(std::equal(stream.begin(), stream.end(), expected.begin()));
  queue.clear(&released);
  REQUIRE(released.size() == pushed);
  for (size_t i = 0; i < released.size(); i++) CHECK(released[i] == i + 1);
}

TEST_CASE("pieces are cut at granule borders") {
  CHECK(piece_count(0, 0) == 0);
  CHECK(piece_count(0, 1) == 1);
  CHECK(piece_count(0, kGranuleBytes) == 1);
  CHECK(piece_count(0, kGranuleBytes + 1) == 2);
  CHECK(piece_count(kGranuleBytes - 1, 2) == 2);
  CHECK(piece_count(kGranuleBytes - 1, 1) == 1);
  CHECK(piece_count(0, kMaxChunkBytes) == kMaxGranules);
  const auto data = pattern(3 * kGranuleBytes, 9);
  uint32_t crcs[4];
  piece_crcs(100, Bytes(data).first(2 * kGranuleBytes), crcs);
  CHECK(crcs[0] == crc32c(data.data(), kGranuleBytes - 100));
  CHECK(crcs[1] == crc32c(data.data() + kGranuleBytes - 100, kGranuleBytes));
  CHECK(crcs[2] == crc32c(data.data() + 2 * kGranuleBytes - 100, 100));
}
