// Requests that wait: where they wait, deadlines, resends. And the two requests that are about a
// whole space: its least epoch, and its removal page by page.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

// ---- Answering ----------------------------------------------------------------------------------

void Replica::Machine::reply(Request* r, Outcome outcome, const ChunkFacts& chunk_facts) {
  Reply answer;
  answer.outcome = outcome;
  answer.chunk = chunk_facts;
  reply(r, answer);
}

// Answers and forgets a request that no queue holds.
void Replica::Machine::reply(Request* r, const Reply& prepared) {
  Reply answer = prepared;
  answer.token = r->token();
  answer.chain_version = config_.version;
  if (answer.outcome == Outcome::offline && answer.reason == Reason::none) answer.reason = reason_;
  out_->push_back(answer);
  forget(r);
}

void Replica::Machine::forget(Request* r) {
  if (ClientUpdate* u = std::get_if<ClientUpdate>(&r->body)) release(u->payload);
  requests_.remove(r);
  request_pool_.give(r);
}

// ---- Waiting ------------------------------------------------------------------------------------

void Replica::Machine::park(Request* r) {
  r->state = Request::State::parked;
  parked_.push(r);
}

void Replica::Machine::unpark() {
  while (Request* r = parked_.pop()) run_.push(r);
  while (Request* r = room_.pop()) run_.push(r);
}

void Replica::Machine::run() {
  while (Request* r = run_.pop()) {
    if (r->state == Request::State::answered) {
      forget(r);
    } else {
      judge(r);
    }
  }
}

// Deadlines end waits, not what is under way at a disk or on the chain.
void Replica::Machine::expire() {
  if (next_deadline_ms_ == 0 || now_ms_ < next_deadline_ms_) return;
  next_deadline_ms_ = 0;
  for (Request* r = requests_.first(); r != nullptr;) {
    Request* next = requests_.next(r);
    const uint64_t deadline = r->deadline_ms();
    const bool busy = r->state == Request::State::fetching || r->state == Request::State::reading ||
                      r->state == Request::State::answered;
    if (deadline != 0 && !busy && deadline > now_ms_) {
      next_deadline_ms_ = next_deadline_ms_ == 0 ? deadline : std::min(next_deadline_ms_, deadline);
    } else if (deadline != 0 && !busy) {
      Reply answer;
      answer.token = r->token();
      answer.outcome = Outcome::timed_out;
      answer.chain_version = config_.version;
      out_->push_back(answer);
      if (ClientUpdate* u = std::get_if<ClientUpdate>(&r->body)) release(u->payload);
      if (r->state == Request::State::asking) {
        drop_op(r->op);
        forget(r);
      } else {
        r->state = Request::State::answered;  // the queue that holds it forgets it
      }
    }
    r = next;
  }
}

void Replica::Machine::tick() {
  expire();
  while (Request* r = parked_.pop()) run_.push(r);
  persist_proposal();
  persist_recorded();
  ask_leases();
  watch_neighbours();
  if (acts()) {
    sync_source_.tick();
    repairer_.tick();
  }
  if (!acts() || !on_path()) return;
  if (now_ms_ - nudged_ms_ >= options_.resend_ms && !serving()) nudge(false);
  resend_old();
}

void Replica::Machine::resend_old() {
  const auto old = [&](uint64_t sent_ms) { return now_ms_ - sent_ms >= options_.resend_ms; };
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (last() || p->acked || !old(p->sent_ms)) continue;
    if (p->fallen && root(p->chunk) == p) advance_refusal(p->chunk);
    if (p->fallen || !p->sent) continue;
    p->sent = false;
    if (p->version() == p->chunk->probe) p->chunk->probed = false;
    send_ready(p->chunk);
  }
  for (EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (!e->acked && old(e->sent_ms)) send_epoch(e);
  }
  for (Request* r = requests_.first(); r != nullptr; r = requests_.next(r)) {
    if (r->state != Request::State::asking || !old(r->asked_ms)) continue;
    if (leased())
      ask(r, std::get<ClientRead>(r->body));
    else
      judge_anew(r);
  }
}

void Replica::Machine::peer_connected(TargetId target) {
  if (!acts() || !on_path()) return;
  if (target == syncing_member()) sync_source_.connected();
  const bool below = !last() && target == successor();
  if (!below && (first() || target != predecessor())) return;
  nudge(below);
  for (EpochChange* e = epochs_.first(); below && e != nullptr; e = epochs_.next(e)) {
    if (!e->acked) send_epoch(e);
  }
}

// ---- The least epoch of a space -----------------------------------------------------------------

void Replica::Machine::judge_set_space_epoch(Request* r, const ClientSetSpaceEpoch& set) {
  if (!chain_allows(r, /*head_only=*/true)) return;
  r->state = Request::State::setting_epoch;
  for (EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (e->space == set.space && e->epoch == set.epoch) return e->waiters.push(r);
  }
  EpochChange* e = epoch_pool_.take();
  e->space = set.space;
  e->epoch = set.epoch;
  e->waiters.push(r);
  epochs_.push_back(e);
  e->op = new_op(Op::Kind::epoch, nullptr, nullptr, e);
  out_->push_back(SetSpaceEpoch{e->op, e->space, e->epoch});
  send_epoch(e);
}

void Replica::Machine::send_epoch(EpochChange* e) {
  e->sent_ms = now_ms_;
  if (last() || !reconciled_ || !successor_reconciled_) return;
  e->sent = true;
  Notice n{.type = NoticeType::space_epoch, .key = ChunkKey::of(e->space, {}), .number = e->epoch};
  notify(successor(), n);
}

void Replica::Machine::space_epoch_received(const Notice& n) {
  const uint64_t space = n.key.space();
  for (EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (e->space != space || e->epoch != n.number) continue;
    if (!e->acked) send_epoch(e);
    return;
  }
  EpochChange* e = epoch_pool_.take();
  e->space = space;
  e->epoch = n.number;
  epochs_.push_back(e);
  e->op = new_op(Op::Kind::epoch, nullptr, nullptr, e);
  out_->push_back(SetSpaceEpoch{e->op, e->space, e->epoch});
  send_epoch(e);
}

void Replica::Machine::epoch_durable(EpochChange* e, Outcome outcome) {
  if (outcome != Outcome::ok) return fail(Reason::device_failed);
  e->op = 0;
  e->durable = true;
  if (sync_holds_back(e)) return;
  if (last() || e->acked) finish_epoch(e);
}

void Replica::Machine::space_epoch_acked(const Notice& n) {
  for (EpochChange* e = epochs_.first(); e != nullptr; e = epochs_.next(e)) {
    if (e->space != n.key.space() || e->epoch != n.number) continue;
    e->acked = true;
    if (e->durable) finish_epoch(e);
    return maybe_send_resent();
  }
}

// Durable on this member and on all behind it.
void Replica::Machine::finish_epoch(EpochChange* e) {
  if (!first()) {
    Notice n{.type = NoticeType::space_epoch_ack, .key = ChunkKey::of(e->space, {}), .number = e->epoch};
    notify(predecessor(), n);
  }
  answer_epoch(e, Outcome::ok);
  forget_epoch(e);
}

void Replica::Machine::forget_epoch(EpochChange* e) {
  epochs_.remove(e);
  drop_op(e->op);
  epoch_pool_.give(e);
}

void Replica::Machine::answer_epoch(EpochChange* e, Outcome outcome) {
  while (Request* r = e->waiters.pop()) {
    if (r->state == Request::State::answered) {
      forget(r);
    } else {
      reply(r, outcome);
    }
  }
}

// ---- Removal of a space, page by page -----------------------------------------------------------

void Replica::Machine::judge_remove_page(Request* r, const ClientRemovePage& page) {
  if (!chain_allows(r, /*head_only=*/true)) return;
  const uint64_t least = least_epoch(page.space);
  const bool whole = page.space_epoch == UINT64_MAX;
  if (page.limit == 0 || (whole && least != UINT64_MAX)) return reply(r, Outcome::invalid);
  if (least > page.space_epoch) return reply(r, Outcome::stale_epoch);
  for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (p->update.key.space() != page.space || (page.has_after && p->update.key <= page.after)) continue;
    return park(r);  // behind what is pending
  }
  r->state = Request::State::removing_page;
  r->reply.key = page.after;
  r->outstanding = 1;  // ours, until all are under way
  std::optional<ChunkKey> key = store_.first_committed(page.space, page.has_after ? &page.after : nullptr);
  const uint32_t limit = std::min(page.limit, options_.max_pendings);
  for (uint32_t i = 0; i < limit && key.has_value(); i++) {
    Chunk* c = chunk(*key);
    r->reply.key = *key;
    if (!c->committed.version.none()) {
      ClientUpdate u;
      u.key = *key;
      u.kind = UpdateKind::remove;
      u.space_epoch = page.space_epoch;
      Pending* p = number(u, c);
      p->page = r;
      r->outstanding++;
      begin_update(p);
    }
    key = store_.first_committed(page.space, &r->reply.key);
  }
  r->reply.more = key.has_value();
  page_step(r);
}

void Replica::Machine::page_removed(Request* r, Outcome outcome) {
  if (outcome == Outcome::ok) {
    r->reply.count++;
  } else {
    r->reply.outcome = outcome;
  }
  page_step(r);
}

void Replica::Machine::page_step(Request* r) {
  if (--r->outstanding > 0) return;
  if (r->state == Request::State::answered) return forget(r);
  reply(r, Reply{r->reply});
}

}  // namespace ffs::craq
