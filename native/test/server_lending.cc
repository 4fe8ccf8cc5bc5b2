// Reads sent out of the memory of a device on tmpfs (server/lending.h): what is sent, what goes another way,
// and what becomes of a slot that somebody is being sent.
#include "server/lending.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>

#include <fstream>
#include <sstream>

#include "base/fd.h"
#include "io/memory_copies.h"
#include "test/server_reader.h"

using namespace ffs;
using namespace ffs::server;
using namespace ffs::server::testing;
using wire::UpdateKind;

namespace {

constexpr uint32_t kChunk = ReaderWorld::kChunk;
constexpr uint64_t kReads = 16;  // more than sockets take
constexpr uint64_t kDevice = 256u << 20;
constexpr uint64_t kForEver = UINT64_MAX;

// A tmpfs with O_DIRECT and some room.
bool suits() {
  char path[] = "/dev/shm/ffs-lending-XXXXXX";
  Fd fd(::mkostemp(path, O_CLOEXEC | O_DIRECT));
  struct statvfs facts {};
  const bool good = fd.valid() && io::MemoryCopies::lies_in_memory(fd.get()) &&
                    ::fstatvfs(fd.get(), &facts) == 0 && facts.f_bavail * facts.f_frsize > 256u << 20;
  if (fd.valid()) ::unlink(path);
  if (!good) MESSAGE("/dev/shm is no tmpfs with room");
  return good;
}

Cluster::Options in_memory(uint64_t most_lent_us = kMostLentUs) {
  Cluster::Options options;
  options.in_memory = true;
  options.most_lent_us = most_lent_us;
  options.device_bytes = kDevice;
  return options;
}

struct World : ReaderWorld {
  explicit World(const Cluster::Options& options, net::Transport transport = net::Transport::kTcp)
      : ReaderWorld(options, transport, kReads) {}
  void ask_and_not_read() {
    const uint64_t before = metrics().memory_reads;
    ask();
    wait_for([&](const ShardMetrics& now) { return now.memory_reads == before + kReads; });
    CHECK(metrics().memory_lent_bytes >= kChunk);  // the rest has gone, or waits in sockets
    CHECK(metrics().pool_used_bytes == 0);
  }
  void read_all() {
    ReaderWorld::read_all();
    wait_for([](const ShardMetrics& now) { return now.memory_lent_bytes == 0; });
  }
  // A new version of half of the chunks, none of the others, and more written than there are free slots that
  // nobody has.
  void take_every_slot() {
    for (uint64_t i = 1; i <= kReads; i++) {
      if (i % 2 == 0) {
        REQUIRE(writer.change(UpdateKind::kRemove, i).code() == 0);
      } else {
        REQUIRE(writer.write(i, 0, pattern(kChunk, 99)).code() == 0);
      }
    }
    const auto other = pattern(kChunk, 98);
    for (int i = 0; i < 100; i++) REQUIRE(writer.write(200 + i % 8, 0, other).code() == 0);
  }
  // A small overwrite of the last chunk, which goes into the slot once nobody reads that.
  void overwrite_a_little() { REQUIRE(writer.write(kReads, 8192, pattern(4096, 97)).code() == 0); }
};

// Where this process has the device mapped.
std::pair<void*, size_t> mapping_of(const std::string& device) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(device) == std::string::npos || line.find("rw-s") == std::string::npos) continue;
    uintptr_t from = 0, to = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> from >> dash >> to;
    return {reinterpret_cast<void*>(from), to - from};
  }
  FAIL("the device isn't mapped");
  return {};
}

}  // namespace

TEST_CASE("lending: how much, and how long") {
  constexpr uint64_t kAll = 64u << 20;
  CHECK(may_lend(0, 0, 16u << 20, kAll));
  CHECK(may_lend(kMostLentToOne - 4096, kMostLentToOne, 4096, kAll));
  CHECK_FALSE(may_lend(kMostLentToOne - 4096, kMostLentToOne, 4097, kAll));
  CHECK_FALSE(may_lend(0, kAll - 4096, 4097, kAll));
  CHECK_FALSE(may_lend(0, 0, 1, 0));
  Lent lent;
  CHECK_FALSE(lent_too_long(lent, kMostLentUs + 1, kMostLentUs));  // nobody has it
  lent.session = reinterpret_cast<Session*>(&lent);
  CHECK(lent_too_long(lent, kMostLentUs + 1, kMostLentUs));
  CHECK_FALSE(lent_too_long(lent, kMostLentUs, kMostLentUs));
  lent.copy = std::make_unique<uint8_t[]>(1);
  CHECK_FALSE(lent_too_long(lent, kMostLentUs + 1, kMostLentUs));  // there is a copy
}

TEST_CASE("lending: a device in memory is sent from there, what must be put together is not") {
  if (!suits()) return;
  for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
    World w(in_memory(), transport);
    const auto read = [&](uint64_t index, uint32_t offset, uint32_t length, uint32_t flags) {
      const uint64_t id = w.reader.send_read(index, offset, length, /*inline_data=*/true, 0, flags);
      return w.reader.take_read(w.reader.wait(id), offset, 0);
    };
    const auto lends = [&](uint64_t index, uint32_t offset, uint32_t length,
                           uint32_t flags = wire::kReadWantChecksums) {
      const ShardMetrics before = w.metrics();
      const Answer answer = read(index, offset, length, flags);
      REQUIRE(answer.code() == 0);
      const auto& bytes = w.content[index - 1];
      const size_t end = std::min<size_t>(bytes.size(), size_t{offset} + length);
      const std::vector<uint8_t> wanted(bytes.begin() + offset, bytes.begin() + static_cast<ptrdiff_t>(end));
      CHECK(answer.payload == wanted);
      const ShardMetrics now = w.metrics();
      CHECK(now.reads == before.reads + 1);
      CHECK(now.bytes_copied == before.bytes_copied);
      return now.memory_reads - before.memory_reads == 1;
    };
    CHECK(lends(1, 0, kChunk));
    CHECK(lends(1, 1, 4095));  // any range
    CHECK(lends(1, 65536 - 7, 65536 + 9));
    CHECK(lends(1, kChunk - 100, 4096));  // cut at the end
    CHECK(lends(2, 65536, 65536, wire::kReadWantChecksums | wire::kReadVerifyPartial));
    CHECK(lends(2, kChunk - 65536, 65536, wire::kReadWantChecksums | wire::kReadVerifyPartial));
    CHECK_FALSE(lends(2, 65536, 4096, wire::kReadWantChecksums | wire::kReadVerifyPartial));
    CHECK_FALSE(lends(2, 0, kChunk, wire::kReadWantChecksums | wire::kReadVerifyWhole));
    // Zeros at the end that nothing stores, and what is laid over the slot until it is in it.
    REQUIRE(w.writer.change(UpdateKind::kTruncate, 3, kChunk + 8192).code() == 0);
    w.content[2].resize(kChunk + 8192);
    CHECK_FALSE(lends(3, kChunk - 4096, 8192));
    CHECK(lends(3, 0, kChunk));
    w.wait_for([](const ShardMetrics& now) { return now.store.overlay_bytes == 0; });
    const auto patch = pattern(5000, 50);
    REQUIRE(w.writer.write(4, 3000, patch).code() == 0);
    std::copy(patch.begin(), patch.end(), w.content[3].begin() + 3000);
    (void)lends(4, 0, kChunk);  // right, wherever the overlay is by now
    w.wait_for([](const ShardMetrics& now) { return now.store.overlay_bytes == 0; });
    CHECK(lends(4, 0, kChunk));
    CHECK(read(5, 2 * kChunk, 4096, wire::kReadWantChecksums).payload.empty());
    CHECK(read(999, 0, 4096, wire::kReadWantChecksums).code() == ENOENT);
    const auto idle = [](const ShardMetrics& now) {
      return now.memory_lent_bytes + now.pool_used_bytes == 0;
    };
    w.wait_for(idle);
  }
}

TEST_CASE("lending: a slot that somebody is being sent isn't written, moved or given to others") {
  if (!suits()) return;
  World w(in_memory(kForEver));
  w.ask_and_not_read();
  w.overwrite_a_little();
  w.take_every_slot();
  CHECK(w.metrics().memory_read_copies == 0);
  w.read_all();
  const uint64_t before = w.metrics().memory_reads;
  CHECK(w.reader.read(1, 0, kChunk).payload == pattern(kChunk, 99));
  CHECK(w.reader.read(2, 0, kChunk).code() == ENOENT);
  CHECK(w.metrics().memory_reads == before + 1);
}

TEST_CASE("lending: a reader that doesn't read holds no slot for long") {
  if (!suits()) return;
  World w(in_memory());
  w.ask_and_not_read();
  w.overwrite_a_little();
  w.wait_for([](const ShardMetrics& now) { return now.store.overlay_bytes == 0; });  // it is in the slot
  CHECK(w.metrics().memory_read_copies > 0);
  CHECK(w.metrics().memory_lent_bytes > 0);  // still: the copies
  w.take_every_slot();
  w.read_all();
}

TEST_CASE("lending: what a connection had ends with it, in the middle of a reply too") {
  if (!suits()) return;
  for (const uint64_t most_us : {kForEver, kMostLentUs}) {  // slots, copies
    World w(in_memory(most_us));
    w.ask_and_not_read();
    if (most_us != kForEver) w.wait_for([](const ShardMetrics& now) { return now.memory_read_copies > 0; });
    const uint64_t sessions = w.metrics().sessions;
    w.reader.disconnect();
    w.wait_for([&](const ShardMetrics& now) { return now.sessions == sessions - 1; });
    CHECK(w.metrics().memory_lent_bytes == 0);
    w.overwrite_a_little();
    w.wait_for([](const ShardMetrics& now) { return now.store.overlay_bytes == 0; });
    w.take_every_slot();
    CHECK(w.cluster.node(0).server->stop() == 0);
    w.cluster.node(0).server.reset();
  }
}

TEST_CASE("lending: more than may be lent goes through the pool") {
  if (!suits()) return;
  Cluster::Options options = in_memory(kForEver);
  options.pool_bytes = 16u << 20;
  World w(options);
  for (uint64_t i = 1; i <= kReads; i++)
    w.ids.push_back(w.reader.send_read(i, 0, kChunk, /*inline_data=*/true));
  w.reader.flush();
  w.wait_for([](const ShardMetrics& now) { return now.pool_used_bytes > 0; });
  CHECK(w.metrics().memory_lent_bytes <= options.pool_bytes / 4);
  w.read_all();
  CHECK(w.metrics().memory_reads > 0);
  CHECK(w.metrics().memory_reads < kReads);
  w.wait_for([](const ShardMetrics& now) { return now.pool_used_bytes == 0; });
}

TEST_CASE("lending: pages that the kernel can't reach are read instead, and nothing is lent any more") {
  if (!suits()) return;
  for (const auto transport : {net::Transport::kTcp, net::Transport::kLocal}) {
    World w(in_memory(kForEver), transport);
    w.ask_and_not_read();
    const auto [base, bytes] = mapping_of(w.cluster.node(0).device);
    REQUIRE(::mprotect(base, bytes, PROT_NONE) == 0);
    w.read_all();
    const ShardMetrics after = w.metrics();
    CHECK(after.memory_read_copies > 0);
    const uint64_t id = w.reader.send_read(1, 0, kChunk, /*inline_data=*/true);
    CHECK(w.reader.take_read(w.reader.wait(id), 0, 0).payload == w.content[0]);
    CHECK(w.metrics().memory_reads == after.memory_reads);
  }
}

TEST_CASE("lending: a device that was cut ends the reply that has begun, and later reads are errors") {
  if (!suits()) return;
  World w(in_memory(kForEver));
  w.ask_and_not_read();
  const std::string& device = w.cluster.node(0).device;
  REQUIRE(::truncate(device.c_str(), 1 << 20) == 0);
  CHECK(w.reader.closed());
  w.wait_for([](const ShardMetrics& now) { return now.memory_lent_bytes == 0; });
  const Answer answer = w.writer.read(1, 0, kChunk);
  CHECK(answer.code() == EIO);
  CHECK(answer.payload.empty());
  REQUIRE(::truncate(device.c_str(), kDevice) == 0);
}

// A read under way when its chain changes is made again: what the first one had was never given back.
TEST_CASE("a read that is made again gives its first buffer back") {
  for (const bool memory : {false, true}) {
    if (memory && !suits()) continue;
    Cluster::Options options;
    options.in_memory = memory;
    World w(options);
    std::atomic<bool> over = false;
    std::thread changes([&] {
      for (int turn = 0; turn < 20; turn++) w.cluster.form();
      over = true;
    });
    uint64_t good = 0;
    while (!over) {
      std::vector<uint64_t> ids;
      for (uint64_t i = 1; i <= kReads; i++) ids.push_back(w.reader.send_read(i, 0, kChunk, true));
      w.reader.flush();
      for (const uint64_t id : ids) good += w.reader.wait(id).code() == 0 ? 1 : 0;
    }
    changes.join();
    CHECK(good > 0);
    const auto idle = [](const ShardMetrics& now) {
      return now.memory_lent_bytes + now.pool_used_bytes == 0;
    };
    w.wait_for(idle);
  }
}
