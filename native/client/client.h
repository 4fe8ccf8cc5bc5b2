// Client: what the rings of a process share - options, routing, capabilities, channels
// (docs/ring.md). Any thread; never blocks on a server. Rings keep it alive.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "client/capabilities.h"
#include "client/channels.h"
#include "client/routing.h"

namespace ffs::client {

enum class TransportChoice : uint32_t { kAuto = 0, kTcp = 1, kLocal = 2 };

struct ClientOptions {
  TransportChoice transport = TransportChoice::kAuto;
  ClientId client;
  std::array<uint8_t, 16> cluster{};
  uint32_t connect_timeout_ms = 1000;
  uint32_t request_timeout_ms = 30000;
  uint32_t try_timeout_ms = 2000;
  bool checksums = true;
  uint64_t inflight_bytes = 64ull << 20;
  std::string congestion = "cubic";
};

class Client {
 public:
  Client(ClientOptions options, std::string host_id)
      : options_(std::move(options)), host_id_(std::move(host_id)) {}

  const ClientOptions& options() const { return options_; }
  const std::string& host_id() const { return host_id_; }
  CapabilityTable& capabilities() { return capabilities_; }
  ChannelAllocator& channels() { return channels_; }

  // An older epoch than the known one changes nothing.
  void set_routing(std::shared_ptr<const Routing> routing) {
    std::lock_guard lock(mutex_);
    if (routing->epoch < routing_->epoch) return;
    routing_ = std::move(routing);
    routing_generation_.fetch_add(1, std::memory_order_release);
  }
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
};

}  // namespace ffs::client
