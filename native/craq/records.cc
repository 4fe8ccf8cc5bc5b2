// The records of the machine: made, found, remembered, freed; and what every event begins and ends
// with.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

// ---- What was said of versions below the floor can be forgotten ------------------------------

Version Replica::Machine::floor() const {
  Version own = order_.empty() ? Version{config_.version, counter_ + 1} : order_.first()->version();
  if (first()) return own;
  return order_.empty() ? floor_ : std::min(floor_, own);
}

void Replica::Machine::floor_received(const Version& v) {
  floor_ = std::max(floor_, v);
  while (Chunk* c = memory_.first()) {
    if (c->remember_until >= floor_) return;
    memory_.remove(c);
    c->removed = Version{};
    forget_refused(c);
    retire(c);
  }
}

void Replica::Machine::keep_in_memory(Chunk* c, const Version& until) {
  c->remember_until = std::max(c->remember_until, until);
  if (!memory_.linked(c)) memory_.push_back(c);
}

// ---- Records --------------------------------------------------------------------------------

Chunk* Replica::Machine::chunk(const ChunkKey& key) {
  if (Chunk* c = chunks_.find(key); c != nullptr) return c;
  Chunk* c = chunk_pool_.take();
  c->key = key;
  c->committed = store_.committed(key);
  chunks_.insert(c);
  retire(c);
  return c;
}

// The record is freed at the next event, unless it is in use by then.
void Replica::Machine::retire(Chunk* c) {
  if (c->retired) return;
  c->retired = true;
  c->retired_next = retired_chunks_;
  retired_chunks_ = c;
}

Pending* Replica::Machine::find_pending(const Chunk* c, const Version& v) const {
  for (Pending* p = c->pendings.last(); p != nullptr && p->version() >= v; p = c->pendings.prev(p)) {
    if (p->version() == v) return p;
  }
  return nullptr;
}

void Replica::Machine::begin(uint64_t now_ms, Effects& out) {
  now_ms_ = now_ms;
  out_ = &out;
  out_begin_ = out.size();
  numbered_bytes_ = 0;
  while (Pending* p = retired_pendings_) {
    retired_pendings_ = p->next_free;
    if (p->update.identity.client.value != 0) channels_.remove(p);
    pending_pool_.give(p);
  }
  while (Chunk* c = retired_chunks_) {
    retired_chunks_ = c->retired_next;
    c->retired = false;
    if (c->dirty() || !c->turn.empty() || memory_.linked(c)) continue;
    chunks_.remove(c);
    chunk_pool_.give(c);
  }
}

void Replica::Machine::finish() {
  run();
  // What a sync that is over has still under way at the disk would land on what is done from then on.
  const bool settled = unreconciled_ == 0 && drops_ == 0 && !sync_target_.busy();
  if (phase_ == Phase::reconciling && settled) become_reconciled();
  maybe_serve();
  run();
  pump_sync();
  out_ = nullptr;
}

OpId Replica::Machine::new_op(Op::Kind kind, Request* r, Pending* p, EpochChange* e) {
  Op* op = op_pool_.take();
  op->kind = kind;
  op->request = r;
  op->pending = p;
  op->epoch = e;
  op->id = ++last_op_;
  ops_.insert(op);
  return op->id;
}

// Its completion will find nobody.
void Replica::Machine::drop_op(OpId id) {
  if (id == 0) return;
  if (Op* op = ops_.find(id); op != nullptr) {
    op->request = nullptr;
    op->pending = nullptr;
    op->epoch = nullptr;
  }
}

void Replica::Machine::release(BufferRef& payload) {
  if (payload == kNoBuffer) return;
  out_->push_back(Release{payload});
  payload = kNoBuffer;
}

void Replica::Machine::notify(TargetId to, const Notice& n) {
  out_->push_back(SendNotice{header_to(to), n});
}
}  // namespace ffs::craq
