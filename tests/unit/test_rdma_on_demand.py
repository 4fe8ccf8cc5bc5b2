"""libibverbs is loaded when RDMA is first wanted: others needn't have it. docs/rdma.md, Which transport."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import contextlib
from ffs._native.iov import Iov
from ffs._native.ring import NativeClient, Ring
from ffs.errors import FfsError

def loaded():
    with open("/proc/self/maps") as maps:
        return "libibverbs" in maps.read()

for options in ({"transport": "tcp"}, {"transport": "local"}, {"transport": "auto"}, {"rdma": "off"}):
    Ring(NativeClient(1, bytes(16), **options), 4).close()
Iov(4096).close()
print(loaded())
with contextlib.suppress(FfsError):
    NativeClient(1, bytes(16), transport="rdma")
print(loaded())
"""


def test_libibverbs_is_loaded_by_who_wants_rdma_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == "False"
    wanted = subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libibverbs.so.1')"],
        capture_output=True,
        check=False,
    )
    assert after == str(wanted.returncode == 0)
