// ffs_local_*: see native/engine/local_store.h.
#include <cstddef>
#include <cstring>
#include <string>

#include "capi/error.h"
#include "capi/options.h"
#include "engine/local_store.h"
#include "ffs/ffs.h"

struct ffs_local {
  std::unique_ptr<ffs::engine::LocalStore> store;
};

namespace {

using ffs::engine::LocalEntry;
using ffs::engine::LocalListed;
using ffs::engine::LocalOp;

const char* bad(const ffs_local_entry& entry) {
  if (entry.op < FFS_LOCAL_READ || entry.op > FFS_LOCAL_EXISTS) return "an unknown operation";
  if (entry.op == FFS_LOCAL_PUT && (entry.length == 0 || entry.length > ffs::kMaxChunkBytes))
    return "a block has 1 byte to 16 MiB";
  if (entry.op == FFS_LOCAL_READ && entry.length > ffs::kMaxChunkBytes) return "room for more than 16 MiB";
  if (entry.op <= FFS_LOCAL_PUT && entry.length != 0 && entry.memory == 0) return "no memory";
  return nullptr;
}

}  // namespace

extern "C" {

int ffs_local_open(const ffs_local_options* given, ffs_local** out) {
  ffs_local_options options;
  if (!ffs::capi::take_options(given, &options) || options.path == nullptr || out == nullptr)
    return ffs::capi::fail(EINVAL, "a local store needs options with their struct_size, and a path");
  ffs::engine::LocalOptions o;
  o.path = options.path;
  o.backend = options.io_backend != nullptr ? options.io_backend : "";
  o.size_bytes = options.size_bytes;
  o.max_chunks = options.max_chunks;
  o.fresh = (options.flags & FFS_LOCAL_FRESH) != 0;
  o.sparse = (options.flags & FFS_LOCAL_SPARSE) != 0;
  std::string why;
  auto store = ffs::engine::LocalStore::open(o, &why);
  if (!store.ok())
    return ffs::capi::fail(store.error(), "local store " + o.path + (why.empty() ? "" : ": " + why));
  *out = new ffs_local{std::move(*store)};
  return 0;
}

int ffs_local_run(ffs_local* local, ffs_local_entry* entries, uint32_t count, uint32_t depth) {
  std::vector<LocalEntry> batch(count);
  for (uint32_t i = 0; i < count; i++) {
    if (const char* why = bad(entries[i])) return ffs::capi::fail(EINVAL, "entry %u: %s", i, why);
    std::memcpy(batch[i].key.data(), entries[i].key, 16);
    std::memcpy(batch[i].tag.data(), entries[i].tag, 16);
    batch[i].memory = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(entries[i].memory));
    batch[i].op = static_cast<LocalOp>(entries[i].op);
    batch[i].length = entries[i].length;
  }
  local->store->run(batch, depth);
  for (uint32_t i = 0; i < count; i++) entries[i].result = batch[i].result;
  return 0;
}

int ffs_local_list(ffs_local* local, const uint8_t* after, ffs_local_listed* out, uint32_t capacity) {
  std::array<uint8_t, 16> key{};
  if (after != nullptr) std::memcpy(key.data(), after, 16);
  std::vector<LocalListed> page(capacity);
  const size_t count = local->store->list(after != nullptr ? &key : nullptr, page);
  for (size_t i = 0; i < count; i++) {
    out[i] = {};
    std::memcpy(out[i].key, page[i].key.data(), 16);
    std::memcpy(out[i].tag, page[i].tag.data(), 16);
    out[i].length = page[i].length;
  }
  return static_cast<int>(count);
}

int ffs_local_get_figures(ffs_local* local, ffs_local_figures* out) {
  if (out == nullptr || out->struct_size < sizeof(ffs_local_figures))
    return ffs::capi::fail(EINVAL, "a local store's figures need their struct_size");
  const ffs::engine::LocalFigures figures = local->store->figures();
  out->most_in_flight = figures.most_in_flight;
  out->capacity_bytes = figures.capacity.capacity_bytes;
  out->free_bytes = figures.capacity.free_bytes;
  out->chunks = figures.capacity.chunks;
  out->max_chunks = figures.capacity.max_chunks;
  out->reads = figures.metrics.reads;
  out->puts = figures.metrics.staged;
  out->bytes_read = figures.metrics.bytes_read;
  out->bytes_written = figures.metrics.bytes_written;
  out->flushes = figures.metrics.flushes;
  out->checksum_errors = figures.metrics.checksum_errors;
  out->poisoned = figures.metrics.poisoned ? 1 : 0;
  out->uring = figures.uring ? 1 : 0;
  return 0;
}

void ffs_local_close(ffs_local* local) {
  delete local;
}

}  // extern "C"
