#include "net/shared_memory.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ffs::net {

void Mapping::reset() {
  if (data_ != nullptr && owned_) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    owned_ = other.owned_;
  }
  return *this;
}

Result<Fd> create_sealed_memfd(const char* name, uint64_t bytes, bool huge_pages) {
  if (bytes == 0) return Error::of(EINVAL, "shared memory of no bytes");
  if (huge_pages && bytes % (2u << 20) != 0) {
    return Error::of(EINVAL, "huge pages need a size that is a multiple of 2 MiB");
  }
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge_pages ? MFD_HUGETLB | MFD_HUGE_2MB : 0u);
  Fd fd(::memfd_create(name, flags));
  if (!fd.valid()) return Error::of(errno, "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return Error::of(errno, "sizing shared memory");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Error::of(errno, "sealing shared memory");
  }
  return fd;
}

Status check_sealed(int fd, uint64_t offset, uint64_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Error::of(EINVAL, "the region's descriptor is no memfd");
  if ((seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_GROW) == 0) {
    return Error::of(EPERM, "the region's memfd must be sealed against shrinking and growing");
  }
  struct stat info;
  if (::fstat(fd, &info) != 0) return Error::of(errno, "fstat of the region's memfd");
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  if (bytes == 0 || offset > size || bytes > size - offset) {
    return Error::of(ERANGE, "the region reaches over the end of its memfd");
  }
  return ok_status();
}

Result<Mapping> map_shared(int fd, uint64_t offset, uint64_t bytes, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) return Error::of(errno, "mapping shared memory");
  return Mapping(data, bytes);
}

}  // namespace ffs::net
