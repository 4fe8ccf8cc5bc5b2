// base/guarded.h: memory that isn't there ends the work on it, not the process.
#include "base/guarded.h"

#include <doctest/doctest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "base/fd.h"

using namespace ffs;

namespace {

constexpr size_t kPage = 4096, kBytes = 64 * kPage;

struct Mapped {
  Mapped() : file(::memfd_create("guarded", MFD_CLOEXEC)) {
    REQUIRE(::ftruncate(file.get(), kBytes) == 0);
    memory =
        static_cast<uint8_t*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0));
    REQUIRE(memory != MAP_FAILED);
  }
  ~Mapped() { ::munmap(memory, kBytes); }
  Fd file;
  uint8_t* memory;
};

}  // namespace

TEST_CASE("memory that isn't there any more ends the work on it, again and again and in any thread") {
  Mapped m;
  const auto work = [&m] {
    uint32_t sum = 0;
    for (int round = 0; round < 3; round++) {
      CHECK(touch([&] { std::memset(m.memory, 7, kPage); }));
      CHECK(touch([&] { sum = crc32c(m.memory, kPage); }));
      CHECK(sum == crc32c(std::vector<uint8_t>(kPage, 7).data(), kPage));
      int reached = 0;
      CHECK_FALSE(touch([&] {
        reached = 1;
        m.memory[kBytes / 2] = 1;
        reached = 2;
      }));
      CHECK(reached == 1);
      CHECK_FALSE(touch([&] { sum = crc32c(m.memory, kBytes); }));
    }
  };
  REQUIRE(::ftruncate(m.file.get(), kBytes / 2) == 0);
  work();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
  REQUIRE(::ftruncate(m.file.get(), kBytes) == 0);
  CHECK(touch([&] { std::memset(m.memory, 8, kBytes); }));
}
