// What TCP sends out of the sender's own memory (MSG_ZEROCOPY), and when that memory may be used for
// something else: the kernel numbers these sends and tells, on the socket's error queue, with which it is
// done (docs/architecture.md, Sending without a copy). Beyond start() and collect() no I/O; one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/result.h"

namespace ffs::net {

enum class ZeroCopyMode : uint8_t { kOff, kAuto, kOn };

struct ZeroCopyCounters {
  uint64_t sends = 0;   // sendmsg calls without a copy
  uint64_t copied = 0;  // of them, those that the kernel copied after all
};

class ZeroCopy {
 public:
  // Of smaller payloads the pinning of pages and the report cost more than the copy.
  static constexpr size_t kLeastBytes = 64u << 10;
  // So many sends in a row that the kernel had to copy (a peer on this host, a packet capture) end it under
  // kAuto: then it costs a report each and saves nothing.
  static constexpr uint32_t kMostCopied = 4;

  // kAuto: on for a TCP connection whose peer has another address than this end. A kernel without it leaves
  // it off.
  void start(int socket, ZeroCopyMode mode);
  // As start() where the connection is to another host. Pure.
  void assume_on(ZeroCopyMode mode);
  // The kernel's number of the next send, for tests; before the first.
  void start_at(uint32_t number) { next_ = number; }
  // Whether the next payload is to go so.
  bool on() const { return on_; }
  // The kernel may still read memory of payloads that were sent.
  bool outstanding() const { return !done_.empty(); }

  // A sendmsg with the flag has taken bytes.
  void sent();
  // While something is outstanding: the owner has no more to send of this token's memory, which is free when
  // all that was sent so far is done with.
  void hold(uint64_t token);
  // The kernel is done with the sends `first` to `last` (its own 32-bit numbers).
  void completed(uint32_t first, uint32_t last, bool copied, std::vector<uint64_t>* released);
  // Reads the socket's error queue until it is empty. False: something else than such a report was there.
  bool collect(int socket, std::vector<uint64_t>* released);
  // Since the last time.
  ZeroCopyCounters take_counters();

 private:
  struct Held {
    uint64_t send = 0;  // the last one before it
    uint64_t token = 0;
  };
  void release_done(std::vector<uint64_t>* released);

  bool on_ = false;
  bool gives_up_ = false;
  uint32_t copied_in_a_row_ = 0;
  uint64_t next_ = 0;      // number of the next send; the kernel's is its lower half
  std::deque<bool> done_;  // of the sends before next_, from the first that isn't done with on
  std::deque<Held> held_;  // in the order of sends
  ZeroCopyCounters counters_;
};

}  // namespace ffs::net
