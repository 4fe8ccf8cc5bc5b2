// Budget: a bucket of tokens that bounds how much of something may be done beside the real work -
// retries, hedged reads (docs/ring.md, Retries). Pure; one thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ffs::client {

class Budget {
 public:
  // Holds `burst` tokens at most, and that many at first.
  Budget(uint32_t burst, uint32_t tokens_per_s) : most_(burst * kUnit), have_(most_), per_s_(tokens_per_s) {}

  // `count` requests that each earn `percent` hundredths of a token.
  void earn(uint64_t count, uint32_t percent) {
    have_ = std::min(most_, have_ + count * percent * (kUnit / 100));
  }
  bool available(uint64_t now_ns) {
    refill(now_ns);
    return have_ >= kUnit;
  }
  bool spend(uint64_t now_ns) {
    if (!available(now_ns)) return false;
    have_ -= kUnit;
    return true;
  }

 private:
  static constexpr uint64_t kUnit = 1000000;  // in a token: one comes in a microsecond at 1 token a second

  void refill(uint64_t now_ns) {
    if (now_ns <= filled_ns_) return;
    if (filled_ns_ != 0 && per_s_ != 0) {
      const uint64_t passed_us = std::min<uint64_t>((now_ns - filled_ns_) / 1000, 1000000);
      if (passed_us == 0) return;  // what is less than a microsecond counts later
      have_ = std::min(most_, have_ + passed_us * per_s_);
    }
    filled_ns_ = now_ns;
  }

  uint64_t most_;
  uint64_t have_;
  uint32_t per_s_;
  uint64_t filled_ns_ = 0;
};

}  // namespace ffs::client
