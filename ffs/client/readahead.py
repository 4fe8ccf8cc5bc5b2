"""How far to read ahead: what a buffered file decides from the reads that it sees. Pure, no I/O.

Reads that follow each other open a window of data that is fetched before it is asked for; it doubles with
each of them. A read elsewhere closes it, and makes what the next one fetches smaller, so that small reads at
random places don't move a buffer each. docs/client.md, Reading ahead.
"""

from __future__ import annotations

from typing import Final, NamedTuple

FIRST_BYTES: Final = 1 << 20
"""The window after the second read in a row."""

MOST_BYTES: Final = 7 << 20
"""And at most."""

PIECE_BYTES: Final = 1 << 20
"""What one request fetches at most: to a multiple of it within a chunk."""

LEAST_FILL_BYTES: Final = 16 << 10
"""What a small read fetches at least, after several at random places."""

PAGE_BYTES: Final = 4096
"""Requests are for whole pages, so that a server on the same host can write into our memory itself."""

OLDEST_S: Final = 1.0
"""What was fetched longer ago than this isn't served any more."""


class Decision(NamedTuple):
    """serve: bytes to give at most now. window: bytes beyond them to have under way; 0: none, and what is
    held is of no use."""

    serve: int
    window: int


class Piece(NamedTuple):
    """One request: `length` bytes of the file from `start`, read as whole pages from `low` in `chunk`."""

    start: int
    length: int
    chunk: int
    low: int
    size: int

    @property
    def skip(self) -> int:
        """Where, in what is read, the piece begins."""
        return self.start % PAGE_BYTES


class Pattern:
    """What the reads of one file look like. `buffer_bytes`: of the buffer that small reads come through."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._fill = buffer_bytes
        self._next: int | None = None  # where the last read ended
        self._window = 0

    @property
    def window(self) -> int:
        """The window now, in bytes."""
        return self._window

    def ask(self, offset: int, size: int) -> Decision:
        """A read of `size` bytes from `offset`."""
        if self._next is None:  # the first says nothing
            self._window = 0
        elif offset == self._next:
            self._window = min(max(2 * self._window, FIRST_BYTES), MOST_BYTES)
            self._fill = min(2 * self._fill, self._buffer_bytes)
        elif self._next < offset <= self._next + self._window:
            pass  # a part is left out: the window goes along
        else:
            self._window = 0
            self._fill = max(self._fill // 2, min(LEAST_FILL_BYTES, self._buffer_bytes))
        if self._window or size > self._buffer_bytes:
            return Decision(size, self._window)
        # A whole buffer is asked for; the reader behind it wanted some of that.
        return Decision(min(size, self._fill), 0)

    def served(self, end: int) -> None:
        """The read was given the bytes up to `end`."""
        self._next = end

    def outlived(self) -> None:
        """What was fetched ahead wasn't asked for in time: less of it."""
        self._window = self._window // 2 if self._window > FIRST_BYTES else 0

    def forget(self) -> None:
        """Nothing is known."""
        self._next, self._window, self._fill = None, 0, self._buffer_bytes


def next_piece(start: int, until: int, length: int, chunk_size: int) -> Piece | None:
    """What to fetch from `start` on so that the bytes up to `until` are under way, in a file of `length`
    bytes: to the next border of pieces or chunks, or to the file's end. None: nothing."""
    if start >= min(until, length):
        return None
    chunk, inside = divmod(start, chunk_size)
    stop = min(chunk_size, (inside // PIECE_BYTES + 1) * PIECE_BYTES, length - start + inside)
    low = inside - inside % PAGE_BYTES
    return Piece(start, stop - inside, chunk, low, stop + -stop % PAGE_BYTES - low)
