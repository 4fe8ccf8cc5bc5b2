// The parts of the client that need no peer: retry policy, channels, capabilities, routing, Iov.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "client/budget.h"
#include "client/capabilities.h"
#include "client/channels.h"
#include "client/iov.h"
#include "client/latency.h"
#include "client/retry.h"
#include "client/routing.h"

using namespace ffs;
using namespace ffs::client;
using wire::Detail;

namespace {

Situation reading(bool untried, bool sound = true) {
  Situation s;
  s.untried_left = untried;
  s.sound_left = sound;
  return s;
}

Situation updating() {
  Situation s;
  s.update = true;
  s.identified = true;
  return s;
}

Decision reply(const Situation& s, uint32_t status, Detail detail, uint32_t after = 0) {
  return decide(s, {Ending::kReply, status, detail, after});
}

}  // namespace

TEST_CASE("reads turn to an untried replica when one can't help, then wait for routing") {
  for (auto ending : {Ending::kUnreachable, Ending::kLost, Ending::kTryTimeout}) {
    CHECK(decide(reading(true), {ending}).next == Next::kOtherReplica);
  }
  CHECK(decide(reading(false), {Ending::kLost}).next == Next::kAwaitRouting);
  CHECK(decide(reading(false), {Ending::kTryTimeout}).next == Next::kAgain);
  CHECK(reply(reading(true), EAGAIN, Detail::kNotServing).next == Next::kOtherReplica);
  CHECK(reply(reading(false), EAGAIN, Detail::kNotServing).next == Next::kAwaitRouting);
  CHECK(reply(reading(true), EIO, Detail::kPoisoned).next == Next::kOtherReplica);
}

TEST_CASE("a try may take twice as long whenever all replicas were late once") {
  CHECK(patience_ms(2000, 0, 3) == 2000);
  CHECK(patience_ms(2000, 2, 3) == 2000);
  CHECK(patience_ms(2000, 3, 3) == 4000);
  CHECK(patience_ms(2000, 3, 1) == 16000);
  CHECK(patience_ms(2000, 1000, 3) == 32000);
  CHECK(patience_ms(~0u, 1000, 0) == uint64_t{~0u} * 16);
}

TEST_CASE("damage goes to the sound replicas and ends in EIO when there are none") {
  CHECK(decide(reading(true), {Ending::kBadData}).next == Next::kOtherReplica);
  CHECK(decide(reading(false, true), {Ending::kBadData}).next == Next::kAwaitRouting);
  const Decision none = reply(reading(false, false), EIO, Detail::kCorrupt);
  CHECK(none.next == Next::kComplete);
  CHECK(none.status == EIO);
  CHECK(none.detail == Detail::kCorrupt);
}

TEST_CASE("updates keep to the head: again, or when routing is newer, never elsewhere") {
  for (auto ending : {Ending::kUnreachable, Ending::kLost, Ending::kTryTimeout}) {
    const Decision d = decide(updating(), {ending});
    CHECK((d.next == Next::kAwaitRouting || d.next == Next::kAgain));
  }
  for (auto detail : {Detail::kStaleRouting, Detail::kWrongTarget, Detail::kNotHead, Detail::kNotServing}) {
    CHECK(reply(updating(), EAGAIN, detail).next == Next::kAwaitRouting);
  }
  CHECK(reply(updating(), EAGAIN, Detail::kReissue).next == Next::kReissue);
  Situation unidentified = updating();
  unidentified.identified = false;  // a create or a touch: there is no sequence to go up
  CHECK(reply(unidentified, EAGAIN, Detail::kReissue).next == Next::kAgain);
  CHECK(reply(updating(), EAGAIN, Detail::kBusy, 400).after_ms == 400);
  CHECK(reply(updating(), ENXIO, Detail::kNoRegion).next == Next::kRegister);
}

TEST_CASE("answers are answers") {
  for (int status : {ENOENT, EEXIST, ENOSPC, ENODATA}) {
    CHECK(reply(updating(), static_cast<uint32_t>(status), Detail::kNone).status ==
          static_cast<uint32_t>(status));
  }
  for (auto detail : {Detail::kStaleEpoch, Detail::kFenced, Detail::kOldSequence, Detail::kTagMismatch}) {
    const Decision d = reply(updating(), ESTALE, detail);
    CHECK(d.next == Next::kComplete);
    CHECK(d.detail == detail);
  }
  Situation s = updating();
  CHECK(reply(s, EACCES, Detail::kNoCapability).next == Next::kSendCapability);
  s.capability_sent_again = true;
  CHECK(reply(s, EACCES, Detail::kNoCapability).next == Next::kComplete);
  CHECK(reply(s, EACCES, Detail::kExpired).next == Next::kAwaitCapability);
  CHECK(reply(s, EACCES, Detail::kUnknownKey).next == Next::kAwaitCapability);
  for (const Detail final :
       {Detail::kForged, Detail::kOtherSpace, Detail::kMissingRight, Detail::kUnsigned}) {
    const Decision ended = reply(s, EACCES, final);
    CHECK(ended.next == Next::kComplete);
    CHECK(ended.status == EACCES);
    CHECK(ended.detail == final);
  }
  CHECK(reply(s, EBADMSG, Detail::kChecksum).next == Next::kAgain);
  s.bad_data_count = 4;
  CHECK(reply(s, EBADMSG, Detail::kChecksum).status == EBADMSG);
}

TEST_CASE("what was offered and is wanted is sent at once, and once") {
  Situation s;
  s.update = true;
  CHECK(reply(s, EAGAIN, Detail::kWanted).next == Next::kSendData);
  CHECK(certainly_not_applied({Ending::kReply, EAGAIN, Detail::kWanted}));
  s.data_sent = true;  // a server that wants what it was given
  const Decision d = reply(s, EAGAIN, Detail::kWanted);
  CHECK(d.next == Next::kComplete);
  CHECK(d.status == EPROTO);
}

TEST_CASE("only answers that say so make an update certainly not applied") {
  CHECK(certainly_not_applied({Ending::kReply, EAGAIN, Detail::kNotHead}));
  CHECK(certainly_not_applied({Ending::kUnreachable}));
  CHECK_FALSE(certainly_not_applied({Ending::kLost}));
  CHECK_FALSE(certainly_not_applied({Ending::kTryTimeout}));
  CHECK_FALSE(certainly_not_applied({Ending::kReply, ETIMEDOUT, Detail::kDeadline}));
}

TEST_CASE("the pause grows to a quarter of a second and stays") {
  uint32_t last = 0;
  for (uint32_t attempt = 0; attempt < 100; attempt++) {
    const uint32_t pause = backoff_ms(attempt);
    CHECK(pause >= last);
    CHECK(pause <= kMostBackoffMs);
    last = pause;
  }
  CHECK(last == kMostBackoffMs);
}

TEST_CASE("a budget holds a burst, then what is earned") {
  Budget budget(4, 0);
  for (int i = 0; i < 4; i++) CHECK(budget.spend(1));
  CHECK_FALSE(budget.spend(1'000'000'000'000));  // time brings nothing at a rate of 0
  budget.earn(6, 15);
  CHECK_FALSE(budget.spend(1));
  budget.earn(1, 15);
  CHECK(budget.spend(1));
  CHECK_FALSE(budget.spend(1));
  budget.earn(1000, 100);  // no more than the burst
  for (int i = 0; i < 4; i++) CHECK(budget.spend(1));
  CHECK_FALSE(budget.available(1));
}

TEST_CASE("a budget is filled by time, however often it is looked at") {
  Budget budget(2, 10);
  uint64_t now = 5'000'000'000;
  CHECK((budget.spend(now) && budget.spend(now)));
  uint32_t spent = 0;
  for (int i = 0; i < 2'000'000; i++) spent += budget.spend(now += 500);  // a second, in half microseconds
  CHECK(spent == 10);
}

TEST_CASE("a read is late after twice the 99th percentile of its size, between the bounds") {
  Latencies latencies;
  constexpr uint64_t kMs = 1'000'000;
  CHECK(latencies.hedge_after_ns(4096, kMs, 1000 * kMs) >= 50 * kMs);  // nothing is known
  CHECK(latencies.hedge_after_ns(16 << 20, kMs, 1000 * kMs) >
        latencies.hedge_after_ns(4096, kMs, 1000 * kMs));
  for (int i = 0; i < 990; i++) latencies.add(4096, 2 * kMs);
  for (int i = 0; i < 8; i++) latencies.add(4096, 500 * kMs);
  const uint64_t after = latencies.hedge_after_ns(4096, kMs, 1000 * kMs);
  CHECK(after >= 4 * kMs);
  CHECK(after <= 6 * kMs);
  CHECK(latencies.hedge_after_ns(4096, 10 * kMs, 1000 * kMs) == 10 * kMs);
  CHECK(latencies.hedge_after_ns(4096, kMs, 3 * kMs) == 3 * kMs);
  CHECK(latencies.hedge_after_ns(8192, kMs, 1000 * kMs) >= 50 * kMs);  // another size
  for (int i = 0; i < 4000; i++) latencies.add(4096, 100'000);         // what is old fades
  CHECK(latencies.hedge_after_ns(4096, kMs, 1000 * kMs) == kMs);
}

TEST_CASE("channels: one update outstanding each, sequences only grow, chains apart") {
  ChannelAllocator channels;
  const ChainId a(1), b(2);
  const Channel first = channels.acquire(a, 0);
  const Channel second = channels.acquire(a, 0);
  CHECK(first.number != second.number);
  CHECK(first.sequence == 1);
  CHECK(channels.acquire(b, 0).sequence == 1);
  channels.release(a, first);
  const Channel again = channels.acquire(a, 0);
  CHECK(again.number == first.number);
  CHECK(again.sequence == 2);
  const Channel reissued = channels.reissue(a, again);
  CHECK(reissued.sequence == 3);
  channels.retire(a, reissued, 1000);
  CHECK(channels.acquire(a, 1000).number == 3);
  const Channel rested = channels.acquire(a, 1000 + ChannelAllocator::kRestMs);
  CHECK(rested.number == reissued.number);
  CHECK(rested.sequence == 4);
}

TEST_CASE("capabilities: ids are reused, issues never") {
  CapabilityTable table;
  std::vector<uint8_t> bytes(88, 1), out;
  CHECK_FALSE(table.add(bytes.data(), 87).ok());
  const uint32_t id = *table.add(bytes.data(), 88);
  CHECK(id == 1);
  const uint64_t issue = table.issue(id);
  bytes[0] = 2;
  CHECK(table.renew(id, bytes.data(), 88).ok());
  CHECK(table.issue(id) > issue);
  CHECK(table.copy(id, &out) == table.issue(id));
  CHECK(out == bytes);
  CHECK(table.drop(id).ok());
  CHECK(table.drop(id).error().code == ENOENT);
  CHECK(table.renew(id, bytes.data(), 88).error().code == ENOENT);
  CHECK(table.issue(id) == 0);
  CHECK(table.issue(77777777) == 0);
  CHECK(*table.add(bytes.data(), 88) == id);
  CHECK(table.issue(id) > issue + 1);
  for (uint32_t i = 0; i < 1000; i++) CHECK(*table.add(bytes.data(), 88) == i + 2);
}

TEST_CASE("routing: unknown places don't serve, bad input is refused") {
  ffs_chain_route chain{};
  chain.chain = 3;
  chain.member_count = 3;
  ffs_target_route places[2]{};
  for (int i = 0; i < 3; i++) chain.members[i] = 10 + i, chain.states[i] = FFS_SERVING;
  chain.states[1] = FFS_SYNCING;
  for (int i = 0; i < 2; i++) {
    places[i].target = 10 + i;
    places[i].port = 4000;
    std::strcpy(places[i].host, "127.0.0.1");
  }
  auto routing = make_routing(9, &chain, 1, places, 2);
  REQUIRE(routing.ok());
  const Chain* known = (*routing)->chain(ChainId(3));
  REQUIRE(known != nullptr);
  CHECK((*routing)->chain(ChainId(4)) == nullptr);
  CHECK((*routing)->endpoints.size() == 1);
  CHECK(known->members[0].serving);
  CHECK_FALSE(known->members[1].serving);
  CHECK_FALSE(known->members[2].serving);
  CHECK(known->head() == &known->members[0]);
  chain.member_count = 9;
  CHECK_FALSE(make_routing(9, &chain, 1, places, 2).ok());
  chain.member_count = 3;
  std::memset(places[0].host, 'x', sizeof places[0].host);
  CHECK_FALSE(make_routing(9, &chain, 1, places, 2).ok());
}

TEST_CASE("an Iov: sealed, whole pages, extents; bad sizes are refused") {
  IovOptions options;
  CHECK(Iov::create(options).error().code == EINVAL);
  options.size_bytes = 5000;
  auto iov = std::move(*Iov::create(options));
  CHECK(iov->size() == 8192);
  CHECK(iov->shareable());
  CHECK(net::check_sealed(iov->fd(), 0, 8192).ok());
  CHECK(iov->direct_slice(4096, 4096));
  CHECK_FALSE(iov->direct_slice(0, 100));
  CHECK_FALSE(iov->direct_slice(1, 4096));
  options.size_bytes = kExtentBytes + 4096;
  auto large = std::move(*Iov::create(options));
  CHECK(large->extent_bytes(0) == kExtentBytes);
  CHECK(large->extent_bytes(1) == 4096);
  CHECK(large->direct_slice(kExtentBytes, 4096));
  CHECK_FALSE(large->direct_slice(kExtentBytes - 4096, 8192));
  CHECK(large->region(0) != large->region(1));

  std::vector<uint8_t> theirs(10000, 7);
  IovOptions borrowed;
  borrowed.memory = theirs.data() + 1;
  CHECK(Iov::create(borrowed).error().code == EINVAL);
  borrowed.size_bytes = 9999;
  {
    auto lent = std::move(*Iov::create(borrowed));
    CHECK(lent->data() == theirs.data() + 1);
    CHECK(lent->size() == 9999);
    CHECK_FALSE(lent->shareable());
    CHECK(lent->fd() == -1);
    lent->data()[0] = 8;
  }
  CHECK(theirs[1] == 8);  // it stays whose it is
  borrowed.numa_node = 0;
  CHECK(Iov::create(borrowed).error().code == EINVAL);

  IovOptions shared;
  shared.fd = iov->fd();
  auto second = std::move(*Iov::create(shared));
  CHECK(second->shareable());
  iov->data()[5] = 42;
  CHECK(second->data()[5] == 42);
  options.size_bytes = 4096;
  options.numa_node = 1000;
  CHECK_FALSE(Iov::create(options).ok());
}

TEST_CASE("taking a slice back: new pages for us, the old ones stay with who holds them") {
  IovOptions options;
  options.size_bytes = 1 << 20;
  auto iov = std::move(*Iov::create(options));
  std::memset(iov->data(), 1, iov->size());
  // A private mapping that has made its own copy stands for pinned pages here; a pinned page itself
  // is held by a pipe that the page was given to.
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  iovec piece{iov->data() + 8192, 4096};
  REQUIRE(::vmsplice(ends[1], &piece, 1, 0) == 4096);
  const uint64_t before = iov->region(0);
  REQUIRE(iov->take_back(8192, 4096));
  CHECK(iov->region(0) != before);
  CHECK(iov->data()[8191] == 1);
  CHECK(iov->data()[8192] == 0);
  CHECK(iov->data()[12287] == 0);
  CHECK(iov->data()[12288] == 1);
  iov->data()[8192] = 9;  // the page that the pipe holds is another one now
  uint8_t held[4096];
  REQUIRE(::read(ends[0], held, 4096) == 4096);
  CHECK(held[0] == 1);
  ::close(ends[0]);
  ::close(ends[1]);
}

// Two megabytes side by side are one large page for a moment; if they stayed one, a slice of it couldn't be
// taken back while a server holds another. Of the last part of a file it reaches over the end.
TEST_CASE("gathered pages keep their bytes, and are taken back one by one while others are held") {
  for (const size_t bytes : {size_t{6} << 20, size_t{1} << 20, (size_t{2} << 20) + (700u << 10)}) {
    IovOptions options;
    options.size_bytes = bytes;
    auto iov = std::move(*Iov::create(options));
    for (size_t i = 0; i < bytes; i += 8) std::memcpy(iov->data() + i, &i, 8);
    iov->gather(0);
    struct stat info;
    REQUIRE(::fstat(iov->fd(), &info) == 0);
    CHECK(static_cast<size_t>(info.st_blocks) * 512 == bytes);  // nothing is kept beyond the end
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    for (size_t large = 0; large < bytes; large += 2u << 20) {
      iovec held{iov->data() + large + 40960, 4096};
      REQUIRE(::vmsplice(pipe[1], &held, 1, 0) == 4096);  // holds the page
      const size_t last = std::min(bytes, large + (2u << 20)) - 4096;
      for (const size_t page : {large, large + 36864, large + 45056, last}) {
        CHECK(iov->take_back(page, 4096));
        for (size_t i = 0; i < 4096; i++) REQUIRE(iov->data()[page + i] == 0);
        for (size_t i = 0; i < 4096; i += 8) {
          const size_t at = page + i;
          std::memcpy(iov->data() + at, &at, 8);
        }
      }
    }
    for (size_t i = 0; i < bytes; i += 8) REQUIRE(std::memcmp(iov->data() + i, &i, 8) == 0);
    ::close(pipe[0]);
    ::close(pipe[1]);
  }
}

namespace {

// How many pieces of memory that lie apart [data, data + bytes) is in; 0: the kernel doesn't tell us.
size_t pieces_of(const uint8_t* data, size_t bytes) {
  ffs::Fd map(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  size_t pieces = 0;
  uint64_t last = 0;
  for (size_t i = 0; i < bytes; i += 4096) {
    const volatile uint8_t touched = data[i];
    (void)touched;
    uint64_t entry = 0;
    const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(data + i) / 4096 * 8);
    if (::pread(map.get(), &entry, 8, at) != 8) return 0;
    const uint64_t frame = entry & ((1ull << 55) - 1);
    if (frame == 0) return 0;
    if (frame != last + 1) pieces++;
    last = frame;
  }
  return pieces;
}

}  // namespace

// An Iov of sixteen blocks of 64 KiB was left as it was: the disk gave half of what it can.
TEST_CASE("an Iov that is smaller than a large page is gathered as well, where larger ones are") {
  uint32_t large_ones = 0, small_ones = 0;
  for (int i = 0; i < 5 && small_ones == 0; i++) {  // there may be no large page just now
    IovOptions options;
    options.size_bytes = 2u << 20;
    auto large = std::move(*Iov::create(options));
    options.size_bytes = 1u << 20;
    auto small = std::move(*Iov::create(options));
    for (Iov* iov : {large.get(), small.get()}) {
      const size_t pages = iov->size() / 4096;  // in another order than they lie in
      for (size_t i = 0; i < pages; i++) iov->data()[i * 37 % pages * 4096] = 1;
      iov->gather(0);
    }
    const size_t pieces = pieces_of(large->data(), large->size());
    if (pieces == 0) return;
    large_ones += pieces == 1;
    small_ones += pieces_of(small->data(), small->size()) == 1;
  }
  CHECK((small_ones > 0 || large_ones == 0));
}

TEST_CASE("the registry: no destroying while used, no using what is gone") {
  IovOptions options;
  options.size_bytes = 4096;
  auto iov = std::move(*Iov::create(options));
  CHECK_FALSE(IovRegistry::acquire(iov.get()));
  IovRegistry::add(iov.get());
  REQUIRE(IovRegistry::acquire(iov.get()));
  CHECK(IovRegistry::remove(iov.get()).error().code == EBUSY);
  iov->unuse();
  const uint64_t removals = IovRegistry::removals();
  CHECK(IovRegistry::alive(iov->serial()));
  CHECK(IovRegistry::remove(iov.get()).ok());
  CHECK(IovRegistry::removals() == removals + 1);
  CHECK_FALSE(IovRegistry::alive(iov->serial()));
  CHECK(IovRegistry::remove(iov.get()).error().code == ENOENT);
}
