"""What a store holds and what was answered, comparable between worlds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from exactly_once_world import World

from ffs import errors
from metadata.fs.schema import TICKET_KEY, quota_in_key, signed


async def content(world: World) -> list[Any]:
    """All keys and chunks, with inodes numbered by their place in the tree: an attempt that is thrown away
    uses an id up, so the same story has other ids in it after a fault. Left out: blocks of ids, what renewals
    count, capabilities' ids, the answers kept in slots, and the key of tickets, which is random."""
    pairs = await world.store.read(lambda snap: snap.range(b"\0", b"\xff"))
    rank = _places(pairs)
    out: list[Any] = []
    usage: Counter[Any] = Counter()
    for key, value in pairs:
        kind = key[:1]
        if kind in b"kb" or key == TICKET_KEY:
            continue
        if kind == b"i":
            ino, rest = int.from_bytes(key[3:11], "big"), key[11:]
        elif key[:2] in (b"Ql", b"Qb", b"Qe", b"Qs"):
            kind, ino, rest = key[:2], quota_in_key(key), key[10:]
            if kind in (b"Qb", b"Qe"):
                usage[kind, rank.get(ino, ino)] += signed(value)  # the shard is the inode's
                continue
        else:
            ino, rest = int.from_bytes(key[1:9], "big"), key[9:]
        words = [
            rank.get(int.from_bytes(rest[at : at + 8], "big"), rest[at : at + 8].hex())
            for at in range(0, len(rest), 8)
        ]
        out.append((kind, rank.get(ino, ino), words, _comparable(key, value, rank)))
    chunks = {
        (rank.get(space, space), key, length)
        for held in world.chains.chunks.values()
        for (space, key), length in held.items()
    }
    epochs: dict[Any, list[int]] = {}
    for (_, space), epoch in world.chains.epochs.items():
        epochs.setdefault(rank.get(space, space), []).append(epoch)
    order = {key: sorted(found) for key, found in epochs.items()}
    out += [(*which, used) for which, used in usage.items()]
    return [*sorted(out, key=repr), sorted(chunks, key=repr), sorted(order.items(), key=repr)]


def _places(pairs: list[tuple[bytes, bytes]]) -> dict[int, str]:
    """A name for each inode: its place in a walk from the root, then those without a name, and quotas, by
    age."""
    entries = [
        (int.from_bytes(key[1:9], "big"), msgspec.msgpack.decode(value)[1])
        for key, value in pairs
        if key[:1] == b"d"
    ]
    order = [1]
    for ino in order:  # grows meanwhile
        order += [child for parent, child in entries if parent == ino and child not in order]
    inodes = {int.from_bytes(key[3:11], "big") for key, _ in pairs if key[:1] == b"i"}
    rest = sorted(inodes - set(order)) + [quota_in_key(key) for key, _ in pairs if key[:2] == b"Ql"]
    return {ino: f"#{at}" for at, ino in enumerate(order + rest)}


def _comparable(key: bytes, value: bytes, rank: dict[int, str]) -> Any:
    if key[:1] == b"w":
        return None  # names a capability
    if key[:1] == b"r":  # version and sequence; or a page of answers
        return msgspec.msgpack.decode(value)[:2] if len(key) == 13 else None
    if len(value) == 8:
        return value  # a counter
    try:
        return _ranked(msgspec.msgpack.decode(value), rank)
    except msgspec.MsgspecError:
        return value


def _ranked(value: Any, rank: dict[int, str]) -> Any:
    if isinstance(value, list):
        return [_ranked(item, rank) for item in value]
    return rank.get(value, value) if isinstance(value, int) else value


def told(reply: Any) -> Any:
    """What of a reply must be the same in every world: its kind, or the error."""
    if isinstance(reply, errors.FfsError):
        raise reply
    results = getattr(reply, "results", None)
    if results is not None:
        return [told(result) for result in results]
    return type(reply), getattr(reply, "code", 0)
