// Updates: from clients, and from the predecessor in a chain. An inline payload is received straight
// into a pool buffer before the replica hears of the update; one in a region of the client's is
// fetched when the replica admits it (docs/craq.md, A write).
#include <cstring>

#include "server/log.h"
#include "server/shard.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;
using wire::Detail;
using wire::Type;
using wire::UpdateKind;

namespace {

constexpr uint32_t kRemovePageChunks = 64;

bool has_data(uint8_t kind) {
  return kind == static_cast<uint8_t>(UpdateKind::kWrite) ||
         kind == static_cast<uint8_t>(UpdateKind::kReplace) ||
         kind == static_cast<uint8_t>(UpdateKind::kCreate);
}

uint32_t rights_for(uint8_t kind) {
  switch (static_cast<UpdateKind>(kind)) {
    case UpdateKind::kRemoveRange:
    case UpdateKind::kSpaceEpoch:
      return wire::kRightRemove;
    case UpdateKind::kTouch:
      return wire::kRightRead;
    default:  // also the removal of one chunk: who may overwrite all of it may take it away
      return wire::kRightWrite;
  }
}

}  // namespace

// Whether the frame contradicts itself, beyond what the reader has checked.
bool Shard::update_fault(const net::Frame& frame, const wire::Update& update) const {
  const bool data = has_data(update.kind);
  const bool inline_data = update.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kInline);
  const bool region_data =
      update.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion) ||
      (update.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRdma) && frame.type == Type::kUpdate);
  if (update.kind < static_cast<uint8_t>(UpdateKind::kWrite) ||
      update.kind > static_cast<uint8_t>(UpdateKind::kTouch)) {
    return true;
  }
  constexpr uint32_t kKnown =
      wire::kUpdatePin | wire::kUpdateNeedExisting | wire::kUpdateBeyondEnd | wire::kUpdateOffer;
  if (update.tag_bytes > kMaxTagBytes || (update.flags & ~kKnown) != 0) return true;
  if ((update.flags & wire::kUpdateBeyondEnd) != 0 && update.kind != static_cast<uint8_t>(UpdateKind::kWrite))
    return true;
  if (static_cast<uint64_t>(update.offset) + update.length > kMaxChunkBytes) return true;
  if (update.codec != 0 && update.logical_length > kMaxChunkBytes) return true;
  if ((update.flags & wire::kUpdateOffer) != 0) {
    return frame.type != Type::kUpdate || update.kind != static_cast<uint8_t>(UpdateKind::kCreate) ||
           update.offset != 0 || update.bulk.kind != static_cast<uint8_t>(wire::BulkKind::kNone) ||
           frame.payload_bytes != 0 || !frame.var.empty();
  }
  if (!data || update.length == 0)
    return frame.payload_bytes != 0 || (data && (inline_data || region_data) && update.bulk.length != 0);
  if (!inline_data && !region_data) return true;
  if (update.bulk.length != update.length || frame.payload_bytes != (inline_data ? update.length : 0))
    return true;
  if (update.kind != static_cast<uint8_t>(UpdateKind::kWrite) && update.offset != 0) return true;
  const uint32_t crcs = update.context.checksum_kind == static_cast<uint8_t>(wire::ChecksumKind::kCrc32c)
                            ? net::piece_count(update.offset, update.length)
                            : 0;
  return frame.var.size() != static_cast<uint64_t>(crcs) * 4;
}

// A payload record for the frame's data, with the writer's checksums, and no bytes yet.
Payload* Shard::payload_for(const net::Frame& frame, const wire::Update& update) {
  Payload* payload = take_payload(update.offset, update.length);
  payload->creates = update.kind == static_cast<uint8_t>(UpdateKind::kCreate);
  payload->has_crcs = !frame.var.empty();
  payload->crc_count = net::piece_count(update.offset, update.length);
  if (payload->has_crcs) std::memcpy(payload->crcs.data(), frame.var.data(), frame.var.size());
  return payload;
}

bool Shard::on_update(Session& session, const net::Frame& frame) {
  const auto update = frame.as<wire::Update>();
  if (update_fault(frame, update)) return refuse(session, frame, EINVAL, Detail::kBadFrame), true;
  Target* target = find_target(update.context);
  if (target == nullptr) return refuse(session, frame, EAGAIN, Detail::kWrongTarget), true;
  // A record must be free before the payload is taken off the socket; it is taken when the event is
  // made, and nothing but this session's turn lies between if there is no payload.
  if (ops_used() >= config_.max_ops) {
    wait_for_op(session);
    return false;
  }
  if (frame.payload_bytes > 0) {
    session.incoming.active = true;
    session.incoming.request_id = frame.request_id;
    session.incoming.type = frame.type;
    session.incoming.update = update;
    session.incoming.payload = payload_for(frame, update);
    // Over RDMA what is inline is copied out of messages by this process.
    Payload* payload = session.incoming.payload;
    if (session.connection.channel == nullptr && take_berth(payload, *target)) {
      if (session.connection.reader.place_payload_guarded(payload->data())) return true;
      lose_berth(payload);
    }
    return receive_payload(session, BufferUse::kUpdate);
  }
  if (!has_data(update.kind) || update.length == 0 || (update.flags & wire::kUpdateOffer) != 0) {
    submit_update(session, update, frame.request_id, nullptr, craq::PayloadState::ready);
    return true;
  }
  if (update.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRdma)) {
    if (session.connection.channel == nullptr) return refuse(session, frame, EINVAL, Detail::kBadFrame), true;
    Payload* payload = payload_for(frame, update);
    payload->source = &session;
    payload->remote_key = static_cast<uint32_t>(update.bulk.region);
    payload->address = update.bulk.address;
    payload->request_id = frame.request_id;
    payload->waiter.priority = update.context.priority;
    session.requests++;
    submit_update(session, update, frame.request_id, payload, craq::PayloadState::later);
    return true;
  }
  auto found = session.regions.find(update.bulk.region);
  if (found == session.regions.end() || found->second->state != ClientRegion::State::kReady ||
      !found->second->holds(update.bulk.address, update.length)) {
    return refuse(session, frame, ENXIO, Detail::kNoRegion), true;
  }
  Payload* payload = payload_for(frame, update);
  payload->region = found->second;
  payload->address = update.bulk.address;
  payload->waiter.priority = update.context.priority;
  regions_->use(payload->region);
  submit_update(session, update, frame.request_id, payload, craq::PayloadState::later);
  return true;
}

// The payload of session.incoming goes to a pool buffer, at once or when there is one. True: go on
// reading.
bool Shard::receive_payload(Session& session, BufferUse use) {
  Payload* payload = session.incoming.payload;
  session.waiter.ready = on_payload_buffer;
  session.waiter.priority = use == BufferUse::kUpdate ? session.incoming.update.context.priority : 0;
  session.waiter.owner = &session;
  uint8_t* buffer = buffers_->allocate_or_wait(use, payload->pad + payload->length, &session.waiter);
  if (buffer == nullptr) return false;
  set_buffer(payload, buffer);
  session.connection.reader.place_payload(payload->data());
  return true;
}

void Shard::on_payload_buffer(BufferWaiter* waiter, uint8_t* buffer) {
  Session& session = *static_cast<Session*>(waiter->owner);
  Payload* payload = session.incoming.payload;
  session.incoming.moved_us = session.shard->now_us_;
  session.shard->set_buffer(payload, buffer);
  session.connection.reader.place_payload(payload->data());
  session.shard->list_to_read(session);
}

void Shard::payload_complete(Session& session) {
  Session::Incoming& incoming = session.incoming;
  if (!incoming.active) return;  // it was discarded
  incoming.active = false;
  Payload* payload = std::exchange(incoming.payload, nullptr);
  const bool good = check_payload(payload);
  const auto state = good ? craq::PayloadState::ready : craq::PayloadState::bad;
  if (incoming.type == Type::kForward) {
    submit_forward(incoming.forward, payload, state);
  } else if (incoming.type == Type::kSync) {
    submit_sync(incoming.sync, incoming.message, payload, state);
  } else {
    submit_update(session, incoming.update, incoming.request_id, payload, state);
  }
}

void Shard::submit_update(Session& session, const wire::Update& update, uint64_t request_id, Payload* payload,
                          craq::PayloadState state) {
  Target* target = find_target(update.context);
  if (target == nullptr) {
    if (payload != nullptr) release(payload);
    return send_update_refusal(session, request_id, EAGAIN, static_cast<uint32_t>(Detail::kWrongTarget));
  }
  net::Frame frame;
  frame.type = Type::kUpdate;
  frame.request_id = request_id;
  Request* request = requests_.take();  // within max_ops, but for sessions that were receiving meanwhile
  request->shard = this;
  request->session = &session;
  request->target = target;
  request->request_id = request_id;
  request->type = Type::kUpdate;
  request->open_answers = 1;
  request->update_kind = static_cast<UpdateKind>(update.kind);
  request->length = update.length;
  session.requests++;

  const ChunkKey key = key_of(update.key);
  request->space = key.space();
  const Outcome allowed =
      authority(session, update.context, key.space(), rights_for(update.kind), &request->denied_detail);
  if (request->update_kind == UpdateKind::kSpaceEpoch || request->update_kind == UpdateKind::kRemoveRange ||
      request->update_kind == UpdateKind::kTouch) {
    return submit_space_update(session, update, request, *target, allowed);
  }
  craq::ClientUpdate event_;
  event_.token = token_of(request);
  event_.chain_version = {update.context.chain_term, update.context.chain_counter};
  event_.authority = allowed;
  event_.identity = {ClientId(update.context.client), update.context.channel, update.context.sequence};
  event_.key = key;
  event_.kind = static_cast<craq::UpdateKind>(update.kind);
  event_.offset_bytes = update.offset;
  event_.length_bytes = update.length;
  event_.attributes = attributes_of(update);
  event_.attributes.expiry_ms = expiry_of(*target, update);
  event_.need_existing = (update.flags & wire::kUpdateNeedExisting) != 0;
  event_.beyond_end = (update.flags & wire::kUpdateBeyondEnd) != 0;
  event_.offer = (update.flags & wire::kUpdateOffer) != 0;
  event_.space_epoch = update.context.space_epoch;
  event_.deadline_ms = deadline(update.context.deadline_ms);
  event_.payload = give(*target, payload);
  event_.payload_state = state;
  event(*target, [&](craq::Replica& replica) { replica.on_client_update(event_, now_ms_, effects_); });
}

// Updates of a whole space, and touches, which the replica knows by other events.
void Shard::submit_space_update(Session&, const wire::Update& update, Request* request, Target& target,
                                Outcome allowed) {
  const ChunkKey key = key_of(update.key);
  const ChainVersion chain_version{update.context.chain_term, update.context.chain_counter};
  const uint64_t deadline_ms = deadline(update.context.deadline_ms);
  if (request->update_kind == UpdateKind::kSpaceEpoch) {
    craq::ClientSetSpaceEpoch set;
    set.token = token_of(request);
    set.chain_version = chain_version;
    set.authority = allowed;
    set.space = key.space();
    set.epoch = update.context.space_epoch;
    set.deadline_ms = deadline_ms;
    event(target, [&](craq::Replica& replica) { replica.on_client_set_space_epoch(set, now_ms_, effects_); });
  } else if (request->update_kind == UpdateKind::kRemoveRange) {
    craq::ClientRemovePage page;
    page.token = token_of(request);
    page.chain_version = chain_version;
    page.authority = allowed;
    page.space = key.space();
    page.after = key;
    page.has_after = key != ChunkKey::of(key.space(), {}) && key_predecessor(&page.after);
    page.limit = kRemovePageChunks;
    if (allowed == Outcome::ok) evictor_->removing();
    page.space_epoch = update.context.space_epoch;
    page.deadline_ms = deadline_ms;
    event(target, [&](craq::Replica& replica) { replica.on_client_remove_page(page, now_ms_, effects_); });
  } else {
    craq::ClientRead touch;
    touch.token = token_of(request);
    touch.chain_version = chain_version;
    touch.authority = allowed;
    touch.key = key;
    touch.space_epoch = update.context.space_epoch;
    touch.facts_only = true;
    touch.touch = true;
    touch.deadline_ms = deadline_ms;
    event(target, [&](craq::Replica& replica) { replica.on_client_read(touch, now_ms_, effects_); });
  }
}

// --- from the predecessor ---------------------------------------------------------------------------

bool Shard::on_forward(Session& session, const net::Frame& frame) {
  const auto forward = frame.as<wire::Forward>();
  const wire::Update& update = forward.update;
  if (update_fault(frame, update) || update.kind > static_cast<uint8_t>(UpdateKind::kCreate)) {
    metrics_.frame_errors++;
    close_session(session, "a forward contradicts itself");
    return true;
  }
  Target* target = find_target(update.context);
  if (target == nullptr) {
    // Not ours (yet): the sender sends again when it has no answer.
    if (frame.payload_bytes > 0) session.connection.reader.discard_payload();
    return true;
  }
  if (frame.payload_bytes > 0) {
    session.incoming.active = true;
    session.incoming.request_id = 0;
    session.incoming.type = frame.type;
    session.incoming.forward = forward;
    session.incoming.payload = payload_for(frame, update);
    return receive_payload(session, target->peer_use);
  }
  submit_forward(forward, nullptr, craq::PayloadState::ready);
  return true;
}

void Shard::submit_forward(const wire::Forward& forward, Payload* payload, craq::PayloadState state) {
  craq::PeerHeader header;
  craq::Update update;
  Target* target = find_target(forward.update.context);
  if (target == nullptr || !update_of(forward, &header, &update)) {
    if (payload != nullptr) release(payload);
    return;
  }
  update.payload = give(*target, payload);
  metrics_.forwards++;
  event(*target,
        [&](craq::Replica& replica) { replica.on_update(header, update, state, now_ms_, effects_); });
}

void Shard::on_notice(Session& session, const net::Frame& frame) {
  const auto wire_notice = frame.as<wire::Notice>();
  craq::PeerHeader header;
  craq::Notice notice;
  if (!notice_of(wire_notice, &header, &notice)) {
    metrics_.frame_errors++;
    close_session(session, "a notice of an unknown kind");
    return;
  }
  Target* target = find_target(wire_notice.context);
  if (target == nullptr) return;
  event(*target, [&](craq::Replica& replica) { replica.on_notice(header, notice, now_ms_, effects_); });
}

}  // namespace ffs::server
