// The bytes on a device: every struct of docs/disk_format.md, pinned. Little-endian, no padding,
// reserved fields zero. Readers and writers share these and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/ids.h"
#include "io/io.h"

namespace ffs::engine {

constexpr uint32_t kFormatVersion = 1;
constexpr uint64_t kBlock = io::kBlockBytes;
constexpr uint64_t kSlabBytes = 16ull << 20;
constexpr uint32_t kClasses = 13;  // slots of 4 KiB << class
constexpr uint8_t kNoClass = 0xff;
// Limits of what a chunk's record in memory holds.
constexpr uint32_t kPlaceBits = 40;
constexpr uint64_t kMaxDeviceBytes = kBlock << kPlaceBits;  // 4 PiB
constexpr uint32_t kExpiryBits = 48;
constexpr uint64_t kMaxExpiryMs = (1ull << kExpiryBits) - 1;  // the year 10889; a later time counts as this
constexpr uint32_t kRoleBits = 4;
constexpr uint8_t kMaxRole = (1u << kRoleBits) - 1;
constexpr uint32_t kDeviceRecord = 0xffff;  // RecordHeader.target of records about the whole device

constexpr uint64_t kSuperblockOffset[2] = {0, 64 * 1024};
constexpr uint64_t kJournalOffset = 1ull << 20;
constexpr uint8_t kSuperblockMagic[8] = {'F', 'F', 'S', 'D', 'E', 'V', '\r', '\n'};
constexpr uint32_t kJournalMagic = 0x314a4646;   // "FFJ1"
constexpr uint32_t kSnapshotMagic = 0x31534646;  // "FFS1"

// Feature bits known to this program. An unknown incompat bit refuses the device, an unknown
// ro_compat bit refuses writing (so opening), an unknown compat bit is ignored and kept.
constexpr uint64_t kIncompatTransfers = 1;  // the journal may hold record types 10 to 13
constexpr uint64_t kIncompatMoves = 2;      // and of type 14
constexpr uint64_t kIncompatNull = 4;       // a null device: nothing is stored where the chunks lie
constexpr uint64_t kIncompatShared = 8;     // slots may be named by several chunks, records be of type 15
constexpr uint64_t kOurIncompat = kIncompatTransfers | kIncompatMoves;  // set on what this program writes
constexpr uint64_t kKnownIncompat = kOurIncompat | kIncompatNull | kIncompatShared;
constexpr uint64_t kKnownReadOnlyCompat = 0;

constexpr uint32_t kNoArea = 0xffffffff;

struct Superblock {
  uint8_t magic[8];
  uint32_t crc;  // CRC32C of the whole block with this field zero
  uint32_t format_version;
  uint64_t sequence;  // the higher of the two that verify counts; it lies in slot (sequence & 1)
  uint64_t compat;
  uint64_t ro_compat;
  uint64_t incompat;
  uint8_t cluster[16];
  uint8_t device[16];
  uint64_t store_id;    // drawn at each format; names the journal and snapshots of this store
  uint64_t created_ms;  // Unix time of the format
  uint64_t size_bytes;
  uint32_t sector_bytes;
  uint32_t slab_bytes;
  uint64_t max_chunks;
  uint64_t journal_offset;
  uint64_t journal_bytes;
  uint64_t snapshot_offset[2];
  uint64_t snapshot_bytes;  // room of each area
  uint64_t data_offset;
  uint64_t slab_count;
  // The last complete snapshot, and where replay starts.
  uint64_t snapshot_id;    // 0: none
  uint64_t snapshot_used;  // bytes
  uint32_t snapshot_area;  // 0 or 1; kNoArea: none
  uint32_t snapshot_slices;
  uint64_t replay_offset;       // in the journal region
  uint64_t replay_block;        // sequence of the block that stands there, if any
  uint64_t replay_record;       // sequence of its first record
  uint32_t replay_incarnation;  // openings so far; blocks with a lower one aren't replayed
  uint32_t reserved;
  char written_by[32];  // program that formatted, zero-padded
  uint32_t target_count;
  uint32_t reserved2;
  uint64_t targets[128];
  uint64_t snapshot_ms;  // Unix time when the snapshot was completed; 0: unknown
  uint8_t rest[2792];
};
static_assert(sizeof(Superblock) == kBlock);
static_assert(offsetof(Superblock, targets) == 272 && offsetof(Superblock, snapshot_ms) == 1296);

// Before every journal block and snapshot slice.
struct BlockHeader {
  uint32_t magic;
  uint32_t crc;  // CRC32C of the first used_bytes bytes with this field zero
  uint64_t store_id;
  uint64_t sequence;      // journal: of the block. slice: 0, 1, ... in its snapshot
  uint64_t mark;          // journal: highest block sequence known flushed. slice: the snapshot's id
  uint64_t first_record;  // journal: sequence of its first record. slice: of the last record whose
                          // effect it shows
  uint32_t used_bytes;    // header and records
  uint32_t span_blocks;   // 4 KiB blocks up to the next header
  uint32_t record_count;
  uint32_t incarnation;  // counts openings of the store; never goes down along the journal
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(BlockHeader) == 64);

constexpr uint32_t kBlockIsPadding = 1;          // journal: skip to the start of the region
constexpr uint32_t kSliceIsLast = 2;             // snapshot
constexpr uint32_t kSliceHasTables = 4;          // snapshot: after the chunks
constexpr uint32_t kMaxBlockBytes = 256 * 1024;  // of a journal block or slice

enum class RecordType : uint8_t {
  stage = 1,
  commit = 2,
  refuse = 3,
  retry = 4,
  fence = 5,
  space_epoch = 6,
  expire_spaces = 7,
  chain_state = 8,
  opened = 9,
  install = 10,  // laid out like stage
  erase = 11,
  reset_target = 12,
  release_target = 13,
  move = 14,
  share = 15,
  chunk = 16,    // snapshots only: a committed version
  pending = 17,  // snapshots only: laid out like stage
};

// A record: header, fixed part (fixed_bytes, at least what this version knows; more is kept and
// ignored), then what the type says. Records are padded with zeros to a multiple of 8.
struct RecordHeader {
  uint32_t bytes;  // the whole record
  uint8_t type;
  uint8_t version;  // 1
  uint16_t target;  // index into Superblock.targets
  uint16_t fixed_bytes;
  uint16_t reserved;
  uint32_t reserved2;
};
static_assert(sizeof(RecordHeader) == 16);

// One version of a chunk.
struct DiskImage {
  Version version;
  uint64_t place;  // first 4 KiB block of its slot on the device; 0: none
  uint32_t stored_length;
  uint32_t logical_length;
  uint64_t expiry_ms;
  uint8_t place_class;  // slot size 4 KiB << class; kNoClass: none
  uint8_t codec;
  uint8_t flags;
  uint8_t role;
  uint8_t tag_bytes;
  uint8_t kind;  // UpdateKind that made it
  uint16_t granules;
  uint8_t tag[16];
};
static_assert(sizeof(DiskImage) == 64);

// After the fixed part: changed_granules checksums (u32; padded to 8), then overlay_count times a
// DiskOverlay, then the bytes of all overlays in the same order.
struct StageRecord {
  ChunkKey key;
  Version base;
  DiskImage image;
  uint64_t client;
  uint64_t sequence;
  uint32_t channel;
  uint32_t chain;
  uint64_t space_epoch;
  uint32_t write_offset;
  uint32_t write_length;
  uint16_t first_changed;     // granules [first_changed, + changed_granules) differ from the base;
  uint16_t changed_granules;  // all others are the base's
  uint8_t flags;
  uint8_t reserved;
  uint16_t overlay_count;
};
static_assert(sizeof(StageRecord) == 152);
constexpr uint8_t kStageCommitNow = 1;
constexpr uint8_t kInstallKeepsPendings = 2;  // those above its version

struct DiskOverlay {
  uint32_t first_block;  // 4 KiB blocks of the chunk
  uint32_t blocks;
};
static_assert(sizeof(DiskOverlay) == 8);

struct CommitRecord {
  ChunkKey key;
  Version version;
};
static_assert(sizeof(CommitRecord) == 40);

struct RefuseRecord {
  ChunkKey key;
  Version version;
  uint64_t client;
  uint64_t sequence;
  uint32_t channel;
  uint32_t chain;
  uint32_t code;
  uint32_t reserved;
};
static_assert(sizeof(RefuseRecord) == 72);

struct RetryRecord {
  ChunkKey key;
  Version version;
  uint64_t client;
  uint64_t sequence;
  uint32_t channel;
  uint32_t chain;
  uint32_t code;
  uint8_t state;
  uint8_t reserved[3];
};
static_assert(sizeof(RetryRecord) == 72);

struct EraseRecord {
  ChunkKey key;
};
static_assert(sizeof(EraseRecord) == 24);

// The bytes of the committed version, overlays laid over them, stand in another slot from now on.
struct MoveRecord {
  ChunkKey key;
  Version version;
  uint64_t place;
  uint8_t place_class;
  uint8_t reserved[7];
};
static_assert(sizeof(MoveRecord) == 56);

// The committed version stands in that slot from now on, which other chunks may name as well: the bytes there
// are the same as in its own.
struct ShareRecord {
  ChunkKey key;
  Version version;
  uint64_t place;
  uint8_t place_class;
  uint8_t flags;
  uint8_t reserved[6];
};
static_assert(sizeof(ShareRecord) == 56);
constexpr uint8_t kShareStays = 1;  // it stood there before

// Of reset_target and release_target; the target stands in the header.
struct TargetRecord {
  uint64_t reserved;
};
static_assert(sizeof(TargetRecord) == 8);

struct FenceRecord {
  uint64_t client;
};
static_assert(sizeof(FenceRecord) == 8);

struct SpaceEpochRecord {
  uint64_t space;
  uint64_t least_epoch;
  uint64_t expiry_ms;
};
static_assert(sizeof(SpaceEpochRecord) == 24);

struct ExpireSpacesRecord {
  uint64_t manager_ms;
};
static_assert(sizeof(ExpireSpacesRecord) == 8);

// Followed by `bytes` bytes.
struct ChainStateRecord {
  uint32_t bytes;
  uint32_t reserved;
};
static_assert(sizeof(ChainStateRecord) == 8);

// The first record of every opening.
struct OpenedRecord {
  uint32_t incarnation;
  uint32_t reserved;
  uint64_t unix_ms;
};
static_assert(sizeof(OpenedRecord) == 16);

// After the fixed part: image.granules checksums (padded to 8), overlays as in StageRecord.
struct ChunkRecord {
  ChunkKey key;
  DiskImage image;
  uint32_t accessed;         // the last use, in 64 ms since created_ms, from 1 on; 0: unknown
  uint32_t accessed_before;  // the use before that; 0: none, or unknown
  uint16_t overlay_count;
  uint8_t reserved[6];
};
static_assert(sizeof(ChunkRecord) == 104);

constexpr uint64_t pad8(uint64_t bytes) {
  return (bytes + 7) & ~7ull;
}
constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}
constexpr uint64_t slot_bytes(uint8_t place_class) {
  return kBlock << place_class;
}
constexpr uint32_t granules_of(uint32_t length) {
  return (length + kGranuleBytes - 1) / kGranuleBytes;
}

}  // namespace ffs::engine
