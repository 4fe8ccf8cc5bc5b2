"""The C library: the cffi module and the one place where its return codes become errors.

Calls release the GIL. docs/ring.md, Building.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from ffs.errors import FfsError, error_of

__all__ = ["MISSING", "check", "crc32c", "ffi", "host_id", "last_error", "lib", "set_protocol_versions"]

MISSING: Final = "the native part of ffs isn't built: run `make build` (or install the wheel)"

try:
    _module: Any = importlib.import_module("ffs._native._ffs")
except ModuleNotFoundError as error:
    raise ImportError(f"{MISSING} ({error})") from error

ffi: Any = _module.ffi
lib: Any = _module.lib

if lib.ffs_abi_version() != 1:
    raise ImportError(f"ffs._native._ffs speaks ABI {lib.ffs_abi_version()}, this package 1: rebuild it")


def last_error() -> str:
    """The line that explains the last failure of a C call in this thread."""
    line = ffi.new("char[]", 512)
    lib.ffs_last_error(line, 512)
    return str(ffi.string(line).decode("utf-8", "replace"))


def native_error(code: int) -> FfsError:
    """The error of a negative return code of this thread's last C call."""
    return error_of(code, last_error() or None)


def check(code: int) -> int:
    """`code` if it is >= 0; raises the class of ffs.errors that belongs to -code otherwise."""
    if code < 0:
        raise native_error(code)
    return code


def set_protocol_versions(least: int, most: int) -> None:
    """Data connections of this process speak these protocol versions. Before the first server or client.
    InvalidArgument. docs/wire_format.md, Connection frames."""
    check(lib.ffs_set_protocol_versions(least, most))


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC32C of any contiguous buffer; `seed`: the checksum of what comes before it. Any thread."""
    view = ffi.from_buffer(data)
    return int(lib.ffs_crc32c(seed, view, len(view)))


def host_id() -> str:
    """Boot id and network namespace: processes with equal strings can use the transport `local`."""
    out = ffi.new("char[]", 256)
    check(lib.ffs_host_id(out, 256))
    return str(ffi.string(out).decode())
