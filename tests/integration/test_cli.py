"""The command `ffs` against a real cluster, as people and programs use it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffs.cli import main
from ffs.cli.devcluster.process import is_alive
from ffs.cli.devcluster.state import Directory, RunFile
from ffs.cli.devcluster.supervisor import Supervisor
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ffs(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs a command: (exit status, stdout, stderr)."""
    monkeypatch.setenv("FFS_CLUSTER", address)

    def run(*line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(line))
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def outside(*line: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as from a shell."""
    return subprocess.run(
        [sys.executable, "-m", "ffs", *line],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,  # type: ignore[call-overload]
    )


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5_000_001])
def test_put_get_cat(ffs, home: str, tmp_path: Path, size: int) -> None:  # type: ignore[no-untyped-def]
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(size))
    source.chmod(0o640)
    assert ffs("put", str(source), f"{home}/file") == (0, "", "")
    assert ffs("get", f"{home}/file", str(back)) == (0, "", "")
    assert back.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(back.stat().st_mode) == 0o640
    fields = json.loads(ffs("stat", "--json", f"{home}/file")[1])
    assert (fields["size"], fields["type"], fields["mode"]) == (size, "file", "0640")


def test_cat_writes_bytes(address: str, client: Client, home: str) -> None:
    data = os.urandom(100_000)
    with client.open(f"{home}/a", "wb") as file:
        file.write(data)
    run = subprocess.run(
        [sys.executable, "-m", "ffs", "--cluster", address, "cat", f"{home}/a", f"{home}/a"],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert run.stdout == data + data


def test_trees_both_ways(ffs, home: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "x").write_text("x")
    (tree / "a" / "b" / "ü y").write_text("deep")
    assert ffs("put", str(tree), home)[0] == 1
    assert ffs("cp", "-r", str(tree), f"ffs:{home}")[0] == 0
    assert ffs("cp", "-r", f"ffs:{home}/tree", f"ffs:{home}/copy")[0] == 0
    assert ffs("get", "-r", f"{home}/copy", str(tmp_path))[0] == 0
    listed = sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*"))
    assert listed == sorted(str(p.relative_to(tree)) for p in tree.rglob("*"))
    assert (tmp_path / "copy" / "a" / "b" / "ü y").read_text() == "deep"
    assert not list(tmp_path.rglob("*.part"))


def test_links_and_odd_files_in_trees(ffs, home: str, tmp_path: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "round").symlink_to(".")
    (tree / "lost").symlink_to("nowhere")
    assert ffs("put", "-r", str(tree), home)[0] == 0
    assert client.readlink(f"{home}/tree/round") == "."
    assert ffs("get", "-r", f"{home}/tree", str(tmp_path / "back"))[0] == 0
    assert os.readlink(tmp_path / "back" / "lost") == "nowhere"
    os.mkfifo(tree / "pipe")
    status, _, said = ffs("put", "-r", str(tree / "pipe"), home)
    assert status == 1
    assert "pipe" in said


def test_names_that_are_not_utf8(address: str, client: Client, home: str) -> None:
    client.mkdir(f"{home}/\udcff\udc80")
    run = subprocess.run(
        [sys.executable, "-m", "ffs", "--cluster", address, "ls", home],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert run.stdout == b"\xff\x80\n"


def test_a_reader_that_goes_away_ends_it_quietly(address: str, client: Client, home: str) -> None:
    client.create_many([f"{home}/{number:0200}" for number in range(1000)])
    run = subprocess.run(
        f"{sys.executable} -m ffs --cluster {address} ls {home} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.stderr == ""
    assert run.stdout.count("\n") == 1


def test_names(ffs, home: str) -> None:  # type: ignore[no-untyped-def]
    assert ffs("mkdir", f"{home}/a/b")[0] == 1
    assert ffs("mkdir", "-p", f"{home}/a/b", f"{home}/a/b")[0] == 0
    assert ffs("mkdir", f"{home}/a")[0] == 1
    assert ffs("mv", f"{home}/a/b", f"{home}/c")[0] == 0
    assert ffs("ls", home)[1].split() == ["a", "c"]
    rows = [json.loads(line) for line in ffs("ls", "--json", home)[1].splitlines()]
    assert [(row["path"], row["type"]) for row in rows] == [
        (f"{home}/a", "directory"),
        (f"{home}/c", "directory"),
    ]
    assert "drwx" in ffs("ls", "-l", home)[1]
    assert f"{home}/a:" in ffs("ls", "-R", home)[1]
    assert ffs("rm", f"{home}/a")[0] == 1
    assert ffs("rm", "-r", f"{home}/a", f"{home}/c")[0] == 0
    assert ffs("ls", home)[1] == ""
    assert ffs("rm", f"{home}/a")[0] == 1
    assert ffs("rm", "-f", f"{home}/a")[0] == 0


def test_mv_into_a_directory_and_no_clobber(ffs, home: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    for name in ("one", "two"):
        with client.open(f"{home}/{name}", "w") as file:
            file.write(name)
    client.mkdir(f"{home}/d")
    assert ffs("mv", f"{home}/one", f"{home}/two", f"{home}/d")[0] == 0
    assert client.listdir(f"{home}/d") == ["one", "two"]
    status, _, said = ffs("mv", "-n", f"{home}/d/one", f"{home}/d/two")
    assert status == 1
    assert "there already" in said
    assert ffs("mv", f"{home}/d/one", f"{home}/d/two")[0] == 0
    with client.open(f"{home}/d/two") as file:
        assert file.read() == "one"


def test_du_and_df(ffs, home: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.makedirs(f"{home}/a/b")
    for path, size in (("x", 10), ("a/y", 100), ("a/b/z", 1000)):
        with client.open(f"{home}/{path}", "wb") as file:
            file.write(bytes(size))
    client.link(f"{home}/a/y", f"{home}/again")
    rows = [json.loads(line) for line in ffs("du", "--json", home)[1].splitlines()]
    assert {row["path"]: row["bytes"] for row in rows}[home] == 1110
    assert ffs("du", "-s", "-b", home)[1] == f"1110\t{home}\n"
    space = json.loads(ffs("df", "--json")[1])
    assert 0 < space["free"] <= space["total"]
    assert "size" in ffs("df")[1]


def test_status(ffs) -> None:  # type: ignore[no-untyped-def]
    status, out, _ = ffs("status", "--json")
    fields = json.loads(out)
    assert status == 0
    assert [node["alive"] for node in fields["nodes"]] == [True] * 3
    assert all(chain["writable"] for chain in fields["chains"])
    assert {entry["name"]: entry["replicas"] for entry in fields["tables"]} == {"default": 3, "single": 1}
    assert "table default: 3 replicas" in ffs("status")[1]


# --- errors: one line that names the thing and the way out ------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["cat", "{home}/none"], "{home}/none"),
        (["ls", "{home}/none"], "{home}/none"),
        (["stat", "{home}/none"], "{home}/none"),
        (["get", "{home}/none", "{tmp}/x"], "{home}/none"),
        (["put", "{tmp}/none", "{home}/x"], "{tmp}/none"),
        (["put", "{tmp}", "{home}/x"], "add -r"),
        (["put", "{tmp}/file", "{home}/none/"], "make it first"),
        (["put", "{tmp}/file", "{tmp}/file", "{home}/x"], "isn't a directory"),
        (["rm", "-r", "/"], "root"),
        (["rm", "{home}"], "add -r"),
        (["mkdir", "{home}/" + "n" * 256], "255"),
        (["mkdir", "{home}/a\0b"], "NUL"),
        (["cp", "-r", "ffs:{home}", "ffs:{home}/in"], "itself"),
    ],
)
def test_errors(ffs, home: str, tmp_path: Path, client: Client, line: list[str], words: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("x")
    fill = {"home": home, "tmp": str(tmp_path)}
    status, out, said = ffs(*(part.format(**fill) for part in line))
    assert status == 1
    assert out == ""
    assert words.format(**fill) in said
    assert said.count("\n") == 1
    assert client.listdir(home) == []
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_get_that_fails_leaves_what_was_there(ffs, home: str, client: Client, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    client.mkdir(f"{home}/d")
    (tmp_path / "old").write_text("old")
    assert ffs("get", f"{home}/d", str(tmp_path / "old"))[0] == 1
    assert (tmp_path / "old").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_nobody_there_is_exit_3() -> None:
    run = outside("--cluster", "127.0.0.1:1", "ls")
    assert run.returncode == 3
    assert "127.0.0.1:1" in run.stderr
    assert run.stderr.count("\n") == 1


def test_no_address_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FFS_CLUSTER", raising=False)
    assert main(["ls"]) == 1
    assert "FFS_CLUSTER" in capsys.readouterr().err


# --- devices ------------------------------------------------------------------------------------------


def test_devices_are_shown_and_not_overwritten(
    cluster: Supervisor, client: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = cluster.status().nodes[0].devices[0].path
    assert main(["device", "inspect", "--json", path]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["cluster"] == client.cluster.hex()
    assert len(fields["targets"]) == cluster.status().nodes[0].devices[0].targets
    line = ["device", "format", path, "--cluster-id", "0" * 32, "--target", "1"]
    assert main(line) == 1
    assert path in capsys.readouterr().err
    stranger = tmp_path / "stranger"
    stranger.write_bytes(os.urandom(1 << 20))
    assert main(["device", "inspect", str(stranger)]) == 1
    assert "stranger" in capsys.readouterr().err


# --- up and down --------------------------------------------------------------------------------------


def _gone(run: RunFile) -> bool:
    return not any(is_alive(p.pid, p.started) for p in (run.supervisor, *run.processes))


def test_data_survives_down_and_up(tmp_path: Path) -> None:
    # Long, so that no Unix socket fits below it.
    where = tmp_path / ("long-" * 20) / "cluster"
    options = ["--dir", str(where), "--nodes", "1", "--device-size", "1GiB"]
    first = outside("up", "--detach", "--json", *options)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\n") == 1
    told = json.loads(first.stdout)
    assert told["dir"] == str(where)
    run = Directory(where).read_run()
    assert run is not None
    try:
        again = outside("up", "--detach", *options)
        assert again.returncode == 1
        assert "already up" in again.stderr
        assert told["address"] in again.stderr
        other = outside("up", "--detach", "--dir", str(where), "--nodes", "2")
        assert other.returncode == 1
        assert "--nodes 1" in other.stderr
        source = tmp_path / "source"
        source.write_bytes(os.urandom(3_000_000))
        cluster = ["--cluster", told["address"]]
        assert outside(*cluster, "put", str(source), "/kept").returncode == 0
    finally:
        down = outside("down", "--dir", str(where), "--json")
    assert down.returncode == 0, down.stderr
    assert json.loads(down.stdout)["stopped"] is True
    assert _gone(run)
    assert outside("down", "--dir", str(where)).returncode == 1
    second = outside("up", "--detach", "--json", *options)
    assert second.returncode == 0, second.stderr
    try:
        cluster = ["--cluster", json.loads(second.stdout)["address"]]
        assert outside(*cluster, "get", "/kept", str(tmp_path / "back")).returncode == 0
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
    finally:
        assert outside("down", "--dir", str(where)).returncode == 0


def test_up_with_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, secret = tmp_path / "c", tmp_path / "secret"
    options = ["--detach", "--dir", str(where), "--nodes", "1", "--device-size", "1GiB"]
    monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(secret))
    none = outside("up", *options)
    assert none.returncode == 1
    assert "that FFS_CLUSTER_SECRET_FILE names isn't there: make one with (umask 077; head" in none.stderr
    assert not where.exists()
    secret.write_bytes(os.urandom(32).hex().encode())
    secret.chmod(0o644)
    exposed = outside("up", *options)
    assert exposed.returncode == 1
    assert f"chmod 600 {secret}" in exposed.stderr
    secret.chmod(0o600)
    up = outside("up", *options)
    assert up.returncode == 0, up.stderr
    try:
        assert f"export FFS_CLUSTER_SECRET_FILE={secret}" in up.stdout
        assert "authentication is OFF" not in up.stdout
        monkeypatch.setenv("FFS_CLUSTER", up.stdout.split()[3])
        assert outside("mkdir", "/d").returncode == 0
        monkeypatch.delenv("FFS_CLUSTER_SECRET_FILE")
        refused = outside("ls")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "name the file in FFS_CLUSTER_SECRET_FILE" in refused.stderr
        assert outside("down", "--dir", str(where)).returncode == 0
        again = outside("up", "--detach", "--dir", str(where))  # with the secret of before
        assert again.returncode == 0, again.stderr
        assert outside("ls").returncode == 1
        monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(secret))
        monkeypatch.setenv("FFS_CLUSTER", again.stdout.split()[3])
        assert outside("ls").stdout == "d\n"
    finally:
        outside("down", "--dir", str(where))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_stops_cleanly(tmp_path: Path, number: int) -> None:
    where = tmp_path / "cluster"
    process = subprocess.Popen(
        [sys.executable, "-m", "ffs", "up", "--dir", str(where), "--nodes", "1", "--device-size", "1GiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "cluster up at" in line, process.communicate()
    run = Directory(where).read_run()
    assert run is not None
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert _gone(run)
    assert Directory(where).read_run() is None


def test_down_after_the_supervisor_was_killed(tmp_path: Path) -> None:
    where = tmp_path / "cluster"
    up = outside("up", "--detach", "--json", "--dir", str(where), "--nodes", "1", "--device-size", "1GiB")
    assert up.returncode == 0, up.stderr
    run = Directory(where).read_run()
    assert run is not None
    os.kill(run.supervisor.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_alive(run.supervisor.pid, run.supervisor.started) and time.monotonic() < deadline:
        time.sleep(0.01)
    again = outside("up", "--detach", "--dir", str(where))
    assert again.returncode == 1
    assert "ffs down --dir" in again.stderr
    assert outside("down", "--dir", str(where)).returncode == 0
    assert _gone(run)


def test_a_start_that_fails_leaves_only_its_logs(tmp_path: Path) -> None:
    """The storage server can't make its device: the file system says no to so large a file."""
    where = tmp_path / "cluster"
    up = outside("up", "--detach", "--dir", str(where), "--nodes", "1", "--device-size", "9000000TiB")
    assert up.returncode == 1
    assert up.stderr.count("\n") == 1
    assert f"(log: {where}/log/node0.log)" in up.stderr
    assert [entry.name for entry in where.iterdir()] == ["log"]
    assert (where / "log" / "node0.log").read_text() != ""
