"""Chains and places of targets, as the C library takes them. Pure values; any thread.

docs/ring.md, Routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ffs._native.lib import ffi, lib
from ffs.errors import InvalidArgument

__all__ = [
    "LAST_SERVING",
    "OFFLINE",
    "SERVING",
    "SYNCING",
    "WAITING",
    "ChainRoute",
    "TargetRoute",
    "c_chains",
    "c_targets",
]

OFFLINE: Final = int(lib.FFS_OFFLINE)
SERVING: Final = int(lib.FFS_SERVING)
SYNCING: Final = int(lib.FFS_SYNCING)
WAITING: Final = int(lib.FFS_WAITING)
LAST_SERVING: Final = int(lib.FFS_LAST_SERVING)
MAX_REPLICAS: Final = 8


@dataclass(frozen=True, slots=True)
class ChainRoute:
    """A chain: version (term, counter), members (target ids, head first), their states, and the incarnations
    of their nodes for which the version was made (servers only; () for clients)."""

    chain: int
    term: int
    counter: int
    members: tuple[int, ...]
    states: tuple[int, ...]
    proposed: bool = False  # for servers: persist it, don't act in it
    incarnations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetRoute:
    """Where a target is: node id, numeric host, TCP port, host_id() and Unix socket of its shard.
    `away`: the manager doesn't hear of its node."""

    target: int
    node: int
    host: str
    port: int
    host_id: str = ""
    socket_path: str = ""
    away: bool = False


class _Kept:
    """The last array that was made of a tuple: a node hands the same routes to its server and to its
    collector, and the same places with each configuration. C only reads it. Any thread."""

    def __init__(self) -> None:
        self._last: tuple[object, Any] = (None, None)

    def of(self, routes: object, make: Callable[[], Any]) -> Any:
        last, made = self._last
        if last is not routes:
            made = make()
            if isinstance(routes, tuple):  # nobody changes those
                self._last = routes, made
        return made


_chains, _targets = _Kept(), _Kept()


def c_chains(chains: Sequence[ChainRoute]) -> Any:
    """A C array of ffs_chain_route. Raises InvalidArgument, naming the chain."""
    return _chains.of(chains, lambda: _make_chains(chains))


def c_targets(targets: Sequence[TargetRoute]) -> Any:
    """A C array of ffs_target_route. Raises InvalidArgument, naming what doesn't fit."""
    return _targets.of(targets, lambda: _make_targets(targets))


def _make_chains(chains: Sequence[ChainRoute]) -> Any:
    out = ffi.new("ffs_chain_route[]", len(chains))
    for entry, chain in zip(out, chains, strict=True):
        if len(chain.members) != len(chain.states) or len(chain.members) > MAX_REPLICAS:
            raise InvalidArgument(
                f"chain {chain.chain}: {len(chain.members)} members and {len(chain.states)} states; "
                f"give as many states as members, at most {MAX_REPLICAS}"
            )
        entry.chain = chain.chain
        entry.term = chain.term
        entry.counter = chain.counter
        entry.member_count = len(chain.members)
        for i, (member, state) in enumerate(zip(chain.members, chain.states, strict=True)):
            entry.members[i] = member
            entry.states[i] = state
        if chain.incarnations and len(chain.incarnations) != len(chain.members):
            raise InvalidArgument(
                f"chain {chain.chain}: {len(chain.members)} members and {len(chain.incarnations)} "
                "incarnations; give as many, or none"
            )
        for i, incarnation in enumerate(chain.incarnations):
            entry.incarnations[i] = incarnation
        entry.proposed = chain.proposed
    return out


def _put(field: Any, text: str, what: str) -> None:
    data = text.encode()
    if len(data) >= len(field):
        raise InvalidArgument(f"{what} {text!r} is longer than {len(field) - 1} bytes")
    field[0 : len(data)] = data


def _make_targets(targets: Sequence[TargetRoute]) -> Any:
    out = ffi.new("ffs_target_route[]", len(targets))
    for entry, route in zip(out, targets, strict=True):
        entry.target = route.target
        entry.node = route.node
        entry.port = route.port
        if route.away:
            entry.away = 1
        _put(entry.host, route.host, "host")
        _put(entry.host_id, route.host_id, "host id")
        _put(entry.socket_path, route.socket_path, "socket path")
    return out
