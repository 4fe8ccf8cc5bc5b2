// One thread, one Io, one device's chunk store, one TCP port and one Unix socket, and the
// replicas of the device's targets (docs/architecture.md). Everything private belongs to
// that thread; the public functions may be called from any other thread and block shortly.
//
// A pass of the thread: run completions, take frames from readable connections, copy fetched
// payloads, send all that was queued, submit all device operations at once. Decisions are the
// replicas' (craq/replica.h): frames become events (dispatch.cc), effects become calls (effects.cc),
// answers become frames (replies.cc).
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/spin.h"
#include "craq/replica.h"
#include "engine/chunk_store.h"
#include "ffs/wire.h"
#include "io/io.h"
#include "server/authority.h"
#include "server/background.h"
#include "server/buffers.h"
#include "server/evict.h"
#include "server/lending.h"
#include "server/peers.h"
#include "server/rdma.h"
#include "server/regions.h"
#include "server/scrub.h"
#include "server/session.h"
#include "server/shard_facts.h"
#include "server/slab.h"
#include "server/spaces.h"

namespace ffs::server {

// How many serving members stand behind one of them in its chain; 0 for others.
uint32_t members_behind(const craq::ChainConfig& config, TargetId id);

class Shard : private io::Gate {
 public:
  // Starts the thread, which opens and recovers the device and binds port and socket. Blocks
  // until that is done. Null: *failure says why.
  static std::unique_ptr<Shard> open(const ShardConfig& config, Failure* failure);
  ~Shard();  // stops if need be

  uint32_t number() const { return config_.number; }
  uint16_t port() const { return port_; }
  const std::string& socket_path() const { return socket_path_; }
  const std::vector<TargetId>& targets() const { return target_ids_; }

  void start();  // accepts connections from now on
  void configure(const Routing& routing);
  std::vector<TargetReport> report();
  ShardMetrics metrics();
  int fence(ClientId client);  // 0 or a positive errno; durable on return
  void lease(uint64_t until_ms);
  // The keys that sign capabilities from now on. What was opened under others is refused.
  void set_keys(const std::vector<SigningKey>& keys);
  // Replaces what is known of quotas and times to live; of chains that aren't here too.
  void set_spaces(const std::vector<SpacePolicy>& policies);
  std::vector<SpaceUse> space_use();
  // The target leaves its chain and drops what it has; false: it isn't this shard's.
  bool release_target(TargetId target);
  // Ends connections, lets operations finish, closes the store (a last snapshot). 0 or errno.
  int stop();

 private:
  friend struct Request;
  struct Call;
  struct Completion {
    Target* target;
    craq::OpId op;
    craq::Outcome outcome;
    craq::BufferRef buffer;
  };

  explicit Shard(const ShardConfig& config) : config_(config) {}

  // --- shard.cc: thread, passes, control
  void main();
  Status open_all();
  void tell_choices() const;
  void pass();
  void tick();
  void io_pass();
  bool spin();
  void shut_down();
  void abandon_all();
  bool call(const std::function<void()>& body);
  void measure(uint64_t started_us);
  void read_clock();
  void give_lease(Target& target);

  // --- membership.cc: targets that come, change and leave
  void apply(const Routing& routing);
  void apply(const ChainRoute& chain, TargetId id);
  Target* take_target(TargetId id, ChainId chain);
  void begin_leaving(TargetId id);
  void end_waiting(Target& target);
  void go_on_leaving(Target& target);
  static void on_left(engine::StoreOp* op);
  void abandon(Target& target);
  TargetReport report_of(TargetId id) const;
  void signal_news();
  void look_for_news(Target& target);

  // --- eviction.cc: spaces with a quota or a time to live
  void account_spaces();
  uint64_t manager_time() const;
  void evict(bool tick);
  void run_waiting();
  void report_uses();
  void on_used(Session& session, const net::Frame& frame);
  static craq::EvictionAnswer on_evict_order(void* owner, TargetId target, const craq::EvictionOrder& order);
  static bool on_evict_ahead(void* owner, uint32_t removals);
  uint64_t expiry_of(const Target& target, const wire::Update& update) const;

  // --- connections.cc
  static void on_accept(io::Poll* poll);
  void accept_all();
  static void on_session(io::Poll* poll);
  void read_sessions();
  void read_session(Session& session);
  void list_to_read(Session& session);
  void list_to_flush(Session& session);
  void flush_session(Session& session);
  Result<bool> send_some(Session& session);
  void wait_for_socket(Session& session);
  void give_sent(Session& session);
  void note_sending(Session& session, bool moved);
  void end_sending();
  void end_stalled();
  void flush_sessions();
  void close_session(Session& session, const char* why);
  void end_session_if_unused(Session& session);
  void release_token(uint64_t token);
  void wake_waiting_sessions();

  // --- rdma.cc: channels of sessions, bulk data over them
  void open_rdma();
  void register_next(size_t port);
  static void on_rdma_registered(io::Op* op);
  bool offers_rdma() const;
  RdmaPort* rdma_port(const Session& session, bool ethernet);
  void on_rdma_open(Session& session, const net::Frame& frame);
  static void on_rdma_opened(io::Op* op);
  static void on_rdma_event(io::Poll* poll);
  void go_on_with_channel(Session& session);
  void take_bulk(std::vector<net::rdma::Ended>& ended);
  void channel_broke(Session& session);
  void end_channel(Session& session);
  static void on_channel_ended(io::Op* op);
  void read_over_rdma(Payload* payload);
  void write_over_rdma(Request* request);
  void drop_source(Payload* payload);
  void rdma_metrics(ShardMetrics* out);

  // --- dispatch.cc: frames to events. False: the session waits for room; the frame comes again.
  bool dispatch(Session& session, const net::Frame& frame);
  void on_hello(Session& session, const net::Frame& frame);
  void on_peer_hello(Session& session, const net::Frame& frame, const wire::HelloReply& reply);
  bool take_peer_proof(Session& session, const net::Frame& frame);
  void on_open_capability(Session& session, const net::Frame& frame);
  void on_register_region(Session& session, const net::Frame& frame);
  void on_unregister_region(Session& session, const net::Frame& frame);
  bool on_read(Session& session, const net::Frame& frame);
  void begin_read(Request* request, const wire::Read& read, ClientRegion* region);
  bool on_exists(Session& session, const net::Frame& frame);
  bool on_last_chunk(Session& session, const net::Frame& frame);
  bool on_list_chunks(Session& session, const net::Frame& frame);
  // --- read_many.cc: many small reads in one frame
  bool on_read_many(Session& session, const net::Frame& frame);
  void start_many(Session& session, Target& target, const wire::ReadMany& head,
                  const wire::ReadManyEntry& entry, ClientRegion* region, craq::ClientRead* asked);
  static void on_many_done(engine::StoreOp* op);
  void run_many();
  void end_many(ManyRead* read);
  void read_alone(ManyRead* read);
  void read_alone(Session& session, Target& target, const wire::ReadMany& head,
                  const wire::ReadManyEntry& entry);
  void give_many(ManyRead* read);
  void push_results(Session& session);
  void push_result(Session& session, uint64_t request_id, const wire::ReadReply& said, uint32_t crc);
  size_t ops_used() const { return requests_.used() + many_reads_.used(); }
  void note_ops() { most_ops_ = std::max(most_ops_, ops_used()); }
  // --- updates.cc: frames with payloads
  bool on_update(Session& session, const net::Frame& frame);
  bool on_forward(Session& session, const net::Frame& frame);
  void on_notice(Session& session, const net::Frame& frame);
  bool on_sync(Session& session, const net::Frame& frame);
  void payload_complete(Session& session);
  void answer_exists_if_complete(Request* request);
  uint64_t token_of(const Request* request, uint32_t index = 0) const {
    return (static_cast<uint64_t>(request->slot) + 1) << 16 | index;
  }
  void submit_update(Session& session, const wire::Update& update, uint64_t request_id, Payload* payload,
                     craq::PayloadState state);
  void submit_forward(const wire::Forward& forward, Payload* payload, craq::PayloadState state);
  void submit_sync(const wire::Sync& sync, net::Bytes message, Payload* payload, craq::PayloadState state);
  craq::Outcome authority(const Session& session, const wire::Context& context, uint64_t space,
                          uint32_t rights, uint32_t* detail) const;
  bool update_fault(const net::Frame& frame, const wire::Update& update) const;
  Payload* payload_for(const net::Frame& frame, const wire::Update& update);
  bool receive_payload(Session& session, BufferUse use);
  void submit_space_update(Session& session, const wire::Update& update, Request* request, Target& target,
                           craq::Outcome authority);
  Target* find_target(const wire::Context& context);
  Request* take_request(Session& session, const net::Frame& frame, Target* target);
  Request* new_request(Session& session, wire::Type type, uint64_t request_id, Target* target);
  void wait_for_op(Session& session);
  void give_request(Request* request);
  uint64_t deadline(uint32_t deadline_ms) const { return deadline_ms == 0 ? 0 : now_ms_ + deadline_ms; }

  // --- effects.cc: effects to calls; completions to events
  template <typename F>
  void event(Target& target, F&& body) {
    FFS_CHECK(!in_event_);
    in_event_ = true;
    effects_.clear();
    body(*target.replica);
    run_effects(target);
    in_event_ = false;
  }
  void run_effects(Target& target);
  net::SendQueue* down_lane(const Target& target, TargetId to);
  void run(Target& target, const craq::SendUpdate& effect);
  void run(Target& target, const craq::SendNotice& effect);
  void run(Target& target, const craq::Reply& effect);
  void run(Target& target, const craq::Fetch& effect);
  void run(Target& target, const craq::Release& effect);
  void run(Target& target, const craq::Stage& effect);
  void run(Target& target, const craq::Commit& effect);
  void run(Target& target, const craq::Refuse& effect);
  void run(Target& target, const craq::Read& effect);
  void run(Target& target, const craq::Load& effect);
  void run(Target& target, const craq::SetSpaceEpoch& effect);
  void run(Target& target, const craq::PersistChain& effect);
  void run(Target& target, const craq::ProposalPersisted& effect);
  void run(Target& target, const craq::StateChanged& effect);
  void run(Target& target, const craq::Touch& effect);
  void run(Target& target, const craq::SendSync& effect);
  void run(Target& target, const craq::Copy& effect);
  void run(Target& target, const craq::Install& effect);
  void run(Target& target, const craq::Erase& effect);
  void run(Target& target, const craq::ResetTarget& effect);
  void run(Target& target, const craq::SetRetry& effect);
  void run(Target& target, const craq::Repaired& effect);
  void run(Target& target, const craq::Evicted& effect);
  void complete(Target& target, craq::OpId op, craq::Outcome outcome, craq::BufferRef buffer = {});
  void run_completions();
  static void on_stored(engine::StoreOp* op);
  static void on_small_done(engine::StoreOp* op);
  craq::BufferRef give(Target& target, Payload* payload);
  // --- recovery.cc
  static void on_loaded(engine::StoreOp* op);
  static void on_installed(engine::StoreOp* op);
  LoadWork* take_load(Target& target, craq::OpId op, const ChunkKey& key, const Version& version,
                      uint32_t length);
  void start_load(LoadWork* work);
  void end_load(LoadWork* work, craq::Outcome outcome);
  size_t loads_waiting() const;  // for buffers
  // The gate of the device's background operations: Background decides, with the shard's clock.
  Piece next(const std::array<uint32_t, io::kOpClasses>& wanted) override;
  void ended(io::OpClass op_class, uint32_t bytes) override;
  bool clients_wait() const;
  void compact_ahead();
  void deduplicate();
  void scrub();
  void tell_damages();
  static void on_scrub_damage(void* owner, TargetId target, const ChunkKey& key, const Version& version);
  static std::optional<ChunkKey> on_scrub_compare(void* owner, TargetId target, const ChunkKey& from);
  SmallWork* take_small(Target& target, craq::OpId op);

  // --- transfer.cc: payloads and reads on their way
  Payload* take_payload(uint32_t chunk_offset, uint32_t length);
  void add_reference(Payload* payload) { payload->references++; }
  void release(Payload* payload);
  void set_buffer(Payload* payload, uint8_t* buffer);
  bool take_berth(Payload* payload, const Target& target);
  void lose_berth(Payload* payload);
  void check_some(Payload* payload, uint32_t arrived);
  bool check_payload(Payload* payload);  // checksums against bytes, or computes them
  void list_fetch(Payload* payload);
  void start_fetch(Payload* payload);
  static void on_fetch_buffer(BufferWaiter* waiter, uint8_t* buffer);
  void run_fetches();
  bool copy_some(Payload* payload, uint32_t* budget);
  void end_fetch(Payload* payload, craq::Outcome outcome);
  static void on_payload_buffer(BufferWaiter* waiter, uint8_t* buffer);
  void start_read(Request* request);
  void read_inline(Request* request);
  static void on_read_buffer(BufferWaiter* waiter, uint8_t* buffer);
  static void on_load_buffer(BufferWaiter* waiter, uint8_t* buffer);
  static void on_read_done(engine::StoreOp* op);
  void drop_data(Request* request);
  void drop_read(Request* request);

  // --- lending.cc: reads sent out of the device's memory
  bool lend(Request* request);
  void queue_lent(Request* request);
  void release(Lent* lent);
  int copy_lent(Lent* lent);
  void end_long_loans();
  bool mend_fault(Session& session);
  void stop_lending(int error);
  uint64_t most_lent() const { return config_.pool_bytes / 4; }

  // --- replies.cc: answers to frames
  void reply_read(Request* request, const craq::Reply& reply);
  void reply_update(Request* request, const craq::Reply& reply);
  void reply_exists(Request* request, uint32_t index, const craq::Reply& reply);
  uint64_t count_space(const Target& target, uint64_t space) const;
  void reply_last_chunk(Request* request, const craq::Reply& reply);
  void reply_list_chunks(Request* request, const craq::Reply& reply);
  bool list_next(const Target& target, const ChunkKey& from, wire::ListEntry* entry) const;
  void refuse(Session& session, const net::Frame& frame, int status, wire::Detail detail);
  void send_refusal(Session& session, wire::Type type, uint64_t request_id, int status, wire::Detail detail);
  void refuse_request(Request* request, int status, wire::Detail detail);
  void send_update_refusal(Session& session, uint64_t request_id, int status, uint32_t detail);
  void push_status(Session& session, wire::Type type, uint64_t request_id, int status, wire::Detail detail,
                   uint64_t value = 0);

  // --- regions
  void answer_leaver(const ClientRegion::Waiter& leaver);
  void unuse_region(Session& session, ClientRegion* region);
  static void on_region_settled(void* owner, ClientRegion* region);
  static void on_region_gone(void* owner, ClientRegion* region);
  static void on_peer_connected(void* owner, TargetId target);
  static void on_peer_released(void* owner, uint64_t token);

  ShardConfig config_;
  uint16_t port_ = 0;
  std::string socket_path_;
  std::vector<TargetId> target_ids_;
  std::string host_id_;

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool opened_ = false;  // guarded by mutex_, like the next two
  Failure failure_;
  std::mutex call_mutex_;  // held by who is inside call()
  bool finished_ = false;  // guarded by call_mutex_
  int stop_result_ = 0;    // by the thread, read after it has ended
  bool stopping_ = false;
  bool accepting_ = false;

  std::unique_ptr<io::Io> io_;
  std::unique_ptr<engine::ChunkStore> store_;
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<Regions> regions_;
  std::unique_ptr<Peers> peers_;
  std::vector<std::unique_ptr<RdmaPort>> rdma_ports_;
  uint32_t rdma_polls_ = 0;                // of ports, not yet removed
  uint32_t rdma_work_ = 0;                 // on the helper thread
  net::rdma::ChannelCounters rdma_ended_;  // of channels that are gone
  std::vector<net::rdma::Ended> bulk_ended_;
  Fd tcp_listener_, local_listener_;
  io::Poll tcp_poll_, local_poll_;
  uint32_t listeners_ = 0;        // polls of listeners not yet removed
  uint32_t polls_ = 0;            // of sessions, not yet removed
  uint32_t reads_under_way_ = 0;  // of requests, in the store
  bool accept_again_ = false;

  uint64_t now_ms_ = 0;
  uint64_t now_us_ = 0;
  uint64_t lease_until_ms_ = 0;
  uint64_t last_tick_us_ = 0;
  uint64_t manager_ms_ = 0;        // at the last contact with it
  uint64_t manager_heard_ms_ = 0;  // when that was
  uint64_t routing_epoch_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Target>> targets_;
  Authority authority_{config_.signed_capabilities};
  Spaces spaces_;
  std::unique_ptr<Evictor> evictor_;
  uint64_t evicted_us_ = 0;  // the last step of the evictor
  uint64_t dedup_granted_us_ = 0;
  uint64_t uses_reported_us_ = 0;

  Slab<Session> sessions_;
  Slab<Request> requests_;
  Slab<ManyRead> many_reads_;
  Slab<Payload> payloads_;
  Slab<Lent> lents_;
  uint64_t lent_bytes_ = 0;
  bool lending_ = true;
  Slab<StageWork> stages_;
  Slab<SmallWork> smalls_;
  Slab<LoadWork> loads_;
  Slab<InstallWork> installs_;
  Background background_{config_.sync_share_percent};
  std::unique_ptr<Scrubber> scrubber_;
  struct Damage {
    TargetId target;
    ChunkKey key;
    Version version;
  };
  std::vector<Damage> damages_;     // that the scrubber has found in this pass
  std::vector<TargetId> scrubbed_;  // whom it looks at, anew each tick
  std::vector<Session*> to_read_, reading_, to_flush_, flushing_;
  uint64_t stall_look_us_ = 0;    // connections.cc, end_stalled
  std::vector<Session*> ending_;  // connections.cc, end_sending
  std::vector<Session*> waiting_for_op_;
  std::vector<ManyRead*> many_done_;
  std::vector<uint64_t> released_;
  craq::Effects effects_;
  bool in_event_ = false;
  Spinner spinner_;
  size_t most_ops_ = 0;     // in use at a time, since it was looked at
  uint64_t served_us_ = 0;  // when a client's frame came last
  std::vector<Completion> completions_, completing_;
  Payload* fetch_head_ = nullptr;
  Payload* fetch_tail_ = nullptr;
  std::vector<uint8_t> scratch_;  // variable parts
  std::vector<ChunkKey> used_keys_;
  ShardMetrics metrics_;
};

}  // namespace ffs::server
