"""`ffs device ...`: devices of storage servers, without a cluster. docs/operations.md, Looking at a device.

`format`, `grow` and `discard` write; `inspect` and `check` only read. `check` ends with 0 (clean),
1 (damaged) or 2 (it can't be judged).
"""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING, Final

from ffs.cli.device_text import check_lines, problem_fields, state_fields, state_lines
from ffs.cli.parsing import Commands, command, count_argument, print_json, size_argument
from ffs.cli.text import format_bytes, plural
from ffs.errors import InvalidArgument

if TYPE_CHECKING:
    from ffs._native.device import CheckReport

EXIT_OF_VERDICT: Final = {"clean": 0, "damaged": 1, "unjudged": 2}


def add_commands(commands: Commands) -> None:
    device = commands.add_parser(
        "device",
        help="look at or format a device",
        description="Devices of storage servers, without a cluster.",
    )
    device.set_defaults(run=lambda args: _usage(device))
    verbs = device.add_subparsers(dest="verb", metavar="VERB")
    inspect = command(
        verbs, "inspect", run_inspect, "show what is on a device; nothing is written", json_option=True
    )
    inspect.add_argument("path", metavar="DEVICE")
    check = command(
        verbs,
        "check",
        run_check,
        "check a device that isn't in use; nothing is written",
        json_option=True,
        epilog="exit status: 0 clean, 1 damaged, 2 it can't be judged",
    )
    check.add_argument("path", metavar="DEVICE")
    check.add_argument("--data", action="store_true", help="read all chunks and compare all checksums")
    check.add_argument(
        "--depth", type=count_argument, default=32, metavar="N", help="chunks read at the same time (32)"
    )
    grow = command(verbs, "grow", run_grow, "take in what a device has grown by; it mustn't be in use")
    grow.add_argument("path", metavar="DEVICE")
    grow.add_argument(
        "--size", type=size_argument, default=0, metavar="SIZE", help="a file: lengthen it to this first"
    )
    discard = command(
        verbs, "discard", run_discard, "give free space back to the device; it mustn't be in use"
    )
    discard.add_argument("path", metavar="DEVICE")
    make = command(verbs, "format", run_format, "make a device empty and ready for a storage server")
    make.add_argument("path", metavar="DEVICE")
    make.add_argument(
        "--cluster-id", required=True, metavar="HEX", help="as ffs status shows it: 32 hex digits"
    )
    make.add_argument(
        "--target",
        type=int,
        action="append",
        required=True,
        metavar="ID",
        help="id of a target; once for each",
    )
    make.add_argument(
        "--size", type=size_argument, default=0, metavar="SIZE", help="of a file; made if it isn't there"
    )
    make.add_argument("--sparse", action="store_true", help="a file: don't write it through once")
    make.add_argument("--force", action="store_true", help="whatever is on it: ALL OF IT IS LOST")
    make.add_argument(
        "--max-chunks", type=count_argument, default=0, metavar="N", help="default: one for each 256 KiB"
    )


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def run_inspect(args: argparse.Namespace) -> int:
    from ffs._native.device import device_survey

    state = device_survey(args.path)
    if args.json:
        print_json({"path": args.path, **state_fields(state)})
    else:
        print("\n".join(state_lines(args.path, state)))
    return 0


def run_check(args: argparse.Namespace) -> int:
    from ffs._native.device import device_check

    # Python would see Ctrl-C only after the native call, which may take hours. Nothing is written, so the
    # process may just end.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        report = device_check(args.path, data=args.data, depth=args.depth)
    finally:
        signal.signal(signal.SIGINT, before)
    if args.json:
        print_json(_check_fields(args.path, report))
    else:
        print("\n".join(check_lines(args.path, report, args.data)))
    return EXIT_OF_VERDICT[report.verdict]


def _check_fields(path: str, report: CheckReport) -> dict[str, object]:
    return {
        "path": path,
        "verdict": report.verdict,
        "reason": report.reason,
        "note": report.note,
        "problem_count": report.problem_count,
        "problems": [problem_fields(problem) for problem in report.problems],
        "chunks": report.chunks,
        "pending_versions": report.pending_versions,
        "data_bytes": report.data_bytes,
        "device": None if report.verdict == "unjudged" else state_fields(report.state),
    }


def run_grow(args: argparse.Namespace) -> int:
    from ffs._native.device import device_grow, device_inspect

    before = device_inspect(args.path).size_bytes
    after = device_grow(args.path, args.size).size_bytes
    print(f"{args.path}: its store grew from {format_bytes(before)} to {format_bytes(after)}")
    return 0


def run_discard(args: argparse.Namespace) -> int:
    from ffs._native.device import device_discard

    print(f"{args.path}: {format_bytes(device_discard(args.path))} of free space discarded")
    return 0


def run_format(args: argparse.Namespace) -> int:
    from ffs._native.device import device_format, device_inspect

    try:
        cluster = bytes.fromhex(args.cluster_id)
    except ValueError:
        cluster = b""
    if len(cluster) != 16:
        raise InvalidArgument(f"--cluster-id {args.cluster_id}: give the 32 hex digits that ffs status shows")
    for target in args.target:
        if not 0 < target < 1 << 64:
            raise InvalidArgument(f"--target {target}: ids begin at 1")
    device_format(
        args.path,
        size_bytes=args.size,
        targets=args.target,
        cluster=cluster,
        force=args.force,
        sparse=args.sparse,
        max_chunks=args.max_chunks,
    )
    made = device_inspect(args.path)
    print(f"{args.path}: formatted for {plural(len(args.target), 'target')} of cluster {cluster.hex()}")
    print(f"{format_bytes(made.size_bytes)}, at most {made.max_chunks} chunks")
    return 0
