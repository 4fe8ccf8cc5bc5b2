// Reads sent out of the device's own memory: from the store's answer to the last byte in the socket.
#include "server/lending.h"

#include <cstring>

#include "server/log.h"
#include "server/shard.h"

namespace ffs::server {

// The read is over at once, and is judged after it like one that the device has answered. False: it isn't one
// to be lent, and goes its ordinary way.
bool Shard::lend(Request* request) {
  Session& session = *request->session;
  if (!lending_ || session.connection.channel != nullptr) return false;  // RDMA sends registered memory
  if (!may_lend(session.lent_bytes, lent_bytes_, request->read.length, most_lent())) return false;
  engine::Lent from;
  if (!store_->lend(&request->read, &from)) return false;
  Lent* lent = lents_.take();
  lent->session = &session;
  lent->from = from;
  lent->queued = false;
  lent->since_us = now_us_;
  session.lent_bytes += from.length;
  lent_bytes_ += from.length;
  request->lent = lent;
  request->read_done = true;
  complete(*request->target, request->read_op, craq::Outcome::ok);
  return true;
}

// The request's bytes go behind the head of its reply.
void Shard::queue_lent(Request* request) {
  Lent* lent = std::exchange(request->lent, nullptr);
  lent->queued = true;
  lent->session->connection.queue.push_piece(net::Bytes(lent->bytes(), lent->from.length), lent->token());
  metrics_.memory_reads++;
}

void Shard::release(Lent* lent) {
  lent->session->lent_bytes -= lent->from.length;
  lent_bytes_ -= lent->from.length;
  if (lent->copy == nullptr) store_->give_back(lent->from);
  lent->copy.reset();
  lent->session = nullptr;
  lents_.give(lent);
}

// 0 or a positive errno.
int Shard::copy_lent(Lent* lent) {
  auto copy = std::make_unique_for_overwrite<uint8_t[]>(lent->from.length);
  if (const int error = store_->copy_lent(lent->from, copy.get()); error != 0) return error;
  metrics_.bytes_copied += lent->from.length;
  metrics_.memory_read_copies++;
  if (lent->queued) lent->session->connection.queue.move_payload(lent->token(), copy.get());
  lent->copy = std::move(copy);
  store_->give_back(lent->from);
  return 0;
}

// Every tick: what has been lent for too long.
void Shard::end_long_loans() {
  uint64_t copied = 0;
  for (uint32_t slot = 0; slot < lents_.size() && lents_.used() > 0 && copied < kCopiedATick; slot++) {
    Lent* lent = lents_.at(slot);
    if (!lent_too_long(*lent, now_us_, config_.most_lent_us)) continue;
    copied += lent->from.length;
    if (const int error = copy_lent(lent); error != 0) {
      stop_lending(error);
      if (lent->queued) close_session(*lent->session, "the device can't be read");
    }
  }
}

// The kernel couldn't get at a page that is to be sent to this session. The ordinary way has the better
// errors, so everything takes that one from now on; what is on its way goes on as a copy, if it can be read
// at all: a reply that has begun can't become an error any more.
bool Shard::mend_fault(Session& session) {
  stop_lending(EFAULT);
  bool found = false;
  for (uint32_t slot = 0; slot < lents_.size(); slot++) {
    Lent* lent = lents_.at(slot);
    if (lent->session != &session || !lent->queued || lent->copy != nullptr) continue;
    if (copy_lent(lent) != 0) return false;
    found = true;
  }
  return found;
}

void Shard::stop_lending(int error) {
  if (!lending_) return;
  lending_ = false;
  log(LogLevel::kWarning,
      "device %s: its memory can't be had (%s): was the file cut, or is the host out of memory? All of it is "
      "copied from now on",
      config_.device_path.c_str(), std::strerror(error));
}

}  // namespace ffs::server
