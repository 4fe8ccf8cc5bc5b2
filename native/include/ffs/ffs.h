/* ffs.h: the whole C ABI of the native core.
 *
 * Conventions
 * - Every function returns 0 (or a count >= 0 where said) or -errno. On failure
 *   ffs_last_error() holds one line for people, by thread.
 * - Handles are opaque. Who creates destroys. A handle's functions may be called from any
 *   thread unless said otherwise; destroying while another thread is inside is an error of the
 *   caller, except where said.
 * - Option structs begin with struct_size = sizeof(struct): older callers pass shorter ones,
 *   missing fields are zero = default.
 * - Strings are NUL-terminated UTF-8, copied before the call returns.
 * - No C++ exception crosses this line. No callback into the caller: completion is a ring plus
 *   a descriptor to poll.
 * The cffi build reads the part between the two marks below; keep it plain C.
 */
#ifndef FFS_FFS_H
#define FFS_FFS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* CFFI BEGIN */

/* ---- general ------------------------------------------------------------------------ */

int ffs_abi_version(void);                            /* 1 */
/* Copies the calling thread's last error line (always NUL-terminated). Returns its length. */
int ffs_last_error(char *out, size_t capacity);
uint32_t ffs_crc32c(uint32_t seed, const void *data, size_t length); /* seed 0 to begin */
/* Copies and returns the CRC32C of what was copied, in one pass. */
uint32_t ffs_copy_crc32c(void *to, const void *from, size_t length);

/* `count` copies of `bytes` from one address to another, by up to `threads` threads, the caller's among them;
 * blocks until all is copied. Nothing may overlap. Any thread, no locks. EINVAL: an address is null. */
typedef struct {
  uint64_t to, from, bytes;
} ffs_copy_piece;
int ffs_copy_many(const ffs_copy_piece *pieces, size_t count, uint32_t threads);

/* XXH3 with 128 bits and seed 0 of `count` pieces, 16 bytes each into `digests`, in the order that xxhash calls
 * canonical; not proof against who chooses the bytes. Any thread, no locks. EINVAL: an address is null. */
typedef struct {
  uint64_t from, bytes;
} ffs_hash_piece;
int ffs_xxh3_many(const ffs_hash_piece *pieces, size_t count, uint8_t *digests);
const char *ffs_xxh3_backend(void); /* what of the processor it uses */

/* int8 codes of 16-bit floats: [blocks][outer][heads][inner] of them, one range for each head of a block
 * (docs/kv.md, int8 values). `codes` takes as many bytes as there are values, `ranges` blocks x heads pairs
 * (lowest, step) of float. No alignment is needed; nothing may overlap. EINVAL; ERANGE: a value isn't finite,
 * or a head spans more than a float holds (codes are undefined then). Any thread, no locks. */
enum { FFS_FLOAT16 = 1, FFS_BFLOAT16 = 2 };
typedef struct {
  uint32_t struct_size;
  uint32_t dtype;            /* FFS_FLOAT16, FFS_BFLOAT16 */
  uint64_t blocks, outer, heads, inner;
} ffs_int8_shape;
int ffs_int8_encode(const ffs_int8_shape *shape, const void *values, uint8_t *codes, float *ranges);
/* Of a whole block: `keys` bytes come first in both, unchanged, then values; in `coded` their codes, and the
 * ranges behind those. */
int ffs_int8_decode_block(const ffs_int8_shape *shape, uint64_t keys, const void *coded, void *block);
const char *ffs_int8_backend(void); /* "avx512", "avx2" or "plain": what this processor gets */
/* Boot id and network namespace in one string: equal strings can use `local`. */
int ffs_host_id(char *out, size_t capacity);
/* Protocol versions that this process speaks on data connections; by default its build's own. Before the
 * first server or client. For upgrades: holds a new build back to the old version, and lets a test have a
 * build report another one. EINVAL: least > most, or 0. docs/wire_format.md, Connection frames. */
int ffs_set_protocol_versions(uint32_t least, uint32_t most);

/* ---- devices ------------------------------------------------------------------------ */

typedef struct {
  uint32_t struct_size;
  uint32_t sector_bytes;     /* 0: ask the device; 512 or 4096 */
  uint64_t size_bytes;       /* file-backed: its size; 0: as it is */
  uint64_t max_chunks;       /* 0: size / 256 KiB */
  uint64_t journal_bytes;    /* 0: chosen from the size */
  const uint64_t *targets;   /* ids of the targets that live here */
  uint32_t target_count;
  uint32_t force;            /* format over a foreign or used device */
  uint32_t sparse;           /* file-backed: don't write it through once */
  uint32_t only_look;        /* say what it would refuse, and write nothing */
  uint8_t cluster[16];
  uint8_t device_uuid[16];   /* zero: drawn */
  uint32_t null_data;        /* a file: keeps records only, no chunk's bytes; for measuring */
  uint32_t reserved;
} ffs_format_options;

typedef struct {
  uint8_t cluster[16];
  uint8_t device_uuid[16];
  uint64_t size_bytes;
  uint64_t max_chunks;
  uint64_t journal_bytes;
  uint64_t created_ms;       /* Unix time */
  uint64_t features_compat;
  uint64_t features_ro_compat;
  uint64_t features_incompat;
  uint32_t sector_bytes;
  uint32_t format_version;
  uint32_t target_count;
  uint32_t reserved;
  uint64_t targets[64];
} ffs_device_info;

/* Blocking. EBUSY in use, EROFS read-only, always refused; EEXIST it isn't blank (the line names what it holds, and
 * force); ENOSPC too small (the line says the least size); EINVAL. Nothing half made: the superblocks are written
 * last. A block device is discarded whole; with force no older signature is left on it. */
int ffs_device_format(const char *path, const ffs_format_options *options);
/* Blocking, reads only, also of a device in use. ENOMEDIUM: no ffs superblock; EBADMSG: damaged; ENOTSUP: a newer
 * format (the line says which version wrote it); ENOSPC: smaller than its store. */
int ffs_device_inspect(const char *path, ffs_device_info *out);
/* Takes in what the device has beyond its store, as slabs. size_bytes, if not 0: what a file is lengthened to
 * first. Blocking; the store must not be open (EBUSY). EINVAL: nothing to take in; others as inspect. */
int ffs_device_grow(const char *path, uint64_t size_bytes, ffs_device_info *out);

/* Opens the store, gives all free space back to the device (the host's disk, of a file) and closes it. *bytes: how
 * much. Blocking; the store must not be open (EBUSY). EOPNOTSUPP: the device can't; others as inspect. */
int ffs_device_discard(const char *path, uint64_t *bytes);

typedef struct {
  uint64_t slabs, slots_used, slots_free;
} ffs_class_use;             /* of slots of 4 KiB << class */

typedef struct {
  uint64_t target, chunks;   /* committed ones */
  uint64_t logical_bytes, allocated_bytes;
  uint64_t pending_versions, retry_entries, space_epochs, chain_state_bytes;
} ffs_target_use;

typedef struct {
  ffs_device_info info;
  uint64_t device_bytes;     /* the device's size now; info.size_bytes is the store's */
  uint64_t superblock_sequence;
  uint32_t superblock_copies; /* bit 0: the one at byte 0 is whole; bit 1: the one at 65536 */
  uint32_t block_device;
  uint32_t device_sector_bytes;
  uint32_t flushes;          /* write_cache auto flushes it; cache_reason says why */
  uint64_t discard_bytes;    /* one discard; 0: none */
  uint32_t discard_granularity;
  uint32_t recovered;        /* 0: what is below isn't known, `reason` says why (in use, damaged) */
  char cache_reason[80];
  char written_by[32];
  char reason[320];
  uint64_t snapshot_id, snapshot_ms; /* the last one: 0 none; Unix time of its end, 0 unknown */
  uint64_t snapshot_bytes, snapshot_area_bytes;
  uint64_t journal_used_bytes; /* replayed by an opening; info.journal_bytes is its room */
  uint64_t slabs, free_slabs;
  uint64_t capacity_bytes, used_bytes, free_bytes; /* used: slots; free: what new chunks may take */
  uint64_t chunks;
  ffs_class_use classes[13];
  ffs_target_use targets[64]; /* info.target_count of them */
} ffs_device_state;

/* Looks at all of a device without writing: its superblock and, by recovery in memory, what is stored. Blocking,
 * as long as an opening; alone. A device in use or damaged isn't an error: recovered is 0. Else as inspect. */
int ffs_device_survey(const char *path, ffs_device_state *out);

typedef struct {
  uint32_t struct_size;
  uint32_t data;             /* 1: read all chunks and compare all checksums */
  uint32_t depth;            /* chunks that are read at the same time; 0: 32 */
  uint32_t reserved;
} ffs_check_options;

typedef struct {
  uint32_t kind;             /* 0: recovery refuses it; 1: a slot with two owners; 2: free slots and chunks
                              * disagree; 3: content */
  uint32_t pending;          /* 1: a version that isn't committed */
  uint64_t target, space;    /* 1 and 3: the chunk */
  uint8_t key[16];
  uint32_t term, counter;    /* 3: its version */
  uint64_t update;
  char text[320];
} ffs_device_problem;

typedef struct {
  uint32_t verdict;          /* 0: clean, 1: damaged, 2: can't be judged (reason) */
  uint32_t reserved;
  uint64_t problems;         /* of all; the first ones are written out */
  uint64_t chunks, pending_versions;
  uint64_t data_bytes;       /* compared with their checksums */
  char reason[320];
  char note[320];            /* not right, and harmless; or empty */
} ffs_check_report;

/* Checks a device without writing: recovers it in memory, compares free slots with chunks, and with `data` all
 * content with its checksums. Alone. Blocking, as long as reading all of it. What is wrong stands in *out, and
 * nothing but EINVAL is an error. `state` may be NULL. */
int ffs_device_check(const char *path, const ffs_check_options *options, ffs_check_report *out,
                     ffs_device_state *state, ffs_device_problem *problems, uint32_t capacity);

/* ---- storage server ----------------------------------------------------------------- */

typedef struct ffs_server ffs_server;

/* Replies with large payloads over TCP go out without a copy: AUTO: to other hosts, as long as the kernel needn't
 * copy after all (docs/architecture.md, Sending without a copy). */
enum { FFS_ZERO_COPY_AUTO = 0, FFS_ZERO_COPY_OFF = 1, FFS_ZERO_COPY_ON = 2 };

typedef struct {
  uint32_t struct_size;
  uint32_t log_level;        /* 0 errors .. 3 debug; to stderr */
  uint64_t node;
  uint64_t incarnation;
  uint8_t cluster[16];
  const char *bind_host;     /* TCP, e.g. "127.0.0.1" */
  const char *socket_dir;    /* Unix sockets of the shards; NULL: no `local` */
  const char *io_backend;    /* NULL or "auto", "uring", "pread" */
  uint64_t pool_bytes;       /* a shard; 0: 256 MiB */
  uint64_t region_limit_bytes; /* registered client memory a client; 0: 8 GiB */
  uint32_t max_sessions;     /* a shard; 0: 1024 */
  uint32_t max_ops;          /* in flight a shard; 0: 4096 */
  const char *tcp_congestion; /* NULL: "cubic?"; "" leaves the system's. One that
                                ends in ? is taken where the kernel has it and allows it */
  uint64_t flags;
  uint32_t failure_timeout_ms; /* of the cluster, from the manager; 0: 10000. Peer leases are a fifth */
  uint32_t sync_share_percent; /* of the device that background work may take while clients are served; 0: 25 */
  uint64_t scrub_bytes_per_s;  /* a device; 0: no scrub */
  const uint8_t *peer_key;     /* 32 bytes that servers prove to each other; then only signed capabilities are
                                * taken. NULL: neither (a cluster without a secret). Copied */
  uint64_t dedup_bytes_per_s;  /* a device, compared to find equal chunks (FFS_SPACE_DEDUP); 0: none are looked for */
  const char *rdma;          /* devices, "NAME[:PORT[:GID INDEX]]" with commas between them (docs/rdma.md); NULL
                              * or "": all that are there; "off": none */
  uint32_t rdma_traffic_class; /* of what goes out over RDMA, 0 to 255: DSCP << 2 */
  uint32_t zero_copy_send;     /* one of FFS_ZERO_COPY_* */
} ffs_server_options;

/* A key that signs capabilities (docs/control_plane.md, Signing keys). */
typedef struct {
  uint32_t id;
  uint8_t secret[32];
} ffs_signing_key;

typedef struct {
  uint32_t shard;            /* number */
  uint32_t port;             /* TCP */
  char socket_path[108];     /* "" without `local` */
  uint32_t target_count;
  uint64_t targets[64];
} ffs_shard_info;

/* One replica's place: where to reach it. */
typedef struct {
  uint64_t target;
  uint64_t node;
  char host[64];             /* numeric address */
  char host_id[96];          /* ffs_host_id() of its node */
  char socket_path[108];
  uint32_t port;
  uint32_t away;             /* clients: 1 = the manager doesn't hear of its node */
} ffs_target_route;

/* States of a target in its chain. */
enum { FFS_OFFLINE = 0, FFS_SERVING = 1, FFS_SYNCING = 2, FFS_WAITING = 3, FFS_LAST_SERVING = 4 };

typedef struct {
  uint32_t chain;
  uint32_t term;             /* chain version */
  uint32_t counter;
  uint32_t member_count;
  uint64_t members[8];       /* target ids, head first */
  uint8_t states[8];
  uint32_t proposed;         /* servers: 1 = persist, don't adopt; 0 = recorded */
  uint32_t reserved;
  uint64_t incarnations[8];  /* of the members' nodes, for which this version was made */
} ffs_chain_route;

/* What a target says of itself, for heartbeats. */
typedef struct {
  uint64_t target;
  uint32_t chain;            /* 0: in none yet */
  uint32_t recorded_term;    /* chain version that it acts in (0: none since its start) */
  uint32_t recorded_counter;
  uint32_t persisted_term;   /* chain version on its device */
  uint32_t persisted_counter;
  uint32_t persisted_here;   /* 1: persisted by this incarnation */
  uint32_t state;            /* FFS_OFFLINE ... as it sees itself */
  uint32_t poisoned;
  uint64_t used_bytes;
  uint64_t capacity_bytes;   /* of its device */
  uint64_t free_bytes;       /* of its device */
  uint64_t chunks;
  uint32_t reason;           /* craq/replica.h, Reason */
  uint32_t leased;
  uint64_t suspect;          /* a neighbour that owes it an answer for a failure timeout; 0: none */
  uint64_t sync_target;      /* it is the source of that target's sync in its recorded version; 0: none */
  uint32_t sync_done;        /* ... which equals it now, and every commit waits for it */
  uint32_t sync_failure;     /* an errno: why the sync doesn't get on; 0 */
  uint64_t sync_chunks_total, sync_chunks_compared, sync_chunks_sent, sync_bytes_sent;
  uint64_t damaged;          /* chunks known to be damaged now */
  uint64_t repaired;         /* since its start */
  uint64_t scrubbed_bytes;   /* since its start */
} ffs_target_report;

typedef struct {
  uint64_t reads, read_bytes, updates, update_bytes, forwards, refusals, errors;
  uint64_t flushes, journal_bytes, long_steps, longest_step_us;
  uint64_t sessions, regions, region_bytes, pool_bytes, pool_used_bytes, ops_waiting;
  uint64_t bytes_copied;     /* payload bytes copied by the CPU */
  uint64_t crc_failures, frame_errors;
  /* Work in the background: bytes that it has begun to move, by class; microseconds in which it waited for its share or
     behind clients; bytes a second that it may take now while clients are served. */
  uint64_t recovery_bytes, compaction_bytes, scrub_bytes, eviction_bytes, background_held_us, background_rate;
  uint64_t slow_reads;       /* reads of clients that took longer beside it than such reads do without */
  uint64_t longest_read_us;  /* of a client, since the start */
  uint64_t scrubbed_bytes;   /* checked, of all targets that were here */
  /* The store. */
  uint64_t capacity_bytes, free_bytes, max_chunks, chunks, chunk_memory_bytes;
  uint64_t journal_used_bytes, journal_size_bytes, snapshots, snapshot_age_us, overlay_bytes, checksum_errors;
  uint64_t free_slabs, slabs_emptied, moves, moved_bytes, moves_dropped, waiting_for_room;
  uint64_t discards, discarded_bytes, discard_failures, discards_due_bytes;
  /* Equal chunks: bytes that were read and compared, chunks that were put into another's slot, those whose checksums
     were equal and bytes weren't; now: chunks in slots of several, slots that this saves. */
  uint64_t dedup_bytes, dedup_shared, dedup_differ, shared_chunks, saved_bytes;
  /* RDMA: connections that were set up, and that broke; of all of them, work requests by kind, messages that
     told of credits only, bytes written and read, posts to a send queue, reports of its work, messages that came. */
  uint64_t rdma_sessions, rdma_breaks, rdma_sends, rdma_writes, rdma_reads, rdma_credit_sends, rdma_bytes;
  uint64_t rdma_doorbells, rdma_completions, rdma_receives;
  /* Reads sent out of the memory of a device that lies in memory, without a copy of the server's; of them, those that
     were copied after all, as their reader's socket was full for long. Now: bytes on their way so, copies too. */
  uint64_t memory_reads, memory_read_copies, memory_lent_bytes;
  /* Sends over TCP without a copy (docs/architecture.md, Sending without a copy); of them, those that the kernel
     copied after all. */
  uint64_t zero_copy_sends, zero_copy_copied;
  uint64_t memory_writes;    /* New chunks whose bytes were received straight into it. */
} ffs_shard_metrics;

typedef struct {
  uint32_t struct_size;
  uint32_t write_cache;      /* 0: as the kernel says, 1: volatile (flushed), 2: protected (never flushed) */
  uint32_t discard;          /* of freed slabs: 0: where the device can, 1: off, 2: on */
  uint32_t null_data;        /* the device was formatted with null_data; else, and without, EINVAL */
} ffs_device_options;

/* How a chain keeps a space (docs/craq.md, Eviction). */
enum {
  FFS_SPACE_EVICTABLE = 1,   /* chunks may be evicted: to stay below the quota, and to keep room on the device */
  FFS_SPACE_DEDUP = 2,       /* equal chunks of the space share a slot (docs/disk_format.md, Shared slots) */
};
typedef struct {
  uint64_t space;
  uint32_t chain;
  uint32_t flags;
  uint64_t quota_bytes;      /* of the space on that chain, as allocated on one replica; 0: none */
  uint64_t ttl_ms;           /* the most that updates get, in manager time; 0: none */
} ffs_space_policy;

/* What a target holds of a space for which there is a policy. The counters begin with the process; only
 * the head that orders an eviction counts it. */
typedef struct {
  uint64_t target;
  uint64_t space;
  uint64_t chunks;           /* committed */
  uint64_t bytes;            /* as allocated */
  uint64_t evicted_chunks, evicted_bytes;
  uint64_t hits;             /* uses of chunks that were there, at this target */
  uint64_t expired_chunks;   /* removed because they had expired; not among the evicted */
  uint32_t ready;            /* 0: still being counted; chunks and bytes are too low */
  uint32_t reserved;
  uint64_t shared_chunks;    /* of the chunks: in slots that others name as well */
  uint64_t saved_bytes;      /* slots that there would be without */
} ffs_space_use;

int ffs_server_create(const ffs_server_options *options, ffs_server **out);
/* Opens and recovers the device, binds the shard's port and socket. Before start only. Blocking.
 * `options` may be NULL. EBUSY, ENOMEDIUM, EBADMSG, ENOTSUP, EPROTO (another cluster's device), ENOSPC (the
 * device is smaller than it was), EINVAL. */
int ffs_server_add_device(ffs_server *server, const char *path, const ffs_device_options *options,
                          ffs_shard_info *out);
int ffs_server_start(ffs_server *server);
/* Hands routing to the shards (a copy); returns when every shard has taken it. Targets that
 * aren't this server's are peers. Blocking, short. Idempotent; older versions change nothing. */
int ffs_server_configure(ffs_server *server, uint64_t routing_epoch, uint64_t manager_ms,
                         const ffs_chain_route *chains, uint32_t chain_count,
                         const ffs_target_route *targets, uint32_t target_count);
/* The clock of leases, ms: goes on while the machine sleeps (CLOCK_BOOTTIME). */
uint64_t ffs_clock_ms(void);
/* The manager's lease on this node holds until then, on ffs_clock_ms. Never goes back. */
int ffs_server_lease(ffs_server *server, uint64_t until_ms);
/* The keys that sign capabilities from now on, at most 8; what was opened under others is refused. Copied.
 * Blocking, short. EINVAL. */
int ffs_server_set_keys(ffs_server *server, const ffs_signing_key *keys, uint32_t count);
/* Replaces all policies; of chains that this server has no part in too. Blocking, short. Idempotent. */
int ffs_server_set_spaces(ffs_server *server, const ffs_space_policy *policies, uint32_t count);
/* Fills at most capacity records, one for each target and space with a policy; returns how many there are,
 * which may be more. */
int ffs_server_space_use(ffs_server *server, ffs_space_use *out, uint32_t capacity);
/* The target is in no chain any more: drops its chunks and all its state; its reports name chain 0 when
 * that is durable. Returns at once. Idempotent. ENOENT: not this server's. */
int ffs_server_release_target(ffs_server *server, uint64_t target);
/* Readable when a report has news for the manager (state, persisted version, sync done, suspect); reading
 * its 8 bytes rearms it. Owned by the server. */
int ffs_server_news_fd(ffs_server *server);
/* Fills at most capacity reports; returns the count. */
int ffs_server_report(ffs_server *server, ffs_target_report *out, uint32_t capacity);
int ffs_server_metrics(ffs_server *server, uint32_t shard, ffs_shard_metrics *out);
/* Fences a client session on every target: its updates are refused from then on. Blocking. */
int ffs_server_fence(ffs_server *server, uint64_t client);
/* Stops listening, ends sessions, takes a last snapshot, closes devices. Blocking. */
int ffs_server_stop(ffs_server *server);
void ffs_server_destroy(ffs_server *server);

/* ---- client -------------------------------------------------------------------------- */

typedef struct ffs_client ffs_client;
typedef struct ffs_iov ffs_iov;
typedef struct ffs_ring ffs_ring;

enum { FFS_TRANSPORT_AUTO = 0, FFS_TRANSPORT_TCP = 1, FFS_TRANSPORT_LOCAL = 2, FFS_TRANSPORT_RDMA = 3 };

typedef struct {
  uint32_t struct_size;
  uint32_t transport;
  uint64_t client;           /* client session id, from the metadata service */
  uint8_t cluster[16];
  uint32_t connect_timeout_ms; /* 0: 1000 */
  uint32_t request_timeout_ms; /* default deadline; 0: 30000 */
  uint32_t try_timeout_ms;   /* a read turns to another replica; 0: 2000 */
  uint32_t checksum;         /* 0: CRC32C, 1: off */
  uint64_t inflight_bytes;   /* a server and ring; 0: 64 MiB */
  const char *tcp_congestion;
  uint32_t unavailable_timeout_ms; /* a chain of which routing says so long that no serving member is
                                      there: EHOSTDOWN; 0: 3000 */
  uint32_t hedge_percent;    /* reads that may be sent to a second replica, beyond a burst; 0: 5;
                                over 100: none */
  uint32_t hedge_after_ms;   /* 0: adaptive (docs/ring.md, Hedged reads) */
  uint32_t reserved;
  const char *rdma;          /* as ffs_server_options */
  uint32_t rdma_traffic_class;
  uint32_t reserved2;
} ffs_client_options;

/* Doesn't connect: rings connect on first use. FFS_TRANSPORT_RDMA where this process can't have it is an error
 * that says why: ENOTSUP (the build), ENOSYS (no libibverbs), ENODEV. */
int ffs_client_create(const ffs_client_options *options, ffs_client **out);
void ffs_client_destroy(ffs_client *client); /* after its rings */
/* Replaces what is known; waiting requests go on with it. */
int ffs_client_set_routing(ffs_client *client, uint64_t routing_epoch, const ffs_chain_route *chains,
                           uint32_t chain_count, const ffs_target_route *targets, uint32_t target_count);
/* A capability's bytes (wire.h, Capability); returns its id (>= 1) for ffs_sqe.capability. */
int ffs_client_add_capability(ffs_client *client, const void *bytes, uint32_t length);
int ffs_client_renew_capability(ffs_client *client, uint32_t id, const void *bytes, uint32_t length);
int ffs_client_drop_capability(ffs_client *client, uint32_t id);

typedef struct {
  uint32_t struct_size;
  uint32_t flags;            /* FFS_IOV_HUGEPAGES */
  uint64_t size_bytes;       /* rounded up to pages */
  int32_t numa_node;         /* -1: any */
  int32_t fd;                /* -1: a new memfd; else a shared file to map (borrowed, duplicated) */
  void *memory;              /* NULL, or size_bytes of the caller's memory (any alignment), which stays his and
                                must outlive the Iov: fd -1, no flags, numa_node -1. ffs_iov_fd: -1. */
} ffs_iov_options;
enum { FFS_IOV_HUGEPAGES = 1 };

/* Shared memory, page aligned, sealed SHRINK and GROW when it is a memfd of ours. */
int ffs_iov_create(const ffs_iov_options *options, ffs_iov **out);
void *ffs_iov_data(ffs_iov *iov);
uint64_t ffs_iov_size(ffs_iov *iov);
int ffs_iov_fd(ffs_iov *iov);
/* EBUSY while a request of any ring uses it. */
int ffs_iov_destroy(ffs_iov *iov);

typedef struct {
  uint32_t struct_size;
  int32_t fd;                /* a dmabuf (borrowed, duplicated): what a GPU or another device exports */
  uint64_t offset;           /* of it; any alignment */
  uint64_t size_bytes;       /* exactly, not rounded */
} ffs_dmabuf_options;

/* Memory of a device (docs/rdma.md, Memory of a device): requests read into it and write from it over RDMA only, and no
 * CPU touches it. ffs_iov_data: NULL; ffs_iov_fd: -1. The memory must stay exported, at its place, until
 * ffs_iov_destroy. It is registered with an adapter at its first use, in the thread of the ring that uses it, which
 * blocks meanwhile (milliseconds a GiB); what goes wrong then is the result of the request. Any
 * thread, doesn't block. EBADF; EINVAL: no dmabuf, no bytes, or it ends before offset + size_bytes; EMFILE. */
int ffs_iov_import_dmabuf(const ffs_dmabuf_options *options, ffs_iov **out);

/* Why a request could do nothing with memory of a device: ffs_cqe.detail is one of these and 256 times the
 * FFS_TRANSPORT_... by which the target (ffs_cqe.value) is reached. Such a request isn't tried again by itself. */
enum {
  FFS_DEVICE_TRANSPORT = 0x10001, /* EOPNOTSUPP: it isn't reached over RDMA */
  FFS_DEVICE_REGISTER = 0x10002,  /* the adapter doesn't register the memory: the kernel's errno, EOPNOTSUPP: never */
  FFS_DEVICE_REACH = 0x10003,     /* ENXIO: registered, and the server's adapter was refused: it was freed or moved */
  FFS_DEVICE_HOLE = 0x10004       /* EOPNOTSUPP: a read with FFS_SQE_ZERO_FILL met a hole: nobody can put zeros there */
};

enum {
  FFS_OP_READ = 1, FFS_OP_WRITE = 2, FFS_OP_TRUNCATE = 3, FFS_OP_REMOVE = 4, FFS_OP_REPLACE = 5,
  FFS_OP_CREATE = 6, FFS_OP_SPACE_EPOCH = 7, FFS_OP_REMOVE_RANGE = 8, FFS_OP_TOUCH = 9,
  FFS_OP_EXISTS = 10, FFS_OP_LAST_CHUNK = 11, FFS_OP_LIST_CHUNKS = 12
};
enum {
  FFS_SQE_VERIFY = 1,        /* read: verify whole granules on the server for a part */
  FFS_SQE_COMPARE_TAG = 2,   /* read, exists: `tag` must be the chunk's */
  FFS_SQE_TOUCH = 4,
  FFS_SQE_PIN = 8,
  FFS_SQE_UNPIN = 16,
  FFS_SQE_ZERO_FILL = 32,    /* read: an absent chunk or a short one reads as zeros (holes) */
  FFS_SQE_NEED_EXISTING = 64, /* write: ENOENT where the chunk is absent */
  FFS_SQE_BEYOND_END = 128   /* write: EEXIST if the chunk reaches beyond `offset` (value: its length) */
};
enum {
  FFS_LIST_ALL_SPACES = 1,   /* flags of LIST_CHUNKS: beyond the key's space (cluster capability) */
  FFS_LIST_SPACES_ONLY = 2   /* the first chunk of each space */
};

typedef struct {
  uint8_t op;
  uint8_t flags;
  uint8_t tag_bytes;
  uint8_t codec;
  uint32_t chain;
  uint32_t capability;
  uint32_t group;            /* k >= 1: this and the next k-1 entries complete as one request;
                                0 inside a group. Reads of one chunk that follow each other in it
                                are of one version of the chunk, or it fails with EAGAIN */
  uint8_t key[24];
  uint32_t offset;           /* in the chunk */
  uint32_t length;           /* bytes; TRUNCATE: the chunk's new length */
  uint32_t logical_length;
  uint32_t timeout_ms;       /* 0: the client's default */
  ffs_iov *iov;              /* NULL where no data moves */
  uint64_t iov_offset;       /* EXISTS: keys stand there (wire.h ExistsKey x length), results
                                (ExistsEntry) overwrite them from the start.
                                LIST_CHUNKS: at most `length` (1024) of wire.h ListEntry, from `key` on */
  uint64_t space_epoch;
  uint64_t expiry_ms;
  uint64_t userdata;
  uint64_t target;           /* LAST_CHUNK, LIST_CHUNKS, READ: force this replica; 0: choose */
  uint8_t tag[16];
  uint8_t priority;
  uint8_t reserved[7];
} ffs_sqe;

typedef struct {
  uint64_t userdata;
  int64_t result;            /* bytes moved (a group: their sum up to the first short one),
                                or -errno of the first failure */
  uint32_t detail;           /* wire.h Detail, or FFS_DEVICE_... */
  uint32_t failed;           /* group: entries that failed */
  uint32_t chunk_length;     /* of the last entry's chunk */
  uint32_t chain;            /* of the failure */
  uint64_t value;            /* REMOVE_RANGE: removed; CREATE: length of what was there;
                                LAST_CHUNK: chunks of the space;
                                LIST_CHUNKS: 1 if there are more (result: entries);
                                detail FFS_DEVICE_...: the target that was asked */
  uint8_t key[24];           /* LAST_CHUNK */
  uint8_t tag[16];
  uint8_t tag_bytes;
  uint8_t codec;
  uint8_t reserved[6];
} ffs_cqe;

typedef struct {
  uint32_t struct_size;
  uint32_t entries;          /* requests that may be prepared or in flight; a power of two */
  uint32_t inflight;         /* of these at servers at a time; the others go out as those are answered, in submit
                                and wait. 0: all; at most `entries` */
  uint32_t reserved;
} ffs_ring_options;

typedef struct {
  uint64_t submitted, completed, failed, retries, hedges, send_calls, recv_calls;
  uint64_t bytes_read, bytes_written, bytes_copied, connects;
  uint64_t max_inflight;     /* entries at servers at a time, at most so far */
  uint64_t hedge_wins;       /* hedged reads whose second replica answered first */
  uint64_t damaged;          /* answers whose data didn't match its checksums, or that said so */
  uint64_t budget_waits;     /* retries that waited for the retry budget */
  uint64_t unavailable;      /* requests that ended with EHOSTDOWN */
  uint64_t tcp_links, local_links, rdma_links; /* connections that stand now, by transport */
  /* Over RDMA, of all connections: posts to a send queue, messages (those posted with their bytes; those that told
     of credits only), reports of the send queue, messages that came, connections that broke. */
  uint64_t rdma_doorbells, rdma_sends, rdma_inline_sends, rdma_credit_sends, rdma_completions, rdma_receives;
  uint64_t rdma_breaks;
  uint64_t bytes_landed; /* that a server of this host read into memory of the ring's own, copied from there */
} ffs_ring_stats;

/* A ring works in the calling thread: submit sends, wait receives; one thread at a time is
 * inside (EBUSY otherwise). It owns its connections. A handle isn't an address: when its ring
 * is gone, or another thread just destroys it, calls are refused (EBADF, EBUSY). EMFILE: 65536 rings. */
int ffs_ring_create(ffs_client *client, const ffs_ring_options *options, ffs_ring **out);
/* Cancels what is in flight and waits until no server can touch its buffers any more
 * (docs/ring.md, Buffers), then frees. */
int ffs_ring_destroy(ffs_ring *ring);
/* Takes whole groups; returns how many entries were taken (fewer: the ring is full). EINVAL
 * names the first bad entry (bounds of the iov, unknown op) and takes none. */
int ffs_ring_prepare(ffs_ring *ring, const ffs_sqe *entries, uint32_t count);
int ffs_ring_submit(ffs_ring *ring);   /* never blocks on a server; returns entries sent or queued */
enum { FFS_WAIT_NEEDS_ROUTING = 1, FFS_WAIT_TIMEOUT = 2, FFS_WAIT_NEEDS_CAPABILITY = 4 };
/* Submits what is prepared, then waits for at least `min` completions, at most timeout_ms
 * (-1: no limit). Returns how many were stored (<= capacity), in completion order. Comes back
 * early, with *events set, when requests wait for newer routing or for a renewed capability:
 * give it (ffs_client_set_routing) and call again; the requests go on with the same identity. */
int ffs_ring_wait(ffs_ring *ring, ffs_cqe *out, uint32_t capacity, uint32_t min, int32_t timeout_ms,
                  uint32_t *events);
/* The request completes with -ECANCELED, or as it would have (first wins). ENOENT. */
int ffs_ring_cancel(ffs_ring *ring, uint64_t userdata);
/* Readable when wait(min=0) would make progress. Owned by the ring. */
int ffs_ring_fd(ffs_ring *ring);
int ffs_ring_get_stats(ffs_ring *ring, ffs_ring_stats *out);

/* ---- floors for benchmarks ----------------------------------------------------------- */

typedef struct ffs_floor ffs_floor;
typedef struct {
  uint32_t struct_size;
  uint32_t op;               /* 0 read, 1 write, 2 socket (server process needed), 3 memcpy, 4 message: a socket, heads only */
  const char *path;          /* the device file, or the socket's address host:port; of op 4 also a Unix socket's path */
  uint64_t region_bytes;     /* of the device that is used */
  uint64_t region_offset;
  uint32_t block_bytes;
  uint32_t depth;
  uint32_t random;
  uint32_t crc;              /* also compute CRC32C over what moved */
  uint32_t fsync_every;      /* writes: one fdatasync for so many blocks; 0 none */
  const char *tcp_congestion;
} ffs_floor_options;
/* An own minimal io_uring/O_DIRECT or socket loop; setup is outside the timed slices. */
int ffs_floor_open(const ffs_floor_options *options, ffs_floor **out);
/* Runs about duration_ms; stores blocks done and nanoseconds taken. */
int ffs_floor_run(ffs_floor *floor, uint32_t duration_ms, uint64_t *blocks, uint64_t *elapsed_ns);
void ffs_floor_close(ffs_floor *floor);
/* The peer of op 2: serves block_bytes replies on host:port until the process ends or the
 * connection closes; prints nothing. Blocking. Port 0 binds any and stores it before accepting. */
int ffs_floor_serve(const char *host, int *port_inout, int listen_fd, const char *tcp_congestion);

/* ---- the engine without a server, for benchmarks -------------------------------------- */

typedef struct ffs_engine_bench ffs_engine_bench;
typedef struct {
  uint32_t struct_size;
  uint32_t flags;            /* 0 */
  const char *path;          /* a file that isn't there yet: made, formatted, removed at the end */
  const char *io_backend;    /* NULL or "auto", "uring", "pread" */
  uint64_t size_bytes;
  uint64_t max_chunks;       /* 0: the engine's choice */
  uint64_t journal_bytes;    /* 0: the engine's choice */
  uint32_t depth;            /* operations in flight, at most; up to 1024 */
  uint32_t reserved;
} ffs_engine_bench_options;
typedef struct {
  uint32_t struct_size;
  uint32_t work;             /* 0 read, 1 replace whole chunks, 2 overwrite in place (up to 64 KiB) */
  uint32_t block_bytes;
  uint32_t depth;
  uint32_t random;
  uint32_t beside;           /* what goes on meanwhile: 0 nothing, 1 snapshots, 2 compaction */
  uint64_t working_set;      /* chunks, from the first; 0: all */
  uint32_t plain;            /* the caller's memory isn't registered (a server's is) */
  uint32_t reserved;
} ffs_engine_bench_load;
typedef struct {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t operations, elapsed_ns;
  uint64_t flushes, journal_bytes, snapshots, moved_bytes; /* during the run */
  uint64_t longest_step_us;  /* of the store, since it was opened */
  uint64_t longest_operation_us;
  uint64_t granules_read;    /* during the run: to verify them before small overwrites */
} ffs_engine_bench_count;
typedef struct {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t chunks;
  uint64_t data_offset;      /* where chunks begin on the device, to within 16 MiB */
} ffs_engine_bench_fact_sheet;
/* Format, open. The calling thread is the engine's: all other calls come from it. All block. */
int ffs_engine_bench_open(const ffs_engine_bench_options *options, ffs_engine_bench **out);
/* Chunks number first .. first + count - 1, of `bytes` each. */
int ffs_engine_bench_fill(ffs_engine_bench *bench, uint64_t first, uint64_t count, uint32_t bytes);
/* Removes all chunks but every keep-th. */
int ffs_engine_bench_thin(ffs_engine_bench *bench, uint32_t keep);
/* Keeps the depth for about duration_ms, then lets it drain. */
int ffs_engine_bench_run(ffs_engine_bench *bench, const ffs_engine_bench_load *load, uint32_t duration_ms,
                         ffs_engine_bench_count *out);
/* Closes the store and opens it anew: its counters start again. */
int ffs_engine_bench_reopen(ffs_engine_bench *bench);
int ffs_engine_bench_facts(ffs_engine_bench *bench, ffs_engine_bench_fact_sheet *out);
void ffs_engine_bench_close(ffs_engine_bench *bench);

typedef struct {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t chunks;
  uint64_t memory_bytes;     /* what the store counts for its chunks */
  uint64_t resident_bytes;   /* of the process, more than with the same store without chunks */
  uint64_t open_us, open_cpu_us;
  uint64_t snapshot_us, snapshot_bytes;
  uint64_t longest_step_us, longest_pass_cpu_us; /* while a snapshot is written */
} ffs_engine_bench_scale_report;
/* A store with so many chunks of 1 MiB, of which only the records are there, in a sparse file that is
 * removed at the end: what they take, how long opening takes. In a process of its own, as resident memory
 * is found by difference. Blocks for seconds. */
int ffs_engine_bench_scale(const char *path, uint64_t chunks, ffs_engine_bench_scale_report *out);

/* ---- a chunk store without a server: the local tier of a KV cache (docs/kv_tiers.md) ---------------- */

typedef struct ffs_local ffs_local;
typedef struct {
  uint32_t struct_size;
  uint32_t flags;            /* FFS_LOCAL_... */
  const char *path;          /* a file that is made if it isn't there, or one or a device that was one before */
  const char *io_backend;    /* NULL or "auto", "uring", "pread" */
  uint64_t size_bytes;       /* of a new one */
  uint64_t max_chunks;       /* of a new one; 0: size / 256 KiB */
} ffs_local_options;
enum {
  FFS_LOCAL_FRESH = 1,       /* forget what it holds */
  FFS_LOCAL_SPARSE = 2       /* a new file takes its room as it is written */
};
enum { FFS_LOCAL_READ = 1, FFS_LOCAL_PUT = 2, FFS_LOCAL_REMOVE = 3, FFS_LOCAL_EXISTS = 4 };
typedef struct {
  uint8_t key[16];
  uint8_t tag[16];
  uint64_t memory;           /* address; aligned to 4096 its bytes aren't copied */
  uint32_t op;
  uint32_t length;           /* READ: room; PUT: bytes, 1 to 16 MiB */
  int32_t result;            /* out: bytes (REMOVE: 0), or -errno: ENOENT no such block (or another tag), EMSGSIZE it
                              * doesn't fit, EBADMSG damaged, ENOSPC full, EBUSY it is being put already, EIO */
  uint32_t reserved;
} ffs_local_entry;
typedef struct {
  uint8_t key[16];
  uint8_t tag[16];
  uint32_t length;
  uint32_t reserved;
} ffs_local_listed;
typedef struct {
  uint32_t struct_size;
  uint32_t most_in_flight;   /* operations, so far */
  uint64_t capacity_bytes, free_bytes, chunks, max_chunks;
  uint64_t reads, puts, bytes_read, bytes_written, flushes, checksum_errors;
  uint32_t poisoned;         /* its device failed: every put fails until it is opened again */
  uint32_t uring;            /* 1: io_uring */
} ffs_local_figures;

/* Opens or makes it; a thread of its own serves it from then on. Blocking. EBUSY in use, EXDEV a cluster's device, ENOSPC
 * too small (the line says the least size), EBADMSG damaged, ENOMEDIUM something else, EINVAL. */
int ffs_local_open(const ffs_local_options *options, ffs_local **out);
/* All of the entries, at most `depth` of them in flight (0: as many as it can). Blocking; any thread, several at once;
 * reads of one go before the puts of another. A put is durable. EINVAL names the first bad entry and does none. */
int ffs_local_run(ffs_local *local, ffs_local_entry *entries, uint32_t count, uint32_t depth);
/* Blocks in the order of their keys, those after the key `after` (NULL: from the first). How many. Blocking. */
int ffs_local_list(ffs_local *local, const uint8_t *after, ffs_local_listed *out, uint32_t capacity);
int ffs_local_get_figures(ffs_local *local, ffs_local_figures *out);
/* Writes a snapshot and frees; no call may be under way. Blocking. */
void ffs_local_close(ffs_local *local);

/* CFFI END */

#ifdef __cplusplus
}
#endif

#endif
