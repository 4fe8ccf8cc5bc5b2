#include "server/scrub.h"

#include <algorithm>
#include <cerrno>
#include <random>

#include "server/log.h"
#include "server/store_view.h"

namespace ffs::server {

namespace {

constexpr int64_t kLeastCostBytes = 4096;  // of a chunk, so that empty ones are paced as well
constexpr uint32_t kUnreadable = 16;       // in a row: the device is going, nobody is asked any more
constexpr uint64_t kBurst = 20;            // a twentieth of a second's bytes may be saved up

}  // namespace

Scrubber::Scrubber(engine::ChunkStore& store, uint64_t bytes_per_s, const Events& events,
                   uint64_t least_pass_us)
    : store_(store), bytes_per_s_(bytes_per_s), events_(events), least_pass_us_(least_pass_us) {}

Scrubber::~Scrubber() {
  FFS_CHECK(!reading_);
}

Scrubber::Counts Scrubber::counts(TargetId target) const {
  auto at = counts_.find(target);
  return at != counts_.end() ? at->second : Counts{};
}

bool Scrubber::listed(TargetId target) const {
  return std::binary_search(targets_.begin(), targets_.end(), target);
}

void Scrubber::forget(TargetId target) {
  std::erase(targets_, target);
  if (target_ == target) in_chunk_ = false;
}

// --- pace -----------------------------------------------------------------------------------------

void Scrubber::tick(uint64_t now_us, std::span<const TargetId> targets, bool clients_active) {
  if (bytes_per_s_ == 0) return;
  now_us_ = now_us;
  targets_.assign(targets.begin(), targets.end());
  std::sort(targets_.begin(), targets_.end());
  refill(now_us, clients_active);
  if (phase_ != Phase::resting && !listed(target_)) next_target();
  if (phase_ == Phase::resting && !targets_.empty() &&
      (!ever_started_ || now_us - pass_started_us_ >= least_pass_us_)) {
    next_target();
  }
  if (phase_ == Phase::comparing && !reading_) compare_once();
  go_on();
}

void Scrubber::refill(uint64_t now_us, bool clients_active) {
  const uint64_t elapsed_us = refilled_us_ == 0 ? 0 : std::min<uint64_t>(now_us - refilled_us_, 1'000'000);
  refilled_us_ = now_us;
  const uint64_t rate = clients_active ? bytes_per_s_ / 4 : bytes_per_s_;
  const auto most = static_cast<int64_t>(std::max<uint64_t>(bytes_per_s_ / kBurst, kLeastCostBytes));
  tokens_ = std::min(tokens_ + static_cast<int64_t>(rate * elapsed_us / 1'000'000), most);
}

// The next one in the order of ids; after the last: rests until the next pass is due.
void Scrubber::next_target() {
  in_chunk_ = false;
  cursor_ = ChunkKey{};
  if (phase_ == Phase::resting) {
    pass_started_us_ = now_us_;
    TargetId after;
    if (!ever_started_) {
      std::random_device seed;
      const size_t first = seed() % targets_.size();
      if (first > 0) after = targets_[first - 1];
    }
    ever_started_ = true;
    target_ = after;
  }
  auto next = std::upper_bound(targets_.begin(), targets_.end(), target_);
  phase_ = next != targets_.end() ? Phase::reading : Phase::resting;
  if (next != targets_.end()) target_ = *next;
}

// --- reading --------------------------------------------------------------------------------------

void Scrubber::go_on() {
  while (!reading_ && phase_ == Phase::reading && tokens_ > 0 && listed(target_)) {
    if (unreadable_ >= kUnreadable || store_.metrics().poisoned) return;
    if (in_chunk_) {
      read_part();
    } else if (!next_chunk()) {
      phase_ = Phase::comparing;
      cursor_ = ChunkKey{};
    }
  }
}

bool Scrubber::next_chunk() {
  engine::ChunkInfo info;
  if (!store_.first_at_or_after(target_, cursor_, &info)) return false;
  key_ = info.key;
  version_ = info.version;
  length_bytes_ = info.attributes.codec != 0 ? info.stored_length : info.length;
  at_bytes_ = 0;
  in_chunk_ = true;
  if (length_bytes_ == 0) {
    tokens_ -= kLeastCostBytes;
    chunk_over();
  }
  return true;
}

void Scrubber::read_part() {
  static_cast<engine::ReadOp&>(part_) = engine::ReadOp{};
  part_.scrubber = this;
  part_.op_class = io::OpClass::scrub;
  part_.done = [](engine::StoreOp* op) { static_cast<Part*>(op)->scrubber->part_read(); };
  part_.target = target_;
  part_.key = key_;
  part_.at_least = version_;
  part_.exact_version = true;
  part_.offset = at_bytes_;
  part_.length = std::min(kPartBytes, length_bytes_ - at_bytes_);
  part_.verify_whole = true;
  part_.sink = &nowhere_;
  tokens_ -= std::max<int64_t>(part_.length, kLeastCostBytes);
  reading_ = true;
  store_.read(&part_);
}

void Scrubber::part_read() {
  reading_ = false;
  const bool current = in_chunk_ && part_.target == target_ && part_.key == key_;
  Counts& counts = counts_[part_.target];
  counts.bytes += part_.read_length;
  all_bytes_ += part_.read_length;
  unreadable_ = part_.error == EIO ? unreadable_ + 1 : 0;
  if (unreadable_ == kUnreadable) {
    log(LogLevel::kError,
        "scrub: %u reads in a row failed, the device seems to be going: no scrub until a restart",
        kUnreadable);
  }
  if (part_.error == EBADMSG || part_.error == EIO) {
    counts.damaged++;
    log(LogLevel::kWarning, "scrub: target %llu, space %llu: a chunk is damaged near byte %u (%s)",
        static_cast<unsigned long long>(part_.target.value),
        static_cast<unsigned long long>(part_.key.space()), part_.offset,
        part_.what != nullptr ? part_.what : "");
    if (listed(part_.target)) events_.damaged(events_.owner, part_.target, part_.key, part_.at_least);
  }
  if (current) {
    at_bytes_ += part_.length;
    // Damaged: all of it is replaced. Not there any more: the next pass meets what took its place.
    if (part_.error != 0 || at_bytes_ >= length_bytes_) chunk_over();
  }
  go_on();
}

void Scrubber::chunk_over() {
  in_chunk_ = false;
  cursor_ = key_;
  if (key_successor(&cursor_)) return;
  phase_ = Phase::comparing;  // the last key of all
  cursor_ = ChunkKey{};
}

// --- comparing ------------------------------------------------------------------------------------

// One range a tick; the answers come to the replica.
void Scrubber::compare_once() {
  const std::optional<ChunkKey> next = events_.compare(events_.owner, target_, cursor_);
  if (next.has_value()) {
    cursor_ = *next;
    return;
  }
  counts_[target_].passes++;
  next_target();
}

}  // namespace ffs::server
