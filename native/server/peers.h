// This shard's connections to the shards of its chains' other members, several lanes each: a free
// one for what never waits for a buffer on the other side, and one `down` for each distance of the
// receiver from its tail, for updates and what must follow them in order. So a full pool on the
// other side holds up only those updates that wait for the same pool (server/buffers.h), and never
// the notices (held, acknowledged, cancelled) that will empty it. Recovery and repair have a lane of their
// own, so that their chunks stand in nobody's way. A lane that is down drops what it is given:
// the replicas send again when it is back (craq/replica.h, on_peer_connected). What is queued holds buffers
// that the shard needs for its other chains: a lane whose other side takes nothing for two failure timeouts
// (its process is stopped, its host is frozen) ends. One shard thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ids.h"
#include "ffs/wire.h"
#include "io/io.h"
#include "net/mac.h"
#include "net/socket.h"

namespace ffs::server {

// Where a target is reached.
struct Route {
  TargetId target;
  NodeId node;
  std::string host;
  std::string host_id;
  std::string socket_path;
  uint16_t port = 0;
  bool operator==(const Route&) const = default;
};

// 0: free; 1 + n: down to a member with n members behind it; the last: recovery.
using LaneNumber = uint32_t;
constexpr LaneNumber kLaneFree = 0;
constexpr LaneNumber lane_down(uint32_t members_behind) {
  return 1 + members_behind;
}
constexpr LaneNumber kLaneSync = kMaxReplicas;
constexpr uint32_t kMaxLanes = kMaxReplicas + 1;

class Peers {
 public:
  struct Identity {
    std::array<uint8_t, 16> cluster{};
    NodeId node;
    uint64_t incarnation = 0;
    std::string host_id;
    std::string congestion;
    bool proves = false;  // both sides prove `key`, derived from the cluster's secret
    net::MacKey key{};
  };
  // `connected` runs when all lanes to the target's shard are up; `released` gets the tokens of
  // payloads that were sent or dropped.
  struct Events {
    void* owner = nullptr;
    void (*connected)(void* owner, TargetId target) = nullptr;
    void (*released)(void* owner, uint64_t token) = nullptr;
  };
  // stall_ms: how long a lane may move nothing while something is queued; 0: for ever.
  Peers(io::Io& io, Identity identity, Events events, uint64_t stall_ms = 0);
  ~Peers();  // after close() and drained()

  // The members that this shard talks to, with their places. Lanes to places that are no longer
  // named end; new ones are dialled.
  // member_count: of the longest chain.
  void set_routes(const std::vector<Route>& routes, uint32_t member_count, uint64_t now_ms);
  // The queue of a lane that is up, or null.
  net::SendQueue* lane(TargetId target, LaneNumber number);
  // Whether who serves that target takes frames of a feature (wire::Features). False while it isn't reached.
  bool takes(TargetId target, uint64_t feature) const;
  // Sends what was queued since the last time; of recovery at most so much a lane, the rest next time.
  void flush(size_t most_recovery_bytes);
  bool must_flush() const { return !to_flush_.empty(); }
  void tick(uint64_t now_ms);  // dials again
  void close();                // no more lanes; drained() says when all is over
  bool drained() const { return open_lanes_ == 0; }
  uint64_t lanes_up() const;

 private:
  struct Peer;
  struct Lane {
    enum class State { kIdle, kConnecting, kHello, kUp, kClosing };
    Peers* owner = nullptr;
    Peer* peer = nullptr;
    State state = State::kIdle;
    net::Connection connection;
    io::Poll in;
    io::Poll out;  // while it is dialled, and from when its socket was full until all is sent
    Fd out_fd;
    uint32_t polls = 0;
    bool out_armed = false;
    bool out_ending = false;  // it found nothing to send, so it is taken away
    uint64_t retry_at_ms = 0;
    uint32_t attempts = 0;
    uint64_t features = 0;  // of the other side
    wire::ServerHello hello{};
    bool listed = false;
    uint64_t sent_bytes = 0, moved_bytes = 0;  // since the dial: now, and when it was last seen to move
    uint64_t moved_ms = 0;
  };
  struct Peer {
    Route place;  // of its first target
    std::vector<TargetId> targets;
    std::array<Lane, kMaxLanes> lanes;
    bool wanted = true;
  };
  static std::string place_key(const Route& route);
  static void ready(io::Poll* poll);
  void dial(Lane& lane, uint64_t now_ms);
  void progress(Lane& lane, uint32_t events);
  void wait_for_room(Lane& lane);
  void room(Lane& lane);
  void poll_ended(Lane& lane, const io::Poll& poll);
  bool read_lane(Lane& lane);
  bool say_hello(Lane& lane);
  const char* greet(Lane& lane, const net::Frame& frame);
  void flush_lane(Lane& lane, size_t most_bytes);
  void close_lane(Lane& lane, const char* why);
  void list(Lane& lane);
  void end_stalled(uint64_t slept_ms);
  bool all_up(const Peer& peer) const;
  bool used(uint32_t number) const { return number < lanes_ || number == kLaneSync; }
  void forget_unwanted();

  io::Io& io_;
  Identity identity_;
  Events events_;
  std::unordered_map<std::string, std::unique_ptr<Peer>> peers_;
  std::vector<std::unique_ptr<Peer>> leaving_;
  std::unordered_map<uint64_t, Peer*> by_target_;
  std::vector<Lane*> to_flush_, flushing_;
  std::vector<uint64_t> released_;
  uint64_t stall_ms_;
  uint64_t now_ms_ = 0;
  uint64_t ticked_ms_ = 0;
  uint32_t open_lanes_ = 0;
  uint32_t lanes_ = 2;  // free and down that are used
  bool closed_ = false;
};

}  // namespace ffs::server
