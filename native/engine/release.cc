// Targets emptied: of what is pending (before a replica is filled anew), or of everything. And what
// recovery walks over: chunks with digests, retry entries, space epochs.
#include <algorithm>
#include <utility>

#include "engine/store_impl.h"

namespace ffs::engine {

bool ChunkStore::Impl::updates_on_the_way(uint16_t target, uint64_t before_ticket) const {
  bool found = false;
  busy.for_each([&](const BusyKey& key, const OpList& queue) {
    if (key.target != target) return;
    for (const StoreOp* op = queue.head; op != nullptr; op = op->next) {
      const auto& p = static_cast<const StageOp*>(op)->p;
      found |= p.mode != kMoveMode && p.ticket < before_ticket;  // moves leave no trace
    }
  });
  return found;
}

// Retry tables that a record emptied are out of sight at once. Giving back the memory of a large one may take
// milliseconds: the helper thread does it.
void ChunkStore::Impl::free_dropped_tables() {
  constexpr size_t kSmallTable = 4096;
  struct Burial {
    io::Offload work;
    Impl* impl;
    RetryTable table;
  };
  for (RetryTable& table : std::exchange(state->dropped_retry, {})) {
    if (table.size() < kSmallTable) continue;
    auto burial = new Burial{{}, this, std::move(table)};
    burial->work.work = [](io::Offload* work) {
      RetryTable freed = std::move(reinterpret_cast<Burial*>(work)->table);
      return int32_t{0};
    };
    burial->work.op.done = [](io::Op* op) {
      auto self = reinterpret_cast<Burial*>(op);
      self->impl->burials--;
      delete self;
    };
    burials++;
    io.offload(&burial->work);
  }
}

// ------------------------------------------------------------------------------ reset

void ChunkStore::reset_target(TargetId target, StoreOp* op) {
  if (op != nullptr) op->store_kind = kPlainOp;
  int index = impl_->target_index(target);
  if (index < 0) return impl_->fail_target(op, target);
  impl_->reset_target(static_cast<uint16_t>(index), op);
}

void ChunkStore::Impl::reset_target(uint16_t target, StoreOp* op) {
  if (poisoned) return when_durable(op);
  append_simple(RecordType::reset_target, target, TargetRecord{});
  state->index.each_live([&](uint32_t chunk) {
    if (state->index[chunk].target == target) state->drop_pendings(chunk);
  });
  state->drop_retry(target);
  free_dropped_tables();
  busy.for_each([&](const BusyKey& key, const OpList& queue) {
    if (key.target != target) return;
    for (StoreOp* other = queue.head; other != nullptr; other = other->next) {
      auto stage_op = static_cast<StageOp*>(other);
      if (stage_op->p.mode == kUpdateMode && !stage_op->commit_now) stage_op->p.dropped = true;
    }
  });
  if (op != nullptr && updates_on_the_way(target, next_ticket)) {
    reset_waits.push_back({op, target, next_ticket});
    want_flush();
  } else {
    when_durable(op);
  }
}

void ChunkStore::Impl::end_resets() {
  auto waits = [&](const ResetWait& wait) {
    if (updates_on_the_way(wait.target, wait.ticket)) return true;
    when_durable(wait.op);
    return false;
  };
  reset_waits.erase(std::stable_partition(reset_waits.begin(), reset_waits.end(), waits), reset_waits.end());
}

// ------------------------------------------------------------------------------ release

void ChunkStore::release_target(TargetId target, StoreOp* op) {
  if (op != nullptr) op->store_kind = kPlainOp;
  int index = impl_->slot_of_target(target);
  if (index < 0) return impl_->fail_target(op, target);
  impl_->release_target(static_cast<uint16_t>(index), op);
}

void ChunkStore::Impl::release_target(uint16_t target, StoreOp* op) {
  if (poisoned) return when_durable(op);
  if (!releasing[target]) {
    append_simple(RecordType::release_target, target, TargetRecord{});
    releasing[target] = true;
    state->drop_tables(target);
    free_dropped_tables();
    busy.for_each([&](const BusyKey& key, const OpList& queue) {
      if (key.target != target) return;
      for (StoreOp* other = queue.head; other != nullptr; other = other->next)
        static_cast<StageOp*>(other)->p.dropped = true;
    });
    releases.push_back({target, false, ChunkKey{}, {}});
  }
  auto job = std::find_if(releases.begin(), releases.end(),
                          [&](const ReleaseJob& other) { return other.target == target; });
  FFS_CHECK(job != releases.end());
  if (op != nullptr) job->waiters.push_back(op);
  want_flush();
}

// A part of the chunks of the first target. The record says that they are all gone: nothing is
// journaled, snapshots leave them out, replay drops them at once.
void ChunkStore::Impl::step_release() {
  if (releases.empty()) return;
  ReleaseJob& job = releases.front();
  for (uint32_t i = 0; i < options.release_step_chunks; i++) {
    uint32_t chunk = state->index.lower_bound(job.target, job.cursor, job.started);
    if (chunk == 0 || state->index[chunk].target != job.target) {
      if (updates_on_the_way(job.target, next_ticket)) return;  // the last of them wakes us
      releasing[job.target] = false;
      std::vector<StoreOp*> waiters = std::move(job.waiters);
      releases.erase(releases.begin());
      for (StoreOp* op : waiters) when_durable(op);
      want_flush();  // what waits for the slots
      return;
    }
    job.started = true;
    job.cursor = state->index[chunk].key;
    state->forget_chunk(chunk);
  }
  schedule_pump();
}

// ------------------------------------------------------------------------------ walking

uint64_t chunk_digest(const ChunkInfo& info) {
  // docs/disk_format.md, Digest of a chunk.
  uint64_t digest = 0x316769642d736666;  // "ffs-dig1"
  auto word = [&](uint64_t value) { digest = mix64((digest ^ value) + 0x9e3779b97f4a7c15); };
  auto pair = [&](uint32_t low, uint32_t high) { word(low | uint64_t{high} << 32); };
  uint64_t key[3];
  std::memcpy(key, info.key.bytes.data(), sizeof key);
  for (uint64_t part : key) word(part);
  pair(info.version.chain.term, info.version.chain.counter);
  word(info.version.update);
  const Attributes& a = info.attributes;
  pair(info.length, a.codec != 0 ? info.stored_length : 0);
  word(a.expiry_ms);
  const uint32_t flags = a.flags & ~uint32_t{kFlagSharedSlot};  // says something about the place
  pair(flags | uint32_t{a.role} << 8 | uint32_t{a.codec} << 16 | uint32_t{a.tag_bytes} << 24,
       static_cast<uint32_t>(info.checksums.size()));
  std::array<uint8_t, kMaxTagBytes> tag{};
  std::memcpy(tag.data(), a.tag.data(), std::min<size_t>(a.tag_bytes, kMaxTagBytes));
  uint64_t halves[2];
  std::memcpy(halves, tag.data(), sizeof halves);
  for (uint64_t half : halves) word(half);
  for (size_t i = 0; i < info.checksums.size(); i += 2)
    pair(info.checksums[i], i + 1 < info.checksums.size() ? info.checksums[i + 1] : 0);
  return digest;
}

bool ChunkStore::digest_at_or_after(TargetId target, const ChunkKey& key, ChunkInfo* info,
                                    uint64_t* digest) const {
  if (!first_at_or_after(target, key, info)) return false;
  *digest = chunk_digest(*info);
  return true;
}

void ChunkStore::each_retry(TargetId target, RetryVisitor& visitor) const {
  int index = impl_->target_index(target);
  if (index < 0) return;
  impl_->state->retry[static_cast<size_t>(index)].for_each([&](const RetryKey& key, const RetryEntry& entry) {
    visitor.visit(key.client, key.chain, key.channel, entry);
  });
}

void ChunkStore::each_space_epoch(TargetId target, SpaceEpochVisitor& visitor) const {
  int index = impl_->target_index(target);
  impl_->state->spaces.for_each([&](const SpaceKey& key, const SpaceEpoch& epoch) {
    if (key.target == index) visitor.visit(key.space, epoch);
  });
}

}  // namespace ffs::engine
