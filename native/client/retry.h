// What to do when a try of a request ended (docs/ring.md, Retries): a pure function of what
// happened, so that every row can be tested. Doing it is the ring's business.
#pragma once

#include <cstdint>

#include "ffs/wire.h"

namespace ffs::client {

enum class Ending : uint8_t {
  kReply,         // the server answered: status and detail say what
  kUnreachable,   // no connection could be made, or hello got no answer
  kLost,          // the connection ended with the request unanswered
  kTryTimeout,    // no answer within try_timeout_ms
  kHelloRefused,  // the server refused the connection: status and detail
  kBadData,       // what came doesn't match its checksums
};

struct TryOutcome {
  Ending ending = Ending::kReply;
  uint32_t status = 0;  // errno
  wire::Detail detail = wire::Detail::kNone;
  uint32_t retry_after_ms = 0;
};

struct Situation {
  bool update = false;
  bool identified = false;    // it has a channel: creates and touches need none
  uint32_t attempt = 1;       // tries so far, this one included
  bool untried_left = false;  // read: a serving replica that this round hasn't asked
  bool sound_left = false;    // read: a serving replica that hasn't shown damage
  bool capability_sent_again = false;
  bool data_sent = false;       // create: not just offered
  uint32_t bad_data_count = 0;  // how often data was damaged on the way
};

enum class Next : uint8_t {
  kComplete,         // with `status` (0: success)
  kOtherReplica,     // at once
  kAgain,            // after after_ms, same identity; replicas of all kinds are welcome again
  kAwaitRouting,     // the same, and newer routing is asked for and ends the wait
  kAwaitCapability,  // until the capability is renewed
  kSendData,         // at once, with the bytes that were offered
  kSendCapability,   // open the capability anew on the connection, then send again
  kRegister,         // forget the region on that connection, then send again
  kReissue,          // after after_ms, under a new sequence: only what is identified
};

struct Decision {
  Next next = Next::kComplete;
  uint32_t after_ms = 0;
  uint32_t status = 0;
  wire::Detail detail = wire::Detail::kNone;
};

Decision decide(const Situation& situation, const TryOutcome& outcome);
// Grows from 5 ms to a quarter of a second: a chain that comes back says so to nobody, and the ring's
// retry budget bounds what this costs (docs/ring.md, Retries).
constexpr uint32_t kMostBackoffMs = 250;
uint32_t backoff_ms(uint32_t attempt);
// How long the next try of a read may take, `late` of whose tries took too long: twice as long whenever
// each of the replicas was late once, up to sixteen times. Where all is slow, an answer would never be
// waited for otherwise, and every try would make the servers slower.
uint64_t patience_ms(uint32_t try_timeout_ms, uint32_t late, uint32_t replicas);
// Whether an update that got this answer can't take effect any more without being sent again.
bool certainly_not_applied(const TryOutcome& outcome);

}  // namespace ffs::client
