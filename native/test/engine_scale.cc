// Very many chunks: memory, start-up, the store's own steps. The ordinary run takes few; a million by
//   FFS_SCALE_CHUNKS=1000000 ./test_engine --test-case='scale*'
#include <doctest/doctest.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine/chunk_store.h"
#include "engine/scale.h"

using namespace ffs;
using namespace ffs::engine;

TEST_CASE("scale: chunks of 1 MiB fit their 192 bytes of memory, and are there after opening") {
  const char* asked = std::getenv("FFS_SCALE_CHUNKS");
  const uint64_t chunks = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 20'000;
  const char* folder = std::getenv("TMPDIR");
  const std::string path =
      std::string(folder != nullptr ? folder : "/tmp") + "/ffs_scale_" + std::to_string(getpid());
  auto io = io::Io::create(io::Options{});
  REQUIRE(io.ok());
  auto report = measure_scale(*io.value(), path, chunks);
  if (!report.ok()) FAIL(report.error().what << ": " << ChunkStore::last_open_message());
  std::printf("%s\n", report.value().json().c_str());
  CHECK(report.value().memory_bytes <= 192 * chunks);
  CHECK(report.value().memory_bytes >= 176 * chunks);  // it counts records and checksums at least
  if (chunks >= 100'000) CHECK(report.value().resident_bytes <= 192 * chunks);
}
