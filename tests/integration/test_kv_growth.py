"""K16 on a real cluster: an empty new node under load gets its share of the targets, and no key moves to
another chain for it (docs/guides/kv.md)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest
from kv_blocks import BLOCK, keys_of, payload

import ffs
from ffs.cli.devcluster.handle import DevCluster
from ffs.kv import Space
from ffs.kv.entries import chains_of
from ffs.kv.keys import key_array

BATCH = 20
FAILURE_TIMEOUT_S = 3.0  # a busy machine must not look like a dead node
PATIENCE_S = 120.0  # of the load's requests: chains move under them

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    made = DevCluster(
        tmp_path_factory.mktemp("growth") / "dir",
        nodes=2,
        replicas=1,
        device_bytes=1 << 30,
        failure_timeout_s=FAILURE_TIMEOUT_S,
    )
    with made:
        yield made


class Load:
    """Puts new blocks and gets them, and those that were there before, until it is stopped."""

    def __init__(self, space: Space, before: list[bytes]) -> None:
        self.keys: list[bytes] = []
        self._space = space
        self._before = before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._error: BaseException | None = None

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                new = keys_of(BATCH, salt=f"load {len(self.keys)}")
                put = self._space.put(new, [payload(key) for key in new])
                put.raise_errors()
                assert put.hits.all()
                self.keys += new
                check(self._space, new + self._before[:BATCH])
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._error is not None:
            raise self._error


def check(space: Space, keys: list[bytes]) -> None:
    into = [bytearray(BLOCK) for _ in keys]
    got = space.get(keys, into)
    got.raise_errors()
    assert got.hits.all()
    assert [bytes(block) for block in into] == [payload(key) for key in keys]


def chains(run: Run) -> dict[int, list[str]]:
    """The nodes of each chain."""
    rows = [json.loads(line) for line in run("cluster", "chains", "--json")[1].splitlines()]
    return {row["id"]: row["nodes"] for row in rows}


def test_k16_an_empty_new_node_gets_its_share_and_no_key_moves(cluster: DevCluster, run: Run) -> None:
    with (
        ffs.connect(cluster.address, request_timeout=PATIENCE_S) as client,
        Space.create(client, "/kv", block_bytes=BLOCK, evictable=False, timeout_s=PATIENCE_S) as space,
    ):
        before = keys_of(100, salt="before")
        space.put(before, [payload(key) for key in before]).raise_errors()
        sample = key_array(keys_of(3000, salt="sample"))
        placed = chains_of(space._handle.placement, sample)
        name = cluster.add_node()
        with Load(space, before) as load:
            status, out, err = run("cluster", "add", name)
        assert status == 0, (out, err)
        assert len(load.keys) >= BATCH
        check(space, before + load.keys)
        with Space.open(client, "/kv") as again:  # as who comes later places them
            assert (chains_of(again._handle.placement, sample) == placed).all()
            check(again, load.keys[-BATCH:])
        new = {chain for chain, nodes in chains(run).items() if name in nodes}
        share = sum(int(chain) in new for chain in placed) / len(placed)
        assert 0.2 < share < 0.5, share  # a third of the targets, and so of what is put
