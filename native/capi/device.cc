// ffs_device_*: formatting and inspecting a device (docs/disk_format.md).
#include <algorithm>
#include <cstring>
#include <string>

#include "capi/error.h"
#include "capi/options.h"
#include "engine/chunk_store.h"
#include "ffs/ffs.h"

namespace {

// The engine's sentence with the numbers, or the static text.
int fail_device(const ffs::Error& error, const char* path) {
  const std::string& message = ffs::engine::ChunkStore::last_open_message();
  const int code = error.code == EMEDIUMTYPE ? ENOMEDIUM : error.code == EXDEV ? EPROTO : error.code;
  if (!message.empty()) return ffs::capi::fail(code, "device %s: %s", path, message.c_str());
  return ffs::capi::fail(code, "device %s: %s (%s)", path, error.what != nullptr ? error.what : "failed",
                         std::strerror(error.code));
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
  format.sparse = options.sparse != 0;
  format.overwrite = options.force != 0;
  auto io = ffs::io::Io::create(ffs::io::Options{});
  if (!io.ok()) return ffs::capi::fail(io.error(), "format: starting I/O");
  const ffs::Status made = ffs::engine::ChunkStore::format(**io, path, format);
  return made.ok() ? 0 : fail_device(made.error(), path);
}

int ffs_device_inspect(const char* path, ffs_device_info* out) {
  if (path == nullptr || out == nullptr)
    return ffs::capi::fail(EINVAL, "inspect: path and result are needed");
  auto identity = ffs::engine::ChunkStore::identify(path);
  if (!identity.ok()) return fail_device(identity.error(), path);
  *out = ffs_device_info{};
  std::memcpy(out->cluster, identity->cluster.data(), sizeof out->cluster);
  std::memcpy(out->device_uuid, identity->device.data(), sizeof out->device_uuid);
  out->size_bytes = identity->size_bytes;
  out->max_chunks = identity->max_chunks;
  out->format_version = identity->format_version;
  out->created_ms = identity->created_ms;
  out->journal_bytes = identity->journal_bytes;
  out->sector_bytes = identity->sector_bytes;
  out->features_compat = identity->features_compat;
  out->features_ro_compat = identity->features_ro_compat;
  out->features_incompat = identity->features_incompat;
  out->target_count = static_cast<uint32_t>(std::min<size_t>(identity->targets.size(), 64));
  for (uint32_t i = 0; i < out->target_count; i++) out->targets[i] = identity->targets[i].value;
  return 0;
}

}  // extern "C"
