// What recovery and repair ask for (docs/craq.md, Recovery, Repair): whole versions read, sent, received and
// installed. Decisions are the replicas'; here is the share of the device that copies may take.
#include <algorithm>
#include <cstring>

#include "server/log.h"
#include "server/shard.h"
#include "server/store_view.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;
using wire::Type;

namespace {
constexpr uint32_t kCompactStepBytes = 4u << 20;  // in a tick

// Chains are filled one after another, a few at a time: the first has its replica back soon, and while the
// manager lets it serve the next ones keep the device busy. In step all would come to their ends at once.
constexpr uint64_t turn_of(uint64_t since_ms, ChainId chain) {
  return since_ms << 20 | (chain.value & ((1u << 20) - 1));
}
}  // namespace

// --- messages -------------------------------------------------------------------------------------

void Shard::run(Target&, const craq::SendSync& effect) {
  FFS_CHECK(effect.bytes.size() <= wire::kMaxSyncMessageBytes);
  net::SendQueue* queue = peers_->lane(effect.header.to, kLaneSync);
  if (queue == nullptr) return;  // said again when the lane is up
  wire::Sync sync = sync_of(effect);
  sync.message_bytes = static_cast<uint32_t>(effect.bytes.size());
  if (effect.payload == craq::kNoBuffer) {
    queue->push(Type::kSync, 0, sync, effect.bytes);
    return;
  }
  Payload* payload = Payload::of(effect.payload);
  FFS_CHECK(payload->buffer != nullptr && payload->chunk_offset == 0 && payload->length > 0);
  sync.payload_length = payload->length;
  const size_t crc_bytes = payload->crc_count * size_t{4};
  scratch_.resize(effect.bytes.size() + crc_bytes);
  std::copy(effect.bytes.begin(), effect.bytes.end(), scratch_.begin());
  std::memcpy(scratch_.data() + effect.bytes.size(), payload->crcs.data(), crc_bytes);
  add_reference(payload);
  queue->push(Type::kSync, 0, sync, scratch_, net::Bytes(payload->data(), payload->length),
              reinterpret_cast<uint64_t>(payload) | 1);
}

bool Shard::on_sync(Session& session, const net::Frame& frame) {
  session.recovery = true;
  const auto sync = frame.as<wire::Sync>();
  const uint64_t crc_bytes = uint64_t{4} * net::piece_count(0, frame.payload_bytes);
  if (sync.message_bytes > wire::kMaxSyncMessageBytes || sync.payload_length != frame.payload_bytes ||
      frame.payload_bytes > kMaxChunkBytes || frame.var.size() != sync.message_bytes + crc_bytes) {
    metrics_.frame_errors++;
    close_session(session, "a sync message contradicts itself");
    return true;
  }
  if (find_target(sync.context) == nullptr) {
    if (frame.payload_bytes > 0) session.connection.reader.discard_payload();
    return true;
  }
  const net::Bytes message = frame.var.first(sync.message_bytes);
  if (frame.payload_bytes == 0) {
    submit_sync(sync, message, nullptr, craq::PayloadState::ready);
    return true;
  }
  Session::Incoming& incoming = session.incoming;
  incoming.active = true;
  incoming.type = frame.type;
  incoming.sync = sync;
  incoming.message.assign(message.begin(), message.end());
  incoming.payload = take_payload(0, frame.payload_bytes);
  incoming.payload->has_crcs = true;
  incoming.payload->crc_count = net::piece_count(0, frame.payload_bytes);
  std::memcpy(incoming.payload->crcs.data(), frame.var.data() + sync.message_bytes, crc_bytes);
  return receive_payload(session, BufferUse::kSyncIn);
}

void Shard::submit_sync(const wire::Sync& sync, net::Bytes message, Payload* payload,
                        craq::PayloadState state) {
  Target* target = find_target(sync.context);
  if (target == nullptr) {
    if (payload != nullptr) release(payload);
    return;
  }
  const craq::PeerHeader header = header_of(sync);
  const craq::BufferRef buffer = give(*target, payload);
  event(*target,
        [&](craq::Replica& replica) { replica.on_sync(header, message, buffer, state, now_ms_, effects_); });
}

// --- the share of the device ----------------------------------------------------------------------

io::Gate::Piece Shard::next(const std::array<uint32_t, io::kOpClasses>& wanted) {
  const bool urgent = wanted[static_cast<size_t>(io::OpClass::compaction)] > 0 &&
                      store_->compaction_need() == engine::SpaceNeed::urgent;
  background_.set_urgent(io::OpClass::compaction, urgent);
  return background_.next(wanted, clients_wait(), now_us_);
}

void Shard::ended(io::OpClass op_class, uint32_t bytes) {
  background_.ended(op_class, bytes, now_us_);
}

// Before updates have to wait for room, a little at a time; its pieces take their turns. When they do wait
// the store goes on by itself.
void Shard::compact_ahead() {
  if (stopping_ || io_->background_ops(io::OpClass::compaction) > 0) return;
  if (store_->compaction_need() == engine::SpaceNeed::soon) store_->compact(kCompactStepBytes);
}

// Requests of clients that the shard hasn't come to.
bool Shard::clients_wait() const {
  if (!waiting_for_op_.empty()) return true;
  return std::any_of(to_read_.begin(), to_read_.end(),
                     [](const Session* session) { return !session->from_server; });
}

// --- the scrubber ---------------------------------------------------------------------------------

void Shard::scrub() {
  scrubbed_.clear();
  for (const auto& [id, target] : targets_) {
    if (!target->leaving) scrubbed_.push_back(target->id);
  }
  scrubber_->tick(now_us_, scrubbed_, background_.clients_active(now_us_));
}

// From within a read's end: the replicas hear of it later in the pass.
void Shard::on_scrub_damage(void* owner, TargetId target, const ChunkKey& key, const Version& version) {
  static_cast<Shard*>(owner)->damages_.push_back({target, key, version});
}

void Shard::tell_damages() {
  for (const Damage& damage : damages_) {
    auto found = targets_.find(damage.target.value);
    if (found == targets_.end() || found->second->leaving) continue;
    event(*found->second,
          [&](craq::Replica& replica) { replica.on_damaged(damage.key, damage.version, now_ms_, effects_); });
  }
  damages_.clear();
}

std::optional<ChunkKey> Shard::on_scrub_compare(void* owner, TargetId target, const ChunkKey& from) {
  Shard* self = static_cast<Shard*>(owner);
  auto found = self->targets_.find(target.value);
  if (found == self->targets_.end() || found->second->leaving) return std::nullopt;
  std::optional<ChunkKey> next;
  self->event(*found->second, [&](craq::Replica& replica) {
    next = replica.on_compare(from, self->now_ms_, self->effects_);
  });
  return next;
}

// --- reading whole versions -----------------------------------------------------------------------

void Shard::run(Target& target, const craq::Load& effect) {
  LoadWork* work = take_load(target, effect.op, effect.key, effect.version, effect.length_bytes);
  start_load(work);
}

// A version that isn't here any more is told by the read (absent).
void Shard::run(Target& target, const craq::Copy& effect) {
  if (effect.length_bytes == 0) return complete(target, effect.op, Outcome::ok);
  LoadWork* work = take_load(target, effect.op, effect.key, effect.version, effect.length_bytes);
  work->use = BufferUse::kSyncOut;
  work->op_class = effect.background ? io::OpClass::recovery : io::OpClass::client;
  work->waiter.priority = effect.background ? 1 : 0;
  work->waiter.turn = effect.background ? turn_of(effect.since_ms, target.chain) : 0;
  start_load(work);
}

LoadWork* Shard::take_load(Target& target, craq::OpId op, const ChunkKey& key, const Version& version,
                           uint32_t length) {
  LoadWork* work = loads_.take();
  static_cast<engine::ReadOp&>(*work) = engine::ReadOp{};
  work->shard = this;
  work->owner_target = &target;
  work->op_id = op;
  work->use = BufferUse::kUpdate;
  work->waiter.priority = 0;
  work->waiter.turn = 0;
  work->done = on_loaded;
  work->target = target.id;
  work->key = key;
  work->at_least = version;
  work->exact_version = true;
  work->length = length;
  work->payload = take_payload(0, length);
  work->payload->crc_count = net::piece_count(0, length);
  work->payload->has_crcs = true;
  work->checksums = work->payload->crcs.data();
  return work;
}

void Shard::start_load(LoadWork* work) {
  if (work->owner_target->leaving) return end_load(work, Outcome::absent);  // nobody waits for it
  work->waiter.ready = on_load_buffer;
  work->waiter.owner = work;
  const uint32_t bytes = std::max(work->length, 1u);
  uint8_t* buffer = buffers_->allocate_or_wait(work->use, bytes, &work->waiter);
  if (buffer != nullptr) on_load_buffer(&work->waiter, buffer);
}

void Shard::on_load_buffer(BufferWaiter* waiter, uint8_t* buffer) {
  LoadWork* work = static_cast<LoadWork*>(waiter->owner);
  Shard* self = work->shard;
  self->set_buffer(work->payload, buffer);
  work->memory = buffer;
  work->region = self->buffers_->region_of(buffer);
  self->store_->read(work);
}

void Shard::on_loaded(engine::StoreOp* op) {
  LoadWork* work = static_cast<LoadWork*>(op);
  Shard* self = work->shard;
  Outcome outcome = op->error == ENOENT ? Outcome::absent : outcome_of(op->error);
  // Length and checksums are the store's; the bytes are checked before they are passed on.
  if (outcome == Outcome::ok &&
      (work->read_length != work->payload->length || !self->check_payload(work->payload))) {
    outcome = Outcome::corrupt;
  }
  self->end_load(work, outcome);
}

void Shard::end_load(LoadWork* work, Outcome outcome) {
  if (outcome == Outcome::ok) {
    complete(*work->owner_target, work->op_id, outcome, give(*work->owner_target, work->payload));
  } else {
    release(work->payload);
    complete(*work->owner_target, work->op_id, outcome);
  }
  loads_.give(work);
}

size_t Shard::loads_waiting() const {
  size_t count = 0;
  for (uint32_t slot = 0; slot < loads_.size(); slot++) count += loads_.at(slot)->waiter.waiting ? 1 : 0;
  return count;
}

// --- putting them in place ------------------------------------------------------------------------

void Shard::run(Target& target, const craq::Install& effect) {
  InstallWork* work = installs_.take();
  static_cast<engine::InstallOp&>(*work) = engine::InstallOp{};
  work->shard = this;
  work->target_record = &target;
  work->op_id = effect.op;
  work->payload = nullptr;
  engine::InstallOp& install = *work;
  install.done = on_installed;
  install.target = target.id;
  install.key = effect.key;
  install.version = effect.chunk.version;
  install.only_over = effect.only_over;
  install.attributes = to_engine(effect.chunk.attributes);
  install.logical_length = effect.chunk.attributes.logical_length_bytes;
  if (!(effect.payload == craq::kNoBuffer)) {
    Payload* payload = Payload::of(effect.payload);
    FFS_CHECK(payload->buffer != nullptr && payload->chunk_offset == 0);
    add_reference(payload);
    work->payload = payload;
    install.length = payload->length;
    install.data = payload->data();
    install.region = buffers_->region_of(payload->buffer);
    install.tail_padded = true;
    install.piece_checksums = payload->crcs.data();
  }
  install.op_class = effect.background ? io::OpClass::recovery : io::OpClass::client;
  store_->install(work);
}

void Shard::on_installed(engine::StoreOp* op) {
  InstallWork* work = static_cast<InstallWork*>(op);
  Shard* self = work->shard;
  Target& target = *work->target_record;
  if (op->error != 0 && op->error != ENOSPC && op->error != ECANCELED) {
    log(LogLevel::kError, "target %llu: installing a chunk failed: %s (errno %d)",
        static_cast<unsigned long long>(target.id.value), op->what != nullptr ? op->what : "", op->error);
  }
  self->complete(target, work->op_id,
                 op->error == ECANCELED ? Outcome::condition_failed : outcome_of(op->error));
  if (work->payload != nullptr) self->release(work->payload);
  self->installs_.give(work);
}

void Shard::run(Target& target, const craq::Erase& effect) {
  store_->erase(target.id, effect.key, take_small(target, effect.op));
}

void Shard::run(Target& target, const craq::ResetTarget& effect) {
  store_->reset_target(target.id, take_small(target, effect.op));
}

void Shard::run(Target& target, const craq::SetRetry& effect) {
  store_->retry_set(target.id, effect.client, target.chain, effect.channel, to_engine(effect.entry),
                    take_small(target, effect.op));
}

void Shard::run(Target& target, const craq::Repaired& effect) {
  const auto& key = effect.key.bytes;
  char text[2 * sizeof key + 1];
  for (size_t i = 0; i < key.size(); i++) std::snprintf(text + 2 * i, 3, "%02x", key[i]);
  log(LogLevel::kWarning, "target %llu, chain %u: chunk %s, version %u.%u.%llu was damaged: %s",
      static_cast<unsigned long long>(target.id.value), target.chain.value, text, effect.version.chain.term,
      effect.version.chain.counter, static_cast<unsigned long long>(effect.version.update),
      effect.ok ? "repaired from another replica" : "no serving replica has a good copy now");
}

}  // namespace ffs::server
