// What stands on a device before it is formatted: file systems, partition tables, volume managers and the
// like by their signatures, and anything else that isn't zeros. Blocking; any thread.
//
// The signatures only give things their names: a device that holds one we don't know isn't blank either, and
// is refused as well. (libblkid knows more names; it would be one more library in the client's process.)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace ffs::io {

struct Finding {
  const char* what;  // "an ext2/3/4 file system"; static
  uint64_t offset;   // of the signature
};

struct Probed {
  std::vector<Finding> found;
  bool blank = true;     // zeros wherever it was looked: the first 8 MiB, the last MiB, 256 places between
  uint64_t data_at = 0;  // not blank: the first block that isn't zeros
  // "an ext4 file system (signature at byte 1080), ..." or "data in the 4 KiB at byte 0"; empty: blank.
  std::string text() const;
};

// `fd` may be O_DIRECT. Errors: those of reading.
Result<Probed> probe(int fd, uint64_t size_bytes);

// Discards all of a block device, piece by piece. ENOTSUP: it has no discard.
Status discard_all(int fd, uint64_t size_bytes);

// Zeros over every place where a signature known here may stand, and flushes: nothing that reads signatures
// finds an old one. All content of these places is lost.
Status wipe_signatures(int fd, uint64_t size_bytes);

// Lets the kernel forget the partitions of a disk whose table is gone. EBUSY: some are open. Not a whole
// disk, or nothing known of it: success.
Status forget_partitions(int fd);

}  // namespace ffs::io
