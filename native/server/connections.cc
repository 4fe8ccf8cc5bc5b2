// Sockets to frames and back: accepting, reading, sending, ending.
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
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
// Of a payload in one copy, so that it is checked while it is in the cache.
constexpr size_t kReceiveBytes = 256u << 10;
// Of recovery, while clients are served: in one copy, and in a pass.
constexpr size_t kGentleReceiveBytes = 128u << 10, kGentleBudgetBytes = 256u << 10;

// Of what was sent, what the other end hasn't taken yet.
int bytes_untaken(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

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
      if (transport == net::Transport::kTcp)
        session->connection.zero_copy.start(session->connection.socket.get(), config_.zero_copy_send);
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
  uint32_t events = std::exchange(poll->events, 0u);
  if (!session.open) return;
  if ((events & POLLERR) != 0 && session.connection.zero_copy.outstanding()) {
    if (session.connection.collect_sent(&self->released_)) events &= ~static_cast<uint32_t>(POLLERR);
    self->give_sent(session);
    self->note_sending(session, /*moved=*/true);
  }
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
  session.connection.reader.limit_receives(gentle ? kGentleReceiveBytes : kReceiveBytes);
  while (session.open) {
    if (session.waits_for_op || session.send_full || session.waiter.waiting)
      return;  // listed again when it can go on
    net::Frame frame;
    switch (session.connection.reader.next(&frame)) {
      case net::FrameReader::Next::kFrame:
        if (!session.from_server) served_us_ = now_us_;
        session.incoming.moved_us = now_us_;
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
      session.incoming.moved_us = now_us_;
      if (session.incoming.active && session.connection.reader.in_payload()) {
        Payload* payload = session.incoming.payload;
        check_some(payload,
                   payload->length - static_cast<uint32_t>(session.connection.reader.payload_left()));
      }
      // The socket was emptied; what comes next is reported anew. (Not so once the peer has hung up:
      // its end was reported already.)
      if (session.connection.drained && !session.hung_up) session.readable = false;
    } else if (got.error().code == EAGAIN) {
      session.readable = false;
    } else {
      if (got.error().code == EPROTO) metrics_.frame_errors++;
      // The memory that a payload was to go to: it comes again, and then goes the ordinary way.
      if (got.error().code == EFAULT) stop_lending(EFAULT);
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
  const size_t before = session.connection.queue.pending_bytes();
  auto sent = session.connection.flush(&released_, most_bytes);
  give_sent(session);
  note_sending(session, session.connection.queue.pending_bytes() < before);
  return sent;
}

void Shard::note_sending(Session& session, bool moved) {
  const bool waits = !session.connection.queue.empty() || session.connection.zero_copy.outstanding();
  if (!waits) session.sent_us = 0;
  if (waits && (moved || session.sent_us == 0)) session.sent_us = now_us_;
}

// What nobody reads any more.
void Shard::give_sent(Session& session) {
  for (uint64_t token : released_) release_token(token);
  released_.clear();
  const net::ZeroCopyCounters counted = session.connection.zero_copy.take_counters();
  metrics_.zero_copy_sends += counted.sends;
  metrics_.zero_copy_copied += counted.copied;
}

// Connections whose other end stopped in the middle of a payload, or takes nothing of the replies that wait
// for it: it has memory that others wait for, so it hasn't got for ever. The client asks again. Time in
// which this process was stopped doesn't count.
void Shard::end_stalled() {
  const uint64_t most_us = 2000ull * config_.failure_timeout_ms;
  if (most_us == 0 || now_us_ - stall_look_us_ < most_us / 8) return;
  const uint64_t since_us = now_us_ - std::exchange(stall_look_us_, now_us_);
  const uint64_t slept_us = since_us > most_us / 4 ? since_us : 0;
  for (uint32_t slot = 0; slot < sessions_.size(); slot++) {
    Session& session = *sessions_.at(slot);
    if (!session.open) continue;
    session.incoming.moved_us = std::min(session.incoming.moved_us + slept_us, now_us_);
    if (session.sent_us != 0) session.sent_us = std::min(session.sent_us + slept_us, now_us_);
    // Not those that wait for something of this server's.
    const net::Connection& connection = session.connection;
    const bool comes = connection.reader.in_payload() && !session.readable;
    const bool goes =
        session.sent_us != 0 && (connection.queue.holds_payload() || connection.zero_copy.outstanding());
    // A socket takes more when a third of it is free, which a slow reader needs its time for.
    const int untaken = goes ? bytes_untaken(connection.socket.get()) : 0;
    if (goes && std::exchange(session.untaken_bytes, untaken) != untaken) session.sent_us = now_us_;
    const char* why = nullptr;
    if (comes && now_us_ - session.incoming.moved_us > most_us) why = "nothing has come of its payload";
    if (goes && now_us_ - session.sent_us > most_us) why = "it has taken nothing of its replies";
    if (why == nullptr) continue;
    log(LogLevel::kInfo, "shard %u: a connection ends: %s for %llu s", config_.number, why,
        static_cast<unsigned long long>(most_us / 1'000'000));
    close_session(session, why);
  }
}

// Closed sessions of which the kernel still reads something: their memory is given back when it has done so.
void Shard::end_sending() {
  std::erase_if(ending_, [this](Session* session) {
    (void)session->connection.collect_sent(&released_);
    give_sent(*session);
    if (session->connection.zero_copy.outstanding()) return false;
    session->listed_to_end = false;
    end_session_if_unused(*session);
    return true;
  });
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
  session.connection.abandon(&released_);
  give_sent(session);
  if (session.connection.zero_copy.outstanding()) {
    session.listed_to_end = true;
    ending_.push_back(&session);
  }
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
      session.listed_to_flush || session.region_waits > 0 || session.rdma_work > 0 || session.listed_to_end) {
    return;
  }
  session.connection = net::Connection(Fd(), net::Transport::kTcp);
  session.out_fd.reset();
  session.capabilities.clear();
  session.out_armed = session.out_ending = session.hello = session.from_server = session.proved =
      session.recovery = session.readable = session.send_full = false;
  session.client = ClientId();
  session.sent_us = 0;
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
