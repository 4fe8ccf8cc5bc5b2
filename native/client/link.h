// Link: a ring's connection to one shard of a server - connecting, hello, the capabilities and
// regions that the server has been told of (docs/ring.md, Connections). Belongs to its ring's
// thread; never blocks. Requests are the ring's business: it pushes them into `queue()`.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/client.h"
#include "client/granules.h"
#include "client/iov.h"
#include "client/slot.h"
#include "net/rdma/adapter.h"
#include "net/rdma/verbs_pair.h"
#include "net/socket.h"

namespace ffs::client {

class Link {
 public:
  enum class State : uint8_t { kIdle, kConnecting, kHello, kRdma, kReady };

  Link(Client& client, Endpoint endpoint);

  const Endpoint& endpoint() const { return endpoint_; }
  State state() const { return state_; }
  bool ready() const { return state_ == State::kReady; }
  bool local() const { return transport_ == net::Transport::kLocal; }
  // Its frames and its bulk data go over a queue pair.
  bool rdma() const { return connection_ != nullptr && connection_->channel != nullptr; }
  net::rdma::Channel& channel() { return *connection_->channel; }
  net::Connection& connection() { return *connection_; }
  bool connected() const { return connection_ != nullptr; }

  // Begins to connect. An error: nothing listens there, or the like.
  Status start(uint64_t now_ns);
  // Connecting has ended; says hello.
  Status on_connected();
  // Takes the reply to hello; an error is the server's refusal (detail in *detail).
  Status on_hello_reply(const net::Frame& frame, wire::Detail* detail);
  // Takes the reply to rdma_open. An error: over RDMA alone is wanted, and it can't be had.
  Status on_rdma_reply(const net::Frame& frame);
  // Readable when the channel has something to say; -1 without one.
  int rdma_fd() const { return rdma() ? events_->fd() : -1; }
  void take_rdma_events();
  // The connection's path is no good for RDMA: for a while, TCP will do.
  void distrust_rdma(uint64_t now_ns) { rdma_not_before_ns_ = now_ns + kDistrustNs; }
  // Of all channels that were here.
  net::rdma::ChannelCounters rdma_counters() const;
  // Why RDMA was wanted and isn't used; null: nothing to say.
  const char* no_rdma() const { return no_rdma_; }
  // Forgets the connection and all that the server knew through it. `released` gets the tokens
  // of payloads that were still queued.
  void disconnect(std::vector<uint64_t>* released);

  // The handle of a capability on this connection; opens it (or its newer issue) if need be.
  // EBADF: the capability is gone.
  Result<uint32_t> capability(uint32_t id);
  void forget_capability(uint32_t id);  // the next use opens it again

  // The region to name for a slice, or 0: send inline. Registers the extent on first use; it
  // counts once the server has said so. `into`: the server is to write there.
  uint64_t region(Iov& iov, uint64_t offset, uint64_t length, bool into);
  void forget_region(uint64_t region);
  // Why the adapter registered no memory of a device when it was last asked; 0: nothing to say.
  int device_refusal() const { return device_refusal_; }
  // Small reads that go out together (docs/wire_format.md, read_many): begin_reads starts a frame that has
  // the slot's context and region, which add_read fills with reads that join it. push_reads queues it;
  // whatever must stand behind its reads on the connection does that first.
  bool takes_read_many() const { return takes_read_many_; }
  bool takes_offers() const { return takes_offers_; }
  bool joins_reads(const Slot& slot) const;
  void begin_reads(const Slot& first, const wire::Context& context);
  void add_read(const Slot& slot, uint64_t request_id);
  void push_reads();
  // Takes replies to control frames; false: not one of this link's.
  bool on_control_reply(const net::Frame& frame);
  // Closes capabilities that were dropped and regions of Iovs that are gone.
  void sweep();

  // What the ring keeps here.
  SlotList waiting;  // queued slots, to be sent
  SlotList in_flight;
  uint64_t inflight_bytes = 0;
  uint64_t load_bytes = 0;     // waiting and in flight
  uint64_t landing_bytes = 0;  // of reads that have a place to land
  uint64_t connect_deadline_ns = 0;
  uint64_t retry_ns = 0;  // no connecting before
  uint32_t failures = 0;  // since it last was ready
  uint64_t last_receive_ns = 0;
  bool suspect = false;         // says nothing though asked: reads go elsewhere
  uint64_t beaten_sent_ns = 0;  // sent then, a read that another replica answered before; 0: none since
                                // the last receive
  uint64_t latency_ns = 0;      // of small reads, smoothed
  uint64_t latency_at_ns = 0;   // its last sample
  bool dirty = false;           // stands in the ring's list of links to pump
  bool wants_write = false;     // EPOLLOUT is armed
  bool local_refused = false;
  bool rdma_watched = false;      // rdma_fd() is in the ring's epoll
  bool rdma_broken = false;       // the socket may say yet who was to blame
  uint64_t broken_until_ns = 0;   // then it is given up
  net::FrameReader beside{4096};  // of the socket of a link over RDMA

  // The payload that is being received.
  uint32_t receiving = kNoSlot;  // kNoSlot: thrown away
  wire::ReadReply read_reply{};
  std::vector<uint32_t> granule_crcs;
  GranuleCheck granules;  // of granule_crcs, as their bytes arrived
  std::vector<wire::ReadPatch> patches;
  std::vector<uint8_t> scratch;

 private:
  struct Handle {
    uint64_t issue = 0;
    uint32_t handle = 0;
  };
  enum class RegionState : uint8_t { kAsked, kDirect, kReadable, kRefused };
  struct Region {
    RegionState state = RegionState::kAsked;
    uint64_t iov_serial = 0;
    uint64_t extent = 0;
    uint32_t key = 0;                  // over RDMA
    std::shared_ptr<const void> held;  // its registration
  };
  enum class Control : uint8_t { kCapability, kRegister, kUnregister };
  struct Asked {
    Control kind;
    uint64_t what;
    Fd fd;  // that goes with the frame: the send queue borrows it
  };

  static constexpr uint64_t kDistrustNs = 30'000'000'000;

  bool may_be_local() const;
  Status offer_rdma(bool server_takes_it);
  uint64_t rdma_key(Iov& iov, uint64_t extent);
  uint64_t ask(Control kind, uint64_t what, Fd fd = Fd());
  void register_extent(Iov& iov, uint64_t extent, uint64_t id);
  void unregister(uint64_t region);

  // What the reads of the frame under way have in common.
  struct ManyReads {
    wire::ReadMany head{};
    uint32_t capability = 0;  // id; its handle on this connection doesn't change while a frame is under way
    uint64_t deadline_ns = 0;
    std::vector<wire::ReadManyEntry> entries;
  };

  Client& client_;
  Endpoint endpoint_;
  State state_ = State::kIdle;
  net::Transport transport_ = net::Transport::kTcp;
  std::unique_ptr<net::rdma::Events> events_;  // of the pair and the channel, so it goes after them
  std::unique_ptr<net::Connection> connection_;
  net::rdma::Adapter* adapter_ = nullptr;
  std::unique_ptr<net::rdma::VerbsPair> pair_;  // until it is connected
  net::rdma::ChannelCounters rdma_counters_;    // of channels that are gone
  uint64_t rdma_not_before_ns_ = 0;
  uint64_t started_ns_ = 0;
  const char* no_rdma_ = nullptr;
  std::vector<Handle> handles_;  // by capability id
  uint32_t last_handle_ = 0;
  std::unordered_map<uint64_t, Region> regions_;
  std::vector<std::shared_ptr<const void>> retired_;  // registrations that requests in flight may name still
  uint64_t cached_region_ = 0;                        // the last one that regions_ was asked for
  RegionState cached_state_ = RegionState::kAsked;
  uint32_t cached_key_ = 0;  // over RDMA
  int device_refusal_ = 0;
  std::unordered_map<uint64_t, Asked> asked_;
  uint64_t last_control_ = 0;
  uint64_t drops_seen_ = 0;
  uint64_t removals_seen_ = 0;
  std::vector<uint8_t> bytes_;  // of a capability, reused
  bool takes_read_many_ = false;
  bool takes_offers_ = false;
  ManyReads many_;
};

}  // namespace ffs::client
