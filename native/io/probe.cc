#include "io/probe.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "io/io.h"

namespace ffs::io {

namespace {

constexpr uint64_t kHeadBytes = 8ull << 20;
constexpr uint64_t kTailBytes = 1ull << 20;
constexpr uint64_t kSamples = 256;
constexpr uint64_t kKiB = 1024;

struct Signature {
  const char* what;
  uint64_t offset;
  const char* bytes;
  uint32_t count;
};

#define FFS_SIGNATURE(what, offset, bytes) \
  { what, offset, bytes, sizeof(bytes) - 1 }

// Counted from the beginning. Public facts of each format.
constexpr Signature kFromStart[] = {
    FFS_SIGNATURE("an ext2/3/4 file system", 1080, "\x53\xef"),
    FFS_SIGNATURE("an XFS file system", 0, "XFSB"),
    FFS_SIGNATURE("a btrfs file system", 65536 + 64, "_BHRfS_M"),
    FFS_SIGNATURE("a FAT file system", 54, "FAT1"),
    FFS_SIGNATURE("a FAT file system", 82, "FAT32   "),
    FFS_SIGNATURE("an exFAT file system", 3, "EXFAT   "),
    FFS_SIGNATURE("an NTFS file system", 3, "NTFS    "),
    FFS_SIGNATURE("a BitLocker volume", 3, "-FVE-FS-"),
    FFS_SIGNATURE("an F2FS file system", 1024, "\x10\x20\xf5\xf2"),
    FFS_SIGNATURE("an EROFS file system", 1024, "\xe2\xe1\xf5\xe0"),
    FFS_SIGNATURE("a squashfs file system", 0, "hsqs"),
    FFS_SIGNATURE("a JFS file system", 32768, "JFS1"),
    FFS_SIGNATURE("a ReiserFS file system", 65536 + 52, "ReIsEr"),
    FFS_SIGNATURE("a GFS2 file system", 65536, "\x01\x16\x19\x70"),
    FFS_SIGNATURE("an OCFS2 file system", 8192, "OCFSV2"),
    FFS_SIGNATURE("an HFS+ file system", 1024, "H+\0\4"),
    FFS_SIGNATURE("an APFS container", 32, "NXSB"),
    FFS_SIGNATURE("an ISO 9660 file system", 32769, "CD001"),
    FFS_SIGNATURE("a UDF file system", 32769, "BEA01"),
    FFS_SIGNATURE("a GPT partition table", 512, "EFI PART"),
    FFS_SIGNATURE("a GPT partition table", 4096, "EFI PART"),
    FFS_SIGNATURE("an LVM physical volume", 0, "LABELONE"),
    FFS_SIGNATURE("an LVM physical volume", 512, "LABELONE"),
    FFS_SIGNATURE("an LVM physical volume", 1024, "LABELONE"),
    FFS_SIGNATURE("an LVM physical volume", 1536, "LABELONE"),
    FFS_SIGNATURE("a member of a Linux RAID", 0, "\xfc\x4e\x2b\xa9\1\0\0\0"),
    FFS_SIGNATURE("a member of a Linux RAID", 4096, "\xfc\x4e\x2b\xa9\1\0\0\0"),
    FFS_SIGNATURE("a LUKS volume", 0, "LUKS\xba\xbe"),
    FFS_SIGNATURE("the second header of a LUKS volume", 16 * kKiB, "SKUL\xba\xbe"),
    FFS_SIGNATURE("the second header of a LUKS volume", 32 * kKiB, "SKUL\xba\xbe"),
    FFS_SIGNATURE("the second header of a LUKS volume", 4096 * kKiB, "SKUL\xba\xbe"),
    FFS_SIGNATURE("a bcache device", 4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    FFS_SIGNATURE("a bcachefs member", 4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9"),
    FFS_SIGNATURE("a Stratis pool member", 512 + 4, "!Stra0tis"),
    FFS_SIGNATURE("a VDO volume", 0, "dmvdo001"),
    FFS_SIGNATURE("a Ceph OSD", 0, "bluestore block device"),
    FFS_SIGNATURE("a swap area", 4096 - 10, "SWAPSPACE2"),
    FFS_SIGNATURE("a swap area", 8192 - 10, "SWAPSPACE2"),
    FFS_SIGNATURE("a swap area", 16384 - 10, "SWAPSPACE2"),
    FFS_SIGNATURE("a swap area", 65536 - 10, "SWAPSPACE2"),
};

// Further copies, beyond the first 8 MiB: wiped with the rest.
constexpr Signature kFarCopies[] = {
    FFS_SIGNATURE("a copy of a btrfs superblock", (64ull << 20) + 64, "_BHRfS_M"),
    FFS_SIGNATURE("a copy of a btrfs superblock", (256ull << 30) + 64, "_BHRfS_M"),
};

#undef FFS_SIGNATURE

class Buffer {
 public:
  explicit Buffer(uint64_t size)
      : bytes_(static_cast<uint8_t*>(std::aligned_alloc(kBlockBytes, size)), std::free) {
    FFS_CHECK(bytes_ != nullptr);
    std::memset(bytes_.get(), 0, size);
  }
  uint8_t* get() const { return bytes_.get(); }

 private:
  std::unique_ptr<uint8_t, void (*)(void*)> bytes_;
};

constexpr uint64_t rounded(uint64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

// Reads [offset, offset + bytes), all of it on the device; `offset` is a multiple of 4096.
Status read_at(int fd, uint64_t offset, uint8_t* memory, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t rc = ::pread(fd, memory + at, rounded(bytes) - at, static_cast<off_t>(offset + at));
    if (rc < 0 && errno == EINTR) continue;
    if (rc < 0) return Error::of(errno, "reading the device");
    if (rc == 0) return Error::of(EIO, "the device ends before its size");
    at += static_cast<uint64_t>(rc);
  }
  return ok_status();
}

struct Part {
  const uint8_t* bytes;
  uint64_t from, to;  // on the device
};

bool stands(const Part& part, uint64_t offset, const char* bytes, uint64_t count) {
  return offset >= part.from && offset + count <= part.to &&
         std::memcmp(part.bytes + (offset - part.from), bytes, count) == 0;
}

void look(const Part& part, const Signature& signature, std::vector<Finding>* found) {
  if (stands(part, signature.offset, signature.bytes, signature.count))
    found->push_back({signature.what, signature.offset});
}

// Boot code or a partition table: the mark alone says neither, so a used entry is wanted.
void look_for_mbr(const Part& head, std::vector<Finding>* found) {
  if (!stands(head, 510, "\x55\xaa", 2)) return;
  for (const Finding& f : *found) {
    if (std::strstr(f.what, "FAT") != nullptr || std::strstr(f.what, "NTFS") != nullptr) return;
  }
  for (uint64_t entry = 446; entry < 510; entry += 16) {
    if (head.bytes[entry + 4] != 0) {
      found->push_back({"an MBR partition table", 510});
      return;
    }
  }
}

void look_for_zfs(const Part& part, uint64_t label, std::vector<Finding>* found) {
  for (uint64_t at = label + 128 * kKiB; at < label + 256 * kKiB; at += kKiB) {
    if (stands(part, at, "\x0c\xb1\xba\0\0\0\0\0", 8) || stands(part, at, "\0\0\0\0\0\xba\xb1\x0c", 8)) {
      found->push_back({"a member of a ZFS pool", at});
      return;
    }
  }
}

// What marks the end of a device.
void look_at_end(const Part& tail, uint64_t size, std::vector<Finding>* found) {
  for (uint64_t sector : {uint64_t{512}, uint64_t{4096}}) {
    if (size >= sector) look(tail, {"a copy of a GPT partition table", size - sector, "EFI PART", 8}, found);
  }
  if (size < 2 * kTailBytes) return;
  const uint64_t raid_1_0 = ((size / 512 - 16) & ~7ull) * 512;
  const uint64_t raid_0_90 = (size & ~(64 * kKiB - 1)) - 64 * kKiB;
  look(tail, {"a member of a Linux RAID", raid_1_0, "\xfc\x4e\x2b\xa9\1\0\0\0", 8}, found);
  look(tail, {"a member of a Linux RAID", raid_0_90, "\xfc\x4e\x2b\xa9", 4}, found);
  look(tail, {"a member of an Intel RAID", size - 1024, "Intel Raid ISM Cfg Sig. ", 24}, found);
  look_for_zfs(tail, size / (256 * kKiB) * (256 * kKiB) - 512 * kKiB, found);
}

// The offset of the first block of [from, to) that isn't zeros, or UINT64_MAX.
uint64_t first_data(const Part& part) {
  for (uint64_t at = part.from; at < part.to; at += kBlockBytes) {
    const uint8_t* block = part.bytes + (at - part.from);
    const uint64_t count = std::min<uint64_t>(kBlockBytes, part.to - at);
    if (std::any_of(block, block + count, [](uint8_t byte) { return byte != 0; })) return at;
  }
  return UINT64_MAX;
}

uint64_t tail_start(uint64_t size) {
  return size > kTailBytes ? (size - kTailBytes) / kBlockBytes * kBlockBytes : 0;
}

Status write_zeros(int fd, uint64_t from, uint64_t to) {
  const uint64_t piece = 1ull << 20;
  Buffer zeros(piece);
  for (uint64_t at = from; at < to;) {
    const ssize_t rc =
        ::pwrite(fd, zeros.get(), static_cast<size_t>(std::min(piece, to - at)), static_cast<off_t>(at));
    if (rc < 0 && errno == EINTR) continue;
    if (rc <= 0) return Error::of(rc < 0 ? errno : EIO, "wiping old signatures");
    at += static_cast<uint64_t>(rc);
  }
  return ok_status();
}

}  // namespace

std::string Probed::text() const {
  std::string out;
  for (const Finding& f : found) {
    if (!out.empty()) out += ", ";
    out += std::string(f.what) + " (signature at byte " + std::to_string(f.offset) + ")";
  }
  if (out.empty() && !blank) out = "data in the 4 KiB at byte " + std::to_string(data_at);
  return out;
}

Result<Probed> probe(int fd, uint64_t size_bytes) {
  Probed probed;
  uint64_t data_at = UINT64_MAX;
  const uint64_t head_bytes = std::min(size_bytes, kHeadBytes);
  Buffer memory(rounded(kHeadBytes));
  FFS_TRY_STATUS(read_at(fd, 0, memory.get(), head_bytes));
  const Part head{memory.get(), 0, head_bytes};
  for (const Signature& signature : kFromStart) look(head, signature, &probed.found);
  look_for_mbr(head, &probed.found);
  look_for_zfs(head, 0, &probed.found);
  data_at = first_data(head);

  const uint64_t far = std::max(head_bytes, tail_start(size_bytes));
  for (uint64_t i = 1; i <= kSamples && far > head_bytes; i++) {
    const uint64_t at = (head_bytes + (far - head_bytes) / (kSamples + 1) * i) / kBlockBytes * kBlockBytes;
    FFS_TRY_STATUS(read_at(fd, at, memory.get(), std::min<uint64_t>(kBlockBytes, size_bytes - at)));
    data_at = std::min(data_at, first_data({memory.get(), at, std::min(at + kBlockBytes, size_bytes)}));
  }
  for (const Signature& copy : kFarCopies) {
    const uint64_t block = copy.offset / kBlockBytes * kBlockBytes;
    if (block + kBlockBytes > size_bytes) continue;
    FFS_TRY_STATUS(read_at(fd, block, memory.get(), kBlockBytes));
    look({memory.get(), block, block + kBlockBytes}, copy, &probed.found);
  }
  const uint64_t start = tail_start(size_bytes);
  FFS_TRY_STATUS(read_at(fd, start, memory.get(), size_bytes - start));
  const Part tail{memory.get(), start, size_bytes};
  look_at_end(tail, size_bytes, &probed.found);
  data_at = std::min(data_at, first_data(tail));

  probed.blank = data_at == UINT64_MAX && probed.found.empty();
  probed.data_at = data_at == UINT64_MAX ? 0 : data_at;
  return probed;
}

Status discard_all(int fd, uint64_t size_bytes) {
  constexpr uint64_t kPiece = 16ull << 30;
  for (uint64_t at = 0; at < size_bytes; at += kPiece) {
    uint64_t range[2] = {at, std::min(kPiece, size_bytes - at)};
    if (::ioctl(fd, BLKDISCARD, range) == 0) continue;
    if (errno == EOPNOTSUPP || errno == ENOTTY) return Error::of(ENOTSUP, "the device has no discard");
    return Error::of(errno, "discarding the device");
  }
  return ok_status();
}

Status wipe_signatures(int fd, uint64_t size_bytes) {
  size_bytes = size_bytes / 512 * 512;  // a file may have an odd end, which no signature uses
  const uint64_t head_bytes = std::min(size_bytes, kHeadBytes);
  FFS_TRY_STATUS(write_zeros(fd, 0, head_bytes));
  for (const Signature& copy : kFarCopies) {
    const uint64_t block = copy.offset / kBlockBytes * kBlockBytes;
    if (block + kBlockBytes <= size_bytes) FFS_TRY_STATUS(write_zeros(fd, block, block + kBlockBytes));
  }
  if (size_bytes > head_bytes)
    FFS_TRY_STATUS(write_zeros(fd, std::max(head_bytes, tail_start(size_bytes)), size_bytes));
  return ::fdatasync(fd) == 0 ? ok_status() : Status(Error::of(errno, "flushing wiped signatures"));
}

Status forget_partitions(int fd) {
  if (::ioctl(fd, BLKRRPART) == 0 || errno == EINVAL || errno == ENOTTY) return ok_status();
  return Error::of(errno, "the kernel still knows partitions of this disk");
}

}  // namespace ffs::io
