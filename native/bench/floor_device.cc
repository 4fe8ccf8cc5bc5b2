// The raw device: io_uring, O_DIRECT, a registered file and registered buffers, one thread - what any
// user-space store must go through at least.
#include <fcntl.h>
#include <liburing.h>

#include <algorithm>
#include <vector>

#include "base/crc32c.h"
#include "base/fd.h"
#include "base/ids.h"
#include "bench/floor.h"

namespace ffs::bench {

namespace {

constexpr uint64_t kSyncData = ~0ull;  // user_data of an fdatasync

class DeviceFloor final : public Floor {
 public:
  explicit DeviceFloor(const FloorOptions& options) : options_(options) {}
  ~DeviceFloor() override {
    if (ring_ready_) io_uring_queue_exit(&ring_);
  }

  Status open() {
    if (options_.block_bytes % 512 != 0 || options_.region_offset % 512 != 0) {
      return Error::of(EINVAL, "O_DIRECT needs block_bytes and region_offset that are multiples of 512");
    }
    const int mode = options_.op == FloorOp::kWrite ? O_RDWR : O_RDONLY;
    file_.reset(::open(options_.path.c_str(), mode | O_DIRECT | O_CLOEXEC));
    if (!file_.valid()) return Error::of(errno, "opening the floor's device");
    const off_t size = ::lseek(file_.get(), 0, SEEK_END);
    if (size < 0) return Error::of(errno, "size of the floor's device");
    if (options_.region_offset + options_.region_bytes > static_cast<uint64_t>(size)) {
      return Error::of(EINVAL, "the floor's region reaches over the end of its device");
    }
    FFS_TRY_STATUS(memory_.allocate(size_t{options_.depth} * options_.block_bytes));
    return open_ring();
  }

  Result<FloorCount> run(uint32_t duration_ms) override {
    FloorCount count;
    const uint64_t begin = now_ns();
    const uint64_t end = begin + duration_ms * 1000000ull;
    uint32_t in_flight = 0;
    for (uint32_t slot = 0; slot < options_.depth; slot++) prepare(slot), in_flight++;
    bool more = true;
    while (in_flight > 0) {
      const int rc = io_uring_submit_and_wait(&ring_, 1);
      if (rc < 0 && rc != -EINTR) return Error::of(-rc, "io_uring_enter");
      more = more && now_ns() < end;
      io_uring_cqe* entries[256];
      const unsigned got = io_uring_peek_batch_cqe(&ring_, entries, 256);
      for (unsigned i = 0; i < got; i++) {
        in_flight--;
        FFS_TRY_STATUS(finish(*entries[i], more, &count, &in_flight));
      }
      io_uring_cq_advance(&ring_, got);
    }
    count.elapsed_ns = now_ns() - begin;
    return count;
  }

 private:
  uint8_t* block(uint32_t slot) { return memory_.data() + size_t{slot} * options_.block_bytes; }

  Status open_ring() {
    const unsigned entries = options_.depth + 16;
    int rc = io_uring_queue_init(entries, &ring_, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (rc == -EINVAL) rc = io_uring_queue_init(entries, &ring_, 0);
    if (rc < 0) return Error::of(-rc, "io_uring_setup");
    ring_ready_ = true;
    const int fd = file_.get();
    rc = io_uring_register_files(&ring_, &fd, 1);
    if (rc < 0) return Error::of(-rc, "registering the floor's file");
    const iovec whole{memory_.data(), memory_.size()};
    fixed_ = memory_.size() <= (1ull << 30) && io_uring_register_buffers(&ring_, &whole, 1) == 0;
    return ok_status();
  }

  uint64_t next_offset() {
    const uint64_t blocks = options_.region_bytes / options_.block_bytes;
    const uint64_t index =
        options_.random ? mix64(++counter_ * 0x9e3779b97f4a7c15ull) % blocks : counter_++ % blocks;
    return options_.region_offset + index * options_.block_bytes;
  }

  void prepare(uint32_t slot) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    FFS_CHECK(entry != nullptr);
    const uint64_t offset = next_offset();
    const bool write = options_.op == FloorOp::kWrite;
    if (write && options_.crc) sum_ = sum_ ^ crc32c(block(slot), options_.block_bytes);
    if (fixed_ && write)
      io_uring_prep_write_fixed(entry, 0, block(slot), options_.block_bytes, offset, 0);
    else if (fixed_)
      io_uring_prep_read_fixed(entry, 0, block(slot), options_.block_bytes, offset, 0);
    else if (write)
      io_uring_prep_write(entry, 0, block(slot), options_.block_bytes, offset);
    else
      io_uring_prep_read(entry, 0, block(slot), options_.block_bytes, offset);
    entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, slot);
  }

  Status finish(const io_uring_cqe& done, bool more, FloorCount* count, uint32_t* in_flight) {
    if (done.res < 0) return Error::of(-done.res, "the floor's device");
    if (done.user_data == kSyncData) return ok_status();
    if (static_cast<uint32_t>(done.res) != options_.block_bytes)
      return Error::of(EIO, "a short transfer of the floor");
    const auto slot = static_cast<uint32_t>(done.user_data);
    if (options_.op == FloorOp::kRead && options_.crc)
      sum_ = sum_ ^ crc32c(block(slot), options_.block_bytes);
    count->blocks++;
    if (options_.fsync_every > 0 && ++unsynced_ >= options_.fsync_every) {
      unsynced_ = 0;
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      FFS_CHECK(entry != nullptr);
      io_uring_prep_fsync(entry, 0, IORING_FSYNC_DATASYNC);
      entry->flags |= IOSQE_FIXED_FILE;
      io_uring_sqe_set_data64(entry, kSyncData);
      (*in_flight)++;
    }
    if (more) prepare(slot), (*in_flight)++;
    return ok_status();
  }

  FloorOptions options_;
  Fd file_;
  io_uring ring_{};
  bool ring_ready_ = false;
  bool fixed_ = false;
  BlockMemory memory_;
  uint64_t counter_ = 0;
  uint32_t unsynced_ = 0;
  volatile uint32_t sum_ = 0;  // so that the checksum can't be optimised away
};

}  // namespace

Result<std::unique_ptr<Floor>> open_device_floor(const FloorOptions& options) {
  auto floor = std::make_unique<DeviceFloor>(options);
  FFS_TRY_STATUS(floor->open());
  return std::unique_ptr<Floor>(std::move(floor));
}

}  // namespace ffs::bench
