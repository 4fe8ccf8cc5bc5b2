#include "client/client.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/check.h"

namespace ffs::client {

Waker::Waker() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void Waker::ring() {
  std::lock_guard lock(mutex_);
  if (rung_.exchange(true, std::memory_order_release)) return;
  const uint64_t one = 1;
  FFS_CHECK(::write(fd_.get(), &one, sizeof one) == sizeof one);
}

void Waker::quiet() {
  std::lock_guard lock(mutex_);
  uint64_t count;
  (void)!::read(fd_.get(), &count, sizeof count);
  rung_.store(false, std::memory_order_release);
}

void Client::set_routing(std::shared_ptr<const Routing> routing) {
  std::lock_guard lock(mutex_);
  if (routing->epoch < routing_->epoch) return;
  routing_ = std::move(routing);
  routing_generation_.fetch_add(1, std::memory_order_release);
  std::erase_if(needed_ns_, [this](const auto& entry) {
    const Chain* chain = routing_->chain(entry.first);
    return chain == nullptr || chain->available;
  });
  for (const auto& waker : wakers_) waker->ring();
}

void Client::wake() {
  std::lock_guard lock(mutex_);
  for (const auto& waker : wakers_) waker->ring();
}

void Client::add_waker(std::shared_ptr<Waker> waker) {
  std::lock_guard lock(mutex_);
  wakers_.push_back(std::move(waker));
}

void Client::remove_waker(const std::shared_ptr<Waker>& waker) {
  std::lock_guard lock(mutex_);
  std::erase(wakers_, waker);
}

uint64_t Client::first_needed_ns(ChainId chain, uint64_t now_ns) {
  std::lock_guard lock(mutex_);
  const Chain* known = routing_->chain(chain);
  if (known == nullptr || known->available) return now_ns;  // the ring has yet to hear that it is back
  return needed_ns_.emplace(chain, now_ns).first->second;
}

}  // namespace ffs::client
