// The way in: each event of Replica, the checks that every message passes, and the way from a
// completed operation to the chapter that began it.
#include "craq/machine.h"

namespace ffs::craq {

Replica::Replica(TargetId self, ChainId chain, const StoreView& store, const Options& options,
                 uint64_t now_ms)
    : machine_(std::make_unique<Machine>(self, chain, store, options, now_ms)) {}
Replica::~Replica() = default;

void Replica::on_proposed(const ChainConfig& config, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->proposed(config);
  machine_->finish();
}

void Replica::on_recorded(const ChainConfig& config, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->recorded(config);
  machine_->finish();
}

void Replica::on_client_update(const ClientUpdate& request, uint64_t now_ms, Effects& out) {
  machine_->client_request(request, now_ms, out);
}
void Replica::on_client_read(const ClientRead& request, uint64_t now_ms, Effects& out) {
  machine_->client_request(request, now_ms, out);
}
bool Replica::read_at_once(const ClientRead& request, uint64_t now_ms, ChunkFacts* facts,
                           ChainVersion* judged_in) const {
  return machine_->read_at_once(request, now_ms, facts, judged_in);
}
bool Replica::read_stands(const ChainVersion& judged_in, uint64_t now_ms) const {
  return machine_->read_stands(judged_in, now_ms);
}
void Replica::on_client_set_space_epoch(const ClientSetSpaceEpoch& request, uint64_t now_ms, Effects& out) {
  machine_->client_request(request, now_ms, out);
}
void Replica::on_client_remove_page(const ClientRemovePage& request, uint64_t now_ms, Effects& out) {
  machine_->client_request(request, now_ms, out);
}
void Replica::on_client_last_chunk(const ClientLastChunk& request, uint64_t now_ms, Effects& out) {
  machine_->client_request(request, now_ms, out);
}

EvictionAnswer Replica::on_evict(const EvictionOrder& order, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  const EvictionAnswer answer = machine_->evict(order);
  machine_->finish();
  return answer;
}

void Replica::on_update(const PeerHeader& header, const Update& update, PayloadState payload_state,
                        uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  if (!machine_->update_arrived(header, update, payload_state) && update.payload != kNoBuffer) {
    out.push_back(Release{update.payload});
  }
  machine_->finish();
}

void Replica::on_notice(const PeerHeader& header, const Notice& notice, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->notice_arrived(header, notice);
  machine_->finish();
}

void Replica::on_completion(OpId op, Outcome outcome, BufferRef payload, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->completed(op, outcome, payload);
  machine_->finish();
}

void Replica::on_lease(uint64_t until_ms, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->lease_received(until_ms);
  machine_->finish();
}

void Replica::on_sync(const PeerHeader& header, std::span<const uint8_t> bytes, BufferRef payload,
                      PayloadState payload_state, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->sync_arrived(header, bytes, payload, payload_state);
  machine_->finish();
}

void Replica::on_damaged(const ChunkKey& key, const Version& version, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->damaged(key, version);
  machine_->finish();
}

std::optional<ChunkKey> Replica::on_compare(const ChunkKey& from, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  const std::optional<ChunkKey> next = machine_->compare(from);
  machine_->finish();
  return next;
}

void Replica::on_peer_connected(TargetId target, uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->peer_connected(target);
  machine_->finish();
}

void Replica::on_tick(uint64_t now_ms, Effects& out) {
  machine_->begin(now_ms, out);
  machine_->tick();
  machine_->finish();
}

ReplicaStatus Replica::status() const {
  return machine_->status();
}

// A message is for us, in the version that we have adopted, or it changes nothing.
bool Replica::Machine::speaks_to_us(const PeerHeader& header) const {
  return acts() && header.chain == chain_ && header.to == self_ && header.chain_version == config_.version;
}

bool Replica::Machine::update_arrived(const PeerHeader& header, const Update& u, PayloadState payload_state) {
  if (!speaks_to_us(header) || !on_path() || first() || header.from != predecessor() || !reconciled_)
    return false;
  heard_from(header.from);
  update_received(u, payload_state);
  return true;
}

void Replica::Machine::notice_arrived(const PeerHeader& header, const Notice& n) {
  if (!speaks_to_us(header) || !on_path()) return;
  heard_from(header.from);
  const bool from_above = !first() && header.from == predecessor();
  const bool from_below = !last() && header.from == successor();
  switch (n.type) {
    case NoticeType::held:
      if (from_above && reconciled_) held_received(n);
      return;
    case NoticeType::cancel:
      if (from_above && reconciled_) cancel_received(n);
      return;
    case NoticeType::space_epoch:
      if (from_above && reconciled_) space_epoch_received(n);
      return;
    case NoticeType::reconcile_answer:
      if (from_above) reconcile_answered(n);
      return;
    case NoticeType::resent:
      if (from_above) resent_received();
      return;
    case NoticeType::invite:
      if (from_above) invite_received();
      return;
    case NoticeType::ack:
      if (from_below) ack_received(n);
      return;
    case NoticeType::refusal:
      if (from_below) refusal_received(n);
      return;
    case NoticeType::missing:
      if (from_below) missing_received(n);
      return;
    case NoticeType::space_epoch_ack:
      if (from_below) space_epoch_acked(n);
      return;
    case NoticeType::reconcile:
      if (from_below) reconcile_received(n);
      return;
    case NoticeType::reconciled:
      if (from_below) reconciled_received();
      return;
    case NoticeType::ready:
      if (from_below) ready_received();
      return;
    case NoticeType::query:
      query_received(header, n);
      return;
    case NoticeType::answer:
      if (header.from == last_member()) answer_received(n);
      return;
    case NoticeType::lease_ask:
      lease_asked(header.from, n);
      return;
    case NoticeType::lease_grant:
      lease_granted(header.from, n);
      return;
  }
}

void Replica::Machine::completed(OpId id, Outcome outcome, BufferRef payload) {
  Op* op = ops_.find(id);
  FFS_CHECK(op != nullptr);
  const Op done = *op;
  ops_.remove(op);
  op_pool_.give(op);
  switch (done.kind) {
    case Op::Kind::fetch_for_request:
      if (done.request != nullptr) fetched_for_request(done.request, outcome);
      break;
    case Op::Kind::fetch:
      if (done.pending != nullptr) fetched(done.pending, outcome);
      break;
    case Op::Kind::stage:
      staged(done.pending, outcome);
      break;
    case Op::Kind::refuse:
      refuse_durable(done.pending, outcome);
      break;
    case Op::Kind::drop:
      drops_--;
      if (outcome != Outcome::ok) fail(Reason::device_failed);
      break;
    case Op::Kind::read:
      read_done(done.request, outcome);
      break;
    case Op::Kind::load:
      if (done.pending != nullptr) {
        loaded(done.pending, outcome, payload);
      } else {
        release(payload);
      }
      break;
    case Op::Kind::epoch:
      if (done.epoch != nullptr) {
        epoch_durable(done.epoch, outcome);
      } else if (outcome != Outcome::ok) {
        fail(Reason::device_failed);
      }
      break;
    case Op::Kind::chain:
      chain_persisted(outcome);
      break;
    case Op::Kind::retry:
      if (outcome != Outcome::ok) fail(Reason::device_failed);
      break;
    case Op::Kind::sync_source:
      sync_source_.completed(id, outcome, payload);
      break;
    case Op::Kind::sync_target:
      sync_target_.completed(id, outcome);
      break;
    case Op::Kind::repair:
      repairer_.completed(id, outcome, payload);
      break;
    case Op::Kind::question:
      FFS_CHECK(false);  // isn't an effect
  }
}

}  // namespace ffs::craq
