"""ffs: a distributed store for AI work. docs/client.md.

    client = ffs.connect("host:port")
    with ffs.open("/data/file", "wb", client=client) as file:
        file.write(b"...")

`connect` and `open` take the cluster of the environment variable FFS_CLUSTER by default. Errors
are OSErrors: `ffs.NotFound` is a FileNotFoundError, and so on (ffs.errors).

Servers share this package with the client: names are loaded on first use, so that a server
doesn't load the client, nor the client the native library before it moves data.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffs._native.iov import Iov
    from ffs.client.aio_ior import AsyncIor
    from ffs.client.client import Client, connect
    from ffs.client.file import File
    from ffs.client.ior import Ior
    from ffs.client.opening import open_path as open
    from ffs.errors import (
        AccessDenied,
        ChainUnavailable,
        ChecksumMismatch,
        Exists,
        Fenced,
        FfsError,
        InvalidArgument,
        IsADirectory,
        NameTooLong,
        NoSpace,
        NotADirectory,
        NotEmpty,
        NotFound,
        OutcomeUnknown,
        QuotaExceeded,
        Unreachable,
        WrongCluster,
    )

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AsyncIor",
    "ChainUnavailable",
    "ChecksumMismatch",
    "Client",
    "Exists",
    "Fenced",
    "FfsError",
    "File",
    "InvalidArgument",
    "Ior",
    "Iov",
    "IsADirectory",
    "NameTooLong",
    "NoSpace",
    "NotADirectory",
    "NotEmpty",
    "NotFound",
    "OutcomeUnknown",
    "QuotaExceeded",
    "Unreachable",
    "WrongCluster",
    "connect",
    "open",
]

_HOMES = {
    "AsyncIor": "ffs.client.aio_ior",
    "Client": "ffs.client.client",
    "File": "ffs.client.file",
    "Ior": "ffs.client.ior",
    "Iov": "ffs._native.iov",
    "connect": "ffs.client.client",
    "open": "ffs.client.opening",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ffs' has no attribute {name!r}")
    module = importlib.import_module(_HOMES.get(name, "ffs.errors"))
    value = getattr(module, "open_path" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
