#include "base/guarded.h"

#include <setjmp.h>
#include <signal.h>

#include <atomic>

#include "base/check.h"

namespace ffs {

namespace {

thread_local sigjmp_buf* landing = nullptr;
struct sigaction before {};

void on_sigbus(int signal, siginfo_t* info, void* context) {
  if (landing != nullptr) ::siglongjmp(*landing, 1);
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  ::signal(SIGBUS, SIG_DFL);  // the instruction comes again, and ends the process as it would have
}

bool install() {
  struct sigaction action {};
  action.sa_sigaction = on_sigbus;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // it is left by a jump, so it mustn't stay blocked
  FFS_CHECK(::sigaction(SIGBUS, &action, &before) == 0);
  return true;
}

}  // namespace

bool touch(void (*body)(void*), void* argument) {
  static const bool installed = install();
  (void)installed;
  sigjmp_buf here;
  if (sigsetjmp(here, 0) != 0) {
    landing = nullptr;
    return false;
  }
  landing = &here;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  body(argument);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  landing = nullptr;
  return true;
}

}  // namespace ffs
