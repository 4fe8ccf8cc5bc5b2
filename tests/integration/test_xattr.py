"""Extended attributes through a client and the command line, on the real processes."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ffs import errors
from ffs.client.client import Client

Run = Callable[..., tuple[int, str, str]]


def test_a_client_has_the_calls_of_os(client: Client, home: str) -> None:
    path = f"{home}/f"
    client.mknod(path)
    client.symlink("f", f"{home}/l")
    client.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    client.setxattr(f"{home}/l", b"user.\xff", bytearray(b"\0" * 65536))
    assert client.listxattr(path) == ["user.a", os.fsdecode(b"user.\xff")]
    assert client.getxattr(path, os.fsdecode(b"user.\xff")) == b"\0" * 65536
    assert client.listxattr(f"{home}/l", follow_symlinks=False) == []
    with pytest.raises(FileExistsError, match=r"user\.a"):
        client.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    with pytest.raises(OSError, match="at most 65536") as caught:
        client.setxattr(path, "user.a", bytes(65537))
    assert caught.value.errno == errno.E2BIG
    with pytest.raises(errors.NoData) as missing:
        client.getxattr(path, "user.b")
    assert missing.value.filename == path
    with pytest.raises(errors.InvalidArgument):
        client.getxattr(path, "user.\0")
    client.removexattr(path, "user.a")
    client.rename(path, f"{home}/g")
    assert client.listxattr(f"{home}/g") == [os.fsdecode(b"user.\xff")]


def test_the_command_line(client: Client, home: str, run: Run, tmp_path: Path) -> None:
    path = f"{home}/f"
    client.mknod(path)
    (tmp_path / "value").write_bytes(b"\0\xff")
    assert run("xattr", "set", path, "user.a", 'say "hi"') == (0, "", "")
    assert run("xattr", "set", path, "user.b", "--from", str(tmp_path / "value"), "--create")[0] == 0
    assert client.getxattr(path, "user.b") == b"\0\xff"
    assert run("xattr", "ls", path) == (0, "user.a\nuser.b\n", "")
    assert run("xattr", "ls", "-l", path)[1] == 'user.a="say \\"hi\\""\nuser.b=0sAP8=\n'
    found = json.loads(run("xattr", "get", path, "user.b", "--json")[1])
    assert base64.b64decode(found["base64"]) == b"\0\xff"
    status, _, said = run("xattr", "set", path, "user.a", "x", "--create")
    assert (status, said.count("\n")) == (1, 1)
    assert "already" in said
    assert "--from FILE" in run("xattr", "set", path, "user.a")[2]
    assert "user.*" in run("xattr", "set", path, "trusted.a", "x")[2]
    assert run("xattr", "rm", path, "user.a")[0] == 0
    assert client.listxattr(path) == ["user.b"]
