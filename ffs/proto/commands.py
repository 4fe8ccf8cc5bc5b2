"""What people ask about the cluster and tell it: `ffs cluster ...`, `ffs space ...`. docs/operations.md.

Form and rules of change as in ffs.proto.common, ids as in ffs.proto.cluster; tags 120-139, answered by
metadata.cluster.commands at the primary. No I/O.
"""

from __future__ import annotations

from msgspec import Struct

from ffs.proto.cluster import TableRoute
from ffs.proto.common import Message
from ffs.proto.spaces import SpaceView

# metadata.cluster.commands answers them, at the primary. docs/operations.md.


class GetCluster(Message, tag=120, kw_only=True):
    """All that `ffs cluster` shows."""


class DeviceView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """`here`: its node is alive and has it open now. Targets: all, in chains, free for new moves."""

    uuid: bytes
    path: str
    here: bool
    poisoned: bool
    size_bytes: int
    capacity_bytes: int
    free_bytes: int
    targets: int
    used_targets: int
    free_targets: int
    role: str = ""
    null_data: bool = False


class NodeView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """`leaving`: targets of the node that chains still have or want; a draining node with none of them
    may be switched off. Also devices that it had and doesn't have open now, while chains need them."""

    id: int
    name: str
    domain: str
    alive: bool
    draining: bool
    incarnation: int
    host: str
    control: str
    silent_ms: int  # since its last heartbeat; -1: none since this manager took over
    leaving: int
    note: str  # why its drain, or its new device, can't go on; ""
    devices: tuple[DeviceView, ...]


class TargetView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A target that is in a chain, is to be, or still holds what a chain has given up (`released`)."""

    id: int
    node: int
    device: bytes
    chain: int
    state: int  # TargetState; of a target that isn't in the chain's record: OFFLINE
    wanted: bool  # the chain shall end with it
    member: bool  # it is in the chain's record
    released: bool
    here: bool  # reported in its node's present incarnation
    poisoned: bool
    used_bytes: int
    chunks: int
    damaged: int
    repaired: int
    scrubbed_bytes: int


class SyncView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A copy under way, as its source tells."""

    source: int
    target: int
    done: bool
    failure: int
    chunks_total: int
    chunks_compared: int
    chunks_sent: int
    bytes_sent: int
    bytes_per_s: int


class ChainView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """`writable`: takes writes. `whole`: all wanted targets serve, and no other one. `shared_domain`: a
    failure domain that holds two of its wanted targets; ""."""

    id: int
    table: int
    term: int
    counter: int
    members: tuple[int, ...]
    states: tuple[int, ...]  # with WAITING and LAST_SERVING
    wanted: tuple[int, ...]  # never empty
    writable: bool
    readable: bool
    whole: bool
    forced: int
    reason: str  # "" when whole
    shared_domain: str
    sync: SyncView | None = None


class GetSpaces(Message, tag=128, kw_only=True):
    """KV spaces and their use, as the primary knows it. `space`: one inode id (NotFound), 0: all."""

    space: int = 0


class SpacesReply(Message, tag=129, kw_only=True):
    """`complete` False: a store of an earlier version is still looked through for its spaces."""

    complete: bool
    spaces: tuple[SpaceView, ...]


class ClusterReply(Message, tag=121, kw_only=True):
    cluster: bytes
    epoch: int
    term: int
    primary: str
    manager_ms: int
    rebalancing: bool  # a rebalance has moves to begin still
    nodes: tuple[NodeView, ...]
    targets: tuple[TargetView, ...]
    chains: tuple[ChainView, ...]
    tables: tuple[TableRoute, ...]
    spaces: tuple[SpaceView, ...] = ()


class DrainNode(Message, tag=122, kw_only=True):
    """Move all targets of a node elsewhere; `undo`: what hasn't moved yet stays. InvalidArgument or NoSpace,
    with what is missing, when there is nowhere to move them. Answered by MoveReply."""

    node: str  # name or id
    undo: bool = False


class ReplaceTarget(Message, tag=123, kw_only=True):
    """Put other targets in the place of one (its id) or of all of a device (uuid in hex, or PATH@NODE), on
    `device` (likewise) or, "", where there is room. Answered by MoveReply."""

    what: str
    device: str = ""


class Rebalance(Message, tag=124, kw_only=True):
    """Even out targets over devices; `onto`: only towards this node (name or id; "": all). `only_plan`: say
    what would be moved. Answered by MoveReply."""

    onto: str = ""
    only_plan: bool = False


class ForceLead(Message, tag=125, kw_only=True):
    """Let a target lead its chain alone, though others may know more. Refused (InvalidArgument) unless it's
    needed. `confirmed` False: answered with what would be lost and nothing is done."""

    target: int
    confirmed: bool = False


class ForceLeadReply(Message, tag=126, kw_only=True):
    chain: int
    done: bool
    absent: tuple[tuple[int, str, str], ...]  # (target, node, why it can't lead) of those that may know more
    silent: tuple[str, ...] = ()  # nodes of those that may come back: their hosts must be off
    notes: tuple[str, ...] = ()


class ForgetNode(Message, tag=130, kw_only=True):
    """Drop all that is known of a node that is off and that no chain needs, with its devices: they would
    have to be formatted to come back. InvalidArgument or Busy with the reason while it can't be. Answered by
    MoveReply."""

    node: str


class MoveReply(Message, tag=127, kw_only=True):
    """`chains` have new wanted targets, `targets` of them are to be filled; `notes` for people."""

    chains: tuple[int, ...] = ()
    targets: int = 0
    reordered: int = 0  # chains that only get another head
    node: int = 0  # that the command was about
    notes: tuple[str, ...] = ()
