// Many small reads in one frame (docs/wire_format.md, read_many). Most find a chunk that nothing is pending
// of, and a device that puts the bytes in place: those take a short way without a request record, and their
// results go out together. Whatever else there is becomes a read by itself, as if it had come alone.
#include <algorithm>
#include <cstring>

#include "server/shard.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;
using wire::Detail;
using wire::Type;

namespace {

// Whether the device can put all of it in place.
bool whole_blocks(const wire::ReadManyEntry& entry, uint32_t chunk_length) {
  const uint32_t end = std::min(entry.offset + entry.length, chunk_length);
  return entry.offset % io::kBlockBytes == 0 && end % io::kBlockBytes == 0 &&
         entry.address % io::kBlockBytes == 0;
}

}  // namespace

// False: the session waits for room; the frame comes again.
bool Shard::on_read_many(Session& session, const net::Frame& frame) {
  const auto head = frame.as<wire::ReadMany>();
  if (head.count == 0 || head.count > wire::kMaxReadMany ||
      frame.var.size() != head.count * sizeof(wire::ReadManyEntry)) {
    metrics_.frame_errors++;
    close_session(session, "a frame of many reads has another length than it says");
    return true;
  }
  if (ops_used() >= config_.max_ops) {  // a frame may go over it, by what it holds
    wait_for_op(session);
    return false;
  }
  Target* target = find_target(head.context);
  const bool over_rdma = session.connection.channel != nullptr;
  auto found = session.regions.find(head.region);
  ClientRegion* region = found == session.regions.end() ? nullptr : found->second;
  if (region != nullptr && region->state != ClientRegion::State::kReady) region = nullptr;

  craq::ClientRead read;
  read.chain_version = {head.context.chain_term, head.context.chain_counter};
  read.space_epoch = head.context.space_epoch;
  read.deadline_ms = deadline(head.context.deadline_ms);
  uint64_t space = 0;
  uint32_t denied_detail = 0;
  for (uint32_t i = 0; i < head.count; i++) {
    wire::ReadManyEntry entry;
    std::memcpy(&entry, frame.var.data() + i * sizeof entry, sizeof entry);
    read.key = key_of(entry.key);
    if (i == 0 || read.key.space() != space) {
      space = read.key.space();
      read.authority = authority(session, head.context, space, wire::kRightRead, &denied_detail);
    }
    const uint64_t end = static_cast<uint64_t>(entry.offset) + entry.length;
    if (target == nullptr) {
      send_refusal(session, Type::kRead, entry.request_id, EAGAIN, Detail::kWrongTarget);
    } else if (entry.length == 0 || entry.length > wire::kMaxReadManyBytes || end > kMaxChunkBytes) {
      send_refusal(session, Type::kRead, entry.request_id, EINVAL, Detail::kBadFrame);
    } else if (over_rdma) {
      read_alone(session, *target, head, entry);
    } else if (region == nullptr || !region->holds(entry.address, entry.length)) {
      send_refusal(session, Type::kRead, entry.request_id, ENXIO, Detail::kNoRegion);
    } else {
      start_many(session, *target, head, entry, region, &read);
    }
  }
  return true;
}

void Shard::start_many(Session& session, Target& target, const wire::ReadMany& head,
                       const wire::ReadManyEntry& entry, ClientRegion* region, craq::ClientRead* asked) {
  asked->offset_bytes = entry.offset;
  asked->length_bytes = entry.length;
  ManyRead* read = many_reads_.take();
  read->shard = this;
  read->session = &session;
  read->owner_target = &target;
  read->area = region;
  read->address = entry.address;
  read->request_id = entry.request_id;
  read->arrived_us = now_us_;
  read->beside = reads_under_way_;
  read->context = head.context;
  read->flags = head.flags & wire::kReadWantChecksums;
  read->deadline_ms = asked->deadline_ms;
  read->done = on_many_done;
  read->target = target.id;
  read->key = asked->key;
  read->offset = entry.offset;
  read->length = entry.length;
  regions_->use(region);
  session.requests++;
  target.under_way++;
  note_ops();
  craq::ChunkFacts facts;
  if (!region->registered.registered() ||
      !target.replica->read_at_once(*asked, now_ms_, &facts, &read->judged_in) ||
      !whole_blocks(entry, facts.length_bytes)) {
    return read_alone(read);
  }
  read->at_least = facts.version;
  read->memory = region->mapping.data() + entry.address;
  read->region = region->registered;
  read->sink = read;
  read->checksums = read->flags != 0 ? read->sums.data() : nullptr;
  reads_under_way_++;
  store_->read(read);
}

void Shard::on_many_done(engine::StoreOp* op) {
  auto* read = static_cast<ManyRead*>(static_cast<engine::ReadOp*>(op));
  read->shard->reads_under_way_--;
  read->shard->many_done_.push_back(read);  // judged by a clock that is read after this
}

void Shard::run_many() {
  for (size_t i = 0; i < many_done_.size(); i++) end_many(many_done_[i]);
  many_done_.clear();
}

void Shard::end_many(ManyRead* read) {
  Session& session = *read->session;
  Target& target = *read->owner_target;
  const bool plain = read->error == 0 && !target.leaving && session.open && read->granule_count <= 1 &&
                     target.replica->read_stands(read->judged_in, now_ms_);
  if (!plain) return read_alone(read);
  wire::ReadReply said{};
  said.bytes = read->read_length;
  said.chunk_length = read->readable_length;
  said.first_granule = read->first_granule;
  said.granule_count = read->checksums != nullptr ? read->granule_count : 0;
  push_result(session, read->request_id, said, read->sums[0]);
  background_.client_read(read->read_length, read->beside, now_us_ - read->arrived_us, now_us_);
  metrics_.reads++;
  metrics_.read_bytes += read->read_length;
  give_many(read);
}

// Over RDMA the device never puts the bytes in place: a request of its own, whose result goes with the
// others'.
void Shard::read_alone(Session& session, Target& target, const wire::ReadMany& head,
                       const wire::ReadManyEntry& entry) {
  wire::Read read{};
  read.context = head.context;
  std::memcpy(read.key, entry.key, sizeof read.key);
  read.offset = entry.offset;
  read.length = entry.length;
  read.flags = head.flags & wire::kReadWantChecksums;
  read.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRdma);
  read.bulk.length = entry.length;
  read.bulk.region = head.region;
  read.bulk.address = entry.address;
  Request* request = new_request(session, Type::kRead, entry.request_id, &target);
  request->of_many = true;
  request->deadline_ms = deadline(head.context.deadline_ms);
  begin_read(request, read, nullptr);
}

// The long way, from the beginning.
void Shard::read_alone(ManyRead* many) {
  Session& session = *many->session;
  Target& target = *many->owner_target;
  if (session.open && target.leaving) {
    send_refusal(session, Type::kRead, many->request_id, EAGAIN, Detail::kWrongTarget);
  } else if (session.open) {
    wire::Read read{};
    read.context = many->context;
    std::memcpy(read.key, many->key.bytes.data(), sizeof read.key);
    read.offset = many->offset;
    read.length = many->length;
    read.flags = many->flags;
    read.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRegion);
    read.bulk.length = many->length;
    read.bulk.address = many->address;
    Request* request = new_request(session, Type::kRead, many->request_id, &target);
    request->deadline_ms = many->deadline_ms;
    begin_read(request, read, many->area->registered.registered() ? many->area : nullptr);
  }
  give_many(many);
}

void Shard::give_many(ManyRead* read) {
  Session* session = read->session;
  Target& target = *read->owner_target;
  unuse_region(*session, read->area);
  read->session = nullptr;
  many_reads_.give(read);
  session->requests--;
  if (!session->open) end_session_if_unused(*session);
  target.under_way--;
  if (target.leaving) go_on_leaving(target);
}

void Shard::push_result(Session& session, uint64_t request_id, const wire::ReadReply& said, uint32_t crc) {
  wire::ReadManyResult result{};
  result.request_id = request_id;
  result.bytes = said.bytes;
  result.chunk_length = said.chunk_length;
  const bool summed = said.granule_count > 0;
  result.granule = summed ? said.first_granule : wire::kNoGranule;
  result.crc = summed ? crc : 0;
  session.results.push_back(result);
  if (session.results.size() == wire::kMaxReadMany) push_results(session);
  list_to_flush(session);
}

// What there is of results goes behind everything that is queued.
void Shard::push_results(Session& session) {
  if (session.results.empty()) return;
  wire::ReadManyReply reply{};
  reply.routing_epoch = routing_epoch_;
  reply.count = static_cast<uint32_t>(session.results.size());
  session.connection.queue.push(Type::kReadManyReply, 0, reply,
                                net::Bytes(reinterpret_cast<const uint8_t*>(session.results.data()),
                                           session.results.size() * sizeof(wire::ReadManyResult)));
  session.results.clear();
}

}  // namespace ffs::server
