// The capabilities of a client by a small id. Reading whether one has changed is free of locks, so
// that rings can look at each request. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/result.h"

namespace ffs::client {

constexpr uint32_t kMaxCapabilityBytes = 4096;

class CapabilityTable {
 public:
  // The id, from 1. EINVAL: fewer bytes than a Capability or too many; ENOSPC: a million are open.
  Result<uint32_t> add(const void* bytes, uint32_t length);
  Status renew(uint32_t id, const void* bytes, uint32_t length);  // ENOENT
  Status drop(uint32_t id);                                       // ENOENT

  // Which issue of the id is current: 0 if there is none, else unique in this table for ever.
  uint64_t issue(uint32_t id) const {
    if (id >= kBlocks * kBlockEntries) return 0;
    const Block* block = blocks_[id / kBlockEntries].load(std::memory_order_acquire);
    return block == nullptr ? 0 : block->issues[id % kBlockEntries].load(std::memory_order_acquire);
  }
  // Copies the bytes of the current issue, which is returned (0: dropped meanwhile).
  uint64_t copy(uint32_t id, std::vector<uint8_t>* out) const;
  // Grows with each drop, so that rings can close what is gone.
  uint64_t drops() const { return drops_.load(std::memory_order_acquire); }

 private:
  static constexpr uint32_t kBlockEntries = 256;
  static constexpr uint32_t kBlocks = 4096;
  struct Block {
    std::array<std::atomic<uint64_t>, kBlockEntries> issues{};
    std::array<std::vector<uint8_t>, kBlockEntries> bytes;
  };

  mutable std::mutex mutex_;  // of everything but reading issues
  std::array<std::atomic<Block*>, kBlocks> blocks_{};
  std::vector<std::unique_ptr<Block>> owned_;
  std::vector<uint32_t> free_;
  uint32_t next_id_ = 1;
  uint64_t last_issue_ = 0;
  std::atomic<uint64_t> drops_{0};
};

}  // namespace ffs::client
