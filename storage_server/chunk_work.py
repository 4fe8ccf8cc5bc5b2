"""What each request of the namespace does to chunks: generators over ring operations. Pure.

`steps_of(request)` yields an Operation, is sent its completion (a row of ffs._native.ring.CQE_DTYPE; of a
LIST_CHUNKS a Listing), and so on; it returns the reply or raises the error of the chain. Every one is
idempotent. An absent chunk is a result, never an error. docs/control_plane.md, Storage control.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from errno import ENOENT
from typing import Any, Final, NamedTuple, cast

from ffs._native.ring import (
    LIST_ALL_SPACES,
    LIST_ENTRY_DTYPE,
    LIST_MAX_ENTRIES,
    OP_LAST_CHUNK,
    OP_LIST_CHUNKS,
    OP_REMOVE_RANGE,
    OP_SPACE_EPOCH,
    OP_TRUNCATE,
    error_of_cqe,
)
from ffs.errors import DeadlineExceeded, StaleEpoch
from ffs.proto.chain_calls import (
    LastChunk,
    LastChunkReply,
    ListChunks,
    ListChunksReply,
    RaiseSpaceEpoch,
    RemovePage,
    RemovePageReply,
    TruncateChunk,
)
from ffs.proto.common import Message, OkReply


class Operation(NamedTuple):
    op: int
    key: bytes  # 24 bytes
    length: int
    epoch: int
    flags: int = 0


class Listing(NamedTuple):
    """What a LIST_CHUNKS is answered by: its completion, and the memory that the entries stand in."""

    cqe: Any
    memory: memoryview


LISTING_BYTES: Final = LIST_MAX_ENTRIES * LIST_ENTRY_DTYPE.itemsize

Request = RaiseSpaceEpoch | RemovePage | TruncateChunk | LastChunk | ListChunks  # of one chain
Steps = Generator[Operation, Any, Message]


def steps_of(request: Request) -> Steps:
    if isinstance(request, RaiseSpaceEpoch):
        return _raise_epoch(request)
    if isinstance(request, TruncateChunk):
        return _truncate(request)
    if isinstance(request, LastChunk):
        return _last_chunk(request)
    if isinstance(request, ListChunks):
        return _list_chunks(request)
    return _remove_page(request)


def _failed(cqe: Any) -> bool:
    return int(cqe["result"]) < 0


def _absent(cqe: Any) -> bool:
    return int(cqe["result"]) == -ENOENT


def _first_key(space: int) -> bytes:
    return space.to_bytes(8, "big") + bytes(16)


def _raise_epoch(request: RaiseSpaceEpoch) -> Steps:
    cqe = yield Operation(OP_SPACE_EPOCH, _first_key(request.space), 0, request.epoch)
    if _failed(cqe):
        error = error_of_cqe(cqe)
        if not isinstance(error, StaleEpoch):  # higher already: it is a maximum
            raise error
    return OkReply()


def _truncate(request: TruncateChunk) -> Steps:
    """Cuts; a chunk that is shorter already isn't made longer."""
    cqe = yield Operation(OP_TRUNCATE, request.key, request.length_bytes, request.epoch)
    if _failed(cqe) and not _absent(cqe):
        raise error_of_cqe(cqe)
    return OkReply()


def _last_chunk(request: LastChunk) -> Steps:
    cqe = yield Operation(OP_LAST_CHUNK, _first_key(request.space), 0, 0)
    if _absent(cqe):
        return LastChunkReply(key=b"", length_bytes=0, chunks=0)
    if _failed(cqe):
        raise error_of_cqe(cqe)
    return LastChunkReply(
        key=cqe["key"].tobytes(), length_bytes=int(cqe["chunk_length"]), chunks=int(cqe["value"])
    )


def _remove_page(request: RemovePage) -> Steps:
    """The chain's head removes a page by itself; its own bound holds, whatever `limit` is."""
    key = request.space.to_bytes(8, "big") + request.start
    cqe = yield Operation(OP_REMOVE_RANGE, key, 0, request.epoch)
    if _absent(cqe):
        return RemovePageReply(removed=0, more=False)
    if _failed(cqe):
        raise error_of_cqe(cqe)
    return RemovePageReply(removed=int(cqe["value"]), more=bool(cqe["chunk_length"]))


def removal_of(chain: int, space: int, epoch: int, in_time: Callable[[], bool]) -> Steps:
    """One pair of a RemoveSpaces; at least a page of it. Others are answered with it, so one that has more
    than there is time for ends with DeadlineExceeded."""
    yield from _raise_epoch(RaiseSpaceEpoch(chain=chain, space=space, epoch=epoch))
    page = RemovePage(chain=chain, space=space, epoch=epoch, start=bytes(16))
    while cast(RemovePageReply, (yield from _remove_page(page))).more:
        if not in_time():
            raise DeadlineExceeded(f"space {space} has more on chain {chain} than one request removes")
    return OkReply()


def _list_chunks(request: ListChunks) -> Steps:
    limit = min(request.limit or LIST_MAX_ENTRIES, LIST_MAX_ENTRIES)
    listing = yield Operation(OP_LIST_CHUNKS, request.start, limit, 0, LIST_ALL_SPACES)
    cqe, memory = listing
    if _failed(cqe):
        raise error_of_cqe(cqe)
    size = int(cqe["result"]) * LIST_ENTRY_DTYPE.itemsize
    return ListChunksReply(entries=bytes(memory[:size]), more=bool(cqe["value"]))
