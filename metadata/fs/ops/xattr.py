"""Extended attributes: get, set, list, remove, of names `user.*`. docs/metadata.md, Extended attributes.

Limits and errnos are Linux's. The values stand under keys of their own; one record an inode keeps the names,
so that a listing reads no values and a new name is judged against the limits without reading the others.
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from ffs import errors
from ffs.proto import xattrs
from ffs.proto.common import Creds, OkReply
from ffs.proto.records import DIRECTORY, FILE, FLAG_XATTR, Inode, XattrNames
from metadata.fs.core import Core
from metadata.fs.ops.stat import resolve
from metadata.fs.schema import (
    SUB_CTIME,
    Reader,
    decode_xattr_names,
    encode,
    inode_key,
    xattr_key,
    xattr_names_key,
)
from metadata.fs.walk import R, W, may, owns
from metadata.kv.contract import Transaction

PREFIX: Final = b"user."
MAX_ALL_VALUE_BYTES: Final = 4 << 20  # of one inode; Linux leaves this bound to the file system


def _failed(number: int, message: str, path: bytes) -> errors.FfsError:
    return errors.FfsError(message, path or None, errno=number)


def _check_name(name: bytes, path: bytes) -> None:
    """What Linux checks before it looks at the file."""
    if not 1 <= len(name) <= xattrs.MAX_XATTR_NAME_BYTES or b"\0" in name:
        raise _failed(
            errno.ERANGE,
            f"an attribute's name has 1 to {xattrs.MAX_XATTR_NAME_BYTES} bytes without NUL",
            path,
        )


def _judge(inode: Inode, creds: Creds, name: bytes, path: bytes, want: int) -> None:
    """Whether `creds` may read (R) or change (W) this attribute at all, in Linux's order."""
    if name.startswith(PREFIX):
        if inode.type not in (FILE, DIRECTORY):
            if want == W:
                raise errors.NotPermitted("only files and directories have user attributes", path or None)
            raise errors.NoData("only files and directories have user attributes", path or None)
        if want == W and inode.type == DIRECTORY and inode.mode & 0o1000 and not owns(inode, creds):
            raise errors.NotPermitted("the directory is sticky: only its owner may change this", path or None)
    if not may(inode, creds, want):
        word = "write" if want == W else "read"
        raise errors.AccessDenied(f"user {creds.uid} has no {word} permission", path or None)
    if not name.startswith(PREFIX):
        shown = name.decode(errors="replace")
        raise errors.Unsupported(f"attribute {shown!r}: only names user.* are kept", path or None)
    if name == PREFIX:
        raise errors.InvalidArgument("nothing after user. in the attribute's name", path or None)


async def _names(reader: Reader, ino: int, inode: Inode) -> XattrNames:
    if not inode.flags & FLAG_XATTR:
        return XattrNames()
    data = await reader.get(xattr_names_key(ino))
    return XattrNames() if data is None else decode_xattr_names(data)


def _missing(name: bytes, path: bytes) -> errors.NoData:
    return errors.NoData(f"there is no attribute {name.decode(errors='replace')!r}", path or None)


async def get(core: Core, reader: Reader, req: xattrs.GetXattr) -> xattrs.XattrReply:
    _check_name(req.name, req.path)
    ino, inode = await resolve(reader, req.creds, req.path, req.ino, req.follow)
    _judge(inode, req.creds, req.name, req.path, R)
    value = await reader.get(xattr_key(ino, req.name)) if inode.flags & FLAG_XATTR else None
    if value is None:
        raise _missing(req.name, req.path)
    return xattrs.XattrReply(value=value)


async def list_names(core: Core, reader: Reader, req: xattrs.ListXattr) -> xattrs.ListXattrReply:
    """Needs no more than reaching the file, as on Linux."""
    ino, inode = await resolve(reader, req.creds, req.path, req.ino, req.follow)
    return xattrs.ListXattrReply(names=sorted((await _names(reader, ino, inode)).names))


async def set_value(core: Core, txn: Transaction, req: xattrs.SetXattr) -> OkReply:
    path, name, value = req.path, req.name, req.value
    if req.flags & ~(xattrs.XATTR_CREATE | xattrs.XATTR_REPLACE):
        raise errors.InvalidArgument(f"flags {req.flags}: 0, create (1) or replace (2)", path or None)
    _check_name(name, path)
    if len(value) > xattrs.MAX_XATTR_VALUE_BYTES:
        raise _failed(
            errno.E2BIG, f"a value has at most {xattrs.MAX_XATTR_VALUE_BYTES} bytes, not {len(value)}", path
        )
    ino, inode = await resolve(txn, req.creds, path, req.ino, req.follow)
    _judge(inode, req.creds, name, path, W)
    known = await _names(txn, ino, inode)
    there = name in known.names
    if there and req.flags & xattrs.XATTR_CREATE:
        raise errors.Exists(f"there is an attribute {name.decode(errors='replace')!r} already", path or None)
    if not there and req.flags & xattrs.XATTR_REPLACE:
        raise _missing(name, path)
    old = len(await txn.get(xattr_key(ino, name)) or b"") if there else 0
    names = known.names if there else [*known.names, name]
    total = known.value_bytes - old + len(value)
    if sum(len(each) + 1 for each in names) > xattrs.MAX_XATTR_LIST_BYTES:
        raise _failed(
            errno.E2BIG,
            f"the names of a file's attributes have {xattrs.MAX_XATTR_LIST_BYTES} bytes at most",
            path,
        )
    if total > MAX_ALL_VALUE_BYTES:
        raise errors.NoSpace(
            f"the attributes of one file hold {MAX_ALL_VALUE_BYTES} bytes at most: {total} would be",
            path or None,
        )
    if not inode.flags & FLAG_XATTR:
        txn.set(inode_key(ino), encode(msgspec.structs.replace(inode, flags=inode.flags | FLAG_XATTR)))
    txn.set(xattr_key(ino, name), value)
    txn.set(xattr_names_key(ino), encode(XattrNames(names=names, value_bytes=total)))
    txn.max(inode_key(ino) + SUB_CTIME, core.now_ns())
    return OkReply()


async def remove(core: Core, txn: Transaction, req: xattrs.RemoveXattr) -> OkReply:
    path, name = req.path, req.name
    _check_name(name, path)
    ino, inode = await resolve(txn, req.creds, path, req.ino, req.follow)
    _judge(inode, req.creds, name, path, W)
    known = await _names(txn, ino, inode)
    if name not in known.names:
        raise _missing(name, path)
    size = len(await txn.get(xattr_key(ino, name)) or b"")
    left = [each for each in known.names if each != name]
    txn.clear(xattr_key(ino, name))
    if left:
        record = XattrNames(names=left, value_bytes=known.value_bytes - size)
        txn.set(xattr_names_key(ino), encode(record))
    else:
        txn.clear(xattr_names_key(ino))
    txn.max(inode_key(ino) + SUB_CTIME, core.now_ns())
    return OkReply()
