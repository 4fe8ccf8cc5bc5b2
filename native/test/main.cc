// One doctest main for every native test program. Under a sanitizer doctest takes no signals: it would print,
// and allocate, within the handler, which ThreadSanitizer reports as a fault of its own, and
// AddressSanitizer's trace of a crash would be lost.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS
#endif
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
