// A device that lies in memory (tmpfs), mapped for reading: so that the kernel can copy straight out of its
// pages into a socket (docs/architecture.md, Sending from memory). This process never touches the mapping
// itself: a page that can't be had (the file was cut, memory ran out) is then an EFAULT of the system call,
// and no SIGBUS. Pages come in as they are first sent, and count as shared memory of the process.
#pragma once

#include <cstdint>
#include <memory>

namespace ffs::io {

class DeviceMap {
 public:
  // Of the whole file, read-only. Null: it doesn't lie in memory, or there is no address space for it.
  // Keeps `fd` for copy(); it must stay open.
  static std::unique_ptr<DeviceMap> of(int fd, uint64_t bytes);
  ~DeviceMap();
  DeviceMap(const DeviceMap&) = delete;
  DeviceMap& operator=(const DeviceMap&) = delete;

  // For system calls that read from it, only. The range must lie in the device.
  const uint8_t* at(uint64_t offset, uint64_t bytes) const;
  // The same bytes by pread. 0 or a positive errno; EIO: the file ends before them.
  int copy(uint64_t offset, uint8_t* to, uint32_t bytes) const;

 private:
  DeviceMap(int fd, const uint8_t* base, uint64_t bytes) : fd_(fd), base_(base), bytes_(bytes) {}

  int fd_;
  const uint8_t* base_;
  uint64_t bytes_;
};

}  // namespace ffs::io
