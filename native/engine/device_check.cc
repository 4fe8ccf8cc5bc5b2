#include "engine/device_check.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/fd.h"
#include "engine/store_impl.h"
#include "io/probe.h"
#include "io/shadow_io.h"

namespace ffs::engine {

namespace {

constexpr uint32_t kInUseWaitMs = 200;  // somebody waits for the answer

// The next key in order; false: there is none.
bool step(ChunkKey* key) {
  for (size_t i = key->bytes.size(); i-- > 0;) {
    if (++key->bytes[i] != 0) return true;
  }
  return false;
}

struct Counter final : RetryVisitor, SpaceEpochVisitor {
  uint64_t count = 0;
  void visit(ClientId, ChainId, uint32_t, const RetryEntry&) override { count++; }
  void visit(uint64_t, const SpaceEpoch&) override { count++; }
};

// Calls `each(target, key, pending)` for every version that pends.
template <typename Each>
void for_each_pending(const ChunkStore& store, Each each) {
  for (const TargetId target : store.identity().targets) {
    ChunkKey at{}, found;
    for (bool more = true; more && store.first_pending_at_or_after(target, at, &found); more = step(&at)) {
      PendingInfo info;
      for (uint32_t i = 0; store.pending_at(target, found, i, &info); i++) each(target, found, info);
      at = found;
    }
  }
}

TargetState state_of(const ChunkStore& store, TargetId target) {
  TargetState state;
  state.target = target;
  state.usage = store.usage(target);
  state.chain_state_bytes = static_cast<uint32_t>(store.chain_state(target).size());
  Counter retries, spaces;
  store.each_retry(target, retries);
  store.each_space_epoch(target, spaces);
  state.retry_entries = retries.count;
  state.space_epochs = spaces.count;
  return state;
}

std::string read_copies(const std::string& path, bool whole[2]) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Superblock super;
  for (int i = 0; i < 2 && fd.valid(); i++) {
    whole[i] = ::pread(fd.get(), &super, sizeof super, static_cast<off_t>(kSuperblockOffset[i])) ==
               static_cast<ssize_t>(sizeof super);
    const uint32_t stated = super.crc;
    seal_superblock(&super);
    whole[i] = whole[i] && super.crc == stated && std::memcmp(super.magic, kSuperblockMagic, 8) == 0;
  }
  if (whole[0] && whole[1]) return {};
  return "the superblock at byte " + std::to_string(kSuperblockOffset[whole[0] ? 1 : 0]) +
         " is damaged; the other copy counts (the next snapshot writes it again)";
}

}  // namespace

// A store that is open over memory.
class OfflineStore {
 public:
  ~OfflineStore() {
    store_.reset();
    if (file_.valid()) shadow_->remove_file(file_);
    shadow_.reset();
    real_.reset();
    io::close_device(device_);
  }
  // EBUSY, and what ChunkStore::open says. `clashes` may be null.
  Status open(const std::string& path, const Uuid& cluster, std::vector<SlotClash>* clashes);
  void describe(DeviceState* state) const;
  ChunkStore& store() { return *store_; }
  io::ShadowIo& io() { return *shadow_; }

 private:
  io::Device device_;
  io::File file_;
  std::unique_ptr<io::Io> real_;
  std::unique_ptr<io::ShadowIo> shadow_;
  std::unique_ptr<ChunkStore> store_;
};

Status OfflineStore::open(const std::string& path, const Uuid& cluster, std::vector<SlotClash>* clashes) {
  auto opened = io::open_device(path, io::Access::read_only, kInUseWaitMs);
  if (!opened.ok()) {
    const std::string user = opened.error().code == EBUSY ? io::in_use(path) : std::string();
    return open_error(opened.error().code, opened.error().what, "%s",
                      user.empty() ? std::strerror(opened.error().code) : user.c_str());
  }
  device_ = *opened;
  FFS_TRY(real_, io::Io::create(io::Options{}));
  shadow_ = std::make_unique<io::ShadowIo>(*real_);
  FFS_TRY(file_, shadow_->add_file(device_.fd));
  OpenOptions options;
  options.cluster = cluster;
  options.discard = Discard::off;
  options.clashes = clashes;
  FFS_TRY(store_, ChunkStore::open_file(*shadow_, file_, device_.size_bytes, options));
  return ok_status();
}

void OfflineStore::describe(DeviceState* state) const {
  const ChunkStore::Impl& impl = *store_->impl_;
  state->recovered = true;
  for (uint8_t c = 0; c < kClasses; c++) state->classes[c] = impl.allocator->use_of(c);
  state->free_slabs = impl.allocator->free_slabs();
  state->used_bytes = impl.allocator->used_bytes();
  state->capacity = store_->capacity();
  state->journal_used_bytes = impl.journal_found_bytes;
  for (const TargetId target : store_->identity().targets)
    state->targets.push_back(state_of(*store_, target));
  for_each_pending(*store_, [&](TargetId target, const ChunkKey&, const PendingInfo&) {
    for (TargetState& t : state->targets) t.pending_versions += t.target == target ? 1 : 0;
  });
}

namespace {

// Of a device that isn't ours: what is there instead. What can't be read is left unsaid.
Error with_content(const std::string& path, Error error) {
  const std::string said = ChunkStore::last_open_message();
  auto device = io::describe_device(path);
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!device.ok() || !fd.valid()) return error;
  auto probed = io::probe(fd.get(), device->size_bytes);
  if (!probed.ok()) return error;
  set_open_message(said + "; it " + (probed->blank ? "is blank" : "holds " + probed->text()));
  return error;
}

// What can be said without recovery; an error is identify()'s.
Status describe_outside(const std::string& path, DeviceState* state) {
  auto identity = ChunkStore::identify(path);
  if (!identity.ok() && identity.error().code == EMEDIUMTYPE) return with_content(path, identity.error());
  FFS_TRY(state->identity, std::move(identity));
  read_copies(path, state->superblock_whole);
  FFS_TRY(state->device, io::describe_device(path));
  state->cache = choose_cache_mode(state->device, WriteCache::automatic);
  return ok_status();
}

// Reads every version whole, `depth` at a time, and compares it with its checksums.
class DataCheck {
 public:
  DataCheck(OfflineStore& opened, const CheckOptions& options, CheckReport& report)
      : store_(opened.store()), io_(opened.io()), report_(report), max_problems_(options.max_problems) {
    for_each_pending(store_, [&](TargetId target, const ChunkKey& key, const PendingInfo& info) {
      if (info.kind != UpdateKind::remove) pendings_.push_back({target, key, info.version, true});
    });
    slots_.resize(std::clamp<uint32_t>(options.depth, 1, 256));
  }
  void run() {
    for (auto& slot : slots_) {
      slot = std::make_unique<Slot>();
      start(slot.get());
    }
    while (reading_ > 0) io_.run_once(-1);
  }

 private:
  struct Item {
    TargetId target;
    ChunkKey key;
    Version version;
    bool pending = false;
  };
  struct Nowhere final : Sink {
    int put(uint32_t, const uint8_t*, uint32_t) override { return 0; }
  };
  struct Slot {
    Item item;
    ReadOp op;
  };

  bool next(Item* item) {
    const auto& targets = store_.identity().targets;
    for (; target_ < targets.size(); target_++, at_ = ChunkKey{}, ended_ = false) {
      ChunkInfo info;
      if (ended_ || !store_.first_at_or_after(targets[target_], at_, &info)) continue;
      *item = {targets[target_], info.key, info.version, false};
      at_ = info.key;
      ended_ = !step(&at_);
      return true;
    }
    if (pendings_.empty()) return false;
    *item = pendings_.back();
    pendings_.pop_back();
    return true;
  }
  void prepare(ReadOp* op, const Item& item, uint32_t offset, uint32_t length) {
    *op = ReadOp{};
    op->target = item.target;
    op->key = item.key;
    op->at_least = item.version;
    op->exact_version = true;
    op->offset = offset;
    op->length = length;
    op->sink = &nowhere_;
    op->verify_whole = true;
    op->verify_partial = true;
  }
  void start(Slot* slot) {
    if (!next(&slot->item)) return;
    prepare(&slot->op, slot->item, 0, kMaxChunkBytes);
    slot->op.owner = this;
    slot->op.store = nullptr;
    slot->op.done = [](StoreOp* op) { static_cast<DataCheck*>(op->owner)->ended(static_cast<ReadOp*>(op)); };
    reading_++;
    store_.read(&slot->op);
  }
  void ended(ReadOp* op) {
    auto slot =
        std::find_if(slots_.begin(), slots_.end(), [&](auto& s) { return s != nullptr && &s->op == op; });
    FFS_CHECK(slot != slots_.end());
    reading_--;
    (op->error == 0 ? report_.data_bytes : failed_bytes_) += op->read_length;
    if (op->error != 0) damaged_.push_back({(*slot)->item, op->error});
    start(slot->get());
  }

 public:
  // After run(): which granules of the damaged versions they are, one by one.
  void name_damage() {
    for (const auto& [item, error] : damaged_) {
      report_.problem_count++;
      if (report_.problems.size() >= max_problems_) continue;
      Problem problem{Problem::Kind::content, item.target, item.key, item.version, item.pending, {}};
      problem.text = granules(item, error);
      report_.problems.push_back(std::move(problem));
    }
  }

 private:
  std::string granules(const Item& item, int error) {
    std::string bad;
    uint32_t count = 0;
    for (uint32_t g = 0; g < kMaxGranules; g++) {
      ReadOp op;
      bool done = false;
      prepare(&op, item, g * kGranuleBytes, kGranuleBytes);
      op.owner = &done;
      op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
      store_.read(&op);
      while (!done) io_.run_once(-1);
      if (op.error == 0 && op.read_length == 0) break;
      if (op.error == 0) continue;
      if (count++ < 8) bad += (bad.empty() ? "" : ", ") + std::to_string(g);
    }
    if (count > 8) bad += ", ...";
    const std::string what = error == EBADMSG ? "content doesn't fit its checksums" : "content can't be read";
    return what + (bad.empty() ? std::string() : ": granules " + bad) +
           (error == EBADMSG ? "" : std::string(" (") + std::strerror(error) + ")");
  }

  ChunkStore& store_;
  io::ShadowIo& io_;
  CheckReport& report_;
  uint32_t max_problems_;
  Nowhere nowhere_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Item> pendings_;
  std::vector<std::pair<Item, int>> damaged_;
  uint64_t failed_bytes_ = 0;
  size_t target_ = 0;
  ChunkKey at_;
  bool ended_ = false;
  uint32_t reading_ = 0;
};

bool means_damage(int code) {
  return code == EBADMSG || code == EIO || code == ENOSPC;
}

void refused(CheckReport* report, const std::string& path, const Error& error) {
  std::string why = ChunkStore::last_open_message();
  if (why.empty()) why = error.what != nullptr ? error.what : std::strerror(error.code);
  if (why.starts_with(path + ": ")) why.erase(0, path.size() + 2);
  if (!means_damage(error.code)) {
    report->verdict = Verdict::unjudged;
    report->reason = why;
    return;
  }
  report->verdict = Verdict::damaged;
  report->problem_count = 1;
  report->problems.push_back({Problem::Kind::recovery, {}, {}, {}, false, why});
}

}  // namespace

Result<DeviceState> survey_device(const std::string& path) {
  DeviceState state;
  FFS_TRY_STATUS(describe_outside(path, &state));
  OfflineStore opened;
  Status open = opened.open(path, state.identity.cluster, nullptr);
  if (open.ok()) {
    opened.describe(&state);
  } else {
    state.why_not = ChunkStore::last_open_message();
  }
  return state;
}

CheckReport check_device(const std::string& path, const CheckOptions& options) {
  CheckReport report;
  Status outside = describe_outside(path, &report.state);
  if (!outside.ok()) {
    refused(&report, path, outside.error());
    return report;
  }
  bool whole[2];
  if (std::string note = read_copies(path, whole); !note.empty()) report.notes.push_back(std::move(note));
  std::vector<SlotClash> clashes;
  OfflineStore opened;
  Status open = opened.open(path, report.state.identity.cluster, &clashes);
  if (!open.ok()) {
    refused(&report, path, open.error());
    return report;
  }
  opened.describe(&report.state);
  for (const SlotClash& clash : clashes) {
    if (report.problem_count++ >= options.max_problems) continue;
    report.problems.push_back({Problem::Kind::clash,
                               clash.target,
                               clash.key,
                               {},
                               false,
                               "its slot of " + std::to_string(slot_bytes(clash.place_class) / 1024) +
                                   " KiB at byte " + std::to_string(clash.place * kBlock) +
                                   " is another chunk's, or none of the device's"});
  }
  if (clashes.empty()) {
    std::string wrong = opened.store().check_consistency();
    if (!wrong.empty()) {
      report.problem_count++;
      report.problems.push_back({Problem::Kind::accounts, {}, {}, {}, false, std::move(wrong)});
    }
  }
  for (const TargetState& target : report.state.targets) {
    report.chunks += target.usage.chunks;
    report.pending_versions += target.pending_versions;
  }
  if (options.data) {
    DataCheck data(opened, options, report);
    data.run();
    data.name_damage();
  }
  report.verdict = report.problem_count == 0 ? Verdict::clean : Verdict::damaged;
  return report;
}

}  // namespace ffs::engine
