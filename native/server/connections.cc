// Sockets to frames and back: accepting, reading, sending, ending.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>

#include "server/log.h"
#include "server/shard.h"

namespace ffs::server {

namespace {

// What a session may have waiting to be sent before its further requests wait.
constexpr size_t kSendLimitBytes = 24u << 20;
// What is sent to one session in a pass before the others have their turn.
constexpr size_t kSendBudgetBytes = 4u << 20;
// What one session may take of a pass before the others have their turn.
constexpr size_t kReadBudgetBytes = 8u << 20;
// Of recovery, while clients are served: in one copy, and in a pass.
constexpr size_t kGentleReceiveBytes = 128u << 10, kGentleBudgetBytes = 256u << 10;

}  // namespace

// --- accepting ------------------------------------------------------------------------------------

void Shard::on_accept(io::Poll* poll) {
  Shard* self = static_cast<Shard*>(poll->owner);
  if (poll->removed) {
    self->listeners_--;
    return;
  }
  poll->events = 0;
  self->accept_again_ = true;
  self->accept_all();
}

void Shard::accept_all() {
  accept_again_ = false;
  for (const auto transport : {net::Transport::kLocal, net::Transport::kTcp}) {
    const Fd& listener = transport == net::Transport::kLocal ? local_listener_ : tcp_listener_;
    if (!listener.valid() || stopping_ || !accepting_) continue;
    while (true) {
      if (sessions_.used() >= config_.max_sessions) {
        accept_again_ = true;  // they wait in the backlog until a session ends
        break;
      }
      auto socket = net::accept_connection(listener, transport);
      if (!socket.ok()) {
        const int code = socket.error().code;
        if (code == ECONNABORTED) continue;
        if (code != EAGAIN) {
          accept_again_ = true;  // out of descriptors or memory: the next tick tries again
          log(LogLevel::kWarning, "shard %u can't accept a connection: %s", config_.number,
              std::strerror(code));
        }
        break;
      }
      Session* session = sessions_.take();
      session->shard = this;
      session->connection = net::Connection(std::move(*socket), transport);
      session->used = session->open = true;
      session->in = io::Poll{};
      session->in.ready = on_session;
      session->in.owner = session;
      session->polls = 1;
      polls_++;
      io_->poll_add(&session->in, session->connection.socket.get(), POLLIN | POLLRDHUP);
    }
  }
}

// --- reading --------------------------------------------------------------------------------------

void Shard::on_session(io::Poll* poll) {
  Session& session = *static_cast<Session*>(poll->owner);
  Shard* self = session.shard;
  if (poll->removed) {
    session.polls--;
    self->polls_--;
    if (poll == &session.out) {
      session.out_armed = session.out_ending = false;
      if (!session.connection.queue.empty()) self->list_to_flush(session);  // full again meanwhile
    }
    if (poll->error != 0) self->close_session(session, "polling failed");
    self->end_session_if_unused(session);
    return;
  }
  const uint32_t events = std::exchange(poll->events, 0u);
  if (!session.open) return;
  if (session.connection.channel != nullptr) {  // the socket only tells of the end
    if ((events & (POLLRDHUP | POLLHUP | POLLERR)) != 0) self->close_session(session, "the peer has closed");
    self->end_session_if_unused(session);
    return;
  }
  if (poll == &session.out) {
    if (!session.connection.queue.empty()) {
      self->list_to_flush(session);
    } else if (!session.out_ending) {
      // A Unix socket reports room whenever its peer has read: each of these would be a wake-up for nothing.
      session.out_ending = true;
      self->io_->poll_remove(&session.out);
    }
    return;
  }
  session.readable = true;
  if ((events & (POLLRDHUP | POLLHUP | POLLERR)) != 0) session.hung_up = true;
  self->list_to_read(session);
}

void Shard::list_to_read(Session& session) {
  if (session.listed_to_read || !session.open) return;
  session.listed_to_read = true;
  to_read_.push_back(&session);
}

// Clients and updates from other servers first; what these bring of recovery comes last.
void Shard::read_sessions() {
  reading_.swap(to_read_);
  for (const bool recovery : {false, true}) {
    for (Session*& session : reading_) {
      if (session == nullptr || session->recovery != recovery) continue;
      session->listed_to_read = false;
      read_session(*session);
      if (session->connection.channel != nullptr) go_on_with_channel(*session);
      if (!session->open) end_session_if_unused(*session);
      session = nullptr;
    }
  }
  reading_.clear();
}

void Shard::read_session(Session& session) {
  const bool gentle = session.recovery && background_.clients_active(now_us_);
  size_t budget = gentle ? kGentleBudgetBytes : kReadBudgetBytes;
  if (session.recovery) session.connection.reader.limit_receives(gentle ? kGentleReceiveBytes : 0);
  while (session.open) {
    if (session.waits_for_op || session.send_full || session.waiter.waiting)
      return;  // listed again when it can go on
    net::Frame frame;
    switch (session.connection.reader.next(&frame)) {
      case net::FrameReader::Next::kFrame:
        if (!session.from_server) served_us_ = now_us_;
        if (!dispatch(session, frame)) return;
        if (session.connection.queue.pending_bytes() > kSendLimitBytes) {
          session.send_full = true;
          list_to_flush(session);
        }
        continue;
      case net::FrameReader::Next::kPayload:
        payload_complete(session);
        continue;
      case net::FrameReader::Next::kBad:
        metrics_.frame_errors++;
        log(LogLevel::kWarning, "shard %u ends a connection: %s", config_.number,
            session.connection.reader.error().what);
        close_session(session, "bad frame");
        return;
      case net::FrameReader::Next::kNeedMore:
        break;
    }
    if (!session.readable) return;
    if (budget == 0) {
      list_to_read(session);
      return;
    }
    auto got = session.connection.receive();
    if (got.ok()) {
      read_clock();
      budget -= std::min(budget, *got);
      // The socket was emptied; what comes next is reported anew. (Not so once the peer has hung up:
      // its end was reported already.)
      if (session.connection.drained && !session.hung_up) session.readable = false;
    } else if (got.error().code == EAGAIN) {
      session.readable = false;
    } else {
      if (got.error().code == EPROTO) metrics_.frame_errors++;
      close_session(session, got.error().what);
    }
  }
}

// --- sending --------------------------------------------------------------------------------------

void Shard::list_to_flush(Session& session) {
  if (session.listed_to_flush || !session.open) return;
  session.listed_to_flush = true;
  to_flush_.push_back(&session);
}

void Shard::flush_sessions() {
  flushing_.swap(to_flush_);
  for (Session* session : flushing_) {
    session->listed_to_flush = false;
    if (session->open) {
      flush_session(*session);
    } else {
      end_session_if_unused(*session);
    }
  }
  flushing_.clear();
}

Result<bool> Shard::send_some(Session& session) {
  const size_t most_bytes = session.connection.channel != nullptr ? SIZE_MAX : kSendBudgetBytes;
  auto sent = session.connection.flush(&released_, most_bytes);
  for (uint64_t token : released_) release_token(token);
  released_.clear();
  return sent;
}

void Shard::flush_session(Session& session) {
  push_results(session);
  auto sent = send_some(session);
  while (!sent.ok() && sent.error().code == EFAULT && mend_fault(session)) sent = send_some(session);
  if (!sent.ok()) return close_session(session, sent.error().what);
  if (!*sent && session.connection.channel == nullptr) {
    if (session.connection.full) {
      wait_for_socket(session);
    } else {
      list_to_flush(session);
    }
  }
  if (session.open && session.send_full && session.connection.queue.pending_bytes() <= kSendLimitBytes / 2) {
    session.send_full = false;
    list_to_read(session);
  }
}

void Shard::wait_for_socket(Session& session) {
  if (session.out_armed) return;
  // A second descriptor of the socket: an epoll (the fallback's) takes each only once.
  if (!session.out_fd.valid())
    session.out_fd = Fd(::fcntl(session.connection.socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!session.out_fd.valid()) return close_session(session, "no descriptor left to wait for a full socket");
  session.out_armed = true;
  session.out = io::Poll{};
  session.out.ready = on_session;
  session.out.owner = &session;
  session.polls++;
  polls_++;
  io_->poll_add(&session.out, session.out_fd.get(), POLLOUT);
}

// Tokens of send queues: a pool buffer (aligned to 4 KiB), a payload with its lowest bit set, or what is
// lent.
void Shard::release_token(uint64_t token) {
  if ((token & 1) != 0) {
    release(reinterpret_cast<Payload*>(token & ~1ull));
  } else if ((token & Lent::kTokenBit) != 0) {
    release(reinterpret_cast<Lent*>(token & ~Lent::kTokenBit));
  } else {
    buffers_->release(reinterpret_cast<uint8_t*>(token));
  }
}

// --- ending ---------------------------------------------------------------------------------------

void Shard::close_session(Session& session, const char* why) {
  if (!session.open) return;
  log(LogLevel::kDebug, "shard %u: a connection ends: %s", config_.number, why != nullptr ? why : "");
  session.open = false;
  session.results.clear();
  if (session.connection.channel != nullptr) end_channel(session);
  session.connection.queue.clear(&released_);
  for (uint64_t token : released_) release_token(token);
  released_.clear();
  buffers_->cancel(&session.waiter);
  if (session.waits_for_op) {
    session.waits_for_op = false;
    std::erase(waiting_for_op_, &session);
  }
  if (session.incoming.active) {
    session.incoming.active = false;
    if (session.incoming.payload != nullptr) release(session.incoming.payload);
    session.incoming.payload = nullptr;
  }
  for (auto& [id, region] : session.regions) {
    std::erase_if(region->waiters,
                  [&](const ClientRegion::Waiter& waiter) { return waiter.session == &session; });
    regions_->drop(region);
  }
  session.regions.clear();
  session.connection.descriptors.clear();
  ::shutdown(session.connection.socket.get(), SHUT_RDWR);
  if (!session.in.removed) io_->poll_remove(&session.in);
  if (session.out_armed && !session.out_ending && !session.out.removed) io_->poll_remove(&session.out);
}

// A closed session's record is free when no poll, no list and no request points to it.
void Shard::end_session_if_unused(Session& session) {
  if (!session.used || session.open || session.polls > 0 || session.requests > 0 || session.listed_to_read ||
      session.listed_to_flush || session.region_waits > 0 || session.rdma_work > 0) {
    return;
  }
  session.connection = net::Connection(Fd(), net::Transport::kTcp);
  session.out_fd.reset();
  session.capabilities.clear();
  session.out_armed = session.out_ending = session.hello = session.from_server = session.proved =
      session.recovery = session.readable = session.send_full = false;
  session.client = ClientId();
  session.rdma = nullptr;
  session.used = session.hung_up = false;
  sessions_.give(&session);
  if (accept_again_) accept_all();
}

void Shard::wake_waiting_sessions() {
  if (waiting_for_op_.empty() || ops_used() >= config_.max_ops) return;
  for (Session* session : waiting_for_op_) {
    session->waits_for_op = false;
    list_to_read(*session);
  }
  waiting_for_op_.clear();
}

}  // namespace ffs::server
