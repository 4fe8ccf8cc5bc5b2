// Answers of the replicas to frames.
#include <cstring>

#include "server/shard.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;
using wire::Detail;
using wire::Type;

namespace {

constexpr uint32_t kRetryAfterMs = 20;

}  // namespace

void Shard::push_status(Session& session, Type type, uint64_t request_id, int status, Detail detail,
                        uint64_t value) {
  wire::StatusReply reply{};
  reply.status = static_cast<uint32_t>(status);
  reply.detail = static_cast<uint32_t>(detail);
  reply.value = value;
  session.connection.queue.push(type, request_id, reply);
  list_to_flush(session);
}

// Answers a request that no replica is asked about.
void Shard::refuse(Session& session, const net::Frame& frame, int status, Detail detail) {
  if (frame.payload_bytes > 0) session.connection.reader.discard_payload();
  send_refusal(session, frame.type, frame.request_id, status, detail);
}

// Answers one whose replica is gone.
void Shard::refuse_request(Request* request, int status, Detail detail) {
  Session& session = *request->session;
  if (session.open) send_refusal(session, request->type, request->request_id, status, detail);
  give_request(request);
}

void Shard::send_refusal(Session& session, Type type, uint64_t request_id, int status, Detail detail) {
  metrics_.errors++;
  const auto status_field = static_cast<uint32_t>(status);
  const auto detail_field = static_cast<uint32_t>(detail);
  switch (type) {
    case Type::kRead: {
      wire::ReadReply reply{};
      reply.status = status_field;
      reply.detail = detail_field;
      reply.routing_epoch = routing_epoch_;
      session.connection.queue.push(Type::kReadReply, request_id, reply);
      break;
    }
    case Type::kUpdate:
      return send_update_refusal(session, request_id, status, detail_field);
    case Type::kExists: {
      wire::ExistsReply reply{};
      reply.status = status_field;
      reply.detail = detail_field;
      reply.routing_epoch = routing_epoch_;
      session.connection.queue.push(Type::kExistsReply, request_id, reply);
      break;
    }
    case Type::kLastChunk: {
      wire::LastChunkReply reply{};
      reply.status = status_field;
      reply.detail = detail_field;
      session.connection.queue.push(Type::kLastChunkReply, request_id, reply);
      break;
    }
    case Type::kListChunks: {
      wire::ListChunksReply reply{};
      reply.status = status_field;
      reply.detail = detail_field;
      reply.routing_epoch = routing_epoch_;
      session.connection.queue.push(Type::kListChunksReply, request_id, reply);
      break;
    }
    default:
      FFS_CHECK(false && "no request");
  }
  list_to_flush(session);
}

void Shard::send_update_refusal(Session& session, uint64_t request_id, int status, uint32_t detail) {
  wire::UpdateReply reply{};
  reply.status = static_cast<uint32_t>(status);
  reply.detail = detail;
  reply.routing_epoch = routing_epoch_;
  session.connection.queue.push(Type::kUpdateReply, request_id, reply);
  list_to_flush(session);
}

void Shard::reply_read(Request* request, const craq::Reply& answer) {
  Session& session = *request->session;
  if (!session.open) return give_request(request);
  const engine::ReadOp& read = request->read;
  Told what = told(answer.outcome, true);
  wire::ReadReply reply{};
  if (answer.outcome == Outcome::denied) what.detail = static_cast<Detail>(request->denied_detail);
  reply.status = static_cast<uint32_t>(what.status);
  reply.detail = static_cast<uint32_t>(what.detail);
  reply.chain = to_wire(answer.chain_version);
  reply.routing_epoch = routing_epoch_;
  if (answer.outcome == Outcome::offline) reply.retry_after_ms = kRetryAfterMs;
  if (answer.outcome != Outcome::ok || !request->read_done) {
    FFS_CHECK(answer.outcome != Outcome::ok);
    metrics_.errors += answer.outcome == Outcome::absent ? 0 : 1;
    session.connection.queue.push(Type::kReadReply, request->request_id, reply);
    list_to_flush(session);
    return give_request(request);
  }
  reply.version = to_wire(read.version);
  reply.expiry_ms = read.attributes.expiry_ms;
  reply.bytes = read.read_length;
  reply.chunk_length = read.readable_length;
  reply.logical_length = read.chunk_length;
  reply.codec = read.attributes.codec;
  reply.tag_bytes = read.attributes.tag_bytes;
  reply.chunk_flags = read.attributes.flags;
  std::memcpy(reply.tag, read.attributes.tag.data(), sizeof reply.tag);
  reply.bulk = request->bulk;
  reply.bulk.length = read.read_length;
  const bool checksums = read.checksums != nullptr;
  if (checksums) {
    reply.checksum_kind = static_cast<uint8_t>(wire::ChecksumKind::kCrc32c);
    reply.first_granule = read.first_granule;
    reply.granule_count = read.granule_count;
  }
  const bool over_rdma = request->bulk.kind == static_cast<uint8_t>(wire::BulkKind::kRdma);
  if (over_rdma) {
    if (read.read_length > 0) write_over_rdma(request);
    if (request->of_many && reply.codec == 0 && reply.tag_bytes == 0 && reply.granule_count <= 1 &&
        reply.chunk_length == reply.logical_length) {
      push_result(session, request->request_id, reply, request->sums[0]);
      background_.client_read(read.read_length, request->beside, now_us_ - request->arrived_us, now_us_);
      metrics_.reads++;
      metrics_.read_bytes += read.read_length;
      return give_request(request);
    }
  }
  const bool in_region = request->region != nullptr;
  reply.bulk.kind = static_cast<uint8_t>(over_rdma   ? wire::BulkKind::kRdma
                                         : in_region ? wire::BulkKind::kRegion
                                                     : wire::BulkKind::kInline);
  reply.patch_count = in_region ? static_cast<uint32_t>(request->patches.size()) : 0;

  scratch_.resize(reply.granule_count * size_t{4} + reply.patch_count * sizeof(wire::ReadPatch));
  if (reply.granule_count > 0)
    std::memcpy(scratch_.data(), request->sums.data(), reply.granule_count * size_t{4});
  size_t payload_bytes = in_region || over_rdma ? 0 : read.read_length;
  for (uint32_t i = 0; i < reply.patch_count; i++) {
    const Patch& patch = request->patches[i];
    const wire::ReadPatch out{patch.at, patch.length};
    std::memcpy(scratch_.data() + reply.granule_count * size_t{4} + i * sizeof out, &out, sizeof out);
    payload_bytes += patch.length;
  }
  net::SendQueue& queue = session.connection.queue;
  queue.push_head(Type::kReadReply, request->request_id,
                  net::Bytes(reinterpret_cast<const uint8_t*>(&reply), sizeof reply), scratch_,
                  payload_bytes);
  if (in_region) {
    for (const Patch& patch : request->patches) {
      queue.push_piece(net::Bytes(patch.buffer, patch.length), reinterpret_cast<uint64_t>(patch.buffer));
    }
    request->patches.clear();
  } else if (request->lent != nullptr) {
    queue_lent(request);
  } else if (payload_bytes > 0) {
    queue.push_piece(net::Bytes(read.memory, payload_bytes), reinterpret_cast<uint64_t>(request->buffer),
                     /*stays=*/true);
    request->buffer = nullptr;
  }
  background_.client_read(read.read_length, request->beside, now_us_ - request->arrived_us, now_us_);
  metrics_.reads++;
  metrics_.read_bytes += read.read_length;
  list_to_flush(session);
  give_request(request);
}

void Shard::reply_update(Request* request, const craq::Reply& answer) {
  Session& session = *request->session;
  if (!session.open) return give_request(request);
  const bool reading = request->update_kind == wire::UpdateKind::kTouch;
  Told what = told(answer.outcome, reading);
  if (answer.outcome == Outcome::denied) what.detail = static_cast<Detail>(request->denied_detail);
  // Refused by a member whose device is full: what the chain holds of evictable spaces makes room for it.
  const bool block = request->update_kind == wire::UpdateKind::kCreate;
  const bool again =
      answer.outcome == Outcome::no_space &&
      evictor_->will_make_room(request->target->spaces, request->space, block, request->length);
  if (again) what = {EAGAIN, Detail::kReissue};
  wire::UpdateReply reply{};
  reply.status = static_cast<uint32_t>(what.status);
  reply.detail = static_cast<uint32_t>(what.detail);
  reply.version = to_wire(answer.chunk.version);
  reply.chain = to_wire(answer.chain_version);
  reply.routing_epoch = routing_epoch_;
  reply.chunk_length = answer.chunk.logical_bytes();
  if (answer.outcome == Outcome::offline || again) reply.retry_after_ms = kRetryAfterMs;
  if (request->update_kind == wire::UpdateKind::kRemoveRange) {
    reply.value = answer.count;
    reply.chunk_length = answer.more ? 1 : 0;
  } else if (answer.outcome == Outcome::existed || answer.outcome == Outcome::tag_differs) {
    reply.value = answer.chunk.logical_bytes();
  } else if (answer.outcome == Outcome::ok) {
    reply.value = request->length;
  }
  if (answer.outcome == Outcome::ok) {
    background_.client_served(now_us_);
    const bool removed = request->update_kind == wire::UpdateKind::kRemove ||
                         (request->update_kind == wire::UpdateKind::kRemoveRange && answer.count > 0);
    if (removed) evictor_->removing();
    metrics_.updates++;
    metrics_.update_bytes += request->length;
  } else if (answer.outcome != Outcome::existed && answer.outcome != Outcome::wanted) {
    metrics_.errors++;
  }
  session.connection.queue.push(Type::kUpdateReply, request->request_id, reply);
  list_to_flush(session);
  give_request(request);
}

void Shard::reply_exists(Request* request, uint32_t index, const craq::Reply& answer) {
  FFS_CHECK(index < request->entries.size());
  wire::ExistsEntry& entry = request->entries[index];
  entry.length = answer.chunk.logical_bytes();
  if (answer.outcome == Outcome::ok) {
    entry.state = 1;
  } else if (answer.outcome == Outcome::tag_differs) {
    entry.state = 2;
  } else if (answer.outcome == Outcome::absent) {
    entry = wire::ExistsEntry{};
  } else if (request->failed_status == 0) {
    Told what = told(answer.outcome, true);
    if (answer.outcome == Outcome::denied) what.detail = static_cast<Detail>(request->denied_detail);
    request->failed_status = static_cast<uint32_t>(what.status);
    request->failed_detail = static_cast<uint32_t>(what.detail);
  }
  request->chain_version = answer.chain_version;
  answer_exists_if_complete(request);
}

void Shard::answer_exists_if_complete(Request* request) {
  FFS_CHECK(request->open_answers > 0);
  if (--request->open_answers > 0) return;
  Session& session = *request->session;
  if (session.open) {
    wire::ExistsReply reply{};
    reply.status = request->failed_status;
    reply.detail = request->failed_detail;
    reply.chain = to_wire(request->chain_version);
    reply.routing_epoch = routing_epoch_;
    reply.count = reply.status == 0 ? static_cast<uint32_t>(request->entries.size()) : 0;
    session.connection.queue.push(Type::kExistsReply, request->request_id, reply,
                                  net::Bytes(reinterpret_cast<const uint8_t*>(request->entries.data()),
                                             reply.count * sizeof(wire::ExistsEntry)));
    metrics_.errors += reply.status != 0 ? 1 : 0;
    list_to_flush(session);
  }
  give_request(request);
}

void Shard::reply_last_chunk(Request* request, const craq::Reply& answer) {
  Session& session = *request->session;
  if (session.open) {
    Told what = told(answer.outcome, true);
    if (answer.outcome == Outcome::denied) what.detail = static_cast<Detail>(request->denied_detail);
    wire::LastChunkReply reply{};
    reply.status = static_cast<uint32_t>(what.status);
    reply.detail = static_cast<uint32_t>(what.detail);
    if (answer.outcome == Outcome::ok) {
      std::memcpy(reply.key, answer.key.bytes.data(), sizeof reply.key);
      reply.length = answer.chunk.logical_bytes();
      reply.chunks = count_space(*request->target, request->space);
    }
    session.connection.queue.push(Type::kLastChunkReply, request->request_id, reply);
    list_to_flush(session);
  }
  give_request(request);
}

void Shard::reply_list_chunks(Request* request, const craq::Reply& answer) {
  Session& session = *request->session;
  if (!session.open) return give_request(request);
  Told what{};
  if (answer.outcome != Outcome::absent) what = told(answer.outcome, true);  // absent: just the first key
  if (answer.outcome == Outcome::denied) what.detail = static_cast<Detail>(request->denied_detail);
  wire::ListChunksReply reply{};
  reply.status = static_cast<uint32_t>(what.status);
  reply.detail = static_cast<uint32_t>(what.detail);
  reply.chain = to_wire(answer.chain_version);
  reply.routing_epoch = routing_epoch_;
  scratch_.resize(request->length * sizeof(wire::ListEntry));
  ChunkKey at = request->list_from;
  const uint64_t space = at.space();
  const bool one_space = (request->list_flags & wire::kListAllSpaces) == 0;
  wire::ListEntry entry{};
  while (reply.status == 0 && list_next(*request->target, at, &entry)) {
    const ChunkKey key = key_of(entry.key);
    if (one_space && key.space() != space) break;
    if (reply.count == request->length) {
      reply.more = 1;
      break;
    }
    std::memcpy(scratch_.data() + reply.count++ * sizeof entry, &entry, sizeof entry);
    const bool spaces_only = (request->list_flags & wire::kListSpacesOnly) != 0;
    if (spaces_only && (one_space || key.space() == UINT64_MAX)) break;
    at = spaces_only ? ChunkKey::of(key.space() + 1, {}) : key;
    if (!spaces_only && !key_successor(&at)) break;
  }
  metrics_.errors += reply.status != 0 ? 1 : 0;
  session.connection.queue.push(Type::kListChunksReply, request->request_id, reply,
                                net::Bytes(scratch_.data(), reply.count * sizeof entry));
  list_to_flush(session);
  give_request(request);
}

// The first chunk at or after a key of which this target has a version, committed or pending: so nothing that
// a client was told is missing, whichever member it asks.
bool Shard::list_next(const Target& target, const ChunkKey& from, wire::ListEntry* entry) const {
  engine::ChunkInfo info;
  const bool committed = store_->first_at_or_after(target.id, from, &info);
  ChunkKey at = from;
  ChunkKey pending;
  *entry = {};
  while (store_->first_pending_at_or_after(target.id, at, &pending)) {
    if (committed && !(pending < info.key)) break;
    engine::PendingInfo facts;
    for (uint32_t i = 0; store_->pending_at(target.id, pending, i, &facts); i++) {
      if (facts.kind != engine::UpdateKind::remove) entry->length = std::max(entry->length, facts.length);
    }
    if (entry->length > 0) {
      std::memcpy(entry->key, pending.bytes.data(), sizeof entry->key);
      entry->flags = wire::kListPending;
      return true;
    }
    at = pending;
    if (!key_successor(&at)) break;
  }
  if (!committed) return false;
  entry->length = info.length;
  engine::PendingInfo facts;
  for (uint32_t i = 0; store_->pending_at(target.id, info.key, i, &facts); i++) {
    if (facts.kind != engine::UpdateKind::remove) entry->length = std::max(entry->length, facts.length);
  }
  std::memcpy(entry->key, info.key.bytes.data(), sizeof entry->key);
  return true;
}

// Committed chunks of a space here. A walk of the index: some 50 ns a chunk.
uint64_t Shard::count_space(const Target& target, uint64_t space) const {
  std::array<uint8_t, 16> last;
  last.fill(0xff);
  const ChunkKey to = ChunkKey::of(space, last);
  ChunkKey from = ChunkKey::of(space, {});
  uint64_t chunks = 0;
  while (true) {
    const engine::SpaceStats stats = store_->range_stats(target.id, from, to, 65536);
    chunks += stats.chunks;
    if (stats.complete) return chunks;
    from = stats.next;
  }
}

}  // namespace ffs::server
