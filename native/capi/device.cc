// ffs_device_*: formatting, growing, looking at and checking a device (docs/disk_format.md).
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "capi/error.h"
#include "capi/options.h"
#include "engine/chunk_store.h"
#include "engine/device_check.h"
#include "ffs/ffs.h"

namespace {

// The engine's sentence with the numbers, or the static text.
int fail_device(const ffs::Error& error, const char* path) {
  const std::string& message = ffs::engine::ChunkStore::last_open_message();
  const int code = error.code == EMEDIUMTYPE ? ENOMEDIUM : error.code == EXDEV ? EPROTO : error.code;
  if (message.starts_with(path)) return ffs::capi::fail(code, "device %s", message.c_str());
  if (!message.empty()) return ffs::capi::fail(code, "device %s: %s", path, message.c_str());
  return ffs::capi::fail(code, "device %s: %s (%s)", path, error.what != nullptr ? error.what : "failed",
                         std::strerror(error.code));
}

template <size_t N>
void copy_text(char (&out)[N], const std::string& text) {
  std::strncpy(out, text.c_str(), N - 1);
  out[N - 1] = 0;
}

void fill_info(const ffs::engine::DeviceIdentity& identity, ffs_device_info* out) {
  *out = ffs_device_info{};
  std::memcpy(out->cluster, identity.cluster.data(), sizeof out->cluster);
  std::memcpy(out->device_uuid, identity.device.data(), sizeof out->device_uuid);
  out->size_bytes = identity.size_bytes;
  out->max_chunks = identity.max_chunks;
  out->format_version = identity.format_version;
  out->created_ms = identity.created_ms;
  out->journal_bytes = identity.journal_bytes;
  out->sector_bytes = identity.sector_bytes;
  out->features_compat = identity.features_compat;
  out->features_ro_compat = identity.features_ro_compat;
  out->features_incompat = identity.features_incompat;
  out->target_count = static_cast<uint32_t>(std::min<size_t>(identity.targets.size(), 64));
  for (uint32_t i = 0; i < out->target_count; i++) out->targets[i] = identity.targets[i].value;
}

void fill_state(const ffs::engine::DeviceState& state, ffs_device_state* out) {
  *out = ffs_device_state{};
  fill_info(state.identity, &out->info);
  out->device_bytes = state.device.size_bytes;
  out->superblock_sequence = state.identity.superblock_sequence;
  out->superblock_copies = (state.superblock_whole[0] ? 1u : 0u) | (state.superblock_whole[1] ? 2u : 0u);
  out->block_device = state.device.block_device ? 1 : 0;
  out->device_sector_bytes = state.device.sector_bytes;
  out->flushes = state.cache.flushes ? 1 : 0;
  out->discard_bytes = state.device.discard_bytes;
  out->discard_granularity = state.device.discard_granularity;
  out->recovered = state.recovered ? 1 : 0;
  copy_text(out->cache_reason, state.cache.why);
  copy_text(out->written_by, state.identity.written_by);
  copy_text(out->reason, state.why_not);
  out->snapshot_id = state.identity.snapshot_id;
  out->snapshot_ms = state.identity.snapshot_ms;
  out->snapshot_bytes = state.identity.snapshot_used_bytes;
  out->snapshot_area_bytes = state.identity.snapshot_area_bytes;
  out->journal_used_bytes = state.journal_used_bytes;
  out->slabs = state.identity.slabs;
  out->free_slabs = state.free_slabs;
  out->capacity_bytes = state.capacity.capacity_bytes;
  out->used_bytes = state.used_bytes;
  out->free_bytes = state.capacity.free_bytes;
  out->chunks = state.capacity.chunks;
  static_assert(std::size(decltype(out->classes){}) == ffs::engine::kClasses);
  for (uint32_t c = 0; c < ffs::engine::kClasses; c++) {
    out->classes[c] = {state.classes[c].slabs, state.classes[c].slots_used, state.classes[c].slots_free};
  }
  for (size_t i = 0; i < std::min<size_t>(state.targets.size(), 64); i++) {
    const ffs::engine::TargetState& t = state.targets[i];
    out->targets[i] = {t.target.value,     t.usage.chunks,  t.usage.logical_bytes, t.usage.allocated_bytes,
                       t.pending_versions, t.retry_entries, t.space_epochs,        t.chain_state_bytes};
  }
}

void fill_problem(const ffs::engine::Problem& problem, ffs_device_problem* out) {
  *out = ffs_device_problem{};
  out->kind = static_cast<uint32_t>(problem.kind);
  out->pending = problem.pending ? 1 : 0;
  out->target = problem.target.value;
  out->space = problem.key.space();
  std::memcpy(out->key, problem.key.bytes.data() + 8, sizeof out->key);
  out->term = problem.version.chain.term;
  out->counter = problem.version.chain.counter;
  out->update = problem.version.update;
  copy_text(out->text, problem.text);
}

}  // namespace

extern "C" {

int ffs_device_format(const char* path, const ffs_format_options* given) {
  ffs_format_options options{};
  if (path == nullptr || !ffs::capi::take_options(given, &options)) {
    return ffs::capi::fail(EINVAL, "format: path and options (with struct_size) are needed");
  }
  if (options.target_count == 0 || options.targets == nullptr) {
    return ffs::capi::fail(EINVAL, "format %s: name at least one target", path);
  }
  if (options.target_count > 64) return ffs::capi::fail(EINVAL, "format %s: at most 64 targets", path);
  if (options.sector_bytes != 0 && options.sector_bytes != 512 && options.sector_bytes != 4096) {
    return ffs::capi::fail(EINVAL, "format %s: sector_bytes is %u; 0, 512 or 4096", path,
                           options.sector_bytes);
  }
  ffs::engine::FormatOptions format;
  std::memcpy(format.cluster.data(), options.cluster, format.cluster.size());
  std::memcpy(format.device.data(), options.device_uuid, format.device.size());
  for (uint32_t i = 0; i < options.target_count; i++) {
    const uint64_t target = options.targets[i];
    if (target == 0) return ffs::capi::fail(EINVAL, "format %s: target ids begin at 1", path);
    if (std::find(format.targets.begin(), format.targets.end(), ffs::TargetId(target)) !=
        format.targets.end()) {
      return ffs::capi::fail(EINVAL, "format %s: target %llu is named twice", path,
                             static_cast<unsigned long long>(target));
    }
    format.targets.emplace_back(target);
  }
  format.size_bytes = options.size_bytes;
  format.max_chunks = options.max_chunks;
  format.journal_bytes = options.journal_bytes;
  format.sector_bytes = options.sector_bytes;
  format.sparse = options.sparse != 0;
  format.overwrite = options.force != 0;
  format.only_look = options.only_look != 0;
  format.null_data = options.null_data != 0;
  auto io = ffs::io::Io::create(ffs::io::Options{});
  if (!io.ok()) return ffs::capi::fail(io.error(), "format: starting I/O");
  const ffs::Status made = ffs::engine::ChunkStore::format(**io, path, format);
  if (made.ok()) return 0;
  const int code = fail_device(made.error(), path);
  if (made.error().code != EEXIST || format.only_look) return code;
  const std::string said = ffs::capi::last_error();
  return ffs::capi::fail(-code, "%s; ffs device format --force %s overwrites it: all of it is lost",
                         said.c_str(), path);
}

int ffs_device_inspect(const char* path, ffs_device_info* out) {
  if (path == nullptr || out == nullptr)
    return ffs::capi::fail(EINVAL, "inspect: path and result are needed");
  auto identity = ffs::engine::ChunkStore::identify(path);
  if (!identity.ok()) return fail_device(identity.error(), path);
  fill_info(*identity, out);
  return 0;
}

int ffs_device_grow(const char* path, uint64_t size_bytes, ffs_device_info* out) {
  if (path == nullptr || out == nullptr) return ffs::capi::fail(EINVAL, "grow: path and result are needed");
  auto grown = ffs::engine::ChunkStore::grow(path, size_bytes);
  if (!grown.ok()) return fail_device(grown.error(), path);
  fill_info(*grown, out);
  return 0;
}

int ffs_device_discard(const char* path, uint64_t* bytes) {
  if (path == nullptr || bytes == nullptr)
    return ffs::capi::fail(EINVAL, "discard: path and result are needed");
  auto identity = ffs::engine::ChunkStore::identify(path);
  if (!identity.ok()) return fail_device(identity.error(), path);
  auto io = ffs::io::Io::create(ffs::io::Options{});
  if (!io.ok()) return ffs::capi::fail(io.error(), "discard: starting I/O");
  ffs::engine::OpenOptions options;
  options.cluster = identity->cluster;
  auto store = ffs::engine::ChunkStore::open(**io, path, options);
  if (!store.ok()) return fail_device(store.error(), path);
  *bytes = 0;
  const ffs::Status discarded = (*store)->discard_free(bytes);
  const ffs::Status closed = (*store)->close();
  store->reset();
  for (const ffs::Status* status : {&discarded, &closed}) {
    if (status->ok()) continue;
    const ffs::Error error = status->error();
    return ffs::capi::fail(error.code, "device %s: %s (%s)", path,
                           error.what != nullptr ? error.what : "discarding free space",
                           std::strerror(error.code));
  }
  return 0;
}

int ffs_device_survey(const char* path, ffs_device_state* out) {
  if (path == nullptr || out == nullptr) return ffs::capi::fail(EINVAL, "survey: path and result are needed");
  auto state = ffs::engine::survey_device(path);
  if (!state.ok()) return fail_device(state.error(), path);
  fill_state(*state, out);
  return 0;
}

int ffs_device_check(const char* path, const ffs_check_options* given, ffs_check_report* out,
                     ffs_device_state* state, ffs_device_problem* problems, uint32_t capacity) {
  ffs_check_options options{};
  if (path == nullptr || out == nullptr || !ffs::capi::take_options(given, &options) ||
      (problems == nullptr && capacity > 0)) {
    return ffs::capi::fail(EINVAL, "check: path, options (with struct_size) and results are needed");
  }
  ffs::engine::CheckOptions check;
  check.data = options.data != 0;
  if (options.depth != 0) check.depth = options.depth;
  check.max_problems = capacity;
  const ffs::engine::CheckReport report = ffs::engine::check_device(path, check);
  *out = ffs_check_report{};
  out->verdict = static_cast<uint32_t>(report.verdict);
  out->problems = report.problem_count;
  out->chunks = report.chunks;
  out->pending_versions = report.pending_versions;
  out->data_bytes = report.data_bytes;
  copy_text(out->reason, report.reason);
  if (!report.notes.empty()) copy_text(out->note, report.notes.front());
  if (state != nullptr) fill_state(report.state, state);
  for (size_t i = 0; i < std::min<size_t>(report.problems.size(), capacity); i++)
    fill_problem(report.problems[i], &problems[i]);
  return 0;
}

}  // extern "C"
