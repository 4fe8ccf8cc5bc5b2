"""One development cluster for all integration tests: the real processes on file-backed devices.

`cluster` (once a session): a metadata service and three storage servers with three-way chains,
brought up as `ffs up` does it. `client`: a client of it, one a test. `home`: a fresh directory in
it, as a path of the store.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ffs
from ffs.cli import main
from ffs.cli.devcluster.handle import DevCluster
from ffs.cli.devcluster.state import Directory, Shape
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client

sys.path.insert(0, str(Path(__file__).parent))  # real_cluster.py stands beside the tests

DEVICE_BYTES = 6 << 30  # sparse: what is stored counts

Run = Callable[..., tuple[int, str, str]]

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """The running cluster; `.address` is where its metadata service listens."""
    said: list[str] = []
    # Longer than what the tests' hasty clients wait for, and than what a busy machine holds processes up.
    shape = Shape(nodes=3, replicas=3, device_bytes=DEVICE_BYTES, failure_timeout_ms=4000)
    supervisor = Supervisor(Directory(tmp_path_factory.mktemp("cluster") / "dir"), shape, said.append)
    with supervisor.hold():
        supervisor.start(lambda: False)
        yield supervisor
        assert supervisor.newly_dead() == []


@pytest.fixture(scope="session")
def address(cluster: Supervisor) -> str:
    """For ffs.connect and FFS_CLUSTER."""
    return cluster.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """A client of the cluster, closed after the test."""
    with ffs.connect(address) as connected:
        yield connected


@pytest.fixture
def run(
    cluster: Supervisor | DevCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command on the cluster, also on a module's own: (exit status, stdout, stderr)."""
    monkeypatch.setenv("FFS_CLUSTER", cluster.address)

    def command(*line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(line))
        said = capsys.readouterr()
        return status, said.out, said.err

    return command


@pytest.fixture
def home(client: Client) -> str:
    """A directory of the store that is this test's own."""
    path = f"/test-{next(_numbers)}"
    client.mkdir(path)
    return path
