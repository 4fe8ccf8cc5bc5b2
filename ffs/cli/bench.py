"""`ffs bench io`, `fuse`, `engine`, `recovery`, `meta`, `kv`, `ckpt`, `peers`: speed as a ratio to the raw
device, store, FUSE mount or peer in the same run (docs/guides/bench.md)."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ffs.cli.benchmark.io_matrix import DEVICES, OPS, SIZES, TRANSPORTS, Wanted
from ffs.cli.benchmark.stopped import stopping_cleanly
from ffs.cli.parsing import Commands, command, count_argument

if TYPE_CHECKING:
    from ffs.cli.benchmark.report import Result


def add_commands(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure ffs against the machine", description="Measures ffs.")
    bench.set_defaults(run=lambda args: _usage(bench))
    what = bench.add_subparsers(dest="what", metavar="WHAT")
    _add_io(what)
    words = "the same file through ffs, bindfs and libfuse's passthrough"
    fuse = command(what, "fuse", stopping_cleanly(run_fuse), words, json_option=True)
    fuse.add_argument("--dir", type=Path, help="on which file system (default: below /var/tmp)")
    fuse.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs (default: /dev/shm)")
    fuse.add_argument("--only", action="append", metavar="CASE", help="run this case; may be repeated")
    fuse.add_argument("--slices", type=count_argument, default=31, help="slices of each (default: 31)")
    fuse.add_argument("--slice-ms", type=count_argument, default=50, help=argparse.SUPPRESS)
    fuse.add_argument("--mib", type=count_argument, default=512, help="of the file (default: 512)")
    words = "the chunk engine by itself, on a disk and on tmpfs"
    engine = command(what, "engine", stopping_cleanly(run_engine), words, json_option=True)
    engine.add_argument("--dir", type=Path, help="on which file system (default: below /var/tmp)")
    engine.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs (default: /dev/shm)")
    engine.add_argument("--only", action="append", metavar="CASE", help="run this case; may be repeated")
    engine.add_argument(
        "--slices", type=count_argument, default=31, help="pairs of slices a case (default: 31)"
    )
    engine.add_argument("--slice-ms", type=count_argument, default=50, help=argparse.SUPPRESS)
    engine.add_argument(
        "--mib", type=count_argument, default=512, help="MiB that are read and written (default: 512)"
    )
    engine.add_argument(
        "--chunks", type=count_argument, default=1_000_000, help="chunks of the start-up (default: 1000000)"
    )
    words = "blocks of a KV space put and got, on a device in memory"
    blocks = command(what, "kv", stopping_cleanly(run_kv), words, json_option=True)
    blocks.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    blocks.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs (default: /dev/shm)")
    blocks.add_argument(
        "--only", action="append", metavar="PATTERN", help="cases whose names match; may be repeated"
    )
    blocks.add_argument(
        "--slices", type=count_argument, default=31, help="pairs of slices a case (default: 31)"
    )
    blocks.add_argument("--slice-ms", type=count_argument, default=50, help=argparse.SUPPRESS)
    blocks.add_argument("--mib", type=count_argument, default=256, help="MiB of blocks (default: 256)")
    blocks.epilog = "--transport local|tcp: only cases over this one (default: over both)"
    words = "blocks of a KV space beside another store's, by turns"
    peers = command(what, "peers", stopping_cleanly(run_peers), words, json_option=True)
    peers.add_argument("--dir", type=Path, help="on which file system (default: below /var/tmp)")
    peers.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs (default: /dev/shm)")
    peers.add_argument(
        "--mooncake",
        type=Path,
        default=Path(".venv-peers/bin/python"),
        metavar="PYTHON",
        help="of the environment that has Mooncake's store (default: .venv-peers/bin/python)",
    )
    peers.add_argument(
        "--vllm",
        type=Path,
        default=Path(".venv-adapters/bin/python"),
        metavar="PYTHON",
        help="of the environment that has vLLM and ffs (default: .venv-adapters/bin/python)",
    )
    peers.add_argument(
        "--only", action="append", metavar="PATTERN", help="cases whose names match; may be repeated"
    )
    peers.add_argument("--slices", type=count_argument, default=15, help="of each a case (default: 15)")
    peers.add_argument("--slice-ms", type=count_argument, default=50, help=argparse.SUPPRESS)
    peers.add_argument("--mib", type=count_argument, default=256, help="MiB of blocks (default: 256)")
    words = "how fast a returned replica is filled, and what readers feel of it"
    recovery = command(what, "recovery", stopping_cleanly(run_recovery), words, json_option=True)
    recovery.add_argument("--dir", type=Path, help="on which file system (default: below /var/tmp)")
    recovery.add_argument("--only", action="append", metavar="CASE", help="run this case; may be repeated")
    recovery.add_argument("--rounds", type=count_argument, default=3, help="recoveries a case (default: 3)")
    recovery.add_argument(
        "--fill-mib",
        type=count_argument,
        default=1024,
        help="MiB that the replica has missed (default: 1024)",
    )
    words = "names: creates, lookups and listings by many clients, and a metadata service that dies"
    names = command(what, "meta", stopping_cleanly(run_meta), words, json_option=True)
    names.add_argument("--dir", type=Path, help="on which file system (default: below /var/tmp)")
    names.add_argument(
        "--engine", metavar="URL", default="", help="fdb://CLUSTER-FILE (default: LMDB in --dir)"
    )
    names.add_argument("--only", action="append", metavar="CASE", help="run this case; may be repeated")
    names.add_argument(
        "--slices", type=count_argument, default=15, help="slices of each contestant a case (default: 15)"
    )
    names.add_argument("--slice-ms", type=count_argument, default=400, help=argparse.SUPPRESS)
    names.add_argument(
        "--files", type=count_argument, default=40_000, help="files that are looked at (default: 40000)"
    )
    names.add_argument("--small-files", type=count_argument, default=1000, help=argparse.SUPPRESS)
    names.add_argument("--kill-ms", type=count_argument, default=4000, help=argparse.SUPPRESS)

    words = "checkpoints of several ranks against plain copies, the device and torch's own"
    states = command(what, "ckpt", stopping_cleanly(run_ckpt), words, json_option=True)
    states.add_argument("--dir", type=Path, help="on which file system (default: below /var/tmp)")
    states.add_argument(
        "--only", action="append", metavar="PATTERN", help="cases whose names match; may be repeated"
    )
    states.add_argument("--slices", type=count_argument, default=5, help="rounds of each (default: 5)")
    states.add_argument("--size", default="1G", help="of the state, all ranks together (default: 1G)")
    states.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    states.add_argument("--ranks", type=count_argument, default=4, help=argparse.SUPPRESS)


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _add_io(what: Commands) -> None:
    words = "reads, writes and names on clusters of its own; without a choice the cases that have goals"
    io = command(what, "io", stopping_cleanly(run_io), words, json_option=True)
    io.add_argument("--dir", type=Path, help="on which file system (default: a directory below /var/tmp)")
    io.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs (default: /dev/shm)")
    io.add_argument(
        "--only", action="append", metavar="PATTERN", help="cases whose names match; may be repeated"
    )
    io.add_argument(
        "--all", action="store_true", help="not just the cases that have goals: half an hour for all"
    )
    io.add_argument("--op", action="append", choices=OPS, help="may be repeated, as those that follow")
    io.add_argument("--size", action="append", choices=tuple(SIZES))
    io.add_argument("--qd", action="append", type=count_argument, metavar="N", help="requests in flight")
    io.add_argument("--device", action="append", choices=DEVICES)
    io.add_argument("--replicas", action="append", type=count_argument, metavar="N")
    io.add_argument("--checksum", choices=("on", "off"))
    io.epilog = "--transport local|tcp: only cases over this one (default: over both)"
    io.add_argument(
        "--huge-pages", action="store_true", help="ffs's memory in reserved ones (vm.nr_hugepages), not lent"
    )
    io.add_argument("--plot", type=Path, metavar="FILE", help="ratio by size, as .svg or .html")
    io.add_argument("--slices", type=count_argument, default=31, help="pairs of slices a case (default: 31)")
    io.add_argument("--slice-ms", type=count_argument, default=50, help=argparse.SUPPRESS)


def run_io(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.io_matrix import select
    from ffs.cli.benchmark.plot import check_name, write_plot
    from ffs.cli.benchmark.suite import META_NAMES, Suite

    cases, names = select(_wanted(args), META_NAMES)
    _check_tmpfs(args.tmpfs)
    if args.plot is not None:
        check_name(args.plot)
    with tempfile.TemporaryDirectory(prefix="ffs-bench-", dir=args.tmpfs) as memory:

        def results(scratch: Path) -> Iterator[Result]:
            places = {"disk": scratch, "tmpfs": Path(memory) / "tmpfs", "null": Path(memory) / "null"}
            for place in places.values():
                place.mkdir(exist_ok=True)
            suite = Suite(places, args.slices, args.slice_ms / 1000, args.huge_pages)
            return suite.run(cases, names, _say)

        found = _print(args, results)
    if args.plot is not None:
        write_plot(args.plot, found)
    return 0 if all(result.ok for result in found) else 1


def _wanted(args: argparse.Namespace) -> Wanted:
    return Wanted(
        only=tuple(args.only or ()),
        all=args.all,
        ops=tuple(args.op or ()),
        sizes=tuple(args.size or ()),
        depths=tuple(args.qd or ()),
        transports=(args.transport,) if args.transport in TRANSPORTS else (),
        devices=tuple(args.device or ()),
        replicas=tuple(args.replicas or ()),
        checksums=() if args.checksum is None else (args.checksum == "on",),
    )


def _check_tmpfs(path: Path) -> None:
    from ffs.errors import InvalidArgument

    if not path.is_dir():
        raise InvalidArgument(f"--tmpfs {path}: no such directory")


def run_fuse(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.fuse import NAMES, Suite

    _check_tmpfs(args.tmpfs)

    def warn(line: str) -> None:
        print(f"ffs bench fuse: {line}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="ffs-bench-", dir=args.tmpfs) as tmpfs:

        def suite(scratch: Path) -> Suite:
            places = {"disk": scratch, "tmpfs": Path(tmpfs)}
            return Suite(places, args.slices, args.slice_ms / 1000, warn, args.mib << 20)

        return _run(args, NAMES, suite)


def run_engine(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.engine import Suite
    from ffs.cli.benchmark.engine_cases import NAMES
    from ffs.errors import InvalidArgument

    if args.mib < 64:
        raise InvalidArgument(f"--mib {args.mib}: the cases need at least 64")
    _check_tmpfs(args.tmpfs)

    def suite(scratch: Path, tmpfs: Path) -> Suite:
        directories = {"disk": scratch, "tmpfs": tmpfs}
        return Suite(directories, args.slices, args.slice_ms / 1000, args.mib << 20, args.chunks)

    with tempfile.TemporaryDirectory(prefix="ffs-bench-", dir=args.tmpfs) as tmpfs:
        return _run(args, NAMES, lambda scratch: suite(scratch, Path(tmpfs)))


def run_kv(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.kv import Suite
    from ffs.cli.benchmark.kv_cases import select

    cases, int8 = select(args.only or (), args.transport)
    _check_tmpfs(args.tmpfs)
    with tempfile.TemporaryDirectory(prefix="ffs-bench-", dir=args.tmpfs) as memory:
        suite = Suite(Path(memory), max(args.mib, 64) << 20, args.slices, args.slice_ms / 1000)
        found = _print(args, lambda scratch: suite.run(cases, int8, _say))
    return 0 if all(result.ok for result in found) else 1


def run_peers(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.peers.cases import select
    from ffs.cli.benchmark.peers.suite import Suite

    cases, vllm_cases = select(args.only or ())
    _check_tmpfs(args.tmpfs)
    with tempfile.TemporaryDirectory(prefix="ffs-bench-", dir=args.tmpfs) as memory:

        def results(scratch: Path) -> Iterator[Result]:
            set_bytes, slice_s = max(args.mib, 64) << 20, args.slice_ms / 1000
            suite = Suite(scratch, Path(memory), args.mooncake, args.vllm, set_bytes, args.slices, slice_s)
            return suite.run(cases, vllm_cases, _say)

        found = _print(args, results)
    return 0 if all(result.ok for result in found) else 1


def run_recovery(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.recovery import NAMES, Suite

    return _run(args, NAMES, lambda scratch: Suite(scratch, args.rounds, args.fill_mib << 20))


def run_meta(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.meta import NAMES, Suite
    from ffs.errors import InvalidArgument

    if args.engine and not args.engine.startswith("fdb://"):
        raise InvalidArgument(
            f"--engine {args.engine}: give fdb://CLUSTER-FILE?prefix=TEXT, or nothing for LMDB"
        )

    def suite(scratch: Path) -> Suite:
        return Suite(
            scratch,
            args.slices,
            args.slice_ms / 1000,
            files=args.files,
            small=args.small_files,
            store=args.engine,
            kill_s=args.kill_ms / 1000,
        )

    return _run(args, NAMES, suite)


def run_ckpt(args: argparse.Namespace) -> int:
    from ffs.cli.benchmark.ckpt import Suite
    from ffs.cli.benchmark.ckpt_cases import select
    from ffs.cli.demo import find_model
    from ffs.cli.text import parse_bytes

    cases = select(args.only or ())
    model, size = args.model or find_model(), parse_bytes(args.size)
    found = _print(
        args, lambda scratch: Suite(scratch, model, size, args.slices, args.ranks).run(cases, _say)
    )
    return 0 if all(result.ok for result in found) else 1


class _Suite(Protocol):
    def run(self, names: frozenset[str], say: Callable[[str], None]) -> Iterator[Result]: ...


def _run(args: argparse.Namespace, names: Sequence[str], make: Callable[[Path], _Suite]) -> int:
    """Runs the cases that were asked for in a scratch directory; prints them as they come."""
    from ffs.errors import InvalidArgument

    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        raise InvalidArgument(f"no case {unknown[0]!r}; there are: {', '.join(names)}")
    found = _print(args, lambda scratch: make(scratch).run(frozenset(args.only or names), _say))
    return 0 if all(result.ok for result in found) else 1


def _print(args: argparse.Namespace, run: Callable[[Path], Iterator[Result]]) -> list[Result]:
    """The results of `run` in a scratch directory, printed as they come."""
    from ffs.cli.benchmark.report import json_line, people_table
    from ffs.cli.devcluster.secret import no_credentials

    if args.dir is not None:
        args.dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="ffs-bench-", dir=args.dir or "/var/tmp"))
    results = []
    try:
        with no_credentials():
            for result in run(scratch):
                results.append(result)
                if args.json:
                    print(json_line(result), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not args.json:
        print(people_table(results))
    return results


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(f"bench: {line}", file=sys.stderr)
