"""Extended attributes. docs/metadata.md, Messages.

Requests of the namespace with the rules of ffs.proto.meta for identity, paths and errors; tags 64-69. No I/O.
"""

from __future__ import annotations

from typing import Final

from ffs.proto.common import Message, Request

# Extended attributes: Linux's limits and flags.
MAX_XATTR_NAME_BYTES: Final = 255
MAX_XATTR_VALUE_BYTES: Final = 65536
MAX_XATTR_LIST_BYTES: Final = 65536  # the names of one inode, each with a NUL
XATTR_CREATE: Final = 1
XATTR_REPLACE: Final = 2


class GetXattr(Request, tag=64, kw_only=True):
    path: bytes = b""
    ino: int = 0
    follow: bool = True
    name: bytes = b""
    ticket: bytes = b""


class XattrReply(Message, tag=65, kw_only=True):
    value: bytes


class SetXattr(Request, tag=66, kw_only=True):
    """Answer: OkReply."""

    path: bytes = b""
    ino: int = 0
    follow: bool = True
    name: bytes = b""
    value: bytes = b""
    flags: int = 0  # XATTR_*
    ticket: bytes = b""


class RemoveXattr(Request, tag=67, kw_only=True):
    """Answer: OkReply."""

    path: bytes = b""
    ino: int = 0
    follow: bool = True
    name: bytes = b""
    ticket: bytes = b""


class ListXattr(Request, tag=68, kw_only=True):
    path: bytes = b""
    ino: int = 0
    follow: bool = True
    ticket: bytes = b""


class ListXattrReply(Message, tag=69, kw_only=True):
    """In byte order."""

    names: list[bytes]
