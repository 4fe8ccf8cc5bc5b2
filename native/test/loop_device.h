// A block device over a file: a loop device with direct I/O and sectors of a given size. Root only. It goes
// away by itself with the last descriptor, so also when the test dies.
#pragma once

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "base/fd.h"

namespace ffs::testing {

// Memory where that takes O_DIRECT, so that tests don't wait for a disk, else the working directory.
inline std::string fast_directory() {
  const std::string probe = "/dev/shm/ffs-direct." + std::to_string(::getpid());
  Fd fd(::open(probe.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
  ::unlink(probe.c_str());
  return fd.valid() ? "/dev/shm" : ".";
}

class LoopDevice {
 public:
  // `why_not()` says why there is none.
  LoopDevice(const std::string& file_path, uint64_t size_bytes, uint32_t sector_bytes)
      : file_path_(file_path) {
    ::unlink(file_path.c_str());
    Fd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    file_.reset(::open(file_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600));
    if (!control.valid() || !file_.valid() || ::ftruncate(file_.get(), static_cast<off_t>(size_bytes)) != 0) {
      why_not_ = std::string("no loop devices here: ") + std::strerror(errno);
      return;
    }
    // Between asking for a free one and taking it somebody else may take it.
    for (int attempt = 0; attempt < 20 && !held_.valid(); attempt++) {
      const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
      path_ = "/dev/loop" + std::to_string(number);
      Fd loop(::open(path_.c_str(), O_RDWR | O_CLOEXEC));  // or it would be read-only
      loop_config config{};
      config.fd = static_cast<uint32_t>(file_.get());
      config.block_size = sector_bytes;
      config.info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
      if (loop.valid() && ::ioctl(loop.get(), LOOP_CONFIGURE, &config) == 0) {
        held_ = std::move(loop);
      } else {
        why_not_ = std::string("no loop device: ") + std::strerror(errno);
      }
    }
  }
  ~LoopDevice() { ::unlink(file_path_.c_str()); }
  LoopDevice(const LoopDevice&) = delete;

  bool valid() const { return held_.valid(); }
  const std::string& why_not() const { return why_not_; }
  const std::string& path() const { return path_; }
  const Fd& file() const { return file_; }
  // Gives file and device another size.
  bool resize(uint64_t size_bytes) {
    return ::ftruncate(file_.get(), static_cast<off_t>(size_bytes)) == 0 &&
           ::ioctl(held_.get(), LOOP_SET_CAPACITY) == 0;
  }

 private:
  std::string file_path_, path_, why_not_;
  Fd file_, held_;
};

}  // namespace ffs::testing
