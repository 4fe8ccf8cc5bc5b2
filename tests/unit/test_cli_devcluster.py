"""The directory of a development cluster and its processes: no servers run here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ffs.cli import build_parser
from ffs.cli.cluster import _shape
from ffs.cli.devcluster import process
from ffs.cli.devcluster.control import Control, ask
from ffs.cli.devcluster.handle import take_down
from ffs.cli.devcluster.state import FORMAT, ClusterFile, Directory, ProcessRecord, RunFile, Shape, write_file
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.errors import Busy, Damaged, Exists, FfsError, InvalidArgument, NotFound

SHAPE = Shape(nodes=3, replicas=3, device_bytes=1 << 30)


def _sleeper(code: str = "import time; time.sleep(600)") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def test_files_round_trip(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert directory.read_cluster() is None
    assert directory.read_run() is None
    cluster = ClusterFile(FORMAT, SHAPE, "127.0.0.1:1", "ab" * 16)
    run = RunFile(ProcessRecord("supervisor", 1, 2), "127.0.0.1:1", (ProcessRecord("meta", 3, 4),))
    write_file(directory.cluster_file, cluster)
    write_file(directory.run_file, run)
    assert directory.read_cluster() == cluster
    assert directory.read_run() == run
    assert not list(tmp_path.glob("*.new"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(Damaged, match=r"cluster\.json"):
        Directory(tmp_path).read_cluster()


def test_one_supervisor_a_directory(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert not directory.is_held()
    with directory.hold():
        assert directory.is_held()
        write_file(directory.run_file, RunFile(ProcessRecord("supervisor", 77, 1), "127.0.0.1:5", ()))
        with (
            pytest.raises(Busy, match=r"already up at 127\.0\.0\.1:5 \(pid 77\).*ffs down --dir"),
            Directory(tmp_path).hold(),
        ):
            pass
    assert not directory.is_held()


def test_other_peoples_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(Exists, match=r"thesis\.tex"):
        Directory(tmp_path).check_usable()
    with pytest.raises(InvalidArgument, match="isn't a directory"):
        Directory(tmp_path / "thesis.tex").check_usable()
    Directory(tmp_path / "new").check_usable()


@pytest.mark.parametrize("existed", [True, False])
def test_a_failed_first_up_leaves_nothing(tmp_path: Path, existed: bool) -> None:
    path = tmp_path / "cluster"
    if existed:
        path.mkdir()
    supervisor = Supervisor(Directory(path), SHAPE, lambda line: None)

    def begin_and_fail() -> None:
        with supervisor.hold():
            (path / "meta").mkdir()
            (path / "meta" / "x").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        begin_and_fail()
    assert path.exists() is existed
    assert not existed or not list(path.iterdir())


def test_a_failed_first_up_keeps_the_logs_and_the_next_one_may_begin_there(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "cluster")

    def fail_with(error: BaseException) -> None:
        with Supervisor(directory, SHAPE, lambda line: None).hold():
            directory.log.mkdir(exist_ok=True)
            (directory.log / "meta.log").write_text("why\n")
            directory.meta.mkdir()
            raise error

    with pytest.raises(FfsError):
        fail_with(FfsError("not all chains serve"))
    assert [entry.name for entry in directory.path.iterdir()] == ["log"]
    assert (directory.log / "meta.log").read_text() == "why\n"
    with pytest.raises(KeyboardInterrupt):  # in the same directory; stopped, it leaves nothing of its own
        fail_with(KeyboardInterrupt())
    assert list(directory.path.iterdir()) == []


def test_a_cluster_that_isnt_up_in_time_names_its_logs(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "cluster")
    supervisor = Supervisor(directory, SHAPE, lambda line: None, ready_timeout_s=0.0)
    with pytest.raises(FfsError, match=r"--timeout.*see its log .*/log/meta\.log"), supervisor.hold():
        supervisor.start(lambda: False)
    assert (directory.log / "meta.log").exists()


def test_a_failed_later_up_keeps_the_data(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    write_file(directory.cluster_file, ClusterFile(FORMAT, SHAPE))
    (tmp_path / "meta").mkdir()
    with pytest.raises(RuntimeError), Supervisor(directory, SHAPE, lambda line: None).hold():
        raise RuntimeError
    assert (tmp_path / "meta").exists()
    assert directory.read_cluster() is not None


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 3, 1 << 30),
        Shape(3, 0, 1 << 30),
        Shape(9, 9, 1 << 30),
        Shape(65, 1, 1 << 30),
        Shape(3, 3, 1 << 20),
        Shape(3, 3, 1 << 30, domains=4),
        Shape(3, 3, 1 << 30, failure_timeout_ms=100),
    ],
)
def test_impossible_shapes_are_refused_before_anything_is_made(tmp_path: Path, shape: Shape) -> None:
    path = tmp_path / "cluster"
    with (
        pytest.raises(InvalidArgument, match="--"),
        Supervisor(Directory(path), shape, lambda line: None).hold(),
    ):
        pass
    assert not path.exists()


def test_a_pid_that_is_another_process_now_is_not_touched() -> None:
    with _sleeper() as child:
        started = process.start_ticks(child.pid)
        assert started is not None
        assert process.is_alive(child.pid, started)
        assert not process.is_alive(child.pid, started + 1)
        assert process.signal_and_wait(child.pid, started + 1, signal.SIGKILL, 1)
        assert child.poll() is None
        assert process.signal_and_wait(child.pid, started, signal.SIGKILL, 10)
    assert process.start_ticks(child.pid) is None
    assert process.signal_and_wait(child.pid, started, signal.SIGKILL, 1)


def test_a_child_that_ends_early_tells_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = process.spawn("meta", [sys.executable, "-c", "import sys; sys.exit('no luck')"], log, os.environ)
    with pytest.raises(FfsError, match="meta ended with status 1: no luck"):
        process.wait_file(child, tmp_path / "ready", time.monotonic() + 30)


def test_children_that_ignore_sigterm_or_are_stopped_end_too(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time, pathlib; signal.signal(15, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)"
    )
    child = process.spawn("stubborn", [sys.executable, "-c", stubborn], tmp_path / "log", os.environ)
    process.wait_file(child, tmp_path / "up", time.monotonic() + 30)
    assert process.stop_children([child], 0.2) == ["stubborn"]
    polite = process.spawn(
        "polite", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", os.environ
    )
    os.kill(polite.pid, signal.SIGSTOP)
    assert process.stop_children([polite], 30) == []


def test_down_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no cluster"):
        take_down(tmp_path)
    write_file(Directory(tmp_path).cluster_file, ClusterFile(FORMAT, SHAPE))
    with pytest.raises(NotFound, match="down already"):
        take_down(tmp_path)


def test_down_ends_servers_whose_supervisor_was_killed(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    with _sleeper() as orphan:
        started = process.start_ticks(orphan.pid)
        assert started is not None
        record = ProcessRecord("node0", orphan.pid, started)
        write_file(directory.run_file, RunFile(ProcessRecord("supervisor", orphan.pid, 1), "a:1", (record,)))
        # The wait below reaps it, as init would an orphan.
        os.set_blocking(0, True)
        take_down(tmp_path)
        assert orphan.wait(10) == -signal.SIGTERM
    assert directory.read_run() is None


# --- control ----------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> Directory:
    """A directory with a path that is too long for the address of a socket."""
    path = tmp_path / ("x" * 120)
    path.mkdir()
    return Directory(path)


def _serve(control: Control, do: Callable[[str, str], str], stop: threading.Event) -> None:
    while not stop.is_set():
        control.serve(do)
        time.sleep(0.01)


def test_what_is_asked_of_a_supervisor_is_answered(far: Directory) -> None:
    asked = []

    def do(verb: str, node: str) -> str:
        asked.append((verb, node))
        if verb == "kill":
            raise Busy(f"{node} doesn't run: start it")
        return "node3"

    control, stop = Control(far), threading.Event()
    thread = threading.Thread(target=_serve, args=(control, do, stop))
    thread.start()
    try:
        assert ask(far, "add") == "node3"
        with pytest.raises(Busy, match="node1 doesn't run"):
            ask(far, "kill", "node1")
        with _raw(far) as nonsense:
            nonsense.sendall(b"what?\n")
            assert nonsense.recv(10) == b""
        assert ask(far, "start", "node1") == "node3"
    finally:
        stop.set()
        thread.join()
        control.close()
    assert asked == [("add", ""), ("kill", "node1"), ("start", "node1")]
    with pytest.raises(NotFound, match="no cluster runs here"):
        ask(far, "add")
    Control(far).close()


def _raw(directory: Directory) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(directory.path, os.O_RDONLY)
    connection.connect(f"/proc/self/fd/{descriptor}/control")
    os.close(descriptor)
    return connection


def test_nodes_that_do_not_run_are_named(tmp_path: Path) -> None:
    supervisor = Supervisor(Directory(tmp_path), SHAPE, lambda line: None)
    with pytest.raises(NotFound, match="there are node0 to node2"):
        supervisor._do("kill", "node3")
    with pytest.raises(NotFound, match="no node meta"):
        supervisor._do("kill", "meta")
    with pytest.raises(Busy, match="node1 doesn't run: start it with ffs dev start node1"):
        supervisor._do("kill", "node1")


def test_shapes_of_older_clusters_are_read(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(
        '{"format": 1, "shape": {"nodes": 3, "replicas": 3, "device_bytes": 1073741824}}'
    )
    known = Directory(tmp_path).read_cluster()
    assert known is not None
    assert (known.shape.domains, known.shape.failure_timeout_ms) == (0, 1000)


@pytest.mark.parametrize(
    ("null", "options", "words"),
    [(True, [], "store nothing: give that option again"), (False, ["--null-devices"], "made without")],
)
def test_devices_that_store_nothing_are_asked_for_each_time(
    tmp_path: Path, null: bool, options: list[str], words: str
) -> None:
    shape = Shape(nodes=1, replicas=1, device_bytes=1 << 30, null_devices=null)
    write_file(Directory(tmp_path).cluster_file, ClusterFile(FORMAT, shape))
    with pytest.raises(InvalidArgument, match=words):  # `main` would start it if it is not
        _shape(build_parser().parse_args(["up", "--dir", str(tmp_path), *options]))
