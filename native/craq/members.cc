// What the manager proposes and records: who is a member, what is made durable and when, and in which
// phase that leaves this one. docs/craq.md, Members. How it goes on from adoption: restart.cc.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

// ---- A configuration --------------------------------------------------------------------------

uint32_t path_of(const ChainConfig& config) {
  uint32_t count = 0;
  while (count < config.member_count && config.members[count].state == MemberState::serving) count++;
  return count;
}

uint32_t index_of(const ChainConfig& config, TargetId target) {
  uint32_t index = 0;
  while (index < config.member_count && config.members[index].target != target) index++;
  return index;
}

bool serves(const ChainConfig& config, TargetId target) {
  return index_of(config, target) < path_of(config);
}

bool syncs(const ChainConfig& config, TargetId target) {
  const uint32_t i = index_of(config, target);
  return i < config.member_count && config.members[i].state == MemberState::syncing;
}

TargetId Replica::Machine::syncing_member() const {
  if (path_count_ >= config_.member_count) return TargetId{};
  const Member& behind = config_.members[path_count_];
  return behind.state == MemberState::syncing ? behind.target : TargetId{};
}

// ---- Proposed, recorded, made durable -----------------------------------------------------------

// A target that restarted may be told what its last incarnation was meant to take part in.
bool Replica::Machine::meant_for_us(const ChainConfig& config) const {
  if (!serves(config, self_) && !syncs(config, self_)) return true;
  const uint64_t named = config.members[index_of(config, self_)].incarnation;
  return options_.incarnation == 0 || named == options_.incarnation;
}

void Replica::Machine::proposed(const ChainConfig& config) {
  const ChainVersion decided = std::max({config_.version, next_config_.version, start_floor_});
  if (poisoned() || config.version <= decided || !meant_for_us(config)) return;
  if (config.version < std::max(record_.proposed, proposal_.version)) return;
  if (config.version == proposal_.version) {
    const bool durable = !proposal_waits_ && persists_ == 0;
    if (durable) out_->push_back(ProposalPersisted{config.version});
    return;
  }
  // What is durable here tells the manager which versions this target has been a part of: one that has no
  // part in the chain keeps no proposal that leaves it out.
  const bool takes_part = serves(next_config_, self_);
  if (!takes_part && !serves(config, self_) && !syncs(config, self_)) return;
  proposal_ = config;
  proposal_waits_ = true;
  sync_source_.promotion_over();
  const bool left_out = takes_part && !serves(config, self_);
  if (left_out && !is(Mutant::keep_serving_when_left_out)) stand_down();
  persist_proposal();
}

// The chain may go on without this member as soon as this proposal is durable here.
void Replica::Machine::stand_down() {
  recorded_waits_ = false;
  if (phase_ != Phase::offline && phase_ != Phase::failed) go_offline(Reason::left_out);
}

// Once it is durable here, the chain may go on without those that it leaves out: not before the leases
// are over that they may hold from this member, in this incarnation or the last one. Tried at each tick.
void Replica::Machine::persist_proposal() {
  if (!proposal_waits_ || now_ms_ < start_hold_until_ms_ || poisoned() || !may_promote(proposal_)) return;
  if (granted_outside(proposal_) && !is(Mutant::persist_without_waiting_for_leases)) return;
  proposal_waits_ = false;
  record_.proposed = proposal_.version;
  outgrown_by(proposal_);
  persist_chain();
}

void Replica::Machine::outgrown_by(const ChainConfig& config) {
  for (uint32_t i = 0; i < path_of(config); i++) {
    if (!serves(config_, config.members[i].target)) outgrown_by_ = std::max(outgrown_by_, config.version);
  }
}

void Replica::Machine::recorded(const ChainConfig& config) {
  FFS_CHECK(config.member_count <= kMaxReplicas);
  if (poisoned() || config.version < start_proposed_ || !meant_for_us(config)) return;
  if (config.version <= std::max({config_.version, next_config_.version, start_floor_})) return;
  next_config_ = config;
  const uint32_t path = path_of(config);
  const bool filled = syncs(config, self_);
  recorded_waits_ = false;
  if (proposal_.version <= config.version) proposal_waits_ = false;
  if (phase_ == Phase::failed && !filled) return;  // diverged: only a sync cures it
  if (path == 0) return go_offline(Reason::members_incomplete);
  if (!serves(config, self_) && !filled) return go_offline(Reason::not_a_member);
  const bool left_out = proposal_.version > config.version && !serves(proposal_, self_);
  if (left_out && !filled && !is(Mutant::keep_serving_when_left_out)) return go_offline(Reason::left_out);
  recorded_waits_ = true;
  if (filled || phase_ == Phase::failed) keeps_serving_ = false;
  if (now_ms_ < start_hold_until_ms_) return go_offline(Reason::start_hold);
  persist_recorded();
}

// Made durable, then adopted.
void Replica::Machine::persist_recorded() {
  if (!recorded_waits_ || now_ms_ < start_hold_until_ms_ || poisoned()) return;
  recorded_waits_ = false;
  set_phase(Phase::persisting, Reason::persisting);
  outgrown_by(next_config_);
  record_.adopted = next_config_.version;
  persist_chain();
}

void Replica::Machine::persist_chain() {
  persists_++;
  out_->push_back(PersistChain{new_op(Op::Kind::chain, nullptr, nullptr), record_});
}

void Replica::Machine::chain_persisted(Outcome outcome) {
  FFS_CHECK(persists_ > 0);
  persists_--;
  if (outcome != Outcome::ok) return fail(Reason::device_failed);
  if (persists_ > 0) return;
  durable_record_ = record_;
  persisted_here_ = true;
  if (record_.proposed > record_.adopted) out_->push_back(ProposalPersisted{record_.proposed});
  if (phase_ == Phase::persisting) adopt();
}

// ---- Phases -----------------------------------------------------------------------------------

void Replica::Machine::set_phase(Phase phase, Reason reason) {
  if (phase == phase_ && reason == reason_) return;
  phase_ = phase;
  reason_ = reason;
  out_->push_back(StateChanged{serving(), reason, config_.version});
}

// Nothing is sent from here until another version is adopted, perhaps never: payloads that the store has,
// too, are given back. They are memory that those still on their way here may wait for.
void Replica::Machine::go_offline(Reason reason) {
  keeps_serving_ = false;
  set_phase(Phase::offline, reason);
  for (Pending* p = order_.first(); p != nullptr; p = order_.next(p)) {
    if (p->disk == Pending::Disk::staged) let_go(p);
  }
  sync_source_.suspend();
  judge_askers();
  unpark();
}

// Until restart, or until it is synced. What waits for a result waits for its deadline: its outcome is
// unknown.
void Replica::Machine::fail(Reason reason) {
  if (poisoned()) return;
  keeps_serving_ = false;
  set_phase(Phase::failed, reason);
  judge_askers();
  unpark();
}

ReplicaStatus Replica::Machine::status() const {
  ReplicaStatus s;
  s.serving = serving();
  s.reason = reason_;
  s.chain_version = config_.version;
  s.persisted = durable_record_;
  s.persisted_here = persisted_here_;
  s.member_count = config_.member_count;
  s.my_index = my_index_;
  s.pendings = pending_count_;
  s.leased = leased();
  s.suspect = suspect_;
  s.waiting = static_cast<uint32_t>(request_pool_.used());
  const bool acting = phase_ != Phase::offline && phase_ != Phase::failed && path_count_ > 0;
  if (acting && on_path()) s.state = MemberState::serving;
  if (acting && !on_path()) s.state = MemberState::syncing;
  if (phase_ != Phase::offline && phase_ != Phase::failed) sync_source_.fill(&s);
  s.damaged = repairer_.damaged_count();
  s.repaired = repairer_.repaired_count();
  return s;
}

}  // namespace ffs::craq
