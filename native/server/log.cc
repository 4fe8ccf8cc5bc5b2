#include "server/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace ffs::server {

namespace {
std::atomic<uint32_t> g_level{static_cast<uint32_t>(LogLevel::kWarning)};
}

void set_log_level(uint32_t level) {
  g_level.store(level, std::memory_order_relaxed);
}

void log(LogLevel level, const char* format, ...) {
  if (static_cast<uint32_t>(level) > g_level.load(std::memory_order_relaxed)) return;
  static const char* const names[] = {"error", "warning", "info", "debug"};
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "ffs-storage: %s: %s\n", names[static_cast<uint32_t>(level)], line);
}

}  // namespace ffs::server
