// Targets that come, change and leave: routing to events of the replicas, replicas to reports.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>

#include "server/log.h"
#include "server/shard.h"
#include "server/store_view.h"

namespace ffs::server {

namespace {

// The members that updates go through: they stand first (craq/replica.h, ChainConfig).
uint32_t serving_members(const craq::ChainConfig& config) {
  uint32_t count = 0;
  while (count < config.member_count && config.members[count].state == craq::MemberState::serving) count++;
  return count;
}

}  // namespace

uint32_t members_behind(const craq::ChainConfig& config, TargetId id) {
  const uint32_t serving = serving_members(config);
  for (uint32_t i = 0; i < serving; i++) {
    if (config.members[i].target != id) continue;
    // Nothing comes down to the head: there is no pool and no lane for that. What a member that was before it
    // still sends in an older version is received like the next one's, and changes nothing.
    return std::min(serving - 1 - i, serving >= 2 ? serving - 2 : 0);
  }
  return 0;
}

// --- routing --------------------------------------------------------------------------------------

void Shard::configure(const Routing& routing) {
  (void)call([this, &routing] { apply(routing); });
}

void Shard::apply(const Routing& routing) {
  if (routing.manager_ms > manager_ms_) {
    manager_ms_ = routing.manager_ms;
    manager_heard_ms_ = now_ms_;
    evictor_->set_time(now_us_, manager_time());
    // Not with the next tick only: a block that was stamped without a time, or with an old one, would count
    // as the longest unused, or its next use as no second one.
    store_->set_manager_time(manager_time());
  }
  routing_epoch_ = std::max(routing_epoch_, routing.epoch);
  std::unordered_map<uint64_t, const Route*> places;
  for (const Route& route : routing.targets) places[route.target.value] = &route;
  std::unordered_map<uint64_t, Route> neighbours;
  uint32_t longest = 1;
  for (const ChainRoute& chain : routing.chains) {
    for (uint32_t i = 0; i < chain.config.member_count; i++) {
      if (!store_->has_target(chain.config.members[i].target)) continue;
      longest = std::max(longest, chain.config.member_count);
      for (uint32_t k = 0; k < chain.config.member_count; k++) {
        auto place = places.find(chain.config.members[k].target.value);
        if (k != i && place != places.end()) neighbours[place->first] = *place->second;
      }
    }
  }
  std::vector<Route> routes;
  for (auto& [id, route] : neighbours) routes.push_back(route);
  const Status grown = buffers_->grow_to_members(longest);
  if (!grown.ok()) {
    log(LogLevel::kError, "shard %u: no memory for chains of %u members: %s", config_.number, longest,
        grown.error().what != nullptr ? grown.error().what : std::strerror(grown.error().code));
    return;
  }
  peers_->set_routes(routes, longest, now_ms_);

  for (const ChainRoute& chain : routing.chains) {
    for (uint32_t i = 0; i < chain.config.member_count; i++) {
      const TargetId id = chain.config.members[i].target;
      if (store_->has_target(id)) apply(chain, id);
    }
    // Who isn't named any more learns that as well, and stops.
    for (auto& [id, target] : targets_) {
      bool named = false;
      for (uint32_t i = 0; i < chain.config.member_count; i++) {
        named = named || chain.config.members[i].target == target->id;
      }
      if (target->chain == chain.chain && !named) apply(chain, target->id);
    }
  }
}

// Hands one configuration of its chain to one target of this shard.
void Shard::apply(const ChainRoute& chain, TargetId id) {
  Target* target = take_target(id, chain.chain);
  if (target == nullptr) return;
  if (!chain.proposed) {
    if (chain.config.version < target->recorded.version) return;
    target->recorded = chain.config;
    target->peer_use = use_by_distance(members_behind(chain.config, id));
  }
  event(*target, [&](craq::Replica& replica) {
    if (chain.proposed) {
      replica.on_proposed(chain.config, now_ms_, effects_);
    } else {
      replica.on_recorded(chain.config, now_ms_, effects_);
    }
  });
}

// The target in that chain, made if it was in none. Null: it belongs to another, or is on its way out.
Target* Shard::take_target(TargetId id, ChainId chain) {
  auto& target = targets_[id.value];
  if (target != nullptr && target->leaving) return nullptr;  // named again when it is out
  if (target != nullptr && target->chain != chain) {
    log(LogLevel::kError, "target %llu belongs to chain %u and is named in chain %u: ignored",
        static_cast<unsigned long long>(id.value), target->chain.value, chain.value);
    return nullptr;
  }
  if (target != nullptr) return target.get();
  craq::Options options;
  options.peer_lease_ms = config_.failure_timeout_ms / 5;
  options.suspect_ms = config_.failure_timeout_ms;
  options.incarnation = config_.incarnation;
  target = std::make_unique<Target>();
  target->id = id;
  target->chain = chain;
  target->shard = this;
  target->spaces = spaces_.take(id, chain);
  target->view = std::make_unique<EngineView>(*store_, id, chain, *evictor_, target->spaces);
  target->replica = std::make_unique<craq::Replica>(id, chain, *target->view, options, now_ms_);
  account_spaces();
  give_lease(*target);
  return target.get();
}

// --- leases ---------------------------------------------------------------------------------------

void Shard::lease(uint64_t until_ms) {
  (void)call([this, until_ms] {
    lease_until_ms_ = std::max(lease_until_ms_, until_ms);
    for (auto& [id, target] : targets_) {
      if (!target->leaving) give_lease(*target);
    }
  });
}

void Shard::give_lease(Target& target) {
  if (lease_until_ms_ == 0) return;
  event(target, [&](craq::Replica& replica) { replica.on_lease(lease_until_ms_, now_ms_, effects_); });
}

// --- leaving --------------------------------------------------------------------------------------

bool Shard::release_target(TargetId id) {
  if (std::find(target_ids_.begin(), target_ids_.end(), id) == target_ids_.end()) return false;
  (void)call([this, id] { begin_leaving(id); });
  return true;
}

// Its replica hears nothing from now on; what it has started ends first (go_on_leaving).
void Shard::begin_leaving(TargetId id) {
  auto& target = targets_[id.value];
  if (target != nullptr && target->leaving) return;
  if (target == nullptr) {  // in no chain since the start
    if (store_->chain_state(id).empty()) {
      targets_.erase(id.value);
      return;  // nor before: there is nothing to drop
    }
    craq::ChainRecord record;
    target = std::make_unique<Target>();
    target->id = id;
    target->shard = this;
    (void)decode_chain_record(store_->chain_state(id), &target->chain, &record);
  }
  log(LogLevel::kInfo, "target %llu leaves chain %u and drops its content",
      static_cast<unsigned long long>(id.value), target->chain.value);
  target->leaving = true;
  scrubber_->forget(id);
  if (target->spaces != nullptr) target->spaces->leads = false;
  end_waiting(*target);
  go_on_leaving(*target);
}

// What waits for buffers would wait for those that the replica itself holds until it is gone.
void Shard::end_waiting(Target& target) {
  for (uint32_t slot = 0; slot < payloads_.size(); slot++) {
    Payload* payload = payloads_.at(slot);
    if (payload->references == 0 || payload->target != &target || !payload->waiter.waiting) continue;
    buffers_->cancel(&payload->waiter);
    end_fetch(payload, craq::Outcome::dropped);
  }
  for (uint32_t slot = 0; slot < loads_.size(); slot++) {
    LoadWork* work = loads_.at(slot);
    if (work->owner_target != &target || !work->waiter.waiting) continue;
    buffers_->cancel(&work->waiter);
    end_load(work, craq::Outcome::absent);
  }
}

// Once nothing of the replica is under way: drops it, then all that the store has of the target.
void Shard::go_on_leaving(Target& target) {
  if (target.under_way > 0) return;
  abandon(target);
  SmallWork* work = take_small(target, 0);
  work->done = on_left;
  store_->release_target(target.id, work);
}

void Shard::on_left(engine::StoreOp* op) {
  SmallWork* work = static_cast<SmallWork*>(op);
  Shard* self = work->shard;
  const TargetId id = work->target->id;
  self->smalls_.give(work);
  if (op->error != 0) {
    // The device is poisoned; it goes on reporting its chain, and is released after the restart.
    log(LogLevel::kError, "target %llu: dropping its content failed: %s (errno %d)",
        static_cast<unsigned long long>(id.value), op->what != nullptr ? op->what : "", op->error);
    return;
  }
  self->targets_.erase(id.value);
  self->signal_news();
}

// Gives back what a replica holds: requests that wait in it are answered, payloads released.
void Shard::abandon(Target& target) {
  target.replica.reset();
  target.view.reset();
  spaces_.drop(target.id);
  target.spaces = nullptr;
  for (uint32_t slot = 0; slot < requests_.size(); slot++) {
    Request* request = requests_.at(slot);
    if (request->session == nullptr || request->target != &target) continue;
    refuse_request(request, EAGAIN, wire::Detail::kWrongTarget);
  }
  for (uint32_t slot = 0; slot < payloads_.size(); slot++) {
    Payload* payload = payloads_.at(slot);
    if (payload->references == 0 || payload->holder != &target) continue;
    payload->holder = nullptr;
    release(payload);
  }
}

// --- reports --------------------------------------------------------------------------------------

std::vector<TargetReport> Shard::report() {
  std::vector<TargetReport> reports;
  (void)call([this, &reports] {
    for (const TargetId id : target_ids_) reports.push_back(report_of(id));
  });
  return reports;
}

TargetReport Shard::report_of(TargetId id) const {
  TargetReport report;
  report.target = id;
  report.poisoned = store_->metrics().poisoned;
  report.scrubbed_bytes = scrubber_->scrubbed_bytes(id);
  report.usage = store_->usage(id);
  report.capacity = store_->capacity();
  report.status.reason = craq::Reason::no_configuration;
  (void)decode_chain_record(store_->chain_state(id), &report.chain, &report.status.persisted);
  if (auto found = targets_.find(id.value); found != targets_.end()) {
    const Target& target = *found->second;
    report.chain = target.chain;
    if (target.replica != nullptr) report.status = target.replica->status();
    if (target.leaving) {
      report.status.serving = false;
      report.status.reason = craq::Reason::not_a_member;
    }
    report.persisted_here = target.persisted_here || report.status.persisted_here;
  }
  report.recorded = report.status.chain_version;
  report.persisted = std::max(report.status.persisted.proposed, report.status.persisted.adopted);
  return report;
}

// Wakes whoever sends reports to the manager: at once when a state changes or a version is durable...
void Shard::signal_news() {
  if (config_.news_fd < 0) return;
  const uint64_t one = 1;
  const ssize_t written = ::write(config_.news_fd, &one, sizeof one);
  FFS_CHECK(written == sizeof one || errno == EAGAIN);  // full: it is readable as it is
}

// ... and within a tick for what comes without an effect.
void Shard::look_for_news(Target& target) {
  const craq::ReplicaStatus now = target.replica->status();
  const craq::ReplicaStatus& before = target.told;
  if (now.sync_done == before.sync_done && now.sync_target == before.sync_target &&
      now.suspect == before.suspect && now.sync_failure == before.sync_failure && now.state == before.state) {
    return;
  }
  target.told = now;
  signal_news();
}

}  // namespace ffs::server
