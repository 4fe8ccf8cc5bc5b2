// Making a store, and knowing one by its superblocks.
#include <algorithm>

#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>

#include "base/crc32c.h"
#include "engine/store_impl.h"

namespace ffs::engine {

namespace {

constexpr char kWrittenBy[] = "ffs 0.1.0";
constexpr uint64_t kMiB = 1ull << 20;
thread_local std::string t_open_message;

struct Layout {
  uint64_t max_chunks, journal_bytes, snapshot_bytes, data_offset, slab_count;
};

// docs/disk_format.md, Regions.
Layout layout_for(uint64_t size_bytes, uint64_t max_chunks, uint64_t journal_bytes) {
  Layout layout{};
  layout.max_chunks = max_chunks != 0 ? max_chunks : size_bytes / (256 * 1024);
  uint64_t extra = std::clamp<uint64_t>(size_bytes / 64, 2 * kMiB, 64 * kMiB);
  layout.snapshot_bytes = round_up(layout.max_chunks * 320 + size_bytes / kGranuleBytes * 8 + extra, kMiB);
  uint64_t usual =
      std::max(layout.snapshot_bytes, std::clamp<uint64_t>(size_bytes / 32, 4 * kMiB, 1024 * kMiB));
  layout.journal_bytes = journal_bytes != 0 ? std::max(journal_bytes, layout.snapshot_bytes) : usual;
  layout.journal_bytes = round_up(layout.journal_bytes, kMiB);
  layout.data_offset = kJournalOffset + layout.journal_bytes + 2 * layout.snapshot_bytes;
  layout.slab_count = size_bytes > layout.data_offset ? (size_bytes - layout.data_offset) / kSlabBytes : 0;
  return layout;
}

uint64_t random_u64() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// In an anonymous namespace of C++ the kernel's uuid has no better source than this.
Uuid random_uuid() {
  Uuid uuid;
  uint64_t halves[2] = {random_u64(), random_u64()};
  std::memcpy(uuid.data(), halves, sizeof halves);
  return uuid;
}

bool is_zero(const Uuid& uuid) {
  return uuid == Uuid{};
}

}  // namespace

Status check_format_options(const FormatOptions& options, uint64_t size_bytes, uint32_t sector_bytes) {
  if (is_zero(options.cluster))
    return open_error(EINVAL, "a device needs the id of its cluster", "cluster id is all zeros");
  if (options.targets.empty() || options.targets.size() > kMaxTargets) {
    return open_error(EINVAL, "a device has 1 to 128 targets", "%zu targets given", options.targets.size());
  }
  for (size_t i = 0; i < options.targets.size(); i++) {
    for (size_t j = 0; j < i; j++) {
      if (options.targets[i] == options.targets[j])
        return open_error(EINVAL, "a target is named twice", "target %llu",
                          static_cast<unsigned long long>(options.targets[i].value));
    }
  }
  if (sector_bytes == 0 || kBlock % sector_bytes != 0) {
    return open_error(EINVAL, "sectors of more than 4096 bytes", "sector size %u", sector_bytes);
  }
  Layout layout = layout_for(size_bytes / kBlock * kBlock, options.max_chunks, options.journal_bytes);
  if (layout.slab_count < kClasses) {
    return open_error(ENOSPC, "the device is too small", "%llu bytes, at least %llu are needed",
                      static_cast<unsigned long long>(size_bytes),
                      static_cast<unsigned long long>(ChunkStore::minimum_size_bytes(options.max_chunks)));
  }
  if (size_bytes > kMaxDeviceBytes) {
    return open_error(EINVAL, "the device is too large", "%llu bytes, at most %llu can be used",
                      static_cast<unsigned long long>(size_bytes),
                      static_cast<unsigned long long>(kMaxDeviceBytes));
  }
  return ok_status();
}

namespace {

Superblock make_superblock(const FormatOptions& options, uint64_t size_bytes, uint32_t sector_bytes) {
  Layout layout = layout_for(size_bytes, options.max_chunks, options.journal_bytes);
  Superblock super{};
  std::memcpy(super.magic, kSuperblockMagic, sizeof super.magic);
  super.format_version = kFormatVersion;
  super.incompat = kOurIncompat | (options.null_data ? kIncompatNull : 0);
  Uuid device = is_zero(options.device) ? random_uuid() : options.device;
  std::memcpy(super.cluster, options.cluster.data(), 16);
  std::memcpy(super.device, device.data(), 16);
  super.store_id = random_u64();
  super.created_ms = unix_ms();
  super.size_bytes = size_bytes;
  super.sector_bytes = sector_bytes;
  super.slab_bytes = kSlabBytes;
  super.max_chunks = layout.max_chunks;
  super.journal_offset = kJournalOffset;
  super.journal_bytes = layout.journal_bytes;
  super.snapshot_offset[0] = kJournalOffset + layout.journal_bytes;
  super.snapshot_offset[1] = super.snapshot_offset[0] + layout.snapshot_bytes;
  super.snapshot_bytes = layout.snapshot_bytes;
  super.data_offset = layout.data_offset;
  super.slab_count = layout.slab_count;
  super.snapshot_area = kNoArea;
  super.replay_block = 1;
  super.replay_record = 1;
  std::strncpy(super.written_by, kWrittenBy, sizeof super.written_by - 1);
  super.target_count = static_cast<uint32_t>(options.targets.size());
  for (size_t i = 0; i < options.targets.size(); i++) super.targets[i] = options.targets[i].value;
  return super;
}

struct AlignedBlock {
  uint8_t* bytes = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kBlock));
  AlignedBlock() { std::memset(bytes, 0, kBlock); }
  ~AlignedBlock() { std::free(bytes); }
  AlignedBlock(const AlignedBlock&) = delete;
};

int32_t transfer(io::Io& io, io::File file, bool write, uint64_t offset, uint8_t* memory) {
  bool done = false;
  io::Op op;
  op.owner = &done;
  op.done = io::mark_done;
  if (write) {
    io.write(&op, file, offset, memory, kBlock);
  } else {
    io.read(&op, file, offset, memory, kBlock);
  }
  return io::wait_for(io, op);
}

Status write_block(io::Io& io, io::File file, uint64_t offset, uint8_t* memory) {
  int32_t rc = transfer(io, file, true, offset, memory);
  if (rc < 0)
    return open_error(-rc, "writing a superblock", "at byte %llu", static_cast<unsigned long long>(offset));
  bool done = false;
  io::Op op;
  op.owner = &done;
  op.done = io::mark_done;
  io.datasync(&op, file);
  rc = io::wait_for(io, op);
  if (rc < 0)
    return open_error(-rc, "flushing a superblock", "at byte %llu", static_cast<unsigned long long>(offset));
  return ok_status();
}

bool has_magic(const uint8_t* block) {
  return std::memcmp(block, kSuperblockMagic, sizeof kSuperblockMagic) == 0;
}

bool checksum_holds(const uint8_t* block) {
  Superblock super;
  std::memcpy(&super, block, sizeof super);
  uint32_t stated = super.crc;
  seal_superblock(&super);
  return super.crc == stated;
}

}  // namespace

Error open_error(int code, const char* what, const char* format, ...) {
  char numbers[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(numbers, sizeof numbers, format, arguments);
  va_end(arguments);
  t_open_message = std::string(what) + ": " + numbers;
  return Error::of(code, what);
}

void set_open_message(std::string message) {
  t_open_message = std::move(message);
}

void clear_open_message() {
  t_open_message.clear();
}

Error open_at_path(const std::string& path, Error error) {
  if (t_open_message.empty())
    t_open_message = std::string(error.what != nullptr ? error.what : "") + ": " + std::strerror(error.code);
  t_open_message = path + ": " + t_open_message;
  return error;
}

const std::string& ChunkStore::last_open_message() {
  return t_open_message;
}

uint64_t unix_ms() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1000000;
}

void seal_superblock(Superblock* super) {
  super->crc = 0;
  super->crc = crc32c(super, sizeof *super);
}

Result<Superblock> choose_superblock(const uint8_t* a, const uint8_t* b, uint64_t device_bytes) {
  const uint8_t* best = nullptr;
  Superblock super;
  uint64_t best_sequence = 0;
  for (const uint8_t* block : {a, b}) {
    if (!has_magic(block) || !checksum_holds(block)) continue;
    std::memcpy(&super, block, sizeof super);
    if (best == nullptr || super.sequence > best_sequence) best = block, best_sequence = super.sequence;
  }
  if (best == nullptr) {
    if (!has_magic(a) && !has_magic(b)) {
      return open_error(EMEDIUMTYPE, "no ffs store is on this device",
                        "no superblock at bytes 0 and 65536; format it first");
    }
    return open_error(EBADMSG, "both superblocks are damaged", "checksums fail at bytes 0 and 65536");
  }
  std::memcpy(&super, best, sizeof super);
  super.written_by[sizeof super.written_by - 1] = 0;
  uint64_t unknown = (super.incompat & ~kKnownIncompat) | (super.ro_compat & ~kKnownReadOnlyCompat);
  if (super.format_version > kFormatVersion || unknown != 0) {
    return open_error(ENOTSUP, "the device needs a newer ffs",
                      "format version %u (known: %u), unknown feature bits %#llx; written by %s",
                      super.format_version, kFormatVersion, static_cast<unsigned long long>(unknown),
                      super.written_by);
  }
  uint64_t end = super.data_offset + super.slab_count * kSlabBytes;
  bool sane =
      super.target_count >= 1 && super.target_count <= kMaxTargets && super.slab_bytes == kSlabBytes &&
      super.journal_offset == kJournalOffset && super.journal_bytes >= 4 * kMaxBlockBytes &&
      super.journal_bytes % kBlock == 0 && super.journal_bytes <= super.size_bytes &&
      super.snapshot_bytes % kBlock == 0 &&
      super.snapshot_bytes <= super.size_bytes &&  // the sums don't wrap
      super.snapshot_bytes >= 8 * kMaxBlockBytes && super.replay_block >= 1 &&
      super.replay_block < 1ull << 60 && super.replay_record < 1ull << 60 && super.snapshot_id < 1ull << 60 &&
      super.sequence < 1ull << 60 && super.snapshot_offset[0] == super.journal_offset + super.journal_bytes &&
      super.snapshot_offset[1] == super.snapshot_offset[0] + super.snapshot_bytes &&
      super.data_offset == super.snapshot_offset[1] + super.snapshot_bytes &&
      super.data_offset % kBlock == 0 && super.slab_count <= UINT32_MAX / 2 && end <= super.size_bytes &&
      super.size_bytes <= kMaxDeviceBytes && super.replay_offset < super.journal_bytes &&
      super.replay_offset % kBlock == 0 && (super.snapshot_area <= 1 || super.snapshot_area == kNoArea) &&
      super.snapshot_used <= super.snapshot_bytes;
  if (!sane)
    return open_error(EBADMSG, "the superblock contradicts itself", "sequence %llu",
                      static_cast<unsigned long long>(super.sequence));
  if (super.size_bytes > device_bytes) {
    return open_error(
        ENOSPC, "the device is smaller than its store",
        "it has %llu bytes, the store uses %llu: give it its size back; if what was cut off is lost, "
        "format it anew (--force) and let its replicas be filled",
        static_cast<unsigned long long>(device_bytes), static_cast<unsigned long long>(super.size_bytes));
  }
  return super;
}

DeviceIdentity identity_of(const Superblock& super) {
  DeviceIdentity identity;
  std::memcpy(identity.cluster.data(), super.cluster, 16);
  std::memcpy(identity.device.data(), super.device, 16);
  for (uint32_t i = 0; i < super.target_count; i++) identity.targets.emplace_back(super.targets[i]);
  identity.size_bytes = super.size_bytes;
  identity.max_chunks = super.max_chunks;
  identity.format_version = super.format_version;
  identity.created_ms = super.created_ms;
  identity.journal_bytes = super.journal_bytes;
  identity.sector_bytes = super.sector_bytes;
  identity.features_compat = super.compat;
  identity.features_ro_compat = super.ro_compat;
  identity.features_incompat = super.incompat;
  identity.written_by = super.written_by;
  identity.superblock_sequence = super.sequence;
  identity.slabs = super.slab_count;
  identity.snapshot_id = super.snapshot_id;
  identity.snapshot_ms = super.snapshot_ms;
  identity.snapshot_used_bytes = super.snapshot_area == kNoArea ? 0 : super.snapshot_used;
  identity.snapshot_area_bytes = super.snapshot_bytes;
  return identity;
}

uint64_t ChunkStore::minimum_size_bytes(uint64_t max_chunks) {
  uint64_t size = kClasses * kSlabBytes;
  while (layout_for(size, max_chunks, 0).slab_count < kClasses) size += kMiB;
  return size;
}

Status ChunkStore::format_file(io::Io& io, io::File file, uint64_t size_bytes, uint32_t sector_bytes,
                               const FormatOptions& options, DeviceIdentity* made) {
  uint64_t size = size_bytes / kBlock * kBlock;
  FFS_TRY_STATUS(check_format_options(options, size, sector_bytes));
  AlignedBlock block;
  for (uint64_t offset : kSuperblockOffset) {
    int32_t rc = transfer(io, file, false, offset, block.bytes);
    if (rc != static_cast<int32_t>(kBlock))
      return open_error(rc < 0 ? -rc : EIO, "reading the device", "at byte %llu",
                        static_cast<unsigned long long>(offset));
    if (!options.overwrite && has_magic(block.bytes)) {
      return open_error(EEXIST, "the device holds an ffs store already",
                        "superblock at byte %llu; overwrite it only if its data may go",
                        static_cast<unsigned long long>(offset));
    }
  }
  Superblock super = make_superblock(options, size, sector_bytes);
  // An older store's superblocks must not outlive the first step; the new ones come last, number 1 at the
  // end.
  std::memset(block.bytes, 0, kBlock);
  for (uint64_t offset : kSuperblockOffset) FFS_TRY_STATUS(write_block(io, file, offset, block.bytes));
  for (uint64_t sequence : {0, 1}) {
    super.sequence = sequence;
    seal_superblock(&super);
    std::memcpy(block.bytes, &super, sizeof super);
    FFS_TRY_STATUS(write_block(io, file, kSuperblockOffset[sequence & 1], block.bytes));
  }
  if (made != nullptr) *made = identity_of(super);
  return ok_status();
}

}  // namespace ffs::engine
