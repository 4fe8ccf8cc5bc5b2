"""Signing keys: what follows what (metadata.auth.keyring), a signature by hand, no secret in any text."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import struct

import msgspec
import pytest

from ffs.errors import Damaged, Overloaded
from ffs.proto import auth
from ffs.proto.common import Capability, decode_capability
from ffs.rpc.handshake import Peer
from metadata.auth import keyring
from metadata.auth.keys import ANNOUNCE_S, KEYRING_KEY, KeyKeeper, Signer, decode_keyring
from metadata.cluster.clock import ManagerClock
from metadata.cluster.lease import Lease
from metadata.fs.core import CAPABILITY_TTL_MS
from metadata.kv.memory import MemoryStore

A, B, C = bytes(range(32)), b"\x01" * 32, b"\x02" * 32
STORAGE = Peer("storage", "n", 1, 1, 1, True)


def test_a_rotation_goes_through_announced_signing_retired_gone() -> None:
    ring = keyring.first(A, 1000)
    assert ring.signing.secret == A
    assert keyring.key_set(ring).sign == 1
    assert keyring.activate(ring, 1) is ring  # nothing is announced
    announced = keyring.rotate(ring, B, 2000)
    assert (announced.revision, announced.signing.id, len(announced.keys)) == (2, 1, 2)
    assert keyring.rotate(announced, C, 2001) is announced  # it goes on already
    active = keyring.activate(announced, 3000)
    assert (active.signing.id, active.keys[0].retired_ms, active.revision) == (2, 3000, 3)
    end = 3000 + CAPABILITY_TTL_MS + keyring.LATE_MS
    assert keyring.forget(active, CAPABILITY_TTL_MS, end - 1) is active
    gone = keyring.forget(active, CAPABILITY_TTL_MS, end)
    assert [key.id for key in gone.keys] == [2]
    assert gone.revision == 4


def test_two_keys_are_valid_at_most_and_no_id_comes_again() -> None:
    ring, seen = keyring.first(A, 1), {1}
    for number in range(20):
        ring = keyring.rotate(ring, bytes([number]) * 32, 10 + number)
        assert len(ring.keys) == 2
        assert ring.announced is not None
        assert ring.announced.id not in seen
        seen.add(ring.announced.id)
        ring = keyring.activate(ring, 10 + number)
        assert len(ring.keys) == 2


def test_a_key_is_due_after_its_time_from_when_it_signs() -> None:
    ring = keyring.first(A, 1000)
    assert not keyring.due(ring, 3_600_000, 3_600_999)
    assert keyring.due(ring, 3_600_000, 3_601_000)
    assert not keyring.due(ring, 0, 1 << 60)
    assert not keyring.due(keyring.rotate(ring, B, 5), 1, 1 << 60)


def test_a_signature_by_hand() -> None:
    capability = Capability(1, 3, 2**63, 7, 4, 3_600_000, 99)
    made = auth.sign_capability(capability, auth.SigningKey(5, A))
    said = struct.pack("<BBHIQQQQQII", 1, 1, 0, 3, 2**63, 7, 4, 3_600_000, 99, 5, 0)
    assert made[:56] == said
    assert made[56:] == hmac.new(A, b"ffs capability 1\0" + said, hashlib.sha256).digest()
    assert decode_capability(made).key_id == 5


def test_secrets_stand_in_no_text() -> None:
    ring = keyring.first(A, 1)
    shown = f"{ring!r} {keyring.key_set(ring)!r} {auth.verifier_of(b's', A)!r}"
    assert repr(A)[2:20] not in shown
    assert A.hex() not in shown
    broken = msgspec.msgpack.encode([1, 1, 1, [[1, A, "no time"]]])
    with pytest.raises(Damaged) as caught:
        decode_keyring(broken)
    assert repr(A)[2:20] not in str(caught.value)


def test_the_primary_waits_for_live_nodes_but_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store, clock = MemoryStore(), ManagerClock()
        lease = Lease(store, clock)
        await lease._step()
        signer = Signer(store)
        with pytest.raises(Overloaded):
            signer.sign(Capability(0, 1, 1, 1, 1, 1, 1))
        await signer.ensure_first()
        await signer.ensure_first()
        assert signer.ring is not None
        assert [key.id for key in signer.ring.keys] == [1]
        now, behind, told = [0.0], ["slow"], []
        keeper = KeyKeeper(
            store, lease, clock, signer=signer, period_ms=0, behind=lambda revision: behind,
            changed=lambda: told.append(1), now_s=lambda: now[0],
        )  # fmt: skip
        reply = await keeper.handle(look=False)
        assert (reply.rotating, reply.waiting_for) == (True, ("slow",))
        assert told
        await keeper.tick()
        await keeper.tick()
        assert signer.ring.signing.id == 1  # the node doesn't know the new one
        news = keeper.news_for(STORAGE, 1)
        assert news is not None
        assert [key.id for key in news.keys] == [1, 2]
        assert keeper.news_for(STORAGE, news.revision) is None
        assert keeper.news_for(STORAGE, None) is None
        assert keeper.news_for(Peer("storage", "n", 1, 1, 1, False), 1) is None  # it has proved nothing
        now[0] = ANNOUNCE_S
        await keeper.tick()
        assert signer.ring.signing.id == 2
        behind.clear()
        await keeper.handle(look=False)
        await keeper.tick()
        assert signer.ring.signing.id == 3
        # Another process signs with the new one once it has looked.
        other = Signer(store)
        await other.refresh()
        assert decode_capability(other.sign(Capability(0, 1, 1, 1, 1, 1, 1))).key_id == 3
        assert await store.read(lambda snapshot: snapshot.get(KEYRING_KEY)) is not None

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert "slow has not taken it" in caplog.text
