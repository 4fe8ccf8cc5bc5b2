#include "client/retry.h"

#include <algorithm>
#include <cerrno>

namespace ffs::client {

using wire::Detail;

namespace {

constexpr uint32_t kMaxBadData = 4;
constexpr uint32_t kMostDoublings = 4;

Decision complete(uint32_t status, Detail detail) {
  return {Next::kComplete, 0, status, detail};
}

// The answering replica can't help now. A read turns to the others, then all wait for a change.
Decision elsewhere(const Situation& s, uint32_t after_ms) {
  if (!s.update && s.untried_left) return {Next::kOtherReplica, 0, 0, Detail::kNone};
  return {Next::kAwaitRouting, after_ms, 0, Detail::kNone};
}

// Data at rest is damaged there: only another replica helps.
Decision damaged(const Situation& s) {
  if (s.update) return complete(EIO, Detail::kCorrupt);
  if (s.untried_left) return {Next::kOtherReplica, 0, 0, Detail::kNone};
  if (s.sound_left) return {Next::kAwaitRouting, backoff_ms(s.attempt), 0, Detail::kNone};
  return complete(EIO, Detail::kCorrupt);
}

Decision on_reply(const Situation& s, const TryOutcome& o) {
  const uint32_t pause = std::max(o.retry_after_ms, backoff_ms(s.attempt));
  switch (o.detail) {
    case Detail::kStaleRouting:
    case Detail::kWrongTarget:
    case Detail::kNotHead:
      return {Next::kAwaitRouting, pause, 0, Detail::kNone};
    case Detail::kNotServing:
    case Detail::kPoisoned:
      return elsewhere(s, pause);
    case Detail::kBusy:
      return {Next::kAgain, pause, 0, Detail::kNone};
    case Detail::kReissue:
      return {s.identified ? Next::kReissue : Next::kAgain, pause, 0, Detail::kNone};
    case Detail::kChecksum:
      if (s.bad_data_count >= kMaxBadData) return complete(EBADMSG, Detail::kChecksum);
      return {Next::kAgain, pause, 0, Detail::kNone};
    case Detail::kCorrupt:
      return damaged(s);
    case Detail::kExpired:
    case Detail::kUnknownKey:  // it was rotated away, or the server hasn't heard of it yet
      return {Next::kAwaitCapability, 0, 0, Detail::kNone};
    case Detail::kNoCapability:
      if (s.capability_sent_again) return complete(o.status, Detail::kNoCapability);
      return {Next::kSendCapability, 0, 0, Detail::kNone};
    case Detail::kWanted:
      if (s.data_sent) return complete(EPROTO, Detail::kBadFrame);
      return {Next::kSendData, 0, 0, Detail::kNone};
    case Detail::kNoRegion:
      return {Next::kRegister, 0, 0, Detail::kNone};
    case Detail::kDeadline:  // the server gave up waiting; our own deadline decides
      return {Next::kAgain, pause, 0, Detail::kNone};
    case Detail::kNone:
    case Detail::kStaleEpoch:
    case Detail::kFenced:
    case Detail::kOldSequence:
    case Detail::kTagMismatch:
    case Detail::kWrongCluster:
    case Detail::kVersion:
    case Detail::kBadFrame:
    case Detail::kForged:
    case Detail::kOtherSpace:
    case Detail::kMissingRight:
    case Detail::kUnsigned:
    case Detail::kUnproved:
      break;
  }
  if (o.status == EAGAIN) return {Next::kAgain, pause, 0, Detail::kNone};
  return complete(o.status, o.detail);
}

}  // namespace

uint32_t backoff_ms(uint32_t attempt) {
  return std::min(kMostBackoffMs, 5u << std::min(attempt, 8u));
}

uint64_t patience_ms(uint32_t try_timeout_ms, uint32_t late, uint32_t replicas) {
  return uint64_t{try_timeout_ms} << std::min(late / std::max(replicas, 1u), kMostDoublings);
}

Decision decide(const Situation& s, const TryOutcome& o) {
  switch (o.ending) {
    case Ending::kReply:
      return on_reply(s, o);
    case Ending::kUnreachable:
    case Ending::kLost:
      return elsewhere(s, backoff_ms(s.attempt));
    case Ending::kTryTimeout:
      if (!s.update && s.untried_left) return {Next::kOtherReplica, 0, 0, Detail::kNone};
      return {Next::kAgain, backoff_ms(s.attempt), 0, Detail::kNone};
    case Ending::kHelloRefused:
      if (o.status == EAGAIN) return elsewhere(s, std::max(o.retry_after_ms, backoff_ms(s.attempt)));
      if (!s.update && s.untried_left) return {Next::kOtherReplica, 0, 0, Detail::kNone};
      return complete(o.status, o.detail);
    case Ending::kBadData:
      return damaged(s);
  }
  return complete(EPROTO, Detail::kBadFrame);
}

bool certainly_not_applied(const TryOutcome& o) {
  if (o.ending != Ending::kReply)
    return o.ending == Ending::kUnreachable || o.ending == Ending::kHelloRefused;
  switch (o.detail) {
    case Detail::kStaleRouting:
    case Detail::kNotServing:
    case Detail::kWrongTarget:
    case Detail::kNotHead:
    case Detail::kBusy:
    case Detail::kNoCapability:
    case Detail::kExpired:
    case Detail::kForged:
    case Detail::kUnknownKey:
    case Detail::kOtherSpace:
    case Detail::kMissingRight:
    case Detail::kUnsigned:
    case Detail::kNoRegion:
    case Detail::kReissue:
    case Detail::kChecksum:
    case Detail::kWanted:
      return true;
    default:
      return false;
  }
}

}  // namespace ffs::client
