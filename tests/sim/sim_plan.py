"""What a seed draws: the size of its world, how bad its network, disks and clocks are, and which faults."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True)
class Plan:
    """Printed with a failure. Times in ms, rates as shares."""

    members: int = 3
    spares: int = 0  # nodes whose targets aren't in the chain at first
    clients: int = 3
    channels: int = 2
    keys: int = 3
    safety_ms: int = 6000
    timeout_ms: int = 1000  # the failure timeout
    # the network
    fifo: bool = False  # messages of a pair keep their order
    loss: float = 0.03
    repeat: float = 0.03
    delay_ms: int = 15
    late: float = 0.0  # messages that come much later
    later: float = 0.1  # payloads that are fetched
    bad: float = 0.01  # payloads that fail their checksums
    uncached: float = 0.1  # updates sent twice by the network
    cut_every_ms: int = 0  # partitions; 0: never, here and below
    # nodes
    disk_ms: int = 25
    slow_every_ms: int = 0
    crash_every_ms: int = 1500
    crash_all: float = 0.3
    long_down: float = 0.0  # crashes after which a node stays away for longer than the failure timeout
    never: float = 0.0  # after which it stays away to the end
    wipe: float = 0.0  # after which it comes back with an empty device
    pause_every_ms: int = 0
    drift: float = 0.0  # of clocks, each way
    no_space: float = 0.0  # share of the time in which some member is full
    rot_every_ms: int = 0
    scrub_every_ms: int = 0
    evict_every_ms: int = 0  # a chunk is chosen at some node, and ordered to go a while later
    # the manager
    managers: int = 2
    manager_every_ms: int = 0  # crashes, pauses and cuts of the primary
    lost_commits: float = 0.0  # transactions whose outcome it doesn't hear
    moves_every_ms: int = 0  # wanted members change
    # clients
    stale: float = 0.0  # refreshes of routing that change nothing
    epochs: bool = False  # space epochs, removal of a space
    fences: bool = False  # sessions end: clients are fenced, their retry entries go
    mix: tuple[int, ...] = (6, 1, 1, 1, 2, 6)  # write truncate remove replace create read
    per_chunk: int = 16
    window: int = 4  # transfers of a sync under way
    mutant: int = 0

    @staticmethod
    def draw(rng: random.Random) -> Plan:
        p = Plan()
        p.members = rng.choice((1, 2, 3, 3, 3, 3, 4))
        p.spares = rng.choice((0, 0, 1, 2))
        p.clients = rng.randint(1, 4)
        p.channels = rng.randint(1, 3)
        p.keys = rng.choice((1, 1, 2, 4, 8))
        p.safety_ms = rng.choice((1500, 3000, 5000, 8000))
        p.timeout_ms = rng.choice((500, 1000))
        p._draw_network(rng)
        p._draw_nodes(rng)
        p._draw_manager(rng)
        p.stale = rng.choice((0.0, 0.3, 0.8))
        p.epochs = rng.random() < 0.3
        p.fences = rng.random() < 0.2
        p.mix = rng.choice(((6, 1, 1, 1, 2, 6), (8, 0, 0, 0, 0, 4), (2, 2, 3, 1, 3, 6), (4, 1, 1, 1, 1, 20)))
        p.per_chunk = rng.choice((1, 3, 16))
        p.window = rng.choice((1, 2, 16))
        # Drawn aside: the worlds without it stay what they were.
        aside = random.Random(repr(rng.getstate()[1][:8]))
        p.evict_every_ms = aside.choice((0, 0, 40, 200))
        return p

    def _draw_network(self, rng: random.Random) -> None:
        self.fifo = rng.random() < 0.4
        self.loss = 0.0 if self.fifo else rng.choice((0.0, 0.02, 0.1))
        self.repeat = 0.0 if self.fifo else rng.choice((0.0, 0.05, 0.2))
        self.delay_ms = rng.choice((1, 5, 20, 100))
        self.late = 0.0 if self.fifo else rng.choice((0.0, 0.0, 0.02))
        self.later = rng.choice((0.0, 0.2))
        self.bad = rng.choice((0.0, 0.0, 0.05))
        self.uncached = rng.choice((0.0, 0.2))
        self.cut_every_ms = rng.choice((0, 0, 800, 2000))

    def _draw_nodes(self, rng: random.Random) -> None:
        self.disk_ms = rng.choice((1, 5, 20, 100))
        self.slow_every_ms = rng.choice((0, 0, 1500))
        self.crash_every_ms = rng.choice((0, 400, 1000, 2500))
        self.crash_all = rng.choice((0.0, 0.3, 1.0))
        self.long_down = rng.choice((0.0, 0.3, 0.7))
        self.never = rng.choice((0.0, 0.0, 0.1))
        self.wipe = rng.choice((0.0, 0.0, 0.15))
        self.pause_every_ms = rng.choice((0, 0, 700, 2000))
        self.drift = rng.choice((0.0, 0.02))
        self.no_space = rng.choice((0.0, 0.0, 0.3))
        self.rot_every_ms = rng.choice((0, 0, 300, 1500))
        self.scrub_every_ms = rng.choice((0, 200))

    def _draw_manager(self, rng: random.Random) -> None:
        self.manager_every_ms = rng.choice((0, 0, 900, 2500))
        self.lost_commits = rng.choice((0.0, 0.2))
        self.moves_every_ms = rng.choice((0, 0, 1200, 3000))
