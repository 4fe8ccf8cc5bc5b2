#include "client/channels.h"

#include "base/check.h"

namespace ffs::client {

Channel ChannelAllocator::acquire(ChainId chain, uint64_t now_ms) {
  std::lock_guard lock(mutex_);
  OfChain& own = chains_[chain];
  Channel channel;
  if (!own.free.empty()) {
    channel = own.free.back();
    own.free.pop_back();
  } else if (!own.resting.empty() && own.resting.front().until_ms <= now_ms) {
    channel = own.resting.front().channel;
    own.resting.pop_front();
  } else {
    channel.number = ++own.last_number;
  }
  channel.sequence++;
  return channel;
}

Channel ChannelAllocator::reissue(ChainId, Channel channel) {
  FFS_CHECK(channel.number != 0);
  channel.sequence++;
  return channel;
}

void ChannelAllocator::release(ChainId chain, Channel channel) {
  FFS_CHECK(channel.number != 0);
  std::lock_guard lock(mutex_);
  chains_[chain].free.push_back(channel);
}

void ChannelAllocator::retire(ChainId chain, Channel channel, uint64_t now_ms) {
  FFS_CHECK(channel.number != 0);
  std::lock_guard lock(mutex_);
  chains_[chain].resting.push_back({channel, now_ms + kRestMs});
}

}  // namespace ffs::client
