// The loop: one switch over the effects of the replicas, with no decisions in it. Completions are
// collected and told in the next turn, never from within an effect.
#include <algorithm>

#include "server/log.h"
#include "server/shard.h"
#include "server/store_view.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;
using wire::Type;

namespace {

engine::UpdateKind kind_of(craq::UpdateKind kind) {
  switch (kind) {
    case craq::UpdateKind::write:
      return engine::UpdateKind::write;
    case craq::UpdateKind::truncate:
      return engine::UpdateKind::truncate;
    case craq::UpdateKind::remove:
      return engine::UpdateKind::remove;
    case craq::UpdateKind::replace:
    case craq::UpdateKind::create:
      return engine::UpdateKind::replace;
  }
  FFS_CHECK(false && "an unknown kind of update");
  return engine::UpdateKind::write;
}

const char* reason_text(craq::Reason reason) {
  switch (reason) {
    case craq::Reason::none:
      return "serving";
    case craq::Reason::no_configuration:
      return "no chain version since the start";
    case craq::Reason::restarted:
      return "restarted: waits for a new chain version";
    case craq::Reason::members_incomplete:
      return "members of the chain aren't serving";
    case craq::Reason::not_a_member:
      return "the chain doesn't name it";
    case craq::Reason::persisting:
      return "makes the chain version durable";
    case craq::Reason::reconciling:
      return "compares pendings with its predecessor";
    case craq::Reason::resuming:
      return "waits for the members behind it";
    case craq::Reason::device_failed:
      return "its device failed, until restart";
    case craq::Reason::diverged:
      return "lacks what its predecessor committed, until it has been synced";
    case craq::Reason::no_lease:
      return "has no lease";
    case craq::Reason::left_out:
      return "the chain goes on without it";
    case craq::Reason::syncing:
      return "is being synced";
    case craq::Reason::start_hold:
      return "waits until leases of its last incarnation are over";
  }
  return "?";
}

}  // namespace

void Shard::run_effects(Target& target) {
  // run() never appends to effects_: completions and messages come back as later events.
  for (const craq::Effect& effect : effects_) {
    std::visit(
        [&](const auto& one) {
          if constexpr (requires { one.op; }) target.under_way++;
          run(target, one);
        },
        effect);
  }
}

void Shard::complete(Target& target, craq::OpId op, Outcome outcome, craq::BufferRef buffer) {
  completions_.push_back({&target, op, outcome, buffer});
}

void Shard::run_completions() {
  run_many();
  for (bool first = true; !completions_.empty(); first = false) {
    if (!first) read_clock();  // what was read in the last turn is judged by a clock that is read after it
    completing_.swap(completions_);
    for (const Completion& done : completing_) {
      done.target->under_way--;
      if (done.target->leaving) {
        go_on_leaving(*done.target);
        continue;
      }
      event(*done.target, [&](craq::Replica& replica) {
        replica.on_completion(done.op, done.outcome, done.buffer, now_ms_, effects_);
      });
    }
    completing_.clear();
  }
}

// --- messages -------------------------------------------------------------------------------------

// The lane for what goes down to a member: by how many members stand behind that one.
net::SendQueue* Shard::down_lane(const Target& target, TargetId to) {
  return peers_->lane(to, lane_down(members_behind(target.recorded, to)));
}

void Shard::run(Target& target, const craq::SendUpdate& effect) {
  net::SendQueue* queue = down_lane(target, effect.header.to);
  if (queue == nullptr) return;  // sent again when the lane is up
  wire::Forward forward = forward_of(effect);
  if (effect.update.payload == craq::kNoBuffer) {
    queue->push(Type::kForward, 0, forward);
    return;
  }
  Payload* payload = Payload::of(effect.update.payload);
  FFS_CHECK(payload->has_place() && payload->length == effect.update.length_bytes);
  forward.update.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
  forward.update.bulk.length = payload->length;
  add_reference(payload);
  queue->push(
      Type::kForward, 0, forward,
      net::Bytes(reinterpret_cast<const uint8_t*>(payload->crcs.data()), payload->crc_count * size_t{4}),
      net::Bytes(payload->data(), payload->length), reinterpret_cast<uint64_t>(payload) | 1);
}

void Shard::run(Target& target, const craq::SendNotice& effect) {
  net::SendQueue* queue = follows_updates(effect.notice.type) ? down_lane(target, effect.header.to)
                                                              : peers_->lane(effect.header.to, kLaneFree);
  if (queue != nullptr) queue->push(Type::kNotice, 0, notice_of(effect));
}

void Shard::on_peer_connected(void* owner, TargetId peer) {
  Shard* self = static_cast<Shard*>(owner);
  self->read_clock();
  for (auto& [id, target] : self->targets_) {
    if (target->leaving) continue;
    self->event(*target, [&](craq::Replica& replica) {
      replica.on_peer_connected(peer, self->now_ms_, self->effects_);
    });
  }
}

void Shard::on_peer_released(void* owner, uint64_t token) {
  static_cast<Shard*>(owner)->release_token(token);
}

// --- answers --------------------------------------------------------------------------------------

void Shard::run(Target&, const craq::Reply& reply) {
  Request* request = requests_.at(static_cast<uint32_t>((reply.token >> 16) - 1));
  FFS_CHECK(request->session != nullptr && request->open_answers > 0);
  const auto index = static_cast<uint32_t>(reply.token & 0xffff);
  switch (request->type) {
    case Type::kRead:
      return reply_read(request, reply);
    case Type::kUpdate:
      return reply_update(request, reply);
    case Type::kExists:
      return reply_exists(request, index, reply);
    case Type::kLastChunk:
      return reply_last_chunk(request, reply);
    case Type::kListChunks:
      return reply_list_chunks(request, reply);
    default:
      FFS_CHECK(false && "a reply to what was never asked");
  }
}

// --- payloads -------------------------------------------------------------------------------------

void Shard::run(Target& target, const craq::Fetch& effect) {
  Payload* payload = Payload::of(effect.payload);
  payload->target = &target;
  payload->fetch = effect.op;
  start_fetch(payload);
}

void Shard::run(Target&, const craq::Release& effect) {
  Payload* payload = Payload::of(effect.payload);
  payload->holder = nullptr;
  release(payload);
}

// The caller's reference becomes the replica's.
craq::BufferRef Shard::give(Target& target, Payload* payload) {
  if (payload == nullptr) return craq::kNoBuffer;
  payload->holder = &target;
  return payload->ref();
}

// --- the store ------------------------------------------------------------------------------------

void Shard::run(Target& target, const craq::Stage& effect) {
  const craq::Update& update = effect.update;
  StageWork* work = stages_.take();
  static_cast<engine::StageOp&>(*work) = engine::StageOp{};
  work->shard = this;
  work->target = nullptr;
  work->op_id = effect.op;
  work->payload = nullptr;
  engine::StageOp& stage = *work;
  stage.done = on_stored;
  stage.owner = &target;
  stage.target = target.id;
  stage.key = update.key;
  stage.version = update.version;
  stage.base = update.base_absent ? Version{} : update.base;
  stage.kind = kind_of(update.kind);
  stage.offset = update.offset_bytes;
  stage.length = update.length_bytes;
  stage.attributes = to_engine(update.attributes);
  stage.keep_attributes = effect.keep_attributes;
  stage.logical_length = update.attributes.logical_length_bytes;
  stage.identity = update.identity;
  stage.chain = target.chain;
  stage.space_epoch = update.space_epoch;
  if (!(update.payload == craq::kNoBuffer)) {
    Payload* payload = Payload::of(update.payload);
    FFS_CHECK(payload->has_place() && payload->length == update.length_bytes);
    add_reference(payload);
    work->payload = payload;
    stage.data = payload->data();
    if (payload->buffer != nullptr) stage.region = buffers_->region_of(payload->buffer);
    if (payload->berth.bytes != nullptr) {
      stage.berth = &payload->berth;
      metrics_.memory_writes++;
    }
    stage.tail_padded = true;
    stage.piece_checksums = payload->crcs.data();
    stage.block_checksums = payload->known_blocks();
    evictor_->staging(target.spaces, update.key, update.length_bytes);
  }
  store_->stage(&stage);
}

void Shard::on_stored(engine::StoreOp* op) {
  StageWork* work = static_cast<StageWork*>(op);
  Shard* self = work->shard;
  Target& target = *static_cast<Target*>(op->owner);
  if (op->error != 0 && op->error != ENOSPC && op->error != EBADMSG) {  // a damaged base: repaired first
    log(LogLevel::kError, "target %llu: storing an update failed: %s (errno %d)",
        static_cast<unsigned long long>(target.id.value), op->what != nullptr ? op->what : "", op->error);
  }
  self->complete(target, work->op_id, outcome_of_stage(op->error));
  if (work->payload != nullptr) {
    self->evictor_->stored(target.spaces, work->key, work->length);
    self->release(work->payload);
  }
  self->stages_.give(work);
}

void Shard::run(Target& target, const craq::Commit& effect) {
  const Status committed = store_->commit(target.id, effect.key, effect.version, nullptr);
  FFS_CHECK(committed.ok());
  if (target.spaces != nullptr) evictor_->committed(*target.spaces, effect.key);
}

SmallWork* Shard::take_small(Target& target, craq::OpId op) {
  SmallWork* work = smalls_.take();
  static_cast<engine::StoreOp&>(*work) = engine::StoreOp{};
  work->shard = this;
  work->target = &target;
  work->op_id = op;
  work->done = on_small_done;
  return work;
}

void Shard::on_small_done(engine::StoreOp* op) {
  SmallWork* work = static_cast<SmallWork*>(op);
  Shard* self = work->shard;
  self->complete(*work->target, work->op_id, outcome_of(op->error));
  self->smalls_.give(work);
}

void Shard::run(Target& target, const craq::Refuse& effect) {
  metrics_.refusals++;
  store_->refuse(target.id, effect.key, effect.version, effect.identity, target.chain,
                 static_cast<uint32_t>(effect.outcome), take_small(target, effect.op));
}

void Shard::run(Target& target, const craq::SetSpaceEpoch& effect) {
  store_->set_space_epoch(target.id, effect.space, engine::SpaceEpoch{effect.epoch, 0},
                          take_small(target, effect.op));
}

void Shard::run(Target& target, const craq::PersistChain& effect) {
  const auto bytes = encode_chain_record(target.chain, effect.record);
  store_->set_chain_state(target.id, bytes, take_small(target, effect.op));
}

void Shard::run(Target& target, const craq::Read& effect) {
  Request* request = requests_.at(static_cast<uint32_t>((effect.token >> 16) - 1));
  FFS_CHECK(request->session != nullptr && request->type == Type::kRead);
  request->read_op = effect.op;
  engine::ReadOp& read = request->read;
  read = engine::ReadOp{};
  read.done = on_read_done;
  read.owner = request;
  read.target = target.id;
  read.key = effect.key;
  read.at_least = effect.version;
  read.offset = effect.offset_bytes;
  read.length = effect.length_bytes;
  read.verify_partial = (request->read_flags & wire::kReadVerifyPartial) != 0;
  read.verify_whole = (request->read_flags & wire::kReadVerifyWhole) != 0;
  read.checksums = (request->read_flags & wire::kReadWantChecksums) != 0 ? request->sums.data() : nullptr;
  start_read(request);
}

// --- news -----------------------------------------------------------------------------------------

void Shard::run(Target& target, const craq::ProposalPersisted&) {
  target.persisted_here = true;
  signal_news();
}

void Shard::run(Target& target, const craq::StateChanged& effect) {
  log(LogLevel::kInfo, "target %llu, chain %u, version %u.%u: %s",
      static_cast<unsigned long long>(target.id.value), target.chain.value, effect.chain_version.term,
      effect.chain_version.counter, reason_text(effect.reason));
  signal_news();
}

// --- eviction -------------------------------------------------------------------------------------

void Shard::run(Target& target, const craq::Touch& effect) {
  HeldSpace* held = target.spaces != nullptr ? target.spaces->find(effect.key.space()) : nullptr;
  if (held == nullptr) return;  // nobody evicts from it
  held->hits++;
  if (!held->policy.evictable) return;
  store_->touch(target.id, effect.key, store_->stamp_of(manager_time()));
  if (!target.spaces->leads) target.touches.note(effect.key);
}

void Shard::run(Target& target, const craq::Evicted& effect) {
  if (target.spaces != nullptr) evictor_->evicted(*target.spaces, effect.key, effect.outcome);
}

}  // namespace ffs::server
