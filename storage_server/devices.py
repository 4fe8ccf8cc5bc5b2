"""The node's devices: looked at before anything is changed, formatted only where nothing is lost.

docs/operations.md, Devices. What a device is, and every refusal of one that is foreign, damaged, in use
or too small, is said by the native engine; this module decides what may be formatted. All of that comes
before the node is known to the cluster.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from errno import ENOMEDIUM
from uuid import UUID

from ffs._native.device import device_format, device_inspect
from ffs.errors import Exists, FfsError, InvalidArgument, NotFound, WrongCluster
from ffs.proto.cluster import DeviceInfo
from storage_server.config import UUID_PREFIX, DeviceChoice

Allocate = Callable[[bytes, int], Awaitable[tuple[int, ...]]]  # (device uuid, count) -> target ids


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done with one device."""

    choice: DeviceChoice
    found: DeviceInfo | None  # None: to be formatted
    make: bool  # the file doesn't exist yet


def survey(choices: Sequence[DeviceChoice], cluster: bytes, *, format_if_new: bool) -> list[Plan]:
    """Looks at all devices, changes nothing. Blocking. Raises for the first that can't be used:
    NotFound, WrongCluster, InvalidArgument, or what the native engine says."""
    plans = [_survey_one(resolve(choice), cluster, format_if_new) for choice in choices]
    by_uuid: dict[bytes, str] = {}
    for plan in plans:
        if plan.found is None:
            continue
        if (other := by_uuid.setdefault(plan.found.uuid, plan.found.path)) != plan.found.path:
            raise InvalidArgument(f"the same device as {other}: name it once", plan.found.path)
    return plans


def resolve(choice: DeviceChoice, names: Sequence[str] | None = None) -> DeviceChoice:
    """The choice with a path, where it names a device by its uuid: block devices (of /sys/class/block, or
    `names`) are asked for their superblocks. Blocking. NotFound; InvalidArgument: no uuid, or several such
    devices of which none is on top of the others (paths of one disk)."""
    if not choice.path.startswith(UUID_PREFIX):
        return choice
    try:
        wanted = UUID(choice.path.removeprefix(UUID_PREFIX)).bytes
    except ValueError:
        raise InvalidArgument(
            "after uuid: goes the uuid that ffs device inspect shows", choice.path
        ) from None
    found = [path for path in names or _block_devices() if _uuid_at(path) == wanted]
    if not found:
        raise NotFound("no block device of this host has this uuid (read as this user)", choice.path)
    free = [path for path in found if not _has_holders(path)]
    if len(found) > 1 and len(free) != 1:
        raise InvalidArgument(f"{', '.join(found)} all have this uuid: name one by its path", choice.path)
    return replace(choice, path=free[0] if free else found[0])


def _block_devices() -> list[str]:
    names = sorted(os.listdir("/sys/class/block")) if os.path.isdir("/sys/class/block") else []
    # Drives for media that come and go are slow to ask, and hold no stores.
    return [f"/dev/{name.replace('!', '/')}" for name in names if not name.startswith(("sr", "fd"))]


def _uuid_at(path: str) -> bytes | None:
    try:
        return device_inspect(path).device_uuid
    except OSError:
        return None  # not one of ours, or not readable: that is the question


def _has_holders(path: str) -> bool:
    try:
        return bool(os.listdir(f"/sys/class/block/{os.path.basename(path)}/holders"))
    except OSError:
        return False


def _survey_one(choice: DeviceChoice, cluster: bytes, format_if_new: bool) -> Plan:
    path = choice.path
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not choice.size_bytes:
            raise NotFound("no such device; to make a file, give PATH:SIZE", path) from None
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            raise NotFound("the directory for the device file doesn't exist", parent) from None
        _look(choice, cluster, make=True)
        return Plan(choice, None, make=True)
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise InvalidArgument("a device is a block device or a file", path)
    try:
        info = device_inspect(path)
    except FfsError as error:
        if error.errno != ENOMEDIUM:
            raise
        _look(choice, cluster, make=False)
        if not format_if_new:
            raise NotFound("no ffs device; it is blank: --format-if-new formats it", path) from None
        return Plan(choice, None, make=False)
    if info.cluster != cluster:
        raise WrongCluster(
            f"the device belongs to cluster {info.cluster.hex()}, the metadata service is cluster "
            f"{cluster.hex()}: check --metadata and --device",
            path,
        )
    # In use, or read-only: known now, not after the cluster was told.
    device_format(
        path,
        cluster=cluster,
        targets=info.targets,
        max_chunks=info.max_chunks,
        journal_bytes=info.journal_bytes,
        force=True,
        only_look=True,
    )
    found = DeviceInfo(
        uuid=info.device_uuid,
        path=path,
        size_bytes=info.size_bytes,
        targets=tuple(info.targets),
        role=choice.role,
        null_data=choice.data == "null",
    )
    return Plan(choice, found, make=False)


def _look(choice: DeviceChoice, cluster: bytes, *, make: bool) -> None:
    """Whether it may be formatted. Raises what formatting would, with the way out of a node."""
    path = choice.path
    try:
        device_format(
            path, size_bytes=choice.size_bytes, targets=[1], cluster=cluster, sparse=make, only_look=True
        )
    except Exists as error:
        block = stat.S_ISBLK(os.stat(path).st_mode)
        empty = f"wipefs -a {path} && blkdiscard -z {path}" if block else f"rm {path}"
        again = "start with --format-if-new" if block else "give PATH:SIZE"
        raise Exists(f"{error.message}; if that may be lost, empty it ({empty}) and {again}") from None


async def prepare(
    plans: Sequence[Plan], cluster: bytes, targets_per_device: int, allocate: Allocate
) -> list[DeviceInfo]:
    """Formats what the plans say and returns all devices. A formatting that fails leaves no file behind."""
    devices = []
    for plan in plans:
        if plan.found is not None:
            devices.append(plan.found)
            continue
        uuid = os.urandom(16)
        targets = await allocate(uuid, targets_per_device)
        devices.append(await asyncio.to_thread(_format, plan, cluster, uuid, targets))
    return devices


def _format(plan: Plan, cluster: bytes, uuid: bytes, targets: tuple[int, ...]) -> DeviceInfo:
    path = plan.choice.path
    null = plan.choice.data == "null"
    if not plan.make:
        device_format(
            path,
            size_bytes=plan.choice.size_bytes,
            targets=targets,
            cluster=cluster,
            device_uuid=uuid,
            null_data=null,
        )
    else:
        making = f"{path}.new"
        with_cleanup = False
        try:
            if os.path.exists(making):
                os.unlink(making)  # of a process that died while it formatted: it was never a device
            with_cleanup = True
            device_format(
                making,
                size_bytes=plan.choice.size_bytes,
                targets=targets,
                cluster=cluster,
                device_uuid=uuid,
                sparse=True,
                null_data=null,
            )
            os.rename(making, path)
        except FfsError as error:
            if with_cleanup and os.path.exists(making):
                os.unlink(making)
            raise type(error)(error.message, path) from None
    info = device_inspect(path)
    return DeviceInfo(
        uuid=info.device_uuid,
        path=path,
        size_bytes=info.size_bytes,
        targets=tuple(info.targets),
        role=plan.choice.role,
        null_data=null,
    )
