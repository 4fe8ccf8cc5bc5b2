// The records of a shard: connections, requests, payloads. Plain structs; shard.h works on them.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/ids.h"
#include "craq/replica.h"
#include "engine/chunk_store.h"
#include "ffs/wire.h"
#include "io/io.h"
#include "net/socket.h"
#include "server/authority.h"
#include "server/buffers.h"
#include "server/lending.h"
#include "server/regions.h"
#include "server/store_view.h"
#include "server/touches.h"

namespace ffs::server {

class Shard;
class TargetSpaces;
struct Target;
struct Session;
struct RdmaPort;

// The bytes of an update on their way, with the writer's checksums; craq's BufferRef. Counted:
// the replica's reference, one for each send under way, one for each stage under way.
constexpr uint32_t kMaxKnownBlocks = 256;

struct Payload {
  Payload* next_free = nullptr;
  uint32_t slot = 0;
  uint32_t references = 0;
  uint8_t* buffer = nullptr;  // of the pool; null until the bytes are (to be) here
  engine::Berth berth;        // or a slot of a device in memory
  uint32_t pad = 0;           // data begins so far into the buffer: chunk offset modulo 4096
  uint32_t chunk_offset = 0;
  uint32_t length = 0;
  bool creates = false;  // the whole content of a new chunk
  bool sound = true;     // as far as it was checked
  uint32_t checked = 0;  // bytes, of whole pieces
  uint32_t pieces_checked = 0;
  bool has_crcs = false;  // the writer sent them; else they are computed here
  uint32_t crc_count = 0;
  std::array<uint32_t, kMaxGranules + 1> crcs;
  // The same of each whole block of 4096 bytes, for the store's small overwrites later: of payloads that
  // begin with a block, up to 1 MiB.
  bool by_block = false;
  bool has_block_crcs = false;  // once the bytes were checked
  std::array<uint32_t, kMaxKnownBlocks> block_crcs;

  // Where it comes from, when it is fetched (PayloadState::later): a region, or memory of the client's that
  // `source` (which counts it among its requests) reads over RDMA under `remote_key`.
  ClientRegion* region = nullptr;
  Session* source = nullptr;
  uint32_t remote_key = 0;
  uint64_t request_id = 0;  // with a source
  uint64_t address = 0;
  Target* holder = nullptr;  // whose replica has a reference
  Target* target = nullptr;  // the fetch's
  craq::OpId fetch = 0;
  uint32_t fetched = 0;  // bytes copied
  BufferWaiter waiter;
  Payload* next_fetch = nullptr;

  bool has_place() const { return buffer != nullptr || berth.bytes != nullptr; }
  uint8_t* data() const { return berth.bytes != nullptr ? berth.bytes : buffer + pad; }
  const uint32_t* known_blocks() const { return has_block_crcs ? block_crcs.data() : nullptr; }
  craq::BufferRef ref() { return craq::BufferRef{reinterpret_cast<uint64_t>(this)}; }
  static Payload* of(craq::BufferRef ref) { return reinterpret_cast<Payload*>(ref.value); }
};

// Bytes of a read that the device couldn't deliver in place.
struct Patch {
  uint32_t at = 0;
  uint32_t length = 0;
  uint32_t capacity = 0;
  uint8_t* buffer = nullptr;
};

// A client's request between its frame and its reply.
struct Request : engine::Sink {
  Request* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  Session* session = nullptr;
  Target* target = nullptr;
  uint64_t request_id = 0;
  wire::Type type{};
  uint32_t open_answers = 0;   // replies of the replica that are still to come
  uint64_t deadline_ms = 0;    // on the shard's clock; 0: none
  uint64_t arrived_us = 0;     // kRead: when its frame was seen
  uint32_t beside = 0;         // and how many other reads were under way
  uint32_t denied_detail = 0;  // why authority was denied

  // kRead
  uint32_t read_flags = 0;
  uint8_t checksum_kind = 0;
  wire::BulkRef bulk{};
  ClientRegion* region = nullptr;  // in use; null: the reply is inline
  uint8_t* buffer = nullptr;       // an inline reply's
  Lent* lent = nullptr;            // the same, of a device in memory
  engine::ReadOp read;
  craq::OpId read_op = 0;
  bool read_done = false;
  bool of_many = false;       // came with others, over RDMA: a plain result goes with theirs
  bool patch_failed = false;  // no buffer for a patch: read again, inline
  std::vector<Patch> patches;
  std::array<uint32_t, kMaxGranules + 2> sums;
  BufferWaiter waiter;

  // kUpdate (length: kListChunks too)
  wire::UpdateKind update_kind{};
  uint32_t length = 0;

  // kExists
  std::vector<wire::ExistsEntry> entries;
  uint32_t failed_status = 0;
  uint32_t failed_detail = 0;
  ChainVersion chain_version;
  // kUpdate, kLastChunk
  uint64_t space = 0;
  // kListChunks; `length` is how many are wanted
  ChunkKey list_from;
  uint32_t list_flags = 0;

  int put(uint32_t at, const uint8_t* bytes, uint32_t size) override;
};

// One read of a kReadMany on its short way (read_many.cc). If it turns out not to be as plain as that, a
// Request begins anew. A device that can't put the bytes in place finds a sink that refuses them.
struct ManyRead : engine::ReadOp, engine::Sink {
  ManyRead* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  Session* session = nullptr;
  Target* owner_target = nullptr;
  ClientRegion* area = nullptr;  // in use
  uint64_t address = 0;          // in it
  uint64_t request_id = 0;
  uint64_t arrived_us = 0;
  uint64_t deadline_ms = 0;  // on the shard's clock; 0: none
  uint32_t beside = 0;
  uint32_t flags = 0;
  wire::Context context{};
  ChainVersion judged_in;          // the chain version that the replica had
  std::array<uint32_t, 3> sums{};  // room for what the store asks for; one at most is whole

  int put(uint32_t, const uint8_t*, uint32_t) override { return ENOBUFS; }
};

// A connection that somebody opened to this shard: a client, or another server of a chain.
struct Session {
  Session* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  net::Connection connection;
  io::Poll in;
  io::Poll out;
  Fd out_fd;
  bool out_armed = false;   // since the socket was full
  bool out_ending = false;  // it found nothing to send, so it is taken away
  bool used = false;
  bool open = false;
  bool hung_up = false;  // the peer's end was reported
  bool hello = false;
  bool from_server = false;
  bool proved = false;    // a server's: it has proved the cluster's secret, or there is none
  bool recovery = false;  // it brings what recovery and repair send
  bool readable = false;
  bool listed_to_read = false;
  bool listed_to_flush = false;
  bool waits_for_op = false;  // no request record was free
  bool send_full = false;     // too much waits to be sent
  uint64_t sent_us = 0;   // when some of what waits to be sent went last, or began to wait; 0: nothing does
  int untaken_bytes = 0;  // in the socket, when they were looked at last
  ClientId client;
  uint32_t requests = 0;       // records that point here
  uint64_t lent_bytes = 0;     // of the device's memory
  bool listed_to_end = false;  // closed, and the kernel still reads what it sends
  uint32_t polls = 0;          // not yet removed
  uint32_t region_waits = 0;   // unregistered regions whose end is to be answered
  RdmaPort* rdma = nullptr;    // of its channel
  uint32_t rdma_work = 0;      // set-up or end of a channel under way on the helper thread
  std::unordered_map<uint32_t, OpenedCapability> capabilities;
  net::Mac expected_proof{};  // of a server that has said hello and not proved the secret yet
  std::unordered_map<uint64_t, ClientRegion*> regions;

  // An update whose payload is being received.
  struct Incoming {
    bool active = false;
    uint64_t moved_us = 0;  // when some of it came last
    uint64_t request_id = 0;
    wire::Type type{};
    wire::Update update{};  // kUpdate, and the update inside a kForward
    wire::Forward forward{};
    wire::Sync sync{};
    std::vector<uint8_t> message;  // of a kSync
    Payload* payload = nullptr;
  } incoming;
  BufferWaiter waiter;                        // for the payload's buffer
  std::vector<wire::ReadManyResult> results;  // of small reads, for the next frame
};

// An operation of the store under way for a replica. One struct a kind; kept in slabs.
struct StageWork : engine::StageOp {
  StageWork* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  Target* target = nullptr;
  craq::OpId op_id = 0;
  Payload* payload = nullptr;  // a reference
};

struct SmallWork : engine::StoreOp {
  SmallWork* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  Target* target = nullptr;
  craq::OpId op_id = 0;
};

// A whole version read for a replica: to be sent again (Load), or to be copied to another member.
struct LoadWork : engine::ReadOp {
  LoadWork* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  Target* owner_target = nullptr;
  craq::OpId op_id = 0;
  Payload* payload = nullptr;  // what the replica will own
  BufferUse use = BufferUse::kUpdate;
  BufferWaiter waiter;
};

struct InstallWork : engine::InstallOp {
  InstallWork* next_free = nullptr;
  uint32_t slot = 0;
  Shard* shard = nullptr;
  Target* target_record = nullptr;
  craq::OpId op_id = 0;
  Payload* payload = nullptr;  // a reference; null: no bytes
};

// A target of this shard's device that a chain names.
struct Target {
  TargetId id;
  ChainId chain;
  Shard* shard = nullptr;
  std::unique_ptr<EngineView> view;
  std::unique_ptr<craq::Replica> replica;
  craq::ChainConfig recorded;             // the last one handed over; version zero: none
  BufferUse peer_use = BufferUse::kTail;  // for updates from its predecessor
  bool persisted_here = false;            // a chain version, by this incarnation
  uint32_t under_way = 0;                 // effects with an op that haven't been told as completed
  bool leaving = false;                   // released: its replica hears nothing any more, or is gone
  craq::ReplicaStatus told;               // what the manager was woken for last
  TargetSpaces* spaces = nullptr;         // while it is in a chain
  Touches touches;                        // to be reported to the head
  bool told_lacking = false;              // the head was told last that this device lacks room
};

}  // namespace ffs::server
