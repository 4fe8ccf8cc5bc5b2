// Looking again and again instead of sleeping, where that pays (docs/ring.md, Spinning): waking an idle
// processor takes tens of microseconds, about as long as a request of a few KiB. Only while little is in
// flight, only while nobody else wants the processor, and only as long as it has found something lately.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace ffs {

class Spinner {
 public:
  static constexpr uint64_t kMostNs = 150'000;  // then sleep
  static constexpr uint32_t kMostRequests = 4;  // with so many in flight there is other work to overlap

  static uint64_t now_ns() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  }

  // Before a wait: true if it may begin with looking.
  bool pays(uint64_t now_ns) {
    if (now_ns < crowded_until_ns_) return false;
    if (misses_ < kMissesToRest) return true;
    return ++rested_ % kTryEvery == 0;
  }
  void found() { misses_ = 0; }
  void missed() { misses_ += misses_ < kMissesToRest ? 1 : 0; }
  // Between two looks: lets others run. False: somebody did for long, so this one sleeps, and for a while
  // doesn't look.
  bool alone(uint64_t now_ns) {
    if (++looks_ % kYieldEvery != 0) return true;
    const uint64_t before_ns = Spinner::now_ns();
    ::sched_yield();
    return yielded(now_ns, Spinner::now_ns() - before_ns);
  }
  // What `alone` makes of a yield that took so long.
  bool yielded(uint64_t now_ns, uint64_t took_ns) {
    if (took_ns < kSwitchNs) return true;
    crowded_until_ns_ = now_ns + kRestTimes * took_ns;
    return false;
  }

 private:
  static constexpr uint32_t kMissesToRest = 8, kTryEvery = 16, kYieldEvery = 8;
  // A shorter turn was an interrupt, or another one that looks, or a server at a small request: by then a
  // sleeper wouldn't be awake again. Whoever took longer has work, and takes as long again: then no more than
  // one part in five of the time goes to such turns.
  static constexpr uint64_t kSwitchNs = 50'000;
  static constexpr uint64_t kRestTimes = 4;
  uint64_t crowded_until_ns_ = 0;
  uint32_t misses_ = 0;
  uint32_t rested_ = 0;
  uint32_t looks_ = 0;
};

}  // namespace ffs
