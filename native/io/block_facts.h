// What the kernel says of a block device (sysfs) and who holds it. Blocking; any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace ffs::io {

struct BlockFacts {
  // False only where the kernel says "write through": what completed is durable without a flush.
  bool volatile_cache = true;
  uint64_t discard_bytes = 0;  // most that one request of the kernel covers; 0: no discard
  uint32_t discard_granularity = 0;
  uint32_t physical_sector_bytes = 0;  // 0: unknown
};

// A partition has those of its disk.
BlockFacts block_facts(dev_t device);

// Who uses a block device, one of its partitions, or what is built on it, in words: "mounted at /srv",
// "dm-3 is built on it", "its partition sda2 is mounted at /". Empty: nobody that can be told. Opening with
// O_EXCL is what decides; this names the reason.
std::string user_of(dev_t device);

}  // namespace ffs::io
