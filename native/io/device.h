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
};

// Opens for exclusive use. Errors: ENOENT, EACCES, EBUSY (in use for 2 s: another process, or mounted),
// ENODEV (neither a file nor a block device), EINVAL (no O_DIRECT here).
Result<Device> open_device(const std::string& path);
void close_device(Device& device);

// Makes a regular file of `size_bytes` at `path` (its directory must exist), allocates its
// blocks and, unless `sparse`, writes zeros over all of them once so that later syncs carry no
// allocation. Overwrites the content of an existing file only if `overwrite`; else EEXIST.
// A failure removes the file that it made. ENOSPC names a full file system.
Status make_device_file(const std::string& path, uint64_t size_bytes, bool sparse, bool overwrite);

}  // namespace ffs::io
