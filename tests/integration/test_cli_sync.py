"""`ffs sync`: both ways and within a cluster, deletions, refusals, and runs that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ffs.cli.copying import mover
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]


def content(root: Path) -> dict[str, Any]:
    """Relative path -> content, target of a symlink, or None for a directory."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def summary(out: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert fields["action"] == "summary"
    return fields


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "a" / "b").mkdir(parents=True)
    (root / "logs").mkdir()
    for number in range(30):
        (root / "a" / f"{number:02}").write_bytes(os.urandom(number * 40))
    (root / "a" / "b" / "deep").write_text("deep")
    (root / "logs" / "1.log").write_text("log")
    (root / "link").symlink_to("a/00")
    return root


def test_there_and_back(run, home: str, tree: Path, tmp_path: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    target, back = f"ffs:{home}/t", tmp_path / "back"
    status, out, _ = run("sync", str(tree), target)
    assert status == 0
    assert "32 copied" in out
    assert out.count("\n") == 1
    assert summary(run("sync", "--json", str(tree), target)[1])["unchanged_count"] == 33
    assert run("sync", target, f"ffs:{home}/u")[0] == 0
    assert run("sync", f"ffs:{home}/u", str(back))[0] == 0
    assert content(back) == content(tree)
    assert (back / "a" / "07").stat().st_mtime_ns == (tree / "a" / "07").stat().st_mtime_ns

    (tree / "a" / "07").write_bytes(b"x" * 280)  # the same size at another time
    (tree / "a" / "08").unlink()
    (tree / "a" / "b" / "deep").unlink()
    (tree / "a" / "b").rmdir()
    (tree / "link").unlink()
    (tree / "link").symlink_to("a/01")
    (tree / "a" / "09").chmod(0o600)
    (tree / "a" / "10").unlink()
    (tree / "a" / "10").mkdir()
    assert run("sync", "--exclude", "a/10", str(tree), target)[0] == 0
    assert client.exists(f"{home}/t/a/08")
    assert run("sync", str(tree), target)[0] == 1  # a directory where a file is
    fields = summary(run("sync", "--json", "--delete", str(tree), target)[1])
    assert (fields["deleted_count"], fields["failed"]) == (2, 0)
    assert run("get", "-r", f"{home}/t", str(tmp_path / "again"))[0] == 0
    assert content(tmp_path / "again") == content(tree)
    assert client.stat(f"{home}/t/a/09").st_mode & 0o777 == 0o600
    assert run("sync", "--delete", target, str(back))[0] == 0
    assert content(back) == content(tree)


def times(root: Path) -> dict[str, int]:
    """mtimes of directories and symlinks, the root's too."""
    found = [root, *(path for path in root.rglob("*") if path.is_symlink() or path.is_dir())]
    return {str(path.relative_to(root)): path.lstat().st_mtime_ns for path in found}


def set_times(root: Path, start_ns: int) -> None:
    """Another one for each directory and symlink, all in the past."""
    for number, name in enumerate(times(root)):
        at = start_ns + number * 1_000_000_007
        os.utime(root / name, ns=(at, at), follow_symlinks=False)


def test_directories_and_symlinks_keep_their_times(
    run, home: str, tree: Path, tmp_path: Path, client: Client
) -> None:  # type: ignore[no-untyped-def]
    """Whatever happens in them, deletions too. A run that finds nothing to do changes nothing."""
    target, back = f"ffs:{home}/t", tmp_path / "back"
    (tree / "dangling").symlink_to("nowhere")
    (tree / "empty").mkdir()
    set_times(tree, 10**18)
    os.utime(tree / "logs", ns=(-5, -5))  # before 1970
    assert run("sync", str(tree), target)[0] == 0
    assert client.stat(f"{home}/t/logs").st_mtime_ns == 0
    os.utime(tree / "logs", ns=(7, 7))
    assert run("sync", str(tree), target)[0] == 0
    assert run("sync", target, str(back))[0] == 0
    assert times(back) == times(tree)

    def changed() -> dict[str, int]:
        names = [f"{home}/t/{name}" for name in times(tree)]
        return {name: client.lstat(name).st_ctime_ns for name in names}

    before = changed()
    fields = summary(run("sync", "--json", str(tree), target)[1])
    assert (fields["unchanged_count"], fields["failed"]) == (34, 0)
    assert changed() == before

    (tree / "a" / "new").write_text("new")
    (tree / "a" / "b" / "deep").unlink()
    (tree / "dangling").unlink()
    (tree / "link").unlink()
    (tree / "link").symlink_to("a/00")  # at another time
    set_times(tree, 10**17)
    client.mkdir(f"{home}/t/empty/more")
    client.open(f"{home}/t/a/b/stray", "wb").close()
    out = run("sync", "--delete", "-v", str(tree), target)[1]
    assert "linked" not in out  # it has got its time, no more
    assert run("sync", "--delete", target, str(back))[0] == 0
    (tree / "a" / "07").write_bytes(b"rewritten: its directory's time stays")
    assert run("sync", str(tree), target)[0] == 0
    assert run("sync", target, str(back))[0] == 0
    assert times(back) == times(tree)
    assert content(back) == content(tree)


def test_a_dry_run_says_it_all_and_does_nothing(run, home: str, tree: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.makedirs(f"{home}/t/gone")
    out = run("sync", "--dry-run", "--delete", str(tree), f"ffs:{home}/t")[1]
    assert out.count(" -> ") == 33
    assert f"would: deleted ffs:{home}/t/gone" in out
    assert "B/s" not in out  # nothing has moved
    assert client.listdir(f"{home}/t") == ["gone"]


def test_checksum_sees_what_size_and_time_hide(run, home: str, tree: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    target = f"ffs:{home}/t"
    assert run("sync", str(tree), target)[0] == 0
    info = (tree / "a" / "20").stat()
    (tree / "a" / "20").write_bytes(os.urandom(info.st_size))
    os.utime(tree / "a" / "20", ns=(info.st_mtime_ns, info.st_mtime_ns))
    os.utime(tree / "a" / "21")
    assert "copied" not in run("sync", "--exclude", "21", str(tree), target)[1]
    assert "1 copied" in run("sync", "--checksum", str(tree), target)[1]
    with client.open(f"{home}/t/a/20", "rb") as file:
        assert file.read() == (tree / "a" / "20").read_bytes()
    assert "copied" not in run("sync", str(tree), target)[1]  # the time of 21 was set right


def test_excluded_is_left_alone_on_both_sides(run, home: str, tree: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.makedirs(f"{home}/t/old/logs")
    client.create_many([f"{home}/t/old/logs/kept.log", f"{home}/t/old/gone"])
    assert run("sync", "--delete", "--exclude", "*.log", str(tree), f"ffs:{home}/t")[0] == 0
    assert client.listdir(f"{home}/t/logs") == []
    assert client.listdir(f"{home}/t/old") == ["logs"]
    assert client.listdir(f"{home}/t/old/logs") == ["kept.log"]


def test_links_are_never_followed_out_of_the_target(run, home: str, tree: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").symlink_to(outside)
    (target / "extra").symlink_to(outside)
    assert run("sync", str(tree), f"ffs:{home}/t")[0] == 0
    assert run("sync", "--delete", f"ffs:{home}/t", str(target))[0] == 0
    assert content(target) == content(tree)
    assert os.listdir(outside) == ["precious"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["{tmp}/none", "ffs:{home}/t", "--delete"], "{tmp}/none"),
        (["{tmp}/empty", "ffs:{home}", "--delete"], "--allow-empty"),
        (["{tmp}/tree", "ffs:/", "--delete"], "root"),
        (["{tmp}/tree/link", "ffs:{home}/t"], "ffs cp"),
        (["ffs:{home}", "ffs:{home}/in"], "lies in"),
        (["ffs:{home}/in", "ffs:{home}"], "lies in"),
        (["{tmp}/tree", "{tmp}/other"], "both local"),
    ],
)
def test_refusals(
    run, home: str, tree: Path, tmp_path: Path, client: Client, line: list[str], words: str
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "empty").mkdir()
    client.makedirs(f"{home}/in/kept")
    fill = {"home": home, "tmp": str(tmp_path)}
    status, _, said = run("sync", *(part.format(**fill) for part in line))
    assert status == 1
    assert words.format(**fill) in said
    assert said.count("\n") == 1
    assert client.listdir(f"{home}/in") == ["kept"]
    assert client.listdir(home) == ["in"]


def test_nothing_is_deleted_after_a_failure(run, home: str, tree: Path, client: Client, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    client.makedirs(f"{home}/t/a/00/in-the-way")
    client.makedirs(f"{home}/t/gone")
    monkeypatch.setattr(mover.Mover, "_move_small", _refuse)
    status, _, said = run("sync", "--delete", str(tree), f"ffs:{home}/t")
    assert status == 1
    assert "nothing was deleted" in said
    assert client.exists(f"{home}/t/gone")


def _refuse(self: mover.Mover, item: mover.Item, reader: Any, writer: Any) -> None:
    self._report(item, OSError(5, "no"))


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_killed_run_is_gone_on_with(
    run, address: str, home: str, client: Client, tmp_path: Path, direction: str
) -> None:  # type: ignore[no-untyped-def]
    tree, target = tmp_path / "many", f"ffs:{home}/t"
    tree.mkdir()
    for number in range(600):
        (tree / f"{number:04}").write_bytes(os.urandom(20_000))
    source: str = str(tree)
    if direction == "down":
        assert run("sync", source, target)[0] == 0
        source, target = target, str(tmp_path / "back")
    process = subprocess.Popen(
        [sys.executable, "-m", "ffs", "--cluster", address, "sync", "--json", source, target],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for _ in range(60):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()

    def there() -> list[str]:
        return client.listdir(f"{home}/t") if direction == "up" else os.listdir(target)

    names = [name for name in there() if not name.startswith(".")]
    assert 59 <= len(names) < 600
    for name in names:  # whole, or not there
        path = f"{home}/t/{name}" if direction == "up" else os.path.join(target, name)
        assert (client.stat(path) if direction == "up" else os.stat(path)).st_size == 20_000
    time.sleep(0.1)  # the system takes the process off its table
    fields = summary(run("sync", "--json", source, target)[1])
    assert fields["failed"] == 0
    assert fields["copied_count"] + fields["unchanged_count"] == 600
    assert fields["unchanged_count"] >= len(names)
    assert sorted(there()) == [f"{number:04}" for number in range(600)]
    if direction == "down":
        assert content(Path(target)) == content(tree)
    assert "600 unchanged" in run("sync", "--checksum", source, target)[1]


def test_ctrl_c_leaves_nothing_half(run, address: str, home: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tree = tmp_path / "many"
    tree.mkdir()
    for number in range(400):
        (tree / f"{number:04}").write_bytes(bytes(20_000))
    assert run("put", "-r", str(tree), home)[0] == 0
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ffs",
            "--cluster",
            address,
            "get",
            "-r",
            "--json",
            f"{home}/many",
            str(tmp_path / "b"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b"ffs: stopped\n")
    names = os.listdir(tmp_path / "b")
    assert 19 <= len(names) < 400
    assert not [name for name in names if name.startswith(".")]
    assert {(tmp_path / "b" / name).stat().st_size for name in names} == {20_000}
