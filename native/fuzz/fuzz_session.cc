// A live shard against clients that send well-formed frames of nonsense: right checksums, wrong
// everything else, in any order, cut off anywhere. It must go on serving others. One shard serves all
// runs; an input is a stream of frames after hello and a capability.
#include <openssl/crypto.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/crc32c.h"
#include "fuzz/fuzz.h"
#include "net/peer_proof.h"
#include "net/shared_memory.h"
#include "net/socket.h"
#include "server/log.h"
#include "server/server.h"

using namespace ffs;
using wire::Type;

namespace {

constexpr uint64_t kTarget = 5, kClient = 9, kSpace = 7;
constexpr net::MacKey kKey = {4, 2};

class Victim {
 public:
  // With `secret`: servers must prove it, capabilities must be signed.
  explicit Victim(bool secret) : secret_(secret) {
    char name[] = "/tmp/ffs-fuzz-XXXXXX";
    dir_ = ::mkdtemp(name);
    const std::string device = dir_ + "/device";
    auto io = io::Io::create(io::Options{});
    FFS_CHECK(io.ok());
    engine::FormatOptions format;
    format.cluster[0] = 1;
    format.targets = {TargetId(kTarget)};
    format.size_bytes = 512u << 20;
    format.max_chunks = 4096;
    format.sparse = true;
    FFS_CHECK(engine::ChunkStore::format(**io, device, format).ok());
    server::set_log_level(0);
    server::ShardConfig config;
    config.node = NodeId(1);
    config.incarnation = 1;
    config.cluster[0] = 1;
    config.bind_host = "127.0.0.1";
    config.socket_dir = dir_;
    config.pool_bytes = 1;
    config.max_ops = 64;
    config.failure_timeout_ms = 500;  // a short wait at the start
    config.peers_prove = config.signed_capabilities = secret;
    config.peer_key = kKey;
    server_ = std::make_unique<server::Server>(config);
    server::Failure failure;
    shard_ = server_->add_device(device, &failure);
    FFS_CHECK(shard_ != nullptr);
    server_->set_keys({{1, kKey}});
    FFS_CHECK(server_->start() == 0);
    for (const bool proposed : {true, false}) {
      server::Routing routing;
      routing.epoch = 1;
      server::ChainRoute chain;
      chain.chain = ChainId(1);
      chain.proposed = proposed;
      chain.config.version = {1, 1};
      chain.config.member_count = 1;
      chain.config.members[0] = {TargetId(kTarget), craq::MemberState::serving, 1};
      routing.chains.push_back(chain);
      server_->set_spaces({{kSpace, ChainId(1), true, 16u << 20, 0}});
      server_->configure(routing);
      for (int i = 0; i < 10000 && !server_->report()[0].persisted_here; i++) ::usleep(1000);
    }
    for (int i = 0; i < 10000 && !server_->report()[0].status.serving; i++) ::usleep(1000);
    FFS_CHECK(server_->report()[0].status.serving);
    auto memory = net::create_sealed_memfd("fuzz", 1 << 20, false);
    FFS_CHECK(memory.ok());
    memory_ = std::move(*memory);
  }

  // hello, capability 1, region 3 (or hello as another server), then the stream; at the end the connection
  // is dropped.
  void attack(const uint8_t* data, size_t size, bool local, bool as_server) {
    net::Connection connection = connect(local);
    if (as_server) {
      greet_as_server(connection);
    } else {
      greet(connection, local);
    }
    std::vector<uint64_t> released;
    flush(connection);
    size_t sent = 0;
    for (int stalls = 0; sent < size && stalls < 20;) {
      const ssize_t some =
          ::send(connection.socket.get(), data + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (some > 0)
        sent += static_cast<size_t>(some);
      else if (errno != EAGAIN)
        break;
      else
        stalls++, ::usleep(500);
    }
    if (++attacks_ % 256 == 0) check_alive();
  }

  void check_alive() {
    net::Connection connection = connect(attacks_ % 512 == 0);
    greet(connection, connection.transport == net::Transport::kLocal);
    wire::StatusReply ping{};
    ping.value = 77;
    connection.queue.push(Type::kPing, 100, ping);
    flush(connection);
    for (int turns = 0; turns < 30000; turns++) {
      net::Frame frame;
      while (connection.reader.next(&frame) == net::FrameReader::Next::kFrame) {
        if (frame.type == Type::kPong) return;
      }
      auto got = connection.receive();
      FFS_CHECK(got.ok() || got.error().code == EAGAIN);
      pollfd one{connection.socket.get(), POLLIN, 0};
      (void)::poll(&one, 1, 1);
    }
    FFS_CHECK(false && "the shard does not answer any more");
  }

  ~Victim() {
    FFS_CHECK(server_->stop() == 0);
    server_.reset();
    (void)!std::system(("rm -rf " + dir_).c_str());
  }

 private:
  net::Connection connect(bool local) {
    auto socket = local ? net::connect_local(shard_->socket_path().c_str())
                        : net::connect_tcp("127.0.0.1", shard_->port(), nullptr);
    FFS_CHECK(socket.ok());
    return net::Connection(std::move(*socket), local ? net::Transport::kLocal : net::Transport::kTcp);
  }
  void greet(net::Connection& connection, bool local) {
    wire::Hello hello{};
    hello.cluster[0] = 1;
    hello.client = kClient;
    hello.role = static_cast<uint8_t>(wire::Role::kClient);
    hello.version_min = hello.version_max = wire::kProtocolVersion;
    connection.queue.push(Type::kHello, 1, hello);
    wire::Capability capability{};
    capability.version = 1;
    capability.kind = 2;
    capability.rights = 7;
    capability.client = kClient;
    capability.expiry_ms = UINT64_MAX;
    capability.key_id = 1;
    const net::Mac mac = net::capability_mac(kKey, capability);
    std::memcpy(capability.mac, mac.data(), sizeof capability.mac);
    wire::OpenCapability open{1, 0};
    connection.queue.push(Type::kOpenCapability, 2, open,
                          net::Bytes(reinterpret_cast<const uint8_t*>(&capability), sizeof capability));
    if (!local) return;
    connection.queue.push(Type::kRegisterRegion, 3, wire::RegisterRegion{3, 1 << 20, 0, 0, 0}, {}, {}, 0,
                          memory_.get());
  }
  void greet_as_server(net::Connection& connection) {
    wire::Hello hello{};
    hello.cluster[0] = 1;
    hello.node = 2;
    hello.incarnation = 1;
    hello.role = static_cast<uint8_t>(wire::Role::kServer);
    hello.version_min = hello.version_max = wire::kProtocolVersion;
    if (!secret_) return connection.queue.push(Type::kHello, 1, hello);
    wire::ServerHello proving{hello, {1, 2, 3}};
    connection.queue.push(Type::kHello, 1, proving);
    flush(connection);
    const wire::ServerHelloReply reply = answer(connection);
    // Every fourth one doesn't prove it: what follows must be looked at by nobody.
    if (attacks_ % 4 == 3) return;
    wire::PeerProof proof{};
    const net::Mac mac = net::peer_proof(kKey, net::Side::kAsker, proving, reply);
    std::memcpy(proof.proof, mac.data(), sizeof proof.proof);
    connection.queue.push(Type::kPeerProof, 0, proof);
  }
  wire::ServerHelloReply answer(net::Connection& connection) {
    for (int turns = 0; turns < 30000; turns++) {
      net::Frame frame;
      if (connection.reader.next(&frame) == net::FrameReader::Next::kFrame) {
        FFS_CHECK(frame.type == Type::kHelloReply);
        const auto reply = frame.as<wire::ServerHelloReply>();
        FFS_CHECK(reply.reply.status == 0);
        return reply;
      }
      auto got = connection.receive();
      FFS_CHECK(got.ok() || got.error().code == EAGAIN);
      pollfd one{connection.socket.get(), POLLIN, 0};
      (void)::poll(&one, 1, 1);
    }
    FFS_CHECK(false && "hello of a server gets no answer");
    return {};
  }
  void flush(net::Connection& connection) {
    std::vector<uint64_t> released;
    for (int turns = 0; turns < 1000; turns++) {
      auto sent = connection.flush(&released);
      if (!sent.ok() || *sent) return;
      ::usleep(500);
    }
  }

  std::string dir_;
  std::unique_ptr<server::Server> server_;
  server::Shard* shard_ = nullptr;
  Fd memory_;
  bool secret_;
  uint64_t attacks_ = 0;
};

Victim& victim(bool secret) {
  // Before them, so that it ends after them: what libcrypto keeps for their threads goes with those.
  static const int libcrypto = OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr);
  FFS_CHECK(libcrypto == 1);
  static Victim open(false), closed(true);
  return secret ? closed : open;
}

// Rights the checksums as far as the lengths can be followed; a stream ends where they can't.
void repair(std::vector<uint8_t>& bytes) {
  size_t at = 0;
  while (bytes.size() - at >= sizeof(wire::FrameHeader)) {
    wire::FrameHeader header;
    std::memcpy(&header, bytes.data() + at, sizeof header);
    const uint64_t head = sizeof header + uint64_t{header.fixed_bytes} + header.var_bytes;
    if (head > bytes.size() - at) return;
    header.frame_crc = 0;
    std::memcpy(bytes.data() + at, &header, sizeof header);
    header.frame_crc = crc32c(bytes.data() + at, head);
    std::memcpy(bytes.data() + at, &header, sizeof header);
    if (header.payload_bytes > bytes.size() - at - head) return;
    at += head + header.payload_bytes;
  }
}

wire::Context context() {
  wire::Context context{};
  context.target = kTarget;
  context.chain = 1;
  context.capability = 1;
  context.chain_term = 1;
  context.chain_counter = 1;
  context.client = kClient;
  context.sequence = 1;
  context.channel = 1;
  context.deadline_ms = 50;
  return context;
}

std::vector<uint8_t> taken(net::SendQueue& queue, uint8_t first = 0) {
  std::vector<uint8_t> out{first};
  std::vector<uint64_t> released;
  while (!queue.empty()) {
    iovec pieces[8];
    int fd;
    const int count = queue.gather(pieces, 8, &fd);
    size_t total = 0;
    for (int i = 0; i < count; i++) {
      const auto* from = static_cast<const uint8_t*>(pieces[i].iov_base);
      out.insert(out.end(), from, from + pieces[i].iov_len);
      total += pieces[i].iov_len;
    }
    queue.advance(total, &released);
  }
  return out;
}

// What another server of the chain would send; the first byte says so.
std::vector<std::vector<uint8_t>> servers_seeds() {
  std::vector<std::vector<uint8_t>> out;
  net::SendQueue queue;
  const ChunkKey key = ChunkKey::of_file(kSpace, 1);
  const std::vector<uint8_t> data(70000, 3), message(40, 1);
  std::vector<uint32_t> crcs(net::piece_count(0, 70000));
  net::piece_crcs(0, data, crcs.data());
  const net::Bytes crc_bytes(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4);
  wire::Forward forward{};
  forward.version = {1, 1, 5};
  forward.from = kTarget + 1;
  forward.update.context = context();
  forward.update.context.capability = 0;
  std::memcpy(forward.update.key, key.bytes.data(), 24);
  forward.update.kind = 1;
  forward.update.length = 70000;
  forward.update.bulk = {1, {}, 70000, 0, 0};
  queue.push(Type::kForward, 0, forward, crc_bytes, data);
  out.push_back(taken(queue, 2));
  for (uint8_t kind = 1; kind <= 17; kind++) {
    wire::Notice notice{};
    notice.context = context();
    notice.from = kTarget + 1;
    notice.kind = kind;
    std::memcpy(notice.key, key.bytes.data(), 24);
    queue.push(Type::kNotice, 0, notice);
  }
  out.push_back(taken(queue, 2));
  wire::Sync sync{};
  sync.context = context();
  sync.from = kTarget + 1;
  sync.message_bytes = static_cast<uint32_t>(message.size());
  queue.push(Type::kSync, 0, sync, message);
  sync.payload_length = 70000;
  std::vector<uint8_t> var(message);
  var.insert(var.end(), crc_bytes.begin(), crc_bytes.end());
  queue.push(Type::kSync, 0, sync, var, data);
  queue.push(Type::kSync, 0, sync, var, data);
  out.push_back(taken(queue, 2));
  wire::Used used{};
  used.context = context();
  used.from = kTarget + 1;
  used.lacking_bytes = 1u << 30;
  used.count = 2;
  used.flags = wire::kUsedShortOfRoom;
  std::vector<uint8_t> used_keys(key.bytes.begin(), key.bytes.end());
  used_keys.insert(used_keys.end(), key.bytes.begin(), key.bytes.end());
  queue.push(Type::kUsed, 0, used, used_keys);
  out.push_back(taken(queue, 2));
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  std::vector<uint8_t> stream(data + 1, data + size);
  repair(stream);
  victim(data[0] / 4 % 2 == 1).attack(stream.data(), stream.size(), data[0] % 2 == 0, data[0] / 2 % 2 == 1);
  return 0;
}

std::vector<std::vector<uint8_t>> fuzz::seeds() {
  std::vector<std::vector<uint8_t>> out;
  net::SendQueue queue;
  const std::vector<uint8_t> data(70000, 3);
  std::vector<uint32_t> crcs(net::piece_count(100, 70000));
  net::piece_crcs(100, data, crcs.data());
  const net::Bytes crc_bytes(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4);
  const ChunkKey key = ChunkKey::of_file(kSpace, 1);
  for (uint8_t kind = 1; kind <= 8; kind++) {
    wire::Update update{};
    update.context = context();
    std::memcpy(update.key, key.bytes.data(), 24);
    update.kind = kind;
    if (kind == 1 || kind == 4 || kind == 5) {
      update.offset = kind == 1 ? 100 : 0;
      update.length = 70000;
      update.context.checksum_kind = kind == 1 ? 1 : 0;
      update.bulk = {1, {}, 70000, 0, 0};
      queue.push(Type::kUpdate, kind, update, kind == 1 ? crc_bytes : net::Bytes(), data);
      update.bulk = {2, {}, 70000, 3, 4096};
      queue.push(Type::kUpdate, kind, update, kind == 1 ? crc_bytes : net::Bytes());
    } else {
      queue.push(Type::kUpdate, kind, update);
    }
    out.push_back(taken(queue));
  }
  for (const uint8_t bulk : {1, 2}) {
    wire::Read read{};
    read.context = context();
    std::memcpy(read.key, key.bytes.data(), 24);
    read.length = 70000;
    read.flags = wire::kReadWantChecksums | wire::kReadVerifyPartial;
    read.bulk = {bulk, {}, 70000, 3, 8192};
    queue.push(Type::kRead, 1, read);
    queue.push(Type::kUnregisterRegion, 2, wire::UnregisterRegion{3});
    queue.push(Type::kRead, 3, read);
    out.push_back(taken(queue));
  }
  wire::ReadMany many{};
  many.context = context();
  many.count = 3;
  many.flags = wire::kReadWantChecksums;
  many.region = 3;
  std::vector<wire::ReadManyEntry> entries(3);
  for (uint32_t i = 0; i < 3; i++) {
    std::memcpy(entries[i].key, key.bytes.data(), 24);
    entries[i].offset = i * 4096;
    entries[i].length = 4096 + i * 100;
    entries[i].address = 8192 * i;
    entries[i].request_id = i + 1;
  }
  queue.push(Type::kReadMany, 0, many,
             net::Bytes(reinterpret_cast<const uint8_t*>(entries.data()), 3 * sizeof(wire::ReadManyEntry)));
  queue.push(Type::kUnregisterRegion, 2, wire::UnregisterRegion{3});
  out.push_back(taken(queue));
  wire::Exists exists{};
  exists.context = context();
  exists.count = 2;
  const std::vector<uint8_t> keys(2 * sizeof(wire::ExistsKey), 1);
  queue.push(Type::kExists, 1, exists, keys);
  wire::LastChunk last{};
  last.context = context();
  last.space = kSpace;
  queue.push(Type::kLastChunk, 2, last);
  wire::ListChunks list{};
  list.context = context();
  list.count = wire::kMaxListEntries;
  list.flags = wire::kListSpacesOnly;
  queue.push(Type::kListChunks, 5, list);
  queue.push(Type::kCloseCapability, 0, wire::OpenCapability{1, 0});
  queue.push(Type::kRegisterRegion, 4, wire::RegisterRegion{4, 4096, 0, 0, 0});
  out.push_back(taken(queue));
  wire::Capability capability{};
  capability.version = 1;
  capability.rights = 7;
  capability.client = kClient;
  capability.key_id = 1;
  queue.push(Type::kOpenCapability, 1, wire::OpenCapability{2, 0},
             net::Bytes(reinterpret_cast<const uint8_t*>(&capability), sizeof capability));
  queue.push(Type::kPeerProof, 0, wire::PeerProof{});
  queue.push(Type::kRdmaOpen, 6, wire::RdmaOpen{});
  out.push_back(taken(queue, 4));
  for (std::vector<uint8_t>& stream : servers_seeds()) {
    out.push_back(stream);
    stream[0] = 6;  // the same where there is a secret
    out.push_back(std::move(stream));
  }
  return out;
}
