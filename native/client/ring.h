// Ring: requests in, completions out (docs/ring.md). All work happens in the calling thread:
// submit sends what can be sent, wait receives; there is no thread inside. One thread at a time
// may be inside; the caller (capi/client.cc) sees to that. Nothing is allocated for a request once
// the buffers have grown to their working size.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/spin.h"
#include "client/budget.h"
#include "client/client.h"
#include "client/latency.h"
#include "client/link.h"
#include "client/slot.h"

namespace ffs::client {

struct PrepareResult {
  uint32_t taken = 0;
  const char* fault = nullptr;  // why an entry can't be taken; then nothing was
  uint32_t fault_entry = 0;
};

uint64_t now_ns();  // CLOCK_MONOTONIC
// Whether any serving replica will do.
bool chooses_replica(const Slot& slot);

class Ring {
 public:
  // inflight: entries that may be at servers at a time, 0: all.
  static Result<std::unique_ptr<Ring>> create(std::shared_ptr<Client> client, uint32_t entries,
                                              uint32_t inflight = 0);
  ~Ring();

  PrepareResult prepare(const ffs_sqe* entries, uint32_t count);
  uint32_t submit();
  // ffs.h, ffs_ring_wait.
  uint32_t wait(ffs_cqe* out, uint32_t capacity, uint32_t min, int64_t timeout_ms, uint32_t* events);
  // False: no such request.
  bool cancel(uint64_t userdata);
  // Cancels everything and waits until no server can touch a buffer of it.
  void close();
  // In a child of fork: frees, without a word to any server (the sockets are the parent's too).
  void abandon();

  int fd() const { return epoll_.get(); }
  ffs_ring_stats stats() const;

 private:
  Ring(std::shared_ptr<Client> client, uint32_t entries, uint32_t inflight);

  // ring.cc: taking requests, completing them, waiting
  const char* fault_of(const ffs_sqe& entry);
  void take_group(const ffs_sqe* entries, uint32_t count);
  uint32_t submit_prepared();
  uint32_t reap(ffs_cqe* out, uint32_t capacity);
  bool has_room() const { return inflight_bound_ == 0 || at_servers_ < inflight_bound_; }
  void start(uint32_t index);
  void go_on(uint32_t index);
  void start_backlog();
  uint32_t outstanding() const { return slots_.size() - slots_.free_count(); }
  void progress(bool block, uint64_t until_ns);
  bool spin(Link& link, uint64_t until_ns);
  void note_timer(uint64_t at_ns) { next_timer_ns_ = at_ns < next_timer_ns_ ? at_ns : next_timer_ns_; }
  void arm_timer();
  void run_due();
  void cancel_slot(uint32_t index);
  void finish(uint32_t index, int64_t result, wire::Detail detail, bool outcome_known);
  void complete_group(uint32_t head);

  // ring_routing.cc: new routing, chains that are down
  void take_news();
  void adopt_routing();
  bool fits_routing(const Slot& slot);
  void leave_old_places();
  void watch_chain(Slot& slot, const Chain& chain);
  void watch_chains();
  void expire(uint32_t index);

  // ring_hedge.cc: reads that a second replica is asked for
  void arm_hedge(Slot& slot, const Chain& chain);
  void run_hedges();
  const Member* second_replica(Slot& slot);
  void leave(uint32_t index);
  void hedge(uint32_t index);
  void end_hedge(uint32_t second, const TryOutcome& outcome);
  bool win_by_hedge(uint32_t second);
  void release_hedge(uint32_t second);
  void drop_hedge(uint32_t index);
  void note_latency(Link& link, const Slot& slot);

  // ring_dispatch.cc: where requests go, what happens when a try ends
  void dispatch(uint32_t index);
  const Member* choose_replica(const Chain& chain, Slot& slot);
  uint64_t cost_of(const Member& member);
  bool is_well(const Member& member);
  Link* link_of(const Member& member);
  const Chain* chain_of(const Slot& slot);
  void enqueue(uint32_t index, Link& link, TargetId target);
  void detach(uint32_t index);
  void park(uint32_t index, uint64_t after_ms, bool for_routing, bool for_capability);
  uint64_t jittered_ns(uint64_t after_ms);
  bool may_resume(Slot& slot, bool routing_changed);
  bool pays_for_retry(Slot& slot);
  bool is_waited_for(Slot& slot);
  void note_damage(Slot& slot, TargetId target, const TryOutcome& outcome);
  void note_members(Slot& slot, const TryOutcome& outcome, Situation* situation);
  void end_try(uint32_t index, const TryOutcome& outcome);
  void act(uint32_t index, const TryOutcome& outcome);
  bool slice_is_free(uint32_t index, bool answered);
  void quarantine(uint32_t index, bool ending, int64_t result, const TryOutcome& outcome);
  void give_up(uint32_t index, int64_t result, wire::Detail detail);
  void run_timers();
  void check_link_timers(Link& link);
  void check_try_timers(Link& link);
  void check_parked();
  void check_backlog();
  void check_quarantine();
  void resume_parked(bool routing_changed);

  // ring_send.cc: links and requests on them
  void mark_dirty(Link& link);
  void pump_dirty();
  void pump(Link& link);
  void fail_link(Link& link, const TryOutcome& outcome);
  void watch(Link& link);
  void want_write(Link& link, bool on);
  bool send_request(Link& link, uint32_t index);
  wire::Context context_of(const Slot& slot, uint32_t handle, const Chain* chain);
  void push_read(Link& link, uint32_t index, uint32_t handle, const Chain* chain);
  void push_update(Link& link, uint32_t index, const wire::Context& context);
  void report_damage(Link& link, uint32_t index);
  void sum_ahead();
  uint32_t sum_payload(uint32_t index);
  void push_exists(Link& link, uint32_t index, const wire::Context& context);
  void push_last_chunk(Link& link, uint32_t index, const wire::Context& context);
  void push_list_chunks(Link& link, uint32_t index, const wire::Context& context);
  void release_tokens();
  void rdma_broke(Link& link);
  void watch_channel(Link& link);
  bool arm_channels();

  bool lands(Link& link, const Slot& slot);
  bool finds_place(Link& link, Slot& slot);
  void leave_landing(Slot& slot);
  void wake_waiting_links();

  // ring_receive.cc: replies
  void on_ready(Link& link, uint32_t events);
  void receive(Link& link);
  void receive_beside(Link& link);
  bool drain_reader(Link& link);
  bool on_frame(Link& link, const net::Frame& frame);
  bool on_read_reply(Link& link, const net::Frame& frame, uint32_t index);
  bool on_read_many_reply(Link& link, const net::Frame& frame);
  bool frees_quarantined(uint32_t index);
  bool on_update_reply(const net::Frame& frame, uint32_t index);
  void end_update(uint32_t index);
  bool on_exists_reply(const net::Frame& frame, uint32_t index);
  bool on_last_chunk_reply(const net::Frame& frame, uint32_t index);
  bool on_list_chunks_reply(const net::Frame& frame, uint32_t index);
  void on_payload(Link& link);
  uint32_t slot_of(uint64_t request_id);
  void note_epoch(uint64_t routing_epoch);

  // ring_device.cc: memory that only RDMA reaches
  bool refuses_device(Link& link, uint32_t index);
  void fail_device(uint32_t index, uint32_t fault, int code);

  // ring_verify.cc: what a read's answer has to pass
  void check_arriving(Link& link, const Slot& slot, uint64_t arrived);
  void finish_read(Link& link, uint32_t index);
  void note_arrival(Link& link, uint32_t index);
  void judge_arrived();
  void note_landed(Slot& slot, uint64_t bytes);
  void judge(Link& link, uint32_t index, const wire::ReadReply& reply, bool sound);
  void deliver(uint32_t index, const wire::ReadReply& reply);

  std::shared_ptr<Client> client_;
  SlotTable slots_;
  SlotList prepared_;
  SlotList backlog_;
  SlotList parked_;
  SlotList quarantine_;
  std::vector<ffs_cqe> done_;  // a ring of slots_.size()
  uint32_t done_first_ = 0;
  uint32_t done_count_ = 0;
  uint32_t events_ = 0;
  uint32_t inflight_bound_;  // entries at servers; 0: none
  uint32_t at_servers_ = 0;  // in links' queues and in flight; second tries don't count

  // Reads whose data is there, in this pass.
  struct Arrived {
    uint32_t index, first_crc, crc_count;
    Link* link;
    wire::ReadReply reply;
  };
  std::vector<Arrived> arrived_;
  std::vector<uint32_t> arrived_crcs_;

  Landing landing_;
  Link* lands_next_ = nullptr;  // its first read found no room there: nobody else takes any before it

  std::shared_ptr<const Routing> routing_;
  uint64_t routing_generation_ = 0;
  uint64_t hinted_epoch_ = 0;            // the newest that a reply spoke of
  std::vector<Link*> link_by_endpoint_;  // of routing_
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Link*> dirty_;
  uint32_t channels_ = 0;              // links over RDMA
  const Chain* last_chain_ = nullptr;  // of routing_, that chain_of was asked for
  uint32_t turn_ = 0;                  // breaks ties between replicas
  uint64_t random_;

  Latencies latencies_;
  Budget retry_budget_;
  uint32_t budget_waiters_ = 0;
  Budget hedge_budget_;
  uint64_t hedge_bytes_ = 0;                        // of the second tries under way
  std::vector<std::vector<uint8_t>> hedge_memory_;  // of each spare slot

  std::shared_ptr<Waker> waker_;
  Spinner spinner_;
  Fd epoll_;
  Fd timer_;
  uint64_t now_ns_ = 0;  // when this call last looked
  uint64_t next_timer_ns_ = ~0ull;
  uint64_t next_hedge_ns_ = ~0ull;
  uint64_t armed_ns_ = ~0ull;

  std::vector<uint64_t> tokens_;  // of payloads that were sent
  std::vector<uint32_t> crcs_;
  uint32_t summing_ = kNoSlot;          // the create that was offered last
  std::vector<uint32_t> offered_crcs_;  // of its bytes, as far as they are computed (Slot::summed)
  std::vector<uint32_t> moving_;        // slots of a failed link
  std::vector<Iov*> held_;              // Iovs marked used while entries are checked
  ffs_ring_stats stats_{};
};

}  // namespace ffs::client
