// Which backend of io/ the tests run over: io_uring, or FFS_TEST_IO_BACKEND=pread.
#pragma once

#include <cstdlib>
#include <cstring>

#include "io/io.h"

namespace ffs::testing {

inline io::Backend chosen_backend() {
  const char* name = std::getenv("FFS_TEST_IO_BACKEND");
  return name != nullptr && std::strcmp(name, "pread") == 0 ? io::Backend::pread : io::Backend::uring;
}

}  // namespace ffs::testing
