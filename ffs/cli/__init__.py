"""The command `ffs`: parsing, and errors as one line each. One file a noun.

Exit status: 0 done; 1 an operation failed (the line on stderr says what and the way out); 2 the command
line is wrong; 3 no cluster answers; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from ffs import errors
from ffs.cli.names import plain
from ffs.cli.parsing import CommandParser, join_signed
from ffs.rpc.secret_file import ExposedSecretWarning

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

_NOUNS = (
    "cluster",
    "cluster_commands",
    "dev",
    "listing",
    "files",
    "reading",
    "attributes",
    "copy",
    "sync",
    "find",
    "trash",
    "shell",
    "completion",
    "usage",
    "space",
    "kv",
    "quota",
    "ckpt",
    "user",
    "xattr",
    "device",
    "rdma",
    "doctor",
    "flock",
    "fsck",
    "bench",
    "demo",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ffs",
        description="A distributed store for AI work: start a cluster, look at it, move files.",
        epilog="Paths in the cluster are ffs:/path or ffs://host:port/path (docs/guides/getting_started.md).",
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.add_argument(
        "--cluster",
        metavar="HOST:PORT",
        help="address of the metadata service (default: FFS_CLUSTER)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "tcp", "local", "rdma"),
        default="auto",
        help="how data moves between client and servers (default: the best that both offer)",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for noun in _NOUNS:
        importlib.import_module(f"ffs.cli.{noun}").add_commands(commands)
    return parser


def describe_error(error: BaseException) -> str:
    """One line: what was touched, what went wrong, the way out."""
    if isinstance(error, OSError):
        named = [
            os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
        ]
        text = error.strerror or str(error) or type(error).__name__
        where = " -> ".join(named)
        line = text if not where or _is_named(where, text) else f"{where}: {text}"
    else:
        line = str(error) or type(error).__name__
    return " ".join(line.split())


def _is_named(where: str, text: str) -> bool:
    """Whether the sentence names it already: as a whole path, not as part of another or as a word."""
    if text.startswith(f"{where}: "):
        return True
    return "/" in where and re.search(rf"(?<![\w/.-]){re.escape(where)}(?![\w/-]|\.\w)", text) is not None


def exit_status(error: BaseException) -> int:
    if isinstance(error, errors.Unreachable):
        return EXIT_UNREACHABLE
    return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status; never raises for what the user can mend."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names are bytes to the file system: what isn't UTF-8 goes out as it came in.
            stream.reconfigure(errors="surrogateescape")
    line = sys.argv[1:] if argv is None else list(argv)
    if line[:1] == ["__complete"]:  # without the parser: a person waits for the key's answer
        from ffs.cli.complete import main as complete

        return complete(line[1:])
    parser = build_parser()
    args = parser.parse_args(join_signed(line))
    if args.version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"ffs {version('ffs')}")
        except PackageNotFoundError:
            print("ffs (from a source tree)")
        return 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    with warnings.catch_warnings():
        warnings.simplefilter("once", ExposedSecretWarning)
        warnings.showwarning = _show_warning
        return run_parsed(args)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one line, without the place in our code that it comes from."""
    words = " ".join(str(message).split())
    print(plain(f"ffs: warning: {words}", sys.stderr), file=file or sys.stderr)


def run_parsed(args: argparse.Namespace) -> int:
    """Runs the command of a parsed line; its errors become a line on stderr and a status."""
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("ffs: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError as error:
        if isinstance(error, errors.FfsError):
            return _failed(args, error)
        # The reader of our output went away (`ffs ls | head`): end quietly, and keep Python from
        # writing to the closed pipe once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _failed(args, error)


def _failed(args: argparse.Namespace, error: BaseException) -> int:
    if args.debug:
        import traceback

        traceback.print_exc()
    print(plain(f"ffs {args.command}: {describe_error(error)}", sys.stderr), file=sys.stderr)
    return exit_status(error)
