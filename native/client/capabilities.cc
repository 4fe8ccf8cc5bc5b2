#include "client/capabilities.h"

#include <cstring>

#include "ffs/wire.h"

namespace ffs::client {

namespace {

Status check_bytes(const void* bytes, uint32_t length) {
  if (bytes == nullptr || length < sizeof(wire::Capability)) {
    return Error::of(EINVAL, "a capability has at least 88 bytes");
  }
  if (length > kMaxCapabilityBytes) return Error::of(EINVAL, "a capability has at most 4096 bytes");
  return ok_status();
}

}  // namespace

Result<uint32_t> CapabilityTable::add(const void* bytes, uint32_t length) {
  FFS_TRY_STATUS(check_bytes(bytes, length));
  std::lock_guard lock(mutex_);
  uint32_t id;
  if (!free_.empty()) {
    id = free_.back();
    free_.pop_back();
  } else {
    if (next_id_ >= kBlocks * kBlockEntries)
      return Error::of(ENOSPC, "a million capabilities are open: close files");
    id = next_id_++;
  }
  Block* block = blocks_[id / kBlockEntries].load(std::memory_order_relaxed);
  if (block == nullptr) {
    owned_.push_back(std::make_unique<Block>());
    block = owned_.back().get();
    blocks_[id / kBlockEntries].store(block, std::memory_order_release);
  }
  const auto* from = static_cast<const uint8_t*>(bytes);
  block->bytes[id % kBlockEntries].assign(from, from + length);
  block->issues[id % kBlockEntries].store(++last_issue_, std::memory_order_release);
  return id;
}

Status CapabilityTable::renew(uint32_t id, const void* bytes, uint32_t length) {
  FFS_TRY_STATUS(check_bytes(bytes, length));
  std::lock_guard lock(mutex_);
  if (issue(id) == 0) return Error::of(ENOENT, "no such capability id");
  Block* block = blocks_[id / kBlockEntries].load(std::memory_order_relaxed);
  const auto* from = static_cast<const uint8_t*>(bytes);
  block->bytes[id % kBlockEntries].assign(from, from + length);
  block->issues[id % kBlockEntries].store(++last_issue_, std::memory_order_release);
  return ok_status();
}

Status CapabilityTable::drop(uint32_t id) {
  std::lock_guard lock(mutex_);
  if (issue(id) == 0) return Error::of(ENOENT, "no such capability id");
  Block* block = blocks_[id / kBlockEntries].load(std::memory_order_relaxed);
  block->bytes[id % kBlockEntries].clear();
  block->issues[id % kBlockEntries].store(0, std::memory_order_release);
  free_.push_back(id);
  drops_.fetch_add(1, std::memory_order_release);
  return ok_status();
}

uint64_t CapabilityTable::copy(uint32_t id, std::vector<uint8_t>* out) const {
  std::lock_guard lock(mutex_);
  const uint64_t current = issue(id);
  if (current == 0) return 0;
  const Block* block = blocks_[id / kBlockEntries].load(std::memory_order_relaxed);
  *out = block->bytes[id % kBlockEntries];
  return current;
}

}  // namespace ffs::client
