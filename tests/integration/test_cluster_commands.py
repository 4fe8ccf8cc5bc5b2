"""`ffs cluster ...` on real processes: drain, undo, rebalance, add, replace, force-lead, and what it takes to
interrupt them. One cluster of four nodes; each test leaves it whole. docs/operations.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ffs
from ffs.cli.devcluster import commands
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]
FILES = 24
FILE_BYTES = 3_000_001
FAILURE_TIMEOUT_S = 3.0  # a busy machine must not look like a dead node
PATIENCE_S = 120.0  # of the load's requests: chains move under them

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    made = DevCluster(
        tmp_path_factory.mktemp("commands") / "dir",
        nodes=4,
        replicas=3,
        device_bytes=1 << 30,
        failure_timeout_s=FAILURE_TIMEOUT_S,
    )
    with made:
        yield made


def content(number: int) -> bytes:
    block = hashlib.sha256(str(number).encode()).digest()
    return (block * (FILE_BYTES // len(block) + 1))[:FILE_BYTES]


@pytest.fixture(scope="module")
def stored(cluster: DevCluster) -> str:
    """A directory of files that must be the same after whatever was done."""
    with ffs.connect(cluster.address) as client:
        client.mkdir("/kept")
        for number in range(FILES):
            with client.open(f"/kept/{number}", "wb") as file:
                file.write(content(number))
    return "/kept"


def check_files(cluster: DevCluster, directory: str) -> None:
    with ffs.connect(cluster.address) as client:
        for number in range(FILES):
            with client.open(f"{directory}/{number}", "rb") as file:
                assert file.read() == content(number), f"{directory}/{number}"


def lines_of(run: Run, *line: str) -> list[dict[str, object]]:
    return [json.loads(text) for text in run(*line, "--json")[1].splitlines()]


def node_of(run: Run, name: str) -> dict[str, object]:
    return next(node for node in lines_of(run, "cluster", "nodes") if node["name"] == name)


def used_targets(run: Run) -> dict[str, int]:
    return {
        str(node["name"]): sum(device["used_targets"] for device in node["devices"])  # type: ignore[attr-defined]
        for node in lines_of(run, "cluster", "nodes")
    }


def wait_whole(run: Run, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while run("cluster", "status")[0] != 0:
        assert time.monotonic() < deadline, run("cluster", "status")[1]
        time.sleep(0.3)


class Load:
    """Writes and reads back, until it is stopped: every acknowledged byte must be read."""

    def __init__(self, client: Client, directory: str) -> None:
        self._client = client
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.rounds = 0
        self.error: BaseException | None = None

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                data = os.urandom(200_000)
                with self._client.open(f"{self._directory}/load-{self.rounds % 16}", "wb") as file:
                    file.write(data)
                with self._client.open(f"{self._directory}/load-{self.rounds % 16}", "rb") as file:
                    assert file.read() == data
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        if self.error is not None:
            raise self.error
        assert self.rounds > 0


def test_looking_at_a_cluster(run: Run, stored: str) -> None:
    wait_whole(run)
    status, out, _ = run("cluster", "status")
    assert status == 0
    assert "4 of 4 storage nodes alive" in out
    assert "table default: 3 replicas, 42 chains: 42 whole" in out
    fields = json.loads(run("cluster", "status", "--json")[1])
    assert fields["whole"] is True
    assert len(fields["chains"]) == sum(fields["states"].values()) == 82
    assert run("cluster", "chains", "--unhealthy") == (0, "", "")
    targets = lines_of(run, "cluster", "targets")
    assert len(targets) == 42 * 3 + 40
    assert {target["state"] for target in targets} == {"serving"}
    deadline = time.monotonic() + 60
    while sum(int(str(t["chunks"])) for t in lines_of(run, "cluster", "targets")) < FILES * 3 * 3:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    some = lines_of(run, "cluster", "targets", "--node", "node2")
    assert {target["node"] for target in some} == {"node2"}


def test_drain_under_load_then_switch_off_then_back(cluster: DevCluster, run: Run, stored: str) -> None:
    with ffs.connect(cluster.address, request_timeout=PATIENCE_S) as client, Load(client, stored):
        status, out, err = run("cluster", "drain", "node1")
        assert status == 0, (out, err)
        assert "it may be switched off" in out
        assert used_targets(run)["node1"] == 0
        assert node_of(run, "node1")["drained"] is True
        cluster.kill_node(1)
        check_files(cluster, stored)
    # Three nodes hold three replicas: none of them may go.
    status, _, err = run("cluster", "drain", "node2")
    assert status == 1
    assert "3 replicas on distinct nodes, and 2 nodes would be left to take them: start another" in err
    status, _, err = run("cluster", "add", "node1")
    assert status == 1
    assert "node node1 is" in err
    cluster.start_node(1)
    assert run("cluster", "drain", "node1", "--undo")[0] == 0
    with ffs.connect(cluster.address, request_timeout=PATIENCE_S) as client, Load(client, stored):
        status, out, _ = run("cluster", "rebalance")
        assert (status, out.splitlines()[-1]) == (0, "targets and heads are even")
    counts = used_targets(run)
    assert max(counts.values()) - min(counts.values()) <= 2, counts
    wait_whole(run)
    assert run("cluster", "rebalance", "--dry-run")[1].startswith("0 targets to fill")
    check_files(cluster, stored)


def test_interrupted_and_undone(cluster: DevCluster, run: Run, stored: str) -> None:
    """Ctrl-C ends the command, not the work."""
    wait_whole(run)
    drain = subprocess.Popen(
        [sys.executable, "-m", "ffs", "cluster", "drain", "node3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert drain.stdout is not None
    first = drain.stdout.readline()
    assert "targets to fill" in first, drain.communicate(timeout=60)
    drain.send_signal(signal.SIGINT)
    _, err = drain.communicate(timeout=60)
    if drain.returncode != 0:  # 0: it was done before the signal came
        assert drain.returncode == 130
        assert "it goes on in the cluster" in err
    deadline = time.monotonic() + 90
    while used_targets(run)["node3"]:
        assert time.monotonic() < deadline, run("cluster", "status")[1]
        time.sleep(0.3)
    assert "node node3 is drained" in run("cluster", "status")[1]
    assert run("cluster", "drain", "node3", "--undo", "--json")[0] == 0
    assert run("cluster", "add", "node3")[0] == 0
    wait_whole(run)
    check_files(cluster, stored)


def test_another_manager_goes_on(cluster: DevCluster, run: Run, stored: str, tmp_path: Path) -> None:
    """The metadata process is killed right after a drain was begun."""
    wait_whole(run)
    status, out, _ = run("cluster", "drain", "node0", "--no-wait")
    assert status == 0
    assert "it goes on in the cluster" in out
    os.kill(cluster.processes()["meta"], signal.SIGKILL)
    ready = tmp_path / "ready"
    store = cluster.directory.meta
    line = commands.metadata(f"lmdb://{store}", cluster.address, ready, int(FAILURE_TIMEOUT_S * 1000))
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen(line, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}) as second:
        try:
            deadline = time.monotonic() + 90
            while not ready.exists() or used_targets(run)["node0"]:
                assert second.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, run("cluster", "status")[1]
                time.sleep(0.3)
            check_files(cluster, stored)
            assert run("cluster", "drain", "node0", "--undo")[0] == 0
            assert run("cluster", "rebalance")[0] == 0
            wait_whole(run)
            check_files(cluster, stored)
            _add_a_node(cluster, run, stored)
            _lose_a_disk(cluster, run, stored)
            _replace(cluster, run, stored)
        finally:
            second.terminate()


def _add_a_node(cluster: DevCluster, run: Run, stored: str) -> None:
    name = cluster.add_node()
    assert name == "node4"
    with ffs.connect(cluster.address, request_timeout=PATIENCE_S) as client, Load(client, stored):
        status, out, _ = run("cluster", "add", name)
    assert (status, out.splitlines()[-1]) == (0, "node node4 has its share of the targets")
    counts = used_targets(run)
    assert max(counts.values()) - min(counts.values()) <= 2, counts
    wait_whole(run)
    check_files(cluster, stored)


def _lose_a_disk(cluster: DevCluster, run: Run, stored: str) -> None:
    """A node comes back with an empty disk in the old one's place. What had three replicas is rebuilt on it
    without a command; what had one is lost, and led on empty when a person says so."""
    cluster.kill_node(2)
    had = used_targets(run)["node2"]
    cluster.start_node(2, fresh=True)
    deadline = time.monotonic() + 90
    while True:
        ill = lines_of(run, "cluster", "chains", "--unhealthy")
        devices = list(node_of(run, "node2")["devices"])  # type: ignore[call-overload]
        rebuilt = devices[0]["used_targets"] == had
        if rebuilt and all(len(c["wanted"]) == 1 and c["state"] == "offline" for c in ill):  # type: ignore[arg-type]
            break
        assert time.monotonic() < deadline, ill
        time.sleep(0.3)
    assert ill, "single replicas were on that disk"
    check_files(cluster, stored)
    fresh = [str(chain["wanted"][0]) for chain in ill]  # type: ignore[index]
    status, _, err = run("cluster", "force-lead", fresh[0])
    assert status == 1
    assert "its node runs without its device" in err
    assert "give --yes" in err
    status, out, _ = run("cluster", "force-lead", *fresh, "--yes")
    assert status == 0
    assert len(out.splitlines()) == len(fresh)
    whole = next(c for c in lines_of(run, "cluster", "chains") if c["table"] != ill[0]["table"])
    status, _, err = run("cluster", "force-lead", str(whole["members"][1]), "--yes")  # type: ignore[index]
    assert status == 1
    assert "needs no force" in err
    wait_whole(run)
    assert len(list(node_of(run, "node2")["devices"])) == 1  # type: ignore[call-overload]
    check_files(cluster, stored)


def _replace(cluster: DevCluster, run: Run, stored: str) -> None:
    """One target onto a device that is named, then a device's onto the others."""
    chain = next(c for c in lines_of(run, "cluster", "chains") if len(c["members"]) == 3)  # type: ignore[arg-type]
    names = [f"node{n}" for n in range(5)]
    other = next(name for name in names if name not in chain["nodes"])  # type: ignore[operator]
    device = cluster.directory.path / other / "device"
    leaving = chain["members"][1]  # type: ignore[index]
    status, out, _ = run("cluster", "replace", str(leaving), "--device", f"{device}@{other}")
    assert (status, out.splitlines()[-1]) == (0, f"{leaving} is replaced")
    now = next(c for c in lines_of(run, "cluster", "chains") if c["id"] == chain["id"])
    assert set(now["nodes"]) == {chain["nodes"][0], chain["nodes"][2], other}  # type: ignore[index, call-overload]
    status, _, err = run("cluster", "replace", str(leaving))
    assert status == 1
    assert "nothing to replace" in err
    with ffs.connect(cluster.address, request_timeout=PATIENCE_S) as client, Load(client, stored):
        status, out, err = run("cluster", "replace", f"{device}@{other}")
    assert status == 0, (out, err)
    assert used_targets(run)[other] == 0
    wait_whole(run)
    check_files(cluster, stored)
