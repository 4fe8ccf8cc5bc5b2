#include "base/copy_many.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/threads.h"

namespace ffs {

namespace {

// What a thread takes at once: large enough for memcpy to stream past the caches.
constexpr uint64_t kSliceBytes = 4ull << 20;
// Below this a second thread costs more than it brings.
constexpr uint64_t kLeastShared = 8ull << 20;

// A run of pieces, or a part of one.
struct Slice {
  size_t piece;
  uint64_t at;     // in the first piece
  uint64_t bytes;  // of this piece and those after it
};

std::vector<Slice> slices_of(const CopyPiece* pieces, size_t count) {
  std::vector<Slice> out;
  uint64_t open = 0;  // bytes of the last slice, which may take more pieces; 0: none
  for (size_t i = 0; i < count; i++) {
    uint64_t at = 0;
    while (at < pieces[i].bytes) {
      const uint64_t bytes = std::min(kSliceBytes - open, pieces[i].bytes - at);
      if (open == 0) {
        out.push_back({i, at, bytes});
      } else {
        out.back().bytes += bytes;
      }
      open = (open + bytes) % kSliceBytes;
      at += bytes;
    }
  }
  return out;
}

void copy_slice(const CopyPiece* pieces, Slice slice) {
  while (slice.bytes > 0) {
    const CopyPiece& piece = pieces[slice.piece];
    const uint64_t bytes = std::min(slice.bytes, piece.bytes - slice.at);
    if (bytes > 0) std::memcpy(piece.to + slice.at, piece.from + slice.at, bytes);
    slice.bytes -= bytes;
    slice.at = 0;
    slice.piece++;
  }
}

}  // namespace

void copy_many(const CopyPiece* pieces, size_t count, unsigned threads) {
  uint64_t total = 0;
  for (size_t i = 0; i < count; i++) total += pieces[i].bytes;
  if (threads < 2 || total < kLeastShared) {
    for (size_t i = 0; i < count; i++) {
      if (pieces[i].bytes > 0) std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    }
    return;
  }
  const std::vector<Slice> slices = slices_of(pieces, count);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < slices.size(); i = next.fetch_add(1))
      copy_slice(pieces, slices[i]);
  };
  const size_t helpers = std::min<size_t>(threads, slices.size()) - 1;
  std::vector<std::thread> others;
  others.reserve(helpers);
  while (others.size() < helpers) {
    auto other = start_thread(work);
    if (!other.ok()) break;  // those that there are do all of it
    others.push_back(std::move(*other));
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace ffs
