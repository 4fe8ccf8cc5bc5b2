// The worker: finds chunks that may be equal, compares them byte by byte, shares. See dedup.h.
#include "engine/dedup.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "engine/stage_path.h"
#include "engine/store_impl.h"

namespace ffs::engine {

namespace {
constexpr uint32_t kLookChunks = 256;             // looked at in one step
constexpr size_t kQueuedChunks = 64 * 1024;       // more than that are found by a walk
constexpr int64_t kMostBudgetBytes = 64ll << 20;  // saved up
}  // namespace

// One comparison. The slots are referenced, so neither is written anew while it runs.
struct Dedup::Work {
  Dedup* dedup = nullptr;
  uint32_t chunk[2] = {0, 0};
  SpaceKey space;
  ChunkKey key[2];
  Version version[2];
  uint64_t place[2] = {0, 0};
  uint8_t* bytes[2] = {nullptr, nullptr};
  io::Op io[2];
  uint32_t in_flight = 0;
  bool failed = false;
  bool replaces = false;  // not equal: the second stands for the content from now on
  uint32_t stored = 0, readable = 0;
  uint32_t at = 0, piece = 0;
  uint32_t sums[kMaxGranules];
};

Dedup::Dedup(ChunkStore::Impl& store) : s_(store) {}
Dedup::~Dedup() {
  FFS_CHECK(work_ == nullptr);
}

SpaceKey Dedup::space_of(uint32_t chunk) const {
  const Chunk& c = s_.state->index[chunk];
  return {c.target, c.key.space()};
}

// ------------------------------------------------------------------------------ candidates

uint64_t Dedup::mix_of(const Index& index, const Chunk& chunk) {
  const Image& image = chunk.image;
  uint64_t mix = mix64(chunk.key.space() ^ mix64(chunk.target + 1ull));
  auto word = [&](uint64_t value) { mix = mix64((mix ^ value) + 0x9e3779b97f4a7c15); };
  word(image.stored | uint64_t{image.logical} << 32);
  word(image.codec | image.place_class << 8);
  const uint32_t count = image.granules();
  const uint32_t* sums = index.sums.at(image.sums, count);
  for (uint32_t g = 0; g < count; g += 2) word(sums[g] | uint64_t{g + 1 < count ? sums[g + 1] : 0} << 32);
  return mix != 0 ? mix : 1;
}

bool Dedup::wanted(const Chunk& chunk) const {
  return !chunk.image.version.none() && chunk.image.place != 0 && chunk.image.stored >= kLeastSharedBytes &&
         spaces_.find({chunk.target, chunk.key.space()}) != nullptr;
}

// Its committed version is all there is of it, and nothing is about to change it.
bool Dedup::at_rest(uint32_t chunk) const {
  const Chunk& c = s_.state->index[chunk];
  return c.live == 0 && c.image.overlay == 0 && !s_.releasing[c.target] &&
         s_.busy.find({c.target, c.key}) == nullptr;
}

bool Dedup::may_be_equal(const Chunk& a, const Chunk& b) const {
  const Index& index = s_.state->index;
  const Image &x = a.image, &y = b.image;
  const uint32_t count = x.granules();
  return a.used && a.target == b.target && a.key.space() == b.key.space() && x.stored == y.stored &&
         x.logical == y.logical && x.codec == y.codec && x.place_class == y.place_class &&
         std::memcmp(index.sums.at(x.sums, count), index.sums.at(y.sums, count), count * sizeof(uint32_t)) ==
             0;
}

void Dedup::committed(uint32_t chunk) {
  if (spaces_.empty() || !wanted(s_.state->index[chunk])) return;
  if (queue_.size() < kQueuedChunks) {
    queue_.push_back(chunk);
  } else {
    walk_wanted_ = true;
  }
}

void Dedup::leaves(uint32_t chunk, const Image& image) {
  if (table_.empty() || image.place == 0 || image.stored < kLeastSharedBytes) return;
  const uint64_t mix = mix_of(s_.state->index, s_.state->index[chunk]);
  const uint32_t* known = table_.find(mix);
  if (known == nullptr || *known != chunk) return;
  table_.erase(mix);
  // Others of its content are there: a walk finds one that stands for them.
  if ((image.flags & kFlagSharedSlot) != 0 && names(image.place) > 1) walk_wanted_ = true;
}

void Dedup::set_spaces(uint16_t target, std::span<const uint64_t> spaces) {
  bool changed = false;
  spaces_.erase_if([&](const SpaceKey& key, bool) {
    const bool gone =
        key.target == target && std::find(spaces.begin(), spaces.end(), key.space) == spaces.end();
    changed |= gone;
    return gone;
  });
  for (uint64_t space : spaces) {
    changed |= spaces_.find({target, space}) == nullptr;
    spaces_[{target, space}] = true;
  }
  if (!changed) return;
  walk_wanted_ = true;
  next_walk_us_ = 0;
}

// ------------------------------------------------------------------------------ pace

bool Dedup::has_work() const {
  if (spaces_.empty() || stopped_ || s_.poisoned || s_.options.null_data) return false;
  const bool walks = cursor_ != 0 || (walk_wanted_ && s_.now_us >= next_walk_us_);
  return work_ != nullptr || waits_ != 0 || !queue_.empty() || walks;
}

void Dedup::grant(uint32_t bytes) {
  if (!has_work()) return;
  budget_bytes_ = std::min(budget_bytes_ + bytes, kMostBudgetBytes);
  s_.schedule_pump();
}

void Dedup::step() {
  if (work_ != nullptr || budget_bytes_ <= 0 || !has_work()) return;
  if (waits_ != 0) consider(std::exchange(waits_, 0));
  uint32_t chunk = 0;
  for (uint32_t i = 0; i < kLookChunks && work_ == nullptr && waits_ == 0 && next_chunk(&chunk); i++)
    consider(chunk);
  if (work_ == nullptr && waits_ == 0 && has_work()) s_.schedule_pump();
}

void Dedup::begin_walk() {
  walk_wanted_ = false;
  next_walk_us_ = s_.now_us + s_.options.dedup_rest_us;
  table_.clear();
  cursor_ = 1;
}

bool Dedup::next_chunk(uint32_t* chunk) {
  if (!queue_.empty()) {
    *chunk = queue_.front();
    queue_.pop_front();
    return true;
  }
  if (cursor_ == 0 && walk_wanted_ && s_.now_us >= next_walk_us_) begin_walk();
  if (cursor_ == 0) return false;
  if (cursor_ >= s_.state->index.end()) {
    cursor_ = 0;
    return false;
  }
  *chunk = cursor_++;
  return true;
}

// ------------------------------------------------------------------------------ comparing

void Dedup::consider(uint32_t chunk) {
  const Index& index = s_.state->index;
  const Chunk& c = index[chunk];
  if (!c.used || !wanted(c)) return;
  if (!at_rest(chunk)) {
    walk_wanted_ = true;
    return;
  }
  const uint64_t mix = mix_of(index, c);
  uint32_t* known = table_.find(mix);
  if (known == nullptr) return table_.insert(mix, chunk);
  if (*known == chunk || index[*known].image.place == c.image.place) return;
  if (!may_be_equal(index[*known], c)) {
    *known = chunk;  // one mix of two contents
    return;
  }
  if (!at_rest(*known)) {
    walk_wanted_ = true;
    return;
  }
  if (std::max(names(index[*known].image.place), names(c.image.place)) >= s_.options.max_slot_names) {
    *known = chunk;  // from here on the next ones go there
    return;
  }
  start(*known, chunk);
}

// Older programs take a slot of two chunks for damage: the device says so before the first one is there.
bool Dedup::feature_is_there() {
  if ((s_.super.incompat & kIncompatShared) != 0) return true;
  wants_feature_ = true;
  s_.start_snapshot();  // ends with a superblock
  return false;
}

void Dedup::start(uint32_t kept, uint32_t chunk) {
  const bool journal_room = s_.journal->used_bytes() + s_.journal->gathered_bytes() + kMaxBlockBytes <=
                            s_.journal->region_bytes() / 4 * 3;
  if (!journal_room) s_.start_snapshot();
  waits_ = chunk;
  if (!journal_room || !feature_is_there()) return;
  const Image& image = s_.state->index[chunk].image;
  const size_t memory = std::min<size_t>(align_up(image.stored), kPieceBytes);
  auto work = std::make_unique<Work>();
  for (uint8_t*& bytes : work->bytes) bytes = s_.scratch->allocate(memory);
  if (work->bytes[0] == nullptr || work->bytes[1] == nullptr) {
    for (uint8_t* bytes : work->bytes) {
      if (bytes != nullptr) s_.scratch->release(bytes);
    }
    return;
  }
  waits_ = 0;
  work->dedup = this;
  work->space = space_of(chunk);
  work->stored = image.stored;
  work->readable = image.codec == 0 ? image.logical : image.stored;
  std::memcpy(work->sums, s_.state->index.sums.at(image.sums, image.granules()),
              image.granules() * sizeof(uint32_t));
  const uint32_t both[] = {kept, chunk};
  for (int i = 0; i < 2; i++) {
    const Chunk& c = s_.state->index[both[i]];
    work->chunk[i] = both[i];
    work->key[i] = c.key;
    work->version[i] = c.image.version;
    work->place[i] = c.image.place;
    s_.ref_slot(c.image.place);
    work->io[i].owner = work.get();
    work->io[i].op_class = io::OpClass::dedup;
    work->io[i].done = [](io::Op* op) { static_cast<Work*>(op->owner)->dedup->piece_read(op->result); };
  }
  budget_bytes_ -= 2 * int64_t{image.stored};
  work_ = std::move(work);
  read_piece();
}

void Dedup::read_piece() {
  Work& w = *work_;
  w.piece = std::min(w.stored - w.at, kPieceBytes);
  w.in_flight = 2;
  for (int i = 0; i < 2; i++) {
    s_.io.read(&w.io[i], s_.file, w.place[i] * kBlock + w.at, w.bytes[i], align_up(w.piece),
               s_.scratch->region_of(w.bytes[i]));
  }
}

void Dedup::piece_read(int32_t result) {
  Work& w = *work_;
  w.failed |= result < 0;
  if (--w.in_flight > 0) return;
  s_.counters.dedup_compared_bytes += 2 * uint64_t{w.piece};
  if (w.failed || s_.poisoned || s_.closing || stopped_ || !unchanged(false) || !unchanged(true))
    return end_work(false);
  // Equal checksums of what is there prove nothing that counts: damage must not spread, and a checksum can be
  // forged. Bytes that match their checksums and each other do.
  const bool first_right = piece_is_right(w.bytes[0]), second_right = piece_is_right(w.bytes[1]);
  if (!first_right || !second_right) {
    s_.counters.checksum_errors++;  // scrub and repair deal with it
    w.replaces = second_right;
    return end_work(false);
  }
  if (std::memcmp(w.bytes[0], w.bytes[1], w.piece) != 0) {
    s_.counters.dedup_differ++;
    w.replaces = true;  // so that forged ones don't keep the others apart
    return end_work(false);
  }
  w.at += w.piece;
  if (w.at < w.stored) return read_piece();
  end_work(true);
}

bool Dedup::piece_is_right(const uint8_t* bytes) const {
  const Work& w = *work_;
  for (uint32_t from = w.at; from < w.at + w.piece; from += kGranuleBytes) {
    const uint32_t to = std::min(from + kGranuleBytes, w.readable);
    const uint32_t stored_to = std::min(to, w.stored);
    const uint32_t sum = crc32c(bytes + (from - w.at), stored_to - from);
    if (crc32c_extend_zeros(sum, to - stored_to) != w.sums[from / kGranuleBytes]) return false;
  }
  return true;
}

bool Dedup::unchanged(bool which) const {
  const Work& w = *work_;
  const uint32_t chunk = s_.state->index.find(w.space.target, w.key[which]);
  if (chunk == 0 || chunk != w.chunk[which]) return false;
  const Image& image = s_.state->index[chunk].image;
  return image.version == w.version[which] && image.place == w.place[which];
}

void Dedup::end_work(bool equal) {
  const std::unique_ptr<Work> w = std::move(work_);
  for (int i = 0; i < 2; i++) s_.scratch->release(w->bytes[i]);
  auto still = [&](int i) {
    const uint32_t chunk = s_.state->index.find(w->space.target, w->key[i]);
    return chunk == w->chunk[i] && chunk != 0 && s_.state->index[chunk].image.version == w->version[i] &&
           s_.state->index[chunk].image.place == w->place[i] && at_rest(chunk);
  };
  const bool wanted_still = spaces_.find(w->space) != nullptr;  // the space may have been told to stop
  if (equal && wanted_still && still(0) && still(1)) {
    const bool first = names(w->place[0]) >= names(w->place[1]);
    share(w->chunk[first ? 0 : 1], w->chunk[first ? 1 : 0]);
  } else if (equal) {
    walk_wanted_ = true;
  } else if (w->replaces && still(1) && wanted(s_.state->index[w->chunk[1]])) {
    if (uint32_t* known = table_.find(mix_of(s_.state->index, s_.state->index[w->chunk[1]])))
      *known = w->chunk[1];
  }
  for (int i = 0; i < 2; i++) s_.unref_slot(w->place[i]);
  s_.schedule_pump();
}

// ------------------------------------------------------------------------------ sharing

// The first record before the second: whoever reads the second has read that others may name the slot.
void Dedup::share(uint32_t kept, uint32_t chunk) {
  const Image image = s_.state->index[kept].image;
  if (names(image.place) >= s_.options.max_slot_names) return;
  if ((image.flags & kFlagSharedSlot) == 0) record(kept, image.place);
  record(chunk, image.place);
  s_.counters.dedup_shared++;
  s_.counters.dedup_shared_bytes += slot_bytes(image.place_class);
}

void Dedup::record(uint32_t chunk, uint64_t place) {
  const Chunk& c = s_.state->index[chunk];
  ShareRecord record{};
  record.key = c.key;
  record.version = c.image.version;
  record.place = place;
  record.place_class = static_cast<uint8_t>(c.image.place_class);
  record.flags = place == c.image.place ? kShareStays : 0;
  const SpaceKey space = space_of(chunk);
  s_.append_simple(RecordType::share, c.target, record);
  // Before the state lets go of the old slot: moving to where it is doesn't happen.
  add_name(place, record.place_class, space);
  const char* contradiction = s_.state->share(space.target, record);
  FFS_CHECK(contradiction == nullptr);
}

// ------------------------------------------------------------------------------ compaction

bool Dedup::follow(uint32_t chunk) {
  const Image& image = s_.state->index[chunk].image;
  if ((image.flags & kFlagSharedSlot) == 0 || moved_.empty()) return false;
  const uint64_t* place = moved_.find(image.place);
  if (place == nullptr || names(*place) == 0 || names(*place) >= s_.options.max_slot_names) return false;
  record(chunk, *place);
  s_.counters.moves++;
  return true;
}

bool Dedup::move(uint32_t chunk, uint64_t place) {
  const Image& image = s_.state->index[chunk].image;
  const uint64_t old = image.place;
  if ((image.flags & kFlagSharedSlot) == 0 || names(old) <= 1) return false;
  record(chunk, place);
  moved_[old] = place;
  return true;
}

}  // namespace ffs::engine
