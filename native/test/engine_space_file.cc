// Space on a real file: discards give its blocks back, round after round, and compaction works over real I/O.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "engine_space.h"
#include "loop_device.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

struct TempFile {
  std::string path;
  TempFile() {
    // In memory where that can be, as these tests write and flush a lot; FFS_SPACE_DIR: on another file
    // system.
    const char* base = std::getenv("FFS_SPACE_DIR");
    std::string name =
        (base != nullptr ? std::string(base) : ffs::testing::fast_directory()) + "/ffs-space-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    directory = name;
    path = name + "/store";
  }
  ~TempFile() { std::filesystem::remove_all(directory); }
  uint64_t allocated() const {
    struct stat status;
    REQUIRE(::stat(path.c_str(), &status) == 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }
  std::string directory;
};

// Puts so many chunks, or removes all there are.
void all_at_once(SpaceStore& s, UpdateKind kind, uint64_t count, uint32_t size) {
  std::vector<std::unique_ptr<SpaceStore::Job>> jobs;
  for (const auto& [n, chunk] : s.chunks) {
    if (kind == UpdateKind::remove) jobs.push_back(s.start(kind, n, 0));
  }
  for (uint64_t n = 0; n < count; n++) jobs.push_back(s.start(kind, n, size));
  for (auto& job : jobs) CHECK(s.end(*job) == 0);
}

}  // namespace

TEST_CASE("space on a file: fill and delete for ten rounds, its blocks come back each time") {
  TempFile file;
  SpaceStore s(file.path);
  s.format_path(300ull << 20, 3'000, true);
  s.options.discard_delay_us = 2'000;
  s.open();
  const uint64_t slabs = s.store->capacity().capacity_bytes;
  const uint64_t empty = file.allocated();
  uint64_t took = 0, most_left = 0;
  for (int round = 0; round < 10; round++) {
    CAPTURE(round);
    // Through nearly all of the device in the first round and the last, else some slabs: it takes long.
    uint64_t put_now = 0;
    if (round == 0 || round == 9) {
      put_now = s.fill(0, 16 << 20);
      if (round == 0) took = put_now;
      CHECK(put_now == took);
      CHECK(file.allocated() >= took << 24);
    } else {
      all_at_once(s, UpdateKind::replace, 6, 4 << 20);
    }
    if (round % 4 == 0) CHECK(s.all_wrong() == "");
    all_at_once(s, UpdateKind::remove, 0, 0);
    CHECK(s.chunks.empty());
    s.settle();  // the records are durable, so the slabs are free
    for (int i = 0; i < 10'000 && s.store->metrics().discards_due_bytes > 0; i++) s.pass();
    s.settle();
    CHECK(s.free_bytes() == slabs);
    const uint64_t left = file.allocated() - std::min(empty, file.allocated());
    most_left = std::max(most_left, left);
    if (round == 4) s.reopen();
  }
  // Journal and snapshots stay; of the slabs nothing does.
  MESSAGE("empty " << empty << ", most left " << most_left << ", journal "
                   << s.store->identity().journal_bytes);
  CHECK(most_left <= s.store->identity().journal_bytes + (16 << 20));
  const StoreMetrics m = s.store->metrics();
  CHECK(m.discards > 0);
  CHECK(m.discard_failures == 0);
  MESSAGE("held at most " << (most_left >> 20) << " MiB beside the empty store, of " << (slabs >> 20)
                          << " MiB of slabs");
}

TEST_CASE("space on a file: compaction makes room for large chunks, what a process reads stays right") {
  TempFile file;
  SpaceStore s(file.path);
  s.format_path(300ull << 20, 3'000, true);
  s.open();
  REQUIRE(s.fill(0, 1'500'000) > 100);
  std::vector<uint64_t> keys;
  for (const auto& [n, chunk] : s.chunks) keys.push_back(n);
  std::shuffle(keys.begin(), keys.end(), s.random);
  std::vector<std::unique_ptr<SpaceStore::Job>> jobs;
  for (size_t i = 0; i < keys.size() / 2; i++) jobs.push_back(s.start(UpdateKind::remove, keys[i], 0));
  for (auto& job : jobs) CHECK(s.end(*job) == 0);
  s.settle();
  const uint64_t promised = s.free_bytes();
  const uint64_t took = s.fill(10'000, 16 << 20) << 24;
  s.settle();
  CHECK(took <= promised);
  CHECK(took + 2 * (16 << 20) >= promised);
  CHECK(s.store->metrics().moves > 0);
  CHECK(s.all_wrong() == "");
  s.reopen();
  CHECK(s.all_wrong() == "");
}

TEST_CASE("space on a block device: freed slabs are discarded while the store is open, and all on request") {
  ffs::testing::LoopDevice loop(
      ffs::testing::fast_directory() + "/ffs-space-loop." + std::to_string(::getpid()), 300ull << 20, 4096);
  if (!loop.valid()) {
    MESSAGE("skipped: " << loop.why_not());
    return;
  }
  SpaceStore s(loop.path());
  s.format_path(0, 3'000, false);
  s.options.discard_delay_us = 2'000;
  s.open();
  auto allocated = [&] {
    struct stat status;
    REQUIRE(::fstat(loop.file().get(), &status) == 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  };
  const uint64_t empty = allocated();
  all_at_once(s, UpdateKind::replace, 10, 4 << 20);
  CHECK(allocated() >= empty + (39 << 20));
  all_at_once(s, UpdateKind::remove, 0, 0);
  s.settle();
  for (int i = 0; i < 10'000 && s.store->metrics().discards_due_bytes > 0; i++) s.pass();
  s.settle();
  if (s.store->metrics().discards == 0) {
    MESSAGE("skipped: this device doesn't discard");
    return;
  }
  CHECK(allocated() <= empty + (24 << 20));
  // Written before discards were on: given back by the tool's function.
  s.close();
  s.options.discard = Discard::off;
  s.open();
  all_at_once(s, UpdateKind::replace, 10, 4 << 20);
  all_at_once(s, UpdateKind::remove, 0, 0);
  s.settle();
  CHECK(allocated() >= empty + (39 << 20));
  CHECK(s.put(1, 100'000) == 0);
  uint64_t bytes = 0;
  CHECK(s.store->discard_free(&bytes).ok());
  CHECK(bytes == s.store->capacity().capacity_bytes - kSlabBytes);
  CHECK(allocated() <= empty + (24 << 20));
  CHECK(s.all_wrong() == "");
}
