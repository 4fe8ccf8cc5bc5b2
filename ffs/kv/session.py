"""Sessions that must survive: their blocks are copied to a space with three replicas and no eviction, with a
list of them, and come back from there whatever tier was lost (K27). docs/kv_tiers.md, Sessions.

The list is a block of that space itself, under a key that is made of the session's name, so bringing a
session back needs its name and the space, nothing else.
"""

from __future__ import annotations

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


class _List(msgspec.Struct, array_like=True):
    """What the list's block holds, as msgpack. `keys`: 32 bytes each, one after the other; `pages`: how many
    blocks the list has, this is number `page`."""

    format: int
    name: str
    page: int
    pages: int
    keys: bytes


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


def list_key(name: str, page: int) -> bytes:
    """Of a session's list, page by page."""
    hasher = blake3.blake3(derive_key_context=_CONTEXT)
    label = name.encode()
    hasher.update(len(label).to_bytes(8, "little") + label + page.to_bytes(8, "little"))
    return hasher.digest()


def pin_session(
    tiers: TierManager, name: str, keys: Sequence[bytes], into: Space, *, timeout_s: float | None = None
) -> Pinned:
    """Copies the blocks of a session, from whatever tier has them, into a space that keeps them, and then
    its list. Until the list is there nothing of the session can be brought back; a session of that name that
    was there is replaced at that moment. Blocking. Raises the first error of a store (what was copied stays
    and needn't be copied again), InvalidArgument for a space that may drop blocks or is too small."""
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
    room = into.block_bytes - 64 - len(name.encode())
    a_page = room // KEY_BYTES
    if a_page < 1:
        raise InvalidArgument(f"the name {name!r} is too long for blocks of {into.block_bytes} bytes")
    pages = max(1, -(-len(keys) // a_page))
    names = [list_key(name, page) for page in range(pages)]
    blocks = [
        msgspec.msgpack.encode(
            _List(_FORMAT, name, page, pages, b"".join(keys[page * a_page : (page + 1) * a_page]))
        )
        for page in range(pages)
    ]
    # The first page says how many there are, so it goes first and comes last. A longer list that was there
    # goes whole: nothing else would ever take its last pages away.
    try:
        before = _page(name, 0, into, timeout_s)
    except FfsError:
        before = None  # it is damaged, and is replaced; or nothing answers, which shows below
    old = [list_key(name, page) for page in range(pages, before.pages if before is not None else 0)]
    into.delete([*names, *old], timeout_s=timeout_s).raise_errors()
    for piece in (slice(1, None), slice(0, 1)):
        into.put_many(names[piece], blocks[piece], timeout_s=timeout_s).raise_errors()


def session_keys(name: str, space: Space, *, timeout_s: float | None = None) -> list[bytes]:
    """The blocks of a pinned session, in order. Blocking. NotFound: no such session; FfsError: its list is
    damaged."""
    keys: list[bytes] = []
    page, pages = 0, 1
    while page < pages:
        read = _page(name, page, space, timeout_s)
        if read is None:
            raise NotFound(f"no session {name!r} is pinned here", space.path)
        pages = read.pages
        keys += [read.keys[at : at + KEY_BYTES] for at in range(0, len(read.keys), KEY_BYTES)]
        page += 1
    return keys


def _page(name: str, page: int, space: Space, timeout_s: float | None) -> _List | None:
    """A block of a session's list; None: it isn't there. FfsError: it is damaged."""
    memory = bytearray(space.block_bytes)
    found = space.get_many([list_key(name, page)], [memory], timeout_s=timeout_s)
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
    a_page = (space.block_bytes - 64 - len(name.encode())) // KEY_BYTES
    pages = max(1, -(-len(keys) // a_page))
    space.delete([list_key(name, page) for page in range(pages)], timeout_s=timeout_s).raise_errors()
    space.delete(gone, timeout_s=timeout_s).raise_errors()
    return len(gone)
