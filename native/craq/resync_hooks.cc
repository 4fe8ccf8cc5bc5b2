// Where recovery and repair touch the machine: what holds a commit back, what they see of it, and what they
// tell it. docs/craq.md, Recovery and Repair.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

// ---- Sessions come and go with chain versions ---------------------------------------------------

// Not before: until a new version is adopted, what was held back for the syncing member stays so.
void Replica::Machine::adopt_sync() {
  sync_source_.stop();
  sync_target_.stop();
  repairer_.chain_changed();
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) p->reached = false;
  if (on_path()) return;
  const Member& source = config_.members[path_count_ - 1];
  sync_target_.start(source.target, source.incarnation, config_.members[my_index_].incarnation);
}

void Replica::Machine::start_sync_source() {
  if (!last() || syncing_member() == TargetId{}) return;
  const Member& target = config_.members[path_count_];
  sync_source_.start(target.target, config_.members[my_index_].incarnation, target.incarnation);
}

// The member that this one fills may serve only when it has all, in the incarnation that has it. A member
// that was left out meanwhile (and is to be filled itself) fills nobody any more.
bool Replica::Machine::may_promote(const ChainConfig& config) {
  // What counts is the recorded version: not yet ours, or no longer.
  if (next_config_.version > config_.version) return phase_ != Phase::persisting;
  const TargetId target = syncing_member();
  const bool fills = target != TargetId{} && on_path() && last();
  if (!fills || !serves(config, self_) || !serves(config, target)) return true;
  return sync_source_.may_promote(target, config.members[index_of(config, target)].incarnation);
}

void Replica::Machine::sync_arrived(const PeerHeader& header, std::span<const uint8_t> bytes,
                                    BufferRef payload, PayloadState payload_state) {
  const bool member = index_of(config_, header.from) < config_.member_count;
  std::optional<SyncMessage> m;
  if (speaks_to_us(header) && member) m = decode_sync(bytes);
  if (!m.has_value()) return release(payload);
  heard_from(header.from);
  if (m->session.attempt == 0) return repairer_.arrived(header.from, *m, payload, payload_state);
  if (phase_ == Phase::syncing) return sync_target_.arrived(header.from, *m, payload, payload_state);
  release(payload);
  if (sync_source_.active() && header.from == syncing_member()) sync_source_.arrived(*m);
}

void Replica::Machine::pump_sync() {
  if (!acts()) return;
  sync_target_.pump();
  repairer_.pump();
  sync_source_.pump();
  run();
}

// ---- What waits for the syncing member ----------------------------------------------------------

bool Replica::Machine::sync_holds_back(const Pending* p) {
  if (!last() || p->reached || !sync_source_.waits()) return false;
  sync_source_.want(p->update.key, p->version());
  return true;
}

bool Replica::Machine::sync_holds_back_refusal(const Chunk* c, Pending* oldest) {
  if (!last() || !sync_source_.waits()) return false;
  bool waits = false;
  for (Pending* p = oldest; p != nullptr; p = c->pendings.next(p)) {
    const UpdateIdentity& who = p->update.identity;
    if (p->reached || who.client.value == 0) continue;
    RetryItem item{who.client, who.channel, {}};
    item.entry = RetryEntry{who.sequence, c->key, p->version(), RetryState::refused, p->outcome};
    sync_source_.want_refusal(c->key, p->version(), item);
    waits = true;
  }
  return waits;
}

bool Replica::Machine::sync_holds_back(const EpochChange* e) {
  if (!last() || !sync_source_.active()) return false;
  sync_source_.epoch_set(e->space, e->epoch);
  return sync_source_.waits();
}

void Replica::Machine::reached_target(const ChunkKey& key, const Version& version) {
  Chunk* c = find_chunk(key);
  Pending* p = c != nullptr ? find_pending(c, version) : nullptr;
  if (p == nullptr) return;
  p->reached = true;
  progress(c);
  if (root(c) != nullptr) advance_refusal(c);
}

void Replica::Machine::epoch_reached_target(uint64_t space, uint64_t epoch) {
  for (EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (e->space == space && e->epoch == epoch && e->durable && last()) return finish_epoch(e);
  }
}

// At the last member nothing else is waited for.
void Replica::Machine::finish_durable_epochs() {
  for (EpochChange* e = epochs_.first(); e != nullptr && last();) {
    EpochChange* next = epochs_.next(e);
    if (e->durable) finish_epoch(e);
    e = next;
  }
}

void Replica::Machine::sync_gave_up() {
  finish_durable_epochs();
  std::vector<ChunkKey> dirty;
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    p->reached = false;
    if (ChunkPendings::prev(p) == nullptr) dirty.push_back(p->update.key);
  }
  for (const ChunkKey& key : dirty) {
    Chunk* c = chunk(key);
    progress(c);
    if (root(c) != nullptr) advance_refusal(c);
  }
}

void Replica::Machine::sync_news() {
  out_->push_back(StateChanged{serving(), reason_, config_.version});
}

// ---- What they see ------------------------------------------------------------------------------

OpId Replica::Machine::new_sync_op(SyncPart part) {
  const Op::Kind kind = part == SyncPart::source   ? Op::Kind::sync_source
                        : part == SyncPart::target ? Op::Kind::sync_target
                                                   : Op::Kind::repair;
  return new_op(kind, nullptr, nullptr);
}

void Replica::Machine::send_sync(TargetId to, const SyncMessage& m, BufferRef payload) {
  out_->push_back(SendSync{header_to(to), encode(m), payload});
}

bool Replica::Machine::store_is_current() const {
  for (size_t i = out_begin_; i < out_->size(); i++) {
    const Effect& e = (*out_)[i];
    if (std::holds_alternative<Commit>(e) || std::holds_alternative<Refuse>(e)) return false;
  }
  return true;
}

ChunkFacts Replica::Machine::committed_now(const ChunkKey& key) const {
  const Chunk* c = find_chunk(key);
  return c != nullptr ? c->committed : store_.committed(key);
}

// The oldest pending version, once every serving member has it: nothing can undo it then.
Wanted Replica::Machine::wanted(const ChunkKey& key, bool in_step) const {
  Wanted w;
  const Chunk* c = find_chunk(key);
  const Pending* p = c != nullptr && in_step ? c->pendings.first() : nullptr;
  const bool certain = p != nullptr && p->held && !p->fallen && p->disk == Pending::Disk::staged;
  if (!certain) {
    w.chunk = committed_now(key);
    w.version = w.chunk.version;
    return w;
  }
  w.pending = true;
  w.version = p->version();
  if (!p->removal()) w.chunk = p->after;
  const UpdateIdentity& who = p->update.identity;
  if (who.client.value == 0 || is(Mutant::no_retry_copy)) return w;
  w.retry = RetryItem{who.client, who.channel, {}};
  w.retry->entry = RetryEntry{who.sequence, key, p->version(), RetryState::done, Outcome::ok};
  return w;
}

std::optional<ChunkFacts> Replica::Machine::held_version(const ChunkKey& key, const Version& version) const {
  const ChunkFacts committed = committed_now(key);
  if (committed.version == version) return committed;
  const Chunk* c = find_chunk(key);
  const Pending* p = c != nullptr ? find_pending(c, version) : nullptr;
  if (p == nullptr || p->removal() || p->disk != Pending::Disk::staged) return std::nullopt;
  return p->after;
}

// ---- At the syncing member ----------------------------------------------------------------------

// All that is pending here, as if it had never come: whoever leads the chain has it, or nobody has.
bool Replica::Machine::forget_pendings() {
  if (drops_ > 0) return false;
  for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (p->disk == Pending::Disk::staging || p->state == Pending::State::refusing) return false;
  }
  while (Pending* p = order_.last()) {
    p->outcome = Outcome::dropped;
    resolve(p, Pending::State::refused);
  }
  return true;
}

void Replica::Machine::chunk_replaced(const ChunkKey& key) {
  Chunk* c = find_chunk(key);
  if (c == nullptr) return;
  c->committed = store_.committed(key);
  c->removed = Version{};
}

// ---- Damage -------------------------------------------------------------------------------------

std::optional<ChunkKey> Replica::Machine::compare(const ChunkKey& from) {
  if (!serving() || first()) return std::nullopt;
  return repairer_.compare(from, predecessor());
}

void Replica::Machine::source_damaged(const ChunkKey& key, const Version& version) {
  repairer_.damaged(key, version);
}

// It is staged again when that is repaired; a pending one can be repaired once it is committed.
void Replica::Machine::base_damaged(Pending* p) {
  p->base_damaged = true;
  Chunk* c = p->chunk;
  if (c->unreconciled) settle(c);
  progress(c);
  repair_base(c);
}

void Replica::Machine::repair_base(Chunk* c) {
  const Pending* p = c->pendings.first();
  if (p != nullptr && p->base_damaged) repairer_.damaged(c->key, c->committed.version);
}

void Replica::Machine::repair_ended(const ChunkKey& key, const Version&, bool ok) {
  sync_source_.repaired(key, ok);
  Chunk* c = find_chunk(key);
  if (c == nullptr || !ok) return;
  for (Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) p->base_damaged = false;
  stage_next(c);
}

bool Replica::Machine::wants_payload(const ChunkKey& key, const Version& version) const {
  const Chunk* c = find_chunk(key);
  const Pending* p = c != nullptr ? find_pending(c, version) : nullptr;
  return p != nullptr && p->obtaining;
}

// If nobody has it, a head that is alone with it gives it up: no other member ever had it. The others wait,
// since their predecessor has it, or had.
void Replica::Machine::obtained(const ChunkKey& key, const Version& version, Outcome outcome,
                                BufferRef payload) {
  Chunk* c = find_chunk(key);
  Pending* p = c != nullptr ? find_pending(c, version) : nullptr;
  if (p == nullptr || !p->obtaining) return release(payload);
  if (outcome == Outcome::ok) {
    p->obtaining = false;
    p->update.payload = payload;
    send_ready(c);
    return maybe_send_resent();
  }
  if (!first() || p->fallen) return;
  fall(p, Outcome::io_error);
  advance_refusal(c);
}

}  // namespace ffs::craq
