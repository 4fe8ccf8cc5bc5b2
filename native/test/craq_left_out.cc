// A member that the chain goes on without keeps nothing that others may wait for. docs/craq.md, Members.
#include "test/craq_world.h"

namespace ffs::craq::testing {

TEST_CASE("a head that is left out gives the payloads of its pendings back, and sends them if it returns") {
  World w(6, 2);
  w.record("ss");
  REQUIRE(w.until([&] { return w.serving("ab"); }));
  Node& a = w.nodes[0];
  Node& b = w.nodes[1];
  for (uint64_t i = 0; i < 30; i++) w.update(0, UpdateKind::replace, i, 0, 20);
  REQUIRE(a.buffers.size() == 30);
  for (int i = 0; i < 20; i++) a.disk_step();  // the others are still on their way to the disk
  ChainConfig without = w.config;
  without.version.counter++;
  std::swap(without.members[0], without.members[1]);
  without.members[1].state = MemberState::offline;
  a.run([&](Effects& out) { a.replica->on_proposed(without, w.now_ms, out); });
  while (a.disk_step()) {
  }
  CHECK(a.replica->status().reason == Reason::left_out);
  CHECK(a.replica->status().pendings == 30);
  CHECK(a.buffers.empty());

  SUBCASE("it is left out") {
    for (Node& n : w.nodes) n.run([&](Effects& out) { n.replica->on_recorded(without, w.now_ms, out); });
    w.config = without;
    CHECK(w.until([&] { return w.serving("b"); }));
    for (int i = 0; i < 100; i++) w.tick(10000);
    CHECK(a.started.empty());  // nor does it read them again
  }
  SUBCASE("it isn't, after all") {
    w.config.version.counter++;
    w.record("ss");
    CHECK(w.until([&] { return w.serving("ab") && w.quiet(); }));
    CHECK(b.store.chunk_count() == 30);
  }
  CHECK(a.buffers.empty());
}

TEST_CASE("payloads that come when the head has been left out are given back, and not read again") {
  World w(8, 2);
  w.record("ss");
  REQUIRE(w.until([&] { return w.serving("ab"); }));
  Node& a = w.nodes[0];
  for (uint64_t i = 0; i < 10; i++) w.update(0, UpdateKind::replace, i, 0, 20);
  while (a.disk_step()) {
  }
  w.network.clear();
  w.restart(0);
  w.record("ss");
  REQUIRE(w.until([&] { return !a.buffers.empty() && !a.started.empty(); }));  // to be sent once more
  ChainConfig without = w.config;
  without.version.counter++;
  std::swap(without.members[0], without.members[1]);
  without.members[1].state = MemberState::offline;
  a.run([&](Effects& out) { a.replica->on_proposed(without, w.now_ms, out); });
  CHECK(a.buffers.empty());
  for (int i = 0; i < 100; i++) a.started_step(w.random);
  CHECK(a.started.empty());
  CHECK(a.buffers.empty());
}

namespace {

// b fills c in the middle of it, and has copies on their way.
void fill_from_b(World& w) {
  w.record("ss-");
  REQUIRE(w.until([&] { return w.serving("ab"); }));
  for (uint64_t i = 0; i < 30; i++) {
    w.update(0, UpdateKind::replace, i, 0, 20);
    REQUIRE(w.until([&] { return w.quiet(); }));
  }
  REQUIRE(w.nodes[1].buffers.empty());
  w.record("ssy");
}

// A proposal of `states`, in the order of the nodes, is given to b.
ChainConfig propose_to_b(World& w, std::array<MemberState, 3> states) {
  ChainConfig next;
  next.version = {1, w.config.version.counter + 1};
  w.config.version = next.version;
  next.member_count = 3;
  uint32_t at = 0;
  for (const MemberState state : {MemberState::serving, MemberState::syncing, MemberState::offline}) {
    for (uint32_t i = 0; i < 3; i++) {
      if (states[i] == state) next.members[at++] = {w.nodes[i].target, state, w.nodes[i].incarnation};
    }
  }
  Node& b = w.nodes[1];
  b.run([&](Effects& out) { b.replica->on_proposed(next, w.now_ms, out); });
  while (b.disk_step()) {
  }
  return next;
}

constexpr MemberState S = MemberState::serving, Y = MemberState::syncing, O = MemberState::offline;

}  // namespace

TEST_CASE("a source that is left out keeps no copies that it was about to send") {
  World w(5, 3);
  fill_from_b(w);
  Node& a = w.nodes[0];
  Node& b = w.nodes[1];
  REQUIRE(w.until([&] { return w.serving("ab") && b.buffers.size() >= 3 && !b.started.empty(); }));
  const ChainConfig without = propose_to_b(w, {S, O, Y});
  CHECK(b.replica->status().reason == Reason::left_out);
  CHECK(b.buffers.empty());
  for (int i = 0; i < 100; i++) b.started_step(w.random);  // copies that come too late
  CHECK(b.buffers.empty());
  for (Node& n : w.nodes) n.run([&](Effects& out) { n.replica->on_recorded(without, w.now_ms, out); });
  CHECK(w.until([&] { return a.replica->status().sync_done; }));
  CHECK(b.buffers.empty());
}

TEST_CASE("a source that was left out lets nobody into the path, nor goes on without whom it filled") {
  World w(5, 3);
  fill_from_b(w);
  Node& b = w.nodes[1];
  REQUIRE(w.until([&] { return b.replica->status().sync_done; }));
  const ChunkKey key = ChunkKey::of_file(2, 1);
  const Version before = b.store.committed(key).version;
  w.update(0, UpdateKind::write, 1);
  for (int i = 0; i < 20; i++) {  // at a's disk only
    while (w.nodes[0].disk_step()) {
    }
    while (!w.network.empty()) w.deliver();
  }
  REQUIRE(b.store.undurable() > 0);
  const ChainConfig without = propose_to_b(w, {S, O, Y});  // now at b's, too
  REQUIRE(b.replica->status().persisted.proposed == without.version);
  CHECK(b.store.undurable() == 0);
  CHECK(b.replica->status().pendings == 1);
  CHECK(b.store.committed(key).version == before);
  propose_to_b(w, {S, S, S});
  w.until([&] { return false; }, 1000);
  CHECK(b.replica->status().persisted.proposed == without.version);
}

TEST_CASE("commits that waited for a promotion go on when another version is proposed instead") {
  World w(5, 3);
  fill_from_b(w);
  Node& a = w.nodes[0];
  Node& b = w.nodes[1];
  REQUIRE(w.until([&] { return b.replica->status().sync_done; }));
  const ChainVersion served = w.config.version;
  const ChainConfig promoted = propose_to_b(w, {S, S, S});
  REQUIRE(w.until([&] { return b.replica->status().persisted.proposed == promoted.version; }));
  w.config.version = served;  // what clients name
  a.replies.clear();
  w.update(0, UpdateKind::write, 1);
  CHECK(!w.until([&] { return !a.replies.empty(); }, 3000));
  w.config.version = promoted.version;
  propose_to_b(w, {S, S, Y});
  CHECK(w.until([&] { return !a.replies.empty(); }, 10000));
  CHECK(a.replies.back().outcome == Outcome::ok);
}

}  // namespace ffs::craq::testing
