"""The transports of the data plane, for tests of what must hold over each: one parameter of pytest.

`rdma` needs a device. Hosts without one skip it; tests/guest runs the same tests over software RDMA, with
FFS_TEST_TRANSPORTS=rdma: those transports alone (as of the native tests).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


NO_RDMA = pytest.mark.skipif(
    not has_rdma(),
    reason="this host has no RDMA device (/sys/class/infiniband is empty); make test-rdma has one",
)
TRANSPORTS = [
    pytest.param(name, marks=NO_RDMA if name == "rdma" else ())
    for name in os.environ.get("FFS_TEST_TRANSPORTS", "tcp,local,rdma").split(",")
]
