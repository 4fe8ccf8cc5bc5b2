"""What verbs say of RDMA devices beyond sysfs, through pyverbs where that can be imported.

pyverbs is looked for in this environment, then among Debian's packages (python3-pyverbs), which a virtual
environment doesn't see. Blocking; any thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

DEBIAN = "/usr/lib/python3/dist-packages"
_MTU_OF_CODE: Final = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


@dataclass(frozen=True, slots=True)
class VerbsDevice:
    """A device that was opened. `mtus`: the active MTU of each port in bytes, by port number. Limits as the
    device states them. `error`: why it couldn't be opened; then the rest is empty."""

    name: str
    error: str = ""
    mtus: tuple[tuple[int, int], ...] = ()
    max_qp: int = 0
    max_qp_wr: int = 0
    max_mr_size: int = 0
    max_rd_atomic: int = 0

    def mtu(self, port: int) -> int:
        return dict(self.mtus).get(port, 0)


@dataclass(frozen=True, slots=True)
class Verbs:
    """`state`: "ok"; "no pyverbs"; "no InfiniBand" (the kernel has no verbs). `reason`: in words."""

    state: str
    reason: str
    devices: tuple[VerbsDevice, ...] = ()


def query() -> Verbs:
    """All devices that verbs list; never raises for what a host lacks."""
    try:
        device = _pyverbs_device()
    except ImportError as error:
        return Verbs("no pyverbs", f"{error}: install python3-pyverbs (apt) or ffs[rdma] for MTUs and limits")
    from pyverbs.pyverbs_error import PyverbsError

    try:
        listed = device.get_device_list()
    except PyverbsError as error:  # without the kernel's InfiniBand modules: the list itself fails
        return Verbs("no InfiniBand", f"the kernel has no verbs ({_one_line(error)})")
    names = [each.name.decode() for each in listed]
    return Verbs("ok", f"{len(names)} devices", tuple(_open(device, name, PyverbsError) for name in names))


def _pyverbs_device() -> Any:
    """The module pyverbs.device. ImportError: neither place has one for this Python."""
    try:
        import pyverbs.device
    except ImportError:
        sys.path.append(DEBIAN)
        try:
            import pyverbs.device
        finally:
            sys.path.remove(DEBIAN)
    return pyverbs.device


def _open(module: Any, name: str, failure: type[Exception]) -> VerbsDevice:
    try:
        with module.Context(name=name) as context:
            limits = context.query_device()
            mtus = []
            for port in range(1, limits.phys_port_cnt + 1):
                mtus.append((port, _MTU_OF_CODE.get(int(context.query_port(port).active_mtu), 0)))
            return VerbsDevice(
                name,
                mtus=tuple(mtus),
                max_qp=limits.max_qp,
                max_qp_wr=limits.max_qp_wr,
                max_mr_size=limits.max_mr_size,
                max_rd_atomic=limits.max_qp_rd_atom,
            )
    except (failure, OSError) as error:
        return VerbsDevice(name, error=_one_line(error))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
