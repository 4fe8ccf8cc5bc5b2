// Postings: the send queue as the channel sees it - what waits, what is under way, which of a batch report
// their end (docs/rdma.md, Posting). Work ends in the order in which it was posted, so one report ends all
// before it. Pure; one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "net/rdma/pair.h"

namespace ffs::net::rdma {

// What is to be done with work when it has ended.
struct Entry {
  Work work;
  uint64_t token = 0;  // given back with its end; 0: nobody waits
  uint64_t tag = 0;    // the owner's
  int32_t slot = -1;   // of the channel's memory for messages; -1: none
};

struct Ended {
  WorkKind kind = WorkKind::kSend;
  uint64_t token = 0;
  uint64_t tag = 0;
  bool good = true;
};

class Postings {
 public:
  // The device's queue holds `depth`; no work moves more than `most_bytes`.
  Postings(uint32_t depth, uint32_t most_bytes) : depth_(depth), most_bytes_(most_bytes) {
    FFS_CHECK(depth >= 4 && most_bytes > 0);
  }

  // Bulk work waits its turn here; longer than most_bytes it is cut, and the last part has the token.
  void add(Work work, uint64_t token, uint64_t tag);
  bool waits() const { return !waiting_.empty(); }
  // Room for one more, beyond what waits.
  bool has_room() const { return under_way() + waiting_.size() < depth_; }
  // A message, behind all that waits. Only with has_room().
  void add_message(const Entry& entry);

  // What can be posted now, in order, numbered and with its reports chosen. Empty: nothing, or no room.
  std::span<const Work> batch();
  // The batch was posted.
  void posted();

  // Work up to `number` has ended well.
  void ended(uint64_t number, std::vector<Ended>* out, std::vector<int32_t>* slots);
  // `number` failed: whatever stood before it has ended well. False: there is no such work (the queue was
  // broken before, and this is only flushed).
  bool failed(uint64_t number, Ended* culprit, std::vector<Ended>* out, std::vector<int32_t>* slots);
  // Nothing moves any more: all that is left, under way or waiting.
  void abandon(std::vector<Ended>* out);

  uint32_t under_way() const { return static_cast<uint32_t>(under_way_.size()); }

 private:
  uint32_t depth_;
  uint32_t most_bytes_;
  std::deque<Entry> waiting_;
  std::deque<Entry> under_way_;
  std::vector<Work> batch_;
  uint64_t next_number_ = 1;
  uint32_t silent_ = 0;  // under way since the last one that reports
};

}  // namespace ffs::net::rdma
