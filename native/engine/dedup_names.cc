// Who names a shared slot, and what sharing saves. See dedup.h.
#include <algorithm>

#include "engine/dedup.h"
#include "engine/store_impl.h"

namespace ffs::engine {

uint32_t Dedup::names(uint64_t place) const {
  const uint16_t* found = names_.find(place);
  return found != nullptr ? *found : 0;
}

void Dedup::add_name(uint64_t place, uint8_t place_class, const SpaceKey& space) {
  uint16_t* known = names_.find(place);
  if (known == nullptr) return names_.insert(place, 1);
  FFS_CHECK(*known < kMaxSlotNames);
  SpaceSharing& sharing = sharing_[space];
  sharing.chunks += *known == 1 ? 2 : 1;
  sharing.saved_bytes += slot_bytes(place_class);
  ++*known;
}

bool Dedup::drop_name(uint64_t place, uint8_t place_class, const SpaceKey& space) {
  uint16_t* known = names_.find(place);
  FFS_CHECK(known != nullptr);
  if (*known == 1) {
    names_.erase(place);
    moved_.erase(place);
    if (!moved_.empty()) moved_.erase_if([&](uint64_t, uint64_t to) { return to == place; });
    return !freed_early_.erase(place);
  }
  SpaceSharing& sharing = sharing_[space];
  sharing.chunks -= *known == 2 ? 2 : 1;
  sharing.saved_bytes -= slot_bytes(place_class);
  --*known;
  if (!s_.mutants.free_shared_with_first_name || freed_early_.find(place) != nullptr) return false;
  freed_early_[place] = true;
  return true;
}

bool Dedup::claim(Allocator& allocator, uint64_t place, uint8_t place_class, const SpaceKey& space) {
  if (names_.find(place) == nullptr) {
    if (!allocator.claim(place, place_class)) return false;
  } else if (!allocator.in_use(place, place_class) || names(place) >= kMaxSlotNames) {
    return false;
  }
  add_name(place, place_class, space);
  return true;
}

SpaceSharing Dedup::sharing(const SpaceKey& space) const {
  const SpaceSharing* found = sharing_.find(space);
  return found != nullptr ? *found : SpaceSharing{};
}

SpaceSharing Dedup::sharing() const {
  SpaceSharing all;
  sharing_.for_each([&](const SpaceKey&, const SpaceSharing& one) {
    all.chunks += one.chunks;
    all.saved_bytes += one.saved_bytes;
  });
  return all;
}

size_t Dedup::memory_bytes() const {
  return names_.memory_bytes() + table_.memory_bytes() + queue_.size() * sizeof(uint32_t);
}

std::string Dedup::check(std::vector<std::pair<uint64_t, uint8_t>>* named) const {
  std::sort(named->begin(), named->end());
  std::vector<std::pair<uint64_t, uint8_t>> slots;
  uint64_t saved = 0, counted = 0;
  for (size_t from = 0, to = 0; from < named->size(); from = to) {
    while (to < named->size() && (*named)[to] == (*named)[from]) to++;
    if (names((*named)[from].first) != to - from) return "the names of a shared slot are miscounted";
    slots.push_back((*named)[from]);
    saved += (to - from - 1) * slot_bytes((*named)[from].second);
  }
  if (slots.size() != names_.size()) return "a shared slot is counted that nobody names";
  sharing_.for_each([&](const SpaceKey&, const SpaceSharing& sharing) { counted += sharing.saved_bytes; });
  if (counted != saved) return "what sharing saves is miscounted";
  *named = std::move(slots);
  return {};
}

// ------------------------------------------------------------------------------ ChunkStore

void ChunkStore::dedup_spaces(TargetId target, std::span<const uint64_t> spaces) {
  const int number = impl_->slot_of_target(target);
  if (number >= 0) impl_->dedup.set_spaces(static_cast<uint16_t>(number), spaces);
}
bool ChunkStore::dedup_has_work() const {
  return impl_->dedup.has_work();
}
void ChunkStore::dedup(uint32_t max_bytes) {
  impl_->dedup.grant(max_bytes);
}

}  // namespace ffs::engine
