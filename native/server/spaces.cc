#include "server/spaces.h"

#include <algorithm>
#include <tuple>

namespace ffs::server {

namespace {

bool before(const SpacePolicy& a, const SpacePolicy& b) {
  return std::tie(a.chain, a.space) < std::tie(b.chain, b.space);
}

}  // namespace

HeldSpace* TargetSpaces::find(uint64_t space) {
  const auto at = std::lower_bound(ids_.begin(), ids_.end(), space);
  if (at == ids_.end() || *at != space) return nullptr;
  return spaces_[static_cast<size_t>(at - ids_.begin())].get();
}

std::vector<uint64_t> TargetSpaces::dedup_ids() const {
  std::vector<uint64_t> ids;
  for (const auto& held : spaces_) {
    if (held->policy.dedup) ids.push_back(held->policy.space);
  }
  return ids;
}

void TargetSpaces::take(std::span<const SpacePolicy> policies) {
  std::vector<std::unique_ptr<HeldSpace>> spaces;
  std::vector<uint64_t> ids;
  SpacePolicy first;
  first.chain = chain_;
  for (auto at = std::lower_bound(policies.begin(), policies.end(), first, before);
       at != policies.end() && at->chain == chain_; ++at) {
    HeldSpace* known = find(at->space);
    if (known == nullptr) {
      spaces.push_back(std::make_unique<HeldSpace>());
      spaces.back()->pool = engine::EvictionPool(mix64(target_.value ^ mix64(at->space)));
      spaces.back()->alone = engine::EvictionPool(mix64(target_.value ^ mix64(at->space + 1)));
    } else {
      const auto index =
          static_cast<size_t>(std::lower_bound(ids_.begin(), ids_.end(), at->space) - ids_.begin());
      spaces.push_back(std::move(spaces_[index]));
    }
    spaces.back()->policy = *at;
    ids.push_back(at->space);
  }
  ids_changed_ |= ids != ids_;
  spaces_ = std::move(spaces);
  ids_ = std::move(ids);
}

void Spaces::set(std::vector<SpacePolicy> policies) {
  std::stable_sort(policies.begin(), policies.end(), before);
  policies_.clear();
  for (const SpacePolicy& policy : policies) {
    if (!policies_.empty() && !before(policies_.back(), policy)) policies_.pop_back();
    policies_.push_back(policy);
  }
  for (auto& [id, target] : targets_) target.take(policies_);
}

TargetSpaces* Spaces::take(TargetId target, ChainId chain) {
  auto at = targets_.find(target);
  if (at != targets_.end() && at->second.chain() != chain) {
    targets_.erase(at);
    at = targets_.end();
  }
  if (at == targets_.end()) {
    at = targets_.emplace(target, TargetSpaces(target, chain)).first;
    at->second.take(policies_);
  }
  return &at->second;
}

void Spaces::drop(TargetId target) {
  targets_.erase(target);
}

}  // namespace ffs::server
