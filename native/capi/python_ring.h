// What the Python ring does in one call of C: where a signal handler, which runs between calls, must not come
// in between, and where a dozen calls of numpy would cost more than the requests (docs/ring.md, Building).
// Compiled into the cffi module only.
#pragma once

#include <errno.h>
#include <string.h>

#include "ffs/ffs.h"

/* CFFI BEGIN */
// What a wait has stored so far, and what was needed: a handler that raises as the call returns takes its
// result away, and the completions with it.
typedef struct {
  uint32_t have, events;
} ffs_py_kept;

// The requests of a ring of files (ffs/client/ior_table.py). Each has a number, which is its userdata in
// native, and an owner: what must be kept until it is over, a file and an Iov.
typedef struct {
  // By number.
  int64_t* free;  // those that are free as a stack, used from its end
  uint8_t* live;
  uint64_t* userdata;  // the caller's
  int64_t* end;        // of a write: where in the file it ends
  uint32_t* owner;
  // By owner.
  uint32_t* flying;  // its requests in flight
  int64_t* reached;  // the furthest end of its writes that were done, -1: of none
  uint8_t* failed;   // whether one of its writes failed
  uint8_t* listed;
  uint32_t* news;  // the owners that are listed: none is in flight any more, or writes are over
  uint32_t free_count, news_count;
  uint32_t writes;  // whether the requests are writes
} ffs_py_table;

// Requests that are over and that the caller has not been given: by place in the wait's completions.
typedef struct {
  uint64_t* userdata;
  int64_t* result;
} ffs_py_over;

// What the entries of one file's requests have in common.
typedef struct {
  ffs_sqe like;
  uint64_t inode;
  uint32_t chunk_shift;
  uint32_t chain_count;
  const uint32_t* chains;  // by chunk index modulo chain_count
} ffs_py_file;

static int ffs_py_wait(ffs_ring* ring, ffs_cqe* out, uint32_t room, uint32_t least, int32_t timeout_ms,
                       ffs_py_kept* kept);
static int ffs_py_settle(ffs_ring* ring, ffs_cqe* out, uint32_t room, uint32_t least, int32_t timeout_ms,
                         ffs_py_kept* kept, ffs_py_table* table, ffs_py_over* over);
static void ffs_py_told(ffs_py_table* table);
static int ffs_py_take(ffs_ring* ring, const ffs_sqe* entries, uint32_t count, ffs_py_table* table);
static int64_t ffs_py_bad(const int64_t* at, const int64_t* to, const int64_t* size, uint32_t count,
                          int64_t room);
static int ffs_py_prepare_inside(ffs_ring* ring, const ffs_py_file* file, uint64_t iov, int64_t room,
                                 int64_t known, const int64_t* at, const int64_t* to, const int64_t* size,
                                 const int64_t* user, uint32_t count, ffs_sqe* entries, ffs_py_table* table,
                                 uint32_t owner, int64_t* taken);
static int ffs_py_prepare_one(ffs_ring* ring, const ffs_py_file* file, uint64_t iov, int64_t room,
                              int64_t known, int64_t at, int64_t to, int64_t size, int64_t user,
                              ffs_sqe* entries, ffs_py_table* table, uint32_t owner, int64_t* taken);
static int ffs_py_move(ffs_ring* ring, const ffs_py_file* file, uint8_t op, uint8_t flags, uint64_t index,
                       uint32_t offset, uint32_t length, uint64_t iov, uint64_t iov_offset,
                       int32_t timeout_ms, ffs_cqe* out, ffs_py_kept* kept);
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

static void ffs_py_list(ffs_py_table* table, uint32_t owner) {
  if (table->listed[owner]) return;
  table->listed[owner] = 1;
  table->news[table->news_count++] = owner;
}

// ffs_py_wait; what came is over with it: its numbers are free, and `over` has the caller's userdata.
static int ffs_py_settle(ffs_ring* ring, ffs_cqe* out, uint32_t room, uint32_t least, int32_t timeout_ms,
                         ffs_py_kept* kept, ffs_py_table* table, ffs_py_over* over) {
  const uint32_t before = kept->have;
  const int stored = ffs_py_wait(ring, out, room, least, timeout_ms, kept);
  for (uint32_t i = before; i < kept->have; i++) {
    const uint64_t number = out[i].userdata;
    const uint32_t owner = table->owner[number];
    over->userdata[i] = out[i].userdata = table->userdata[number];
    over->result[i] = out[i].result;
    table->live[number] = 0;
    table->free[table->free_count++] = (int64_t)number;
    if (table->writes) {
      if (out[i].result < 0) {
        table->failed[owner] = 1;
      } else if (table->reached[owner] < table->end[number]) {
        table->reached[owner] = table->end[number];
      }
      ffs_py_list(table, owner);
    }
    if (--table->flying[owner] == 0) ffs_py_list(table, owner);
  }
  return stored;
}

// The caller has seen to all that is listed.
static void ffs_py_told(ffs_py_table* table) {
  while (table->news_count > 0) {
    const uint32_t owner = table->news[--table->news_count];
    table->reached[owner] = -1;
    table->failed[owner] = 0;
    table->listed[owner] = 0;
  }
}

// ffs_ring_prepare; the numbers of the requests that it took, the uppermost of the stack, leave it with that.
// The table knows all of them but that.
static int ffs_py_take(ffs_ring* ring, const ffs_sqe* entries, uint32_t count, ffs_py_table* table) {
  const int taken = ffs_ring_prepare(ring, entries, count);
  for (int i = 0; i < taken; i++) {
    if (entries[i].group == 0) continue;
    const int64_t number = table->free[--table->free_count];
    table->live[number] = 1;
    table->flying[table->owner[number]]++;
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

// One entry a request, without userdata. 0: a request can't be, has nothing to read, or crosses a chunk's
// end; then `out` is of no use.
static int ffs_py_fill(const ffs_py_file* file, uint64_t iov, int64_t known, const int64_t* at,
                       const int64_t* to, const int64_t* size, uint32_t count, ffs_sqe* out) {
  const int64_t chunk = (int64_t)1 << file->chunk_shift;
  for (uint32_t i = 0; i < count; i++) {
    const uint64_t index = (uint64_t)at[i] >> file->chunk_shift;
    const int64_t inside = at[i] & (chunk - 1);
    const int64_t left = known > at[i] ? known - at[i] : 0;
    const int64_t bytes = size[i] < left ? size[i] : left;
    if (bytes < 1 || bytes > chunk - inside) return 0;
    ffs_sqe* entry = &out[i];
    *entry = file->like;
    entry->iov = (ffs_iov*)(uintptr_t)iov;
    ffs_py_big_endian(entry->key, file->inode);
    ffs_py_big_endian(entry->key + 16, index);
    entry->chain = file->chains[index % file->chain_count];
    entry->offset = (uint32_t)inside;
    entry->length = (uint32_t)bytes;
    entry->iov_offset = (uint64_t)to[i];
  }
  return 1;
}

// Requests of one file that lie in one chunk each, as many as have a number, all in one step. 0: they aren't
// that plain, or can't be, which the long way says; nothing was taken. 1: `taken` were, or it is -errno.
//
// iov: its handle, room: its bytes, known: where reads end, entries: room for as many as the table has
// numbers.
static int ffs_py_prepare_inside(ffs_ring* ring, const ffs_py_file* file, uint64_t iov, int64_t room,
                                 int64_t known, const int64_t* at, const int64_t* to, const int64_t* size,
                                 const int64_t* user, uint32_t count, ffs_sqe* entries, ffs_py_table* table,
                                 uint32_t owner, int64_t* taken) {
  if (ffs_py_bad(at, to, size, count, room) >= 0) return 0;
  if (count > table->free_count) count = table->free_count;
  *taken = 0;
  if (count == 0) return 1;
  if (!ffs_py_fill(file, iov, known, at, to, size, count, entries)) return 0;
  const int64_t* numbers = table->free + table->free_count - 1;
  for (uint32_t i = 0; i < count; i++) {
    const int64_t number = numbers[-(int64_t)i];
    entries[i].userdata = (uint64_t)number;
    table->userdata[number] = (uint64_t)user[i];
    table->end[number] = at[i] + size[i];
    table->owner[number] = owner;
  }
  *taken = ffs_py_take(ring, entries, count, table);
  return 1;
}

// The same of one.
static int ffs_py_prepare_one(ffs_ring* ring, const ffs_py_file* file, uint64_t iov, int64_t room,
                              int64_t known, int64_t at, int64_t to, int64_t size, int64_t user,
                              ffs_sqe* entries, ffs_py_table* table, uint32_t owner, int64_t* taken) {
  return ffs_py_prepare_inside(ring, file, iov, room, known, &at, &to, &size, &user, 1, entries, table, owner,
                               taken);
}

// Prepares a request for a range of one chunk in a ring that has no other, and waits for it as ffs_py_wait
// does.
static int ffs_py_move(ffs_ring* ring, const ffs_py_file* file, uint8_t op, uint8_t flags, uint64_t index,
                       uint32_t offset, uint32_t length, uint64_t iov, uint64_t iov_offset,
                       int32_t timeout_ms, ffs_cqe* out, ffs_py_kept* kept) {
  ffs_sqe entry = file->like;
  entry.op = op;
  entry.flags = flags;
  ffs_py_big_endian(entry.key, file->inode);
  ffs_py_big_endian(entry.key + 16, index);
  entry.chain = file->chains[index % file->chain_count];
  entry.offset = offset;
  entry.length = length;
  entry.iov = (ffs_iov*)(uintptr_t)iov;
  entry.iov_offset = iov_offset;
  const int taken = ffs_ring_prepare(ring, &entry, 1);
  return taken == 1 ? ffs_py_wait(ring, out, 1, 1, timeout_ms, kept) : taken < 0 ? taken : -ENOBUFS;
}
