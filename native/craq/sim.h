/* One replica over a model of its store, driven through bytes: how tests/sim (Python) runs the
 * very machine that the server runs. C, to be a part of the C ABI (include/ffs/ffs.h).
 *
 * Bytes are little-endian without padding. "key" is 24 bytes, "version" 16 (term u32, counter
 * u32, update u64), "chain" 8 (term u32, counter u32), "bytes" a u32 length and that many bytes.
 *
 * The model of the disk is a journal: each Stage, Commit, Refuse, epoch, chain record, Install, Erase,
 * ResetTarget and SetRetry is appended when the replica asks for it, visible at once (a stage that commits:
 * its commit only when durable), and durable only when a DISK event says so, in order. A crash keeps what is
 * durable, and as many further records as the event says. A committed version can be damaged at rest: Read,
 * Load, Copy, and a stage that needs it, then end with `corrupt`, until it is installed or replaced.
 *
 * An event is: type u8, now_ms u64, and
 *    1 TICK
 *    2 RECORDED, 3 PROPOSED   chain, count u8, count x (target u64, state u8, incarnation u64)
 *    4 UPDATE    token u64, chain, authority u16, client u64, channel u32, sequence u64, key,
 *                kind u8, offset u32, length u32, tag u64, flags u8 (1 pinned), expiry u64, expected
 *                version, epoch u64, deadline u64, need_existing u8, payload_state u8, payload bytes
 *    5 READ      token u64, chain, authority u16, key, offset u32, length u32, epoch u64,
 *                flags u8 (1 uncommitted_ok, 2 facts_only, 4 compare_tag, 8 touch), tag u64, deadline u64
 *    6 SET_EPOCH token u64, chain, authority u16, space u64, epoch u64, deadline u64
 *    7 REMOVE_PAGE token u64, chain, authority u16, space u64, has_after u8, key, limit u32,
 *                epoch u64, deadline u64
 *    8 LAST_CHUNK  token u64, chain, authority u16, space u64, deadline u64
 *    9 MESSAGE   payload_state u8, message bytes (as a SEND effect gave them; bad: with another payload)
 *   10 DISK      count u32: so many further journal records become durable
 *   11 DONE      op u64, outcome u16: a Fetch, Read, Load or Copy ends (ok: as the store has it)
 *   12 CONNECTED target u64
 *   13 CRASH     keep u32: of the records that aren't durable, the first `keep` survive;
 *                the replica starts anew, without configuration
 *   14 SPACE     admit u16, stage u16, evicts u8: outcomes that admit() and Stage give from now on; unless it
 *                is ok, Install ends with no_space. evicts: what admit() refuses waits
 *   15 DUMP
 *   16 FENCE     client u64
 *   17 LEASE     until u64: the manager's lease
 *   18 START     wipe u8: the replica starts anew now (after a CRASH: when the process is back), on an empty
 *                store if `wipe`
 *   19 DAMAGE    key, silent u8: the committed version is damaged at rest; silent: its content changes and
 *                its checksums with it
 *   20 DAMAGED   key, version: on_damaged
 *   21 COMPARE   key: on_compare
 *   22 STATUS
 *   23 EVICT     key, version, last access u64, expired u8: on_evict
 *   24 CLOCK     manager time u64, from now on
 *   25 TOUCH     key: the store hears of a use (a Touch of the replica does the same). A crash forgets it
 *   26 SAMPLE    key
 *
 * The answer is a sequence of records, each a type u8, a size u32 of what follows, and
 *    1 SEND      to u64, message bytes; type u8 (0 update, 255 of recovery, else NoticeType)
 *    2 REPLY     token u64, outcome u16, reason u8, chain, version, length u32, key, more u8,
 *                count u32, content bytes (of a read)
 *    3 RECORD    kind u8 (1 stage, 3 commit, 4 refuse, 5 epoch, 6 chain, 7 fence, 8
 *                install, 9 erase, 10 reset, 11 retry entry), key, version, base version, client u64,
 *                channel u32, sequence u64, removal u8, outcome u16, update kind u8, exists u8, content
 *                bytes (of that version). chain: `version` holds what is adopted, `base` what is proposed;
 *                install: `base` is only_over
 *    4 STARTED   kind u8 (1 fetch, 2 read, 3 load, 4 copy), op u64
 *    5 STATE     serving u8, reason u8, chain
 *    6 PROPOSAL  chain
 *    7 FAULT     text: the replica asked for what its contract forbids
 *    8 DUMPED    (after a STATUS answer) chunks u32, then each: key, exists u8, version, tag u64, damaged u8,
 *                content bytes, pendings u32, then each: version, removal u8, client u64, channel u32,
 *                sequence u64, content bytes; retry entries u32, then each: client u64, channel u32,
 *                sequence u64, key, version, state u8, outcome u16; epochs u32, then each: space u64,
 *                epoch u64
 *    9 FAILED    outcome u16: a journal record ended without success and changed nothing
 *   10 REPAIRED  key, version, ok u8
 *   11 STATUS    serving u8, reason u8, chain, proposed chain, adopted chain (both durable), persisted_here
 *                u8, state u8, leased u8, suspect u64, sync_target u64, sync_done u8, sync_failure u16,
 *                damaged u32, repaired u32, pendings u32, waiting u32, buffers u32, undurable u32
 *   12 COMPARED  more u8, key to go on from
 *   13 EVICTION  answer u8 (0 ordered, 1 changed, 2 busy, 3 not head), after what it led to
 *   14 EVICTED   key, outcome u16
 *   15 SAMPLED   version, last access u64, pinned u8, expired u8
 */
#ifndef FFS_CRAQ_SIM_H
#define FFS_CRAQ_SIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ffs_sim ffs_sim;

typedef struct ffs_sim_options {
  uint32_t struct_size; /* sizeof(ffs_sim_options) */
  uint32_t chain;
  uint64_t target;
  uint32_t max_pendings;
  uint32_t max_pendings_per_chunk;
  uint64_t resend_ms;
  uint64_t peer_lease_ms; /* 0: leases are off */
  uint64_t suspect_ms;
  uint64_t now_ms; /* of the first start */
  uint32_t sync_window;
  uint32_t mutant; /* craq::Mutant; 0 in all but the tests that must fail */
} ffs_sim_options;

/* A target with an empty store. The caller owns it. NULL if the options make no sense. */
ffs_sim* ffs_sim_create(const ffs_sim_options* options);
void ffs_sim_destroy(ffs_sim* sim);

/* Gives one event; *effects points to the answer, valid until the next call for this sim.
 * 0; -EINVAL if the event is malformed (nothing happened). Not thread-safe; never blocks. */
int ffs_sim_step(ffs_sim* sim, const uint8_t* event, size_t event_bytes, const uint8_t** effects,
                 size_t* effects_bytes);

#ifdef __cplusplus
}
#endif

#endif
