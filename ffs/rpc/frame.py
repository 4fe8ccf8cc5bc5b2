"""Frames of the control plane, without I/O. docs/control_plane.md, Frames.

A frame is a header of 24 bytes and a body, little-endian:

    offset  size  field
    0       4     magic       "FFR1"
    4       1     version     of the framing, 1
    5       1     kind        1 request, 2 reply, 3 cancel (empty body)
    6       2     flags       sent as 0, ignored
    8       8     request id  chosen by the asker, repeated by the reply
    16      4     length      of the body in bytes, at most MAX_BODY_BYTES
    20      4     crc         CRC-32 (as of zlib) of bytes 0..19 and the body

The body is one tagged msgpack message (ffs.rpc.codec). Pure functions and one small state
machine; not thread-safe, never blocks. Errors: ProtocolError, after which the connection is
good for nothing.
"""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

from ffs.errors import ProtocolError

MAGIC: Final = 0x31524646  # "FFR1"
VERSION: Final = 1
HEADER_BYTES: Final = 24
MAX_BODY_BYTES: Final = 16 * 1024 * 1024

REQUEST: Final = 1
REPLY: Final = 2
CANCEL: Final = 3

Frame = tuple[int, int, bytes]  # kind, request id, body

_HEAD: Final = struct.Struct("<IBBHQI")
_CRC: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<IBBHQII")
_pack_head = _HEAD.pack
_pack_crc = _CRC.pack
_unpack_header = _HEADER.unpack_from


def encode_frame(kind: int, request_id: int, body: bytes) -> bytes:
    """One whole frame. Raises ProtocolError for a body over the bound."""
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(
            f"a message of {len(body)} bytes is over the bound of {MAX_BODY_BYTES}: ask for less at a time"
        )
    head = _pack_head(MAGIC, VERSION, kind, 0, request_id, len(body))
    return head + _pack_crc(crc32(body, crc32(head))) + body


class FrameDecoder:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_need", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # received, not yet a whole frame
        self._size = 0
        self._need = HEADER_BYTES  # bytes without which nothing can be cut

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that hasn't wholly arrived (0 at a frame border)."""
        return self._size

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order. Raises ProtocolError on bytes that no peer sends."""
        if self._size:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._need:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
        frames: list[Frame] = []
        at = 0
        end = len(data)
        self._need = HEADER_BYTES
        while end - at >= HEADER_BYTES:
            magic, version, kind, _flags, request_id, length, crc = _unpack_header(data, at)
            if magic != MAGIC or version != VERSION or length > MAX_BODY_BYTES:
                raise _refusal(data, at)
            body_at = at + HEADER_BYTES
            stop = body_at + length
            if stop > end:
                self._need = HEADER_BYTES + length
                break
            body = data[body_at:stop]
            if crc32(body, crc32(data[at : at + 20])) != crc:
                raise ProtocolError("checksum of a control frame doesn't match: the connection is damaged")
            frames.append((kind, request_id, body))
            at = stop
        if at < end:
            rest = data[at:]
            self._parts.append(rest)
            self._size = len(rest)
        return frames


def _refusal(data: bytes, at: int) -> ProtocolError:
    magic, version, _kind, _flags, _request_id, length, _crc = _unpack_header(data, at)
    if magic != MAGIC:
        return ProtocolError(f"not ffs's control protocol: frame begins with {data[at : at + 4]!r}")
    if version != VERSION:
        return ProtocolError(f"control frame of version {version}, this side speaks {VERSION}")
    return ProtocolError(f"control frame says {length} bytes, the bound is {MAX_BODY_BYTES}")
