"""Mooncake's store beside ffs: a master, an owner of the memory and a client without a segment, each a
process of the peers' environment (`make bench-peers`)."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ffs.cli.benchmark.peers.process import PeerProcess
from ffs.errors import FfsError, NotFound

SEGMENT_BYTES = 3 << 30  # as much as the device of ffs has
_HERE = Path(__file__).parent


def check(python: Path) -> None:
    """NotFound: there is no such environment."""
    if not (python.exists() and (python.parent / "mooncake_master").exists()):
        raise NotFound(f"no Mooncake beside {python}: `make bench-peers` installs it and runs this")


@contextmanager
def mooncake(python: Path, home: Path) -> Iterator[PeerProcess]:
    """Its client, ready. All of it ends with the context. FfsError: something of it didn't start."""
    check(python)
    path = {"PATH": f"{python.parent}:/usr/bin:/bin"}
    with ExitStack() as stack:
        rpc, metrics = _free_ports()
        master = f"127.0.0.1:{rpc}"
        command = [
            str(python.parent / "mooncake_master"),
            "-rpc_address=127.0.0.1",
            f"-rpc_port={rpc}",
            f"-metrics_port={metrics}",
        ]
        stack.enter_context(
            PeerProcess(command, home / "mooncake_master.log", environment=path, answers=False)
        )
        _await(rpc)
        owner = [str(python), "-P", str(_HERE / "mooncake_owner.py"), master, str(SEGMENT_BYTES)]
        stack.enter_context(
            PeerProcess(owner, home / "mooncake_owner.log", environment=path, answers=False, ready="ready")
        )
        client = [str(python), "-P", str(_HERE / "mooncake_client.py"), master]
        yield stack.enter_context(PeerProcess(client, home / "mooncake_client.log", environment=path))


def _free_ports() -> tuple[int, int]:
    """Two that nobody has now. Somebody may take one before Mooncake does: then it says so and ends."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def _await(port: int, timeout_s: float = 20.0) -> None:
    """Until somebody listens there. Blocking. FfsError: nobody does in time."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise FfsError(f"Mooncake's master didn't listen on port {port} within {timeout_s:g} s")
