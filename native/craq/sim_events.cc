// Events from bytes to the replica (sim.h lists them).
#include "craq/sim_target.h"

namespace ffs::craq::sim {

namespace {

Attributes tagged(uint64_t tag) {
  Attributes a;
  if (tag != 0) {
    std::memcpy(a.tag.data(), &tag, 8);
    a.tag_bytes = 8;
  }
  return a;
}

uint64_t tag_of(const Attributes& a) {
  uint64_t tag = 0;
  std::memcpy(&tag, a.tag.data(), 8);
  return tag;
}

UpdateIdentity read_identity(Reader& in) {
  UpdateIdentity who;
  who.client = ClientId{in.u64()};
  who.channel = in.u32();
  who.sequence = in.u64();
  return who;
}

ChainVersion read_chain(Reader& in) {
  return in.value<ChainVersion>();
}
Outcome read_outcome(Reader& in) {
  return static_cast<Outcome>(in.u16());
}

// What arrived, or was read, with other bytes than were sent, or written.
Bytes damaged_bytes(std::span<const uint8_t> bytes) {
  Bytes out(bytes.begin(), bytes.end());
  for (uint8_t& byte : out) byte ^= 0xaa;
  return out;
}

}  // namespace

Target::Target(const ffs_sim_options& o) : self_(o.target), chain_(o.chain) {
  options_.max_pendings = o.max_pendings;
  options_.max_pendings_per_chunk = o.max_pendings_per_chunk;
  options_.resend_ms = o.resend_ms;
  options_.peer_lease_ms = o.peer_lease_ms;
  options_.suspect_ms = o.suspect_ms;
  options_.sync_window = o.sync_window;
  options_.mutant = static_cast<Mutant>(o.mutant);
  now_ms_ = o.now_ms;
  restart();
}

bool Target::step(Reader in) {
  out_.clear();
  auto type = static_cast<EventType>(in.u8());
  now_ms_ = in.u64();
  return in.ok() && dispatch(type, in);
}

void Target::restart() {
  replica_ = std::make_unique<Replica>(self_, chain_, store_, options_, now_ms_);
  buffers_.clear();
  started_.clear();
  at_once_.clear();
  content_.clear();
}

template <typename F>
bool Target::run(F&& event) {
  effects_.clear();
  event();
  for (size_t i = 0; i < effects_.size(); i++) {
    std::visit([&](const auto& e) { execute(e); }, effects_[i]);
  }
  return true;
}

bool Target::dispatch(EventType type, Reader& in) {
  switch (type) {
    case EventType::tick:
      return in.done() && run([&] { replica_->on_tick(now_ms_, effects_); });
    case EventType::recorded:
    case EventType::proposed:
      return configure(in, type == EventType::proposed);
    case EventType::update:
      return client_update(in);
    case EventType::read:
      return client_read(in);
    case EventType::set_epoch:
    case EventType::remove_page:
    case EventType::last_chunk:
      return client_space(in, type);
    case EventType::message:
      return message(in);
    case EventType::disk:
      return disk(in);
    case EventType::done:
      return done(in);
    case EventType::connected: {
      TargetId target{in.u64()};
      return in.done() && run([&] { replica_->on_peer_connected(target, now_ms_, effects_); });
    }
    case EventType::crash: {
      uint32_t keep = in.u32();
      if (!in.done()) return false;
      store_.crash(keep);
      restart();
      return true;
    }
    case EventType::start: {
      bool wipe = in.u8() != 0;
      if (!in.done()) return false;
      if (wipe) store_.wipe();
      restart();
      return true;
    }
    case EventType::space:
      store_.admit_outcome = read_outcome(in);
      stage_outcome_ = read_outcome(in);
      store_.evicts = in.u8() != 0;
      return in.done();
    case EventType::dump:
      return in.done() && dump();
    case EventType::status:
      return in.done() && put_status();
    case EventType::fence:
      return fence(in);
    case EventType::lease: {
      uint64_t until_ms = in.u64();
      return in.done() && run([&] { replica_->on_lease(until_ms, now_ms_, effects_); });
    }
    case EventType::damage:
      return damage(in);
    case EventType::damaged:
      return damaged(in);
    case EventType::compare:
      return compare(in);
    case EventType::evict:
      return evict(in);
    case EventType::clock:
      store_.manager_time_ms = in.u64();
      return in.done();
    case EventType::touch: {
      const ChunkKey key = in.key();
      if (!in.done()) return false;
      store_.touch(key);
      return true;
    }
    case EventType::sample:
      return sample(in);
  }
  return false;
}

bool Target::configure(Reader& in, bool proposed) {
  ChainConfig config;
  config.version = read_chain(in);
  config.member_count = in.u8();
  if (config.member_count > kMaxReplicas) return false;
  for (uint32_t i = 0; i < config.member_count; i++) {
    config.members[i].target = TargetId{in.u64()};
    config.members[i].state = static_cast<MemberState>(in.u8());
    config.members[i].incarnation = in.u64();
  }
  if (!in.done()) return false;
  return run([&] {
    if (proposed) {
      replica_->on_proposed(config, now_ms_, effects_);
    } else {
      replica_->on_recorded(config, now_ms_, effects_);
    }
  });
}

bool Target::client_update(Reader& in) {
  ClientUpdate u;
  u.token = in.u64();
  u.chain_version = read_chain(in);
  u.authority = read_outcome(in);
  u.identity = read_identity(in);
  u.key = in.key();
  u.kind = static_cast<UpdateKind>(in.u8());
  u.offset_bytes = in.u32();
  u.length_bytes = in.u32();
  u.attributes = tagged(in.u64());
  u.attributes.flags = in.u8();
  u.attributes.expiry_ms = in.u64();
  u.expected = in.version();
  u.space_epoch = in.u64();
  u.deadline_ms = in.u64();
  u.need_existing = in.u8() != 0;
  u.payload_state = static_cast<PayloadState>(in.u8());
  u.payload = new_buffer(in.bytes(in.u32()));
  return in.done() && run([&] { replica_->on_client_update(u, now_ms_, effects_); });
}

bool Target::client_read(Reader& in) {
  ClientRead r;
  r.token = in.u64();
  r.chain_version = read_chain(in);
  r.authority = read_outcome(in);
  r.key = in.key();
  r.offset_bytes = in.u32();
  r.length_bytes = in.u32();
  r.space_epoch = in.u64();
  uint8_t flags = in.u8();
  r.uncommitted_ok = (flags & 1) != 0;
  r.facts_only = (flags & 2) != 0;
  r.compare_tag = (flags & 4) != 0;
  r.touch = (flags & 8) != 0;
  r.tag = tagged(in.u64());
  r.deadline_ms = in.u64();
  if (!in.done()) return false;
  // As a server does with many small reads (server/read_many.cc): the short way, where there is one.
  AtOnce short_way{r, {}, {}};
  if (r.token % 2 == 0 && replica_->read_at_once(r, now_ms_, &short_way.facts, &short_way.judged_in)) {
    const OpId op = kFirstAtOnce + ++last_at_once_;
    at_once_.emplace(op, short_way);
    return run([&] {
      effects_.push_back(Read{op, r.token, r.key, short_way.facts.version, r.offset_bytes, r.length_bytes});
    });
  }
  return run([&] { replica_->on_client_read(r, now_ms_, effects_); });
}

// The disk has ended a read of the short way: its answer, or the long way from the beginning.
bool Target::end_at_once(const AtOnce& read, Outcome outcome, Bytes content) {
  if (outcome != Outcome::ok || !replica_->read_stands(read.judged_in, now_ms_)) {
    return run([&] { replica_->on_client_read(read.request, now_ms_, effects_); });
  }
  content_[read.request.token] = std::move(content);
  Reply reply;
  reply.token = read.request.token;
  reply.chunk = read.facts;
  reply.chain_version = read.judged_in;
  return run([&] { effects_.push_back(reply); });
}

bool Target::client_space(Reader& in, EventType type) {
  const RequestToken token = in.u64();
  const ChainVersion chain = read_chain(in);
  const Outcome authority = read_outcome(in);
  const uint64_t space = in.u64();
  if (type == EventType::set_epoch) {
    ClientSetSpaceEpoch s{token, chain, authority, space, in.u64(), in.u64()};
    return in.done() && run([&] { replica_->on_client_set_space_epoch(s, now_ms_, effects_); });
  }
  if (type == EventType::last_chunk) {
    ClientLastChunk l{token, chain, authority, space, in.u64()};
    return in.done() && run([&] { replica_->on_client_last_chunk(l, now_ms_, effects_); });
  }
  ClientRemovePage p{token, chain, authority, space};
  p.has_after = in.u8() != 0;
  p.after = in.key();
  p.limit = in.u32();
  p.space_epoch = in.u64();
  p.deadline_ms = in.u64();
  return in.done() && run([&] { replica_->on_client_remove_page(p, now_ms_, effects_); });
}

// Messages are opaque bytes between two simulators of one process: a mark, the structs as they
// lie in memory (of recovery: its own bytes), and the payload.
bool Target::message(Reader& in) {
  const auto payload_state = static_cast<PayloadState>(in.u8());
  const auto arrived = [&](std::span<const uint8_t> bytes) {
    return payload_state == PayloadState::bad ? new_buffer(damaged_bytes(bytes)) : new_buffer(bytes);
  };
  Reader m(in.bytes(in.u32()));
  if (!in.done()) return false;
  const uint8_t mark = m.u8();
  const PeerHeader header = m.value<PeerHeader>();
  if (mark == 'N') {
    const Notice n = m.value<Notice>();
    return m.done() && run([&] { replica_->on_notice(header, n, now_ms_, effects_); });
  }
  if (mark == 'S') {
    const std::span<const uint8_t> bytes = m.bytes(m.u32());
    const bool has_payload = m.u8() != 0;
    if (!m.ok()) return false;
    const BufferRef ref = has_payload ? arrived(m.bytes(m.left())) : kNoBuffer;
    return run([&] { replica_->on_sync(header, bytes, ref, payload_state, now_ms_, effects_); });
  }
  Update u = m.value<Update>();
  u.payload = arrived(m.bytes(m.left()));
  return mark == 'U' && m.ok() &&
         run([&] { replica_->on_update(header, u, payload_state, now_ms_, effects_); });
}

bool Target::disk(Reader& in) {
  uint32_t count = in.u32();
  if (!in.done()) return false;
  Record r;
  for (; count > 0 && store_.make_durable(&r); count--) {
    if (r.outcome != Outcome::ok) Answer(out_, AnswerType::failed).put(static_cast<uint16_t>(r.outcome));
    if (r.op == 0) continue;
    run([&] { replica_->on_completion(r.op, r.outcome, kNoBuffer, now_ms_, effects_); });
  }
  return true;
}

bool Target::done(Reader& in) {
  const OpId op = in.u64();
  Outcome outcome = read_outcome(in);
  auto at = started_.find(op);
  if (!in.done() || at == started_.end()) return false;
  Started s = std::move(at->second);
  started_.erase(at);
  if (outcome == Outcome::ok) outcome = s.outcome;
  if (auto found = at_once_.find(op); found != at_once_.end()) {
    const AtOnce read = found->second;
    at_once_.erase(found);
    return end_at_once(read, outcome, std::move(s.content));
  }
  BufferRef loaded;
  if (s.kind == 2 && outcome == Outcome::ok) content_[s.token] = std::move(s.content);
  if (s.kind >= 3 && outcome == Outcome::ok) loaded = new_buffer(s.content);
  if (s.kind == 4 && outcome == Outcome::corrupt) loaded = new_buffer(damaged_bytes(s.content));
  return run([&] { replica_->on_completion(op, outcome, loaded, now_ms_, effects_); });
}

bool Target::fence(Reader& in) {
  Record r;
  r.kind = RecordKind::fence;
  r.space = in.u64();
  if (!in.done()) return false;
  append(std::move(r));
  return true;
}

bool Target::damage(Reader& in) {
  const ChunkKey key = in.key();
  const bool silent = in.u8() != 0;
  if (!in.done()) return false;
  store_.damage(key, silent);
  return true;
}

bool Target::damaged(Reader& in) {
  const ChunkKey key = in.key();
  const Version version = in.version();
  return in.done() && run([&] { replica_->on_damaged(key, version, now_ms_, effects_); });
}

bool Target::compare(Reader& in) {
  const ChunkKey from = in.key();
  if (!in.done()) return false;
  std::optional<ChunkKey> next;
  run([&] { next = replica_->on_compare(from, now_ms_, effects_); });
  Answer a(out_, AnswerType::compared);
  a.put_flag(next.has_value());
  a.put(next.value_or(ChunkKey{}));
  return true;
}

bool Target::evict(Reader& in) {
  EvictionOrder order;
  order.key = in.key();
  order.version = in.version();
  order.last_access = in.u64();
  order.expired = in.u8() != 0;
  if (!in.done()) return false;
  EvictionAnswer answer{};
  run([&] { answer = replica_->on_evict(order, now_ms_, effects_); });
  Answer(out_, AnswerType::eviction).put(static_cast<uint8_t>(answer));
  return true;
}

bool Target::sample(Reader& in) {
  const ChunkKey key = in.key();
  if (!in.done()) return false;
  const ChunkFacts facts = store_.committed(key);
  Answer a(out_, AnswerType::sampled);
  a.put(facts.version);
  a.put(store_.last_access(key));
  a.put_flag(facts.attributes.pinned());
  a.put_flag(!facts.version.none() && facts.attributes.expired(store_.manager_time_ms));
  return true;
}

bool Target::put_status() {
  const ReplicaStatus s = replica_->status();
  Answer a(out_, AnswerType::status);
  a.put_flag(s.serving);
  a.put(static_cast<uint8_t>(s.reason));
  a.put(s.chain_version);
  a.put(s.persisted.proposed);
  a.put(s.persisted.adopted);
  a.put_flag(s.persisted_here);
  a.put(static_cast<uint8_t>(s.state));
  a.put_flag(s.leased);
  a.put(s.suspect.value);
  a.put(s.sync_target.value);
  a.put_flag(s.sync_done);
  a.put(static_cast<uint16_t>(s.sync_failure));
  a.put(static_cast<uint32_t>(s.damaged));
  a.put(static_cast<uint32_t>(s.repaired));
  a.put(s.pendings);
  a.put(s.waiting);
  a.put(static_cast<uint32_t>(buffers_.size()));
  a.put(static_cast<uint32_t>(store_.undurable()));
  return true;
}

bool Target::dump() {
  put_status();
  Answer a(out_, AnswerType::dumped);
  const ModelState& state = store_.state();
  a.put(static_cast<uint32_t>(state.chunks.size()));
  for (const auto& [key, c] : state.chunks) {
    a.put(key);
    a.put_flag(!c.committed.facts.version.none());
    a.put(c.committed.facts.version);
    a.put(tag_of(c.committed.facts.attributes));
    a.put_flag(c.committed.damaged);
    a.put_bytes(c.committed.content);
    a.put(static_cast<uint32_t>(c.pendings.size()));
    for (const ModelVersion& p : c.pendings) {
      a.put(p.version);
      a.put_flag(p.removal);
      a.put_identity(p.identity);
      a.put_bytes(p.content);
    }
  }
  a.put(static_cast<uint32_t>(state.retry.size()));
  for (const auto& [who, entry] : state.retry) {
    a.put_identity(UpdateIdentity{ClientId{who.first}, who.second, entry.sequence});
    a.put(entry.key);
    a.put(entry.version);
    a.put(static_cast<uint8_t>(entry.state));
    a.put(static_cast<uint16_t>(entry.outcome));
  }
  a.put(static_cast<uint32_t>(state.epochs.size()));
  for (const auto& [space, epoch] : state.epochs) {
    a.put(space);
    a.put(epoch);
  }
  return true;
}

}  // namespace ffs::craq::sim
