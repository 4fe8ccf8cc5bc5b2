#include "server/server.h"

#include <sys/eventfd.h>

namespace ffs::server {

Server::Server(const ShardConfig& base) : news_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), base_(base) {
  base_.news_fd = news_.get();
}

Server::~Server() {
  (void)stop();
}

Shard* Server::add_device(const std::string& path, const DeviceOptions& options, Failure* failure) {
  std::lock_guard lock(mutex_);
  if (started_ || stopped_) {
    *failure = {EINVAL, "devices are added before the server starts"};
    return nullptr;
  }
  ShardConfig config = base_;
  config.number = static_cast<uint32_t>(shards_.size());
  config.device_path = path;
  config.write_cache = options.write_cache;
  config.discard = options.discard;
  config.null_data = options.null_data;
  auto shard = Shard::open(config, failure);
  if (shard == nullptr) return nullptr;
  for (const TargetId id : shard->targets()) {
    for (const auto& other : shards_) {
      for (const TargetId known : other->targets()) {
        if (known != id) continue;
        *failure = {EEXIST,
                    "target " + std::to_string(id.value) + " is on another device of this server already"};
        return nullptr;
      }
    }
  }
  shards_.push_back(std::move(shard));
  return shards_.back().get();
}

int Server::start() {
  std::lock_guard lock(mutex_);
  if (stopped_ || shards_.empty()) return EINVAL;
  if (started_) return EALREADY;
  started_ = true;
  for (auto& shard : shards_) shard->start();
  return 0;
}

void Server::configure(const Routing& routing) {
  std::lock_guard lock(mutex_);
  for (auto& shard : shards_) shard->configure(routing);
}

std::vector<TargetReport> Server::report() {
  std::lock_guard lock(mutex_);
  std::vector<TargetReport> all;
  for (auto& shard : shards_) {
    auto some = shard->report();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

bool Server::metrics(uint32_t shard, ShardMetrics* out) {
  std::lock_guard lock(mutex_);
  if (shard >= shards_.size()) return false;
  *out = shards_[shard]->metrics();
  return true;
}

int Server::fence(ClientId client) {
  std::lock_guard lock(mutex_);
  int first = 0;
  for (auto& shard : shards_) {
    const int result = shard->fence(client);
    if (first == 0) first = result;
  }
  return first;
}

void Server::lease(uint64_t until_ms) {
  std::lock_guard lock(mutex_);
  for (auto& shard : shards_) shard->lease(until_ms);
}

void Server::set_keys(const std::vector<SigningKey>& keys) {
  std::lock_guard lock(mutex_);
  for (auto& shard : shards_) shard->set_keys(keys);
}

void Server::set_spaces(const std::vector<SpacePolicy>& policies) {
  std::lock_guard lock(mutex_);
  for (auto& shard : shards_) shard->set_spaces(policies);
}

std::vector<SpaceUse> Server::space_use() {
  std::lock_guard lock(mutex_);
  std::vector<SpaceUse> all;
  for (auto& shard : shards_) {
    auto some = shard->space_use();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

int Server::release_target(TargetId target) {
  std::lock_guard lock(mutex_);
  for (auto& shard : shards_) {
    if (shard->release_target(target)) return 0;
  }
  return ENOENT;
}

int Server::stop() {
  std::lock_guard lock(mutex_);
  if (stopped_) return 0;
  stopped_ = true;
  int first = 0;
  for (auto& shard : shards_) {
    const int result = shard->stop();
    if (first == 0) first = result;
  }
  return first;
}

}  // namespace ffs::server
