// Files and block devices: made ready for a store, known by their superblocks, grown.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/fd.h"
#include "engine/store_impl.h"
#include "io/probe.h"

namespace ffs::engine {

namespace {

unsigned long long number_of(uint64_t n) {
  return n;
}

struct Superblocks {
  Superblocks() { std::memset(bytes, 0, 2 * kBlock); }
  ~Superblocks() { std::free(bytes); }
  Superblocks(const Superblocks&) = delete;
  uint8_t* copy(int i) const { return bytes + i * kBlock; }

  Status read(int fd) {
    for (int i = 0; i < 2; i++) {
      const ssize_t rc = ::pread(fd, copy(i), kBlock, static_cast<off_t>(kSuperblockOffset[i]));
      if (rc < 0)
        return open_error(errno, "reading the superblocks", "at byte %llu", number_of(kSuperblockOffset[i]));
    }
    return ok_status();
  }
  Status write(int fd, int i) const {
    const ssize_t rc = ::pwrite(fd, copy(i), kBlock, static_cast<off_t>(kSuperblockOffset[i]));
    if (rc != static_cast<ssize_t>(kBlock) || ::fdatasync(fd) != 0)
      return open_error(rc < 0 ? errno : EIO, "writing a superblock", "at byte %llu",
                        number_of(kSuperblockOffset[i]));
    return ok_status();
  }
  bool any_magic() const {
    return std::memcmp(copy(0), kSuperblockMagic, sizeof kSuperblockMagic) == 0 ||
           std::memcmp(copy(1), kSuperblockMagic, sizeof kSuperblockMagic) == 0;
  }

  uint8_t* bytes = static_cast<uint8_t*>(std::aligned_alloc(kBlock, 2 * kBlock));
};

struct OpenDevice {
  io::Device device;
  ~OpenDevice() { io::close_device(device); }
};

// Opened for this call alone; says who has it else.
Status open_alone(const std::string& path, OpenDevice* out) {
  auto opened = io::open_device(path);
  if (opened.ok()) {
    out->device = *opened;
    return ok_status();
  }
  const std::string user = opened.error().code == EBUSY ? io::in_use(path) : std::string();
  if (user.empty()) return opened.error();
  return open_error(EBUSY, "the device is in use", "%s", user.c_str());
}

std::string hex(const uint8_t* bytes, size_t count) {
  std::string out;
  char digits[3];
  for (size_t i = 0; i < count; i++) std::snprintf(digits, sizeof digits, "%02x", bytes[i]), out += digits;
  return out;
}

// Nothing is lost unless the caller insists: what isn't blank is named and refused.
Status refuse_content(const io::Device& device, const Uuid& cluster) {
  Superblocks blocks;
  FFS_TRY_STATUS(blocks.read(device.fd));
  if (blocks.any_magic()) {
    auto super = choose_superblock(blocks.copy(0), blocks.copy(1), UINT64_MAX);
    if (!super.ok()) {
      const std::string why = ChunkStore::last_open_message();
      return open_error(EEXIST, "the device holds an ffs store already", "%s", why.c_str());
    }
    const bool same = std::memcmp(super->cluster, cluster.data(), cluster.size()) == 0;
    return open_error(EEXIST, "the device holds an ffs store already",
                      "of %s, cluster %s, device %s, %u target%s", same ? "this cluster" : "another cluster",
                      hex(super->cluster, 16).c_str(), hex(super->device, 16).c_str(), super->target_count,
                      super->target_count == 1 ? "" : "s");
  }
  FFS_TRY(const io::Probed probed, io::probe(device.fd, device.size_bytes));
  if (probed.blank) return ok_status();
  return open_error(EEXIST, probed.found.empty() ? "the device isn't blank" : "the device is somebody's",
                    "it holds %s", probed.text().c_str());
}

// No superblock of an older store outlives the first step. What a discard leaves is undefined, so old
// signatures are written over after it.
Status empty_device(const io::Device& device, const std::string& path, bool wipe) {
  Superblocks zeros;
  for (int i = 0; i < 2; i++) FFS_TRY_STATUS(zeros.write(device.fd, i));
  if (device.block_device && device.discard_bytes > 0) {
    Status discarded = io::discard_all(device.fd, device.size_bytes);
    if (!discarded.ok() && discarded.error().code != ENOTSUP) {
      std::fprintf(stderr, "ffs: engine: %s: discarding all of it failed (%s); formatting goes on\n",
                   path.c_str(), std::strerror(discarded.error().code));
    }
  }
  if (!wipe) return ok_status();
  FFS_TRY_STATUS(io::wipe_signatures(device.fd, device.size_bytes));
  Status forgotten = device.block_device ? io::forget_partitions(device.fd) : ok_status();
  if (!forgotten.ok()) {
    std::fprintf(stderr, "ffs: engine: %s: %s (%s): partprobe, or a restart, before they are used\n",
                 path.c_str(), forgotten.error().what, std::strerror(forgotten.error().code));
  }
  return ok_status();
}

Status format_opened(io::Io& io, const io::Device& device, const std::string& path, bool fresh_file,
                     const FormatOptions& options, DeviceIdentity* made) {
  uint64_t size = device.size_bytes;
  if (device.block_device && options.size_bytes != 0) {
    size = options.size_bytes;
    if (size > device.size_bytes)
      return open_error(ENOSPC, "the device is smaller than asked", "it has %llu bytes, asked for %llu",
                        number_of(device.size_bytes), number_of(size));
  }
  if (device.block_device && options.null_data)
    return open_error(EINVAL, "a null device is a file", "this is a block device");
  const uint32_t sector = options.sector_bytes != 0 ? options.sector_bytes : device.sector_bytes;
  if (device.block_device && sector != device.sector_bytes) {
    return open_error(EINVAL, "the device has other sectors", "of %u bytes, asked for %u",
                      device.sector_bytes, sector);
  }
  FFS_TRY_STATUS(check_format_options(options, size, sector));
  if (!options.overwrite && !fresh_file) FFS_TRY_STATUS(refuse_content(device, options.cluster));
  if (options.only_look) return ok_status();
  if (!fresh_file) FFS_TRY_STATUS(empty_device(device, path, options.overwrite));
  FFS_TRY(io::File file, io.add_file(device.fd));
  Status result = ChunkStore::format_file(io, file, size, sector, options, made);
  io.remove_file(file);
  return result;
}

}  // namespace

Status ChunkStore::format(io::Io& io, const std::string& path, const FormatOptions& options,
                          DeviceIdentity* made) {
  clear_open_message();
  struct stat status;
  const bool exists = ::stat(path.c_str(), &status) == 0;
  const bool block_device = exists && S_ISBLK(status.st_mode);
  const bool make_file = !block_device && options.size_bytes != 0;
  if (!block_device && exists && !S_ISREG(status.st_mode)) {
    return open_at_path(
        path, open_error(EINVAL, "neither a regular file nor a block device", "mode %o", status.st_mode));
  }
  if (make_file) {
    Status checked = check_format_options(options, options.size_bytes, 512);
    if (!checked.ok()) return open_at_path(path, checked.error());
    const bool ours = exists && !options.overwrite && identify(path).ok();
    clear_open_message();
    if (ours) return open_at_path(path, Error::of(EEXIST, "the device holds an ffs store already"));
    const bool over_it = exists && (options.overwrite || status.st_size == 0);
    if (options.only_look && exists && !over_it)
      return open_at_path(path, Error::of(EEXIST, "the device file exists"));
    if (options.only_look) return ok_status();
    Status filled = io::make_device_file(path, options.size_bytes / kBlock * kBlock,
                                         options.sparse || options.null_data, over_it);
    if (!filled.ok()) return open_at_path(path, filled.error());
  }
  OpenDevice opened;
  Status formatted = open_alone(path, &opened);
  if (formatted.ok())
    formatted = format_opened(io, opened.device, path, make_file && !options.overwrite, options, made);
  if (formatted.ok()) return formatted;
  if (make_file && !exists) ::unlink(path.c_str());
  return open_at_path(path, formatted.error());
}

Result<DeviceIdentity> ChunkStore::identify(const std::string& path) {
  clear_open_message();
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return open_at_path(path, Error::of(errno, "opening the device"));
  const off_t end = ::lseek(fd.get(), 0, SEEK_END);
  Superblocks blocks;
  Status read = blocks.read(fd.get());
  if (!read.ok()) return open_at_path(path, read.error());
  auto super = choose_superblock(blocks.copy(0), blocks.copy(1), end > 0 ? static_cast<uint64_t>(end) : 0);
  if (!super.ok()) return open_at_path(path, super.error());
  return identity_of(super.value());
}

namespace {

Result<DeviceIdentity> grow_opened(io::Device& device, uint64_t size_bytes) {
  Superblocks blocks;
  FFS_TRY_STATUS(blocks.read(device.fd));
  FFS_TRY(Superblock super, choose_superblock(blocks.copy(0), blocks.copy(1), device.size_bytes));
  if (size_bytes != 0) {
    if (device.block_device || size_bytes <= device.size_bytes) {
      return open_error(
          EINVAL, device.block_device ? "a size is for files" : "the file has that size already",
          "it has %llu bytes, asked for %llu", number_of(device.size_bytes), number_of(size_bytes));
    }
    FFS_TRY_STATUS(io::extend_device_file(device, size_bytes / kBlock * kBlock));
  }
  const uint64_t whole = std::min(device.size_bytes / kBlock * kBlock, kMaxDeviceBytes);
  const uint64_t slabs = (whole - super.data_offset) / kSlabBytes;
  if (slabs <= super.slab_count) {
    return open_error(EINVAL, "nothing to take in",
                      "the device has %llu bytes, its store uses %llu; it grows by slabs of 16 MiB",
                      number_of(device.size_bytes), number_of(super.size_bytes));
  }
  super.size_bytes = whole;
  super.slab_count = slabs;
  super.sequence++;
  seal_superblock(&super);
  std::memcpy(blocks.copy(super.sequence & 1), &super, sizeof super);
  FFS_TRY_STATUS(blocks.write(device.fd, super.sequence & 1));
  return identity_of(super);
}

}  // namespace

Result<DeviceIdentity> ChunkStore::grow(const std::string& path, uint64_t size_bytes) {
  clear_open_message();
  OpenDevice opened;
  Status alone = open_alone(path, &opened);
  if (!alone.ok()) return open_at_path(path, alone.error());
  auto grown = grow_opened(opened.device, size_bytes);
  if (!grown.ok()) return open_at_path(path, grown.error());
  return grown;
}

}  // namespace ffs::engine
