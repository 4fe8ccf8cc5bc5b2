// ffs_engine_bench_*: see native/bench/engine_driver.h.
#include <string>

#include "bench/engine_driver.h"
#include "capi/error.h"
#include "engine/chunk_store.h"
#include "engine/scale.h"
#include "ffs/ffs.h"
#include "io/io.h"

struct ffs_engine_bench {
  std::unique_ptr<ffs::bench::EngineDriver> driver;
  std::string name;
};

namespace {

int fail(const ffs::Error& error, const ffs_engine_bench* bench, const char* what) {
  return ffs::capi::fail(error, "engine bench on " + bench->name + ", " + what);
}

}  // namespace

extern "C" {

int ffs_engine_bench_open(const ffs_engine_bench_options* options, ffs_engine_bench** out) {
  if (options == nullptr || out == nullptr || options->struct_size < sizeof(ffs_engine_bench_options) ||
      options->path == nullptr) {
    return ffs::capi::fail(
        EINVAL, "engine bench: options with their struct_size, a path and a place for the handle are needed");
  }
  ffs::bench::EngineOptions o;
  o.path = options->path;
  o.backend = options->io_backend != nullptr ? options->io_backend : "";
  o.size_bytes = options->size_bytes;
  o.max_chunks = options->max_chunks;
  o.journal_bytes = options->journal_bytes;
  o.depth = options->depth;
  auto driver = ffs::bench::open_engine(o);
  if (!driver.ok()) {
    const std::string& why = ffs::engine::ChunkStore::last_open_message();
    return ffs::capi::fail(driver.error(), "engine bench on " + o.path + (why.empty() ? "" : ": " + why));
  }
  *out = new ffs_engine_bench{std::move(*driver), o.path};
  return 0;
}

int ffs_engine_bench_fill(ffs_engine_bench* bench, uint64_t first, uint64_t count, uint32_t bytes) {
  const auto status = bench->driver->fill(first, count, bytes);
  return status.ok() ? 0 : fail(status.error(), bench, "filling");
}

int ffs_engine_bench_run(ffs_engine_bench* bench, const ffs_engine_bench_load* load, uint32_t duration_ms,
                         ffs_engine_bench_count* out) {
  if (load == nullptr || out == nullptr || load->struct_size < sizeof(ffs_engine_bench_load) ||
      out->struct_size < sizeof(ffs_engine_bench_count)) {
    return ffs::capi::fail(EINVAL, "engine bench: load and count need their struct_size");
  }
  if (load->work > 2 || load->beside > 2) {
    return ffs::capi::fail(EINVAL, "engine bench: work and beside are from 0 to 2");
  }
  ffs::bench::EngineLoad l;
  l.work = static_cast<ffs::bench::EngineWork>(load->work);
  l.block_bytes = load->block_bytes;
  l.depth = load->depth;
  l.random = load->random != 0;
  l.plain = load->plain != 0;
  l.working_set = load->working_set;
  l.beside = static_cast<ffs::bench::EngineBeside>(load->beside);
  const auto count = bench->driver->run(l, duration_ms);
  if (!count.ok()) return fail(count.error(), bench, "running");
  out->operations = count->operations;
  out->elapsed_ns = count->elapsed_ns;
  out->flushes = count->flushes;
  out->journal_bytes = count->journal_bytes;
  out->snapshots = count->snapshots;
  out->moved_bytes = count->moved_bytes;
  out->longest_step_us = count->longest_step_us;
  out->longest_operation_us = count->longest_operation_us;
  out->granules_read = count->granules_read;
  return 0;
}

int ffs_engine_bench_reopen(ffs_engine_bench* bench) {
  const auto status = bench->driver->reopen();
  if (status.ok()) return 0;
  return fail(status.error(), bench,
              ("opening again: " + ffs::engine::ChunkStore::last_open_message()).c_str());
}

int ffs_engine_bench_thin(ffs_engine_bench* bench, uint32_t keep) {
  const auto status = bench->driver->thin(keep);
  return status.ok() ? 0 : fail(status.error(), bench, "thinning");
}

int ffs_engine_bench_facts(ffs_engine_bench* bench, ffs_engine_bench_fact_sheet* out) {
  if (out == nullptr || out->struct_size < sizeof(ffs_engine_bench_fact_sheet))
    return ffs::capi::fail(EINVAL, "engine bench: the facts need their struct_size");
  const auto facts = bench->driver->facts();
  out->chunks = facts.chunks;
  out->data_offset = facts.data_offset;
  return 0;
}

int ffs_engine_bench_scale(const char* path, uint64_t chunks, ffs_engine_bench_scale_report* out) {
  if (path == nullptr || out == nullptr || out->struct_size < sizeof(ffs_engine_bench_scale_report))
    return ffs::capi::fail(EINVAL, "engine bench: a path and a report with its struct_size are needed");
  auto io = ffs::io::Io::create(ffs::io::Options());
  if (!io.ok()) return ffs::capi::fail(io.error(), "engine bench: input and output");
  const auto report = ffs::engine::measure_scale(**io, path, chunks);
  if (!report.ok()) {
    return ffs::capi::fail(report.error(), std::string("engine bench on ") + path + ", many chunks (" +
                                               ffs::engine::ChunkStore::last_open_message() + ")");
  }
  out->chunks = report->chunks;
  out->memory_bytes = report->memory_bytes;
  out->resident_bytes = report->resident_bytes;
  out->open_us = report->open_us;
  out->open_cpu_us = report->open_cpu_us;
  out->snapshot_us = report->snapshot_us;
  out->snapshot_bytes = report->snapshot_bytes;
  out->longest_step_us = report->longest_step_us;
  out->longest_pass_cpu_us = report->longest_pass_cpu_us;
  return 0;
}

void ffs_engine_bench_close(ffs_engine_bench* bench) {
  delete bench;
}

}  // extern "C"
