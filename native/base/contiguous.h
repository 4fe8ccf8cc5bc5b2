// Shared memory whose pages lie side by side: a device takes one piece where it would take 256 for a MiB of
// scattered pages, which costs a virtual disk more than half of its speed (docs/performance.md, Pages). All
// of it is a wish: where the kernel doesn't, pages stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs {

// As mmap of a shared file, at an address that is good for large pages. Null: errno says why.
void* map_shared_aligned(int fd, int protection, int more_flags, size_t bytes, uint64_t offset);

// Brings pages of a mapping of map_shared_aligned in, 2 MiB side by side where memory for it is found.
// Blocking: half a millisecond a MiB, and more where the kernel has to make room. Keeps what is written
// there, and may run while others use the memory. `alone`: afterwards each page can be taken out of its file
// by itself again, though its neighbours are pinned.
void gather_pages(void* data, size_t bytes, bool alone);

}  // namespace ffs
