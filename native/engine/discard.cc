// Discards: slabs that became free are given back to the device, adjacent ones together, a few at a time, on
// the helper thread. A slab is free only when the record that freed its last slot is durable and its own
// I/O has ended, so nothing that a crash may bring back is discarded (docs/disk_format.md, Space).
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "engine/store_impl.h"

namespace ffs::engine {

namespace {
constexpr uint32_t kMaxDiscards = 2;       // in flight
constexpr uint64_t kMaxDiscardSlabs = 64;  // in one: 1 GiB
}  // namespace

void ChunkStore::Impl::begin_discards() {
  discarding =
      options.discard == Discard::on || (options.discard == Discard::automatic && device.discard_bytes > 0);
  allocator->track_discards(discarding);
}

// From the pump. Freed slabs wait a little for their neighbours; what is handed out meanwhile needs none.
void ChunkStore::Impl::step_discards(bool at_once) {
  if (!discarding || poisoned || allocator->due_slabs() == 0) {
    discard_due_us = 0;
    return;
  }
  if (discard_due_us == 0) discard_due_us = now_us + options.discard_delay_us;
  if (!at_once && now_us < discard_due_us && allocator->due_slabs() < kMaxDiscardSlabs) return;
  const uint64_t most = device.discard_bytes > 0 ? device.discard_bytes / kSlabBytes : kMaxDiscardSlabs;
  const auto limit = static_cast<uint32_t>(std::clamp<uint64_t>(most, 1, kMaxDiscardSlabs));
  uint32_t first, count;
  while (discards_in_flight < kMaxDiscards && allocator->begin_discard(limit, &first, &count)) {
    auto job = new DiscardJob;
    job->impl = this;
    job->first = first;
    job->count = count;
    job->op.owner = job;
    job->op.done = [](io::Op* op) {
      auto done = static_cast<DiscardJob*>(op->owner);
      done->impl->discard_done(done, op->result);
    };
    discards_in_flight++;
    io.discard(&job->op, file, allocator->offset_of(first), count * kSlabBytes);
  }
}

void ChunkStore::Impl::discard_done(DiscardJob* job, int32_t result) {
  discards_in_flight--;
  allocator->end_discard(job->first, job->count);  // free all the same
  if (result < 0) {
    counters.discard_failures++;
    discard_error = -result;
    if (counters.discard_failures == 1) {
      std::fprintf(stderr, "ffs: engine: discarding %u slabs failed (%s)\n", job->count,
                   std::strerror(-result));
    }
    if (result == -EOPNOTSUPP || result == -ENOTTY) {
      discarding = false;
      allocator->track_discards(false);
    }
  } else {
    counters.discards++;
    counters.discarded_bytes += job->count * kSlabBytes;
  }
  delete job;
  note_room();
  schedule_pump();
}

// The canary mutant: the range of a slot whose old owner a crash may bring back.
void ChunkStore::Impl::discard_slot(uint64_t place, uint8_t place_class) {
  auto op = new io::Op;
  op->done = [](io::Op* done) { delete done; };
  io.discard(op, file, place * kBlock, slot_bytes(place_class));
}

Status ChunkStore::discard_free(uint64_t* discarded_bytes) {
  return impl_->discard_free(discarded_bytes);
}

Status ChunkStore::Impl::discard_free(uint64_t* discarded_bytes) {
  const uint64_t before = counters.discarded_bytes;
  discarding = true;
  discard_error = 0;
  allocator->track_discards(true);
  allocator->all_free_due();
  while (discard_error == 0 && (allocator->due_slabs() > 0 || discards_in_flight > 0)) {
    step_discards(true);
    io.run_once(1000);
  }
  while (discards_in_flight > 0) io.run_once(1000);
  begin_discards();  // as it was
  if (discarded_bytes != nullptr) *discarded_bytes = counters.discarded_bytes - before;
  if (discard_error == 0) return ok_status();
  return open_error(discard_error, "discarding free space", "after %llu bytes",
                    static_cast<unsigned long long>(counters.discarded_bytes - before));
}

}  // namespace ffs::engine
