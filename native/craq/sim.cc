// Events from bytes to the replica, its effects on the model store and back to bytes (sim.h).
#include "craq/sim.h"

#include <cstring>
#include <unordered_map>

#include "base/check.h"
#include "base/cursor.h"
#include "craq/sim_store.h"

namespace ffs::craq::sim {

namespace {

enum class EventType : uint8_t {
  tick = 1,
  recorded,
  proposed,
  update,
  read,
  set_epoch,
  remove_page,
  last_chunk,
  message,
  disk,
  done,
  connected,
  crash,
  space,
  dump,
  fence,
};

enum class AnswerType : uint8_t { send = 1, reply, record, started, state, proposal, fault, dumped, failed };

// Answer records, appended to one growing buffer.
class Answer {
 public:
  explicit Answer(Bytes& out) : out_(out) {}
  void begin(AnswerType type) {
    put(static_cast<uint8_t>(type));
    start_ = out_.size();
    put(uint32_t{0});
  }
  void end() {
    uint32_t size = static_cast<uint32_t>(out_.size() - start_ - 4);
    std::memcpy(out_.data() + start_, &size, 4);
  }
  template <typename T>
  void put(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* from = reinterpret_cast<const uint8_t*>(&v);
    out_.insert(out_.end(), from, from + sizeof(T));
  }
  void put_bytes(const void* from, size_t size) {
    put(static_cast<uint32_t>(size));
    const auto* at = static_cast<const uint8_t*>(from);
    out_.insert(out_.end(), at, at + size);
  }
  void put_bytes(const Bytes& b) { put_bytes(b.data(), b.size()); }
  void put_identity(const UpdateIdentity& who) {
    put(who.client.value);
    put(who.channel);
    put(who.sequence);
  }
  size_t mark() const { return out_.size(); }
  void patch(size_t at, uint32_t v) { std::memcpy(out_.data() + at, &v, 4); }

 private:
  Bytes& out_;
  size_t start_ = 0;
};

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

}  // namespace

class Sim {
 public:
  explicit Sim(const ffs_sim_options& o) : target_(o.target), chain_(o.chain) {
    options_.max_pendings = o.max_pendings;
    options_.max_pendings_per_chunk = o.max_pendings_per_chunk;
    options_.resend_ms = o.resend_ms;
    options_.mutant = static_cast<Mutant>(o.mutant);
    restart();
  }

  bool step(Reader in) {
    out_.clear();
    auto type = static_cast<EventType>(in.u8());
    now_ms_ = in.u64();
    return in.ok() && dispatch(type, in);
  }

  const Bytes& answer() const { return out_; }

 private:
  // A read or fetch or load that is under way.
  struct Started {
    uint8_t kind = 0;
    RequestToken token = 0;
    BufferRef buffer;
    Bytes content;
  };

  void restart() {
    replica_ = std::make_unique<Replica>(TargetId{target_}, ChainId{chain_}, store_, options_);
    buffers_.clear();
    started_.clear();
    content_.clear();
    state_ = {};
  }

  bool dispatch(EventType type, Reader& in) {
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
      case EventType::space:
        store_.admit_outcome = read_outcome(in);
        stage_outcome_ = read_outcome(in);
        return in.done();
      case EventType::dump:
        return in.done() && dump();
      case EventType::fence: {
        Record r;
        r.kind = RecordKind::fence;
        r.space = in.u64();
        return in.done() && append(std::move(r));
      }
    }
    return false;
  }

  bool configure(Reader& in, bool proposed) {
    ChainConfig config;
    config.version = read_chain(in);
    config.member_count = in.u8();
    if (config.member_count > kMaxReplicas) return false;
    for (uint32_t i = 0; i < config.member_count; i++) {
      config.members[i].target = TargetId{in.u64()};
      config.members[i].state = static_cast<MemberState>(in.u8());
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

  bool client_update(Reader& in) {
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
    u.expected = in.version();
    u.space_epoch = in.u64();
    u.deadline_ms = in.u64();
    u.need_existing = in.u8() != 0;
    u.payload_state = static_cast<PayloadState>(in.u8());
    u.payload = new_buffer(in.bytes(in.u32()));
    return in.done() && run([&] { replica_->on_client_update(u, now_ms_, effects_); });
  }

  bool client_read(Reader& in) {
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
    r.tag = tagged(in.u64());
    r.deadline_ms = in.u64();
    return in.done() && run([&] { replica_->on_client_read(r, now_ms_, effects_); });
  }

  bool client_space(Reader& in, EventType type) {
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
  // lie in memory, and the payload.
  bool message(Reader& in) {
    auto payload_state = static_cast<PayloadState>(in.u8());
    Reader m(in.bytes(in.u32()));
    if (!in.done()) return false;
    const uint8_t mark = m.u8();
    const PeerHeader header = m.value<PeerHeader>();
    if (mark == 'N') {
      const Notice n = m.value<Notice>();
      return m.done() && run([&] { replica_->on_notice(header, n, now_ms_, effects_); });
    }
    Update u = m.value<Update>();
    u.payload = new_buffer(m.bytes(m.left()));
    return mark == 'U' && m.ok() &&
           run([&] { replica_->on_update(header, u, payload_state, now_ms_, effects_); });
  }

  bool disk(Reader& in) {
    uint32_t count = in.u32();
    if (!in.done()) return false;
    Record r;
    for (; count > 0 && store_.make_durable(&r); count--) {
      if (r.outcome != Outcome::ok) put_failed(r.outcome);
      if (r.op == 0) continue;
      run([&] { replica_->on_completion(r.op, r.outcome, kNoBuffer, now_ms_, effects_); });
    }
    return true;
  }

  bool done(Reader& in) {
    const OpId op = in.u64();
    const Outcome outcome = read_outcome(in);
    auto at = started_.find(op);
    if (!in.done() || at == started_.end()) return false;
    Started s = std::move(at->second);
    started_.erase(at);
    BufferRef loaded;
    if (s.kind == 2) content_[s.token] = std::move(s.content);
    if (s.kind == 3 && outcome == Outcome::ok) loaded = new_buffer(s.content);
    return run([&] { replica_->on_completion(op, outcome, loaded, now_ms_, effects_); });
  }

  template <typename F>
  bool run(F&& event) {
    effects_.clear();
    event();
    for (size_t i = 0; i < effects_.size(); i++) {
      std::visit([&](const auto& e) { execute(e); }, effects_[i]);
    }
    return true;
  }

  BufferRef new_buffer(std::span<const uint8_t> bytes) {
    BufferRef ref{++last_buffer_};
    buffers_[ref.value] = Bytes(bytes.begin(), bytes.end());
    return ref;
  }

  const Bytes& payload(BufferRef ref) {
    static const Bytes none;
    if (ref == kNoBuffer) return none;
    auto at = buffers_.find(ref.value);
    if (at == buffers_.end()) {
      fault("a buffer is used after its release");
      return none;
    }
    return at->second;
  }

  void fault(const std::string& text) {
    Answer a(out_);
    a.begin(AnswerType::fault);
    a.put_bytes(text.data(), text.size());
    a.end();
  }

  void put_failed(Outcome outcome) {
    Answer a(out_);
    a.begin(AnswerType::failed);
    a.put(static_cast<uint16_t>(outcome));
    a.end();
  }

  void put_record(const Record& r, bool exists) {
    Answer a(out_);
    a.begin(AnswerType::record);
    a.put(static_cast<uint8_t>(r.kind));
    a.put(r.update.key);
    a.put(r.update.version);
    a.put(r.update.base);
    a.put_identity(r.update.identity);
    a.put(static_cast<uint8_t>(r.update.kind == UpdateKind::remove));
    a.put(static_cast<uint16_t>(r.kind == RecordKind::refuse ? r.refusal : r.outcome));
    a.put(static_cast<uint8_t>(r.update.kind));
    a.put(static_cast<uint8_t>(exists));
    a.put_bytes(r.content);
    a.end();
  }

  bool append(Record r) {
    put_record(r, !r.after.version.none());
    if (std::string wrong = store_.append(std::move(r)); !wrong.empty()) fault(wrong);
    return true;
  }

  // ---- effects

  void execute(const SendUpdate& e) {
    const Bytes& bytes = payload(e.update.payload);
    send(e.header, 'U', &e.update, sizeof(e.update), bytes, 0);
  }
  void execute(const SendNotice& e) {
    send(e.header, 'N', &e.notice, sizeof(e.notice), {}, static_cast<uint8_t>(e.notice.type));
  }
  void send(const PeerHeader& header, char mark, const void* body, size_t size, const Bytes& bytes,
            uint8_t type) {
    Answer a(out_);
    a.begin(AnswerType::send);
    a.put(header.to.value);
    size_t at = a.mark();
    a.put(uint32_t{0});
    a.put(mark);
    a.put(header);
    out_.insert(out_.end(), static_cast<const uint8_t*>(body), static_cast<const uint8_t*>(body) + size);
    out_.insert(out_.end(), bytes.begin(), bytes.end());
    a.patch(at, static_cast<uint32_t>(a.mark() - at - 4));
    a.put(type);
    a.end();
  }
  void execute(const Reply& e) {
    Answer a(out_);
    a.begin(AnswerType::reply);
    a.put(e.token);
    a.put(static_cast<uint16_t>(e.outcome));
    a.put(static_cast<uint8_t>(e.reason));
    a.put(e.chain_version);
    a.put(e.chunk.version);
    a.put(e.chunk.length_bytes);
    a.put(e.key);
    a.put(static_cast<uint8_t>(e.more));
    a.put(e.count);
    auto at = content_.find(e.token);
    a.put_bytes(at == content_.end() ? Bytes{} : at->second);
    if (at != content_.end()) content_.erase(at);
    a.end();
  }
  // Recovery: nothing gives these effects yet.
  void execute(const SendSync&) { FFS_CHECK(false); }
  void execute(const Copy&) { FFS_CHECK(false); }
  void execute(const Install&) { FFS_CHECK(false); }
  void execute(const Erase&) { FFS_CHECK(false); }
  void execute(const ResetTarget&) { FFS_CHECK(false); }
  void execute(const SetRetry&) { FFS_CHECK(false); }
  void execute(const Repaired&) { FFS_CHECK(false); }
  void execute(const Fetch& e) {
    payload(e.payload);
    start(e.op, Started{.kind = 1, .buffer = e.payload});
  }
  void execute(const Release& e) {
    if (buffers_.erase(e.payload.value) == 0) fault("a buffer is released twice");
  }
  void execute(const Stage& e) {
    Record r;
    r.kind = e.commit_now ? RecordKind::stage_commit : RecordKind::stage;
    r.op = e.op;
    r.update = e.update;
    std::string wrong = store_.content_after(e.update, payload(e.update.payload), e.keep_attributes, &r);
    if (!wrong.empty()) fault(wrong);
    r.outcome = stage_outcome_;
    append(std::move(r));
  }
  void execute(const Commit& e) {
    Record r;
    r.kind = RecordKind::commit;
    r.update.key = e.key;
    r.update.version = e.version;
    bool exists = false;
    if (const ModelVersion* v = store_.find(e.key, e.version); v != nullptr) {
      r.content = v->content;
      r.update.identity = v->identity;
      exists = !v->removal;
      if (v->removal) r.update.kind = UpdateKind::remove;
    }
    put_record(r, exists);
    if (std::string wrong = store_.append(std::move(r)); !wrong.empty()) fault(wrong);
  }
  void execute(const Refuse& e) {
    Record r;
    r.kind = RecordKind::refuse;
    r.op = e.op;
    r.update.key = e.key;
    r.update.version = e.version;
    r.update.identity = e.identity;
    r.refusal = e.outcome;
    append(std::move(r));
  }
  void execute(const Read& e) {
    Started s{.kind = 2, .token = e.token};
    const ModelVersion* v = store_.find(e.key, e.version);
    if (v == nullptr || v->removal) {
      fault("read of a version that isn't there");
    } else {
      size_t from = std::min<size_t>(e.offset_bytes, v->content.size());
      size_t to = std::min<size_t>(from + e.length_bytes, v->content.size());
      s.content.assign(v->content.begin() + from, v->content.begin() + to);
    }
    start(e.op, std::move(s));
  }
  void execute(const Load& e) {
    Started s{.kind = 3};
    const ModelVersion* v = store_.find(e.key, e.version);
    if (v == nullptr || v->content.size() != e.length_bytes) {
      fault("load of a version that isn't there");
    } else {
      s.content = v->content;
    }
    start(e.op, std::move(s));
  }
  void start(OpId op, Started s) {
    Answer a(out_);
    a.begin(AnswerType::started);
    a.put(s.kind);
    a.put(op);
    a.end();
    started_[op] = std::move(s);
  }
  void execute(const SetSpaceEpoch& e) {
    Record r;
    r.kind = RecordKind::epoch;
    r.op = e.op;
    r.space = e.space;
    r.epoch = e.epoch;
    append(std::move(r));
  }
  void execute(const PersistChain& e) {
    Record r;
    r.kind = RecordKind::chain;
    r.op = e.op;
    r.chain = e.record;
    append(std::move(r));
  }
  void execute(const ProposalPersisted& e) {
    Answer a(out_);
    a.begin(AnswerType::proposal);
    a.put(e.version);
    a.end();
  }
  void execute(const StateChanged& e) {
    state_ = e;
    Answer a(out_);
    a.begin(AnswerType::state);
    a.put(static_cast<uint8_t>(e.serving));
    a.put(static_cast<uint8_t>(e.reason));
    a.put(e.chain_version);
    a.end();
  }
  void execute(const Touch&) {}

  bool dump() {
    const ReplicaStatus s = replica_->status();
    Answer a(out_);
    a.begin(AnswerType::dumped);
    a.put(static_cast<uint8_t>(s.serving));
    a.put(static_cast<uint8_t>(s.reason));
    a.put(s.chain_version);
    a.put(s.persisted.proposed);
    a.put(s.persisted.adopted);
    a.put(static_cast<uint8_t>(s.persisted_here));
    a.put(s.pendings);
    a.put(s.waiting);
    a.put(static_cast<uint32_t>(buffers_.size()));
    a.put(static_cast<uint32_t>(store_.undurable()));
    a.put(static_cast<uint32_t>(store_.state().chunks.size()));
    for (const auto& [key, c] : store_.state().chunks) {
      a.put(key);
      a.put(static_cast<uint8_t>(!c.committed.facts.version.none()));
      a.put(c.committed.facts.version);
      a.put(tag_of(c.committed.facts.attributes));
      a.put_bytes(c.committed.content);
      a.put(static_cast<uint32_t>(c.pendings.size()));
      for (const ModelVersion& p : c.pendings) {
        a.put(p.version);
        a.put(static_cast<uint8_t>(p.removal));
        a.put_identity(p.identity);
        a.put_bytes(p.content);
      }
    }
    a.end();
    return true;
  }

  const uint64_t target_;
  const uint32_t chain_;
  Options options_;
  ModelStore store_;
  std::unique_ptr<Replica> replica_;
  Effects effects_;
  uint64_t now_ms_ = 0;
  Outcome stage_outcome_ = Outcome::ok;
  StateChanged state_;
  uint64_t last_buffer_ = 0;
  std::unordered_map<uint64_t, Bytes> buffers_;
  std::unordered_map<OpId, Started> started_;
  std::unordered_map<RequestToken, Bytes> content_;
  Bytes out_;
};

}  // namespace ffs::craq::sim

struct ffs_sim {
  explicit ffs_sim(const ffs_sim_options& options) : sim(options) {}
  ffs::craq::sim::Sim sim;
};

extern "C" {

ffs_sim* ffs_sim_create(const ffs_sim_options* options) {
  if (options == nullptr || options->struct_size != sizeof(ffs_sim_options)) return nullptr;
  if (options->target == 0 || options->max_pendings == 0 || options->max_pendings_per_chunk == 0 ||
      options->resend_ms == 0) {
    return nullptr;
  }
  return new ffs_sim(*options);
}

void ffs_sim_destroy(ffs_sim* sim) {
  delete sim;
}

int ffs_sim_step(ffs_sim* sim, const uint8_t* event, size_t event_bytes, const uint8_t** effects,
                 size_t* effects_bytes) {
  bool ok = sim->sim.step(ffs::Reader(event, event_bytes));
  *effects = sim->sim.answer().data();
  *effects_bytes = sim->sim.answer().size();
  return ok ? 0 : -EINVAL;
}

}  // extern "C"
