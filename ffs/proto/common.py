"""What messages and records share: layout, credentials, capability, hello, errors.

Form: msgpack by msgspec, every Struct an array (`array_like`): the fields in the order of this
source. A message is preceded by its tag (an int, unique over all messages of ffs: 0-9 here,
10-99 ffs.proto.meta (80-87: ffs.proto.auth; 48-49, 88-91 and 96: ffs.proto.quota), 100-199
ffs.proto.cluster); the field after the tag is its version `v`.
A record begins with `v`. Fields are only ever appended, each with a default: a reader skips
trailing fields that it doesn't know and fills in those that an older writer didn't send.
Names and paths are bytes (no encoding is assumed). No I/O. docs/metadata.md, Messages.
"""

from __future__ import annotations

import struct
from typing import Final

from msgspec import Struct

from ffs import errors
from ffs.layout import Layout as Layout

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1


class Creds(Struct, array_like=True, frozen=True, gc=False):
    """Who asks. The RPC layer replaces it where the connection's token says otherwise."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()


class Message(Struct, array_like=True, kw_only=True, gc=False):
    """Base of all messages; subclasses give a tag."""

    v: int = 1


_DEFAULT_CREDS: Final = Creds()


class Request(Message, kw_only=True):
    """Head of every request of the namespace (ffs.proto.meta)."""

    client: int = 0
    slot: int = 0
    sequence: int = 0
    creds: Creds = _DEFAULT_CREDS


# --- connection -----------------------------------------------------------------------------


class Hello(Message, tag=1, kw_only=True):
    """First message on a control connection. `cluster` b"" accepts any; else 16 bytes that must agree."""

    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    cluster: bytes = b""
    role: str = "client"  # client | meta | storage
    node: int = 0
    incarnation: int = 0
    token: bytes = b""  # id of a user's token, which the asker can prove; b"": none
    name: str = ""  # for people: host and program
    nonce: bytes = b""  # 32 random bytes: the asker can prove the cluster secret (ffs.rpc.handshake)


class HelloReply(Message, tag=2, kw_only=True):
    protocol: int  # the version chosen
    cluster: bytes
    name: str = ""
    features: int = 0
    manager_time_ms: int = 0
    routing_epoch: int = 0
    nonce: bytes = b""  # 32 random bytes: the server wants an AuthProof before anything else
    proof: bytes = b""  # of the secret, or of the token, by the server
    salt: bytes = b""  # of the token that Hello named


class AuthProof(Message, tag=5, kw_only=True):
    """The asker's proof of the cluster secret, answered by OkReply (ffs.rpc.handshake)."""

    proof: bytes


class ErrorReply(Message, tag=3, kw_only=True):
    """Any request may be answered by this; `to_error` gives the exception to raise."""

    code: int  # a positive errno
    message: str = ""
    filename: bytes | None = None
    filename2: bytes | None = None
    retry_after_ms: int = 0


class OkReply(Message, tag=4, kw_only=True):
    """Done, and there is nothing more to say."""


def error_reply(error: OSError) -> ErrorReply:
    """The message for an error. Names are sent as bytes (os.fsencode's form)."""
    known = errors.from_os_error(error)
    return ErrorReply(
        code=known.errno or known.code,
        message=known.message,
        filename=_name_bytes(known.filename),
        filename2=_name_bytes(known.filename2),
    )


def to_error(reply: ErrorReply) -> errors.FfsError:
    """The exception that a peer sent; names come back as str (os.fsdecode's form)."""
    return errors.error_of(reply.code, reply.message, _name_str(reply.filename), _name_str(reply.filename2))


def _name_bytes(name: object) -> bytes | None:
    if name is None or isinstance(name, bytes):
        return name
    return str(name).encode("utf-8", "surrogateescape")


def _name_str(name: bytes | None) -> str | None:
    return None if name is None else name.decode("utf-8", "surrogateescape")


# --- capability -----------------------------------------------------------------------------

RIGHT_READ: Final = 1
RIGHT_WRITE: Final = 2
RIGHT_REMOVE: Final = 4

CAPABILITY_FILE: Final = 0
CAPABILITY_KV: Final = 1
CAPABILITY_CLUSTER: Final = 2

_CAPABILITY = struct.Struct("<BBHIQQQQQII32s")  # native/include/ffs/wire.h, struct Capability
CAPABILITY_BYTES: Final = 88
if _CAPABILITY.size != CAPABILITY_BYTES:
    raise AssertionError("struct Capability is 88 bytes")


class Capability(Struct, frozen=True, gc=False):
    """What its bearer may do to one space. Signed by the metadata service (key_id 0: unsigned)."""

    kind: int
    rights: int
    client: int  # session
    space: int  # inode id
    epoch: int  # truncate epoch at issue
    expiry_ms: int  # manager time
    id: int  # unique; fences and retry entries name it
    key_id: int = 0
    mac: bytes = bytes(32)


def encode_capability(capability: Capability) -> bytes:
    """The 88 bytes that a client shows to a storage server."""
    c = capability
    return _CAPABILITY.pack(
        1, c.kind, 0, c.rights, c.client, c.space, c.epoch, c.expiry_ms, c.id, c.key_id, 0, c.mac
    )


def decode_capability(data: bytes) -> Capability:
    """Inverse of encode_capability; later versions may be longer. Raises ProtocolError."""
    if len(data) < CAPABILITY_BYTES:
        raise errors.ProtocolError(f"a capability has at least {CAPABILITY_BYTES} bytes, not {len(data)}")
    v, kind, _, rights, client, space, epoch, expiry, ident, key_id, _, mac = _CAPABILITY.unpack_from(data)
    if v < 1:
        raise errors.ProtocolError(f"capability of version {v}")
    return Capability(kind, rights, client, space, epoch, expiry, ident, key_id, mac)
