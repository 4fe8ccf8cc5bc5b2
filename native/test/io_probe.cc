// What stands on a device is named before anything is written, and wiped where that is asked for.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "io/block_facts.h"
#include "io/device.h"
#include "io/io.h"
#include "io/probe.h"
#include "io/shadow_io.h"

using namespace ffs;
using namespace ffs::io;

namespace {

struct SparseFile {
  std::string path = "ffs-probe-test." + std::to_string(::getpid());
  Fd fd;
  uint64_t size;
  // In memory (no disk is waited for), or a file for what opens by path.
  explicit SparseFile(uint64_t bytes, bool in_memory = true) : size(bytes) {
    ::unlink(path.c_str());
    fd.reset(in_memory ? ::memfd_create("device", MFD_CLOEXEC)
                       : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    REQUIRE(fd.valid());
    REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(size)) == 0);
  }
  ~SparseFile() { ::unlink(path.c_str()); }
  void put(uint64_t offset, const std::string& bytes) {
    REQUIRE(::pwrite(fd.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset)) ==
            static_cast<ssize_t>(bytes.size()));
  }
  Probed look() {
    auto probed = probe(fd.get(), size);
    REQUIRE(probed.ok());
    return *probed;
  }
};

constexpr uint64_t kMiB = 1ull << 20;

std::string raw(std::initializer_list<int> bytes) {
  std::string out;
  for (int byte : bytes) out.push_back(static_cast<char>(byte));
  return out;
}

}  // namespace

TEST_CASE("signatures get their names, at both ends and far copies, and none is left after wiping") {
  struct Case {
    const char* name;
    uint64_t offset;
    std::string bytes;
  };
  constexpr uint64_t size = 80 * kMiB;
  const std::string raid = raw({0xfc, 0x4e, 0x2b, 0xa9, 1, 0, 0, 0});
  const std::vector<Case> cases = {
      {"ext2/3/4", 1080, raw({0x53, 0xef})},
      {"XFS", 0, "XFSB"},
      {"btrfs", 65600, "_BHRfS_M"},
      {"copy of a btrfs", 64 * kMiB + 64, "_BHRfS_M"},
      {"GPT", 4096, "EFI PART"},
      {"copy of a GPT", size - 512, "EFI PART"},
      {"LVM", 512, "LABELONE"},
      {"Linux RAID", 4096, raid},
      {"Linux RAID", size - 8192, raid},
      {"LUKS", 0, "LUKS" + raw({0xba, 0xbe})},
      {"second header of a LUKS", 4 * kMiB, "SKUL" + raw({0xba, 0xbe})},
      {"bcache", 4096 + 24, raw({0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca})},
      {"ZFS", 128 * 1024 + 3072, raw({0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0})},
      {"ZFS", size - 384 * 1024, raw({0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c})},
      {"swap", 4086, "SWAPSPACE2"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.name);
    SparseFile file(size);
    CHECK(file.look().blank);
    CHECK(file.look().text().empty());
    file.put(c.offset, c.bytes);
    const Probed probed = file.look();
    CHECK_FALSE(probed.blank);
    REQUIRE(probed.found.size() == 1);
    CHECK(probed.found[0].offset == c.offset);
    CHECK(probed.text().find(c.name) != std::string::npos);
    REQUIRE(wipe_signatures(file.fd.get(), size).ok());
    CHECK(file.look().blank);
  }
}

TEST_CASE(
    "a partition table is told from the mark of a FAT boot sector, and data without a name isn't blank") {
  SparseFile file(64 * kMiB);
  file.put(510, raw({0x55, 0xaa}));
  CHECK(file.look().found.empty());
  CHECK(file.look().text() == "data in the 4 KiB at byte 0");
  file.put(446 + 4, raw({0x83}));
  CHECK(file.look().text().find("MBR partition table") != std::string::npos);
  file.put(82, "FAT32   ");
  CHECK(file.look().text().find("FAT") != std::string::npos);
  CHECK(file.look().text().find("MBR") == std::string::npos);
  // Between the ends every 1/257 of the device is looked at.
  SparseFile other(200 * kMiB);
  other.put(120 * kMiB, std::string(kMiB, 'x'));
  CHECK_FALSE(other.look().blank);
  CHECK(other.look().data_at >= 120 * kMiB);
}

TEST_CASE("the kernel's facts of a device that isn't there are the careful ones") {
  const BlockFacts facts = block_facts(0);
  CHECK(facts.volatile_cache);
  CHECK(facts.discard_bytes == 0);
  CHECK(user_of(0).empty());
}

TEST_CASE("an Io over memory returns what was written through it and leaves the file as it is") {
  for (Backend backend : {Backend::uring, Backend::pread}) {
    SparseFile file(kMiB, false);
    file.put(0, std::string(64 * 1024, 'o'));
    Options options;
    options.backend = backend;
    auto real = Io::create(options);
    REQUIRE(real.ok());
    Fd direct(::open(file.path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));  // a write would fail
    ShadowIo io(**real);
    auto added = io.add_file(direct.get());
    REQUIRE(added.ok());
    std::unique_ptr<uint8_t, void (*)(void*)> memory(
        static_cast<uint8_t*>(std::aligned_alloc(4096, 64 * 1024)), std::free);
    auto run = [&](auto start) {
      bool done = false;
      Op op;
      op.owner = &done;
      op.done = mark_done;
      start(&op);
      CHECK_FALSE(done);  // nothing completes inside the call
      return wait_for(io, op);
    };
    std::memset(memory.get(), 'n', 8192);
    CHECK(run([&](Op* op) { io.write(op, *added, 8192, memory.get(), 8192, {}); }) == 8192);
    CHECK(run([&](Op* op) { io.datasync(op, *added); }) == 0);
    CHECK(run([&](Op* op) { io.read(op, *added, 4096, memory.get(), 16384, {}); }) == 16384);
    CHECK((memory.get()[4095] == 'o' && memory.get()[4096] == 'n'));
    CHECK((memory.get()[12287] == 'n' && memory.get()[12288] == 'o'));
    CHECK(run([&](Op* op) { io.read(op, *added, 32768, memory.get(), 4096, {}); }) == 4096);
    CHECK(memory.get()[0] == 'o');
    CHECK(run([&](Op* op) { io.discard(op, *added, 0, 4096); }) == 0);
    CHECK(run([&](Op* op) { io.read(op, *added, kMiB - 4096, memory.get(), 8192, {}); }) == 4096);
    bool worked = false;
    Offload offload;
    offload.op.owner = &worked;
    offload.op.done = mark_done;
    offload.work = [](Offload*) -> int32_t { return 7; };
    io.offload(&offload);
    while (!worked) io.run_once(-1);
    CHECK(io.written_bytes() == 8192);
    char byte = 0;
    CHECK((::pread(file.fd.get(), &byte, 1, 8192) == 1 && byte == 'o'));
    io.remove_file(*added);
  }
}

TEST_CASE("a device file grows, sparse as it was, and keeps its size where it can't") {
  SparseFile file(kMiB, false);
  auto opened = open_device(file.path);
  REQUIRE(opened.ok());
  Device device = *opened;
  CHECK(device.sparse);
  CHECK(device.discard_bytes == UINT64_MAX);
  CHECK(extend_device_file(device, kMiB).error().code == EINVAL);
  CHECK(extend_device_file(device, 2 * kMiB).ok());
  CHECK(device.size_bytes == 2 * kMiB);
  struct stat status;
  CHECK((::fstat(device.fd, &status) == 0 && status.st_size == static_cast<off_t>(2 * kMiB)));
  CHECK(extend_device_file(device, 1ull << 62).error().code == EFBIG);
  CHECK((::fstat(device.fd, &status) == 0 && status.st_size == static_cast<off_t>(2 * kMiB)));
  close_device(device);
  const auto facts = describe_device(file.path);
  REQUIRE(facts.ok());
  CHECK((facts->fd == -1 && facts->size_bytes == 2 * kMiB && !facts->block_device));
  auto reader = open_device(file.path, Access::read_only);
  REQUIRE(reader.ok());
  CHECK(open_device(file.path).error().code == EBUSY);  // alone, whichever the access
  close_device(*reader);
}
