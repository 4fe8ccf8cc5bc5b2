"""`ffs shell` from a script and on a terminal; completion in real shells."""

from __future__ import annotations

import io
import os
import pty
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ffs.cli import build_parser, location, main
from ffs.cli.completion import bash_script, zsh_script
from ffs.cli.grammar import read_grammar
from ffs.cli.shell import history_path, quoted, unquoted, word_start
from ffs.client.client import Client

ROOT = Path(__file__).parents[2]

Script = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(run, monkeypatch: pytest.MonkeyPatch) -> Script:  # type: ignore[no-untyped-def]
    """Runs lines through `ffs shell`: (status, stdout, stderr)."""

    def lines(*words: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(words) + "\n"))
        return run("shell", *options)

    return lines


def test_a_script(script: Script, home: str, client: Client, tmp_path: Path) -> None:
    (tmp_path / "my file").write_text("content")
    status, out, said = script(
        f"cd {home}  # the test's own",
        "mkdir -p a/b",
        f"lcd {tmp_path}",
        "put 'my file' a/b/",
        'cp "my file" ffs:a/copy',
        "cd a",
        "pwd",
        "ls",
        "cat b/my\\ file ./copy",
        "cd ..",
        "",
        "mv a/copy a/b/../moved",
        "find -type f",
        "cd -",
        "du -sb b",
        "get moved here",
        "lpwd",
    )
    assert (status, said) == (0, "")
    assert out.split("\n") == [
        f"{home}/a", "b", "copy", f"contentcontent{home}/a/b/my file", f"{home}/a/moved", f"7\t{home}/a/b",
        str(tmp_path), "",
    ]  # fmt: skip
    assert (tmp_path / "here").read_text() == "content"
    assert location.current is None


def test_a_script_stops_at_the_first_error_unless_told(script: Script, home: str, client: Client) -> None:
    status, _, said = script(f"cd {home}", "mkdir a", "rm none", "mkdir b")
    assert status == 1
    assert f"{home}/none" in said
    assert client.listdir(home) == ["a"]
    status, _, said = script(
        f"cd {home}", "no-such-verb", "cd nowhere", "cat 'x", "mkdir b", "exit", "mkdir c", options=("-k",)
    )
    assert status == 2
    assert "invalid choice" in said
    assert "nowhere" in said
    assert "No closing quotation" in said
    assert client.listdir(home) == ["a", "b"]
    assert script("ls --no-such-option")[0] == 2
    assert script("shell")[0] == 1
    assert script("exit 7")[0] == 7


def test_one_session_for_all_commands(script: Script, home: str, client: Client) -> None:
    names = [f"mkdir {home}/{number}" for number in range(50)]
    before = time.monotonic()
    assert script(*names)[0] == 0
    assert len(client.listdir(home)) == 50
    assert time.monotonic() - before < 60


def test_nobody_there() -> None:
    assert main(["--cluster", "127.0.0.1:1", "shell"]) == 3
    assert main(["__complete", "--cluster", "127.0.0.1:1", "--", "/a"]) == 0


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *line: str, **environment: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(environment, TERM="dumb", COLUMNS="200")
            os.execvp(line[0], line)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str, seconds: float = 30) -> str:
        """Wait until `text` is shown; returns what came before."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} doesn't come: {self.seen!r}"
            if select.select([self.fd], [], [], left)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    assert text in self.seen, f"{text!r} didn't come: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def end(self) -> int:
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_on_a_terminal(address: str, home: str, client: Client, tmp_path: Path) -> None:
    client.makedirs(f"{home}/some directory/inner")
    history = tmp_path / "history"
    environment = {"FFS_CLUSTER": address, "FFS_HISTORY": str(history), "PYTHONPATH": str(ROOT)}
    terminal = Terminal(sys.executable, "-m", "ffs", "shell", **environment)
    terminal.expect("ffs:/> ")
    terminal.type(f"cd {home[:-1]}{home[-1]}/so\t")
    terminal.expect("some\\ directory/")
    terminal.type("inn\t\n")
    terminal.expect(f"ffs:'{home}/some directory/inner'> ")
    terminal.type(f"cd '{home}/some dir\t\n")
    terminal.expect("No closing quotation")
    terminal.expect("> ")
    terminal.type("cat none\n")
    terminal.expect("ffs cat:")
    terminal.expect("> ")
    terminal.type("touc\tfresh\n")
    terminal.expect("touch fresh")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert client.listdir(f"{home}/some directory/inner") == ["fresh"]
    assert "touch fresh" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_history_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FFS_HISTORY", "")
    assert history_path() is None
    monkeypatch.setenv("FFS_HISTORY", str(tmp_path / "none" / "h"))
    assert history_path() is None
    (tmp_path / "h").write_text("x")
    (tmp_path / "h").chmod(0o644)
    monkeypatch.setenv("FFS_HISTORY", str(tmp_path / "h"))
    assert history_path() == str(tmp_path / "h")
    assert stat.S_IMODE((tmp_path / "h").stat().st_mode) == 0o600
    monkeypatch.delenv("FFS_HISTORY")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_path() == str(tmp_path / ".ffs_history")


@pytest.mark.parametrize("path", ["/a", "/a b/", "/it's", '/"q"', "/tab\there", "/back\\slash", "/ü*?[x]"])
def test_quoting_there_and_back(path: str) -> None:
    assert unquoted(quoted(path).rstrip(" ")) == path or path.endswith(" ")
    assert unquoted(f"'{path[:3]}") == path[:3] or "'" in path
    line = "cp -r 'a b' " + quoted(path).rstrip(" ")
    assert unquoted(line[word_start(line) :]) == path
    assert unquoted(quoted(path, '"').rstrip(" ")) == path


# --- completion -----------------------------------------------------------------------------------------


@pytest.fixture
def shells(address: str, home: str, client: Client, tmp_path: Path) -> dict[str, str]:
    """An environment in which `ffs` is this one, and a cluster with something to complete."""
    client.makedirs(f"{home}/models/large")
    client.mknod(f"{home}/model.bin")
    client.mknod(f"{home}/.hidden")
    client.mknod(f"{home}/two words")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ffs").write_text(f'#!/bin/sh\nexec {sys.executable} -m ffs "$@"\n')
    (tmp_path / "bin" / "ffs").chmod(0o755)
    (tmp_path / "local file").touch()
    grammar = read_grammar(build_parser())
    (tmp_path / "ffs.bash").write_text(bash_script(grammar))
    (tmp_path / "ffs.zsh").write_text(zsh_script(grammar))
    return {
        "FFS_CLUSTER": address,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }


def in_bash(shells: dict[str, str], *lines: str) -> list[list[str]]:
    """What bash offers for each line, with the cursor at its end."""
    steps = [f'COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _ffs; printf "%s\\n" "${{COMPREPLY[@]}}" END'
             for line in lines]  # fmt: skip
    run = subprocess.run(
        ["bash", "-c", "source ~/ffs.bash; cd; " + "; ".join(steps)],
        capture_output=True,
        text=True,
        env=shells,
        timeout=120,
    )
    assert run.stderr == ""
    return [part.strip("\n").split("\n") for part in run.stdout.split("END\n")[:-1]]


def test_bash(shells: dict[str, str], home: str) -> None:
    offers = in_bash(
        shells,
        "ffs tru",
        "ffs cluster dr",
        "ffs ls --j",
        "ffs checksum --algorithm b",
        f"ffs ls {home}/mod",
        f"ffs ls -l {home}/models/",
        f"ffs cat {home}/.h",
        f"ffs cat {home}/two",
        f"ffs cp ffs:{home}/mod",
        "ffs cp loc",
        "ffs cp ff",
        f"ffs --transport tcp get {home}/model.",
        "ffs completion ",
        "ffs ls /no/such/place/",
        f"ffs --cluster 127.0.0.1:1 ls {home}/mod",
    )
    assert offers == [
        ["truncate "],
        ["drain "],
        ["--json "],
        ["blake3 "],
        [f"{home}/model.bin ", f"{home}/models/"],
        [f"{home}/models/large/"],
        [f"{home}/.hidden "],
        [f"{home}/two\\ words "],
        [f"{home}/model.bin ", f"{home}/models/"],
        ["local\\ file "],
        ["ffs.bash ", "ffs.zsh ", "ffs:/"],
        [f"{home}/model.bin "],
        ["bash ", "zsh "],
        [""],
        [""],
    ]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh on this machine")
def test_zsh(shells: dict[str, str], home: str) -> None:
    terminal = Terminal("zsh", "-f", "-i", **shells)
    terminal.type("PS1='READY '; cd; autoload -Uz compinit; compinit -D; source ~/ffs.zsh; echo SO''URCED\n")
    terminal.expect("SOURCED")
    terminal.expect("READY ")
    for typed, expected in (
        ("ffs trunc\t", "truncate "),
        ("ffs cluster dr\t", "drain "),
        (f"ffs ls {home}/models/l\t", f"{home}/models/large/"),
        (f"ffs cp ffs:{home}/model.\t", f"ffs:{home}/model.bin"),
        (f"ffs cat {home}/two\t", "two\\ words"),
        ("ffs cp loc\t", "local\\ file"),
    ):
        terminal.type(typed)
        terminal.expect(expected)
        terminal.type("\x15\n")
        terminal.expect("READY ")
    terminal.type("exit 0\n")
    assert terminal.end() == 0
