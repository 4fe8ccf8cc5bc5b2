"""The seam of eviction orders: in which order blocks go, and nothing else (docs/kv_tiers.md, Policies)."""

from __future__ import annotations

from typing import Final, Protocol

from ffs.errors import InvalidArgument

NAMES: Final = ("adaptive", "lru", "lru-2", "s3-fifo")


class Order(Protocol):
    """The blocks of one tier, in the order in which they should go. Not thread-safe.

    Sizes are bytes and may differ by block. A held block is pinned: it stays, and isn't in the line of
    those that may go. Each method is O(1), or O(log n) amortised.
    """

    @property
    def total_bytes(self) -> int:
        """Of all blocks, held ones too."""
        ...

    def __contains__(self, key: bytes) -> bool: ...

    def __len__(self) -> int: ...

    def insert(self, key: bytes, nbytes: int, held: bool = False) -> None:
        """A block that isn't there is now. This counts as a use. `held`: and it can't go until `free`."""
        ...

    def touch(self, key: bytes) -> None:
        """A block that is there was used."""
        ...

    def hold(self, key: bytes) -> None:
        """It can't go until `free`. Once, not counted: pins.py counts."""
        ...

    def free(self, key: bytes) -> None:
        """The opposite."""
        ...

    def peek(self) -> bytes | None:
        """Who goes next; None: nobody can. The same until something else is called."""
        ...

    def evict(self, key: bytes) -> None:
        """It went to make room: it may be remembered, so that its return is noticed."""
        ...

    def remove(self, key: bytes) -> None:
        """It ceased to exist: nothing is remembered."""
        ...


def make_order(name: str, capacity_bytes: int) -> Order:
    """One of NAMES for a tier of `capacity_bytes`. InvalidArgument."""
    from ffs.kv.policy.adaptive import Adaptive
    from ffs.kv.policy.lru import Lru
    from ffs.kv.policy.lru_k import LruK
    from ffs.kv.policy.s3_fifo import S3Fifo

    if capacity_bytes <= 0:
        raise InvalidArgument(f"a tier of {capacity_bytes} bytes holds nothing")
    if name == "adaptive":
        return Adaptive(capacity_bytes)
    if name == "lru":
        return Lru()
    if name == "lru-2":
        return LruK(capacity_bytes)
    if name == "s3-fifo":
        return S3Fifo(capacity_bytes)
    raise InvalidArgument(f"eviction policy {name!r}: there are {', '.join(NAMES)}")
