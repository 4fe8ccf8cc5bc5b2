// A tiny client of a storage server in this process (server_cluster.h), for tests: blocking, one connection,
// no retries. It shares the codec with the server and nothing else.
#pragma once

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "net/rdma/verbs_pair.h"
#include "net/shared_memory.h"
#include "net/socket.h"
#include "server/wire_craq.h"
#include "test/server_cluster.h"

namespace ffs::server::testing {

constexpr int kAnswerSeconds = 120;  // only what hangs comes to that, on slow and busy machines too

// What came back for a request.
struct Answer {
  Type type{};
  wire::ReadReply read{};
  wire::UpdateReply update{};
  wire::StatusReply status{};
  wire::ExistsReply exists{};
  wire::LastChunkReply last{};
  wire::ListChunksReply list{};
  wire::HelloReply hello{};
  wire::ServerHelloReply server_hello{};
  wire::RdmaOpenReply rdma{};
  std::vector<uint8_t> var;
  std::vector<uint8_t> payload;
  uint32_t code() const {
    switch (type) {
      case Type::kReadReply:
        return read.status;
      case Type::kUpdateReply:
        return update.status;
      case Type::kExistsReply:
        return exists.status;
      case Type::kLastChunkReply:
        return last.status;
      case Type::kListChunksReply:
        return list.status;
      case Type::kHelloReply:
        return hello.status;
      case Type::kRdmaOpenReply:
        return rdma.status;
      default:
        return status.status;
    }
  }
  Detail detail() const {
    switch (type) {
      case Type::kReadReply:
        return static_cast<Detail>(read.detail);
      case Type::kUpdateReply:
        return static_cast<Detail>(update.detail);
      case Type::kExistsReply:
        return static_cast<Detail>(exists.detail);
      case Type::kLastChunkReply:
        return static_cast<Detail>(last.detail);
      case Type::kListChunksReply:
        return static_cast<Detail>(list.detail);
      case Type::kHelloReply:
        return static_cast<Detail>(hello.detail);
      default:
        return static_cast<Detail>(status.detail);
    }
  }
};

class TestClient {
 public:
  static constexpr size_t kRegionBytes = 32u << 20;

  TestClient(const Shard& shard, net::Transport transport, uint64_t client = kClient) : client_(client) {
    auto socket = transport == net::Transport::kLocal ? net::connect_local(shard.socket_path().c_str())
                                                      : net::connect_tcp("127.0.0.1", shard.port(), "cubic?");
    REQUIRE(socket.ok());
    rdma_ = transport == kRdma;
    connection_ = net::Connection(std::move(*socket), rdma_ ? net::Transport::kTcp : transport);
  }

  // Frames after hello are of this version.
  void speak(uint8_t version) {
    connection_.reader.speak(version);
    connection_.queue.speak(version);
  }

  Answer hello(const std::array<uint8_t, 16>& cluster = kCluster, uint8_t version = wire::kProtocolVersion,
               uint8_t most = 0) {
    wire::Hello hello{};
    std::memcpy(hello.cluster, cluster.data(), 16);
    hello.client = client_;
    hello.role = static_cast<uint8_t>(wire::Role::kClient);
    hello.version_min = version;
    hello.version_max = std::max(version, most);
    return ask(Type::kHello, hello);
  }

  Answer open(uint32_t handle = 1, uint8_t kind = 0, uint64_t space = kSpace, uint32_t rights = 7,
              uint64_t expiry_ms = 0) {
    wire::Capability capability{};
    capability.version = 1;
    capability.kind = kind;
    capability.rights = rights;
    capability.client = client_;
    capability.space = space;
    capability.expiry_ms = expiry_ms;
    return show(handle, capability);
  }
  Answer show(uint32_t handle, const wire::Capability& capability) {
    wire::OpenCapability open{};
    open.handle = handle;
    return ask(Type::kOpenCapability, open,
               net::Bytes(reinterpret_cast<const uint8_t*>(&capability), sizeof capability));
  }

  // hello, capability 1 for all that the tests do, and over `local` a region of kRegionBytes.
  void ready() {
    Answer said = hello();
    REQUIRE(said.code() == 0);
    if (rdma_) {
      // The shard registers its memory after its start.
      for (int i = 0; i < 500 && (said.hello.features & wire::kFeatureRdma) == 0; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        const auto port = peer_port();
        connection_ =
            net::Connection(std::move(*net::connect_tcp("127.0.0.1", port, "cubic?")), net::Transport::kTcp);
        said = hello();
      }
      REQUIRE_MESSAGE((said.hello.features & wire::kFeatureRdma) != 0, "the server offers no RDMA");
      open_channel();
    }
    REQUIRE(open().code() == 0);
    if (connection_.transport == net::Transport::kLocal) {
      auto memory = net::create_sealed_memfd("test", kRegionBytes, false);
      REQUIRE(memory.ok());
      memory_ = std::move(*memory);
      auto mapping = net::map_shared(memory_.get(), 0, kRegionBytes, true);
      REQUIRE(mapping.ok());
      region_ = std::move(*mapping);
      region_id_ = next_region()++;
      const Answer answer = register_region(region_id_, memory_.get(), 0, kRegionBytes);
      REQUIRE(answer.code() == 0);
      direct_ = answer.status.value == 1;
    }
  }

  // The connection goes over to RDMA; the region's memory may be reached from there on.
  void open_channel() {
    auto adapters = net::rdma::Adapters::get("");
    REQUIRE(adapters.ok());
    net::rdma::Adapter* adapter = (*adapters)->pick(connection_.socket.get(), -1);
    REQUIRE(adapter != nullptr);
    events_ = std::move(*net::rdma::Events::create(*adapter));
    auto pair =
        net::rdma::VerbsPair::create(*adapter, *events_, this, net::rdma::Shape{}, net::rdma::Access::kThere);
    REQUIRE(pair.ok());
    const Answer answer = ask(Type::kRdmaOpen, wire::RdmaOpen{(*pair)->end()});
    REQUIRE(answer.code() == 0);
    REQUIRE((*pair)->connect(answer.rdma.end, 0).ok());
    connection_.channel = net::rdma::VerbsPair::channel(std::move(*pair), answer.rdma.end);
    void* memory = ::mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    region_ = net::Mapping(memory, kRegionBytes);
    auto registered = adapter->register_memory(memory, kRegionBytes, 0, net::rdma::Access::kThere);
    REQUIRE(registered.ok());
    registration_ = std::move(*registered);
    region_id_ = registration_->remote_key();
  }
  uint16_t peer_port() const {
    sockaddr_in address{};
    socklen_t length = sizeof address;
    REQUIRE(::getpeername(connection_.socket.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
    return ntohs(address.sin_port);
  }
  // Data goes into and out of the region, not through frames.
  bool lends() const { return rdma_ || connection_.transport == net::Transport::kLocal; }
  wire::BulkKind lent_kind() const { return rdma_ ? wire::BulkKind::kRdma : wire::BulkKind::kRegion; }
  void name_region(uint64_t id) { region_id_ = id; }

  Answer register_region(uint64_t id, int fd, uint64_t offset, uint64_t size) {
    wire::RegisterRegion region{};
    region.region = id;
    region.offset = offset;
    region.size = size;
    return ask(Type::kRegisterRegion, region, {}, {}, fd);
  }
  Answer unregister_region(uint64_t id) { return ask(Type::kUnregisterRegion, wire::UnregisterRegion{id}); }

  wire::Context context() {
    wire::Context context = base;
    context.client = client_;
    return context;
  }

  // --- sending without waiting
  template <typename T>
  uint64_t send(Type type, const T& fixed, net::Bytes var = {}, net::Bytes payload = {}, int fd = -1) {
    const uint64_t id = ++last_id_;
    connection_.queue.push(type, id, fixed, var, payload, 0, fd);
    return id;
  }

  uint64_t send_update(wire::Update update, const std::vector<uint8_t>& data, bool inline_data,
                       uint64_t region_at = 0) {
    std::vector<uint32_t> crcs(net::piece_count(update.offset, static_cast<uint32_t>(data.size())));
    net::piece_crcs(update.offset, data, crcs.data());
    return send_update_with(update, data, crcs, inline_data, region_at);
  }

  uint64_t send_update_with(wire::Update update, const std::vector<uint8_t>& data,
                            const std::vector<uint32_t>& crcs, bool inline_data, uint64_t region_at = 0) {
    update.bulk = {};
    const net::Bytes var(reinterpret_cast<const uint8_t*>(crcs.data()), crcs.size() * 4);
    if (!data.empty()) update.bulk.length = static_cast<uint32_t>(data.size());
    if (inline_data || data.empty()) {
      if (!data.empty()) update.bulk.kind = static_cast<uint8_t>(wire::BulkKind::kInline);
      sent_.push_back(std::make_unique<std::vector<uint8_t>>(data));
      return send(Type::kUpdate, update, var, *sent_.back());
    }
    std::memcpy(region_.data() + region_at, data.data(), data.size());
    update.bulk.kind = static_cast<uint8_t>(lent_kind());
    update.bulk.region = region_id_;
    update.bulk.address = region_at;
    return send(Type::kUpdate, update, var);
  }

  wire::Update update(wire::UpdateKind kind, uint64_t index, uint32_t offset, uint32_t length) {
    wire::Update update{};
    update.context = context();
    update.context.channel = 1;
    update.context.sequence = next_sequence()++;
    const ChunkKey key = ChunkKey::of_file(kSpace, index);
    std::memcpy(update.key, key.bytes.data(), 24);
    update.kind = static_cast<uint8_t>(kind);
    update.offset = offset;
    update.length = length;
    return update;
  }

  uint64_t send_read(uint64_t index, uint32_t offset, uint32_t length, bool inline_data,
                     uint64_t region_at = 0, uint32_t flags = wire::kReadWantChecksums) {
    const auto kind = inline_data ? wire::BulkKind::kInline : lent_kind();
    return send_read(index, offset, length, kind, region_at, flags);
  }
  uint64_t send_read(uint64_t index, uint32_t offset, uint32_t length, wire::BulkKind kind,
                     uint64_t region_at, uint32_t flags = wire::kReadWantChecksums) {
    wire::Read read{};
    read.context = context();
    const ChunkKey key = ChunkKey::of_file(kSpace, index);
    std::memcpy(read.key, key.bytes.data(), 24);
    read.offset = offset;
    read.length = length;
    read.flags = flags;
    read.bulk.length = length;
    read.bulk.kind = static_cast<uint8_t>(kind);
    read.bulk.region = kind == wire::BulkKind::kInline ? 0 : region_id_;
    read.bulk.address = region_at;
    return send(Type::kRead, read);
  }

  // One frame of reads; the id of each, in order.
  std::vector<uint64_t> send_read_many(std::vector<wire::ReadManyEntry> entries, uint64_t region = 0,
                                       int32_t count_off_by = 0) {
    wire::ReadMany many{};
    many.context = context();
    many.count = static_cast<uint32_t>(static_cast<int32_t>(entries.size()) + count_off_by);
    many.flags = wire::kReadWantChecksums;
    many.region = region == 0 ? region_id_ : region;
    std::vector<uint64_t> ids;
    for (wire::ReadManyEntry& entry : entries) ids.push_back(entry.request_id = ++last_id_);
    connection_.queue.push(Type::kReadMany, 0, many,
                           net::Bytes(reinterpret_cast<const uint8_t*>(entries.data()),
                                      entries.size() * sizeof(wire::ReadManyEntry)));
    return ids;
  }

  // --- waiting
  Answer wait(uint64_t id) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kAnswerSeconds);
    while (true) {
      if (auto found = answers_.find(id); found != answers_.end()) {
        Answer answer = std::move(found->second);
        answers_.erase(found);
        return answer;
      }
      REQUIRE_MESSAGE(std::chrono::steady_clock::now() < until, "no answer in time");
      const bool alive = step() || answers_.count(id) != 0;
      REQUIRE_MESSAGE(alive, "the server has closed the connection");
    }
  }
  // What the server says over the socket of a connection over RDMA that has broken.
  Answer wait_beside(uint64_t id) {
    REQUIRE(connection_.flush(&released_).ok());
    net::FrameReader reader(4096);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kAnswerSeconds);
    while (true) {
      REQUIRE_MESSAGE(std::chrono::steady_clock::now() < until, "no answer in time");
      pollfd one{connection_.socket.get(), POLLIN, 0};
      (void)::poll(&one, 1, 100);
      auto got = connection_.receive_beside(reader);
      if (!got.ok()) {
        REQUIRE_MESSAGE(got.error().code == EAGAIN, "the server has closed the connection without a word");
        continue;
      }
      net::Frame frame;
      while (reader.next(&frame) == net::FrameReader::Next::kFrame) {
        if (frame.request_id == id) return decode(frame);
      }
    }
  }
  template <typename T>
  Answer ask(Type type, const T& fixed, net::Bytes var = {}, net::Bytes payload = {}, int fd = -1) {
    return wait(send(type, fixed, var, payload, fd));
  }
  // True if the server closes the connection instead of answering.
  bool closed(int turns = 5000) {
    for (int i = 0; i < turns; i++) {
      if (!step(2)) return true;
    }
    return false;
  }

  // --- whole operations
  Answer write(uint64_t index, uint32_t offset, const std::vector<uint8_t>& data) {
    const bool inline_data = !lends();
    return wait(
        send_update(update(wire::UpdateKind::kWrite, index, offset, static_cast<uint32_t>(data.size())), data,
                    inline_data));
  }
  Answer change(wire::UpdateKind kind, uint64_t index, uint32_t length = 0) {
    return wait(send_update(update(kind, index, 0, length), {}, true));
  }
  // The answer with the bytes in `payload`, wherever they came, and checksums verified.
  Answer read(uint64_t index, uint32_t offset, uint32_t length, uint64_t region_at = 4096) {
    const bool inline_data = !lends();
    if (!inline_data) std::memset(region_.data() + region_at, 0xEE, length);
    Answer answer = wait(send_read(index, offset, length, inline_data, region_at));
    return take_read(answer, offset, region_at);
  }

  Answer take_read(Answer answer, uint32_t offset, uint64_t region_at) {
    if (answer.code() != 0) return answer;
    const wire::ReadReply& reply = answer.read;
    REQUIRE(answer.var.size() == reply.granule_count * 4 + reply.patch_count * sizeof(wire::ReadPatch));
    if (reply.bulk.kind == static_cast<uint8_t>(lent_kind())) {
      std::vector<uint8_t> data(region_.data() + region_at, region_.data() + region_at + reply.bytes);
      size_t at = 0;
      for (uint32_t i = 0; i < reply.patch_count; i++) {
        wire::ReadPatch patch;
        std::memcpy(&patch, answer.var.data() + reply.granule_count * 4 + i * sizeof patch, sizeof patch);
        REQUIRE(patch.at + patch.length <= data.size());
        std::memcpy(data.data() + patch.at, answer.payload.data() + at, patch.length);
        at += patch.length;
      }
      REQUIRE(at == answer.payload.size());
      answer.payload = std::move(data);
      direct_reads++;
    }
    REQUIRE(answer.payload.size() == reply.bytes);
    for (uint32_t i = 0; i < reply.granule_count; i++) {
      uint32_t crc;
      std::memcpy(&crc, answer.var.data() + i * 4, 4);
      const uint64_t begin = static_cast<uint64_t>(reply.first_granule + i) * kGranuleBytes;
      const uint64_t end = std::min<uint64_t>(begin + kGranuleBytes, reply.chunk_length);
      REQUIRE(begin >= offset);
      REQUIRE(end <= static_cast<uint64_t>(offset) + reply.bytes);
      CHECK(crc == crc32c(answer.payload.data() + (begin - offset), end - begin));
    }
    return answer;
  }

  // Raw bytes, past the codec.
  void send_raw(const void* bytes, size_t size) {
    REQUIRE(::send(connection_.socket.get(), bytes, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
  }
  void flush() {
    auto sent = connection_.flush(&released_);
    (void)sent;
  }
  void disconnect() { connection_.socket.reset(); }
  bool direct() const { return direct_; }
  uint64_t region_id() const { return region_id_; }
  uint8_t* region() { return region_.data(); }
  net::Connection& connection() { return connection_; }
  // Sequences of a channel only go up, also over several connections of one client.
  static std::atomic<uint64_t>& next_sequence() {
    static std::atomic<uint64_t> next = 1;
    return next;
  }
  static std::atomic<uint64_t>& next_region() {
    static std::atomic<uint64_t> next = 1;
    return next;
  }

  wire::Context base = default_context();
  uint64_t direct_reads = 0;
  uint64_t together = 0;  // results that came in frames of many

 private:
  static wire::Context default_context() {
    wire::Context context{};
    context.target = Cluster::target(0);
    context.chain = 1;
    context.chain_term = 1;
    context.chain_counter = 1;
    context.capability = 1;
    context.checksum_kind = 1;
    context.space_epoch = 1;
    return context;
  }

  // One turn of sending and receiving; false when the connection is over.
  bool step(int timeout_ms = 100) {
    auto sent = connection_.flush(&released_);
    if (!sent.ok()) return false;
    net::Frame frame;
    const size_t answered = answers_.size();
    while (true) {
      const auto next = connection_.reader.next(&frame);
      if (next == net::FrameReader::Next::kFrame && frame.type == Type::kReadManyReply) {
        take_results(frame);
      } else if (next == net::FrameReader::Next::kFrame) {
        current_ = decode(frame);
        current_id_ = frame.request_id;
        if (frame.payload_bytes > 0) {
          current_.payload.resize(frame.payload_bytes);
          connection_.reader.place_payload(current_.payload.data());
        } else {
          answers_[current_id_] = std::move(current_);
        }
      } else if (next == net::FrameReader::Next::kPayload) {
        answers_[current_id_] = std::move(current_);
      } else {
        REQUIRE(next == net::FrameReader::Next::kNeedMore);
        break;
      }
    }
    if (answers_.size() > answered) return true;
    auto got = connection_.receive();
    if (got.ok()) return true;
    if (got.error().code != EAGAIN) return false;
    if (connection_.channel != nullptr) return wait_for_message(timeout_ms);
    const short events = static_cast<short>(POLLIN | (connection_.queue.empty() ? 0 : POLLOUT));
    pollfd one{connection_.socket.get(), events, 0};
    (void)::poll(&one, 1, timeout_ms);
    return true;
  }

  bool wait_for_message(int timeout_ms) {
    const auto more = connection_.channel->arm();
    if (!more.ok() || *more) return true;
    pollfd both[2] = {{events_->fd(), POLLIN, 0}, {connection_.socket.get(), POLLIN, 0}};
    (void)::poll(both, 2, timeout_ms);
    std::vector<void*> owners;
    events_->take(&owners);
    if (!owners.empty()) connection_.channel->disarmed();
    return both[1].revents == 0;  // its end
  }

  // Each as the reply that it would have had alone.
  void take_results(const net::Frame& frame) {
    const auto many = frame.as<wire::ReadManyReply>();
    REQUIRE(frame.var.size() == many.count * sizeof(wire::ReadManyResult));
    REQUIRE(many.count > 0);
    for (uint32_t i = 0; i < many.count; i++) {
      wire::ReadManyResult result;
      std::memcpy(&result, frame.var.data() + i * sizeof result, sizeof result);
      Answer answer;
      answer.type = Type::kReadReply;
      answer.read.bytes = result.bytes;
      answer.read.chunk_length = answer.read.logical_length = result.chunk_length;
      answer.read.bulk.kind = static_cast<uint8_t>(lent_kind());
      if (result.granule != wire::kNoGranule) {
        answer.read.granule_count = 1;
        answer.read.first_granule = result.granule;
        answer.var.resize(4);
        std::memcpy(answer.var.data(), &result.crc, 4);
      }
      answers_[result.request_id] = std::move(answer);
      together++;
    }
  }

  Answer decode(const net::Frame& frame) {
    Answer answer;
    answer.type = frame.type;
    answer.var.assign(frame.var.begin(), frame.var.end());
    switch (frame.type) {
      case Type::kReadReply:
        answer.read = frame.as<wire::ReadReply>();
        break;
      case Type::kUpdateReply:
        answer.update = frame.as<wire::UpdateReply>();
        break;
      case Type::kExistsReply:
        answer.exists = frame.as<wire::ExistsReply>();
        break;
      case Type::kLastChunkReply:
        answer.last = frame.as<wire::LastChunkReply>();
        break;
      case Type::kListChunksReply:
        answer.list = frame.as<wire::ListChunksReply>();
        break;
      case Type::kHelloReply:
        answer.hello = frame.as<wire::HelloReply>();
        answer.server_hello = frame.as<wire::ServerHelloReply>();
        break;
      case Type::kRdmaOpenReply:
        answer.rdma = frame.as<wire::RdmaOpenReply>();
        break;
      default:
        answer.status = frame.as<wire::StatusReply>();
        break;
    }
    return answer;
  }

  uint64_t client_;
  bool rdma_ = false;
  net::Mapping region_;
  std::unique_ptr<net::rdma::Registration>
      registration_;  // of region_; it and the events outlive the channel
  std::unique_ptr<net::rdma::Events> events_;
  net::Connection connection_;
  std::vector<uint64_t> released_;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> sent_;
  std::map<uint64_t, Answer> answers_;
  Answer current_;
  uint64_t current_id_ = 0;
  uint64_t last_id_ = 0;
  Fd memory_;
  uint64_t region_id_ = 0;
  bool direct_ = false;
};

}  // namespace ffs::server::testing
