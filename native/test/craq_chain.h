// Replicas wired by hand for tests of one rule each: a store that keeps facts only, a network that
// delivers in order, a disk that ends at once unless it is held. What the simulator can't say in so few
// words.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "craq/replica.h"

namespace ffs::craq::test {

// Facts of chunks, no bytes. Effects are visible and durable when they are carried out.
class FactStore final : public StoreView {
 public:
  struct Kept {
    Update update;
    ChunkFacts after;
  };
  struct Entry {
    ChunkFacts committed;
    std::map<Version, Kept> pendings;
  };

  ChunkFacts committed(const ChunkKey& key) const override {
    auto at = chunks.find(key);
    return at == chunks.end() ? ChunkFacts{} : at->second.committed;
  }
  void each_pending(PendingVisitor& visitor) const override {
    for (const auto& [key, entry] : chunks) {
      for (const auto& [version, kept] : entry.pendings) {
        PendingFacts facts;
        facts.key = key;
        facts.chunk = kept.after;
        facts.chunk.version = version;
        facts.removal = kept.update.kind == UpdateKind::remove;
        facts.identity = kept.update.identity;
        visitor.visit(facts);
      }
    }
  }
  std::optional<RetryEntry> retry(ClientId client, uint32_t channel) const override {
    auto at = retries.find({client.value, channel});
    return at == retries.end() ? std::nullopt : std::optional(at->second);
  }
  bool fenced(ClientId) const override { return false; }
  uint64_t least_epoch(uint64_t) const override { return 0; }
  ChainRecord chain_record() const override { return record; }
  Outcome admit(const ChunkKey&, UpdateKind, uint32_t, uint64_t) const override { return Outcome::ok; }
  std::optional<ChunkKey> first_committed(uint64_t, const ChunkKey*) const override { return std::nullopt; }
  std::optional<ChunkKey> last_committed(uint64_t) const override { return std::nullopt; }
  std::optional<ChunkDigest> digest_at_or_after(const ChunkKey&) const override { return std::nullopt; }
  uint64_t chunk_count() const override { return chunks.size(); }
  void each_retry(RetryVisitor&) const override {}
  void each_space_epoch(SpaceEpochVisitor&) const override {}

  void stage(const Stage& s) {
    Entry& entry = chunks[s.update.key];
    Kept kept{s.update, {}};
    if (s.update.kind != UpdateKind::remove) {
      kept.after.version = s.update.version;
      kept.after.length_bytes = s.update.length_bytes;
    }
    entry.pendings[s.update.version] = kept;
    remember(s.update.identity, s.update.key, s.update.version, RetryState::pending, Outcome::ok);
  }
  void commit(const ChunkKey& key, const Version& version) {
    Entry& entry = chunks[key];
    auto at = entry.pendings.find(version);
    entry.committed = at->second.after;
    remember(at->second.update.identity, key, version, RetryState::done, Outcome::ok);
    entry.pendings.erase(at);
  }
  void refuse(const Refuse& r) {
    chunks[r.key].pendings.erase(r.version);
    remember(r.identity, r.key, r.version, RetryState::refused, r.outcome);
  }

  std::map<ChunkKey, Entry> chunks;
  ChainRecord record;

 private:
  void remember(const UpdateIdentity& who, const ChunkKey& key, const Version& version, RetryState state,
                Outcome outcome) {
    if (who.client.value == 0) return;
    retries[{who.client.value, who.channel}] = RetryEntry{who.sequence, key, version, state, outcome};
  }
  std::map<std::pair<uint64_t, uint32_t>, RetryEntry> retries;
};

struct Node {
  FactStore store;
  std::unique_ptr<Replica> replica;
  Effects out;
  std::deque<std::pair<OpId, Outcome>> disk;  // what ends when the disk isn't held
  bool hold_disk = false;
  bool down = false;  // gets nothing, says nothing
  Outcome stages_end = Outcome::ok;
  Outcome reads_end = Outcome::ok;
  size_t reads = 0;
  size_t persists = 0;
  std::deque<Notice> seen;  // notices that came here
};

// Targets 11, 12, ... by index. `now` never moves by itself.
class Wired {
 public:
  using Message = std::variant<SendUpdate, SendNotice>;

  explicit Wired(uint32_t nodes, Mutant mutant = Mutant::none) {
    options.mutant = mutant;
    options.peer_lease_ms = 1000;
    options.suspect_ms = 4000;
    for (uint32_t i = 0; i < nodes; i++) {
      nodes_.push_back(std::make_unique<Node>());
      start(i);
    }
  }

  Node& operator[](uint32_t i) { return *nodes_[i]; }
  Replica& replica(uint32_t i) { return *nodes_[i]->replica; }
  static TargetId target(uint32_t i) { return TargetId{11 + i}; }

  // A new incarnation.
  void start(uint32_t i) {
    Node& n = *nodes_[i];
    n.disk.clear();
    n.out.clear();
    n.down = n.hold_disk = false;
    n.replica = std::make_unique<Replica>(target(i), ChainId{7}, n.store, options, now);
  }

  // Serving members in order, then syncing ones, then offline ones.
  ChainConfig config(uint32_t counter, std::initializer_list<uint32_t> serving,
                     std::initializer_list<uint32_t> syncing = {},
                     std::initializer_list<uint32_t> offline = {}) const {
    ChainConfig c;
    c.version = ChainVersion{1, counter};
    for (uint32_t i : serving) c.members[c.member_count++] = {target(i), MemberState::serving, 1};
    for (uint32_t i : syncing) c.members[c.member_count++] = {target(i), MemberState::syncing, 1};
    for (uint32_t i : offline) c.members[c.member_count++] = {target(i), MemberState::offline, 1};
    return c;
  }

  void record(uint32_t i, const ChainConfig& c) {
    event(i, [&](Replica& r, Effects& out) { r.on_recorded(c, now, out); });
  }
  void propose(uint32_t i, const ChainConfig& c) {
    event(i, [&](Replica& r, Effects& out) { r.on_proposed(c, now, out); });
  }
  void lease(uint32_t i, uint64_t until_ms) {
    event(i, [&](Replica& r, Effects& out) { r.on_lease(until_ms, now, out); });
  }
  void lease_all(uint64_t until_ms) {
    for (uint32_t i = 0; i < nodes_.size(); i++) lease(i, until_ms);
  }
  void tick(uint32_t i) {
    event(i, [&](Replica& r, Effects& out) { r.on_tick(now, out); });
  }
  // Time passes for all that aren't down, in steps that a server's ticks have.
  void pass(uint64_t ms) {
    for (const uint64_t end = now + ms; now < end;) {
      now = std::min(end, now + 50);
      for (uint32_t i = 0; i < nodes_.size(); i++) tick(i);
      settle();
    }
  }
  void record_all(const ChainConfig& c) {
    for (uint32_t i = 0; i < nodes_.size(); i++) record(i, c);
    settle();
  }
  // All serve, with the manager's lease for an hour.
  void begin(std::initializer_list<uint32_t> serving) {
    lease_all(now + 3'600'000);
    record_all(config(1, serving));
  }

  RequestToken write(uint32_t i, const ChunkKey& key, uint64_t sequence, uint32_t counter = 1) {
    ClientUpdate u;
    u.identity = {ClientId{5}, key.bytes[23] + 1u, sequence};
    u.kind = UpdateKind::replace;
    u.length_bytes = static_cast<uint32_t>(sequence);
    return send(i, key, u, counter);
  }
  RequestToken send(uint32_t i, const ChunkKey& key, ClientUpdate u, uint32_t counter = 1) {
    u.token = ++last_token_;
    u.chain_version = ChainVersion{1, counter};
    u.key = key;
    if (u.length_bytes > 0) u.payload = BufferRef{++last_buffer_};
    event(i, [&](Replica& r, Effects& out) { r.on_client_update(u, now, out); });
    return u.token;
  }
  RequestToken read(uint32_t i, const ChunkKey& key, uint32_t counter = 1) {
    ClientRead u;
    u.token = ++last_token_;
    u.chain_version = ChainVersion{1, counter};
    u.key = key;
    event(i, [&](Replica& r, Effects& out) { r.on_client_read(u, now, out); });
    return u.token;
  }
  bool answered(RequestToken token) const { return replies_.contains(token); }
  const Reply& reply(RequestToken token) const { return replies_.at(token); }
  // The length read (the sequence of the update that wrote it), or -1: unanswered, or not ok.
  int64_t value(RequestToken token) const {
    auto at = replies_.find(token);
    if (at == replies_.end() || at->second.outcome != Outcome::ok) return -1;
    return at->second.chunk.length_bytes;
  }

  // Until nothing moves any more.
  void settle() {
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t i = 0; i < nodes_.size(); i++) moved |= end_ops(i);
      while (!net.empty()) {
        Message m = net.front();
        net.pop_front();
        deliver(m);
        moved = true;
      }
    }
  }
  // Ends what is under way on one disk.
  bool end_ops(uint32_t i) {
    Node& n = *nodes_[i];
    bool any = false;
    while (!n.disk.empty() && !n.hold_disk && !n.down) {
      auto [op, outcome] = n.disk.front();
      n.disk.pop_front();
      event(i, [&, op = op, outcome = outcome](Replica& r, Effects& out) {
        r.on_completion(op, outcome, outcome == Outcome::ok ? loaded_[op] : kNoBuffer, now, out);
      });
      any = true;
    }
    return any;
  }
  void deliver(const Message& m) {
    const PeerHeader header = std::visit([](const auto& s) { return s.header; }, m);
    const uint32_t from = static_cast<uint32_t>(header.from.value - 11);
    const uint32_t to = static_cast<uint32_t>(header.to.value - 11);
    if (cut.contains({from, to}) || nodes_[from]->down || nodes_[to]->down) return;
    event(to, [&](Replica& r, Effects& out) {
      if (const auto* update = std::get_if<SendUpdate>(&m)) {
        Update u = update->update;
        u.payload = BufferRef{++last_buffer_};
        r.on_update(header, u, PayloadState::ready, now, out);
      } else {
        nodes_[to]->seen.push_back(std::get<SendNotice>(m).notice);
        r.on_notice(header, std::get<SendNotice>(m).notice, now, out);
      }
    });
  }

  Options options;
  uint64_t now = 100'000;
  std::deque<Message> net;
  std::set<std::pair<uint32_t, uint32_t>> cut;  // (from, to)

 private:
  template <typename F>
  void event(uint32_t i, F&& give) {
    Node& n = *nodes_[i];
    if (n.down) return;
    n.out.clear();
    give(*n.replica, n.out);
    for (const Effect& e : n.out) {
      std::visit([&](const auto& effect) { carry_out(n, effect); }, e);
    }
  }
  template <typename T>
  void carry_out(Node&, const T&) {}
  void carry_out(Node&, const SendUpdate& e) { net.push_back(e); }
  void carry_out(Node&, const SendNotice& e) { net.push_back(e); }
  void carry_out(Node&, const Reply& e) { replies_[e.token] = e; }
  void carry_out(Node& n, const Stage& e) {
    if (n.stages_end == Outcome::ok) n.store.stage(e);
    n.disk.push_back({e.op, n.stages_end});
  }
  void carry_out(Node& n, const Commit& e) { n.store.commit(e.key, e.version); }
  void carry_out(Node& n, const Refuse& e) {
    n.store.refuse(e);
    n.disk.push_back({e.op, Outcome::ok});
  }
  void carry_out(Node& n, const PersistChain& e) {
    n.store.record = e.record;
    n.persists++;
    n.disk.push_back({e.op, Outcome::ok});
  }
  void carry_out(Node& n, const Read& e) {
    n.reads++;
    n.disk.push_back({e.op, n.reads_end});
  }
  void carry_out(Node& n, const Load& e) {
    loaded_[e.op] = BufferRef{++last_buffer_};
    n.disk.push_back({e.op, Outcome::ok});
  }

  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<RequestToken, Reply> replies_;
  std::map<OpId, BufferRef> loaded_;
  RequestToken last_token_ = 0;
  uint64_t last_buffer_ = 0;
};

}  // namespace ffs::craq::test
