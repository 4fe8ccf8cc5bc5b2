/* One replica over a model of its store, driven through bytes: how tests/sim (Python) runs the
 * very machine that the server runs. C, to be a part of the C ABI (include/ffs/ffs.h).
 *
 * Bytes are little-endian without padding. "key" is 24 bytes, "version" 16 (term u32, counter
 * u32, update u64), "chain" 8 (term u32, counter u32), "bytes" a u32 length and that many bytes.
 *
 * The model of the disk is a journal: each Stage, Commit, Refuse, epoch and chain record is
 * appended when the replica asks for it, visible at once, and durable only when a DISK event says
 * so, in order. A crash keeps what is durable, and as many further records as the event says.
 *
 * An event is: type u8, now_ms u64, and
 *    1 TICK
 *    2 RECORDED, 3 PROPOSED   chain, count u8, count x (target u64, state u8)
 *    4 UPDATE    token u64, chain, authority u16, client u64, channel u32, sequence u64, key,
 *                kind u8, offset u32, length u32, tag u64, expected version, epoch u64,
 *                deadline u64, need_existing u8, payload_state u8, payload bytes
 *    5 READ      token u64, chain, authority u16, key, offset u32, length u32, epoch u64,
 *                flags u8 (1 uncommitted_ok, 2 facts_only, 4 compare_tag), tag u64, deadline u64
 *    6 SET_EPOCH token u64, chain, authority u16, space u64, epoch u64, deadline u64
 *    7 REMOVE_PAGE token u64, chain, authority u16, space u64, has_after u8, key, limit u32,
 *                epoch u64, deadline u64
 *    8 LAST_CHUNK  token u64, chain, authority u16, space u64, deadline u64
 *    9 MESSAGE   payload_state u8, message bytes (as a SEND effect gave them)
 *   10 DISK      count u32: so many further journal records become durable
 *   11 DONE      op u64, outcome u16: a Fetch, Read or Load ends
 *   12 CONNECTED target u64
 *   13 CRASH     keep u32: of the records that aren't durable, the first `keep` survive;
 *                the replica starts anew, without configuration
 *   14 SPACE     admit u16, stage u16: outcomes that admit() and Stage give from now on
 *   15 DUMP
 *   16 FENCE     client u64
 *
 * The answer is a sequence of records, each a type u8, a size u32 of what follows, and
 *    1 SEND      to u64, message bytes; type u8 (0 update, else NoticeType)
 *    2 REPLY     token u64, outcome u16, reason u8, chain, version, length u32, key, more u8,
 *                count u32, content bytes (of a read)
 *    3 RECORD    kind u8 (1 stage, 2 stage and commit, 3 commit, 4 refuse, 5 epoch, 6 chain), key,
 *                version, base version, client u64, channel u32, sequence u64, removal u8,
 *                outcome u16, update kind u8, exists u8, content bytes (of that version)
 *    4 STARTED   kind u8 (1 fetch, 2 read, 3 load), op u64
 *    5 STATE     serving u8, reason u8, chain
 *    6 PROPOSAL  chain
 *    7 FAULT     text: the replica asked for what its contract forbids
 *    8 DUMPED    serving u8, reason u8, chain, proposed chain, adopted chain (both durable),
 *                persisted_here u8, pendings u32, waiting u32,
 *                buffers u32, undurable u32, chunks u32, then each: key, exists u8, version, tag u64,
 *                content bytes, pendings u32, then each: version, removal u8, client u64, channel u32,
 *                sequence u64, content bytes
 *    9 FAILED    outcome u16: a journal record ended without success and changed nothing
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
  uint32_t mutant; /* craq::Mutant; 0 in all but the tests that must fail */
  uint32_t reserved;
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
