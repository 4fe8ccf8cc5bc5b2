#include "capi/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "base/check.h"

namespace ffs::capi {

namespace {
thread_local char line[512] = "";
}  // namespace

const char* last_error() {
  return line;
}

int fail(int code, const char* format, ...) {
  FFS_CHECK(code > 0);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return -code;
}

int fail(const Error& error, const std::string& context) {
  return fail(error.code, "%s: %s", context.c_str(),
              error.what != nullptr ? error.what : std::strerror(error.code));
}

}  // namespace ffs::capi
