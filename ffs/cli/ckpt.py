"""`ffs ckpt`: looking at checkpoints, verifying, comparing, pinning and removing them.
docs/guides/checkpoint.md, Looking."""

from __future__ import annotations

import argparse
import contextlib
import posixpath
import sys
import time
from typing import TYPE_CHECKING

from ffs.cli.location import one_address, parse_location
from ffs.cli.names import shown
from ffs.cli.operands import Tally, literal_option, remote_operands
from ffs.cli.parsing import Commands, command, connect, print_json
from ffs.cli.progress import Progress
from ffs.cli.text import format_bytes, format_rate, format_seconds, parse_duration, plural, table
from ffs.errors import Busy, FfsError, InvalidArgument

if TYPE_CHECKING:
    from ffs.checkpoint.manifest import Manifest
    from ffs.client.client import Client


def add_commands(commands: Commands) -> None:
    ckpt = commands.add_parser(
        "ckpt",
        help="checkpoints: list, show, verify, compare, pin, remove, advise",
        description="Checkpoints of ffs.checkpoint, by the path of one, or of the run that has them.",
    )
    ckpt.set_defaults(run=lambda args: _usage(ckpt))
    verbs = ckpt.add_subparsers(dest="verb", metavar="VERB")
    listed = command(verbs, "ls", run_ls, "list the checkpoints of runs, or of / below it", json_option=True)
    listed.add_argument("paths", nargs="+", metavar="PATH")
    show = command(verbs, "show", run_show, "what a checkpoint holds", json_option=True)
    show.add_argument("paths", nargs="+", metavar="PATH")
    show.add_argument("-t", "--tensors", action="store_true", help="every tensor")
    check = command(verbs, "verify", run_verify, "read checkpoints against their hashes", json_option=True)
    check.add_argument("paths", nargs="+", metavar="PATH")
    diff = command(verbs, "diff", run_diff, "compare two checkpoints by names and hashes", json_option=True)
    diff.add_argument("one", metavar="PATH")
    diff.add_argument("other", metavar="PATH")
    remove = command(verbs, "rm", run_rm, "remove checkpoints that nobody reads")
    remove.add_argument("paths", nargs="+", metavar="PATH")
    remove.add_argument("-f", "--force", action="store_true", help="pinned ones, too")
    gc = command(verbs, "gc", run_gc, "remove what savers and conversions that died have left")
    gc.add_argument("paths", nargs="+", metavar="PATH", help="the directory that has the checkpoints")
    pin = command(verbs, "pin", run_pin, "keep checkpoints from retention")
    pin.add_argument("paths", nargs="+", metavar="PATH")
    pin.add_argument("--reason", default="", metavar="WORDS", help="why, for who looks later")
    unpin = command(verbs, "unpin", run_unpin, "let retention have them again")
    unpin.add_argument("paths", nargs="+", metavar="PATH")
    change = command(verbs, "convert", run_convert, "checkpoints, DCP, safetensors, torch.save")
    change.description = (
        "Converts a checkpoint of ffs, a DCP directory, a safetensors file or a torch.save file, in the "
        "cluster (ffs:/path) or here, into another. The result appears whole, or not at all."
    )
    change.add_argument("source", metavar="SOURCE")
    change.add_argument("goal", metavar="GOAL")
    change.add_argument(
        "--to",
        choices=("ffs", "dcp", "safetensors", "torch"),
        help="the format (by default by GOAL's ending, else ffs in the cluster)",
    )
    change.add_argument("--trusted", action="store_true", help="pickles of SOURCE may run code")
    for parser in (listed, show, check, remove, gc, pin, unpin):
        literal_option(parser)
    advice = command(verbs, "advise", run_advise, "how often to save", json_option=True)
    advice.add_argument("--stall", type=_seconds, required=True, metavar="TIME", help="of training, a save")
    advice.add_argument(
        "--persist", type=_seconds, default=0.0, metavar="TIME", help="until a checkpoint is visible"
    )
    advice.add_argument(
        "--mtbf", type=_seconds, required=True, metavar="TIME", help="mean time between failures of the job"
    )
    advice.add_argument(
        "--restart", type=_seconds, default=0.0, metavar="TIME", help="from a failure to the next step"
    )
    advice.add_argument("--mfu", type=float, metavar="SHARE", help="model FLOPs utilisation without failures")


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error


# --- verbs ------------------------------------------------------------------------------------------


def run_ls(args: argparse.Namespace) -> int:
    tally = Tally(args)
    rows = []
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                for path in checkpoints_at(client, place.path):
                    with tally.guard():
                        rows.append(_summary(client, path))
    if args.json:
        for row in rows:
            print_json(row)
    elif rows:
        head = ("step", "size", "tensors", "ranks", "linked", "saved", "", "path")
        print(table(head, [_line(row) for row in rows], right=(0, 1, 2, 3, 4)))
    return tally.status


def checkpoints_at(client: Client, path: str) -> list[str]:
    """The path itself if it is a checkpoint, else those right in it, by step, then by name. Blocking."""
    from ffs.checkpoint.commit import step_of
    from ffs.checkpoint.manifest import FILE_NAME

    if client.exists(posixpath.join(path, FILE_NAME)):
        return [path]
    names = [name for name in client.listdir(path) if not name.startswith(".")]
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    others = sorted(name for name in names if step_of(name) is None)
    found = [name for _, name in steps]
    found += [name for name in others if client.exists(posixpath.join(path, name, FILE_NAME))]
    return [posixpath.join(path, name) for name in found]


def _summary(client: Client, path: str) -> dict[str, object]:
    from ffs.checkpoint import retention
    from ffs.checkpoint.hold import read_manifest

    manifest = read_manifest(client, path)
    return {
        "path": path,
        "step": manifest.step,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "ranks": manifest.ranks,
        "linked_bytes": sum(shard.bytes for shard in manifest.shards if shard.linked),
        "stored_bytes": sum(shard.bytes for shard in manifest.shards),
        "pinned": retention.is_pinned(client, path),
        "saved_s": client.stat(posixpath.join(path, "manifest.json")).st_mtime,
    }


def _line(row: dict[str, object]) -> tuple[str, ...]:
    stored = int(row["stored_bytes"])  # type: ignore[call-overload]
    linked = int(row["linked_bytes"])  # type: ignore[call-overload]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(row["saved_s"])))  # type: ignore[arg-type]
    return (
        "-" if row["step"] is None else str(row["step"]),
        format_bytes(int(row["bytes"])),  # type: ignore[call-overload]
        str(row["tensors"]),
        str(row["ranks"]),
        f"{100 * linked // stored} %" if stored else "-",
        when,
        "pinned" if row["pinned"] else "",
        shown(str(row["path"])),
    )


def run_show(args: argparse.Namespace) -> int:
    from ffs.checkpoint import retention
    from ffs.checkpoint.hold import read_manifest

    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for number, place in enumerate(places):
            with tally.guard():
                manifest = read_manifest(client, place.path)
                pinned = retention.pin_reason(client, place.path)
                if args.json:
                    print_json(_summary(client, place.path) | {"manifest": _plain(manifest)})
                    continue
                if number:
                    print()
                print("\n".join(lines(place.path, manifest, pinned, every=args.tensors)))
    return tally.status


def _plain(manifest: Manifest) -> object:
    import msgspec

    return msgspec.to_builtins(manifest)


def lines(path: str, manifest: Manifest, pinned: str | None, *, every: bool) -> list[str]:
    """For people. Pure."""
    stored = sum(shard.bytes for shard in manifest.shards)
    linked = sum(shard.bytes for shard in manifest.shards if shard.linked)
    out = [f"checkpoint  {shown(path)}"]
    if manifest.step is not None:
        out.append(f"step        {manifest.step}")
    out.append(f"saved by    {plural(manifest.ranks, 'rank')}")
    out.append(
        f"holds       {plural(len(manifest.tensors), 'tensor')} ({len(manifest.tied)} tied), "
        f"{format_bytes(manifest.nbytes)}"
    )
    out.append(
        f"files       {plural(len(manifest.shards), 'shard')}, {format_bytes(stored)}, "
        f"of it {format_bytes(linked)} linked to an earlier checkpoint"
    )
    if pinned is not None:
        out.append(f"pinned      {pinned or 'yes'}")
    kinds: dict[str, tuple[int, int]] = {}
    for name, tensor in manifest.tensors.items():
        kind = name.split(".")[0]
        count, nbytes = kinds.get(kind, (0, 0))
        kinds[kind] = count + 1, nbytes + tensor.bytes
    rows = [(shown(kind), str(count), format_bytes(nbytes)) for kind, (count, nbytes) in kinds.items()]
    if len(rows) <= 50:
        out += ["", table(("part", "tensors", "size"), rows, right=(1, 2))]
    if every:
        detail = [
            (
                shown(name),
                tensor.dtype,
                str(list(tensor.shape)),
                format_bytes(tensor.bytes),
                str(len(tensor.parts)),
            )
            for name, tensor in manifest.tensors.items()
        ]
        out += ["", table(("tensor", "type", "shape", "size", "pieces"), detail, right=(3, 4))]
    return out


def run_verify(args: argparse.Namespace) -> int:
    from ffs.checkpoint.hold import read_manifest
    from ffs.checkpoint.verify import verify

    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        paths = []
        for place in places:
            with tally.guard():
                paths += checkpoints_at(client, place.path)
        for path in paths:
            with tally.guard():
                total = read_manifest(client, path).nbytes
                began = time.monotonic()
                with Progress(sys.stderr, shown(path), total) as progress:
                    damages = verify(client, path, progress.advance)
                seconds = time.monotonic() - began
                if args.json:
                    rows = [{"file": d.file, "tensor": d.tensor, "what": d.words} for d in damages]
                    print_json({"path": path, "bytes": total, "seconds": round(seconds, 3), "damages": rows})
                for damage in damages:
                    where = f"{damage.file}: {shown(damage.tensor)}" if damage.tensor else damage.file
                    tally.failed(FfsError(f"{where}: {damage.words}", path))
                if not damages and not args.json:
                    rate = format_rate(total, seconds)
                    print(f"{shown(path)}: whole, {format_bytes(total)} compared with their hashes, {rate}")
    return tally.status


def run_diff(args: argparse.Namespace) -> int:
    from ffs.checkpoint.hold import read_manifest
    from ffs.checkpoint.verify import differences

    tally = Tally(args)
    args.literal = True
    with remote_operands(args, [args.one, args.other], tally) as (client, places):
        one, other = (read_manifest(client, place.path) for place in places)
    found = differences(one, other)
    same = len(other.tensors) - sum(each.kind != "removed" for each in found)
    if args.json:
        rows = [{"name": d.name, "kind": d.kind, "words": d.words} for d in found]
        print_json({"same": same, "differences": rows})
    else:
        for each in found:
            print(f"{each.kind:<9} {shown(each.name)}" + (f"  ({each.words})" if each.words else ""))
        print(f"{plural(same, 'tensor')} the same, {len(found)} not")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from ffs.checkpoint.convert import Place, convert

    places = [parse_location(args.source), parse_location(args.goal)]
    with contextlib.ExitStack() as stack:
        client = None
        if any(place.remote for place in places):
            client = stack.enter_context(connect(args, one_address(places, args.cluster)))
        source, goal = (Place(place.path, client if place.remote else None) for place in places)
        with Progress(sys.stderr, shown(goal.path), None) as progress:
            convert(
                source,
                goal,
                args.to,
                trusted=args.trusted,
                progress=progress.advance,
                begun=progress.expect,
            )
    return 0


def run_rm(args: argparse.Namespace) -> int:
    from ffs.checkpoint import retention
    from ffs.checkpoint.hold import read_manifest

    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                read_manifest(client, place.path)  # nothing that isn't a checkpoint
                if retention.is_pinned(client, place.path) and not args.force:
                    raise Busy("it is pinned: ffs ckpt unpin first, or rm --force", place.path)
                if not retention.remove(client, place.path):
                    raise Busy("somebody is reading it: try again later", place.path)
    return tally.status


def run_gc(args: argparse.Namespace) -> int:
    from ffs.checkpoint.remains import collect_remains

    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                client.listdir(place.path)  # says what isn't there
                for name in collect_remains(client, place.path):
                    print(f"removed {shown(posixpath.join(place.path, name))}")
    return tally.status


def run_pin(args: argparse.Namespace) -> int:
    from ffs.checkpoint import retention
    from ffs.checkpoint.hold import read_manifest

    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                read_manifest(client, place.path)
                retention.pin(client, place.path, args.reason)
    return tally.status


def run_unpin(args: argparse.Namespace) -> int:
    from ffs.checkpoint import retention
    from ffs.checkpoint.hold import read_manifest

    tally = Tally(args)
    with remote_operands(args, args.paths, tally) as (client, places):
        for place in places:
            with tally.guard():
                read_manifest(client, place.path)
                retention.unpin(client, place.path)
    return tally.status


def run_advise(args: argparse.Namespace) -> int:
    from ffs.checkpoint.advise import advise

    advice = advise(args.stall, max(args.persist, args.stall), args.mtbf, args.restart, args.mfu)
    if args.json:
        print_json(
            {
                "young_s": advice.young_s,
                "daly_s": advice.daly_s,
                "interval_s": advice.interval_s,
                "waste": advice.waste,
                "mfu": advice.mfu,
            }
        )
        return 0
    print(f"save every   {format_seconds(advice.interval_s)}")
    print(f"             Young {format_seconds(advice.young_s)}, Daly {format_seconds(advice.daly_s)}")
    print(f"then lost    {100 * advice.waste:.2f} % of the time: stalls, work since the last save, restarts")
    if advice.mfu is not None:
        print(f"effective    {100 * advice.mfu:.2f} % MFU")
    return 0
