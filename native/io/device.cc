#include "io/device.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>

#include "base/fd.h"
#include "io/block_facts.h"
#include "io/io.h"

namespace ffs::io {

namespace {

Status fill_block_device(int fd, const struct stat& status, Device* device) {
  device->block_device = true;
  int sector = 0;
  if (::ioctl(fd, BLKGETSIZE64, &device->size_bytes) != 0 || ::ioctl(fd, BLKSSZGET, &sector) != 0)
    return Error::of(errno, "asking a block device for its size");
  device->sector_bytes = static_cast<uint32_t>(sector);
  const BlockFacts facts = block_facts(status.st_rdev);
  device->volatile_cache = facts.volatile_cache;
  device->discard_bytes = facts.discard_bytes;
  device->discard_granularity = facts.discard_granularity;
  return ok_status();
}

void fill_file(const struct stat& status, Device* device) {
  device->size_bytes = static_cast<uint64_t>(status.st_size);
  device->sector_bytes = 512;
  device->sparse = static_cast<uint64_t>(status.st_blocks) * 512 < device->size_bytes;
  if (!device->sparse) return;
  device->discard_bytes = UINT64_MAX;
  device->discard_granularity = kBlockBytes;
}

// All but fd.
Result<Device> facts_of(int fd) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return Error::of(errno, "stat of the device");
  Device device;
  if (S_ISBLK(status.st_mode)) {
    FFS_TRY_STATUS(fill_block_device(fd, status, &device));
  } else {
    fill_file(status, &device);
  }
  return device;
}

}  // namespace

namespace {

// A process that was killed with an io_uring keeps its files for a moment after it is gone: the
// kernel takes the ring apart in the background. So a device in use is asked for again.
uint64_t now_ms() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

template <typename Try>
int try_for_a_while(uint32_t wait_ms, Try attempt) {
  constexpr timespec kPause{0, 20'000'000};
  const uint64_t end = now_ms() + wait_ms;
  int error = attempt();
  while ((error == EBUSY || error == EWOULDBLOCK) && now_ms() < end) {
    ::nanosleep(&kPause, nullptr);
    error = attempt();
  }
  return error;
}

int lock_device(int fd, uint32_t wait_ms) {
  return try_for_a_while(wait_ms, [fd] { return ::flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno; });
}

// A block device is opened for writing even if it is read-only; only its writes would fail.
bool is_read_only(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  int read_only = 0;
  return fd.valid() && ::ioctl(fd.get(), BLKROGET, &read_only) == 0 && read_only != 0;
}

}  // namespace

std::string in_use(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0 || !S_ISBLK(status.st_mode)) return {};
  return user_of(status.st_rdev);
}

Result<Device> open_device(const std::string& path, Access access, uint32_t wait_ms) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return Error::of(errno, "no such device or file");
  bool block = S_ISBLK(status.st_mode);
  if (!block && !S_ISREG(status.st_mode))
    return Error::of(ENODEV, "neither a regular file nor a block device");
  if (block && access == Access::read_write && is_read_only(path))
    return Error::of(EROFS, "the device is read-only (blockdev --setrw makes it writable, if its disk is)");
  // O_EXCL on a block device refuses one that is mounted or claimed.
  const int flags =
      (access == Access::read_only ? O_RDONLY : O_RDWR) | O_DIRECT | O_CLOEXEC | (block ? O_EXCL : 0);
  Fd fd;
  int error = try_for_a_while(wait_ms, [&] {
    fd.reset(::open(path.c_str(), flags));
    return fd.valid() ? 0 : errno;
  });
  if (error == EINVAL) return Error::of(EINVAL, "the file system of this path has no O_DIRECT");
  if (error == EBUSY) return Error::of(EBUSY, "the device is in use (mounted or claimed)");
  if (error != 0) return Error::of(error, "opening the device");
  error = lock_device(fd.get(), wait_ms);
  if (error != 0)
    return Error::of(error == EWOULDBLOCK ? EBUSY : error, "the device is in use by another process");
  FFS_TRY(Device device, facts_of(fd.get()));
  device.fd = fd.release();
  return device;
}

Result<Device> describe_device(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return Error::of(errno, "no such device or file");
  if (!S_ISBLK(status.st_mode) && !S_ISREG(status.st_mode))
    return Error::of(ENODEV, "neither a regular file nor a block device");
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return Error::of(errno, "opening the device");
  return facts_of(fd.get());
}

void close_device(Device& device) {
  // Unlocked by name: an io_uring may hold the file for a while after it was closed (a flush that ran
  // on one of the kernel's workers gives it back late).
  if (device.fd >= 0) ::flock(device.fd, LOCK_UN);
  if (device.fd >= 0) ::close(device.fd);
  device.fd = -1;
}

namespace {

Status write_zeros(int fd, uint64_t from, uint64_t size_bytes) {
  constexpr size_t kPiece = 8u << 20;
  void* zeros = ::mmap(nullptr, kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (zeros == MAP_FAILED) return Error::of(errno, "memory for writing the device through");
  uint64_t at = from;
  int error = 0;
  while (at < size_bytes && error == 0) {
    size_t part = size_bytes - at < kPiece ? static_cast<size_t>(size_bytes - at) : kPiece;
    ssize_t rc = ::pwrite(fd, zeros, part, static_cast<off_t>(at));
    if (rc < 0 && errno != EINTR) error = errno;
    if (rc > 0) at += static_cast<uint64_t>(rc);
  }
  ::munmap(zeros, kPiece);
  if (error != 0) return Error::of(error, "writing the device through once");
  return ok_status();
}

Status fill(int fd, uint64_t from, uint64_t size_bytes, bool sparse) {
  if (::ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) return Error::of(errno, "sizing the device file");
  if (sparse) return ok_status();
  if (::fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(size_bytes - from)) != 0 &&
      errno != EOPNOTSUPP) {
    return Error::of(errno, errno == ENOSPC ? "the file system has no room for a device file of this size"
                                            : "allocating the device file");
  }
  FFS_TRY_STATUS(write_zeros(fd, from, size_bytes));
  if (::fsync(fd) != 0) return Error::of(errno, "syncing the device file");
  return ok_status();
}

}  // namespace

Status make_device_file(const std::string& path, uint64_t size_bytes, bool sparse, bool overwrite) {
  if (size_bytes == 0 || size_bytes % 4096 != 0) {
    return Error::of(EINVAL, "a device file's size is a multiple of 4096, not 0");
  }
  bool made = true;
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600));
  if (!fd.valid() && errno == EEXIST) {
    if (!overwrite) return Error::of(EEXIST, "the device file exists");
    made = false;
    fd.reset(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT));
  }
  if (!fd.valid()) {
    return Error::of(
        errno, errno == EINVAL ? "the file system of this path has no O_DIRECT" : "making the device file");
  }
  if (lock_device(fd.get(), kInUseWaitMs) != 0) return Error::of(EBUSY, "the device file is in use");
  Status filled = fill(fd.get(), 0, size_bytes, sparse);
  if (!filled.ok() && made) ::unlink(path.c_str());
  return filled;
}

Status extend_device_file(Device& device, uint64_t size_bytes) {
  if (device.block_device || size_bytes % kBlockBytes != 0 || size_bytes <= device.size_bytes)
    return Error::of(EINVAL, "a device file grows to a multiple of 4096 beyond its size");
  const uint64_t from = device.size_bytes / kBlockBytes * kBlockBytes;
  Status filled = fill(device.fd, from, size_bytes, device.sparse);
  if (filled.ok() && ::fsync(device.fd) != 0) filled = Error::of(errno, "syncing the device file");
  if (filled.ok()) {
    device.size_bytes = size_bytes;
  } else if (::ftruncate(device.fd, static_cast<off_t>(device.size_bytes)) != 0) {
    return Error::of(errno, "giving the device file its old size back");
  }
  return filled;
}

}  // namespace ffs::io
