#include "engine/scale.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <vector>

#include "engine/store_impl.h"

namespace ffs::engine {

namespace {

constexpr uint64_t kChunkBytes = 1u << 20;
constexpr uint64_t kSpace = 7;
constexpr TargetId kTarget{1};

uint64_t clock_us(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000 + static_cast<uint64_t>(time.tv_nsec) / 1'000;
}

uint64_t resident_bytes() {
  malloc_trim(0);
  unsigned long pages = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  if (std::fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
  std::fclose(file);
  return uint64_t{resident} * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

Uuid cluster_id() {
  Uuid id{};
  id[0] = 1;
  return id;
}

// Keys as a KV space has them: spread over all the range, here in order.
ChunkKey key_at(uint64_t i, uint64_t chunks) {
  std::array<uint8_t, 16> key{};
  const uint64_t high = UINT64_MAX / chunks * i + mix64(i) % (UINT64_MAX / chunks);
  for (size_t b = 0; b < 8; b++) key[b] = static_cast<uint8_t>(high >> (8 * (7 - b)));
  return ChunkKey::of(kSpace, key);
}

Status put(int fd, uint64_t offset, const uint8_t* bytes, size_t size) {
  if (pwrite(fd, bytes, size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size)) return ok_status();
  return Error::of(errno != 0 ? errno : EIO, "writing the image of a store");
}

// Writes a snapshot with the chunks into a formatted device, by the encoders of the engine.
Status write_chunks(const std::string& path, uint64_t chunks, bool shared, uint64_t* snapshot_bytes) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "r+b"), std::fclose);
  if (file == nullptr) return Error::of(errno, "opening the image of a store");
  const int fd = fileno(file.get());
  uint8_t blocks[2][kBlock];
  for (int i = 0; i < 2; i++) {
    if (pread(fd, blocks[i], kBlock, static_cast<off_t>(kSuperblockOffset[i])) !=
        static_cast<ssize_t>(kBlock))
      return Error::of(EIO, "reading the image of a store");
  }
  FFS_TRY(Superblock super, choose_superblock(blocks[0], blocks[1], UINT64_MAX));
  std::vector<uint8_t> slice(kMaxBlockBytes);
  uint64_t offset = 0, next = 0;
  uint32_t slices = 0;
  uint32_t sums[kChunkBytes / kGranuleBytes];
  for (bool tables = false; !tables;) {
    tables = next == chunks;
    BlockHeader header{};
    header.magic = kSnapshotMagic;
    header.store_id = super.store_id;
    header.sequence = slices++;
    header.mark = super.snapshot_id + 1;
    Writer writer(slice.data() + sizeof header, slice.size() - sizeof header);
    while (next < chunks && writer.left() >= chunk_bytes(std::size(sums), {}, 0)) {
      ChunkRecord chunk{};
      chunk.key = key_at(next, chunks);
      chunk.image.version = {{1, 1}, next + 1};
      const uint64_t content = shared ? next / 2 : next;
      chunk.image.place = (super.data_offset + content * kChunkBytes) / kBlock;
      chunk.image.flags = shared ? kFlagSharedSlot : 0;
      chunk.image.place_class = 8;
      chunk.image.stored_length = chunk.image.logical_length = kChunkBytes;
      chunk.image.kind = static_cast<uint8_t>(UpdateKind::write);
      chunk.image.granules = std::size(sums);
      chunk.accessed = static_cast<uint32_t>(next + 1);
      for (uint32_t& sum : sums) sum = static_cast<uint32_t>(mix64(content + (&sum - sums) * chunks));
      encode_chunk(writer, 0, chunk, sums, {}, {});
      header.record_count++;
      next++;
    }
    header.flags = tables ? kSliceHasTables : next == chunks ? kSliceIsLast : 0;
    header.used_bytes = static_cast<uint32_t>(sizeof header + writer.size());
    header.span_blocks = static_cast<uint32_t>(round_up(header.used_bytes, kBlock) / kBlock);
    seal_block(slice.data(), header);
    const uint64_t span = header.span_blocks * kBlock;
    if (offset + span > super.snapshot_bytes) return Error::of(ENOSPC, "the chunks don't fit a snapshot");
    FFS_TRY_STATUS(put(fd, super.snapshot_offset[0] + offset, slice.data(), span));
    offset += span;
  }
  super.sequence++;
  super.snapshot_id++;
  if (shared) super.incompat |= kIncompatShared;
  super.snapshot_area = 0;
  super.snapshot_used = offset;
  super.snapshot_slices = slices;
  seal_superblock(&super);
  *snapshot_bytes = offset;
  std::memcpy(blocks[0], &super, sizeof super);
  return put(fd, kSuperblockOffset[super.sequence & 1], blocks[0], kBlock);
}

Result<std::unique_ptr<ChunkStore>> open_image(io::Io& io, const std::string& path) {
  OpenOptions options;
  options.cluster = cluster_id();
  return ChunkStore::open(io, path, options);
}

Status snapshot(io::Io& io, ChunkStore& store, uint64_t* longest_pass_cpu_us) {
  const uint64_t before = store.metrics().snapshots;
  store.start_snapshot();
  while (store.metrics().snapshots == before) {
    if (store.metrics().poisoned) return Error::of(EIO, "writing a snapshot");
    store.tick(clock_us(CLOCK_MONOTONIC));
    const uint64_t start = clock_us(CLOCK_THREAD_CPUTIME_ID);
    io.run_once(1000);
    *longest_pass_cpu_us = std::max(*longest_pass_cpu_us, clock_us(CLOCK_THREAD_CPUTIME_ID) - start);
  }
  return ok_status();
}

// Until every chunk is known by its checksums.
Status fill_table(io::Io& io, ChunkStore& store) {
  store.dedup_spaces(kTarget, {&kSpace, 1});
  while (store.dedup_has_work()) {
    store.dedup(1u << 20);
    store.tick(clock_us(CLOCK_MONOTONIC));
    io.run_once(1000);
  }
  return store.metrics().poisoned ? Error::of(EIO, "comparing chunks") : ok_status();
}

Status measure(io::Io& io, const std::string& path, ScaleContents contents, ScaleReport* report) {
  FormatOptions format;
  format.cluster = cluster_id();
  format.targets = {kTarget};
  format.size_bytes = round_up(report->chunks * kChunkBytes / 8 * 9 + (512ull << 20), kSlabBytes);
  format.sparse = true;
  report->device_bytes = format.size_bytes;
  FFS_TRY_STATUS(ChunkStore::format(io, path, format));
  uint64_t empty_bytes = 0;
  {
    FFS_TRY(std::unique_ptr<ChunkStore> empty, open_image(io, path));
    empty_bytes = resident_bytes();
    FFS_TRY_STATUS(empty->close());
  }
  const bool shared = contents == ScaleContents::shared_by_two;
  FFS_TRY_STATUS(write_chunks(path, report->chunks, shared, &report->snapshot_bytes));
  const uint64_t start = clock_us(CLOCK_MONOTONIC), start_cpu = clock_us(CLOCK_PROCESS_CPUTIME_ID);
  FFS_TRY(std::unique_ptr<ChunkStore> store, open_image(io, path));
  report->open_us = clock_us(CLOCK_MONOTONIC) - start;
  report->open_cpu_us = clock_us(CLOCK_PROCESS_CPUTIME_ID) - start_cpu;
  if (contents != ScaleContents::plain) FFS_TRY_STATUS(fill_table(io, *store));
  const uint64_t resident = resident_bytes();
  report->resident_bytes = resident > empty_bytes ? resident - empty_bytes : 0;
  report->memory_bytes = store->metrics().memory_bytes;
  if (store->usage(kTarget).chunks != report->chunks) return Error::of(EBADMSG, "chunks are missing");
  for (uint64_t i = 0; i < report->chunks; i += report->chunks / 1000 + 1) {
    ChunkInfo info;
    if (!store->lookup(kTarget, key_at(i, report->chunks), &info) || info.version.update != i + 1)
      return Error::of(EBADMSG, "a chunk isn't found");
  }
  const uint64_t before_snapshot = clock_us(CLOCK_MONOTONIC);
  FFS_TRY_STATUS(snapshot(io, *store, &report->longest_pass_cpu_us));
  const uint64_t before_close = clock_us(CLOCK_MONOTONIC);
  report->snapshot_us = before_close - before_snapshot;
  report->longest_step_us = store->metrics().longest_step_us;
  FFS_TRY_STATUS(store->close());
  store.reset();
  report->close_us = clock_us(CLOCK_MONOTONIC) - before_close;
  return ok_status();
}

}  // namespace

std::string ScaleReport::json() const {
  char line[768];
  auto n = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  auto each = [&](uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(chunks); };
  std::snprintf(line, sizeof line,
                "{\"chunks\": %llu, \"device_bytes\": %llu, \"snapshot_bytes\": %llu, \"open_s\": %.3f, "
                "\"open_cpu_s\": %.3f, \"memory_bytes\": %llu, \"memory_bytes_per_chunk\": %.1f, "
                "\"resident_bytes\": %llu, \"resident_bytes_per_chunk\": %.1f, \"snapshot_s\": %.3f, "
                "\"close_s\": %.3f, \"longest_step_us\": %llu, \"longest_pass_cpu_us\": %llu}",
                n(chunks), n(device_bytes), n(snapshot_bytes), static_cast<double>(open_us) / 1e6,
                static_cast<double>(open_cpu_us) / 1e6, n(memory_bytes), each(memory_bytes),
                n(resident_bytes), each(resident_bytes), static_cast<double>(snapshot_us) / 1e6,
                static_cast<double>(close_us) / 1e6, n(longest_step_us), n(longest_pass_cpu_us));
  return line;
}

Result<ScaleReport> measure_scale(io::Io& io, const std::string& path, uint64_t chunks,
                                  ScaleContents contents) {
  if (chunks == 0) return Error::of(EINVAL, "a scale of no chunks");
  if (access(path.c_str(), F_OK) == 0) return Error::of(EEXIST, "the file of a measurement exists");
  ScaleReport report;
  report.chunks = chunks;
  Status status = measure(io, path, contents, &report);
  unlink(path.c_str());
  FFS_TRY_STATUS(status);
  return report;
}

}  // namespace ffs::engine
