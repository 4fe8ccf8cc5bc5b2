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

}  // namespace ffs::craq::testing
