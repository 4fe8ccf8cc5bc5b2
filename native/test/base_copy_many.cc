// Many copies as one, by one thread and by several: every byte where it belongs, and nothing beside it.
#include <algorithm>
#include <random>
#include <vector>

#include "base/copy_many.h"
#include "doctest/doctest.h"
#include "no_threads.h"

namespace ffs {
namespace {

// Pieces of these sizes, one behind the other with a byte between them that must stay as it is.
void check(const std::vector<size_t>& sizes, unsigned threads) {
  size_t room = 1;
  for (const size_t size : sizes) room += size + 1;
  std::vector<uint8_t> from(room);
  std::vector<uint8_t> to(room, 0xee);
  std::mt19937_64 random(7);
  for (size_t i = 0; i < room; i++) from[i] = static_cast<uint8_t>(random() >> 13);
  std::vector<CopyPiece> pieces;
  size_t at = 1;
  for (const size_t size : sizes) {
    pieces.push_back({to.data() + at, from.data() + at, size});
    at += size + 1;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  copy_many(pieces.data(), pieces.size(), threads);
  std::vector<uint8_t> wanted(room, 0xee);
  for (const CopyPiece& piece : pieces) {
    const size_t begin = static_cast<size_t>(piece.to - to.data());
    std::copy(piece.from, piece.from + piece.bytes, wanted.data() + begin);
  }
  CHECK((to == wanted));
}

}  // namespace

TEST_CASE("copy_many: sizes around a slice, by one thread and by several") {
  const size_t slice = 4u << 20;
  for (const unsigned threads : {0u, 1u, 2u, 5u}) {
    check({}, threads);
    check({0, 1, 0}, threads);
    check({slice, slice}, threads);
    check({slice - 1, 1, slice + 1, 0, 3 * slice + 17, 5}, threads);
    check({2 * slice + 3, 2 * slice + 3}, threads);
  }
}

TEST_CASE("copy_many: thousands of small pieces share slices") {
  std::vector<size_t> sizes;
  std::mt19937 random(3);
  for (int i = 0; i < 3000; i++) sizes.push_back(random() % 9000);
  check(sizes, 1);
  check(sizes, 3);
}

TEST_CASE("copy_many: where no thread can be started the caller's does all of it") {
  const NoThreads none;
  check({9u << 20, 5, 7u << 20}, 4);
}

}  // namespace ffs
