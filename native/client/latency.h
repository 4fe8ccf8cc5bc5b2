// Latencies: how long reads of a size take here, and from when on one is late enough to ask a second
// replica (docs/ring.md, Hedged reads). Pure; one thread.
#pragma once

#include <array>
#include <cstdint>

namespace ffs::client {

// A histogram of about the last thousand latencies, in steps of a quarter of a power of two.
class LatencyHistogram {
 public:
  void add(uint64_t latency_ns);
  // The upper end of the step that 99 in 100 lie in or below; 0: too few are known.
  uint64_t p99_ns() const { return p99_ns_; }

  static constexpr uint32_t kLeast = 64;      // samples before p99 is told
  static constexpr uint32_t kHalveAt = 1024;  // then all counts are halved: what is old fades

 private:
  static constexpr uint32_t kSteps = 96;
  static uint32_t step_of(uint64_t latency_ns);
  static uint64_t end_of(uint32_t step);
  void renew();

  std::array<uint16_t, kSteps> counts_{};
  uint32_t total_ = 0;
  uint32_t until_renewal_ = kLeast;
  uint64_t p99_ns_ = 0;
};

// The latencies of a ring's reads by size (powers of two from 4 KiB to 16 MiB).
class Latencies {
 public:
  // A read of `length` took so long, or is known to take at least so long.
  void add(uint32_t length, uint64_t latency_ns) { by_size_[size_class(length)].add(latency_ns); }
  // When a second replica is asked: twice the 99th percentile, at least `floor_ns`, at most `most_ns`.
  // While too little is known: what a slow disk and network would take.
  uint64_t hedge_after_ns(uint32_t length, uint64_t floor_ns, uint64_t most_ns) const;

 private:
  static constexpr uint32_t kClasses = 13;
  static uint32_t size_class(uint32_t length);

  std::array<LatencyHistogram, kClasses> by_size_;
};

}  // namespace ffs::client
