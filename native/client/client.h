// Client: what the rings of a process share - options, routing, capabilities, channels
// (docs/ring.md). Any thread; never blocks on a server. Rings keep it alive.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "client/capabilities.h"
#include "client/channels.h"
#include "client/routing.h"

namespace ffs::client {

enum class TransportChoice : uint32_t { kAuto = 0, kTcp = 1, kLocal = 2, kRdma = 3 };

struct ClientOptions {
  TransportChoice transport = TransportChoice::kAuto;
  ClientId client;
  std::array<uint8_t, 16> cluster{};
  uint32_t connect_timeout_ms = 1000;
  uint32_t request_timeout_ms = 30000;
  uint32_t try_timeout_ms = 2000;
  bool checksums = true;
  uint64_t inflight_bytes = 64ull << 20;
  uint32_t unavailable_timeout_ms = 3000;
  uint32_t hedge_percent = 5;   // 0: none
  uint32_t hedge_after_ms = 0;  // 0: adaptive
  std::string congestion = "cubic?";
  std::string rdma;                // devices (net/rdma/adapter.h); empty: all there are; "off": none
  uint8_t rdma_traffic_class = 0;  // of what goes out over RDMA
};

// Through which a ring that waits is woken when there is something new for it to know.
class Waker {
 public:
  // An eventfd of the ring's epoll; not valid: the system has no more.
  Waker();
  int fd() const { return fd_.get(); }
  bool valid() const { return fd_.valid(); }
  bool rung() const { return rung_.load(std::memory_order_relaxed); }
  void ring();   // any thread
  void quiet();  // the ring's thread: look for news after this

 private:
  Fd fd_;
  std::mutex mutex_;  // so that the flag and the descriptor say the same
  std::atomic<bool> rung_{false};
};

class Client {
 public:
  Client(ClientOptions options, std::string host_id)
      : options_(std::move(options)), host_id_(std::move(host_id)) {}

  const ClientOptions& options() const { return options_; }
  const std::string& host_id() const { return host_id_; }
  CapabilityTable& capabilities() { return capabilities_; }
  ChannelAllocator& channels() { return channels_; }

  // An older epoch than the known one changes nothing. Wakes rings that wait.
  void set_routing(std::shared_ptr<const Routing> routing);
  // Wakes rings that wait, so that they see a renewed capability.
  void wake();
  void add_waker(std::shared_ptr<Waker> waker);
  void remove_waker(const std::shared_ptr<Waker>& waker);
  // When a request first needed the chain since routing says that it is down; now, if it's the first.
  uint64_t first_needed_ns(ChainId chain, uint64_t now_ns);
  // Grows with each set_routing.
  uint64_t routing_generation() const { return routing_generation_.load(std::memory_order_acquire); }
  std::shared_ptr<const Routing> routing(uint64_t* generation) const {
    std::lock_guard lock(mutex_);
    *generation = routing_generation_.load(std::memory_order_relaxed);
    return routing_;
  }

 private:
  ClientOptions options_;
  std::string host_id_;
  CapabilityTable capabilities_;
  ChannelAllocator channels_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Routing> routing_ = std::make_shared<Routing>();
  std::atomic<uint64_t> routing_generation_{1};
  std::unordered_map<ChainId, uint64_t> needed_ns_;  // chains that are down
  std::vector<std::shared_ptr<Waker>> wakers_;
};

}  // namespace ffs::client
