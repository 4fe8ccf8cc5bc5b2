// Starting a thread where the host may allow no more of them: an error, not an exception.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/result.h"

namespace ffs {

// EAGAIN: a limit of threads or of memory. Nothing runs then.
template <typename Work>
Result<std::thread> start_thread(Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error&) {
    return Error::of(EAGAIN, "no thread can be started: raise the limit of processes (ulimit -u, pids.max)");
  }
}

}  // namespace ffs
