// The messages of recovery and repair: any bytes. What is accepted has all its fields in range, its items
// inside the bytes, and encodes to the very bytes that it came from.
#include <algorithm>

#include "base/check.h"
#include "craq/sync_wire.h"
#include "fuzz/fuzz.h"

using namespace ffs;
using namespace ffs::craq;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> bytes(data, data + size);
  const std::optional<SyncMessage> m = decode_sync(bytes);
  if (!m.has_value()) return 0;
  FFS_CHECK(m->chunk.length_bytes <= kMaxChunkBytes && m->chunk.attributes.tag_bytes <= kMaxTagBytes);
  FFS_CHECK(m->items.size() <= bytes.size() && m->key.bytes.size() == 24);
  const bool retries =
      m->kind == SyncKind::retries || m->kind == SyncKind::chunk || m->kind == SyncKind::erase;
  for (size_t i = 0; retries && i < m->retry_count(); i++) FFS_CHECK(m->retry(i).client.value != 0);
  for (size_t i = 0; m->kind == SyncKind::epochs && i < m->epoch_count(); i++) (void)m->epoch(i);
  for (size_t i = 0; m->kind == SyncKind::list && i < m->list_count(); i++) (void)m->listed(i);
  const std::vector<uint8_t> again = encode(*m);
  FFS_CHECK(again == bytes);
  return 0;
}

std::vector<std::vector<uint8_t>> fuzz::seeds() {
  std::vector<std::vector<uint8_t>> out;
  for (uint8_t kind = 1; kind <= 12; kind++) {
    for (uint32_t items : {0u, 1u, 3u, 128u}) {
      SyncMessage m;
      m.kind = static_cast<SyncKind>(kind);
      m.session = {7, 8, 9};
      m.number = 5;
      m.last.bytes.fill(0xff);
      m.chunk.version = Version{{1, 2}, 3};
      m.chunk.length_bytes = 100;
      SyncItems list;
      for (uint32_t i = 0; i < items; i++) {
        if (m.kind == SyncKind::retries ||
            ((m.kind == SyncKind::chunk || m.kind == SyncKind::erase) && i < 1)) {
          list.add(RetryItem{ClientId{i + 1}, 2, RetryEntry{3, {}, m.chunk.version, RetryState::done}});
        }
        if (m.kind == SyncKind::epochs) list.add(EpochItem{i, 4});
        if (m.kind == SyncKind::list) list.add(ListItem{{}, m.chunk.version, i});
      }
      m.items = list.bytes();
      out.push_back(encode(m));
    }
  }
  return out;
}
