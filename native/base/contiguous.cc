#include "base/contiguous.h"

#include <sys/mman.h>

#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ffs {

namespace {
constexpr size_t kLargePage = 2u << 20;
constexpr size_t kPage = 4096;
}  // namespace

void* map_shared_aligned(int fd, int protection, int more_flags, size_t bytes, uint64_t offset) {
  const int flags = MAP_SHARED | more_flags;
  const auto at = static_cast<off_t>(offset);
  if (bytes < kLargePage || offset % kLargePage != 0) {
    void* plain = ::mmap(nullptr, bytes, protection, flags, fd, at);
    return plain == MAP_FAILED ? nullptr : plain;
  }
  const size_t room = bytes + kLargePage;
  void* reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<uint8_t*>(reserved);
  const size_t before = (kLargePage - reinterpret_cast<uintptr_t>(begin) % kLargePage) % kLargePage;
  void* data = ::mmap(begin + before, bytes, protection, flags | MAP_FIXED, fd, at);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, room);
    errno = error;
    return nullptr;
  }
  const size_t mapped = (bytes + kPage - 1) / kPage * kPage;
  if (before > 0) ::munmap(begin, before);
  if (before + mapped < room) ::munmap(begin + before + mapped, room - before - mapped);
  return data;
}

void gather_pages(void* data, size_t bytes, bool alone) {
  auto* at = static_cast<uint8_t*>(data);
  if (reinterpret_cast<uintptr_t>(at) % kLargePage != 0) return;
  const size_t whole = bytes / kLargePage * kLargePage;
  if (whole == 0) return;
  (void)::madvise(at, whole, MADV_HUGEPAGE);
  for (size_t i = 0; i < whole; i += kLargePage) {
    // The copy into one large page; if there is none now, the next ones won't be found either.
    (void)::madvise(at + i, kLargePage, MADV_POPULATE_WRITE);
    const bool gathered = ::madvise(at + i, kLargePage, MADV_COLLAPSE) == 0;
    if (!gathered && errno != EAGAIN && errno != EBUSY) break;
    // A hint for a part of a large page splits it: its pages stay where they are, each by itself.
    if (alone && gathered) (void)::madvise(at + i, kPage, MADV_COLD);
  }
  if (alone) (void)::madvise(at, whole, MADV_NOHUGEPAGE);
}

}  // namespace ffs
