"""The benchmark's floors move what they say, and refuse what can't be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ffs import errors
from ffs._native.floor import Floor
from ffs.cli.benchmark.floors import socket_peer

BLOCK = 65536


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "device"
    path.write_bytes(os.urandom(64 * BLOCK))
    return path


@pytest.mark.parametrize("options", [{}, {"random": True}, {"crc": True}], ids=str)
def test_reading_a_device(device: Path, options: dict[str, Any]) -> None:
    before = device.read_bytes()
    with Floor("read", device, block_bytes=BLOCK, depth=4, region_bytes=64 * BLOCK, **options) as floor:
        for _ in range(2):
            blocks, elapsed_ns = floor.run(20)
            assert blocks >= 4
            assert elapsed_ns >= 20_000_000
    assert device.read_bytes() == before


def test_writing_stays_inside_its_region(device: Path) -> None:
    before = device.read_bytes()
    with Floor(
        "write",
        device,
        block_bytes=BLOCK,
        depth=4,
        region_bytes=8 * BLOCK,
        region_offset=16 * BLOCK,
        fsync_every=4,
    ) as floor:
        blocks, _ = floor.run(30)
        assert blocks >= 8  # so that it went round
    after = device.read_bytes()
    assert after[: 16 * BLOCK] == before[: 16 * BLOCK]
    assert after[24 * BLOCK :] == before[24 * BLOCK :]
    for i in range(16, 24):
        assert after[i * BLOCK : (i + 1) * BLOCK] != before[i * BLOCK : (i + 1) * BLOCK]


def test_copying() -> None:
    with Floor("copy", block_bytes=4096, region_bytes=1 << 20, crc=True) as floor:
        blocks, elapsed_ns = floor.run(5)
        assert blocks > 0
        assert elapsed_ns >= 5_000_000


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_messages_without_payload(tmp_path: Path, family: str, crc: bool) -> None:
    with socket_peer(tmp_path / "socket" if family == "unix" else None) as address:
        for depth in (1, 300):
            with Floor("message", address, block_bytes=4096, depth=depth, crc=crc) as floor:
                for _ in range(2):
                    blocks, elapsed_ns = floor.run(20)
                    assert blocks >= depth
                    assert elapsed_ns >= 20_000_000


@pytest.mark.parametrize("crc", [False, True])
def test_a_socket_with_a_server_process(crc: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = (
            "import socket, sys\n"
            "from ffs._native.floor import floor_serve\n"
            "floor_serve(socket.socket(fileno=int(sys.argv[1])))\n"
        )
        os.set_inheritable(listener.fileno(), True)
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno())], pass_fds=[listener.fileno()]
        )
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            with Floor("socket", address, block_bytes=100_000, depth=8, crc=crc) as floor:
                for _ in range(2):
                    assert floor.run(20)[0] >= 8
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"op": "swim"}, "swim"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"depth": 0}, "depth"),
        ({"depth": 5000}, "depth"),
        ({"block_bytes": 1000}, "512"),
        ({"region_bytes": BLOCK - 1}, "region_bytes"),
        ({"region_bytes": 65 * BLOCK}, "end of its device"),
        ({"op": "socket", "path": "nowhere"}, "host:port"),
    ],
)
def test_what_cannot_be_is_refused(device: Path, arguments: dict[str, Any], word: str) -> None:
    given = {
        "op": "read",
        "path": device,
        "block_bytes": BLOCK,
        "depth": 4,
        "region_bytes": 4 * BLOCK,
        **arguments,
    }
    with pytest.raises(errors.InvalidArgument, match=word):
        Floor(given.pop("op"), given.pop("path"), **given)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(errors.NotFound, match="nothing-here"):
        Floor("read", "/nothing-here", block_bytes=4096, region_bytes=4096)
