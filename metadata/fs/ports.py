"""What the namespace needs of the rest of the cluster. metadata/cluster implements it; tests do too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class TableView:
    """A chain table at its present version."""

    id: int
    name: str
    version: int
    chains: Sequence[int]  # ids, in the table's order
    replicas: int
    chunk_size: int  # what files get by default, bytes
    stripe: int = 0  # chains a file uses by default; 0: all


class HeldChunk(NamedTuple):
    """A chunk as one replica of a chain has it."""

    key: bytes  # 24 bytes
    length: int
    pending: bool  # nothing of it is committed there yet


class ClusterPort(Protocol):
    """The manager's state as this process has it cached. Every call returns at once."""

    def manager_time_ms(self) -> int:
        """Manager time: never goes back."""

    def table(self, table: int, version: int = 0, *, role: str = "") -> TableView | None:
        """A chain table at `version` (0: the present one). Table 0 is the one for what names none: the
        first table of `role`, else the default among those without a role. None: there is no such table
        (yet)."""

    def space_bytes(self, table: int) -> tuple[int, int]:
        """(total, free) usable bytes of a table: after replication."""


class ChainPort(Protocol):
    """Work on the chunks of one chain, done by the storage process of its head. Every call is
    idempotent and durable on return. ChainUnavailable when the chain has no head that serves,
    Unreachable when it can't be asked."""

    async def raise_space_epoch(self, chain: int, space: int, epoch: int) -> None:
        """Writes to `space` under an older epoch are refused from now on."""

    async def remove_page(
        self, chain: int, space: int, first_key: bytes, epoch: int, limit: int
    ) -> tuple[int, bool]:
        """Removes at most `limit` chunks of the space, from key `first_key` (16 bytes) on:
        (removed, whether there are more)."""

    async def remove_space(self, chain: int, space: int, epoch: int) -> None:
        """Raises the epoch, then removes all that the chain has of the space. Calls that are made at once
        may go together."""

    async def truncate_chunk(self, chain: int, space: int, key: bytes, length: int, epoch: int) -> None:
        """Cuts a chunk to `length` bytes if it is there and longer."""

    async def last_chunk(self, chain: int, space: int) -> tuple[bytes, int] | None:
        """(key of 16 bytes, bytes) of the last chunk of the space, None if it has none."""

    async def list_chunks(self, chain: int, first_key: bytes, limit: int) -> tuple[list[HeldChunk], bool]:
        """(at most `limit` chunks of all spaces from key `first_key`, 24 bytes, on, in order; whether there
        are more). For checks: what one replica has, a moment ago."""
