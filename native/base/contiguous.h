// Shared memory whose pages lie side by side: a device takes one piece where it would take 256 for a MiB of
// scattered pages, which costs a virtual disk more than half of its speed (docs/performance.md, Pages). All
// of it is a wish: where the kernel doesn't, pages stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs {

// Below so much of a large page gathering costs more than it brings.
constexpr size_t kLeastGathered = 256u << 10;

// Brings the pages of [offset, offset + bytes) of a shared file in, 2 MiB side by side where memory for it is
// found; what is left at the file's end, of kLeastGathered or more, side by side too. `offset` is a multiple
// of 2 MiB. Blocking: half a millisecond a MiB, and more where the kernel has to make room. Keeps what is
// written there, and may run while others use the memory. Afterwards each page can be taken out of its file
// by itself, though its neighbours are pinned.
void gather_pages(int fd, uint64_t offset, size_t bytes);

}  // namespace ffs
