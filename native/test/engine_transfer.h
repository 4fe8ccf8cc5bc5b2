// What tests of transfers ask of a store by hand: installs, erases, resets, releases, and what they see.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine_harness.h"

namespace ffs::engine::testing {

inline const TargetId kTarget(Harness::kTarget);
inline const TargetId kOther(78);

struct Plain : StoreOp {
  bool finished = false;
  Plain() {
    owner = &finished;
    done = [](StoreOp* op) { *static_cast<bool*>(op->owner) = true; };
  }
};

struct Install : InstallOp {
  bool finished = false;
  Laid laid;
  Install(uint64_t chunk, Version the_version, const std::vector<uint8_t>& bytes, Version over = {})
      : laid(0, bytes) {
    target = kTarget;
    key = key_of(chunk);
    version = the_version;
    only_over = over;
    length = static_cast<uint32_t>(bytes.size());
    data = bytes.empty() ? nullptr : laid.data;
    tail_padded = true;
    owner = &finished;
    done = [](StoreOp* op) { *static_cast<bool*>(op->owner) = true; };
  }
};

inline int install(Harness& h, uint64_t chunk, Version version, const std::vector<uint8_t>& bytes,
                   Version over = {}) {
  auto op = std::make_unique<Install>(chunk, version, bytes, over);
  h.store->install(op.get());
  h.run_until(op->finished);
  return op->error;
}

template <typename Start>
inline int waited(Harness& h, Start start) {
  Plain op;
  start(&op);
  h.run_until(op.finished);
  return op.error;
}
inline int erase(Harness& h, uint64_t chunk) {
  return waited(h, [&](StoreOp* op) { h.store->erase(kTarget, key_of(chunk), op); });
}
inline int reset(Harness& h, TargetId target = kTarget) {
  return waited(h, [&](StoreOp* op) { h.store->reset_target(target, op); });
}
inline int release(Harness& h, TargetId target = kTarget) {
  return waited(h, [&](StoreOp* op) { h.store->release_target(target, op); });
}

inline uint64_t digest_of(Harness& h, uint64_t chunk, TargetId target = kTarget) {
  ChunkInfo info;
  uint64_t digest = 0;
  REQUIRE(h.store->digest_at_or_after(target, key_of(chunk), &info, &digest));
  REQUIRE(info.key == key_of(chunk));
  return digest;
}

inline void reopen(Harness& h) {
  h.close();
  h.open();
  CHECK(h.store->check_consistency() == "");
}

// Flips a bit of the stored bytes, wherever the committed version lies: found by its content.
inline void damage(Harness& h, const std::vector<uint8_t>& content, uint32_t at) {
  std::vector<uint8_t> block(kBlock);
  const uint32_t from = at / kBlock * kBlock;
  uint64_t hits = 0;
  for (uint64_t offset = 0; offset < h.io->size_bytes(); offset += kBlock) {
    h.io->image().read(offset, block.data(), kBlock);
    if (std::memcmp(block.data(), content.data() + from, std::min<size_t>(kBlock, content.size() - from)) !=
        0)
      continue;
    block[at - from] ^= 0x10;
    h.io->image().write(offset, block.data(), kBlock);
    hits++;
  }
  REQUIRE(hits >= 1);
}

struct Discard final : Sink {
  int put(uint32_t, const uint8_t*, uint32_t) override { return 0; }
};

// As the scrubber reads: everything checked, nothing kept.
inline int verify(Harness& h, uint64_t chunk, Version version, uint32_t length) {
  auto op = std::make_unique<ReadOp>();
  Discard nowhere;
  bool done = false;
  op->target = kTarget;
  op->key = key_of(chunk);
  op->at_least = version;
  op->exact_version = true;
  op->verify_whole = true;
  op->length = length;
  op->sink = &nowhere;
  op->owner = &done;
  op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  h.store->read(op.get());
  h.run_until(done);
  return op->error;
}

struct Retries final : RetryVisitor {
  std::map<std::pair<uint64_t, uint32_t>, RetryEntry> entries;
  void visit(ClientId client, ChainId chain, uint32_t channel, const RetryEntry& entry) override {
    CHECK(chain == ChainId(3));
    entries[{client.value, channel}] = entry;
  }
};
struct Spaces final : SpaceEpochVisitor {
  std::map<uint64_t, uint64_t> epochs;
  void visit(uint64_t space, const SpaceEpoch& epoch) override { epochs[space] = epoch.least_epoch; }
};

inline size_t retries(Harness& h, TargetId target = kTarget) {
  Retries all;
  h.store->each_retry(target, all);
  return all.entries.size();
}

inline int write_as(Harness& h, uint64_t key, Version version, Version base,
                    const std::vector<uint8_t>& bytes, uint32_t channel, TargetId target = kTarget) {
  auto op = std::make_unique<StageOp>();
  Laid laid(0, bytes);
  bool done = false;
  op->target = target;
  op->key = key_of(key);
  op->version = version;
  op->base = base;
  op->kind = UpdateKind::replace;
  op->length = static_cast<uint32_t>(bytes.size());
  op->data = laid.data;
  op->tail_padded = true;
  op->identity = {ClientId(5), channel, 1};
  op->chain = ChainId(3);
  op->owner = &done;
  op->done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  h.store->stage(op.get());
  h.run_until(done);
  return op->error;
}

}  // namespace ffs::engine::testing
