// The unflushed tail of the journal: which of its records stay (docs/disk_format.md, Journal).
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/crc32c.h"
#include "engine/recovery.h"

namespace ffs::engine {

// ------------------------------------------------------------------------------ the unflushed tail

Status Recovery::judge_tail() {
  for (const auto& [key, records] : tail_) FFS_TRY_STATUS(judge_chunk(key, records));
  // The tables, in the order in which it all happened.
  std::stable_sort(kept_retry_.begin(), kept_retry_.end(),
                   [](const NumberedRetry& a, const NumberedRetry& b) { return a.number < b.number; });
  size_t next = 0;
  auto retry_until = [&](uint64_t number) {
    for (; next < kept_retry_.size() && kept_retry_[next].number < number; next++) {
      s_.state->set_retry(kept_retry_[next].change.key, kept_retry_[next].change.entry);
    }
  };
  for (const TailRecord& record : tail_tables_) {
    retry_until(record.number);
    FFS_TRY_STATUS(apply_table(view_of(record)));
  }
  retry_until(UINT64_MAX);
  return ok_status();
}

Status Recovery::judge_chunk(const OrderedKey& key, const std::vector<TailRecord>& records) {
  State& state = *s_.state;
  std::vector<uint8_t> saved;
  if (uint32_t chunk = state.index.find(key.first, key.second)) {
    FFS_TRY_STATUS(s_.apply_now(chunk));  // or its records might be larger than records may be
    saved.resize(state.chunk_record_bytes(chunk));
    Writer writer(saved.data(), saved.size());
    uint32_t count = 0;
    state.encode_chunk_and_pendings(chunk, writer, &count);
    FFS_CHECK(writer.ok() && writer.left() == 0);
  }
  for (size_t count = records.size();; count--) {
    bool right = false;
    FFS_TRY_STATUS(try_state(key, saved, records, count, &right));
    if (right) {
      dropped_ |= count < records.size();
      return ok_status();
    }
    FFS_CHECK(count > 0);  // the flushed state is taken as it is
  }
}

Status Recovery::try_state(const OrderedKey& key, const std::vector<uint8_t>& saved,
                           const std::vector<TailRecord>& records, size_t count, bool* right) {
  State& state = *s_.state;
  if (uint32_t chunk = state.index.find(key.first, key.second)) state.forget_chunk(chunk);
  Reader reader(saved.data(), saved.size());
  RecordView record;
  OrderedKey ignored;
  while (next_record(reader, &record)) FFS_TRY_STATUS(apply_snapshot_record(record, &ignored, false));
  std::vector<NumberedRetry> changes;
  auto is_reset = [&](size_t i) { return about_target(view_of(records[i])); };
  auto drop_pendings = [&] {
    if (uint32_t chunk = state.index.find(key.first, key.second)) state.drop_pendings(chunk);
  };
  for (size_t i = 0; i < count; i++) {
    if (is_reset(i)) {
      drop_pendings();
      continue;
    }
    std::vector<RetryChange> of_record;
    state.deferred_retry = &of_record;
    Status applied = apply(view_of(records[i]));
    state.deferred_retry = nullptr;
    FFS_TRY_STATUS(applied);
    for (const RetryChange& change : of_record) changes.push_back({records[i].number, change});
  }
  // A reset of the target stays, whatever becomes of the data before it.
  for (size_t i = count; i < records.size(); i++) {
    if (is_reset(i)) drop_pendings();
  }
  *right = true;
  if (count > 0 && !s_.mutants.replay_without_verification) {
    FFS_TRY(*right, versions_are_right(key, records, count));
  }
  std::erase_if(changes, [&](const NumberedRetry& change) { return change.number <= tables_number_; });
  if (*right) kept_retry_.insert(kept_retry_.end(), changes.begin(), changes.end());
  return ok_status();
}

// Which granules each version has from the tail's records, then whether the versions that can
// be read have them right.
Result<bool> Recovery::versions_are_right(const OrderedKey& key, const std::vector<TailRecord>& records,
                                          size_t count) {
  std::map<Version, Granules> written;
  for (size_t i = 0; i < count; i++) {
    StageView view;
    RecordView record = view_of(records[i]);
    auto type = static_cast<RecordType>(record.header.type);
    MoveRecord move;
    Reader after(nullptr, 0);
    if (type == RecordType::move && fixed_part(record, &move, &after)) written[move.version].set();
    ShareRecord share;
    if (type == RecordType::share && fixed_part(record, &share, &after) && (share.flags & kShareStays) == 0)
      written[share.version].set();
    const bool install = type == RecordType::install;  // all of it is its own
    if ((!install && type != RecordType::stage) || !decode_stage(record, &view)) continue;
    Granules own;
    for (uint32_t g = 0; g < view.fixed.changed_granules; g++) own.set(view.fixed.first_changed + g);
    auto base = written.find(view.fixed.base);
    if (!install && base != written.end()) own |= base->second;
    written[view.fixed.image.version] = own;
  }
  State& state = *s_.state;
  uint32_t chunk = state.index.find(key.first, key.second);
  if (chunk == 0) return true;
  std::vector<const Image*> images;
  if (!state.index[chunk].image.version.none()) images.push_back(&state.index[chunk].image);
  if (const Live* live = state.index.live_if(chunk)) {
    for (const Pending& pending : live->pendings) images.push_back(&pending.image);
  }
  for (const Image* image : images) {
    auto found = written.find(image->version);
    if (found == written.end()) continue;
    FFS_TRY(bool right, granules_are_right(*image, found->second));
    if (!right) return false;
  }
  return true;
}

Result<bool> Recovery::granules_are_right(const Image& image, const Granules& granules) {
  uint32_t count = image.granules();
  uint32_t length = image.codec == 0 ? image.logical : image.stored;
  const uint32_t* sums = s_.state->index.sums.at(image.sums, count);
  // Very many records may put chunks into one slot.
  const bool shared = (image.flags & kFlagSharedSlot) != 0 && image.overlay == 0;
  if (const auto known = right_.find(image.place);
      shared && known != right_.end() &&
      std::equal(known->second.begin(), known->second.end(), sums, sums + count))
    return true;
  std::unique_ptr<uint8_t, void (*)(void*)> memory(
      static_cast<uint8_t*>(std::aligned_alloc(kBlock, kGranuleBytes)), std::free);
  for (uint32_t g = 0; g < count; g++) {
    if (!granules.test(g)) continue;
    uint32_t from = g * kGranuleBytes, to = std::min(from + kGranuleBytes, length);
    uint32_t stored_to = std::clamp(image.stored, from, to);
    uint32_t sum = 0;
    if (stored_to > from) {
      auto bytes = static_cast<uint32_t>(round_up(stored_to - from, kBlock));
      // A bad place on the device, which may be why its write failed, is no reason to refuse the rest.
      const uint64_t at = image.place * kBlock + from;
      const Status read = s_.read_now(at, memory.get(), bytes);
      if (!read.ok() && read.error().code != EIO) return read.error();
      if (!read.ok()) {
        std::fprintf(stderr,
                     "ffs: engine: %u bytes at byte %llu of the device, which a record of the journal's last "
                     "group tells of, can't be read: taken as not written\n",
                     bytes, number_of(at));
        return false;
      }
      s_.patch(image.overlay, from, from + bytes, memory.get());
      sum = crc32c(memory.get(), stored_to - from);
    }
    if (crc32c_extend_zeros(sum, to - stored_to) != sums[g]) return false;
  }
  if (shared && granules.count() >= count) right_[image.place].assign(sums, sums + count);
  return true;
}

Status Recovery::rebuild_allocator() {
  State& state = *s_.state;
  Status status = ok_status();
  struct Slot {
    uint64_t place;
    uint8_t place_class;
    bool shared;
    bool operator==(const Slot&) const = default;
  };
  std::vector<Slot> places;
  state.index.each([&](uint32_t number) {
    const Chunk& chunk = state.index[number];
    places.clear();
    auto name = [&](const Image& image) {
      const Slot slot{image.place, static_cast<uint8_t>(image.place_class),
                      (image.flags & kFlagSharedSlot) != 0};
      if (image.place != 0 && std::find(places.begin(), places.end(), slot) == places.end())
        places.push_back(slot);
    };
    name(chunk.image);
    if (Live* live = state.index.live_if(number)) {
      for (Pending& pending : live->pendings) {
        pending.durable = true;
        name(pending.image);
      }
    }
    for (const auto& [place, place_class, shared] : places) {
      const bool mine =
          shared ? s_.dedup.claim(*s_.allocator, place, place_class, {chunk.target, chunk.key.space()})
                 : s_.allocator->claim(place, place_class);
      if (mine) continue;
      if (s_.options.clashes != nullptr) {
        s_.options.clashes->push_back({s_.identity.targets[chunk.target], chunk.key, place, place_class});
      } else if (status.ok()) {
        status = open_error(EBADMSG, "two chunks name one slot", "slot at byte %llu of the device",
                            number_of(place * kBlock));
      }
    }
  });
  return status;
}

}  // namespace ffs::engine
