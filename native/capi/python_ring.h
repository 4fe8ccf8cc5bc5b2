// What the Python ring does in one call of C: where a signal handler, which runs between calls, must not come
// in between, and where a dozen calls of numpy would cost more than the requests (docs/ring.md, Building).
// Compiled into the cffi module only.
#pragma once

#include <string.h>

#include "ffs/ffs.h"

/* CFFI BEGIN */
// What a wait has stored so far, and what was needed: a handler that raises as the call returns takes its
// result away, and the completions with it.
typedef struct {
  uint32_t have, events;
} ffs_py_kept;

// The numbers of requests (ffs/client/ior_table.py): those that are free as a stack, used from its end.
typedef struct {
  int64_t* free;
  uint8_t* live;  // by number
  uint32_t free_count;
} ffs_py_numbers;

// What the entries of one file's requests have in common.
typedef struct {
  ffs_sqe like;
  uint64_t inode;
  int64_t known;  // reads end there
  uint32_t chunk_shift;
  uint32_t chain_count;
  const uint32_t* chains;  // by chunk index modulo chain_count
} ffs_py_file;

static int ffs_py_wait(ffs_ring* ring, ffs_cqe* out, uint32_t room, uint32_t least, int32_t timeout_ms,
                       ffs_py_kept* kept);
static int ffs_py_prepare(ffs_ring* ring, const ffs_sqe* entries, uint32_t count, ffs_py_numbers* numbers);
static int64_t ffs_py_bad(const int64_t* at, const int64_t* to, const int64_t* size, uint32_t count,
                          int64_t room);
static int ffs_py_cut(const ffs_py_file* file, const int64_t* at, const int64_t* to, const int64_t* size,
                      uint32_t count, ffs_sqe* out);
/* CFFI END */

static int ffs_py_wait(ffs_ring* ring, ffs_cqe* out, uint32_t room, uint32_t least, int32_t timeout_ms,
                       ffs_py_kept* kept) {
  uint32_t events = 0;
  const uint32_t have = kept->have;
  const int stored =
      ffs_ring_wait(ring, out + have, room - have, least > have ? least - have : 0, timeout_ms, &events);
  if (stored < 0) return stored;
  kept->have = have + (uint32_t)stored;
  kept->events = (kept->events & ~(uint32_t)FFS_WAIT_TIMEOUT) | events;
  return stored;
}

// ffs_ring_prepare; the numbers of the requests that it took, the uppermost of the stack, leave it with that.
static int ffs_py_prepare(ffs_ring* ring, const ffs_sqe* entries, uint32_t count, ffs_py_numbers* numbers) {
  const int taken = ffs_ring_prepare(ring, entries, count);
  for (int i = 0; i < taken; i++) {
    if (entries[i].group > 0) numbers->live[numbers->free[--numbers->free_count]] = 1;
  }
  return taken;
}

// The first request that lies outside of an Iov of `room` bytes, before a file's begin, or is empty; -1:
// none.
static int64_t ffs_py_bad(const int64_t* at, const int64_t* to, const int64_t* size, uint32_t count,
                          int64_t room) {
  for (uint32_t i = 0; i < count; i++) {
    if (at[i] < 0 || size[i] < 1 || to[i] < 0 || to[i] > room || size[i] > room - to[i]) return i;
  }
  return -1;
}

static void ffs_py_big_endian(uint8_t* out, uint64_t value) {
  for (int i = 7; i >= 0; i--, value >>= 8) out[i] = (uint8_t)value;
}

// One entry a request; their userdata is left to the caller. 0: a request has nothing to read, or crosses a
// chunk's end; then `out` is of no use.
static int ffs_py_cut(const ffs_py_file* file, const int64_t* at, const int64_t* to, const int64_t* size,
                      uint32_t count, ffs_sqe* out) {
  const int64_t chunk = (int64_t)1 << file->chunk_shift;
  for (uint32_t i = 0; i < count; i++) {
    const uint64_t index = (uint64_t)at[i] >> file->chunk_shift;
    const int64_t inside = at[i] & (chunk - 1);
    const int64_t left = file->known > at[i] ? file->known - at[i] : 0;
    const int64_t bytes = size[i] < left ? size[i] : left;
    if (bytes < 1 || bytes > chunk - inside) return 0;
    ffs_sqe* entry = &out[i];
    *entry = file->like;
    ffs_py_big_endian(entry->key, file->inode);
    ffs_py_big_endian(entry->key + 16, index);
    entry->chain = file->chains[index % file->chain_count];
    entry->offset = (uint32_t)inside;
    entry->length = (uint32_t)bytes;
    entry->iov_offset = (uint64_t)to[i];
  }
  return 1;
}
