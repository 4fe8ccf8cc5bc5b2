#include "client/ring.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ffs/wire.h"

namespace ffs::client {

using wire::Detail;

namespace {

constexpr uint32_t kMaxExistsKeys = wire::kMaxVarBytes / sizeof(wire::ExistsKey);
constexpr uint64_t kForever = ~0ull;
// Docs/ring.md, Retries and Hedged reads.
constexpr uint32_t kLeastRetryBurst = 32;
constexpr uint32_t kRetriesASecond = 20;
constexpr uint32_t kRetryPercent = 15;
constexpr uint32_t kSuccessPercent = 200;
constexpr uint32_t kHedgeBurst = 16;
constexpr uint32_t kMostHedges = 64;

bool moves_data(uint8_t op) {
  return op == FFS_OP_READ || op == FFS_OP_WRITE || op == FFS_OP_REPLACE || op == FFS_OP_CREATE ||
         op == FFS_OP_EXISTS || op == FFS_OP_LIST_CHUNKS;
}

bool is_update(uint8_t op) {
  return op != FFS_OP_READ && op != FFS_OP_EXISTS && op != FFS_OP_LAST_CHUNK && op != FFS_OP_LIST_CHUNKS;
}

}  // namespace

uint64_t now_ns() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

Ring::Ring(std::shared_ptr<Client> client, uint32_t entries, uint32_t inflight)
    : client_(std::move(client)),
      slots_(entries, std::min(entries, kMostHedges)),
      done_(entries),
      inflight_bound_(inflight),
      random_(now_ns() | 1),
      retry_budget_(std::max(entries, kLeastRetryBurst), kRetriesASecond),
      hedge_budget_(kHedgeBurst, 0),
      hedge_memory_(std::min(entries, kMostHedges)),
      waker_(std::make_shared<Waker>()) {
  routing_ = client_->routing(&routing_generation_);
  link_by_endpoint_.assign(routing_->endpoints.size(), nullptr);
  crcs_.resize(kMaxGranules + 1);
  offered_crcs_.resize(kMaxGranules + 1);
}

Result<std::unique_ptr<Ring>> Ring::create(std::shared_ptr<Client> client, uint32_t entries,
                                           uint32_t inflight) {
  if (entries == 0 || (entries & (entries - 1)) != 0 || entries > 65536) {
    return Error::of(EINVAL, "a ring's entries must be a power of two up to 65536");
  }
  if (inflight > entries) return Error::of(EINVAL, "a ring's inflight is at most its entries");
  std::unique_ptr<Ring> ring(new Ring(std::move(client), entries, inflight));
  ring->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!ring->epoll_.valid()) return Error::of(errno, "epoll_create");
  ring->timer_.reset(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!ring->timer_.valid()) return Error::of(errno, "timerfd_create");
  epoll_event event{EPOLLIN, {nullptr}};
  if (::epoll_ctl(ring->epoll_.get(), EPOLL_CTL_ADD, ring->timer_.get(), &event) != 0) {
    return Error::of(errno, "epoll_ctl");
  }
  if (!ring->waker_->valid()) return Error::of(EMFILE, "eventfd");
  event.data.ptr = ring->waker_.get();
  if (::epoll_ctl(ring->epoll_.get(), EPOLL_CTL_ADD, ring->waker_->fd(), &event) != 0) {
    return Error::of(errno, "epoll_ctl");
  }
  ring->client_->add_waker(ring->waker_);
  return ring;
}

Ring::~Ring() {
  FFS_CHECK(outstanding() == 0);
  if (waker_ != nullptr) client_->remove_waker(waker_);
}

// --- taking requests --------------------------------------------------------------------------

// Why an entry can't be a request, or null. Its Iov is marked used (held_) meanwhile.
const char* Ring::fault_of(const ffs_sqe& e) {
  if (e.op < FFS_OP_READ || e.op > FFS_OP_LIST_CHUNKS) return "there is no such op";
  if (client_->capabilities().issue(e.capability) == 0) return "no such capability id";
  if (e.tag_bytes > kMaxTagBytes) return "tag_bytes is over 16";
  if (e.op == FFS_OP_EXISTS) {
    if (e.length == 0 || e.length > kMaxExistsKeys) return "EXISTS takes 1 to 5461 keys";
  } else if (e.op == FFS_OP_LIST_CHUNKS) {
    if (e.length == 0 || e.length > wire::kMaxListEntries) return "LIST_CHUNKS gives 1 to 1024 entries";
  } else if (e.op != FFS_OP_LAST_CHUNK && e.op != FFS_OP_REMOVE && e.op != FFS_OP_TOUCH) {
    if (e.length > kMaxChunkBytes || e.offset > kMaxChunkBytes - e.length) {
      return "offset + length reaches over 16 MiB, the most that a chunk can hold";
    }
    if (moves_data(e.op) && e.length == 0) return "length is 0";
    if ((e.op == FFS_OP_REPLACE || e.op == FFS_OP_CREATE) && e.offset != 0)
      return "the whole content has offset 0";
  }
  if (!moves_data(e.op)) return nullptr;
  auto* iov = reinterpret_cast<Iov*>(e.iov);
  if (iov == nullptr) return "iov is needed for this op";
  if (held_.empty() || held_.back() != iov) {
    if (!IovRegistry::acquire(iov)) return "iov is no Iov that is open";
    held_.push_back(iov);
  }
  if (iov->on_device() && (e.op == FFS_OP_EXISTS || e.op == FFS_OP_LIST_CHUNKS)) {
    return "keys and lists are for the CPU: they can't stand in memory of a device";
  }
  uint64_t bytes = e.length;
  if (e.op == FFS_OP_EXISTS) bytes *= sizeof(wire::ExistsKey);
  if (e.op == FFS_OP_LIST_CHUNKS) bytes *= sizeof(wire::ListEntry);
  if (e.iov_offset > iov->size() || bytes > iov->size() - e.iov_offset)
    return "the slice reaches over the end of its Iov";
  return nullptr;
}

PrepareResult Ring::prepare(const ffs_sqe* entries, uint32_t count) {
  PrepareResult result;
  uint32_t inside = 0;  // entries of the present group that are still to come
  for (uint32_t i = 0; i < count && result.fault == nullptr; i++) {
    result.fault_entry = i;
    if (inside > 0) {
      if (entries[i].group != 0) result.fault = "group must be 0 inside a group";
      inside--;
    } else if (entries[i].group == 0) {
      result.fault = "group must be at least 1 at the start of a group";
    } else if (entries[i].group > slots_.size()) {
      result.fault = "the group has more entries than the ring";
    } else if (entries[i].group > count - i) {
      result.fault = "the group is cut off";
    } else {
      inside = entries[i].group - 1;
    }
    if (result.fault == nullptr) result.fault = fault_of(entries[i]);
  }
  if (result.fault == nullptr) {
    const uint32_t room = slots_.size() - outstanding() - done_count_;
    while (result.taken < count && entries[result.taken].group <= room - result.taken) {
      const uint32_t group = entries[result.taken].group;
      take_group(entries + result.taken, group);
      result.taken += group;
    }
  }
  for (Iov* iov : held_) iov->unuse();
  held_.clear();
  return result;
}

void Ring::take_group(const ffs_sqe* entries, uint32_t count) {
  uint32_t head = kNoSlot, last = kNoSlot;
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t index = slots_.free_list().head;
    slots_.remove(index);
    Slot& slot = slots_[index];
    const uint32_t serial = slot.serial;
    slot = Slot{};
    slot.serial = serial;  // request ids of late replies must not match
    slot.sqe = entries[i];
    slot.update = is_update(entries[i].op);
    slot.state = SlotState::kPrepared;
    if (moves_data(entries[i].op)) {
      slot.iov()->use();
      slot.on_device = slot.iov()->on_device();
    }
    if (head == kNoSlot) head = index;
    if (last != kNoSlot) slots_[last].group_next = index;
    slot.group_head = head;
    last = index;
    slots_.push(prepared_, index);
  }
  slots_[head].group_left = count;
}

uint32_t Ring::submit() {
  const uint32_t submitted = submit_prepared();
  arm_timer();
  return submitted;
}

uint32_t Ring::submit_prepared() {
  now_ns_ = now_ns();
  take_news();
  uint32_t submitted = 0;
  while (!prepared_.empty()) {
    const uint32_t index = prepared_.head;
    slots_.remove(index);
    Slot& slot = slots_[index];
    const uint32_t timeout_ms =
        slot.sqe.timeout_ms != 0 ? slot.sqe.timeout_ms : client_->options().request_timeout_ms;
    slot.deadline_ns = now_ns_ + timeout_ms * 1000000ull;
    note_timer(slot.deadline_ns);
    start(index);
    submitted++;
  }
  stats_.submitted += submitted;
  retry_budget_.earn(submitted, kRetryPercent);
  pump_dirty();
  return submitted;
}

// From no list: to where it belongs, or behind the bound.
void Ring::start(uint32_t index) {
  if (backlog_.empty() && has_room()) return dispatch(index);
  slots_[index].state = SlotState::kBacklog;
  slots_.push(backlog_, index);
}

// The same, for one that was on its way before: ahead of those that weren't.
void Ring::go_on(uint32_t index) {
  if (has_room()) return dispatch(index);
  slots_[index].state = SlotState::kBacklog;
  slots_.push_front(backlog_, index);
}

void Ring::start_backlog() {
  while (!backlog_.empty() && has_room()) {
    const uint32_t index = backlog_.head;
    slots_.remove(index);
    dispatch(index);
  }
}

// --- completing -------------------------------------------------------------------------------

void Ring::finish(uint32_t index, int64_t result, Detail detail, bool outcome_known) {
  Slot& slot = slots_[index];
  FFS_CHECK(slot.list == nullptr && slot.state != SlotState::kFree && slot.state != SlotState::kFinished);
  FFS_CHECK(!slot.is_hedge());
  if (slot.hedge != kNoSlot) drop_hedge(index);
  if (slot.attempt > 1 && result >= 0) {  // whoever waits for the budget may try as well
    retry_budget_.earn(1, kSuccessPercent);
    if (budget_waiters_ > 0) note_timer(now_ns_);
  }
  if (slot.channel.number != 0) {
    const ChainId chain(slot.sqe.chain);
    if (outcome_known) {
      client_->channels().release(chain, slot.channel);
    } else {
      client_->channels().retire(chain, slot.channel, now_ns_ / 1000000);
    }
    slot.channel = {};
  }
  leave_landing(slot);
  if (moves_data(slot.sqe.op)) slot.iov()->unuse();
  slot.serial++;  // whatever still comes for it is late
  slot.state = SlotState::kFinished;
  slot.result = result;
  slot.detail = static_cast<uint32_t>(detail);
  stats_.completed++;
  if (result < 0) stats_.failed++;
  if (result == -EHOSTDOWN) stats_.unavailable++;
  if (result > 0 && slot.sqe.op == FFS_OP_READ) stats_.bytes_read += static_cast<uint64_t>(result);
  if (result > 0 && slot.update) stats_.bytes_written += static_cast<uint64_t>(result);
  Slot& head = slots_[slot.group_head];
  if (--head.group_left == 0) complete_group(slot.group_head);
}

// One completion for a group: bytes up to the first short entry, or the first failure in order.
void Ring::complete_group(uint32_t head) {
  FFS_CHECK(done_count_ < done_.size());
  ffs_cqe& out = done_[(done_first_ + done_count_++) & (slots_.size() - 1)];
  out = ffs_cqe{};
  out.userdata = slots_[head].sqe.userdata;
  int64_t sum = 0;
  int64_t failure = 0;
  uint64_t failed_at = 0;  // the target, of memory of a device
  bool counting = true;
  uint32_t before = head;
  for (uint32_t index = head; index != kNoSlot;) {
    Slot& slot = slots_[index];
    const uint32_t next = slot.group_next;
    // Ranges of two contents.
    if (slot.result >= 0 && (slot.differs_from(slots_[head]) || slot.differs_from(slots_[before]))) {
      slot.result = -EAGAIN;
    }
    before = index;
    if (slot.result < 0) {
      if (failure == 0) {
        failure = slot.result, out.detail = slot.detail, out.chain = slot.sqe.chain;
        failed_at = slot.value;
      }
      out.failed++;
    } else if (counting) {
      sum += slot.result;
      counting = !(slot.sqe.op == FFS_OP_READ && static_cast<uint64_t>(slot.result) < slot.sqe.length);
    }
    out.chunk_length = slot.chunk_length;
    out.value = slot.value;
    std::memcpy(out.key, slot.sqe.key, sizeof out.key);
    std::memcpy(out.tag, slot.sqe.tag, sizeof out.tag);
    out.tag_bytes = slot.sqe.tag_bytes;
    out.codec = slot.sqe.codec;
    slot.state = SlotState::kFree;
    slots_.push_front(slots_.free_list(), index);
    index = next;
  }
  if (out.detail >= FFS_DEVICE_TRANSPORT) out.value = failed_at;
  out.result = failure != 0 ? failure : sum;
}

uint32_t Ring::reap(ffs_cqe* out, uint32_t capacity) {
  const uint32_t count = std::min(capacity, done_count_);
  for (uint32_t i = 0; i < count; i++) {
    out[i] = done_[done_first_];
    done_first_ = (done_first_ + 1) & (slots_.size() - 1);
  }
  done_count_ -= count;
  return count;
}

// --- waiting ----------------------------------------------------------------------------------

uint32_t Ring::wait(ffs_cqe* out, uint32_t capacity, uint32_t min, int64_t timeout_ms, uint32_t* events) {
  for (const auto& link : links_) link->sweep();  // before more is in flight: what only that held goes
  submit_prepared();
  for (const auto& link : links_) {
    if (link->ready() && !link->connection().queue.empty()) mark_dirty(*link);
  }
  const uint64_t until_ns =
      timeout_ms < 0 ? kForever : now_ns_ + static_cast<uint64_t>(timeout_ms) * 1000000ull;
  min = std::min(min, capacity);
  uint32_t stored = reap(out, capacity);
  if (stored < min || min == 0) {
    progress(false, now_ns_);
    stored += reap(out + stored, capacity - stored);
  }
  *events = 0;
  while (stored < min && outstanding() > 0 && events_ == 0) {
    if (now_ns_ >= until_ns) {
      *events |= FFS_WAIT_TIMEOUT;
      break;
    }
    progress(true, until_ns);
    stored += reap(out + stored, capacity - stored);
  }
  *events |= events_;
  events_ = 0;
  arm_timer();
  return stored;
}

// Sends what can be sent, receives what is there, does what is due. With `block`: waits for one of
// these, at most until until_ns.
void Ring::progress(bool block, uint64_t until_ns) {
  take_news();
  pump_dirty();
  Link* only = nullptr;
  uint32_t busy = 0;
  for (const auto& link : links_) {
    if (link->connected() && (link->in_flight.count > 0 || !link->ready())) only = link.get(), busy++;
  }
  // One connection: look at it at once, epoll only if nothing is there.
  bool looked = false;
  if (busy == 1 && only->ready() && !only->wants_write) {
    looked = true;
    const uint32_t before = done_count_;
    receive(*only);
    // What came may be for the caller to do, or may have made something to send: neither waits for a timer.
    const bool came = done_count_ != before || !arrived_.empty() || events_ != 0 || !dirty_.empty();
    if (came || (block && spin(*only, until_ns))) block = false;
  } else if (busy == 0 && !block) {
    now_ns_ = now_ns();
    run_due();
    pump_dirty();
    return;
  }
  int timeout_ms = 0;
  if (block && channels_ > 0 && arm_channels()) {
    block = false;
    for (const auto& link : links_) {
      if (link->rdma() && !link->rdma_broken) receive(*link);
    }
  }
  if (block) {
    now_ns_ = now_ns();
    const uint64_t next_ns = std::min({until_ns, next_timer_ns_, next_hedge_ns_});
    if (next_ns == kForever) {
      timeout_ms = -1;
    } else if (next_ns > now_ns_) {
      timeout_ms = static_cast<int>(std::min<uint64_t>((next_ns - now_ns_ + 999999) / 1000000, 1u << 30));
    }
  }
  if (block || !looked) {
    epoll_event ready[64];
    const int count = ::epoll_wait(epoll_.get(), ready, 64, timeout_ms);
    bool woken = false;
    for (int i = 0; i < count; i++) {
      if (ready[i].data.ptr == nullptr) {
        uint64_t expirations;
        (void)!::read(timer_.get(), &expirations, sizeof expirations);
        armed_ns_ = kForever;
      } else if (ready[i].data.ptr == waker_.get()) {
        woken = true;
      } else if ((ready[i].data.u64 & 1) != 0) {  // watch_channel
        Link& link = *reinterpret_cast<Link*>(ready[i].data.u64 & ~uint64_t{1});
        if (!link.rdma()) continue;
        link.take_rdma_events();
        if (!link.rdma_broken) receive(link);
      } else {
        on_ready(*static_cast<Link*>(ready[i].data.ptr), ready[i].events);
      }
    }
    if (woken) now_ns_ = now_ns(), take_news();
  }
  now_ns_ = now_ns();
  run_due();
  pump_dirty();
  if (arrived_.empty()) return;
  judge_arrived();
  pump_dirty();
}

// Looks for answers for a while, where that pays. True: something came.
bool Ring::spin(Link& link, uint64_t until_ns) {
  if (!link.ready() || link.in_flight.count == 0 || link.in_flight.count >= Spinner::kMostRequests)
    return false;
  now_ns_ = now_ns();
  if (!spinner_.pays(now_ns_)) return false;
  const uint64_t begin_ns = now_ns_;
  const uint64_t end_ns = std::min({begin_ns + Spinner::kMostNs, until_ns, next_timer_ns_, next_hedge_ns_});
  while (now_ns_ < end_ns && spinner_.alone(now_ns_)) {
    const uint64_t before_ns = link.last_receive_ns;
    sum_ahead();
    receive(link);
    if (!link.ready() || link.last_receive_ns != before_ns) {
      spinner_.found();
      return true;
    }
    now_ns_ = now_ns();
  }
  if (now_ns_ >= begin_ns + Spinner::kMostNs) spinner_.missed();
  return false;
}

void Ring::run_due() {
  if (now_ns_ >= next_hedge_ns_) run_hedges();
  if (now_ns_ >= next_timer_ns_) run_timers();
}

// So that fd() turns readable when something is due, or when completions are left.
void Ring::arm_timer() {
  const uint64_t next_ns = std::min(next_timer_ns_, next_hedge_ns_);
  const bool more = done_count_ > 0 || (channels_ > 0 && outstanding() > 0 && arm_channels());
  const uint64_t at_ns = more ? 1 : outstanding() > 0 ? next_ns : kForever;
  const bool expired = armed_ns_ <= now_ns_;   // readable until it is set anew
  if (at_ns >= armed_ns_ && !expired) return;  // an early alarm does no harm
  itimerspec spec{};
  if (at_ns != kForever) {
    spec.it_value.tv_sec = static_cast<time_t>(at_ns / 1000000000);
    spec.it_value.tv_nsec = static_cast<long>(at_ns % 1000000000);
  }
  FFS_CHECK(::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr) == 0);
  armed_ns_ = at_ns;
}

ffs_ring_stats Ring::stats() const {
  ffs_ring_stats out = stats_;
  net::rdma::ChannelCounters sum;
  for (const auto& link : links_) {
    sum.add(link->rdma_counters());
    if (!link->ready()) continue;
    (link->rdma() ? out.rdma_links : link->local() ? out.local_links : out.tcp_links)++;
  }
  out.rdma_doorbells = sum.doorbells;
  out.rdma_sends = sum.sends;
  out.rdma_inline_sends = sum.inline_sends;
  out.rdma_credit_sends = sum.credit_sends;
  out.rdma_completions = sum.completions;
  out.rdma_receives = sum.receives;
  return out;
}

// --- cancelling -------------------------------------------------------------------------------

void Ring::cancel_slot(uint32_t index) {
  Slot& slot = slots_[index];
  if (slot.state == SlotState::kFree || slot.state == SlotState::kFinished) return;
  if (slot.state == SlotState::kQuarantine) {  // it ends when its slice is free, instead of trying again
    if (!slot.ending) slot.ending = true, slot.result = -ECANCELED, slot.last_detail = Detail::kNone;
    return;
  }
  give_up(index, -ECANCELED, Detail::kNone);
}

bool Ring::cancel(uint64_t userdata) {
  now_ns_ = now_ns();
  bool found = false;
  for (uint32_t i = 0; i < slots_.size(); i++) {
    if (slots_[i].state == SlotState::kFree) continue;
    if (slots_[slots_[i].group_head].sqe.userdata != userdata) continue;
    found = true;
  }
  if (!found) return false;
  for (uint32_t i = 0; i < slots_.size(); i++) {
    if (slots_[i].state != SlotState::kFree && slots_[slots_[i].group_head].sqe.userdata == userdata)
      cancel_slot(i);
  }
  pump_dirty();
  arm_timer();
  return true;
}

void Ring::close() {
  now_ns_ = now_ns();
  for (uint32_t i = 0; i < slots_.size(); i++) cancel_slot(i);
  done_count_ = 0;
  while (outstanding() > 0) {
    progress(true, kForever);
    done_count_ = 0;
  }
  for (const auto& link : links_) link->disconnect(&tokens_);
  tokens_.clear();
}

void Ring::abandon() {
  for (uint32_t i = 0; i < slots_.size(); i++) {
    Slot& slot = slots_[i];
    if (slot.state == SlotState::kFree) continue;
    if (slot.state != SlotState::kFinished && moves_data(slot.sqe.op)) slot.iov()->unuse();
    if (slot.list != nullptr) slots_.remove(i);
    slot.state = SlotState::kFree;
    slots_.push(slots_.free_list(), i);
  }
  landing_.abandon();
  waker_.reset();  // the client's lock may be held by a thread that isn't in this process
}

}  // namespace ffs::client
