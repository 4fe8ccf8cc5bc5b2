"""Three metadata services over one store, each killed in turn and started again while others work."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from ffs.cli.devcluster.handle import DevCluster
from ffs.cli.devcluster.state import Directory
from metadata.cluster.chain_port import StorageControl
from metadata.cluster.clock import ManagerClock
from metadata.cluster.identity import cluster_id
from metadata.cluster.routing import RoutingCache
from metadata.kv.lmdb_store import LmdbStore

T = TypeVar("T")

METAS = 3


class Kills(threading.Thread):
    """Kills (SIGKILL) and starts services until `finish`. Order and pauses come from the seed."""

    def __init__(
        self, cluster: DevCluster, inspector: Inspector, seed: int, preferred: Callable[[], int]
    ) -> None:
        """`preferred`: the service that is asked now; every second kill hits it."""
        super().__init__(daemon=True)
        self._inspector = inspector
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._preferred = preferred
        self._end = threading.Event()
        self._error: BaseException | None = None
        self.killed: Counter[int] = Counter()

    def run(self) -> None:
        try:
            turn = 0
            while not self._end.wait(self._rng.uniform(0.02, 0.2)):
                self._kill(self._preferred() if turn % 2 else turn // 2 % METAS, turn)
                turn += 1
        except BaseException as error:
            self._error = error

    def _kill(self, index: int, turn: int) -> None:
        pid = self._cluster.processes()[Directory.meta_name(index)]
        handle = os.pidfd_open(pid)
        try:
            if turn % 4:
                self._inspector.await_commit()  # so it dies between the commit of a request and its answer
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [])
        finally:
            os.close(handle)
        self.killed[index] += 1
        self._end.wait(self._rng.uniform(0.0, 0.2))
        self._cluster.start_meta(index)

    def finish(self) -> None:
        """All run again on return. Raises what went wrong."""
        self._end.set()
        self.join(60)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


class Inspector:
    """Looks into the store beside the services, and at the chunks on the chains."""

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.store = LmdbStore(directory / "meta")

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def await_commit(self) -> None:
        """Returns within microseconds of a commit by anybody; after half a second in any case."""
        info = self.store._env.info
        last = info()["last_txnid"]
        end = time.monotonic() + 0.5
        while info()["last_txnid"] == last and time.monotonic() < end:
            pass

    def keys(self, begin: bytes = b"\0", end: bytes = b"\xff") -> list[tuple[bytes, bytes]]:
        return self.runner.run(self.store.read(lambda snap: snap.range(begin, end)))

    def counts(self) -> Counter[bytes]:
        """How many keys of each kind (their first byte) there are, but for inodes and the manager's own."""
        return Counter(key[:1] for key, _ in self.keys() if key[:1] not in b"czkQi")

    def inodes(self) -> set[int]:
        return {int.from_bytes(key[3:11], "big") for key, _ in self.keys(b"i", b"j")}

    def with_chunks(self, spaces: set[int]) -> set[tuple[int, int]]:
        """(chain, space) of each of `spaces` that has a chunk somewhere."""

        async def look() -> set[tuple[int, int]]:
            cluster = await cluster_id(self.store, "test")
            routing = RoutingCache(self.store, ManagerClock())
            await routing.refresh()
            control = StorageControl(routing, cluster=cluster, secret=None, name="test")
            found = set()
            try:
                for chain in routing.view.chains:
                    for space in spaces:
                        if await control.last_chunk(chain, space) is not None:
                            found.add((chain, space))
            finally:
                control.close()
            return found

        return self.runner.run(look())

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def go() -> T:
            return await work()

        return self.runner.run(go())


def until(condition: Callable[[], object], what: Callable[[], object], seconds: float = 60) -> None:
    """Waits for a condition; says `what()` instead when the time is up."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def seed_of_run() -> int:
    """A fixed one in the gate; a new one in a soak."""
    if "FFS_SOAK_SECONDS" in os.environ:
        return random.randrange(2**32)
    return 20261130
