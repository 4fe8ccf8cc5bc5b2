// Credits: so that a message never meets an empty receive queue (docs/rdma.md, Messages). Each side knows how
// many receive buffers the other has ready for it. A message takes one; who has used a buffer and posted it
// anew owes it, and tells so with its next message, or with an empty one when half of them are owed. The
// last one is kept for that empty message, so the two can't wait for each other. Pure; one thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"

namespace ffs::net::rdma {

class Credits {
 public:
  // `theirs`: buffers that the other has ready; `ours`: the ones ready here. Both at least kLeastBuffers.
  Credits(uint32_t theirs, uint32_t ours) : available_(theirs), most_(theirs), ours_(ours) {
    FFS_CHECK(theirs >= kLeastBuffers && ours >= kLeastBuffers);
  }
  static constexpr uint32_t kLeastBuffers = 4;

  bool can_send() const { return available_ > 1; }
  // Nothing else would tell the other in time.
  bool must_tell() const { return owed_ * 2 >= ours_ && available_ > 0; }
  // A message goes: what it tells.
  uint32_t take() {
    FFS_CHECK(available_ > 0);
    available_--;
    return std::exchange(owed_, 0u);
  }
  // A message came that tells so many. False: more than there can be.
  bool told(uint32_t count) {
    if (count > most_ - available_) return false;
    available_ += count;
    return true;
  }
  void posted(uint32_t count) {
    owed_ += count;
    FFS_CHECK(owed_ <= ours_);
  }
  uint32_t available() const { return available_; }
  uint32_t owed() const { return owed_; }

 private:
  uint32_t available_;
  uint32_t most_;
  uint32_t ours_;
  uint32_t owed_ = 0;
};

}  // namespace ffs::net::rdma
