// One target's part in its chain: a pure state machine. Event in, effects out; no sockets,
// disks, clocks or threads. The protocol is docs/craq.md.
//
// Use. One Replica per target, used by one thread. Each on_...() call takes one event and
// appends to `out`, in order, what is to be done. The caller executes *all* effects in order
// before it gives the next event of this replica. Nothing blocks and nothing throws. In the
// steady state nothing is allocated: pools and `out` keep their memory.
//
// Completions. Effects with an `op` end in exactly one on_completion(op, ...), in any order
// unless said otherwise, also when the operation failed. An op is never reused.
//
// The disk. Records (Stage, Commit, Refuse, SetSpaceEpoch, PersistChain) must become durable
// in the order in which the effects were given (one journal): a crash leaves a prefix.
// Completions of Stage, Refuse, SetSpaceEpoch, PersistChain, Install, Erase, ResetTarget and SetRetry mean
// "durable". At most one Stage is under way for a chunk, so the store never stages on a base that isn't
// durable.
//
// Buffers. A BufferRef that comes in with an event is one reference, owned by the replica until
// it gives it back by exactly one Release. Stage, SendUpdate and Fetch name a buffer without
// giving up that reference: a server that is still writing or sending after the Release holds a
// reference of its own.
//
// Time. now_ms is monotonic and counts on while the machine sleeps (CLOCK_BOOTTIME); deadlines are on that
// clock, 0 = none. Leases are judged by it: the caller reads the clock after the event that it gives has
// arrived, never before.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "craq/messages.h"
#include "craq/store_view.h"

namespace ffs::craq {

using RequestToken = uint64_t;  // the server's name of a client's request
using OpId = uint64_t;          // the replica's name of an operation under way; never 0

// ---- Events -------------------------------------------------------------------------------

enum class MemberState : uint8_t { serving = 1, syncing, waiting, last_serving, offline };

struct Member {
  TargetId target;
  MemberState state = MemberState::offline;
  uint64_t incarnation = 0;  // of its node, for which the version was proposed or recorded
};

// A chain as the manager proposes or has recorded it. First the serving members in chain order, head
// first; then at most one that is syncing; then all others, which take no part (docs/craq.md, Members).
struct ChainConfig {
  ChainVersion version;
  uint32_t member_count = 0;
  std::array<Member, kMaxReplicas> members{};
};

// Has the payload arrived? `later`: it is fetched when the update is admitted (Fetch), which
// spares the transfer of a repeated or refused one. `bad`: it arrived and failed its checksums.
enum class PayloadState : uint8_t { ready, later, bad };

struct ClientUpdate {
  RequestToken token = 0;
  ChainVersion chain_version;       // of the client's routing
  Outcome authority = Outcome::ok;  // the server's check of the capability: ok, denied, fenced
  UpdateIdentity identity;          // client 0: create-if-absent, evictions, collection
  ChunkKey key;
  UpdateKind kind = UpdateKind::write;
  uint32_t offset_bytes = 0;
  uint32_t length_bytes = 0;  // as in Update
  Attributes attributes;
  bool need_existing = false;  // answer `absent` instead of creating the chunk
  bool beyond_end = false;     // a write: answer `existed` if the newest version reaches beyond offset_bytes
  bool offer = false;          // a create without its payload: nothing changes, `wanted` if it would be taken
  Version expected;            // not none: apply only if this is the newest version (else condition_failed)
  uint64_t space_epoch = 0;
  uint64_t deadline_ms = 0;
  BufferRef payload;
  PayloadState payload_state = PayloadState::ready;
};

struct ClientRead {
  RequestToken token = 0;
  ChainVersion chain_version;
  Outcome authority = Outcome::ok;
  ChunkKey key;
  uint32_t offset_bytes = 0;
  uint32_t length_bytes = 0;
  uint64_t space_epoch = 0;     // below the space's least epoch: stale_epoch
  bool uncommitted_ok = false;  // the newest version that is durable here will do
  bool facts_only = false;      // existence, length, tag: no Read effect, only the Reply
  bool compare_tag = false;     // answer tag_differs unless the chunk's tag is this one
  Attributes tag;               // only its tag is used
  bool touch = false;           // counts as use of the chunk, if there is one: Touch
  uint64_t deadline_ms = 0;
};

// To the head: sets the least epoch accepted in a space on every member.
struct ClientSetSpaceEpoch {
  RequestToken token = 0;
  ChainVersion chain_version;
  Outcome authority = Outcome::ok;
  uint64_t space = 0;
  uint64_t epoch = 0;
  uint64_t deadline_ms = 0;
};

// To the head: removes up to `limit` chunks of a space, in key order, each behind its pendings.
// space_epoch is judged as with an update. If it is the maximum, which is for the removal of the
// space itself, the space's least epoch must be that already (else invalid). Reply::key is the last
// key taken, for the next page; Reply::more says whether there is one.
struct ClientRemovePage {
  RequestToken token = 0;
  ChainVersion chain_version;
  Outcome authority = Outcome::ok;
  uint64_t space = 0;
  bool has_after = false;
  ChunkKey after;
  uint32_t limit = 64;
  uint64_t space_epoch = UINT64_MAX;
  uint64_t deadline_ms = 0;
};

// To any member: the last committed chunk of a space (key and length), or absent.
struct ClientLastChunk {
  RequestToken token = 0;
  ChainVersion chain_version;
  Outcome authority = Outcome::ok;
  uint64_t space = 0;
  uint64_t deadline_ms = 0;
};

// To the head, from its own server: a chunk that may go. The order is carried out only if the chunk is as it
// was when it was chosen: the same version committed, nothing pending, and either not used since and not
// pinned, or expired.
struct EvictionOrder {
  ChunkKey key;
  Version version;
  uint64_t last_access = 0;  // as StoreView::last_access said
  bool expired = false;
};

enum class EvictionAnswer : uint8_t {
  ordered,   // it is removed from now on: Evicted follows
  changed,   // the chunk isn't as it was
  busy,      // too many updates are under way
  not_head,  // this target doesn't order its chain's updates now
};

// ---- Effects ------------------------------------------------------------------------------

struct SendUpdate {
  PeerHeader header;
  Update update;
};

struct SendNotice {
  PeerHeader header;
  Notice notice;
};

// Why a target serves nothing, or what it waits for.
enum class Reason : uint8_t {
  none = 0,
  no_configuration = 1,    // no chain version since the start
  restarted = 2,           // waits for the manager to record a new version (docs/craq.md, Changes)
  members_incomplete = 3,  // the recorded chain has members that aren't serving
  not_a_member = 4,        // the recorded chain doesn't name this target
  persisting = 5,          // makes the new chain version durable
  reconciling = 6,         // compares its pendings with its predecessor's
  resuming = 7,            // waits for the members behind it to have all pendings
  device_failed = 8,       // a write failed; until restart
  diverged = 9,            // lacks what its predecessor has committed; until it has been synced
  no_lease = 10,           // neither the manager's lease nor all peers' (docs/craq.md, Leases)
  left_out = 11,           // a proposal that it has made durable goes on without it
  syncing = 12,            // is being filled by its predecessor (docs/craq.md, Recovery)
  start_hold = 13,         // waits until leases that its last incarnation may have granted are over
};

// The answer to a client's request; exactly one a token.
struct Reply {
  RequestToken token = 0;
  Outcome outcome = Outcome::ok;
  Reason reason = Reason::none;  // with Outcome::offline
  ChainVersion chain_version;    // this replica's: a hint to refresh
  ChunkFacts chunk;              // update: version; read, last chunk: all
  ChunkKey key;                  // last chunk; remove page
  bool more = false;             // remove page
  uint32_t count = 0;            // remove page: chunks removed
};

// Bring the payload of an admitted update here and check its checksums (ok or bad_checksum;
// timed_out when the sender is gone).
struct Fetch {
  OpId op = 0;
  BufferRef payload;
};

struct Release {
  BufferRef payload;
};

// Make a pending version durable. The retry entry of update.identity goes with it (pending). Completes with
// ok, no_space, over_quota, fenced (nothing was changed: a refusal, which travels up), or io_error (the
// device is poisoned). Fences and epochs needn't be judged: the head did.
// update.base is the newest version in the store; base_absent: there is no chunk.
struct Stage {
  OpId op = 0;
  Update update;
  bool keep_attributes = false;  // the base's, else update.attributes
};

// In memory at once, durable later, no completion. Also turns the retry entry to done.
struct Commit {
  ChunkKey key;
  Version version;
};

// Journal (identity, version, outcome) and drop the pending version, if it was staged.
struct Refuse {
  OpId op = 0;
  ChunkKey key;
  Version version;
  UpdateIdentity identity;
  Outcome outcome = Outcome::ok;
};

// Pin that version (committed or pending) now and read it for the request. Completes with ok or
// io_error/bad_checksum. The version is in the store when the effect is executed.
struct Read {
  OpId op = 0;
  RequestToken token = 0;
  ChunkKey key;
  Version version;
  uint32_t offset_bytes = 0;
  uint32_t length_bytes = 0;
};

// Read a whole pending version into a new buffer, for a resend after a restart. Completes with
// the buffer, which the replica then owns.
struct Load {
  OpId op = 0;
  ChunkKey key;
  Version version;
  uint32_t length_bytes = 0;
};

struct SetSpaceEpoch {
  OpId op = 0;
  uint64_t space = 0;
  uint64_t epoch = 0;  // the store keeps the maximum
};

struct PersistChain {
  OpId op = 0;
  ChainRecord record;
};

// A message of recovery, repair or comparison (docs/craq.md, Recovery). `bytes` are encoded and decoded by
// craq alone (sync_wire.h); the server moves them, and the payload, as it moves an update's.
struct SendSync {
  PeerHeader header;
  std::vector<uint8_t> bytes;
  BufferRef payload;
};

// Read a whole committed or pending version into a new buffer with its checksums, as the source of a
// transfer. `background`: the server's share for recovery bounds it (else it goes like any other read).
// Completes with ok and the buffer; absent (that version isn't there any more); corrupt (damaged at
// rest); io_error.
struct Copy {
  OpId op = 0;
  ChunkKey key;
  Version version;
  uint32_t length_bytes = 0;
  bool background = true;
  uint64_t since_ms = 0;  // when the sync began that it is for; 0: it is for none
};

// Make (version, facts, payload) the committed state of the chunk. A length of 0 has no payload. Without
// `only_over` (recovery): whatever was there, and the chunk's pending versions are dropped without a trace.
// With it (a repair of a member that serves): nothing is changed (condition_failed) unless the committed
// version is exactly this one, and pending versions stay, since they have been acknowledged as held.
// It takes its turn behind stages of the chunk that are under way. `background` as with Copy: false where a
// client waits for it. Durable on completion: ok, no_space, bad_checksum, condition_failed, io_error.
struct Install {
  OpId op = 0;
  ChunkKey key;
  ChunkFacts chunk;
  BufferRef payload;
  Version only_over;
  bool background = true;
};

// The chunk and its pending versions cease to exist. Durable on completion.
struct Erase {
  OpId op = 0;
  ChunkKey key;
};

// Drops all pending versions, and the whole retry table of this target: it is about to be filled from its
// predecessor. Durable on completion.
struct ResetTarget {
  OpId op = 0;
};

// Sets an entry of the retry table. Durable on completion.
struct SetRetry {
  OpId op = 0;
  ClientId client;
  uint32_t channel = 0;
  RetryEntry entry;
};

// For counters, the log and `ffs cluster status`.
struct Repaired {
  ChunkKey key;
  Version version;
  bool ok = false;  // false: no serving member has a good copy; it is looked for again later
};

// Tell the manager: this proposal is durable here.
struct ProposalPersisted {
  ChainVersion version;
};

// For heartbeats, status and the log.
struct StateChanged {
  bool serving = false;
  Reason reason = Reason::none;
  ChainVersion chain_version;
};

// The chunk was used: a read that counts as use, or a create that found it.
struct Touch {
  ChunkKey key;
};

// The end of an eviction that was ordered. ok: the chunk is gone. Others: the chain changed meanwhile.
struct Evicted {
  ChunkKey key;
  Outcome outcome = Outcome::ok;
};

using Effect = std::variant<SendUpdate, SendNotice, Reply, Fetch, Release, Stage, Commit, Refuse, Read, Load,
                            SetSpaceEpoch, PersistChain, ProposalPersisted, StateChanged, Touch, SendSync,
                            Copy, Install, Erase, ResetTarget, SetRetry, Repaired, Evicted>;
using Effects = std::vector<Effect>;

// ---- The machine --------------------------------------------------------------------------

// Deliberate breaks, for the simulator to prove that it sees them. Never set in production.
enum class Mutant : uint8_t {
  none = 0,
  commit_before_successor,
  tail_commits_without_held,
  ignore_retry_table,
  no_recheck_after_read,
  reuse_versions_after_restart,
  ignore_base,
  serve_before_reconcile,
  dirty_read_answers_local,
  forget_refusals,
  forget_retries_on_restart,
  commit_unknown_pendings,
  no_lease_check_after_read = 20,      // leases: only on arrival
  no_lease_check,                      // and not on arrival, only after the disk read
  persist_without_waiting_for_leases,  // granted to those that the proposal leaves out
  no_start_hold,                       // nor those that the last incarnation granted
  serve_dirty_as_new_last,             // it answers before it has committed its pendings
  keep_serving_when_left_out,          // by a proposal that it has made durable
  lone_without_persisted_check,        // alone in the adopted version is enough, whatever comes
  early_promotion = 30,                // recovery: done as soon as all ranges have been asked about
  no_wait_in_step,                     // commits don't wait for the syncing member
  ignore_sync_numbers,                 // it takes late and repeated transfers again
  forget_backlog,                      // what changes behind the cursor isn't sent
  no_retry_copy,                       // the retry table isn't copied
  no_erase,                            // chunks that only the syncing member has stay
  spread_corruption,                   // payloads that failed their checksums are sent and installed
  repair_any_version,                  // a repair is installed whatever is committed by now
  trust_old_attempts,                  // messages of an earlier attempt take effect
  no_epoch_copy,                       // the space epochs aren't copied
  evict_whatever_happened = 50,        // eviction: the conditions of an order aren't checked
  evict_beside_pendings,               // nor whether something is pending
  expired_is_there,                    // expired chunks are read and found
};

struct Options {
  uint64_t incarnation =
      0;  // of this server; what names this target in another one isn't for it. 0: not known
  uint32_t max_pendings = 1024;          // the head numbers no more at a time; others wait
  uint32_t max_pendings_per_chunk = 16;  // the same for one chunk
  uint64_t resend_ms = 500;              // unanswered messages to members are sent again
  uint64_t peer_lease_ms = 2000;         // that members grant each other; a fifth of the failure timeout. The
                                         // shorter of two counts. 0: no leases (tests that aren't about them)
  uint64_t suspect_ms = 10000;  // a neighbour that owes and is silent for so long is reported; 0: none
  uint32_t sync_window = 16;    // transfers of a sync under way
  Mutant mutant = Mutant::none;
};

struct ReplicaStatus {
  bool serving = false;
  Reason reason = Reason::none;
  ChainVersion chain_version;   // adopted in this incarnation; zero = none
  ChainRecord persisted;        // durable
  bool persisted_here = false;  // the newest of them by this incarnation
  uint32_t member_count = 0;
  uint32_t my_index = 0;
  uint32_t pendings = 0;
  uint32_t waiting = 0;                      // client requests that wait
  MemberState state = MemberState::offline;  // as it sees itself
  bool leased = false;
  TargetId suspect;  // a neighbour that owes an answer and hasn't been heard of for suspect_ms; zero = none
  // Of the sync that this target is the source of, in chain_version:
  TargetId sync_target;    // zero = none
  bool sync_done = false;  // sync_target equals this target, and every commit waits for it
  uint64_t sync_chunks_compared = 0, sync_chunks_sent = 0, sync_bytes_sent = 0;
  uint64_t sync_chunks_total = 0;      // at its start
  Outcome sync_failure = Outcome::ok;  // why it doesn't get on: no_space, corrupt, ...
  uint64_t damaged = 0;                // chunks known to be damaged here now
  uint64_t repaired = 0;               // since the start
};

class Replica {
 public:
  // A replica in a new incarnation: loads the store's pendings, serves nothing. The store must
  // outlive it. now_ms: of its start, from which the leases of its last incarnation are waited for.
  Replica(TargetId self, ChainId chain, const StoreView& store, const Options& options, uint64_t now_ms = 0);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  // The manager proposes / has recorded a configuration of this chain.
  void on_proposed(const ChainConfig& config, uint64_t now_ms, Effects& out);
  void on_recorded(const ChainConfig& config, uint64_t now_ms, Effects& out);

  void on_client_update(const ClientUpdate& request, uint64_t now_ms, Effects& out);
  void on_client_read(const ClientRead& request, uint64_t now_ms, Effects& out);
  // The short way of a read, for many at once: true if it can be answered from the committed version right
  // away (this member may answer, nothing of the chunk is pending, the chunk has neither tag nor codec). Then
  // the caller reads facts->version, and answers if the read succeeded and read_stands(*judged_in)
  // afterwards; else, and when this is false, on_client_read decides as if nothing had been. Changes nothing.
  bool read_at_once(const ClientRead& request, uint64_t now_ms, ChunkFacts* facts,
                    ChainVersion* judged_in) const;
  bool read_stands(const ChainVersion& judged_in, uint64_t now_ms) const;
  void on_client_set_space_epoch(const ClientSetSpaceEpoch& request, uint64_t now_ms, Effects& out);
  void on_client_remove_page(const ClientRemovePage& request, uint64_t now_ms, Effects& out);
  void on_client_last_chunk(const ClientLastChunk& request, uint64_t now_ms, Effects& out);

  // Removes a chunk to make room, or because it has expired. Evictions take at most half of the pendings.
  EvictionAnswer on_evict(const EvictionOrder& order, uint64_t now_ms, Effects& out);

  // Messages of members. Those of one connection come in order; loss, repetition and reordering
  // across connections are allowed. An update's payload is `later` only if Fetch can bring it.
  void on_update(const PeerHeader& header, const Update& update, PayloadState payload_state, uint64_t now_ms,
                 Effects& out);
  void on_notice(const PeerHeader& header, const Notice& notice, uint64_t now_ms, Effects& out);

  // The end of an effect with an op. `payload` only for Load.
  void on_completion(OpId op, Outcome outcome, BufferRef payload, uint64_t now_ms, Effects& out);

  // The manager's lease on this target's node holds until `until_ms` (on now_ms's clock, which goes on
  // while the machine sleeps). Never goes back.
  void on_lease(uint64_t until_ms, uint64_t now_ms, Effects& out);

  // A SendSync of a member has arrived. `payload` and `payload_state` as with on_update.
  void on_sync(const PeerHeader& header, std::span<const uint8_t> bytes, BufferRef payload,
               PayloadState payload_state, uint64_t now_ms, Effects& out);

  // A read, the scrubber or a stage has found that version damaged on this target: have it repaired.
  void on_damaged(const ChunkKey& key, const Version& version, uint64_t now_ms, Effects& out);

  // Compare this target's chunks, from `from` on, with its predecessor's (the scrubber); a difference under
  // one version is repaired like damage. Returns the key to go on from, or none at the end; nothing happens
  // unless this target serves and isn't the head.
  std::optional<ChunkKey> on_compare(const ChunkKey& from, uint64_t now_ms, Effects& out);

  // A connection to a member is up (again): what it hasn't answered is sent anew. Losing one
  // needs no event: messages to it may be dropped.
  void on_peer_connected(TargetId target, uint64_t now_ms, Effects& out);

  // Deadlines and resends. Call it every 10 to 100 ms.
  void on_tick(uint64_t now_ms, Effects& out);

  ReplicaStatus status() const;

 private:
  class Machine;
  std::unique_ptr<Machine> machine_;
};

}  // namespace ffs::craq
