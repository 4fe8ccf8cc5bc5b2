"""Ior without a server: what it refuses, how it cuts requests, what becomes of those that nobody serves."""

from __future__ import annotations

import os
import pickle
import select
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ffs import errors
from ffs._native.entries import FileRing
from ffs._native.iov import Iov
from ffs._native.lib import ffi
from ffs._native.ring import OP_READ, OP_WRITE, SQE_DTYPE, SQE_ZERO_FILL, NativeClient
from ffs._native.routes import SERVING, ChainRoute, TargetRoute, c_chains, c_targets
from ffs.client.ior import Ior
from ffs.client.ior_cut import cut
from ffs.client.layers import FileText
from ffs.layout import Layout, Placement, chunk_slices, file_chunk_key

CHUNK = 1 << 20


@dataclass
class PlainClient:
    """What Ior asks of a client."""

    native: NativeClient
    refreshes: int = 0
    renewals: list[int] = field(default_factory=list)

    def want_routing(self) -> None:
        self.refreshes += 1

    def want_renewal(self, native_id: int) -> None:
        self.renewals.append(native_id)

    def describe_chain(self, chain: int) -> str:
        return f"chain {chain} (which is told of here)"


@dataclass(eq=False)
class PlainFile:
    """What Ior asks of a file."""

    capability: int
    inode: int = 77
    size: int = 100 * CHUNK
    epoch: int = 3
    name: str = "/a"
    writes: bool = True
    placement: Placement = field(
        default_factory=lambda: Placement(
            Layout(table=1, table_version=1, chunk_size=CHUNK, stripe=0, seed=5), [4, 5, 6]
        )
    )
    noted: list[tuple[int, int]] = field(default_factory=list)
    failures: int = 0
    room: int = 1 << 60
    asked: list[tuple[int, bool]] = field(default_factory=list)  # and whether by the main thread

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return self.writes

    def note_written(self, end: int, epoch: int | None = None) -> None:
        self.noted.append((end, epoch or 0))

    def note_failed(self) -> None:
        self.failures += 1

    def has_room(self, end: int) -> bool:
        return end <= self.room

    def ensure_room(self, end: int) -> None:
        if self.has_room(end):
            return
        self.asked.append((end, threading.current_thread() is threading.main_thread()))
        if end > 10 * CHUNK:
            raise errors.QuotaExceeded("no room")
        self.room = end


@pytest.fixture
def client() -> Iterator[PlainClient]:
    native = NativeClient(9, bytes(16), request_timeout_ms=300)
    yield PlainClient(native)
    native.close()


@pytest.fixture
def file(client: PlainClient) -> PlainFile:
    return PlainFile(client.native.add_capability(bytes(88)))


@pytest.fixture
def iov() -> Iterator[Iov]:
    with Iov(8 << 20) as memory:
        yield memory


def ring(client: PlainClient, entries: int = 16, **options: Any) -> Ior:
    return Ior(client, entries, **options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"entries": 3}, "power of two"),
        ({"entries": 0}, "power of two"),
        ({"entries": 1 << 17}, "power of two"),
        ({"kind": "both"}, "kind"),
        ({"depth": -1}, "depth"),
        ({"depth": 17}, "depth"),
        ({"priority": -1}, "priority"),
        ({"priority": 256}, "priority"),
    ],
)
def test_impossible_rings_are_refused(client: PlainClient, options: dict[str, Any], word: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=word):
        ring(client, **{"entries": 16, **options})


def test_what_is_no_file_or_memory_of_ours_is_refused_with_the_way_out(
    client: PlainClient, file: Any, iov: Iov, tmp_path: Path
) -> None:
    own: Any
    with ring(client) as ior, open(tmp_path / "x", "w+b") as own:
        text = FileText(own)
        for other in (text, own, "/a", None):
            with pytest.raises(TypeError, match="in a binary mode"):
                ior.prepare(other, 0, iov[0:10])
            with pytest.raises(TypeError, match="in a binary mode"):
                ior.prepare_many([file, other], [0, 0], iov, [0, 0], [1, 1])
        text.detach()
        for memory in (bytearray(10), iov.numpy(), None):
            with pytest.raises(TypeError, match=r"ffs\.Iov\(size\)"):
                ior.prepare(file, 0, memory)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"ffs\.Iov\(size\)"):
                ior.prepare_many(file, [0], memory, [0], [1])  # type: ignore[arg-type]
        assert ior.wait(1, 0) == []


def test_pickling_says_what_to_do_instead(client: PlainClient, iov: Iov) -> None:
    with ring(client) as ior:
        for thing, way in ((ior, "in the worker"), (iov, "Iov.from_fd"), (iov[0:10], "Iov.from_fd")):
            with pytest.raises(TypeError, match=way):
                pickle.dumps(thing)


def test_bad_requests_are_refused_by_number_and_none_is_taken(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    with ring(client) as ior:
        for offsets, places, lengths in [
            ([0, -1], [0, 0], [1, 1]),
            ([0, 0], [0, -1], [1, 1]),
            ([0, 0], [0, len(iov)], [1, 1]),
            ([0, 0], [0, 0], [1, len(iov) + 1]),
            ([0, 0], [0, 1 << 62], [1, 1 << 62]),
            ([0, 0], [0, 0], [1, 0]),
        ]:
            with pytest.raises(errors.InvalidArgument, match="request 1"):
                ior.prepare_many(file, offsets, iov, places, lengths)
        with pytest.raises(errors.InvalidArgument, match="give as many"):
            ior.prepare_many(file, [0, 1], iov, [0], [1])
        with pytest.raises(errors.InvalidArgument, match="whole numbers"):
            ior.prepare_many(file, [0.5], iov, [0], [1])
        with pytest.raises(errors.InvalidArgument, match="files"):
            ior.prepare_many([file], [0, 1], iov, [0, 0], [1, 1])
        assert ior.prepare_many(file, [], iov, [], []) == 0
        assert ior.wait(1, 0) == []
    file.writes = False
    with ring(client, kind="write") as ior, pytest.raises(errors.InvalidArgument, match="isn't open"):
        ior.prepare(file, 0, iov[0:1])


def test_writes_ask_for_the_room_that_they_need_and_no_more(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    other = PlainFile(file.capability, room=0)
    file.room = CHUNK
    with ring(client, kind="write") as ior:
        assert ior.prepare_many([file, other, file], [0, 5, 2 * CHUNK], iov, [0, 0, 0], [9, 7, 3]) == 3
        assert file.asked == [(2 * CHUNK + 3, True)]
        assert other.asked == [(12, True)]
        assert ior.prepare_many(file, [CHUNK, 0], iov, [0, 0], [9, CHUNK]) == 2
        assert len(file.asked) == 1
        with pytest.raises(errors.QuotaExceeded):
            ior.prepare_many(file, [0, 11 * CHUNK], iov, [0, 0], [9, 9])
        assert len(list(ior._table.files())) == 2
        assert int(ior._table.flights.live.sum()) == 5
    with ring(client) as ior:
        ior.prepare_many(file, [50 * CHUNK], iov, [0], [9])
    assert len(file.asked) == 2


def test_a_request_over_more_chunks_than_entries_is_refused_with_the_way_out(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    with ring(client, entries=4) as ior:
        with pytest.raises(errors.InvalidArgument, match="5 chunks"):
            ior.prepare(file, 1, iov[0 : 4 * CHUNK])
        ior.prepare(file, 0, iov[0 : 4 * CHUNK])


def test_a_full_ring_takes_whole_requests_and_says_how_many(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    with ring(client, entries=8) as ior:
        # 3 entries each: two fit
        taken = ior.prepare_many(
            file, np.arange(5) * 4 * CHUNK + 1, iov, [0] * 5, [2 * CHUNK] * 5, userdata=[7, 8, 9, 10, 11]
        )
        assert taken == 2
        ior.prepare_many(file, [0, 0], iov, [0, 0], [1, 1], [50, 51])
        with pytest.raises(errors.RingFull):
            ior.prepare(file, 0, iov[0:1])
        with pytest.raises(errors.Busy):
            iov.close()
        done = ior.wait(4)
        assert sorted(c.userdata for c in done) == [7, 8, 50, 51]
        assert all(isinstance(c.error, errors.FfsError) for c in done)
        assert ior.prepare_many(file, [0] * 9, iov, [0] * 9, [1] * 9) == 8


def test_unserved_requests_end_at_their_deadline_and_ask_for_routing(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    native = client.native
    places = [TargetRoute(1, 1, "127.0.0.1", 9)]
    native.set_routing(5, [ChainRoute(c, 1, 1, (1,), (0,)) for c in (4, 5, 6)], places)
    with ring(client) as ior:
        ior.prepare(file, 0, iov[0 : 2 * CHUNK], 1)
        (done,) = ior.wait(1)
        assert isinstance(done.error, errors.ChainUnavailable)
        assert client.refreshes > 0
    # Serving by what is known, but nobody listens there.
    native.set_routing(6, [ChainRoute(c, 1, 1, (1,), (SERVING,)) for c in (4, 5, 6)], places)
    with ring(client, kind="write") as ior:
        ior.prepare(file, 0, iov[0:9], 2)
        (done,) = ior.wait(1)
        assert isinstance(done.error, errors.DeadlineExceeded)  # surely not applied
        assert (file.noted, file.failures) == ([], 1)
        ior.prepare(file, 0, iov[0:9], 3)
    ior.close()
    assert file.failures == 2  # closed with a write in flight


def test_reads_at_the_end_are_done_at_once_and_reads_over_it_are_cut(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    file.size = CHUNK + 5
    with ring(client) as ior:
        assert ior.prepare_many(file, [CHUNK + 5, 10**9], iov, [0, 0], [4096, 1], [3, 4]) == 2
        done = ior.wait(1, 0)
        assert [(c.userdata, c.result, c.error) for c in done] == [(3, 0, None), (4, 0, None)]
        assert ior.prepare_many(file, [CHUNK - 1, CHUNK + 5, 0], iov, [0, 0, 0], [100, 1, 2]) == 3
        assert ior.wait(3, 1)[0].result == 0
        assert ior.submit() == 0
        assert ior.stats().submitted == 3  # two chunks, none, one


def test_requests_are_cut_as_the_scalar_layout_says(client: PlainClient, file: PlainFile, iov: Iov) -> None:
    rng = np.random.default_rng(1234)
    other = PlainFile(
        client.native.add_capability(bytes(88)),
        inode=1 << 40,
        epoch=9,
        placement=Placement(
            Layout(table=1, table_version=1, chunk_size=CHUNK // 4, stripe=0, seed=8), list(range(20, 33))
        ),
    )
    files = [file, other]
    n = 200
    which = rng.integers(0, 2, n)
    at = rng.integers(0, 20 * CHUNK, n)
    size = rng.integers(1, 4 * CHUNK, n)
    to = rng.integers(0, 4 * CHUNK, n)
    sqes, first, counts = cut(files, which, OP_WRITE, 0, at, iov.handle, to, size)
    row = 0
    for i in range(n):
        target = files[int(which[i])]
        pieces = chunk_slices(target.placement.layout.chunk_size, int(at[i]), int(size[i]))
        assert (first[i], counts[i]) == (row, len(pieces))
        for nth, piece in enumerate(pieces):
            sqe = sqes[row]
            assert bytes(sqe["key"]) == target.inode.to_bytes(8, "big") + file_chunk_key(piece.chunk)
            assert sqe["chain"] == target.placement.chain_of_index(piece.chunk)
            assert (sqe["offset"], sqe["length"]) == (piece.offset, piece.length)
            assert sqe["iov_offset"] == int(to[i]) + piece.position
            assert sqe["group"] == (len(pieces) if nth == 0 else 0)
            assert (sqe["capability"], sqe["space_epoch"]) == (target.capability, target.epoch)
            row += 1
    assert row == len(sqes)


def entries_of(ior: Ior, count: int) -> Any:
    """The last `count` entries that were made in C."""
    memory = ffi.buffer(ior._ring.entries_raw)
    return np.frombuffer(bytearray(memory[: count * SQE_DTYPE.itemsize]), dtype=SQE_DTYPE)


@pytest.fixture
def no_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileRing, "prepare_noted", lambda *_: pytest.fail("it took the long way"))


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes the long way."""
    seen: list[Any] = []
    prepare = FileRing.prepare_noted
    monkeypatch.setattr(
        FileRing, "prepare_noted", lambda ring, sqes: seen.append(sqes.copy()) or prepare(ring, sqes)
    )
    return seen


@pytest.mark.usefixtures("no_long_way")
def test_the_short_way_of_cutting_equals_the_long_one(client: PlainClient, file: PlainFile, iov: Iov) -> None:
    rng = np.random.default_rng(99)
    n = 500
    at = rng.integers(0, 60 * CHUNK, n)
    size = np.minimum(rng.integers(1, CHUNK + 1, n), CHUNK - at % CHUNK)
    to = rng.integers(0, 4 * CHUNK, n)
    none = np.zeros(n, dtype=np.int64)
    long, _, _ = cut([file], none, OP_READ, SQE_ZERO_FILL, at, iov.handle, to, size)
    with ring(client, 512) as ior:
        assert ior.prepare_many(file, at, iov, to, size) == n
        short = entries_of(ior, n)
        assert short["userdata"].tolist() == list(range(n))
        short["userdata"] = 0
        assert short.tobytes() == long.tobytes()
    file.size = int(at[0]) + 1
    with ring(client, 512, priority=3) as ior:
        assert ior.prepare_many(file, [at[0]] * n, iov, to, [10] * n) == n
        cut_off = entries_of(ior, n)
        assert set(cut_off["length"]) == {1}
        assert set(cut_off["priority"]) == {3}


@pytest.mark.parametrize("odd", [(CHUNK - 1, 2), (98 * CHUNK, CHUNK + 1), (200 * CHUNK, 1)])
def test_what_is_not_that_plain_goes_the_long_way(
    client: PlainClient, file: PlainFile, iov: Iov, long_way: list[Any], odd: tuple[int, int]
) -> None:
    """Over a chunk's end, more than a chunk, beyond the file's end."""
    with ring(client) as ior:
        assert ior.prepare_many(file, [0, odd[0], 8], iov, [0, 0, 0], [1, odd[1], 1], [5, 6, 7]) == 3
        assert len(long_way) == 1
        assert sorted(done.userdata for done in ior.wait(3)) == [5, 6, 7]


def test_files_and_iovs_are_kept_while_requests_are_in_flight_and_no_longer(client: PlainClient) -> None:
    def refs(*, long: bool) -> list[weakref.ref[Any]]:
        file, iov = PlainFile(client.native.add_capability(bytes(88))), Iov(CHUNK)
        ior.prepare_many([file], [CHUNK - 1 if long else 0], iov, [0], [2])
        return [weakref.ref(file), weakref.ref(iov)]

    for kind in ("read", "write"):
        with ring(client, kind=kind) as ior:
            for long in (False, True):
                kept = refs(long=long)
                ior.submit()
                assert None not in [ref() for ref in kept]
                ior.cancel(0)
                assert len(ior.wait(1)) == 1
                assert [ref() for ref in kept] == [None, None]
                # Nor by requests that the ring had no room for.
                with Iov(CHUNK) as iov:
                    file = PlainFile(client.native.add_capability(bytes(88)))
                    assert ior.prepare_many(file, [0] * 16, iov, [0] * 16, [1] * 16) == 16
                    with pytest.raises(errors.RingFull):
                        ior.prepare(PlainFile(file.capability), 0, iov[0:1])
                    kept = refs(long=long)
                    assert [ref() for ref in kept] == [None, None]
                    ior.cancel_range(0, 16)
                    assert len(ior.wait(16)) == 16


def test_more_files_than_entries_take_their_turns(client: PlainClient, iov: Iov) -> None:
    """Each is an owner of requests, of which a ring has a bounded number."""
    files = [PlainFile(client.native.add_capability(bytes(88)), inode=i) for i in range(100)]
    with ring(client, 4, kind="write") as ior:
        begun = 0
        while begun < len(files):
            rest = len(files) - begun
            taken = ior.prepare_many(
                files[begun:], [0] * rest, iov, [0] * rest, [1] * rest, range(begun, 100)
            )
            assert taken == 4
            begun += taken
            ior.cancel_range(0, 100)
            assert len(ior.wait(4)) == 4
            for file in files[:begun]:
                assert file.failures == 1
                ior.prepare(file, 0, iov[0:1], 7)
                ior.cancel(7)
                ior.wait(1)
                file.failures = 1
    assert {file.failures for file in files} == {1}


@pytest.mark.usefixtures("no_long_way")
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_single_request_is_what_an_array_of_one_is(
    client: PlainClient, file: PlainFile, iov: Iov, kind: str
) -> None:
    end = file.size = 100 * CHUNK - 50
    places = [(0, 0, 1), (CHUNK - 9, 70, 9), (7 * CHUNK + 3, 5, CHUNK - 3), (end - 4, 9, 4), (end - 4, 9, 50)]
    with ring(client, kind=kind, priority=3) as single, ring(client, kind=kind, priority=3) as arrays:
        for number, (offset, place, size) in enumerate(places):
            single.prepare(file, offset, iov[place : place + size], 40 + number)
            assert arrays.prepare_many(file, [offset], iov, [place], [size], [40 + number]) == 1
            one, many = entries_of(single, 1), entries_of(arrays, 1)
            for name in SQE_DTYPE.names or ():
                assert one[name].tolist() == many[name].tolist(), (offset, name)
        assert [single._table.find(40 + number) for number in range(len(places))] == [
            arrays._table.find(40 + number) for number in range(len(places))
        ]
        with pytest.raises(errors.Busy):
            iov.close()
        done = [single.wait(1) for _ in places], [arrays.wait(1) for _ in places]
        for way in done:
            assert sorted(c.userdata for cs in way for c in cs) == [40, 41, 42, 43, 44]
        assert not single._table.busy
    iov.close()


def test_a_single_request_that_cannot_be_takes_nothing(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    with ring(client, entries=1) as ior:
        for offset, part in [(-1, iov[0:4]), (0, iov[4:4]), (0.5, iov[0:4])]:
            with pytest.raises(errors.InvalidArgument):
                ior.prepare(file, offset, part)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match="userdata"):
            ior.prepare(file, 0, iov[0:4], 1.5)  # type: ignore[arg-type]
        assert not ior._table.busy
        ior.prepare(file, file.size, iov[0:4], 5)  # at the end: done at once
        assert ior.wait() == [(5, 0, None)]
        ior.prepare(file, 0, iov[0:4], 6)
        with pytest.raises(errors.RingFull):
            ior.prepare(file, 0, iov[0:4], 7)
        assert [done.userdata for done in ior.wait()] == [6]
    file.writes = False
    with ring(client, kind="write") as ior, pytest.raises(errors.InvalidArgument, match="isn't open"):
        ior.prepare(file, 0, iov[0:4])
    file.writes = True
    file.room = 0
    with ring(client, kind="write") as ior:
        with pytest.raises(errors.QuotaExceeded):
            ior.prepare(file, 11 * CHUNK, iov[0:4])
        assert not ior._table.busy
        ior.prepare(file, 0, iov[0:4])
    assert [end for end, _ in file.asked] == [11 * CHUNK + 4, 4]


def test_cancel_ends_a_request_and_unknown_ones_are_named(
    client: PlainClient, file: PlainFile, iov: Iov
) -> None:
    with ring(client) as ior:
        ior.prepare(file, 0, iov[0 : 3 * CHUNK], 42)
        ior.submit()
        with pytest.raises(errors.NotFound, match="41"):
            ior.cancel(41)
        ior.cancel(42)
        (done,) = ior.wait(1)
        assert isinstance(done.error, errors.Cancelled)
        with pytest.raises(errors.NotFound):
            ior.cancel(42)


def test_the_descriptor_tells_of_completions(client: PlainClient, file: PlainFile, iov: Iov) -> None:
    with ring(client) as ior:
        ior.prepare(file, 0, iov[0:1], 1)
        ior.submit()
        done: list[Any] = []
        while not done:
            assert select.select([ior.fileno()], [], [], 20)[0]
            done = ior.wait(0, 0)
        assert isinstance(done[0].error, errors.FfsError)


def test_depth_submits_by_itself(client: PlainClient, file: PlainFile, iov: Iov) -> None:
    with ring(client, depth=3) as ior:
        for i in range(7):
            ior.prepare(file, i, iov[i : i + 1], i)
        assert ior.stats().submitted == 6


def test_a_rings_priority_is_that_of_its_requests(
    client: PlainClient, file: PlainFile, iov: Iov, long_way: list[Any]
) -> None:
    for given in (0, 7, 255):
        with ring(client, priority=given) as ior:
            ior.prepare_many(file, [0], iov, [0], [10])  # in one chunk, and over three
            assert entries_of(ior, 1)["priority"].tolist() == [given]
            ior.prepare(file, CHUNK - 5, iov[0 : CHUNK + 10])
            assert long_way[-1]["priority"].tolist() == [given] * 3


def test_one_thread_at_a_time(client: PlainClient, file: PlainFile, iov: Iov) -> None:
    with ring(client) as ior:
        ior.prepare(file, 0, iov[0:1], 1)
        inside = threading.Event()
        failures: list[BaseException] = []

        def other() -> None:
            inside.wait()
            while not failures and thread_waits.is_set():
                try:
                    ior.stats()
                except errors.Busy as error:
                    failures.append(error)

        thread_waits = threading.Event()
        thread_waits.set()
        thread = threading.Thread(target=other)
        thread.start()
        inside.set()
        ior.wait(1)
        thread_waits.clear()
        thread.join()
        assert failures


def test_a_child_of_fork_is_told_to_make_its_own(client: PlainClient, file: PlainFile, iov: Iov) -> None:
    ior = ring(client)
    ior.prepare(file, 0, iov[0:1], 1)
    ior.submit()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                ior.submit()
            except errors.FfsError as error:
                if "after fork" in str(error):
                    ior.close()
                    fresh = ring(client)
                    fresh.prepare(file, 0, iov[0:1], 1)
                    status = 0 if len(fresh.wait(1)) == 1 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert len(ior.wait(1)) == 1
    ior.close()


def test_routes_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="chain 7"):
        c_chains([ChainRoute(7, 1, 1, (1, 2), (1,))])
    with pytest.raises(errors.InvalidArgument, match="chain 7"):
        c_chains([ChainRoute(7, 1, 1, tuple(range(9)), (1,) * 9)])
    with pytest.raises(errors.InvalidArgument, match="host"):
        c_targets([TargetRoute(1, 1, "h" * 64, 1)])
    with pytest.raises(errors.InvalidArgument, match="transport"):
        NativeClient(1, bytes(16), transport="pigeon")
    with pytest.raises(errors.InvalidArgument, match="16 bytes"):
        NativeClient(1, b"short")
    with pytest.raises(errors.InvalidArgument, match="session"):
        NativeClient(0, bytes(16))
