#include "engine/chunk_hash.h"

namespace ffs::engine {

ChunkHash::ChunkHash(uint64_t numbers) : number_mask_(mask_for(numbers)) {
  directory_.push_back(add_segment(0));
}

uint32_t ChunkHash::add_segment(uint32_t depth) {
  const uint32_t number = segments_.add();
  segments_[number] = Segment{{}, 0, depth};
  return number;
}

void ChunkHash::double_directory() {
  std::vector<uint32_t> twice(directory_.size() * 2);
  for (size_t i = 0; i < twice.size(); i++) twice[i] = directory_[i / 2];
  directory_ = std::move(twice);
  depth_++;
}

// Of the slots whose first `old_depth` bits are the hash's, those with the next bit set.
void ChunkHash::redirect(uint64_t hash, uint32_t old_depth, uint32_t to) {
  const size_t slots = size_t{1} << (depth_ - old_depth);
  const size_t first = old_depth == 0 ? 0 : (hash >> (64 - old_depth)) * slots;
  for (size_t i = slots / 2; i < slots; i++) directory_[first + i] = to;
}

}  // namespace ffs::engine
