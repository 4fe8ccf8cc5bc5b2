"""Signing keys of capabilities, users and their tokens: messages, records, and the arithmetic of both sides.

Form and rules of change as in ffs.proto.common; tags 80-89. What is secret stands in fields that no repr
shows. No I/O. docs/control_plane.md, Signing keys and Users; docs/guides/security.md.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from msgspec import Struct

from ffs.errors import InvalidArgument
from ffs.proto.common import CAPABILITY_BYTES, Capability, Creds, Message, encode_capability

KEY_BYTES: Final = 32
TOKEN_ID_BYTES: Final = 8
SALT_BYTES: Final = 16
_TOKEN_PREFIX: Final = "ffs1"
_MAC_BYTES: Final = 32
_CAPABILITY_LABEL: Final = b"ffs capability 1\0"  # native/net/mac.cc
_PEER_LABEL: Final = b"ffs data peers 1"


class SigningKey(Struct, array_like=True, frozen=True, gc=False):
    """A key that signs capabilities, as storage nodes learn it."""

    id: int  # from 1, never given again
    secret: bytes  # 32 bytes

    def __repr__(self) -> str:
        return f"SigningKey(id={self.id})"


class KeySet(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """The keys that are valid: they replace those before. Goes over authenticated connections only."""

    revision: int  # grows at every change
    sign: int  # the id of the one to sign with
    keys: tuple[SigningKey, ...]

    def signing_key(self) -> SigningKey | None:
        return next((key for key in self.keys if key.id == self.sign), None)


def sign_capability(capability: Capability, key: SigningKey) -> bytes:
    """The bytes that a client shows to a storage server, signed. docs/wire_format.md, open_capability."""
    c = capability
    unsigned = encode_capability(
        Capability(c.kind, c.rights, c.client, c.space, c.epoch, c.expiry_ms, c.id, key.id)
    )
    said = unsigned[: CAPABILITY_BYTES - _MAC_BYTES]
    return said + hmac.digest(key.secret, _CAPABILITY_LABEL + said, "sha256")


def peer_key(secret: bytes) -> bytes:
    """What storage servers prove to each other, of the cluster secret."""
    return hmac.digest(secret, _PEER_LABEL, "sha256")


# --- keys: ffs cluster rotate-keys ------------------------------------------------------------


class RotateKeys(Message, tag=80, kw_only=True):
    """Make a new key the one that signs, or - `look` - only say how the keys are. Answered by KeysReply, at
    the primary."""

    look: bool = False


class KeyView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """A key without its secret. Times in manager time, ms; 0: not yet."""

    id: int
    made_ms: int
    signing_ms: int
    retired_ms: int


class KeysReply(Message, tag=81, kw_only=True):
    signed: bool  # False: the cluster has no secret, and capabilities aren't signed
    revision: int = 0
    keys: tuple[KeyView, ...] = ()
    rotating: bool = False  # a key is announced and doesn't sign yet
    waiting_for: tuple[str, ...] = ()  # live nodes that don't know it yet


# --- users ---------------------------------------------------------------------------------------


class TokenView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    id: bytes  # 8 bytes
    made_ns: int
    label: str = ""


class UserView(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    name: str
    creds: Creds
    tokens: tuple[TokenView, ...] = ()


class SetUser(Message, tag=82, kw_only=True):
    """Makes a user, or - `exists` - changes one. Answered by UsersReply with that one."""

    name: str
    creds: Creds
    exists: bool = False


class UsersReply(Message, tag=83, kw_only=True):
    users: tuple[UserView, ...]


class ListUsers(Message, tag=84, kw_only=True):
    """Answered by UsersReply."""


class RemoveUser(Message, tag=85, kw_only=True):
    """With all tokens; sessions under them end. Answered by OkReply."""

    name: str


class Verifier(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """What a server keeps of a token: enough to check a proof of it, not enough to make one."""

    salt: bytes
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return "Verifier()"


class AddToken(Message, tag=86, kw_only=True):
    """The asker has drawn the token; the service learns what proves it, and not the token itself. Answered by
    UsersReply with that user. The same again is no error."""

    name: str
    id: bytes
    verifier: Verifier
    label: str = ""


class RevokeToken(Message, tag=87, kw_only=True):
    """One token of a user, or - id b"" - all; sessions under it end. Answered by UsersReply with the user."""

    name: str
    id: bytes = b""


class Token(Struct, frozen=True, gc=False):
    """What a user has: shown once, when it is made."""

    id: bytes  # 8 bytes
    secret: bytes  # 32 bytes

    def __repr__(self) -> str:
        return f"Token(id={self.id.hex()})"

    def text(self) -> str:
        return f"{_TOKEN_PREFIX}-{self.id.hex()}-{self.secret.hex()}"


def parse_token(text: str) -> Token:
    """Inverse of Token.text. Raises InvalidArgument, which doesn't repeat it."""
    parts = text.strip().split("-")
    try:
        token = Token(bytes.fromhex(parts[1]), bytes.fromhex(parts[2]))
        good = len(parts) == 3 and parts[0] == _TOKEN_PREFIX
    except (IndexError, ValueError):
        good = False
    if not good or (len(token.id), len(token.secret)) != (TOKEN_ID_BYTES, KEY_BYTES):
        raise InvalidArgument("that is no token of ffs: it looks like ffs1-<16 digits>-<64 digits>")
    return token


# A token is drawn at random (256 bits): no slow hash is needed, as for a password. The proof is SCRAM's
# (RFC 5802): who reads the store can't act as a user with what stands there.


def client_key(salt: bytes, secret: bytes) -> bytes:
    """What only the token's holder knows."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), b"ffs token 1 client", "sha256")


def server_key(salt: bytes, secret: bytes) -> bytes:
    return hmac.digest(hmac.digest(salt, secret, "sha256"), b"ffs token 1 server", "sha256")


def verifier_of(salt: bytes, secret: bytes) -> Verifier:
    return Verifier(
        salt=salt,
        stored_key=hashlib.sha256(client_key(salt, secret)).digest(),
        server_key=server_key(salt, secret),
    )
