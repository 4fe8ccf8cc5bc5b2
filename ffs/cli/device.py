"""`ffs device inspect`, `ffs device format`: devices of storage servers, without a cluster."""

from __future__ import annotations

import argparse
import time
import uuid

from ffs.cli.parsing import Commands, command, print_json, size_argument
from ffs.cli.text import format_bytes
from ffs.errors import InvalidArgument


def add_commands(commands: Commands) -> None:
    device = commands.add_parser(
        "device",
        help="look at or format a device",
        description="Devices of storage servers, without a cluster.",
    )
    device.set_defaults(run=lambda args: _usage(device))
    verbs = device.add_subparsers(dest="verb", metavar="VERB")
    inspect = command(verbs, "inspect", run_inspect, "show what a device's superblock says", json_option=True)
    inspect.add_argument("path", metavar="DEVICE")
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


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def run_inspect(args: argparse.Namespace) -> int:
    from ffs._native.device import device_inspect

    info = device_inspect(args.path)
    fields: dict[str, object] = {
        "path": args.path,
        "cluster": info.cluster.hex(),
        "uuid": info.device_uuid.hex(),
        "size": info.size_bytes,
        "sector": info.sector_bytes,
        "format": info.format_version,
        "created_ms": info.created_ms,
        "journal": info.journal_bytes,
        "max_chunks": info.max_chunks,
        "targets": list(info.targets),
        "features": {
            "compat": info.features_compat,
            "ro_compat": info.features_ro_compat,
            "incompat": info.features_incompat,
        },
    }
    if args.json:
        print_json(fields)
        return 0
    created = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(info.created_ms / 1000))
    targets = ", ".join(str(target) for target in info.targets)
    print(f"device    {args.path}")
    print(f"cluster   {info.cluster.hex()}")
    print(f"uuid      {uuid.UUID(bytes=bytes(info.device_uuid))}")
    print(
        f"size      {info.size_bytes} bytes ({format_bytes(info.size_bytes)}), sectors of {info.sector_bytes}"
    )
    print(f"format    version {info.format_version}, made {created}")
    print(f"journal   {format_bytes(info.journal_bytes)}; at most {info.max_chunks} chunks")
    print(f"targets   {targets}")
    return 0


def run_format(args: argparse.Namespace) -> int:
    from ffs._native.device import device_format

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
    )
    print(f"{args.path}: formatted for {len(args.target)} targets of cluster {cluster.hex()}")
    return 0
