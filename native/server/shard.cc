#include "server/shard.h"

#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "base/threads.h"
#include "server/log.h"
#include "server/store_view.h"

namespace ffs::server {

namespace {

constexpr uint64_t kTickUs = 20000;
constexpr uint64_t kUnusedWorthALine = 64ull << 20;
constexpr uint64_t kLongStepUs = 1000;
// Of recovery, while clients are served: in a pass and to one server.
constexpr size_t kGentleSendBytes = 256u << 10;
// Since a client's last frame: whoever works with one request at a time has asked again by then.
constexpr uint64_t kMostUsBetween = 1000;
constexpr uint64_t kShutDownUs = 10u * 1000000;

// The clock of deadlines and resends: it goes on while the machine sleeps (docs/craq.md, Leases).
uint64_t clock_us() {
  timespec now;
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

}  // namespace

// --- life ---------------------------------------------------------------------------------------

std::unique_ptr<Shard> Shard::open(const ShardConfig& config, Failure* failure) {
  std::unique_ptr<Shard> shard(new Shard(config));
  auto thread = start_thread([raw = shard.get()] { raw->main(); });
  if (!thread.ok()) {
    *failure = {thread.error().code, std::string("shard: ") + thread.error().what};
    return nullptr;
  }
  shard->thread_ = std::move(*thread);
  {
    std::unique_lock lock(shard->mutex_);
    shard->changed_.wait(lock, [&] { return shard->opened_ || shard->failure_.code != 0; });
    if (shard->failure_.code == 0) return shard;
    *failure = shard->failure_;
  }
  shard->thread_.join();
  return nullptr;
}

Shard::~Shard() {
  if (thread_.joinable()) (void)stop();
}

void Shard::main() {
  char name[16];
  std::snprintf(name, sizeof name, "ffs-shard-%u", config_.number);
  ::pthread_setname_np(::pthread_self(), name);
  read_clock();
  const Status opened = open_all();
  {
    std::lock_guard lock(mutex_);
    if (opened.ok()) {
      opened_ = true;
    } else {
      failure_.code = opened.error().code;
      if (failure_.line.empty()) failure_.line = opened.error().what != nullptr ? opened.error().what : "";
    }
    changed_.notify_all();
  }
  if (!opened.ok()) {
    scrubber_.reset();
    store_.reset();
    buffers_.reset();
    return;
  }
  while (!stopping_) pass();
  shut_down();
}

Status Shard::open_all() {
  FFS_TRY(host_id_, net::host_id());
  io::Options options;
  options.backend = config_.null_data ? io::Backend::null : config_.backend;
  FFS_TRY(io_, io::Io::create(options));
  engine::OpenOptions open_options;
  open_options.write_cache = config_.write_cache;
  open_options.discard = config_.discard;
  open_options.null_data = config_.null_data;
  std::memcpy(open_options.cluster.data(), config_.cluster.data(), open_options.cluster.size());
  auto store = engine::ChunkStore::open(*io_, config_.device_path, open_options);
  if (!store.ok()) {
    failure_.line = engine::ChunkStore::last_open_message();
    return store.error();
  }
  store_ = std::move(*store);
  tell_choices();
  io_->set_gate(this);
  target_ids_ = store_->identity().targets;
  FFS_TRY(buffers_, Buffers::create(*io_, config_.pool_bytes));
  regions_ =
      std::make_unique<Regions>(*io_, config_.region_limit_bytes, this, on_region_settled, on_region_gone);
  evictor_ = std::make_unique<Evictor>(*store_, spaces_, config_.evict_reserve_percent,
                                       Evictor::Events{this, on_evict_order, on_evict_ahead});
  scrubber_ = std::make_unique<Scrubber>(*store_, config_.scrub_bytes_per_s,
                                         Scrubber::Events{this, on_scrub_damage, on_scrub_compare});
  Peers::Identity identity;
  identity.cluster = config_.cluster;
  identity.node = config_.node;
  identity.incarnation = config_.incarnation;
  identity.host_id = host_id_;
  identity.congestion = config_.tcp_congestion;
  identity.proves = config_.peers_prove;
  identity.key = config_.peer_key;
  peers_ = std::make_unique<Peers>(*io_, identity, Peers::Events{this, on_peer_connected, on_peer_released},
                                   2 * config_.failure_timeout_ms);

  auto tcp = net::listen_tcp(config_.bind_host.c_str(), config_.port, config_.tcp_congestion.c_str());
  if (!tcp.ok()) {
    failure_.line = std::string(tcp.error().what) + " on " + config_.bind_host + ":" +
                    std::to_string(config_.port) + ": " + std::strerror(tcp.error().code);
    return tcp.error();
  }
  tcp_listener_ = std::move(*tcp);
  FFS_TRY(port_, net::bound_port(tcp_listener_));
  if (!config_.socket_dir.empty()) {
    socket_path_ = config_.socket_dir + "/shard-" + std::to_string(config_.node.value) + "-" +
                   std::to_string(config_.number) + ".sock";
    auto local = net::listen_local(socket_path_.c_str());
    if (!local.ok()) {
      failure_.line =
          std::string(local.error().what) + " " + socket_path_ + ": " + std::strerror(local.error().code);
      return local.error();
    }
    local_listener_ = std::move(*local);
  }
  open_rdma();
  return ok_status();
}

// What was chosen for this device, and why.
void Shard::tell_choices() const {
  const char* path = config_.device_path.c_str();
  if (config_.null_data) log(LogLevel::kWarning, "device %s: a null device: it keeps no data", path);
  const std::string& reason = io_->fallback_reason();
  if (!reason.empty()) {
    log(LogLevel::kWarning, "device %s: I/O by pread/pwrite threads: %s", path, reason.c_str());
  } else {
    log(LogLevel::kInfo, "device %s: I/O by %s (%s)", path, io::backend_name(io_->backend()),
        config_.backend == io::Backend::pread ? "as configured" : "io_uring works here");
  }
  const engine::CacheMode cache = store_->cache_mode();
  log(cache.overruled || !cache.flushes ? LogLevel::kWarning : LogLevel::kInfo,
      "device %s: write cache %s (%s)", path,
      cache.flushes ? "volatile: flushed before acknowledging" : "protected: no flush", cache.why);
  if (const uint64_t unused = store_->unused_bytes(); unused >= kUnusedWorthALine) {
    log(LogLevel::kWarning,
        "device %s: %llu bytes more than the store uses: ffs device grow takes them in, offline", path,
        static_cast<unsigned long long>(unused));
  }
}

// --- passes ---------------------------------------------------------------------------------------

// Leases are judged by this clock: it is read after an event has arrived and before a replica is given
// it (docs/craq.md, Leases). A process that was stopped in between must not judge by an older reading.
void Shard::read_clock() {
  now_us_ = clock_us();
  now_ms_ = now_us_ / 1000;
  if (evictor_ != nullptr) evictor_->set_time(now_us_, manager_time());
}

void Shard::io_pass() {
  const bool ops_free = !waiting_for_op_.empty() && ops_used() < config_.max_ops;
  const bool busy = !to_read_.empty() || !completions_.empty() || !many_done_.empty() || !to_flush_.empty() ||
                    fetch_head_ != nullptr || ops_free || buffers_->can_serve() || peers_->must_flush();
  const uint64_t wait_us = io_->background_waits() ? background_.wait_us(now_us_) : kTickUs;
  if (busy || wait_us == 0 || !spin())
    io_->run_once(busy ? 0 : static_cast<int64_t>(std::min(wait_us, kTickUs)));
  read_clock();
}

// Looks for what comes next instead of sleeping, right after a client was served. True: something was run.
bool Shard::spin() {
  // Of a burst that has just ended more will come, which others have to work for.
  const size_t most_ops = std::exchange(most_ops_, ops_used());
  if (most_ops >= Spinner::kMostRequests || ops_used() >= Spinner::kMostRequests) return false;
  if (io_->background_waits()) return false;
  const uint64_t begin_ns = Spinner::now_ns();
  if (now_us_ - served_us_ > kMostUsBetween || !spinner_.pays(begin_ns)) return false;
  uint64_t now_ns = begin_ns;
  while (now_ns < begin_ns + Spinner::kMostNs && spinner_.alone(now_ns)) {
    if (io_->run_once(0) > 0) {
      spinner_.found();
      return true;
    }
    now_ns = Spinner::now_ns();
  }
  if (now_ns >= begin_ns + Spinner::kMostNs) spinner_.missed();
  return false;
}

void Shard::pass() {
  io_pass();
  const uint64_t started_us = now_us_;
  run_completions();
  if (!damages_.empty()) tell_damages();
  buffers_->serve_waiters();
  wake_waiting_sessions();
  read_sessions();
  run_fetches();
  read_clock();
  run_completions();
  if (!stopping_) evict(/*tick=*/false);
  if (now_us_ - last_tick_us_ >= kTickUs) tick();
  flush_sessions();
  peers_->flush(background_.clients_active(now_us_) ? kGentleSendBytes : SIZE_MAX);
  measure(started_us);
}

void Shard::measure(uint64_t started_us) {
  const uint64_t took = clock_us() - started_us;
  if (took > kLongStepUs) metrics_.long_steps++;
  if (took > metrics_.longest_step_us) metrics_.longest_step_us = took;
}

void Shard::tick() {
  last_tick_us_ = now_us_;
  store_->tick(now_us_, manager_time());
  if (!stopping_) evict(/*tick=*/true);
  const engine::StoreMetrics moved = store_->metrics();
  background_.observe(moved.bytes_read + moved.bytes_written, now_us_);
  for (auto& [id, target] : targets_) {
    if (target->leaving) continue;
    event(*target, [&](craq::Replica& replica) { replica.on_tick(now_ms_, effects_); });
    look_for_news(*target);
  }
  if (!stopping_) report_uses();
  if (!stopping_) scrub();
  compact_ahead();
  deduplicate();
  end_long_loans();
  end_sending();
  end_stalled();
  buffers_->pin_used();
  peers_->tick(now_ms_);
  if (accept_again_) accept_all();
}

// --- control --------------------------------------------------------------------------------------

struct Shard::Call {
  io::Op op;
  std::function<void()>* body = nullptr;
};

// Runs `body` on the shard's thread and waits for it. False: the shard has stopped.
bool Shard::call(const std::function<void()>& body) {
  std::lock_guard one_at_a_time(call_mutex_);
  if (finished_) return false;
  std::mutex mutex;
  std::condition_variable done;
  bool ran = false;
  std::function<void()> wrapped = [&] {
    read_clock();
    body();
    std::lock_guard lock(mutex);
    ran = true;
    done.notify_one();
  };
  Call request;
  request.body = &wrapped;
  request.op.result = 0;
  request.op.done = [](io::Op* op) { (*reinterpret_cast<Call*>(op)->body)(); };
  io_->post(&request.op);
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return ran; });
  return true;
}

void Shard::start() {
  (void)call([this] {
    if (accepting_) return;
    accepting_ = true;
    tcp_poll_.ready = on_accept;
    tcp_poll_.owner = this;
    listeners_ = 1;
    io_->poll_add(&tcp_poll_, tcp_listener_.get(), POLLIN);
    if (local_listener_.valid()) {
      local_poll_.ready = on_accept;
      local_poll_.owner = this;
      listeners_ = 2;
      io_->poll_add(&local_poll_, local_listener_.get(), POLLIN);
    }
    accept_again_ = true;  // somebody may have knocked before the poll
  });
}

ShardMetrics Shard::metrics() {
  ShardMetrics out;
  (void)call([this, &out] {
    out = metrics_;
    const engine::StoreMetrics store = store_->metrics();
    out.flushes = store.flushes;
    out.journal_bytes = store.journal_bytes;
    out.longest_step_us = std::max(out.longest_step_us, store.longest_step_us);
    out.sessions = sessions_.used();
    out.regions = regions_->count();
    out.region_bytes = regions_->bytes();
    out.pool_bytes = buffers_->total_bytes();
    out.pool_used_bytes = out.pool_bytes - buffers_->free_bytes();
    out.memory_lent_bytes = lent_bytes_;
    out.ops_waiting = buffers_->waiting() + waiting_for_op_.size() + store.waiting;
    for (size_t i = 0; i < io::kOpClasses; i++) {
      out.background_bytes[i] = background_.bytes(static_cast<io::OpClass>(i));
    }
    out.background_held_us = background_.held_us();
    out.background_rate = background_.rate_bytes_per_s();
    out.slow_reads = background_.felt_reads();
    out.longest_read_us = background_.longest_read_us();
    out.scrubbed_bytes = scrubber_->scrubbed_bytes();
    rdma_metrics(&out);
    out.store = store;
    out.capacity = store_->capacity();
  });
  return out;
}

int Shard::fence(ClientId client) {
  struct Fence : engine::StoreOp {
    std::mutex mutex;
    std::condition_variable done_changed;
    bool over = false;
  } fence;
  fence.done = [](engine::StoreOp* op) {
    auto* self = static_cast<Fence*>(op);
    std::lock_guard lock(self->mutex);
    self->over = true;
    self->done_changed.notify_one();
  };
  if (!call([&] { store_->fence(client, &fence); })) return ESHUTDOWN;
  std::unique_lock lock(fence.mutex);
  fence.done_changed.wait(lock, [&] { return fence.over; });
  return fence.error;
}

int Shard::stop() {
  if (!thread_.joinable()) return 0;
  (void)call([this] { stopping_ = true; });
  {
    std::lock_guard lock(call_mutex_);  // nobody is inside call(), and nobody comes any more
    finished_ = true;
  }
  thread_.join();
  return stop_result_;
}

// --- the end ----------------------------------------------------------------------------------------

void Shard::shut_down() {
  io_->set_gate(nullptr);  // what waits for it goes now
  buffers_->stop_pinning();
  peers_->close();
  for (io::Poll* poll : {&tcp_poll_, &local_poll_}) {
    if (poll->ready != nullptr && !poll->removed) io_->poll_remove(poll);
  }
  for (const auto& port : rdma_ports_) {
    if (!port->poll.removed) io_->poll_remove(&port->poll);
  }
  for (uint32_t slot = 0; slot < sessions_.size(); slot++) {
    Session* session = sessions_.at(slot);
    if (session->open) close_session(*session, "the server stops");
  }
  auto store_busy = [this] {
    return stages_.used() + smalls_.used() + loads_.used() + installs_.used() > loads_waiting() ||
           reads_under_way_ > 0 || !store_->idle() || !scrubber_->idle();
  };
  auto busy = [&] {
    return store_busy() || polls_ > 0 || !peers_->drained() || listeners_ > 0 || buffers_->pinning() ||
           rdma_work_ > 0 || rdma_polls_ > 0 || !ending_.empty();
  };
  const uint64_t give_up_us = clock_us() + kShutDownUs;
  while (busy() && now_us_ < give_up_us) pass();
  if (busy()) {
    // Memory that the kernel may still write can't be freed: it goes with the process.
    log(LogLevel::kError,
        "shard %u: operations don't end (stages %zu, small %zu, loads %zu, reads %u, store idle %d, polls "
        "%u, "
        "lanes %d, listeners %u): the device is left to recovery",
        config_.number, stages_.used(), smalls_.used(), loads_.used(), reads_under_way_,
        store_->idle() ? 1 : 0, polls_, peers_->drained() ? 0 : 1, listeners_);
    stop_result_ = EBUSY;
    (void)scrubber_.release();
    (void)store_.release();
    for (auto& port : rdma_ports_) (void)port.release();
    (void)buffers_.release();
    (void)regions_.release();
    (void)peers_.release();
    (void)io_.release();
    return;
  }
  run_many();
  // What waits for the rest of its chain has nobody to answer any more.
  for (auto& [id, target] : targets_) target->replica.reset();
  abandon_all();
  while (!regions_->empty() && now_us_ < give_up_us) io_pass();
  scrubber_.reset();
  const Status closed = store_->close();
  if (!closed.ok()) stop_result_ = closed.error().code;
  store_.reset();
  targets_.clear();
  rdma_ports_.clear();  // what is registered, before its memory
  buffers_.reset();
  if (regions_->empty())
    regions_.reset();
  else
    (void)regions_.release();
  peers_.reset();
  io_.reset();
  if (!socket_path_.empty()) ::unlink(socket_path_.c_str());
}

// After the replicas are gone: gives back what their requests and updates held.
void Shard::abandon_all() {
  for (uint32_t slot = 0; slot < requests_.size(); slot++) {
    Request* request = requests_.at(slot);
    if (request->session != nullptr) give_request(request);
  }
  for (uint32_t slot = 0; slot < payloads_.size(); slot++) {
    Payload* payload = payloads_.at(slot);
    if (payload->references == 0) continue;
    buffers_->cancel(&payload->waiter);
    payload->references = 1;
    release(payload);
  }
  for (uint32_t slot = 0; slot < loads_.size(); slot++) {
    LoadWork* work = loads_.at(slot);
    if (!work->waiter.waiting) continue;
    buffers_->cancel(&work->waiter);
    loads_.give(work);  // its payload is given back already
  }
  fetch_head_ = fetch_tail_ = nullptr;
}

}  // namespace ffs::server
