#include "io/sim.h"

#include <algorithm>
#include <cstring>

namespace ffs::io {

// ------------------------------------------------------------------------------ SimImage

void SimImage::read(uint64_t offset, uint8_t* memory, size_t size) const {
  FFS_CHECK(offset + size <= size_bytes_);
  while (size > 0) {
    const Extent* extent = extents_[offset / kExtentBytes].get();
    const uint64_t within = offset % (extent == nullptr ? kExtentBytes : 4096);
    const size_t part = std::min<size_t>(size, (extent == nullptr ? kExtentBytes : 4096) - within);
    const Page* page = extent == nullptr ? nullptr : extent->pages[offset / 4096 % 64].get();
    if (page == nullptr) {
      std::memset(memory, 0, part);
    } else {
      std::memcpy(memory, page->data() + within, part);
    }
    memory += part, offset += part, size -= part;
  }
}

std::shared_ptr<SimImage::Page>& SimImage::slot(uint64_t page) {
  auto& extent = extents_[page / 64];
  if (extent == nullptr) {
    extent = std::make_shared<Extent>();
  } else if (extent.use_count() > 1) {
    extent = std::make_shared<Extent>(*extent);
  }
  return extent->pages[page % 64];
}

void SimImage::write(uint64_t offset, const uint8_t* memory, size_t size) {
  FFS_CHECK(offset + size <= size_bytes_);
  while (size > 0) {
    const uint64_t within = offset % 4096;
    const size_t part = std::min<size_t>(size, 4096 - within);
    auto& page = slot(offset / 4096);
    if (page == nullptr) {
      page = std::make_shared<Page>();
      page->fill(0);
    } else if (page.use_count() > 1) {
      page = std::make_shared<Page>(*page);
    }
    std::memcpy(page->data() + within, memory, part);
    memory += part, offset += part, size -= part;
  }
}

void SimImage::flip(uint64_t offset, uint8_t mask) {
  uint8_t byte;
  read(offset, &byte, 1);
  byte ^= mask;
  write(offset, &byte, 1);
}

void SimImage::discard(uint64_t offset, uint64_t size, std::optional<uint64_t> garbage_seed) {
  FFS_CHECK(offset % 4096 == 0 && size % 4096 == 0 && offset + size <= size_bytes_);
  std::shared_ptr<Page> left;  // zeros
  if (garbage_seed) {
    std::mt19937_64 random(*garbage_seed);
    left = std::make_shared<Page>();
    for (auto& byte : *left) byte = static_cast<uint8_t>(random());
  }
  for (uint64_t page = offset / 4096; page < (offset + size) / 4096; page++) slot(page) = left;
}

bool SimImage::operator==(const SimImage& other) const {
  if (size_bytes_ != other.size_bytes_) return false;
  std::vector<uint8_t> a(kExtentBytes), b(kExtentBytes);
  for (size_t i = 0; i < extents_.size(); i++) {
    if (extents_[i] == other.extents_[i]) continue;
    const size_t size = std::min(kExtentBytes, size_bytes_ - i * kExtentBytes);
    read(i * kExtentBytes, a.data(), size);
    other.read(i * kExtentBytes, b.data(), size);
    if (!std::equal(a.begin(), a.begin() + static_cast<ptrdiff_t>(size), b.begin())) return false;
  }
  return true;
}

namespace {

// Of a discard and the piece of it: the same for the running disk and for those after a crash.
std::optional<uint64_t> left_by_discard(uint64_t id, uint64_t at) {
  const uint64_t seed = id * 0x9e3779b97f4a7c15ull + at;
  return (seed >> 20) % 2 == 0 ? std::nullopt : std::optional<uint64_t>(seed);
}

bool overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size) {
  return a < b + b_size && b < a + a_size;
}

}  // namespace

// ------------------------------------------------------------------------------ SimIo

SimIo::SimIo(SimImage image, uint64_t seed, SimDevice device)
    : image_(std::move(image)), device_(device), random_(seed) {}

SimIo::~SimIo() {
  stop_helper();
}

Result<File> SimIo::add_file(int) {
  return Error::of(ENOTSUP, "the simulated backend has one disk and no files");
}
void SimIo::remove_file(File) {
  FFS_CHECK(false);
}
void SimIo::poll_add(Poll*, int, uint32_t) {
  FFS_CHECK(false);
}
void SimIo::poll_remove(Poll*) {
  FFS_CHECK(false);
}
void SimIo::unregister_region(Region) {
  FFS_CHECK(false);
}

Result<Region> SimIo::register_region(void*, size_t) {
  return Error::of(ENOTSUP, "the simulated backend has no registered memory");
}

void SimIo::watch(OpKind kind, uint64_t offset, uint64_t length) {
  if (length == 0 || !misuse_.empty()) return;
  for (const Running& other : running_) {
    if (!overlap(offset, length, other.op->offset, other.length)) continue;
    const bool discards = kind == OpKind::discard || other.op->kind == OpKind::discard;
    const bool writes = kind == OpKind::write && other.op->kind == OpKind::write;
    if (!discards && !writes) continue;
    misuse_ = std::string(discards ? "a discard is in flight with another op" : "two writes are in flight") +
              " at byte " + std::to_string(std::max(offset, other.op->offset));
  }
}

// Whether the fault happens to this op.
bool SimIo::strikes(SimFault::Kind first, SimFault::Kind last, uint64_t offset) {
  if (struck_ || fault_.kind < first || fault_.kind > last || offset < fault_.from || offset >= fault_.to)
    return false;
  if (fault_.skip > 0) return fault_.skip--, false;
  return struck_ = true;
}

void SimIo::rot(uint64_t offset, uint8_t mask) {
  image_.flip(offset, mask);
  damage_.push_back({offset, 1, log_.size()});
  struck_ = true;
}

void SimIo::misdo(Running* running) {
  const uint64_t offset = running->lands, length = running->length;
  auto changed = std::make_shared<std::vector<uint8_t>>(*running->bytes);
  switch (fault_.kind) {
    case SimFault::lost_write:
      changed->clear();
      break;
    case SimFault::torn_write:
      changed->resize(length / device_.sector_bytes / 2 * device_.sector_bytes);
      break;
    case SimFault::misdirected_write:
      for (size_t tries = 0; tries < 64 && running->lands == offset && !written_.empty(); tries++) {
        const uint64_t place = written_[random_() % written_.size()];
        if (place >= fault_.from && place + length <= std::min(fault_.to, size_bytes()))
          running->lands = place;
      }
      damage_.push_back({running->lands, length, log_.size()});
      break;
    default:
      changed->at(random_() % length) ^= static_cast<uint8_t>(1u << random_() % 8);
  }
  damage_.push_back({offset, length, log_.size()});
  running->landed = std::move(changed);
}

void SimIo::start(Op* op, OpKind kind, uint64_t offset, void* memory, uint64_t length) {
  FFS_CHECK(op->done != nullptr);
  const uint64_t sector = device_.sector_bytes;
  FFS_CHECK(offset % sector == 0 && length % sector == 0 && reinterpret_cast<uintptr_t>(memory) % 512 == 0);
  FFS_CHECK(offset + length <= image_.size_bytes());
  watch(kind, offset, length);
  op->kind = kind;
  op->offset = offset;
  op->memory = static_cast<uint8_t*>(memory);
  op->length = static_cast<uint32_t>(kind == OpKind::discard ? 0 : length);
  Running running{op, next_id_++, length, nullptr, offset, nullptr};
  if (kind == OpKind::write) {
    running.bytes = std::make_shared<std::vector<uint8_t>>(op->memory, op->memory + length);
    running.landed = running.bytes;
    if (strikes(SimFault::lost_write, SimFault::flipped_write, offset)) misdo(&running);
    written_.push_back(offset);
    if (written_.size() > 64) written_.erase(written_.begin());
    note({SimEvent::write_started, running.id, running.lands, running.landed, 0});
  } else if (kind == OpKind::datasync) {
    syncs_++;
    note({SimEvent::sync_started, running.id, 0, nullptr, 0});
  } else if (kind == OpKind::discard) {
    discards_++;
    note({SimEvent::discard_started, running.id, offset, nullptr, length});
  }
  in_flight_++;
  running_.push_back(std::move(running));
}

void SimIo::read(Op* op, File, uint64_t offset, void* memory, uint32_t length, Region) {
  start(op, OpKind::read, offset, memory, length);
}
void SimIo::write(Op* op, File, uint64_t offset, const void* memory, uint32_t length, Region) {
  start(op, OpKind::write, offset, const_cast<void*>(memory), length);
}
void SimIo::datasync(Op* op, File) {
  start(op, OpKind::datasync, 0, nullptr, 0);
}
void SimIo::discard(Op* op, File, uint64_t offset, uint64_t length) {
  start(op, OpKind::discard, offset, nullptr, length);
}

void SimIo::finish(size_t index) {
  Running running = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<ptrdiff_t>(index));
  in_flight_--;
  Op* op = running.op;
  auto result = static_cast<int32_t>(op->length);
  if (op->kind == OpKind::read && overlap(op->offset, op->length, bad_from_, bad_to_ - bad_from_)) {
    result = -EIO;
  } else if (op->kind == OpKind::read) {
    image_.read(op->offset, op->memory, op->length);
    if (op->length > 0 && strikes(SimFault::flipped_read, SimFault::flipped_read, op->offset))
      op->memory[random_() % op->length] ^= static_cast<uint8_t>(1u << random_() % 8);
  } else if (op->kind == OpKind::write) {
    // Memory of an op in flight is the disk's: it must not have changed.
    FFS_CHECK(std::memcmp(running.bytes->data(), op->memory, op->length) == 0);
    if (fail_write_ > 0 && --fail_write_ == 0) {
      result = -EIO;
    } else {
      image_.write(running.lands, running.landed->data(), running.landed->size());
      note({SimEvent::write_done, running.id, running.lands, nullptr, 0});
    }
  } else if (op->kind == OpKind::discard) {
    for (uint64_t at = 0; at < running.length; at += 65536) {
      image_.discard(op->offset + at, std::min<uint64_t>(65536, running.length - at),
                     left_by_discard(running.id, at));
    }
    note({SimEvent::discard_done, running.id, op->offset, nullptr, 0});
  } else if (fail_sync_ > 0 && --fail_sync_ == 0) {
    result = -EIO;
  } else {
    note({SimEvent::sync_done, running.id, 0, nullptr, 0});
  }
  complete(op, result);
}

int SimIo::run_once(int64_t timeout_us) {
  take_posted();
  if (!running_.empty() && device_.in_order) {
    finish(0);
  } else if (!running_.empty()) {
    size_t count = 1 + random_() % std::min<size_t>(running_.size(), 4);
    while (count-- > 0 && !running_.empty()) finish(random_() % running_.size());
  } else if (!has_ready() && timeout_us < 0) {
    FFS_CHECK(in_flight_ > 0);  // only the helper thread could still bring something
  }
  return run_ready();
}

// ------------------------------------------------------------------------------ CrashImages

void CrashImages::put(SimImage& image, const Loose& loose, uint64_t at, uint64_t size) {
  if (loose.bytes == nullptr) {
    image.discard(loose.offset + at, std::min(size, loose.length - at), left_by_discard(loose.id, at));
  } else {
    image.write(loose.offset + at, loose.bytes->data() + at, size);
  }
}

bool CrashImages::loose_within(uint64_t from, uint64_t to) const {
  return std::any_of(loose_.begin(), loose_.end(),
                     [&](const Loose& w) { return w.offset >= from && w.offset < to; });
}

bool CrashImages::loose_discards() const {
  return std::any_of(loose_.begin(), loose_.end(), [](const Loose& w) { return w.bytes == nullptr; });
}

// Behind those that completed before, so that overlapping writes lie in the right order.
void CrashImages::done(uint64_t id) {
  auto found = std::find_if(loose_.begin(), loose_.end(), [&](const Loose& w) { return w.id == id; });
  FFS_CHECK(found != loose_.end());
  Loose write = *found;
  loose_.erase(found);
  if (device_.protected_cache) {
    for (uint64_t at = 0; at < write.length; at += kDiscardPieceBytes)
      put(durable_, write, at, std::min(kDiscardPieceBytes, write.length - at));
    return;
  }
  write.completed = true;
  write.completed_at = events_;
  auto first_running =
      std::find_if(loose_.begin(), loose_.end(), [](const Loose& w) { return !w.completed; });
  loose_.insert(first_running, write);
}

void CrashImages::advance(const SimEvent& event) {
  events_++;
  switch (event.kind) {
    case SimEvent::write_started:
      loose_.push_back({event.id, event.offset, event.bytes->size(), event.bytes, false, 0});
      break;
    case SimEvent::discard_started:
      loose_.push_back({event.id, event.offset, event.length, nullptr, false, 0});
      break;
    case SimEvent::write_done:
    case SimEvent::discard_done:
      done(event.id);
      break;
    case SimEvent::sync_started:
      syncs_[event.id] = events_;
      break;
    case SimEvent::sync_done: {
      uint64_t started = syncs_[event.id];
      auto flushed = [&](const Loose& w) { return w.completed && w.completed_at < started; };
      for (const Loose& write : loose_) {
        for (uint64_t at = 0; flushed(write) && at < write.length; at += kDiscardPieceBytes)
          put(durable_, write, at, std::min(kDiscardPieceBytes, write.length - at));
      }
      std::erase_if(loose_, flushed);
      syncs_.erase(event.id);
      break;
    }
  }
}

}  // namespace ffs::io
