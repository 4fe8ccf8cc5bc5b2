"""The client's copy of the routing: chains, targets, chain tables. docs/client.md, Routing.

Fetched on first use; once native is there, pushed: `ffs.client.watch` waits at the metadata services for
changes and gives them to `take`. Handed to the native client of the session. Thread-safe. A refresh that
fails leaves what is known: open files go on without the metadata services.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ffs.client.caller import ONCE, Caller
from ffs.errors import InvalidArgument, NotFound, StaleRouting
from ffs.layout import Placement
from ffs.proto.cluster import ChainRoute, GetRouting, RoutingReply, TableRoute, TargetRoute, TargetState
from ffs.proto.common import Layout

Subscriber = Callable[[int, Sequence[ChainRoute], Sequence[TargetRoute]], None]


class Routing:
    """Routing of one cluster in one process."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._fetching = threading.Lock()  # one thread at a time asks
        self._telling = threading.Lock()  # guards what is known; never held while somebody is asked
        self._reply: RoutingReply | None = None
        self._tables: dict[tuple[int, int], TableRoute] = {}
        self._subscriber: Subscriber | None = None

    @property
    def epoch(self) -> int:
        """Of what is known; 0 before the first fetch."""
        reply = self._reply
        return 0 if reply is None else reply.epoch

    def subscribe(self, subscriber: Subscriber) -> None:
        """Give every newer routing to `subscriber`, and the present one (fetched if there is none) now."""
        self.get()
        with self._telling:
            self._subscriber = subscriber
            self._tell(subscriber)

    def unsubscribe(self) -> None:
        """On return the subscriber isn't running and won't be called any more."""
        with self._telling:
            self._subscriber = None

    def get(self) -> RoutingReply:
        """What is known, fetched on first use. Blocking; raises as Caller.call does."""
        if self._reply is None:
            self.refresh()
        if self._reply is None:
            raise StaleRouting("the metadata service gave no routing")
        return self._reply

    def refresh(self, *, once: bool = False) -> bool:
        """Fetch routing newer than the known one; True if there was. Blocking.

        `once`: don't retry a failure, which is raised. Threads that come while another fetches share its
        result.
        """
        before = self.epoch
        with self._fetching:
            if self.epoch != before:
                return True
            request = GetRouting(known_epoch=self.epoch)
            reply = self._caller.call(request, RoutingReply, policy=ONCE if once else None)
            return self.take(reply)

    def take(self, reply: RoutingReply) -> bool:
        """Take what a metadata service said; False if it isn't newer than what is known."""
        with self._telling:
            if not reply.changed or (self._reply is not None and reply.epoch <= self._reply.epoch):
                return False
            self._tables = {(table.id, table.version): table for table in reply.tables}
            self._reply = reply
            if self._subscriber is not None:
                self._tell(self._subscriber)
            return True

    def _tell(self, subscriber: Subscriber) -> None:
        if self._reply is not None:
            reachable = [target for target in self._reply.targets if target.port]
            subscriber(self._reply.epoch, self._reply.chains, reachable)

    def describe_chain(self, number: int) -> str:
        """A chain's members and their states, as far as is known here: for error messages."""
        reply = self._reply
        chain = None if reply is None else next((c for c in reply.chains if c.chain == number), None)
        if reply is None or chain is None:
            return f"chain {number} (unknown here)"
        places = {target.target: target for target in reply.targets}
        members = []
        for member, state in zip(chain.members, chain.states, strict=True):
            place = places.get(member)
            words = TargetState(state).name.lower() if state in list(TargetState) else f"state {state}"
            if place is None or not place.alive or not place.port:
                words += ", its node isn't there"
            members.append(f"target {member} on node id {place.node if place else '?'}: {words}")
        version = f"version {chain.term}.{chain.counter}"
        return f"chain {number} ({version}; {'; '.join(members)})"

    def describe_target(self, number: int) -> str:
        """Where a target is, as far as is known here: for error messages."""
        reply = self._reply
        place = None if reply is None else next((t for t in reply.targets if t.target == number), None)
        if place is None:
            return f"the server of target {number}"
        return f"the server at {place.host}:{place.port} (target {number}, node id {place.node})"

    def placement(self, layout: Layout) -> Placement:
        """The placement of a layout; refreshes once if its table version isn't known. Blocking then."""
        table = self._table(layout)
        if table is None:
            self.refresh()
            table = self._table(layout)
        if table is None:
            raise StaleRouting(
                f"chain table {layout.table} version {layout.table_version} isn't in epoch {self.epoch}"
            )
        return Placement(layout, table.chains)

    def _table(self, layout: Layout) -> TableRoute | None:
        return self._tables.get((layout.table, layout.table_version))

    def table_id(self, table: str | int) -> int:
        """The id of a chain table by name (or by id, which must exist). NotFound lists the names."""
        for attempt in range(2):
            for route in self.get().tables:
                if table in (route.name, route.id):
                    return route.id
            if attempt == 0:
                self.refresh()
        names = ", ".join(sorted({route.name for route in self.get().tables})) or "none"
        raise NotFound(f"no chain table {table!r}; there are: {names}")

    def kv_table_of(self, replicas: int) -> int:
        """The id of the chain table for KV spaces with so many replicas: of role kv if there is one, else of
        no role. NotFound lists the tables, and says how to make one."""
        _require_int("replicas", replicas)
        if not 1 <= replicas <= 3:
            raise InvalidArgument(f"replicas is {replicas}: give 1 to 3")
        for attempt in range(2):
            tables = self.get().tables
            fits = [route for route in tables if route.replicas == replicas and route.role in ("kv", "")]
            if fits:
                return min(fits, key=lambda route: (route.role != "kv", route.id)).id
            if attempt == 0:
                self.refresh()
        names = ", ".join(sorted({f"{route.name} ({route.replicas})" for route in tables})) or "none"
        raise NotFound(
            f"no chain table for KV spaces has {replicas} replicas; there are, with so many: {names}."
            f" Make one: `ffs cluster table create NAME --replicas {replicas}`"
        )


def check_layout_options(chunk_size: int | None, stripe: int | None) -> None:
    """Refuse, before anything is sent, options that no table could satisfy. InvalidArgument, TypeError."""
    if chunk_size is not None:
        _require_int("chunk_size", chunk_size)
        if chunk_size < 4096 or chunk_size > 16 << 20 or chunk_size & (chunk_size - 1):
            raise InvalidArgument(
                f"chunk size {chunk_size}: give a power of two from 4096 to {16 << 20} bytes"
            )
    if stripe is not None:
        _require_int("stripe", stripe)
        if stripe < 0:
            raise InvalidArgument(f"stripe {stripe}: give how many chains, or 0 for all of the table")


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, not {type(value).__name__}")
