// The replica's effects: on the model store, and to bytes (sim.h lists the answers).
#include <algorithm>

#include "craq/sim_target.h"

namespace ffs::craq::sim {

namespace {
constexpr uint8_t kFetch = 1, kRead = 2, kLoad = 3, kCopy = 4;
constexpr uint8_t kSyncMessage = 255;  // among the types of SEND
}  // namespace

BufferRef Target::new_buffer(std::span<const uint8_t> bytes) {
  BufferRef ref{++last_buffer_};
  buffers_[ref.value] = Bytes(bytes.begin(), bytes.end());
  return ref;
}

const Bytes& Target::payload(BufferRef ref) {
  static const Bytes none;
  if (ref == kNoBuffer) return none;
  auto at = buffers_.find(ref.value);
  if (at == buffers_.end()) {
    fault("a buffer is used after its release");
    return none;
  }
  return at->second;
}

void Target::fault(const std::string& text) {
  Answer(out_, AnswerType::fault).put_bytes(text.data(), text.size());
}

void Target::put_record(const Record& r, bool exists) {
  Answer a(out_, AnswerType::record);
  a.put(static_cast<uint8_t>(r.kind));
  a.put(r.update.key);
  a.put(r.update.version);
  a.put(r.update.base);
  a.put_identity(r.update.identity);
  a.put_flag(r.update.kind == UpdateKind::remove);
  a.put(static_cast<uint16_t>(r.kind == RecordKind::refuse ? r.refusal : r.outcome));
  a.put(static_cast<uint8_t>(r.update.kind));
  a.put_flag(exists);
  a.put_bytes(r.content);
}

void Target::append(Record r) {
  put_record(r, !r.after.version.none());
  if (std::string wrong = store_.append(std::move(r)); !wrong.empty()) fault(wrong);
}

void Target::start(OpId op, Started s) {
  Answer a(out_, AnswerType::started);
  a.put(s.kind);
  a.put(op);
  started_[op] = std::move(s);
}

// ---- messages and answers -------------------------------------------------------------------

void Target::execute(const SendUpdate& e) {
  const Bytes& bytes = payload(e.update.payload);
  send(e.header, 'U', &e.update, sizeof(e.update), bytes, 0);
}
void Target::execute(const SendNotice& e) {
  send(e.header, 'N', &e.notice, sizeof(e.notice), {}, static_cast<uint8_t>(e.notice.type));
}
void Target::execute(const SendSync& e) {
  Bytes body;
  const auto size = static_cast<uint32_t>(e.bytes.size());
  const auto* at = reinterpret_cast<const uint8_t*>(&size);
  body.insert(body.end(), at, at + 4);
  body.insert(body.end(), e.bytes.begin(), e.bytes.end());
  body.push_back(e.payload == kNoBuffer ? 0 : 1);
  send(e.header, 'S', body.data(), body.size(), payload(e.payload), kSyncMessage);
}

void Target::send(const PeerHeader& header, char mark, const void* body, size_t size, const Bytes& bytes,
                  uint8_t type) {
  Answer a(out_, AnswerType::send);
  a.put(header.to.value);
  const size_t at = a.mark();
  a.put(uint32_t{0});
  a.put(mark);
  a.put(header);
  a.put_raw(body, size);
  a.put_raw(bytes.data(), bytes.size());
  a.patch(at, static_cast<uint32_t>(a.mark() - at - 4));
  a.put(type);
}

void Target::execute(const Reply& e) {
  Answer a(out_, AnswerType::reply);
  a.put(e.token);
  a.put(static_cast<uint16_t>(e.outcome));
  a.put(static_cast<uint8_t>(e.reason));
  a.put(e.chain_version);
  a.put(e.chunk.version);
  a.put(e.chunk.length_bytes);
  a.put(e.key);
  a.put_flag(e.more);
  a.put(e.count);
  auto at = content_.find(e.token);
  a.put_bytes(at == content_.end() ? Bytes{} : at->second);
  if (at != content_.end()) content_.erase(at);
}

void Target::execute(const ProposalPersisted& e) {
  Answer(out_, AnswerType::proposal).put(e.version);
}

void Target::execute(const StateChanged& e) {
  Answer a(out_, AnswerType::state);
  a.put_flag(e.serving);
  a.put(static_cast<uint8_t>(e.reason));
  a.put(e.chain_version);
}

void Target::execute(const Repaired& e) {
  Answer a(out_, AnswerType::repaired);
  a.put(e.key);
  a.put(e.version);
  a.put_flag(e.ok);
}

void Target::execute(const Evicted& e) {
  Answer a(out_, AnswerType::evicted);
  a.put(e.key);
  a.put(static_cast<uint16_t>(e.outcome));
}

// ---- buffers, reads ---------------------------------------------------------------------------

void Target::execute(const Fetch& e) {
  payload(e.payload);
  start(e.op, Started{.kind = kFetch});
}

void Target::execute(const Release& e) {
  if (buffers_.erase(e.payload.value) == 0) fault("a buffer is released twice");
}

void Target::execute(const Read& e) {
  Started s{.kind = kRead, .token = e.token};
  const ModelVersion* v = store_.find(e.key, e.version);
  if (v == nullptr || v->removal) {
    fault("read of a version that isn't there");
  } else {
    if (v->damaged) s.outcome = Outcome::corrupt;
    size_t from = std::min<size_t>(e.offset_bytes, v->content.size());
    size_t to = std::min<size_t>(from + e.length_bytes, v->content.size());
    s.content.assign(v->content.begin() + from, v->content.begin() + to);
  }
  start(e.op, std::move(s));
}

void Target::execute(const Load& e) {
  Started s{.kind = kLoad};
  const ModelVersion* v = store_.find(e.key, e.version);
  if (v == nullptr || v->content.size() != e.length_bytes) {
    fault("load of a version that isn't there");
  } else {
    if (v->damaged) s.outcome = Outcome::corrupt;
    s.content = v->content;
  }
  start(e.op, std::move(s));
}

void Target::execute(const Copy& e) {
  Started s{.kind = kCopy};
  const ModelVersion* v = store_.find(e.key, e.version);
  if (v == nullptr || v->removal) {
    s.outcome = Outcome::absent;
  } else {
    if (v->damaged) s.outcome = Outcome::corrupt;
    if (v->content.size() != e.length_bytes) fault("a copy names another length than the version has");
    s.content = v->content;
  }
  start(e.op, std::move(s));
}

// ---- the journal ------------------------------------------------------------------------------

void Target::execute(const Stage& e) {
  Record r;
  r.kind = RecordKind::stage;
  r.op = e.op;
  r.update = e.update;
  std::string wrong = store_.content_after(e.update, payload(e.update.payload), e.keep_attributes, &r);
  if (!wrong.empty()) fault(wrong);
  if (stage_outcome_ != Outcome::ok) r.outcome = stage_outcome_;
  append(std::move(r));
}

void Target::execute(const Commit& e) {
  Record r;
  r.kind = RecordKind::commit;
  r.update.key = e.key;
  r.update.version = e.version;
  if (const ModelVersion* v = store_.find(e.key, e.version); v != nullptr) {
    r.content = v->content;
    r.after = v->facts;
    r.update.identity = v->identity;
    if (v->removal) r.update.kind = UpdateKind::remove;
  }
  append(std::move(r));
}

void Target::execute(const Refuse& e) {
  Record r;
  r.kind = RecordKind::refuse;
  r.op = e.op;
  r.update.key = e.key;
  r.update.version = e.version;
  r.update.identity = e.identity;
  r.refusal = e.outcome;
  append(std::move(r));
}

void Target::execute(const Install& e) {
  Record r;
  r.kind = RecordKind::install;
  r.op = e.op;
  r.update.key = e.key;
  r.update.version = e.chunk.version;
  r.update.base = e.only_over;
  r.after = e.chunk;
  r.content = payload(e.payload);
  if (r.content.size() != e.chunk.length_bytes) fault("install of another length than it says");
  if (e.chunk.version.none()) fault("install of no version");
  if (!e.only_over.none() && store_.committed(e.key).version != e.only_over) {
    r.outcome = Outcome::condition_failed;
  } else if (stage_outcome_ != Outcome::ok) {
    r.outcome = Outcome::no_space;
  }
  append(std::move(r));
}

void Target::execute(const Erase& e) {
  Record r;
  r.kind = RecordKind::erase;
  r.op = e.op;
  r.update.key = e.key;
  append(std::move(r));
}

void Target::execute(const ResetTarget& e) {
  Record r;
  r.kind = RecordKind::reset;
  r.op = e.op;
  append(std::move(r));
}

void Target::execute(const SetRetry& e) {
  Record r;
  r.kind = RecordKind::set_retry;
  r.op = e.op;
  r.update.key = e.entry.key;
  r.update.version = e.entry.version;
  r.update.identity = UpdateIdentity{e.client, e.channel, e.entry.sequence};
  r.retry = e.entry;
  append(std::move(r));
}

void Target::execute(const SetSpaceEpoch& e) {
  Record r;
  r.kind = RecordKind::epoch;
  r.op = e.op;
  r.space = e.space;
  r.epoch = e.epoch;
  append(std::move(r));
}

void Target::execute(const PersistChain& e) {
  Record r;
  r.kind = RecordKind::chain;
  r.op = e.op;
  r.chain = e.record;
  r.update.version.chain = e.record.adopted;
  r.update.base.chain = e.record.proposed;
  append(std::move(r));
}

}  // namespace ffs::craq::sim
