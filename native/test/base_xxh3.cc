// XXH3: digests that xxhash's own tools print, and every backend against the plain one at the lengths where
// the algorithm changes its way.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "base/xxh3.h"
#include "doctest/doctest.h"

namespace ffs {
namespace {

std::string hex(const uint8_t* digest) {
  std::string out;
  for (size_t i = 0; i < kXxh3Bytes; i++) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", digest[i]);
    out += two;
  }
  return out;
}

std::string hash_with(const Xxh3Backend& backend, const std::vector<uint8_t>& data) {
  uint8_t digest[kXxh3Bytes];
  backend.hash(data.data(), data.size(), digest);
  return hex(digest);
}

}  // namespace

TEST_CASE("xxh3: what xxh128sum prints") {
  size_t count = 0;
  const Xxh3Backend* backends = xxh3_backends(&count);
  REQUIRE(count >= 1);
  CHECK(std::string(backends[count - 1].name) == "plain");
  CHECK(std::string(xxh3_backend()) == backends[0].name);
  std::vector<uint8_t> counted(1000);
  for (size_t i = 0; i < counted.size(); i++) counted[i] = static_cast<uint8_t>(i % 251);
  for (size_t i = 0; i < count; i++) {
    CAPTURE(backends[i].name);
    CHECK(hash_with(backends[i], {}) == "99aa06d3014798d86001c324468d497f");
    CHECK(hash_with(backends[i], {'f', 'f', 's'}) == "8bda096e001b3a1da09cece7448792c5");
    CHECK(hash_with(backends[i], counted) == "18bf41bc8229e27733ef703fb2b20ed1");
  }
}

TEST_CASE("xxh3: all backends agree, wherever the bytes lie") {
  size_t count = 0;
  const Xxh3Backend* backends = xxh3_backends(&count);
  std::mt19937_64 random(3);
  std::vector<uint8_t> data(70000);
  for (auto& byte : data) byte = static_cast<uint8_t>(random() >> 11);
  const size_t lengths[] = {1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4096, 65537};
  for (const size_t length : lengths) {
    for (const size_t begin : {0, 1, 31}) {
      uint8_t plain[kXxh3Bytes], other[kXxh3Bytes];
      backends[count - 1].hash(data.data() + begin, length, plain);
      for (size_t i = 0; i < count; i++) {
        backends[i].hash(data.data() + begin, length, other);
        CAPTURE(length);
        CHECK(hex(other) == hex(plain));
      }
    }
  }
}

TEST_CASE("xxh3: many pieces, each by itself; nothing is read of an empty one") {
  std::vector<uint8_t> data(5000, 7);
  const HashPiece pieces[] = {{data.data(), 5000}, {nullptr, 0}, {data.data() + 1, 10}};
  uint8_t digests[3 * kXxh3Bytes];
  xxh3_many(pieces, 3, digests);
  const Xxh3Backend* backends = nullptr;
  size_t count = 0;
  backends = xxh3_backends(&count);
  CHECK(hex(digests) == hash_with(backends[0], data));
  CHECK(hex(digests + kXxh3Bytes) == "99aa06d3014798d86001c324468d497f");
  CHECK(hex(digests + 2 * kXxh3Bytes) == hash_with(backends[0], std::vector<uint8_t>(10, 7)));
}

}  // namespace ffs
