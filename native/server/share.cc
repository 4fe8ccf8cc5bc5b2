#include "server/share.h"

namespace ffs::server {

// The best of what was seen, forgotten slowly: a window in which nobody asked for much says little.
void SyncShare::observe(uint64_t device_bytes, uint64_t now_us) {
  if (window_us_ == 0 || device_bytes < window_bytes_) {
    window_us_ = now_us;
    window_bytes_ = device_bytes;
    return;
  }
  const uint64_t elapsed_us = now_us - window_us_;
  if (elapsed_us < kWindowUs) return;
  const uint64_t seen = (device_bytes - window_bytes_) * 1000000 / elapsed_us;
  bytes_per_s_ = std::max({seen, bytes_per_s_ - bytes_per_s_ / 256, kLeastBytesPerS});
  window_us_ = now_us;
  window_bytes_ = device_bytes;
}

bool SyncShare::begin(uint32_t bytes, uint64_t now_us) {
  if (clients_active(now_us)) {
    const int64_t rate = static_cast<int64_t>(bytes_per_s_ * percent_ / 100);
    const int64_t elapsed_us = static_cast<int64_t>(std::min<uint64_t>(now_us - refilled_us_, 1000000));
    refilled_us_ = now_us;
    tokens_ = std::min(tokens_ + rate * elapsed_us / 1000000, rate * kBurstUs / 1000000);
    if (tokens_ < 0 || in_flight_ > 0) return false;
    tokens_ -= static_cast<int64_t>(std::max<uint64_t>(bytes, kLeastCostBytes));
  } else {
    if (in_flight_ > 0 && in_flight_bytes_ + bytes > kIdleBytes) return false;
    tokens_ = 0;
    refilled_us_ = now_us;
  }
  in_flight_++;
  in_flight_bytes_ += bytes;
  return true;
}

}  // namespace ffs::server
