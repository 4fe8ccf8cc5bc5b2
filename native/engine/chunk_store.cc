// Look-ups, small records, and what holds the parts together.
#include "engine/chunk_store.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine/store_impl.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ look-ups

int ChunkStore::Impl::slot_of_target(TargetId target) const {
  for (size_t i = 0; i < identity.targets.size(); i++) {
    if (identity.targets[i] == target) return static_cast<int>(i);
  }
  return -1;
}

int ChunkStore::Impl::target_index(TargetId target) const {
  int index = slot_of_target(target);
  return index >= 0 && releasing[static_cast<size_t>(index)] ? -1 : index;
}

void ChunkStore::Impl::fail_target(StoreOp* op, TargetId target) {
  if (op == nullptr) return;
  if (slot_of_target(target) >= 0) return fail_later(op, EBUSY, "the target is being released");
  fail_later(op, EINVAL, "no such target on this device");
}

void ChunkStore::Impl::fill_info(uint32_t chunk, ChunkInfo* info) const {
  const Chunk& c = state->index[chunk];
  const Live* live = state->index.live_if(chunk);
  uint32_t granules = c.image.granules();
  info->key = c.key;
  info->version = c.image.version;
  info->length = c.image.logical;
  info->stored_length = c.image.stored;
  info->attributes = c.image.attributes();
  info->checksums = {state->index.sums.at(c.image.sums, granules), granules};
  info->pending_count = live != nullptr ? static_cast<uint32_t>(live->pendings.size()) : 0;
}

void ChunkStore::Impl::fill_pending(const Pending& pending, PendingInfo* info) const {
  uint32_t granules = pending.image.granules();
  info->version = pending.image.version;
  info->base = pending.base;
  info->kind = pending.image.kind();
  info->write_offset = pending.write_offset;
  info->write_length = pending.write_length;
  info->length = pending.image.logical;
  info->stored_length = pending.image.stored;
  info->attributes = pending.image.attributes();
  info->identity = pending.identity;
  info->chain = pending.chain;
  info->space_epoch = pending.space_epoch;
  info->durable = pending.durable;
  info->arriving = pending.arriving;
  info->checksums = {state->index.sums.at(pending.image.sums, granules), granules};
}

ChunkStore::ChunkStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChunkStore::~ChunkStore() = default;

bool ChunkStore::lookup(TargetId target, const ChunkKey& key, ChunkInfo* info) const {
  int index = impl_->target_index(target);
  uint32_t chunk = index >= 0 ? impl_->state->index.find(static_cast<uint16_t>(index), key) : 0;
  if (chunk == 0) return false;
  impl_->fill_info(chunk, info);
  return !info->version.none() || info->pending_count > 0;
}

bool ChunkStore::pending_at(TargetId target, const ChunkKey& key, uint32_t number, PendingInfo* info) const {
  int index = impl_->target_index(target);
  uint32_t chunk = index >= 0 ? impl_->state->index.find(static_cast<uint16_t>(index), key) : 0;
  const Live* live = chunk != 0 ? impl_->state->index.live_if(chunk) : nullptr;
  if (live == nullptr || number >= live->pendings.size()) return false;
  impl_->fill_pending(live->pendings[number], info);
  return true;
}

bool ChunkStore::find_pending(TargetId target, const ChunkKey& key, const Version& version,
                              PendingInfo* info) const {
  int index = impl_->target_index(target);
  uint32_t chunk = index >= 0 ? impl_->state->index.find(static_cast<uint16_t>(index), key) : 0;
  const Pending* pending = chunk != 0 ? impl_->state->find_pending(chunk, version) : nullptr;
  if (pending == nullptr) return false;
  impl_->fill_pending(*pending, info);
  return true;
}

// ------------------------------------------------------------------------------ records without data

void ChunkStore::stage(StageOp* op) {
  impl_->stage(op);
}
void ChunkStore::read(ReadOp* op) {
  impl_->read(op);
}

Status ChunkStore::commit(TargetId target, const ChunkKey& key, const Version& version, StoreOp* op) {
  Impl& s = *impl_;
  int index = s.target_index(target);
  uint32_t chunk = index >= 0 ? s.state->index.find(static_cast<uint16_t>(index), key) : 0;
  Image* image = chunk != 0 ? s.state->find_image(chunk, version) : nullptr;
  if (image == nullptr) return Error::of(ENOENT, "a commit of a version that isn't pending");
  if (s.poisoned) return Error::of(EIO, "the store is poisoned by a failed journal write: restart it");
  const Pending* pending = s.state->find_pending(chunk, version);
  if (pending != nullptr && pending->arriving)
    return Error::of(EBUSY, "a commit of a version whose data is still being written");
  if (op != nullptr) op->store_kind = kPlainOp;
  if (image == &s.state->index[chunk].image) {
    if (op != nullptr) s.when_durable(op);
    return ok_status();
  }
  auto target_number = static_cast<uint16_t>(index);
  s.append_simple(RecordType::commit, target_number, CommitRecord{key, version});
  FFS_CHECK(s.state->commit(target_number, key, version) == nullptr);
  s.counters.committed++;
  chunk = s.state->index.find(target_number, key);
  if (chunk != 0) s.queue_apply(chunk);
  if (op != nullptr) s.when_durable(op);
  return ok_status();
}

void ChunkStore::refuse(TargetId target, const ChunkKey& key, const Version& version,
                        const UpdateIdentity& identity, ChainId chain, uint32_t code, StoreOp* op) {
  Impl& s = *impl_;
  int index = s.target_index(target);
  op->store_kind = kPlainOp;
  if (index < 0) return s.fail_target(op, target);
  if (code == 0) return s.fail_later(op, EINVAL, "a refusal without a code");
  if (s.poisoned) return s.fail_later(op, EIO, "the store is poisoned by a failed journal write: restart it");
  if (!s.table_room(op)) return;
  if (OpList* queue = s.busy.find({static_cast<uint16_t>(index), key})) {
    for (StoreOp* other = queue->head; other != nullptr; other = other->next) {
      auto stage_op = static_cast<StageOp*>(other);
      if (stage_op->p.mode == kUpdateMode && stage_op->version == version) stage_op->p.refused = true;
    }
  }
  RefuseRecord record{key,  version, identity.client.value, identity.sequence, identity.channel, chain.value,
                      code, 0};
  s.append_simple(RecordType::refuse, static_cast<uint16_t>(index), record);
  FFS_CHECK(s.state->refuse(static_cast<uint16_t>(index), record) == nullptr);
  s.counters.refused++;
  s.when_durable(op);
}

// Records without data may fill more than updates may: the tables waste nothing in their slices.
bool ChunkStore::Impl::table_room(StoreOp* op) {
  if (state->snapshot_bytes() < super.snapshot_bytes / 8 * 5) return true;
  if (op != nullptr) fail_later(op, ENOSPC, "no room for more records in a snapshot");
  return false;
}

bool ChunkStore::retry_lookup(TargetId target, ClientId client, ChainId chain, uint32_t channel,
                              RetryEntry* entry) const {
  int index = impl_->target_index(target);
  if (index < 0) return false;
  const RetryEntry* found = impl_->state->retry[static_cast<size_t>(index)].find(
      {static_cast<uint16_t>(index), client, chain, channel});
  if (found == nullptr) return false;
  *entry = *found;
  return true;
}

void ChunkStore::retry_set(TargetId target, ClientId client, ChainId chain, uint32_t channel,
                           const RetryEntry& entry, StoreOp* op) {
  Impl& s = *impl_;
  int index = s.target_index(target);
  if (op != nullptr) op->store_kind = kPlainOp;
  if (index < 0) return s.fail_target(op, target);
  if (client.value == 0) {
    if (op != nullptr) s.fail_later(op, EINVAL, "a retry entry of no client");
    return;
  }
  if (!s.table_room(op)) return;
  RetryRecord record{entry.key, entry.version, client.value, entry.sequence,
                     channel,   chain.value,   entry.error,  static_cast<uint8_t>(entry.state),
                     {}};
  s.append_simple(RecordType::retry, static_cast<uint16_t>(index), record);
  s.state->set_retry({static_cast<uint16_t>(index), client, chain, channel}, entry);
  s.when_durable(op);
}

void ChunkStore::fence(ClientId client, StoreOp* op) {
  if (op != nullptr) op->store_kind = kPlainOp;
  if (!impl_->table_room(op)) return;
  impl_->append_simple(RecordType::fence, kDeviceRecord, FenceRecord{client.value});
  impl_->state->fence(client);
  impl_->when_durable(op);
}

bool ChunkStore::Impl::fenced_client(ClientId client) const {
  return client.value != 0 && state->fenced.find(client.value) != nullptr;
}

bool ChunkStore::fenced(ClientId client) const {
  return impl_->fenced_client(client);
}

void ChunkStore::set_space_epoch(TargetId target, uint64_t space, const SpaceEpoch& epoch, StoreOp* op) {
  Impl& s = *impl_;
  int index = s.target_index(target);
  if (op != nullptr) op->store_kind = kPlainOp;
  if (index < 0) return s.fail_target(op, target);
  if (!s.table_room(op)) return;
  SpaceEpochRecord record{space, epoch.least_epoch, epoch.expiry_ms};
  s.append_simple(RecordType::space_epoch, static_cast<uint16_t>(index), record);
  s.state->set_space(static_cast<uint16_t>(index), space, epoch);
  s.when_durable(op);
}

SpaceEpoch ChunkStore::space_epoch(TargetId target, uint64_t space) const {
  int index = impl_->target_index(target);
  if (index < 0) return {};
  const SpaceEpoch* found = impl_->state->spaces.find({static_cast<uint16_t>(index), space});
  return found != nullptr ? *found : SpaceEpoch{};
}

void ChunkStore::expire_space_epochs(TargetId target, uint64_t manager_ms, StoreOp* op) {
  Impl& s = *impl_;
  int index = s.target_index(target);
  if (op != nullptr) op->store_kind = kPlainOp;
  if (index < 0) return s.fail_target(op, target);
  s.append_simple(RecordType::expire_spaces, static_cast<uint16_t>(index), ExpireSpacesRecord{manager_ms});
  s.state->expire_spaces(static_cast<uint16_t>(index), manager_ms);
  s.when_durable(op);
}

void ChunkStore::set_chain_state(TargetId target, std::span<const uint8_t> bytes, StoreOp* op) {
  Impl& s = *impl_;
  int index = s.target_index(target);
  if (op != nullptr) op->store_kind = kPlainOp;
  if (index < 0) return s.fail_target(op, target);
  if (bytes.size() > kMaxChainStateBytes) {
    if (op != nullptr) s.fail_later(op, EINVAL, "a chain state of more than 4096 bytes");
    return;
  }
  if (!s.table_room(op)) return;
  Writer writer = s.journal->append(chain_state_bytes(bytes.size()));
  encode_chain_state(writer, static_cast<uint16_t>(index), bytes);
  s.state->set_chain_state(static_cast<uint16_t>(index), bytes);
  s.when_durable(op);
}

std::span<const uint8_t> ChunkStore::chain_state(TargetId target) const {
  int index = impl_->target_index(target);
  if (index < 0) return {};
  return impl_->state->chain_states[static_cast<size_t>(index)];
}

void ChunkStore::flush(StoreOp* op) {
  op->store_kind = kPlainOp;
  impl_->when_durable(op);
}

// ------------------------------------------------------------------------------ order

bool ChunkStore::first_at_or_after(TargetId target, const ChunkKey& key, ChunkInfo* info) const {
  int index = impl_->target_index(target);
  if (index < 0) return false;
  auto number = static_cast<uint16_t>(index);
  ChunkKey from = key;
  for (bool strictly = false;; strictly = true) {
    uint32_t chunk = impl_->state->index.lower_bound(number, from, strictly);
    if (chunk == 0 || impl_->state->index[chunk].target != number) return false;
    impl_->fill_info(chunk, info);
    if (!info->version.none()) return true;
    from = info->key;
  }
}

namespace {

// The key just below; false if there is none.
bool decrement(ChunkKey* key) {
  for (size_t i = key->bytes.size(); i-- > 0;) {
    if (key->bytes[i]-- != 0) return true;
  }
  return false;
}

}  // namespace

bool ChunkStore::Impl::last_at_or_before(TargetId target, ChunkKey from, ChunkInfo* info) const {
  int number = target_index(target);
  if (number < 0) return false;
  for (;;) {
    uint32_t chunk = state->index.floor(static_cast<uint16_t>(number), from);
    if (chunk == 0 || state->index[chunk].target != number) return false;
    fill_info(chunk, info);
    if (!info->version.none()) return true;
    from = info->key;
    if (!decrement(&from)) return false;
  }
}

bool ChunkStore::last_before(TargetId target, const ChunkKey& key, ChunkInfo* info) const {
  ChunkKey from = key;
  return decrement(&from) && impl_->last_at_or_before(target, from, info);
}

bool ChunkStore::last_of_space(TargetId target, uint64_t space, ChunkInfo* info) const {
  std::array<uint8_t, 16> high;
  high.fill(0xff);
  return impl_->last_at_or_before(target, ChunkKey::of(space, high), info) && info->key.space() == space;
}

bool ChunkStore::first_pending_at_or_after(TargetId target, const ChunkKey& key, ChunkKey* found) const {
  int index = impl_->target_index(target);
  if (index < 0) return false;
  auto number = static_cast<uint16_t>(index);
  ChunkKey from = key;
  for (bool strictly = false;; strictly = true) {
    uint32_t chunk = impl_->state->index.lower_bound(number, from, strictly);
    if (chunk == 0 || impl_->state->index[chunk].target != number) return false;
    const Live* live = impl_->state->index.live_if(chunk);
    from = impl_->state->index[chunk].key;
    if (live != nullptr && !live->pendings.empty()) {
      *found = from;
      return true;
    }
  }
}

SpaceStats ChunkStore::range_stats(TargetId target, const ChunkKey& from, const ChunkKey& to,
                                   uint32_t limit) const {
  SpaceStats stats;
  int index = impl_->target_index(target);
  ChunkKey at = from;
  stats.complete = true;
  if (index < 0) return stats;
  for (bool strictly = false;; strictly = true) {
    uint32_t chunk = impl_->state->index.lower_bound(static_cast<uint16_t>(index), at, strictly);
    if (chunk == 0) return stats;
    const Chunk& c = impl_->state->index[chunk];
    if (c.target != index || c.key > to) return stats;
    at = c.key;
    if (limit-- == 0) {
      stats.complete = false;
      stats.next = at;
      return stats;
    }
    if (c.image.version.none()) continue;
    stats.chunks++;
    stats.bytes += c.image.logical;
  }
}

// ------------------------------------------------------------------------------ the rest

void ChunkStore::tick(uint64_t now_us, uint64_t manager_ms) {
  set_manager_time(manager_ms);
  impl_->tick(now_us);
}

void ChunkStore::set_manager_time(uint64_t manager_ms) {
  if (manager_ms != 0) impl_->state->now_stamp = stamp_of(manager_ms);
}

bool ChunkStore::idle() const {
  return impl_->idle();
}

const DeviceIdentity& ChunkStore::identity() const {
  return impl_->identity;
}
bool ChunkStore::has_target(TargetId target) const {
  return impl_->slot_of_target(target) >= 0;
}

Capacity ChunkStore::capacity() const {
  return impl_->capacity();
}

TargetUsage ChunkStore::usage(TargetId target) const {
  int index = impl_->slot_of_target(target);
  return index >= 0 ? impl_->state->usage[static_cast<size_t>(index)] : TargetUsage{};
}

StoreMetrics ChunkStore::metrics() const {
  const Impl& s = *impl_;
  StoreMetrics m = s.counters;
  m.flushes = s.journal->flushes;
  m.journal_blocks = s.journal->blocks_written;
  m.groups_ahead = s.journal->groups_ahead;
  m.journal_bytes = s.journal->bytes_written;
  m.journal_used_bytes = s.journal->used_bytes();
  m.journal_size_bytes = s.journal->region_bytes();
  m.snapshot_age_us = s.now_us - s.last_snapshot_us;
  m.waiting_for_room = s.space_waiters.size();
  m.waiting = s.stage_waiters.size() + s.space_waiters.size() + s.apply_waiters.size() + s.read_waiters.count;
  m.free_slabs = s.allocator->free_slabs();
  m.discards_due_bytes = s.allocator->due_slabs() * kSlabBytes;
  m.poisoned = s.poisoned;
  m.memory_bytes = s.state->memory_bytes() + s.allocator->memory_bytes() + s.dedup.memory_bytes();
  const SpaceSharing sharing = s.dedup.sharing();
  m.shared_chunks = sharing.chunks;
  m.saved_bytes = sharing.saved_bytes;
  return m;
}

bool ChunkStore::room_for(uint32_t bytes) const {
  return impl_->room_for(bytes);
}
SpaceNeed ChunkStore::compaction_need() const {
  return impl_->compaction_need();
}
void ChunkStore::compact(uint32_t max_bytes) {
  impl_->compact(max_bytes);
}

std::string ChunkStore::check_consistency() const {
  return impl_->check_consistency();
}
void ChunkStore::start_snapshot() {
  impl_->start_snapshot();
}
Status ChunkStore::close() {
  return impl_->close();
}

}  // namespace ffs::engine
