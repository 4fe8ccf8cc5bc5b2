"""The keys that sign capabilities: what follows what. Pure. docs/control_plane.md, Signing keys.

A key is *announced* (storage nodes learn it, nothing is signed with it), then *signs*, then is *retired*
(nothing more is signed with it, what was signed with it is still good), then gone. Two are valid at most:

    now                       event       then
    signs                     rotate      signs + announced
    signs + retired           rotate      signs + announced; clients renew what the retired one had signed
    signs + announced         rotate      the same: a rotation goes on already
    signs + announced         activate    retired + signs
    signs + retired           time        signs, once all that the retired one signed has expired

Times are manager time, ms.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ffs.proto.auth import KEY_BYTES, KeySet, KeysReply, KeyView, SigningKey

LATE_MS: Final = 60_000  # other metadata processes may sign so long with a key that has been retired


class Key(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A key as it is stored."""

    id: int
    secret: bytes
    made_ms: int
    signing_ms: int = 0
    retired_ms: int = 0

    def __repr__(self) -> str:
        return f"Key(id={self.id}, signing_ms={self.signing_ms}, retired_ms={self.retired_ms})"


class Keyring(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """All keys of a cluster: the record `K`. In order of their ids; the signing one is always there."""

    v: int = 1
    revision: int
    last_id: int
    keys: tuple[Key, ...]

    @property
    def signing(self) -> Key:
        return next(key for key in self.keys if key.signing_ms and not key.retired_ms)

    @property
    def announced(self) -> Key | None:
        return next((key for key in self.keys if not key.signing_ms), None)


def first(secret: bytes, now_ms: int) -> Keyring:
    """Of a cluster that has none: it signs at once. `secret`: KEY_BYTES random bytes."""
    if len(secret) != KEY_BYTES:
        raise AssertionError("a signing key has 32 bytes")
    key = Key(id=1, secret=secret, made_ms=now_ms, signing_ms=max(1, now_ms))
    return Keyring(revision=1, last_id=1, keys=(key,))


def rotate(ring: Keyring, secret: bytes, now_ms: int) -> Keyring:
    """Announces a new key, in place of one that is retired."""
    if ring.announced is not None:
        return ring
    made = Key(id=ring.last_id + 1, secret=secret, made_ms=now_ms)
    return Keyring(revision=ring.revision + 1, last_id=made.id, keys=(ring.signing, made))


def activate(ring: Keyring, now_ms: int) -> Keyring:
    """The announced key signs from now on."""
    new = ring.announced
    if new is None:
        return ring
    old = replace(ring.signing, retired_ms=max(1, now_ms))
    return replace(ring, revision=ring.revision + 1, keys=(old, replace(new, signing_ms=max(1, now_ms))))


def forget(ring: Keyring, ttl_ms: int, now_ms: int) -> Keyring:
    """Without keys that signed nothing which may be good still."""
    left = tuple(key for key in ring.keys if not key.retired_ms or key.retired_ms + ttl_ms + LATE_MS > now_ms)
    return ring if left == ring.keys else replace(ring, revision=ring.revision + 1, keys=left)


def due(ring: Keyring, period_ms: int, now_ms: int) -> bool:
    """Whether the signing key has signed for so long (0: for ever) that another is to follow."""
    return bool(period_ms) and ring.announced is None and ring.signing.signing_ms + period_ms <= now_ms


def key_set(ring: Keyring) -> KeySet:
    """What storage nodes are told."""
    return KeySet(
        revision=ring.revision,
        sign=ring.signing.id,
        keys=tuple(SigningKey(key.id, key.secret) for key in ring.keys),
    )


def reply(ring: Keyring, waiting_for: tuple[str, ...]) -> KeysReply:
    """What people are told."""
    views = tuple(
        KeyView(id=k.id, made_ms=k.made_ms, signing_ms=k.signing_ms, retired_ms=k.retired_ms)
        for k in ring.keys
    )
    rotating = ring.announced is not None
    return KeysReply(
        signed=True,
        revision=ring.revision,
        keys=views,
        rotating=rotating,
        waiting_for=waiting_for if rotating else (),
    )
