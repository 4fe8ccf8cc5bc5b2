"""What goes wrong, drawn from a seed: one fault a second for a while, never so much at once that a chain
has lost every member that was serving.

At most `most_away` storage servers are away (killed or stopped) at a time; of the metadata processes at
most one. Cuts are between hosts, one-way or both ways.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos_cluster import Cluster


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong at `at_s`, and how it ends."""

    words: str
    at_s: float
    ends_s: float
    end: Callable[[], None]


class Nemesis:
    def __init__(self, cluster: Cluster, seed: int, *, most_away: int = 2, cuts: bool = True) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._most_away = most_away
        self._cuts = cuts and cluster.hosts.can_cut
        self._open: list[Fault] = []
        self._began = time.monotonic()
        self.log: list[str] = []

    def run(self, seconds: float, every_s: float = 1.0) -> None:
        """A fault every `every_s`; at the end all of them are over and every process runs."""
        until = time.monotonic() + seconds
        following = time.monotonic()
        while (now := time.monotonic()) < until:
            for fault in [fault for fault in self._open if fault.ends_s <= now]:
                self._finish(fault)
            if now >= following:
                following += every_s
                self._one()
            time.sleep(0.05)
        for fault in list(self._open):
            self._finish(fault)

    def _say(self, words: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:7.2f}  {words}")

    def _begin(self, words: str, lasts_s: float, end: Callable[[], None]) -> None:
        now = time.monotonic()
        self._say(f"{words} for {lasts_s:.1f} s")
        self._open.append(Fault(words, now, now + lasts_s, end))

    def _finish(self, fault: Fault) -> None:
        self._open.remove(fault)
        fault.end()
        self._say(f"over: {fault.words}")

    def _one(self) -> None:
        rng = self._rng
        cluster = self._cluster
        processes = cluster.processes
        away = [name for name in processes if not processes[name].running or processes[name].stopped]
        nodes = [name for name in cluster.nodes if name not in away]
        metas = [name for name in cluster.metas if name not in away]
        can_node = len(cluster.nodes) - len(nodes) < self._most_away
        can_meta = len(metas) > 1
        choices = []
        if can_node:
            choices += ["kill node", "kill node", "stop node", "stop node"]
        if can_meta:
            choices += ["kill meta", "stop meta"]
        if self._cuts and can_node and not any("cut" in fault.words for fault in self._open):
            choices += ["cut", "cut one-way"]
        if not choices:
            return
        choice = rng.choice(choices)
        if choice.startswith("cut"):
            self._cut(both=choice == "cut")
            return
        name = rng.choice(nodes if "node" in choice else metas)
        process = processes[name]
        if choice.startswith("kill"):
            process.kill()
            self._begin(f"kill -9 {name}", rng.choice((0.0, 0.5, 3.0)), process.start)
        else:
            process.pause()
            self._begin(f"stop {name}", rng.choice((0.3, 1.0, 4.0)), process.resume)

    def _cut(self, *, both: bool) -> None:
        rng = self._rng
        hosts = self._cluster.hosts
        lonely = rng.choice(self._cluster.nodes)
        others = [name for name in (*self._cluster.nodes, *self._cluster.metas) if name != lonely]
        if not both:
            others = rng.sample(others, rng.randint(1, len(others)))
        for other in others:
            hosts.cut(lonely, other)
            if both:
                hosts.cut(other, lonely)
        way = "cut off" if both else "cut one-way"
        self._begin(f"{way} {lonely} from {' '.join(others)}", rng.choice((1.0, 4.0)), hosts.heal)
