"""What the checks know: operations, contents, and what each target has. No rules here (sim_checks)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sim_wire import NONE, Chain, Identity, Kind, Outcome, Record, Version, dotted, short

CONTENT = tuple[bool, bytes]  # exists, bytes
ABSENT: CONTENT = (False, b"")


class Violation(AssertionError):
    """An invariant doesn't hold."""


@dataclass(slots=True)
class Op:
    """A client's update, however often it is sent."""

    identity: Identity
    kind: Kind
    key: bytes
    offset: int = 0
    length: int = 0
    payload: bytes = b""
    tag: int = 0
    epoch: int = 0
    lower: int = 0  # position in the chunk's order that was known when it was invoked
    least_epoch: int = 0  # of the space, acknowledged when it was invoked
    version: Version = NONE  # that committed
    refused: bool = False
    answered: Outcome | None = None

    def __str__(self) -> str:
        what = f"{self.offset}+{self.length} {self.payload.hex()}"
        return f"{self.kind.name} {short(self.key)} by {dotted(self.identity)} {what} from {self.lower}"


@dataclass(slots=True)
class Asked:
    """A read: what was known when it was invoked."""

    key: bytes
    lower: int
    uncommitted_ok: bool = False
    facts_only: bool = False

    def __str__(self) -> str:
        return f"READ {short(self.key)} from {self.lower}"


@dataclass(slots=True)
class AskedLast:
    space: int
    lower: dict[bytes, int]


def apply(op_kind: int, base: CONTENT, offset: int, length: int, payload: bytes) -> CONTENT:
    """The model of an update."""
    content = base[1]
    if op_kind == Kind.REMOVE:
        return ABSENT
    if op_kind == Kind.TRUNCATE:
        return True, content[:length] + bytes(max(0, length - len(content)))
    if op_kind == Kind.WRITE:
        content = content + bytes(max(0, offset - len(content)))
        return True, content[:offset] + payload + content[offset + len(payload) :]
    return True, payload


class Config(NamedTuple):
    """A recorded chain version."""

    serving: tuple[int, ...]  # targets, head first
    syncing: int = 0  # target; 0: none


class Shadow:
    """What one target has: journal records that aren't durable yet, versions that are and aren't committed,
    and its position in each chunk's order of commits (as it shows it, and durably)."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.tail: list[Record] = []
        self.staged: dict[bytes, set[Version]] = {}
        self.position: dict[bytes, int] = {}
        self.durable_position: dict[bytes, int] = {}
        self.serving = False
        self.adopted: Chain = (0, 0)
        self.lost = False  # its device was wiped, and it hasn't been synced since
        self.lost_in = -1  # the incarnation of its node in which that happened

    def __str__(self) -> str:
        return f"target {self.target}"


@dataclass(slots=True)
class Chunk:
    """The truth about one chunk: its states in the order of commits."""

    states: list[CONTENT] = field(default_factory=lambda: [ABSENT])
    positions: dict[Version, int] = field(default_factory=dict)
    known: int = 0  # the highest position that some client was told of
