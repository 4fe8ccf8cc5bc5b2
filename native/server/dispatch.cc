// Frames to events of the replicas. What a frame says is checked here; what it leads to is
// decided there.
#include <cstring>

#include "net/peer_proof.h"
#include "net/version.h"
#include "server/log.h"
#include "server/shard.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;
using wire::Detail;
using wire::Type;

bool Shard::dispatch(Session& session, const net::Frame& frame) {
  if (!session.hello) {
    if (frame.type == Type::kHello) {
      on_hello(session, frame);
    } else {
      metrics_.frame_errors++;
      close_session(session, "the first frame is no hello");
    }
    return true;
  }
  if (session.from_server) {
    if (!session.proved) return take_peer_proof(session, frame);
    if (frame.type == Type::kForward) return on_forward(session, frame);
    if (frame.type == Type::kSync) return on_sync(session, frame);
    if (frame.type == Type::kNotice) {
      on_notice(session, frame);
      return true;
    }
    if (frame.type == Type::kUsed) {
      on_used(session, frame);
      return true;
    }
    metrics_.frame_errors++;
    close_session(session, "a server sent a client's frame");
    return true;
  }
  switch (frame.type) {
    case Type::kOpenCapability:
      on_open_capability(session, frame);
      return true;
    case Type::kCloseCapability:
      session.capabilities.erase(frame.as<wire::OpenCapability>().handle);
      return true;
    case Type::kRegisterRegion:
      on_register_region(session, frame);
      return true;
    case Type::kUnregisterRegion:
      on_unregister_region(session, frame);
      return true;
    case Type::kPing:
      push_status(session, Type::kPong, frame.request_id, 0, Detail::kNone,
                  frame.as<wire::StatusReply>().value);
      return true;
    case Type::kRead:
      return on_read(session, frame);
    case Type::kUpdate:
      return on_update(session, frame);
    case Type::kExists:
      return on_exists(session, frame);
    case Type::kLastChunk:
      return on_last_chunk(session, frame);
    case Type::kListChunks:
      return on_list_chunks(session, frame);
    case Type::kReadMany:
      return on_read_many(session, frame);
    case Type::kRdmaOpen:
      on_rdma_open(session, frame);
      return true;
    default:
      metrics_.frame_errors++;
      close_session(session, "a client sent a frame that isn't a client's");
      return true;
  }
}

// --- connection -----------------------------------------------------------------------------------

void Shard::on_hello(Session& session, const net::Frame& frame) {
  const auto hello = frame.as<wire::Hello>();
  wire::HelloReply reply{};
  std::memcpy(reply.cluster, config_.cluster.data(), sizeof reply.cluster);
  reply.node = config_.node.value;
  reply.incarnation = config_.incarnation;
  reply.routing_epoch = routing_epoch_;
  reply.max_payload_bytes = wire::kMaxPayloadBytes;
  reply.features = wire::kFeatureUsed | wire::kFeatureReadMany | wire::kFeatureOffer;
  if (session.connection.transport == net::Transport::kTcp && offers_rdma()) {
    reply.features |= wire::kFeatureRdma;
  }
  reply.version = net::choose_version(net::spoken_versions(), {hello.version_min, hello.version_max});
  const bool known_role = hello.role == static_cast<uint8_t>(wire::Role::kClient) ||
                          hello.role == static_cast<uint8_t>(wire::Role::kServer);
  if (std::memcmp(hello.cluster, config_.cluster.data(), sizeof hello.cluster) != 0) {
    reply.status = EPROTO;
    reply.detail = static_cast<uint32_t>(Detail::kWrongCluster);
  } else if (reply.version == 0 || !known_role) {
    reply.status = EPROTO;
    reply.detail = static_cast<uint32_t>(Detail::kVersion);
  }
  const bool peer = hello.role == static_cast<uint8_t>(wire::Role::kServer);
  if (peer && reply.status == 0 &&
      config_.peers_prove != net::has_nonce(frame.as<wire::ServerHello>().nonce)) {
    reply.status = EACCES;
    reply.detail = static_cast<uint32_t>(Detail::kUnproved);
  }
  if (peer && reply.status == 0 && config_.peers_prove) {
    on_peer_hello(session, frame, reply);
  } else {
    session.connection.queue.push(Type::kHelloReply, frame.request_id, reply);
    session.proved = true;
  }
  if (reply.status != 0) {
    (void)session.connection.flush(&released_);  // the last word; if it doesn't go out, closing says it
    close_session(session, "hello refused");
    return;
  }
  session.connection.reader.speak(reply.version);
  session.connection.queue.speak(reply.version);
  session.hello = true;
  session.from_server = peer;
  session.client = ClientId(hello.client);
  list_to_flush(session);
}

// A server of a cluster with a secret: our proof goes with the reply, its proof must be the next frame.
void Shard::on_peer_hello(Session& session, const net::Frame& frame, const wire::HelloReply& reply) {
  const auto hello = frame.as<wire::ServerHello>();
  wire::ServerHelloReply answer{};
  answer.reply = reply;
  FFS_CHECK(net::random_bytes(answer.nonce));
  const net::Mac ours = net::peer_proof(config_.peer_key, net::Side::kServer, hello, answer);
  std::memcpy(answer.proof, ours.data(), sizeof answer.proof);
  session.expected_proof = net::peer_proof(config_.peer_key, net::Side::kAsker, hello, answer);
  session.proved = false;
  session.connection.queue.push(Type::kHelloReply, frame.request_id, answer);
}

bool Shard::take_peer_proof(Session& session, const net::Frame& frame) {
  if (frame.type == Type::kPeerProof &&
      net::same_mac(session.expected_proof, frame.as<wire::PeerProof>().proof)) {
    session.proved = true;
    return true;
  }
  metrics_.frame_errors++;
  log(LogLevel::kWarning, "shard %u: a server that connected doesn't prove the cluster's secret",
      config_.number);
  close_session(session, "it doesn't prove the cluster's secret");
  return false;
}

void Shard::on_open_capability(Session& session, const net::Frame& frame) {
  const auto open = frame.as<wire::OpenCapability>();
  wire::Capability capability{};
  constexpr size_t kMostCapabilities = 1u << 20;
  if (frame.var.size() < sizeof capability) {
    return push_status(session, Type::kOpenCapabilityReply, frame.request_id, EINVAL, Detail::kBadFrame);
  }
  std::memcpy(&capability, frame.var.data(), sizeof capability);
  if (capability.version == 0 || capability.client != session.client.value || open.handle == 0 ||
      session.capabilities.size() >= kMostCapabilities) {
    return push_status(session, Type::kOpenCapabilityReply, frame.request_id, EACCES, Detail::kNoCapability);
  }
  // One that isn't genuine is kept, so that requests which name it are told why they are refused.
  const Detail fault = authority_.fault(capability);
  session.capabilities[open.handle] = {capability, fault};
  if (fault != Detail::kNone) {
    return push_status(session, Type::kOpenCapabilityReply, frame.request_id, EACCES, fault);
  }
  push_status(session, Type::kOpenCapabilityReply, frame.request_id, 0, Detail::kNone, open.handle);
}

void Shard::set_keys(const std::vector<SigningKey>& keys) {
  (void)call([this, &keys] {
    authority_.set_keys(keys);
    for (uint32_t slot = 0; slot < sessions_.size(); slot++) {
      for (auto& [handle, opened] : sessions_.at(slot)->capabilities) {
        opened.fault = authority_.fault(opened.capability);
      }
    }
  });
}

// Expiry is judged at the last contact with the manager: a capability that was good then stays so
// while no manager is there (shared rules in docs/wire_format.md, Connection frames).
Outcome Shard::authority(const Session& session, const wire::Context& context, uint64_t space,
                         uint32_t rights, uint32_t* detail) const {
  const auto refused = [detail](Detail why) {
    *detail = static_cast<uint32_t>(why);
    return Outcome::denied;
  };
  auto found = session.capabilities.find(context.capability);
  if (found == session.capabilities.end()) return refused(Detail::kNoCapability);
  const wire::Capability& capability = found->second.capability;
  if (context.client != 0 && context.client != session.client.value) return refused(Detail::kNoCapability);
  if (found->second.fault != Detail::kNone) return refused(found->second.fault);
  if (capability.kind != 2 && capability.space != space) return refused(Detail::kOtherSpace);
  if ((capability.rights & rights) != rights) return refused(Detail::kMissingRight);
  // An unsigned one may have no expiry: whoever can make it up needs none.
  if ((capability.expiry_ms != 0 || config_.signed_capabilities) && capability.expiry_ms <= manager_ms_) {
    return refused(Detail::kExpired);
  }
  // Judged by the session that has proved itself, not by the client that a request names: one that names none
  // has no entry in the retry table, where the replica would meet the fence.
  if (rights != wire::kRightRead && store_->fenced(session.client)) return Outcome::fenced;
  return Outcome::ok;
}

Target* Shard::find_target(const wire::Context& context) {
  auto found = targets_.find(context.target);
  if (found == targets_.end() || found->second->chain.value != context.chain || found->second->leaving) {
    return nullptr;
  }
  return found->second.get();
}

// --- regions --------------------------------------------------------------------------------------

void Shard::on_register_region(Session& session, const net::Frame& frame) {
  const auto wanted = frame.as<wire::RegisterRegion>();
  Fd fd;
  if (!session.connection.descriptors.empty()) {
    fd = std::move(session.connection.descriptors.front());
    session.connection.descriptors.pop_front();
  }
  if (session.regions.count(wanted.region) != 0) {
    return push_status(session, Type::kRegisterRegionReply, frame.request_id, EEXIST, Detail::kNone);
  }
  auto region = regions_->add(session.client, wanted.region, std::move(fd), wanted.offset, wanted.size);
  if (!region.ok()) {
    log(LogLevel::kInfo, "shard %u refuses a region: %s", config_.number, region.error().what);
    return push_status(session, Type::kRegisterRegionReply, frame.request_id, region.error().code,
                       Detail::kNone);
  }
  session.regions[wanted.region] = *region;
  (*region)->waiters.push_back({&session, frame.request_id, 0});
  if ((*region)->state != ClientRegion::State::kPreparing) on_region_settled(this, *region);
}

void Shard::on_region_settled(void* owner, ClientRegion* region) {
  Shard* self = static_cast<Shard*>(owner);
  auto waiters = std::move(region->waiters);
  region->waiters.clear();
  const bool failed = region->state == ClientRegion::State::kFailed;
  for (const auto& waiter : waiters) {
    self->push_status(*waiter.session, Type::kRegisterRegionReply, waiter.request_id,
                      failed ? region->error : 0, Detail::kNone, region->registered.registered() ? 1 : 0);
    if (!failed) continue;
    waiter.session->regions.erase(region->id);
    self->regions_->drop(region);
  }
}

void Shard::on_unregister_region(Session& session, const net::Frame& frame) {
  const auto unwanted = frame.as<wire::UnregisterRegion>();
  auto found = session.regions.find(unwanted.region);
  if (found == session.regions.end()) {
    return push_status(session, Type::kUnregisterRegionReply, frame.request_id, ENXIO, Detail::kNoRegion);
  }
  ClientRegion* region = found->second;
  std::erase_if(region->waiters,
                [&](const ClientRegion::Waiter& waiter) { return waiter.session == &session; });
  session.regions.erase(found);
  session.region_waits++;
  // When other connections keep the region, this one's own reads are what must end.
  uint32_t remaining = 0;
  if (region->registrations > 1) {
    for (uint32_t slot = 0; slot < requests_.size(); slot++) {
      const Request* request = requests_.at(slot);
      if (request->session == &session && request->region == region) remaining++;
    }
    for (uint32_t slot = 0; slot < many_reads_.size(); slot++) {
      const ManyRead* read = many_reads_.at(slot);
      if (read->session == &session && read->area == region) remaining++;
    }
    if (remaining == 0) answer_leaver({&session, frame.request_id});
  }
  if (region->registrations == 1 || remaining > 0) {
    region->leavers.push_back({&session, frame.request_id, remaining});
  }
  regions_->drop(region);
}

void Shard::answer_leaver(const ClientRegion::Waiter& leaver) {
  leaver.session->region_waits--;
  if (leaver.session->open) {
    push_status(*leaver.session, Type::kUnregisterRegionReply, leaver.request_id, 0, Detail::kNone);
  } else {
    end_session_if_unused(*leaver.session);
  }
}

// A read of `session` is through with the region.
void Shard::unuse_region(Session& session, ClientRegion* region) {
  for (size_t i = 0; i < region->leavers.size(); i++) {
    ClientRegion::Waiter& leaver = region->leavers[i];
    if (leaver.session != &session || leaver.remaining == 0 || --leaver.remaining > 0) continue;
    const ClientRegion::Waiter done = leaver;
    region->leavers.erase(region->leavers.begin() + static_cast<ptrdiff_t>(i));
    answer_leaver(done);
    break;
  }
  regions_->unuse(region);
}

void Shard::on_region_gone(void* owner, ClientRegion* region) {
  Shard* self = static_cast<Shard*>(owner);
  auto leavers = std::move(region->leavers);
  region->leavers.clear();
  for (const auto& leaver : leavers) self->answer_leaver(leaver);
}

// --- requests -------------------------------------------------------------------------------------

// A record for the request, or null: then the session waits for one and the frame comes again.
Request* Shard::take_request(Session& session, const net::Frame& frame, Target* target) {
  if (ops_used() >= config_.max_ops) {
    wait_for_op(session);
    return nullptr;
  }
  return new_request(session, frame.type, frame.request_id, target);
}

// The session's last frame comes again when there is a record.
void Shard::wait_for_op(Session& session) {
  session.connection.reader.unread();
  session.waits_for_op = true;
  waiting_for_op_.push_back(&session);
}

Request* Shard::new_request(Session& session, Type type, uint64_t request_id, Target* target) {
  Request* request = requests_.take();
  request->shard = this;
  request->session = &session;
  request->target = target;
  request->request_id = request_id;
  request->type = type;
  request->open_answers = 1;
  request->of_many = false;
  session.requests++;
  note_ops();
  return request;
}

void Shard::give_request(Request* request) {
  drop_read(request);
  Session* session = request->session;
  request->session = nullptr;
  request->target = nullptr;
  session->requests--;
  requests_.give(request);
  if (!session->open) end_session_if_unused(*session);
}

bool Shard::on_read(Session& session, const net::Frame& frame) {
  const auto read = frame.as<wire::Read>();
  Target* target = find_target(read.context);
  if (target == nullptr) return refuse(session, frame, EAGAIN, Detail::kWrongTarget), true;
  const uint64_t end = static_cast<uint64_t>(read.offset) + read.length;
  if (end > kMaxChunkBytes || read.tag_bytes > kMaxTagBytes || read.bulk.length < read.length) {
    return refuse(session, frame, EINVAL, Detail::kBadFrame), true;
  }
  ClientRegion* region = nullptr;
  if (read.bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRegion)) {
    auto found = session.regions.find(read.bulk.region);
    if (found == session.regions.end() || found->second->state != ClientRegion::State::kReady ||
        !found->second->holds(read.bulk.address, read.length)) {
      return refuse(session, frame, ENXIO, Detail::kNoRegion), true;
    }
    region = found->second->registered.registered() ? found->second : nullptr;
  } else if (read.bulk.kind != static_cast<uint8_t>(wire::BulkKind::kInline) &&
             (read.bulk.kind != static_cast<uint8_t>(wire::BulkKind::kRdma) ||
              session.connection.channel == nullptr)) {
    return refuse(session, frame, EINVAL, Detail::kBadFrame), true;
  }
  Request* request = take_request(session, frame, target);
  if (request == nullptr) return false;
  request->deadline_ms = deadline(read.context.deadline_ms);
  begin_read(request, read, region);
  return true;
}

// A read that has its record and its deadline, to its replica. `region`: where the device may put it, or
// null.
void Shard::begin_read(Request* request, const wire::Read& read, ClientRegion* region) {
  const Session& session = *request->session;
  request->read_flags = read.flags;
  request->checksum_kind = read.context.checksum_kind;
  request->bulk = read.bulk;
  request->region = region;
  if (region != nullptr) regions_->use(region);
  request->length = read.length;
  request->arrived_us = now_us_;
  request->beside = reads_under_way_;
  request->waiter.priority = read.context.priority;

  craq::ClientRead event_;
  event_.token = token_of(request);
  event_.chain_version = {read.context.chain_term, read.context.chain_counter};
  event_.key = key_of(read.key);
  event_.authority =
      authority(session, read.context, event_.key.space(), wire::kRightRead, &request->denied_detail);
  event_.offset_bytes = read.offset;
  event_.length_bytes = read.length;
  event_.space_epoch = read.context.space_epoch;
  event_.uncommitted_ok = (read.flags & wire::kReadUncommitted) != 0;
  event_.compare_tag = (read.flags & wire::kReadCompareTag) != 0;
  event_.touch = (read.flags & wire::kReadTouch) != 0;
  std::memcpy(event_.tag.tag.data(), read.tag, sizeof read.tag);
  event_.tag.tag_bytes = static_cast<uint8_t>(read.tag_bytes);
  event_.deadline_ms = request->deadline_ms;
  event(*request->target, [&](craq::Replica& replica) { replica.on_client_read(event_, now_ms_, effects_); });
}

bool Shard::on_exists(Session& session, const net::Frame& frame) {
  const auto ask = frame.as<wire::Exists>();
  Target* target = find_target(ask.context);
  if (target == nullptr) return refuse(session, frame, EAGAIN, Detail::kWrongTarget), true;
  if (frame.var.size() != static_cast<uint64_t>(ask.count) * sizeof(wire::ExistsKey)) {
    return refuse(session, frame, EINVAL, Detail::kBadFrame), true;
  }
  Request* request = take_request(session, frame, target);
  if (request == nullptr) return false;
  request->entries.assign(ask.count, wire::ExistsEntry{});
  request->failed_status = request->failed_detail = 0;
  request->open_answers = ask.count + 1;  // one more, so that it lives until all are asked
  craq::ClientRead event_;
  event_.chain_version = {ask.context.chain_term, ask.context.chain_counter};
  event_.space_epoch = ask.context.space_epoch;
  event_.facts_only = true;
  event_.touch = (ask.flags & wire::kReadTouch) != 0;
  event_.deadline_ms = deadline(ask.context.deadline_ms);
  for (uint32_t i = 0; i < ask.count; i++) {
    wire::ExistsKey key;
    std::memcpy(&key, frame.var.data() + i * sizeof key, sizeof key);
    event_.token = token_of(request, i);
    event_.key = key_of(key.key);
    event_.authority =
        authority(session, ask.context, event_.key.space(), wire::kRightRead, &request->denied_detail);
    event_.compare_tag = key.tag_bytes != 0 && key.tag_bytes <= kMaxTagBytes;
    std::memcpy(event_.tag.tag.data(), key.tag, sizeof key.tag);
    event_.tag.tag_bytes = static_cast<uint8_t>(key.tag_bytes);
    event(*target, [&](craq::Replica& replica) { replica.on_client_read(event_, now_ms_, effects_); });
  }
  answer_exists_if_complete(request);
  return true;
}

bool Shard::on_last_chunk(Session& session, const net::Frame& frame) {
  const auto ask = frame.as<wire::LastChunk>();
  Target* target = find_target(ask.context);
  if (target == nullptr) return refuse(session, frame, EAGAIN, Detail::kWrongTarget), true;
  Request* request = take_request(session, frame, target);
  if (request == nullptr) return false;
  request->space = ask.space;
  craq::ClientLastChunk event_;
  event_.token = token_of(request);
  event_.chain_version = {ask.context.chain_term, ask.context.chain_counter};
  event_.authority = authority(session, ask.context, ask.space, wire::kRightRead, &request->denied_detail);
  event_.space = ask.space;
  event_.deadline_ms = deadline(ask.context.deadline_ms);
  event(*target, [&](craq::Replica& replica) { replica.on_client_last_chunk(event_, now_ms_, effects_); });
  return true;
}

// Judged as a question for the facts of its first key; what it lists is looked up when that is answered.
bool Shard::on_list_chunks(Session& session, const net::Frame& frame) {
  const auto ask = frame.as<wire::ListChunks>();
  Target* target = find_target(ask.context);
  if (target == nullptr) return refuse(session, frame, EAGAIN, Detail::kWrongTarget), true;
  if (ask.count == 0 || ask.count > wire::kMaxListEntries ||
      (ask.flags & ~(wire::kListAllSpaces | wire::kListSpacesOnly)) != 0) {
    return refuse(session, frame, EINVAL, Detail::kBadFrame), true;
  }
  Request* request = take_request(session, frame, target);
  if (request == nullptr) return false;
  const bool all = (ask.flags & wire::kListAllSpaces) != 0;
  request->list_from = key_of(ask.key);
  request->list_flags = ask.flags;
  request->length = ask.count;
  craq::ClientRead event_;
  event_.token = token_of(request);
  event_.chain_version = {ask.context.chain_term, ask.context.chain_counter};
  event_.key = request->list_from;
  // No file or KV space has that id: only a capability for the cluster is for it.
  const uint64_t space = all ? UINT64_MAX : event_.key.space();
  event_.authority = authority(session, ask.context, space, wire::kRightRead, &request->denied_detail);
  if (event_.authority == Outcome::denied &&
      request->denied_detail == static_cast<uint32_t>(Detail::kMissingRight)) {  // that to write will do
    event_.authority = authority(session, ask.context, space, wire::kRightWrite, &request->denied_detail);
  }
  event_.space_epoch = all ? UINT64_MAX : ask.context.space_epoch;
  event_.facts_only = true;
  event_.deadline_ms = deadline(ask.context.deadline_ms);
  event(*target, [&](craq::Replica& replica) { replica.on_client_read(event_, now_ms_, effects_); });
  return true;
}

}  // namespace ffs::server
