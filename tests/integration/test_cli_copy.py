"""cp, put, get: trees, batches, links, attributes, patterns, part files; compared with what cp does."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ffs.cli.copying import mover
from ffs.client.client import Client
from ffs.errors import DeviceFailed, NoSpace


def tree_of(root: Path) -> dict[str, tuple[Any, ...]]:
    """What a tree is: relative path -> type, mode, content or target."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir", mode)
        else:
            found[name] = ("file", mode, path.read_bytes())
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with what trees have."""
    root = tmp_path / "tree"
    (root / "a" / "b").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "closed").mkdir()
    for number in range(150):
        (root / "a" / f"{number:03}").write_bytes(os.urandom(number * 17 % 5000))
    (root / "a" / "b" / "large").write_bytes(os.urandom((9 << 20) + 1234))
    (root / "a" / "b" / "strange \n*\\name").write_text("x")
    (root / "closed" / "inside").write_text("seen")
    (root / "link").symlink_to("a/000")
    (root / "dirlink").symlink_to("a")
    (root / "a" / "000").chmod(0o600)
    (root / "a" / "001").chmod(0o755)
    (root / "closed").chmod(0o555)
    return root


def cp(*line: str) -> None:
    subprocess.run(["cp", *line], check=True, timeout=60)


@pytest.mark.parametrize("options", [["-r"], ["-r", "-L"], ["-a"]])
def test_a_tree_comes_back_as_cp_would_have_copied_it(
    run, home: str, tree: Path, tmp_path: Path, options: list[str]
) -> None:  # type: ignore[no-untyped-def]
    assert run("put", *options, str(tree), f"{home}/t")[0] == 0
    assert run("get", *options, f"{home}/t", str(tmp_path / "back"))[0] == 0
    cp(*options, str(tree), str(tmp_path / "peer"))
    assert tree_of(tmp_path / "back") == tree_of(tmp_path / "peer")
    if options == ["-a"]:
        for name in ("a/b/large", "a/000", "a", "closed"):
            assert (tmp_path / "back" / name).stat().st_mtime_ns == (tree / name).stat().st_mtime_ns
    assert run("cp", *options, f"ffs:{home}/t", f"ffs:{home}/u")[0] == 0
    assert run("get", *options, f"{home}/u", str(tmp_path / "again"))[0] == 0
    assert tree_of(tmp_path / "again") == tree_of(tmp_path / "back")
    (tree / "closed").chmod(0o755)


def test_into_a_directory_or_as_a_name(run, home: str, tree: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.mkdir(f"{home}/d")
    assert run("put", "-r", str(tree / "a"), str(tree / "empty"), f"{home}/d")[0] == 0
    assert client.listdir(f"{home}/d") == ["a", "empty"]
    assert run("put", "-rT", str(tree / "a"), f"{home}/d")[0] == 0
    assert "000" in client.listdir(f"{home}/d")


def test_patterns_on_the_cluster(run, home: str, client: Client, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    client.makedirs(f"{home}/run1/deep")
    client.makedirs(f"{home}/run2")
    names = ["run1/a.bin", "run1/b.bin", "run1/.h.bin", "run1/deep/c.bin", "run2/[x].bin", "run2/d.txt"]
    client.create_many([f"{home}/{name}" for name in names])
    got = tmp_path / "got"
    got.mkdir()
    assert run("get", f"{home}/run*/?.bin", str(got))[0] == 0
    assert sorted(os.listdir(got)) == ["a.bin", "b.bin"]
    assert run("ls", "-d", f"{home}/**/*.bin")[1].split() == [
        f"{home}/run1/a.bin",
        f"{home}/run1/b.bin",
        f"{home}/run1/deep/c.bin",
        f"{home}/run2/[x].bin",
    ]
    assert run("rm", f"{home}/run2/\\[x].bin") == (0, "", "")
    assert client.listdir(f"{home}/run2") == ["d.txt"]
    status, _, said = run("rm", f"{home}/*.none")
    assert (status, said.count("\n")) == (1, 1)
    assert f"{home}/*.none" in said
    client.mknod(f"{home}/*")
    assert run("rm", "--literal", f"{home}/*")[0] == 0
    assert client.listdir(home) == ["run1", "run2"]


def test_n_i_u_and_dry_run(run, home: str, tree: Path, client: Client, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first, second = str(tree / "a" / "010"), str(tree / "a" / "020")
    assert run("put", first, f"{home}/x")[0] == 0

    def content() -> bytes:
        with client.open(f"{home}/x", "rb") as file:
            return bytes(file.read())

    assert run("put", "-n", second, f"{home}/x")[0] == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert run("put", "-i", second, f"{home}/x")[0] == 0
    assert run("put", "--dry-run", second, f"{home}/x")[1] == f"would: {second} -> ffs:{home}/x\n"
    client.utime(f"{home}/x", ns=(0, 1 << 62))
    assert run("put", "-u", second, f"{home}/x")[0] == 0
    assert content() == Path(first).read_bytes()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run("put", "-i", second, f"{home}/x")[0] == 0
    assert content() == Path(second).read_bytes()
    client.chmod(f"{home}/x", 0o604)
    assert run("put", first, f"{home}/x")[0] == 0
    assert stat.S_IMODE(client.stat(f"{home}/x").st_mode) == 0o604
    rows = [json.loads(line) for line in run("put", "--json", first, f"{home}/y")[1].splitlines()]
    assert [row["action"] for row in rows] == ["copied", "summary"]
    assert rows[0]["target"] == f"ffs:{home}/y"


def test_one_bad_file_stops_nothing_else(run, home: str, tree: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.makedirs(f"{home}/t/a/005")
    os.mkfifo(tree / "a" / "pipe")
    status, _, said = run("put", "-r", str(tree), f"{home}/t", "-T")
    assert status == 1
    assert said.count("\n") == 2
    assert "pipe" in said
    assert "005" in said
    assert len(client.listdir(f"{home}/t/a")) == 151
    status, _, said = run("put", str(tree / "none"), str(tree / "a" / "001"), f"{home}/t")
    assert status == 1
    assert said.count("\n") == 1
    assert client.exists(f"{home}/t/001")


def test_what_leads_round_in_circles_ends(run, home: str, tmp_path: Path, client: Client) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "t" / "d").mkdir(parents=True)
    (tmp_path / "t" / "d" / "up").symlink_to("..")
    status, _, said = run("put", "-rL", str(tmp_path / "t"), home)
    assert status == 1
    assert "leads back" in said


def test_stdin(run, home: str, client: Client, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    data = os.urandom(100_000)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run("put", "-", f"{home}/x")[0] == 0
    with client.open(f"{home}/x", "rb") as file:
        assert file.read() == data


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files are smaller here, so that few bytes make many pieces."""
    monkeypatch.setattr(mover, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(mover, "SMALL_BYTES", 1 << 16)
    monkeypatch.setattr(mover, "PART_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_large_copy_goes_on_where_it_was_stopped(
    run, home: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:  # type: ignore[no-untyped-def]
    local, data = tmp_path / "large", os.urandom(3_000_000)
    local.write_bytes(data)
    source, target = str(local), f"{home}/large"
    if verb == "get":
        assert run("put", "-p", source, target)[0] == 0
        source, target = target, str(tmp_path / "d" / "back")
        (tmp_path / "d").mkdir()
    whole = mover.Mover._piece
    moved: list[int] = []

    def piece(self: Any, reader: Any, writer: Any, offset: int, size: int) -> int:
        if offset >= 2_000_000 and not moved.count(-1):
            moved.append(-1)
            raise DeviceFailed("enough for now", source)
        moved.append(offset)
        return whole(self, reader, writer, offset, size)

    monkeypatch.setattr(mover.Mover, "_piece", piece)
    status, _, said = run(verb, "--resume", source, target)
    assert (status, "enough for now" in said) == (1, True)
    listing = client.listdir(home) if verb == "put" else os.listdir(tmp_path / "d")
    assert [name for name in listing if name.endswith(".ffs-part")]
    assert not [name for name in listing if name in ("back", "large") and verb == "get"]
    moved[:] = [-1]
    assert run(verb, "--resume", source, target) == (0, "", "")
    assert len(moved) < 25  # of 46
    assert min(moved[1:]) > 1_000_000
    if verb == "put":
        with client.open(target, "rb") as file:
            assert file.read() == data
        assert client.listdir(home) == ["large"]
    else:
        assert Path(target).read_bytes() == data
        assert os.listdir(tmp_path / "d") == ["back"]
    moved[:] = [-1]
    assert run(verb, "--resume", source, target) == (0, "", "")
    assert moved == [-1]


@pytest.mark.usefixtures("small_parts")
def test_a_copy_that_fails_leaves_nothing(
    run, home: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "new").write_bytes(os.urandom(2_000_000))
    with client.open(f"{home}/x", "wb") as file:
        file.write(b"old")

    def piece(self: Any, reader: Any, writer: Any, offset: int, size: int) -> int:
        if offset > 1_000_000:
            raise DeviceFailed("broken")
        return whole(self, reader, writer, offset, size)

    whole = mover.Mover._piece
    monkeypatch.setattr(mover.Mover, "_piece", piece)
    status, _, said = run("put", str(tmp_path / "new"), f"{home}/x")
    assert (status, said) == (1, f"ffs put: ffs:{home}/x: broken\n")
    with client.open(f"{home}/x", "rb") as file:
        assert file.read() == b"old"
    assert client.listdir(home) == ["x"]


def test_a_run_without_room_is_given_up(
    run, home: str, client: Client, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    tried: list[str] = []

    def move(self: Any, item: mover.Item, reader: Any, writer: Any) -> None:
        tried.append(item.target)
        self._report(item, NoSpace("no space left"))

    monkeypatch.setattr(mover.Mover, "_move_small", move)
    status, _, said = run("put", "-r", str(tree), home)
    assert status == 1
    assert said.count("no space left") == 1
    assert "--resume" in said.splitlines()[-1]
    assert len(tried) < 100
    status, out, said = run("sync", str(tree), f"ffs:{home}/t")
    assert (status, out) == (1, "")
    assert said.count("\n") == 2
    (tree / "closed").chmod(0o755)


def test_a_tree_isnt_written_through_a_link_inside_the_target(  # type: ignore[no-untyped-def]
    run, home: str, client: Client, tmp_path: Path
) -> None:
    client.makedirs(f"{home}/t/x")
    client.mknod(f"{home}/t/x/file")
    (tmp_path / "victim").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").symlink_to(tmp_path / "victim")
    status, _, err = run("get", "-r", f"{home}/t/.", str(tmp_path / "out"))
    assert status == 1
    assert "isn't a directory" in err
    assert os.listdir(tmp_path / "victim") == []
    # The target itself may be named by a link.
    (tmp_path / "named").symlink_to(tmp_path / "victim")
    assert run("get", "-r", f"{home}/t/.", str(tmp_path / "named"))[0] == 0
    assert (tmp_path / "victim" / "x" / "file").exists()


def test_a_link_in_a_circle_hinders_no_pattern(run, home: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.symlink("loop", f"{home}/loop")
    client.mknod(f"{home}/a.txt")
    assert run("rm", f"{home}/*.txt") == (0, "", "")
    assert client.listdir(home) == ["loop"]


def test_json_of_a_name_that_isnt_utf8(run, home: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    client.mknod(f"{home}/\udcff")
    client.mknod(f"{home}/ä")
    lines = run("ls", "--json", home)[1].splitlines()
    assert sorted(json.loads(line)["path"] for line in lines) == [f"{home}/ä", f"{home}/\udcff"]
    assert all(line.encode() for line in lines)  # no raw byte, which would be no UTF-8
