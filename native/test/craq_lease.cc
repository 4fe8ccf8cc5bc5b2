// Who may answer clients, and what its grants hold back. docs/craq.md, Leases. A peer lease is 1000 ms.
#include <doctest/doctest.h>

#include "craq_chain.h"

namespace ffs::craq {
namespace {

using test::Wired;

const ChunkKey kKey = ChunkKey::of_file(1, 0);
constexpr uint64_t kHeldMs = 1000 - 1000 / 16;  // what a holder may count on, from asking

void cut_off(Wired& w, uint32_t member) {
  for (uint32_t i = 0; i < 3; i++) {
    if (i == member) continue;
    w.cut.insert({i, member});
    w.cut.insert({member, i});
  }
}

// A chain that serves, with a chunk, whose lease from the manager ends in `manager_ms`.
Wired chain(std::initializer_list<uint32_t> members, uint64_t manager_ms, Mutant mutant = Mutant::none) {
  Wired w(3, mutant);
  w.lease_all(w.now + manager_ms);
  w.record_all(w.config(1, members));
  w.write(0, kKey, 5);
  w.settle();
  REQUIRE(w.replica(0).status().serving);
  return w;
}

bool refused_for_lease(const Wired& w, RequestToken token) {
  return w.answered(token) && w.reply(token).outcome == Outcome::offline &&
         w.reply(token).reason == Reason::no_lease;
}

}  // namespace

TEST_CASE("without a lease nothing is answered, from whatever state it comes") {
  Wired w = chain({0, 1, 2}, 5000);
  cut_off(w, 0);
  w.now += 4999;
  const RequestToken in_time = w.read(0, kKey);
  w.settle();
  CHECK(w.value(in_time) == 5);
  CHECK(w.replica(0).status().leased);
  w.now += 1;
  CHECK(refused_for_lease(w, w.read(0, kKey)));
  CHECK(!w.replica(0).status().leased);
  CHECK(refused_for_lease(w, w.write(0, kKey, 6)));
  CHECK(refused_for_lease(w, w.write(0, kKey, 5)));  // the retry table would know
}

bool answers_a_retry_without_a_lease(Mutant mutant) {
  Wired w = chain({0, 1}, 5000, mutant);
  w.now += 5000;
  return w.reply(w.write(0, kKey, 5)).outcome == Outcome::ok;
}

TEST_CASE("the first answer is given again only with a lease") {
  CHECK(!answers_a_retry_without_a_lease(Mutant::none));
  CHECK(answers_a_retry_without_a_lease(Mutant::no_lease_check));
}

TEST_CASE("with the manager silent, the leases of all peers do, and are kept up") {
  Wired w = chain({0, 1, 2}, 5000);
  w.pass(20'000);
  for (uint32_t i : {0u, 1u, 2u}) {
    CHECK(w.replica(i).status().leased);
    const RequestToken token = w.read(i, kKey);
    w.settle();
    CHECK(w.value(token) == 5);
  }
  const RequestToken token = w.write(0, kKey, 6);
  w.settle();
  CHECK(w.reply(token).outcome == Outcome::ok);
  // One of them is lost: nobody has a lease from all.
  w[2].down = true;
  w.pass(1000);
  CHECK(refused_for_lease(w, w.read(0, kKey)));
  CHECK(refused_for_lease(w, w.read(1, kKey)));
  w[2].down = false;
  w.pass(400);
  const RequestToken again = w.read(0, kKey);
  w.settle();
  CHECK(w.value(again) == 6);
}

TEST_CASE("nobody asks its peers while the manager answers") {
  Wired w = chain({0, 1}, 5000);
  for (int i = 0; i < 20; i++) {
    w.lease_all(w.now + 5000);
    w.pass(1000);
  }
  for (const Notice& n : w[1].seen) CHECK(n.type != NoticeType::lease_ask);
}

TEST_CASE("a holder counts from asking, and less than the whole") {
  Wired w = chain({0, 1}, 0);
  w.tick(0);  // asks now
  const uint64_t asked_ms = w.now;
  w.now += 300;  // the answer is slow
  w.settle();
  CHECK(w.replica(0).status().leased);
  w.cut = {{1, 0}};
  w.now = asked_ms + kHeldMs - 1;
  w.tick(0);
  CHECK(w.replica(0).status().leased);
  w.now += 1;
  w.tick(0);
  CHECK(!w.replica(0).status().leased);
}

TEST_CASE("a lease holds for the shorter one of what both count with") {
  Wired w(2);
  SUBCASE("the granter was restarted with a shorter one") {
    w.options.peer_lease_ms = 100;
    w.start(1);
  }
  SUBCASE("the holder was") {
    w.options.peer_lease_ms = 100;
    w.start(0);
  }
  SUBCASE("it was restarted with a longer one") {
    w.options.peer_lease_ms = 100;
    w.start(0);
    w.options.peer_lease_ms = 1000;
    w.start(1);
  }
  w.lease(1, w.now + 3'600'000);
  w.record_all(w.config(1, {0, 1}));
  w.write(1, kKey, 5);
  w.settle();
  w.pass(900);
  CHECK(w.replica(0).status().leased);
  w.cut = {{0, 1}, {1, 0}};
  const uint64_t cut_ms = w.now;
  w.propose(1, w.config(2, {1}, {}, {0}));
  while (w.replica(1).status().persisted.proposed != ChainVersion{1, 2}) {
    REQUIRE(w.now < cut_ms + 5000);
    w.now += 10;
    w.tick(1);
    w.settle();
  }
  w.tick(0);
  CHECK(!w.replica(0).status().leased);  // now the other one may go on alone
  CHECK(w.now - cut_ms <= 1000);
}

TEST_CASE("a grant that nobody asked for, or of a stranger, is none") {
  Wired w = chain({0, 1}, 0);
  Notice grant{.type = NoticeType::lease_grant, .number = w.now + 1};
  grant.other.update = 1000;
  w.deliver(SendNotice{{ChainId{7}, {1, 1}, Wired::target(1), Wired::target(0)}, grant});
  CHECK(!w.replica(0).status().leased);
  grant.number = w.now;
  w.deliver(SendNotice{{ChainId{7}, {1, 1}, Wired::target(2), Wired::target(0)}, grant});
  CHECK(!w.replica(0).status().leased);
  w.deliver(SendNotice{{ChainId{7}, {1, 0}, Wired::target(1), Wired::target(0)}, grant});
  CHECK(!w.replica(0).status().leased);
  w.deliver(SendNotice{{ChainId{7}, {1, 1}, Wired::target(1), Wired::target(0)}, grant});
  CHECK(w.replica(0).status().leased);
}

TEST_CASE("the only serving member needs no lease; a syncing one grants none and isn't asked") {
  Wired w(3);
  w.record_all(w.config(1, {0}, {1}));
  CHECK(w.replica(0).status().leased);
  const RequestToken token = w.write(0, kKey, 5);
  w.settle();
  CHECK(w.answered(token));
}

// Whether it answers although the disk came back after its lease was over.
bool answers_after_its_lease(Mutant mutant) {
  Wired w = chain({0, 1, 2}, 5000, mutant);
  cut_off(w, 0);
  w[0].hold_disk = true;
  const RequestToken token = w.read(0, kKey);
  w.now += 5000;  // it was stopped
  w[0].hold_disk = false;
  w.end_ops(0);
  CHECK(w.answered(token));
  if (mutant == Mutant::none) CHECK(refused_for_lease(w, token));
  return w.value(token) == 5;
}

TEST_CASE("the lease is checked again after the disk read") {
  CHECK(!answers_after_its_lease(Mutant::none));
  CHECK(answers_after_its_lease(Mutant::no_lease_check_after_read));
}

TEST_CASE("a dirty read is answered with a lease only, and doesn't wait for ever without one") {
  Wired w = chain({0, 1}, 5000);
  w[1].hold_disk = true;
  w.write(0, kKey, 6);
  w.settle();
  w.cut = {{1, 0}};
  const RequestToken token = w.read(0, kKey);
  w.settle();
  CHECK(!w.answered(token));
  w.pass(6000);
  CHECK(refused_for_lease(w, token));
}

TEST_CASE("the last member's answer comes when the lease is over: not passed on") {
  Wired w = chain({0, 1}, 5000);
  w[1].hold_disk = true;
  w.write(0, kKey, 6);
  w.settle();
  const RequestToken token = w.read(0, kKey);  // asks
  const size_t reads = w[0].reads;
  w.now += 5000;
  w.settle();
  CHECK(refused_for_lease(w, token));
  CHECK(w[0].reads == reads);
}

// What a member granted at `now`, and when it makes a proposal durable that leaves the holder out.
uint64_t persisted_after_ms(Mutant mutant) {
  Wired w = chain({0, 1, 2}, 0, mutant);
  w.cut = {{0, 1}, {1, 0}, {2, 0}, {2, 1}, {0, 2}};  // only 2's question comes to 1, and its own to nobody
  w.cut.erase({2, 1});
  w.tick(2);
  w.settle();
  const uint64_t granted_ms = w.now;
  const size_t before = w[1].persists;
  w.now += 100;
  w.propose(1, w.config(2, {0, 1}, {}, {2}));
  for (int i = 0; i < 300 && w[1].persists == before; i++) {
    w.now += 10;
    w.tick(2);  // asks on, and gets nothing
    w.settle();
    w.tick(1);
  }
  CHECK(w.replica(1).status().serving);  // in the old version, meanwhile
  return w.now - granted_ms;
}

TEST_CASE("a proposal that leaves out a member is made durable when what was granted to it is over") {
  CHECK(persisted_after_ms(Mutant::none) >= 1000);
  CHECK(persisted_after_ms(Mutant::none) <= 1010);
  CHECK(persisted_after_ms(Mutant::persist_without_waiting_for_leases) < 1000);
}

TEST_CASE("what was granted in an older version holds back as well") {
  Wired w = chain({0, 1, 2}, 0);
  w.tick(2);
  w.settle();  // 1 has granted
  w.cut = {{0, 2}, {1, 2}, {2, 0}, {2, 1}};
  w.record(0, w.config(2, {0, 1, 2}));
  w.record(1, w.config(2, {0, 1, 2}));
  w.settle();
  const size_t before = w[1].persists;
  w.propose(1, w.config(3, {0, 1}, {}, {2}));
  w.now += 999;
  w.tick(1);
  CHECK(w[1].persists == before);
  w.now += 1;
  w.tick(1);
  CHECK(w[1].persists == before + 1);
}

TEST_CASE("a proposal that leaves nobody out, or whom nothing was granted to, doesn't wait") {
  Wired w = chain({0, 1, 2}, 60'000);
  const size_t before = w[1].persists;
  w.propose(1, w.config(2, {0, 1}, {}, {2}));
  CHECK(w[1].persists == before + 1);
}

// When a restarted member makes a proposal durable, counted from its start.
uint64_t restarted_persists_after_ms(Mutant mutant) {
  Wired w = chain({0, 1}, 0, mutant);
  w.start(1);
  const uint64_t started_ms = w.now;
  const size_t before = w[1].persists;
  w.propose(1, w.config(2, {1}, {}, {0}));
  for (int i = 0; i < 300 && w[1].persists == before; i++) {
    w.now += 10;
    w.tick(1);
  }
  CHECK(w[1].persists == before + 1);
  return w.now - started_ms;
}

TEST_CASE("a restarted member makes nothing durable until what its last incarnation granted is over") {
  CHECK(restarted_persists_after_ms(Mutant::none) >= 1000);
  CHECK(restarted_persists_after_ms(Mutant::no_start_hold) < 1000);
  // The same of what is recorded; it says what it waits for.
  Wired w = chain({0, 1}, 60'000);
  w.start(1);
  w.now += 999;
  w.record(1, w.config(2, {0, 1}));
  CHECK(w.replica(1).status().reason == Reason::start_hold);
  CHECK(w.reply(w.read(1, kKey, 2)).reason == Reason::start_hold);
  w.now += 1;
  w.tick(1);
  w.settle();
  CHECK(w.replica(1).status().chain_version == ChainVersion{1, 2});
  // A target that was in no chain before granted nothing.
  Wired fresh(1);
  fresh.record_all(fresh.config(1, {0}));
  CHECK(fresh.replica(0).status().serving);
}

// One that leads alone has made durable that there shall be a second one, and then hears nothing.
bool goes_on_alone(Mutant mutant) {
  Wired w = chain({0}, 5000, mutant);
  w.propose(0, w.config(2, {0, 1}));
  w.settle();
  w.now += 5000;
  const RequestToken token = w.read(0, kKey);
  w.settle();
  return w.value(token) == 5;
}

TEST_CASE("alone, but not by what it has made durable: a lease is needed") {
  CHECK(!goes_on_alone(Mutant::none));
  CHECK(goes_on_alone(Mutant::lone_without_persisted_check));
}

TEST_CASE("two whose proposal has a third: their leases from each other don't do") {
  Wired w = chain({0, 1}, 0);
  w.pass(100);
  CHECK(w.replica(0).status().leased);
  w.propose(0, w.config(2, {0, 1, 2}));
  w.propose(0, w.config(3, {0, 1}));  // a later one without it takes nothing back
  w.pass(100);
  CHECK(!w.replica(0).status().leased);
  CHECK(w.replica(1).status().leased);  // has made nothing of the kind durable
  // In a version that is as new it is settled who there is.
  for (uint32_t i : {0u, 1u}) w.record(i, w.config(3, {0, 1}));
  w.settle();
  w.pass(100);
  CHECK(w.replica(0).status().leased);
}

TEST_CASE("a member that a proposal leaves out gets no more grants, not even at an earlier version") {
  Wired w = chain({0, 1, 2}, 0);
  w.propose(1, w.config(5, {0, 1}, {}, {2}));
  w.now += 1000;
  w.tick(1);
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 5});
  for (uint32_t i : {0u, 1u, 2u}) w.record(i, w.config(2, {0, 1, 2}));
  w.settle();
  w.pass(400);
  CHECK(!w.replica(2).status().leased);
  CHECK(w.replica(0).status().leased);
}

}  // namespace ffs::craq
