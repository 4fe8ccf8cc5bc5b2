// The part of ffs.h that needs no handle.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/crc32c.h"
#include "capi/error.h"
#include "ffs/ffs.h"
#include "net/socket.h"
#include "net/version.h"

extern "C" {

int ffs_abi_version(void) {
  return 1;
}

int ffs_last_error(char* out, size_t capacity) {
  const char* line = ffs::capi::last_error();
  const size_t length = std::strlen(line);
  if (out != nullptr && capacity > 0) {
    const size_t copied = std::min(length, capacity - 1);
    std::memcpy(out, line, copied);
    out[copied] = '\0';
  }
  return static_cast<int>(length);
}

uint32_t ffs_crc32c(uint32_t seed, const void* data, size_t length) {
  return ffs::crc32c_extend(seed, data, length);
}

uint32_t ffs_copy_crc32c(void* to, const void* from, size_t length) {
  return ffs::crc32c_copy(to, from, length);
}

int ffs_set_protocol_versions(uint32_t least, uint32_t most) {
  if (least == 0 || least > most || most > UINT8_MAX) {
    return ffs::capi::fail(EINVAL, "protocol versions %u to %u: give 1 to 255, least first", least, most);
  }
  ffs::net::set_spoken_versions({static_cast<uint8_t>(least), static_cast<uint8_t>(most)});
  return 0;
}

int ffs_host_id(char* out, size_t capacity) {
  auto id = ffs::net::host_id();
  if (!id.ok()) return ffs::capi::fail(id.error(), "host id");
  if (out == nullptr || capacity <= id->size()) {
    return ffs::capi::fail(ENOBUFS, "host id: give a buffer of at least %zu bytes", id->size() + 1);
  }
  std::memcpy(out, id->c_str(), id->size() + 1);
  return 0;
}

}  // extern "C"
