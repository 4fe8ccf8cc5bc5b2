"""`ffs bench peers` without the peers' packages: how their processes are asked, and the client's script
against a store of the test's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ffs.cli.benchmark.peers import mooncake
from ffs.cli.benchmark.peers.cases import CASES, VLLM_CASES, select
from ffs.cli.benchmark.peers.mooncake import check
from ffs.cli.benchmark.peers.process import PeerProcess
from ffs.cli.benchmark.peers.suite import PeerLoop
from ffs.cli.benchmark.report import Result
from ffs.errors import FfsError, InvalidArgument, NotFound

CLIENT = Path(mooncake.__file__).parent / "mooncake_client.py"
SIZE, BATCH = 65536, 4

STORE = """
import ctypes, os

class MooncakeDistributedStore:
    def __init__(self):
        self.kept = {}
    def setup(self, *options):
        return 0
    def close(self):
        return 0
    def register_buffer(self, address, size):
        return 0
    def unregister_buffer(self, address):
        return 0
    def put_from(self, key, address, size):
        self.kept[key] = ctypes.string_at(address, size)
        return 0
    def get_into(self, key, address, size):
        if "FAIL" in os.environ:
            return -704
        value = self.kept.get(key)
        if value is None:
            return -704
        if "DAMAGE" in os.environ:
            value = value[:-1] + bytes([value[-1] ^ 1])
        ctypes.memmove(address, value, size)
        return size
    def batch_put_from(self, keys, addresses, sizes):
        return [self.put_from(*each) for each in zip(keys, addresses, sizes)]
    def batch_get_into(self, keys, addresses, sizes):
        return [self.get_into(*each) for each in zip(keys, addresses, sizes)]
    def batch_remove(self, keys, force):
        return [0 if self.kept.pop(key, None) is not None else -704 for key in keys]
"""


def client(tmp_path: Path, **environment: str) -> PeerProcess:
    package = tmp_path / "packages" / "mooncake"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "store.py").write_text(STORE)
    return PeerProcess(
        [sys.executable, "-P", str(CLIENT), "nowhere:1"],
        tmp_path / "log",
        environment={"PYTHONPATH": str(package.parent), **environment},
    )


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("op", ["get", "put"])
def test_every_call_is_counted_and_the_last_one_compared(tmp_path: Path, op: str, batch: int) -> None:
    with client(tmp_path) as process:
        process.ask(do="case", op=op, size=SIZE, batch=batch, set_bytes=SIZE * 8)
        loop = PeerLoop(process, SIZE)
        piece = loop(0.01)
        assert process.ask(do="end") == {}
    assert loop.tally.errors == 0
    assert loop.tally.blocks == len(loop.tally.calls_ns) * batch > 0
    assert loop.tally.verified_bytes == batch * SIZE
    assert piece.units == loop.tally.blocks * SIZE
    assert piece.seconds == pytest.approx(sum(loop.tally.calls_ns) / 1e9)


def test_a_byte_that_is_wrong_ends_the_run_and_is_told(tmp_path: Path) -> None:
    with client(tmp_path, DAMAGE="1") as process:
        process.ask(do="case", op="get", size=SIZE, batch=1, set_bytes=SIZE)
        with pytest.raises(FfsError, match="other bytes than were put"):
            process.ask(do="run", seconds=0.001)


def test_a_call_that_fails_is_told(tmp_path: Path) -> None:
    with client(tmp_path, FAIL="1") as process:
        process.ask(do="case", op="put", size=SIZE, batch=1, set_bytes=SIZE)
        with pytest.raises(FfsError, match="answered -704, not 65536"):
            process.ask(do="run", seconds=0.001)


def test_a_process_without_an_answer_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('words', flush=True); time.sleep(600)"]
    with pytest.raises(FfsError, match="gave no answer"):
        PeerProcess(command, tmp_path / "log", timeout_s=0.3)


def test_an_environment_that_is_not_there_is_told_with_the_way_to_it(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="make bench-peers"):
        check(tmp_path / "python")


def test_cases_are_chosen_by_either_name() -> None:
    every = [*CASES, *VLLM_CASES]
    names = [name for case in every for name in case.names]
    assert len(names) == len(set(names))
    (chosen,), none = select(["mooncake-put-1m-x16-local"])
    assert chosen.names == ("mooncake-put-1m-x16-tcp", "mooncake-put-1m-x16-local")
    assert none == []
    assert [case.names for case in select(["vllm-fs-load-1m-x1-*"])[1]] == [
        ("vllm-fs-load-1m-x1-disk",),
        ("vllm-fs-load-1m-x1-tmpfs",),
    ]
    assert select([]) == (list(CASES), list(VLLM_CASES))
    with pytest.raises(InvalidArgument, match="mooncake-get-64k-x1-tcp"):
        select(["none"])


@pytest.mark.parametrize(
    ("ratio", "more_ok", "goal", "ok"),
    [(2.0, True, 1.5, True), (2.0, False, 1.5, False), (1.0, True, 1.5, False), (1.0, True, None, True)],
)
def test_all_goals_of_a_case_count(ratio: float, more_ok: bool, goal: float | None, ok: bool) -> None:
    result = Result("case", ratio, 1.0, ratio, "GB/s", 3, goal, more_ok=more_ok)
    assert result.ok is ok
