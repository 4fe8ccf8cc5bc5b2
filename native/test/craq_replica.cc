// The replica by itself: what it asks for, in which order, and that the steady state allocates
// nothing. The protocol between replicas is tested by tests/sim.
#include <doctest/doctest.h>

#include <cstdlib>
#include <new>

#include "craq/sim_store.h"

namespace {
size_t allocations = 0;
}

void* operator new(size_t size) {
  allocations++;
  if (void* memory = std::malloc(size); memory != nullptr) return memory;
  std::abort();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace ffs::craq {
namespace {

const ChunkKey kKey = ChunkKey::of_file(1, 0);

// A store with nothing in it that forgets everything: enough where only effects are looked at.
class EmptyStore final : public StoreView {
 public:
  ChunkFacts committed(const ChunkKey&) const override { return facts; }
  void each_pending(PendingVisitor&) const override {}
  std::optional<RetryEntry> retry(ClientId, uint32_t) const override { return entry; }
  bool fenced(ClientId client) const override { return client == fenced_client; }
  uint64_t least_epoch(uint64_t) const override { return least; }
  ChainRecord chain_record() const override { return {}; }
  Outcome admit(const ChunkKey&, UpdateKind, uint32_t, uint64_t) const override { return room; }
  std::optional<ChunkKey> first_committed(uint64_t, const ChunkKey*) const override { return std::nullopt; }
  std::optional<ChunkKey> last_committed(uint64_t) const override { return std::nullopt; }
  std::optional<ChunkDigest> digest_at_or_after(const ChunkKey&) const override { return std::nullopt; }
  uint64_t chunk_count() const override { return 0; }
  void each_retry(RetryVisitor&) const override {}
  void each_space_epoch(SpaceEpochVisitor&) const override {}

  ChunkFacts facts;
  std::optional<RetryEntry> entry;
  ClientId fenced_client;
  uint64_t least = 0;
  Outcome room = Outcome::ok;
};

struct Fixture {
  EmptyStore store;
  Options options;
  Effects out;
  std::unique_ptr<Replica> replica;
  uint64_t now_ms = 1000;
  ChainVersion version{1, 1};

  // Member `index` of a chain of `members`, serving.
  explicit Fixture(uint32_t members, uint32_t index = 0, const Options& given = {})
      : options(given), index_(index) {
    replica = std::make_unique<Replica>(TargetId{11 + index}, ChainId{7}, store, options);
    ChainConfig config;
    config.version = version;
    config.member_count = members;
    for (uint32_t i = 0; i < members; i++) config.members[i] = {TargetId{11 + i}, MemberState::serving};
    replica->on_recorded(config, now_ms, out);
    replica->on_completion(take<PersistChain>().op, Outcome::ok, kNoBuffer, now_ms, out);
    if (index > 0) from_above(Notice{.type = NoticeType::resent});
    if (index + 1 < members) {
      from_below(Notice{.type = NoticeType::reconciled});
      from_below(Notice{.type = NoticeType::ready});
    }
    REQUIRE(replica->status().serving);
    replica->on_lease(now_ms + 3'600'000, now_ms, out);
    out.clear();
  }

  PeerHeader header(uint32_t from) const {
    return {ChainId{7}, version, TargetId{11 + from}, TargetId{11 + index_}};
  }
  void from_above(const Notice& n) { replica->on_notice(header(index_ - 1), n, now_ms, out); }
  void from_below(const Notice& n) { replica->on_notice(header(index_ + 1), n, now_ms, out); }

  ClientUpdate write(uint64_t sequence, RequestToken token) const {
    ClientUpdate u;
    u.token = token;
    u.chain_version = version;
    u.identity = {ClientId{5}, 1, sequence};
    u.key = kKey;
    u.length_bytes = 4;
    u.payload = BufferRef{token};
    return u;
  }
  void send(const ClientUpdate& u) { replica->on_client_update(u, now_ms, out); }

  // The only effect of that type; effects are forgotten by clear().
  template <typename T>
  T take() {
    const T* found = nullptr;
    for (const Effect& e : out) {
      if (const T* t = std::get_if<T>(&e); t != nullptr) {
        REQUIRE(found == nullptr);
        found = t;
      }
    }
    REQUIRE(found != nullptr);
    return *found;
  }
  template <typename T>
  size_t count() const {
    size_t n = 0;
    for (const Effect& e : out) n += std::holds_alternative<T>(e) ? 1 : 0;
    return n;
  }
  Outcome answer() {
    Outcome outcome = take<Reply>().outcome;
    out.clear();
    return outcome;
  }

 private:
  uint32_t index_;
};

}  // namespace

TEST_CASE("the head sends data on before it stages, and doesn't wait for its disk") {
  Fixture f(2);
  f.send(f.write(1, 100));
  REQUIRE(f.out.size() == 2);
  CHECK(std::holds_alternative<SendUpdate>(f.out[0]));
  CHECK(std::holds_alternative<Stage>(f.out[1]));
  CHECK(!f.take<SendUpdate>().update.held);
}

TEST_CASE("a write at the head: staged, held, acknowledged, committed, answered, released") {
  Fixture f(2);
  f.send(f.write(1, 100));
  OpId op = f.take<Stage>().op;
  Version v = f.take<Stage>().update.version;
  f.out.clear();
  f.replica->on_completion(op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  CHECK(f.take<SendNotice>().notice.type == NoticeType::held);
  CHECK(f.count<Commit>() == 0);
  f.out.clear();
  f.from_below(Notice{.type = NoticeType::ack, .key = kKey, .version = v});
  CHECK(f.take<Commit>().version == v);
  CHECK(f.take<Release>().payload == BufferRef{100});
  CHECK(f.take<Reply>().chunk.version == v);
}

TEST_CASE("a chain of one commits when the update is durable, and not before") {
  Fixture f(1);
  f.send(f.write(1, 100));
  OpId op = f.take<Stage>().op;
  CHECK(f.count<Commit>() == 0);
  f.out.clear();
  f.replica->on_completion(op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  CHECK(f.count<Commit>() == 1);
  CHECK(f.take<Reply>().outcome == Outcome::ok);
}

TEST_CASE("the last member commits only with its own durability and held") {
  for (bool held_first : {false, true}) {
    Fixture f(2, 1);
    Update u;
    u.key = kKey;
    u.version = {f.version, 1};
    u.length_bytes = 4;
    u.base_absent = u.base_committed = true;
    u.payload = BufferRef{9};
    f.replica->on_update(f.header(0), u, PayloadState::ready, f.now_ms, f.out);
    OpId op = f.take<Stage>().op;
    f.out.clear();
    Notice held{.type = NoticeType::held, .key = kKey, .version = u.version};
    if (held_first) f.from_above(held);
    CHECK(f.count<Commit>() == 0);
    f.replica->on_completion(op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
    if (!held_first) {
      CHECK(f.count<Commit>() == 0);
      f.from_above(held);
    }
    CHECK(f.take<Commit>().version == u.version);
    CHECK(f.take<SendNotice>().notice.type == NoticeType::ack);
  }
}

TEST_CASE("a last member that was told held before it stages commits when that is durable") {
  Fixture f(2, 1);
  Update u;
  u.key = kKey;
  u.version = {f.version, 1};
  u.length_bytes = 4;
  u.base_absent = u.base_committed = u.held = true;
  u.payload = BufferRef{9};
  f.replica->on_update(f.header(0), u, PayloadState::ready, f.now_ms, f.out);
  OpId op = f.take<Stage>().op;
  CHECK(f.count<Commit>() == 0);
  f.out.clear();
  f.replica->on_completion(op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  CHECK(f.take<Commit>().version == u.version);
}

TEST_CASE("judged in order: chain version, authority, retry table, space epoch, base") {
  // Everything is wrong; one after the other is put right.
  Fixture f(2);
  f.store.least = 5;
  f.store.entry = RetryEntry{9, kKey, {}, RetryState::done, Outcome::ok};
  ClientUpdate u = f.write(1, 100);
  u.chain_version = ChainVersion{1, 0};
  u.authority = Outcome::denied;
  u.need_existing = true;
  u.payload = kNoBuffer;
  f.send(u);
  CHECK(f.answer() == Outcome::stale_chain);
  u.chain_version = f.version;
  f.send(u);
  CHECK(f.answer() == Outcome::denied);
  u.authority = Outcome::ok;
  f.send(u);
  CHECK(f.answer() == Outcome::old_sequence);
  u.identity.sequence = 10;
  f.send(u);
  CHECK(f.answer() == Outcome::stale_epoch);
  u.space_epoch = 5;
  f.send(u);
  CHECK(f.answer() == Outcome::absent);
  u.need_existing = false;
  f.send(u);
  CHECK(f.count<Stage>() == 1);
}

TEST_CASE("a write beyond the end is refused where the newest version, pending too, reaches further") {
  Fixture f(2);
  ClientUpdate u = f.write(1, 100);
  u.payload = kNoBuffer;
  u.offset_bytes = 40;
  u.beyond_end = true;
  f.send(u);
  CHECK(f.count<Stage>() == 1);  // the chunk is absent: it ends at 0
  f.out.clear();
  ClientUpdate next = f.write(2, 100);
  next.payload = kNoBuffer;
  next.identity.channel = u.identity.channel + 1;
  next.beyond_end = true;
  next.offset_bytes = u.offset_bytes + u.length_bytes - 1;
  f.send(next);
  CHECK(f.answer() == Outcome::existed);
  next.identity.sequence++;
  next.offset_bytes++;
  f.out.clear();
  f.send(next);
  CHECK(f.count<Reply>() == 0);  // numbered, behind the first
  CHECK(f.count<SendUpdate>() == 1);
}

TEST_CASE("an offered create changes nothing: wanted, or what the create would be told") {
  Fixture f(1);
  ClientUpdate offer = f.write(0, 100);
  offer.identity = {};
  offer.kind = UpdateKind::create;
  offer.payload = kNoBuffer;
  offer.offer = true;
  f.send(offer);
  CHECK(f.count<Stage>() == 0);
  CHECK(f.answer() == Outcome::wanted);
  ClientUpdate create = offer;
  create.offer = false;
  create.payload = BufferRef{9};
  f.send(create);
  const OpId op = f.take<Stage>().op;
  f.out.clear();
  f.send(offer);  // waits for what is pending
  CHECK(f.out.empty());
  f.replica->on_completion(op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  size_t existed = 0;
  for (const Effect& e : f.out) {
    const Reply* reply = std::get_if<Reply>(&e);
    existed += reply != nullptr && reply->outcome == Outcome::existed;
  }
  CHECK(existed == 1);
  f.out.clear();
  offer.kind = UpdateKind::replace;  // there is no such thing
  f.send(offer);
  CHECK(f.answer() == Outcome::invalid);
}

TEST_CASE("an update of a newer chain version waits until it is adopted") {
  Fixture f(1);
  ClientUpdate u = f.write(1, 100);
  u.chain_version = ChainVersion{1, 2};
  f.send(u);
  CHECK(f.out.empty());
  ChainConfig config;
  config.version = ChainVersion{1, 2};
  config.member_count = 1;
  config.members[0] = {TargetId{11}, MemberState::serving};
  f.replica->on_recorded(config, f.now_ms, f.out);
  CHECK(f.count<Stage>() == 0);
  f.replica->on_completion(f.take<PersistChain>().op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  CHECK(f.take<Stage>().update.version == Version{{1, 2}, 1});
}

TEST_CASE("a payload is fetched only for an update that is admitted") {
  Fixture f(2);
  f.store.facts.version = {f.version, 1};
  f.store.facts.attributes.tag_bytes = 1;
  ClientUpdate u = f.write(1, 100);
  u.identity = {};
  u.kind = UpdateKind::create;
  u.payload_state = PayloadState::later;
  f.send(u);
  CHECK(f.count<Fetch>() == 0);
  CHECK(f.count<Release>() == 1);
  CHECK(f.answer() == Outcome::tag_differs);

  f.store.facts = {};
  f.send(u);
  OpId op = f.take<Fetch>().op;
  CHECK(f.count<SendUpdate>() == 0);
  f.out.clear();
  f.replica->on_completion(op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  CHECK(f.count<SendUpdate>() == 1);

  Fixture bad(2);
  bad.send(u);
  op = bad.take<Fetch>().op;
  bad.out.clear();
  bad.replica->on_completion(op, Outcome::bad_checksum, kNoBuffer, bad.now_ms, bad.out);
  CHECK(bad.count<Release>() == 1);
  CHECK(bad.answer() == Outcome::bad_checksum);
}

TEST_CASE("what can't be: refused as invalid, with its payload released") {
  Fixture f(1);
  for (auto [offset, length] : {std::pair{0u, 0u}, {kMaxChunkBytes, 1u}, {1u, kMaxChunkBytes}, {~0u, 2u}}) {
    ClientUpdate u = f.write(1, 100);
    u.offset_bytes = offset;
    u.length_bytes = length;
    f.send(u);
    CHECK(f.count<Release>() == 1);
    CHECK(f.answer() == Outcome::invalid);
  }
}

TEST_CASE("an encoded chunk is replaced or removed, nothing is written into it") {
  ChunkFacts encoded;
  encoded.version = {{1, 1}, 1};
  encoded.length_bytes = 4;
  encoded.attributes.codec = 1;
  encoded.attributes.logical_length_bytes = 100;
  const auto refused = [](Fixture& f, const ClientUpdate& u) {
    f.out.clear();
    f.send(u);
    CHECK(f.count<Stage>() == 0);
    CHECK(f.count<SendUpdate>() == 0);
    CHECK(f.count<Release>() == 1);
    CHECK(f.answer() == Outcome::invalid);
  };
  const auto update = [](Fixture& f, uint64_t sequence, UpdateKind kind, uint8_t codec) {
    ClientUpdate u = f.write(sequence, 100 + sequence);
    u.identity.channel = static_cast<uint32_t>(sequence);
    u.kind = kind;
    u.attributes.codec = codec;
    return u;
  };
  for (const UpdateKind kind : {UpdateKind::write, UpdateKind::truncate}) {
    for (const uint8_t codec : {0, 1}) {
      Fixture f(2);
      f.store.facts = encoded;  // committed
      refused(f, update(f, 1, kind, codec));
      f.send(update(f, 2, UpdateKind::replace, 0));  // no longer encoded, once this is committed
      REQUIRE(f.count<Stage>() == 1);
      f.out.clear();
      f.send(update(f, 3, kind, 0));
      CHECK(f.count<SendUpdate>() == 1);

      Fixture pending(2);
      pending.send(update(pending, 1, UpdateKind::replace, 1));
      REQUIRE(pending.count<Stage>() == 1);
      refused(pending, update(pending, 2, kind, codec));
    }
  }
  Fixture f(2);
  refused(f, update(f, 1, UpdateKind::write, 1));  // nor does one begin so
  f.send(update(f, 2, UpdateKind::write, 0));
  CHECK(f.count<Stage>() == 1);
}

TEST_CASE("an update that the store won't take is refused, and the chain goes on") {
  for (const Outcome outcome : {Outcome::invalid, Outcome::fell_with_base}) {
    Fixture f(2);
    f.send(f.write(1, 100));
    const Stage stage = f.take<Stage>();
    f.out.clear();
    f.replica->on_completion(stage.op, outcome, kNoBuffer, f.now_ms, f.out);
    CHECK(f.count<StateChanged>() == 0);
    const Notice cancel = f.take<SendNotice>().notice;
    CHECK(cancel.type == NoticeType::cancel);
    CHECK(cancel.outcome == outcome);
    f.out.clear();
    f.from_below(
        Notice{.type = NoticeType::refusal, .outcome = outcome, .key = kKey, .version = cancel.version});
    const Refuse refuse = f.take<Refuse>();
    f.out.clear();
    f.replica->on_completion(refuse.op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
    CHECK(f.answer() == outcome);
    CHECK(f.replica->status().serving);
    f.send(f.write(2, 101));
    CHECK(f.count<Stage>() == 1);
  }
}

TEST_CASE("a full device is a refusal that all members journal before it is answered") {
  Fixture f(2);
  f.store.room = Outcome::no_space;
  f.send(f.write(1, 100));
  CHECK(f.count<SendUpdate>() == 0);
  CHECK(f.count<Refuse>() == 0);
  const Notice cancel = f.take<SendNotice>().notice;
  CHECK(cancel.type == NoticeType::cancel);
  f.out.clear();
  Notice refusal{
      .type = NoticeType::refusal, .outcome = cancel.outcome, .key = kKey, .version = cancel.version};
  f.from_below(refusal);
  CHECK(f.count<Reply>() == 0);
  Refuse refuse = f.take<Refuse>();
  CHECK(refuse.outcome == Outcome::no_space);
  f.out.clear();
  f.replica->on_completion(refuse.op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  CHECK(f.count<SendNotice>() == 0);
  CHECK(f.answer() == Outcome::no_space);
}

TEST_CASE("a deadline ends the wait, not the update") {
  Fixture f(2);
  ClientUpdate u = f.write(1, 100);
  u.deadline_ms = f.now_ms + 50;
  f.send(u);
  Stage stage = f.take<Stage>();
  f.out.clear();
  f.replica->on_tick(f.now_ms + 49, f.out);
  CHECK(f.count<Reply>() == 0);
  f.replica->on_tick(f.now_ms + 50, f.out);
  CHECK(f.answer() == Outcome::timed_out);
  f.replica->on_completion(stage.op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  f.from_below(Notice{.type = NoticeType::ack, .key = kKey, .version = stage.update.version});
  CHECK(f.count<Commit>() == 1);
  CHECK(f.count<Reply>() == 0);
  CHECK(f.replica->status().waiting == 0);
}

TEST_CASE("a failed device: offline at once for whoever asks, until restart") {
  Fixture f(2);
  f.send(f.write(1, 100));
  OpId op = f.take<Stage>().op;
  f.out.clear();
  f.replica->on_completion(op, Outcome::io_error, kNoBuffer, f.now_ms, f.out);
  CHECK(f.take<StateChanged>().reason == Reason::device_failed);
  f.out.clear();
  f.send(f.write(2, 101));
  CHECK(f.take<Reply>().reason == Reason::device_failed);
  CHECK(f.answer() == Outcome::offline);
}

TEST_CASE("messages of strangers, of other chains and of other versions change nothing") {
  Fixture f(3, 1);
  Update u;
  u.key = kKey;
  u.version = {f.version, 1};
  u.base_absent = u.base_committed = true;
  u.length_bytes = 4;
  u.payload = BufferRef{9};
  std::vector<PeerHeader> wrong(5, f.header(0));
  wrong[0].chain = ChainId{8};
  wrong[1].to = TargetId{11};
  wrong[2].from = TargetId{13};
  wrong[3].chain_version = ChainVersion{1, 0};
  wrong[4].chain_version = ChainVersion{1, 2};
  for (const PeerHeader& header : wrong) {
    f.out.clear();
    f.replica->on_update(header, u, PayloadState::ready, f.now_ms, f.out);
    REQUIRE(f.out.size() == 1);
    CHECK(f.take<Release>().payload == BufferRef{9});
  }
}

TEST_CASE("a read is answered at once where nothing is in its way, and only there") {
  Options options;
  options.peer_lease_ms = 1000;
  Fixture f(2, 0, options);
  ClientRead read;
  read.token = 9;
  read.chain_version = f.version;
  read.key = kKey;
  read.length_bytes = 4;
  ChunkFacts facts;
  ChainVersion judged_in;
  auto at_once = [&](const ClientRead& r) {
    const bool good = f.replica->read_at_once(r, f.now_ms, &facts, &judged_in);
    CHECK(f.out.empty());
    return good;
  };
  CHECK(!at_once(read));  // absent
  f.send(f.write(1, 1));
  const Stage stage = f.take<Stage>();
  f.out.clear();
  CHECK(!at_once(read));
  f.replica->on_completion(stage.op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
  f.out.clear();
  CHECK(!at_once(read));  // pending: the last member is to be asked
  f.from_below(Notice{.type = NoticeType::ack, .key = kKey, .version = stage.update.version});
  f.out.clear();
  REQUIRE(at_once(read));
  CHECK(facts.version == stage.update.version);
  CHECK(facts.length_bytes == 4);
  CHECK(judged_in == f.version);

  ClientRead other = read;
  other.authority = Outcome::denied;
  CHECK(!at_once(other));
  other = read, other.chain_version = {1, 2};  // newer than this member's
  CHECK(!at_once(other));
  for (bool ClientRead::*wish :
       {&ClientRead::uncommitted_ok, &ClientRead::facts_only, &ClientRead::compare_tag, &ClientRead::touch}) {
    other = read, other.*wish = true;
    CHECK(!at_once(other));
  }
  // Another update of the chunk: what is committed here may not be the newest.
  CHECK(f.replica->read_stands(judged_in, f.now_ms));
  f.send(f.write(2, 2));
  f.out.clear();
  CHECK(!at_once(read));
  // Without a lease somebody else may lead by now.
  CHECK(f.replica->read_stands(judged_in, f.now_ms));
  f.now_ms += 4'000'000;
  CHECK(!f.replica->read_stands(judged_in, f.now_ms));
  f.replica->on_lease(f.now_ms + 1000, f.now_ms, f.out);
  CHECK(f.replica->read_stands(judged_in, f.now_ms));
  // What was judged in an older version of the chain is judged again.
  CHECK(!f.replica->read_stands(ChainVersion{1, 0}, f.now_ms));
}

TEST_CASE("the steady state allocates nothing") {
  Fixture f(2);
  auto one = [&](uint64_t i) {
    ClientUpdate u = f.write(i, 100 + i);
    u.key = ChunkKey::of_file(1, i % 8);
    f.send(u);
    Stage stage = f.take<Stage>();
    f.replica->on_completion(stage.op, Outcome::ok, kNoBuffer, f.now_ms, f.out);
    f.from_below(Notice{.type = NoticeType::ack, .key = u.key, .version = stage.update.version});
    ClientRead read;
    read.token = i;
    read.chain_version = f.version;
    read.key = u.key;
    f.replica->on_client_read(read, f.now_ms, f.out);
    f.replica->on_tick(f.now_ms, f.out);
    f.out.clear();
  };
  for (uint64_t i = 1; i <= 200; i++) one(i);
  size_t before = allocations;
  for (uint64_t i = 201; i <= 1000; i++) one(i);
  CHECK(allocations == before);
}

}  // namespace ffs::craq
