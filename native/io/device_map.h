// A device that lies in memory (tmpfs), mapped: so that the kernel can copy straight out of its pages into a
// socket, and out of a socket or a client's memory into them (docs/architecture.md, Sending from memory;
// Receiving into memory). A page may turn out not to be there (the file was cut, memory ran out): a system
// call says EFAULT then, and this process touches the mapping only under base/guarded.h. Pages come in as
// they are first used, and count as shared memory of the process.
#pragma once

#include <cstdint>
#include <memory>

namespace ffs::io {

class DeviceMap {
 public:
  // Of the whole file. Null: it doesn't lie in memory, or there is no address space for it.
  // Keeps `fd` for copy(); it must stay open.
  static std::unique_ptr<DeviceMap> of(int fd, uint64_t bytes);
  ~DeviceMap();
  DeviceMap(const DeviceMap&) = delete;
  DeviceMap& operator=(const DeviceMap&) = delete;

  // The range must lie in the device. The second is for bytes that nobody else has: a slot without an owner.
  const uint8_t* at(uint64_t offset, uint64_t bytes) const { return checked(offset, bytes); }
  uint8_t* writable(uint64_t offset, uint64_t bytes) { return checked(offset, bytes); }
  // The same bytes by pread. 0 or a positive errno; EIO: the file ends before them.
  int copy(uint64_t offset, uint8_t* to, uint32_t bytes) const;

 private:
  DeviceMap(int fd, uint8_t* base, uint64_t bytes) : fd_(fd), base_(base), bytes_(bytes) {}
  uint8_t* checked(uint64_t offset, uint64_t bytes) const;

  int fd_;
  uint8_t* base_;
  uint64_t bytes_;
};

}  // namespace ffs::io
