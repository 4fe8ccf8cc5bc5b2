"""Helpers for the parsers of the nouns, and how commands reach a cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ffs.cli.text import parse_bytes
from ffs.errors import InvalidArgument

if TYPE_CHECKING:
    from ffs.client.client import Client

Commands = Any  # argparse's _SubParsersAction, which has no public name
Run = Callable[[argparse.Namespace], int]


class CommandParser(argparse.ArgumentParser):
    """Options and operands of a command may stand in any order: `ffs rm /a -r /b`."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        plain = not any(
            action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._get_positional_actions()
        )
        if self._inside or not plain:
            return super().parse_known_args(args, namespace)
        self._inside = True  # what follows calls this method for each of its two passes
        try:
            found = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False
        if found[1] and self._subparsers is None:  # said here, it comes with the usage of this command
            self.error(f"unrecognized arguments: {' '.join(found[1])}")
        return found


def command(
    commands: Commands, name: str, run: Run, help_line: str, *, json_option: bool = False, **options: Any
) -> argparse.ArgumentParser:
    """Adds one command. --cluster and --transport are welcome after its name too."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_line, description=help_line, **options
    )
    parser.set_defaults(run=run)
    hidden = argparse.SUPPRESS
    parser.add_argument("--cluster", default=hidden, help=hidden)
    parser.add_argument("--transport", choices=("auto", "tcp", "local", "rdma"), default=hidden, help=hidden)
    parser.add_argument("--debug", action="store_true", default=hidden, help=hidden)
    if json_option:
        parser.add_argument("--json", action="store_true", help="for programs: JSON on stdout")
    return parser


_SIGNED = {
    "find": {"-size", "-mtime", "-mmin", "-perm", "-links"},
    "head": {"-n", "--lines", "-c", "--bytes"},
    "tail": {"-n", "--lines", "-c", "--bytes"},
    "truncate": {"-s", "--size"},
}


def join_signed(argv: Sequence[str]) -> list[str]:
    """`-size -4k` as `-size=-4k`: else argparse takes values that begin with a minus for options. Pure."""
    line = list(argv)
    verb = next((i for i, word in enumerate(line) if word in _SIGNED), None)
    if verb is None:
        return line
    out, options, i = line[: verb + 1], _SIGNED[line[verb]], verb + 1
    while i < len(line):
        value = line[i + 1] if i + 1 < len(line) else ""
        if line[i] in options and value[:1] == "-" and value[1:2].isdigit():
            # A short option takes its value as `-n-4`, a long one as `--lines=-4`; find's are long ones.
            short = len(line[i]) == 2
            out.append(line[i] + value if short else f"{line[i]}={value}")
            i += 2
        else:
            out.append(line[i])
            i += 1
    return out


def size_argument(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error


def count_argument(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of at least 1")
    return value


def seconds_argument(text: str) -> int:
    """Milliseconds, of a number of seconds."""
    try:
        value = round(float(text) * 1000)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a time: give a number of seconds")
    return value


_held: dict[tuple[str | None, str], Client] | None = None


@contextlib.contextmanager
def hold_clients() -> Iterator[None]:
    """Inside, `connect` gives the same client for the same address, and closes none before the end: for a
    shell, whose commands come one after another."""
    global _held
    before, _held = _held, {}
    try:
        yield
    finally:
        clients, _held = _held, before
        for client in clients.values():
            client.close()


def connect(
    args: argparse.Namespace, address: str | None = None
) -> contextlib.AbstractContextManager[Client]:
    """A client of --cluster, FFS_CLUSTER, or `address` if the command's paths name one; to be used by
    `with`. Blocking."""
    from ffs.client.client import connect as open_client

    if _held is None:
        return open_client(address or args.cluster, transport=args.transport)
    key = (address or args.cluster, args.transport)
    if key not in _held:
        _held[key] = open_client(key[0], transport=args.transport)
    return contextlib.nullcontext(_held[key])


def print_json(value: object) -> None:
    """One line. What isn't UTF-8 in a name is an escape (\\udcff for the byte ff), so that it stays JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    print(text if _is_utf8(text) else json.dumps(value, separators=(",", ":")))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
