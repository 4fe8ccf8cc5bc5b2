// Comparison by ranges: the source of a sync walks its chunks in the order of their keys and asks about
// ranges; who is asked says "the same", or what it has there. docs/craq.md, Recovery.
#include "base/check.h"
#include "craq/resync.h"

namespace ffs::craq {

namespace {

constexpr size_t kRangesUnderWay = 4;
constexpr size_t kMaxTodo = 256;  // keys found; the walk waits when there are more

uint64_t fold(uint64_t sum, const ChunkDigest& d) {
  return mix64(sum ^ mix64(ChunkKeyHash{}(d.key) ^ mix64(d.digest)));
}

}  // namespace

bool next_key(ChunkKey* key) {
  for (size_t i = key->bytes.size(); i > 0; i--) {
    if (++key->bytes[i - 1] != 0) return true;
  }
  return false;
}

RangeDigest digest_range(const StoreView& store, const ChunkKey& from, const ChunkKey& to, uint32_t limit) {
  RangeDigest range;
  range.last = to;
  ChunkKey at = from;
  for (std::optional<ChunkDigest> d = store.digest_at_or_after(at); d.has_value() && d->key <= to;
       d = store.digest_at_or_after(at)) {
    range.digest = fold(range.digest, *d);
    at = d->key;
    if (++range.count == limit) {
      if (d->key < to) range.last = d->key;
      break;
    }
    if (!next_key(&at)) break;
  }
  return range;
}

void answer_compare(SyncHost& host, TargetId asker, const SyncMessage& question) {
  if (question.count > kMaxSyncItems || question.key > question.last) return;
  SyncMessage answer;
  answer.session = question.session;
  answer.number = question.number;
  const RangeDigest own = digest_range(host.store(), question.key, question.last, question.count + 1);
  if (own.count == question.count && own.digest == question.digest) {
    answer.kind = SyncKind::same;
    return host.send_sync(asker, answer, kNoBuffer);
  }
  answer.kind = SyncKind::list;
  answer.last = question.last;
  SyncItems items;
  ChunkKey at = question.key;
  for (std::optional<ChunkDigest> d = host.store().digest_at_or_after(at);
       d.has_value() && d->key <= question.last; d = host.store().digest_at_or_after(at)) {
    items.add(ListItem{d->key, d->chunk.version, d->digest});
    at = d->key;
    if (items.count() == kMaxSyncItems) {
      answer.last = d->key;
      break;
    }
    if (!next_key(&at)) break;
  }
  answer.items = items.bytes();
  host.send_sync(asker, answer, kNoBuffer);
}

// The store is current: what isn't seen here will be told by committed(), as it lies behind the walk then.
void SyncSource::walk() {
  while (!walk_done_ && ranges_.size() < kRangesUnderWay && todo_.size() < kMaxTodo) {
    Range range{.from = walk_from_, .to = last_key()};
    ask(range);
    range.to = walk_from_ = range.asked_to;
    walk_done_ = !next_key(&walk_from_);
    ranges_.push_back(range);
  }
  for (Range& range : ranges_) {
    if (range.question == 0) ask(range);
  }
}

void SyncSource::ask(Range& range) {
  const RangeDigest own = digest_range(host_.store(), range.from, range.to, kMaxSyncItems);
  range.asked_to = own.last;
  range.asked_count = own.count;
  range.question = ++last_question_;
  range.sent_ms = host_.now_ms();
  range.tries++;
  if (range.first_ms == 0) range.first_ms = range.sent_ms;
  SyncMessage m{.kind = SyncKind::compare, .session = session_, .number = range.question};
  m.key = range.from;
  m.last = range.asked_to;
  m.count = own.count;
  m.digest = own.digest;
  host_.send_sync(target_, m, kNoBuffer);
}

void SyncSource::range_answered(const SyncMessage& m) {
  size_t i = 0;
  while (i < ranges_.size() && (ranges_[i].question == 0 || ranges_[i].question != m.number)) i++;
  if (i == ranges_.size() || !host_.store_is_current()) return;
  if (m.kind == SyncKind::same) {
    compared_ += ranges_[i].asked_count;
    return advance_range(i, ranges_[i].asked_to);
  }
  if (m.last < ranges_[i].from || m.last > ranges_[i].asked_to) return;
  ChunkKey before;
  for (size_t k = 0; k < m.list_count(); k++) {
    const ChunkKey key = m.listed(k).key;
    if (key < ranges_[i].from || key > m.last || (k > 0 && key <= before)) return;
    before = key;
  }
  compare_list(ranges_[i], m);
  advance_range(i, m.last);
}

// Both in the order of keys: what differs, what only we have, and what only the target has.
void SyncSource::compare_list(const Range& range, const SyncMessage& m) {
  ChunkKey at = range.from;
  std::optional<ChunkDigest> own = host_.store().digest_at_or_after(at);
  size_t k = 0;
  while (true) {
    const bool ours = own.has_value() && own->key <= m.last;
    const bool theirs = k < m.list_count();
    if (!ours && !theirs) return;
    const ListItem item = theirs ? m.listed(k) : ListItem{};
    if (theirs && (!ours || item.key < own->key)) {
      if (!host_.is(Mutant::no_erase)) todo_.push_back(item.key);
      k++;
      continue;
    }
    const bool both = theirs && item.key == own->key;
    if (!both || item.version != own->chunk.version || item.digest != own->digest) todo_.push_back(own->key);
    if (both) k++;
    compared_++;
    at = own->key;
    own = next_key(&at) ? host_.store().digest_at_or_after(at) : std::nullopt;
  }
}

void SyncSource::advance_range(size_t index, const ChunkKey& upto) {
  Range& range = ranges_[index];
  if (upto >= range.to) {
    ranges_.erase(ranges_.begin() + static_cast<ptrdiff_t>(index));
    return;
  }
  range.from = upto;
  FFS_CHECK(next_key(&range.from));
  range.question = 0;
  range.first_ms = 0;
  range.tries = 0;
}

}  // namespace ffs::craq
