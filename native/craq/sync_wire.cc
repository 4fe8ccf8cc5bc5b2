#include "craq/sync_wire.h"

#include "base/check.h"
#include "base/cursor.h"

namespace ffs::craq {

namespace {

constexpr uint16_t kLastOutcome = static_cast<uint16_t>(Outcome::corrupt);

// What follows the head, before the items.
size_t fixed_bytes(SyncKind kind) {
  switch (kind) {
    case SyncKind::begin:
    case SyncKind::retries:
    case SyncKind::epochs:
    case SyncKind::probe:
    case SyncKind::taken:
    case SyncKind::same:
      return 0;
    case SyncKind::chunk:
    case SyncKind::fetched:
      return 80;
    case SyncKind::erase:
    case SyncKind::list:
      return 24;
    case SyncKind::compare:
      return 64;
    case SyncKind::fetch:
      return 40;
  }
  return 0;
}

// Of one item; 0 for kinds that have none.
size_t item_bytes(SyncKind kind) {
  switch (kind) {
    case SyncKind::retries:
    case SyncKind::chunk:
    case SyncKind::erase:
      return kRetryItemBytes;
    case SyncKind::epochs:
      return kEpochItemBytes;
    case SyncKind::list:
      return kListItemBytes;
    default:
      return 0;
  }
}

size_t max_items(SyncKind kind) {
  const bool single = kind == SyncKind::chunk || kind == SyncKind::erase;
  return single ? 1 : kMaxSyncItems;
}

void put_retry(Writer& out, const RetryItem& item) {
  out.u64(item.client.value);
  out.u32(item.channel);
  out.u16(static_cast<uint16_t>(item.entry.outcome));
  out.u8(static_cast<uint8_t>(item.entry.state));
  out.u8(0);
  out.u64(item.entry.sequence);
  out.key(item.entry.key);
  out.version(item.entry.version);
}

// False if a field is out of its range.
bool get_retry(Reader& in, RetryItem* item) {
  item->client = ClientId{in.u64()};
  item->channel = in.u32();
  const uint16_t outcome = in.u16();
  const uint8_t state = in.u8();
  const uint8_t zero = in.u8();
  item->entry.outcome = static_cast<Outcome>(outcome);
  item->entry.state = static_cast<RetryState>(state);
  item->entry.sequence = in.u64();
  item->entry.key = in.key();
  item->entry.version = in.version();
  const bool known =
      state == static_cast<uint8_t>(RetryState::done) || state == static_cast<uint8_t>(RetryState::refused);
  return in.ok() && known && zero == 0 && outcome <= kLastOutcome && item->client.value != 0;
}

void put_chunk(Writer& out, const ChunkFacts& chunk) {
  const Attributes& a = chunk.attributes;
  out.version(chunk.version);
  out.u32(chunk.length_bytes);
  out.u32(a.flags);
  out.u32(a.logical_length_bytes);
  out.u8(a.tag_bytes);
  out.u8(a.codec);
  out.u8(a.role);
  out.u8(a.checksum_kind);
  out.u64(a.expiry_ms);
  out.bytes(a.tag.data(), a.tag.size());
}

bool get_chunk(Reader& in, ChunkFacts* chunk) {
  Attributes& a = chunk->attributes;
  chunk->version = in.version();
  chunk->length_bytes = in.u32();
  a.flags = in.u32();
  a.logical_length_bytes = in.u32();
  a.tag_bytes = in.u8();
  a.codec = in.u8();
  a.role = in.u8();
  a.checksum_kind = in.u8();
  a.expiry_ms = in.u64();
  a.tag = in.value<std::array<uint8_t, kMaxTagBytes>>();
  return in.ok() && chunk->length_bytes <= kMaxChunkBytes && a.tag_bytes <= kMaxTagBytes;
}

void put_fixed(Writer& out, const SyncMessage& m) {
  switch (m.kind) {
    case SyncKind::chunk:
    case SyncKind::fetched:
      out.key(m.key);
      return put_chunk(out, m.chunk);
    case SyncKind::erase:
      return out.key(m.key);
    case SyncKind::list:
      return out.key(m.last);
    case SyncKind::compare:
      out.key(m.key);
      out.key(m.last);
      out.u32(m.count);
      out.u32(0);
      return out.u64(m.digest);
    case SyncKind::fetch:
      out.key(m.key);
      return out.version(m.chunk.version);
    default:
      return;
  }
}

bool get_fixed(Reader& in, SyncMessage* m) {
  switch (m->kind) {
    case SyncKind::chunk:
      m->key = in.key();
      return get_chunk(in, &m->chunk) && !m->chunk.version.none();
    case SyncKind::fetched:
      m->key = in.key();
      return get_chunk(in, &m->chunk);
    case SyncKind::erase:
      m->key = in.key();
      return in.ok();
    case SyncKind::list:
      m->last = in.key();
      return in.ok();
    case SyncKind::compare: {
      m->key = in.key();
      m->last = in.key();
      m->count = in.u32();
      const uint32_t zero = in.u32();
      m->digest = in.u64();
      return in.ok() && zero == 0 && m->key <= m->last;
    }
    case SyncKind::fetch:
      m->key = in.key();
      m->chunk.version = in.version();
      return in.ok() && !m->chunk.version.none();
    default:
      return in.ok();
  }
}

bool items_valid(const SyncMessage& m) {
  const size_t size = item_bytes(m.kind);
  if (size == 0) return m.items.empty();
  if (m.items.size() % size != 0 || m.items.size() / size > max_items(m.kind)) return false;
  if (size != kRetryItemBytes) return true;
  Reader in(m.items);
  while (in.left() > 0) {
    RetryItem item;
    if (!get_retry(in, &item)) return false;
  }
  return in.ok();
}

void append(std::vector<uint8_t>& to, const uint8_t* from, size_t size) {
  to.insert(to.end(), from, from + size);
}

}  // namespace

RetryItem SyncMessage::retry(size_t i) const {
  FFS_CHECK(i < retry_count());
  Reader in(items.subspan(i * kRetryItemBytes, kRetryItemBytes));
  RetryItem item;
  FFS_CHECK(get_retry(in, &item));
  return item;
}

EpochItem SyncMessage::epoch(size_t i) const {
  FFS_CHECK(i < epoch_count());
  Reader in(items.subspan(i * kEpochItemBytes, kEpochItemBytes));
  EpochItem item;
  item.space = in.u64();
  item.epoch = in.u64();
  return item;
}

ListItem SyncMessage::listed(size_t i) const {
  FFS_CHECK(i < list_count());
  Reader in(items.subspan(i * kListItemBytes, kListItemBytes));
  ListItem item;
  item.key = in.key();
  item.version = in.version();
  item.digest = in.u64();
  return item;
}

void SyncItems::add(const RetryItem& item) {
  uint8_t bytes[kRetryItemBytes];
  Writer out(bytes, sizeof bytes);
  put_retry(out, item);
  append(bytes_, bytes, out.size());
  count_++;
}

void SyncItems::add(const EpochItem& item) {
  uint8_t bytes[kEpochItemBytes];
  Writer out(bytes, sizeof bytes);
  out.u64(item.space);
  out.u64(item.epoch);
  append(bytes_, bytes, out.size());
  count_++;
}

void SyncItems::add(const ListItem& item) {
  uint8_t bytes[kListItemBytes];
  Writer out(bytes, sizeof bytes);
  out.key(item.key);
  out.version(item.version);
  out.u64(item.digest);
  append(bytes_, bytes, out.size());
  count_++;
}

std::vector<uint8_t> encode(const SyncMessage& m) {
  std::vector<uint8_t> bytes(kSyncHeadBytes + fixed_bytes(m.kind) + m.items.size());
  FFS_CHECK(bytes.size() <= kMaxSyncBytes && items_valid(m));
  Writer out(bytes);
  out.u8(static_cast<uint8_t>(m.kind));
  out.u8(m.kind == SyncKind::chunk ? m.urgent : static_cast<uint8_t>(m.progress));
  out.u16(static_cast<uint16_t>(m.outcome));
  out.u32(m.session.attempt);
  out.u64(m.session.source_incarnation);
  out.u64(m.session.target_incarnation);
  out.u64(m.number);
  out.u64(m.floor);
  put_fixed(out, m);
  out.bytes(m.items.data(), m.items.size());
  FFS_CHECK(out.ok() && out.left() == 0);
  return bytes;
}

std::optional<SyncMessage> decode_sync(std::span<const uint8_t> bytes) {
  Reader in(bytes);
  SyncMessage m;
  const uint8_t kind = in.u8();
  const uint8_t progress = in.u8();  // chunk: urgent
  const uint16_t outcome = in.u16();
  m.session.attempt = in.u32();
  m.session.source_incarnation = in.u64();
  m.session.target_incarnation = in.u64();
  m.number = in.u64();
  m.floor = in.u64();
  if (!in.ok() || kind < static_cast<uint8_t>(SyncKind::begin) ||
      kind > static_cast<uint8_t>(SyncKind::fetched) || outcome > kLastOutcome ||
      progress > static_cast<uint8_t>(Progress::lacking) || bytes.size() > kMaxSyncBytes) {
    return std::nullopt;
  }
  m.kind = static_cast<SyncKind>(kind);
  if (m.kind == SyncKind::chunk) {
    if (progress > 1) return std::nullopt;
    m.urgent = progress == 1;
  } else {
    m.progress = static_cast<Progress>(progress);
  }
  m.outcome = static_cast<Outcome>(outcome);
  if (!get_fixed(in, &m)) return std::nullopt;
  m.items = in.bytes(in.left());
  if (!in.ok() || !items_valid(m)) return std::nullopt;
  return m;
}

}  // namespace ffs::craq
