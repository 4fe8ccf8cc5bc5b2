"""Which cluster to talk to: the address given, or FFS_CLUSTER. Pure but for the environment.

`host:port[,host:port...]`, with or without `ffs://`; `?cluster=<32 hex digits>` at the end
demands that cluster id. docs/client.md, Connecting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ffs.errors import InvalidArgument
from ffs.rpc.address import format_address, parse_addresses

ENVIRONMENT = "FFS_CLUSTER"


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """The metadata services of one cluster; `cluster` is b"" when any id is welcome."""

    servers: tuple[tuple[str, int], ...]
    cluster: bytes = b""

    def __str__(self) -> str:
        servers = ",".join(format_address(server) for server in self.servers)
        return servers + (f"?cluster={self.cluster.hex()}" if self.cluster else "")


def resolve_address(address: str | None, environment: Mapping[str, str] | None = None) -> ClusterAddress:
    """`address`, or what FFS_CLUSTER holds. Raises InvalidArgument that says what is expected."""
    if address is None:
        address = (os.environ if environment is None else environment).get(ENVIRONMENT)
        if not address:
            raise InvalidArgument(
                f"no address: give host:port to ffs.connect(), or set {ENVIRONMENT};"
                " `ffs up` prints the address of the cluster that it starts"
            )
    if not isinstance(address, str):
        raise TypeError(f"an address is a str such as 'host:port', not {type(address).__name__}")
    body, mark, query = address.partition("?")
    return ClusterAddress(parse_addresses(body), _parse_query(address, query) if mark else b"")


def _parse_query(address: str, query: str) -> bytes:
    key, _, value = query.partition("=")
    try:
        cluster = bytes.fromhex(value)
    except ValueError:
        cluster = b""
    if key != "cluster" or len(cluster) != 16:
        raise InvalidArgument(f"address {address!r}: only ?cluster=<32 hex digits> may follow the servers")
    return cluster
