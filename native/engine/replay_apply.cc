// Overlays into their slots at recovery. Running stores put overlays into their slots now and then, and
// nothing records it: replay meets all of them since the snapshot. Of the oldest version in each slot of a
// chunk they go there now, with many writes in flight. (No other chunk has the slot: the flush that would
// have given it away would have moved the mark.)
#include <bitset>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "engine/recovery.h"

namespace ffs::engine {

ApplyBatch::~ApplyBatch() {
  for (Write& write : writes_) io::wait_for(s_.io, write.op);
}

// Fetches what replay left on the device.
Status ApplyBatch::fetch(uint32_t chunk) {
  State& state = *s_.state;
  auto fetch_chain = [&](uint32_t head) -> Status {
    for (uint32_t at = head; at != 0; at = state.index.overlays[at].next) {
      Overlay& o = state.index.overlays[at];
      if (o.bytes != nullptr) continue;
      const uint64_t size = o.blocks * kBlock, lead = o.at % kBlock;
      std::unique_ptr<uint8_t, void (*)(void*)> read(
          static_cast<uint8_t*>(std::aligned_alloc(kBlock, size + kBlock)), std::free);
      auto bytes = static_cast<uint8_t*>(std::aligned_alloc(kBlock, size));
      FFS_CHECK(read != nullptr && bytes != nullptr);
      Status got =
          s_.read_now(o.at - lead, read.get(), static_cast<uint32_t>(size + (lead != 0 ? kBlock : 0)));
      if (!got.ok()) std::free(bytes);
      FFS_TRY_STATUS(got);
      std::memcpy(bytes, read.get() + lead, size);
      o.bytes = bytes;
      s_.heap_overlay_bytes += size;
    }
    return ok_status();
  };
  FFS_TRY_STATUS(fetch_chain(state.index[chunk].image.overlay));
  if (const Live* live = state.index.live_if(chunk)) {
    for (const Pending& pending : live->pendings) FFS_TRY_STATUS(fetch_chain(pending.image.overlay));
  }
  return ok_status();
}

Status ApplyBatch::add(uint32_t chunk) {
  FFS_TRY_STATUS(fetch(chunk));
  std::vector<uint64_t> places;
  auto look = [&](const Image& image) {
    if (image.place == 0 || std::find(places.begin(), places.end(), image.place) != places.end()) return;
    places.push_back(image.place);
    if (image.overlay != 0) write(chunk, image.place, image.overlay);
  };
  look(s_.state->index[chunk].image);
  if (const Live* live = s_.state->index.live_if(chunk)) {
    for (const Pending& pending : live->pendings) look(pending.image);
  }
  return writes_.size() >= kMostWrites ? finish() : ok_status();
}

// Newest first, each block once: then it doesn't matter which write ends first.
void ApplyBatch::write(uint32_t chunk, uint64_t place, uint32_t head) {
  heads_.push_back({chunk, head});
  std::bitset<kMaxChunkBytes / kBlock> written;
  const Index& index = s_.state->index;
  for (uint32_t at = head; at != 0; at = index.overlays[at].next) {
    const Overlay& o = index.overlays[at];
    for (uint32_t from = 0; from < o.blocks;) {
      uint32_t to = from;
      while (to < o.blocks && !written[o.first_block + to]) written.set(o.first_block + to++);
      if (to > from) {
        Write& w = writes_.emplace_back();
        w.op.owner = &w.done;
        w.op.done = io::mark_done;
        s_.io.write(&w.op, s_.file, (place + o.first_block + from) * kBlock, o.bytes + from * kBlock,
                    static_cast<uint32_t>((to - from) * kBlock));
      }
      from = std::max(to, from + 1);
    }
  }
}

Status ApplyBatch::finish() {
  int error = 0;
  for (Write& w : writes_) {
    const int32_t rc = io::wait_for(s_.io, w.op);
    if (rc < 0) error = -rc;
  }
  writes_.clear();
  if (error != 0) return open_error(error, "writing the device", "small updates into their chunks");
  for (const auto& [chunk, head] : heads_) s_.state->trim_overlays(chunk, head);
  s_.applied_now |= !heads_.empty();
  heads_.clear();
  return ok_status();
}

Status ChunkStore::Impl::apply_now(uint32_t chunk) {
  ApplyBatch batch(*this);
  FFS_TRY_STATUS(batch.add(chunk));
  return batch.finish();
}

// One flush for all, before anything cuts the journal.
Status ChunkStore::Impl::apply_all_now() {
  ApplyBatch batch(*this);
  Status status = ok_status();
  state->index.each([&](uint32_t chunk) {
    if (status.ok()) status = batch.add(chunk);
  });
  FFS_TRY_STATUS(status);
  FFS_TRY_STATUS(batch.finish());
  return applied_now ? sync_now() : ok_status();
}

}  // namespace ffs::engine
