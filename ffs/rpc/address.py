"""Addresses of control connections: `host:port[,host:port...]`, also `ffs://host:port,...`. Pure."""

from __future__ import annotations

import ipaddress

from ffs.errors import InvalidArgument

Address = tuple[str, int]


def parse_address(text: str, *, port_zero: bool = False) -> Address:
    """One `host:port` ([v6]:port for IPv6). Port 0 only where a listener may choose. InvalidArgument."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"address {text!r}: write an IPv6 host as [host]:port")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise InvalidArgument(f"address {text!r} isn't host:port")
    number = int(port)
    if number > 65535 or (number == 0 and not port_zero):
        raise InvalidArgument(f"address {text!r}: the port must be 1..65535")
    return host, number


def parse_addresses(text: str) -> tuple[Address, ...]:
    """One or several, separated by commas, with or without ffs://. Raises InvalidArgument."""
    rest = text.strip().removeprefix("ffs://").rstrip("/")
    if not rest:
        raise InvalidArgument(f"address {text!r} names no metadata server: write host:port[,host:port...]")
    return tuple(dict.fromkeys(parse_address(part) for part in rest.split(",")))


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on it. Names other than localhost count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
