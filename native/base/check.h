// FFS_CHECK stays on in production: a violated invariant stops the process before it can
// spread (docs/style.md, Asserts stay on).
#pragma once

#include <cstdio>
#include <cstdlib>

namespace ffs {

[[noreturn]] inline void check_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "ffs: check failed: %s at %s:%d\n", expression, file, line);
  std::fflush(stderr);
  std::abort();
}

}  // namespace ffs

#define FFS_CHECK(expression)                               \
  do {                                                      \
    if (!(expression)) [[unlikely]] {                       \
      ::ffs::check_failed(#expression, __FILE__, __LINE__); \
    }                                                       \
  } while (0)
