"""find, tree, ln, chmod, chown, touch, truncate, head, tail, readlink, rmdir, checksum, trash and restore."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffs.client.client import Client

ROOT = Path(__file__).parents[2]


@pytest.fixture
def filled(client: Client, home: str) -> str:
    """A directory of the store with a few things in it."""
    client.makedirs(f"{home}/a/b")
    client.mkdir(f"{home}/empty")
    for name, data in (
        ("x.bin", b"x" * 5000),
        ("a/y.txt", b"1\n2\n3\n"),
        ("a/b/z.bin", b""),
        ("a/b/.h", b"h"),
    ):
        with client.open(f"{home}/{name}", "wb") as file:
            file.write(data)
    client.symlink("a/b", f"{home}/link")
    return home


def mode(client: Client, path: str) -> int:
    return stat.S_IMODE(client.lstat(path).st_mode)


def test_find(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    def found(*options: str) -> list[str]:
        status, out, said = run("find", filled, *options)
        assert (status, said) == (0, "")
        return [path.removeprefix(filled) for path in out.splitlines()]

    assert found() == ["", "/a", "/a/b", "/a/b/.h", "/a/b/z.bin", "/a/y.txt", "/empty", "/link", "/x.bin"]
    assert found("-name", "*.bin") == ["/a/b/z.bin", "/x.bin"]
    assert found("-iname", "*.BIN", "-size", "+4k") == ["/x.bin"]
    assert found("-size", "-1k", "-type", "f") == ["/a/b/z.bin"]
    assert found("-empty") == ["/a/b/z.bin", "/empty"]
    assert found("-type", "l") == ["/link"]
    assert found("-mindepth", "1", "-maxdepth", "1", "-type", "d") == ["/a", "/empty"]
    assert found("-depth", "-name", "[ab]") == ["/a/b", "/a"]
    assert found("-prune", "b", "-path", "*/a/*") == ["/a/y.txt"]
    client.utime(f"{filled}/a/y.txt", ns=(0, time.time_ns() + 10**11))
    client.utime(f"{filled}/x.bin", ns=(0, time.time_ns() + 10**12))
    assert found("-newer", f"{filled}/a/y.txt", "-type", "f", "-mmin", "-1") == ["/x.bin"]
    out = run("find", filled, "-name", "x*", "-print0")[1]
    assert out == f"{filled}/x.bin\0"
    assert json.loads(run("find", filled, "-name", "x*", "--json")[1])["size"] == 5000
    assert run("find", filled, "-name", "*.bin", "-delete", "--dry-run")[1].count("would: remove") == 2
    assert found("-name", "*.bin", "-delete") == []
    assert found("-mindepth", "1", "-delete") == []
    assert found() == [""]
    assert run("find", filled + "/none")[0] == 1


def test_a_terminal_gets_names_quoted_and_a_pipe_as_they_are(run, home: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    odd = "x\x1b]0;owned\x07\ny"
    client.mkdir(f"{home}/d")
    client.mknod(f"{home}/d/{odd}")
    client.symlink(odd, f"{home}/d/link")
    assert run("ls", f"{home}/d")[1] == f"link\n{odd}\n"
    assert run("find", f"{home}/d", "-type", "f")[1] == f"{home}/d/{odd}\n"
    assert json.loads(run("ls", "--json", f"{home}/d")[1].splitlines()[1])["path"] == f"{home}/d/{odd}"

    script = ";".join(f"ffs.cli.main({line!r})" for line in (
        ["ls", f"{home}/d"], ["ls", "-l", f"{home}/d"], ["find", home], ["tree", home], ["du", home],
        ["stat", f"{home}/d/link"], ["rm", f"{home}/d/{odd}/x"],
        ["mv", "-v", f"{home}/d/{odd}", f"{home}/{odd}"],
    ))  # fmt: skip
    shell, terminal = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", f"import ffs.cli; {script}"], stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    said = b""
    while True:
        try:
            said += os.read(shell, 65536)
        except OSError:  # the last of the other end is gone
            break
    os.close(shell)
    assert child.wait() == 0
    assert not set(said) & {0x1B, 0x07}
    text = said.decode().replace("\r\n", "\n")
    shown = "'x'$'\\033'']0;owned'$'\\a\\n''y'"
    assert text.splitlines()[0].split() == ["link", shown]
    assert f" link -> {shown}\n" in text
    assert f"└── {shown}\n" in text
    assert f"leads to  {shown}\n" in text
    assert f"'{home}/d/x'$'\\033'']0;owned'$'\\a\\n''y'\n" in text


def test_tree(run, filled: str) -> None:  # type: ignore[no-untyped-def]
    out = run("tree", filled)[1].splitlines()
    assert out == [
        filled,
        "├── a/",
        "│   ├── b/",
        "│   │   ├── .h",
        "│   │   └── z.bin",
        "│   └── y.txt",
        "├── empty/",
        "├── link -> a/b",
        "└── x.bin",
        "",
        "3 directories, 5 files",
    ]
    assert run("tree", "-d", "-L", "1", filled)[1].splitlines()[1:3] == ["├── a/", "└── empty/"]
    root = json.loads(run("tree", "--json", filled)[1])
    assert [child["path"] for child in root["children"]] == [
        f"{filled}/{n}" for n in ("a", "empty", "link", "x.bin")
    ]


def test_chmod_and_chown(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    assert run("chmod", "-R", "u=rwX,go=", f"{filled}/a")[0] == 0
    assert mode(client, f"{filled}/a") == 0o700
    assert mode(client, f"{filled}/a/b/z.bin") == 0o600
    assert run("chmod", "-v", "+x", f"{filled}/*.bin")[1] == f"{filled}/x.bin: 0644 -> 0755\n"
    assert run("chmod", "--dry-run", "000", f"{filled}/x.bin")[1] == f"would: {filled}/x.bin: 0755 -> 0000\n"
    assert mode(client, f"{filled}/x.bin") == 0o755
    status, _, said = run("chmod", "u+q", f"{filled}/x.bin")
    assert (status, "isn't a mode" in said) == (1, True)
    if os.geteuid() == 0:
        assert run("chown", "-R", "12:34", f"{filled}/a")[0] == 0
        info = client.stat(f"{filled}/a/b/.h")
        assert (info.st_uid, info.st_gid) == (12, 34)
        assert run("chown", "-n", "7", f"{filled}/link")[0] == 0
        assert client.lstat(f"{filled}/link").st_uid == 7
        assert client.stat(f"{filled}/link").st_uid == 12


def test_ln_and_readlink(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    assert run("ln", f"{filled}/x.bin", f"{filled}/also")[0] == 0
    assert client.stat(f"{filled}/also").st_nlink == 2
    assert run("ln", "-s", "../x.bin", f"{filled}/a")[0] == 0
    assert client.readlink(f"{filled}/a/x.bin") == "../x.bin"
    assert run("readlink", f"{filled}/a/x.bin") == (0, "../x.bin\n", "")
    assert run("readlink", "-f", f"{filled}/link/../x.bin")[1] == f"{filled}/a/x.bin\n".replace("/a/x", "/x")
    status, _, said = run("ln", "-s", "elsewhere", f"{filled}/also")
    assert (status, "-f replaces it" in said) == (1, True)
    assert run("ln", "-sf", "elsewhere", f"{filled}/also")[0] == 0
    assert client.readlink(f"{filled}/also") == "elsewhere"
    assert run("ln", "-sfn", "empty", f"{filled}/link")[0] == 0
    assert client.readlink(f"{filled}/link") == "empty"
    assert run("ln", f"{filled}/a", f"{filled}/hard")[0] == 1
    assert sorted(client.listdir(filled)) == ["a", "also", "empty", "link", "x.bin"]
    client.symlink("round", f"{filled}/round")
    assert run("readlink", "-f", f"{filled}/round")[0] == 1


def test_touch_and_truncate(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    assert run("touch", "-c", f"{filled}/new")[0] == 0
    assert not client.exists(f"{filled}/new")
    assert run("touch", "-d", "@1000.5", f"{filled}/new", f"{filled}/x.bin")[0] == 0
    assert client.stat(f"{filled}/new").st_mtime_ns == 1_000_500_000_000
    assert client.getsize(f"{filled}/x.bin") == 5000
    assert run("touch", "-r", f"{filled}/new", f"{filled}/a/y.txt")[0] == 0
    assert client.stat(f"{filled}/a/y.txt").st_mtime_ns == 1_000_500_000_000
    assert run("truncate", "-s", "1k", f"{filled}/x.bin", f"{filled}/t")[0] == 0
    assert client.getsize(f"{filled}/t") == 1024
    assert run("truncate", "-s", "-24", f"{filled}/x.bin")[0] == 0
    assert client.getsize(f"{filled}/x.bin") == 1000
    assert run("truncate", "-s", "+1k", f"{filled}/x.bin")[0] == 0
    assert client.getsize(f"{filled}/x.bin") == 2024


@pytest.mark.parametrize(
    "options",
    ["", "-n 2", "-n -2", "-n +2", "-n 0", "-c 7", "-c -7", "-c +7", "-n 500", "-c 70000", "-n -500"],
)
@pytest.mark.parametrize("verb", ["head", "tail"])
@pytest.mark.parametrize("data", [b"", b"a", b"a\n", b"1\n2\n3", b"x" * 70_000 + b"\n" + b"l\n" * 40_000])
def test_head_and_tail_say_what_theirs_say(
    address: str,
    home: str,
    client: Client,
    tmp_path: Path,
    verb: str,
    options: list[str],
    data: bytes,
    capfdbinary,
) -> None:  # type: ignore[no-untyped-def]
    from ffs.cli import main

    words = (options.replace("+", "") if verb == "head" else options).split()
    (tmp_path / "f").write_bytes(data)
    with client.open(f"{home}/f", "wb") as file:
        file.write(data)
    assert main(["--cluster", address, verb, *words, f"{home}/f"]) == 0
    mine = capfdbinary.readouterr().out
    assert mine == subprocess.run([verb, *words, str(tmp_path / "f")], capture_output=True, check=True).stdout


def test_tail_follows(address: str, home: str, client: Client) -> None:
    with client.open(f"{home}/log", "w") as file:
        file.write("one\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "ffs", "--cluster", address, "tail", "-f", f"{home}/log"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "one\n"
    with client.open(f"{home}/log", "a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n"
    with client.open(f"{home}/log", "w", atomic=True) as file:
        file.write("new\n")
    assert process.stdout.readline() == "new\n"
    process.send_signal(2)
    assert process.wait(30) == 130
    process.communicate()


def test_rm_rmdir_mkdir_mv(run, filled: str, client: Client, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert run("rmdir", f"{filled}/a")[0] == 1
    assert run("mkdir", "-p", "-m", "750", f"{filled}/p/q/r")[0] == 0
    assert mode(client, f"{filled}/p/q/r") == 0o750
    assert run("rmdir", "-p", f"{filled}/p/q/r", "-v")[0] == 0
    assert not client.exists(f"{filled}/p")
    assert run("rm", "--dry-run", "-r", f"{filled}/a", f"{filled}/x.bin")[1].count("would:") == 2
    assert run("rm", f"{filled}/none", f"{filled}/x.bin")[0] == 1
    assert not client.exists(f"{filled}/x.bin")
    monkeypatch.setattr("sys.stdin", type("Input", (), {"readline": staticmethod(lambda: "n\n")}))
    assert run("rm", "-ri", f"{filled}/a")[0] == 0
    assert client.exists(f"{filled}/a")
    assert run("mv", "--exchange", f"{filled}/a", f"{filled}/empty")[0] == 0
    assert client.listdir(f"{filled}/empty") == ["b", "y.txt"]
    assert run("mv", f"{filled}/empty/*", f"{filled}/a")[0] == 0
    assert client.listdir(f"{filled}/a") == ["b", "y.txt"]
    assert run("mv", "--dry-run", f"{filled}/a/y.txt", f"{filled}/a/w")[1].startswith("would: ")
    assert run("rm", "-rf", f"{filled}/*", f"{filled}/none*")[0] in (0, 1)


def test_checksum(run, filled: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "x").write_bytes(b"x" * 5000)
    line = run("checksum", f"{filled}/x.bin")[1]
    assert line == f"{hashlib.sha256(b'x' * 5000).hexdigest()}  {filled}/x.bin\n"
    fields = json.loads(run("checksum", "--json", "--algorithm", "md5", f"{filled}/x.bin")[1])
    assert fields["checksum"] == hashlib.md5(b"x" * 5000).hexdigest()


# --- the trash --------------------------------------------------------------------------------------------


def in_trash(run, home: str) -> list[dict[str, object]]:  # type: ignore[no-untyped-def]
    rows = [json.loads(line) for line in run("trash", "list", "--json", f"{home}/**")[1].splitlines()]
    return [row for row in rows if str(row["path"]).startswith(home + "/")]


def test_trash_and_restore(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    before = client.stat(f"{filled}/a")
    assert run("trash", "-v", f"{filled}/a", f"{filled}/link", f"{filled}/*.bin")[0] == 0
    assert client.listdir(filled) == ["empty"]
    assert [row["path"] for row in in_trash(run, filled)] == [f"{filled}/{n}" for n in ("a", "link", "x.bin")]
    assert "2 entries" in run("trash", "list", f"{filled}/a")[1]
    client.mkdir(f"{filled}/a")
    status, _, said = run("restore", f"{filled}/a")
    assert (status, "something else is there" in said) == (1, True)
    client.rmdir(f"{filled}/a")
    assert run("restore", f"{filled}/a", f"{filled}/link")[0] == 0
    after = client.stat(f"{filled}/a")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert client.readlink(f"{filled}/link") == "a/b"
    assert [row["path"] for row in in_trash(run, filled)] == [f"{filled}/x.bin"]
    assert run("restore", f"{filled}/x.bin", "--to", f"{filled}/empty")[0] == 0
    assert client.getsize(f"{filled}/empty/x.bin") == 5000
    assert in_trash(run, filled) == []
    status, _, said = run("restore", f"{filled}/x.bin")
    assert (status, "isn't in the trash" in said) == (1, True)


def test_the_same_name_twice_and_parents(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    for text in ("first", "second"):
        with client.open(f"{filled}/a/b/%ü\n", "w") as file:
            file.write(text)
        assert run("trash", f"{filled}/a/b/%ü\n")[0] == 0
    assert run("trash", f"{filled}/a")[0] == 0
    status, _, said = run("restore", f"{filled}/a/b/%ü\n")
    assert (status, "-p makes it" in said) == (1, True)
    assert run("restore", "-p", f"{filled}/a/b/%ü\n")[0] == 0
    with client.open(f"{filled}/a/b/%ü\n") as file:
        assert file.read() == "second"
    status, _, said = run("restore", f"{filled}/a/b/%ü\n")
    assert (status, "something else" in said) == (1, True)
    assert len(in_trash(run, filled)) == 2
    assert (
        run("trash", "empty", "-f", "--older-than", "1h", f"{filled}/**")[1] == "0 things removed for good\n"
    )
    assert run("trash", "empty", "-f", "--dry-run", f"{filled}/**")[1].count("would:") == 2
    assert run("trash", "empty", "-f", f"{filled}/**")[1] == "2 things removed for good\n"
    assert in_trash(run, filled) == []


def test_what_the_trash_refuses(run, filled: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    assert run("trash", f"{filled}/x.bin")[0] == 0
    for path, words in (("/", "no name"), (f"{filled}/a/..", "no name"), ("/.trash", "trash itself"),
                        ("/.trash/0/files", "trash itself"), (f"{filled}/none", "none")):  # fmt: skip
        status, _, said = run("trash", path)
        assert (status, words in said) == (1, True), path
    assert run("trash", "-f", f"{filled}/none") == (0, "", "")
    assert run("trash", "--older-than", "7d", f"{filled}/a")[0] == 1
    assert client.exists(f"{filled}/a")
    assert mode(client, "/.trash") == 0o1777
    assert mode(client, f"/.trash/{os.geteuid()}") == 0o700


def test_what_others_put_into_a_trash_is_left_alone(run, home: str, client: Client) -> None:  # type: ignore[no-untyped-def]
    """A user can make links in a trash of his own; root, who empties it, must not follow them."""
    client.makedirs(f"{home}/precious")
    client.mknod(f"{home}/precious/data")
    client.makedirs("/.trash/4711/info", exist_ok=True)
    with client.open("/.trash/4711/info/data.trashinfo", "w") as file:
        file.write("[Trash Info]\nPath=/gone\nDeletionDate=2001-01-01T00:00:00\n")
    client.symlink(f"{home}/precious", "/.trash/4711/files")
    for path in ("/.trash/4711", "/.trash/4711/info", "/.trash/4711/files"):
        client.chown(path, 4711, 4711, follow_symlinks=False)
    try:
        status, _, err = run("trash", "empty", "--all", "-f")
        assert status == 1
        assert "/.trash/4711/files: isn't a directory of the user" in err
        assert client.listdir(f"{home}/precious") == ["data"]
    finally:
        client.rmtree("/.trash/4711")
