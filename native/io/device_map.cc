#include "io/device_map.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"
#include "io/memory_copies.h"

namespace ffs::io {

std::unique_ptr<DeviceMap> DeviceMap::of(int fd, uint64_t bytes) {
  if (bytes == 0 || !MemoryCopies::lies_in_memory(fd)) return nullptr;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) return nullptr;
  (void)::madvise(base, bytes, MADV_DONTDUMP);  // a core holds no users' data
  return std::unique_ptr<DeviceMap>(new DeviceMap(fd, static_cast<uint8_t*>(base), bytes));
}

DeviceMap::~DeviceMap() {
  ::munmap(base_, bytes_);
}

uint8_t* DeviceMap::checked(uint64_t offset, uint64_t bytes) const {
  FFS_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
  return base_ + offset;
}

int DeviceMap::copy(uint64_t offset, uint8_t* to, uint32_t bytes) const {
  for (uint32_t moved = 0; moved < bytes;) {
    const ssize_t got = ::pread(fd_, to + moved, bytes - moved, static_cast<off_t>(offset + moved));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return EIO;
    moved += static_cast<uint32_t>(got);
  }
  return 0;
}

}  // namespace ffs::io
