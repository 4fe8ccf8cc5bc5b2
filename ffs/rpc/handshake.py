"""The first messages of a control connection, without I/O. docs/control_plane.md, Hello.

    asker                                   server
    Hello(versions, cluster, role, nonce) ->
                                         <- HelloReply(version, cluster [, nonce, proof])
    [AuthProof(proof)                     ->
                                         <- OkReply]

The bracketed part happens where the server has a cluster secret. Both prove it by HMAC-SHA256
over both nonces, the whole Hello, the cluster and the version chosen: no replay, no mixing of
connections, no downgrade; the secret itself never travels. A user's token is proved in the same
two messages, as in SCRAM (RFC 5802): Hello names the token, HelloReply brings its salt, and neither what
travels nor what the server keeps is enough to act as the user. An asker that has a secret refuses
a server that proves none, and the other way round. Without a secret a server may listen on
loopback only (ffs.rpc.server). Pure but for os.urandom.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ffs.errors import ProtocolError, Unauthenticated, VersionMismatch, WrongCluster
from ffs.proto.auth import SALT_BYTES, Token, Verifier, client_key, server_key, verifier_of
from ffs.proto.common import PROTOCOL_MAX, PROTOCOL_MIN, AuthProof, Hello, HelloReply, Message, OkReply
from ffs.rpc.codec import encode_message

NONCE_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16
Credential = bytes | Token  # the cluster secret, or a user's token
_WANTS: Final = (
    "the cluster wants its secret or a token: name the file in FFS_CLUSTER_SECRET_FILE or FFS_TOKEN_FILE"
    " (servers: --cluster-secret-file)"
)
_WITHOUT: Final = "ask without one (FFS_CLUSTER_SECRET_FILE, FFS_TOKEN_FILE), or start it with a secret"
ROLES: Final = frozenset({"client", "meta", "storage", "admin"})


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as its Hello says (proved where the cluster has a secret)."""

    role: str
    name: str
    node: int
    incarnation: int
    protocol: int
    authenticated: bool
    user: str = ""  # whose token was proved; "": an administrator
    token: bytes = b""  # its id


@dataclass(frozen=True, slots=True)
class Grant:
    """What a server knows of a token."""

    user: str
    verifier: Verifier


def _proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes, cluster: bytes, protocol: int) -> bytes:
    said = hashlib.sha256(hello).digest() + nonce + cluster + protocol.to_bytes(4, "little")
    return hmac.digest(secret, b"ffs control 1 " + side + b"\0" + said, "sha256")


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


class AskerHandshake:
    """The side that connected. Send `hello`; give each reply to `receive` until `done`."""

    def __init__(
        self,
        *,
        role: str,
        cluster: bytes = b"",
        secret: Credential | None = None,
        name: str = "",
        node: int = 0,
        incarnation: int = 0,
    ) -> None:
        self._cluster = cluster
        self._secret = secret
        self.done = False
        self.reply: HelloReply | None = None
        self.hello = encode_message(
            Hello(
                protocol_min=PROTOCOL_MIN,
                protocol_max=PROTOCOL_MAX,
                cluster=cluster,
                role=role,
                name=name,
                node=node,
                incarnation=incarnation,
                nonce=os.urandom(NONCE_BYTES) if secret is not None else b"",
                token=secret.id if isinstance(secret, Token) else b"",
            )
        )

    def receive(self, message: Message) -> bytes | None:
        """Takes a reply. Returns the body to send next, or None; sets `done`."""
        if self.reply is not None:
            if type(message) is not OkReply:
                raise ProtocolError(f"a proof is answered by {type(message).__name__}")
            self.done = True
            return None
        if type(message) is not HelloReply:
            raise ProtocolError(f"hello is answered by {type(message).__name__}")
        self._check(message)
        self.reply = message
        if self._secret is None:
            self.done = True
            return None
        said = (self.hello, message.nonce, message.cluster, message.protocol)
        if isinstance(self._secret, Token):
            key = client_key(message.salt, self._secret.secret)
            stored = verifier_of(message.salt, self._secret.secret).stored_key
            return encode_message(AuthProof(proof=_xor(key, _proof(stored, b"token asker", *said))))
        return encode_message(AuthProof(proof=_proof(self._secret, b"asker", *said)))

    def _check(self, reply: HelloReply) -> None:
        if not PROTOCOL_MIN <= reply.protocol <= PROTOCOL_MAX:
            raise VersionMismatch(
                f"the server chose protocol {reply.protocol}, "
                f"this side speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}"
            )
        if self._cluster and reply.cluster != self._cluster:
            raise WrongCluster(
                f"the server belongs to cluster {reply.cluster.hex()}, this side to {self._cluster.hex()}: "
                "check the address"
            )
        if self._secret is None:
            if reply.nonce:
                raise Unauthenticated(_WANTS)
            return
        if not reply.nonce:
            raise Unauthenticated(f"the server doesn't prove the cluster secret: it has none: {_WITHOUT}")
        said = (self.hello, reply.nonce, reply.cluster, reply.protocol)
        if isinstance(self._secret, Token):
            if len(reply.salt) != SALT_BYTES:
                raise Unauthenticated("the server doesn't know tokens")
            key = server_key(reply.salt, self._secret.secret)
            if not hmac.compare_digest(_proof(key, b"token server", *said), reply.proof):
                raise Unauthenticated("the server doesn't know this token: is it the right cluster?")
            return
        expected = _proof(self._secret, b"server", *said)
        if not hmac.compare_digest(expected, reply.proof):
            raise Unauthenticated("the server has another cluster secret: is it the right cluster?")


class ServerHandshake:
    """The side that was connected to. Give each body to `receive`, send its answer, until `peer` is set."""

    def __init__(
        self,
        *,
        cluster: bytes,
        secret: bytes | None,
        name: str,
        users: Callable[[bytes], Grant | None] | None = None,
    ) -> None:
        """`users` finds a token by its id; None: this server takes none."""
        self._users = users
        self._verifier: Verifier | None = None
        self._cluster = cluster
        self._secret = secret
        self._name = name
        self._expected = b""
        self._asker: Peer | None = None
        self.peer: Peer | None = None

    def receive(self, body: bytes, message: Message) -> Message:
        """Takes one message and its body as it came. Returns the reply; raises what refuses the asker."""
        if self._asker is not None:
            if type(message) is not AuthProof:
                raise Unauthenticated("prove the cluster secret before anything else")
            if self._verifier is not None:
                self._check_token(self._verifier, message.proof)
            elif not hmac.compare_digest(self._expected, message.proof):
                raise Unauthenticated("another cluster secret: check the cluster secret file")
            self.peer = self._asker
            return OkReply()
        if type(message) is not Hello:
            raise ProtocolError(f"a connection begins with hello, not {type(message).__name__}")
        return self._greet(body, message)

    def _check_token(self, verifier: Verifier, proof: bytes) -> None:
        """`_expected` is what the proof was mixed with; what is left must be the token's client key."""
        if len(proof) == len(self._expected):
            key = _xor(proof, self._expected)
            if hmac.compare_digest(hashlib.sha256(key).digest(), verifier.stored_key):
                return
        raise Unauthenticated("that isn't the token that it says")

    def _greet_user(self, body: bytes, hello: Hello, peer: Peer, reply: HelloReply) -> HelloReply:
        grant = self._users(hello.token) if self._users is not None else None
        if grant is None:
            raise Unauthenticated("unknown or revoked token: ask an administrator (ffs user token)")
        if hello.role != "client" or len(hello.nonce) != NONCE_BYTES:
            raise Unauthenticated(f"a user's token isn't for role {hello.role}")
        reply.nonce = os.urandom(NONCE_BYTES)
        reply.salt = grant.verifier.salt
        said = (body, reply.nonce, self._cluster, reply.protocol)
        reply.proof = _proof(grant.verifier.server_key, b"token server", *said)
        self._expected = _proof(grant.verifier.stored_key, b"token asker", *said)
        self._verifier = grant.verifier
        self._asker = replace(peer, authenticated=True, user=grant.user, token=hello.token)
        return reply

    def _greet(self, body: bytes, hello: Hello) -> HelloReply:
        protocol = min(PROTOCOL_MAX, hello.protocol_max)
        if protocol < max(PROTOCOL_MIN, hello.protocol_min):
            raise VersionMismatch(
                f"this server speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, "
                f"{hello.name or 'the asker'} {hello.protocol_min} to {hello.protocol_max}: "
                "update the older side"
            )
        if hello.cluster and self._cluster and hello.cluster != self._cluster:
            raise WrongCluster(
                f"this server belongs to cluster {self._cluster.hex()}, "
                f"{hello.name or 'the asker'} to {hello.cluster.hex()}: check the address"
            )
        if hello.role not in ROLES:
            raise ProtocolError(f"unknown role {hello.role!r} in hello")
        peer = Peer(hello.role, hello.name, hello.node, hello.incarnation, protocol, self._secret is not None)
        reply = HelloReply(protocol=protocol, cluster=self._cluster, name=self._name)
        if hello.token:
            return self._greet_user(body, hello, peer, reply)
        if self._secret is None:
            if hello.nonce:
                raise Unauthenticated(
                    f"this server runs without a cluster secret, and the asker wants one proved: {_WITHOUT}"
                )
            self.peer = peer
            return reply
        if len(hello.nonce) != NONCE_BYTES:
            raise Unauthenticated(_WANTS)
        reply.nonce = os.urandom(NONCE_BYTES)
        said = (body, reply.nonce, self._cluster, protocol)
        reply.proof = _proof(self._secret, b"server", *said)
        self._expected = _proof(self._secret, b"asker", *said)
        self._asker = peer
        return reply
