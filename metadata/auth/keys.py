"""Signing keys in the store: every metadata process signs with them, the primary rotates them.

`Signer` is any process's view of the record `K`; `KeyKeeper` is the primary's work on it. Only clusters
with a secret have either. One event loop. docs/control_plane.md, Signing keys.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from ffs.errors import Damaged, FfsError, Overloaded
from ffs.proto.auth import KEY_BYTES, KeySet, KeysReply, SigningKey, sign_capability
from ffs.proto.common import Capability
from ffs.rpc.handshake import Peer
from metadata.auth import keyring
from metadata.auth.keyring import Keyring
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.cluster.schema import MANAGER_TIME, unpack_u64
from metadata.fs.core import CAPABILITY_TTL_MS
from metadata.kv.contract import Store, Transaction

log = logging.getLogger("ffs.meta.keys")

KEYRING_KEY: Final = b"K"
POLL_S: Final = 0.5
ANNOUNCE_S: Final = 30.0  # a node that is alive and doesn't take a new key is waited for so long

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Keyring)


def decode_keyring(data: bytes) -> Keyring:
    """Raises Damaged. (What msgspec says of a record names no values, so no secrets.)"""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Damaged(f"the record of signing keys can't be read: {error}") from None


class Signer:
    """Signs with the key that the store names. `refresh` before the first capability."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._raw: bytes | None = None
        self.ring: Keyring | None = None
        self._key: SigningKey | None = None

    async def ensure_first(self) -> None:
        """Makes the first key of a cluster that has none."""
        secret = os.urandom(KEY_BYTES)

        async def body(txn: Transaction) -> None:
            if await txn.get(KEYRING_KEY) is None:
                now_ms = unpack_u64(await txn.get(MANAGER_TIME)) or time.time_ns() // 1_000_000
                txn.set(KEYRING_KEY, _encode(keyring.first(secret, now_ms)))

        await self._store.run(body)
        await self.refresh()

    async def refresh(self) -> None:
        """Reads the record again. Raises what the store raises, Damaged."""
        raw = await self._store.read(lambda snapshot: snapshot.get(KEYRING_KEY))
        if raw is None or raw == self._raw:
            return
        ring = decode_keyring(raw)
        self._raw, self.ring = raw, ring
        self._key = SigningKey(ring.signing.id, ring.signing.secret)

    async def poll(self) -> None:
        """For ever: other processes' changes are seen within POLL_S."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
            except FfsError as error:
                log.warning("signing keys: %s", error)

    def sign(self, capability: Capability) -> bytes:
        """Raises Overloaded if there is no key yet."""
        if self._key is None:
            raise Overloaded("this metadata process has read no signing key yet: ask again")
        return sign_capability(capability, self._key)


class KeyKeeper:
    """The primary's: rotates, and says what nodes are to be told. Without a signer (a cluster without a
    secret) it tells nothing."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        clock: ManagerClock,
        *,
        signer: Signer | None,
        period_ms: int,
        behind: Callable[[int], Iterable[str]],
        changed: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        """`behind`: names of the live nodes that don't act on a revision yet; `changed`: nodes have news;
        `period_ms`: how long a key signs, 0: until it is rotated by command."""
        self._store = store
        self._lease = lease
        self._clock = clock
        self._signer = signer
        self._period_ms = period_ms
        self._behind = behind
        self._changed = changed
        self._now_s = now_s
        self._announced: tuple[int, float] = (0, 0.0)  # which key, and since when this process knows it
        self._told: KeySet | None = None

    def news_for(self, peer: Peer, known: int | None) -> KeySet | None:
        """What a node that acts on revision `known` (None: it takes none) must be told; None: nothing. Never
        over a connection that has proved nothing."""
        ring = self._signer.ring if self._signer is not None else None
        if ring is None or known is None or known == ring.revision or not peer.authenticated:
            return None
        if self._told is None or self._told.revision != ring.revision:
            self._told = keyring.key_set(ring)
        return self._told

    async def tick(self) -> None:
        """Goes on with what is due. Call it about twice a second while primary. Raises FfsError."""
        if self._signer is None:
            return
        await self._signer.refresh()
        ring = self._signer.ring
        if ring is None:
            return
        now_ms = self._clock.now_ms()
        if keyring.due(ring, self._period_ms, now_ms):
            await self._rotate()
        elif ring.announced is not None:
            await self._activate_when_known(ring)
        elif keyring.forget(ring, CAPABILITY_TTL_MS, now_ms) is not ring:
            await self._change(lambda found: keyring.forget(found, CAPABILITY_TTL_MS, now_ms))

    async def _activate_when_known(self, ring: Keyring) -> None:
        assert ring.announced is not None
        new = ring.announced.id
        if self._announced[0] != new:
            self._announced = (new, self._now_s())
        behind = list(self._behind(ring.revision))
        if behind and self._now_s() - self._announced[1] < ANNOUNCE_S:
            return
        if behind:
            log.warning("signing key %d is used though %s has not taken it", new, ", ".join(behind))
        now_ms = self._clock.now_ms()
        await self._change(lambda found: _activate(found, new, now_ms))
        log.info("signing key %d signs from now on", new)

    async def handle(self, look: bool) -> KeysReply:
        """RotateKeys."""
        if self._signer is None:
            return KeysReply(signed=False)
        await self._signer.refresh()
        if not look:
            await self._rotate()
        ring = self._signer.ring
        if ring is None:
            raise Overloaded("no signing key has been made yet: ask again")
        return keyring.reply(ring, tuple(self._behind(ring.revision)))

    async def _rotate(self) -> None:
        secret, now_ms = os.urandom(KEY_BYTES), self._clock.now_ms()
        await self._change(lambda ring: keyring.rotate(ring, secret, now_ms))

    async def _change(self, change: Callable[[Keyring], Keyring]) -> None:
        async def body(txn: Transaction) -> None:
            await self._lease.guard(txn)
            raw = await txn.get(KEYRING_KEY)
            if raw is None:
                return
            ring = decode_keyring(raw)
            after = change(ring)
            if after is not ring:
                txn.set(KEYRING_KEY, _encode(after))

        await self._store.run(body)
        assert self._signer is not None
        await self._signer.refresh()
        self._changed()


def _activate(ring: Keyring, new: int, now_ms: int) -> Keyring:
    return keyring.activate(ring, now_ms) if ring.announced is not None and ring.announced.id == new else ring
