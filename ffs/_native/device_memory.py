"""Memory of a device: why a request could do nothing with it, in words. docs/rdma.md, Memory of a device."""

from __future__ import annotations

import os
from typing import Any, Final

from ffs.errors import FfsError, error_of

# ffs.h: a completion's detail is one of these and 256 times the transport.
DEVICE_TRANSPORT: Final = 0x10001
DEVICE_REGISTER: Final = 0x10002
DEVICE_REACH: Final = 0x10003
DEVICE_HOLE: Final = 0x10004

_TRANSPORT_NAMES: Final = {1: "tcp", 2: "local", 3: "rdma"}


def is_device_fault(cqe: Any) -> bool:
    """Whether a completion (a row of CQE_DTYPE) failed by its memory: its value is the target then."""
    return int(cqe["result"]) < 0 and int(cqe["detail"]) >= DEVICE_TRANSPORT


def device_error(cqe: Any, server: str) -> FfsError:
    """The error of such a completion. server: where the target is, for people."""
    detail, code = int(cqe["detail"]), -int(cqe["result"])
    fault, transport = detail & ~0xFF00, _TRANSPORT_NAMES.get(detail >> 8 & 0xFF, "?")
    where = "memory of a device"
    if fault == DEVICE_TRANSPORT:
        text = (
            f"{where} goes over rdma only, and {server} is reached over {transport}: connect with"
            ' transport="rdma" (`ffs doctor` says what this host lacks for it, a server that offers'
            " none logs why), or read and write by an Iov of this host's memory and copy"
        )
    elif fault == DEVICE_REGISTER:
        text = (
            f"{where} can't be registered for rdma to {server} ({os.strerror(code)}): it takes a kernel,"
            " rdma-core and an adapter that know dmabufs, and a device beside it on the same PCIe"
            " complex; without them use an Iov of this host's memory and copy"
        )
    elif fault == DEVICE_REACH:
        text = (
            f"{server} couldn't reach {where} that was registered: it was freed or moved while its Iov"
            " was open; close the Iov and make one of the memory that is there"
        )
    else:
        text = (
            f"a read into {where} met a hole of the file (from {server}): nobody can put its zeros there."
            " Read what is there (seek with SEEK_DATA and SEEK_HOLE), and zero the rest on the device"
        )
    return error_of(code, text)
