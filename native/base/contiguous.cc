#include "base/contiguous.h"

#include <sys/mman.h>

#include <algorithm>
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

// Gathers one large page's worth, of which the file has `bytes`. False: there is no large page to be had now.
bool gather_one(uint8_t* at, size_t bytes) {
  (void)::madvise(at, bytes, MADV_POPULATE_WRITE);
  // The copy into one large page, which for a moment may reach over the file's end.
  if (::madvise(at, kLargePage, MADV_COLLAPSE) != 0) return errno == EAGAIN || errno == EBUSY;
  // A hint for a part of a large page splits it: its pages stay where they are, each by itself, and those
  // beyond the file's end go.
  (void)::madvise(at, kPage, MADV_COLD);
  return true;
}

}  // namespace

// Through a mapping of its own: the kernel gathers what a mapping has at a multiple of 2 MiB, all 2 MiB of
// it.
void gather_pages(int fd, uint64_t offset, size_t bytes) {
  if (offset % kLargePage != 0 || bytes < kLeastGathered) return;
  const size_t whole = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  const size_t room = whole + kLargePage;
  void* reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return;
  auto* begin = static_cast<uint8_t*>(reserved);
  begin += (kLargePage - reinterpret_cast<uintptr_t>(begin) % kLargePage) % kLargePage;
  const int flags = MAP_SHARED | MAP_FIXED;
  if (::mmap(begin, whole, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset)) != MAP_FAILED) {
    (void)::madvise(begin, whole, MADV_HUGEPAGE);
    for (size_t i = 0; i + kLeastGathered <= bytes; i += kLargePage) {
      // If there is no large page now, the next ones won't be found either.
      if (!gather_one(begin + i, std::min(kLargePage, bytes - i))) break;
    }
  }
  ::munmap(reserved, room);
}

}  // namespace ffs
