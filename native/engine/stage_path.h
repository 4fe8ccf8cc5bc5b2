// Shared by the files of an update: which path it takes, and small arithmetic (stage.cc).
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/chunk_store.h"
#include "engine/format.h"

namespace ffs::engine {

enum StagePath : uint8_t { kFresh = 1, kAppend, kDeferred, kRebuild, kLength, kShrink };

constexpr uint32_t kPieceBytes = 256 * 1024;         // of a rebuild: whole granules
constexpr size_t kMaxChunkRecordBytes = 150 * 1024;  // overlays of a chunk stay under this (a slice holds it)
constexpr size_t kMaxPendings = 64;

inline uint32_t align_up(uint32_t n) {
  return static_cast<uint32_t>(round_up(n, kBlock));
}
inline uint32_t align_down(uint32_t n) {
  return n & ~static_cast<uint32_t>(kBlock - 1);
}
inline uint32_t clamp_to(uint32_t value, uint32_t from, uint32_t width) {
  return value <= from ? 0 : std::min(value - from, width);
}

// Whether data for chunk offset `offset` lies in memory as a device write needs it.
inline bool aligned_for(const StageOp& op, uint32_t offset) {
  return (reinterpret_cast<uintptr_t>(op.data) - offset) % kBlock == 0;
}

inline uint32_t write_offset(const StageOp& op) {
  return op.kind == UpdateKind::write ? op.offset : 0;
}
inline uint32_t data_bytes(const StageOp& op) {
  return op.kind == UpdateKind::write || op.kind == UpdateKind::replace ? op.length : 0;
}

}  // namespace ffs::engine
