#include "engine_space.h"

#include <cerrno>
#include <ctime>

namespace ffs::engine::testing {

void SpaceStore::base_options() {
  options.cluster = Harness::cluster();
  options.scratch_bytes = 16u << 20;
  options.overlay_bytes = 16u << 20;
  if (sim != nullptr) options.write_cache = WriteCache::is_volatile;
  read_memory_ = static_cast<uint8_t*>(std::aligned_alloc(4096, kMaxChunkBytes + 4096));
  FFS_CHECK(read_memory_ != nullptr);
}

SpaceStore::~SpaceStore() {
  if (store != nullptr) settle();
  store.reset();
  std::free(read_memory_);
}

void SpaceStore::format(uint64_t max_chunks) {
  FormatOptions format = Harness::format_options();
  format.max_chunks = max_chunks;
  Status made = ChunkStore::format_file(*io, sim->disk(), sim->size_bytes(), 512, format);
  if (!made.ok()) FAIL("format: " << ChunkStore::last_open_message());
}

void SpaceStore::format_path(uint64_t size_bytes, uint64_t max_chunks, bool sparse) {
  FormatOptions format = Harness::format_options();
  format.max_chunks = max_chunks;
  format.size_bytes = size_bytes;
  format.sparse = sparse;
  format.overwrite = true;
  Status made = ChunkStore::format(*io, path, format);
  if (!made.ok()) FAIL("format: " << ChunkStore::last_open_message());
}

void SpaceStore::open() {
  auto opened = sim != nullptr ? ChunkStore::open_file(*io, sim->disk(), sim->size_bytes(), options, mutants)
                               : ChunkStore::open(*io, path, options);
  if (!opened.ok()) FAIL("open: " << ChunkStore::last_open_message());
  store = std::move(opened.value());
  store->tick(clock_us);
}

void SpaceStore::close() {
  settle();
  REQUIRE(store->close().ok());
  store.reset();
}

void SpaceStore::pass() {
  if (sim != nullptr) {
    clock_us += 100;
    store->tick(clock_us);
    io->run_once(0);
    return;
  }
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  const uint64_t now_us =
      static_cast<uint64_t>(time.tv_sec) * 1'000'000 + static_cast<uint64_t>(time.tv_nsec) / 1'000;
  if (now_us >= clock_us + 1'000) {
    clock_us = now_us;
    store->tick(clock_us);
  }
  io->run_once(1'000);
}

void SpaceStore::run_until(const bool& done) {
  for (uint64_t i = 0; !done; i++) {
    FFS_CHECK(i < 20'000'000);
    pass();
  }
}

void SpaceStore::settle() {
  for (int i = 0; i < 100'000 && !store->idle(); i++) pass();
}

void SpaceStore::compact_all() {
  for (int i = 0; i < 1'000'000 && store->compaction_need() != SpaceNeed::none; i++) {
    store->compact(1 << 20);
    pass();
  }
  settle();
}

std::unique_ptr<SpaceStore::Job> SpaceStore::start(UpdateKind kind, uint64_t n, uint32_t size, uint32_t hint,
                                                   bool commit_now) {
  auto job = std::make_unique<Job>();
  auto known = chunks.find(n);
  job->n = n;
  job->after.version = next_version++;
  job->after.size = size;
  job->after.seed = kind == UpdateKind::truncate ? known->second.seed
                    : same_seed != 0             ? same_seed
                                                 : job->after.version;
  job->removes = kind == UpdateKind::remove;
  StageOp& op = job->op;
  if (kind == UpdateKind::replace && size > 0) {
    const size_t room = round_up(size, kBlock);
    job->memory = static_cast<uint8_t*>(std::aligned_alloc(kBlock, room));
    FFS_CHECK(job->memory != nullptr);
    std::memset(job->memory + room - kBlock, 0, kBlock);
    fill_pattern(job->memory, size, job->after.seed);
  }
  op.target = TargetId(kTarget);
  op.key = key(n);
  op.version = v(job->after.version);
  if (known != chunks.end()) op.base = v(known->second.version);
  op.kind = kind;
  op.length = size;
  op.size_hint = hint;
  op.data = job->memory;
  op.tail_padded = true;
  op.commit_now = commit_now;
  op.owner = &job->finished;
  op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  store->stage(&op);
  return job;
}

int SpaceStore::end(Job& job) {
  run_until(job.finished);
  if (job.op.error != 0) return job.op.error;
  if (job.removes) {
    chunks.erase(job.n);
  } else {
    chunks[job.n] = job.after;
  }
  return 0;
}

int SpaceStore::put(uint64_t n, uint32_t size, uint32_t hint) {
  return end(*start(UpdateKind::replace, n, size, hint));
}
int SpaceStore::truncate(uint64_t n, uint32_t size) {
  return end(*start(UpdateKind::truncate, n, size));
}
int SpaceStore::remove(uint64_t n) {
  return end(*start(UpdateKind::remove, n, 0));
}

uint64_t SpaceStore::fill(uint64_t from, uint32_t size, uint32_t hint) {
  // Several at once, as writers do; what fails beside the last successes is tried again alone.
  std::vector<std::unique_ptr<Job>> running;
  uint64_t n = from, put_now = 0;
  for (bool full = false; !full;) {
    running.clear();
    for (int i = 0; i < 16; i++)
      running.push_back(start(UpdateKind::replace, n + static_cast<uint64_t>(i), size, hint));
    for (auto& job : running) {
      const int error = end(*job);
      REQUIRE((error == 0 || error == ENOSPC));
      full |= error != 0;
      put_now += error == 0;
    }
    n += 16;
  }
  while (put(n, size, hint) == 0) n++, put_now++;
  return put_now;
}

std::string SpaceStore::wrong(uint64_t n) {
  auto known = chunks.find(n);
  ReadOp op;
  bool done = false;
  op.target = TargetId(kTarget);
  op.key = key(n);
  op.length = kMaxChunkBytes;
  op.memory = read_memory_;
  op.verify_partial = true;
  op.owner = &done;
  op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
  store->read(&op);
  run_until(done);
  const std::string name = "chunk " + std::to_string(n) + ": ";
  if (known == chunks.end()) return op.error == ENOENT ? "" : name + "it should be gone";
  if (op.error != 0) return name + "error " + std::to_string(op.error);
  if (op.version != v(known->second.version)) return name + "another version";
  if (op.read_length != known->second.size) return name + "length " + std::to_string(op.read_length);
  expected_.resize(known->second.size);
  fill_pattern(expected_.data(), known->second.size, known->second.seed);
  if (std::memcmp(expected_.data(), read_memory_, expected_.size()) != 0) return name + "other bytes";
  return "";
}

std::string SpaceStore::all_wrong() {
  for (const auto& [n, chunk] : chunks) {
    if (std::string text = wrong(n); !text.empty()) return text;
  }
  if (store->capacity().chunks != chunks.size()) return "another number of chunks";
  return store->check_consistency();
}

}  // namespace ffs::engine::testing
