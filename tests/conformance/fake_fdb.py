"""The part of the binding `fdb` that metadata/kv/fdb_store.py uses, over the engine in memory: futures
become ready in another thread, and taking a value before is an error, so a store that blocks or looks too
early fails.

It stands in for a cluster where there is none; with FFS_TEST_FDB_CLUSTER the same tests run on a real one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from metadata.kv.contract import Conflict, Transaction, drive
from metadata.kv.memory import MemoryStore


class FDBError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class _Network(threading.Thread):
    """Completes futures, in order."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            future = self.queue.get()
            with future.lock:
                future.is_done = True
                callbacks = future.callbacks
            for callback in callbacks:
                callback(future)


_network = _Network()


class Future:
    def __init__(self, result: Callable[[], Any]) -> None:
        self.lock = threading.Lock()
        self.is_done = False
        self.callbacks: list[Callable[[Any], None]] = []
        try:
            self._result, self._error = result(), None
        except FDBError as error:
            self._result, self._error = None, error
        _network.queue.put(self)

    def is_ready(self) -> bool:
        return self.is_done

    def on_ready(self, callback: Callable[[Any], None]) -> None:
        with self.lock:
            if not self.is_done:
                self.callbacks.append(callback)
                return
        callback(self)

    def cancel(self) -> None:
        pass

    def wait(self) -> Any:
        assert self.is_done, "taken before it was ready: this would block the event loop"
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def value(self) -> Any:
        return self.wait()


class _Transaction:
    def __init__(self, store: MemoryStore) -> None:
        self._txn: Transaction = store.begin()
        self.options = SimpleNamespace(set_timeout=lambda ms: None)
        self.snapshot = SimpleNamespace(get=lambda key: Future(lambda: drive(self._txn.peek(key))))

    def get(self, key: bytes) -> Future:
        return Future(lambda: drive(self._txn.get(key)))

    def get_range(self, begin: bytes, end: bytes, limit: int, reverse: bool, mode: str) -> Any:
        """Two rows at a time, whatever was asked for."""
        page = min(limit, 2) if limit else 2

        def rows() -> Any:
            pairs = drive(self._txn.range(begin, end, page, reverse))
            found = [SimpleNamespace(key=k, value=v) for k, v in pairs]
            return found, len(found), len(found) == page

        return SimpleNamespace(_future=Future(rows))

    def set(self, key: bytes, value: bytes) -> None:
        self._txn.set(key, value)

    def clear(self, key: bytes) -> None:
        self._txn.clear(key)

    def clear_range(self, begin: bytes, end: bytes) -> None:
        self._txn.clear_range(begin, end)

    def add(self, key: bytes, param: bytes) -> None:
        self._txn.add(key, int.from_bytes(param, "little"))

    def max(self, key: bytes, param: bytes) -> None:
        self._txn.max(key, int.from_bytes(param, "little"))

    def set_versionstamped_key(self, key: bytes, value: bytes) -> None:
        at = int.from_bytes(key[-4:], "little")
        self._txn.set_stamped(key[:at], key[at + 10 : -4], value)

    def get_versionstamp(self) -> Any:
        transaction = self

        class Stamp(Future):
            @property
            def value(self) -> Any:
                return transaction._txn.stamp

        return Stamp(lambda: None)

    def commit(self) -> Future:
        def result() -> None:
            try:
                drive(self._txn.commit())
            except Conflict as error:
                raise FDBError(1020) from error

        return Future(result)

    def cancel(self) -> None:
        self._txn.release()


class Binding:
    """What `import fdb` gives."""

    FDBError = FDBError
    StreamingMode = SimpleNamespace(exact="exact", want_all="want_all")
    predicates = SimpleNamespace(
        is_maybe_committed=lambda error: error.code == 1021,
        is_retryable=lambda error: error.code in (1009, 1037),
    )

    def open(self, cluster_file: str | None) -> Any:
        store = MemoryStore()
        return SimpleNamespace(create_transaction=lambda: _Transaction(store))
