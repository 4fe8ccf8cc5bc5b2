#include "client/link.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "net/version.h"

namespace ffs::client {

using wire::Detail;
using wire::Type;

namespace {
// Control frames have request ids whose low half is 0; those of requests never are (slot.h).
constexpr uint64_t kHelloId = 0;
constexpr uint32_t kControlShift = 32;
// Checksums are computed as data arrives: so much stays in the second-level cache with its source.
constexpr size_t kReceiveBytes = 256 * 1024;
}  // namespace

Link::Link(Client& client, Endpoint endpoint) : client_(client), endpoint_(std::move(endpoint)) {
  drops_seen_ = client.capabilities().drops();
  removals_seen_ = IovRegistry::removals();
}

bool Link::may_be_local() const {
  if (client_.options().transport == TransportChoice::kTcp) return false;
  if (client_.options().transport == TransportChoice::kRdma) return false;
  if (client_.options().transport == TransportChoice::kLocal) return true;
  return !local_refused && !endpoint_.socket_path.empty() && endpoint_.host_id == client_.host_id();
}

Status Link::start(uint64_t now_ns) {
  FFS_CHECK(state_ == State::kIdle && connection_ == nullptr);
  transport_ = may_be_local() ? net::Transport::kLocal : net::Transport::kTcp;
  auto fd = local() ? net::connect_local(endpoint_.socket_path.c_str())
                    : net::connect_tcp(endpoint_.host.c_str(), endpoint_.port,
                                       client_.options().congestion.c_str());
  if (!fd.ok()) return fd.error();
  connection_ = std::make_unique<net::Connection>(std::move(*fd), transport_);
  if (client_.options().checksums) connection_->reader.limit_receives(kReceiveBytes);
  state_ = State::kConnecting;
  started_ns_ = now_ns;
  connect_deadline_ns = now_ns + client_.options().connect_timeout_ms * 1000000ull;
  return ok_status();
}

Status Link::on_connected() {
  FFS_CHECK(state_ == State::kConnecting);
  FFS_TRY_STATUS(net::connect_result(connection_->socket));
  wire::Hello hello{};
  std::memcpy(hello.cluster, client_.options().cluster.data(), sizeof hello.cluster);
  hello.client = client_.options().client.value;
  hello.role = static_cast<uint8_t>(wire::Role::kClient);
  hello.version_min = net::spoken_versions().least;
  hello.version_max = net::spoken_versions().most;
  connection_->queue.push(Type::kHello, kHelloId, hello);
  state_ = State::kHello;
  return ok_status();
}

Status Link::on_hello_reply(const net::Frame& frame, Detail* detail) {
  *detail = Detail::kBadFrame;
  if (frame.type != Type::kHelloReply || frame.request_id != kHelloId || frame.payload_bytes != 0) {
    return Error::of(EPROTO, "the server's first frame isn't the reply to hello");
  }
  const auto answer = frame.as<wire::HelloReply>();
  *detail = static_cast<Detail>(answer.detail);
  if (answer.status != 0)
    return Error::of(static_cast<int>(answer.status), "the server refuses the connection");
  if (std::memcmp(answer.cluster, client_.options().cluster.data(), sizeof answer.cluster) != 0) {
    *detail = Detail::kWrongCluster;
    return Error::of(EPROTO, "the server belongs to another cluster");
  }
  if (net::choose_version(net::spoken_versions(), {answer.version, answer.version}) == 0) {
    *detail = Detail::kVersion;
    return Error::of(EPROTO, "the server chose a protocol version that wasn't offered");
  }
  connection_->reader.speak(answer.version);
  connection_->queue.speak(answer.version);
  takes_read_many_ = (answer.features & wire::kFeatureReadMany) != 0;
  takes_offers_ = (answer.features & wire::kFeatureOffer) != 0;
  beside.speak(answer.version);
  return offer_rdma((answer.features & wire::kFeatureRdma) != 0);
}

// --- over RDMA (docs/rdma.md, Setting up) ------------------------------------------------------

// Goes on over TCP where it can't be had, unless nothing else is wanted.
Status Link::offer_rdma(bool server_takes_it) {
  const TransportChoice choice = client_.options().transport;
  const bool forced = choice == TransportChoice::kRdma;
  state_ = State::kReady;
  no_rdma_ = nullptr;
  const bool tried = choice == TransportChoice::kAuto && !local() && client_.options().rdma != "off" &&
                     started_ns_ >= rdma_not_before_ns_;
  if (!forced && !tried) return failures = 0, ok_status();
  const auto without = [this, forced](const Error& error) -> Status {
    no_rdma_ = error.what;
    if (forced) return error;
    failures = 0;
    return ok_status();
  };
  auto adapters = net::rdma::Adapters::get(client_.options().rdma);
  if (!adapters.ok()) return without(adapters.error());
  if (!server_takes_it) return without(Error::of(ENOTSUP, "the server offers no RDMA"));
  adapter_ = (*adapters)->pick(connection_->socket.get(), net::rdma::numa_node_here());
  if (adapter_ == nullptr) return without(Error::of(ENODEV, "no RDMA port is active"));
  auto events = net::rdma::Events::create(*adapter_);
  if (!events.ok()) return without(events.error());
  events_ = std::move(*events);
  auto pair =
      net::rdma::VerbsPair::create(*adapter_, *events_, this, net::rdma::Shape{}, net::rdma::Access::kThere);
  if (!pair.ok()) return without(pair.error());
  pair_ = std::move(*pair);
  connection_->queue.push(Type::kRdmaOpen, kHelloId, wire::RdmaOpen{pair_->end()});
  state_ = State::kRdma;
  return ok_status();
}

Status Link::on_rdma_reply(const net::Frame& frame) {
  if (frame.type != Type::kRdmaOpenReply || frame.request_id != kHelloId || frame.payload_bytes != 0) {
    return Error::of(EPROTO, "the server's frame isn't the reply to rdma_open");
  }
  const auto reply = frame.as<wire::RdmaOpenReply>();
  Status connected = reply.status != 0
                         ? Status(Error::of(static_cast<int>(reply.status), "the server can't take RDMA now"))
                         : pair_->connect(reply.end, client_.options().rdma_traffic_class);
  if (!connected.ok() && reply.status == 0) {
    // The server has gone over to RDMA: this connection is of no use.
    no_rdma_ = connected.error().what;
    return connected;
  }
  if (!connected.ok()) {
    no_rdma_ = connected.error().what;
    pair_.reset();
    events_.reset();
    if (client_.options().transport == TransportChoice::kRdma) return connected;
  } else {
    connection_->channel = net::rdma::VerbsPair::channel(std::move(pair_), reply.end);
    connection_->drained = false;
  }
  state_ = State::kReady;
  failures = 0;
  return ok_status();
}

void Link::take_rdma_events() {
  std::vector<void*> owners;
  events_->take(&owners);
  if (!owners.empty()) channel().disarmed();
}

net::rdma::ChannelCounters Link::rdma_counters() const {
  net::rdma::ChannelCounters out = rdma_counters_;
  if (rdma()) out.add(connection_->channel->counters());
  return out;
}

// The key that a slice of the extent goes by, or 0.
uint64_t Link::rdma_key(Iov& iov, uint64_t extent) {
  const uint64_t id = iov.region(extent);
  if (id == cached_region_) return cached_key_;
  auto found = regions_.find(id);
  if (found == regions_.end()) {
    // An earlier id of the extent: a slice of it was taken back since.
    std::erase_if(regions_, [&](auto& one) {
      if (one.second.iov_serial != iov.serial() || one.second.extent != extent) return false;
      if (one.second.held != nullptr) retired_.push_back(std::move(one.second.held));
      return true;
    });
    if (in_flight.empty()) retired_.clear();
    Error why{};
    const auto [key, held] = iov.remote_key(*adapter_, extent, &why);
    if (key == 0) no_rdma_ = why.what;
    if (iov.on_device()) device_refusal_ = key != 0 ? 0 : why.code;
    if (key == 0 && iov.on_device()) return 0;  // nothing else will do, so it is tried again
    found = regions_
                .emplace(id, Region{key != 0 ? RegionState::kDirect : RegionState::kRefused, iov.serial(),
                                    extent, key, held})
                .first;
  }
  cached_region_ = id;
  cached_key_ = found->second.key;
  return cached_key_;
}

void Link::disconnect(std::vector<uint64_t>* released) {
  if (connection_ != nullptr) connection_->queue.clear(released);
  if (rdma()) rdma_counters_.add(connection_->channel->counters());
  connection_.reset();  // a queue pair too: from here on no server writes through it
  pair_.reset();
  events_.reset();
  beside = net::FrameReader(4096);
  rdma_broken = false;
  cached_key_ = 0;
  state_ = State::kIdle;
  handles_.clear();
  last_handle_ = 0;
  regions_.clear();
  retired_.clear();
  cached_region_ = 0;
  asked_.clear();
  many_.entries.clear();
  takes_read_many_ = false;
  receiving = kNoSlot;
  wants_write = false;
  suspect = false;
  beaten_sent_ns = 0;
}

uint64_t Link::ask(Control kind, uint64_t what, Fd fd) {
  const uint64_t id = ++last_control_ << kControlShift;
  asked_.emplace(id, Asked{kind, what, std::move(fd)});
  return id;
}

// --- capabilities -----------------------------------------------------------------------------

Result<uint32_t> Link::capability(uint32_t id) {
  const uint64_t current = client_.capabilities().issue(id);
  if (current == 0) return Error::of(EBADF, "the capability was dropped");
  if (id < handles_.size() && handles_[id].issue == current) return handles_[id].handle;
  push_reads();
  const uint64_t issue = client_.capabilities().copy(id, &bytes_);
  if (issue == 0) return Error::of(EBADF, "the capability was dropped");
  if (id >= handles_.size()) handles_.resize(id + 1);
  const uint32_t old = handles_[id].handle;
  handles_[id] = {issue, ++last_handle_};
  connection_->queue.push(Type::kOpenCapability, ask(Control::kCapability, id),
                          wire::OpenCapability{last_handle_, 0}, net::Bytes(bytes_));
  // What was sent under the old handle stands before this on the connection.
  if (old != 0) connection_->queue.push(Type::kCloseCapability, 0, wire::OpenCapability{old, 0});
  return last_handle_;
}

void Link::forget_capability(uint32_t id) {
  if (id >= handles_.size() || handles_[id].handle == 0) return;
  push_reads();
  connection_->queue.push(Type::kCloseCapability, 0, wire::OpenCapability{handles_[id].handle, 0});
  handles_[id] = {};
}

// --- regions ----------------------------------------------------------------------------------

uint64_t Link::region(Iov& iov, uint64_t offset, uint64_t length, bool into) {
  if (rdma()) return iov.in_one_extent(offset, length) ? rdma_key(iov, iov.extent_of(offset)) : 0;
  if (!local() || !iov.shareable() || !iov.in_one_extent(offset, length)) return 0;
  if (into && !iov.direct_slice(offset, length)) return 0;
  const uint64_t extent = iov.extent_of(offset);
  const uint64_t id = iov.region(extent);
  if (id != cached_region_) {
    auto found = regions_.find(id);
    if (found == regions_.end()) {
      register_extent(iov, extent, id);
      return 0;
    }
    cached_region_ = id;
    cached_state_ = found->second.state;
  }
  if (cached_state_ == RegionState::kDirect) return id;
  return cached_state_ == RegionState::kReadable && !into ? id : 0;
}

void Link::register_extent(Iov& iov, uint64_t extent, uint64_t id) {
  // An earlier id of the extent: its slice was taken back since.
  for (auto& [old, region] : regions_) {
    if (region.iov_serial == iov.serial() && region.extent == extent) {
      unregister(old);
      break;
    }
  }
  iov.gather(extent);
  Fd fd(::fcntl(iov.fd(), F_DUPFD_CLOEXEC, 0));  // the Iov may go before the frame does
  regions_[id] = {fd.valid() ? RegionState::kAsked : RegionState::kRefused, iov.serial(), extent};
  if (!fd.valid()) return;
  const int borrowed = fd.get();
  const wire::RegisterRegion request{id, iov.extent_bytes(extent), iov.extent_begin(extent), 0, 0};
  connection_->queue.push(Type::kRegisterRegion, ask(Control::kRegister, id, std::move(fd)), request, {}, {},
                          0, borrowed);
}

void Link::unregister(uint64_t region) {
  if (rdma()) {
    regions_.erase(region);
    if (cached_region_ == region) cached_region_ = 0;
    return;
  }
  push_reads();
  connection_->queue.push(Type::kUnregisterRegion, ask(Control::kUnregister, region),
                          wire::UnregisterRegion{region});
  regions_.erase(region);
  if (cached_region_ == region) cached_region_ = 0;
}

void Link::forget_region(uint64_t region) {
  if (regions_.find(region) != regions_.end()) unregister(region);
}

// --- many reads --------------------------------------------------------------------------------

void Link::begin_reads(const Slot& first, const wire::Context& context) {
  push_reads();
  many_.head = wire::ReadMany{};
  many_.head.context = context;
  many_.head.flags = client_.options().checksums ? wire::kReadWantChecksums : 0;
  many_.head.region = first.region;
  many_.capability = first.sqe.capability;
  many_.deadline_ns = first.deadline_ns;
}

bool Link::joins_reads(const Slot& slot) const {
  const wire::Context& context = many_.head.context;
  return !many_.entries.empty() && slot.region == many_.head.region && slot.target.value == context.target &&
         slot.sqe.chain == context.chain && slot.sqe.capability == many_.capability &&
         slot.sqe.space_epoch == context.space_epoch && slot.sqe.priority == context.priority &&
         slot.deadline_ns == many_.deadline_ns;
}

void Link::add_read(const Slot& slot, uint64_t request_id) {
  wire::ReadManyEntry entry;
  std::memcpy(entry.key, slot.sqe.key, sizeof entry.key);
  entry.offset = slot.sqe.offset;
  entry.length = slot.sqe.length;
  entry.address =
      slot.over_rdma ? slot.iov()->remote_address(slot.sqe.iov_offset) : slot.sqe.iov_offset % kExtentBytes;
  entry.request_id = request_id;
  many_.entries.push_back(entry);
  if (many_.entries.size() == wire::kMaxReadMany) push_reads();
}

void Link::push_reads() {
  if (many_.entries.empty()) return;
  many_.head.count = static_cast<uint32_t>(many_.entries.size());
  connection_->queue.push(Type::kReadMany, 0, many_.head,
                          net::Bytes(reinterpret_cast<const uint8_t*>(many_.entries.data()),
                                     many_.entries.size() * sizeof(wire::ReadManyEntry)));
  many_.entries.clear();
}

bool Link::on_control_reply(const net::Frame& frame) {
  auto found = asked_.find(frame.request_id);
  if (found == asked_.end()) return false;
  const Asked asked = std::move(found->second);
  asked_.erase(found);
  const auto reply = frame.as<wire::StatusReply>();
  switch (asked.kind) {
    case Control::kCapability:  // a refusal shows in the requests that name the handle
      return frame.type == Type::kOpenCapabilityReply;
    case Control::kRegister: {
      if (frame.type != Type::kRegisterRegionReply) return false;
      auto region = regions_.find(asked.what);
      if (region == regions_.end()) return true;
      region->second.state = reply.status != 0  ? RegionState::kRefused
                             : reply.value == 1 ? RegionState::kDirect
                                                : RegionState::kReadable;
      cached_region_ = 0;
      return true;
    }
    case Control::kUnregister:
      return frame.type == Type::kUnregisterRegionReply;
  }
  return false;
}

void Link::sweep() {
  if (!ready()) return;
  if (in_flight.empty()) retired_.clear();
  const uint64_t drops = client_.capabilities().drops();
  if (drops != drops_seen_) {
    drops_seen_ = drops;
    for (uint32_t id = 0; id < handles_.size(); id++) {
      if (handles_[id].handle != 0 && client_.capabilities().issue(id) == 0) forget_capability(id);
    }
  }
  const uint64_t removals = IovRegistry::removals();
  if (removals != removals_seen_) {
    removals_seen_ = removals;
    std::vector<uint64_t> gone;
    for (const auto& [id, region] : regions_) {
      if (!IovRegistry::alive(region.iov_serial)) gone.push_back(id);
    }
    for (const uint64_t id : gone) unregister(id);
  }
}

}  // namespace ffs::client
