// What eviction needs to know: when chunks were used, what spaces take, samples of their chunks.
#include <algorithm>

#include "engine/access.h"
#include "engine/store_impl.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ access times

uint32_t ChunkStore::stamp_of(uint64_t manager_ms) const {
  if (manager_ms == 0) return 0;
  const uint64_t created = impl_->super.created_ms;
  const uint64_t since = manager_ms > created ? (manager_ms - created) / kStampMs : 0;
  return static_cast<uint32_t>(std::min<uint64_t>(since, UINT32_MAX - 1) + 1);
}

uint64_t ChunkStore::time_of(uint32_t stamp) const {
  return stamp == 0 ? 0 : impl_->super.created_ms + (uint64_t{stamp} - 1) * kStampMs;
}

void State::touch(uint32_t chunk, uint32_t stamp) {
  Access& access = index[chunk].access;
  if (stamp <= access.last) return;
  if (access.last != 0 && stamp - access.last > kCorrelatedStamps) access.previous = access.last;
  access.last = stamp;
}

void ChunkStore::touch(TargetId target, const ChunkKey& key, uint32_t stamp) {
  const int number = impl_->target_index(target);
  State& state = *impl_->state;
  if (number < 0) return;
  if (uint32_t chunk = state.index.find(static_cast<uint16_t>(number), key)) {
    if (!state.index[chunk].image.version.none()) state.touch(chunk, stamp);
  }
}

void ChunkStore::used_before(TargetId target, const ChunkKey& key, uint32_t stamp) {
  const int number = impl_->target_index(target);
  State& state = *impl_->state;
  const uint32_t chunk = number >= 0 ? state.index.find(static_cast<uint16_t>(number), key) : 0;
  if (chunk == 0 || stamp == 0) return;
  Access& access = state.index[chunk].access;
  if (access.previous == 0 && access.last > stamp && access.last - stamp > kCorrelatedStamps) {
    access.previous = stamp;
  }
}

Access ChunkStore::access(TargetId target, const ChunkKey& key) const {
  const int number = impl_->target_index(target);
  const State& state = *impl_->state;
  const uint32_t chunk = number >= 0 ? state.index.find(static_cast<uint16_t>(number), key) : 0;
  return chunk != 0 ? state.index[chunk].access : Access{};
}

// ------------------------------------------------------------------------------ use of spaces

uint64_t State::allocated_bytes(uint32_t chunk) const {
  const Chunk& c = index[chunk];
  uint64_t bytes = c.image.place != 0 ? slot_bytes(c.image.place_class) : 0;
  const Live* live = index.live_if(chunk);
  if (live == nullptr) return bytes;
  uint64_t last = c.image.place;
  for (size_t i = 0; i < live->pendings.size(); i++) {
    const Image& image = live->pendings[i].image;
    if (image.place == 0 || image.place == last) continue;  // mostly the slot of the version before
    bool known = image.place == c.image.place;
    for (size_t j = 0; j < i && !known; j++) known = live->pendings[j].image.place == image.place;
    if (!known) bytes += slot_bytes(image.place_class);
    last = image.place;
  }
  return bytes;
}

void State::account_spaces(uint16_t target, std::span<const uint64_t> wanted) {
  accounts.erase_if([&](const SpaceKey& key, const SpaceAccount&) {
    return key.target == target && std::find(wanted.begin(), wanted.end(), key.space) == wanted.end();
  });
  for (uint64_t space : wanted) (void)accounts[{target, space}];
}

bool State::step_accounts(uint32_t limit) {
  bool complete = true;
  accounts.update_each([&](const SpaceKey& key, SpaceAccount& account) {
    if (account.complete) return;
    if (limit == 0) {
      complete = false;
      return;
    }
    bool more = false;
    const ChunkKey from = account.started ? account.cursor : ChunkKey::of(key.space, {});
    index.walk(key.target, from, account.started, [&](uint32_t chunk) {
      const Chunk& c = index[chunk];
      if (c.target != key.target || c.key.space() != key.space) return false;
      if (limit == 0) {
        more = true;
        return false;
      }
      limit--;
      account.allocated_bytes += allocated_bytes(chunk);
      if (!c.image.version.none()) account.chunks++;
      account.cursor = c.key;
      account.started = true;
      return true;
    });
    account.complete = !more;
    complete &= account.complete;
  });
  return complete;
}

void ChunkStore::Impl::step_accounts() {
  constexpr uint32_t kStepChunks = 512;  // well under a millisecond
  accounts_unfinished = !state->step_accounts(kStepChunks);
  if (accounts_unfinished) schedule_pump();
}

void ChunkStore::account_spaces(TargetId target, std::span<const uint64_t> spaces) {
  const int number = impl_->target_index(target);
  if (number < 0) return;
  impl_->state->account_spaces(static_cast<uint16_t>(number), spaces);
  impl_->accounts_unfinished = true;
  impl_->schedule_pump();
}

SpaceUse ChunkStore::space_use(TargetId target, uint64_t space) const {
  const int number = impl_->target_index(target);
  if (number < 0) return {};
  const SpaceAccount* account = impl_->state->accounts.find({static_cast<uint16_t>(number), space});
  if (account == nullptr) return {};
  const SpaceSharing sharing = impl_->dedup.sharing({static_cast<uint16_t>(number), space});
  return {account->chunks, account->allocated_bytes, account->complete, sharing.chunks, sharing.saved_bytes};
}

// ------------------------------------------------------------------------------ samples

namespace {

__extension__ using Wide = unsigned __int128;

Wide number_of_key(const ChunkKey& key) {
  Wide number = 0;
  for (size_t i = 8; i < key.bytes.size(); i++) number = number << 8 | key.bytes[i];
  return number;
}

ChunkKey key_of_number(uint64_t space, Wide number) {
  std::array<uint8_t, 16> key;
  for (size_t i = key.size(); i-- > 0; number >>= 8) key[i] = static_cast<uint8_t>(number);
  return ChunkKey::of(space, key);
}

ChunkSample sample_of(const Chunk& chunk) {
  ChunkSample sample;
  sample.key = chunk.key;
  sample.version = chunk.image.version;
  sample.allocated_bytes =
      chunk.image.place != 0 ? static_cast<uint32_t>(slot_bytes(chunk.image.place_class)) : 0;
  sample.access = chunk.access;
  sample.pinned = (chunk.image.flags & kFlagPinned) != 0;
  sample.shared = (chunk.image.flags & kFlagSharedSlot) != 0;
  sample.expiry_ms = chunk.image.expiry_ms;
  return sample;
}

}  // namespace

uint32_t sample_space(const Index& index, uint16_t target, uint64_t space, uint64_t seed,
                      std::span<ChunkSample> out) {
  if (out.empty()) return 0;
  std::array<uint8_t, 16> ones;
  ones.fill(0xff);
  const uint32_t first = index.lower_bound(target, ChunkKey::of(space, {}), false);
  const uint32_t last = index.floor(target, ChunkKey::of(space, ones));
  if (first == 0 || last == 0 || index[first].target != target || index[first].key.space() != space) return 0;
  // Between the ends, so that spaces whose keys fill a part of the range only are met everywhere too.
  const Wide low = number_of_key(index[first].key), high = number_of_key(index[last].key);
  Wide random = Wide{mix64(seed)} << 64 | mix64(seed ^ 0x9e3779b97f4a7c15);
  if (high - low + 1 != 0) random %= high - low + 1;
  const ChunkKey from = key_of_number(space, low + random);
  uint32_t count = 0;
  auto take = [&](uint32_t chunk) {
    if (!index[chunk].image.version.none()) out[count++] = sample_of(index[chunk]);
    return count < out.size();
  };
  index.walk(target, from, false, [&](uint32_t chunk) {
    return index[chunk].target == target && index[chunk].key.space() == space && take(chunk);
  });
  if (count == out.size()) return count;
  index.walk(target, ChunkKey::of(space, {}), false, [&](uint32_t chunk) {
    return index[chunk].target == target && index[chunk].key < from && take(chunk);
  });
  return count;
}

uint32_t ChunkStore::sample(TargetId target, uint64_t space, uint64_t seed,
                            std::span<ChunkSample> out) const {
  const int number = impl_->target_index(target);
  if (number < 0) return 0;
  const auto target_number = static_cast<uint16_t>(number);
  const Index& index = impl_->state->index;
  const uint32_t count = sample_space(index, target_number, space, seed, out);
  for (ChunkSample& sample : out.first(count)) {
    if (sample.shared)  // or the others have gone
      sample.shared = impl_->dedup.names(index[index.find(target_number, sample.key)].image.place) > 1;
  }
  return count;
}

}  // namespace ffs::engine
