// Identities of updates (docs/craq.md, At most once): a channel belongs to one chain and has one
// update outstanding; its sequences only grow. Any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/ids.h"

namespace ffs::client {

struct Channel {
  uint32_t number = 0;    // from 1; 0: none
  uint64_t sequence = 0;  // of the update that is outstanding
};

class ChannelAllocator {
 public:
  // A channel of the chain that nothing is outstanding on, with its next sequence.
  Channel acquire(ChainId chain, uint64_t now_ms);
  // The same channel under its next sequence: the outstanding update is known to have fallen.
  Channel reissue(ChainId chain, Channel channel);
  // The update's outcome is known: the channel may be used again.
  void release(ChainId chain, Channel channel);
  // Its outcome is unknown and it may still be on its way: the channel rests, so that what is
  // late meets an empty channel and is refused by the next one's sequence.
  void retire(ChainId chain, Channel channel, uint64_t now_ms);

  static constexpr uint64_t kRestMs = 60000;

 private:
  struct Resting {
    Channel channel;
    uint64_t until_ms;
  };
  struct OfChain {
    std::vector<Channel> free;
    std::deque<Resting> resting;  // oldest first
    uint32_t last_number = 0;
  };
  std::mutex mutex_;
  std::unordered_map<ChainId, OfChain> chains_;
};

}  // namespace ffs::client
