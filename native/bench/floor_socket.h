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

}  // namespace ffs::bench
