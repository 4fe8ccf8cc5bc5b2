#include "io/shadow_io.h"

#include <algorithm>
#include <cstring>

namespace ffs::io {

// A read of which some blocks were written here.
struct ShadowIo::Patched {
  Op op;
  ShadowIo* io;
  Op* asked;
  uint64_t offset;
  uint8_t* memory;
};

ShadowIo::~ShadowIo() {
  stop_helper();
}

bool ShadowIo::touches(uint64_t offset, uint32_t length) const {
  if (blocks_.empty()) return false;
  for (uint64_t at = offset / kBlockBytes; at * kBlockBytes < offset + length; at++) {
    if (blocks_.contains(at)) return true;
  }
  return false;
}

void ShadowIo::patch(uint64_t offset, uint8_t* memory, uint32_t length) const {
  for (uint32_t at = 0; at < length; at += kBlockBytes) {
    auto block = blocks_.find((offset + at) / kBlockBytes);
    if (block != blocks_.end())
      std::memcpy(memory + at, block->second->data(), std::min(kBlockBytes, length - at));
  }
}

void ShadowIo::read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) {
  FFS_CHECK(offset % kBlockBytes == 0);
  if (!touches(offset, length)) {
    under_.read(op, file, offset, memory, length, region);
    return;
  }
  auto patched = new Patched{{}, this, op, offset, static_cast<uint8_t*>(memory)};
  patched->op.owner = patched;
  patched->op.done = [](Op* done) {
    std::unique_ptr<Patched> self(static_cast<Patched*>(done->owner));
    if (done->result > 0) self->io->patch(self->offset, self->memory, static_cast<uint32_t>(done->result));
    self->io->complete(self->asked, done->result);
  };
  under_.read(&patched->op, file, offset, memory, length, region);
}

void ShadowIo::write(Op* op, File, uint64_t offset, const void* memory, uint32_t length, Region) {
  FFS_CHECK(op->done != nullptr && offset % kBlockBytes == 0 && length % kBlockBytes == 0);
  op->kind = OpKind::write;
  auto bytes = static_cast<const uint8_t*>(memory);
  for (uint32_t at = 0; at < length; at += kBlockBytes) {
    auto& block = blocks_[(offset + at) / kBlockBytes];
    if (block == nullptr) block = std::make_unique<Block>();
    std::memcpy(block->data(), bytes + at, kBlockBytes);
  }
  complete(op, static_cast<int32_t>(length));
}

void ShadowIo::datasync(Op* op, File) {
  op->kind = OpKind::datasync;
  complete(op, 0);
}

void ShadowIo::discard(Op* op, File, uint64_t, uint64_t) {
  op->kind = OpKind::discard;
  complete(op, 0);
}

void ShadowIo::poll_add(Poll*, int, uint32_t) {
  FFS_CHECK(false);
}

void ShadowIo::poll_remove(Poll*) {
  FFS_CHECK(false);
}

int ShadowIo::run_once(int64_t timeout_us) {
  // What the helper thread hands back wakes this Io, not the one under it: a short wait finds it.
  constexpr int64_t kLongestWaitUs = 1000;
  take_posted();
  int64_t wait = has_ready() || timeout_us == 0 ? 0 : kLongestWaitUs;
  if (timeout_us > 0) wait = std::min(wait, timeout_us);
  const int ran = under_.run_once(wait);
  take_posted();
  return ran + run_ready();
}

}  // namespace ffs::io
