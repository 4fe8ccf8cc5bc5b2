// The bytes of SendSync: messages of recovery, repair and comparison between members. Encoded and decoded
// here alone; docs/craq.md, Messages of recovery and repair, has the table and a worked example.
//
// A message is a head of 40 bytes, a fixed part by kind, and items (so many as the rest of the bytes
// holds). Little-endian, no padding. decode() checks all bounds and every field with a range, allocates
// nothing, and points into the bytes that it was given.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "craq/store_view.h"

namespace ffs::craq {

enum class SyncKind : uint8_t {
  // A session, source to target. Each takes effect once, by its number.
  begin = 1,    // drop your pendings and your retry table
  retries = 2,  // items: entries of the retry table
  epochs = 3,   // items: least epochs of spaces
  chunk = 4,    // key, chunk, payload; at most one retry item
  erase = 5,    // key; at most one retry item
  probe = 6,    // what became of that number?
  taken = 7,    // target to source: number, progress, outcome
  // A question about a range; in a session from its source, else (the scrubber) from the successor.
  compare = 8,  // key to last, count, digest: have you the same?
  same = 9,     // yes
  list = 10,    // no; items: what I have from `key` of the question to `last`
  // Repair: a copy of that version, please.
  fetch = 11,    // key, chunk.version
  fetched = 12,  // outcome; key, chunk, payload
};

// Names a session within a chain version. Zero in messages that belong to none.
struct SyncSession {
  uint32_t attempt = 0;  // from 1 on
  uint64_t source_incarnation = 0;
  uint64_t target_incarnation = 0;
  friend bool operator==(const SyncSession&, const SyncSession&) = default;
};

// Of a number, as the target sees it.
enum class Progress : uint8_t { none = 0, ended = 1, under_way = 2, lacking = 3 };

struct RetryItem {
  ClientId client;
  uint32_t channel = 0;
  RetryEntry entry;
};
struct EpochItem {
  uint64_t space = 0;
  uint64_t epoch = 0;
};
struct ListItem {
  ChunkKey key;
  Version version;
  uint64_t digest = 0;
};

constexpr size_t kSyncHeadBytes = 40;
constexpr size_t kRetryItemBytes = 64;
constexpr size_t kEpochItemBytes = 16;
constexpr size_t kListItemBytes = 48;
constexpr uint32_t kMaxSyncItems = 128;           // in one message
constexpr size_t kMaxSyncBytes = 8 * 1024 + 256;  // of one message, without its payload

// One struct for all kinds, as with Notice: each uses the fields that its line above names.
struct SyncMessage {
  SyncKind kind = SyncKind::begin;
  Progress progress = Progress::none;
  Outcome outcome = Outcome::ok;
  bool urgent = false;  // chunk: a client waits for it
  SyncSession session;
  uint64_t number = 0;  // of a transfer, a question, or the request that is answered
  uint64_t floor = 0;   // all numbers of transfers below it are resolved at the source
  ChunkKey key;         // compare: the first of the range
  ChunkKey last;        // compare: the last of the range; list: the last that the list covers
  uint32_t count = 0;
  uint64_t digest = 0;
  ChunkFacts chunk;
  std::span<const uint8_t> items;  // whole items of the size of this kind

  size_t retry_count() const { return items.size() / kRetryItemBytes; }
  size_t epoch_count() const { return items.size() / kEpochItemBytes; }
  size_t list_count() const { return items.size() / kListItemBytes; }
  RetryItem retry(size_t i) const;
  EpochItem epoch(size_t i) const;
  ListItem listed(size_t i) const;
};

// Items as they are sent.
class SyncItems {
 public:
  void add(const RetryItem& item);
  void add(const EpochItem& item);
  void add(const ListItem& item);
  std::span<const uint8_t> bytes() const { return bytes_; }
  uint32_t count() const { return count_; }

 private:
  std::vector<uint8_t> bytes_;
  uint32_t count_ = 0;
};

std::vector<uint8_t> encode(const SyncMessage& message);

// Nothing if the bytes aren't exactly one message. `items` points into `bytes`.
std::optional<SyncMessage> decode_sync(std::span<const uint8_t> bytes);

}  // namespace ffs::craq
