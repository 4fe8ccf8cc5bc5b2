"""Configuration of a metadata process: one struct, from the command line. docs/operations.md, ffs-meta."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ffs.rpc.address import Address, parse_address


@dataclass(frozen=True, slots=True)
class MetaConfig:
    store: str  # lmdb://DIRECTORY or fdb://CLUSTER-FILE
    listen: Address  # port 0: any free one
    advertise: str  # host:port that others reach it by; "": where it listens
    secret_file: str  # "": none, loopback only
    ready_file: str  # "": none
    lease_ms: int  # 1000 .. 60000: how long a silent manager stays the manager
    failure_timeout_ms: int  # 200 .. 600000: how long a silent storage node is waited for
    log_level: str
    key_rotation_s: int  # how long a key signs capabilities; 0: until `ffs cluster rotate-keys`


def _lease_ms(text: str) -> int:
    value = int(text)
    if not 1000 <= value <= 60_000:
        raise argparse.ArgumentTypeError("give 1000 to 60000 (milliseconds)")
    return value


def _failure_timeout_ms(text: str) -> int:
    value = int(text)
    if not 200 <= value <= 600_000:
        raise argparse.ArgumentTypeError("give 200 to 600000 (milliseconds)")
    return value


def _hours(text: str) -> int:
    hours = float(text)
    if not 0 <= hours <= 24 * 365:
        raise argparse.ArgumentTypeError("give 0 (never) to 8760 (hours)")
    if hours and hours < 1:
        raise argparse.ArgumentTypeError("give 0 (never), or at least 1 hour: capabilities last ten minutes")
    return round(hours * 3600)


def parse_config(arguments: Sequence[str] | None = None) -> MetaConfig:
    """From argv. Ends the process with a usage line for what argparse refuses; InvalidArgument."""
    parser = argparse.ArgumentParser(
        prog="ffs-meta", description="The metadata service of ffs: namespace and cluster manager."
    )
    parser.add_argument("--store", required=True, help="lmdb://DIRECTORY or fdb://CLUSTER-FILE?prefix=TEXT")
    parser.add_argument("--listen", default="127.0.0.1:7550", help="host:port; port 0 takes a free one")
    parser.add_argument("--advertise", default="", help="host:port that others reach it by")
    parser.add_argument(
        "--cluster-secret-file", default="", help="wanted of all who connect; needed beyond loopback"
    )
    parser.add_argument("--ready-file", default="", help="written when it serves: one JSON object")
    parser.add_argument("--lease-ms", type=_lease_ms, default=3000)
    parser.add_argument(
        "--failure-timeout-ms",
        type=_failure_timeout_ms,
        default=10_000,
        help="a storage node that isn't heard for so long is given up: its chains go on without it",
    )
    parser.add_argument(
        "--key-rotation-hours",
        type=_hours,
        default=24 * 3600,
        help="another key signs capabilities after so many hours (default 24; 0: only by command)",
    )
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    known = parser.parse_args(arguments)
    if known.advertise:
        parse_address(known.advertise)
    return MetaConfig(
        store=known.store,
        listen=parse_address(known.listen, port_zero=True),
        advertise=known.advertise,
        secret_file=known.cluster_secret_file,
        ready_file=known.ready_file,
        lease_ms=known.lease_ms,
        failure_timeout_ms=known.failure_timeout_ms,
        log_level=known.log_level,
        key_rotation_s=known.key_rotation_hours,
    )
