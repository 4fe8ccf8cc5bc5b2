"""`ffs fsck`: is everything in the cluster as it should be? docs/guides/fsck.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from ffs.cli.location import parse_remote
from ffs.cli.names import plain
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.text import plural

if TYPE_CHECKING:
    from ffs.client.fsck import Report
    from ffs.proto.checks import FsckFinding

NOT_CLEAN = 1
_INTERVAL_S = 0.1


def add_commands(commands: Commands) -> None:
    fsck = command(
        commands, "fsck", run_fsck, "check namespace and chunks of the cluster; mend them", json_option=True
    )
    fsck.epilog = (
        "Exit status: 0 all is well, or was repaired; 1 something is wrong and isn't repaired, or a chain "
        "didn't answer. For administrators."
    )
    fsck.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="/",
        help="only entries and counters of this directory and of those below it (default: everything)",
    )
    fsck.add_argument("--repair", action="store_true", help="mend what can be mended, and say what was done")


class _Line:
    """What is being looked at, on a terminal; nothing anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._show = stream.isatty()
        self._drawn = 0.0

    def __call__(self, what: str, count: int) -> None:
        now = time.monotonic()
        if self._show and now - self._drawn >= _INTERVAL_S:
            self._drawn = now
            self._write(f"{count} {what}")

    def clear(self) -> None:
        if self._drawn:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def _write(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns - 1
        self._stream.write("\r" + text[:columns].ljust(columns))
        self._stream.flush()


def run_fsck(args: argparse.Namespace) -> int:
    from ffs.client.fsck import run_check

    place = parse_remote(args.path)
    line = _Line(sys.stderr)
    with connect(args, place.address) as client:
        try:
            report = run_check(client, place.path, repair=args.repair, progress=line)
        finally:
            line.clear()
    if args.json:
        print_json(as_json(report))
    else:
        _print(report, whole=place.path == "/", repair=args.repair)
    return 0 if report.clean else NOT_CLEAN


def where(finding: FsckFinding) -> str:
    """The path if it is known, else the inode or the chain. Pure."""
    if finding.path:
        return finding.path.decode("utf-8", "surrogateescape")
    return f"inode {finding.ino}" if finding.ino else "-"


def _print(report: Report, *, whole: bool, repair: bool) -> None:
    done = {id(each.finding): each for each in report.repairs}
    for finding in report.findings:
        print(plain(f"{finding.kind}: {where(finding)}: {finding.text}"))
        repaired = done.get(id(finding))
        if repaired is not None:
            print(plain(f"    {'repaired' if repaired.mended else 'NOT repaired'}: {repaired.text}"))
        elif repair:
            print("    NOT repaired: it can't be repaired by fsck")
        elif finding.repair:
            print(plain(f"    --repair would: {finding.repair}"))
    for chain, why in report.unknown.items():
        print(f"unknown: chain {chain}: its chunks couldn't be looked at: {why}")
    if report.unsettled:
        shown = ", ".join(map(str, report.unsettled[:10]))
        print(f"unsettled: {len(report.unsettled)} inodes changed whenever they were looked at: {shown}")
    looked = ", ".join(f"{count} {what}" for what, count in report.looked.items() if what != "names")
    mended = sum(each.mended for each in report.repairs)
    verdict = plural(len(report.findings), "finding") if report.findings else "clean"
    if not report.findings and report.unknown:
        verdict = "nothing found, but not everything could be looked at"
    if report.repairs:
        verdict += f", {mended} repaired"
    print(f"{verdict} ({looked})")
    if not whole:
        print("(one tree: link counts, sessions and chunks are looked at only without PATH)")


def as_json(report: Report) -> dict[str, Any]:
    """For programs. Pure."""
    done = {id(each.finding): each for each in report.repairs}

    def row(finding: FsckFinding) -> dict[str, Any]:
        repaired = done.get(id(finding))
        return {
            "kind": finding.kind,
            "path": finding.path.decode("utf-8", "surrogateescape") if finding.path else None,
            "inode": finding.ino,
            "chain": finding.chain or None,
            "found": finding.found,
            "expected": finding.expected,
            "text": finding.text,
            "repair": finding.repair or None,
            "repaired": None if repaired is None else repaired.mended,
            "done": None if repaired is None else repaired.text,
        }

    return {
        "clean": report.clean,
        "findings": [row(finding) for finding in report.findings],
        "unknown": [{"chain": chain, "why": why} for chain, why in report.unknown.items()],
        "unsettled": report.unsettled,
        "looked": dict(report.looked),
    }
