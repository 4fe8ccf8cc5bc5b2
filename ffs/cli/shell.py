"""`ffs shell`: the commands without their `ffs`, with a current directory in the cluster
(docs/guides/command_line.md, Shell)."""

from __future__ import annotations

import argparse
import contextlib
import os
import posixpath
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli import location
from ffs.cli.grammar import EITHER, LOCAL, MIXED, NONE, REMOTE, Grammar, offer, read_grammar
from ffs.cli.names import shown
from ffs.cli.parsing import Commands, command, connect, hold_clients, join_signed

if TYPE_CHECKING:
    from ffs.client.client import Client

HISTORY_LINES = 2000
_BUILTINS = {
    "cd": "go to a directory of the cluster (no argument: /; -: the last one)",
    "pwd": "say where in the cluster one is",
    "lcd": "go to a directory of this machine",
    "lpwd": "say where on this machine one is",
    "help": "this, or the help of a command",
    "exit": "end (also: quit, Ctrl-D)",
    "quit": "end",
}


def add_commands(commands: Commands) -> None:
    words = "a shell with history and completion; commands from stdin if that isn't a terminal"
    parser = command(commands, "shell", run_shell, words)
    parser.add_argument("-k", "--keep-going", action="store_true",
                        help="commands from stdin: go on after an error")  # fmt: skip


def run_shell(args: argparse.Namespace) -> int:
    if location.current is not None:
        raise errors.InvalidArgument("this is a shell already")
    with hold_clients(), _current_directory():
        shell = Shell(args, connect(args).__enter__())  # held, and closed at the end, by hold_clients
        if sys.stdin.isatty():
            return shell.talk()
        return shell.read_script()


@contextlib.contextmanager
def _current_directory() -> Iterator[None]:
    location.current = "/"
    try:
        yield
    finally:
        location.current = None


class Shell:
    """One session."""

    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        from ffs.cli import build_parser

        self._args = args
        self._client = client
        self._parser = build_parser()
        self._grammar: Grammar = read_grammar(self._parser)
        for name, words in _BUILTINS.items():
            self._grammar[()].verbs[name] = words
            kind = {"cd": REMOTE, "lcd": LOCAL}.get(name, NONE)
            self._grammar[(name,)] = type(self._grammar[()])(kind=kind)
        self._last = "/"
        self._ended = False

    # --- lines --------------------------------------------------------------------------------

    def talk(self) -> int:
        """With a person, until Ctrl-D; the status of the last command."""
        status = 0
        with line_editing(self._complete):
            while not self._ended:
                try:
                    line = input(f"ffs:{shown(location.current or '')}> ")
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print()
                    continue
                status = self.execute(line, status)
        return status

    def read_script(self) -> int:
        """Commands from stdin. Ends at the first that fails, with its status; with -k the first failure's
        status is the end's."""
        first = 0
        for line in sys.stdin:
            status = self.execute(line, 0)
            if status and not self._args.keep_going:
                return status
            first = first or status
            if self._ended:
                break
        return first

    def execute(self, line: str, before: int) -> int:
        """One line; returns its status, `before` for an empty one. Errors are told, never raised."""
        if line.lstrip().startswith("!"):
            return subprocess.run(line.lstrip()[1:], shell=True, check=False).returncode
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            print(f"ffs shell: {error}: {line.strip()}", file=sys.stderr)
            return 2
        if not words:
            return before
        builtin: Callable[[list[str]], int] | None = {
            "cd": self._cd,
            "pwd": self._pwd,
            "lcd": self._lcd,
            "lpwd": self._lpwd,
            "help": self._help,
            "?": self._help,
            "exit": self._exit,
            "quit": self._exit,
        }.get(words[0])
        if builtin is None:
            return self._command(words)
        try:
            return builtin(words[1:])
        except OSError as error:
            from ffs.cli import describe_error, exit_status

            print(f"{words[0]}: {describe_error(error)}", file=sys.stderr)
            return exit_status(error)

    def _command(self, words: list[str]) -> int:
        from ffs.cli import run_parsed

        line = ["--transport", self._args.transport, *words]
        if self._args.cluster:
            line = ["--cluster", self._args.cluster, *line]
        try:
            args = self._parser.parse_args(join_signed(line))
        except SystemExit as ended:  # argparse has said why, or has shown the help
            return ended.code if isinstance(ended.code, int) else 2
        return run_parsed(args)

    # --- commands of the shell itself ---------------------------------------------------------

    def _cd(self, words: list[str]) -> int:
        if len(words) > 1:
            raise errors.InvalidArgument("takes one directory: put quotes around blanks")
        here = location.current or "/"
        path = words[0] if words else "/"
        path = self._last if path == "-" else location.parse_remote(path).path
        # As a shell has it: '..' is the directory that one came through, also after a symlink.
        path = posixpath.normpath(path)
        path = "/" + path.lstrip("/")
        if not self._client.isdir(path):
            self._client.stat(path)
            raise errors.NotADirectory("isn't a directory", path)
        if not self._client.access(path, os.X_OK):
            raise errors.AccessDenied("may not be entered", path)
        self._last, location.current = here, path
        return 0

    def _pwd(self, words: list[str]) -> int:
        print(shown(location.current or "/"))
        return 0

    def _lcd(self, words: list[str]) -> int:
        os.chdir(os.path.expanduser(words[0] if words else "~"))
        return 0

    def _lpwd(self, words: list[str]) -> int:
        print(os.getcwd())
        return 0

    def _help(self, words: list[str]) -> int:
        if words and words[0] not in _BUILTINS:
            return self._command([*words, "--help"])
        rows = {name: text for name, text in self._grammar[()].verbs.items() if not words or name in words}
        width = max(map(len, rows))
        for name, text in rows.items():
            print(f"  {name.ljust(width)}  {text}")
        if not words:
            print("  " + "!COMMAND".ljust(width) + "  run a command on this machine")
        return 0

    def _exit(self, words: list[str]) -> int:
        self._ended = True
        return int(words[0]) if words and words[0].isdigit() else 0

    # --- completion -----------------------------------------------------------------------------

    def _complete(self, line: str) -> list[str]:
        """What the last word of `line`, which ends at the cursor, may become, as it is typed."""
        try:
            start = word_start(line)
            words, current = shlex.split(line[:start]), unquoted(line[start:])
            offered = offer(self._grammar, words, current)
            found = [word + " " for word in offered.words]
            paths = []
            if offered.kind in (REMOTE, MIXED) or (offered.kind == EITHER and current.startswith("ffs:")):
                paths += self._remote(current)
            if offered.kind in (LOCAL, MIXED) or (offered.kind == EITHER and not current.startswith("ffs:")):
                paths += _local(current)
            found += [quoted(path, line[start : start + 1]) for path in paths]
            if offered.kind == EITHER and "ffs:".startswith(current):
                found.append("ffs:")
            return found
        except (OSError, ValueError):
            return []  # there is nothing to offer; the command itself will say what is wrong

    def _remote(self, current: str) -> list[str]:
        from ffs.cli.complete import remote_paths

        return remote_paths(self._client, current)


def _local(current: str) -> list[str]:
    folder, name = os.path.split(current)
    found = []
    for entry in sorted(os.listdir(os.path.expanduser(folder) or ".")):
        if entry.startswith(name) and (name.startswith(".") or not entry.startswith(".")):
            path = os.path.join(folder, entry)
            found.append(path + ("/" if os.path.isdir(os.path.expanduser(path)) else ""))
    return found


def unquoted(text: str) -> str:
    """A word as it stands on the line, which may end within quotes or after a backslash. Pure."""
    for closing in ("", '"', "'"):
        with contextlib.suppress(ValueError):
            words = shlex.split(text + closing)
            return words[0] if words else ""
    return text


def quoted(path: str, opening: str = "") -> str:
    """As it is typed, by backslashes or within the quotes that `opening` may be; then a blank, if it is no
    directory. Pure."""
    if opening in ("'", '"') and opening not in path and not (opening == '"' and "\\" in path):
        return opening + path + ("" if path.endswith("/") else opening + " ")
    plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-"
    text = "".join(c if c in plain or ord(c) > 127 else "\\" + c for c in path)
    return text if path.endswith("/") else text + " "


def word_start(line: str) -> int:
    """Where the last word of a line begins: after the last blank that is neither within quotes nor behind a
    backslash. Pure."""
    start, quote, escaped = 0, "", False
    for number, c in enumerate(line):
        if escaped:
            escaped = False
        elif c == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in " \t":
            start = number + 1
    return start


# --- readline -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def line_editing(complete: Callable[[str], list[str]]) -> Iterator[None]:
    """History and completion while it lasts, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    found: list[str] = []

    def completer(text: str, state: int) -> str | None:
        if state == 0:
            # readline cuts words at every blank; ours may have some. What it has already is left away.
            line = readline.get_line_buffer()[: readline.get_endidx()]
            had = line[word_start(line) : readline.get_begidx()]
            found[:] = [word[len(had) :] for word in complete(line) if word.startswith(had)]
        return found[state] if state < len(found) else None

    old = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(completer)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    path = history_path()
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        readline.set_completer(old[0])
        readline.set_completer_delims(old[1])
        if path is not None:
            with contextlib.suppress(OSError):
                readline.write_history_file(path)


def history_path() -> str | None:
    """The history's file: FFS_HISTORY, else ~/.ffs_history; made with mode 0600. None if it can't be written
    (or FFS_HISTORY is empty)."""
    path = os.environ.get("FFS_HISTORY", os.path.expanduser("~/.ffs_history"))
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        os.fchmod(fd, 0o600)
    except OSError:
        return None
    finally:
        os.close(fd)
    return path
