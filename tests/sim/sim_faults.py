"""What goes wrong: crashes, wiped devices, pauses, partitions, slow and full disks, bit rot.

Nothing is done that loses data by the rules of docs/craq.md: of the members that serve in the recorded
version, one at least keeps its store, comes back, and has every chunk undamaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sim_wire as wire
from sim_model import Violation
from sim_node import Node
from sim_wire import Answer, Eviction, Outcome, Reason, Version

if TYPE_CHECKING:
    from sim_world import World

FIRST_KEY = bytes(24)


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.active = True
        self.repairs = 0
        self.wipes = 0
        self.pauses = 0
        self.evictions = 0  # ordered

    def begin(self) -> None:
        plan = self.world.plan
        for every, f in (
            (plan.crash_every_ms, self._crashing),
            (plan.pause_every_ms, self._pausing),
            (plan.cut_every_ms, self._cutting),
            (plan.slow_every_ms, self._slowing),
            (plan.rot_every_ms, self._rotting),
            (plan.scrub_every_ms, self._scrubbing),
            (plan.evict_every_ms, self._evicting),
            (400 if plan.no_space else 0, self._filling),
        ):
            if every:
                self.world.at(500 + self.world.rng.randint(0, every), self._again, every, f)

    def _again(self, every_ms: int, f: object) -> None:
        if self.active or f == self._scrubbing:
            f()  # type: ignore[operator]
            self.world.at(int(self.world.rng.expovariate(1 / every_ms)) + 1, self._again, every_ms, f)

    def stop(self) -> None:
        world = self.world
        self.active = False
        world.network.heal()
        world.managers.heal()
        world.clients.active = False
        for node in world.nodes:
            node.disk_factor = 1
            node.sim.step(wire.space(node.clock(), Outcome.OK, Outcome.OK))
            self.world.resume(node, node.starts)
            if not node.never_back:
                self.restart(node, node.starts)

    def beyond_repair(self) -> bool:
        """Whether no rule brings the chain back: nobody whom the record calls serving has its data any more,
        or the last copy of a chunk is damaged."""
        world = self.world
        serving = world.history.versions[world.history.current].serving
        gone = all(world.history.shadow(t).lost or world.by_target[t].never_back for t in serving)
        return gone or self.lost_to_rot()

    # ---- processes ----------------------------------------------------------------------------

    def _crashing(self) -> None:
        world, rng, plan = self.world, self.world.rng, self.world.plan
        everyone = rng.random() < plan.crash_all
        for node in world.nodes if everyone else [rng.choice(world.nodes)]:
            if not node.up:
                continue
            tail = len(world.history.shadow(node.target).tail)
            keep = rng.choice((0, tail, rng.randint(0, tail)))
            down_ms = rng.randint(1, 400)
            if rng.random() < plan.long_down:
                down_ms = int(plan.timeout_ms * rng.uniform(1.1, 3))
            wipe = rng.random() < plan.wipe and self._may_lose(node)
            if rng.random() < plan.never and self._may_lose(node):
                node.never_back = True
            self.crash(node, keep, down_ms, wipe=wipe)

    def _may_lose(self, node: Node) -> bool:
        """Another member that serves in the recorded version keeps its data."""
        world = self.world
        if world.history.current not in world.history.versions:
            return False
        for target in world.history.versions[world.history.current].serving:
            other = world.by_target[target]
            if other is node or other.never_back or world.history.shadow(target).lost:
                continue
            if not any(c.damaged for c in other.sim.dump().store.chunks.values()):
                return True
        return False

    def crash(self, node: Node, keep: int, down_ms: int, *, wipe: bool = False) -> None:
        """Loses all but what is durable and the first `keep` records that aren't."""
        world = self.world
        shadow = world.history.shadow(node.target)
        keep = min(keep, len(shadow.tail))
        world.say(
            f"{world.name(node.target)} crashes, {keep} of {len(shadow.tail)} records survive"
            + (", its device is wiped" if wipe else "")
            + (", it never comes back" if node.never_back else "")
        )
        world.history.crashed(shadow, keep)
        node.sim.step(wire.crash(node.clock(), keep))
        node.forget()
        if wipe:
            self.wipe(node)
        if not node.never_back:
            world.at(down_ms, self.restart, node, node.starts)

    def wipe(self, node: Node) -> None:
        self.wipes += 1
        incarnation = self.world.managers.store.incarnations.get(node.target, 0)
        self.world.history.wiped(self.world.history.shadow(node.target), incarnation)
        node.sim.step(wire.start(node.clock(), wipe=True))

    def release(self, node: Node) -> None:
        """Its target is in no chain any more: it drops all that it holds."""
        self.world.say(f"{self.world.name(node.target)} is released")
        self.world.history.wiped(self.world.history.shadow(node.target), -1)
        node.replicas += 1
        node.sim.step(wire.start(node.clock(), wipe=True))

    def restart(self, node: Node, starts: int) -> None:
        if node.starts != starts or node.up:
            return
        world = self.world
        world.say(f"{world.name(node.target)} starts")
        node.starts += 1
        node.up = True
        node.world_ms = world.now
        node.sim.step(wire.start(node.clock()))
        world.managers.started(node)
        self._connect(node)

    def _connect(self, node: Node) -> None:
        world = self.world
        for other in world.nodes:
            if other is not node and other.up:
                world.arrive(other, lambda n, t: world.step(n, wire.connected(n.clock(), t)), node.target)
                world.arrive(node, lambda n, t: world.step(n, wire.connected(n.clock(), t)), other.target)

    def _pausing(self) -> None:
        world, rng, plan = self.world, self.world.rng, self.world.plan
        node = rng.choice(world.nodes)
        if node.up and not node.paused:
            self.pauses += 1
            ms = rng.choice((rng.randint(10, 200), rng.randint(plan.timeout_ms // 2, plan.timeout_ms * 3)))
            self.pause(node, ms, between_clock_and_use=rng.random() < 0.3)

    def pause(self, node: Node, ms: int, *, between_clock_and_use: bool = False) -> None:
        """SIGSTOP: it processes nothing, its clock goes on, messages wait."""
        self.world.say(f"{self.world.name(node.target)} is stopped for {ms} ms")
        node.world_ms = self.world.now
        node.paused = True
        if between_clock_and_use:
            node.set_old_clock(node.clock())
        self.world.at(ms, self.world.resume, node, node.starts)

    def may_fail(self, node: Node, reason: int) -> None:
        if reason in (Reason.DEVICE_FAILED, Reason.DIVERGED):
            raise Violation(f"target {node.target} failed: {Reason(reason).name}")

    # ---- the network ----------------------------------------------------------------------------

    def _cutting(self) -> None:
        world, rng = self.world, self.world.rng
        node = rng.choice(world.nodes)
        others = [n.target for n in world.nodes if n is not node]
        managers = world.managers.endpoints()
        other = [rng.choice(others)] if others else []
        cut_off, both = rng.choice(
            (
                (others + managers, True),  # from everyone
                (managers, True),
                (managers, False),
                (others, True),
                (other, True),
                (other, False),
                (others + managers, False),  # it is heard, and hears nothing; or the other way round
            )
        )
        until = world.now + rng.randint(50, world.plan.timeout_ms * 3)
        outward = rng.random() < 0.5
        world.say(f"{world.name(node.target)} is cut off from {cut_off} until {until}, both ways: {both}")
        for target in cut_off:
            if both or outward:
                world.network.cut(node.target, target, until)
            if both or not outward:
                world.network.cut(target, node.target, until)
        world.at(until - world.now, self._reconnect, node)

    def _reconnect(self, node: Node) -> None:
        if node.up:
            self._connect(node)

    # ---- disks ----------------------------------------------------------------------------------

    def _slowing(self) -> None:
        node = self.world.rng.choice(self.world.nodes)
        node.disk_factor = 1 if node.disk_factor > 1 else 10

    def _filling(self) -> None:
        """Some member is full for a while: it says so before, or only when it writes."""
        rng = self.world.rng
        for node in self.world.nodes:
            full = rng.random() < self.world.plan.no_space
            code = rng.choice((Outcome.NO_SPACE, Outcome.OVER_QUOTA))
            admit = code if full and rng.random() < 0.3 else Outcome.OK
            node.sim.step(wire.space(node.clock(), admit, code if full else Outcome.OK))

    # ---- eviction -------------------------------------------------------------------------------

    def _evicting(self) -> None:
        """Some node, the head or not, chooses a chunk; the order comes later. The chunk may have been used,
        written or removed by then."""
        world, rng = self.world, self.world.rng
        node = rng.choice(world.nodes)
        keys = sorted(k for k, c in node.sim.dump().store.chunks.items() if c.exists)
        if not node.up or not keys:
            return
        key = rng.choice(keys)
        chosen = node.sim.sample(key)
        if rng.random() < 0.3:
            node.sim.step(wire.touch(key))
        world.at(rng.choice((0, 0, 5, 50)), self._order, node, node.starts, key, chosen)

    def _order(self, node: Node, starts: int, key: bytes, chosen: wire.Sample) -> None:
        if node.starts == starts and node.up:
            self.world.arrive(node, self._evict, key, chosen)

    def _evict(self, node: Node, key: bytes, chosen: wire.Sample) -> None:
        """An order that is carried out is on a chunk as it was chosen, with nothing pending."""
        before, store = node.sim.sample(key), node.sim.dump().store
        pending = key in store.chunks and bool(store.chunks[key].pendings)
        answers = node.sim.step(wire.evict(node.clock(), key, chosen))
        if (Answer.EVICTION, Eviction.ORDERED) in answers:
            self.evictions += 1
            if before != chosen or pending:
                raise Violation(f"{node.target} evicts {wire.short(key)}: {chosen} as chosen, {before} now")
        self.world.carry_out(node, answers)

    def _rotting(self) -> None:
        world, rng = self.world, self.world.rng
        node = rng.choice(world.nodes)
        if not self._may_lose(node):
            return
        store = node.sim.dump().store
        keys = [k for k, c in store.chunks.items() if c.exists and not c.damaged]
        if not keys:
            return
        key = rng.choice(keys)
        world.say(f"{world.name(node.target)} {wire.short(key)} rots")
        node.sim.step(wire.damage(key))
        if node.up and rng.random() < 0.5:
            self._found(node, key, store.chunks[key].version)

    def _found(self, node: Node, key: bytes, version: Version) -> None:
        """By the scrubber."""
        world = self.world
        world.arrive(node, lambda n: world.step(n, wire.damaged(n.clock(), key, version)))

    def repaired(self, ok: bool) -> None:
        self.repairs += ok

    def _scrubbing(self) -> None:
        """Finds all damage of one node, and compares it with its predecessor."""
        world = self.world
        node = world.rng.choice(world.nodes)
        if node.up and not node.paused and world.history.shadow(node.target).serving:
            world.arrive(node, self._scrub)

    def _scrub(self, node: Node) -> None:
        for key, c in node.sim.dump().store.chunks.items():
            if c.damaged:
                self._found(node, key, c.version)
        at: bytes | None = FIRST_KEY
        while at is not None:
            at, answers = node.sim.compare(node.clock(), at)
            self.world.carry_out(node, answers)

    def lost_to_rot(self) -> bool:
        """Whether some chunk is damaged at a serving member, and no other serving member has it: nobody can
        repair it."""
        world = self.world
        serving = world.history.versions[world.history.current].serving
        stores = {t: world.by_target[t].sim.dump().store.chunks for t in serving}
        for target, chunks in stores.items():
            for key, c in chunks.items():
                good = [s[key] for t, s in stores.items() if t != target and key in s]
                if c.damaged and not any(g.version >= c.version and not g.damaged for g in good):
                    return True
        return False
