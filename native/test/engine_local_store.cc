// The store of a local KV tier: what comes back, what is refused, several threads, restarts, a full device.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "engine/local_store.h"
#include "no_threads.h"

using namespace ffs;
using namespace ffs::engine;

namespace {

constexpr uint32_t kBlock = 128 * 1024;

struct Aligned {
  explicit Aligned(size_t bytes) { REQUIRE(posix_memalign(&memory, 4096, bytes) == 0); }
  ~Aligned() { free(memory); }
  uint8_t* at(size_t offset) const { return static_cast<uint8_t*>(memory) + offset; }
  void* memory = nullptr;
};

struct TempFile {
  TempFile() {
    char name[] = "local_store_XXXXXX";
    const int fd = mkstemp(name);
    REQUIRE(fd >= 0);
    close(fd);
    path = name;
  }
  ~TempFile() { unlink(path.c_str()); }
  std::string path;
};

std::array<uint8_t, 16> half(uint64_t number, uint8_t which) {
  std::array<uint8_t, 16> out{};
  for (size_t i = 0; i < 8; i++) out[i] = static_cast<uint8_t>(mix64(number * 2 + which) >> (8 * i));
  out[15] = which;
  return out;
}

LocalEntry entry_of(LocalOp op, uint64_t number, uint8_t* memory, uint32_t length) {
  LocalEntry entry;
  entry.op = op;
  entry.key = half(number, 0);
  entry.tag = half(number, 1);
  entry.memory = memory;
  entry.length = length;
  return entry;
}

void fill(uint8_t* memory, uint64_t number, uint32_t length) {
  for (uint32_t i = 0; i < length; i++) memory[i] = static_cast<uint8_t>(mix64(number) >> (8 * (i % 8)));
}

bool is(const uint8_t* memory, uint64_t number, uint32_t length) {
  for (uint32_t i = 0; i < length; i++)
    if (memory[i] != static_cast<uint8_t>(mix64(number) >> (8 * (i % 8)))) return false;
  return true;
}

std::unique_ptr<LocalStore> open_at(const std::string& path, uint64_t size = 256u << 20, bool fresh = false) {
  LocalOptions options;
  options.path = path;
  const char* backend = std::getenv("FFS_TEST_IO_BACKEND");
  options.backend = backend != nullptr ? backend : "";
  options.size_bytes = size;
  options.max_chunks = 1024;
  options.sparse = true;
  options.fresh = fresh;
  std::string why;
  auto store = LocalStore::open(options, &why);
  REQUIRE_MESSAGE(store.ok(), why);
  return std::move(*store);
}

int32_t one(LocalStore& store, LocalEntry entry) {
  store.run({&entry, 1}, 0);
  return entry.result;
}

}  // namespace

TEST_SUITE("engine_file") {
  TEST_CASE("a local store that gets no thread says so") {
    TempFile file;
    LocalOptions options;
    options.path = file.path;
    options.size_bytes = 256u << 20;
    options.max_chunks = 1024;
    options.sparse = true;
    {
      const NoThreads none;
      const auto store = LocalStore::open(options);
      REQUIRE(!store.ok());
      CHECK(store.error().code == EAGAIN);
    }
    CHECK(LocalStore::open(options).ok());
  }

  TEST_CASE("a local store gives back what was put, whole or not at all, also after a restart") {
    TempFile file;
    Aligned memory(4 * kBlock);
    auto store = open_at(file.path);
    std::vector<LocalEntry> batch;
    const uint32_t lengths[] = {1, 4096, 65537, kBlock};
    for (uint32_t i = 0; i < 4; i++) {
      fill(memory.at(i * kBlock), i, lengths[i]);
      batch.push_back(entry_of(LocalOp::put, i, memory.at(i * kBlock), lengths[i]));
    }
    store->run(batch, 2);
    for (uint32_t i = 0; i < 4; i++) CHECK(batch[i].result == static_cast<int32_t>(lengths[i]));
    for (int round = 0; round < 2; round++) {
      std::memset(memory.memory, 0xee, 4 * kBlock);
      for (uint32_t i = 0; i < 4; i++) batch[i] = entry_of(LocalOp::read, i, memory.at(i * kBlock), kBlock);
      batch.push_back(entry_of(LocalOp::read, 77, memory.at(0), kBlock));
      store->run(batch, 0);
      for (uint32_t i = 0; i < 4; i++) {
        CHECK(batch[i].result == static_cast<int32_t>(lengths[i]));
        CHECK(is(memory.at(i * kBlock), i, lengths[i]));
      }
      CHECK(batch.back().result == -ENOENT);
      batch.pop_back();
      store.reset();
      store = open_at(file.path);
    }
    CHECK(one(*store, entry_of(LocalOp::read, 3, memory.at(0), kBlock - 1)) == -EMSGSIZE);
    CHECK(one(*store, entry_of(LocalOp::exists, 2, nullptr, 0)) == 65537);
    LocalEntry other = entry_of(LocalOp::read, 2, memory.at(0), kBlock);
    other.tag = half(5, 1);
    CHECK(one(*store, other) == -ENOENT);
    other.op = LocalOp::exists;
    CHECK(one(*store, other) == -ENOENT);
    CHECK(one(*store, entry_of(LocalOp::remove, 2, nullptr, 0)) == 0);
    CHECK(one(*store, entry_of(LocalOp::remove, 2, nullptr, 0)) == 0);
    CHECK(one(*store, entry_of(LocalOp::read, 2, memory.at(0), kBlock)) == -ENOENT);
    fill(memory.at(0), 9, kBlock);
    CHECK(one(*store, entry_of(LocalOp::put, 3, memory.at(0), kBlock)) == static_cast<int32_t>(kBlock));
    CHECK(one(*store, entry_of(LocalOp::read, 3, memory.at(kBlock), kBlock)) == static_cast<int32_t>(kBlock));
    CHECK(is(memory.at(kBlock), 9, kBlock));
    store.reset();
    store = open_at(file.path, 256u << 20, true);
    CHECK(one(*store, entry_of(LocalOp::exists, 3, nullptr, 0)) == -ENOENT);
  }

  TEST_CASE("a local store lists all that it holds, page by page") {
    TempFile file;
    Aligned memory(4096);
    auto store = open_at(file.path);
    for (uint64_t i = 0; i < 50; i++) {
      fill(memory.at(0), i, 4096);
      REQUIRE(one(*store, entry_of(LocalOp::put, i, memory.at(0), 100)) == 100);
    }
    std::set<std::array<uint8_t, 16>> seen;
    std::vector<LocalListed> page(7);
    const std::array<uint8_t, 16>* after = nullptr;
    std::array<uint8_t, 16> last{};
    while (const size_t count = store->list(after, page)) {
      for (size_t i = 0; i < count; i++) {
        CHECK(seen.insert(page[i].key).second);
        CHECK(page[i].length == 100);
      }
      last = page[count - 1].key;
      after = &last;
    }
    CHECK(seen.size() == 50);
  }

  TEST_CASE("a full local store says so and goes on, and room comes back") {
    TempFile file;
    Aligned memory(1u << 20);
    auto store = open_at(file.path, 288u << 20);
    fill(memory.at(0), 1, 1u << 20);
    uint64_t stored = 0;
    int32_t result = 0;
    while ((result = one(*store, entry_of(LocalOp::put, stored, memory.at(0), 1u << 20))) > 0) stored++;
    CHECK(result == -ENOSPC);
    CHECK(stored > 10);
    CHECK(one(*store, entry_of(LocalOp::exists, stored, nullptr, 0)) == -ENOENT);
    for (uint64_t i = 0; i < 5; i++) CHECK(one(*store, entry_of(LocalOp::remove, i, nullptr, 0)) == 0);
    CHECK(one(*store, entry_of(LocalOp::put, 1000, memory.at(0), 1u << 20)) == 1 << 20);
    CHECK(one(*store, entry_of(LocalOp::read, stored - 1, memory.at(0), 1u << 20)) == 1 << 20);
  }

  TEST_CASE("many threads put, read and remove at once, and no block is another's") {
    TempFile file;
    auto store = open_at(file.path, 256u << 20);
    std::atomic<int> wrong{0}, hits{0};
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; t++) {
      threads.emplace_back([&, t] {
        Aligned memory(16 * kBlock);
        for (uint64_t round = 0; round < 20; round++) {
          std::vector<LocalEntry> batch;
          for (uint64_t i = 0; i < 16; i++) {
            const uint64_t number = t * 100 + (round * 5 + i) % 60;
            fill(memory.at(i * kBlock), number, kBlock);
            batch.push_back(entry_of(LocalOp::put, number, memory.at(i * kBlock), kBlock));
          }
          store->run(batch, 0);
          for (auto& entry : batch)
            if (entry.result != static_cast<int32_t>(kBlock)) wrong++;
          const uint64_t gone = t * 100 + round % 60;
          if (one(*store, entry_of(LocalOp::remove, gone, nullptr, 0)) != 0) wrong++;
          for (uint64_t i = 0; i < 16; i++) {
            batch[i].op = LocalOp::read;
            batch[i].length = kBlock;
            std::memset(batch[i].memory, 0, kBlock);
          }
          store->run(batch, 0);
          for (uint64_t i = 0; i < 16; i++) {
            const uint64_t number = t * 100 + (round * 5 + i) % 60;
            if (batch[i].result == -ENOENT && number == gone) continue;
            if (batch[i].result != static_cast<int32_t>(kBlock) || !is(batch[i].memory, number, kBlock))
              wrong++;
            hits++;
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(hits > 1000);
    CHECK(store->figures().most_in_flight >= 16);
  }

  TEST_CASE("a device of a cluster isn't taken for a local store, nor overwritten") {
    TempFile file;
    {
      auto io = io::Io::create(io::Options());
      REQUIRE(io.ok());
      FormatOptions format;
      format.cluster.fill(7);
      format.targets = {TargetId{9}};
      format.size_bytes = 256u << 20;
      format.sparse = true;
      REQUIRE(ChunkStore::format(**io, file.path, format).ok());
    }
    for (const bool fresh : {false, true}) {
      LocalOptions options;
      options.path = file.path;
      options.size_bytes = 256u << 20;
      options.fresh = fresh;
      const auto store = LocalStore::open(options);
      REQUIRE(!store.ok());
      CHECK(store.error().code == EXDEV);
    }
  }
}
