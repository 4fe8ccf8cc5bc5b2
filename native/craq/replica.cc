// The story of a write, in order: a client's request is judged and numbered at the head, travels
// down, is staged by every member, is held, is committed by the last, and the acknowledgement
// commits it on the way back up. docs/craq.md, A write.
#include "craq/replica.h"

#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

namespace {

template <typename... F>
struct Overloaded : F... {
  using F::operator()...;
};

bool valid(const ClientUpdate& u) {
  switch (u.kind) {
    case UpdateKind::write:
      return u.length_bytes > 0 && !u.offer && u.offset_bytes <= kMaxChunkBytes &&
             u.length_bytes <= kMaxChunkBytes - u.offset_bytes;
    case UpdateKind::truncate:
    case UpdateKind::replace:
      return u.offset_bytes == 0 && u.length_bytes <= kMaxChunkBytes && !u.offer;
    case UpdateKind::create:
      return u.offset_bytes == 0 && u.length_bytes <= kMaxChunkBytes;
    case UpdateKind::remove:
      return !u.offer;
  }
  return false;
}

// Whether the store says by it that it won't take this update; else it is the device that can't.
bool refuses(Outcome outcome) {
  switch (outcome) {
    case Outcome::no_space:
    case Outcome::over_quota:
    case Outcome::fenced:
    case Outcome::invalid:
    case Outcome::fell_with_base:
      return true;
    default:
      return false;
  }
}

}  // namespace

// ---- 1. At the head: a request comes in, and is judged (again after every wait) -------------

Request* Replica::Machine::new_request() {
  Request* r = request_pool_.take();
  requests_.push_back(r);
  return r;
}

void Replica::Machine::admit_request(Request* r) {
  if (uint64_t deadline = r->deadline_ms(); deadline != 0) {
    next_deadline_ms_ = next_deadline_ms_ == 0 ? deadline : std::min(next_deadline_ms_, deadline);
  }
  run_.push(r);
}

void Replica::Machine::judge(Request* r) {
  r->state = Request::State::judging;
  std::visit(Overloaded{
                 [&](const ClientUpdate& u) { judge_update(r, u); },
                 [&](const ClientRead& read) { judge_read(r, read); },
                 [&](const ClientSetSpaceEpoch& set) { judge_set_space_epoch(r, set); },
                 [&](const ClientRemovePage& page) { judge_remove_page(r, page); },
                 [&](const ClientLastChunk& last) { judge_last_chunk(r, last); },
             },
             r->body);
}

// The first two checks of every request: chain version (and lease), then authority.
bool Replica::Machine::chain_allows(Request* r, bool head_only) {
  if (!chain_version_allows(r, head_only)) return false;
  if (!is(Mutant::no_lease_check) && !lease_allows(r)) return false;
  if (head_only && !first()) {
    reply(r, Outcome::not_head);
    return false;
  }
  if (r->authority() != Outcome::ok) {
    reply(r, r->authority());
    return false;
  }
  return true;
}

// A read of an older version is answered: this member serves, and says that there is a newer one.
bool Replica::Machine::chain_version_allows(Request* r, bool head_only) {
  if (phase_ == Phase::offline || phase_ == Phase::failed || phase_ == Phase::syncing) {
    reply(r, Outcome::offline);
    return false;
  }
  if (head_only && phase_ != Phase::persisting && r->chain_version() < config_.version) {
    reply(r, Outcome::stale_chain);
    return false;
  }
  const bool answers = head_only ? serving() : answers_reads();
  if (answers && r->chain_version() <= config_.version) return true;
  park(r);
  return false;
}

void Replica::Machine::judge_update(Request* r, const ClientUpdate& u) {
  if (!valid(u)) return reply(r, Outcome::invalid);
  if (!chain_allows(r, /*head_only=*/true)) return;
  if (!retry_table_allows(r, u)) return;
  if (least_epoch(u.key.space()) > u.space_epoch) return reply(r, Outcome::stale_epoch);
  if (u.payload_state == PayloadState::bad) return reply(r, Outcome::bad_checksum);
  Chunk* c = chunk(u.key);
  if (!turn_allows(r, u, c)) return;
  const Outcome room = room_for(u);
  if (room != Outcome::ok && store_.makes_room(u.key)) return park(r);
  if (u.offer) return reply(r, room == Outcome::ok ? Outcome::wanted : room);
  if (u.payload_state == PayloadState::later && carries_payload(u.kind) && !r->fetched) {
    r->state = Request::State::fetching;
    r->op = new_op(Op::Kind::fetch_for_request, r, nullptr);
    out_->push_back(Fetch{r->op, u.payload});
    return;
  }
  // Nothing is lost by a create that is applied after all when it comes again.
  const bool goes_unrecorded = u.identity.client.value == 0 || u.kind == UpdateKind::create;
  if (room != Outcome::ok && goes_unrecorded) return reply(r, room);
  Pending* p = number(u, c);
  std::get<ClientUpdate>(r->body).payload = kNoBuffer;  // p owns it now
  r->state = Request::State::wants_result;
  p->waiters.push(r);
  if (room == Outcome::ok) return begin_update(p);
  // A refusal is a result: all members journal it, so that a late repetition isn't applied after all.
  fall(p, room);
  advance_refusal(c);
}

bool Replica::Machine::retry_table_allows(Request* r, const ClientUpdate& u) {
  const UpdateIdentity& who = u.identity;
  if (who.client.value == 0 || is(Mutant::ignore_retry_table)) return true;
  if (store_.fenced(who.client)) {
    reply(r, Outcome::fenced);
    return false;
  }
  if (Pending* p = channels_.find({who.client, who.channel}); p != nullptr) {
    if (p->update.identity.sequence > who.sequence) {
      reply(r, Outcome::old_sequence);
      return false;
    }
    bool under_way = p->state == Pending::State::alive || p->state == Pending::State::refusing;
    if (p->update.identity.sequence == who.sequence) {
      if (under_way) {
        release(std::get<ClientUpdate>(r->body).payload);
        r->state = Request::State::wants_result;
        p->waiters.push(r);
        return false;
      }
      if (p->outcome != Outcome::dropped) {
        reply(r, p->outcome, p->after);
        return false;
      }
    } else if (under_way) {
      r->state = Request::State::wants_turn;
      p->chunk->turn.push(r);
      return false;
    }
    return true;
  }
  if (is(Mutant::forget_retries_on_restart)) return true;
  std::optional<RetryEntry> entry = store_.retry(who.client, who.channel);
  if (!entry.has_value() || entry->sequence < who.sequence) return true;
  if (entry->sequence > who.sequence) {
    reply(r, Outcome::old_sequence);
    return false;
  }
  if (entry->state == RetryState::refused && entry->outcome == Outcome::dropped) return true;
  ChunkFacts answer;
  answer.version = entry->version;
  reply(r, entry->state == RetryState::refused ? entry->outcome : Outcome::ok, answer);
  return false;
}

uint64_t Replica::Machine::least_epoch(uint64_t space) const {
  uint64_t least = store_.least_epoch(space);
  for (const EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (e->space == space) least = std::max(least, e->epoch);
  }
  return least;
}

// The last check: what is there, and does the request have to wait for it?
bool Replica::Machine::turn_allows(Request* r, const ClientUpdate& u, Chunk* c) {
  const Pending* newest_pending = c->pendings.last();
  const bool absent = newest(c).version.none();
  const bool gone = absent || expired(newest(c));  // for who asks whether it is there
  const bool conditional = u.kind == UpdateKind::create || !u.expected.none();
  const bool needs_chunk = u.need_existing || u.kind == UpdateKind::remove || u.kind == UpdateKind::truncate;
  if (newest_pending != nullptr && (newest_pending->fallen || conditional || (needs_chunk && absent) ||
                                    c->pending_count >= options_.max_pendings_per_chunk)) {
    r->state = Request::State::wants_turn;
    c->turn.push(r);
    return false;
  }
  if (!u.expected.none() && c->committed.version != u.expected) {
    reply(r, Outcome::condition_failed);
    return false;
  }
  if ((needs_chunk && absent) || (u.need_existing && gone)) {
    reply(r, u.need_existing ? Outcome::absent : Outcome::ok);
    return false;
  }
  if (u.kind == UpdateKind::create && !gone) {
    bool same = c->committed.attributes.same_tag(u.attributes);
    if (same) out_->push_back(Touch{u.key});
    reply(r, same ? Outcome::existed : Outcome::tag_differs, c->committed);
    return false;
  }
  if (u.beyond_end && newest(c).logical_bytes() > u.offset_bytes) {
    reply(r, Outcome::existed, newest(c));
    return false;
  }
  // The bytes of an encoded chunk mean nothing by themselves: it is replaced as a whole, or removed.
  const bool partial = u.kind == UpdateKind::write || u.kind == UpdateKind::truncate;
  if (partial && (u.attributes.codec != 0 || newest(c).attributes.codec != 0)) {
    reply(r, Outcome::invalid);
    return false;
  }
  if (pending_count_ >= options_.max_pendings) {
    r->state = Request::State::wants_room;
    room_.push(r);
    return false;
  }
  return true;
}

void Replica::Machine::fetched_for_request(Request* r, Outcome outcome) {
  r->op = 0;
  if (outcome != Outcome::ok) return reply(r, outcome);
  r->fetched = true;
  run_.push(r);
}

// ---- 2. Numbered, sent on at once, staged --------------------------------------------------

Pending* Replica::Machine::number(const ClientUpdate& u, Chunk* c) {
  Update update;
  update.key = u.key;
  update.version = Version{config_.version, ++counter_};
  update.identity = u.identity;
  update.space_epoch = u.space_epoch;
  const bool absent = newest(c).version.none();
  update.kind =
      u.kind == UpdateKind::create && !absent ? UpdateKind::replace : u.kind;  // over an expired one
  update.offset_bytes = u.offset_bytes;
  update.length_bytes = u.length_bytes;
  update.attributes = u.attributes;
  update.payload = u.payload;
  const Pending* below = c->pendings.last();
  update.base = below != nullptr ? below->version() : c->committed.version;
  update.base_absent = absent;
  if (carries_payload(u.kind)) numbered_bytes_ += std::max(u.length_bytes, kLeastSlotBytes);
  Pending* p = new_pending(update, c);
  p->held = true;  // nobody is before the head
  return p;
}

Pending* Replica::Machine::new_pending(const Update& u, Chunk* c) {
  Pending* p = pending_pool_.take();
  p->update = u;
  p->chunk = c;
  p->after = facts_after(u, newest(c));
  c->pendings.push_back(p);
  c->pending_count++;
  pending_count_++;
  Pending* after = order_.last();
  while (after != nullptr && after->version() > u.version) after = order_.prev(after);
  order_.insert_after(after, p);
  if (u.identity.client.value != 0) {
    if (Pending* old = channels_.find(ChannelTraits::key(*p)); old != nullptr) channels_.remove(old);
    channels_.insert(p);
  }
  return p;
}

ChunkFacts Replica::Machine::facts_after(const Update& u, const ChunkFacts& base) {
  ChunkFacts after;
  if (u.kind == UpdateKind::remove) return after;
  after.version = u.version;
  const bool whole = u.kind == UpdateKind::replace || u.kind == UpdateKind::create;
  after.attributes = whole || base.version.none() ? u.attributes : base.attributes;
  after.length_bytes = u.kind == UpdateKind::write
                           ? std::max(base.length_bytes, u.offset_bytes + u.length_bytes)
                           : u.length_bytes;
  return after;
}

const ChunkFacts& Replica::Machine::newest(const Chunk* c) const {
  return c->pendings.empty() ? c->committed : c->pendings.last()->after;
}

void Replica::Machine::begin_update(Pending* p) {
  send_ready(p->chunk);
  stage_next(p->chunk);
}

// Sends what wasn't sent yet, in the order of the chunk.
void Replica::Machine::send_ready(Chunk* c) {
  if (last() || !reconciled_ || !successor_reconciled_) return;
  if (!c->probed) probe(c);
  if (!c->probe.none()) return;
  for (Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) {
    if (p->sent) continue;
    if (p->fallen || p->disk == Pending::Disk::fetching || load_first(p)) return;
    send(p);
  }
}

void Replica::Machine::send(Pending* p) {
  Update u = p->update;
  u.floor = floor();
  u.base_committed = ChunkPendings::prev(p) == nullptr;
  u.removal_follows = false;
  for (const Pending* q = p; q != nullptr; q = ChunkPendings::next(q)) u.removal_follows |= q->removal();
  u.held = p->held && p->disk == Pending::Disk::staged;
  p->sent = true;
  p->sent_ms = now_ms_;
  out_->push_back(SendUpdate{header_to(successor()), u});
}

// One stage at a time is under way for a chunk: a crash leaves a sequence without holes.
void Replica::Machine::stage_next(Chunk* c) {
  if (c->staging != nullptr || phase_ == Phase::syncing) return;
  for (Pending* p = c->pendings.first(); p != nullptr; p = c->pendings.next(p)) {
    if (p->disk == Pending::Disk::staged) continue;
    if (p->fallen || p->disk == Pending::Disk::fetching || p->base_damaged) return;
    p->disk = Pending::Disk::staging;
    c->staging = p;
    OpId op = new_op(Op::Kind::stage, nullptr, p);
    const bool partial = p->update.kind == UpdateKind::write || p->update.kind == UpdateKind::truncate;
    Stage stage{.op = op, .update = p->update};
    stage.keep_attributes = partial && !p->update.base_absent;
    out_->push_back(stage);
    return;
  }
}

// ---- 3. At the next member: arrival.cc

// ---- 4. Durable here, and held -------------------------------------------------------------

void Replica::Machine::staged(Pending* p, Outcome outcome) {
  Chunk* c = p->chunk;
  FFS_CHECK(c->staging == p);
  c->staging = nullptr;
  p->disk = outcome == Outcome::ok ? Pending::Disk::staged : Pending::Disk::queued;
  if (refuses(outcome)) {
    fall(p, outcome);
    return advance_refusal(c);
  }
  if (outcome == Outcome::corrupt) return base_damaged(p);
  if (outcome != Outcome::ok) return fail(Reason::device_failed);
  if (last() || phase_ == Phase::offline) let_go(p);
  if (p->held && !p->fallen) send_held(p);
  if (c->unreconciled) settle(c);
  progress(c);
  stage_next(c);
}

// Nobody is behind us to send it to now. Should there be one later (a promoted member), it goes as a whole
// chunk.
void Replica::Machine::let_go(Pending* p) {
  release(p->update.payload);
  p->loaded = true;
  if (p->removal()) return;
  p->update.kind = UpdateKind::replace;
  p->update.offset_bytes = 0;
  p->update.length_bytes = p->after.length_bytes;
  p->update.attributes = p->after.attributes;
}

// It is durable here and held by all before: the successor may count on it.
void Replica::Machine::send_held(Pending* p) {
  if (last() || !p->sent) return;
  notify(successor(), Notice{.type = NoticeType::held, .key = p->update.key, .version = p->version()});
}

void Replica::Machine::held_received(const Notice& n) {
  Chunk* c = find_chunk(n.key);
  if (c == nullptr || c->pendings.empty() || c->pendings.last()->version() < n.version) remember_held(n);
  if (c == nullptr) return;
  Pending* newest_held = nullptr;
  for (Pending* p = c->pendings.first(); p != nullptr && p->version() <= n.version && !p->fallen;
       p = c->pendings.next(p)) {
    if (!p->held && p->disk == Pending::Disk::staged) newest_held = p;
    p->held = true;
  }
  if (newest_held == nullptr) return;
  send_held(newest_held);
  progress(c);
}

// A late repetition is remembered too: it does no harm, since no version is given twice.
void Replica::Machine::remember_held(const Notice& n) {
  early_held_[early_held_next_] = EarlyHeld{n.key, n.version};
  early_held_next_ = (early_held_next_ + 1) % early_held_.size();
  early_held_count_ = std::min<uint32_t>(early_held_count_ + 1, early_held_.size());
}

// `held` covers what is below it in the chunk.
bool Replica::Machine::held_came_early(const ChunkKey& key, const Version& version) {
  for (uint32_t i = 0; i < early_held_count_; i++) {
    if (early_held_[i].version >= version && early_held_[i].key == key) return true;
  }
  return false;
}

// ---- 5. The last member commits; 6. the acknowledgement commits on the way up --------------

void Replica::Machine::progress(Chunk* c) {
  if (!on_path()) return;
  while (Pending* p = c->pendings.first()) {
    if (p->fallen) return advance_refusal(c);
    if (p->disk != Pending::Disk::staged) return;
    bool may_commit = last() ? p->held || is(Mutant::tail_commits_without_held) : p->acked;
    if (is(Mutant::commit_before_successor) && p->held) may_commit = true;
    if (!may_commit || sync_holds_back(p)) return;
    commit(p);
  }
}

void Replica::Machine::ack_received(const Notice& n) {
  Chunk* c = find_chunk(n.key);
  if (c == nullptr) return;
  for (Pending* p = c->pendings.first(); p != nullptr && p->version() <= n.version && !p->fallen;
       p = c->pendings.next(p)) {
    p->acked = true;
  }
  progress(c);
  if (c->probe.none() || n.version < c->probe) return;
  c->probe = Version{};
  send_ready(c);
  maybe_send_resent();
}

void Replica::Machine::commit(Pending* p) {
  Chunk* c = p->chunk;
  FFS_CHECK(p == c->pendings.first());
  out_->push_back(Commit{c->key, p->version()});
  c->committed = p->after;
  c->removed = p->removal() ? p->version() : Version{};
  if (!first()) {
    if (p->removal()) keep_in_memory(c, p->version());
    notify(predecessor(), Notice{.type = NoticeType::ack, .key = c->key, .version = p->version()});
  }
  sync_source_.committed(c->key, p->update.identity, p->reached);
  p->outcome = Outcome::ok;
  p->after.version = p->version();  // what a client is told, also of a removal
  resolve(p, Pending::State::done);
  repair_base(c);
}

// ---- 7. The answer --------------------------------------------------------------------------

// `p` is no longer pending: its clients are answered, and those that waited for it are judged.
void Replica::Machine::resolve(Pending* p, Pending::State state) {
  Chunk* c = p->chunk;
  p->state = state;
  c->pendings.remove(p);
  c->pending_count--;
  pending_count_--;
  order_.remove(p);
  release(p->update.payload);
  drop_op(p->fetch_op);
  drop_op(p->load_op);
  const Outcome outcome = p->outcome == Outcome::dropped ? Outcome::stale_chain : p->outcome;
  while (Request* r = p->waiters.pop()) {
    if (r->state == Request::State::answered) {
      forget(r);
    } else {
      reply(r, outcome, outcome == Outcome::ok ? p->after : ChunkFacts{});
    }
  }
  if (c->unreconciled && !c->dirty()) {
    c->unreconciled = false;
    unreconciled_--;
  }
  if (p->page != nullptr) page_removed(p->page, outcome);
  if (p->eviction) out_->push_back(Evicted{c->key, outcome});
  p->next_free = retired_pendings_;
  retired_pendings_ = p;
  retire(c);
  wake(c);
  if (Request* r = room_.pop(); r != nullptr) run_.push(r);
}

void Replica::Machine::wake(Chunk* c) {
  while (Request* r = c->turn.pop()) run_.push(r);
}

}  // namespace ffs::craq
