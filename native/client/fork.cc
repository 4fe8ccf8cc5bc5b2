#include "client/fork.h"

#include <pthread.h>

#include <atomic>

namespace ffs::client {

namespace {

std::atomic<uint64_t> generation{1};

void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

uint64_t process_generation() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, in_child);
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace ffs::client
