// The handles of rings. A handle isn't an address but a place in a table and a number that the place has had
// but once: a call that another thread makes while the ring goes, or after, finds that out without touching
// memory of the ring. Any thread; one at a time is inside a ring.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "client/fork.h"
#include "client/ring.h"
#include "ffs/ffs.h"

namespace ffs::capi {

// Of one ring after another; it is never freed. What isn't atomic belongs to whoever has set `inside`.
struct RingPlace {
  std::atomic<uint64_t> number{0};  // odd: a ring lives here
  std::atomic<bool> inside{false};
  std::atomic<int> fd{-1};
  std::atomic<uint64_t> process{0};
  std::unique_ptr<client::Ring> ring;
};

class RingTable {
 public:
  static constexpr uint32_t kBlock = 256, kBlocks = 256;

  // Null: there are 65536 rings.
  static ffs_ring* add(std::unique_ptr<client::Ring> ring) {
    for (uint32_t tries = 0; tries < kBlock * kBlocks; tries++) {
      // Round and round: a place that was left rests before it is used again.
      const uint32_t index = next().fetch_add(1, std::memory_order_relaxed) % (kBlock * kBlocks);
      RingPlace* place = at(index, true);
      const uint64_t number = place->number.load(std::memory_order_acquire);
      if (number % 2 != 0 || place->inside.exchange(true, std::memory_order_acquire)) continue;
      if (place->number.load(std::memory_order_relaxed) != number) {
        place->inside.store(false, std::memory_order_release);
        continue;
      }
      place->fd.store(ring->fd(), std::memory_order_relaxed);
      place->process.store(client::process_generation(), std::memory_order_relaxed);
      place->ring = std::move(ring);
      place->number.store(number + 1, std::memory_order_release);
      place->inside.store(false, std::memory_order_release);
      return reinterpret_cast<ffs_ring*>((number + 1) << 16 | index);
    }
    return nullptr;
  }

  // The place of a handle that is in use; null: its ring is gone.
  static RingPlace* find(ffs_ring* handle) {
    RingPlace* place =
        at(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(handle) % (kBlock * kBlocks)), false);
    return place != nullptr && is_of(*place, handle) ? place : nullptr;
  }
  static bool is_of(const RingPlace& place, ffs_ring* handle) {
    const uint64_t number = reinterpret_cast<uintptr_t>(handle) >> 16;
    return number % 2 != 0 && place.number.load(std::memory_order_acquire) == number;
  }
  // The ring is over and taken out; by whoever is inside.
  static void leave(RingPlace& place) {
    place.ring.reset();
    place.number.fetch_add(1, std::memory_order_release);
  }

 private:
  using Block = std::array<RingPlace, kBlock>;
  static std::atomic<uint32_t>& next() {
    static std::atomic<uint32_t> value{0};
    return value;
  }
  static RingPlace* at(uint32_t index, bool make) {
    static std::array<std::atomic<Block*>, kBlocks> blocks{};
    std::atomic<Block*>& slot = blocks[index / kBlock];
    Block* block = slot.load(std::memory_order_acquire);
    if (block == nullptr && make) {
      auto fresh = std::make_unique<Block>();
      if (slot.compare_exchange_strong(block, fresh.get(), std::memory_order_acq_rel))
        block = fresh.release();
    }
    return block == nullptr ? nullptr : &(*block)[index % kBlock];
  }
};

}  // namespace ffs::capi
