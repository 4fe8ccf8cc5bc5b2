#include "io/null_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace ffs::io {

namespace {

bool word_is_zero(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word == 0;
}

constexpr uintptr_t kPageBytes = 64u << 10;

}  // namespace

void NullIo::remember(const void* memory, uint32_t length) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  for (uintptr_t page = begin / kPageBytes; page * kPageBytes < begin + length; page++)
    of_records_.insert(page);
}

void NullIo::make_zeros(uint8_t* memory, uint32_t length) const {
  uint64_t page = UINT64_MAX;
  bool of_records = false;
  for (uint32_t at = 0; at < length; at += kBlockBytes) {
    const uint32_t size = std::min(kBlockBytes, length - at);
    uint8_t* block = memory + at;
    if (reinterpret_cast<uintptr_t>(block) / kPageBytes != page) {
      page = reinterpret_cast<uintptr_t>(block) / kPageBytes;
      of_records = of_records_.contains(page);
    }
    if (!of_records && size >= 8 && word_is_zero(block) && word_is_zero(block + size - 8)) continue;
    std::memset(block, 0, size);
  }
}

Result<std::unique_ptr<NullIo>> NullIo::create(const Options& options) {
  std::unique_ptr<NullIo> io(new NullIo);
  std::string reason;
  FFS_TRY_STATUS(io->open(options, &reason));
  return io;
}

Status NullIo::make_null(File file, uint64_t from) {
  char path[40];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor(file));
  Null null;
  null.cached.reset(::open(path, O_RDWR | O_CLOEXEC));
  if (!null.cached.valid()) return Error::of(errno, "opening a null device's file without O_DIRECT");
  null.from = from;
  if (nulls_.size() <= static_cast<size_t>(file.index)) nulls_.resize(static_cast<size_t>(file.index) + 1);
  nulls_[static_cast<size_t>(file.index)] = std::move(null);
  return ok_status();
}

NullIo::Null* NullIo::null_of(File file) {
  const auto index = static_cast<size_t>(file.index);
  return index < nulls_.size() && nulls_[index].cached.valid() ? &nulls_[index] : nullptr;
}

void NullIo::remove_file(File file) {
  if (Null* null = null_of(file)) null->cached.reset();
  UringIo::remove_file(file);
}

void NullIo::end(Op* op, OpKind kind, uint32_t length, int64_t moved) {
  FFS_CHECK(op->done != nullptr);
  op->kind = kind;
  op->length = length;
  int32_t result = static_cast<int32_t>(moved);
  if (moved < 0) result = -errno;
  if (kind == OpKind::write && moved >= 0 && moved != length) result = -EIO;
  complete(op, result);
}

void NullIo::read(Op* op, File file, uint64_t offset, void* memory, uint32_t length, Region region) {
  Null* null = null_of(file);
  if (null == nullptr) return UringIo::read(op, file, offset, memory, length, region);
  if (offset < null->from) {
    FFS_CHECK(offset + length <= null->from);
    remember(memory, length);
    return end(op, OpKind::read, length,
               ::pread(null->cached.get(), memory, length, static_cast<off_t>(offset)));
  }
  if (!region.foreign) make_zeros(static_cast<uint8_t*>(memory), length);
  end(op, OpKind::read, length, length);
}

void NullIo::write(Op* op, File file, uint64_t offset, const void* memory, uint32_t length, Region region) {
  Null* null = null_of(file);
  if (null == nullptr) return UringIo::write(op, file, offset, memory, length, region);
  if (offset >= null->from) return end(op, OpKind::write, length, length);
  FFS_CHECK(offset + length <= null->from);
  remember(memory, length);
  end(op, OpKind::write, length, ::pwrite(null->cached.get(), memory, length, static_cast<off_t>(offset)));
}

void NullIo::datasync(Op* op, File file) {
  if (null_of(file) == nullptr) return UringIo::datasync(op, file);
  end(op, OpKind::datasync, 0, 0);
}

void NullIo::discard(Op* op, File file, uint64_t offset, uint64_t length) {
  Null* null = null_of(file);
  if (null == nullptr || offset < null->from) return UringIo::discard(op, file, offset, length);
  end(op, OpKind::discard, 0, 0);
}

}  // namespace ffs::io
