"""`ffs space`: KV spaces, their bounds and what they hold. docs/guides/kv.md, Bounds."""

from __future__ import annotations

import argparse
import contextlib
import posixpath
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ffs.cli.location import one_address, parse_remote
from ffs.cli.names import shown
from ffs.cli.parsing import Commands, command, connect, count_argument, print_json, size_argument
from ffs.cli.text import format_bytes, format_duration, parse_bytes, parse_duration, plural, table
from ffs.errors import InvalidArgument
from ffs.proto import meta
from ffs.proto.cluster import TableRoute
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KV_SPACE, KvParams

if TYPE_CHECKING:
    from ffs.client.client import Client
    from ffs.kv.bounds import Usage
    from ffs.kv.geometry import Geometry
    from ffs.kv.int8 import BlockShape

NONE = ("none", "0")


def add_commands(commands: Commands) -> None:
    space = commands.add_parser(
        "space",
        help="KV spaces: make, bound and look at them",
        description="KV spaces: the caches of KV blocks that inference engines share.",
    )
    space.set_defaults(run=lambda args: _usage_line(space))
    verbs = space.add_subparsers(dest="verb", metavar="VERB")
    add_create(verbs)
    change = command(verbs, "set", run_set, "change the bounds of a KV space", json_option=True)
    change.add_argument("path", metavar="PATH")
    _add_bounds(change)
    stat = command(verbs, "stat", run_stat, "bounds and use of KV spaces", json_option=True)
    stat.add_argument("paths", metavar="PATH", nargs="+")
    stat.add_argument("--chains", action="store_true", help="and each chain's share of the quota")
    add_ls(verbs)


def add_create(verbs: Commands) -> None:
    """Of `ffs space` and `ffs kv`."""
    create = command(verbs, "create", run_create, "make a KV space", json_option=True)
    create.add_argument("path", metavar="PATH")
    create.add_argument(
        "--block-size",
        type=size_argument,
        metavar="SIZE",
        help="largest block, 1 to 16MiB (with --parts: of each part); it stays. Needed without --values",
    )
    create.add_argument(
        "--values",
        choices=("int8",),
        help="blocks of a --shape, whose values are stored in eight bits (ffs.kv.int8.Int8Space)",
    )
    create.add_argument(
        "--shape",
        type=_shape,
        metavar="LAYERS,TOKENS,HEADS,SIZE",
        help="of a block: its layers, tokens, KV heads, and numbers in a head",
    )
    create.add_argument("--dtype", choices=("bfloat16", "float16"), help="of its numbers (default: bfloat16)")
    create.add_argument(
        "--order", choices=("tokens", "heads"), help="what comes first in a layer (default: tokens)"
    )
    create.add_argument(
        "--parts",
        type=count_argument,
        default=1,
        metavar="N",
        help="into how many chunks each block is cut, groups of layers: for blocks of more than 16MiB",
    )
    copies = create.add_mutually_exclusive_group()
    copies.add_argument("--table", help="chain table by name or id (default: the one for KV spaces)")
    copies.add_argument(
        "--replicas",
        type=count_argument,
        metavar="N",
        help="1 to 3 copies, by the chain table that has so many",
    )
    create.add_argument(
        "--stripe", type=count_argument, metavar="N", help="over how many chains of the table (default: all)"
    )
    create.add_argument(
        "--exist-ok", action="store_true", help="be content with one that has what is given here"
    )
    _add_bounds(create)


def add_ls(verbs: Commands) -> None:
    """Of `ffs space` and `ffs kv`."""
    listing = command(verbs, "ls", run_ls, "KV spaces below a directory", json_option=True)
    listing.add_argument("path", metavar="PATH", nargs="?", default="/")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quota", type=_quota, metavar="SIZE", help="how much it may hold on one replica: 10G, or none"
    )
    parser.add_argument(
        "--ttl", type=_ttl, metavar="TIME", help="how long a block stays after its put: 30s, 12h, or none"
    )
    parser.add_argument(
        "--evictable",
        type=_yes_no,
        metavar="yes|no",
        help="whether blocks are dropped to make room (default: yes), or a full space refuses puts",
    )
    parser.add_argument(
        "--dedup",
        action=argparse.BooleanOptionalAction,
        help="servers keep equal blocks once where they meet; for spaces whose tenants store the same under "
        "keys of their own",
    )


def _quota(text: str) -> int:
    try:
        return 0 if text in NONE else parse_bytes(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _ttl(text: str) -> float:
    try:
        return 0 if text in NONE else parse_duration(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _yes_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r}: give yes or no")
    return text == "yes"


def _shape(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if len(numbers) != 4 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give four numbers, layers,tokens,heads,head size: 32,16,8,128"
        )
    return tuple(map(int, numbers))


def _usage_line(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def blocks_wanted(args: argparse.Namespace) -> tuple[Geometry, bytes]:
    """What the blocks of a new space are, and what it keeps of their shape. InvalidArgument."""
    from ffs.kv.geometry import Geometry

    if args.values is None:
        if (args.shape, args.dtype, args.order) != (None, None, None):
            raise InvalidArgument("--shape, --dtype and --order go with --values int8", args.path)
        if args.block_size is None:
            raise InvalidArgument("how large is a block? Give --block-size, or --values int8", args.path)
        return Geometry(args.block_size, args.parts), b""
    from ffs.kv.int8 import BlockShape

    if args.shape is None:
        raise InvalidArgument("--values int8 needs the shape of a block: --shape 32,16,8,128", args.path)
    layers, tokens, heads, head_size = args.shape
    shape = BlockShape(
        layers=layers,
        tokens=tokens,
        heads=heads,
        head_size=head_size,
        dtype=args.dtype or "bfloat16",
        order=args.order or "tokens",
    )
    if args.block_size not in (None, shape.plain_bytes):
        raise InvalidArgument(
            f"a block of that shape has {shape.plain_bytes} bytes: leave --block-size out", args.path
        )
    return shape.geometry(args.parts), shape.stored


def run_create(args: argparse.Namespace) -> int:
    from ffs.kv.handle import Handle

    place = parse_remote(args.path)
    geometry, identity = blocks_wanted(args)
    wanted = int(args.table) if args.table and args.table.isdigit() else args.table
    with connect(args, one_address([place], args.cluster)) as client:
        if args.replicas is not None:
            wanted = client.core.routing.kv_table_of(args.replicas)
        client.makedirs(posixpath.dirname(place.path), exist_ok=True)
        Handle.create(
            client,
            place.path,
            geometry,
            table=wanted,
            stripe=args.stripe,
            quota_bytes=args.quota,
            ttl_s=args.ttl,
            evictable=args.evictable,
            dedup=args.dedup,
            exist_ok=args.exist_ok,
            permissions=0o666,
            identity=identity,
        ).close()
        _tell(args, client, place.path)
    return 0


def run_set(args: argparse.Namespace) -> int:
    from ffs.kv.bounds import set_bounds, usage_of

    place = parse_remote(args.path)
    if (args.quota, args.ttl, args.evictable, args.dedup) == (None, None, None, None):
        raise InvalidArgument("nothing to change: give --quota, --ttl, --evictable or --dedup", args.path)
    with connect(args, one_address([place], args.cluster)) as client:
        set_bounds(
            client,
            place.path,
            quota_bytes=args.quota,
            ttl_s=args.ttl,
            evictable=args.evictable,
            dedup=args.dedup,
        )
        _tell(args, client, place.path)
        attributes = _space(client, place.path)
        if warning := overfull(place.path, attributes.kv, usage_of(client, attributes.ino)):
            print(warning, file=sys.stderr)
    return 0


def overfull(path: str, kv: KvParams | None, usage: Usage) -> str:
    """A line where the quota is less than a space holds that drops nothing; else ""."""
    if kv is None or kv.flags & KV_EVICTABLE or not 0 < kv.quota_bytes < usage.bytes:
        return ""
    return (
        f"ffs: {path} holds {format_bytes(usage.bytes)}, more than its quota of "
        f"{format_bytes(kv.quota_bytes)}, and isn't evictable: it takes no new blocks until some are removed "
        "or expire (or --evictable yes)"
    )


def _tell(args: argparse.Namespace, client: Client, path: str) -> None:
    """The bounds, after a change."""
    attributes = _space(client, path)
    fields = space_fields(path, attributes, None, _tables(client))
    if args.json:
        print_json(fields)
    else:
        print(f"{shown(path)}: {bounds_words(attributes.kv)}")


def run_stat(args: argparse.Namespace) -> int:
    from ffs.kv.bounds import usage_of

    places = [parse_remote(path) for path in args.paths]
    with connect(args, one_address(places, args.cluster)) as client:
        tables = _tables(client)
        for number, place in enumerate(places):
            attributes = _space(client, place.path)
            usage = usage_of(client, attributes.ino)
            if args.json:
                print_json(space_fields(place.path, attributes, usage, tables))
                continue
            if number:
                print()
            print("\n".join(stat_lines(place.path, attributes, usage, tables)))
            if args.chains:
                print(share_table(usage))
    return 0


def run_ls(args: argparse.Namespace) -> int:
    from ffs.kv.bounds import usage_of_all

    place = parse_remote(args.path)
    with connect(args, one_address([place], args.cluster)) as client:
        usages = usage_of_all(client)
        tables = _tables(client)
        found = [(path, client.attributes(path)) for path in spaces_below(client, place.path)]
    if args.json:
        for path, attributes in found:
            print_json(space_fields(path, attributes, usages.get(attributes.ino), tables))
    elif found:
        print(listing_table(found, usages, tables))
    return 0


def spaces_below(client: Client, top: str) -> Iterator[str]:
    """Those of a tree, or the one that `top` is. Without recursion: trees may be deeper than Python's
    stack."""
    if client.attributes(top).type == KV_SPACE:
        yield top
        return
    stack = [top]
    while stack:
        below = []
        for entry in sorted(client.scandir(stack.pop()), key=lambda entry: entry.name):
            if entry.is_kv_space():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                below.append(entry.path)
        stack += reversed(below)


def _space(client: Client, path: str) -> meta.Attributes:
    attributes = client.attributes(path)
    if attributes.kv is None:
        raise InvalidArgument("isn't a KV space: ffs space create makes one", path)
    return attributes


def _tables(client: Client) -> dict[int, TableRoute]:
    return {route.id: route for route in client.core.routing.get().tables}


# --- words ------------------------------------------------------------------------------------------


def bounds_words(kv: KvParams | None) -> str:
    """'quota 10.0 GiB, ttl 12h, evictable, int8 values'."""
    if kv is None:
        return ""
    quota = f"quota {format_bytes(kv.quota_bytes)}" if kv.quota_bytes else "no quota"
    ttl = f"ttl {format_duration(kv.ttl_ms / 1000)}" if kv.ttl_ms else "no ttl"
    evictable = "evictable" if kv.flags & KV_EVICTABLE else "not evictable"
    int8 = ", int8 values" if coded_shape(kv) is not None else ""
    return f"{quota}, {ttl}, {evictable}{', dedup' if kv.flags & KV_DEDUP else ''}{int8}"


def coded_shape(kv: KvParams) -> BlockShape | None:
    """Of the blocks of a space that keeps int8 values, as far as this version can read it."""
    if not kv.identity:
        return None
    from ffs.kv.int8 import BlockShape

    with contextlib.suppress(InvalidArgument):  # of a newer version: its bounds can be changed all the same
        return BlockShape.of_stored(kv.identity)
    return None


def stat_lines(
    path: str, attributes: meta.Attributes, usage: Usage, tables: dict[int, TableRoute]
) -> Iterator[str]:
    kv, layout = attributes.kv, attributes.layout
    if kv is None or layout is None:
        raise InvalidArgument("isn't a KV space", path)
    route = tables.get(layout.table)
    replicas = f" ({plural(route.replicas, 'replica')})" if route is not None else ""
    yield f"path       {shown(path)}"
    yield f"inode      {attributes.ino}"
    parts = f", in {kv.parts} parts" if kv.parts > 1 else ""
    yield f"blocks     {'of' if kv.parts > 1 else 'up to'} {format_bytes(kv.block_bytes)}{parts}"
    if (shape := coded_shape(kv)) is not None:
        size = f"{shape.layers} layers, {shape.tokens} tokens, {shape.heads} heads of {shape.head_size}"
        yield f"values     int8: {size}, {shape.dtype}, {shape.order} first"
    yield f"table      {route.name if route is not None else layout.table}{replicas}"
    share = f", {usage.bytes / kv.quota_bytes:.0%} used" if kv.quota_bytes else ""
    yield f"quota      {format_bytes(kv.quota_bytes) if kv.quota_bytes else 'none'}{share}"
    yield f"ttl        {format_duration(kv.ttl_ms / 1000) if kv.ttl_ms else 'none'}"
    yield f"evictable  {'yes' if kv.flags & KV_EVICTABLE else 'no'}"
    yield f"used       {format_bytes(usage.bytes)} in {plural(usage.blocks, 'block')}"
    if kv.flags & KV_DEDUP:
        shared = plural(usage.shared_blocks, "block")
        yield f"dedup      {format_bytes(usage.saved_bytes)} saved, {shared} in a place with others"
    yield (
        f"evicted    {format_bytes(usage.evicted_bytes)} in {plural(usage.evicted_blocks, 'block')} "
        "since the servers started"
    )
    if usage.expired_blocks:
        yield f"expired    {plural(usage.expired_blocks, 'block')}"
    if usage.reported < usage.chains:
        chains = plural(usage.chains, "chain")
        yield f"           as {usage.reported} of {chains} say; the others said nothing yet"


def share_table(usage: Usage) -> str:
    rows = [
        (
            str(share.chain),
            format_bytes(share.quota_bytes) if usage.quota_bytes else "-",
            format_bytes(share.bytes),
            str(share.blocks),
            format_bytes(share.evicted_bytes),
        )
        for share in usage.shares
    ]
    return table(("chain", "share", "used", "blocks", "evicted"), rows, right=(0, 1, 2, 3, 4))


def listing_table(
    found: list[tuple[str, meta.Attributes]], usages: dict[int, Usage], tables: dict[int, TableRoute]
) -> str:
    rows = []
    for path, attributes in found:
        kv, layout, usage = attributes.kv, attributes.layout, usages.get(attributes.ino)
        if kv is None or layout is None:
            continue
        rows.append(
            (
                shown(path),
                tables[layout.table].name if layout.table in tables else str(layout.table),
                format_bytes(kv.block_bytes),
                format_bytes(usage.bytes) if usage is not None else "-",
                format_bytes(kv.quota_bytes) if kv.quota_bytes else "-",
                format_duration(kv.ttl_ms / 1000) if kv.ttl_ms else "-",
                "yes" if kv.flags & KV_EVICTABLE else "no",
                format_bytes(usage.evicted_bytes) if usage is not None else "-",
            )
        )
    head = ("path", "table", "block", "used", "quota", "ttl", "evictable", "evicted")
    return table(head, rows, right=(2, 3, 4, 5, 7))


def space_fields(
    path: str, attributes: meta.Attributes, usage: Usage | None, tables: dict[int, TableRoute]
) -> dict[str, object]:
    """For programs: sizes in bytes, times in milliseconds; 0: none."""
    kv, layout = attributes.kv, attributes.layout
    if kv is None or layout is None:
        raise InvalidArgument("isn't a KV space", path)
    fields: dict[str, object] = {
        "path": path,
        "inode": attributes.ino,
        "table": tables[layout.table].name if layout.table in tables else str(layout.table),
        "block_bytes": kv.block_bytes,
        "parts": kv.parts,
        "quota_bytes": kv.quota_bytes,
        "ttl_ms": kv.ttl_ms,
        "evictable": bool(kv.flags & KV_EVICTABLE),
        "dedup": bool(kv.flags & KV_DEDUP),
    }
    if (shape := coded_shape(kv)) is not None:
        fields["int8_values"] = msgspec.structs.asdict(shape)
    if usage is not None:
        fields |= {
            "bytes": usage.bytes,
            "blocks": usage.blocks,
            "evicted_bytes": usage.evicted_bytes,
            "evicted_blocks": usage.evicted_blocks,
            "expired_blocks": usage.expired_blocks,
            "shared_blocks": usage.shared_blocks,
            "saved_bytes": usage.saved_bytes,
            "hits": usage.hits,
            "chains": usage.chains,
            "chains_reported": usage.reported,
            "shares": [
                {
                    "chain": share.chain,
                    "quota_bytes": share.quota_bytes,
                    "bytes": share.bytes,
                    "blocks": share.blocks,
                    "evicted_bytes": share.evicted_bytes,
                }
                for share in usage.shares
            ],
        }
    return fields
