#include "client/granules.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/ids.h"

namespace ffs::client {

namespace {

// Calls compare(offset in the data, bytes) for each granule that has come and wasn't compared yet.
template <typename Compare>
void walk(const wire::ReadReply& reply, const uint32_t* crcs, size_t count, uint64_t begin, uint64_t arrived,
          GranuleCheck* check, Compare compare) {
  if (reply.checksum_kind != static_cast<uint8_t>(wire::ChecksumKind::kCrc32c)) return;
  const uint64_t end = begin + reply.bytes;
  while (check->checked < count && check->sound) {
    const uint64_t from = (uint64_t{reply.first_granule} + check->checked) * kGranuleBytes;
    const uint64_t to = std::min<uint64_t>(from + kGranuleBytes, reply.chunk_length);
    if (from < begin || to > end || to <= from) {
      check->sound = false;  // a checksum of what wasn't sent
    } else if (to > begin + arrived) {
      return;
    } else {
      check->sound = compare(from - begin, to - from) == crcs[check->checked];
      check->checked++;
    }
  }
}

}  // namespace

void check_granules(const wire::ReadReply& reply, const uint32_t* crcs, size_t count, uint64_t begin,
                    const uint8_t* data, uint64_t arrived, GranuleCheck* check) {
  walk(reply, crcs, count, begin, arrived, check,
       [&](uint64_t at, uint64_t bytes) { return crc32c(data + at, bytes); });
}

void copy_granules(const wire::ReadReply& reply, const uint32_t* crcs, size_t count, uint64_t begin,
                   const uint8_t* data, uint8_t* to, GranuleCheck* check) {
  uint64_t copied = 0;  // up to here; granules follow each other
  walk(reply, crcs, count, begin, reply.bytes, check, [&](uint64_t at, uint64_t bytes) {
    if (at > copied) std::memcpy(to + copied, data + copied, at - copied);
    copied = at + bytes;
    return crc32c_copy(to + at, data + at, bytes);
  });
  if (check->sound && copied < reply.bytes) std::memcpy(to + copied, data + copied, reply.bytes - copied);
}

}  // namespace ffs::client
