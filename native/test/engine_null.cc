// A store on a null device (io/null_io.h): its records are kept, its chunks' bytes are zeros; and neither
// kind of device is taken for the other.
#include <doctest/doctest.h>

#include <unistd.h>

#include <string>
#include <vector>

#include "backend.h"
#include "engine/chunk_store.h"
#include "engine_harness.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

constexpr uint64_t kDeviceBytes = 256ull << 20;

struct DeviceFile {
  std::string path = "./ffs-engine-null." + std::to_string(::getpid());
  ~DeviceFile() { ::unlink(path.c_str()); }
};

std::unique_ptr<io::Io> make_io(io::Backend backend) {
  io::Options options;
  options.backend = backend;
  auto made = io::Io::create(options);
  REQUIRE(made.ok());
  return std::move(*made);
}

Result<std::unique_ptr<ChunkStore>> open_as(io::Io& io, const std::string& path, bool null_data) {
  OpenOptions options;
  options.cluster = Harness::cluster();
  options.null_data = null_data;
  return ChunkStore::open(io, path, options);
}

FormatOptions format_as(bool null_data) {
  FormatOptions options = Harness::format_options();
  options.size_bytes = kDeviceBytes;
  options.sparse = !null_data;
  options.null_data = null_data;
  options.overwrite = true;
  return options;
}

template <typename Op>
void run(io::Io& io, Op& op, void (ChunkStore::*start)(Op*), ChunkStore& store) {
  bool done = false;
  op.owner = &done;
  op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  (store.*start)(&op);
  while (!done) io.run_once(-1);
}

int put(io::Io& io, ChunkStore& store, uint32_t version, uint32_t base, uint32_t offset, uint32_t length) {
  auto op = std::make_unique<StageOp>();
  Laid laid(0, std::vector<uint8_t>(length));
  op->target = TargetId(Harness::kTarget);
  op->key = key_of(1);
  op->version = v(version);
  if (base != 0) op->base = v(base);
  op->kind = base == 0 ? UpdateKind::replace : UpdateKind::write;
  op->offset = offset;
  op->length = length;
  op->data = laid.data;
  op->tail_padded = true;
  op->commit_now = true;
  run(io, *op, &ChunkStore::stage, store);
  return op->error;
}

std::vector<uint8_t> get(io::Io& io, ChunkStore& store, uint32_t length) {
  auto op = std::make_unique<ReadOp>();
  Laid laid(0, std::vector<uint8_t>(length, 3));
  op->target = TargetId(Harness::kTarget);
  op->key = key_of(1);
  op->length = length;
  op->memory = laid.data;
  op->verify_whole = true;
  run(io, *op, &ChunkStore::read, store);
  REQUIRE(op->error == 0);
  return {laid.data, laid.data + op->read_length};
}

}  // namespace

TEST_CASE("a null device keeps its records and has zeros with the right checksums") {
  DeviceFile file;
  const std::vector<uint8_t> zeros(1'500'000);
  {
    auto io = make_io(io::Backend::null);
    REQUIRE(ChunkStore::format(*io, file.path, format_as(true)).ok());
    auto store = open_as(*io, file.path, true);
    REQUIRE_MESSAGE(store.ok(), ChunkStore::last_open_message());
    CHECK(put(*io, **store, 1, 0, 0, 1'500'000) == 0);
    CHECK(put(*io, **store, 2, 1, 8192, 4096) == 0);  // verifies the old content of its granule
    CHECK(get(*io, **store, 2'000'000) == zeros);
    CHECK((*store)->close().ok());
  }
  auto io = make_io(io::Backend::null);
  auto store = open_as(*io, file.path, true);
  REQUIRE_MESSAGE(store.ok(), ChunkStore::last_open_message());
  CHECK(get(*io, **store, 2'000'000) == zeros);
}

TEST_CASE("a null device is opened as no other, and no other as one") {
  DeviceFile file;
  auto null = make_io(io::Backend::null);
  auto other = make_io(ffs::testing::chosen_backend());
  REQUIRE(ChunkStore::format(*null, file.path, format_as(true)).ok());
  CHECK(open_as(*other, file.path, false).error().code == EINVAL);
  CHECK(ChunkStore::last_open_message().find("a null device") != std::string::npos);
  CHECK(open_as(*other, file.path, true).error().code == ENOTSUP);
  REQUIRE(ChunkStore::format(*other, file.path, format_as(false)).ok());
  CHECK(open_as(*null, file.path, true).error().code == EINVAL);
  CHECK(ChunkStore::last_open_message().find("holds data") != std::string::npos);
}
