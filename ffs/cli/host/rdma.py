"""RDMA devices as the kernel lists them in sysfs. docs/rdma.md, Looking at a host.

Sysfs is the list: it needs no library and no rights, and shows devices that verbs can't open too, which is
what somebody who looks for a fault wants to see. What only verbs know (the active MTU, limits) is in `verbs`.
Blocking, as reads of sysfs are; any thread.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

# What RoCE puts around a payload at most; the kernel's own reckoning (include/rdma/ib_addr.h, iboe_get_mtu).
_ROCE_OVERHEAD = 40 + 8 + 12 + 4 + 28 + 4
_MTUS = (4096, 2048, 1024, 512, 256)

# Counters that grow where packets are lost or come out of order, by the names that drivers give them.
LOSS_COUNTERS = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err",
    "rx_icrc_encapsulated", "out_of_seq_request", "rcvd_seq_err", "retry_exceeded_err",
    "retry_rnr_exceeded_err", "completer_retry_err",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port. `kind`: "IB/RoCE v1" or "RoCE v2"; `netdev`: the interface that it comes from."""

    index: int
    gid: str
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class Port:
    """One port. `state` as the kernel says it ("ACTIVE"); `netdev_mtu`: 0 where there is no interface."""

    number: int
    state: str
    physical: str
    link_layer: str
    rate: str
    gids: tuple[Gid, ...]
    netdev: str
    netdev_mtu: int
    losses: tuple[tuple[str, int], ...]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def roce(self) -> bool:
        return self.link_layer == "Ethernet"

    @property
    def mtu_by_netdev(self) -> int:
        """What the port's MTU must be by its interface's; 0 where that can't be told."""
        room = self.netdev_mtu - _ROCE_OVERHEAD
        return next((mtu for mtu in _MTUS if mtu <= room), 0) if self.roce else 0


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One device. `uverbs`: the node that programs open, "" where there is none; `numa`: -1 for none."""

    name: str
    firmware: str
    node_guid: str
    board: str
    numa: int
    uverbs: str
    ports: tuple[Port, ...]


def read_devices(sysfs: Path = Path("/sys"), dev: Path = Path("/dev")) -> tuple[RdmaDevice, ...]:
    """All of this host by name; none where the kernel has no InfiniBand at all. Never raises for what a
    device doesn't say."""
    base = sysfs / "class/infiniband"
    if not base.is_dir():
        return ()
    return tuple(_device(sysfs, dev, each) for each in sorted(base.iterdir()))


def text_of(path: Path) -> str:
    """What a file of sysfs or procfs says, "" where it can't be read: drivers leave out what they lack."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path, otherwise: int) -> int:
    """The number in such a file."""
    try:
        return int(text_of(path))
    except ValueError:
        return otherwise


def _device(sysfs: Path, dev: Path, at: Path) -> RdmaDevice:
    uverbs = ""
    for node in sorted((sysfs / "class/infiniband_verbs").glob("uverbs*")):
        if text_of(node / "ibdev") == at.name:
            uverbs = str(dev / "infiniband" / node.name)
    ports = sorted(
        (each for each in (at / "ports").glob("*") if each.name.isdigit()), key=lambda p: int(p.name)
    )
    return RdmaDevice(
        name=at.name,
        firmware=text_of(at / "fw_ver"),
        node_guid=text_of(at / "node_guid"),
        board=text_of(at / "board_id") or text_of(at / "hca_type"),
        numa=number_of(at / "device/numa_node", -1),
        uverbs=uverbs,
        ports=tuple(_port(sysfs, each) for each in ports),
    )


def _port(sysfs: Path, at: Path) -> Port:
    gids = tuple(_gids(at))
    netdev = next((gid.netdev for gid in gids if gid.netdev), "")
    losses = []
    for folder in ("counters", "hw_counters"):
        for name in LOSS_COUNTERS:
            if (count := number_of(at / folder / name, 0)) > 0:
                losses.append((name, count))
    return Port(
        number=int(at.name),
        state=text_of(at / "state").rpartition(": ")[2],
        physical=text_of(at / "phys_state").rpartition(": ")[2],
        link_layer=text_of(at / "link_layer"),
        rate=text_of(at / "rate"),
        gids=gids,
        netdev=netdev,
        netdev_mtu=number_of(sysfs / "class/net" / netdev / "mtu", 0) if netdev else 0,
        losses=tuple(losses),
    )


def _gids(port: Path) -> list[Gid]:
    found = []
    for path in sorted((port / "gids").glob("*"), key=lambda p: int(p.name)):
        text = text_of(path)
        if text.strip("0:") == "":
            continue
        address = ipaddress.IPv6Address(text)
        mapped = address.ipv4_mapped
        kind = text_of(port / "gid_attrs/types" / path.name)
        netdev = text_of(port / "gid_attrs/ndevs" / path.name)
        found.append(Gid(int(path.name), f"::ffff:{mapped}" if mapped else str(address), kind, netdev))
    return found
