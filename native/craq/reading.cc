// Reads: clean chunks are answered at once, dirty ones after asking the last member what is
// committed. docs/craq.md, A read.
#include "craq/machine.h"

namespace ffs::craq {

void Replica::Machine::judge_read(Request* r, const ClientRead& read) {
  if (!chain_allows(r, /*head_only=*/false)) return;
  if (least_epoch(read.key.space()) > read.space_epoch) return reply(r, Outcome::stale_epoch);
  Chunk* c = find_chunk(read.key);
  if (c == nullptr) return finish_read(r, read, store_.committed(read.key));
  if (read.uncommitted_ok) {
    const ChunkFacts* newest_durable = &c->committed;
    for (Pending* p = c->pendings.first(); p != nullptr && p->disk == Pending::Disk::staged && !p->fallen;
         p = c->pendings.next(p)) {
      newest_durable = &p->after;
    }
    return finish_read(r, read, *newest_durable);
  }
  if (!c->dirty() || decides()) return finish_read(r, read, c->committed);
  if (is(Mutant::dirty_read_answers_local)) return finish_read(r, read, c->committed);
  if (last() && is(Mutant::serve_dirty_as_new_last)) return finish_read(r, read, c->committed);
  // Nobody to ask yet: the new version isn't ours yet, or we are its last member and have to resolve it.
  if (!acts() || last()) return park(r);
  r->op = new_op(Op::Kind::question, r, nullptr);
  ask(r, read);
}

// judge_read and finish_read for what finds nothing in its way; the same checks. Whatever else there is to
// say is said by them.
bool Replica::Machine::read_at_once(const ClientRead& read, uint64_t now_ms, ChunkFacts* facts,
                                    ChainVersion* judged_in) {
  now_ms_ = now_ms;
  if (read.facts_only || read.uncommitted_ok || read.compare_tag || read.touch) return false;
  if (!answers_reads() || read.chain_version > config_.version) return false;
  if (!is(Mutant::no_lease_check) && !leased()) return false;
  if (read.authority != Outcome::ok || least_epoch(read.key.space()) > read.space_epoch) return false;
  const Chunk* c = find_chunk(read.key);
  if (c != nullptr && c->dirty()) return false;
  *facts = c != nullptr ? c->committed : store_.committed(read.key);
  if (facts->version.none() || expired(*facts)) return false;
  if (facts->attributes.codec != 0 || facts->attributes.tag_bytes != 0) return false;
  *judged_in = config_.version;
  return true;
}

// As read_done: what was read may be out of date by now.
bool Replica::Machine::read_stands(const ChainVersion& judged_in, uint64_t now_ms) {
  now_ms_ = now_ms;
  if (is(Mutant::no_recheck_after_read)) return true;
  const bool held = is(Mutant::no_lease_check_after_read) || leased();
  return answers_reads() && config_.version == judged_in && held;
}

void Replica::Machine::ask(Request* r, const ClientRead& read) {
  r->state = Request::State::asking;
  r->asked_ms = now_ms_;
  notify(last_member(), Notice{.type = NoticeType::query, .key = read.key, .number = r->op});
}

// Whoever was asked isn't the last one any more, or it can't be reached.
void Replica::Machine::judge_anew(Request* r) {
  drop_op(r->op);
  r->op = 0;
  r->state = Request::State::judging;
  run_.push(r);
}

void Replica::Machine::judge_askers() {
  for (Request* r = requests_.first(); r != nullptr; r = requests_.next(r)) {
    if (r->state == Request::State::asking) judge_anew(r);
  }
}

// At the last member: what is committed here is the chunk's value. Before it serves that holds for clean
// chunks only: the last member before may have committed what is pending here.
void Replica::Machine::query_received(const PeerHeader& header, const Notice& n) {
  if (!answers_reads() || !last()) return;
  const Chunk* c = find_chunk(n.key);
  const bool undecided = c != nullptr && c->dirty() && !serving();
  if (undecided && !is(Mutant::serve_dirty_as_new_last)) return;  // asked again when this one serves
  const ChunkFacts facts = c != nullptr ? c->committed : store_.committed(n.key);
  Notice answer{.type = NoticeType::answer, .key = n.key, .version = facts.version, .number = n.number};
  answer.flag = !facts.version.none();
  notify(header.from, answer);
}

void Replica::Machine::answer_received(const Notice& n) {
  Op* op = ops_.find(n.number);
  if (op == nullptr || op->kind != Op::Kind::question || op->request == nullptr) return;
  Request* r = op->request;
  const ClientRead& read = std::get<ClientRead>(r->body);
  if (read.key != n.key) return;
  ops_.remove(op);
  op_pool_.give(op);
  r->op = 0;
  if (!lease_allows(r)) return;
  if (!n.flag) return finish_read(r, read, ChunkFacts{});
  const Chunk* c = find_chunk(n.key);
  const ChunkFacts committed = c != nullptr ? c->committed : store_.committed(n.key);
  // The answer is a lower bound: what is committed here may be newer by now.
  if (committed.version >= n.version) return finish_read(r, read, committed);
  const Pending* p = c != nullptr ? find_pending(c, n.version) : nullptr;
  if (p != nullptr && p->disk == Pending::Disk::staged) return finish_read(r, read, p->after);
  run_.push(r);  // removed meanwhile
}

void Replica::Machine::finish_read(Request* r, const ClientRead& read, const ChunkFacts& facts) {
  if (facts.version.none() || expired(facts)) return reply(r, Outcome::absent);
  if (read.compare_tag && !facts.attributes.same_tag(read.tag)) return reply(r, Outcome::tag_differs, facts);
  if (read.touch) out_->push_back(Touch{read.key});
  if (read.facts_only) return reply(r, Outcome::ok, facts);
  r->state = Request::State::reading;
  r->chunk = facts;
  r->judged_in = config_.version;
  r->op = new_op(Op::Kind::read, r, nullptr);
  out_->push_back(Read{r->op, read.token, read.key, facts.version, read.offset_bytes, read.length_bytes});
}

// The chain version and the lease are checked again: what was read may be out of date.
void Replica::Machine::read_done(Request* r, Outcome outcome) {
  constexpr uint32_t kMaxVanished = 16;
  r->op = 0;
  if (is(Mutant::no_recheck_after_read)) return reply(r, outcome, r->chunk);
  if (outcome == Outcome::corrupt) repairer_.damaged(std::get<ClientRead>(r->body).key, r->chunk.version);
  const bool same_chain = answers_reads() && config_.version == r->judged_in;
  const bool gone = outcome == Outcome::absent && ++r->vanished < kMaxVanished;
  if (!same_chain || gone) return run_.push(r);
  if (!is(Mutant::no_lease_check_after_read) && !lease_allows(r)) return;
  reply(r, outcome == Outcome::absent ? Outcome::io_error : outcome, r->chunk);
}

// Committed state alone answers, once nothing at or above the last committed chunk is pending.
void Replica::Machine::judge_last_chunk(Request* r, const ClientLastChunk& last_chunk) {
  if (!chain_allows(r, /*head_only=*/false)) return;
  std::optional<ChunkKey> key = store_.last_committed(last_chunk.space);
  for (const Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (p->update.key.space() != last_chunk.space) continue;
    if (!decides() && (!key.has_value() || p->update.key >= *key)) return park(r);
  }
  if (!key.has_value()) return reply(r, Outcome::absent);
  Reply answer;
  answer.key = *key;
  answer.chunk = store_.committed(*key);
  reply(r, answer);
}

}  // namespace ffs::craq
