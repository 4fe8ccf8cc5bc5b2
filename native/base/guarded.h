// Touching a mapping of a file whose pages may turn out not to be there: the file was cut, or the host has no
// memory for them. The kernel says so by SIGBUS, which here ends the work on them instead of the process.
#pragma once

namespace ffs {

// Runs body(argument) and catches a SIGBUS that it meets: false, and the body was left where it was. So it
// copies, sums and compares, and neither owns nor changes anything that would have to be put right. Any
// thread; not nested. A SIGBUS elsewhere goes to who had the signal before, by default to the end of the
// process.
bool touch(void (*body)(void*), void* argument);

template <typename F>
bool touch(const F& body) {
  const auto call = [](void* f) { (*static_cast<const F*>(f))(); };
  return touch(call, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace ffs
