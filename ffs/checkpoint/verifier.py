"""Hashes of what was loaded, against those that the manifest has (docs/guides/checkpoint.md, Hashes)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final

from ffs.checkpoint.hashing import hash_all
from ffs.checkpoint.snapshot import copying_threads
from ffs.checkpoint.tensors import Bytes
from ffs.errors import ChecksumMismatch

_HASHED_BYTES: Final = 4 << 20  # of parts that are hashed in one go


class Verifier:
    """Hashes parts in threads while others are still on their way; small ones together."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._pool = ThreadPoolExecutor(copying_threads(), thread_name_prefix="ffs-verify")
        self._waiting: list[Future[None]] = []
        self._next: list[tuple[str, str, str, Bytes]] = []
        self._bytes = 0

    def add(self, path: str, name: str, wanted: str, data: Bytes) -> None:
        self._next.append((path, name, wanted, data))
        self._bytes += len(data)
        if self._bytes >= _HASHED_BYTES:
            self._go()

    def _go(self) -> None:
        rows, self._next, self._bytes = self._next, [], 0
        if rows:
            self._waiting.append(self._pool.submit(self._check_all, rows))

    def _check_all(self, rows: list[tuple[str, str, str, Bytes]]) -> None:
        found = hash_all(self._algorithm, (data for _, _, _, data in rows))
        for (path, name, wanted, _), digest in zip(rows, found, strict=True):
            if digest != wanted:
                raise _mismatch(path, name)

    def check(self, path: str, name: str, wanted: str, data: Bytes) -> None:
        self._check_all([(path, name, wanted, data)])

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for all, and raises the first mismatch unless something else went wrong before."""
        if kind is None:
            self._go()
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()


def _mismatch(path: str, name: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"the bytes of {name!r} aren't those that were saved: load another checkpoint", path
    )
