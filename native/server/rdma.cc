// Channels of sessions: setting up, bulk data, what breaks (docs/rdma.md). What blocks - registering memory,
// making and ending queue pairs - runs on the helper thread.
#include "server/rdma.h"

#include <poll.h>

#include <cstring>

#include "net/rdma/verbs_pair.h"
#include "server/log.h"
#include "server/shard.h"

namespace ffs::server {

using craq::Outcome;
using net::rdma::Ended;
using net::rdma::WorkKind;
using wire::Detail;
using wire::Type;

namespace {

const net::rdma::Shape kShape;

struct Register : io::Offload {
  Shard* shard = nullptr;
  RdmaPort* port = nullptr;
  size_t index = 0;
  Error error{};
};

struct SetUp : io::Offload {
  Shard* shard = nullptr;
  Session* session = nullptr;
  RdmaPort* port = nullptr;
  uint8_t traffic_class = 0;
  uint64_t request_id = 0;
  wire::RdmaEnd theirs{};
  wire::RdmaEnd ours{};
  std::unique_ptr<net::rdma::Channel> channel;
  Error error{};
};

struct End : io::Offload {
  Shard* shard = nullptr;
  Session* session = nullptr;
  std::unique_ptr<net::rdma::Channel> channel;
};

// All of them are their io::Offload's first member's first member.
template <typename T>
T* of(io::Op* op) {
  return static_cast<T*>(reinterpret_cast<io::Offload*>(op));
}

int32_t set_up(io::Offload* offload) {
  auto* work = static_cast<SetUp*>(offload);
  auto pair = net::rdma::VerbsPair::create(*work->port->adapter, *work->port->events, work->session, kShape,
                                           net::rdma::Access::kHere);
  if (!pair.ok()) return work->error = pair.error(), 0;
  auto connected = (*pair)->connect(work->theirs, work->traffic_class);
  if (!connected.ok()) return work->error = connected.error(), 0;
  work->ours = (*pair)->end();
  work->channel = net::rdma::VerbsPair::channel(std::move(*pair), work->theirs);
  return 0;
}

}  // namespace

uint32_t RdmaPort::key_of(const uint8_t* buffer) const {
  for (const Pool& one : pools) {
    if (one.pool->contains(buffer)) return one.registration->local_key();
  }
  FFS_CHECK(false && "a buffer of no registered pool");
  return 0;
}

// --- ports ----------------------------------------------------------------------------------------

// RDMA is an offer: without it the shard serves all the same.
void Shard::open_rdma() {
  if (config_.rdma == "off") return;
  std::string who;
  auto adapters = net::rdma::Adapters::get(config_.rdma, &who);
  if (!adapters.ok()) {
    const bool asked = !config_.rdma.empty();
    log(asked ? LogLevel::kWarning : LogLevel::kDebug, "shard %u: no RDMA%s%s: %s", config_.number,
        asked ? " by " : "", config_.rdma.c_str(), adapters.error().what);
    return;
  }
  for (const auto& adapter : (*adapters)->all()) {
    auto port = std::make_unique<RdmaPort>();
    auto events = net::rdma::Events::create(*adapter);
    if (!events.ok()) {
      log(LogLevel::kWarning, "shard %u: no RDMA over %s: %s", config_.number, adapter->name().c_str(),
          events.error().what);
      continue;
    }
    port->shard = this;
    port->adapter = adapter.get();
    port->events = std::move(*events);
    port->pools[0].pool = &buffers_->pool(BufferUse::kRead);
    port->pools[1].pool = &buffers_->pool(BufferUse::kUpdate);
    port->poll.ready = on_rdma_event;
    port->poll.owner = port.get();
    io_->poll_add(&port->poll, port->events->fd(), POLLIN);
    rdma_polls_++;
    rdma_ports_.push_back(std::move(port));
  }
  if (!rdma_ports_.empty()) register_next(0);
}

// One port after another: the helper thread has other work too.
void Shard::register_next(size_t index) {
  auto* work = new Register;
  work->shard = this;
  work->port = rdma_ports_[index].get();
  work->index = index;
  work->work = [](io::Offload* offload) {
    auto* self = static_cast<Register*>(offload);
    for (RdmaPort::Pool& one : self->port->pools) {
      auto done = self->port->adapter->register_memory(one.pool->base(), one.pool->arena_bytes(),
                                                       reinterpret_cast<uint64_t>(one.pool->base()),
                                                       net::rdma::Access::kHere);
      if (!done.ok()) {
        for (RdmaPort::Pool& other : self->port->pools) other.registration.reset();  // of no use alone
        return self->error = done.error(), 0;
      }
      one.registration = std::move(*done);
    }
    return 0;
  };
  work->op.done = on_rdma_registered;
  rdma_work_++;
  io_->offload(work);
}

void Shard::on_rdma_registered(io::Op* op) {
  const std::unique_ptr<Register> work(of<Register>(op));
  Shard* self = work->shard;
  self->rdma_work_--;
  if (work->error.code != 0) {
    work->port->failed = true;
    log(LogLevel::kWarning, "shard %u: no RDMA over %s: %s: %s", self->config_.number,
        work->port->adapter->name().c_str(), work->error.what, std::strerror(work->error.code));
  } else {
    work->port->ready = true;
    log(LogLevel::kInfo, "shard %u: RDMA over %s", self->config_.number, work->port->adapter->name().c_str());
  }
  if (!self->stopping_ && work->index + 1 < self->rdma_ports_.size()) self->register_next(work->index + 1);
}

bool Shard::offers_rdma() const {
  for (const auto& port : rdma_ports_) {
    if (!port->failed) return true;
  }
  return false;
}

// The port for a session, or null: none fits.
RdmaPort* Shard::rdma_port(const Session& session, bool ethernet) {
  auto adapters = net::rdma::Adapters::get(config_.rdma);
  if (!adapters.ok()) return nullptr;
  const net::rdma::Adapter* adapter =
      (*adapters)->pick(session.connection.socket.get(), net::rdma::numa_node_here(), ethernet ? 1 : 0);
  RdmaPort* other = nullptr;
  for (const auto& port : rdma_ports_) {
    if (port->failed || port->adapter->port().ethernet != ethernet) continue;
    if (port->adapter == adapter) return port.get();
    other = port.get();
  }
  return other;
}

// --- setting up -----------------------------------------------------------------------------------

void Shard::on_rdma_open(Session& session, const net::Frame& frame) {
  if (session.connection.channel != nullptr || session.rdma_work > 0 ||
      session.connection.transport != net::Transport::kTcp) {
    metrics_.frame_errors++;
    return close_session(session, "RDMA was asked for twice, or over a Unix socket");
  }
  const auto open = frame.as<wire::RdmaOpen>();
  RdmaPort* port = rdma_port(session, open.end.ethernet != 0);
  if (port == nullptr) {
    wire::RdmaOpenReply reply{};
    reply.status = ENODEV;
    session.connection.queue.push(Type::kRdmaOpenReply, frame.request_id, reply);
    return list_to_flush(session);
  }
  // Behind what registers the port's memory, if that isn't done yet: the helper thread takes one after
  // another.
  auto* work = new SetUp;
  work->shard = this;
  work->session = &session;
  work->port = port;
  work->traffic_class = config_.rdma_traffic_class;
  work->request_id = frame.request_id;
  work->theirs = open.end;
  work->work = set_up;
  work->op.done = on_rdma_opened;
  session.rdma = port;
  session.rdma_work++;
  rdma_work_++;
  io_->offload(work);
}

void Shard::on_rdma_opened(io::Op* op) {
  const std::unique_ptr<SetUp> work(of<SetUp>(op));
  Shard* self = work->shard;
  Session& session = *work->session;
  self->rdma_work_--;
  session.rdma_work--;
  if (work->channel != nullptr && !work->port->ready) {  // it isn't its turn yet, or it failed
    session.connection.channel = std::move(work->channel);
    self->end_channel(session);
    work->error = Error::of(EAGAIN, "the port isn't ready");
  }
  if (work->channel == nullptr) {
    log(LogLevel::kInfo, "shard %u: no RDMA for a client: %s", self->config_.number, work->error.what);
    if (session.open) {
      wire::RdmaOpenReply reply{};
      reply.status = static_cast<uint32_t>(work->error.code);
      session.connection.queue.push(Type::kRdmaOpenReply, work->request_id, reply);
      self->list_to_flush(session);
    }
    return self->end_session_if_unused(session);
  }
  wire::RdmaOpenReply reply{};
  reply.end = work->ours;
  net::Connection& connection = session.connection;
  if (session.open) {
    // The last word over the socket.
    connection.queue.push(Type::kRdmaOpenReply, work->request_id, reply);
    auto sent = connection.flush(&self->released_);
    if (!sent.ok() || !*sent) self->close_session(session, "the reply doesn't go out");
  }
  connection.channel = std::move(work->channel);
  if (!session.open) {
    self->end_channel(session);
    return;
  }
  connection.drained = false;
  session.readable = false;
  self->metrics_.rdma_sessions++;
  self->go_on_with_channel(session);
}

// --- events ---------------------------------------------------------------------------------------

void Shard::on_rdma_event(io::Poll* poll) {
  RdmaPort* port = static_cast<RdmaPort*>(poll->owner);
  Shard* self = port->shard;
  if (poll->removed) {
    self->rdma_polls_--;
    return;
  }
  poll->events = 0;
  std::vector<void*> owners;
  port->events->take(&owners);
  for (void* owner : owners) {
    Session& session = *static_cast<Session*>(owner);
    if (!session.open || session.connection.channel == nullptr) continue;
    session.connection.channel->disarmed();
    self->go_on_with_channel(session);
    self->end_session_if_unused(session);
  }
}

// Takes what has come and ended, and sees to it that more is reported.
void Shard::go_on_with_channel(Session& session) {
  net::rdma::Channel& channel = *session.connection.channel;
  const auto more = channel.arm();
  take_bulk(channel.ended());
  if (!more.ok() || channel.broken()) return channel_broke(session);
  if (channel.readable() && !session.readable) {
    session.readable = true;
    list_to_read(session);
  }
  if (channel.waits() || !session.connection.queue.empty()) list_to_flush(session);
}

void Shard::take_bulk(std::vector<Ended>& ended) {
  bulk_ended_.swap(ended);
  for (const Ended& one : bulk_ended_) {
    if (one.kind == WorkKind::kWrite) {
      buffers_->release(reinterpret_cast<uint8_t*>(one.token));
      continue;
    }
    Payload* payload = reinterpret_cast<Payload*>(one.token);
    payload->fetched = one.good ? payload->length : 0;
    end_fetch(payload, one.good && check_payload(payload) ? Outcome::ok : Outcome::bad_checksum);
  }
  bulk_ended_.clear();
}

// The queue pair is lost, and with it all that goes over it: the client asks again on a new one. If its own
// keys were to blame, it is told of which request (over the socket), so that this one doesn't break the next.
void Shard::channel_broke(Session& session) {
  net::rdma::Channel& channel = *session.connection.channel;
  metrics_.rdma_breaks++;
  const Ended culprit = channel.culprit();
  const bool refused = channel.by_remote_access();
  log(refused ? LogLevel::kWarning : LogLevel::kInfo, "shard %u: an RDMA connection breaks: %s%s",
      config_.number, channel.fault(), refused ? " (an address or key of the client's memory is wrong)" : "");
  end_channel(session);
  if (refused && culprit.tag != 0) {
    session.connection.queue.clear(&released_);
    for (uint64_t token : released_) release_token(token);
    released_.clear();
    send_refusal(session, culprit.kind == WorkKind::kWrite ? Type::kRead : Type::kUpdate, culprit.tag, ENXIO,
                 Detail::kNoRegion);
    (void)session.connection.flush(&released_);  // if it doesn't go out, the client learns it by its deadline
  }
  close_session(session, "its RDMA connection is broken");
}

// --- ending ---------------------------------------------------------------------------------------

// What the channel still holds comes back when no device works on it any more.
void Shard::end_channel(Session& session) {
  auto* work = new End;
  work->shard = this;
  work->session = &session;
  work->channel = std::move(session.connection.channel);
  work->work = [](io::Offload* offload) {
    static_cast<End*>(offload)->channel->end();
    return 0;
  };
  work->op.done = on_channel_ended;
  session.rdma_work++;
  rdma_work_++;
  io_->offload(work);
}

void Shard::on_channel_ended(io::Op* op) {
  const std::unique_ptr<End> work(of<End>(op));
  Shard* self = work->shard;
  self->rdma_work_--;
  work->session->rdma_work--;
  std::vector<Ended> left;
  work->channel->abandon(&left);
  self->rdma_ended_.add(work->channel->counters());
  self->take_bulk(left);
  self->end_session_if_unused(*work->session);
}

// --- bulk data ------------------------------------------------------------------------------------

// The reply, which is queued after this, comes after the bytes.
void Shard::write_over_rdma(Request* request) {
  Session& session = *request->session;
  const engine::ReadOp& read = request->read;
  uint8_t* const buffer = std::exchange(request->buffer, nullptr);
  session.connection.channel->write(static_cast<const uint8_t*>(read.memory), session.rdma->key_of(buffer),
                                    request->bulk.address, static_cast<uint32_t>(request->bulk.region),
                                    read.read_length, reinterpret_cast<uint64_t>(buffer),
                                    request->request_id);
}

// The payload has its buffer.
void Shard::read_over_rdma(Payload* payload) {
  Session& session = *payload->source;
  if (!session.open || session.connection.channel == nullptr) {
    return end_fetch(payload, Outcome::bad_checksum);  // nobody is there to be told
  }
  session.connection.channel->read(payload->data(), session.rdma->key_of(payload->buffer), payload->address,
                                   payload->remote_key, payload->length, reinterpret_cast<uint64_t>(payload),
                                   payload->request_id);
  list_to_flush(session);
}

void Shard::drop_source(Payload* payload) {
  if (payload->region != nullptr) regions_->unuse(payload->region);
  payload->region = nullptr;
  if (payload->source == nullptr) return;
  Session& session = *std::exchange(payload->source, nullptr);
  session.requests--;
  if (!session.open) end_session_if_unused(session);
}

void Shard::rdma_metrics(ShardMetrics* out) {
  out->rdma = rdma_ended_;
  for (uint32_t slot = 0; slot < sessions_.size(); slot++) {
    const Session* session = sessions_.at(slot);
    if (session->connection.channel != nullptr) out->rdma.add(session->connection.channel->counters());
  }
}

}  // namespace ffs::server
