#include "craq/repair.h"

#include <algorithm>

#include "base/check.h"

namespace ffs::craq {

namespace {

constexpr uint32_t kMaxActive = 16;    // repairs at a time
constexpr uint32_t kMaxServed = 16;    // copies for others at a time; who isn't served asks again
constexpr uint32_t kAsksOfOne = 4;     // before the next member is asked
constexpr uint64_t kPauseFactor = 20;  // of resend_ms: until all are asked once more
constexpr uint32_t kLookedAt = 256;    // at each tick, of those that rest
constexpr size_t kMaxQuestions = 8;    // about ranges; an older one is forgotten, the scrubber comes again

}  // namespace

// ---- What is damaged here -----------------------------------------------------------------------

void Repairer::damaged(const ChunkKey& key, const Version& version, TargetId only) {
  Job job;
  job.version = version;
  job.only = only;
  add(key, job);
}

void Repairer::obtain(const ChunkKey& key, const Version& version) {
  Job job;
  job.version = version;
  job.hand_over = true;
  add(key, job);
}

void Repairer::add(const ChunkKey& key, const Job& job) {
  if (!needed(key, job)) return;
  auto [at, fresh] = jobs_.try_emplace(Name{key, job.version}, job);
  if (fresh) return set_state(at, Job::State::queued);
  if (job.only != TargetId{}) return;
  at->second.only = TargetId{};  // known before, from a comparison
  if (!job.hand_over) at->second.hand_over = false;
}

bool Repairer::needed(const ChunkKey& key, const Job& job) const {
  if (job.version.none()) return false;
  if (job.hand_over) return host_.wants_payload(key, job.version);
  return host_.committed_now(key).version == job.version || host_.is(Mutant::repair_any_version);
}

void Repairer::set_state(Jobs::iterator at, Job::State state) {
  const auto busy = [](Job::State s) { return s != Job::State::queued && s != Job::State::resting; };
  Job& job = at->second;
  if (busy(job.state) && !busy(state)) active_.erase(at->first);
  if (!busy(job.state) && busy(state)) active_.insert(at->first);
  if (state == Job::State::queued) queue_.push_back(at->first);
  job.state = state;
  job.since_ms = host_.now_ms();
}

Repairer::Jobs::iterator Repairer::drop(Jobs::iterator at) {
  release(at->second.payload);
  active_.erase(at->first);
  return jobs_.erase(at);
}

void Repairer::chain_changed() {
  questions_.clear();
  copies_.clear();  // what they bring is released
  queue_.clear();
  for (auto at = jobs_.begin(); at != jobs_.end();) {
    Job& job = at->second;
    const bool disk = job.state == Job::State::fetching || job.state == Job::State::installing;
    job.tried = job.asks = 0;
    if (!disk) set_state(at, Job::State::queued);
    at = !disk && job.only != TargetId{} ? drop(at) : std::next(at);
  }
}

void Repairer::pump() {
  while (!queue_.empty() && active_.size() < kMaxActive) {
    auto at = jobs_.find(queue_.front());
    queue_.pop_front();
    if (at == jobs_.end() || at->second.state != Job::State::queued) continue;
    if (needed(at->first.first, at->second)) {
      ask_next(at);
    } else {
      drop(at);
    }
  }
}

void Repairer::tick() {
  const std::set<Name> asking = active_;
  for (const Name& name : asking) {
    auto at = jobs_.find(name);
    if (at == jobs_.end() || at->second.state != Job::State::asking) continue;
    if (!needed(name.first, at->second)) {
      drop(at);
    } else if (host_.now_ms() - at->second.since_ms >= options_.resend_ms) {
      at->second.asks < kAsksOfOne ? ask(at) : ask_next(at);
    }
  }
  // Of all others some at a time: which rest until all members are asked once more, or aren't needed now.
  const size_t looks = std::min<size_t>(kLookedAt, jobs_.size());
  for (size_t i = 0; i < looks && !jobs_.empty(); i++) {
    auto at = jobs_.upper_bound(looked_at_);
    if (at == jobs_.end()) at = jobs_.begin();
    looked_at_ = at->first;
    const bool rested = host_.now_ms() - at->second.since_ms >= kPauseFactor * options_.resend_ms;
    if (at->second.state != Job::State::resting && at->second.state != Job::State::queued) continue;
    if (!needed(at->first.first, at->second)) {
      drop(at);
    } else if (at->second.state == Job::State::resting && rested) {
      at->second.tried = 0;
      set_state(at, Job::State::queued);
    }
  }
}

// ---- Asking the others, one after the other -----------------------------------------------------

// The predecessor first, then up to the head, then those behind.
std::optional<uint32_t> Repairer::next_member(const Job& job) const {
  const ChainConfig& config = host_.config();
  const uint32_t path = host_.path_count();
  uint32_t mine = 0;
  while (mine < path && config.members[mine].target != host_.self()) mine++;
  const auto fits = [&](uint32_t i) {
    const bool allowed = job.only == TargetId{} || job.only == config.members[i].target;
    return i != mine && (job.tried & (1u << i)) == 0 && allowed;
  };
  for (uint32_t i = mine; i > 0; i--) {
    if (fits(i - 1)) return i - 1;
  }
  for (uint32_t i = mine + 1; i < path; i++) {
    if (fits(i)) return i;
  }
  return std::nullopt;
}

void Repairer::ask_next(Jobs::iterator at) {
  Job& job = at->second;
  const std::optional<uint32_t> member = next_member(job);
  if (!member.has_value()) return nobody_has_it(at);
  job.tried |= 1u << *member;
  job.asked = host_.config().members[*member].target;
  job.asks = 0;
  job.id = ++last_id_;
  ask(at);
}

void Repairer::ask(Jobs::iterator at) {
  set_state(at, Job::State::asking);
  Job& job = at->second;
  job.asks++;
  SyncMessage m{.kind = SyncKind::fetch, .number = job.id, .key = at->first.first};
  m.chunk.version = job.version;
  host_.send_sync(job.asked, m, kNoBuffer);
}

void Repairer::nobody_has_it(Jobs::iterator at) {
  const auto [key, version] = at->first;
  Job& job = at->second;
  if (job.only != TargetId{}) {  // the predecessor's copy is the damaged one, or has changed
    drop(at);
    return;
  }
  const bool hand_over = job.hand_over;
  set_state(at, Job::State::resting);
  if (!job.reported) host_.emit(Repaired{key, version, false});
  job.reported = true;
  if (hand_over) return host_.obtained(key, version, Outcome::absent, kNoBuffer);
  host_.repair_ended(key, version, false);
}

void Repairer::arrived(TargetId from, const SyncMessage& m, BufferRef payload, PayloadState payload_state) {
  if (m.kind == SyncKind::fetched) return fetched(from, m, payload, payload_state);
  release(payload);
  if (m.kind == SyncKind::fetch) serve(from, m);
  if (m.kind == SyncKind::compare) answer_compare(host_, from, m);
  if (m.kind == SyncKind::same || m.kind == SyncKind::list) listed(from, m);
}

void Repairer::fetched(TargetId from, const SyncMessage& m, BufferRef payload, PayloadState payload_state) {
  auto at = jobs_.find(Name{m.key, m.chunk.version});
  if (at == jobs_.end() || at->second.state != Job::State::asking || at->second.id != m.number ||
      at->second.asked != from) {
    return release(payload);
  }
  Job& job = at->second;
  if (m.outcome != Outcome::ok) {
    release(payload);
    return ask_next(at);
  }
  const bool spread = host_.is(Mutant::spread_corruption);
  const bool missing = m.chunk.length_bytes > 0 && payload == kNoBuffer;
  if (missing || (payload_state == PayloadState::bad && !spread)) {
    return release(payload);  // asked for again by tick()
  }
  job.payload = payload;
  job.chunk = m.chunk;
  if (payload_state != PayloadState::later || m.chunk.length_bytes == 0) {
    return job.hand_over ? hand_over(at) : install(at);
  }
  set_state(at, Job::State::fetching);
  const OpId op = host_.new_sync_op(SyncPart::repair);
  ops_[op] = at->first;
  host_.emit(Fetch{op, payload});
}

// ---- Putting it in place ------------------------------------------------------------------------

void Repairer::install(Jobs::iterator at) {
  set_state(at, Job::State::installing);
  const ChunkKey& key = at->first.first;
  const Job& job = at->second;
  const OpId op = host_.new_sync_op(SyncPart::repair);
  ops_[op] = at->first;
  Install effect{.op = op, .key = key, .chunk = job.chunk, .payload = job.payload, .only_over = job.version};
  effect.background = false;
  if (host_.is(Mutant::repair_any_version)) effect.only_over = Version{};
  host_.emit(effect);
}

void Repairer::completed(OpId op, Outcome outcome, BufferRef payload) {
  if (auto at = copies_.find(op); at != copies_.end()) {
    const Served s = at->second;
    copies_.erase(at);
    return served(s, outcome, payload);
  }
  release(payload);
  auto at = ops_.find(op);
  if (at == ops_.end()) return;  // a copy that nobody waits for any more
  auto job = jobs_.find(at->second);
  ops_.erase(at);
  FFS_CHECK(job != jobs_.end());
  if (job->second.state == Job::State::installing) return installed(job, outcome);
  if (!needed(job->first.first, job->second)) {
    drop(job);
  } else if (outcome != Outcome::ok) {
    release(job->second.payload);
    set_state(job, Job::State::asking);  // asked again by tick()
  } else if (job->second.hand_over) {
    hand_over(job);
  } else {
    install(job);
  }
}

void Repairer::hand_over(Jobs::iterator at) {
  const Name name = at->first;
  const BufferRef payload = at->second.payload;
  at->second.payload = kNoBuffer;
  drop(at);
  host_.obtained(name.first, name.second, Outcome::ok, payload);
}

void Repairer::installed(Jobs::iterator at, Outcome outcome) {
  Job& job = at->second;
  const auto [key, version] = at->first;
  release(job.payload);
  if (outcome == Outcome::io_error) host_.device_failed();
  if (outcome == Outcome::ok) {
    repaired_++;
    host_.emit(Repaired{key, version, true});
    drop(at);
    host_.chunk_replaced(key);
    host_.repair_ended(key, version, true);
  } else if (outcome == Outcome::condition_failed || !needed(key, job)) {
    drop(at);
  } else {
    set_state(at, Job::State::resting);  // no room: later
  }
}

// ---- For others ---------------------------------------------------------------------------------

void Repairer::serve(TargetId to, const SyncMessage& m) {
  for (const auto& [op, s] : copies_) {
    if (s.to == to && s.id == m.number) return;  // under way
  }
  const std::optional<ChunkFacts> facts = host_.held_version(m.key, m.chunk.version);
  Served s{.to = to, .id = m.number, .key = m.key};
  s.chunk.version = m.chunk.version;
  if (!facts.has_value()) return served(s, Outcome::absent, kNoBuffer);
  s.chunk = *facts;
  if (facts->length_bytes == 0) return served(s, Outcome::ok, kNoBuffer);
  if (copies_.size() >= kMaxServed) return;
  const OpId op = host_.new_sync_op(SyncPart::repair);
  copies_[op] = s;
  host_.emit(Copy{op, m.key, facts->version, facts->length_bytes, /*background=*/true});
}

void Repairer::served(const Served& s, Outcome outcome, BufferRef payload) {
  SyncMessage m{.kind = SyncKind::fetched, .outcome = outcome, .number = s.id, .key = s.key};
  m.chunk = s.chunk;
  const bool spread =
      host_.is(Mutant::spread_corruption) && outcome == Outcome::corrupt && payload != kNoBuffer;
  if (spread) m.outcome = Outcome::ok;
  host_.send_sync(s.to, m, m.outcome == Outcome::ok ? payload : kNoBuffer);
  release(payload);
  if (outcome == Outcome::corrupt || outcome == Outcome::io_error) damaged(s.key, s.chunk.version);
}

// ---- The scrubber's comparison ------------------------------------------------------------------

std::optional<ChunkKey> Repairer::compare(const ChunkKey& from, TargetId predecessor) {
  ChunkKey last;
  if (!host_.store_is_current() || !ask_range(from, last_key(), predecessor, &last)) return std::nullopt;
  return next_key(&last) ? std::optional<ChunkKey>(last) : std::nullopt;
}

bool Repairer::ask_range(const ChunkKey& from, const ChunkKey& to, TargetId predecessor, ChunkKey* last) {
  const RangeDigest own = digest_range(host_.store(), from, to, kMaxSyncItems);
  *last = own.last;
  if (own.count == 0) return false;
  if (questions_.size() >= kMaxQuestions) questions_.pop_front();
  questions_.push_back(Question{++last_id_, predecessor, from, own.last});
  SyncMessage m{.kind = SyncKind::compare, .number = last_id_, .key = from, .last = own.last};
  m.count = own.count;
  m.digest = own.digest;
  host_.send_sync(predecessor, m, kNoBuffer);
  return true;
}

// Only what differs under one version is damage; the rest is on its way through the chain.
void Repairer::listed(TargetId from, const SyncMessage& m) {
  for (auto at = questions_.begin(); at != questions_.end(); ++at) {
    if (at->id != m.number || at->asked != from) continue;
    const Question asked = *at;
    questions_.erase(at);
    if (m.kind == SyncKind::same) return;
    for (size_t i = 0; i < m.list_count(); i++) {
      const ListItem item = m.listed(i);
      const std::optional<ChunkDigest> own = host_.store().digest_at_or_after(item.key);
      const bool both = own.has_value() && own->key == item.key && own->chunk.version == item.version;
      if (both && own->digest != item.digest) damaged(item.key, item.version, from);
    }
    ChunkKey rest = m.last;
    ChunkKey last;
    if (m.last < asked.last && m.list_count() > 0 && next_key(&rest))
      ask_range(rest, asked.last, from, &last);
    return;
  }
}

void Repairer::release(BufferRef& payload) {
  if (payload != kNoBuffer) host_.emit(Release{payload});
  payload = kNoBuffer;
}

}  // namespace ffs::craq
