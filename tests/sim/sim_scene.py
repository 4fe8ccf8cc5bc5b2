"""A world without faults of its own, in which a test plays a part: for cases that need the real manager.

Time passes in `wait` and `until`; clients are the test's (`write`, `read`), with the world's patience and
retries. All checks of the world hold at every step.
"""

from __future__ import annotations

from collections.abc import Callable

from sim_clients import Attempts, Client
from sim_manager import Manager
from sim_model import Asked, Op
from sim_node import Node
from sim_plan import Plan
from sim_wire import Kind, Outcome, key_of
from sim_world import World

from metadata.cluster.members import serving_of, syncing_of

KEY = key_of(1, 0)


def calm(**changes: object) -> Plan:
    """Nothing goes wrong by itself."""
    plan = Plan(
        members=3, clients=0, fifo=True, loss=0.0, repeat=0.0, delay_ms=3, later=0.0, bad=0.0, uncached=0.0,
        disk_ms=3, crash_every_ms=0, timeout_ms=1000,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


class Scene:
    def __init__(self, seed: int = 1, **changes: object) -> None:
        self.world = World(seed, calm(**changes))
        self.plan = self.world.plan
        self.world.clients.active = False  # they are the test's
        self.client = Client(1)
        self.sequence = 0
        self.world.begin()
        self.until(lambda: len(self.serving()) == self.plan.members)
        self.until(self.settled)

    # ---- time ---------------------------------------------------------------------------------

    def wait(self, ms: int) -> None:
        self.world.advance(self.world.now + ms)

    def until(self, true: Callable[[], bool], at_most_ms: int = 20_000) -> None:
        end = self.world.now + at_most_ms
        while not true():
            assert self.world.now < end, self.world.managers.what()
            self.wait(5)

    # ---- what is ----------------------------------------------------------------------------

    def node(self, index: int) -> Node:
        return self.world.nodes[index]

    def indexes(self, targets: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.world.by_target[t].index for t in targets)

    def serving(self) -> tuple[int, ...]:
        """In the recorded version, head first."""
        return self.indexes(serving_of(self.world.managers.store.record))

    def syncing(self) -> int | None:
        target = syncing_of(self.world.managers.store.record)
        return self.world.by_target[target].index if target else None

    def serves(self, index: int) -> bool:
        return self.node(index).up and self.node(index).sim.status().serving

    def settled(self) -> bool:
        """All that are recorded as serving do serve, and there is nothing left to do."""
        record = self.world.managers.store.record
        version = record.term, record.counter
        for index in self.serving():
            s = self.node(index).sim.status()
            if not s.serving or s.chain != version or s.pendings or s.undurable:
                return False
        return True

    def whole(self) -> None:
        """Waits until every wanted target serves."""
        self.until(lambda: not isinstance(self.world.managers.goal(), str) and self.settled())

    def primary(self) -> Manager:
        return max((m for m in self.world.managers.processes if m.up), key=lambda m: m.term)

    # ---- what happens -----------------------------------------------------------------------

    def crash(self, index: int, *, wipe: bool = False, keep: int = 1000) -> None:
        """Until `start`."""
        self.world.faults.crash(self.node(index), keep, 1_000_000_000, wipe=wipe)

    def start(self, index: int) -> None:
        self.world.faults.restart(self.node(index), self.node(index).starts)

    def cut(self, a: int, b: int, *, ms: int, both: bool = True) -> None:
        """Between two nodes, from `a` to `b` at least."""
        self.world.network.cut(self.node(a).target, self.node(b).target, self.world.now + ms)
        if both:
            self.world.network.cut(self.node(b).target, self.node(a).target, self.world.now + ms)

    def cut_from_managers(self, index: int, *, ms: int) -> None:
        for endpoint in self.world.managers.endpoints():
            self.world.network.cut(self.node(index).target, endpoint, self.world.now + ms)
            self.world.network.cut(endpoint, self.node(index).target, self.world.now + ms)

    def stop_managers(self) -> None:
        for m in self.world.managers.processes:
            m.reset()
            m.up = False

    def start_managers(self) -> None:
        for m in self.world.managers.processes:
            m.up = True

    # ---- clients -------------------------------------------------------------------------------

    def begin_write(self, payload: bytes, key: bytes = KEY, kind: Kind = Kind.WRITE) -> Attempts:
        """Goes on by itself."""
        self.sequence += 1
        history = self.world.history
        identity = (1, self.sequence, 1)  # each on a channel of its own
        op = Op(identity, kind, key, payload=payload, length=len(payload), lower=history.chunk(key).known)
        history.ops[identity] = op
        return self.world.clients.submit(Attempts(self.client, self.sequence, op=op))

    def write(
        self, payload: bytes, key: bytes = KEY, kind: Kind = Kind.WRITE, within_ms: int = 20_000
    ) -> None:
        a = self.begin_write(payload, key, kind)
        self.until(lambda: a.finished, within_ms)
        assert a.op is not None
        assert a.op.answered == Outcome.OK, a.op

    def read_at(self, index: int, key: bytes = KEY) -> Outcome | None:
        """One try at that node, with routing that says that it serves; None: no answer."""
        asked = Asked(key, self.world.history.chunk(key).known)
        a = Attempts(self.client, 0, read=asked)
        return self.world.clients.ask_once(a, self.node(index), 200)
