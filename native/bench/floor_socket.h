// What the floors over sockets share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"
#include "bench/floor.h"

namespace ffs::bench {

// Both ways. `length`: of the payload that follows an answer; 0: none.
struct FloorAsk {
  uint32_t length;
  uint32_t tag;
};

// Connects to options.path, host:port; not blocking from then on. Blocking until it is connected.
Result<Fd> connect_floor(const FloorOptions& options);
Status make_blocking(int fd);
Status send_all(int fd, const void* data, size_t length);

// Asks for `depth` blocks, and for another for each that came until the time is over; then the rest comes in.
template <typename Ask, typename Receive>
Result<FloorCount> keep_in_flight(uint32_t depth, uint32_t duration_ms, Ask&& ask, Receive&& receive) {
  FloorCount count;
  const uint64_t begin = now_ns();
  const uint64_t end = begin + duration_ms * 1000000ull;
  uint64_t asked = depth;
  FFS_TRY_STATUS(ask(depth));
  while (count.blocks < asked) {
    FFS_TRY(const uint32_t got, receive());
    count.blocks += got;
    if (got > 0 && now_ns() < end) {
      FFS_TRY_STATUS(ask(got));
      asked += got;
    }
  }
  count.elapsed_ns = now_ns() - begin;
  return count;
}

}  // namespace ffs::bench
