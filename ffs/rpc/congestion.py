"""Names of TCP congestion controls, as client and storage server take them. docs/ring.md, Connections."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from ffs.errors import InvalidArgument

_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def check_congestion(name: str) -> None:
    """Whether this process may set it on a socket: "" leaves the system's, one that ends in ? is a wish and
    always right. InvalidArgument says which ones it may. Doesn't block."""
    if not name or name.endswith("?"):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            allowed = ""
            with suppress(OSError):
                allowed = f" (it allows everybody {', '.join(_ALLOWED.read_text().split())})"
            raise InvalidArgument(
                f"TCP congestion control {name!r}: this kernel lacks it, or doesn't allow it here{allowed}: "
                f'give another one, {name + "?"!r} for it where it is allowed, or "" for the system\'s'
            ) from None
