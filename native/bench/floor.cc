#include "bench/floor.h"

#include <sys/mman.h>
#include <time.h>

#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/ids.h"

namespace ffs::bench {

uint64_t now_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

Status BlockMemory::allocate(size_t bytes) {
  constexpr size_t kHuge = 2u << 20;
  reset();
  mapped_ = (bytes + kHuge - 1) / kHuge * kHuge + kHuge;
  void* mapping = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return Error::of(errno, "memory for the blocks of a benchmark");
  mapping_ = mapping;
  data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapping) + kHuge - 1) / kHuge * kHuge);
  size_ = bytes;
  ::madvise(data_, mapped_ - kHuge, MADV_HUGEPAGE);  // a wish
  uint64_t x = 1;
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    x = mix64(x + i);
    std::memcpy(data_ + i, &x, 8);
  }
  return ok_status();
}

void BlockMemory::reset() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_);
  mapping_ = nullptr;
  data_ = nullptr;
  size_ = 0;
}

namespace {

class CopyFloor final : public Floor {
 public:
  explicit CopyFloor(const FloorOptions& options)
      : block_(options.block_bytes),
        crc_(options.crc),
        from_(options.region_bytes, 1),
        to_(options.region_bytes, 2) {}

  Result<FloorCount> run(uint32_t duration_ms) override {
    FloorCount count;
    const uint64_t begin = now_ns();
    const uint64_t end = begin + duration_ms * 1000000ull;
    uint64_t now = begin;
    while (now < end) {
      if (at_ + block_ > from_.size()) at_ = 0;
      if (crc_) {
        sum_ = sum_ ^ crc32c_copy(to_.data() + at_, from_.data() + at_, block_);
      } else {
        std::memcpy(to_.data() + at_, from_.data() + at_, block_);
      }
      at_ += block_;
      count.blocks++;
      now = now_ns();
    }
    count.elapsed_ns = now - begin;
    return count;
  }

 private:
  size_t block_;
  bool crc_;
  std::vector<uint8_t> from_, to_;
  size_t at_ = 0;
  volatile uint32_t sum_ = 0;  // so that the checksum can't be optimised away
};

}  // namespace

Result<std::unique_ptr<Floor>> open_copy_floor(const FloorOptions& options) {
  return std::unique_ptr<Floor>(std::make_unique<CopyFloor>(options));
}

Result<std::unique_ptr<Floor>> open_floor(const FloorOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes > (256u << 20)) {
    return Error::of(EINVAL, "block_bytes must be from 1 to 256 MiB");
  }
  if (options.depth == 0 || options.depth > 4096) return Error::of(EINVAL, "depth must be from 1 to 4096");
  const bool sends = options.op == FloorOp::kSocket || options.op == FloorOp::kMessage;
  if (!sends && options.region_bytes < options.block_bytes) {
    return Error::of(EINVAL, "region_bytes must hold at least one block");
  }
  switch (options.op) {
    case FloorOp::kRead:
    case FloorOp::kWrite:
      return open_device_floor(options);
    case FloorOp::kSocket:
      return open_socket_floor(options);
    case FloorOp::kMessage:
      return open_message_floor(options);
    case FloorOp::kCopy:
      return open_copy_floor(options);
  }
  return Error::of(EINVAL, "op must be 0 read, 1 write, 2 socket, 3 copy or 4 message");
}

}  // namespace ffs::bench
