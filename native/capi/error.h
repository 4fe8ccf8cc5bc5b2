// The last error line of the calling thread (ffs.h, ffs_last_error). Any thread; never blocks.
#pragma once

#include <string>

#include "base/result.h"

namespace ffs::capi {

// Sets the thread's line (printf style) and returns -code, for `return fail(EINVAL, "...")`.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// The same from an Error; `context` names the thing ("device /dev/x").
int fail(const Error& error, const std::string& context);
// What the thread's line holds.
const char* last_error();

}  // namespace ffs::capi
