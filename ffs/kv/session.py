"""Sessions that must survive: their blocks are copied to a space with three replicas and no eviction, with a
list of them, and come back from there whatever tier was lost (K27). docs/kv_tiers.md, Sessions.

The list is a block of that space itself, under a key that is made of the session's name, so bringing a
session back needs its name and the space, nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import blake3
import msgspec
import numpy as np

from ffs._native.iov import Iov
from ffs.errors import FfsError, InvalidArgument, NotFound
from ffs.kv.blocks import Places
from ffs.kv.keys import KEY_BYTES
from ffs.kv.results import Status
from ffs.kv.tiers.words import Outcome

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.kv.space import Space
    from ffs.kv.tiers.manager import TierManager

_CONTEXT: Final = "ffs 2026 kv session: list of blocks"
_FORMAT: Final = 1
_BATCH_BYTES: Final = 64 << 20
_PAGES_AT_ONCE: Final = 64
_PAGE_HEAD_BYTES: Final = 96
_READS: Final = 8  # of a list that is replaced all the while


class _List(msgspec.Struct, array_like=True):
    """What the list's block holds, as msgpack. `keys`: 32 bytes each, one after the other; `pages`: how many
    blocks the list has, this is number `page`. `stamp`: the same in all pages of one list, and in no other
    list's. `turn`: where its other pages lie, 0 or 1."""

    format: int
    name: str
    page: int
    pages: int
    keys: bytes
    stamp: bytes = b""
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """What `pin_session` has done. `copied`: blocks that moved; `there`: that the space had; `absent`:
    positions of blocks that no tier has any more: they aren't in the list's prefix that survives, see
    `kept`."""

    copied: int
    there: int
    absent: tuple[int, ...]

    @property
    def kept(self) -> int | None:
        """How many blocks from the first on survive; None: all."""
        return self.absent[0] if self.absent else None


def create_session_space(client: Client, path: str, *, block_bytes: int, **options: Any) -> Space:
    """The space for `pin_session`: three replicas, nothing is evicted and nothing expires. Opens it if it is
    there. Blocking. Raises as Space.create, NotFound where no chain table has three replicas."""
    from ffs.kv.space import Space

    return Space.create(
        client, path, block_bytes=block_bytes, replicas=3, evictable=False, ttl_s=0, exist_ok=True, **options
    )


def list_key(name: str, page: int, turn: int = 0) -> bytes:
    """Of a session's list, page by page. The first page has one place, the others two, by turns."""
    hasher = blake3.blake3(derive_key_context=_CONTEXT)
    label = name.encode()
    hasher.update(len(label).to_bytes(8, "little") + label + page.to_bytes(8, "little"))
    if turn and page:
        hasher.update(turn.to_bytes(8, "little"))
    return hasher.digest()


def pin_session(
    tiers: TierManager, name: str, keys: Sequence[bytes], into: Space, *, timeout_s: float | None = None
) -> Pinned:
    """Copies the blocks of a session, from whatever tier has them, into a space that keeps them, and then
    its list. Until the list is there nothing of the session can be brought back; a session of that name that
    was there is replaced at that moment, at once: whoever reads, and whenever this ends, there is the old
    list or the new one. One at a time may pin a session. Blocking. Raises the first error of a store (what
    was copied stays and needn't be copied again), InvalidArgument for a space that may drop blocks or is too
    small."""
    _check(into, tiers.settings.block_bytes)
    present = into.exists_many(keys, timeout_s=timeout_s)
    present.raise_errors()
    wanted = [at for at in range(len(keys)) if present[at] is not Status.HIT]
    absent, copied = [], 0
    at_a_time = max(1, min(_BATCH_BYTES // tiers.settings.stride, tiers.settings.slots // 2))
    for begin in range(0, len(wanted), at_a_time):
        positions = wanted[begin : begin + at_a_time]
        with tiers.fetch([keys[at] for at in positions], timeout_s=timeout_s) as stream:
            blocks = stream.wait_all()
            found = [block for block in blocks if block.memory is not None]
            for block in blocks:
                if block.outcome is Outcome.FAILED and block.error is not None:
                    raise block.error
            places = [block.memory for block in found if block.memory is not None]
            stored = into.put_many([block.key for block in found], places, timeout_s=timeout_s)
            stored.raise_errors()
            copied += len(found)
            absent += [positions[block.position] for block in blocks if block.memory is None]
    _write_list(name, keys, into, timeout_s)
    return Pinned(copied, len(keys) - len(wanted), tuple(absent))


def _check(space: Space, block_bytes: int) -> None:
    bounds = space.bounds
    if bounds.evictable or bounds.ttl_s:
        raise InvalidArgument(
            "this space may drop blocks (evictable, or a time to live): make one by create_session_space",
            space.path,
        )
    if space.parts > 1:
        raise InvalidArgument(
            f"this space cuts blocks in {space.parts} parts, and the list of a session is a short one: give"
            " sessions a space of blocks in one part",
            space.path,
        )
    if space.block_bytes < block_bytes:
        raise InvalidArgument(
            f"it takes blocks of {space.block_bytes} bytes, these have {block_bytes}", space.path
        )


def _write_list(name: str, keys: Sequence[bytes], into: Space, timeout_s: float | None) -> None:
    room = into.block_bytes - _PAGE_HEAD_BYTES - len(name.encode())
    a_page = room // KEY_BYTES
    if a_page < 1:
        raise InvalidArgument(f"the name {name!r} is too long for blocks of {into.block_bytes} bytes")
    pages = max(1, -(-len(keys) // a_page))
    try:
        before = _page(name, 0, into, timeout_s)
    except FfsError:
        before = None  # it is damaged, and is replaced; or nothing answers, which shows below
    turn = 1 - before.turn if before is not None else 0
    stamp = os.urandom(16)
    blocks = [
        msgspec.msgpack.encode(
            _List(
                _FORMAT, name, page, pages, b"".join(keys[page * a_page : (page + 1) * a_page]), stamp, turn
            )
        )
        for page in range(pages)
    ]
    # The first page says where the others are: with it the new list takes the old one's place. What a pin
    # that ended before that has left lies where the next one writes, or takes away.
    for begin in range(1, pages, _PAGES_AT_ONCE):
        some = range(begin, min(begin + _PAGES_AT_ONCE, pages))
        into.replace_many(
            [list_key(name, page, turn) for page in some],
            [blocks[page] for page in some],
            timeout_s=timeout_s,
        ).raise_errors()
    into.replace_many([list_key(name, 0)], [blocks[0]], timeout_s=timeout_s).raise_errors()
    _clear(name, turn, pages, into, timeout_s)
    _clear(name, 1 - turn, 1, into, timeout_s)


def _clear(name: str, turn: int, begin: int, space: Space, timeout_s: float | None) -> None:
    """Takes away pages of that turn from one on. They were written a batch after the other, so behind one of
    which none is there nothing is."""
    while True:
        names = [list_key(name, page, turn) for page in range(begin, begin + _PAGES_AT_ONCE)]
        found = space.exists_many(names, timeout_s=timeout_s)
        found.raise_errors()
        if not found.hits.any():
            return
        space.delete(names, timeout_s=timeout_s).raise_errors()
        begin += _PAGES_AT_ONCE


def session_keys(name: str, space: Space, *, timeout_s: float | None = None) -> list[bytes]:
    """The blocks of a pinned session, in order: of one list, whoever replaces it meanwhile. Blocking.
    NotFound: no such session; FfsError: its list is damaged."""
    last = b""
    for _ in range(_READS):
        head = _page(name, 0, space, timeout_s)
        if head is None:
            raise NotFound(f"no session {name!r} is pinned here", space.path)
        keys, missing = _all_keys(head, space, timeout_s)
        if missing is None:
            return keys
        if head.stamp == last:
            raise NotFound(f"page {missing} of the list of session {name!r} is missing", space.path)
        last = head.stamp  # was it replaced since it was read? Then the next one is whole
    raise FfsError(f"the list of session {name!r} is replaced again and again", space.path)


def _all_keys(head: _List, space: Space, timeout_s: float | None) -> tuple[list[bytes], int | None]:
    """And the first page that isn't there or is another list's; None: all are."""
    joined = head.keys
    for page in range(1, head.pages):
        read = _page(head.name, page, space, timeout_s, head.turn)
        if read is None or read.stamp != head.stamp:
            return [], page
        joined += read.keys
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)], None


def _page(name: str, page: int, space: Space, timeout_s: float | None, turn: int = 0) -> _List | None:
    """A block of a session's list; None: it isn't there. FfsError: it is damaged."""
    memory = bytearray(space.block_bytes)
    found = space.get_many([list_key(name, page, turn)], [memory], timeout_s=timeout_s)
    found.raise_errors()
    if found[0] is not Status.HIT:
        return None
    try:
        read = msgspec.msgpack.decode(memory[: int(found.lengths[0])], type=_List)
    except msgspec.MsgspecError as error:
        raise FfsError(f"the list of session {name!r} can't be read ({error})", space.path) from error
    if (read.format, read.name, read.page) != (_FORMAT, name, page) or len(read.keys) % KEY_BYTES:
        raise FfsError(f"page {page} of the list of session {name!r} isn't what it should be", space.path)
    return read


def restore_session(
    tiers: TierManager, name: str, space: Space, *, timeout_s: float | None = None
) -> tuple[list[bytes], int]:
    """Brings a pinned session back into the tiers, whatever they have lost: its keys, and how many from the
    first on are there now. Blocking. NotFound, and the first error of the space."""
    keys = session_keys(name, space, timeout_s=timeout_s)
    back = 0
    for key, memory in _read(keys, space, timeout_s):
        if tiers.where(key) is None and not tiers.put(key, memory):
            break  # no room: what follows is loaded when it is asked for again
        back += 1
    return keys, back


def _read(keys: Sequence[bytes], space: Space, timeout_s: float | None) -> Iterator[tuple[bytes, memoryview]]:
    stride = -(-space.block_bytes // 4096) * 4096
    at_a_time = max(1, _BATCH_BYTES // stride)
    iov = Iov(min(len(keys), at_a_time) * stride or 4096)
    for begin in range(0, len(keys), at_a_time):
        some = keys[begin : begin + at_a_time]
        found = space.get_many(some, Places(iov, np.arange(len(some)) * stride), timeout_s=timeout_s)
        found.raise_errors()
        for at, key in enumerate(some):
            if found[at] is not Status.HIT:
                return
            yield key, iov[at * stride : at * stride + int(found.lengths[at])].view


def unpin_session(
    name: str, space: Space, *, keep: Sequence[bytes] = (), timeout_s: float | None = None
) -> int:
    """Takes a session's list and blocks away, but those in `keep` (of other sessions that share them); how
    many blocks. Blocking. NotFound."""
    keys = session_keys(name, space, timeout_s=timeout_s)
    kept = set(keep)
    gone = [key for key in keys if key not in kept]
    # The blocks first: whoever dies before the list is gone can do it again.
    space.delete(gone, timeout_s=timeout_s).raise_errors()
    space.delete([list_key(name, 0)], timeout_s=timeout_s).raise_errors()
    for turn in (0, 1):
        _clear(name, turn, 1, space, timeout_s)
    return len(gone)
