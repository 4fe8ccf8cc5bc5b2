#include "server/peers.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "net/peer_proof.h"
#include "net/version.h"
#include "server/log.h"

namespace ffs::server {

namespace {
constexpr uint64_t kRedialMs = 100;
}

Peers::Peers(io::Io& io, Identity identity, Events events, uint64_t stall_ms)
    : io_(io), identity_(std::move(identity)), events_(events), stall_ms_(stall_ms) {}

Peers::~Peers() {
  FFS_CHECK(open_lanes_ == 0);
}

std::string Peers::place_key(const Route& route) {
  return route.host + ":" + std::to_string(route.port) + " " + route.socket_path + " " + route.host_id;
}

void Peers::set_routes(const std::vector<Route>& routes, uint32_t member_count, uint64_t now_ms) {
  now_ms_ = now_ms;
  lanes_ = std::clamp(member_count, lanes_, kMaxReplicas);
  for (auto& [key, peer] : peers_) peer->wanted = false, peer->targets.clear();
  by_target_.clear();
  for (const Route& route : routes) {
    auto& peer = peers_[place_key(route)];
    if (peer == nullptr) {
      peer = std::make_unique<Peer>();
      peer->place = route;
      for (Lane& lane : peer->lanes) {
        lane.owner = this;
        lane.peer = peer.get();
      }
    }
    peer->wanted = true;
    peer->targets.push_back(route.target);
    by_target_[route.target.value] = peer.get();
  }
  for (auto it = peers_.begin(); it != peers_.end();) {
    if (it->second->wanted) {
      ++it;
      continue;
    }
    for (Lane& lane : it->second->lanes) close_lane(lane, "the routing names it no more");
    leaving_.push_back(std::move(it->second));
    it = peers_.erase(it);
  }
  tick(now_ms);
}

net::SendQueue* Peers::lane(TargetId target, LaneNumber number) {
  auto found = by_target_.find(target.value);
  if (found == by_target_.end()) return nullptr;
  Lane& lane = found->second->lanes[number];
  if (lane.state != Lane::State::kUp) return nullptr;
  list(lane);
  return &lane.connection.queue;
}

bool Peers::takes(TargetId target, uint64_t feature) const {
  const auto found = by_target_.find(target.value);
  if (found == by_target_.end()) return false;
  const Lane& lane = found->second->lanes[kLaneFree];
  return lane.state == Lane::State::kUp && (lane.features & feature) != 0;
}

void Peers::list(Lane& lane) {
  if (lane.listed) return;
  lane.listed = true;
  to_flush_.push_back(&lane);
}

void Peers::flush(size_t most_recovery_bytes) {
  flushing_.swap(to_flush_);
  for (Lane* lane : flushing_) {
    lane->listed = false;
    const bool recovery = lane == &lane->peer->lanes[kLaneSync];
    flush_lane(*lane, recovery ? most_recovery_bytes : SIZE_MAX);
  }
  flushing_.clear();
}

void Peers::flush_lane(Lane& lane, size_t most_bytes) {
  if (lane.state != Lane::State::kHello && lane.state != Lane::State::kUp) return;
  const size_t queued = lane.connection.queue.pending_bytes();
  auto sent = lane.connection.flush(&released_, most_bytes);
  lane.sent_bytes += queued - lane.connection.queue.pending_bytes();
  for (uint64_t token : released_) events_.released(events_.owner, token);
  released_.clear();
  if (!sent.ok()) return close_lane(lane, sent.error().what);
  if (*sent) return;
  lane.connection.full ? wait_for_room(lane) : list(lane);
}

void Peers::tick(uint64_t now_ms) {
  now_ms_ = now_ms;
  forget_unwanted();
  if (closed_) return;
  end_stalled(now_ms - std::exchange(ticked_ms_, now_ms));
  for (auto& [key, peer] : peers_) {
    for (uint32_t i = 0; i < kMaxLanes; i++) {
      Lane& lane = peer->lanes[i];
      if (used(i) && lane.state == Lane::State::kIdle && now_ms >= lane.retry_at_ms) dial(lane, now_ms);
    }
  }
}

// slept_ms: since this was last looked at. What was stopped itself judges nobody by that time.
void Peers::end_stalled(uint64_t slept_ms) {
  if (stall_ms_ == 0) return;
  for (auto& [key, peer] : peers_) {
    for (Lane& lane : peer->lanes) {
      if (lane.state != Lane::State::kHello && lane.state != Lane::State::kUp) continue;
      const bool moved = lane.sent_bytes != lane.moved_bytes || lane.connection.queue.empty();
      if (moved || slept_ms >= stall_ms_ / 4) {
        lane.moved_bytes = lane.sent_bytes;
        lane.moved_ms = now_ms_;
      } else if (now_ms_ - lane.moved_ms >= stall_ms_) {
        log(LogLevel::kInfo, "peer %s takes nothing: what waits for it is dropped", key.c_str());
        close_lane(lane, "it takes nothing");
      }
    }
  }
}

void Peers::forget_unwanted() {
  std::erase_if(leaving_, [](const std::unique_ptr<Peer>& peer) {
    return std::all_of(peer->lanes.begin(), peer->lanes.end(),
                       [](const Lane& lane) { return lane.state == Lane::State::kIdle && !lane.listed; });
  });
}

void Peers::dial(Lane& lane, uint64_t now_ms) {
  const Route& place = lane.peer->place;
  const bool same_host = !place.socket_path.empty() && place.host_id == identity_.host_id;
  // The Unix socket first; every second attempt over TCP, should its path be of another place.
  const bool local = same_host && lane.attempts % 2 == 0;
  lane.attempts++;
  lane.retry_at_ms = now_ms + kRedialMs;
  auto socket = local ? net::connect_local(place.socket_path.c_str())
                      : net::connect_tcp(place.host.c_str(), place.port, identity_.congestion.c_str());
  if (!socket.ok()) {
    log(LogLevel::kDebug, "peer %s: %s", place_key(place).c_str(), std::strerror(socket.error().code));
    return;
  }
  // A second descriptor of the socket: an epoll (the fallback's) takes each only once.
  Fd out_fd(::fcntl(socket->get(), F_DUPFD_CLOEXEC, 0));
  if (!out_fd.valid()) {
    log(LogLevel::kWarning, "peer %s: no descriptor left: %s", place_key(place).c_str(),
        std::strerror(errno));
    return;
  }
  lane.out_fd = std::move(out_fd);
  lane.connection =
      net::Connection(std::move(*socket), local ? net::Transport::kLocal : net::Transport::kTcp);
  lane.state = Lane::State::kConnecting;
  lane.sent_bytes = lane.moved_bytes = 0;
  lane.moved_ms = now_ms;
  lane.in = io::Poll{};
  lane.in.ready = ready;
  lane.in.owner = &lane;
  open_lanes_++;
  lane.polls++;
  io_.poll_add(&lane.in, lane.connection.socket.get(), POLLIN | POLLRDHUP);
  wait_for_room(lane);
}

void Peers::wait_for_room(Lane& lane) {
  if (lane.out_armed) return;
  lane.out_armed = true;
  lane.out = io::Poll{};
  lane.out.ready = ready;
  lane.out.owner = &lane;
  lane.polls++;
  io_.poll_add(&lane.out, lane.out_fd.get(), POLLOUT);
}

// There is room in the socket. Once all is sent nobody listens any more: a Unix socket reports room whenever
// its peer has read, and each of these would be a wake-up for nothing.
void Peers::room(Lane& lane) {
  if (!lane.connection.queue.empty()) {
    list(lane);
  } else if (!lane.out_ending) {
    lane.out_ending = true;
    io_.poll_remove(&lane.out);
  }
}

void Peers::poll_ended(Lane& lane, const io::Poll& poll) {
  lane.polls--;
  const bool out = &poll == &lane.out;
  if (out) lane.out_armed = lane.out_ending = false;
  if (poll.error != 0 && lane.state != Lane::State::kClosing) close_lane(lane, "polling failed");
  if (out && lane.state != Lane::State::kClosing && !lane.connection.queue.empty()) list(lane);  // full again
  if (lane.polls > 0) return;
  lane.connection = net::Connection();
  lane.out_fd.reset();
  lane.state = Lane::State::kIdle;
  open_lanes_--;
}

void Peers::ready(io::Poll* poll) {
  Lane& lane = *static_cast<Lane*>(poll->owner);
  Peers* self = lane.owner;
  if (poll->removed) return self->poll_ended(lane, *poll);
  const uint32_t events = std::exchange(poll->events, 0u);
  if (lane.state == Lane::State::kClosing) return;
  if (poll == &lane.out && lane.state != Lane::State::kConnecting) return self->room(lane);
  self->progress(lane, events);
}

void Peers::progress(Lane& lane, uint32_t events) {
  if (lane.state == Lane::State::kConnecting && (events & (POLLOUT | POLLERR | POLLHUP)) != 0) {
    auto connected = net::connect_result(lane.connection.socket);
    if (!connected.ok()) return close_lane(lane, std::strerror(connected.error().code));
    if (!say_hello(lane)) return close_lane(lane, "no random bytes for hello");
    lane.state = Lane::State::kHello;
  }
  if (lane.state == Lane::State::kConnecting) return;
  if ((events & (POLLIN | POLLHUP | POLLERR | POLLRDHUP)) != 0 && !read_lane(lane)) return;
  list(lane);
}

bool Peers::say_hello(Lane& lane) {
  lane.hello = {};
  wire::Hello& hello = lane.hello.hello;
  std::memcpy(hello.cluster, identity_.cluster.data(), sizeof hello.cluster);
  hello.node = identity_.node.value;
  hello.incarnation = identity_.incarnation;
  hello.role = static_cast<uint8_t>(wire::Role::kServer);
  hello.version_min = net::spoken_versions().least;
  hello.version_max = net::spoken_versions().most;
  if (identity_.proves) {
    if (!net::random_bytes(lane.hello.nonce)) return false;
    lane.connection.queue.push(wire::Type::kHello, 0, lane.hello);
  } else {
    lane.connection.queue.push(wire::Type::kHello, 0, hello);
  }
  return true;
}

// Takes the reply to hello, proves the secret. Why the lane can't be used, or null.
const char* Peers::greet(Lane& lane, const net::Frame& frame) {
  const auto answer = frame.as<wire::ServerHelloReply>();
  const wire::HelloReply& reply = answer.reply;
  if (reply.status != 0) {
    log(LogLevel::kWarning, "peer %s refuses us: %s", place_key(lane.peer->place).c_str(),
        reply.detail == static_cast<uint32_t>(wire::Detail::kUnproved)
            ? "it has another cluster secret, or only one of us has one"
            : std::strerror(static_cast<int>(reply.status)));
    return "it refused hello";
  }
  if (net::choose_version(net::spoken_versions(), {reply.version, reply.version}) == 0) {
    return "it chose a protocol version that wasn't offered";
  }
  if (identity_.proves &&
      (!net::has_nonce(answer.nonce) ||
       !net::same_mac(net::peer_proof(identity_.key, net::Side::kServer, lane.hello, answer),
                      answer.proof))) {
    log(LogLevel::kWarning, "peer %s doesn't prove the cluster's secret",
        place_key(lane.peer->place).c_str());
    return "it doesn't prove the cluster's secret";
  }
  lane.connection.reader.speak(reply.version);
  lane.connection.queue.speak(reply.version);
  if (identity_.proves) {
    const net::Mac mac = net::peer_proof(identity_.key, net::Side::kAsker, lane.hello, answer);
    wire::PeerProof proof{};
    std::memcpy(proof.proof, mac.data(), sizeof proof.proof);
    lane.connection.queue.push(wire::Type::kPeerProof, 0, proof);
    list(lane);
  }
  lane.features = reply.features;
  return nullptr;
}

// The other side answers hello and says nothing more. False: the lane was closed.
bool Peers::read_lane(Lane& lane) {
  while (true) {
    net::Frame frame;
    auto next = lane.connection.reader.next(&frame);
    if (next == net::FrameReader::Next::kNeedMore) {
      auto got = lane.connection.receive();
      if (got.ok()) continue;
      if (got.error().code == EAGAIN) return true;
      close_lane(lane, got.error().what);
      return false;
    }
    if (next != net::FrameReader::Next::kFrame || frame.type != wire::Type::kHelloReply) {
      close_lane(lane, "it sent what isn't a hello reply");
      return false;
    }
    if (const char* fault = greet(lane, frame); fault != nullptr) {
      close_lane(lane, fault);
      return false;
    }
    lane.state = Lane::State::kUp;
    lane.attempts = 0;
    Peer* peer = lane.peer;
    if (all_up(*peer)) {
      log(LogLevel::kInfo, "connected to the peer at %s", place_key(peer->place).c_str());
      for (TargetId target : peer->targets) events_.connected(events_.owner, target);
    }
  }
}

bool Peers::all_up(const Peer& peer) const {
  for (uint32_t i = 0; i < kMaxLanes; i++) {
    if (used(i) && peer.lanes[i].state != Lane::State::kUp) return false;
  }
  return true;
}

void Peers::close_lane(Lane& lane, const char* why) {
  if (lane.state == Lane::State::kIdle || lane.state == Lane::State::kClosing) return;
  log(LogLevel::kDebug, "peer %s: lane ends: %s", place_key(lane.peer->place).c_str(),
      why != nullptr ? why : "");
  lane.state = Lane::State::kClosing;
  lane.connection.queue.clear(&released_);
  for (uint64_t token : released_) events_.released(events_.owner, token);
  released_.clear();
  lane.retry_at_ms = now_ms_ + kRedialMs;
  if (!lane.in.removed) io_.poll_remove(&lane.in);
  if (lane.out_armed && !lane.out_ending && !lane.out.removed) io_.poll_remove(&lane.out);
}

void Peers::close() {
  closed_ = true;
  for (auto& [key, peer] : peers_) {
    for (Lane& lane : peer->lanes) close_lane(lane, "the shard stops");
  }
}

uint64_t Peers::lanes_up() const {
  uint64_t count = 0;
  for (const auto& [key, peer] : peers_) {
    for (const Lane& lane : peer->lanes) count += lane.state == Lane::State::kUp ? 1 : 0;
  }
  return count;
}

}  // namespace ffs::server
