"""The calls on extended attributes, named as in os. docs/client.md, Extended attributes.

All block; all are thread-safe; all raise OSErrors of ffs.errors with the path in them.
"""

from __future__ import annotations

from ffs import errors
from ffs.client.lookups import Lookups
from ffs.client.paths import PathLike, check_path, decode_text, encode_text, wire_path
from ffs.proto import xattrs
from ffs.proto.common import OkReply


def _wire_name(attribute: str | bytes, path: PathLike) -> bytes:
    name = attribute if isinstance(attribute, bytes) else encode_text(attribute)
    if b"\0" in name:
        raise errors.InvalidArgument("an attribute's name has no NUL", check_path(path))
    return name


class XattrCalls(Lookups):
    """Mixed into Client. Names begin with "user."; files and directories have attributes, links don't."""

    def getxattr(self, path: PathLike, attribute: str | bytes, *, follow_symlinks: bool = True) -> bytes:
        """As os.getxattr. NoData (ENODATA) if there is none of that name."""
        request = xattrs.GetXattr(
            path=wire_path(path), name=_wire_name(attribute, path), follow=follow_symlinks
        )
        return self.core.ask(request, xattrs.XattrReply).value

    def setxattr(
        self,
        path: PathLike,
        attribute: str | bytes,
        value: bytes | bytearray | memoryview,
        flags: int = 0,
        *,
        follow_symlinks: bool = True,
    ) -> None:
        """As os.setxattr; flags: os.XATTR_CREATE or os.XATTR_REPLACE. At most 64 KiB a value."""
        request = xattrs.SetXattr(
            path=wire_path(path),
            name=_wire_name(attribute, path),
            value=bytes(value),
            flags=flags,
            follow=follow_symlinks,
        )
        self.core.change(request, OkReply)

    def listxattr(self, path: PathLike = "/", *, follow_symlinks: bool = True) -> list[str]:
        """As os.listxattr: the names, sorted."""
        request = xattrs.ListXattr(path=wire_path(path), follow=follow_symlinks)
        return [decode_text(name) for name in self.core.ask(request, xattrs.ListXattrReply).names]

    def removexattr(self, path: PathLike, attribute: str | bytes, *, follow_symlinks: bool = True) -> None:
        """As os.removexattr."""
        request = xattrs.RemoveXattr(
            path=wire_path(path), name=_wire_name(attribute, path), follow=follow_symlinks
        )
        self.core.change(request, OkReply)
