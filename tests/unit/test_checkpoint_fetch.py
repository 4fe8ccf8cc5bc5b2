"""Which ranges are read as one, and which want gets which bytes of them."""

from __future__ import annotations

import numpy as np

from ffs import Iov
from ffs.checkpoint.fetch import Want, runs


def want(path: str, offset: int, length: int, **more: object) -> Want:
    return Want(path, offset, length, into=np.zeros(length, np.uint8), **more)  # type: ignore[arg-type]


def shown(wants: list[Want]) -> list[tuple[str, int, int, int]]:
    return [(run.path, run.begin, run.end, len(run.wants)) for run in runs(wants)]


def test_neighbours_are_read_as_one() -> None:
    wants = [want("a", 0, 10), want("a", 10, 5), want("a", 4111, 9), want("a", 9000, 1), want("b", 9001, 4)]
    assert shown(wants) == [("a", 0, 4120, 3), ("a", 9000, 9001, 1), ("b", 9001, 9005, 1)]


def test_what_has_memory_of_its_own_is_read_alone() -> None:
    iov = Iov(4096)
    wants = [
        want("a", 0, 10),
        want("a", 10, 10, iov=iov),
        want("a", 20, 10),
        Want("a", 30, 10),
        Want("a", 40, 10),
        want("a", 50, 10),
        want("a", 60, 10),
    ]
    assert [run[1:] for run in shown(wants)] == [
        (0, 10, 1),
        (10, 20, 1),
        (20, 30, 1),
        (30, 40, 1),
        (40, 50, 1),
        (50, 70, 2),
    ]


def test_wants_that_overlap_are_read_apart() -> None:
    assert [run[1:] for run in shown([want("a", 0, 10), want("a", 5, 10)])] == [(0, 10, 1), (5, 15, 1)]


def test_nothing_is_nothing() -> None:
    assert shown([]) == []
