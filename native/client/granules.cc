#include "client/granules.h"

#include <algorithm>

#include "base/crc32c.h"
#include "base/ids.h"

namespace ffs::client {

void check_granules(const wire::ReadReply& reply, const uint32_t* crcs, size_t count, uint64_t begin,
                    const uint8_t* data, uint64_t arrived, GranuleCheck* check) {
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
      check->sound = crc32c(data + (from - begin), to - from) == crcs[check->checked];
      check->checked++;
    }
  }
}

}  // namespace ffs::client
