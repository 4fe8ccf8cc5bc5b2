"""Tokens: the handshake with one, joined in memory, and what must break it."""

from __future__ import annotations

import msgspec
import pytest

from ffs.errors import FfsError, InvalidArgument, Unauthenticated
from ffs.proto.auth import Token, Verifier, parse_token, verifier_of
from ffs.proto.common import AuthProof, HelloReply, Message
from ffs.rpc.codec import decode_message, encode_message
from ffs.rpc.handshake import AskerHandshake, Credential, Grant, Peer, ServerHandshake

CLUSTER = bytes(range(16))
SECRET = b"correct horse battery staple"
TOKEN = Token(b"token-id", b"\x07" * 32)
VERIFIER = verifier_of(b"s" * 16, TOKEN.secret)


def known(token: bytes, verifier: Verifier = VERIFIER) -> Grant | None:
    return Grant("alice", verifier) if token == TOKEN.id else None


def shake(credential: Credential | None, *, secret: bytes | None = SECRET, role: str = "client") -> Peer:
    asker = AskerHandshake(role=role, cluster=CLUSTER, secret=credential)
    server = ServerHandshake(cluster=CLUSTER, secret=secret, name="s", users=known)
    body: bytes | None = asker.hello
    while body is not None:
        assert TOKEN.secret not in body
        reply = encode_message(server.receive(body, decode_message(body)))
        assert TOKEN.secret not in reply
        body = asker.receive(decode_message(reply))
    assert asker.done
    assert server.peer is not None
    return server.peer


@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_token_makes_a_user(secret: bytes | None) -> None:
    peer = shake(TOKEN, secret=secret)
    assert (peer.user, peer.token, peer.authenticated, peer.role) == ("alice", TOKEN.id, True, "client")


def test_the_secret_makes_an_administrator() -> None:
    assert (shake(SECRET).user, shake(SECRET).token) == ("", b"")


@pytest.mark.parametrize(
    ("credential", "role"),
    [
        (Token(b"token-id", bytes(32)), "client"),  # another secret
        (Token(b"other-id", TOKEN.secret), "client"),  # unknown, or revoked
        (TOKEN, "storage"),  # no user is a server
        (TOKEN, "admin"),
        (None, "client"),
    ],
)
def test_what_is_refused(credential: Credential | None, role: str) -> None:
    with pytest.raises(Unauthenticated):
        shake(credential, role=role)


def greeted() -> tuple[AskerHandshake, ServerHandshake, HelloReply]:
    asker = AskerHandshake(role="client", cluster=CLUSTER, secret=TOKEN)
    server = ServerHandshake(cluster=CLUSTER, secret=SECRET, name="s", users=known)
    reply = server.receive(asker.hello, decode_message(asker.hello))
    assert isinstance(reply, HelloReply)
    return asker, server, reply


def test_a_proof_is_good_on_its_connection_only() -> None:
    asker, server, reply = greeted()
    proof = asker.receive(reply)
    assert proof is not None
    _, other, _ = greeted()
    with pytest.raises(Unauthenticated):
        other.receive(proof, decode_message(proof))
    server.receive(proof, decode_message(proof))
    assert server.peer is not None


@pytest.mark.parametrize("proof", [b"", bytes(32), bytes(31), bytes(64)])
def test_no_proof_is_no_proof(proof: bytes) -> None:
    _, server, _ = greeted()
    message: Message = AuthProof(proof=proof)
    with pytest.raises(Unauthenticated):
        server.receive(encode_message(message), message)
    assert server.peer is None


@pytest.mark.parametrize("field", ["nonce", "proof", "salt", "cluster"])
def test_a_reply_that_was_changed_gets_no_proof(field: str) -> None:
    asker, _, reply = greeted()
    value = bytearray(getattr(reply, field))
    value[0] ^= 1
    with pytest.raises(FfsError):
        asker.receive(msgspec.structs.replace(reply, **{field: bytes(value)}))


def test_what_a_server_keeps_makes_no_proof() -> None:
    """Who reads the store has stored_key and server_key, and K xor of it is what must be sent."""
    asker, server, reply = greeted()
    for key in (VERIFIER.stored_key, VERIFIER.server_key, VERIFIER.salt + VERIFIER.salt):
        stolen = Token(TOKEN.id, key)
        thief = AskerHandshake(role="client", cluster=CLUSTER, secret=stolen)
        with pytest.raises(Unauthenticated):
            thief.receive(reply)
    assert asker.receive(reply) is not None
    assert server.peer is None


def test_text_of_a_token() -> None:
    assert parse_token(TOKEN.text() + "\n") == TOKEN
    assert TOKEN.secret.hex() not in repr(TOKEN)
    for bad in ("", "ffs1", "ffs2" + TOKEN.text()[4:], TOKEN.text()[:-2], TOKEN.text() + "-00", "a-b-c"):
        with pytest.raises(InvalidArgument) as caught:
            parse_token(bad)
        assert TOKEN.secret.hex()[:40] not in str(caught.value)
