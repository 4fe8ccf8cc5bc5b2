"""Who writes what, in which boxes and files; which ranges a reader needs. Against plain numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffs.checkpoint.dtypes import DTYPE_BYTES
from ffs.checkpoint.manifest import covers
from ffs.checkpoint.plan import ALONE_BYTES, Box, Part, cut, files_of, meets, owners, volume
from ffs.checkpoint.reads import GAP_BYTES, place_in, ranges, scatter

shapes = st.lists(st.sampled_from([1, 2, 3, 5, 40]), max_size=4).map(tuple).filter(lambda s: volume(s) < 2000)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    begin = tuple(draw(st.integers(0, s - 1)) for s in shape)
    return begin, tuple(draw(st.integers(1, s - b)) for s, b in zip(shape, begin, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box, int]:
    shape = draw(shapes)
    items = [1, 2, 8, 4096] if volume(shape) < 500 else [1, 2, 8]
    return shape, draw(box_in(shape)), draw(box_in(shape)), draw(st.sampled_from(items))


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(b, b + e) for b, e in zip(*box, strict=True))


@given(cases())
def test_a_reader_gets_what_a_part_and_its_own_piece_have_both(
    case: tuple[tuple[int, ...], Box, Box, int],
) -> None:
    """C11, C15: any box out of any box, and at most twice the bytes, but for gaps of less than a page."""
    shape, held, goal, item = case
    whole = (np.arange(volume(shape) * item) % 251).astype(np.uint8).reshape((*shape, item))
    part = np.ascontiguousarray(whole[window(held)]).reshape(-1)
    got = np.zeros(volume(goal[1]) * item, np.uint8)
    wanted = np.zeros((*goal[1], item), np.uint8)
    shared = meets(held, goal)
    if shared is not None:
        wanted[window((tuple(s - g for s, g in zip(shared[0], goal[0], strict=True)), shared[1]))] = whole[
            window(shared)
        ]
        end = 0
        for piece in ranges(held, goal, shared, item):
            assert piece.offset >= end
            end = piece.offset + piece.length
            assert piece.length <= max(2 * piece.needed, piece.needed + GAP_BYTES * volume(piece.extent))
            data = part[piece.offset : end]
            run = place_in(goal[1], piece)
            if run is None:
                scatter(data, piece, got, goal[1])
            else:
                got[run[0] : run[0] + run[1]] = data
    assert (got.reshape(wanted.shape) == wanted).all()


@given(shapes, st.sampled_from([1, 16, 100, 1 << 20]))
def test_a_tensor_is_cut_into_contiguous_boxes(shape: tuple[int, ...], most: int) -> None:
    values = np.arange(volume(shape), dtype=np.int32).reshape(shape)
    pieces = cut(Part("x", "I32", shape, (0,) * len(shape), shape), most)
    assert covers(shape, [(piece.begin, piece.extent) for piece in pieces]) == ""
    for piece in pieces:
        assert piece.nbytes <= max(most, DTYPE_BYTES["I32"])
        flat = values.reshape(-1)[piece.at // 4 : (piece.at + piece.nbytes) // 4]
        assert (values[window((piece.begin, piece.extent))].reshape(-1) == flat).all()


def test_boxes_that_overlap_or_leave_gaps_are_told() -> None:
    assert covers((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))]) == ""
    assert "lacks" in covers((4, 4), [((0, 0), (2, 4))])
    assert "overlap" in covers((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert "overlap" in covers((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))])
    assert covers((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))]) == ""
    assert covers((), [((), ())]) == ""
    assert covers((0, 3), []) == "has no parts"


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 5))
def test_ranks_share_evenly_and_agree(sizes: list[int], count: int) -> None:
    named = [(f"t{n}", size) for n, size in enumerate(sizes)]
    owner = owners(named, count)
    assert owner == owners(list(reversed(named)), count)
    load = [sum(size for name, size in named if owner[name] == rank) for rank in range(count)]
    assert max(load) - min(load) <= max(sizes, default=0)


def test_files_have_plain_names_that_stay() -> None:
    def part(name: str, rows: int) -> Part:
        return Part(name, "F32", (rows, 1024), (0, 0), (rows, 1024))

    parts = [
        part("model.a/b\n.weight", 4096),
        part("model.x.weight", 10),
        part("model.y.weight", 10),
        part("optimizer.0.exp_avg", 10),
        part("." + "long" * 100, 4096),
    ]
    files = files_of(parts, 0, 1)
    assert files == files_of(parts, 0, 1)
    assert {piece.name for plan in files for piece in plan.parts} == {p.name for p in parts}
    for plan in files:
        assert "/" not in plan.file
        assert not plan.file.startswith(".")
        assert len(plan.file) <= 200
        assert plan.file.isprintable()
    together = [plan for plan in files if len(plan.parts) > 1]
    assert [[piece.name for piece in plan.parts] for plan in together] == [
        ["model.x.weight", "model.y.weight"]
    ]
    assert all(len(plan.parts) == 1 for plan in files if plan.parts[0].nbytes >= ALONE_BYTES)
    assert not {plan.file for plan in files} & {plan.file for plan in files_of(parts, 1, 2)}
