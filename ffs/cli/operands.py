"""What the verbs share: expanding patterns on the cluster, errors that don't stop the rest, questions."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ffs import errors
from ffs.cli.globs import expand, has_magic, unescape
from ffs.cli.location import Location, one_address, parse_remote
from ffs.cli.names import plain
from ffs.cli.parsing import connect

if TYPE_CHECKING:
    from ffs.client.client import Client


def literal_option(parser: argparse.ArgumentParser) -> None:
    """--literal, for the commands that expand patterns."""
    parser.add_argument("--literal", action="store_true", help="take *, ?, [ and \\ in paths as they are")


class Tally:
    """Errors of single operands: told one line each, and remembered for the exit status."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.failures = 0

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around the work on one operand. An unreachable cluster is everybody's trouble, and ends all."""
        try:
            yield
        except (errors.Unreachable, errors.ShutDown, errors.Cancelled, BrokenPipeError):
            raise
        except OSError as error:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Tell of an error and remember it."""
        from ffs.cli import describe_error

        if self._args.debug:
            import traceback

            traceback.print_exception(error)
        self.failures += 1
        sys.stdout.flush()
        print(plain(f"ffs {self._args.command}: {describe_error(error)}", sys.stderr), file=sys.stderr)

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.failures else 0


def expand_places(
    client: Client, places: Sequence[Location], *, literal: bool = False, tally: Tally | None = None
) -> list[Location]:
    """Patterns in cluster paths, expanded; one that matches nothing, and isn't a name itself, is NotFound
    (told to `tally` if there is one). Blocking."""
    found: list[Location] = []
    for place in places:
        if not place.remote or literal:
            found.append(place)
            continue
        if not has_magic(place.path):
            found.append(replace(place, path=unescape(place.path)))
            continue
        paths = expand(place.path, lambda path: listing(client, path), client.lexists)
        if not paths and client.lexists(place.path):
            paths = [place.path]
        if not paths:
            error = errors.NotFound("no path matches this pattern", place.path)
            if tally is None:
                raise error
            tally.failed(error)
        found += [replace(place, path=path) for path in paths]
    return found


def listing(client: Client, path: str) -> Iterator[tuple[str, bool, bool]]:
    """What `globs.expand` wants to know of a directory."""
    for entry in client.scandir(path):
        try:
            is_directory = entry.is_dir()
        except OSError:
            is_directory = False  # a link in a circle, or through what may not be searched
        yield entry.name, is_directory, entry.is_symlink()


@contextlib.contextmanager
def remote_operands(
    args: argparse.Namespace, paths: Sequence[str], tally: Tally | None = None
) -> Iterator[tuple[Client, list[Location]]]:
    """A client, and the cluster paths of a command with their patterns expanded."""
    places = [parse_remote(path) for path in paths]
    with connect(args, one_address(places, args.cluster)) as client:
        yield client, expand_places(client, places, literal=getattr(args, "literal", False), tally=tally)


def confirm(question: str) -> bool:
    """Ask on stderr, read stdin: anything that begins with y is a yes, the end of input a no."""
    sys.stderr.write(plain(f"{question} [y/N] ", sys.stderr))
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        sys.stderr.write("\n")
    return answer.strip().lower().startswith("y")
