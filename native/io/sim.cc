#include "io/sim.h"

#include <algorithm>
#include <cstring>

namespace ffs::io {

// ------------------------------------------------------------------------------ SimImage

void SimImage::read(uint64_t offset, uint8_t* memory, size_t size) const {
  while (size > 0) {
    uint64_t page = offset / 4096, within = offset % 4096;
    size_t part = std::min<size_t>(size, 4096 - within);
    auto found = pages_.find(page);
    if (found == pages_.end()) {
      std::memset(memory, 0, part);
    } else {
      std::memcpy(memory, found->second->data() + within, part);
    }
    memory += part, offset += part, size -= part;
  }
}

void SimImage::write(uint64_t offset, const uint8_t* memory, size_t size) {
  FFS_CHECK(offset + size <= size_bytes_);
  while (size > 0) {
    uint64_t page = offset / 4096, within = offset % 4096;
    size_t part = std::min<size_t>(size, 4096 - within);
    auto& slot = pages_[page];
    if (slot == nullptr) {
      slot = std::make_shared<Page>();
      slot->fill(0);
    } else if (slot.use_count() > 1) {
      slot = std::make_shared<Page>(*slot);
    }
    std::memcpy(slot->data() + within, memory, part);
    memory += part, offset += part, size -= part;
  }
}

bool SimImage::operator==(const SimImage& other) const {
  auto covers = [](const SimImage& a, const SimImage& b) {
    static const Page zeros{};
    for (const auto& [number, page] : a.pages_) {
      auto found = b.pages_.find(number);
      const Page& peer = found == b.pages_.end() ? zeros : *found->second;
      if (&peer != page.get() && peer != *page) return false;
    }
    return true;
  };
  return size_bytes_ == other.size_bytes_ && covers(*this, other) && covers(other, *this);
}

// ------------------------------------------------------------------------------ SimIo

SimIo::SimIo(SimImage image, uint64_t seed) : image_(std::move(image)), random_(seed) {}

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

void SimIo::start(Op* op, OpKind kind, uint64_t offset, void* memory, uint32_t length) {
  FFS_CHECK(op->done != nullptr);
  FFS_CHECK(offset % 512 == 0 && length % 512 == 0 && reinterpret_cast<uintptr_t>(memory) % 512 == 0);
  FFS_CHECK(offset + length <= image_.size_bytes());
  op->kind = kind;
  op->offset = offset;
  op->memory = static_cast<uint8_t*>(memory);
  op->length = length;
  Running running{op, next_id_++, nullptr};
  if (kind == OpKind::write) {
    running.bytes = std::make_shared<std::vector<uint8_t>>(op->memory, op->memory + length);
    note({SimEvent::write_started, running.id, offset, running.bytes});
  } else if (kind == OpKind::datasync) {
    note({SimEvent::sync_started, running.id, 0, nullptr});
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
  std::vector<uint8_t> zeros(length);
  image_.write(offset, zeros.data(), length);
  defer(op, 0);
}

void SimIo::finish(size_t index) {
  Running running = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<ptrdiff_t>(index));
  in_flight_--;
  Op* op = running.op;
  auto result = static_cast<int32_t>(op->length);
  if (op->kind == OpKind::read) {
    image_.read(op->offset, op->memory, op->length);
  } else if (op->kind == OpKind::write) {
    // Memory of an op in flight is the disk's: it must not have changed.
    FFS_CHECK(std::memcmp(running.bytes->data(), op->memory, op->length) == 0);
    if (fail_write_ > 0 && --fail_write_ == 0) {
      result = -EIO;
    } else {
      image_.write(op->offset, op->memory, op->length);
      note({SimEvent::write_done, running.id, op->offset, nullptr});
    }
  } else if (fail_sync_ > 0 && --fail_sync_ == 0) {
    result = -EIO;
  } else {
    note({SimEvent::sync_done, running.id, 0, nullptr});
  }
  complete(op, result);
}

int SimIo::run_once(int64_t timeout_us) {
  take_posted();
  if (!running_.empty()) {
    size_t count = 1 + random_() % std::min<size_t>(running_.size(), 4);
    while (count-- > 0 && !running_.empty()) finish(random_() % running_.size());
  } else if (!has_ready() && timeout_us < 0) {
    FFS_CHECK(in_flight_ > 0);  // only the helper thread could still bring something
  }
  return run_ready();
}

// ------------------------------------------------------------------------------ CrashImages

void CrashImages::advance(const SimEvent& event) {
  events_++;
  auto find = [&](uint64_t id) {
    return std::find_if(loose_.begin(), loose_.end(), [&](const Loose& w) { return w.id == id; });
  };
  switch (event.kind) {
    case SimEvent::write_started:
      loose_.push_back({event.id, event.offset, event.bytes, false, 0});
      break;
    case SimEvent::write_done: {
      // Behind those that completed before, so that overlapping writes lie in the right order.
      Loose write = *find(event.id);
      loose_.erase(find(event.id));
      write.completed = true;
      write.completed_at = events_;
      auto first_running =
          std::find_if(loose_.begin(), loose_.end(), [](const Loose& w) { return !w.completed; });
      loose_.insert(first_running, write);
      break;
    }
    case SimEvent::sync_started:
      syncs_[event.id] = events_;
      break;
    case SimEvent::sync_done: {
      uint64_t started = syncs_[event.id];
      for (const Loose& write : loose_) {
        if (write.completed && write.completed_at < started) {
          durable_.write(write.offset, write.bytes->data(), write.bytes->size());
        }
      }
      std::erase_if(loose_, [&](const Loose& w) { return w.completed && w.completed_at < started; });
      syncs_.erase(event.id);
      break;
    }
  }
}

}  // namespace ffs::io
