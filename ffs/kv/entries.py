"""Requests of a call as the ring takes them, and what their completions mean. Pure. docs/guides/kv.md, What a
call tells."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ffs._native.ring import SQE_DTYPE
from ffs.client.transfer import error_of_completion
from ffs.errors import FfsError, InvalidArgument, NoSpace, QuotaExceeded, TagMismatch
from ffs.kv.geometry import whole_blocks
from ffs.kv.keys import CHUNK_KEY_BYTES
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.kv.batch import Completions
    from ffs.kv.handle import Handle
    from ffs.layout import Placement

DETAIL_TAG: Final = 8  # wire.h Detail::kTagMismatch
_EXISTS_PIECE: Final = 4096  # keys in one frame: 48 bytes each, frames hold 256 KiB of them
# As numpy likes them: of an Enum it asks much before it takes its number.
_MISS, _HIT, _STORED, _ERROR = map(np.uint8, (0, 1, 2, 3))
assert [Status.MISS, Status.HIT, Status.STORED, Status.ERROR] == [0, 1, 2, 3]

Entries = npt.NDArray[np.void]


def timeout_ms(timeout_s: float) -> int:
    """For an entry. InvalidArgument."""
    if not 0 < timeout_s < 4_000_000:
        raise InvalidArgument(f"timeout_s is {timeout_s}: give seconds above 0")
    return max(1, round(timeout_s * 1000))


def chains_of(placement: Placement, hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Of each block (or part of one)."""
    if len(hashes) == 1:  # arrays of one take twenty times as long
        return np.array([placement.chain_of(hashes[0, :CHUNK_KEY_BYTES].tobytes())], dtype=np.uint32)
    return placement.chains_of(hashes[:, :CHUNK_KEY_BYTES])


def chunk_keys(space: bytes, hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """uint8 (n, 24): the 8 bytes of the space, then the first half of each hash."""
    keys = np.empty((len(hashes), 24), dtype=np.uint8)
    keys[:, :8] = np.frombuffer(space, dtype=np.uint8)
    keys[:, 8:] = hashes[:, :CHUNK_KEY_BYTES]
    return keys


def entries_for(
    operation: int, space: bytes, placement: Placement, hashes: npt.NDArray[np.uint8], timeout: int
) -> Entries:
    """One a hash, with its position as userdata, without place in memory, capability and epoch."""
    entries = np.zeros(len(hashes), dtype=SQE_DTYPE)
    entries["op"] = operation
    entries["group"] = 1
    entries["userdata"] = np.arange(len(hashes), dtype=np.uint64)
    entries["timeout_ms"] = timeout
    entries["tag_bytes"] = CHUNK_KEY_BYTES
    if len(hashes):
        entries["chain"] = chains_of(placement, hashes)
        entries["key"] = chunk_keys(space, hashes)
        entries["tag"] = hashes[:, CHUNK_KEY_BYTES:]
    return entries


def by_chain(chains: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Runs [begin, end) of equal chains, none longer than a frame holds."""
    if not len(chains):
        return []
    borders = np.flatnonzero(np.diff(chains)) + 1
    begins = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(chains)]
    return [
        (at, min(at + _EXISTS_PIECE, end))
        for begin, end in zip(begins, ends, strict=True)
        for at in range(begin, end, _EXISTS_PIECE)
    ]


# --- what completions mean ------------------------------------------------------------------------------


def of_reads(done: Completions, pieces: int, handle: Handle) -> Results:
    result, detail = done["result"], done["detail"]
    if pieces == 1 and len(done) and result.min() >= 0:  # the usual case, in a third of the time
        return Results(np.full(len(done), _HIT, dtype=np.uint8), result.copy(), {})
    status = np.full(len(done), _ERROR, dtype=np.uint8)
    status[result >= 0] = _HIT
    missing = (result == -errno.ENOENT) | (result == -errno.ENODATA) | ((result < 0) & (detail == DETAIL_TAG))
    status[missing] = _MISS
    return _results(status, np.where(result >= 0, result, 0), done, pieces, handle)


def of_puts(done: Completions, lengths: npt.NDArray[np.int64], pieces: int, handle: Handle) -> Results:
    """`lengths`: of what was put, by piece."""
    result, detail = done["result"], done["detail"]
    if pieces == 1 and len(done) and result.min() >= 0:
        return Results(np.full(len(done), _STORED, dtype=np.uint8), lengths.copy(), {})
    status = np.full(len(done), _ERROR, dtype=np.uint8)
    status[result >= 0] = _STORED
    there = (result == -errno.EEXIST) & (detail != DETAIL_TAG)
    status[there] = _HIT
    held = np.where(result >= 0, lengths, np.where(there, done["value"].astype(np.int64), 0))
    return _results(status, held, done, pieces, handle)


def of_removals(done: Completions, pieces: int, handle: Handle) -> Results:
    status = np.full(len(done), _ERROR, dtype=np.uint8)
    status[(done["result"] >= 0) | (done["result"] == -errno.ENOENT)] = _MISS
    return _results(status, np.zeros(len(done), dtype=np.int64), done, pieces, handle)


def _results(
    status: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int64],
    done: Completions,
    pieces: int,
    handle: Handle,
) -> Results:
    errors: dict[int, FfsError] = {}
    for position in np.flatnonzero(status == _ERROR).tolist():
        errors.setdefault(position // pieces, _error(done[position], handle))
    return blocks_of(status, lengths, errors, pieces)


def blocks_of(
    status: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64], errors: dict[int, FfsError], pieces: int
) -> Results:
    """Of pieces, the results of their blocks; `errors` by block."""
    if pieces > 1:
        status = whole_blocks(status, pieces)
        lengths = lengths.reshape(-1, pieces).sum(axis=1)
        lengths[(status == _MISS) | (status == _ERROR)] = 0
    return Results(status, lengths.astype(np.int64, copy=False), errors)


def _error(row: np.void, handle: Handle) -> FfsError:
    error = error_of_completion(row, handle)
    if isinstance(error, TagMismatch):
        return TagMismatch("another block has the same first half of its hash: this one can't be stored")
    if isinstance(error, QuotaExceeded | NoSpace):
        return _no_room(error, int(row["chain"]), handle.path)
    return error


def _no_room(error: QuotaExceeded | NoSpace, chain: int, path: str) -> FfsError:
    """Of which space, and what its owner can do."""
    if isinstance(error, QuotaExceeded):
        return QuotaExceeded(
            f"chain {chain} has its share of the space's quota, and nothing on it may go for this block:"
            f" raise the quota (`ffs space set {path} --quota SIZE`), or let blocks that aren't pinned go for"
            f" new ones (`ffs space set {path} --evictable yes`)",
            path,
        )
    return NoSpace(
        f"a device of chain {chain} is full, and nothing on it may go for this block: remove files or spaces"
        " there, add a device (`ffs cluster chains` shows where the chain lies), or let blocks of spaces"
        " there go for new ones (`ffs space set PATH --evictable yes`)",
        path,
    )
