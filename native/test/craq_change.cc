// A chain's members change while updates and reads are under way. docs/craq.md, Members; Changes.
#include <doctest/doctest.h>

#include "craq_chain.h"

namespace ffs::craq {
namespace {

using test::Wired;

const ChunkKey kKey = ChunkKey::of_file(1, 0);
const ChunkKey kOther = ChunkKey::of_file(1, 1);

// No message of that type from one member gets through until it is mended.
void cut_both(Wired& w, uint32_t a, uint32_t b) {
  w.cut.insert({a, b});
  w.cut.insert({b, a});
}

bool all_serve(Wired& w, std::initializer_list<uint32_t> members) {
  for (uint32_t i : members) {
    if (!w.replica(i).status().serving) return false;
  }
  return true;
}

// The same committed length on all, and nothing pending.
bool all_have(Wired& w, std::initializer_list<uint32_t> members, const ChunkKey& key, uint32_t length_bytes) {
  for (uint32_t i : members) {
    if (w.replica(i).status().pendings != 0 || w[i].store.committed(key).length_bytes != length_bytes)
      return false;
  }
  return true;
}

}  // namespace

TEST_CASE("the head has gone: the next one finishes what it holds") {
  Wired w(3);
  w.begin({0, 1, 2});
  w[2].hold_disk = true;
  w.write(0, kKey, 5);
  w.settle();
  w[0].down = true;
  w[2].hold_disk = false;
  w.cut.insert({2, 1});  // the acknowledgement is lost
  w.settle();
  CHECK(w[2].store.committed(kKey).length_bytes == 5);
  CHECK(w[1].store.committed(kKey).version.none());
  w.cut.clear();
  w.record_all(w.config(2, {1, 2}, {}, {0}));
  CHECK(all_serve(w, {1, 2}));
  CHECK(all_have(w, {1, 2}, kKey, 5));
  // The client asks again, and gets the first answer.
  const RequestToken again = w.write(1, kKey, 5, 2);
  CHECK(w.reply(again).outcome == Outcome::ok);
  CHECK(w.reply(again).chunk.version.chain == ChainVersion{1, 1});
}

TEST_CASE("a middle one has gone: its predecessor sends again, and the client is answered") {
  Wired w(3);
  w.begin({0, 1, 2});
  cut_both(w, 1, 2);
  const RequestToken token = w.write(0, kKey, 5);
  w.settle();
  CHECK(!w.answered(token));
  w[1].down = true;
  w.record_all(w.config(2, {0, 2}, {}, {1}));
  CHECK(all_serve(w, {0, 2}));
  CHECK(w.reply(token).outcome == Outcome::ok);
  CHECK(all_have(w, {0, 2}, kKey, 5));
}

TEST_CASE("the last one has gone: the one before it commits what it has, then serves") {
  Wired w(3);
  w.begin({0, 1, 2});
  cut_both(w, 1, 2);
  const RequestToken token = w.write(0, kKey, 5);
  w.settle();
  w[2].down = true;
  w.record_all(w.config(2, {0, 1}, {}, {2}));
  CHECK(w.reply(token).outcome == Outcome::ok);
  CHECK(all_have(w, {0, 1}, kKey, 5));
  CHECK(all_serve(w, {0, 1}));
}

TEST_CASE("what was refused while there was a successor is refused when it has gone") {
  Wired w(3);
  w.begin({0, 1, 2});
  cut_both(w, 1, 2);
  w[1].stages_end = Outcome::no_space;
  const RequestToken token = w.write(0, kKey, 5);
  w.settle();
  CHECK(!w.answered(token));  // the last member might have it
  w.record_all(w.config(2, {0, 1}, {}, {2}));
  CHECK(w.reply(token).outcome == Outcome::no_space);
  CHECK(all_serve(w, {0, 1}));
  CHECK(w.replica(1).status().pendings == 0);
}

TEST_CASE("what the head has refused, the next head refuses, too") {
  Wired w(3);
  w.begin({0, 1, 2});
  w[0].stages_end = Outcome::over_quota;
  w.cut = {{0, 1}};
  const RequestToken token = w.write(0, kKey, 5);  // nobody else gets it
  w.settle();
  CHECK(!w.answered(token));
  w.cut.clear();
  w.pass(1000);
  CHECK(w.reply(token).outcome == Outcome::over_quota);
  w[0].down = true;
  w.record_all(w.config(2, {1, 2}, {}, {0}));
  CHECK(w.reply(w.write(1, kKey, 5, 2)).outcome == Outcome::over_quota);  // a late repetition
  w.record_all(w.config(3, {2}, {}, {0, 1}));
  CHECK(w.reply(w.write(2, kKey, 5, 3)).outcome == Outcome::over_quota);
  CHECK(all_have(w, {1, 2}, kKey, 0));
}

TEST_CASE("a refusal of what never came says nothing of what is below it") {
  Wired w(2);
  w.begin({0, 1});
  w.cut = {{0, 1}};
  const RequestToken first = w.write(0, kKey, 5);  // is lost on the way
  w.settle();
  w.cut.clear();
  w[1].hold_disk = true;
  Notice cancel{
      .type = NoticeType::cancel, .outcome = Outcome::no_space, .key = kKey, .version = {{1, 1}, 2}};
  cancel.identity = {ClientId{9}, 1, 1};
  w.deliver(SendNotice{{ChainId{7}, {1, 1}, Wired::target(0), Wired::target(1)}, cancel});
  w.pass(600);  // now it comes again
  CHECK(w[0].store.committed(kKey).version.none());
  w[1].hold_disk = false;
  w.settle();
  w.pass(1200);
  CHECK(w.reply(first).outcome == Outcome::ok);
  CHECK(all_have(w, {0, 1}, kKey, 5));
}

TEST_CASE("a removal without identity whose commit record was lost, and a new chunk above it") {
  Wired w(2);
  w.begin({0, 1});
  ClientUpdate create;
  create.kind = UpdateKind::create;
  create.length_bytes = 5;
  ClientUpdate remove;
  remove.kind = UpdateKind::remove;
  w.send(0, kKey, create);
  w.settle();
  test::FactStore& store = w[1].store;
  const ChunkFacts was = store.committed(kKey);
  w.send(0, kKey, remove);
  w.settle();
  w.cut = {{0, 1}};
  create.length_bytes = 6;
  w.send(0, kKey, create);
  w.settle();
  store.chunks[kKey].committed = was;  // as the crash leaves it
  Update removal;
  removal.key = kKey;
  removal.version = {{1, 1}, 2};
  removal.kind = UpdateKind::remove;
  store.chunks[kKey].pendings[removal.version] = {removal, {}};
  w.cut.clear();
  w.start(1);
  w.lease(1, w.now + 3'600'000);
  w.now += 1000;
  w.record_all(w.config(2, {0, 1}));
  CHECK(all_serve(w, {0, 1}));
  CHECK(all_have(w, {0, 1}, kKey, 6));
}

TEST_CASE("only one is left: it commits all that it has") {
  Wired w(2);
  w.begin({0, 1});
  cut_both(w, 0, 1);
  const RequestToken first = w.write(0, kKey, 5);
  const RequestToken second = w.write(0, kOther, 6);
  w.settle();
  w.record(0, w.config(2, {0}, {}, {1}));
  w.settle();
  CHECK(w.reply(first).outcome == Outcome::ok);
  CHECK(w.reply(second).outcome == Outcome::ok);
  CHECK(all_have(w, {0}, kKey, 5));
}

TEST_CASE("another order: what the old last one has committed stands, the rest goes on or never was") {
  Wired w(3);
  w.begin({0, 1, 2});
  w.cut = {{2, 1}};
  const RequestToken committed = w.write(0, kKey, 5);
  w.settle();
  w.cut = {{0, 1}};
  const RequestToken unseen = w.write(0, kOther, 6);  // nobody else has it
  w.settle();
  w.cut.clear();
  w.record_all(w.config(2, {2, 0, 1}));
  CHECK(all_serve(w, {0, 1, 2}));
  CHECK(w.reply(committed).outcome == Outcome::ok);
  CHECK(w.reply(unseen).outcome == Outcome::stale_chain);
  CHECK(all_have(w, {0, 1, 2}, kKey, 5));
  CHECK(all_have(w, {0, 1, 2}, kOther, 0));
  const RequestToken again = w.write(2, kOther, 6, 2);
  w.settle();
  CHECK(w.reply(again).outcome == Outcome::ok);
  CHECK(w.reply(w.write(0, kOther, 7, 2)).outcome == Outcome::not_head);
  CHECK(all_have(w, {0, 1, 2}, kOther, 6));
}

TEST_CASE("a member that isn't named, or named offline, serves nothing; updates go past it") {
  for (bool named : {false, true}) {
    Wired w(3);
    w.begin({0, 1, 2});
    w.record_all(named ? w.config(2, {0, 2}, {}, {1}) : w.config(2, {0, 2}));
    CHECK(w.replica(1).status().reason == Reason::not_a_member);
    CHECK(w.replica(1).status().state == MemberState::offline);
    const RequestToken token = w.write(0, kKey, 5, 2);
    w.settle();
    CHECK(w.reply(token).outcome == Outcome::ok);
    CHECK(w[1].store.committed(kKey).version.none());
    CHECK(w.reply(w.read(1, kKey, 2)).outcome == Outcome::offline);
  }
}

TEST_CASE("a syncing member adopts the version and serves nothing; the path ends before it") {
  Wired w(3);
  w.lease_all(w.now + 1000);
  w.record_all(w.config(1, {0, 1}, {2}));
  CHECK(all_serve(w, {0, 1}));
  const ReplicaStatus s = w.replica(2).status();
  CHECK(s.state == MemberState::syncing);
  CHECK(s.reason == Reason::syncing);
  CHECK(s.chain_version == ChainVersion{1, 1});
  CHECK(s.persisted.adopted == ChainVersion{1, 1});
  CHECK(w.reply(w.read(2, kKey)).reason == Reason::syncing);
  CHECK(w.reply(w.write(2, kKey, 5)).outcome == Outcome::offline);
}

TEST_CASE("one that has diverged comes back by being synced, not by being called serving") {
  Wired w(2);
  w.begin({0, 1});
  Update u;
  u.key = kKey;
  u.version = {{1, 1}, 9};
  u.base = {{1, 1}, 8};  // it has nothing of the kind
  u.base_committed = true;
  w.deliver(SendUpdate{{ChainId{7}, {1, 1}, Wired::target(0), Wired::target(1)}, u});
  CHECK(w.replica(1).status().reason == Reason::diverged);
  w.record(1, w.config(2, {0, 1}));
  w.settle();
  CHECK(w.replica(1).status().reason == Reason::diverged);
  w.propose(1, w.config(3, {0}, {1}));
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 3});
  w.record(1, w.config(3, {0}, {1}));
  w.settle();
  CHECK(w.replica(1).status().state == MemberState::syncing);
}

TEST_CASE("reads name an older chain version: answered, with the newer one; updates are not") {
  Wired w(2);
  w.begin({0, 1});
  w.write(0, kKey, 5);
  w.settle();
  w.record_all(w.config(2, {0, 1}));
  const RequestToken token = w.read(1, kKey, 1);
  w.settle();
  CHECK(w.value(token) == 5);
  CHECK(w.reply(token).chain_version == ChainVersion{1, 2});
  CHECK(w.reply(w.write(0, kKey, 6, 1)).outcome == Outcome::stale_chain);
}

TEST_CASE("clean chunks are read on in every phase of a change") {
  Wired w(3);
  w.begin({0, 1, 2});
  w.write(0, kKey, 5);
  w.settle();
  cut_both(w, 0, 1);
  const ChainConfig next = w.config(2, {0, 1}, {}, {2});
  // Persisting.
  w[1].hold_disk = true;
  w.record(1, next);
  CHECK(w.replica(1).status().reason == Reason::persisting);
  RequestToken token = w.read(1, kKey);
  w[1].hold_disk = false;
  w.end_ops(1);
  CHECK(w.value(token) == 5);
  // Adopted, and nothing is heard of the predecessor.
  CHECK(!w.replica(1).status().serving);
  CHECK(w.replica(1).status().chain_version == ChainVersion{1, 2});
  for (uint32_t counter : {1u, 2u}) {
    token = w.read(1, kKey, counter);
    w.settle();
    CHECK(w.value(token) == 5);
  }
  // Left out by what comes next: no more.
  w.record(1, w.config(3, {0, 2}));
  CHECK(w.reply(w.read(1, kKey, 2)).outcome == Outcome::offline);
}

TEST_CASE("neither one that restarted nor one that was synced reads before it serves") {
  Wired w(2);
  w.begin({0, 1});
  w.write(0, kKey, 5);
  w.settle();
  w.start(1);
  w.lease(1, w.now + 3'600'000);
  w.now += 1000;
  cut_both(w, 0, 1);
  w.record_all(w.config(2, {0, 1}));
  CHECK(w.replica(1).status().chain_version == ChainVersion{1, 2});
  CHECK(!w.answered(w.read(1, kKey, 2)));

  Wired s(2);
  s.lease_all(s.now + 3'600'000);
  s.record_all(s.config(1, {0}, {1}));
  cut_both(s, 0, 1);
  s.record_all(s.config(2, {0, 1}));
  CHECK(!s.answered(s.read(1, kKey, 2)));
}

// The last member has committed 6 and its acknowledgement is lost; then it goes. Does the one that comes
// after it ever show 5 again?
bool new_last_shows_an_old_value(Mutant mutant) {
  Wired w(3, mutant);
  w.begin({0, 1, 2});
  w.write(0, kKey, 5);
  w.settle();
  w.cut.insert({2, 1});
  w.write(0, kKey, 6);
  w.settle();
  w.cut.clear();
  w[2].down = true;
  cut_both(w, 0, 1);
  w.record(1, w.config(2, {0, 1}, {}, {2}));
  w.record(0, w.config(2, {0, 1}, {}, {2}));
  w.settle();
  const RequestToken own = w.read(1, kKey, 2);
  w.settle();
  w.cut.clear();
  // The other one asks it, before it has what it needs.
  Notice query{.type = NoticeType::query, .key = kKey, .number = 77};
  w[0].seen.clear();
  w.deliver(SendNotice{{ChainId{7}, {1, 2}, Wired::target(0), Wired::target(1)}, query});
  bool old = false;
  while (!w.net.empty()) {
    const Notice n = std::get<SendNotice>(w.net.front()).notice;
    old |= n.type == NoticeType::answer && n.version.update == 1;
    w.net.pop_front();
  }
  w.pass(1000);
  CHECK(all_serve(w, {0, 1}));
  old |= w.value(own) == 5;
  if (!old) CHECK(w.value(own) == 6);
  return old;
}

TEST_CASE("a new last member answers for dirty chunks only when it has committed them") {
  CHECK(!new_last_shows_an_old_value(Mutant::none));
  CHECK(new_last_shows_an_old_value(Mutant::serve_dirty_as_new_last));
}

TEST_CASE("a new last member answers for clean chunks at once, and dirty reads ask it") {
  Wired w(3);
  w.begin({0, 1, 2});
  w.write(0, kKey, 5);
  w.settle();
  w[2].down = true;
  w.write(0, kKey, 6);  // the head has it pending, and the next one, too
  w.settle();
  const RequestToken before = w.read(0, kKey);
  w.settle();
  CHECK(!w.answered(before));  // nobody can say
  w.record_all(w.config(2, {0, 1}, {}, {2}));
  CHECK(w.value(before) == 6);

  Notice query{.type = NoticeType::query, .key = kOther, .number = 77};
  cut_both(w, 0, 1);
  w.record_all(w.config(3, {0, 1}));
  CHECK(!w.replica(1).status().serving);
  w.cut.clear();
  w.net.clear();
  w.deliver(SendNotice{{ChainId{7}, {1, 3}, Wired::target(0), Wired::target(1)}, query});
  REQUIRE(w.net.size() == 1);
  CHECK(std::get<SendNotice>(w.net.front()).notice.type == NoticeType::answer);
}

TEST_CASE("a version that was gone when the disk came to it: judged anew") {
  Wired w(1);
  w.begin({0});
  w.write(0, kKey, 5);
  w.settle();
  w[0].reads_end = Outcome::absent;
  const RequestToken token = w.read(0, kKey);
  w[0].reads_end = Outcome::ok;
  w.settle();
  CHECK(w[0].reads == 2);
  CHECK(w.value(token) == 5);
  // But not for ever.
  w[0].reads_end = Outcome::absent;
  const RequestToken lost = w.read(0, kKey);
  w.settle();
  CHECK(w.reply(lost).outcome == Outcome::io_error);
}

TEST_CASE(
    "what a proposal leaves out stops before the proposal is durable, and starts with a later version only") {
  Wired w(2);
  w.begin({0, 1});
  w[1].hold_disk = true;
  w.propose(1, w.config(2, {0}, {}, {1}));
  CHECK(w.replica(1).status().reason == Reason::left_out);
  CHECK(w.reply(w.read(1, kKey)).reason == Reason::left_out);
  w[1].hold_disk = false;
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 2});
  w.record_all(w.config(3, {0, 1}));  // it was given up, and another one made
  CHECK(all_serve(w, {0, 1}));
}

TEST_CASE("what names another incarnation of this target is not for it") {
  Wired w(2);
  w.options.incarnation = 2;
  w.start(1);
  w.record_all(w.config(1, {0, 1}));  // names incarnation 1 of all
  w.propose(1, w.config(2, {0}, {1}));
  w.settle();
  CHECK(w[1].persists == 0);
  w.options.incarnation = 1;
  w.start(1);
  w.propose(1, w.config(2, {0}, {1}));
  CHECK(w[1].persists == 1);
}

TEST_CASE("one that was filling another, and was left out, may itself be filled from it") {
  Wired w(3);
  w.lease_all(w.now + 3'600'000);
  w.cut = {{1, 2}, {2, 1}};  // it gets on with nothing
  w.record_all(w.config(1, {0, 1}, {2}));
  w.propose(1, w.config(2, {0, 1, 2}));
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{});  // the other one hasn't everything
  w.record(1, w.config(4, {0, 2}, {}, {1}));
  w.propose(1, w.config(5, {0, 2}, {1}));
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 5});
}

TEST_CASE("a target that has no part in a chain keeps no proposal that leaves it out") {
  Wired w(3);
  w.begin({0, 1});
  for (uint32_t i : {0u, 1u}) w.propose(i, w.config(2, {0}, {}, {1, 2}));
  w.propose(2, w.config(2, {0}, {}, {1, 2}));  // it would look as if it had been a part of it
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 2});
  CHECK(w.replica(2).status().persisted.proposed == ChainVersion{});
  w.propose(2, w.config(3, {0}, {2}, {1}));
  w.settle();
  CHECK(w.replica(2).status().persisted.proposed == ChainVersion{1, 3});
}

TEST_CASE("a proposal that leaves out a member that is still adopting isn't lost") {
  Wired w(2);
  w.lease_all(w.now + 3'600'000);
  w[1].hold_disk = true;
  w.record(1, w.config(1, {0, 1}));
  w.propose(1, w.config(2, {0}, {}, {1}));
  w[1].hold_disk = false;
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 2});
  CHECK(w.replica(1).status().chain_version == ChainVersion{});
  // The same during the start hold.
  w.begin({0, 1});
  w.record_all(w.config(3, {0, 1}));
  w.start(1);
  w.record(1, w.config(4, {0, 1}));
  w.propose(1, w.config(5, {0}, {}, {1}));
  w.now += 2000;
  w.tick(1);
  w.settle();
  CHECK(w.replica(1).status().persisted.proposed == ChainVersion{1, 5});
  CHECK(w.replica(1).status().chain_version == ChainVersion{});
}

bool serves_although_left_out(Mutant mutant) {
  Wired w(2, mutant);
  w.begin({0, 1});
  w.propose(1, w.config(3, {0}, {}, {1}));
  w.settle();
  w.record_all(w.config(2, {0, 1}));  // comes late
  return w.replica(1).status().serving;
}

TEST_CASE("an older version that comes late doesn't bring back what a proposal leaves out") {
  CHECK(!serves_although_left_out(Mutant::none));
  CHECK(serves_although_left_out(Mutant::keep_serving_when_left_out));
  // Nor after a restart, which has forgotten what the proposal said.
  Wired w(2);
  w.begin({0, 1});
  w.propose(1, w.config(3, {0}, {}, {1}));
  w.settle();
  w.start(1);
  w.now += 2000;
  w.record_all(w.config(2, {0, 1}));
  CHECK(w.replica(1).status().chain_version == ChainVersion{});
  w.record_all(w.config(4, {0, 1}));
  CHECK(all_serve(w, {0, 1}));
}

TEST_CASE("a neighbour that owes and is silent is suspect; one that waits for another isn't") {
  Wired w(3);
  w.begin({0, 1, 2});
  cut_both(w, 1, 2);
  w.pass(5000);
  CHECK(w.replica(1).status().suspect == TargetId{});  // nothing is owed
  w.write(0, kKey, 5);
  w.pass(3900);
  CHECK(w.replica(1).status().suspect == TargetId{});
  w.pass(200);
  CHECK(w.replica(1).status().suspect == Wired::target(2));
  CHECK(w.replica(0).status().suspect == TargetId{});  // its neighbour says that it is there
  w.cut.clear();
  w.pass(1000);
  CHECK(w.replica(1).status().suspect == TargetId{});
}

TEST_CASE("after a pause nobody is suspected before its messages were read") {
  Wired w(2);
  w.begin({0, 1});
  cut_both(w, 0, 1);
  w.write(0, kKey, 5);
  w.settle();
  w.now += 100'000;
  w.tick(0);
  CHECK(w.replica(0).status().suspect == TargetId{});
}

}  // namespace ffs::craq
