"""The error classes of ffs: every one is an OSError with an errno of its own.

One table ties errno and class (`class_of_errno`), so an error survives a wire, a pickle and a C
return code. Where Python has a class of its own for an errno, ours derives from both:
`except FileNotFoundError` and `except ffs.NotFound` catch the same thing. A class exists only
where a caller can act on it. Pure; no I/O, no threads. docs/metadata.md, Errors.
"""

from __future__ import annotations

import errno as _errno
import io
import os
from typing import Any, ClassVar

Name = str | bytes | None


class FfsError(OSError):
    """Root of the tree. `code` is the class's errno; str() reads as of any OSError."""

    code: ClassVar[int] = _errno.EIO

    def __init__(
        self,
        message: str | None = None,
        filename: Name = None,
        filename2: Name = None,
        *,
        errno: int | None = None,
    ) -> None:
        number = self.code if errno is None else errno
        super().__init__(number, message or os.strerror(number), filename, None, filename2)

    @property
    def message(self) -> str:
        """What went wrong and the way out, without errno and names."""
        return str(self.strerror)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.errno, self.strerror, self.filename, self.filename2)


def _rebuild(cls: type[FfsError], number: int, message: str, filename: Name, filename2: Name) -> FfsError:
    return cls(message, filename, filename2, errno=number)


# --- names and permissions ------------------------------------------------------------------


class NotFound(FfsError, FileNotFoundError):
    code = _errno.ENOENT


class Exists(FfsError, FileExistsError):
    code = _errno.EEXIST


class NotADirectory(FfsError, NotADirectoryError):
    code = _errno.ENOTDIR


class IsADirectory(FfsError, IsADirectoryError):
    code = _errno.EISDIR


class NotEmpty(FfsError):
    code = _errno.ENOTEMPTY


class AccessDenied(FfsError, PermissionError):
    """Mode bits refuse it, or a storage server the capability."""

    code = _errno.EACCES


class NotPermitted(FfsError, PermissionError):
    """Only the owner, or root, may do it."""

    code = _errno.EPERM


class InvalidArgument(FfsError, ValueError):
    code = _errno.EINVAL


class NameTooLong(FfsError):
    code = _errno.ENAMETOOLONG


class SymlinkLoop(FfsError):
    code = _errno.ELOOP


class CrossDevice(FfsError):
    """A rename across a border that it may not cross (a quota directory)."""

    code = _errno.EXDEV


class TooManyLinks(FfsError):
    code = _errno.EMLINK


class Busy(FfsError):
    """In use: a device by another process, the root directory, a lock."""

    code = _errno.EBUSY


class BadHandle(FfsError):
    """Closed already, or opened for something else."""

    code = _errno.EBADF


class Unsupported(FfsError, io.UnsupportedOperation):
    code = _errno.EOPNOTSUPP


# --- space ----------------------------------------------------------------------------------


class NoSpace(FfsError):
    code = _errno.ENOSPC


class QuotaExceeded(FfsError):
    code = _errno.EDQUOT


class TooLarge(FfsError):
    code = _errno.EFBIG


# --- the cluster ----------------------------------------------------------------------------


class Unreachable(FfsError, ConnectionError):
    """No server answers at the address."""

    code = _errno.EHOSTUNREACH


class ConnectionLost(FfsError, ConnectionResetError):
    """The connection went while a request was on its way; the caller may send it again."""

    code = _errno.ECONNRESET


class DeadlineExceeded(FfsError, TimeoutError):
    """Not done by the deadline, and known to have had no effect (else OutcomeUnknown)."""

    code = _errno.ETIMEDOUT


class OutcomeUnknown(FfsError):
    """It may have happened or not. The same request (client, slot, sequence) sent again tells."""

    code = _errno.ECOMM


class ChainUnavailable(FfsError):
    """A chain has no replica that serves now; works again when one is back."""

    code = _errno.EHOSTDOWN


class StaleRouting(FfsError):
    """The sender's routing is older than the server's: refresh, send again."""

    code = _errno.EREMCHG


class StaleEpoch(FfsError):
    """The file was truncated, or its space removed, since it was opened: look at it again."""

    code = _errno.ESTALE


class Fenced(FfsError):
    """The client session is over: nothing may be sent under it any more. Connect anew."""

    code = _errno.EKEYREVOKED


class CapabilityExpired(FfsError, PermissionError):
    """Renew the capability at the metadata service, send again."""

    code = _errno.EKEYEXPIRED


class Unauthenticated(FfsError, PermissionError):
    code = _errno.EKEYREJECTED


class NotPrimary(FfsError):
    """This metadata process isn't the manager now; ask the others."""

    code = _errno.EREMOTE


class WrongCluster(FfsError):
    """The server or device belongs to another cluster."""

    code = _errno.ENONET


class ProtocolError(FfsError):
    """Bytes that the protocol doesn't allow."""

    code = _errno.EPROTO


class VersionMismatch(FfsError):
    """No protocol version in common, or a record of a newer version: update the older side."""

    code = _errno.EPROTONOSUPPORT


class Overloaded(FfsError, BlockingIOError):
    """A bound on requests or bytes in flight is reached: wait, send again."""

    code = _errno.EAGAIN


class Cancelled(FfsError):
    code = _errno.ECANCELED


class ShutDown(FfsError, BrokenPipeError):
    """This client or server is closing."""

    code = _errno.ESHUTDOWN


# --- data -----------------------------------------------------------------------------------


class ChecksumMismatch(FfsError):
    """Data differs from the checksum that its writer computed, on the way or at rest."""

    code = _errno.EBADMSG


class TagMismatch(FfsError):
    """The KV block under this key has another tag: other content, same half of the hash."""

    code = _errno.ENOTUNIQ


class Damaged(FfsError):
    """A device or record can't be what was written."""

    code = _errno.EUCLEAN


class NoData(FfsError):
    """An attribute or block that isn't there, where ENOENT would mean the file."""

    code = _errno.ENODATA


class RingFull(FfsError):
    """The submission ring holds all it can: submit or wait, then prepare again."""

    code = _errno.ENOBUFS


class DeviceFailed(FfsError):
    """The device refuses everything since a write or flush of its journal failed."""

    code = _errno.ENOTRECOVERABLE


def _all_classes(root: type[FfsError]) -> list[type[FfsError]]:
    found = [root]
    for sub in root.__subclasses__():
        found += _all_classes(sub)
    return found


# The table: errno -> class. EIO is FfsError itself.
CLASS_OF_ERRNO: dict[int, type[FfsError]] = {}
for _class in _all_classes(FfsError):
    if _class.code in CLASS_OF_ERRNO:
        raise AssertionError(f"{_class.__name__} and {CLASS_OF_ERRNO[_class.code].__name__} share an errno")
    CLASS_OF_ERRNO[_class.code] = _class

# wire.h Detail -> class: finer than the errno beside it in a data reply.
CLASS_OF_DETAIL: dict[int, type[FfsError]] = {
    1: StaleRouting,
    2: ChainUnavailable,
    3: StaleRouting,
    4: StaleRouting,
    5: StaleEpoch,
    6: Fenced,
    7: InvalidArgument,
    8: TagMismatch,
    9: ChecksumMismatch,
    10: ChecksumMismatch,
    11: DeviceFailed,
    12: Overloaded,
    13: AccessDenied,
    14: CapabilityExpired,
    15: BadHandle,
    16: WrongCluster,
    17: VersionMismatch,
    18: Overloaded,
    19: ProtocolError,
    20: OutcomeUnknown,
    21: AccessDenied,  # forged
    22: AccessDenied,  # signed with a key that isn't valid
    23: AccessDenied,  # for another space
    24: AccessDenied,  # without that right
    25: AccessDenied,  # unsigned, where that isn't taken
    26: AccessDenied,  # a server that can't prove the cluster's secret
    27: ProtocolError,  # wanted: never told to a caller, unless a server wants what it was given
}


def error_of(
    number: int, message: str | None = None, filename: Name = None, filename2: Name = None
) -> FfsError:
    """The error for an errno (positive or negated). An errno outside the table gives FfsError with it."""
    number = abs(number)
    cls = CLASS_OF_ERRNO.get(number)
    if cls is None:
        return FfsError(message, filename, filename2, errno=number)
    return cls(message, filename, filename2)


def error_of_status(status: int, detail: int, message: str | None = None, filename: Name = None) -> FfsError:
    """The error for (errno, detail) of a data reply; a detail that isn't known leaves the errno."""
    cls = CLASS_OF_DETAIL.get(detail)
    return error_of(status, message, filename) if cls is None else cls(message, filename)


def from_os_error(error: OSError) -> FfsError:
    """Any OSError as one of ours, with the same errno and names."""
    if isinstance(error, FfsError):
        return error
    return error_of(error.errno or _errno.EIO, error.strerror, error.filename, error.filename2)
