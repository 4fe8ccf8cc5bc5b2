// The frames of the data plane (docs/wire_format.md). Little-endian, no padding, every size
// pinned. A frame is: FrameHeader, fixed part (by type), variable part, inline payload.
//
// A newer sender may send a longer fixed part: a receiver reads what it knows and skips the
// rest; a shorter one than the receiver's first version is refused. Reserved fields are sent as
// zero and ignored. The frame checksum covers header (with the field zero), fixed and variable
// part; the payload is covered by the granule checksums of the variable part.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ffs::wire {

constexpr uint32_t kMagic = 0x31534646;  // "FFS1"
constexpr uint8_t kProtocolVersion = 1;  // negotiated by hello; N and N-1 work together
constexpr uint8_t kHelloVersion = 1;     // of hello and its reply, for ever
constexpr uint32_t kMaxFixedBytes = 1024;
constexpr uint32_t kMaxVarBytes = 256 * 1024;
constexpr uint32_t kMaxPayloadBytes = 16 * 1024 * 1024;
constexpr uint32_t kMaxSyncMessageBytes = 128 * 1024;  // of the variable part of kSync

enum class Type : uint8_t {
  kHello = 1,
  kHelloReply = 2,
  kOpenCapability = 3,
  kOpenCapabilityReply = 4,
  kCloseCapability = 5,  // one way
  kRegisterRegion = 6,   // with SCM_RIGHTS over `local`
  kRegisterRegionReply = 7,
  kUnregisterRegion = 8,
  kUnregisterRegionReply = 9,
  kPing = 10,
  kPong = 11,
  kPeerProof = 12,  // one way, of the server that connected
  kRdmaOpen = 13,   // to servers that say kFeatureRdma: the connection's frames go over a queue pair from here on
  kRdmaOpenReply = 14,
  kRead = 16,
  kReadReply = 17,
  kUpdate = 18,
  kUpdateReply = 19,
  kExists = 20,  // batched: keys (and tags) in the variable part
  kExistsReply = 21,
  kLastChunk = 22,  // the highest committed or pending chunk of a space on this target
  kLastChunkReply = 23,
  kListChunks = 24,  // a page of the chunks on this target, in the order of their keys
  kListChunksReply = 25,
  kReadMany = 26,  // many small reads in one frame; to servers that say kFeatureReadMany
  kReadManyReply = 27,
  // Between the servers of a chain, one way (docs/craq.md, Messages).
  kForward = 32,  // an update on its way down
  kNotice = 33,   // every other message between members
  kSync = 34,     // recovery, repair, comparison
  kUsed = 35,     // to the head: which chunks were used here, and what this device lacks
};

struct FrameHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
  uint16_t flags;
  uint32_t fixed_bytes;
  uint32_t var_bytes;
  uint32_t payload_bytes;  // inline bulk that follows
  uint32_t frame_crc;      // CRC32C of header (this field zero) + fixed + variable part
  uint64_t request_id;     // chosen by the asker, repeated by the reply
};
static_assert(sizeof(FrameHeader) == 32);

enum class BulkKind : uint8_t { kNone = 0, kInline = 1, kRegion = 2, kRdma = 3 };

// Where bulk data lies: in this frame's payload, in a registered region of shared memory
// (offset in it), or at a remote address (RDMA; region holds the rkey).
struct BulkRef {
  uint8_t kind;
  uint8_t reserved[3];
  uint32_t length;
  uint64_t region;
  uint64_t address;
};
static_assert(sizeof(BulkRef) == 24);

struct WireVersion {  // base/ids.h Version
  uint32_t term;
  uint32_t counter;
  uint64_t update;
};
static_assert(sizeof(WireVersion) == 16);

enum class ChecksumKind : uint8_t { kNone = 0, kCrc32c = 1 };

// What every data frame carries.
struct Context {
  uint64_t target;  // the replica that the frame is meant for (asserted on arrival)
  uint32_t chain;
  uint32_t capability;  // handle on this connection; 0 between servers
  uint32_t chain_term;  // chain version that the sender holds
  uint32_t chain_counter;
  uint64_t client;  // client session; 0 with updates that need no retry entry
  uint64_t sequence;
  uint32_t channel;
  uint32_t deadline_ms;  // time that is left, 0: none
  uint64_t space_epoch;
  uint64_t trace_id;
  uint64_t routing_epoch;  // a hint to refresh
  uint8_t priority;        // 0 foreground .. 255 background
  uint8_t checksum_kind;
  uint8_t reserved[6];
};
static_assert(sizeof(Context) == 80);

// --- connection -------------------------------------------------------------------------

enum class Role : uint8_t { kClient = 1, kServer = 2 };

struct Hello {
  uint8_t cluster[16];
  uint64_t client;       // client session id (role client)
  uint64_t node;         // node id (role server)
  uint64_t incarnation;  // of the sending server
  uint64_t features;
  uint8_t role;
  uint8_t version_min;
  uint8_t version_max;
  uint8_t reserved[5];
};
static_assert(sizeof(Hello) == 56);

// Hello of a server (role server): with a nonce. A shorter one has none (all zero).
struct ServerHello {
  Hello hello;
  uint8_t nonce[32];
};
static_assert(sizeof(ServerHello) == 88);

// HelloReply::features.
enum Features : uint64_t {
  kFeatureUsed = 1,      // takes kUsed
  kFeatureReadMany = 2,  // takes kReadMany
  kFeatureOffer = 4,     // takes kUpdateOffer
  kFeatureRdma = 8,      // takes kRdmaOpen
};

struct HelloReply {
  uint32_t status;  // 0 or errno
  uint32_t detail;
  uint8_t cluster[16];
  uint64_t node;
  uint64_t incarnation;
  uint64_t features;
  uint64_t routing_epoch;
  uint32_t max_payload_bytes;
  uint8_t version;  // chosen
  uint8_t reserved[3];
};
static_assert(sizeof(HelloReply) == 64);

// The reply to a server where the cluster has a secret (net/peer_proof.h).
struct ServerHelloReply {
  HelloReply reply;
  uint8_t nonce[32];
  uint8_t proof[32];  // of the server that was connected to
};
static_assert(sizeof(ServerHelloReply) == 128);

// Follows at once; before it, no other frame of that server is taken.
struct PeerProof {
  uint8_t proof[32];
};
static_assert(sizeof(PeerProof) == 32);

// One end of a queue pair (docs/rdma.md, Setting up).
struct RdmaEnd {
  uint32_t queue_pair;    // 24 bits, not 0
  uint32_t first_packet;  // sequence number, 24 bits
  uint8_t gid[16];
  uint16_t lid;           // InfiniBand
  uint8_t mtu;            // of the port: 1 (256 bytes) to 5 (4096)
  uint8_t ethernet;       // 0 InfiniBand, 1 RoCE
  uint8_t reads_in;       // RDMA READs of the other side that it serves at a time
  uint8_t reads_out;      // that it starts at a time
  uint8_t reserved[2];
  uint32_t receives;       // buffers for messages that are posted
  uint32_t message_bytes;  // of each
};
static_assert(sizeof(RdmaEnd) == 40);

struct RdmaOpen {
  RdmaEnd end;
};
static_assert(sizeof(RdmaOpen) == 40);

// status not 0: the connection goes on over TCP.
struct RdmaOpenReply {
  uint32_t status;
  uint32_t detail;
  RdmaEnd end;
};
static_assert(sizeof(RdmaOpenReply) == 48);

// The capability's bytes stand in the variable part (struct Capability below, or a longer one).
struct OpenCapability {
  uint32_t handle;  // chosen by the client, unique on the connection
  uint32_t reserved;
};
static_assert(sizeof(OpenCapability) == 8);

struct StatusReply {
  uint32_t status;
  uint32_t detail;
  uint64_t value;
};
static_assert(sizeof(StatusReply) == 16);

enum Rights : uint32_t { kRightRead = 1, kRightWrite = 2, kRightRemove = 4 };

struct Capability {
  uint8_t version;  // 1
  uint8_t kind;     // 0 file, 1 KV space, 2 cluster (collection, recovery)
  uint16_t reserved;
  uint32_t rights;
  uint64_t client;  // session
  uint64_t space;
  uint64_t epoch;      // space epoch at issue
  uint64_t expiry_ms;  // manager time
  uint64_t id;         // unique; fences and retry entries name it
  uint32_t key_id;     // 0: unsigned (loopback development cluster)
  uint32_t reserved2;
  uint8_t mac[32];  // HMAC-SHA256 of the 56 bytes before it (net/mac.h)
};
static_assert(sizeof(Capability) == 88);

struct RegisterRegion {
  uint64_t region;  // chosen by the client, never used again
  uint64_t size;
  uint64_t offset;  // of the extent in the file that is passed
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(RegisterRegion) == 32);

struct UnregisterRegion {
  uint64_t region;
};
static_assert(sizeof(UnregisterRegion) == 8);

// --- reads ------------------------------------------------------------------------------

enum ReadFlags : uint32_t {
  kReadVerifyPartial = 1,  // verify whole granules on the server where a part is asked for
  kReadWantChecksums = 2,  // granule checksums in the reply
  kReadCompareTag = 4,     // a different tag is ENODATA, detail kDetailTagMismatch
  kReadUncommitted = 8,    // newest pending is welcome
  kReadTouch = 16,         // counts as use for eviction
  kReadVerifyWhole = 32,   // verify every granule on the server: the asker got bytes that didn't match
};

struct Read {
  Context context;
  uint8_t key[24];
  uint32_t offset;
  uint32_t length;
  uint32_t flags;
  uint32_t tag_bytes;
  uint8_t tag[16];
  BulkRef bulk;  // kRegion: destination; kInline: the reply carries the payload
};
static_assert(sizeof(Read) == 160);

// Variable part: granule_count x u32 CRC32C, for the granules that lie whole in
// [offset, offset+bytes) (the last granule of a chunk counts as whole up to the chunk's length),
// then patch_count x ReadPatch. With bulk.kind kInline the payload is the data. With kRegion the
// data is in the region but for the patches: their bytes are the payload, one after another, and
// the client puts them in place. (A server writes client memory through registered pages only,
// docs/ring.md, Buffers; ends of unaligned ranges, zeros and small updates that are still in
// memory come as patches.)
struct ReadReply {
  uint32_t status;      // 0 or errno; ENOENT: no such chunk
  uint32_t detail;      // Detail
  WireVersion version;  // of the content returned
  WireVersion chain;    // chain version of the answering replica (update: 0)
  uint64_t expiry_ms;
  uint64_t routing_epoch;
  uint32_t bytes;           // delivered; short at the end of the chunk
  uint32_t chunk_length;    // where reads end
  uint32_t logical_length;  // with a codec: of what the bytes decode to
  uint32_t first_granule;   // of the checksums
  uint8_t checksum_kind;
  uint8_t codec;
  uint8_t tag_bytes;
  uint8_t chunk_flags;
  uint32_t retry_after_ms;
  uint8_t tag[16];
  BulkRef bulk;
  uint32_t granule_count;
  uint32_t patch_count;
};
static_assert(sizeof(ReadReply) == 128);

struct ReadPatch {
  uint32_t at;  // from the start of the read
  uint32_t length;
};
static_assert(sizeof(ReadPatch) == 8);

// Many small reads of one target under one capability, into one region. Each is a read of its own, with a
// request id of its own: a kReadReply answers it, or an entry of a kReadManyReply. The header's request id is
// 0.
constexpr uint32_t kMaxReadMany = 512;
constexpr uint32_t kMaxReadManyBytes =
    32 * 1024;  // a read; so at most the chunk's last granule is whole in it

// Variable part: `count` x ReadManyEntry.
struct ReadMany {
  Context context;  // of each of them; trace_id is the first one's
  uint32_t count;   // 1 to kMaxReadMany
  uint32_t flags;   // kReadWantChecksums, or 0
  uint64_t region;
};
static_assert(sizeof(ReadMany) == 96);

struct ReadManyEntry {
  uint8_t key[24];
  uint32_t offset;
  uint32_t length;
  uint64_t address;     // in the region
  uint64_t request_id;  // as a header's
};
static_assert(sizeof(ReadManyEntry) == 48);

// What there is to say of reads that found a chunk without tag and codec, all of whose bytes the device put
// in place: status 0, no patches. Of those of several frames, as they come. Variable part: `count` x
// ReadManyResult.
struct ReadManyReply {
  uint64_t routing_epoch;
  uint32_t count;  // 1 to kMaxReadMany
  uint32_t reserved;
};
static_assert(sizeof(ReadManyReply) == 16);

constexpr uint32_t kNoGranule = ~0u;

struct ReadManyResult {
  uint64_t request_id;
  uint32_t bytes;         // as in ReadReply
  uint32_t chunk_length;  // as in ReadReply; the logical length is the same
  uint32_t granule;       // that lies whole in the read, if checksums were asked for; kNoGranule: none
  uint32_t crc;           // its CRC32C
};
static_assert(sizeof(ReadManyResult) == 24);

// --- updates ----------------------------------------------------------------------------

enum class UpdateKind : uint8_t {
  kWrite = 1,     // [offset, offset+length) of the chunk
  kTruncate = 2,  // the chunk's length becomes `length` (shrink, or extend with zeros)
  kRemove = 3,
  kReplace = 4,      // whole content
  kCreate = 5,       // whole content if absent; touches or pins what is there
  kSpaceEpoch = 6,   // raise the space's least epoch to context.space_epoch (key: space, zeros)
  kRemoveRange = 7,  // remove a page of chunks of the space, from `key` on; reply.value: removed
  kTouch = 8,
};

enum UpdateFlags : uint32_t {
  kUpdatePin = 1,
  kUpdateUnpin = 2,
  kUpdateNeedExisting = 4,  // kWrite on an absent chunk is ENOENT instead of creating it
  kUpdateBeyondEnd = 8,     // kWrite is EEXIST if the chunk's newest version reaches beyond `offset`
  kUpdateOffer = 16,  // kCreate of `length` bytes that stay with the client (bulk: none): answered as the
                      // create would be, but EAGAIN, detail kWanted where it would take them
};

// Variable part: one u32 CRC32C for each piece of the data cut at granule borders of the chunk.
struct Update {
  Context context;
  uint8_t key[24];
  uint8_t kind;
  uint8_t codec;
  uint8_t tag_bytes;
  uint8_t role;  // 0 data
  uint32_t flags;
  uint32_t offset;
  uint32_t length;
  uint32_t logical_length;
  uint32_t reserved;
  uint64_t expiry_ms;
  uint8_t tag[16];
  BulkRef bulk;
};
static_assert(sizeof(Update) == 176);

struct UpdateReply {
  uint32_t status;  // EEXIST: create-if-absent found it (value: its length)
  uint32_t detail;
  WireVersion version;
  WireVersion chain;
  uint64_t value;
  uint64_t routing_epoch;
  uint32_t retry_after_ms;
  uint32_t chunk_length;
};
static_assert(sizeof(UpdateReply) == 64);

enum ForwardFlags : uint32_t {
  kForwardBaseAbsent = 1,      // the base is none or a removal
  kForwardBaseCommitted = 2,   // the sender has committed the base
  kForwardRemovalFollows = 4,  // this or a later pending update of the chunk is a removal
  kForwardHeld = 8,            // the sender and all before it hold it durably
};

// An update on its way down the chain, to the next member: what the head decided, then the
// update in the client's form (context.target is the receiver; capability 0).
struct Forward {
  WireVersion version;
  WireVersion base;
  WireVersion floor;  // every version below is resolved at the sender
  uint64_t from;      // target id of the sender
  uint32_t flags;     // ForwardFlags
  uint32_t reserved;
  Update update;
};
static_assert(sizeof(Forward) == 240);

// Which fields a kind uses: docs/craq.md, Messages. The identity (client, channel, sequence)
// stands in the context.
struct Notice {
  Context context;
  uint64_t from;
  uint8_t key[24];
  WireVersion version;
  WireVersion other;
  uint64_t number;
  uint8_t kind;  // craq/messages.h NoticeType
  uint8_t flag;
  uint16_t outcome;  // craq/messages.h Outcome
  uint32_t reserved;
};
static_assert(sizeof(Notice) == 160);

// A message of recovery, repair or comparison; what it says is between the replicas (docs/craq.md,
// Recovery). Variable part: message_bytes of it, then one u32 CRC32C for each 64 KiB of the payload, a whole
// version of a chunk. context: target (the receiver), chain, chain version; the rest is zero.
struct Sync {
  Context context;
  uint64_t from;  // target id of the sender
  uint32_t message_bytes;
  uint32_t payload_length;  // the header's payload_bytes
};
static_assert(sizeof(Sync) == 96);

constexpr uint32_t kMaxUsedKeys = 4096;

// To the head of the chain, each second and as soon as room runs out: keys of chunks that clients have used
// at the sender (a sample), and how its device stands. Variable part: `count` keys of 24 bytes. context:
// target (the receiver), chain, chain version; the rest is zero.
struct Used {
  Context context;
  uint64_t from;           // target id of the sender
  uint64_t lacking_bytes;  // what the chain is asked to evict, so that the sender's device has its reserve
  uint32_t count;          // at most kMaxUsedKeys
  uint32_t flags;          // UsedFlags
};
static_assert(sizeof(Used) == 104);

enum UsedFlags : uint32_t {
  kUsedShortOfRoom = 1,  // puts into evictable spaces must wait
};

// --- batched lookups ----------------------------------------------------------------------

// Variable part of the request: `count` x ExistsKey. Of the reply: `count` x ExistsEntry.
struct Exists {
  Context context;
  uint32_t count;
  uint32_t flags;  // kReadTouch
};
static_assert(sizeof(Exists) == 88);

struct ExistsKey {
  uint8_t key[24];
  uint8_t tag[16];
  uint32_t tag_bytes;
  uint32_t reserved;
};
static_assert(sizeof(ExistsKey) == 48);

struct ExistsReply {
  uint32_t status;
  uint32_t detail;
  WireVersion chain;
  uint64_t routing_epoch;
  uint32_t count;
  uint32_t reserved;
};
static_assert(sizeof(ExistsReply) == 40);

struct ExistsEntry {
  uint32_t state;  // 0 absent, 1 present, 2 present with another tag
  uint32_t length;
};
static_assert(sizeof(ExistsEntry) == 8);

struct LastChunk {
  Context context;
  uint64_t space;
};
static_assert(sizeof(LastChunk) == 88);

struct LastChunkReply {
  uint32_t status;  // ENOENT: none
  uint32_t detail;
  uint8_t key[24];
  uint32_t length;
  uint32_t reserved;
  uint64_t chunks;  // how many the space has on this target
};
static_assert(sizeof(LastChunkReply) == 48);

constexpr uint32_t kMaxListEntries = 1024;

enum ListFlags : uint32_t {
  kListAllSpaces = 1,   // goes on beyond the key's space; only under a capability for the cluster
  kListSpacesOnly = 2,  // the first chunk of each space
};

// From `key` on, at most `count` entries. Of the reply the variable part: `count` x ListEntry.
struct ListChunks {
  Context context;
  uint8_t key[24];
  uint32_t count;
  uint32_t flags;  // ListFlags
};
static_assert(sizeof(ListChunks) == 112);

struct ListChunksReply {
  uint32_t status;
  uint32_t detail;
  WireVersion chain;
  uint64_t routing_epoch;
  uint32_t count;
  uint32_t more;  // 1: there are chunks after the last entry
};
static_assert(sizeof(ListChunksReply) == 40);

enum ListEntryFlags : uint32_t { kListPending = 1 };

struct ListEntry {
  uint8_t key[24];
  uint32_t length;
  uint32_t flags;  // kListPending: nothing of it is committed on this target
};
static_assert(sizeof(ListEntry) == 32);

// Finer than an errno, for the client's decisions. Stable numbers.
enum class Detail : uint32_t {
  kNone = 0,
  kStaleRouting = 1,   // EAGAIN: refresh routing, send again (same identity)
  kNotServing = 2,     // EAGAIN: the replica or chain doesn't serve now
  kWrongTarget = 3,    // EAGAIN: this shard has no such target
  kNotHead = 4,        // EAGAIN
  kStaleEpoch = 5,     // ESTALE: the space epoch is too old
  kFenced = 6,         // ESTALE/EPERM: the client's session is over
  kOldSequence = 7,    // EINVAL: the channel has moved on
  kTagMismatch = 8,    // create: EEXIST with other content; read: ENODATA
  kChecksum = 9,       // EBADMSG: data on the way didn't match; send again
  kCorrupt = 10,       // EIO: data at rest doesn't match on this replica; ask another
  kPoisoned = 11,      // EIO: the device refuses everything until restart
  kBusy = 12,          // EAGAIN: over a bound; retry_after_ms
  kNoCapability = 13,  // EACCES: no such handle, or another session's
  kExpired = 14,       // EACCES: capability expired, renew
  kNoRegion = 15,      // ENXIO: the region isn't registered here
  kWrongCluster = 16,  // EPROTO
  kVersion = 17,       // EPROTO: no common protocol version
  kReissue = 18,       // EAGAIN: fell with an earlier refusal; send under a new sequence
  kBadFrame = 19,      // EPROTO
  kDeadline = 20,      // ETIMEDOUT: outcome unknown for updates
  kForged = 21,        // EACCES: the capability's signature is wrong
  kUnknownKey = 22,    // EACCES: signed with a key that isn't valid here (any more, or yet): renew
  kOtherSpace = 23,    // EACCES: the capability is for another space
  kMissingRight = 24,  // EACCES: it doesn't give that right
  kUnsigned = 25,      // EACCES: this cluster's capabilities are signed, and that one isn't
  kUnproved = 26,      // EACCES, hello of a server: it can't prove the cluster's secret
  kWanted = 27,        // EAGAIN: what was offered isn't there: send it
};

}  // namespace ffs::wire
