"""`ffs fsck` on the real processes: a cluster in use is clean; chunks that nobody owns are found, and go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from ffs._native.iov import Iov
from ffs._native.ring import OP_WRITE, Ring
from ffs.client.client import Client
from ffs.layout import Placement, file_chunk_key
from ffs.proto.common import CAPABILITY_FILE, RIGHT_READ, RIGHT_WRITE, Capability, encode_capability

Run = Callable[..., tuple[int, str, str]]

LIMIT_S = 60.0  # only for a broken program


def _fill(client: Client, home: str) -> int:
    client.makedirs(f"{home}/a/b")
    for number in range(40):
        with client.open(f"{home}/a/f{number}", "wb") as file:
            file.write(b"x" * (number * 10_000))
    client.link(f"{home}/a/f1", f"{home}/a/b/g")
    client.setxattr(f"{home}/a/f2", "user.n", b"v")
    with client.open(f"{home}/a/f30", "r+b") as file:
        file.truncate(100)
    client.unlink(f"{home}/a/f31")
    return client.stat(f"{home}/a/f3").st_ino


@contextmanager
def _space(client: Client, space: int) -> Iterator[Callable[[int, int, int], None]]:
    """Writes chunks of a space as nobody may who isn't allowed to: (chain, index, bytes)."""
    claim = Capability(CAPABILITY_FILE, RIGHT_READ | RIGHT_WRITE, client.session_id, space, 0, 1 << 60, 77)
    number = client.native.add_capability(encode_capability(claim))
    with Iov(1 << 20) as iov, Ring(client.native, 8) as ring:

        def write(chain: int, index: int, length: int) -> None:
            key = space.to_bytes(8, "big") + file_chunk_key(index)
            ring.prepare_one(OP_WRITE, chain, number, key, 0, length, iov[0:length], 1, timeout_ms=30_000)
            completions, _ = ring.wait(1, LIMIT_S)
            assert int(completions[0]["result"]) == length, completions

        yield write


def test_a_cluster_in_use_is_clean(client: Client, home: str, run: Run) -> None:
    _fill(client, home)
    with client.open(f"{home}/open", "wb", buffering=0) as file:
        file.write(b"x" * 3_000_000)  # its length isn't known yet
        status, out, err = run("fsck")
        assert (status, err) == (0, ""), out
        assert out.startswith("clean ("), out
        assert " chunks" in out
    status, out, _ = run("fsck", "--json")
    report = json.loads(out)
    assert (status, report["clean"], report["findings"], report["unknown"]) == (0, True, [], [])
    assert report["looked"]["entries"] >= 40
    assert report["looked"]["chunks"] >= 40
    status, out, _ = run("fsck", home)
    assert (status, out.splitlines()[0]) == (0, "clean (43 entries)"), out
    status, _, err = run("fsck", f"{home}/a/f1")
    assert status == 1
    assert "give a directory" in err


def test_chunks_without_an_owner_are_found_and_go(client: Client, home: str, run: Run) -> None:
    _fill(client, home)
    client.mkdir(f"{home}/gone")
    orphan = client.stat(f"{home}/gone").st_ino  # an id that no file gets: what is collected can't be written
    client.rmdir(f"{home}/gone")
    chain = client.cluster_status().chains[0].id
    with _space(client, orphan) as write:
        write(chain, 0, 4096)
        write(chain, 7, 70_000)
    status, out, _ = run("fsck", "--json")
    (finding,) = json.loads(out)["findings"]
    assert (status, finding["kind"], finding["inode"], finding["chain"]) == (
        1,
        "orphan-chunks",
        orphan,
        chain,
    )
    status, out, _ = run("fsck", "--repair")
    assert status == 0, out
    assert "repaired: the chunks are being collected" in out
    _until_clean(run)


def test_chunks_beyond_the_length_are_found_and_cut(client: Client, home: str, run: Run) -> None:
    ino = _fill(client, home)
    attributes = client.attributes(f"{home}/a/f3")
    assert attributes.layout is not None
    tables = {(table.id, table.version): table.chains for table in client.cluster_status().tables}
    layout = attributes.layout
    chain = Placement(layout, tables[layout.table, layout.table_version]).chain_of_index(9)
    with _space(client, ino) as write:
        write(chain, 9, 4096)
    status, out, _ = run("fsck", "--json")
    (finding,) = json.loads(out)["findings"]
    assert (status, finding["kind"], finding["expected"]) == (1, "chunks-beyond-length", 30_000)
    status, out, _ = run("fsck", "--repair")
    assert status == 0, out
    _until_clean(run)
    assert client.stat(f"{home}/a/f3").st_size == 30_000
    with client.open(f"{home}/a/f3", "rb") as file:
        assert file.read() == b"x" * 30_000


def _until_clean(run: Run) -> None:
    limit = time.monotonic() + LIMIT_S
    while (result := run("fsck"))[0] != 0 or not result[1].startswith("clean"):
        assert time.monotonic() < limit, result
        time.sleep(0.1)
