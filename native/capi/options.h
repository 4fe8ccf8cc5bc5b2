// Option structs of ffs.h: they begin with struct_size, and callers built against an older header
// pass shorter ones; what is missing is zero.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ffs::capi {

// False: no struct, or a size that can't be.
template <typename T>
bool take_options(const T* given, T* out) {
  *out = T{};
  if (given == nullptr || given->struct_size < sizeof(uint32_t)) return false;
  std::memcpy(out, given, std::min<size_t>(given->struct_size, sizeof(T)));
  return true;
}

}  // namespace ffs::capi
