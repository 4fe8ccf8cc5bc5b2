"""Messages and records of the cluster: nodes, targets, chains, tables, routing.

Form and rules of change as in ffs.proto.common. Tags 100-149, to the metadata service (commands.py has those
of people; chain_calls.py what goes to a storage process); replies beside their requests. Ids: node, target
u64; chain u32; all begin at 1. A chain version is (term, counter) as in docs/craq.md. No I/O.
docs/control_plane.md gives the exchanges.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from msgspec import Struct

from ffs.proto.auth import KeySet
from ffs.proto.common import Message
from ffs.proto.spaces import SpaceConfig, SpaceUse

MAX_REPLICAS: Final = 8  # native/include/ffs/ffs.h, ffs_chain_route.members
MAX_TARGETS_OF_DEVICE: Final = 64  # ffs_device_info.targets
DEFAULT_CHAINS_PER_DEVICE: Final = 32

# Roles of devices and chain tables. docs/control_plane.md, Roles.
ROLE_KV: Final = "kv"
ROLE_BULK: Final = "bulk"
ROLES: Final = ("", ROLE_KV, ROLE_BULK)


class TargetState(IntEnum):
    """ffs.h FFS_OFFLINE ...; stable numbers."""

    OFFLINE = 0
    SERVING = 1
    SYNCING = 2
    WAITING = 3
    LAST_SERVING = 4


def collector_client(node: int, incarnation: int) -> int:
    """The client session id under which a storage process collects chunks (storage_server.collector):
    above all ids of real sessions, one for each incarnation, so that the manager can fence the last."""
    return 1 << 63 | (node & 0x7FFF_FFFF) << 32 | (incarnation & 0xFFFF_FFFF)


# --- records, also parts of messages ----------------------------------------------------------


class ChainRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """One chain as recorded. `incarnations` are those of the members' nodes when the version was
    recorded (0: never yet): a member under another one has lost its memory (metadata.cluster.chain)."""

    v: int = 1
    id: int
    table: int
    term: int
    counter: int
    members: tuple[int, ...]  # target ids, head first
    states: tuple[int, ...]  # TargetState, one a member
    incarnations: tuple[int, ...]  # one a member
    wanted: tuple[int, ...] = ()  # the targets that the chain shall end with, in order; (): its members
    forced: int = 0  # `force-lead`: this target leads, though others may know more; 0: none


class TableRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A version of a chain table: ffs.layout picks from `chains` by position."""

    v: int = 1
    id: int
    name: str
    version: int
    replicas: int
    chains: tuple[int, ...]
    role: str = ""  # only devices of this role hold its targets; "": devices without one


class DeviceInfo(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    uuid: bytes  # 16 bytes, from its superblock
    path: str  # on its node, for people
    size_bytes: int
    targets: tuple[int, ...]
    role: str = ""  # ROLE_KV, ROLE_BULK, or "": what its operator keeps it for
    null_data: bool = False  # it keeps records and no bytes, for measuring


class NodeRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A storage node. `alive` changes only when a failure timeout passes without a heartbeat, or
    when it registers again; ports and paths are those of its present incarnation."""

    v: int = 1
    id: int
    name: str
    uuid: bytes  # 16 bytes, drawn by the node once and kept in its directory
    incarnation: int
    host: str = ""  # numeric address of the data ports
    host_id: str = ""  # ffs_host_id()
    control: str = ""  # host:port of its control server
    alive: bool = False
    devices: tuple[DeviceInfo, ...] = ()
    domain: str = ""  # failure domain (rack, power feed); "": its own
    draining: bool = False  # gets no new targets; those it has move away
    previous: int = 0  # the incarnation before; 0: one less than the present one
    start: bytes = b""  # RegisterNode.start of the present incarnation


class TargetRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A target: on which device of which node, and (chain != 0) in which chain."""

    v: int = 1
    id: int
    node: int
    device: bytes  # its uuid
    chain: int = 0
    port: int = 0  # of its shard, in the node's present incarnation; 0: not announced
    socket_path: str = ""


# --- messages: a storage node to the manager ----------------------------------------------------


class AllocateTargets(Message, tag=100, kw_only=True):
    """Ids for a device that is about to be formatted. Repeating it with the same (node_uuid,
    device_uuid) gives the same ids."""

    node_uuid: bytes
    node_name: str
    device_uuid: bytes
    count: int


class AllocateTargetsReply(Message, tag=101, kw_only=True):
    targets: tuple[int, ...]


class RegisterNode(Message, tag=102, kw_only=True):
    """First message of a started storage process: gives node id and a new incarnation. Sent again with the
    same `start` - the first answer was lost - it gives the same one."""

    name: str
    uuid: bytes
    host_id: str
    devices: tuple[DeviceInfo, ...]
    domain: str = ""
    start: bytes = b""  # 16 bytes, drawn by each started process; b"": each request is a start


class RegisterNodeReply(Message, tag=103, kw_only=True):
    node: int
    incarnation: int
    manager_ms: int
    failure_timeout_ms: int = 10_000  # of the cluster


class TargetEndpoint(Struct, array_like=True, frozen=True, gc=False):
    target: int
    port: int
    socket_path: str


class AnnounceNode(Message, tag=104, kw_only=True):
    """Where the registered incarnation can be reached. Answered by OkReply."""

    node: int
    incarnation: int
    host: str
    control: str
    endpoints: tuple[TargetEndpoint, ...]


class TargetReport(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """What a target says of itself: ffs_target_report, same names."""

    target: int
    chain: int
    recorded_term: int
    recorded_counter: int
    persisted_term: int
    persisted_counter: int
    persisted_here: bool
    state: int
    poisoned: bool
    used_bytes: int
    capacity_bytes: int
    free_bytes: int
    chunks: int
    reason: int = 0
    leased: bool = False
    suspect: int = 0
    sync_target: int = 0
    sync_done: bool = False
    sync_failure: int = 0
    sync_chunks_total: int = 0
    sync_chunks_compared: int = 0
    sync_chunks_sent: int = 0
    sync_bytes_sent: int = 0
    damaged: int = 0
    repaired: int = 0
    scrubbed_bytes: int = 0


class Heartbeat(Message, tag=106, kw_only=True):
    """`config` is the number of the NodeConfig that the node acts on (0, 0 at first); `fenced` are the client
    sessions that it has fenced since its last heartbeat; `sequence` grows with each heartbeat of an
    incarnation, so that a late one isn't taken for news (0: not given). `spaces` is the revision of the
    SpaceConfig that it acts on (0, 0 at first; None: it takes none, as versions before them)."""

    node: int
    incarnation: int
    config: tuple[int, int]  # manager's term, number in it
    reports: tuple[TargetReport, ...]
    fenced: tuple[int, ...] = ()
    sequence: int = 0
    spaces: tuple[int, int] | None = None
    space_use: tuple[SpaceUse, ...] = ()
    keys: int | None = None  # revision of the KeySet that it acts on (0 at first; None: it takes none)


class ChainRoute(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """ffs_chain_route: for servers `proposed` says persist, don't adopt."""

    chain: int
    table: int
    term: int
    counter: int
    members: tuple[int, ...]
    states: tuple[int, ...]
    proposed: bool = False
    incarnations: tuple[int, ...] = ()  # one a member


class TargetRoute(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """ffs_target_route. Port 0: not reachable (its node hasn't come back); `alive`: its node
    sends heartbeats (a hint: prefer others for reads)."""

    target: int
    node: int
    host: str
    host_id: str
    socket_path: str
    port: int
    alive: bool


class NodeConfig(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """All that a node's native server must know: its chains and where their members are."""

    number: tuple[int, int]
    epoch: int
    chains: tuple[ChainRoute, ...]
    targets: tuple[TargetRoute, ...]
    released: tuple[int, ...] = ()  # targets that are in no chain any more: drop what they hold


class HeartbeatReply(Message, tag=107, kw_only=True):
    manager_ms: int
    next_ms: int  # send the next one after so long, or as soon as a target has news
    config: NodeConfig | None = None  # None: the one that the node has stands
    fences: tuple[int, ...] = ()  # client sessions to fence, until they are in `fenced`
    lease_ms: int = 0  # counted from when the heartbeat was sent
    term: int = 0  # of the manager: a node takes nothing from an earlier one than it has heard from
    spaces: SpaceConfig | None = None  # None: the one that the node has stands. Taken up before `config`
    keys: KeySet | None = None  # the same, and before that


class WaitConfig(Message, tag=108, kw_only=True):
    """A long poll of a storage node: answered by HeartbeatReply-like WaitConfigReply when its configuration
    isn't number `config` any more, its SpaceConfig isn't revision `spaces` (None: it takes none), or after
    wait_ms."""

    node: int
    incarnation: int
    config: tuple[int, int]
    wait_ms: int
    spaces: tuple[int, int] | None = None
    keys: int | None = None


class WaitConfigReply(Message, tag=109, kw_only=True):
    config: NodeConfig | None = None
    fences: tuple[int, ...] = ()
    term: int = 0
    spaces: SpaceConfig | None = None
    keys: KeySet | None = None


# --- messages: clients and people to the metadata service ----------------------------------------


class GetRouting(Message, tag=110, kw_only=True):
    """Routing if its epoch isn't `known_epoch`; waits up to wait_ms for a change (0: answers at once)."""

    known_epoch: int = 0
    wait_ms: int = 0


class TableRoute(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    id: int
    name: str
    version: int
    replicas: int
    chains: tuple[int, ...]
    role: str = ""


class RoutingReply(Message, tag=111, kw_only=True):
    """`changed` False: the epoch is the known one and the rest is empty."""

    epoch: int
    changed: bool
    manager_ms: int = 0
    chains: tuple[ChainRoute, ...] = ()
    targets: tuple[TargetRoute, ...] = ()
    tables: tuple[TableRoute, ...] = ()  # every version of every table


class CreateTable(Message, tag=112, kw_only=True):
    """A chain table over all live nodes' devices of its role. Existing with the same name: answered with it
    if replicas and role agree, else Exists. InvalidArgument with the reason when nodes or targets don't
    suffice."""

    name: str
    replicas: int
    chains_per_device: int = DEFAULT_CHAINS_PER_DEVICE
    wait_nodes: int = 0  # refuse (Overloaded: try again) while fewer nodes are alive
    role: str = ""


class CreateTableReply(Message, tag=113, kw_only=True):
    table: int
    version: int
    chains: int


class GetStatus(Message, tag=114, kw_only=True):
    """What people and `ffs status` want to know. Answered by the primary."""


class DeviceStatus(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    path: str
    uuid: bytes
    size_bytes: int
    capacity_bytes: int
    free_bytes: int
    targets: int
    poisoned: bool


class NodeStatus(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    id: int
    name: str
    alive: bool
    incarnation: int
    host: str
    control: str
    silent_ms: int  # since its last heartbeat; -1: none since this manager took over
    devices: tuple[DeviceStatus, ...]


class ChainStatus(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    id: int
    table: int
    term: int
    counter: int
    members: tuple[int, ...]
    states: tuple[int, ...]
    nodes: tuple[int, ...]
    writable: bool  # takes updates: all that serve in the recorded version do
    readable: bool  # some member serves
    reason: str  # "" when every wanted member serves, in order; else what is missing, in words


class StatusReply(Message, tag=115, kw_only=True):
    cluster: bytes
    epoch: int
    term: int
    primary: str  # address of the answering process
    manager_ms: int
    nodes: tuple[NodeStatus, ...]
    chains: tuple[ChainStatus, ...]
    tables: tuple[TableRoute, ...]
    signed: bool = False  # capabilities are signed, and connections authenticated


class Ping(Message, tag=116, kw_only=True):
    """Answered by OkReply at once by any server, storage processes too."""

    payload: bytes = b""
