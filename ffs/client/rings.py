"""Internal rings of file objects: a pool, each with its staging memory. docs/client.md, Data path.

A transfer takes a ring for its duration, so N threads that read or write at once use N rings,
and the latest used is given first. A ring whose transfer was interrupted is closed, not given
back: closing waits until no server can touch its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ffs._native.iov import Iov
from ffs._native.ring import Ring
from ffs._native.routes import ChainRoute, TargetRoute
from ffs.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ffs._native.ring import NativeClient
    from ffs.proto import cluster

ENTRIES = 256
"""Requests that one internal ring has in flight at most."""

SMALL_BYTES = 1 << 20
LARGE_BYTES = 64 << 20
"""Staging memory of a ring: small until a transfer has use for more. At least 2 chunks of 16 MiB."""

_MAX_IDLE = 64


def native_chains(chains: Sequence[cluster.ChainRoute]) -> list[ChainRoute]:
    """Chains of a routing message as native takes them."""
    return [
        ChainRoute(
            chain=chain.chain,
            term=chain.term,
            counter=chain.counter,
            members=chain.members,
            states=chain.states,
        )
        for chain in chains
    ]


def native_targets(targets: Sequence[cluster.TargetRoute]) -> list[TargetRoute]:
    """Targets of a routing message as native takes them."""
    return [
        TargetRoute(
            target=target.target,
            node=target.node,
            host=target.host,
            port=target.port,
            host_id=target.host_id,
            socket_path=target.socket_path,
            away=not target.alive,
        )
        for target in targets
    ]


class StagedRing:
    """A ring and the memory through which its data goes. One transfer at a time.

    The memory goes with its last reference."""

    def __init__(self, native: NativeClient) -> None:
        self.ring = Ring(native, ENTRIES)
        self.iov = Iov(SMALL_BYTES)
        self.memory: NDArray[np.uint8] = self.iov.numpy()

    def reserve(self, size: int) -> None:
        """Make the staging memory large if `size` bytes have use for it. No request may be in flight."""
        if size > SMALL_BYTES and len(self.memory) < LARGE_BYTES:
            self.iov = Iov(LARGE_BYTES)
            self.memory = self.iov.numpy()

    def close(self) -> None:
        """Blocks until no server can touch the memory any more."""
        self.ring.close()


class RingPool:
    """The rings of one session. Thread-safe."""

    def __init__(self, native: NativeClient) -> None:
        self._native = native
        self._idle: deque[StagedRing] = deque()
        self._closed = False

    @contextmanager
    def take(self, size: int) -> Iterator[StagedRing]:
        """A ring of one's own, with staging memory that suits a transfer of `size` bytes."""
        staged = self.lend()
        try:
            staged.reserve(size)
            yield staged
        except BaseException:
            # Requests may be in flight still: whoever takes a ring must find it quiet.
            staged.close()
            raise
        self.give_back(staged)

    def lend(self) -> StagedRing:
        """A ring of one's own: to be given back when it is quiet, or closed."""
        try:
            return self._idle.pop()
        except IndexError:
            if self._closed:
                raise Fenced("the client session is over") from None
            return StagedRing(self._native)

    def give_back(self, staged: StagedRing) -> None:
        if self._closed or len(self._idle) >= _MAX_IDLE:
            staged.close()
        else:
            self._idle.append(staged)

    def close(self) -> None:
        """Close what is idle; what is taken is closed when its transfer ends."""
        self._closed = True
        while self._idle:
            try:
                staged = self._idle.pop()
            except IndexError:
                return
            staged.close()
