// The source of a sync: whole chunks on their way, at most one transfer of a key at a time. What was
// committed behind the walk, what the walk has found, and what commits wait for. docs/craq.md, Recovery.
#include "base/check.h"
#include "craq/resync.h"

namespace ffs::craq {

namespace {
constexpr uint32_t kMaxUrgent = 64;  // at a time; the others wait in order
constexpr uint64_t kPauseFactor = 10;
}  // namespace

void SyncSource::committed(const ChunkKey& key, const UpdateIdentity& who, bool reached) {
  if (state_ != State::copying && state_ != State::done) return;
  damaged_.erase(key);
  if (reached) return;
  if (who.client.value != 0) owe_retry(who.client, who.channel);
  if (!covered(key) || host_.is(Mutant::forget_backlog)) return;
  if (auto at = transfers_.find(key); at != transfers_.end()) {
    at->second.again = at->second.owed = true;
  } else {
    backlog_.insert(key);
  }
}

void SyncSource::want(const ChunkKey& key, const Version& version) {
  FFS_CHECK(in_step_);
  if (auto at = transfers_.find(key); at != transfers_.end()) {
    const Transfer& t = at->second;
    if (!t.wanted.pending || t.wanted.version != version) at->second.wanted_pending = true;
    return;
  }
  if (urgent_keys_.insert(key).second) urgent_.push_back(key);
}

void SyncSource::send_urgent() {
  if (promoting_) return;
  const auto flying = [&] { return transfers_.size() - background_; };
  while (!urgent_.empty() && flying() < kMaxUrgent && may_send()) {
    const ChunkKey key = urgent_.front();
    urgent_.pop_front();
    urgent_keys_.erase(key);
    begin_transfer(key, /*urgent=*/true, backlog_.erase(key) != 0);
  }
}

// What changed and what the walk has found, in turns: neither keeps the other waiting.
void SyncSource::send_backlog() {
  while (background_ < options_.sync_window && may_send() && !(todo_.empty() && backlog_.empty())) {
    todo_next_ = !todo_next_;
    ChunkKey key;
    if (backlog_.empty() || (todo_next_ && !todo_.empty())) {
      key = todo_.front();
      todo_.pop_front();
    } else {
      key = *backlog_.begin();
      backlog_.erase(backlog_.begin());
    }
    begin_transfer(key, /*urgent=*/false, /*owed=*/true);
  }
}

void SyncSource::begin_transfer(const ChunkKey& key, bool urgent, bool owed) {
  if (auto at = transfers_.find(key); at != transfers_.end()) {
    at->second.owed |= owed;  // what was committed since the copy began has set `again`
    return;
  }
  if (urgent_keys_.count(key) != 0) urgent = true;  // its turn there finds this one under way
  Transfer& t = transfers_[key];
  t.wanted = host_.wanted(key, in_step_);
  t.urgent = urgent;
  t.owed = owed;
  if (!urgent) background_++;
  if (t.wanted.chunk.length_bytes == 0) return send_chunk(key, t);
  t.state = Transfer::State::copying;
  const OpId op = host_.new_sync_op(SyncPart::source);
  copies_[op] = key;
  host_.emit(Copy{op, key, t.wanted.version, t.wanted.chunk.length_bytes, /*background=*/!urgent, begun_ms_});
}

void SyncSource::send_chunk(const ChunkKey& key, Transfer& t) {
  t.state = Transfer::State::sent;
  const SyncKind kind = t.wanted.chunk.version.none() ? SyncKind::erase : SyncKind::chunk;
  t.number = send_new(Outgoing{.kind = kind, .key = key});
}

void SyncSource::completed(OpId op, Outcome outcome, BufferRef payload) {
  auto at = copies_.find(op);
  if (at == copies_.end()) {  // of a session that is over
    if (payload != kNoBuffer) host_.emit(Release{payload});
    return;
  }
  const ChunkKey key = at->second;
  copies_.erase(at);
  copied(key, outcome, payload);
}

void SyncSource::copied(const ChunkKey& key, Outcome outcome, BufferRef payload) {
  Transfer& t = transfers_.at(key);
  const bool spread = host_.is(Mutant::spread_corruption) && outcome == Outcome::corrupt;
  if (outcome == Outcome::ok || (spread && payload != kNoBuffer)) {
    t.payload = payload;
    return send_chunk(key, t);
  }
  if (payload != kNoBuffer) host_.emit(Release{payload});
  if (outcome == Outcome::absent) {  // superseded or removed
    // The store may show what commits with its own stage before we are told so. Asked again at once it would
    // say the same, for as long as nobody listens to anything else.
    const Wanted now = host_.wanted(key, in_step_);
    if (now.pending == t.wanted.pending && now.version == t.wanted.version) return rest(t, 0);
    const Transfer ended = take_transfer(key);
    if (ended.owed) backlog_.insert(key);
    if (ended.urgent || ended.wanted_pending) follow_up(key);
    return;
  }
  damaged_here(key);
}

// Never spread: it is repaired first. What isn't committed can't be.
void SyncSource::damaged_here(const ChunkKey& key) {
  Transfer& t = transfers_.at(key);
  if (!t.wanted.pending) {
    const Transfer ended = take_transfer(key);
    if (ended.wanted_pending) follow_up(key);
    if (ended.again) {  // and superseded since
      backlog_.insert(key);
      return;
    }
    damaged_.insert(key);
    return host_.source_damaged(key, ended.wanted.version);
  }
  if (state_ != State::done) return give_up(Outcome::corrupt, kPauseFactor * options_.resend_ms);
  set_failure(Outcome::corrupt);
  rest(t, options_.resend_ms);
}

void SyncSource::repaired(const ChunkKey& key, bool ok) {
  if (!active() || damaged_.count(key) == 0) return;
  if (!ok) return set_failure(Outcome::corrupt);
  damaged_.erase(key);
  if (damaged_.empty() && failure_ == Outcome::corrupt) set_failure(Outcome::ok);
  backlog_.insert(key);
}

SyncSource::Transfer SyncSource::take_transfer(const ChunkKey& key) {
  auto at = transfers_.find(key);
  Transfer t = at->second;
  transfers_.erase(at);
  if (!t.urgent) background_--;
  if (t.payload != kNoBuffer) host_.emit(Release{t.payload});
  t.payload = kNoBuffer;
  return t;
}

void SyncSource::transfer_ended(const ChunkKey& key, Outcome outcome) {
  if (outcome == Outcome::no_space || outcome == Outcome::over_quota) {
    if (state_ != State::done) return give_up(outcome, kPauseFactor * options_.resend_ms);
    set_failure(outcome);
  }
  if (outcome != Outcome::ok) return rest(transfers_.at(key), options_.resend_ms);
  const Transfer ended = take_transfer(key);
  sent_++;
  sent_bytes_ += ended.wanted.chunk.length_bytes;
  damaged_.erase(key);
  if (state_ == State::done) set_failure(Outcome::ok);
  if (ended.again) backlog_.insert(key);
  if (ended.wanted_pending) follow_up(key);
  if (ended.wanted.pending) host_.reached_target(key, ended.wanted.version);
}

// A commit waits for more of this key.
void SyncSource::follow_up(const ChunkKey& key) {
  if (urgent_keys_.insert(key).second) urgent_.push_back(key);
}

// It is tried again, with what is there by then, under a new number.
void SyncSource::rest(Transfer& t, uint64_t pause_ms) {
  if (t.payload != kNoBuffer) host_.emit(Release{t.payload});
  t.payload = kNoBuffer;
  t.state = Transfer::State::resting;
  t.rest_until_ms = host_.now_ms() + pause_ms;
}

void SyncSource::wake_resting() {
  std::vector<ChunkKey> due;
  for (const auto& [key, t] : transfers_) {
    if (t.state == Transfer::State::resting && host_.now_ms() >= t.rest_until_ms) due.push_back(key);
  }
  for (const ChunkKey& key : due) {
    const Transfer t = take_transfer(key);
    if (t.urgent || t.wanted_pending) follow_up(key);
    if (t.owed || t.again) backlog_.insert(key);
  }
}

}  // namespace ffs::craq
