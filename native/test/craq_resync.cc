// Recovery and repair: machines joined in memory, over lossy connections, until the stores are equal.
#include "test/craq_world.h"

#include "craq/sync_wire.h"

namespace ffs::craq::testing {
namespace {

using Problem = std::string;

std::string name(const ChunkKey& key) {
  return std::to_string(key.space()) + "/" + std::to_string(key.bytes[23]);
}

// What `target` lacks of what is committed at `source`; it may be ahead by what is pending there.
Problem lacks(const Node& source, const Node& target) {
  const sim::ModelState& a = source.store.state();
  const sim::ModelState& b = target.store.state();
  for (const auto& [key, c] : a.chunks) {
    auto at = b.chunks.find(key);
    const Version there = at != b.chunks.end() ? at->second.committed.facts.version : Version{};
    const ModelVersion* pending = c.pendings.empty() ? nullptr : &c.pendings.front();
    if (pending != nullptr && (there == pending->version || (pending->removal && there.none()))) continue;
    if (there != c.committed.facts.version) return "chunk " + name(key) + " is another version";
    if (!there.none() && at->second.committed.content != c.committed.content) {
      return "chunk " + name(key) + " has another content";
    }
  }
  for (const auto& [key, c] : b.chunks) {
    if (!c.committed.facts.version.none() && a.chunks.count(key) == 0)
      return "chunk " + name(key) + " stayed";
  }
  for (const auto& [who, entry] : a.retry) {
    if (entry.state == RetryState::pending) continue;
    auto at = b.retry.find(who);
    const std::string of = "channel " + std::to_string(who.first) + "/" + std::to_string(who.second);
    if (at == b.retry.end()) return of + " isn't in the retry table";
    const RetryEntry& there = at->second;
    if (there.sequence == entry.sequence && there.version == entry.version && there.outcome == entry.outcome)
      continue;
    return of + " has another entry";
  }
  return {};
}

Problem lacks_epochs(const Node& source, const Node& target) {
  for (const auto& [space, epoch] : source.store.state().epochs) {
    auto at = target.store.state().epochs.find(space);
    const bool equal = at != target.store.state().epochs.end() && at->second == epoch;
    if (!equal) return "the epoch of space " + std::to_string(space) + " is another";
  }
  return {};
}

// A chain of `a` and `b` with a past: b was away for a while, and has what a removed meanwhile.
void make_past(World& w, uint64_t keys) {
  w.record("ss");
  REQUIRE(w.until([&] { return w.serving("ab"); }));
  for (int i = 0; i < 60; i++) {
    w.random_update(0, keys);
    for (int k = 0; k < 5; k++) w.step();
  }
  w.set_epoch(0, 2, 1);
  // b goes with updates under way; some stay pending there.
  w.record("s-");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  for (int i = 0; i < 40; i++) {
    w.random_update(0, keys);
    for (int k = 0; k < 5; k++) w.step();
  }
  w.set_epoch(0, 2, 7);
  w.set_epoch(0, 3, 4);
}

// Fills b while clients write; the problem at the end, or none.
Problem recover(World& w, uint64_t keys) {
  make_past(w, keys);
  w.loss_percent = 10;
  w.repeat_percent = 10;
  w.record("sy");
  uint32_t writes = 0;
  const auto work = [&] {
    if (w.chance(2)) w.nodes[1].install_outcome = w.chance(30) ? Outcome::no_space : Outcome::ok;
    if (writes < 300 && w.chance(10)) {
      w.random_update(0, keys);
      if (writes++ % 50 == 0) w.set_epoch(0, 4 + writes, writes);
    }
  };
  bool done = w.until([&] {
    work();
    return w.nodes[0].replica->status().sync_done;
  });
  if (!done) return "the sync doesn't end";
  // From now on whatever is committed at a is at b.
  for (int i = 0; i < 400; i++) {
    if (Problem p = lacks(w.nodes[0], w.nodes[1]); !p.empty()) return "after done: " + p;
    work();
    w.step();
  }
  w.record("ss");
  if (!w.until([&] {
        work();
        return w.serving("ab");
      }))
    return "b doesn't serve";
  w.nodes[1].install_outcome = Outcome::ok;
  if (!w.until([&] { return w.quiet(); })) return "something stays pending";
  if (Problem p = lacks(w.nodes[0], w.nodes[1]); !p.empty()) return "when all is quiet: " + p;
  if (Problem p = lacks_epochs(w.nodes[0], w.nodes[1]); !p.empty()) return p;
  if (!w.nodes[0].buffers.empty() || !w.nodes[1].buffers.empty()) return "a buffer isn't released";
  return {};
}

}  // namespace

TEST_CASE("a returned member is filled while clients write, over lossy connections") {
  for (uint64_t seed = 1; seed <= 150; seed++) {
    CAPTURE(seed);
    World w(seed, 2);
    const Problem problem = recover(w, 12);
    CHECK(problem == Problem{});
  }
}

TEST_CASE("an equal member is compared, and nothing is copied") {
  World w(1, 2);
  w.record("ss");
  REQUIRE(w.until([&] { return w.serving("ab"); }));
  for (uint64_t key = 0; key < 400; key++) {
    w.update(0, UpdateKind::write, key);
    REQUIRE(w.until([&] { return w.quiet(); }));
  }
  w.record("s-");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
  const ReplicaStatus s = w.nodes[0].replica->status();
  CHECK(s.sync_chunks_total == 400);
  CHECK(s.sync_chunks_compared == 400);
  CHECK(s.sync_chunks_sent == 0);
  CHECK(w.nodes[0].copies == 0);
  CHECK(w.nodes[1].installs == 0);
}

// The version is recorded for both at once, and adopted by each when it is durable there.
TEST_CASE("a begin that came before the target was ready is said again long before other messages") {
  World w(3, 2);
  for (size_t i = 0; i < 2; i++) {
    w.nodes[i].options.resend_ms = 10'000;
    w.nodes[i].options.suspect_ms = 100'000;
    w.restart(i);
  }
  w.record("s-");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  w.loss_percent = 100;
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_target == w.nodes[1].target; }));
  for (int i = 0; i < 5; i++) w.tick();
  w.loss_percent = 0;
  const uint64_t heals_ms = w.now_ms;
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
  CHECK(w.now_ms - heals_ms < 2'000);
}

TEST_CASE("an empty member gets all chunks once; a member of another content loses what it had") {
  World w(2, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  for (uint64_t key = 0; key < 300; key++) {
    w.update(0, UpdateKind::write, key);
    REQUIRE(w.until([&] { return w.quiet(); }));
  }
  for (uint64_t key = 0; key < 250; key++) {  // b has what a never had
    Record r;
    r.kind = RecordKind::install;
    r.update.key = ChunkKey::of_file(key % 2 == 0 ? 1 : 9, 1000 + key);
    r.update.version = r.after.version = Version{{1, 1}, 5000 + key};
    w.nodes[1].append(r);
  }
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
  CHECK(w.nodes[1].installs == 300);
  CHECK(w.nodes[1].erases == 250);
  CHECK(lacks(w.nodes[0], w.nodes[1]) == Problem{});
}

TEST_CASE("a copy that finds the store ahead of us isn't asked for again at once") {
  // A stage that commits by itself is shown by the store before its completion is given.
  World w(3, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  w.update(0, UpdateKind::write, 1);
  REQUIRE(w.until([&] { return w.quiet(); }));
  w.record("sy");
  Node& a = w.nodes[0];
  for (int i = 0; i < 60000 && a.copies == 0; i++) w.step();
  REQUIRE(a.copies == 1);
  REQUIRE(a.started.size() == 1);
  const OpId op = a.started[0].op;
  a.started.clear();
  a.run([&](Effects& out) { a.replica->on_completion(op, Outcome::absent, kNoBuffer, w.now_ms, out); });
  CHECK(a.copies == 1);
  CHECK(w.until([&] { return a.replica->status().sync_done; }));
  CHECK(a.copies == 2);
}

TEST_CASE("a full target is given up, commits go on, and it is filled when it has room") {
  World w(3, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  w.update(0, UpdateKind::write, 1);
  w.nodes[1].install_outcome = Outcome::no_space;
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_failure == Outcome::no_space; }));
  CHECK(!w.nodes[0].replica->status().sync_done);
  w.nodes[0].replies.clear();
  w.update(0, UpdateKind::write, 2);
  REQUIRE(w.until([&] { return !w.nodes[0].replies.empty(); }));
  CHECK(w.nodes[0].replies[0].outcome == Outcome::ok);
  w.nodes[1].install_outcome = Outcome::ok;
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
  CHECK(w.nodes[0].replica->status().sync_failure == Outcome::ok);
  CHECK(lacks(w.nodes[0], w.nodes[1]) == Problem{});
}

TEST_CASE("a silent target stops nobody before the sync is done, and all commits after it") {
  World w(4, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  for (uint64_t key = 0; key < 20; key++) w.update(0, UpdateKind::write, key);
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
  w.loss_percent = 100;
  w.network.clear();
  w.nodes[0].replies.clear();
  w.update(0, UpdateKind::write, 1);
  CHECK(!w.until([&] { return !w.nodes[0].replies.empty(); }, 5000));
  CHECK(w.nodes[0].replica->status().sync_done);
  w.record("s-");  // the manager goes on without it
  CHECK(w.until([&] { return !w.nodes[0].replies.empty(); }));
  w.record("sy");  // and it can't be reached at all
  w.nodes[0].replies.clear();
  w.until([&] { return w.serving("a"); });
  w.update(0, UpdateKind::write, 2);
  CHECK(w.until([&] { return !w.nodes[0].replies.empty(); }));
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_failure == Outcome::timed_out; }));
  w.loss_percent = 0;
  CHECK(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
}

TEST_CASE(
    "the retry entry of a channel that goes on writing is sent when its turn comes, not for each write") {
  World w(4, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  Node& a = w.nodes[0];
  w.update(0, UpdateKind::replace, 1);
  REQUIRE(w.until([&] { return w.quiet(); }));
  w.record("sy");
  REQUIRE(w.until([&] { return a.replica->status().sync_chunks_total > 0; }));
  std::map<uint64_t, size_t> items;  // of each message
  const auto count = [&] {
    for (const Message& sent : w.network) {
      const Bytes* bytes = std::get_if<Bytes>(&sent.body);
      if (bytes == nullptr) continue;
      const std::optional<SyncMessage> m = decode_sync(*bytes);
      REQUIRE(m.has_value());
      if (m->kind == SyncKind::retries) items[m->number] = m->retry_count();
    }
  };
  for (uint64_t i = 0; i < 1500; i++) {  // b hears nothing: 150 channels write ten times each
    w.update(0, UpdateKind::write, 1 + i % 4);
    while (a.disk_step() || a.started_step(w.random)) {
    }
  }
  REQUIRE(!a.replica->status().sync_done);
  REQUIRE(w.until([&] {
    count();
    return a.replica->status().sync_done;
  }));
  CHECK(lacks(a, w.nodes[1]) == Problem{});
  size_t sent = 0;
  for (const auto& [number, entries] : items) sent += entries;
  CHECK(sent >= 150);
  CHECK(sent < 500);
}

TEST_CASE("only who is done, in the incarnation that it was filled in, is let into the path") {
  World w(5, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  w.update(0, UpdateKind::write, 1);
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().chain_version == w.config.version; }));
  Node& a = w.nodes[0];
  ChainConfig next = w.config;
  next.version.counter++;
  next.members[1].state = MemberState::serving;
  a.run([&](Effects& out) { a.replica->on_proposed(next, w.now_ms, out); });
  while (a.disk_step()) {
  }
  CHECK(a.replica->status().persisted.proposed < next.version);
  REQUIRE(w.until([&] { return a.replica->status().sync_done; }));
  ChainConfig reborn = next;
  reborn.version.counter++;
  reborn.members[1].incarnation++;
  a.run([&](Effects& out) { a.replica->on_proposed(reborn, w.now_ms, out); });
  w.until([&] { return false; }, 200);
  CHECK(a.replica->status().persisted.proposed < next.version);
  reborn.version.counter++;
  reborn.members[1].incarnation--;
  a.run([&](Effects& out) { a.replica->on_proposed(reborn, w.now_ms, out); });
  CHECK(w.until([&] { return a.replica->status().persisted.proposed == reborn.version; }));
}

TEST_CASE("damage is repaired from another member: found by a read, a stage, a copy, a comparison") {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    CAPTURE(seed);
    World w(seed, 3);
    w.loss_percent = w.repeat_percent = seed % 2 == 0 ? 10 : 0;
    w.record("ss-");
    REQUIRE(w.until([&] { return w.serving("ab"); }));
    for (uint64_t key = 0; key < 30; key++) w.update(0, UpdateKind::write, key, 0, 20);
    REQUIRE(w.until([&] { return w.quiet(); }));
    Node& b = w.nodes[1];
    const auto key_of = [](uint64_t key) { return ChunkKey::of_file(1 + key % 3, key); };
    for (uint64_t key = 0; key < 8; key++) b.store.damage(key_of(key), /*silent=*/key >= 6);
    // 0: a client's read.
    ClientRead read{.token = 900, .chain_version = w.config.version, .key = key_of(0), .length_bytes = 20};
    read.space_epoch = UINT64_MAX;
    b.run([&](Effects& out) { b.replica->on_client_read(read, w.now_ms, out); });
    REQUIRE(w.until([&] { return !b.replies.empty(); }));
    CHECK(b.replies[0].outcome == Outcome::corrupt);
    // 1: a partial write. 2: the scrubber.
    w.nodes[0].replies.clear();
    w.update(0, UpdateKind::write, 1, 4, 4);
    b.run([&](Effects& out) {
      b.replica->on_damaged(key_of(2), b.store.committed(key_of(2)).version, w.now_ms, out);
    });
    CHECK(w.until([&] { return !w.nodes[0].replies.empty() && b.replica->status().repaired == 3; }));
    // 3, 4, 5: as the source of a sync. 6, 7: nobody can tell, but that the predecessor has another content.
    w.record("ssy");
    REQUIRE(w.until([&] { return b.replica->status().sync_done; }));
    CHECK(b.replica->status().repaired == 6);
    const auto compare = [&] {
      std::optional<ChunkKey> at = ChunkKey{};
      while (at.has_value()) b.run([&](Effects& out) { at = b.replica->on_compare(*at, w.now_ms, out); });
    };
    REQUIRE(w.until([&] { return w.serving("ab"); }));
    CHECK(w.until([&] {
      if (w.chance(1)) compare();
      return b.replica->status().repaired == 8;
    }));
    CHECK(b.replica->status().damaged == 0);
    REQUIRE(w.until([&] { return w.quiet(); }));
    CHECK(lacks(w.nodes[0], w.nodes[1]) == Problem{});
    for (const Repaired& r : b.repairs) CHECK(r.ok);
  }
}

TEST_CASE(
    "a pending version that can't be read back comes from another member, or is given up with its only one") {
  for (const bool known_behind : {true, false}) {
    CAPTURE(known_behind);
    World w(8, 2);
    w.record("ss");
    REQUIRE(w.until([&] { return w.serving("ab"); }));
    Node& a = w.nodes[0];
    w.update(0, UpdateKind::write, 1, 0, 30);
    REQUIRE(w.until([&] { return w.quiet(); }));
    if (!known_behind) w.loss_percent = 100;
    w.update(0, UpdateKind::write, 1, 5, 10);
    const ChunkKey key = ChunkKey::of_file(2, 1);
    const auto pending = [&] {
      const auto at = a.store.state().chunks.find(key);
      return at->second.pendings.empty() ? Version{} : at->second.pendings[0].version;
    };
    REQUIRE(w.until([&] {
      const bool behind = w.nodes[1].store.find(key, pending()) != nullptr;
      return !pending().none() && a.store.undurable() == 0 && behind == known_behind;
    }));
    const Version version = pending();
    const Version before = a.store.committed(key).version;
    w.restart(0);
    a.rotten.insert({key, version});
    w.network.clear();
    w.loss_percent = 0;
    w.record("ss");
    REQUIRE(w.until([&] { return w.serving("ab") && w.quiet(); }));
    CHECK(a.store.committed(key).version == (known_behind ? version : before));
    CHECK(lacks(w.nodes[0], w.nodes[1]) == Problem{});
    const auto entry = a.store.state().retry.at({5 + w.sequence % 3, static_cast<uint32_t>(w.sequence % 50)});
    CHECK(entry.outcome == (known_behind ? Outcome::ok : Outcome::io_error));
  }
}

TEST_CASE("what nobody has undamaged isn't spread, keeps the sync from its end, and is said") {
  World w(6, 2);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  for (uint64_t key = 0; key < 10; key++) w.update(0, UpdateKind::write, key);
  REQUIRE(w.until([&] { return w.quiet(); }));
  const ChunkKey key = ChunkKey::of_file(1 + 4 % 3, 4);
  w.nodes[0].store.damage(key, /*silent=*/false);
  w.record("sy");
  REQUIRE(w.until([&] { return w.nodes[0].replica->status().sync_failure == Outcome::corrupt; }));
  REQUIRE(!w.until([&] { return w.nodes[0].replica->status().sync_done; }, 5000));
  CHECK(w.nodes[1].installs == 9);
  CHECK(w.nodes[0].replica->status().damaged == 1);
  REQUIRE(!w.nodes[0].repairs.empty());
  CHECK(!w.nodes[0].repairs[0].ok);
  w.update(0, UpdateKind::replace, 4);  // its client writes it anew
  CHECK(w.until([&] { return w.nodes[0].replica->status().sync_done; }));
  CHECK(w.nodes[0].replica->status().damaged == 0);
  CHECK(lacks(w.nodes[0], w.nodes[1]) == Problem{});
}

TEST_CASE("each break of recovery is seen within few seeds") {
  for (Mutant mutant :
       {Mutant::early_promotion, Mutant::no_wait_in_step, Mutant::ignore_sync_numbers, Mutant::forget_backlog,
        Mutant::no_retry_copy, Mutant::no_erase, Mutant::no_epoch_copy, Mutant::trust_old_attempts}) {
    CAPTURE(static_cast<int>(mutant));
    bool seen = false;
    for (uint64_t seed = 1; seed <= 150 && !seen; seed++) {
      World w(seed, 2, mutant);
      seen = !recover(w, 12).empty();
    }
    CHECK(seen);
  }
}

TEST_CASE("the break that spreads damage is seen") {
  World w(6, 2, Mutant::spread_corruption);
  w.record("s");
  REQUIRE(w.until([&] { return w.serving("a"); }));
  w.update(0, UpdateKind::write, 4);
  REQUIRE(w.until([&] { return w.quiet(); }));
  w.nodes[0].store.damage(ChunkKey::of_file(1 + 4 % 3, 4), /*silent=*/false);
  w.record("sy");
  CHECK(w.until([&] { return w.nodes[1].installs == 1; }));
}

TEST_CASE("sync messages: a golden one, and what is refused") {
  SyncMessage m{.kind = SyncKind::erase};
  m.session = {2, 0x11, 0x22};
  m.number = 7;
  m.floor = 5;
  m.key = ChunkKey::of_file(3, 9);
  SyncItems items;
  items.add(
      RetryItem{ClientId{6}, 1, RetryEntry{4, m.key, Version{{1, 8}, 10}, RetryState::done, Outcome::ok}});
  m.items = items.bytes();
  const Bytes bytes = encode(m);
  std::string hex;
  for (const uint8_t b : bytes) {
    const char* digits = "0123456789abcdef";
    hex += {digits[b >> 4], digits[b & 15]};
  }
  CHECK(hex ==
        "0500000002000000"
        "1100000000000000"
        "2200000000000000"
        "0700000000000000"
        "0500000000000000"
        "000000000000000300000000000000000000000000000009"
        "0600000000000000"
        "01000000"
        "0000"
        "02"
        "00"
        "0400000000000000"
        "000000000000000300000000000000000000000000000009"
        "01000000080000000a00000000000000");
  const std::optional<SyncMessage> back = decode_sync(bytes);
  REQUIRE(back.has_value());
  CHECK(back->session == m.session);
  CHECK(back->retry(0).entry.version == Version{{1, 8}, 10});
  for (size_t cut = 0; cut < bytes.size(); cut++) {
    const bool whole = cut == 64;  // without the item it is a message too
    CHECK(decode_sync(std::span(bytes).first(cut)).has_value() == whole);
  }
  Bytes wrong = bytes;
  wrong[0] = 13;  // no such kind
  CHECK(!decode_sync(wrong).has_value());
  wrong = bytes;
  wrong[64 + 14] = 1;  // a pending entry
  CHECK(!decode_sync(wrong).has_value());
}

}  // namespace ffs::craq::testing
