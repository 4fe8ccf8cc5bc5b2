// Landing: memory of a ring's own that servers of this host read into, for slices that can't be lent to them
// - memory that somebody else has made, or a place that isn't whole pages (docs/ring.md, Landing). From here
// the data is copied into the slice in the same pass that compares its checksums. Belongs to its ring's
// thread.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>

#include "client/iov.h"

namespace ffs::client {

class Landing {
 public:
  static constexpr uint64_t kBytes = 16ull << 20;  // the longest read fits, in one extent
  // To one server at a time; one longer read goes alone. What its device reads next and what is copied now:
  // of more memory less stays in the processor's cache on the way.
  static constexpr uint64_t kBytesALink = 8ull << 20;
  static constexpr uint64_t kNowhere = ~0ull;
  static constexpr uint32_t kLeastBytes = 16 * 1024;  // below, the copy through the socket costs as little

  ~Landing();

  // Made when first asked for. Null: it can't be had.
  Iov* iov();
  uint8_t* data(uint64_t at) { return iov_->data() + at; }

  // A place for `bytes` (whole pages, at most kBytes), or kNowhere: there is no room now.
  uint64_t take(uint32_t bytes);
  void give(uint64_t at, uint32_t bytes);
  // As Iov::take_back; the place stays taken.
  bool take_back(uint64_t at, uint32_t bytes) { return iov_->take_back(at, bytes); }

  // In a child of fork: locks may be held by a thread that isn't there.
  void abandon() { listed_ = false; }

 private:
  static constexpr uint64_t kUnitBytes = 64 * 1024;
  static constexpr uint32_t kUnits = kBytes / kUnitBytes;

  std::unique_ptr<Iov> iov_;
  std::bitset<kUnits> taken_;
  bool refused_ = false;
  bool listed_ = false;
};

}  // namespace ffs::client
