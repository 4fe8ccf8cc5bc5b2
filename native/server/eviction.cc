// Spaces with a quota or a time to live, in the shard: policies in, use out, the evictor's steps, and the
// reports between the servers of a chain that evictions go by (docs/craq.md, Eviction).
#include <algorithm>
#include <cstring>

#include "server/evict.h"
#include "server/log.h"
#include "server/shard.h"
#include "server/spaces.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::EvictionAnswer;
using wire::Type;

namespace {

constexpr uint64_t kReportUs = 1'000'000;
constexpr uint64_t kHurriedReportUs = 100'000;  // while the device lacks room
constexpr uint64_t kStepUs = 1'000;             // between steps of the evictor that aren't a tick's

}  // namespace

// --- policies and use -----------------------------------------------------------------------------

void Shard::set_spaces(const std::vector<SpacePolicy>& policies) {
  (void)call([this, &policies] {
    spaces_.set(policies);
    account_spaces();
  });
}

// Names the spaces to the store, which counts what it holds of them.
void Shard::account_spaces() {
  for (auto& [id, target] : spaces_.targets()) {
    store_->dedup_spaces(id, target.dedup_ids());
    if (!target.ids_changed()) continue;
    store_->account_spaces(id, target.ids());
  }
}

// Equal chunks are compared at a rate of its own, a quarter of it while clients are served; the pieces take
// their turns with what else is in the background.
void Shard::deduplicate() {
  const uint64_t elapsed_us = std::min<uint64_t>(now_us_ - dedup_granted_us_, 1'000'000);
  if (stopping_ || config_.dedup_bytes_per_s == 0 || !store_->dedup_has_work()) {
    dedup_granted_us_ = now_us_;
    return;
  }
  const uint64_t rate = config_.dedup_bytes_per_s / (background_.clients_active(now_us_) ? 4 : 1);
  const uint64_t bytes = rate * elapsed_us / 1'000'000;
  if (bytes == 0) return;  // too little time: it isn't lost
  dedup_granted_us_ = now_us_;
  store_->dedup(static_cast<uint32_t>(std::min<uint64_t>(bytes, UINT32_MAX)));
}

std::vector<SpaceUse> Shard::space_use() {
  std::vector<SpaceUse> all;
  (void)call([this, &all] {
    for (const auto& [id, target] : spaces_.targets()) {
      for (const auto& held : target.all()) {
        const engine::SpaceUse stored = store_->space_use(id, held->policy.space);
        SpaceUse use;
        use.target = id;
        use.space = held->policy.space;
        use.chunks = stored.chunks;
        use.bytes = stored.allocated_bytes;
        use.ready = stored.ready;
        use.shared_chunks = stored.shared_chunks;
        use.saved_bytes = stored.saved_bytes;
        use.evicted_chunks = held->evicted_chunks;
        use.evicted_bytes = held->evicted_bytes;
        use.expired_chunks = held->expired_chunks;
        use.hits = held->hits;
        all.push_back(use);
      }
    }
  });
  return all;
}

// --- time -----------------------------------------------------------------------------------------

// The manager's time now, by this machine's clock since the last contact: times to live go on without it.
uint64_t Shard::manager_time() const {
  return manager_ms_ == 0 ? 0 : manager_ms_ + (now_ms_ - manager_heard_ms_);
}

// The expiry of a client's update: its own, or by its space's time to live, whichever comes first. (Clients
// give blocks an expiry as long as the policy may not have come here, and may know of an older time to live.)
uint64_t Shard::expiry_of(const Target& target, const wire::Update& update) const {
  ChunkKey key = key_of(update.key);
  const HeldSpace* held = target.spaces != nullptr ? target.spaces->find(key.space()) : nullptr;
  const uint64_t now_ms = manager_time();
  if (held == nullptr || held->policy.ttl_ms == 0 || now_ms == 0) return update.expiry_ms;
  const uint64_t by_space = now_ms + held->policy.ttl_ms;
  return update.expiry_ms == 0 ? by_space : std::min(update.expiry_ms, by_space);
}

// --- evicting -------------------------------------------------------------------------------------

void Shard::evict(bool tick) {
  if (!tick && (now_us_ - evicted_us_ < kStepUs || !evictor_->made_room())) return;
  evicted_us_ = now_us_;
  for (auto& [id, target] : targets_) {
    if (target->spaces == nullptr || target->leaving) continue;
    const craq::ReplicaStatus status = target->replica->status();
    target->spaces->leads = status.serving && status.my_index == 0;
  }
  evictor_->step(tick);
  if (!tick) run_waiting();
}

// Room was made: puts that wait for it are judged again, as each tick does.
void Shard::run_waiting() {
  for (auto& [id, target] : targets_) {
    if (target->leaving || target->spaces == nullptr || !target->spaces->leads) continue;
    if (target->replica->status().waiting == 0) continue;
    event(*target, [&](craq::Replica& replica) { replica.on_tick(now_ms_, effects_); });
  }
}

EvictionAnswer Shard::on_evict_order(void* owner, TargetId id, const craq::EvictionOrder& order) {
  Shard* self = static_cast<Shard*>(owner);
  const auto found = self->targets_.find(id.value);
  if (found == self->targets_.end() || found->second->leaving) return EvictionAnswer::not_head;
  EvictionAnswer answer{};
  self->event(*found->second, [&](craq::Replica& replica) {
    answer = replica.on_evict(order, self->now_ms_, self->effects_);
  });
  return answer;
}

bool Shard::on_evict_ahead(void* owner, uint32_t removals) {
  constexpr uint32_t kRemovalBytes = 4096;  // about a block of the journal
  Shard* self = static_cast<Shard*>(owner);
  return self->background_.take(io::OpClass::eviction, removals * kRemovalBytes, self->now_us_);
}

// --- reports to the head --------------------------------------------------------------------------

// Each second what clients have used here, so that the head doesn't take it for unused; and what the device
// lacks, at once and ten times a second while it does.
void Shard::report_uses() {
  const bool lacking = evictor_->lacking_bytes() > 0 || evictor_->short_of_room();
  if (now_us_ - uses_reported_us_ < (lacking ? kHurriedReportUs : kReportUs)) return;
  uses_reported_us_ = now_us_;
  uint64_t sharers = 0;
  for (const auto& [id, target] : targets_) sharers += target->spaces != nullptr ? 1 : 0;
  for (auto& [id, target] : targets_) {
    if (target->leaving || target->spaces == nullptr || target->spaces->leads) continue;
    if (target->spaces->all().empty()) continue;
    if (target->touches.count() == 0 && !lacking && !target->told_lacking) continue;
    const craq::ReplicaStatus status = target->replica->status();
    const TargetId head = target->recorded.members[0].target;
    if (!status.serving || head == target->id || !peers_->takes(head, wire::kFeatureUsed)) continue;
    net::SendQueue* queue = peers_->lane(head, kLaneFree);
    if (queue == nullptr) continue;
    scratch_.clear();
    target->touches.drain(
        [&](const ChunkKey& key) { scratch_.insert(scratch_.end(), key.bytes.begin(), key.bytes.end()); });
    wire::Used used{};
    used.context.target = head.value;
    used.context.chain = target->chain.value;
    used.context.chain_term = status.chain_version.term;
    used.context.chain_counter = status.chain_version.counter;
    used.from = target->id.value;
    used.lacking_bytes = evictor_->lacking_bytes() / std::max<uint64_t>(sharers, 1);
    used.count = static_cast<uint32_t>(scratch_.size() / sizeof(ChunkKey::bytes));
    used.flags = evictor_->short_of_room() ? static_cast<uint32_t>(wire::kUsedShortOfRoom) : 0;
    target->told_lacking = lacking;
    queue->push(Type::kUsed, 0, used, scratch_);
  }
}

void Shard::on_used(Session& session, const net::Frame& frame) {
  const auto used = frame.as<wire::Used>();
  if (!used_keys(used, frame.var, &used_keys_)) {
    metrics_.frame_errors++;
    close_session(session, "a report of uses contradicts itself");
    return;
  }
  Target* target = find_target(used.context);
  if (target == nullptr || target->spaces == nullptr) return;
  const craq::ChainConfig& chain = target->recorded;
  const ChainVersion version{used.context.chain_term, used.context.chain_counter};
  const auto end = chain.members.begin() + chain.member_count;
  const bool member = std::any_of(chain.members.begin(), end, [&](const craq::Member& other) {
    return other.target.value == used.from && other.target != target->id;
  });
  if (!member || version != chain.version) return;
  const uint32_t stamp = store_->stamp_of(manager_time());
  for (const ChunkKey& key : used_keys_) {
    const HeldSpace* held = target->spaces->find(key.space());
    if (held != nullptr && held->policy.evictable) store_->touch(target->id, key, stamp);
  }
  evictor_->member_lacks(*target->spaces, TargetId(used.from), used.lacking_bytes,
                         (used.flags & wire::kUsedShortOfRoom) != 0);
}

}  // namespace ffs::server
