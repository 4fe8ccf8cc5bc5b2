// Payloads that TCP sends out of the sender's memory: when that memory is free, and that it isn't before.
#include "net/zero_copy.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "net/socket.h"

using namespace ffs;
using namespace ffs::net;
using wire::Type;
using Tokens = std::vector<uint64_t>;

namespace {

constexpr size_t kPayload = 1u << 20;

void wait_for(int fd, short events) {
  pollfd one{fd, events, 0};
  REQUIRE(::poll(&one, 1, 5000) == 1);
}

// A sender whose socket takes all that is sent here, and a receiver that takes little before it is read.
struct Pair {
  explicit Pair(ZeroCopyMode mode = ZeroCopyMode::kOn) {
    auto listening = listen_tcp("127.0.0.1", 0, "cubic?");
    REQUIRE(listening.ok());
    const int little = 64 << 10, much = 32 << 20;
    REQUIRE(::setsockopt(listening->get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little) == 0);
    auto socket = connect_tcp("127.0.0.1", *bound_port(*listening), "cubic?");
    REQUIRE(socket.ok());
    sender = Connection(std::move(*socket), Transport::kTcp);
    // Tests run as root; else what fits goes out and the rest waits, as everywhere.
    if (::setsockopt(sender.socket.get(), SOL_SOCKET, SO_SNDBUFFORCE, &much, sizeof much) != 0)
      REQUIRE(::setsockopt(sender.socket.get(), SOL_SOCKET, SO_SNDBUF, &much, sizeof much) == 0);
    wait_for(listening->get(), POLLIN);
    auto accepted = accept_connection(*listening, Transport::kTcp);
    REQUIRE(accepted.ok());
    receiver = Connection(std::move(*accepted), Transport::kTcp);
    wait_for(sender.socket.get(), POLLOUT);
    sender.zero_copy.start(sender.socket.get(), mode);
  }

  void push(std::vector<uint8_t>& payload, uint64_t token, bool stays) {
    sender.queue.push_head(Type::kReadReply, token, Bytes(head.data(), head.size()), {}, payload.size());
    sender.queue.push_piece(payload, token, stays);
  }
  // Tokens that are free now, after at most so long.
  void collect(Tokens* released, size_t wanted, int most_ms = 5000) {
    for (int i = 0; i < most_ms && released->size() < wanted; i++) {
      CHECK(sender.collect_sent(released));
      if (released->size() < wanted) ::poll(nullptr, 0, 1);
    }
  }
  std::vector<uint8_t> receive(size_t bytes) {
    std::vector<uint8_t> place(bytes);
    bool done = false;
    while (!done) {
      Frame frame;
      Tokens none;
      REQUIRE(sender.flush(&none).ok());
      released.insert(released.end(), none.begin(), none.end());
      switch (receiver.reader.next(&frame)) {
        case FrameReader::Next::kFrame:
          REQUIRE(frame.payload_bytes == bytes);
          receiver.reader.place_payload(place.data());
          break;
        case FrameReader::Next::kPayload:
          done = true;
          break;
        case FrameReader::Next::kNeedMore: {
          wait_for(receiver.socket.get(), POLLIN);
          auto got = receiver.receive();
          if (!got.ok()) REQUIRE(got.error().code == EAGAIN);
          break;
        }
        default:
          FAIL("a bad frame");
      }
    }
    return place;
  }

  std::vector<uint8_t> head = std::vector<uint8_t>(sizeof(wire::ReadReply), 3);
  Connection sender, receiver;
  Tokens released;
};

}  // namespace

TEST_CASE("zero copy: memory is free when the kernel is done with all sends up to its last, in any order") {
  ZeroCopy zero;
  Tokens released;
  zero.sent();    // 0
  zero.hold(10);  // all in send 0
  zero.sent();    // 1
  zero.sent();    // 2
  zero.hold(11);  // in 1 and 2
  zero.sent();    // 3
  zero.hold(12);
  zero.completed(2, 3, false, &released);
  CHECK(released.empty());
  zero.completed(0, 0, false, &released);
  CHECK(released == Tokens{10});
  zero.completed(0, 0, false, &released);  // told once more: nothing
  zero.completed(7, 9, false, &released);  // not ours
  CHECK(released == Tokens{10});
  CHECK(zero.outstanding());
  zero.completed(1, 1, true, &released);
  CHECK(released == Tokens{10, 11, 12});
  CHECK(!zero.outstanding());
  const ZeroCopyCounters counters = zero.take_counters();
  CHECK(counters.sends == 4);
  CHECK(zero.take_counters().sends == 0);
}

TEST_CASE("zero copy: the kernel's numbers wrap") {
  ZeroCopy zero;
  zero.start_at(UINT32_MAX - 1);
  Tokens released;
  for (uint64_t token = 1; token <= 4; token++) {
    zero.sent();
    zero.hold(token);
  }
  zero.completed(0, 1, false, &released);
  CHECK(released.empty());
  zero.completed(UINT32_MAX - 1, UINT32_MAX - 1, false, &released);
  CHECK(released == Tokens{1});
  zero.completed(UINT32_MAX, 0, false, &released);
  CHECK(released == Tokens{1, 2, 3, 4});
}

TEST_CASE("zero copy: payloads that stay go out of their memory, which is held until the kernel is done") {
  Pair pair;
  REQUIRE(pair.sender.zero_copy.on());
  std::vector<uint8_t> first(kPayload, 1), second(kPayload, 2), small(4096, 4);
  pair.push(first, 21, true);
  pair.push(small, 22, true);  // too small
  pair.push(second, 23, true);
  Tokens released;
  REQUIRE(pair.sender.flush(&released).ok());
  const bool all_taken = pair.sender.queue.empty();
  CHECK(std::find(released.begin(), released.end(), 21) == released.end());
  CHECK(std::find(released.begin(), released.end(), 23) == released.end());
  if (all_taken) {
    // Sent says nothing of copied: what is changed now is what arrives.
    CHECK(pair.sender.collect_sent(&released));
    CHECK(std::find(released.begin(), released.end(), 23) == released.end());
    std::memset(second.data() + kPayload - 4096, 9, 4096);
  }
  CHECK(pair.receive(kPayload) == first);
  CHECK(pair.receive(small.size()) == small);
  CHECK(pair.receive(kPayload) == second);
  released.insert(released.end(), pair.released.begin(), pair.released.end());
  pair.collect(&released, 3);
  std::sort(released.begin(), released.end());
  CHECK(released == Tokens{21, 22, 23});
  CHECK(!pair.sender.zero_copy.outstanding());
  CHECK(pair.sender.zero_copy.take_counters().sends >= 2);
}

TEST_CASE("zero copy: what may change is copied") {
  Pair pair;
  std::vector<uint8_t> payload(kPayload, 1);
  const std::vector<uint8_t> as_sent = payload;
  pair.push(payload, 21, /*stays=*/false);
  Tokens released;
  REQUIRE(pair.sender.flush(&released).ok());
  if (pair.sender.queue.empty()) {
    CHECK(released == Tokens{21});
    std::memset(payload.data(), 9, payload.size());
  }
  CHECK(pair.receive(kPayload) == as_sent);
  CHECK(!pair.sender.zero_copy.outstanding());
  CHECK(pair.sender.zero_copy.take_counters().sends == 0);
}

TEST_CASE("zero copy: of a connection that is abandoned all memory comes back, though nobody reads") {
  Pair pair;
  std::vector<std::vector<uint8_t>> payloads(64, std::vector<uint8_t>(kPayload, 5));
  for (size_t i = 0; i < payloads.size(); i++) pair.push(payloads[i], i + 1, i % 4 != 3);
  Tokens released;
  const size_t frame = pair.sender.queue.pending_bytes() / payloads.size();
  REQUIRE(pair.sender.flush(&released, 2 * frame + kPayload / 2).ok());  // the third in part
  REQUIRE(pair.sender.zero_copy.outstanding());
  pair.sender.abandon(&released);
  CHECK(pair.sender.queue.empty());
  CHECK(std::find(released.begin(), released.end(), 3) == released.end());
  pair.collect(&released, payloads.size());
  std::sort(released.begin(), released.end());
  Tokens all;
  for (size_t i = 0; i < payloads.size(); i++) all.push_back(i + 1);
  CHECK(released == all);
  CHECK(!pair.sender.zero_copy.outstanding());
}

TEST_CASE("zero copy: by itself not to this host, and not where the kernel copies after all") {
  Pair pair(ZeroCopyMode::kAuto);
  CHECK(!pair.sender.zero_copy.on());
  Pair off(ZeroCopyMode::kOff);
  CHECK(!off.sender.zero_copy.on());

  for (const auto mode : {ZeroCopyMode::kAuto, ZeroCopyMode::kOn}) {
    ZeroCopy zero;
    zero.assume_on(mode);
    Tokens released;
    for (uint32_t i = 0; i < ZeroCopy::kMostCopied; i++) {
      CHECK(zero.on());
      zero.sent();
      zero.completed(i, i, true, &released);
    }
    CHECK(zero.on() == (mode == ZeroCopyMode::kOn));
    CHECK(zero.take_counters().copied == ZeroCopy::kMostCopied);
  }
}
