// When work in the background (recovery, compaction, scrub, eviction) may use the device, beside clients.
// Pure: the clock comes with each call. The Io asks it for every piece of an operation (io/io.h, Gate), so
// what it decides holds for all of them, whoever started them.
//
// - Nobody is served: pieces of 1 MiB - each costs the kernel and the device about the same, however large it
//   is -, as many at a time as fill the device, within a bound of bytes: whoever comes stands behind those.
// - Clients are served: one piece of 64 KiB at a time, so that a read stands behind no more than that, and no
// more
//   bytes a second than a share of what the device has been seen to move. The share moves between a tenth and
//   all of share_percent, by what clients feel: a read that takes longer than reads of its kind do without
//   background work (their 99th percentile and a half more) takes five percent off, every other one adds a
//   little, so that about one read in 200 is slower than that. What reads take without it is measured while
//   there is none, and every five seconds of it in a pause of a tenth of a second.
// - Classes that wait have turns by their weights; none starves. An urgent class (compaction that updates
// wait
//   for) goes first and isn't held back.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "io/io.h"

namespace ffs::server {

class Background {
 public:
  using Piece = io::Gate::Piece;
  using Wanted = std::array<uint32_t, io::kOpClasses>;

  // share_percent (1 to 100): of the device, at most, while clients are served.
  explicit Background(uint32_t share_percent) : percent_(share_percent) {}

  // --- what clients do
  void client_served(uint64_t now_us) { client_served_us_ = now_us; }
  bool clients_active(uint64_t now_us) const {
    return client_served_us_ > 0 && now_us < client_served_us_ + kActiveUs;
  }
  // A client's read has ended, took_us after its request was seen; `beside` others were under way then.
  void client_read(uint32_t bytes, uint32_t beside, uint64_t took_us, uint64_t now_us);
  // Bytes that the device has moved since the start, for anybody: from which its throughput is learnt.
  void observe(uint64_t device_bytes, uint64_t now_us);

  // --- pieces
  void set_urgent(io::OpClass op_class, bool urgent) { urgent_[index_of(op_class)] = urgent; }
  // clients_wait: requests of clients are here that the shard hasn't come to.
  Piece next(const Wanted& wanted, bool clients_wait, uint64_t now_us);
  void ended(io::OpClass op_class, uint32_t bytes, uint64_t now_us);
  // The same for work that isn't cut in pieces and ends at once: false, not now.
  bool take(io::OpClass op_class, uint32_t bytes, uint64_t now_us);
  // How long to sleep at most while something waits.
  uint64_t wait_us(uint64_t now_us) const;

  // --- for metrics
  uint64_t bytes(io::OpClass op_class) const { return bytes_[index_of(op_class)]; }  // started
  uint64_t held_us() const { return held_us_; }        // something waited, and nothing was under way
  uint64_t felt_reads() const { return felt_reads_; }  // slower than they should be, beside background work
  uint64_t longest_read_us() const { return longest_read_us_; }
  uint64_t rate_bytes_per_s() const {  // now, while clients are served
    const auto rate =
        static_cast<uint64_t>(part_ * static_cast<double>(device_bytes_per_s_) * percent_ / 100);
    return std::max(rate, kLeastBytesPerS);
  }
  uint64_t device_bytes_per_s() const { return device_bytes_per_s_; }
  uint32_t in_flight() const { return in_flight_; }

  static constexpr uint32_t kPieceBytes = 1u << 20;
  static constexpr uint32_t kUrgentPieceBytes = 256 * 1024;  // beside clients
  static constexpr uint32_t kSmallPieceBytes = 64 * 1024;
  static constexpr uint32_t kIdlePieces = 16;  // at a time, at most
  static constexpr uint32_t kIdleBytes = 8u << 20, kUrgentBytes = 4u << 20;
  static constexpr uint32_t kQuietBytes = 16u << 20;   // once nobody has been served
  static constexpr uint64_t kLongQuietUs = 2'000'000;  // for so long: a rare read may stand behind that
  static constexpr uint64_t kActiveUs = 250'000;

 private:
  static constexpr size_t index_of(io::OpClass op_class) { return static_cast<size_t>(op_class); }
  static constexpr uint64_t kWindowUs = 200'000;
  static constexpr uint64_t kLeastDeviceBytesPerS = 100u << 20;
  static constexpr uint32_t kLeastCostBytes = 16 * 1024;  // small ones cost a device operation too
  static constexpr int64_t kBurstUs = 5'000;
  static constexpr int64_t kDebtUs = 100'000;  // what was urgent holds up the rest no longer than this
  static constexpr uint64_t kQuietUs = 5'000;  // after the last piece a read that begins meets none of it
  static constexpr uint64_t kPauseUs = 100'000;
  static constexpr uint64_t kPauseEveryUs = 5'000'000;
  static constexpr uint64_t kLongestWaitUs = 20'000;
  static constexpr uint64_t kLeastBytesPerS = 4u << 20;
  static constexpr double kLeastPart = 0.1;
  static constexpr uint64_t kSeldomUs = 100'000;  // pieces of the least rate aren't further apart
  static constexpr uint32_t kKnown = 32;          // samples, before a baseline counts
  static constexpr double kDecrease = 0.05, kIncrease = kDecrease / 200;
  static constexpr size_t kSizes = 8, kDepths = 8;

  // What reads of a size, with so many others beside them, take without background work.
  struct Baseline {
    double p99_us = 0;
    uint32_t samples = 0;
    void learn(double took_us);
  };
  Baseline& baseline(uint32_t bytes, uint32_t beside);
  void move_part(double factor) { part_ = std::clamp(part_ * factor, kLeastPart, 1.0); }
  bool may_start(bool clients_wait, uint64_t now_us);
  bool pausing(uint64_t now_us);
  uint32_t most_bytes(uint64_t now_us) const;  // in flight
  void refill(uint64_t now_us);
  Piece choose(const Wanted& wanted, bool urgent_only, uint32_t most_bytes);
  Piece start(Piece piece, bool active, uint64_t now_us);

  uint32_t percent_;
  uint64_t client_served_us_ = 0;
  uint64_t window_us_ = 0, window_bytes_ = 0;
  uint64_t device_bytes_per_s_ = kLeastDeviceBytesPerS;

  double part_ = 0.5;   // of the share, kLeastPart to 1
  int64_t tokens_ = 0;  // bytes; below zero after a piece larger than what there was
  uint64_t refilled_us_ = 0;
  uint32_t in_flight_ = 0;  // pieces
  uint32_t in_flight_bytes_ = 0;
  uint64_t last_piece_us_ = 0;  // began or ended
  uint64_t pause_until_us_ = 0;
  uint64_t calm_us_ = 0;  // when a read was last measured without background work, or a pause began
  uint64_t reads_since_calm_ = 0;
  std::array<bool, io::kOpClasses> urgent_{};
  std::array<bool, io::kOpClasses> waited_{};    // when last asked
  std::array<uint64_t, io::kOpClasses> turn_{};  // bytes by weight; the least has its turn
  uint64_t turn_now_ = 0;
  uint64_t held_since_us_ = 0;  // 0: nothing is held back

  std::array<Baseline, kSizes * kDepths> baselines_{};
  std::array<uint64_t, io::kOpClasses> bytes_{};
  uint64_t held_us_ = 0, felt_reads_ = 0, longest_read_us_ = 0;
};

}  // namespace ffs::server
