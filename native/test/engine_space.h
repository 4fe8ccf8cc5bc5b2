// A store whose space is tested: on a simulated disk of any size or on a real file, with chunks of one
// pattern each, so that thousands of them can be put and checked. For tests only.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backend.h"
#include "engine/format.h"
#include "engine_harness.h"

namespace ffs::engine::testing {

// The bytes of a chunk: made from its seed, cheap to make and to compare.
inline void fill_pattern(uint8_t* bytes, uint32_t size, uint64_t seed) {
  uint64_t word = mix64(seed + 1);
  uint32_t at = 0;
  for (; at + 8 <= size; at += 8, word += 0x9e3779b97f4a7c15) std::memcpy(bytes + at, &word, 8);
  std::memcpy(bytes + at, &word, size - at);
}

struct SpaceChunk {
  uint64_t version = 0;
  uint32_t size = 0;
  uint64_t seed = 0;
};

struct SpaceStore {
  static constexpr uint64_t kTarget = Harness::kTarget;

  // On a simulated disk.
  explicit SpaceStore(uint64_t seed, uint64_t disk_bytes = 300ull << 20)
      : SpaceStore(seed, io::SimImage(disk_bytes)) {}
  SpaceStore(uint64_t seed, io::SimImage image) : random(seed) {
    auto made = std::make_unique<io::SimIo>(std::move(image), seed);
    sim = made.get();
    io = std::move(made);
    base_options();
  }
  // On a file or block device, made by format_path().
  explicit SpaceStore(std::string path_) : random(1), path(std::move(path_)) {
    io::Options io_options;
    io_options.backend = ffs::testing::chosen_backend();
    auto made = io::Io::create(io_options);
    REQUIRE(made.ok());
    io = std::move(made.value());
    base_options();
  }
  ~SpaceStore();
  SpaceStore(const SpaceStore&) = delete;

  void format(uint64_t max_chunks = 0);
  void format_path(uint64_t size_bytes, uint64_t max_chunks, bool sparse);
  void open();
  void close();
  void reopen() {
    close();
    open();
  }
  void pass();  // one pass of the loop, a little later
  void run_until(const bool& done);
  void settle();  // until nothing is in flight
  // Compacts as long as there is something to gain.
  void compact_all();

  static ChunkKey key(uint64_t n) { return ChunkKey::of_file(1 + n / 1000, n % 1000); }
  // Whole chunks, committed at once; `hint` chooses the slot. The error.
  int put(uint64_t n, uint32_t size, uint32_t hint = 0);
  int truncate(uint64_t n, uint32_t size);
  int remove(uint64_t n);
  // Compares with what was put.
  std::string wrong(uint64_t n);
  std::string all_wrong();
  // Puts chunks of this size from key `from` on until there is no room; how many.
  uint64_t fill(uint64_t from, uint32_t size, uint32_t hint = 0);
  uint64_t free_bytes() const { return store->capacity().free_bytes; }

  struct Job {  // an update on its way
    StageOp op;
    uint8_t* memory = nullptr;
    uint64_t n = 0;
    SpaceChunk after;
    bool removes = false;
    bool finished = false;
    ~Job() { std::free(memory); }
  };
  std::unique_ptr<Job> start(UpdateKind kind, uint64_t n, uint32_t size, uint32_t hint = 0,
                             bool commit_now = true);
  int end(Job& job);  // waits, and notes what it did

  std::mt19937_64 random;
  std::string path;
  io::SimIo* sim = nullptr;
  std::unique_ptr<io::Io> io;
  std::unique_ptr<ChunkStore> store;
  OpenOptions options;
  Mutants mutants;
  std::map<uint64_t, SpaceChunk> chunks;  // what is there
  uint64_t next_version = 1;
  uint64_t same_seed = 0;  // not 0: all that is put has these bytes
  uint64_t clock_us = 1000;

 private:
  void base_options();
  std::vector<uint8_t> expected_;
  uint8_t* read_memory_ = nullptr;
};

}  // namespace ffs::engine::testing
