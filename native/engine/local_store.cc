#include "engine/local_store.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/threads.h"

namespace ffs::engine {

namespace {

constexpr TargetId kTarget{1};
constexpr ChainId kChain{1};
constexpr uint64_t kSpace = 1;
constexpr uint32_t kSlots = 256;
constexpr int64_t kTickUs = 20'000;
constexpr uint32_t kCompactBytes = 1u << 20;  // a tick

Uuid cluster_id() {
  // Of no cluster: a server refuses the device, and this refuses a server's.
  return {'f', 'f', 's', ' ', 'l', 'o', 'c', 'a', 'l', ' ', 't', 'i', 'e', 'r', 0, 1};
}

ChunkKey key_of(const std::array<uint8_t, 16>& key) {
  return ChunkKey::of(kSpace, key);
}

uint64_t now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count());
}

uint32_t granules_of(uint32_t bytes) {
  return (bytes + kGranuleBytes - 1) / kGranuleBytes;
}

bool same_tag(const Attributes& attributes, const std::array<uint8_t, 16>& tag) {
  return attributes.tag_bytes == 16 && attributes.tag == tag;
}

}  // namespace

// On the stack of the thread that waits for it.
struct LocalStore::Batch {
  std::span<LocalEntry> entries;
  std::vector<uint32_t> sums;     // of what is put; of what was read
  std::vector<size_t> sums_from;  // by entry
  uint32_t depth = 0;
  uint32_t next = 0;    // entry to start
  uint32_t flying = 0;  // of the thread
  uint32_t done = 0;    // of the thread
  bool reads = false;
  bool over = false;  // under the mutex
  std::condition_variable ended;
};

struct LocalStore::Slot {
  LocalStore* store = nullptr;
  Batch* batch = nullptr;
  uint32_t at = 0;
  ReadOp read;
  StageOp stage;
  StoreOp erase;
};

struct LocalStore::Call {
  std::function<void()> work;
  bool over = false;
  std::condition_variable ended;
};

Result<std::unique_ptr<LocalStore>> LocalStore::open(const LocalOptions& options, std::string* why) {
  std::unique_ptr<LocalStore> self(new LocalStore());
  Status status = ok_status();
  bool is_up = false;
  std::condition_variable up;
  {
    std::unique_lock lock(self->mutex_);
    FFS_TRY(self->thread_,
            start_thread([&, raw = self.get()] { raw->serve(options, &up, &status, &is_up, why); }));
    up.wait(lock, [&] { return is_up; });
  }
  if (!status.ok()) return status.error();
  return self;
}

LocalStore::~LocalStore() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (io_ != nullptr) io_->wake();
  }
  thread_.join();
}

Status LocalStore::bring_up(LocalStore* self, const LocalOptions& options) {
  io::Options io_options;
  if (options.backend == "pread") {
    io_options.backend = io::Backend::pread;
  } else if (!options.backend.empty() && options.backend != "uring" && options.backend != "auto") {
    return Error::of(EINVAL, "the backend must be auto, uring or pread");
  }
  auto io = io::Io::create(io_options);
  if (!io.ok()) return io.error();
  struct stat there {};
  const bool empty =
      ::stat(options.path.c_str(), &there) != 0 || (S_ISREG(there.st_mode) && there.st_size == 0);
  if (empty || options.fresh) {
    FormatOptions format;
    format.cluster = cluster_id();
    format.targets = {kTarget};
    format.size_bytes = options.size_bytes;
    format.max_chunks = options.max_chunks;
    format.sparse = options.sparse;
    if (!empty) {
      // What is overwritten is a local tier of ours; anything else is somebody's data.
      const auto identity = ChunkStore::identify(options.path);
      if (!identity.ok()) return identity.error();
      if (identity->cluster != cluster_id()) return Error::of(EXDEV, "the device belongs to a cluster");
      format.overwrite = true;
    }
    const Status formatted = ChunkStore::format(**io, options.path, format);
    if (!formatted.ok()) return formatted;
  }
  OpenOptions open;
  open.cluster = cluster_id();
  auto store = ChunkStore::open(**io, options.path, open);
  if (!store.ok()) return store.error();
  const std::lock_guard lock(self->mutex_);  // wake() of others looks at io_
  self->io_ = std::move(*io);
  self->store_ = std::move(*store);
  return ok_status();
}

// The thread: opens, serves until it is told to stop, closes.
void LocalStore::serve(const LocalOptions& options, std::condition_variable* up, Status* status, bool* is_up,
                       std::string* why) {
  Status opened = bring_up(this, options);
  const bool ok = opened.ok();
  if (ok) {
    for (uint32_t i = 0; i < kSlots; i++) {
      auto slot = std::make_unique<Slot>();
      slot->store = this;
      slot->read.owner = slot->stage.owner = slot->erase.owner = slot.get();
      slot->read.done = slot->stage.done = slot->erase.done = [](StoreOp* op) {
        auto* owner = static_cast<Slot*>(op->owner);
        owner->store->ended(owner, op);
      };
      free_.push_back(slot.get());
      slots_.push_back(std::move(slot));
    }
  }
  {
    const std::lock_guard lock(mutex_);
    if (!ok && why != nullptr) *why = ChunkStore::last_open_message();  // of this thread
    *status = std::move(opened);
    *is_up = true;
    up->notify_one();  // under the lock: `up` is on the stack of the thread that waits
  }
  if (!ok) return;
  uint64_t ticked_us = 0;
  for (bool stop = false; !stop || in_flight_ > 0;) {
    io_->run_once(kTickUs);
    {
      std::unique_lock lock(mutex_);
      stop = stop_;
      for (; !arrived_.empty(); arrived_.pop_front()) {
        Batch* batch = arrived_.front();
        (batch->reads ? reading_ : writing_).push_back(batch);
      }
      while (!calls_.empty()) {
        Call* call = calls_.front();
        calls_.pop_front();
        lock.unlock();
        call->work();
        lock.lock();
        call->over = true;
        call->ended.notify_one();
      }
    }
    take_in();
    const uint64_t now = now_us();
    if (now - ticked_us >= kTickUs) {
      ticked_us = now;
      store_->tick(now);
      if (store_->compaction_need() != SpaceNeed::none) store_->compact(kCompactBytes);
    }
  }
  (void)store_->close();  // a poisoned store has said so in each result
  store_.reset();
  const std::lock_guard lock(mutex_);
  io_.reset();
}

// Starts what may be started: reads first, batches in the order in which they came.
void LocalStore::take_in() {
  for (auto* line : {&reading_, &writing_}) {
    for (auto it = line->begin(); it != line->end() && !free_.empty();) {
      Batch* batch = *it;
      const auto count = static_cast<uint32_t>(batch->entries.size());
      while (!free_.empty() && batch->next < count && batch->flying < batch->depth) {
        Slot* slot = free_.back();
        free_.pop_back();
        batch->flying++;
        in_flight_++;
        most_in_flight_ = std::max(most_in_flight_, in_flight_);
        start(slot, batch, batch->next++);
      }
      // The last entry's end may have finished the batch, which is then its caller's again; all were
      // started before, so it isn't looked at after this.
      it = batch->next == count ? line->erase(it) : it + 1;
    }
  }
}

void LocalStore::start(Slot* slot, Batch* batch, uint32_t at) {
  slot->batch = batch;
  slot->at = at;
  LocalEntry& entry = batch->entries[at];
  const ChunkKey key = key_of(entry.key);
  uint32_t* sums = batch->sums.data() + batch->sums_from[at];
  switch (entry.op) {
    case LocalOp::read: {
      ReadOp& op = slot->read;
      op.target = kTarget;
      op.key = key;
      op.at_least = Version{};
      op.offset = 0;
      op.length = entry.length;
      op.memory = entry.memory;
      op.checksums = sums;
      store_->read(&op);
      return;
    }
    case LocalOp::put:
      start_put(slot, entry, key, sums);
      return;
    case LocalOp::remove:
      store_->erase(kTarget, key, &slot->erase);
      return;
    case LocalOp::exists: {
      // Through the queue like the others: the batch must not end inside take_in.
      slot->erase.error = 0;
      slot->erase.io.owner = &slot->erase;
      slot->erase.io.done = [](io::Op* op) {
        auto* owner = static_cast<StoreOp*>(op->owner);
        owner->done(owner);
      };
      io_->defer(&slot->erase.io, 0);
      return;
    }
  }
  FFS_CHECK(false);
}

void LocalStore::start_put(Slot* slot, const LocalEntry& entry, const ChunkKey& key, const uint32_t* sums) {
  StageOp& op = slot->stage;
  ChunkInfo info;
  const bool there = store_->lookup(kTarget, key, &info);
  op.target = kTarget;
  op.key = key;
  op.base = there ? info.version : Version{};
  op.version = Version{{1, 1}, op.base.update + 1};
  op.kind = UpdateKind::replace;
  op.offset = 0;
  op.length = entry.length;
  op.data = entry.memory;
  op.tail_padded = entry.length % io::kBlockBytes == 0;
  op.piece_checksums = sums;
  op.attributes = Attributes{};
  op.attributes.tag_bytes = 16;
  op.attributes.tag = entry.tag;
  op.identity = UpdateIdentity{};
  op.chain = kChain;
  op.commit_now = true;
  store_->stage(&op);
}

void LocalStore::ended(Slot* slot, StoreOp* op) {
  Batch* batch = slot->batch;
  LocalEntry& entry = batch->entries[slot->at];
  int32_t result = -op->error;
  switch (entry.op) {
    case LocalOp::read:
      if (op->error != 0) break;
      if (!same_tag(slot->read.attributes, entry.tag)) {
        result = -ENOENT;
      } else if (slot->read.chunk_length > entry.length) {
        result = -EMSGSIZE;
      } else {
        const bool whole = slot->read.read_length == slot->read.chunk_length &&
                           slot->read.granule_count == granules_of(slot->read.chunk_length);
        result = whole ? static_cast<int32_t>(slot->read.chunk_length) : -EIO;
      }
      break;
    case LocalOp::put:
      // Another put of the block was on its way when this one looked, or is still.
      if (op->error == EEXIST || op->error == ESTALE) result = -EBUSY;
      if (op->error == 0) result = static_cast<int32_t>(entry.length);
      break;
    case LocalOp::exists: {
      ChunkInfo info;
      const bool there = store_->lookup(kTarget, key_of(entry.key), &info) && !info.version.none();
      result = there && same_tag(info.attributes, entry.tag) ? static_cast<int32_t>(info.length) : -ENOENT;
      break;
    }
    case LocalOp::remove:
      break;
  }
  slot->batch = nullptr;
  free_.push_back(slot);
  in_flight_--;
  batch->flying--;
  finish(batch, &entry, result);
}

void LocalStore::finish(Batch* batch, LocalEntry* entry, int32_t result) {
  entry->result = result;
  if (++batch->done < batch->entries.size()) return;
  const std::lock_guard lock(mutex_);
  batch->over = true;
  batch->ended.notify_one();  // under the lock: once it is free the batch may be gone
}

void LocalStore::run(std::span<LocalEntry> entries, uint32_t depth) {
  if (entries.empty()) return;
  Batch batch;
  batch.entries = entries;
  batch.depth = depth != 0 ? std::min(depth, kSlots) : kSlots;
  batch.sums_from.reserve(entries.size());
  size_t sums = 0;
  for (const LocalEntry& entry : entries) {
    batch.sums_from.push_back(sums);
    if (entry.op == LocalOp::read || entry.op == LocalOp::put) sums += granules_of(entry.length) + 2;
    batch.reads |= entry.op == LocalOp::read || entry.op == LocalOp::exists;
  }
  batch.sums.resize(sums);
  for (size_t i = 0; i < entries.size(); i++) {
    if (entries[i].op != LocalOp::put) continue;
    uint32_t* out = batch.sums.data() + batch.sums_from[i];
    for (uint32_t at = 0; at < entries[i].length; at += kGranuleBytes)
      *out++ = crc32c(entries[i].memory + at, std::min(kGranuleBytes, entries[i].length - at));
  }
  {
    std::unique_lock lock(mutex_);
    arrived_.push_back(&batch);
    io_->wake();
    batch.ended.wait(lock, [&] { return batch.over; });
  }
  for (size_t i = 0; i < entries.size(); i++) {
    LocalEntry& entry = entries[i];
    if (entry.op != LocalOp::read || entry.result < 0) continue;
    const uint32_t* expected = batch.sums.data() + batch.sums_from[i];
    const auto length = static_cast<uint32_t>(entry.result);
    for (uint32_t at = 0; at < length; at += kGranuleBytes) {
      if (crc32c(entry.memory + at, std::min(kGranuleBytes, length - at)) != *expected++) {
        entry.result = -EBADMSG;
        break;
      }
    }
  }
}

void LocalStore::call(Call* call) {
  std::unique_lock lock(mutex_);
  calls_.push_back(call);
  io_->wake();
  call->ended.wait(lock, [&] { return call->over; });
}

size_t LocalStore::list(const std::array<uint8_t, 16>* after, std::span<LocalListed> out) {
  size_t found = 0;
  Call one;
  one.work = [&] {
    ChunkKey from = after != nullptr ? key_of(*after) : key_of({});
    bool skip = after != nullptr;
    ChunkInfo info;
    while (found < out.size() && store_->first_at_or_after(kTarget, from, &info)) {
      from = info.key;
      if (!(skip && info.key == key_of(*after))) {
        LocalListed& listed = out[found++];
        std::memcpy(listed.key.data(), info.key.bytes.data() + 8, 16);
        listed.tag = info.attributes.tag;
        listed.length = info.length;
      }
      skip = false;
      // The next key: one more, as a number of 24 bytes.
      int at = 23;
      while (at >= 0 && ++from.bytes[static_cast<size_t>(at)] == 0) at--;
      if (at < 0) break;
    }
  };
  call(&one);
  return found;
}

LocalFigures LocalStore::figures() {
  LocalFigures figures;
  Call one;
  one.work = [&] {
    figures.capacity = store_->capacity();
    figures.metrics = store_->metrics();
    figures.most_in_flight = most_in_flight_;
    figures.uring = io_->backend() == io::Backend::uring;
  };
  call(&one);
  return figures;
}

}  // namespace ffs::engine
