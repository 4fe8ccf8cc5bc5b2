#include "engine/evict_history.h"

#include <algorithm>
#include <cstdlib>

#include "base/check.h"

namespace ffs::engine {

void EvictionHistory::Free::operator()(Bucket* buckets) const {
  std::free(buckets);
}

void EvictionHistory::fit(uint64_t chunks) {
  constexpr uint64_t kPlenty = 256 * 1024;
  const uint64_t wanted = std::max({kLeastEntries, 2 * chunks, std::min(4 * chunks, kPlenty)});
  if (buckets_ != 0 && wanted < 2 * entries()) return;
  const auto count = static_cast<uint32_t>((wanted + kWays - 1) / kWays);
  // Zeroed by the system when it is touched: nothing walks it here.
  auto* memory = static_cast<Bucket*>(std::calloc(count, sizeof(Bucket)));
  FFS_CHECK(memory != nullptr);
  memory_.reset(memory);
  buckets_ = count;
}

EvictionHistory::Bucket* EvictionHistory::bucket_of(const ChunkKey& key, uint32_t* fingerprint) const {
  const uint64_t hash = mix64(ChunkKeyHash{}(key));
  *fingerprint = 1 + static_cast<uint32_t>(hash >> 32) % ((1u << (32 - kStampBits)) - 1);
  return &memory_[(hash & 0xffffffff) * buckets_ >> 32];
}

void EvictionHistory::remember(const ChunkKey& key, uint32_t last, uint32_t now) {
  if (buckets_ == 0) return;
  uint32_t fingerprint;
  Bucket* bucket = bucket_of(key, &fingerprint);
  const uint32_t now_units = now >> kStampShift;
  const auto age = [&](uint32_t entry) { return (now_units - entry) & kStampMask; };
  uint32_t* place = &bucket->entries[0];
  for (uint32_t& entry : bucket->entries) {
    if (entry >> kStampBits == fingerprint || entry == 0) {
      place = &entry;
      break;
    }
    if (age(entry) > age(*place)) place = &entry;
  }
  *place = fingerprint << kStampBits | (last >> kStampShift & kStampMask);
}

uint32_t EvictionHistory::recall(const ChunkKey& key, uint32_t now) {
  if (buckets_ == 0) return 0;
  uint32_t fingerprint;
  Bucket* bucket = bucket_of(key, &fingerprint);
  for (uint32_t& entry : bucket->entries) {
    if (entry >> kStampBits != fingerprint) continue;
    const uint32_t age_units = ((now >> kStampShift) - entry) & kStampMask;
    entry = 0;
    const uint32_t age = age_units << kStampShift;
    return now > age ? now - age : 0;
  }
  return 0;
}

}  // namespace ffs::engine
