#include "server/background.h"

#include <bit>

#include "base/check.h"

namespace ffs::server {

namespace {

using io::OpClass;

// By OpClass; clients have no turns.
constexpr std::array<uint64_t, io::kOpClasses> kWeights = {1, 8, 4, 1, 4, 1};

}  // namespace

// --- what clients feel ----------------------------------------------------------------------------

// Moves to where one sample in a hundred lies above it; fast at first.
void Background::Baseline::learn(double took_us) {
  if (samples == 0) p99_us = took_us;
  const double step = samples < 4 * kKnown ? 0.3 : 0.1;
  p99_us *= took_us > p99_us ? 1 + step * 0.99 : 1 - step * 0.01;
  p99_us = std::max(p99_us, 1.0);
  samples = std::min(samples + 1, uint32_t{1} << 30);
}

Background::Baseline& Background::baseline(uint32_t bytes, uint32_t beside) {
  const size_t size = std::min<size_t>(std::bit_width((std::max(bytes, 1u) - 1) >> 12), kSizes - 1);
  const size_t depth = std::min<size_t>(std::bit_width(beside), kDepths - 1);
  return baselines_[size * kDepths + depth];
}

void Background::client_read(uint32_t bytes, uint32_t beside, uint64_t took_us, uint64_t now_us) {
  client_served(now_us);
  longest_read_us_ = std::max(longest_read_us_, took_us);
  Baseline& usual = baseline(bytes, beside);
  const auto took = static_cast<double>(took_us);
  const bool alone = in_flight_ == 0 && now_us - std::min(now_us, took_us) >= last_piece_us_ + kQuietUs;
  if (alone) {
    usual.learn(took);
    calm_us_ = now_us;
    reads_since_calm_ = 0;
    // Between pieces that come seldom: of all reads few shall be slow, not of those beside a piece.
    if (now_us < last_piece_us_ + kSeldomUs) move_part(1 + kIncrease);
    return;
  }
  reads_since_calm_++;
  if (usual.samples < kKnown) return;
  const bool felt = took > usual.p99_us * 1.5 + 20;
  if (felt) felt_reads_++;
  move_part(felt ? 1 - kDecrease : 1 + kIncrease);
}

// The best of what was seen, forgotten slowly: a window in which nobody asked for much says little.
void Background::observe(uint64_t device_bytes, uint64_t now_us) {
  if (window_us_ == 0 || device_bytes < window_bytes_) {
    window_us_ = now_us;
    window_bytes_ = device_bytes;
    return;
  }
  const uint64_t elapsed_us = now_us - window_us_;
  if (elapsed_us < kWindowUs) return;
  const uint64_t seen = (device_bytes - window_bytes_) * 1000000 / elapsed_us;
  device_bytes_per_s_ =
      std::max({seen, device_bytes_per_s_ - device_bytes_per_s_ / 256, kLeastDeviceBytesPerS});
  window_us_ = now_us;
  window_bytes_ = device_bytes;
}

// --- whose turn it is -----------------------------------------------------------------------------

// The waiting class that has had least by its weight. Who begins to wait has saved nothing up.
Background::Piece Background::choose(const Wanted& wanted, bool urgent_only, uint32_t most_bytes) {
  size_t best = 0;
  for (size_t i = 1; i < io::kOpClasses; i++) {
    if (wanted[i] > 0 && !waited_[i]) turn_[i] = std::max(turn_[i], turn_now_);
    waited_[i] = wanted[i] > 0;
    if (wanted[i] == 0 || (urgent_only && !urgent_[i])) continue;
    if (best == 0 || turn_[i] < turn_[best]) best = i;
  }
  if (best == 0) return {};
  return {static_cast<OpClass>(best), std::min(wanted[best], most_bytes)};
}

Background::Piece Background::start(Piece piece, bool active, uint64_t now_us) {
  const size_t index = index_of(piece.op_class);
  const uint64_t cost = std::max(piece.bytes, kLeastCostBytes);
  turn_now_ = turn_[index];
  turn_[index] += cost / kWeights[index];
  bytes_[index] += piece.bytes;
  if (active) {
    const int64_t most_debt = static_cast<int64_t>(rate_bytes_per_s()) * kDebtUs / 1'000'000;
    tokens_ = std::max(tokens_ - static_cast<int64_t>(cost), -most_debt);
  }
  last_piece_us_ = now_us;
  if (held_since_us_ != 0) held_us_ += now_us - held_since_us_;
  held_since_us_ = 0;
  return piece;
}

uint32_t Background::most_bytes(uint64_t now_us) const {
  if (clients_active(now_us)) return kUrgentBytes;
  return now_us < client_served_us_ + kLongQuietUs ? kIdleBytes : kQuietBytes;
}

Background::Piece Background::next(const Wanted& wanted, bool clients_wait, uint64_t now_us) {
  const bool active = clients_active(now_us);
  const bool room = in_flight_ < kIdlePieces && in_flight_bytes_ < most_bytes(now_us);
  Piece piece =
      room ? choose(wanted, /*urgent_only=*/true, active ? kUrgentPieceBytes : kPieceBytes) : Piece{};
  if (piece.bytes == 0 && (active ? may_start(clients_wait, now_us) : room)) {
    piece = choose(wanted, /*urgent_only=*/false, active ? kSmallPieceBytes : kPieceBytes);
  }
  if (piece.bytes == 0) {
    if (in_flight_ == 0 && held_since_us_ == 0) held_since_us_ = now_us;
    return {};
  }
  if (!active) {
    tokens_ = 0;
    refilled_us_ = now_us;
  }
  in_flight_++;
  in_flight_bytes_ += piece.bytes;
  return start(piece, active, now_us);
}

void Background::ended(OpClass, uint32_t bytes, uint64_t now_us) {
  FFS_CHECK(in_flight_ > 0 && in_flight_bytes_ >= bytes);
  in_flight_--;
  in_flight_bytes_ -= bytes;
  last_piece_us_ = std::max(last_piece_us_, now_us);
}

bool Background::take(OpClass op_class, uint32_t bytes, uint64_t now_us) {
  const bool active = clients_active(now_us);
  if (active && !urgent_[index_of(op_class)] && !may_start(false, now_us)) return false;
  (void)start({op_class, bytes}, active, now_us);
  return true;
}

// --- beside clients -------------------------------------------------------------------------------

void Background::refill(uint64_t now_us) {
  const auto rate = static_cast<int64_t>(rate_bytes_per_s());
  const auto elapsed_us = static_cast<int64_t>(std::min<uint64_t>(now_us - refilled_us_, 1'000'000));
  const int64_t burst = std::max<int64_t>(rate * kBurstUs / 1'000'000, 1);
  const int64_t gained = rate * elapsed_us / 1'000'000;
  if (gained == 0) return;  // too little time: it isn't lost
  refilled_us_ = now_us;
  tokens_ = std::min(tokens_ + gained, burst);
}

// A pause now and then shows what reads take without any of this.
bool Background::pausing(uint64_t now_us) {
  if (now_us < pause_until_us_) return true;
  if (reads_since_calm_ == 0 || now_us < calm_us_ + kPauseEveryUs) return false;
  pause_until_us_ = now_us + kPauseUs;
  calm_us_ = now_us;
  reads_since_calm_ = 0;
  return true;
}

bool Background::may_start(bool clients_wait, uint64_t now_us) {
  if (in_flight_ > 0) return false;
  refill(now_us);
  if (tokens_ < 0 || pausing(now_us)) return false;
  // Whoever always has requests waiting leaves it a least share all the same.
  const uint64_t patience_us = static_cast<uint64_t>(
      kSmallPieceBytes / (kLeastPart * static_cast<double>(device_bytes_per_s_) * percent_ / 100) * 1e6);
  return !clients_wait || now_us >= last_piece_us_ + std::min(patience_us, kLongestWaitUs);
}

uint64_t Background::wait_us(uint64_t now_us) const {
  if (!clients_active(now_us) || in_flight_ > 0) return kLongestWaitUs;  // the end of a piece wakes
  if (now_us < pause_until_us_) return std::min(pause_until_us_ - now_us, kLongestWaitUs);
  const int64_t lacking = -std::min<int64_t>(tokens_, 0);
  const uint64_t rate = rate_bytes_per_s();
  return std::clamp<uint64_t>(static_cast<uint64_t>(lacking) * 1'000'000 / rate + 1, 50, kLongestWaitUs);
}

}  // namespace ffs::server
