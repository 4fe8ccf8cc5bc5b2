// The source of a sync: its session, its numbered messages, the retry table and the epochs, and how it gets
// to its end. Chunks are in resync_transfer.cc, the comparison in resync_walk.cc. docs/craq.md, Recovery.
#include <algorithm>

#include "base/check.h"
#include "craq/resync.h"

namespace ffs::craq {

namespace {

constexpr uint64_t kMaxAhead = 4000;  // numbers given above the oldest that isn't answered
constexpr uint32_t kItemsPerMessage = 64;
constexpr uint64_t kPauseFactor = 10;    // of resend_ms: after the target was full, or had no good copy
constexpr size_t kMaxBacklog = 1 << 16;  // keys; from here on commits wait, so that it ends

}  // namespace

// ---- The session --------------------------------------------------------------------------------

void SyncSource::start(TargetId target, uint64_t own_incarnation, uint64_t target_incarnation) {
  stop();
  target_ = target;
  session_ = {0, own_incarnation, target_incarnation};
  failure_ = Outcome::ok;
  begin();
}

void SyncSource::stop() {
  if (!active()) return;
  void_session();
  state_ = State::off;
  target_ = TargetId{};
  failure_ = Outcome::ok;
}

void SyncSource::suspend() {
  if (!active()) return;
  const bool in_step = in_step_;
  void_session();
  in_step_ = in_step;
  state_ = State::suspended;
}

void SyncSource::begin() {
  session_.attempt++;
  state_ = State::beginning;
  next_number_ = 1;
  begun_ms_ = heard_ms_ = host_.now_ms();
  send_new(Outgoing{.kind = SyncKind::begin});
}

// The target has dropped what it knew besides its chunks: all else begins.
void SyncSource::begun() {
  state_ = State::copying;
  total_ = host_.store().chunk_count();
  compared_ = sent_ = sent_bytes_ = 0;
  class Retries final : public RetryVisitor {
   public:
    explicit Retries(SyncSource& s) : s_(s) {}
    void visit(ClientId client, uint32_t channel, const RetryEntry&) override {
      s_.owe_retry(client, channel);
    }

   private:
    SyncSource& s_;
  } retries(*this);
  class Epochs final : public SpaceEpochVisitor {
   public:
    explicit Epochs(SyncSource& s) : s_(s) {}
    void visit(uint64_t space, uint64_t epoch) override { s_.epochs_.push_back({space, epoch}); }

   private:
    SyncSource& s_;
  } epochs(*this);
  host_.store().each_retry(retries);
  host_.store().each_space_epoch(epochs);
}

void SyncSource::void_session() {
  for (auto& [key, t] : transfers_) {
    if (t.payload != kNoBuffer) host_.emit(Release{t.payload});
  }
  transfers_.clear();
  copies_.clear();  // what they bring is released
  outgoing_.clear();
  background_ = 0;
  urgent_.clear();
  urgent_keys_.clear();
  todo_.clear();
  backlog_.clear();
  damaged_.clear();
  channels_.clear();
  channels_known_.clear();
  epochs_.clear();
  refusals_.clear();
  retries_under_way_ = epochs_under_way_ = refusals_under_way_ = false;
  walk_from_ = ChunkKey{};
  walk_done_ = false;
  ranges_.clear();
  in_step_ = promoting_ = false;
}

// Not once it was done: the manager may have made the target serving by then.
void SyncSource::give_up(Outcome why, uint64_t pause_ms) {
  FFS_CHECK(state_ == State::beginning || state_ == State::copying);
  void_session();
  state_ = State::pausing;
  pause_until_ms_ = host_.now_ms() + pause_ms;
  set_failure(why);
  host_.sync_gave_up();
}

void SyncSource::set_failure(Outcome why) {
  if (failure_ == why) return;
  failure_ = why;
  host_.sync_news();
}

// ---- What the machine tells ---------------------------------------------------------------------

void SyncSource::refused(const UpdateIdentity& who) {
  if (state_ != State::copying && state_ != State::done) return;
  if (who.client.value != 0) owe_retry(who.client, who.channel);
}

void SyncSource::epoch_set(uint64_t space, uint64_t epoch) {
  if (state_ == State::copying || state_ == State::done) epochs_.push_back({space, epoch});
}

void SyncSource::want_refusal(const ChunkKey& key, const Version& version, const RetryItem& entry) {
  for (const Refusal& r : refusals_) {
    if (r.version == version && r.key == key) return;
  }
  for (const auto& [number, out] : outgoing_) {
    for (const auto& waiting : out.waiting) {
      if (waiting.second == version && waiting.first == key) return;
    }
  }
  refusals_.push_back({key, version, entry});
}

// ---- Numbered messages --------------------------------------------------------------------------

uint64_t SyncSource::floor() const {
  return outgoing_.empty() ? next_number_ : outgoing_.begin()->first;
}

bool SyncSource::may_send() const {
  return next_number_ - floor() < kMaxAhead;
}

uint64_t SyncSource::send_new(Outgoing out) {
  const uint64_t number = next_number_++;
  out.first_ms = host_.now_ms();
  out.tries = 0;
  Outgoing& kept = outgoing_[number] = std::move(out);
  send(number, kept);
  return number;
}

void SyncSource::send(uint64_t number, Outgoing& out) {
  SyncMessage m;
  m.kind = out.kind;
  m.session = session_;
  m.number = number;
  m.floor = floor();
  m.items = out.items;
  out.sent_ms = host_.now_ms();
  out.tries++;
  if (out.kind != SyncKind::chunk && out.kind != SyncKind::erase) {
    return host_.send_sync(target_, m, kNoBuffer);
  }
  const Transfer& t = transfers_.at(out.key);
  m.key = out.key;
  m.chunk = t.wanted.chunk;
  m.urgent = t.urgent && out.kind == SyncKind::chunk;
  SyncItems items;
  if (t.wanted.retry.has_value()) items.add(*t.wanted.retry);
  m.items = items.bytes();
  host_.send_sync(target_, m, t.payload);
}

void SyncSource::arrived(const SyncMessage& m) {
  if (!active() || state_ == State::suspended || m.session != session_) return;
  heard_ms_ = host_.now_ms();
  if (m.kind == SyncKind::same || m.kind == SyncKind::list) return range_answered(m);
  auto at = outgoing_.find(m.number);
  if (m.kind != SyncKind::taken || at == outgoing_.end()) return;
  if (m.progress == Progress::under_way) {
    at->second.sent_ms = host_.now_ms();
  } else if (m.progress == Progress::lacking) {
    send(at->first, at->second);
  } else if (m.progress == Progress::ended) {
    ended(m.number, m.outcome);
  }
}

void SyncSource::ended(uint64_t number, Outcome outcome) {
  const Outgoing out = std::move(outgoing_.at(number));
  outgoing_.erase(number);
  if (out.kind == SyncKind::chunk || out.kind == SyncKind::erase) return transfer_ended(out.key, outcome);
  if (outcome != Outcome::ok) {
    if (state_ != State::done) return give_up(outcome, kPauseFactor * options_.resend_ms);
    send_new(out);
    return;
  }
  if (out.kind == SyncKind::begin) return begun();
  if (out.kind == SyncKind::epochs) {
    epochs_under_way_ = false;
    SyncMessage m;
    m.items = out.items;
    for (size_t i = 0; i < m.epoch_count(); i++)
      host_.epoch_reached_target(m.epoch(i).space, m.epoch(i).epoch);
    return;
  }
  (out.refusals ? refusals_under_way_ : retries_under_way_) = false;
  for (const auto& [key, version] : out.waiting) host_.reached_target(key, version);
}

// ---- The retry table and the epochs -------------------------------------------------------------

// It is read when it is sent: the newest one goes, however often it has changed by then.
void SyncSource::owe_retry(ClientId client, uint32_t channel) {
  if (channels_known_.insert({client.value, channel}).second) channels_.emplace_back(client, channel);
}

void SyncSource::send_retries() {
  if (retries_under_way_ || channels_.empty() || !may_send()) return;
  SyncItems items;
  // An entry that isn't there has been dropped with its client.
  for (uint32_t looked = 0; looked < kItemsPerMessage && !channels_.empty(); looked++) {
    const auto [client, channel] = channels_.front();
    channels_.pop_front();
    channels_known_.erase({client.value, channel});
    std::optional<RetryEntry> entry = host_.store().retry(client, channel);
    if (!entry.has_value() || host_.is(Mutant::no_retry_copy)) continue;
    if (entry->state == RetryState::pending) {
      // Its result follows when there is one. Until then the target mustn't take it for done, but older
      // sequences are over.
      entry->state = RetryState::refused;
      entry->outcome = Outcome::dropped;
    }
    items.add(RetryItem{client, channel, *entry});
  }
  if (items.count() == 0) return;
  retries_under_way_ = true;
  Outgoing out{.kind = SyncKind::retries};
  out.items.assign(items.bytes().begin(), items.bytes().end());
  send_new(std::move(out));
}

void SyncSource::send_refusals() {
  if (refusals_under_way_ || refusals_.empty() || !may_send()) return;
  SyncItems items;
  Outgoing out{.kind = SyncKind::retries, .refusals = true};
  while (!refusals_.empty() && items.count() < kItemsPerMessage) {
    const Refusal& r = refusals_.front();
    items.add(r.entry);
    out.waiting.emplace_back(r.key, r.version);
    refusals_.pop_front();
  }
  out.items.assign(items.bytes().begin(), items.bytes().end());
  refusals_under_way_ = true;
  send_new(std::move(out));
}

void SyncSource::send_epochs() {
  if (epochs_under_way_ || epochs_.empty() || !may_send()) return;
  if (host_.is(Mutant::no_epoch_copy)) return epochs_.clear();
  SyncItems items;
  for (; !epochs_.empty() && items.count() < kItemsPerMessage; epochs_.pop_front())
    items.add(epochs_.front());
  epochs_under_way_ = true;
  Outgoing out{.kind = SyncKind::epochs};
  out.items.assign(items.bytes().begin(), items.bytes().end());
  send_new(std::move(out));
}

// ---- To its end ---------------------------------------------------------------------------------

void SyncSource::pump() {
  if (state_ != State::copying && state_ != State::done) return;
  send_urgent();
  send_refusals();
  send_epochs();
  if (host_.store_is_current()) {
    send_retries();
    walk();
  }
  send_backlog();
  advance();
}

void SyncSource::advance() {
  if (state_ != State::copying) return;
  const bool walked = walk_done_ && ranges_.empty() && todo_.empty();
  if (walked || backlog_.size() >= kMaxBacklog) in_step_ = true;
  const bool early = host_.is(Mutant::early_promotion) && walk_done_;
  if (!early && !all_there()) return;
  in_step_ = true;
  state_ = State::done;
  failure_ = Outcome::ok;
  host_.sync_news();
}

// The target has all that is committed here, and nothing can be committed any more without it.
bool SyncSource::all_there() const {
  if (!in_step_ || !walk_done_ || !ranges_.empty() || !todo_.empty() || !backlog_.empty()) return false;
  if (!damaged_.empty() || !channels_.empty() || !epochs_.empty() || !refusals_.empty()) return false;
  if (retries_under_way_ || epochs_under_way_ || refusals_under_way_ || !host_.store_is_current())
    return false;
  for (const auto& [key, t] : transfers_) {
    if (t.owed) return false;
  }
  return true;
}

void SyncSource::connected() {
  if (active()) resend(true);
}

void SyncSource::tick() {
  if (!active() || state_ == State::suspended) return;
  const uint64_t now = host_.now_ms();
  if (state_ == State::pausing) {
    if (now >= pause_until_ms_) begin();
    return;
  }
  wake_resting();
  resend(false);
  // Before those above suspect us, who owe them answers meanwhile.
  const uint64_t patience_ms = options_.suspect_ms / 2;
  if (state_ == State::done || now - heard_ms_ < patience_ms) return;
  bool silent = false;
  for (const auto& [number, out] : outgoing_) silent |= now - out.first_ms >= patience_ms;
  for (const Range& range : ranges_) silent |= range.question != 0 && now - range.first_ms >= patience_ms;
  if (!silent) return;
  if (state_ == State::beginning) return set_failure(Outcome::timed_out);  // goes on asking
  give_up(Outcome::timed_out, 0);
}

// A payload isn't sent again before the target was asked whether it came. `begin` often comes before the
// target has adopted the version, and is dropped there: it is repeated soon. And whoever is there, however
// slow, shall have been asked a few times before its silence counts.
void SyncSource::resend(bool all) {
  const uint64_t now = host_.now_ms();
  const uint64_t most_ms =
      options_.suspect_ms == 0 ? UINT64_MAX : std::max<uint64_t>(options_.suspect_ms / 8, 1);
  const uint64_t base_ms = state_ == State::beginning ? options_.resend_ms / 32 : options_.resend_ms;
  const auto due = [&](uint64_t sent_ms, uint32_t tries) {
    return all || now - sent_ms >= std::min(base_ms << std::min(tries, 4u) >> 1, most_ms);
  };
  for (auto& [number, out] : outgoing_) {
    if (!due(out.sent_ms, out.tries)) continue;
    if (out.kind != SyncKind::chunk || transfers_.at(out.key).payload == kNoBuffer) {
      send(number, out);
      continue;
    }
    SyncMessage m{.kind = SyncKind::probe, .session = session_, .number = number, .floor = floor()};
    out.sent_ms = now;
    out.tries++;
    host_.send_sync(target_, m, kNoBuffer);
  }
  for (Range& range : ranges_) {
    // More and more seldom: an answer to the question before doesn't count.
    const bool late = now - range.sent_ms >= (options_.resend_ms << std::min(range.tries, 4u) >> 1);
    if (range.question != 0 && (all || late)) range.question = 0;  // asked anew by walk()
  }
}

void SyncSource::fill(ReplicaStatus* status) const {
  if (!active()) return;
  status->sync_target = target_;
  status->sync_done = state_ == State::done;
  status->sync_chunks_compared = compared_;
  status->sync_chunks_sent = sent_;
  status->sync_bytes_sent = sent_bytes_;
  status->sync_chunks_total = total_;
  status->sync_failure = failure_;
}

}  // namespace ffs::craq
