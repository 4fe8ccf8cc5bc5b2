#include "client/latency.h"

#include <algorithm>
#include <bit>

namespace ffs::client {

namespace {

constexpr uint32_t kFirstBit = 13;  // below 8 us all is one
constexpr uint64_t kUnknownNs = 50'000'000;
constexpr uint64_t kUnknownNsAByte = 20;  // 50 MB/s
constexpr uint32_t kRenewEvery = 64;

}  // namespace

uint32_t LatencyHistogram::step_of(uint64_t latency_ns) {
  if (latency_ns < (1ull << kFirstBit)) return 0;
  const auto bit = static_cast<uint32_t>(std::bit_width(latency_ns)) - 1;
  const auto quarter = static_cast<uint32_t>(latency_ns >> (bit - 2)) & 3;
  return std::min(kSteps - 1, 1 + (bit - kFirstBit) * 4 + quarter);
}

uint64_t LatencyHistogram::end_of(uint32_t step) {
  if (step == 0) return 1ull << kFirstBit;
  const uint32_t bit = kFirstBit + (step - 1) / 4;
  return (uint64_t{5} + (step - 1) % 4) << (bit - 2);
}

void LatencyHistogram::add(uint64_t latency_ns) {
  counts_[step_of(latency_ns)]++;
  total_++;
  if (--until_renewal_ == 0) renew();
}

void LatencyHistogram::renew() {
  until_renewal_ = kRenewEvery;
  uint32_t above = total_ / 100;  // so many may lie beyond
  uint32_t step = kSteps - 1;
  while (step > 0 && counts_[step] <= above) above -= counts_[step--];
  p99_ns_ = end_of(step);
  if (total_ < kHalveAt) return;
  total_ = 0;
  for (uint16_t& count : counts_) total_ += count /= 2;
}

uint32_t Latencies::size_class(uint32_t length) {
  const auto width = static_cast<uint32_t>(std::bit_width(length == 0 ? 0 : length - 1));  // 4 KiB: 12
  return std::clamp(width, 12u, 12 + kClasses - 1) - 12;
}

uint64_t Latencies::hedge_after_ns(uint32_t length, uint64_t floor_ns, uint64_t most_ns) const {
  const uint64_t p99_ns = by_size_[size_class(length)].p99_ns();
  const uint64_t wanted_ns = p99_ns == 0 ? kUnknownNs + length * kUnknownNsAByte : 2 * p99_ns;
  return std::min(std::max(wanted_ns, floor_ns), most_ns);
}

}  // namespace ffs::client
