// Whether this process is still the one that made a ring: a child of fork must not use the
// parent's sockets. Any thread; costs one load.
#pragma once

#include <cstdint>

namespace ffs::client {

// Differs in a child from what the parent saw (as long as it was called before the fork).
uint64_t process_generation();

}  // namespace ffs::client
