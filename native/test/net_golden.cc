// The frames of tests/golden/wire/, built from wire.h and compared byte by byte. The Python reader
// of the same files knows nothing of this code (tests/unit/test_wire_format.py).
#include <doctest/doctest.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/ids.h"
#include "net/frame.h"
#include "net/mac.h"
#include "net/peer_proof.h"

using namespace ffs;
using namespace ffs::net;
using wire::Type;

namespace {

std::string golden_path(const std::string& name) {
  // The tests run from the build folder or from the root of the tree.
  const std::string file = "tests/golden/wire/" + name + ".hex";
  for (const std::string up : {"", "../", "../../", "../../../"}) {
    if (std::ifstream(up + file).good()) return up + file;
  }
  const std::string here = __FILE__;
  return here.substr(0, here.rfind("native/test/")) + file;
}

std::vector<uint8_t> golden(const std::string& name) {
  std::ifstream in(golden_path(name));
  REQUIRE_MESSAGE(in.good(), "no golden file ", name);
  std::vector<uint8_t> bytes;
  std::string line;
  while (std::getline(in, line)) {
    const std::string hex = line.substr(line.rfind(": ") + 2);
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
      bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
  }
  return bytes;
}

const uint8_t kCluster[16] = {0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                              0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};
const wire::WireVersion kChunkVersion{2, 5, 77};

wire::Context context() {
  wire::Context c{};
  c.target = 0x101;
  c.chain = 9;
  c.capability = 1;
  c.chain_term = 2;
  c.chain_counter = 5;
  c.client = 0xC11E;
  c.sequence = 41;
  c.channel = 6;
  c.deadline_ms = 30000;
  c.space_epoch = 1;
  c.trace_id = 0x7ACE;
  c.routing_epoch = 12;
  c.checksum_kind = 1;
  return c;
}

template <typename T>
void set_key(T& frame) {
  const ChunkKey key = ChunkKey::of_file(7, 3);
  std::memcpy(frame.key, key.bytes.data(), sizeof frame.key);
}

wire::Update update() {
  wire::Update u{};
  u.context = context();
  set_key(u);
  u.kind = static_cast<uint8_t>(wire::UpdateKind::kWrite);
  u.offset = 65532;
  u.length = 8;
  u.logical_length = 65540;
  u.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kRegion);
  u.bulk.length = 8;
  u.bulk.region = 3;
  u.bulk.address = 4096;
  return u;
}

template <typename T>
Bytes bytes_of(const T& value) {
  return Bytes(reinterpret_cast<const uint8_t*>(&value), sizeof value);
}

template <typename T>
void check(const std::string& name, Type type, const T& fixed, Bytes var = {}, Bytes payload = {}) {
  INFO("frame ", name);
  const std::vector<uint8_t> expected = golden(name);
  SendQueue queue;
  queue.push(type, 0x1000 + static_cast<uint64_t>(type), fixed, var, payload);
  std::vector<uint8_t> built;
  iovec pieces[8];
  int fd;
  const int count = queue.gather(pieces, 8, &fd);
  for (int i = 0; i < count; i++) {
    const auto* from = static_cast<const uint8_t*>(pieces[i].iov_base);
    built.insert(built.end(), from, from + pieces[i].iov_len);
  }
  CHECK(built == expected);

  FrameReader reader;
  iovec slots[2];
  REQUIRE(reader.slots(slots) >= 1);
  std::memcpy(slots[0].iov_base, expected.data(), expected.size());
  reader.received(expected.size());
  Frame frame;
  REQUIRE(reader.next(&frame) == FrameReader::Next::kFrame);
  CHECK(frame.type == type);
  const T decoded = frame.as<T>();
  CHECK(std::memcmp(&decoded, &fixed, sizeof fixed) == 0);
  CHECK(std::vector<uint8_t>(frame.var.begin(), frame.var.end()) ==
        std::vector<uint8_t>(var.begin(), var.end()));
  if (!payload.empty()) {
    std::vector<uint8_t> to(payload.size());
    reader.place_payload(to.data());
    CHECK(reader.next(&frame) == FrameReader::Next::kPayload);
    CHECK(to == std::vector<uint8_t>(payload.begin(), payload.end()));
  }
  CHECK(reader.next(&frame) == FrameReader::Next::kNeedMore);
  CHECK(reader.idle());
}

}  // namespace

TEST_CASE("golden frames of a connection") {
  wire::Hello hello{};
  std::memcpy(hello.cluster, kCluster, 16);
  hello.client = 0xC11E;
  hello.role = 1;
  hello.version_min = hello.version_max = 1;
  check("hello", Type::kHello, hello);
  wire::HelloReply reply{};
  std::memcpy(reply.cluster, kCluster, 16);
  reply.node = 4;
  reply.incarnation = 8;
  reply.routing_epoch = 12;
  reply.max_payload_bytes = wire::kMaxPayloadBytes;
  reply.version = 1;
  check("hello_reply", Type::kHelloReply, reply);
  wire::ServerHello server{};
  std::memcpy(server.hello.cluster, kCluster, 16);
  server.hello.node = 5;
  server.hello.incarnation = 3;
  server.hello.role = 2;
  server.hello.version_min = server.hello.version_max = 1;
  std::memset(server.nonce, 0xA5, sizeof server.nonce);
  check("server_hello", Type::kHello, server);
  const net::MacKey key{1, 2, 3};
  wire::ServerHelloReply answer{};
  answer.reply = reply;
  std::memset(answer.nonce, 0x5A, sizeof answer.nonce);
  const net::Mac ours = net::peer_proof(key, net::Side::kServer, server, answer);
  std::memcpy(answer.proof, ours.data(), sizeof answer.proof);
  check("server_hello_reply", Type::kHelloReply, answer);
  wire::PeerProof proof{};
  const net::Mac theirs = net::peer_proof(key, net::Side::kAsker, server, answer);
  std::memcpy(proof.proof, theirs.data(), sizeof proof.proof);
  check("peer_proof", Type::kPeerProof, proof);
  wire::RdmaOpen rdma{};
  rdma.end.queue_pair = 17;
  rdma.end.first_packet = 0x123456;
  const uint8_t gid[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 99, 0, 1};
  std::memcpy(rdma.end.gid, gid, sizeof gid);
  rdma.end.mtu = 5;
  rdma.end.ethernet = 1;
  rdma.end.reads_in = rdma.end.reads_out = 16;
  rdma.end.receives = 32;
  rdma.end.message_bytes = 8192;
  check("rdma_open", Type::kRdmaOpen, rdma);
  check("rdma_open_reply", Type::kRdmaOpenReply, wire::RdmaOpenReply{0, 0, rdma.end});
  wire::OpenCapability open{};
  open.handle = 1;
  wire::Capability capability{};
  capability.version = 1;
  capability.rights = wire::kRightRead | wire::kRightWrite;
  capability.client = 0xC11E;
  capability.space = 7;
  capability.epoch = 1;
  capability.expiry_ms = 3600000;
  capability.id = 21;
  check("open_capability", Type::kOpenCapability, open, bytes_of(capability));
  capability.key_id = 3;
  const net::Mac mac = net::capability_mac(key, capability);
  std::memcpy(capability.mac, mac.data(), sizeof capability.mac);
  check("open_signed_capability", Type::kOpenCapability, open, bytes_of(capability));
  wire::StatusReply status{};
  status.value = 1;
  check("open_capability_reply", Type::kOpenCapabilityReply, status);
  check("close_capability", Type::kCloseCapability, open);
  check("register_region_reply", Type::kRegisterRegionReply, status);
  wire::RegisterRegion region{};
  region.region = 3;
  region.size = 64u << 20;
  check("register_region", Type::kRegisterRegion, region);
  wire::UnregisterRegion unregister{};
  unregister.region = 3;
  check("unregister_region", Type::kUnregisterRegion, unregister);
  check("unregister_region_reply", Type::kUnregisterRegionReply, wire::StatusReply{});
  status.value = 5;
  check("ping", Type::kPing, status);
  check("pong", Type::kPong, status);
}

TEST_CASE("golden frames of reads and lookups") {
  wire::Read read{};
  read.context = context();
  set_key(read);
  read.length = 131072;
  read.flags = wire::kReadWantChecksums;
  read.bulk = {2, {}, 131072, 3, 8192};
  check("read", Type::kRead, read);

  wire::ReadReply reply{};
  reply.version = kChunkVersion;
  reply.chain = {2, 5, 0};
  reply.routing_epoch = 12;
  reply.bytes = reply.chunk_length = reply.logical_length = 131072;
  reply.checksum_kind = 1;
  reply.bulk = read.bulk;
  reply.granule_count = 2;
  reply.patch_count = 1;
  const uint32_t var[] = {0x11111111, 0x22222222, 131068, 4};
  check("read_reply", Type::kReadReply, reply, bytes_of(var),
        Bytes(reinterpret_cast<const uint8_t*>("tail"), 4));

  wire::Exists exists{};
  exists.context = context();
  exists.count = 1;
  exists.flags = wire::kReadTouch;
  wire::ExistsKey key{};
  set_key(key);
  std::memset(key.tag, 0x0f, sizeof key.tag);
  key.tag_bytes = 16;
  check("exists", Type::kExists, exists, bytes_of(key));
  wire::ExistsReply exists_reply{};
  exists_reply.chain = {2, 5, 0};
  exists_reply.routing_epoch = 12;
  exists_reply.count = 1;
  check("exists_reply", Type::kExistsReply, exists_reply, bytes_of(wire::ExistsEntry{1, 1u << 20}));
  wire::LastChunk last{};
  last.context = context();
  last.space = 7;
  check("last_chunk", Type::kLastChunk, last);
  wire::LastChunkReply last_reply{};
  set_key(last_reply);
  last_reply.length = 65540;
  last_reply.chunks = 4;
  check("last_chunk_reply", Type::kLastChunkReply, last_reply);
  wire::ListChunks list{};
  list.context = context();
  set_key(list);
  list.count = 1024;
  list.flags = wire::kListAllSpaces;
  check("list_chunks", Type::kListChunks, list);
  wire::ListChunksReply list_reply{};
  list_reply.chain = {2, 5, 0};
  list_reply.routing_epoch = 12;
  list_reply.count = list_reply.more = 1;
  wire::ListEntry entry{};
  set_key(entry);
  entry.length = 65540;
  entry.flags = wire::kListPending;
  check("list_chunks_reply", Type::kListChunksReply, list_reply, bytes_of(entry));
}

TEST_CASE("golden frames of many reads") {
  wire::ReadMany many{};
  many.context = context();
  many.count = 2;
  many.flags = wire::kReadWantChecksums;
  many.region = 3;
  wire::ReadManyEntry entries[2]{};
  for (uint32_t i = 0; i < 2; i++) {
    set_key(entries[i]);
    entries[i].offset = 61440 + i * 4096;
    entries[i].length = 4096;
    entries[i].address = 8192 + i * 4096;
    entries[i].request_id = 0x100000001 + i;
  }
  check("read_many", Type::kReadMany, many, bytes_of(entries));
  wire::ReadManyReply reply{};
  reply.routing_epoch = 12;
  reply.count = 2;
  const wire::ReadManyResult results[2] = {{0x100000001, 4096, 65540, wire::kNoGranule, 0},
                                           {0x100000002, 4, 65540, 1, 0x22222222}};
  check("read_many_reply", Type::kReadManyReply, reply, bytes_of(results));
}

TEST_CASE("golden frames of updates") {
  const uint32_t crcs[] = {0x33333333, 0x44444444};
  check("update", Type::kUpdate, update(), bytes_of(crcs));
  wire::UpdateReply reply{};
  reply.version = kChunkVersion;
  reply.chain = {2, 5, 0};
  reply.routing_epoch = 12;
  reply.value = 8;
  reply.chunk_length = 65540;
  check("update_reply", Type::kUpdateReply, reply);

  wire::Forward forward{};
  forward.version = kChunkVersion;
  forward.base = {2, 5, 76};
  forward.floor = {2, 5, 70};
  forward.from = 0x100;
  forward.flags = wire::kForwardBaseCommitted;
  forward.update = update();
  forward.update.context.capability = 0;
  forward.update.offset = 0;
  forward.update.length = forward.update.logical_length = 4;
  forward.update.bulk = {1, {}, 4, 0, 0};
  const uint32_t crc[] = {crc32c("ffs!", 4)};
  check("forward", Type::kForward, forward, bytes_of(crc),
        Bytes(reinterpret_cast<const uint8_t*>("ffs!"), 4));

  wire::Notice notice{};
  notice.context = context();
  notice.context.capability = 0;
  notice.context.deadline_ms = 0;
  notice.from = 0x102;
  set_key(notice);
  notice.version = kChunkVersion;
  notice.kind = 3;
  notice.outcome = 11;
  check("notice", Type::kNotice, notice);

  wire::Sync sync{};
  sync.context = context();
  sync.context.capability = 0;
  sync.context.deadline_ms = 0;
  sync.from = 0x102;
  sync.message_bytes = 5;
  sync.payload_length = 4;
  const uint8_t sync_var[] = {'h', 'e', 'l', 'l', 'o', 0xc0, 0xee, 0x59, 0x5e};
  check("sync", Type::kSync, sync, bytes_of(sync_var), Bytes(reinterpret_cast<const uint8_t*>("ffs!"), 4));

  wire::Used used{};
  used.context.target = 0x101;
  used.context.chain = 9;
  used.context.chain_term = 2;
  used.context.chain_counter = 5;
  used.from = 0x102;
  used.lacking_bytes = 5u << 20;
  used.count = 1;
  used.flags = wire::kUsedShortOfRoom;
  const uint8_t used_key[24] = {0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3};
  check("used", Type::kUsed, used, bytes_of(used_key));
}
