#include "server/evict.h"

#include <algorithm>
#include <utility>

#include "engine/allocator.h"
#include "server/store_view.h"

namespace ffs::server {

using craq::EvictionAnswer;
using craq::Outcome;

namespace {

// What a chunk of that many bytes takes.
uint64_t allocated(uint32_t length_bytes) {
  return length_bytes == 0 ? 0 : engine::slot_bytes(engine::Allocator::class_for(length_bytes));
}

uint64_t percent_of(uint64_t bytes, uint64_t percent) {
  return bytes / 100 * percent + bytes % 100 * percent / 100;
}

}  // namespace

// --- steps ----------------------------------------------------------------------------------------

void Evictor::step(bool tick) {
  samples_left_ = kSamplesAStep;
  scans_left_ = tick ? kScanAStep : 0;
  look_at_device();
  for (auto& [id, target] : spaces_.targets()) {
    if (!target.leads) continue;
    const uint64_t device = device_need(target);
    for (const auto& held : target.all()) {
      if (scans_left_ > 0) scan(target, *held);
      if (!held->policy.evictable || exhausted(*held)) continue;
      bool waited_for = false;
      const Need wanted = need(target, *held, device, &waited_for);
      if (!wanted.met(*held)) evict(target, *held, wanted, waited_for);
    }
  }
  if (!tick) return;
  // Who waits still is judged again in this tick, and asks anew.
  wanted_bytes_ = 0;
  for (auto& [id, target] : spaces_.targets()) {
    for (const auto& held : target.all()) held->wanted_bytes = 0;
  }
}

// Slots of chunks that are being removed, or were just now, are as good as free.
void Evictor::look_at_device() {
  if (now_us_ - settling_us_ >= kSettleUs / 2) {
    settling_bytes_[1] = now_us_ - settling_us_ >= kSettleUs ? 0 : settling_bytes_[0];
    settling_bytes_[0] = 0;
    settling_us_ = now_us_;
  }
  uint64_t leaving = settling_bytes_[0] + settling_bytes_[1];
  evictable_bytes_ = 0;
  for (const auto& [id, target] : spaces_.targets()) {
    if (!target.leads) continue;
    for (const auto& held : target.all()) {
      leaving += held->leaving_freed_bytes;
      if (!held->policy.evictable || exhausted(*held)) continue;
      evictable_bytes_ += store_.space_use(id, held->policy.space).allocated_bytes;
    }
  }
  const engine::Capacity capacity = store_.capacity();
  const uint64_t reserve = percent_of(capacity.capacity_bytes, reserve_percent_);
  const uint64_t low = reserve + wanted_bytes_;
  const uint64_t high = low + reserve / 4;
  const uint64_t free = capacity.free_bytes + leaving;
  if (free < low) below_reserve_ = true;
  if (free >= high) below_reserve_ = false;
  lacking_bytes_ = below_reserve_ && high > free ? high - free : 0;
  // There may be room, but not for this size: more is freed until slabs can be emptied for it.
  if (wanted_bytes_ > leaving && !store_.room_for(static_cast<uint32_t>(wanted_bytes_))) {
    lacking_bytes_ = std::max(lacking_bytes_, wanted_bytes_ - leaving);
  }
  short_of_room_ = capacity.free_bytes < reserve / 2;
}

// What the target's spaces have to give up for the devices of its chain, all together.
uint64_t Evictor::device_need(const TargetSpaces& target) const {
  uint64_t bytes = 0, own = 0;
  for (const MemberRoom& member : target.members) {
    if (now_us_ - member.said_us < kReportUs) bytes = std::max(bytes, member.lacking_bytes);
  }
  for (const auto& held : target.all()) {
    if (held->policy.evictable && !exhausted(*held)) {
      own += store_.space_use(target.target(), held->policy.space).allocated_bytes;
    }
  }
  if (evictable_bytes_ == 0) return bytes;
  const double share = static_cast<double>(own) / static_cast<double>(evictable_bytes_);
  return std::max(bytes, static_cast<uint64_t>(static_cast<double>(lacking_bytes_) * share));
}

// How many bytes are to leave a space, those that are leaving counted in. `device_need`: of the whole target;
// the space gives its share.
Evictor::Need Evictor::need(TargetSpaces& target, HeldSpace& held, uint64_t device_need, bool* waited_for) {
  const engine::SpaceUse use = store_.space_use(target.target(), held.policy.space);
  if (!use.ready) return {};
  Need wanted;
  if (device_need > 0) {
    uint64_t all = 0;
    for (const auto& other : target.all()) {
      if (other->policy.evictable && !exhausted(*other)) {
        all += store_.space_use(target.target(), other->policy.space).allocated_bytes;
      }
    }
    const double share = all == 0 ? 0 : static_cast<double>(use.allocated_bytes) / static_cast<double>(all);
    // Something at least, or many spaces would each give nothing.
    wanted.freed_bytes =
        held.leaving_freed_bytes +
        std::max<uint64_t>(static_cast<uint64_t>(static_cast<double>(device_need) * share), 1);
    *waited_for = short_of_room_ || wanted_bytes_ > 0;
  }
  const uint64_t quota = held.policy.quota_bytes;
  if (quota == 0) return wanted;
  const uint64_t used = use.allocated_bytes + held.staging_bytes;
  const uint64_t low = percent_of(quota, 98);
  if (used - std::min(used, held.leaving_bytes) > percent_of(quota, 99)) held.above_mark = true;
  if (used - std::min(used, held.leaving_bytes) <= low) held.above_mark = false;
  if (held.above_mark && used > low) wanted.bytes = used - low;
  if (held.wanted_bytes > 0 && used + held.wanted_bytes > quota) {
    wanted.bytes = std::max(wanted.bytes, used + held.wanted_bytes - quota);
  }
  *waited_for |= held.wanted_bytes > 0 || used > quota;
  return wanted;
}

// --- evicting -------------------------------------------------------------------------------------

// Where a device runs short, what lies alone goes first, since the rest frees nothing until the last of a
// slot goes; a quota counts each chunk, and takes any. Chunks share slots also in a space that looks for no
// more equal ones.
bool Evictor::alone_first(const TargetSpaces& target, const HeldSpace& held, const Need& need) const {
  if (held.leaving_bytes < need.bytes || now_us_ < held.only_shared_until_us) return false;
  return store_.space_use(target.target(), held.policy.space).shared_chunks > 0;
}

uint32_t Evictor::feed_alone(HeldSpace& held, std::span<engine::ChunkSample> samples) {
  const auto end = std::remove_if(samples.begin(), samples.end(),
                                  [](const engine::ChunkSample& sample) { return sample.shared; });
  const auto alone = static_cast<size_t>(end - samples.begin());
  const uint32_t may_go = held.alone.feed(samples.first(alone), manager_ms_);
  held.alone_fruitless = may_go > 0 ? 0 : held.alone_fruitless + static_cast<uint32_t>(samples.size());
  if (may_go == 0 &&
      (samples.size() < engine::EvictionPool::kSamples || held.alone_fruitless >= kAllShared)) {
    held.alone_fruitless = 0;
    held.only_shared_until_us = now_us_ + kRetryUs;
  }
  return may_go;
}

void Evictor::evict(TargetSpaces& target, HeldSpace& held, const Need& need, bool waited_for) {
  // Few of a small space at a time: samples must show enough of the chunks that aren't leaving already.
  const uint64_t chunks = store_.space_use(target.target(), held.policy.space).chunks;
  const uint64_t most = std::clamp<uint64_t>(chunks / 16, 1, kInFlight);
  while (!need.met(held) && target.leaving.size() < most && samples_left_ > 0) {
    if (!waited_for && !events_.ahead(events_.owner, 1)) return;
    samples_.resize(engine::EvictionPool::kSamples);
    const uint32_t count = store_.sample(target.target(), held.policy.space, held.pool.next_seed(), samples_);
    samples_left_ -= std::min(samples_left_, engine::EvictionPool::kSamples);
    const auto leaving = [&](const engine::ChunkSample& sample) {
      return std::any_of(target.leaving.begin(), target.leaving.end(),
                         [&](const Leaving& one) { return one.key == sample.key; });
    };
    const auto end = std::remove_if(samples_.begin(), samples_.begin() + count, leaving);
    const auto fresh = static_cast<uint32_t>(end - samples_.begin());
    const bool alone = alone_first(target, held, need);
    if (alone && feed_alone(held, std::span(samples_).first(fresh)) == 0 && held.alone.empty()) continue;
    const uint32_t may_go = alone ? 1 : held.pool.feed(std::span(samples_).first(fresh), manager_ms_);
    if (may_go == 0 && fresh == count) {
      if (count == 0) return;  // what is on its way may go once it is committed
      // A space of which this sample was all, or so many in a row, has nothing that may go.
      held.fruitless += count;
      const bool all_seen = count < engine::EvictionPool::kSamples;
      if (!all_seen && held.fruitless < kFruitless) continue;
      held.fruitless = 0;
      if (held.staging_bytes == 0 && held.leaving_bytes == 0) held.exhausted_until_us = now_us_ + kRetryUs;
      return;
    }
    held.fruitless = 0;
    // One that was used since is out; the next isn't taken in its place before others have been looked at, or
    // the pool would be emptied down to those that are to stay.
    engine::Victim victim;
    if (!(alone ? held.alone : held.pool).take(&victim)) continue;
    const EvictionAnswer answer = order(target, held, victim);
    if (answer == EvictionAnswer::busy || answer == EvictionAnswer::not_head) return;
  }
}

EvictionAnswer Evictor::order(TargetSpaces& target, HeldSpace& held, const engine::Victim& victim) {
  craq::EvictionOrder order;
  order.key = victim.key;
  order.version = victim.version;
  order.last_access = access_token(victim.access);
  order.expired = victim.expired;
  // The removal may end within this very call (a chain of one member): it is listed first.
  const uint32_t freed = victim.shared ? 0 : victim.allocated_bytes;
  target.leaving.push_back({victim.key, victim.allocated_bytes, freed, victim.access.last, victim.expired});
  held.leaving_bytes += victim.allocated_bytes;
  held.leaving_freed_bytes += freed;
  const EvictionAnswer answer = events_.order(events_.owner, target.target(), order);
  if (answer != EvictionAnswer::ordered) {
    target.leaving.pop_back();
    held.leaving_bytes -= victim.allocated_bytes;
    held.leaving_freed_bytes -= freed;
  }
  return answer;
}

void Evictor::evicted(TargetSpaces& target, const ChunkKey& key, Outcome outcome) {
  const auto at = std::find_if(target.leaving.begin(), target.leaving.end(),
                               [&](const Leaving& leaving) { return leaving.key == key; });
  if (at == target.leaving.end()) return;  // of a policy that was taken back, and given again
  const Leaving gone = *at;
  target.leaving.erase(at);
  HeldSpace* held = target.find(key.space());
  if (held != nullptr) {
    held->leaving_bytes -= std::min<uint64_t>(held->leaving_bytes, gone.allocated_bytes);
    held->leaving_freed_bytes -= std::min<uint64_t>(held->leaving_freed_bytes, gone.freed_bytes);
  }
  if (outcome != Outcome::ok) return;
  made_room_ = true;
  settling_bytes_[0] += gone.freed_bytes;
  if (held == nullptr) return;
  if (gone.expired) {
    held->expired_chunks++;
    return;
  }
  held->evicted_chunks++;
  held->evicted_bytes += gone.allocated_bytes;
  const uint32_t now = store_.stamp_of(manager_ms_);
  if (gone.last_use == 0 || gone.last_use > now) return;
  held->history.fit(store_.space_use(target.target(), key.space()).chunks);
  held->history.remember(key, gone.last_use, now);
  // Other members' devices have got as much room as this one.
  for (MemberRoom& member : target.members) {
    member.lacking_bytes -= std::min<uint64_t>(member.lacking_bytes, gone.allocated_bytes);
  }
}

void Evictor::committed(TargetSpaces& target, const ChunkKey& key) {
  HeldSpace* held = target.find(key.space());
  if (held == nullptr) return;
  engine::ChunkInfo info;
  if (!store_.lookup(target.target(), key, &info) || info.version.none()) return;
  held->expires |= info.attributes.expiry_ms != 0;
  if ((info.attributes.flags & engine::kFlagPinned) == 0) held->exhausted_until_us = 0;  // this one may go
  const engine::Access access = store_.access(target.target(), key);
  if (!target.leads || !held->policy.evictable || access.previous != 0 || access.last == 0) return;
  const uint32_t before = held->history.recall(key, access.last);
  if (before != 0) store_.used_before(target.target(), key, before);
}

// --- expiry ---------------------------------------------------------------------------------------

void Evictor::scan(TargetSpaces& target, HeldSpace& held) {
  if (!held.scanning) {
    if (!held.expires && held.policy.ttl_ms == 0) return;
    if (held.scan_started_us != 0 && now_us_ - held.scan_started_us < kScanRestUs) return;
    held.scanning = true;
    held.seen_expiry = false;
    held.scan_started_us = now_us_;
    held.scan_from = ChunkKey::of(held.policy.space, {});
  }
  engine::ChunkInfo info;
  for (; scans_left_ > 0; scans_left_--) {
    const bool found = store_.first_at_or_after(target.target(), held.scan_from, &info) &&
                       info.key.space() == held.policy.space;
    if (!found) break;
    const uint64_t expiry_ms = info.attributes.expiry_ms;
    held.seen_expiry |= expiry_ms != 0;
    if (expiry_ms != 0 && expiry_ms <= manager_ms_) {
      if (target.leaving.size() >= kInFlight) return;  // it is met again when there is room for its removal
      engine::Victim victim;
      victim.key = info.key;
      victim.version = info.version;
      victim.expired = true;
      const EvictionAnswer answer = order(target, held, victim);
      if (answer == EvictionAnswer::busy || answer == EvictionAnswer::not_head) return;
    }
    held.scan_from = info.key;
    if (!key_successor(&held.scan_from)) break;
  }
  if (scans_left_ == 0) return;
  held.scanning = false;
  held.expires = held.seen_expiry;
}

// --- admission ------------------------------------------------------------------------------------

Outcome Evictor::refuse(Outcome outcome, bool waits) {
  refused_waits_ = waits;
  return outcome;
}

Outcome Evictor::admit(TargetSpaces* target, const ChunkKey& key, uint32_t length_bytes,
                       uint64_t unseen_bytes) {
  const uint64_t bytes = allocated(length_bytes);
  HeldSpace* held = target != nullptr ? target->find(key.space()) : nullptr;
  const uint64_t quota = held != nullptr ? held->policy.quota_bytes : 0;
  if (quota != 0) {
    const engine::SpaceUse use = store_.space_use(target->target(), key.space());
    // A slot is less than twice as long as what it holds.
    const uint64_t used = use.allocated_bytes + held->staging_bytes + 2 * unseen_bytes;
    if (used + bytes > quota) {
      // What is on its way is counted twice for moments: whether there is room shows when it has landed.
      if (!held->policy.evictable && use.allocated_bytes + bytes <= quota) {
        return refuse(Outcome::over_quota, true);
      }
      held->wanted_bytes = std::max(held->wanted_bytes, bytes);
      return refuse(Outcome::over_quota, held->policy.evictable && bytes <= quota && !exhausted(*held));
    }
  }
  bool room = store_.room_for(length_bytes) && store_.capacity().free_bytes >= 2 * unseen_bytes + bytes;
  if (held != nullptr && held->policy.evictable) {
    room = room && !short_of_room_;
    for (const MemberRoom& member : target->members) {
      room = room && !(member.short_of_room && now_us_ - member.said_us < kReportUs);
    }
  }
  if (room) return Outcome::ok;
  wanted_bytes_ = std::max(wanted_bytes_, bytes);
  return refuse(Outcome::no_space, evictable_bytes_ > 0 || more_goes());
}

// Whoever removes a lot does it chunk by chunk, and chain by chain (docs/metadata.md, Removal and
// collection): where a chunk was removed just now, room is on its way. Waited for as long as that goes on,
// but not for very long.
bool Evictor::more_goes() {
  constexpr uint64_t kMoreComesUs = 1'000'000, kLongestUs = 5'000'000;
  if (removed_us_ == 0 || now_us_ - removed_us_ >= kMoreComesUs) {
    refused_since_us_ = 0;
    return false;
  }
  if (refused_since_us_ == 0) refused_since_us_ = now_us_;
  return now_us_ - refused_since_us_ < kLongestUs;
}

bool Evictor::holds_evictable(const TargetSpaces& target) const {
  return std::any_of(target.all().begin(), target.all().end(), [&](const auto& held) {
    return held->policy.evictable && !exhausted(*held) &&
           store_.space_use(target.target(), held->policy.space).chunks > 0;
  });
}

// The chain's own chunks of evictable spaces, or those of other chains, whose heads evict for the same
// devices. What is on this device stands for what is on the others: a space lies on many chains. Only for
// puts into evictable spaces, and where this device is as full: others would wait in vain for a device
// without blocks.
bool Evictor::will_make_room(TargetSpaces* target, uint64_t space, bool block, uint32_t length_bytes) {
  if (more_goes()) return true;
  if (target == nullptr || !target->leads) return false;
  bool any = holds_evictable(*target);
  const HeldSpace* held = target->find(space);
  const bool into_evictable = held != nullptr ? held->policy.evictable : block;
  const bool others =
      into_evictable || lacking_bytes_ > 0 || short_of_room_ || !store_.room_for(length_bytes);
  if (!any && others) {
    any = std::any_of(spaces_.targets().begin(), spaces_.targets().end(),
                      [&](const auto& entry) { return holds_evictable(entry.second); });
  }
  // Nothing says yet which member it was: until they report, as if one lacked some of these.
  constexpr uint64_t kSome = 4;
  if (any) member_lacks(*target, TargetId{}, kSome * allocated(length_bytes), false);
  return any;
}

void Evictor::staging(TargetSpaces* target, const ChunkKey& key, uint32_t length_bytes) {
  if (HeldSpace* held = target != nullptr ? target->find(key.space()) : nullptr; held != nullptr) {
    held->staging_bytes += allocated(length_bytes);
  }
}

void Evictor::stored(TargetSpaces* target, const ChunkKey& key, uint32_t length_bytes) {
  if (HeldSpace* held = target != nullptr ? target->find(key.space()) : nullptr; held != nullptr) {
    held->staging_bytes -= std::min(held->staging_bytes, allocated(length_bytes));
  }
}

void Evictor::member_lacks(TargetSpaces& target, TargetId member, uint64_t bytes, bool short_of_room) {
  auto at = std::find_if(target.members.begin(), target.members.end(),
                         [&](const MemberRoom& known) { return known.member == member; });
  if (at == target.members.end()) at = target.members.insert(at, MemberRoom{member});
  *at = MemberRoom{member, bytes, short_of_room, now_us_};
}

}  // namespace ffs::server
