#include "client/landing.h"

#include "base/check.h"

namespace ffs::client {

namespace {

uint32_t units_of(uint64_t bytes, uint64_t unit_bytes) {
  return static_cast<uint32_t>((bytes + unit_bytes - 1) / unit_bytes);
}

}  // namespace

Landing::~Landing() {
  if (listed_) IovRegistry::end_own(iov_->serial());
}

Iov* Landing::iov() {
  if (iov_ != nullptr || refused_) return iov_.get();
  IovOptions options;
  options.size_bytes = kBytes;
  auto made = Iov::create(options);
  if (!made.ok()) {
    refused_ = true;  // no memory or descriptors for it: the socket will do
    return nullptr;
  }
  iov_ = std::move(*made);
  IovRegistry::begin_own(iov_->serial());
  listed_ = true;
  return iov_.get();
}

uint64_t Landing::take(uint32_t bytes) {
  FFS_CHECK(bytes > 0 && bytes <= kBytes);
  const uint32_t units = units_of(bytes, kUnitBytes);
  uint32_t run = 0;
  for (uint32_t i = 0; i < kUnits; i++) {
    run = taken_[i] ? 0 : run + 1;
    if (run < units) continue;
    const uint32_t first = i + 1 - units;
    for (uint32_t k = first; k <= i; k++) taken_.set(k);
    return first * kUnitBytes;
  }
  return kNowhere;
}

void Landing::give(uint64_t at, uint32_t bytes) {
  const auto first = static_cast<uint32_t>(at / kUnitBytes);
  for (uint32_t k = first; k < first + units_of(bytes, kUnitBytes); k++) {
    FFS_CHECK(taken_[k]);
    taken_.reset(k);
  }
}

}  // namespace ffs::client
