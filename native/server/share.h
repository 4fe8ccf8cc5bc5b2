// How much of a device recovery may take. While nobody else uses it: all, with enough transfers under way
// to fill it. While clients are served: a share of what the device has been seen to move, one transfer at a
// time, so that a client's read waits for at most that one. Pure; the clock comes with each call.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ffs::server {

class SyncShare {
 public:
  explicit SyncShare(uint32_t percent) : percent_(percent) {}

  void client_served(uint64_t now_us) { client_served_us_ = now_us; }
  bool clients_active(uint64_t now_us) const { return now_us < client_served_us_ + kActiveUs; }

  // All bytes that the device has moved since the start, for anybody: from which its throughput is learnt.
  void observe(uint64_t device_bytes, uint64_t now_us);
  uint64_t bytes_per_s() const { return bytes_per_s_; }

  // True: a transfer of so many bytes begins now; ended() follows.
  bool begin(uint32_t bytes, uint64_t now_us);
  void ended(uint32_t bytes) {
    in_flight_--;
    in_flight_bytes_ -= bytes;
  }
  uint32_t in_flight() const { return in_flight_; }

 private:
  static constexpr uint64_t kActiveUs = 10000;
  static constexpr uint64_t kWindowUs = 200000;
  static constexpr uint64_t kIdleBytes = 32u << 20;  // under way while nobody else is served
  static constexpr uint64_t kLeastBytesPerS = 100u << 20;
  static constexpr uint64_t kLeastCostBytes = 64 * 1024;  // small ones cost a device operation too
  static constexpr int64_t kBurstUs = 20000;

  uint32_t percent_;
  uint64_t client_served_us_ = 0;
  uint64_t window_us_ = 0, window_bytes_ = 0;
  uint64_t bytes_per_s_ = kLeastBytesPerS;
  int64_t tokens_ = 0;  // bytes; below zero after a transfer larger than what there was
  uint64_t refilled_us_ = 0;
  uint32_t in_flight_ = 0;
  uint64_t in_flight_bytes_ = 0;
};

}  // namespace ffs::server
