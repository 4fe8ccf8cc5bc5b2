#include "net/version.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "ffs/wire.h"

namespace ffs::net {

namespace {

std::atomic<uint16_t> spoken{wire::kProtocolVersion << 8 | wire::kProtocolVersion};

}  // namespace

Versions spoken_versions() {
  const uint16_t both = spoken.load(std::memory_order_relaxed);
  return {static_cast<uint8_t>(both >> 8), static_cast<uint8_t>(both & 0xff)};
}

void set_spoken_versions(Versions versions) {
  FFS_CHECK(versions.least != 0 && versions.least <= versions.most);
  spoken.store(static_cast<uint16_t>(versions.least << 8 | versions.most), std::memory_order_relaxed);
}

uint8_t choose_version(Versions ours, Versions theirs) {
  const uint8_t most = std::min(ours.most, theirs.most);
  return most >= std::max(ours.least, theirs.least) ? most : 0;
}

}  // namespace ffs::net
