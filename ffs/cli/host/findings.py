"""What the facts of a host mean for ffs. Pure: facts in, findings out. docs/rdma.md, Looking at a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ffs.cli.host.facts import Facts, NetFacts
from ffs.cli.host.rdma import Port, RdmaDevice
from ffs.cli.text import format_bytes

OK, NOTE, WARN, BAD = "ok", "note", "warn", "bad"
LEAST_MEMLOCK = 1 << 30
LEAST_FILES = 4096
LEAST_SHM = 1 << 30
LEAST_ROCE_MTU = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """`level`: "ok"; "note" (worth knowing); "warn" (slower, or less safe, than it could be); "bad" (ffs or a
    part of it can't work). `way_out`: what to do, "": nothing."""

    level: str
    subject: str
    text: str
    way_out: str = ""


def judge(facts: Facts) -> list[Finding]:
    """All findings, in the order of the list in docs/rdma.md."""
    return [
        *_native(facts), *_io_uring(facts), *_paths(facts), *_memlock(facts), *_files(facts),
        *_shared_memory(facts), *_huge_pages(facts), *_clock(facts), *_congestion(facts), *_rdma(facts),
    ]  # fmt: skip


def worst(findings: list[Finding]) -> str:
    """The gravest level among them."""
    return max((finding.level for finding in findings), key=(OK, NOTE, WARN, BAD).index, default=OK)


def _native(facts: Facts) -> Iterator[Finding]:
    if facts.native:
        yield Finding(BAD, "native", f"the native library doesn't load: {facts.native}")
    else:
        yield Finding(OK, "native", "the native library loads")


def _io_uring(facts: Facts) -> Iterator[Finding]:
    if not facts.io_uring:
        yield Finding(OK, "io_uring", f"works (kernel {facts.kernel})")
        return
    if facts.io_uring_disabled:
        way = "sysctl kernel.io_uring_disabled=0"
    else:
        way = "a container's seccomp profile refuses it: allow the three calls io_uring_*"
    text = f"refused ({facts.io_uring}): servers fall back to threads that call pread and pwrite"
    yield Finding(WARN, "io_uring", text, way)


def _paths(facts: Facts) -> Iterator[Finding]:
    for each in facts.paths:
        if each.direct:
            way = "give a block device, or a directory on ext4 or XFS"
            yield Finding(BAD, "o_direct", f"{each.path}: {each.direct}", way)
        else:
            yield Finding(OK, "o_direct", f"{each.path} ({each.kind}) takes O_DIRECT")


def _memlock(facts: Facts) -> Iterator[Finding]:
    if facts.memlock < 0 or facts.ipc_lock:
        why = (
            "no limit" if facts.memlock < 0 else f"{format_bytes(facts.memlock)}, and CAP_IPC_LOCK passes it"
        )
        yield Finding(OK, "memlock", f"locked memory: {why}")
        return
    way = "LimitMEMLOCK=infinity in the unit, or `* - memlock unlimited` in /etc/security/limits.conf"
    text = f"locked memory: at most {format_bytes(facts.memlock)}"
    if facts.rdma:
        text += "; RDMA registers every buffer that it moves"
    level = WARN if facts.memlock < LEAST_MEMLOCK or facts.rdma else OK
    yield Finding(level, "memlock", text, way if level == WARN else "")


def _files(facts: Facts) -> Iterator[Finding]:
    if 0 <= facts.files < LEAST_FILES:
        way = f"LimitNOFILE={LEAST_FILES} or more, or `ulimit -n`: each connection takes one"
        yield Finding(WARN, "files", f"at most {facts.files} open files a process", way)
    else:
        many = "no limit" if facts.files < 0 else str(facts.files)
        yield Finding(OK, "files", f"open files a process: {many}")


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    size = f"/dev/shm: {format_bytes(facts.shm_free)} free of {format_bytes(facts.shm_bytes)}"
    if facts.shm_bytes == 0:
        way = "mount -t tmpfs tmpfs /dev/shm"
        yield Finding(WARN, "shared memory", "there is no /dev/shm: data loaders' workers need it", way)
    elif facts.shm_free < LEAST_SHM:
        way = "mount -o remount,size=50% /dev/shm; in a container --shm-size or an emptyDir of medium Memory"
        yield Finding(WARN, "shared memory", size, way)
    else:
        yield Finding(OK, "shared memory", size)
    if facts.thp_shmem in ("never", "deny"):
        way = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        text = "shared memory gets no huge pages: Iovs and buffers take a descriptor for every 4 KiB"
        yield Finding(NOTE, "huge pages", text, way)


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    if facts.thp == "never":
        way = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        text = (
            "transparent huge pages are off: a server's pools lie in single pages and fill the device's queue"
        )
        yield Finding(WARN, "huge pages", text, way)
    elif facts.thp:
        yield Finding(OK, "huge pages", f"transparent ones: {facts.thp}")
    if facts.huge_pages:
        text = f"reserved ones: {facts.huge_pages_free} free of {facts.huge_pages}"
        yield Finding(OK, "huge pages", text)


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.clock_synchronized is False:
        way = "run chrony or systemd-timesyncd"
        text = (
            "the clock isn't synchronized: what is dated (tokens, expiry, times of files) drifts from others'"
        )
        yield Finding(WARN, "clock", text, way)
    elif facts.clock_synchronized:
        yield Finding(OK, "clock", "synchronized")
    else:
        yield Finding(NOTE, "clock", "whether it is synchronized can't be told here")
    if facts.clock_source in ("hpet", "acpi_pm"):
        way = "look in the kernel's log why it gave the TSC up"
        yield Finding(WARN, "clock", f"read through {facts.clock_source}, a microsecond each time", way)


def _congestion(facts: Facts) -> Iterator[Finding]:
    if facts.congestion_available and "cubic" not in facts.congestion_available:
        way = "modprobe tcp_cubic, or name another with --tcp-congestion"
        text = f"data connections ask for cubic, and this kernel has {', '.join(facts.congestion_available)}"
        yield Finding(NOTE, "tcp", text, way)
    else:
        yield Finding(
            OK, "tcp", f"congestion control: cubic for data, {facts.congestion or 'unknown'} elsewhere"
        )


def _rdma(facts: Facts) -> Iterator[Finding]:
    if not facts.rdma:
        yield Finding(
            NOTE, "rdma", f"no devices: data goes over TCP and local sockets ({facts.verbs.reason})"
        )
        return
    if facts.verbs.state != "ok":
        yield Finding(NOTE, "rdma", facts.verbs.reason)
    opened = {device.name: device for device in facts.verbs.devices}
    for path in facts.uverbs_denied:
        yield Finding(WARN, "rdma", f"{path} can't be opened by this user", "a udev rule: group or mode 0666")
    for device in facts.rdma:
        seen = opened.get(device.name)
        if not device.uverbs:
            yield Finding(WARN, "rdma", f"{device.name}: programs can't open it", "modprobe ib_uverbs")
        elif facts.verbs.state == "ok" and seen is None:
            way = "install ibverbs-providers"
            yield Finding(WARN, "rdma", f"{device.name}: verbs have no provider for it", way)
        elif seen is not None and seen.error:
            yield Finding(WARN, "rdma", f"{device.name} can't be opened: {seen.error}")
        if facts.numa_nodes > 1 and device.numa < 0:
            text = f"{device.name}: its NUMA node is unknown, so no port can be chosen by memory"
            yield Finding(NOTE, "rdma", text)
        for port in device.ports:
            yield from _port(device, port, seen.mtu(port.number) if seen else 0, facts)


def _port(device: RdmaDevice, port: Port, mtu_by_verbs: int, facts: Facts) -> Iterator[Finding]:
    name = f"{device.name} port {port.number}"
    if not port.active:
        way = f"ip link set {port.netdev} up, and look at the cable" if port.netdev else "look at the cable"
        yield Finding(WARN, "rdma", f"{name} is {port.state or 'in an unknown state'}", way)
        return
    mtu = mtu_by_verbs or port.mtu_by_netdev
    yield Finding(OK, "rdma", f"{name}: active, {port.rate}" + (f", MTU {mtu}" if mtu else ""))
    if port.roce and 0 < mtu < LEAST_ROCE_MTU:
        way = f"ip link set {port.netdev} mtu 9000 here, at the peers and at the switches"
        yield Finding(WARN, "rdma", f"{name}: packets of {mtu} bytes", way)
    if port.roce and not any(gid.kind == "RoCE v2" and gid.gid.startswith("::ffff:") for gid in port.gids):
        way = f"ip address add ADDRESS/LENGTH dev {port.netdev}"
        yield Finding(WARN, "rdma", f"{name} has no RoCE v2 GID of an IPv4 address", way)
    if port.losses:
        counts = ", ".join(f"{counter} {count}" for counter, count in port.losses)
        way = "flow control (PFC) or ECN on the way isn't right: docs/rdma.md, A lossless network"
        yield Finding(WARN, "rdma", f"{name} lost packets since it came up: {counts}", way)
    network = next((each for each in facts.networks if each.name == port.netdev), None)
    if port.roce and network is not None:
        yield from _lossless(name, network)


def _lossless(name: str, network: NetFacts) -> Iterator[Finding]:
    if network.pfc is None:
        text = f"{name}: {network.name} doesn't say whether it has flow control (PFC): ask the switch"
        yield Finding(NOTE, "rdma", text)
    elif not network.pfc:
        way = f"dcb pfc set dev {network.name} prio-pfc 3:on, and the same at the switch"
        yield Finding(WARN, "rdma", f"{name}: {network.name} has no priority with flow control (PFC)", way)
    else:
        on = ", ".join(str(each) for each in network.pfc)
        yield Finding(OK, "rdma", f"{name}: flow control (PFC) on priority {on}")
    if network.ecn is not None and not network.ecn:
        way = f"echo 1 > /sys/class/net/{network.name}/ecn/roce_np/enable/3 (and roce_rp)"
        yield Finding(WARN, "rdma", f"{name}: no congestion control (ECN) for RoCE", way)
