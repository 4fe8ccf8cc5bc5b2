// Shared memory between processes of one host (docs/wire_format.md, Regions): memfds sealed
// against shrinking and growing, so that a mapping of them can't raise SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/fd.h"
#include "base/result.h"

namespace ffs::net {

// A mapping that ends with the object, or memory of somebody else, which stays.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  static Mapping borrowed(void* data, size_t bytes) {
    Mapping mapping(data, bytes);
    mapping.owned_ = false;
    return mapping;
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        owned_(other.owned_) {}
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { reset(); }
  void reset();

  bool valid() const { return data_ != nullptr; }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool owned_ = true;
};

// A new memfd of `bytes`, sealed SHRINK | GROW | SEAL. Huge pages: EINVAL unless bytes is a
// multiple of 2 MiB; ENOMEM when the system has none reserved.
Result<Fd> create_sealed_memfd(const char* name, uint64_t bytes, bool huge_pages);
// Whether `fd` is shared memory whose size can't change and that holds [offset, offset+bytes).
// EPERM: a seal is missing; EINVAL: no memfd; ERANGE: too small.
Status check_sealed(int fd, uint64_t offset, uint64_t bytes);
// Maps [offset, offset+bytes) shared; offset must be a multiple of 4096.
Result<Mapping> map_shared(int fd, uint64_t offset, uint64_t bytes, bool writable);

}  // namespace ffs::net
