// Lines on stderr for the person who runs the server. Any thread. Never secrets, never a line an
// operation: what happens often is a metric.
#pragma once

#include <cstdint>

namespace ffs::server {

enum class LogLevel : uint32_t { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

void set_log_level(uint32_t level);
void log(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace ffs::server
