#include "server/wire_craq.h"

#include <cerrno>

#include "base/check.h"

namespace ffs::server {

using craq::Outcome;
using wire::Detail;

Told told(Outcome outcome, bool reading) {
  switch (outcome) {
    case Outcome::ok:
      return {0, Detail::kNone};
    case Outcome::existed:
      return {EEXIST, Detail::kNone};
    case Outcome::absent:
      return {ENOENT, Detail::kNone};
    case Outcome::tag_differs:
      return {reading ? ENODATA : EEXIST, Detail::kTagMismatch};
    case Outcome::stale_chain:
      return {EAGAIN, Detail::kStaleRouting};
    case Outcome::not_head:
      return {EAGAIN, Detail::kNotHead};
    case Outcome::offline:
      return {EAGAIN, Detail::kNotServing};
    case Outcome::denied:
      return {EACCES, Detail::kNoCapability};
    case Outcome::fenced:
      return {ESTALE, Detail::kFenced};
    case Outcome::old_sequence:
      return {EINVAL, Detail::kOldSequence};
    case Outcome::stale_epoch:
      return {ESTALE, Detail::kStaleEpoch};
    case Outcome::no_space:
      return {ENOSPC, Detail::kNone};
    case Outcome::over_quota:
      return {EDQUOT, Detail::kNone};
    case Outcome::fell_with_base:
      return {EAGAIN, Detail::kReissue};
    case Outcome::condition_failed:
      return {EAGAIN, Detail::kReissue};
    case Outcome::invalid:
      return {EINVAL, Detail::kNone};
    case Outcome::timed_out:
      return {ETIMEDOUT, Detail::kDeadline};
    case Outcome::bad_checksum:
      return reading ? Told{EIO, Detail::kCorrupt} : Told{EBADMSG, Detail::kChecksum};
    case Outcome::io_error:
      return {EIO, reading ? Detail::kNone : Detail::kPoisoned};
    case Outcome::dropped:
      return {EAGAIN, Detail::kReissue};
    case Outcome::corrupt:
      return {EIO, Detail::kCorrupt};
    case Outcome::wanted:
      return {EAGAIN, Detail::kWanted};
  }
  FFS_CHECK(false && "an outcome without a meaning");
  return {EIO, Detail::kNone};
}

Outcome outcome_of(int error) {
  switch (error) {
    case 0:
      return Outcome::ok;
    case ENOSPC:
      return Outcome::no_space;
    case EDQUOT:
      return Outcome::over_quota;
    case EBADMSG:
      return Outcome::corrupt;
    default:
      return Outcome::io_error;
  }
}

// What the store has against an update is a refusal of it, and no word on the device: the chain goes on.
Outcome outcome_of_stage(int error) {
  switch (error) {
    case EINVAL:
      return Outcome::invalid;
    case ESTALE:  // what it is built on isn't there, or there is more already
    case EEXIST:
    case EBUSY:
      return Outcome::fell_with_base;
    default:
      return outcome_of(error);
  }
}

craq::Attributes attributes_of(const wire::Update& update) {
  craq::Attributes attributes;
  std::memcpy(attributes.tag.data(), update.tag, sizeof update.tag);
  attributes.tag_bytes = update.tag_bytes;
  attributes.codec = update.codec;
  attributes.role = update.role;
  attributes.checksum_kind = static_cast<uint8_t>(wire::ChecksumKind::kCrc32c);
  attributes.flags = (update.flags & wire::kUpdatePin) != 0 ? 1 : 0;
  attributes.logical_length_bytes = update.codec != 0 ? update.logical_length : 0;
  attributes.expiry_ms = update.expiry_ms;
  return attributes;
}

namespace {

wire::Context context_of(const craq::PeerHeader& header, const UpdateIdentity& identity) {
  wire::Context context{};
  context.target = header.to.value;
  context.chain = header.chain.value;
  context.chain_term = header.chain_version.term;
  context.chain_counter = header.chain_version.counter;
  context.client = identity.client.value;
  context.channel = identity.channel;
  context.sequence = identity.sequence;
  context.checksum_kind = static_cast<uint8_t>(wire::ChecksumKind::kCrc32c);
  return context;
}

void read_context(const wire::Context& context, uint64_t from, craq::PeerHeader* header,
                  UpdateIdentity* identity) {
  header->chain = ChainId(context.chain);
  header->chain_version = {context.chain_term, context.chain_counter};
  header->from = TargetId(from);
  header->to = TargetId(context.target);
  identity->client = ClientId(context.client);
  identity->channel = context.channel;
  identity->sequence = context.sequence;
}

}  // namespace

wire::Forward forward_of(const craq::SendUpdate& send) {
  const craq::Update& update = send.update;
  wire::Forward forward{};
  forward.version = to_wire(update.version);
  forward.base = to_wire(update.base);
  forward.floor = to_wire(update.floor);
  forward.from = send.header.from.value;
  forward.flags = (update.base_absent ? wire::kForwardBaseAbsent : 0u) |
                  (update.base_committed ? wire::kForwardBaseCommitted : 0u) |
                  (update.removal_follows ? wire::kForwardRemovalFollows : 0u) |
                  (update.held ? wire::kForwardHeld : 0u);
  wire::Update& inner = forward.update;
  inner.context = context_of(send.header, update.identity);
  inner.context.space_epoch = update.space_epoch;
  std::memcpy(inner.key, update.key.bytes.data(), sizeof inner.key);
  inner.kind = static_cast<uint8_t>(update.kind);
  inner.codec = update.attributes.codec;
  inner.tag_bytes = update.attributes.tag_bytes;
  inner.role = update.attributes.role;
  inner.flags = (update.attributes.flags & 1) != 0 ? static_cast<uint32_t>(wire::kUpdatePin) : 0u;
  inner.offset = update.offset_bytes;
  inner.length = update.length_bytes;
  inner.logical_length = update.attributes.logical_length_bytes;
  inner.expiry_ms = update.attributes.expiry_ms;
  std::memcpy(inner.tag, update.attributes.tag.data(), sizeof inner.tag);
  return forward;
}

bool update_of(const wire::Forward& forward, craq::PeerHeader* header, craq::Update* update) {
  const wire::Update& inner = forward.update;
  read_context(inner.context, forward.from, header, &update->identity);
  if (inner.kind < static_cast<uint8_t>(craq::UpdateKind::write) ||
      inner.kind > static_cast<uint8_t>(craq::UpdateKind::create) || inner.tag_bytes > kMaxTagBytes) {
    return false;
  }
  update->key = key_of(inner.key);
  update->version = from_wire(forward.version);
  update->base = from_wire(forward.base);
  update->floor = from_wire(forward.floor);
  update->space_epoch = inner.context.space_epoch;
  update->kind = static_cast<craq::UpdateKind>(inner.kind);
  update->offset_bytes = inner.offset;
  update->length_bytes = inner.length;
  update->attributes = attributes_of(inner);
  update->base_absent = (forward.flags & wire::kForwardBaseAbsent) != 0;
  update->base_committed = (forward.flags & wire::kForwardBaseCommitted) != 0;
  update->removal_follows = (forward.flags & wire::kForwardRemovalFollows) != 0;
  update->held = (forward.flags & wire::kForwardHeld) != 0;
  return true;
}

wire::Notice notice_of(const craq::SendNotice& send) {
  const craq::Notice& from = send.notice;
  wire::Notice notice{};
  notice.context = context_of(send.header, from.identity);
  notice.from = send.header.from.value;
  std::memcpy(notice.key, from.key.bytes.data(), sizeof notice.key);
  notice.version = to_wire(from.version);
  notice.other = to_wire(from.other);
  notice.number = from.number;
  notice.kind = static_cast<uint8_t>(from.type);
  notice.flag = from.flag ? 1 : 0;
  notice.outcome = static_cast<uint16_t>(from.outcome);
  return notice;
}

bool notice_of(const wire::Notice& notice, craq::PeerHeader* header, craq::Notice* out) {
  read_context(notice.context, notice.from, header, &out->identity);
  if (notice.kind < static_cast<uint8_t>(craq::NoticeType::held) ||
      notice.kind > static_cast<uint8_t>(craq::NoticeType::lease_grant) ||
      notice.outcome > static_cast<uint16_t>(Outcome::corrupt)) {
    return false;
  }
  out->type = static_cast<craq::NoticeType>(notice.kind);
  out->flag = notice.flag != 0;
  out->outcome = static_cast<Outcome>(notice.outcome);
  out->key = key_of(notice.key);
  out->version = from_wire(notice.version);
  out->other = from_wire(notice.other);
  out->number = notice.number;
  return true;
}

wire::Sync sync_of(const craq::SendSync& send) {
  wire::Sync sync{};
  sync.context = context_of(send.header, UpdateIdentity{});
  sync.from = send.header.from.value;
  return sync;
}

craq::PeerHeader header_of(const wire::Sync& sync) {
  craq::PeerHeader header;
  UpdateIdentity none;
  read_context(sync.context, sync.from, &header, &none);
  return header;
}

bool used_keys(const wire::Used& used, std::span<const uint8_t> var, std::vector<ChunkKey>* keys) {
  constexpr size_t kKeyBytes = sizeof(ChunkKey::bytes);
  if (used.count > wire::kMaxUsedKeys || var.size() != used.count * kKeyBytes) return false;
  keys->resize(used.count);
  for (size_t i = 0; i < used.count; i++) {
    std::memcpy((*keys)[i].bytes.data(), var.data() + i * kKeyBytes, kKeyBytes);
  }
  return true;
}

// What may overtake updates goes by the lane that never waits: `held` and `cancel` free the buffers
// that an update in front of them may be waiting for (the receiver remembers early ones).
bool follows_updates(craq::NoticeType type) {
  switch (type) {
    case craq::NoticeType::space_epoch:
    case craq::NoticeType::reconcile_answer:
    case craq::NoticeType::resent:
    case craq::NoticeType::invite:
      return true;
    case craq::NoticeType::held:
    case craq::NoticeType::cancel:
    case craq::NoticeType::ack:
    case craq::NoticeType::refusal:
    case craq::NoticeType::missing:
    case craq::NoticeType::query:
    case craq::NoticeType::answer:
    case craq::NoticeType::space_epoch_ack:
    case craq::NoticeType::reconcile:
    case craq::NoticeType::reconciled:
    case craq::NoticeType::ready:
    case craq::NoticeType::lease_ask:
    case craq::NoticeType::lease_grant:
      return false;
  }
  return false;
}

}  // namespace ffs::server
