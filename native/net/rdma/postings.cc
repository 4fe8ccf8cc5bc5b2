#include "net/rdma/postings.h"

#include <algorithm>

namespace ffs::net::rdma {

void Postings::add(Work work, uint64_t token, uint64_t tag) {
  while (work.length > most_bytes_) {
    Entry part;
    part.work = work;
    part.work.length = most_bytes_;
    part.tag = tag;
    waiting_.push_back(part);
    work.memory += most_bytes_;
    work.remote += most_bytes_;
    work.length -= most_bytes_;
  }
  waiting_.push_back({work, token, tag, -1});
}

void Postings::add_message(const Entry& entry) {
  FFS_CHECK(has_room());
  waiting_.push_back(entry);
}

// A read reports by itself: somebody waits for it. Of the others the last one of a batch does if memory is
// to be given back, and whichever comes when half of the queue is silent, so that room is known of in time.
std::span<const Work> Postings::batch() {
  batch_.clear();
  const size_t count = std::min<size_t>(waiting_.size(), depth_ - under_way_.size());
  bool holds_memory = false;
  for (size_t i = 0; i < count; i++) {
    Entry& entry = waiting_[i];
    holds_memory = holds_memory || entry.token != 0 || entry.slot >= 0;
    silent_++;
    const bool last = i + 1 == count;
    entry.work.number = next_number_++;
    entry.work.signalled =
        entry.work.kind == WorkKind::kRead || (last && holds_memory) || silent_ * 2 >= depth_;
    if (entry.work.signalled) silent_ = 0;
    batch_.push_back(entry.work);
  }
  return batch_;
}

void Postings::posted() {
  for (size_t i = 0; i < batch_.size(); i++) {
    under_way_.push_back(waiting_.front());
    waiting_.pop_front();
  }
  batch_.clear();
}

void Postings::ended(uint64_t number, std::vector<Ended>* out, std::vector<int32_t>* slots) {
  while (!under_way_.empty() && under_way_.front().work.number <= number) {
    const Entry& entry = under_way_.front();
    if (entry.slot >= 0) slots->push_back(entry.slot);
    if (entry.token != 0) out->push_back({entry.work.kind, entry.token, entry.tag, true});
    under_way_.pop_front();
  }
}

bool Postings::failed(uint64_t number, Ended* culprit, std::vector<Ended>* out, std::vector<int32_t>* slots) {
  if (under_way_.empty() || number < under_way_.front().work.number ||
      number > under_way_.back().work.number) {
    return false;
  }
  if (number > under_way_.front().work.number) ended(number - 1, out, slots);
  const Entry& entry = under_way_.front();
  *culprit = {entry.work.kind, entry.token, entry.tag, false};
  return true;
}

void Postings::abandon(std::vector<Ended>* out) {
  for (const auto* list : {&under_way_, &waiting_}) {
    for (const Entry& entry : *list) {
      if (entry.token != 0) out->push_back({entry.work.kind, entry.token, entry.tag, false});
    }
  }
  under_way_.clear();
  waiting_.clear();
}

}  // namespace ffs::net::rdma
