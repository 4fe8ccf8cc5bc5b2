// The story of a write goes on at the next member: an update arrives from the predecessor, and is compared
// with what is here. docs/craq.md, When the base isn't there.
#include <algorithm>

#include "craq/machine.h"

namespace ffs::craq {

// ---- 3. At the next member -----------------------------------------------------------------

void Replica::Machine::update_received(const Update& u, PayloadState payload_state) {
  Update mine = u;
  mine.floor = Version{};
  floor_received(u.floor);
  Chunk* c = chunk(u.key);
  if (known_already(u, c)) return release(mine.payload);
  const Tomb* refused = nullptr;
  Fit fits = fit(u, c, &refused);
  if (fits == Fit::accept && payload_state != PayloadState::bad) {
    Pending* p = new_pending(mine, c);
    if (payload_state == PayloadState::later && carries_payload(u.kind)) {
      p->disk = Pending::Disk::fetching;
      p->fetch_op = new_op(Op::Kind::fetch, nullptr, p);
      out_->push_back(Fetch{p->fetch_op, p->update.payload});
    }
    if (u.held || held_came_early(u.key, u.version)) {
      held_received(Notice{.type = NoticeType::held, .key = u.key, .version = u.version});
    }
    return begin_update(p);
  }
  release(mine.payload);
  Notice n{.type = NoticeType::missing, .key = u.key, .version = u.version};
  n.other = c->pendings.empty() ? c->committed.version : c->pendings.last()->version();
  n.flag = fits == Fit::diverged;
  switch (fits) {
    case Fit::accept:  // its payload is bad
    case Fit::missing:
      return notify(predecessor(), n);
    case Fit::diverged:
      notify(predecessor(), n);
      return fail(Reason::diverged);
    case Fit::done:
      c->removed = u.version;
      keep_in_memory(c, u.version);
      n = Notice{.type = NoticeType::ack, .key = u.key, .version = u.version};
      return notify(predecessor(), n);
    case Fit::refused_base:
      if (refused != nullptr) send_refusal(c, refused->version, refused->identity, refused->outcome);
      return;
  }
}

// A repetition of something that is pending, committed or refused here?
bool Replica::Machine::known_already(const Update& u, Chunk* c) {
  if (const Tomb* t = tomb_of(c, u.version); t != nullptr) {
    send_refusal(c, u.version, t->identity, t->outcome);
    return true;
  }
  if (Pending* p = find_pending(c, u.version); p != nullptr) {
    if (u.held) held_received(Notice{.type = NoticeType::held, .key = u.key, .version = u.version});
    return true;
  }
  Notice ack{.type = NoticeType::ack, .key = u.key, .version = std::max(c->committed.version, u.version)};
  // What isn't pending below a pending version was committed (and removed, if we don't have it).
  const Pending* first_here = c->pendings.first();
  const bool below_pending =
      first_here != nullptr && !first_here->unfounded && first_here->version() > u.version;
  if (c->committed.version >= u.version || c->removed >= u.version || below_pending) {
    if (!lacks_entry(u, c)) notify(predecessor(), ack);
    return true;
  }
  if (u.version < floor_) return true;
  if (u.identity.client.value == 0) return false;
  std::optional<RetryEntry> entry = store_.retry(u.identity.client, u.identity.channel);
  if (!entry.has_value() || entry->sequence < u.identity.sequence) return false;
  const bool gone = !c->dirty() && c->committed.version.none();
  const bool later = entry->sequence > u.identity.sequence;
  if (!later && entry->version != u.version) return false;
  if (gone && (later || entry->state == RetryState::done)) {  // committed, and removed since
    c->removed = u.version;
    keep_in_memory(c, u.version);
    notify(predecessor(), ack);
    return true;
  }
  if (!later && entry->state == RetryState::refused && entry->outcome != Outcome::dropped) {
    remember_refused(c, u.version, u.identity, entry->outcome);
    send_refusal(c, u.version, u.identity, entry->outcome);
    return true;
  }
  return false;
}

// A sync that ended in a crash may have brought the version without its retry entry. The entry is made, and
// the update acknowledged when it comes again.
bool Replica::Machine::lacks_entry(const Update& u, const Chunk* c) {
  const UpdateIdentity& who = u.identity;
  if (who.client.value == 0 || c->committed.version != u.version || store_.fenced(who.client)) return false;
  const std::optional<RetryEntry> entry = store_.retry(who.client, who.channel);
  if (entry.has_value() && entry->sequence >= who.sequence && entry->outcome != Outcome::dropped)
    return false;
  const RetryEntry done{who.sequence, u.key, u.version, RetryState::done, Outcome::ok};
  out_->push_back(SetRetry{new_op(Op::Kind::retry, nullptr, nullptr), who.client, who.channel, done});
  return true;
}

Replica::Machine::Fit Replica::Machine::fit(const Update& u, Chunk* c, const Tomb** refused) const {
  if (is(Mutant::ignore_base)) return Fit::accept;
  const Pending* below = c->pendings.last();
  if (below != nullptr) {
    if (below->fallen) return Fit::refused_base;
    if (below->version() == u.base && below->removal() == u.base_absent) return Fit::accept;
  } else {
    const bool absent = c->committed.version.none();
    if (u.base_absent && absent && (u.base.none() || u.base == c->removed || u.base_committed)) {
      return Fit::accept;
    }
    if (!u.base_absent && !absent && u.base == c->committed.version) return Fit::accept;
    // After a restart: we have committed this update and the removal behind it, and forgotten both.
    if (!u.base_absent && absent && u.removal_follows && (u.base_committed || u.base == c->removed)) {
      return Fit::done;
    }
  }
  *refused = tomb_of(c, u.base);
  if (*refused != nullptr) return Fit::refused_base;
  return u.base_committed ? Fit::diverged : Fit::missing;
}

void Replica::Machine::fetched(Pending* p, Outcome outcome) {
  p->fetch_op = 0;
  p->disk = Pending::Disk::queued;
  Chunk* c = p->chunk;
  if (p->fallen) return;
  if (outcome == Outcome::ok) return begin_update(p);
  // It didn't come, or not whole: as if the message had never arrived, and what is built on it.
  Notice n{.type = NoticeType::missing, .key = c->key, .version = p->version()};
  const Pending* below = c->pendings.prev(p);
  n.other = below != nullptr ? below->version() : c->committed.version;
  for (Pending* q = c->pendings.last(); q != nullptr && q->version() >= n.version;) {
    Pending* before = c->pendings.prev(q);
    if (q->state == Pending::State::refusing) {
      q->unfounded = true;  // its record is on its way to the disk
    } else {
      drop_unstaged(q);
    }
    q = before;
  }
  if (!first()) notify(predecessor(), n);
}

void Replica::Machine::drop_unstaged(Pending* p) {
  FFS_CHECK(p->disk == Pending::Disk::fetching || p->disk == Pending::Disk::queued);
  p->outcome = Outcome::dropped;
  resolve(p, Pending::State::refused);
}

}  // namespace ffs::craq
