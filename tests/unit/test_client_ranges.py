"""Neighbouring byte ranges become one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ffs.client.ranges import NEIGHBOUR_BYTES, TOGETHER_BYTES, Span, coalesce

CHUNK = 1 << 20


def test_neighbours_are_read_together_in_any_order() -> None:
    ranges = [(5000, 100), (0, 4096), (4096, 10), (CHUNK - 10, 10), (CHUNK, 10), (5000, 100)]
    assert coalesce(ranges, CHUNK) == [
        Span(0, 5100, (1, 2, 0, 5)),
        Span(CHUNK - 10, 10, (3,)),
        Span(CHUNK, 10, (4,)),  # another chunk, perhaps on another chain
    ]
    apart = [(0, 10), (10 + NEIGHBOUR_BYTES, 10), (21 + 2 * NEIGHBOUR_BYTES, 10)]
    assert [span.members for span in coalesce(apart, CHUNK)] == [(0, 1), (2,)]
    assert coalesce([], CHUNK) == []


@given(
    st.lists(st.tuples(st.integers(0, 1 << 22), st.integers(1, 1 << 21)), max_size=40),
    st.sampled_from([4096, 1 << 20, 1 << 24]),
)
def test_every_range_lies_in_one_span_and_little_else_is_read(
    ranges: list[tuple[int, int]], chunk_size: int
) -> None:
    spans = coalesce(ranges, chunk_size)
    assert sorted(member for span in spans for member in span.members) == list(range(len(ranges)))
    for span in spans:
        inside = sorted(ranges[member] for member in span.members)
        assert span.offset == inside[0][0]
        assert span.offset + span.length == max(offset + length for offset, length in inside)
        at = span.offset
        for offset, length in inside:
            assert offset - at <= NEIGHBOUR_BYTES
            at = max(at, offset + length)
        if len(inside) > 1:
            assert span.length <= TOGETHER_BYTES
            assert span.offset // chunk_size == (span.offset + span.length - 1) // chunk_size
