// While it lives no thread can be started in this process: their stacks have no room.
#pragma once

#include <pthread.h>

#include "doctest/doctest.h"

namespace ffs {

class NoThreads {
 public:
  NoThreads() {
    REQUIRE(::pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t vast;
    REQUIRE(::pthread_getattr_default_np(&vast) == 0);
    REQUIRE(::pthread_attr_setstacksize(&vast, size_t{1} << 48) == 0);
    REQUIRE(::pthread_setattr_default_np(&vast) == 0);
    ::pthread_attr_destroy(&vast);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace ffs
