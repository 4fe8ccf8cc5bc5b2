"""The command lines of the two servers, as a development cluster starts them."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from ffs.errors import ProtocolError


def metadata(
    store: str, listen: str, ready: Path, failure_timeout_ms: int, secret_file: str = ""
) -> list[str]:
    """`store`: a URL of metadata.kv.open_store."""
    return [
        *_module("metadata.server"),
        f"--store={store}",
        f"--listen={listen}",
        f"--ready-file={ready}",
        f"--failure-timeout-ms={failure_timeout_ms}",
        f"--lease-ms={min(3000, max(1000, failure_timeout_ms))}",
        *_secret(secret_file),
    ]


def devices(home: Path, *, roles: bool) -> dict[str, Path]:
    """The files of a storage server's devices, by role."""
    return {role: home / f"device-{role}" for role in ("kv", "bulk")} if roles else {"": home / "device"}


def storage(
    home: Path,
    name: str,
    address: str,
    device_bytes: int,
    ready: Path,
    domain: str = "",
    *,
    roles: bool = False,
    secret_file: str = "",
    null_devices: bool = False,
) -> list[str]:
    labelled = [f"--domain={domain}"] if domain else []
    null = ",data=null" if null_devices else ""
    places = [
        f"--device={path}{null},role={role}" if role else f"--device={path}{null}"
        for role, path in devices(home, roles=roles).items()
    ]
    return [
        *_module("storage_server.server"),
        f"--metadata={address}",
        f"--name={name}",
        f"--dir={home}",
        *places,
        f"--device-size={device_bytes}",
        f"--ready-file={ready}",
        "--listen=127.0.0.1:0",
        "--pool-size=256M",
        "--start-timeout-s=50",
        *(["--allow-null-devices"] if null_devices else []),
        *labelled,
        *_secret(secret_file),
    ]


def _secret(path: str) -> list[str]:
    return [f"--cluster-secret-file={path}"] if path else []


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


def free_address(last: str) -> str:
    """Where metadata should listen: the port of last time if nobody has it now, else any."""
    host, _, port = last.rpartition(":")
    if host and port.isdigit():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError:
                return f"{host}:0"
        return last
    return "127.0.0.1:0"


def ready_address(data: bytes) -> str:
    try:
        return str(json.loads(data)["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"the metadata service's ready file can't be read: {error}") from error
