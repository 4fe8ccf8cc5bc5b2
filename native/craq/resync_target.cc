// The target of a sync: takes each numbered message of its session once, does what it says, and says so
// when that is durable. docs/craq.md, Recovery.
#include <algorithm>

#include "base/check.h"
#include "craq/resync.h"

namespace ffs::craq {

namespace {

constexpr uint64_t kMaxAhead = 4096;  // numbers above the floor; a source in its right mind gives fewer

bool numbered(SyncKind kind) {
  return kind == SyncKind::begin || kind == SyncKind::retries || kind == SyncKind::epochs ||
         kind == SyncKind::chunk || kind == SyncKind::erase;
}

// A later sequence, or the result of one that was only known to be over.
bool newer(const RetryEntry& a, const RetryEntry& b) {
  if (a.sequence != b.sequence) return a.sequence > b.sequence;
  return a.outcome != Outcome::dropped && b.outcome == Outcome::dropped;
}

}  // namespace

void SyncTarget::start(TargetId source, uint64_t source_incarnation, uint64_t own_incarnation) {
  stop();
  active_ = true;
  source_ = source;
  session_ = {0, source_incarnation, own_incarnation};
}

void SyncTarget::stop() {
  active_ = false;
  void_numbers();
}

// What is at the disk ends by itself; its payloads are released then.
void SyncTarget::void_numbers() {
  for (auto& [id, op] : ops_) {
    auto at = taken_.find(op.number);
    if (op.number == 0 || at == taken_.end()) continue;
    op.payload = at->second.payload;
    at->second.payload = kNoBuffer;
    if (op.replaces.has_value()) op.retry = at->second.retry;
    op.number = 0;
  }
  taken_.clear();
  reset_ = reset_due_ = false;
  floor_ = 0;
}

// ---- Which messages are taken -------------------------------------------------------------------

bool SyncTarget::of_session(const SyncMessage& m) {
  if (host_.is(Mutant::trust_old_attempts) && m.kind != SyncKind::begin) return true;
  SyncSession mine = session_;
  mine.attempt = m.session.attempt;
  if (m.session != mine || m.session.attempt < session_.attempt) return false;
  return m.session.attempt == session_.attempt || m.kind == SyncKind::begin;
}

void SyncTarget::arrived(TargetId from, const SyncMessage& m, BufferRef payload, PayloadState payload_state) {
  if (!active_ || from != source_ || m.session.attempt == 0 || !of_session(m)) return release(payload);
  if (m.kind == SyncKind::begin && m.session.attempt > session_.attempt) {
    release(payload);
    return begin_attempt(m.session.attempt, m.number);
  }
  if (m.kind == SyncKind::compare && reset_) answer_compare(host_, from, m);
  const bool blind = host_.is(Mutant::ignore_sync_numbers) && reset_;
  if (m.kind == SyncKind::probe || numbered(m.kind)) {
    floor_ = std::max(floor_, m.floor);
    while (!taken_.empty() && taken_.begin()->first < floor_ && taken_.begin()->second.ended) {
      taken_.erase(taken_.begin());
    }
  }
  auto known = taken_.find(m.number);
  if (blind && numbered(m.kind) && (known == taken_.end() || known->second.ended)) {
    taken_.erase(m.number);
    return take(m, payload, payload_state);
  }
  if (m.kind == SyncKind::probe && known == taken_.end() && m.number >= floor_) {
    answer(m.number, Progress::lacking, Outcome::ok);
  } else if (known != taken_.end() && (m.kind == SyncKind::probe || numbered(m.kind))) {
    answer(m.number);
  } else if (reset_ && numbered(m.kind) && m.number >= floor_ && m.number - floor_ < kMaxAhead) {
    return take(m, payload, payload_state);
  }
  release(payload);
}

void SyncTarget::begin_attempt(uint32_t attempt, uint64_t number) {
  void_numbers();
  session_.attempt = attempt;
  begin_number_ = number;
  reset_due_ = true;
  taken_[number].kind = SyncKind::begin;
  pump();
}

// The table is dropped when nothing of an earlier session, or of the time when this target served, can
// still come after it.
void SyncTarget::pump() {
  if (!active_ || !reset_due_ || busy() || !host_.forget_pendings()) return;
  reset_due_ = false;
  host_.emit(ResetTarget{disk_op(begin_number_, &taken_.at(begin_number_))});
}

// ---- Taking -------------------------------------------------------------------------------------

void SyncTarget::take(const SyncMessage& m, BufferRef payload, PayloadState payload_state) {
  Taken& taken = taken_[m.number];
  taken.kind = m.kind;
  taken.key = m.key;
  taken.chunk = m.chunk;
  taken.urgent = m.urgent;
  taken.payload = payload;
  if (m.kind == SyncKind::chunk) return take_chunk(m, taken, payload_state);
  // Of an erased chunk the entry goes first: with a crash in between, the removal is done once more.
  if (m.kind == SyncKind::erase || m.kind == SyncKind::retries) {
    for (size_t i = 0; i < m.retry_count(); i++) set_retry(m.number, &taken, m.retry(i));
  }
  if (m.kind == SyncKind::erase) {
    const OpId id = disk_op(m.number, &taken);
    ops_[id].replaces = m.key;
    host_.emit(Erase{id, m.key});
  }
  if (m.kind == SyncKind::epochs) {
    for (size_t i = 0; i < m.epoch_count(); i++) {
      const EpochItem item = m.epoch(i);
      host_.emit(SetSpaceEpoch{disk_op(m.number, &taken), item.space, item.epoch});
    }
  }
  if (taken.ops > 0) return;
  taken.ended = true;  // nothing was left to do
  answer(m.number);
}

void SyncTarget::take_chunk(const SyncMessage& m, Taken& taken, PayloadState payload_state) {
  if (m.retry_count() > 0) taken.retry = m.retry(0);
  const bool spread = host_.is(Mutant::spread_corruption) && payload_state == PayloadState::bad;
  const bool missing = m.chunk.length_bytes > 0 && taken.payload == kNoBuffer;
  if (missing || (payload_state == PayloadState::bad && !spread)) {
    forget(m.number);
    return answer(m.number, Progress::lacking, Outcome::ok);
  }
  if (payload_state != PayloadState::later || m.chunk.length_bytes == 0) return install(m.number, taken);
  const OpId id = host_.new_sync_op(SyncPart::target);
  ops_[id] = Op{.number = m.number, .fetch = true};
  taken.fetching = true;
  host_.emit(Fetch{id, taken.payload});
}

void SyncTarget::install(uint64_t number, Taken& taken) {
  taken.fetching = false;
  Install effect{
      .op = disk_op(number, &taken), .key = taken.key, .chunk = taken.chunk, .payload = taken.payload};
  ops_[effect.op].replaces = taken.key;
  effect.background = !taken.urgent;
  host_.emit(effect);  // its retry entry follows when it is there: what fails mustn't be told as done
}

// Entries may come in any order: the newest of a channel is what stays. One that is older than what is on
// its way to the disk waits for that, by setting the same once more.
void SyncTarget::set_retry(uint64_t number, Taken* taken, const RetryItem& item) {
  const std::pair<uint64_t, uint32_t> who{item.client.value, item.channel};
  std::optional<RetryEntry> here = host_.store().retry(item.client, item.channel);
  if (here.has_value() && newer(*here, item.entry)) return;
  Channel& channel = channels_[who];
  if (channel.ops == 0 || newer(item.entry, channel.newest)) channel.newest = item.entry;
  channel.ops++;
  const OpId id = disk_op(number, taken);
  ops_[id].has_channel = true;
  ops_[id].channel = who;
  host_.emit(SetRetry{id, item.client, item.channel, channel.newest});
}

OpId SyncTarget::disk_op(uint64_t number, Taken* taken) {
  const OpId id = host_.new_sync_op(SyncPart::target);
  ops_[id] = Op{.number = number};
  if (taken != nullptr) taken->ops++;
  disk_ops_++;
  return id;
}

// As if it had never come.
void SyncTarget::forget(uint64_t number) {
  auto at = taken_.find(number);
  release(at->second.payload);
  taken_.erase(at);
}

// ---- What has ended -----------------------------------------------------------------------------

void SyncTarget::completed(OpId id, Outcome outcome) {
  auto at = ops_.find(id);
  FFS_CHECK(at != ops_.end());
  const Op op = at->second;
  ops_.erase(at);
  if (op.fetch) return op.number == 0 ? release(op.payload) : fetched(op.number, outcome);
  FFS_CHECK(disk_ops_ > 0);
  disk_ops_--;
  if (op.replaces.has_value()) host_.chunk_replaced(*op.replaces);
  if (op.has_channel && --channels_.at(op.channel).ops == 0) channels_.erase(op.channel);
  if (outcome == Outcome::io_error) host_.device_failed();
  auto number = taken_.find(op.number);
  if (op.number == 0 || number == taken_.end()) {
    release(op.payload);
    if (outcome == Outcome::ok && op.retry.has_value()) set_retry(0, nullptr, *op.retry);
    return pump();
  }
  Taken& taken = number->second;
  if (outcome != Outcome::ok && taken.outcome == Outcome::ok) taken.outcome = outcome;
  if (outcome == Outcome::ok && taken.retry.has_value()) {
    const RetryItem item = *taken.retry;
    taken.retry.reset();
    set_retry(op.number, &taken, item);
  }
  if (--taken.ops > 0) return;
  taken.ended = true;
  release(taken.payload);
  taken.payload = kNoBuffer;
  if (taken.kind == SyncKind::begin) reset_ = true;
  answer(op.number);
}

void SyncTarget::fetched(uint64_t number, Outcome outcome) {
  Taken& taken = taken_.at(number);
  if (outcome == Outcome::ok) return install(number, taken);
  forget(number);
  answer(number, Progress::lacking, Outcome::ok);
}

void SyncTarget::answer(uint64_t number) {
  const Taken& taken = taken_.at(number);
  answer(number, taken.ended ? Progress::ended : Progress::under_way, taken.outcome);
}

void SyncTarget::answer(uint64_t number, Progress progress, Outcome outcome) {
  SyncMessage m{.kind = SyncKind::taken, .progress = progress, .outcome = outcome, .session = session_};
  m.number = number;
  host_.send_sync(source_, m, kNoBuffer);
}

void SyncTarget::release(BufferRef payload) {
  if (payload != kNoBuffer) host_.emit(Release{payload});
}

}  // namespace ffs::craq
