// Opening and closing a store.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "engine/store_impl.h"

namespace ffs::engine {

ChunkStore::Impl::Impl(io::Io& the_io, io::File the_file, const OpenOptions& the_options,
                       const Mutants& the_mutants)
    : io(the_io),
      file(the_file),
      options(the_options),
      mutants(the_mutants),
      granule_sums(the_options.granule_sums) {
  super_buffer = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kBlock));
  FFS_CHECK(super_buffer != nullptr);
  pump_op.owner = this;
  pump_op.done = [](io::Op* op) { static_cast<Impl*>(op->owner)->pump(); };
}

ChunkStore::Impl::~Impl() {
  // Nobody waits any more, but what the kernel or the queue of the Io holds must come back first.
  closing = true;
  while (pump_scheduled || ops_deferred > 0 || snap.active || compaction.in_flight > 0 ||
         dedup.in_flight() > 0 || discards_in_flight > 0 || burials > 0 ||
         applying > apply_waiting_sync.size() || (journal != nullptr && journal->busy())) {
    io.run_once(1000);
  }
  // Overlays that are still named belong to the pools or the heap.
  if (state != nullptr) {
    state->listener = this;
    replaying = true;  // slots needn't be freed any more
    for (uint32_t chunk : apply_queue) state->unref_overlay(state->index.live(chunk).apply_head);
    for (ApplyJob* job : apply_waiting_sync) state->unref_overlay(job->head);
    state->drop_overlays();
  }
  free_move_memory();
  for (ApplyJob* job : apply_waiting_sync) delete job;
  for (ApplyJob* job : free_apply_jobs) delete job;
  journal.reset();
  overlay_pool.reset();
  scratch.reset();
  map.reset();
  if (device.fd >= 0) {
    io.remove_file(file);
    io::close_device(device);
  }
  std::free(super_buffer);
}

CacheMode choose_cache_mode(const io::Device& device, WriteCache asked) {
  if (asked == WriteCache::is_volatile) return {true, false, "as configured"};
  if (asked == WriteCache::is_protected) {
    // Writes into holes and fresh extents change the file system's own records, which only a sync keeps.
    if (device.sparse) return {true, true, "a sparse file needs syncs, whatever its disk does"};
    return {false, false, "as configured"};
  }
  if (!device.volatile_cache) return {false, false, "the kernel says that the device writes through"};
  return {true, false, device.block_device ? "the kernel says that the device has a write cache" : "a file"};
}

bool ChunkStore::Impl::flushes_device() const {
  return choose_cache_mode(device, options.write_cache).flushes;
}

Status ChunkStore::Impl::read_now(uint64_t offset, uint8_t* memory, uint32_t bytes) {
  bool done = false;
  io::Op op;
  op.owner = &done;
  op.done = io::mark_done;
  io.read(&op, file, offset, memory, bytes);
  int32_t rc = io::wait_for(io, op);
  if (rc == static_cast<int32_t>(bytes)) return ok_status();
  return open_error(rc < 0 ? -rc : EIO, "reading the device", "%u bytes at byte %llu", bytes,
                    static_cast<unsigned long long>(offset));
}

Status ChunkStore::Impl::write_now(uint64_t offset, const uint8_t* memory, uint32_t bytes) {
  bool done = false;
  io::Op op;
  op.owner = &done;
  op.done = io::mark_done;
  io.write(&op, file, offset, memory, bytes);
  int32_t rc = io::wait_for(io, op);
  if (rc >= 0) return ok_status();
  return open_error(-rc, "writing the device", "%u bytes at byte %llu", bytes,
                    static_cast<unsigned long long>(offset));
}

Status ChunkStore::Impl::sync_now() {
  bool done = false;
  io::Op op;
  op.owner = &done;
  op.done = io::mark_done;
  io.datasync(&op, file);
  int32_t rc = io::wait_for(io, op);
  if (rc >= 0) return ok_status();
  return open_error(-rc, "flushing the device", "error %d", -rc);
}

// A null device has nothing where its chunks lie, and a device with bytes must never be taken for one.
Status ChunkStore::Impl::begin_null() {
  const bool is_null = (super.incompat & kIncompatNull) != 0;
  if (is_null && !options.null_data) {
    return open_error(EINVAL, "a null device, for measuring: it holds no data",
                      "a server opens it with data=null and --allow-null-devices");
  }
  if (!is_null && options.null_data) {
    return open_error(EINVAL, "this device holds data: it can't be opened as a null device",
                      "a null device is one that was formatted as one");
  }
  return is_null ? io.make_null(file, super.data_offset) : ok_status();
}

Status ChunkStore::Impl::start(uint64_t device_bytes) {
  std::unique_ptr<uint8_t, void (*)(void*)> blocks(
      static_cast<uint8_t*>(std::aligned_alloc(kBlock, 2 * kBlock)), std::free);
  for (int i = 0; i < 2; i++)
    FFS_TRY_STATUS(read_now(kSuperblockOffset[i], blocks.get() + i * kBlock, kBlock));
  FFS_TRY(super, choose_superblock(blocks.get(), blocks.get() + kBlock, device_bytes));
  identity = identity_of(super);
  device_bytes_found = device_bytes;
  if (identity.cluster != options.cluster) {
    return open_error(EXDEV, "the device belongs to another cluster",
                      "its cluster id begins with %02x%02x%02x%02x", super.cluster[0], super.cluster[1],
                      super.cluster[2], super.cluster[3]);
  }
  FFS_TRY_STATUS(begin_null());
  io::BufferPool::Options memory;
  memory.arena_bytes = options.scratch_bytes;
  FFS_TRY(scratch, io::BufferPool::create(&io, memory));
  memory.arena_bytes = options.overlay_bytes;
  FFS_TRY(overlay_pool, io::BufferPool::create(&io, memory));
  releasing.resize(super.target_count);
  state = std::make_unique<State>(super.max_chunks, super.target_count, this);
  state->first_place = super.data_offset / kBlock;
  state->end_place = (super.data_offset + super.slab_count * kSlabBytes) / kBlock;
  allocator = std::make_unique<Allocator>(super.data_offset, super.slab_count);
  FFS_TRY_STATUS(recover());
  state->dropped_retry.clear();  // by replay
  begin_discards();
  return ok_status();
}

Status ChunkStore::Impl::close() {
  FFS_CHECK(stages_in_flight == 0 && reads_in_flight == 0 && lent_slots == 0 && berth_bytes == 0);
  // Lone records and applications come to their end, then one last snapshot tells it all.
  auto drain = [this] {
    while (!idle() || (!poisoned && (journal->anything_gathered() || !apply_queue.empty()))) {
      bool waited_for = journal->anything_gathered() || !apply_waiting_sync.empty();
      if (poisoned && !journal->busy() && apply_waiting_sync.size() == applying) break;
      if (!journal->busy() && waited_for) journal->kick(true);
      if (!apply_queue.empty()) schedule_pump();
      io.run_once(1000);
    }
  };
  compaction.stopped = true;
  dedup.stop();
  drain();
  while (discarding && !poisoned && (allocator->due_slabs() > 0 || discards_in_flight > 0)) {
    step_discards(true);
    io.run_once(1000);
  }
  if (!poisoned) start_snapshot();
  drain();
  for (ApplyJob* job : std::exchange(apply_waiting_sync, {})) end_apply(job);
  while (pump_scheduled) io.run_once(0);
  return poisoned ? Status(Error::of(EIO, "the store is poisoned by a failed journal write: restart it"))
                  : ok_status();
}

Result<std::unique_ptr<ChunkStore>> ChunkStore::open_file(io::Io& io, io::File file, uint64_t size_bytes,
                                                          const OpenOptions& options,
                                                          const Mutants& mutants) {
  auto impl = std::make_unique<Impl>(io, file, options, mutants);
  FFS_TRY_STATUS(impl->start(size_bytes));
  return std::unique_ptr<ChunkStore>(new ChunkStore(std::move(impl)));
}

Result<std::unique_ptr<ChunkStore>> ChunkStore::open(io::Io& io, const std::string& path,
                                                     const OpenOptions& options) {
  clear_open_message();
  auto opened = io::open_device(path);
  if (!opened.ok()) {
    const std::string user = opened.error().code == EBUSY ? io::in_use(path) : std::string();
    return open_at_path(path, open_error(opened.error().code, opened.error().what, "%s",
                                         user.empty() ? std::strerror(opened.error().code) : user.c_str()));
  }
  io::Device device = opened.value();
  auto file = io.add_file(device.fd);
  if (!file.ok()) {
    io::close_device(device);
    return file.error();
  }
  auto impl = std::make_unique<Impl>(io, file.value(), options, Mutants{});
  impl->device = device;
  Status started = impl->start(device.size_bytes);
  if (!started.ok()) return open_at_path(path, started.error());
  if (!options.null_data) impl->map = io::DeviceMap::of(device.fd, device.size_bytes);
  if (impl->map != nullptr)
    io.note_mapping(impl->file, impl->map->at(0, device.size_bytes), device.size_bytes);
  return std::unique_ptr<ChunkStore>(new ChunkStore(std::move(impl)));
}

CacheMode ChunkStore::cache_mode() const {
  return choose_cache_mode(impl_->device, impl_->options.write_cache);
}

uint64_t ChunkStore::unused_bytes() const {
  const uint64_t whole = impl_->device_bytes_found / kBlock * kBlock;
  return whole > impl_->super.size_bytes ? whole - impl_->super.size_bytes : 0;
}

}  // namespace ffs::engine
