"""Who reads what several ranks want; and wants whose bytes come in pieces."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffs.checkpoint.fetch import Want
from ffs.checkpoint.passing import Intake, demands_of
from ffs.checkpoint.share import Piece, Span, merged, outside, rounds, share
from ffs.checkpoint.tensors import Bytes

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5).map(merged)
DEMANDS = st.lists(st.dictionaries(st.integers(0, 2), SPANS, max_size=3), min_size=1, max_size=5)


def wanted(demand: Mapping[int, Sequence[Span]]) -> set[tuple[int, int]]:
    return {(file, at) for file, spans in demand.items() for begin, end in spans for at in range(begin, end)}


@settings(max_examples=300, deadline=None)
@given(DEMANDS, st.integers(1, 20))
def test_each_byte_that_several_want_is_read_once_and_reaches_them_all(
    demands: list[Mapping[int, Sequence[Span]]], piece_bytes: int
) -> None:
    pieces = share(demands, piece_bytes)
    asked = [wanted(demand) for demand in demands]
    read: set[tuple[int, int]] = set()
    for piece in pieces:
        assert 0 < piece.nbytes <= piece_bytes
        assert piece.reader not in piece.takers
        held = {(piece.file, at) for at in range(piece.begin, piece.end)}
        assert not read & held
        read |= held
        assert [r for r, each in enumerate(asked) if held & each] == sorted((piece.reader, *piece.takers))
        assert all(held <= asked[rank] for rank in (piece.reader, *piece.takers))
    assert read == {
        byte for one, each in enumerate(asked) for other in asked[one + 1 :] for byte in each & other
    }
    planned = rounds(pieces, len(demands), 40)
    assert sorted((p for batches in planned for batch in batches for p in batch), key=str) == sorted(
        pieces, key=str
    )
    for batches in planned:
        for reader, batch in enumerate(batches):
            assert all(piece.reader == reader for piece in batch)
            assert len(batch) <= 1 or sum(piece.nbytes for piece in batch) <= 40 // len(demands)


def test_ranks_read_about_as_much_as_each_other() -> None:
    """Whatever each of them has for itself besides."""
    whole = {0: [(0, 1000)], 1: [(0, 600)]}
    demands: list[Mapping[int, Sequence[Span]]] = [whole] * 3 + [{**whole, 2: [(0, 500)]}]
    read = [0, 0, 0, 500]
    for piece in share(demands, 10):
        assert len(piece.takers) == 3
        read[piece.reader] += piece.nbytes
    assert sum(read) == 2100
    assert max(read) - min(read) <= 10
    assert share([whole], 10) == []
    assert share([whole, {}], 10) == []


@given(SPANS, st.integers(0, 60), st.integers(0, 60))
def test_outside(taken: list[Span], begin: int, end: int) -> None:
    left = outside(begin, end, taken)
    inside = {at for first, stop in taken for at in range(first, stop)}
    assert [at for first, stop in left for at in range(first, stop)] == [
        at for at in range(begin, end) if at not in inside
    ]


@pytest.mark.parametrize("seed", range(20))
def test_wants_are_filled_by_pieces_in_any_order(seed: int) -> None:
    """Those with a place of their own, those without, partly shared ones, neighbours and doubles."""
    dice = random.Random(seed)
    files = ["a", "b"]
    content = {file: np.frombuffer(dice.randbytes(200), np.uint8) for file in files}
    came: list[tuple[int, Bytes | None]] = []
    wants = []
    places: list[Bytes | None] = []
    for number in range(12):
        begin = dice.randrange(180)
        length = dice.randrange(20) if number else 0
        into = np.zeros(length, np.uint8) if dice.random() < 0.5 else None
        places.append(into)
        wants.append(
            Want(
                dice.choice(files), begin, length, into=into,
                done=lambda memory, number=number: came.append((number, memory)),
            )
        )  # fmt: skip
    demands = demands_of(wants, files)
    shared: dict[int, list[Span]] = {}
    for file, spans in demands.items():
        cut = [(b, e) for b, e in spans if dice.random() < 0.7]
        shared[file] = merged((b + dice.randrange(3), max(b, e - dice.randrange(3))) for b, e in cut)
    intake = Intake(wants, files, shared)
    pieces = [
        (f, at, min(at + 3, e)) for f, spans in shared.items() for b, e in spans for at in range(b, e, 3)
    ]
    coming: list[tuple[int, int, int] | Want] = [*pieces, *intake.private]
    dice.shuffle(coming)
    for each in coming:
        if isinstance(each, Want):
            data = content[each.path][each.offset : each.offset + each.length]
            if each.into is not None:
                each.into[:] = data
            each.done(None if each.into is not None else data)
        else:
            intake.take(each[0], each[1], content[files[each[0]]][each[1] : each[2]])
    assert sorted(number for number, _ in came) == list(range(12))
    for number, memory in came:
        want, into = wants[number], places[number]
        data = into if into is not None else memory
        if want.length:
            assert data is not None
            assert (data == content[want.path][want.offset : want.offset + want.length]).all()


def test_a_piece_is_what_it_says() -> None:
    assert Piece(1, 10, 14, 0, (1, 2)).nbytes == 4
