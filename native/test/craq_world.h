// Machines of a chain joined in memory over model stores, with a seed: messages are lost, repeated and
// reordered, disks and copies end in any order that the contract allows. For tests of recovery and repair.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>
#include <string>

#include "craq/sim_store.h"

namespace ffs::craq::testing {

using sim::Bytes;
using sim::ModelStore;
using sim::ModelVersion;
using sim::Record;
using sim::RecordKind;

struct Message {
  PeerHeader header;
  std::variant<Update, Notice, Bytes> body;
  Bytes payload;
  bool has_payload = false;
};

struct Started {  // a fetch, read, load or copy under way
  OpId op = 0;
  Outcome outcome = Outcome::ok;
  bool brings = false;  // a buffer
  Bytes content;
};

struct World;

struct Node {
  World* world = nullptr;
  TargetId target;
  uint64_t incarnation = 1;
  ModelStore store;
  Options options;
  std::unique_ptr<Replica> replica;
  std::map<uint64_t, Bytes> buffers;
  uint64_t last_buffer = 0;
  std::vector<Started> started;
  std::vector<Reply> replies;
  std::vector<Repaired> repairs;
  std::set<std::pair<ChunkKey, Version>> rotten;  // pending versions that can't be read any more
  uint32_t copies = 0, installs = 0, erases = 0;
  Outcome install_outcome = Outcome::ok;

  BufferRef buffer(const Bytes& bytes) {
    buffers[++last_buffer] = bytes;
    return BufferRef{last_buffer};
  }
  const Bytes& bytes(BufferRef ref) {
    static const Bytes none;
    if (ref == kNoBuffer) return none;
    REQUIRE(buffers.count(ref.value) == 1);
    return buffers[ref.value];
  }
  void append(Record r) {
    const std::string wrong = store.append(std::move(r));
    INFO(wrong);
    REQUIRE(wrong.empty());
  }
  void start(OpId op, const ChunkKey& key, const Version& version, bool brings, uint32_t from,
             uint32_t length);
  void carry_out(Effects& out);
  template <typename Event>
  void run(const Event& event) {
    Effects out;
    event(out);
    carry_out(out);
  }
  bool disk_step();
  bool started_step(std::mt19937_64& random);
};

struct World {
  explicit World(uint64_t seed_, size_t count, Mutant mutant = Mutant::none) : seed(seed_), random(seed_) {
    nodes.resize(count);
    for (size_t i = 0; i < count; i++) {
      Node& n = nodes[i];
      n.world = this;
      n.target = TargetId{11 + i};
      n.options.resend_ms = 50;
      n.options.peer_lease_ms = 0;
      n.options.suspect_ms = 1000;
      n.options.sync_window = 4;
      n.options.mutant = mutant;
      n.replica = std::make_unique<Replica>(n.target, ChainId{7}, n.store, n.options, now_ms);
    }
  }

  uint64_t seed;
  std::mt19937_64 random;
  std::vector<Node> nodes;
  std::vector<Message> network;
  std::vector<Message> late;  // repetitions that come when nobody thinks of them any more
  uint64_t now_ms = 1000;
  uint32_t loss_percent = 0, repeat_percent = 0;
  ChainConfig config;
  uint64_t sequence = 0;
  RequestToken token = 0;

  uint64_t below(uint64_t bound) { return random() % bound; }
  bool chance(uint32_t percent) { return below(100) < percent; }

  // A recorded version: a letter a node, s serving, y syncing, - offline.
  void record(const std::string& states) {
    config.version = ChainVersion{1, config.version.counter + 1};
    config.member_count = 0;
    for (const char want : {'s', 'y', '-'}) {
      for (size_t i = 0; i < states.size(); i++) {
        if (states[i] != want) continue;
        const MemberState state = want == 's'   ? MemberState::serving
                                  : want == 'y' ? MemberState::syncing
                                                : MemberState::offline;
        config.members[config.member_count++] = Member{nodes[i].target, state, nodes[i].incarnation};
      }
    }
    for (Node& n : nodes) n.run([&](Effects& out) { n.replica->on_recorded(config, now_ms, out); });
  }

  // A new process over the same store.
  void restart(size_t i) {
    Node& n = nodes[i];
    n.store.crash(n.store.undurable());
    n.buffers.clear();
    n.started.clear();
    n.replies.clear();
    n.incarnation++;
    n.replica = std::make_unique<Replica>(n.target, ChainId{7}, n.store, n.options, now_ms);
  }

  void send(Message m) {
    // Leases are off here; asking for them would only fill the network.
    const Notice* n = std::get_if<Notice>(&m.body);
    if (n != nullptr && (n->type == NoticeType::lease_ask || n->type == NoticeType::lease_grant)) return;
    if (chance(loss_percent)) return;
    if (chance(repeat_percent)) (chance(50) ? network : late).push_back(m);
    network.push_back(std::move(m));
  }

  void deliver() {
    const size_t at = below(network.size());
    const Message m = network[at];
    network[at] = network.back();
    network.pop_back();
    Node& n = nodes[m.header.to.value - 11];
    BufferRef payload = m.has_payload ? n.buffer(m.payload) : kNoBuffer;
    n.run([&](Effects& out) {
      if (const Notice* notice = std::get_if<Notice>(&m.body); notice != nullptr) {
        n.replica->on_notice(m.header, *notice, now_ms, out);
      } else if (const Bytes* sync = std::get_if<Bytes>(&m.body); sync != nullptr) {
        n.replica->on_sync(m.header, *sync, payload, PayloadState::ready, now_ms, out);
      } else {
        Update u = std::get<Update>(m.body);
        u.payload = payload;
        n.replica->on_update(m.header, u, PayloadState::ready, now_ms, out);
      }
    });
  }

  void tick(uint64_t ms = 10) {
    now_ms += ms;
    for (Node& n : nodes) n.run([&](Effects& out) { n.replica->on_tick(now_ms, out); });
  }

  // One thing that can happen.
  void step() {
    const uint64_t what = below(16);
    if (!late.empty() && below(200) == 0) {
      const size_t at = below(late.size());
      network.push_back(late[at]);
      late[at] = late.back();
      late.pop_back();
    }
    Node& n = nodes[below(nodes.size())];
    if (what < 8 && !network.empty()) return deliver();
    if (what < 12 && n.disk_step()) return;
    if (what < 15 && n.started_step(random)) return;
    if (what == 15 || network.empty()) tick();
  }

  template <typename Done>
  bool until(const Done& done, uint32_t steps = 60000) {
    for (uint32_t i = 0; i < steps; i++) {
      if (done()) return true;
      step();
    }
    return done();
  }
  bool serving(const std::string& names) {
    for (const char c : names) {
      const ReplicaStatus s = nodes[static_cast<size_t>(c - 'a')].replica->status();
      if (!s.serving || s.chain_version != config.version) return false;
    }
    return true;
  }
  bool quiet() {
    for (Node& n : nodes) {
      if (n.replica->status().pendings != 0 || n.store.undurable() != 0 || !n.started.empty()) return false;
    }
    return true;
  }

  // ---- clients, at node `at`
  void update(size_t at, UpdateKind kind, uint64_t key, uint32_t offset = 0, uint32_t length = 8,
              bool anonymous = false) {
    Node& n = nodes[at];
    ClientUpdate u;
    u.token = ++token;
    u.chain_version = config.version;
    sequence++;
    if (!anonymous) u.identity = {ClientId{5 + sequence % 3}, static_cast<uint32_t>(sequence % 50), sequence};
    u.key = ChunkKey::of_file(1 + key % 3, key);
    u.kind = kind;
    u.space_epoch = UINT64_MAX;
    u.offset_bytes = offset;
    u.length_bytes = kind == UpdateKind::remove ? 0 : length;
    if (kind == UpdateKind::write || kind == UpdateKind::replace || kind == UpdateKind::create) {
      Bytes content(length);
      for (uint8_t& b : content) b = static_cast<uint8_t>(random());
      u.payload = n.buffer(content);
    }
    n.run([&](Effects& out) { n.replica->on_client_update(u, now_ms, out); });
  }
  void random_update(size_t at, uint64_t keys) {
    const uint64_t key = below(keys);
    const uint32_t small = static_cast<uint32_t>(below(30)), length = static_cast<uint32_t>(below(40));
    switch (below(8)) {
      case 0:
        return update(at, UpdateKind::remove, key);
      case 1:
        return update(at, UpdateKind::remove, key, 0, 0, /*anonymous=*/true);
      case 2:
        return update(at, UpdateKind::truncate, key, 0, length);
      case 3:
        return update(at, UpdateKind::replace, key, 0, length);
      case 4:
        return update(at, UpdateKind::create, key, 0, length, /*anonymous=*/true);
      default:
        return update(at, UpdateKind::write, key, small, 1 + length);
    }
  }
  void set_epoch(size_t at, uint64_t space, uint64_t epoch) {
    Node& n = nodes[at];
    const ClientSetSpaceEpoch set{
        .token = ++token, .chain_version = config.version, .space = space, .epoch = epoch};
    n.run([&](Effects& out) { n.replica->on_client_set_space_epoch(set, now_ms, out); });
  }
};

inline void Node::start(OpId op, const ChunkKey& key, const Version& version, bool brings, uint32_t from,
                        uint32_t length) {
  Started s{.op = op, .brings = brings};
  const ModelVersion* v = store.find(key, version);
  if (v == nullptr || v->removal) {
    s.outcome = Outcome::absent;
  } else {
    if (v->damaged || rotten.count({key, version}) != 0) s.outcome = Outcome::corrupt;
    const size_t end = std::min<size_t>(v->content.size(), size_t{from} + length);
    if (from < end)
      s.content.assign(v->content.begin() + from, v->content.begin() + static_cast<ptrdiff_t>(end));
  }
  started.push_back(std::move(s));
}

inline bool Node::disk_step() {
  Record r;
  if (!store.make_durable(&r)) return false;
  if (r.op == 0) return true;
  run([&](Effects& out) { replica->on_completion(r.op, r.outcome, kNoBuffer, world->now_ms, out); });
  return true;
}

inline bool Node::started_step(std::mt19937_64& random) {
  if (started.empty()) return false;
  const size_t at = random() % started.size();
  const Started s = started[at];
  started.erase(started.begin() + static_cast<ptrdiff_t>(at));
  const BufferRef b = s.brings && s.outcome != Outcome::absent ? buffer(s.content) : kNoBuffer;
  run([&](Effects& out) { replica->on_completion(s.op, s.outcome, b, world->now_ms, out); });
  return true;
}

inline void Node::carry_out(Effects& out) {
  const auto keyed = [](RecordKind kind, OpId op, const ChunkKey& key, const Version& version) {
    Record r;
    r.kind = kind;
    r.op = op;
    r.update.key = key;
    r.update.version = version;
    return r;
  };
  for (Effect& effect : out) {
    if (auto* e = std::get_if<SendUpdate>(&effect)) {
      world->send({e->header, e->update, bytes(e->update.payload), e->update.payload != kNoBuffer});
    }
    if (auto* e = std::get_if<SendNotice>(&effect)) {
      world->send({e->header, e->notice, {}, false});
    }
    if (auto* e = std::get_if<SendSync>(&effect)) {
      world->send({e->header, Bytes(e->bytes), bytes(e->payload), e->payload != kNoBuffer});
    }
    if (auto* e = std::get_if<Reply>(&effect)) {
      replies.push_back(*e);
    }
    if (auto* e = std::get_if<Repaired>(&effect)) {
      repairs.push_back(*e);
    }
    if (auto* e = std::get_if<Release>(&effect)) {
      REQUIRE(buffers.erase(e->payload.value) == 1);
    }
    if (auto* e = std::get_if<Fetch>(&effect)) {
      started.push_back({.op = e->op});
    }
    if (auto* e = std::get_if<Read>(&effect)) {
      start(e->op, e->key, e->version, false, e->offset_bytes, e->length_bytes);
    }
    if (auto* e = std::get_if<Load>(&effect)) {
      start(e->op, e->key, e->version, true, 0, e->length_bytes);
    }
    if (auto* e = std::get_if<Copy>(&effect)) {
      copies++;
      start(e->op, e->key, e->version, true, 0, e->length_bytes);
    }
    if (auto* e = std::get_if<Stage>(&effect)) {
      Record r = keyed(RecordKind::stage, e->op, {}, {});
      r.update = e->update;
      const std::string wrong =
          store.content_after(e->update, bytes(e->update.payload), e->keep_attributes, &r);
      INFO(wrong, " kind ", int(e->update.kind), " length ", e->update.length_bytes, " offset ",
           e->update.offset_bytes, " payload ", e->update.payload.value);
      REQUIRE(wrong.empty());
      append(r);
    }
    if (auto* e = std::get_if<Commit>(&effect)) {
      append(keyed(RecordKind::commit, 0, e->key, e->version));
    }
    if (auto* e = std::get_if<Refuse>(&effect)) {
      Record r = keyed(RecordKind::refuse, e->op, e->key, e->version);
      r.update.identity = e->identity;
      r.refusal = e->outcome;
      append(r);
    }
    if (auto* e = std::get_if<Install>(&effect)) {
      installs++;
      Record r = keyed(RecordKind::install, e->op, e->key, e->chunk.version);
      r.update.base = e->only_over;
      r.after = e->chunk;
      r.content = bytes(e->payload);
      REQUIRE(r.content.size() == e->chunk.length_bytes);
      r.outcome = install_outcome;
      if (!e->only_over.none() && store.committed(e->key).version != e->only_over) {
        r.outcome = Outcome::condition_failed;
      }
      append(r);
    }
    if (auto* e = std::get_if<Erase>(&effect)) {
      erases++;
      append(keyed(RecordKind::erase, e->op, e->key, {}));
    }
    if (auto* e = std::get_if<ResetTarget>(&effect)) {
      append(keyed(RecordKind::reset, e->op, {}, {}));
    }
    if (auto* e = std::get_if<SetRetry>(&effect)) {
      Record r = keyed(RecordKind::set_retry, e->op, e->entry.key, e->entry.version);
      r.update.identity = UpdateIdentity{e->client, e->channel, e->entry.sequence};
      r.retry = e->entry;
      append(r);
    }
    if (auto* e = std::get_if<SetSpaceEpoch>(&effect)) {
      Record r = keyed(RecordKind::epoch, e->op, {}, {});
      r.space = e->space;
      r.epoch = e->epoch;
      append(r);
    }
    if (auto* e = std::get_if<PersistChain>(&effect)) {
      Record r = keyed(RecordKind::chain, e->op, {}, {});
      r.chain = e->record;
      append(r);
    }
  }
}

}  // namespace ffs::craq::testing
