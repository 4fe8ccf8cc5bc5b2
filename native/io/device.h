// Opening and making the file or block device under a chunk store. These functions block.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace ffs::io {

struct Device {
  int fd = -1;  // O_DIRECT | O_RDWR, locked (flock) against a second opening
  uint64_t size_bytes = 0;
  uint32_t sector_bytes = 512;
  bool block_device = false;
  bool volatile_cache = true;  // false only if the kernel says that the device writes through
  bool sparse = false;         // a file that has fewer blocks than bytes: writes may allocate
  // Most that one discard covers at best, and what its ends should be multiples of. 0: no discard (also for a
  // file that was written through: holes would cost allocations later). UINT64_MAX: no limit.
  uint64_t discard_bytes = 0;
  uint32_t discard_granularity = 0;
};

enum class Access : uint8_t { read_write, read_only };

// A process that was killed may hold its devices for a moment: so long one in use is asked again.
constexpr uint32_t kInUseWaitMs = 2000;

// Opens for exclusive use, whichever the access. Errors: ENOENT, EACCES, EROFS, EBUSY (in use for 2 s:
// another process, or mounted; in_use() says by whom), ENODEV (neither a file nor a block device), EINVAL (no
// O_DIRECT here).
Result<Device> open_device(const std::string& path, Access access = Access::read_write,
                           uint32_t wait_ms = kInUseWaitMs);
// What can be said of it while somebody may have it open; fd stays -1. Errors as open_device, but for EBUSY.
Result<Device> describe_device(const std::string& path);
// Who uses it, for a message: "mounted at /srv"; empty if it can't be told.
std::string in_use(const std::string& path);
void close_device(Device& device);

// Makes a regular file of `size_bytes` at `path` (its directory must exist), allocates its
// blocks and, unless `sparse`, writes zeros over all of them once so that later syncs carry no
// allocation. Overwrites the content of an existing file only if `overwrite`; else EEXIST.
// A failure removes the file that it made. ENOSPC names a full file system.
Status make_device_file(const std::string& path, uint64_t size_bytes, bool sparse, bool overwrite);

// Lengthens the file of a device that is open; sparse, or with blocks that are written through once. EINVAL:
// it isn't longer. On failure the file keeps its size.
Status extend_device_file(Device& device, uint64_t size_bytes);

}  // namespace ffs::io
