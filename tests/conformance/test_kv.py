"""One conformance class for every engine of the metadata store, and for the fault wrapper over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_fdb
import pytest

from ffs import errors
from metadata.kv import open_store
from metadata.kv.contract import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Conflict,
    Snapshot,
    Store,
    TooMuch,
    TooOld,
    Transaction,
    UnknownResult,
    after,
)
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.fdb_store import FdbStore


def u64(number: int) -> bytes:
    return (number % 2**64).to_bytes(8, "little")


class StoreConformance:
    """Subclasses give `url`."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        raise NotImplementedError

    def open(self, url: str) -> Store:
        return open_store(url)

    @pytest.fixture
    def go(self, url: str) -> Callable[[Callable[[Store], Awaitable[Any]]], Any]:
        def run(test: Callable[[Store], Awaitable[Any]]) -> Any:
            async def main() -> Any:
                store = self.open(url)
                try:
                    return await test(store)
                finally:
                    await store.close()

            return asyncio.run(main())

        return run

    @staticmethod
    async def put(store: Store, **pairs: bytes | None) -> None:
        async def body(txn: Transaction) -> None:
            for key, value in pairs.items():
                if value is None:
                    txn.clear(key.encode())
                else:
                    txn.set(key.encode(), value)

        await store.run(body)

    @staticmethod
    async def all(store: Store) -> list[tuple[bytes, bytes]]:
        async def body(snap: Snapshot) -> list[tuple[bytes, bytes]]:
            return await snap.range(b"\0", b"\xfe")

        return await store.read(body)

    # --- reading and writing ---

    def test_set_get_clear(self, go: Any) -> None:
        async def test(store: Store) -> None:
            await self.put(store, a=b"1", b=b"", c=b"3")
            assert await self.all(store) == [(b"a", b"1"), (b"b", b""), (b"c", b"3")]
            await self.put(store, a=None, missing=None)
            assert await self.all(store) == [(b"b", b""), (b"c", b"3")]

        go(test)

    def test_run_returns_the_result(self, go: Any) -> None:
        async def body(txn: Transaction) -> str:
            txn.set(b"k", b"v")
            return "result"

        async def test(store: Store) -> None:
            assert await store.run(body) == "result"

        go(test)

    def test_a_body_that_raises_writes_nothing(self, go: Any) -> None:
        async def body(txn: Transaction) -> None:
            txn.set(b"k", b"v")
            raise errors.NotFound("on purpose")

        async def test(store: Store) -> None:
            with pytest.raises(errors.NotFound):
                await store.run(body)
            assert await self.all(store) == []

        go(test)

    def test_ranges(self, go: Any) -> None:
        keys = [b"a", b"a\0", b"ab", b"b", b"b\xff", b"c"]

        async def fill(txn: Transaction) -> None:
            for key in keys:
                txn.set(key, b"=" + key)

        async def test(store: Store) -> None:
            await store.run(fill)

            async def body(snap: Snapshot) -> None:
                for begin, end in [
                    (b"a", b"d"),
                    (b"a\0", b"b"),
                    (b"b", b"b"),
                    (b"c", b"a"),
                    (b"\0", b"a"),
                    (b"bb", b"z"),
                ]:
                    want = [(k, b"=" + k) for k in keys if begin <= k < end]
                    for limit in (0, 1, 2, 10):
                        cut = limit or len(want)
                        assert await snap.range(begin, end, limit) == want[:cut]
                        assert await snap.range(begin, end, limit, reverse=True) == want[::-1][:cut]

            await store.read(body)

            async def many(snap: Snapshot) -> None:
                wanted = [b"c", b"missing", b"a", b"a", b"a\0\0"]
                assert await snap.get_many(wanted) == [b"=c", None, b"=a", b"=a", None]
                assert await snap.get_many([]) == []
                spans = [(b"b", b"d"), (b"a", b"a\0"), (b"d", b"z"), (b"c", b"a"), (b"a", b"b")]
                assert await snap.ranges(spans) == [await snap.range(*span) for span in spans]
                assert await snap.ranges([]) == []

            await store.read(many)

            async def in_txn(txn: Transaction) -> None:
                await body(txn)

            await store.run(in_txn)

        go(test)

    def test_own_writes_are_seen(self, go: Any) -> None:
        async def test(store: Store) -> None:
            await self.put(store, a=b"1", b=b"2", c=b"3", d=b"4")

            async def body(txn: Transaction) -> None:
                txn.set(b"bb", b"new")
                txn.clear(b"a")
                assert await txn.get(b"bb") == b"new"
                assert await txn.get(b"a") is None
                assert await txn.range(b"a", b"z", 2) == [(b"b", b"2"), (b"bb", b"new")]
                assert await txn.range(b"a", b"z", 2, reverse=True) == [(b"d", b"4"), (b"c", b"3")]
                txn.clear_range(b"b", b"c")
                assert await txn.get(b"b") is None
                assert await txn.get(b"bb") is None
                txn.set(b"b", b"again")
                assert await txn.range(b"a", b"z") == [(b"b", b"again"), (b"c", b"3"), (b"d", b"4")]
                txn.add(b"n", 5)
                txn.add(b"n", -2)
                assert await txn.get(b"n") == u64(3)
                txn.max(b"n", 10)
                txn.add(b"n", 1)
                assert await txn.get(b"n") == u64(11)

            await store.run(body)
            assert await self.all(store) == [(b"b", b"again"), (b"c", b"3"), (b"d", b"4"), (b"n", u64(11))]

        go(test)

    def test_range_with_limit_fills_up_past_own_clears(self, go: Any) -> None:
        async def test(store: Store) -> None:
            await self.put(store, **{f"k{i}": b"v" for i in range(9)})

            async def body(txn: Transaction) -> list[bytes]:
                for i in (0, 1, 3):
                    txn.clear(b"k%d" % i)
                txn.clear_range(b"k5", b"k7")
                return [k for k, _ in await txn.range(b"k", b"l", 4)]

            assert await store.run(body) == [b"k2", b"k4", b"k7", b"k8"]

        go(test)

    def test_clear_range(self, go: Any) -> None:
        async def test(store: Store) -> None:
            await self.put(store, a=b"1", b=b"2", c=b"3")

            async def body(txn: Transaction) -> None:
                txn.clear_range(b"a", b"c")
                txn.clear_range(b"z", b"a")  # empty

            await store.run(body)
            assert await self.all(store) == [(b"c", b"3")]

        go(test)

    # --- counters and stamps ---

    def test_add_and_max(self, go: Any) -> None:
        async def test(store: Store) -> None:
            async def body(txn: Transaction) -> None:
                txn.add(b"add", 7)
                txn.add(b"negative", -1)
                txn.max(b"max", 300)

            async def more(txn: Transaction) -> None:
                txn.add(b"add", -3)
                txn.max(b"max", 299)
                txn.max(b"big", 2**64 - 1)
                txn.max(b"big", 1)

            await store.run(body)
            await store.run(more)
            assert await self.all(store) == [
                (b"add", u64(4)),
                (b"big", u64(2**64 - 1)),
                (b"max", u64(300)),
                (b"negative", u64(-1)),
            ]

        go(test)

    def test_adds_never_conflict(self, go: Any) -> None:
        """Two hundred adds at once, each on its first attempt."""
        attempts = 0

        async def body(txn: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            txn.add(b"n", 1)
            txn.max(b"m", attempts)

        async def test(store: Store) -> None:
            await asyncio.gather(*(store.run(body) for _ in range(200)))
            assert await self.all(store) == [(b"m", u64(200)), (b"n", u64(200))]
            assert attempts == 200

        go(test)

    def test_stamps_grow(self, go: Any) -> None:
        async def test(store: Store) -> None:
            stamps = []
            for i in range(5):
                txn = store.begin()
                txn.set_stamped(b"log/", b"/end", b"%d" % i)
                await txn.commit()
                txn.release()
                stamps.append(txn.stamp)
            assert all(len(s) == 10 for s in stamps)
            assert sorted(set(stamps)) == stamps
            pairs = await self.all(store)
            assert pairs == [(b"log/" + s + b"/end", b"%d" % i) for i, s in enumerate(stamps)]

        go(test)

    # --- isolation ---

    def test_a_snapshot_stays(self, go: Any) -> None:
        async def test(store: Store) -> None:
            await self.put(store, a=b"old")

            async def body(snap: Snapshot) -> None:
                assert await snap.get(b"a") == b"old"
                await self.put(store, a=b"new", b=b"new")
                assert await snap.get(b"a") == b"old"
                assert await snap.range(b"a", b"c") == [(b"a", b"old")]

            await store.read(body)
            assert await self.all(store) == [(b"a", b"new"), (b"b", b"new")]

        go(test)

    @pytest.mark.parametrize("how", ["key", "absent", "range", "gap", "limit", "reverse"])
    def test_conflicts(self, go: Any, how: str) -> None:
        """What was read and has changed is a conflict; the write isn't applied."""

        async def test(store: Store) -> None:
            await self.put(store, b=b"1", d=b"1", f=b"1", h=b"1")
            txn = store.begin()
            change: dict[str, bytes | None] = {}
            if how == "key":
                await txn.get(b"b")
                change = {"b": b"2"}
            elif how == "absent":
                await txn.get(b"c")
                change = {"c": b"2"}
            elif how == "range":
                await txn.range(b"a", b"e")
                change = {"d": None}
            elif how == "gap":
                await txn.range(b"a", b"e")
                change = {"c": b"2"}
            elif how == "limit":
                await txn.range(b"a", b"z", 2)
                change = {"a": b"2"}
            elif how == "reverse":
                await txn.range(b"a", b"z", 2, reverse=True)
                change = {"g": b"2"}
            txn.set(b"mine", b"x")
            await self.put(store, **change)
            with pytest.raises(Conflict):
                await txn.commit()
            txn.release()
            assert b"mine" not in dict(await self.all(store))

        go(test)

    @pytest.mark.parametrize("how", ["other", "beyond limit", "before reverse limit", "peek", "unread"])
    def test_no_needless_conflicts(self, go: Any, how: str) -> None:
        async def test(store: Store) -> None:
            await self.put(store, b=b"1", d=b"1", f=b"1", h=b"1")
            txn = store.begin()
            change: dict[str, bytes | None] = {"e": b"2"}
            if how == "other":
                await txn.get(b"b")
            elif how == "beyond limit":
                assert len(await txn.range(b"a", b"z", 2)) == 2
            elif how == "before reverse limit":
                assert len(await txn.range(b"a", b"z", 2, reverse=True)) == 2
                change = {"c": b"2"}
            elif how == "peek":
                await txn.peek(b"e")
            txn.set(b"mine", b"x")
            await self.put(store, **change)
            await txn.commit()
            txn.release()
            assert (b"mine", b"x") in await self.all(store)

        go(test)

    def test_a_reader_never_conflicts(self, go: Any) -> None:
        async def test(store: Store) -> None:
            txn = store.begin()
            await txn.get(b"a")
            await self.put(store, a=b"2")
            await txn.commit()
            txn.release()

        go(test)

    def test_write_skew_is_impossible(self, go: Any) -> None:
        """Each takes the other's token only if both are there: one of two at once must see the other's."""

        async def take(store: Store, name: bytes) -> bool:
            async def body(txn: Transaction) -> bool:
                both = await txn.get(b"x") and await txn.get(b"y")
                if both:
                    txn.clear(name)
                return bool(both)

            return await store.run(body)

        async def test(store: Store) -> None:
            for _ in range(20):
                await self.put(store, x=b"1", y=b"1")
                assert sorted(await asyncio.gather(take(store, b"x"), take(store, b"y"))) == [False, True]

        go(test)

    def test_read_modify_write_loses_nothing(self, go: Any) -> None:
        async def body(txn: Transaction) -> None:
            value = int(await txn.get(b"n") or b"0")
            txn.set(b"n", b"%d" % (value + 1))

        async def test(store: Store) -> None:
            await asyncio.gather(*(store.run(body) for _ in range(50)))
            assert await self.all(store) == [(b"n", b"50")]

        go(test)

    def test_random_transactions_are_serialisable(self, go: Any) -> None:
        """Transfers between accounts at random, at once: the sum never changes in any snapshot."""
        seed = random.randrange(2**32)
        rng = random.Random(seed)

        async def transfer(store: Store) -> None:
            source, target = rng.sample(range(8), 2)
            amount = rng.randrange(1, 50)

            async def body(txn: Transaction) -> None:
                have = int(await txn.get(b"acc%d" % source) or b"0")
                other = int(await txn.get(b"acc%d" % target) or b"0")
                if have >= amount:
                    txn.set(b"acc%d" % source, b"%d" % (have - amount))
                    txn.set(b"acc%d" % target, b"%d" % (other + amount))

            await store.run(body)

        async def audit(store: Store) -> None:
            async def body(snap: Snapshot) -> int:
                return sum(int(v) for _, v in await snap.range(b"acc", b"acd"))

            assert await store.read(body) == 800, f"seed {seed}"

        async def test(store: Store) -> None:
            await self.put(store, **{f"acc{i}": b"100" for i in range(8)})
            work = [transfer(store) if rng.random() < 0.8 else audit(store) for _ in range(200)]
            await asyncio.gather(*work)
            await audit(store)

        go(test)

    # --- limits ---

    def test_limits(self, go: Any) -> None:
        async def test(store: Store) -> None:
            async def body(txn: Transaction) -> None:
                with pytest.raises(TooMuch):
                    txn.set(b"k" * (MAX_KEY_BYTES + 1), b"")
                with pytest.raises(TooMuch):
                    txn.set(b"k", bytes(MAX_VALUE_BYTES + 1))
                txn.set(b"k" * MAX_KEY_BYTES, bytes(MAX_VALUE_BYTES))

            await store.run(body)
            assert await self.all(store) == [(b"k" * MAX_KEY_BYTES, bytes(MAX_VALUE_BYTES))]

            async def too_much(txn: Transaction) -> None:
                for i in range(100):
                    txn.set(b"big%d" % i, bytes(MAX_VALUE_BYTES))

            with pytest.raises(TooMuch):
                await store.run(too_much)
            assert len(await self.all(store)) == 1

        go(test)

    def test_too_old(self, go: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        async def test(store: Store) -> None:
            txn = store.begin()
            txn.set(b"k", b"v")
            monkeypatch.setattr("metadata.kv.buffer.MAX_AGE_S", -1.0)
            with pytest.raises(TooOld):
                await txn.commit()
            txn.release()
            monkeypatch.undo()
            assert await self.all(store) == []

        go(test)

    def test_closed(self, go: Any) -> None:
        async def test(store: Store) -> None:
            await self.put(store, a=b"1")
            await store.close()
            with pytest.raises(errors.ShutDown):
                await self.put(store, a=b"2")
            with pytest.raises(errors.ShutDown):
                await self.all(store)

        go(test)

    def test_cancelled_waiter_leaves_the_store_usable(self, go: Any) -> None:
        async def test(store: Store) -> None:
            task = asyncio.ensure_future(self.put(store, a=b"1"))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # some engines are done before it
                await task
            await self.put(store, b=b"2")
            assert (b"b", b"2") in await self.all(store)

        go(test)


class TestMemory(StoreConformance):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return "memory://"


class TestLmdb(StoreConformance):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"lmdb://{tmp_path}/store"


class _Faulty(StoreConformance):
    """What holds over a perfect engine holds over one that fails and is retried. Tests that commit by hand
    or count attempts see the faults themselves, so they are left to the engines."""

    test_a_snapshot_stays = None  # its body writes by another transaction
    test_own_writes_are_seen = None  # nor is its body
    test_stamps_grow = None
    test_conflicts = None
    test_no_needless_conflicts = None
    test_a_reader_never_conflicts = None
    test_adds_never_conflict = None
    test_too_old = None
    # Not idempotent by themselves: with unknown results the contract promises them nothing.
    test_add_and_max = None
    test_read_modify_write_loses_nothing = None
    test_random_transactions_are_serialisable = None
    test_write_skew_is_impossible = None

    def open(self, url: str) -> Store:
        self.seed = random.randrange(2**32)
        print(f"fault seed {self.seed}")
        rates = Rates(
            conflict=0.1, unknown_applied=0.1, unknown_lost=0.1, too_old=0.1, twice=0.3, latency_s=0.001
        )
        return FaultyStore(open_store(url), rates, random.Random(self.seed))


class TestFaultyMemory(_Faulty):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return "memory://"


class TestFaultyLmdb(_Faulty):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"lmdb://{tmp_path}/store"


@pytest.mark.skipif(
    "FFS_TEST_FDB_CLUSTER" not in os.environ, reason="FFS_TEST_FDB_CLUSTER names no cluster file"
)
class TestFdb(StoreConformance):
    test_too_old = None  # FoundationDB judges age by its own clock

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"fdb://{os.environ['FFS_TEST_FDB_CLUSTER']}?prefix=ffs-test-{uuid.uuid4().hex}/"


class TestFdbFake(StoreConformance):
    """The engine for FoundationDB over a stand-in for its binding."""

    test_too_old = None
    test_limits = None  # a prefix makes keys longer than the stand-in takes

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return ""

    def open(self, url: str) -> Store:
        return FdbStore(None, prefix=b"prefix/", binding=fake_fdb.Binding())


@pytest.mark.parametrize(
    ("code", "committing", "kind"),
    [
        (1020, True, Conflict),
        (1021, True, UnknownResult),
        (1031, True, UnknownResult),
        (1031, False, TooOld),
        (1007, False, TooOld),
        (1037, True, TooOld),
        (2101, True, TooMuch),
        (2000, True, errors.FfsError),
    ],
)
def test_fdb_errors(code: int, committing: bool, kind: type) -> None:
    store = FdbStore(None, binding=fake_fdb.Binding())
    assert type(store.convert(fake_fdb.FDBError(code), committing=committing)) is kind


def test_fdb_without_its_library() -> None:
    """A clear error that says what to install, whether the binding or the library is what is missing."""
    with pytest.raises(errors.Unsupported, match=r"libfdb_c|ffs\[fdb\]"):
        open_store("fdb:///nowhere/fdb.cluster")


def test_after() -> None:
    assert after(b"a") == b"b"
    assert after(b"a\xff\xff") == b"b"


@pytest.mark.parametrize(
    "url", ["lmdb://", "lmdb://x?y=1", "sqlite://x", "x", "fdb://f?other=1", "memory://x"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="give lmdb://"):
        open_store(url)
