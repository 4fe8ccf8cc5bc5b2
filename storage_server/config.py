"""Configuration of a storage process: one struct, from the command line. docs/operations.md, ffs-storage."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ffs._native.server import DISCARDS, WRITE_CACHES, ZERO_COPY_SENDS
from ffs.errors import InvalidArgument
from ffs.proto.cluster import MAX_TARGETS_OF_DEVICE, ROLES
from ffs.rpc.address import Address, parse_address, parse_addresses
from ffs.rpc.congestion import check_congestion

MAX_DOMAIN = 100

UUID_PREFIX = "uuid:"  # of a device that is named by its uuid
_DEVICE_WORDS = {
    "write-cache": WRITE_CACHES,
    "discard": DISCARDS,
    "role": ROLES[1:],
    "data": ("keep", "null"),
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    path: str  # or "uuid:" and the device's uuid
    size_bytes: int  # of a file that is made; 0: the device as it is
    write_cache: str = "auto"  # one of WRITE_CACHES
    discard: str = "auto"  # one of DISCARDS
    role: str = ""  # "" or one of ROLES: which chain tables use it
    data: str = "keep"  # or "null": keeps records and no bytes, for measuring


@dataclass(frozen=True, slots=True)
class StorageConfig:
    metadata: tuple[Address, ...]
    name: str  # of the node, for people; unique among live nodes
    directory: str  # the node's uuid and lock
    devices: tuple[DeviceChoice, ...]
    listen: Address  # host of the data ports; port of the control server (0: any)
    advertise_host: str  # numeric address that others reach the node by; "": the host it listens on
    socket_dir: str  # Unix sockets for `local`; "": chosen
    local: bool  # serve `local`
    secret_file: str  # "": none, loopback only
    format_if_new: bool  # also format devices that exist and are blank
    targets_per_device: int  # 1 .. 64, at formatting
    metrics: Address | None
    io_backend: str  # auto, uring, pread
    zero_copy_send: str  # one of ZERO_COPY_SENDS
    tcp_congestion: str | None  # of data connections; None: cubic where it is allowed
    rdma: str  # devices for RDMA (docs/rdma.md); "": all there are; "off": none
    rdma_traffic_class: int  # of what goes out over them, 0 .. 255
    pool_bytes: int  # a device's buffers; 0: the native default
    domain: str  # failure domain (rack, power feed); "": the node is its own
    scrub_bytes_per_s: int  # a device is read and checked at that rate; 0: not at all
    dedup_bytes_per_s: int  # of a device that are compared to find equal blocks; 0: none are looked for
    sync_share_percent: int  # of a device that background work may take while clients are served
    start_timeout_s: float  # how long to wait for the metadata service at start
    ready_file: str
    log_level: str


def parse_size(text: str) -> int:
    """Bytes: a number, or one with K, M, G or T (powers of 1024). InvalidArgument."""
    upper = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = upper[-1:] if upper[-1:].isalpha() else ""
    number = upper.removesuffix(unit) if unit else upper
    if unit not in _UNITS or not (number.isascii() and number.isdigit()):
        raise InvalidArgument(f"size {text!r}: give bytes, or a number with K, M, G or T")
    return int(number) * _UNITS[unit]


def parse_device(text: str, default_size: int) -> DeviceChoice:
    """PATH[:SIZE][,write-cache=WORD][,discard=WORD][,role=WORD]. A path with a colon or comma that exists is
    a path; PATH may be uuid:UUID. InvalidArgument."""
    if os.path.exists(text):
        return DeviceChoice(text, default_size)
    place, *options = text.split(",")
    given: dict[str, str] = {}
    for option in options:
        name, _, word = option.partition("=")
        if name not in _DEVICE_WORDS or name in given:
            known = ", ".join(f"{known}=..." for known in _DEVICE_WORDS)
            raise InvalidArgument(f"--device {text}: {option!r} isn't an option, or is given twice: {known}")
        if word not in _DEVICE_WORDS[name]:
            raise InvalidArgument(f"--device {text}: {name} is one of {', '.join(_DEVICE_WORDS[name])}")
        given[name] = word
    words = {name.replace("-", "_"): word for name, word in given.items()}
    match = re.fullmatch(r"(.+):([0-9]+[KMGT]?(?:i?B)?)", place, re.IGNORECASE | re.ASCII)
    if match is None or os.path.exists(place) or place.startswith(UUID_PREFIX):
        return DeviceChoice(place, default_size, **words)
    return DeviceChoice(match[1], parse_size(match[2]), **words)


def parse_config(arguments: Sequence[str] | None = None) -> StorageConfig:
    """From argv. Ends the process with a usage line for what argparse refuses; InvalidArgument."""
    parser = _parser()
    known = parser.parse_args(arguments)
    default_size = parse_size(known.device_size) if known.device_size else 0
    devices = tuple(parse_device(text, default_size) for text in known.device)
    null = next((device.path for device in devices if device.data == "null"), None)
    if null is not None and not known.allow_null_devices:
        raise InvalidArgument(
            "data=null stores nothing and is for measuring: give --allow-null-devices too", null
        )
    if len({device.path for device in devices}) != len(devices):
        raise InvalidArgument("a device is named twice")
    if not 1 <= known.targets_per_device <= MAX_TARGETS_OF_DEVICE:
        raise InvalidArgument(f"--targets-per-device: give 1 to {MAX_TARGETS_OF_DEVICE}")
    if not 1 <= known.sync_share <= 100:
        raise InvalidArgument("--sync-share: give 1 to 100 percent")
    if not 0 <= known.rdma_traffic_class <= 255:
        raise InvalidArgument("--rdma-traffic-class: give 0 to 255 (DSCP << 2)")
    listen = known.listen if _has_port(known.listen) else f"{_bracketed(known.listen)}:0"
    return StorageConfig(
        metadata=parse_addresses(known.metadata),
        name=known.name or socket.gethostname(),
        directory=known.dir,
        devices=devices,
        listen=parse_address(listen, port_zero=True),
        advertise_host=known.advertise_host,
        socket_dir=known.socket_dir,
        local=not known.no_local,
        secret_file=known.cluster_secret_file,
        format_if_new=known.format_if_new,
        targets_per_device=known.targets_per_device,
        metrics=parse_address(known.metrics, port_zero=True) if known.metrics else None,
        io_backend=known.io_backend,
        tcp_congestion=_congestion(known.tcp_congestion),
        zero_copy_send=known.zero_copy_send,
        rdma=known.rdma,
        rdma_traffic_class=known.rdma_traffic_class,
        pool_bytes=parse_size(known.pool_size),
        domain=_domain(known.domain),
        scrub_bytes_per_s=parse_size(known.scrub_rate),
        dedup_bytes_per_s=parse_size(known.dedup_rate),
        sync_share_percent=known.sync_share,
        start_timeout_s=known.start_timeout_s,
        ready_file=known.ready_file,
        log_level=known.log_level,
    )


def _congestion(text: str | None) -> str | None:
    if text is not None:
        check_congestion(text)
    return text


def _domain(text: str) -> str:
    if len(text) > MAX_DOMAIN or not text.isprintable():
        raise InvalidArgument(f"--domain: give at most {MAX_DOMAIN} printable characters")
    return text


def _has_port(text: str) -> bool:
    return text.count(":") == 1 or (text.startswith("[") and "]:" in text)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ffs-storage", description="A storage node of ffs.")
    add = parser.add_argument
    add("--metadata", "--meta", required=True, help="host:port[,host:port...] of the metadata service")
    add("--name", default="", help="of this node (default: the host's name)")
    add("--dir", required=True, help="directory of the node's identity; made if absent")
    add(
        "--device",
        action="append",
        required=True,
        metavar="PATH[:SIZE][,write-cache=auto|volatile|protected][,discard=auto|off|on][,role=kv|bulk]",
        help="a block device, a file, or uuid:UUID; repeatable; a file that doesn't exist is made with SIZE",
    )
    add("--allow-null-devices", action="store_true", help=argparse.SUPPRESS)
    add("--device-size", default="", help="SIZE for devices that are given without one")
    add("--listen", default="127.0.0.1", help="host[:port]: host of all ports, port of the control server")
    add("--advertise-host", default="", help="numeric address that others reach this node by")
    add("--socket-dir", default="", help="for the Unix sockets of clients on this host")
    add("--no-local", action="store_true", help="TCP only")
    add("--cluster-secret-file", default="", help="needed beyond loopback")
    add("--format-if-new", action="store_true", help="format existing devices that hold nothing at all")
    add("--targets-per-device", type=int, default=MAX_TARGETS_OF_DEVICE, help="at formatting")
    add(
        "--metrics", default="", metavar="HOST:PORT", help="serve Prometheus metrics; port 0 takes a free one"
    )
    add("--io-backend", default="auto", choices=["auto", "uring", "pread"])
    add(
        "--tcp-congestion",
        metavar="NAME",
        help="of data connections (default: cubic?, ? where it is allowed)",
    )
    add(
        "--zero-copy-send",
        default="auto",
        choices=sorted(ZERO_COPY_SENDS),
        help="of large replies over TCP (default: to other hosts, where the kernel does it)",
    )
    add(
        "--rdma",
        default="",
        metavar="DEVICES",
        help="for RDMA: NAME[:PORT[:GID INDEX]],... or off (default: all)",
    )
    add("--rdma-traffic-class", type=int, default=0, metavar="N", help="of RDMA's packets: DSCP << 2")
    add("--pool-size", default="0", help="buffers for each device (0: 256M)")
    add("--domain", default="", help="failure domain: the node's rack or power feed (default: its own)")
    add("--scrub-rate", default="4M", help="bytes a second of each device that are read and checked; 0: none")
    add(
        "--dedup-rate",
        default="64M",
        help="bytes a second of each device that are compared to find equal KV blocks, in spaces that ask "
        "for it; 0: none",
    )
    add(
        "--sync-share",
        type=int,
        default=25,
        metavar="PERCENT",
        help="of each device that background work may take while clients are served",
    )
    add("--start-timeout-s", type=float, default=10.0, help="wait so long for the metadata service")
    add("--ready-file", default="", help="written when it serves: one JSON object")
    add("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser
