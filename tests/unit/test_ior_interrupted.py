"""Ior.wait interrupted as by Ctrl-C, at the end of any call in it, where handlers run: nothing is lost."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from test_ior import CHUNK, PlainClient, PlainFile, client, file, iov  # noqa: F401 - fixtures

from ffs._native.iov import Iov
from ffs.client.ior import Ior

ENTRIES = 16


class InterruptAt:
    """Raises KeyboardInterrupt at the end of the n-th call of C, or the start of one of Python, inside."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, of: Any) -> None:
        if event in ("call", "c_return") and "/ffs/" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def _take(ior: Ior, least: int, timeout: float | None, *, arrays: bool) -> list[int]:
    if arrays:
        return [int(user) for user in ior.wait_array(least, timeout)[0]]
    return [done.userdata for done in ior.wait(least, timeout)]


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(("kind", "count"), [("read", 1), ("read", 4), ("write", 4)])
def test_an_interrupted_wait_loses_nothing(
    client: PlainClient,  # noqa: F811
    file: PlainFile,  # noqa: F811
    iov: Iov,  # noqa: F811
    kind: str,
    count: int,
    arrays: bool,
) -> None:
    place = interrupts = 0
    users = list(range(100, 100 + count))
    with Ior(client, ENTRIES, kind) as ior:
        while True:
            place += 1
            file.failures = 0
            for user in users:
                ior.prepare(file, 0, iov[0:1], user)
            if kind == "read":
                ior.prepare(file, file.size, iov[0:1], 7)
            ior.submit()
            ior.cancel_range(100, 200)  # all end at once
            expected = sorted([*users, 7] if kind == "read" else users)
            at = InterruptAt(place)
            try:
                with at:
                    got = _take(ior, len(expected), 5, arrays=arrays)
            except KeyboardInterrupt:
                interrupts += 1
                got = _take(ior, len(expected), 5, arrays=arrays)
            assert sorted(got) == expected, place
            assert ior._table.free_count == ENTRIES
            assert ior.wait(1) == []
            assert file.failures > 0 or kind == "read"
            if at.left > 0:
                break  # it had fewer calls
    assert interrupts > 10


@pytest.mark.parametrize("way", ["one", "many", "across chunks"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_interrupted_prepare_gives_no_number_out_twice(
    client: PlainClient,  # noqa: F811
    file: PlainFile,  # noqa: F811
    iov: Iov,  # noqa: F811
    kind: str,
    way: str,
) -> None:
    """Two requests had one number: the end of the second was told as that of the first, which never ended."""

    def prepare(user: int) -> None:
        if way == "one":
            ior.prepare(file, 0, iov[0:1], user)
        else:
            at = [0] if way == "many" else [CHUNK - 1]
            assert ior.prepare_many(file, at, iov, [0], [2], [user]) == 1

    place = interrupts = after = 0
    with Ior(client, ENTRIES, kind) as ior:
        while True:
            place += 1
            at = InterruptAt(place)
            before = ior._table.free_count
            try:
                with at:
                    prepare(1)
            except KeyboardInterrupt:
                interrupts += 1
            taken = before - ior._table.free_count
            after += interrupts == place and taken
            prepare(2)
            file.failures = 0
            ior.submit()
            ior.cancel_range(0, 100)
            done = ior.wait(taken + 1, 5)
            assert sorted(completion.userdata for completion in done) == [*([1] * taken), 2], place
            assert ior._table.free_count == ENTRIES
            assert ior.wait(1) == []
            assert file.failures > 0 or kind == "read"
            if at.left > 0:
                break  # it had fewer calls
    assert interrupts > 5
    assert after > 0  # it was interrupted after the ring had taken the request


def test_a_wait_ends_when_nothing_is_in_flight(
    client: PlainClient,  # noqa: F811
    file: PlainFile,  # noqa: F811
    iov: Iov,  # noqa: F811
) -> None:
    with Ior(client, ENTRIES) as ior:
        ior._table.flights.raw.free_count -= 1  # as if native had lost one
        assert ior.wait(1, 20) == []
        assert ior.wait(1) == []
