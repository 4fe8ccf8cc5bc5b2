"""Metadata services hold no state: with each of three killed in turn in the middle of operations, a client
sees what the model says, results and errnos, and nothing is left behind in the store or on the chains."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from client_fs import ClientFs
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import initialize, run_state_machine_as_test
from meta_kills import METAS, Inspector, Kills, seed_of_run, until
from namespace_machine import Machine
from posix_model import ModelFs

import ffs
from ffs.cli.devcluster.handle import DevCluster
from ffs.client.client import Client

SECONDS = float(os.environ.get("FFS_FAILOVER_SECONDS", "7"))
GARBAGE = b"dgtuwWeLM"  # kinds of keys that are gone when all is removed and nobody has anything open


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    home = tmp_path_factory.mktemp("failover") / "dir"
    with DevCluster(home, nodes=1, replicas=1, metas=METAS, device_bytes=1 << 30) as made:
        yield made


@pytest.fixture
def inspector(cluster: DevCluster) -> Iterator[Inspector]:
    with Inspector(cluster.directory.path) as made:
        yield made


class FailoverMachine(Machine):
    client: ClassVar[Client]
    files: ClassVar[set[int]]  # inodes
    calls: ClassVar[int] = 0
    first: ClassVar[BaseException | None] = None

    def both(self, name: str, *args: Any) -> None:
        type(self).calls += 1
        try:
            super().both(name, *args)
        except BaseException as error:
            # Hypothesis runs a failed example again, under other kills, and speaks of what it saw then.
            type(self).first = type(self).first or error
            raise

    @initialize()
    def start(self) -> None:
        self.model = ModelFs()
        self.real = ClientFs(self.client, self.files)

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.close()


# No shrinking: what kills did isn't repeatable, and each example takes real time.
EXAMPLES = settings(
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


DYING = """
import fcntl, sys, time, ffs
client = ffs.connect(sys.argv[1], session_ttl=1.0)
home = sys.argv[2]
files = [client.open(f"{home}/f{at}", "wb", 0) for at in range(3)]
for at, file in enumerate(files):
    file.write(b"x" * (5000 + at))
    file.flock(fcntl.LOCK_EX)
unnamed = client.open(f"{home}/unnamed", "wb", 0, atomic=True)
unnamed.write(b"y" * 5000)
gone = client.open(f"{home}/gone", "wb", 0)
gone.write(b"z" * 5000)
client.remove(f"{home}/gone")
client.mkdir(f"{home}/d")
lock = client.lock_directory(f"{home}/d")
print(*[file.inode for file in [*files, unnamed, gone]], flush=True)
time.sleep(100)
"""


def test_dead_clients_leave_nothing(cluster: DevCluster, inspector: Inspector) -> None:
    """Killed with files open and locks held, while each metadata service is killed too: sessions end, lengths
    are found, and once the files are removed nothing is there any more."""
    before = inspector.counts()
    spaces: set[int] = set()
    with ffs.connect(cluster.address, request_timeout=60) as client:
        children = []
        for at in range(3):
            client.mkdir(f"/dying-{at}")
            command = [sys.executable, "-c", DYING, cluster.address, f"/dying-{at}"]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for child in children:
            assert child.stdout is not None
            spaces |= {int(word) for word in child.stdout.readline().split()}
        assert len(spaces) == 15
        for child in children:
            child.kill()
            child.communicate()
        for index in range(METAS):
            cluster.kill_meta(index)
            cluster.start_meta(index)
        counts = lambda: inspector.counts() - before  # noqa: E731
        until(
            lambda: not any(counts()[bytes([kind])] for kind in b"gwWeLMt"), lambda: f"left over: {counts()}"
        )
        for at in range(3):
            assert client.listdir(f"/dying-{at}") == ["d", "f0", "f1", "f2"]
            for index in range(3):
                assert client.getsize(f"/dying-{at}/f{index}") == 5000 + index
            client.mkdir(f"/dying-{at}/d/free")
            client.rmtree(f"/dying-{at}")
        until(lambda: inspector.inodes() == {1}, lambda: f"left over: {counts()}")
        assert inspector.with_chunks(spaces) == set()
    until(lambda: +counts() == {b"f": 4}, lambda: f"left over: {counts()}")


def test_kills_make_no_difference(cluster: DevCluster, inspector: Inspector) -> None:
    run_seed = seed_of_run()
    print("seed", run_seed)
    before = inspector.counts()
    with ffs.connect(cluster.address, request_timeout=60) as client:
        FailoverMachine.client, FailoverMachine.files = client, set()
        client.core.session()
        kills = Kills(cluster, inspector, run_seed, lambda: client.core.link.at)
        kills.start()
        end = time.monotonic() + SECONDS
        try:
            for round_seed in itertools.count(run_seed):
                print("round", round_seed)
                run_state_machine_as_test(seed(round_seed)(FailoverMachine), settings=EXAMPLES)
                if time.monotonic() > end:
                    break
        except Exception as error:
            raise (FailoverMachine.first or error) from None
        finally:
            kills.finish()
        print(FailoverMachine.calls, "calls, killed", dict(kills.killed))
        assert set(kills.killed) == set(range(METAS))
        assert sum(kills.killed.values()) >= 4
        until(
            lambda: not any(inspector.counts()[bytes([kind])] for kind in GARBAGE),
            lambda: f"left over: {inspector.counts()}",
        )
        assert inspector.inodes() == {1}
        assert inspector.with_chunks(FailoverMachine.files) == set()
    until(
        lambda: +(inspector.counts() - before) == {b"f": 1},  # of the session, until servers may forget it
        lambda: f"before {before}, now {inspector.counts()}",
    )
