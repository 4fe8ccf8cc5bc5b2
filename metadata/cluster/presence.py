"""Which storage nodes are there, and whose lease is over. Pure: every time is an argument, in seconds on one
clock of the manager's machine that never steps (metadata.cluster.clock.monotonic_s).

A node is *here* while it was heard, in its present incarnation, within the failure timeout T. Its lease has
*lapsed* when the manager has given it none for T: it counts from when it asked, and the manager from when it
answered, so the manager's end is the later one. Three things keep that true:

- A new primary doesn't know whom the one before it answered last, so for it every node counts as answered
  at its takeover, before which the old one stopped giving leases (metadata.cluster.lease, `may_grant`).
- A node that registers anew counts as answered then, too - once for each incarnation that sent a
  heartbeat: so one that comes back is waited for, and one that never gets further isn't.
- When the manager itself was late - stopped, swapped out, starved - the silence of that time says nothing
  about the nodes: `tick` shifts all times by it.

docs/control_plane.md, Nodes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    incarnation: int
    answered_s: float  # the last answer with a lease, a takeover, or a registration
    heard_s: float | None = None  # the last heartbeat of this incarnation


class Presences:
    """All nodes as one primary sees them. `begin` first. One thread."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._nodes: dict[int, _Node] = {}
        self._began_s = 0.0
        self._grace_s = timeout_s  # of nodes not answered since the takeover
        self._ticked_s = 0.0

    def begin(self, now_s: float, lease_s: float = 0.0) -> None:
        """This process takes over as primary. `lease_s`: what the one before it gave, if that was longer."""
        self._nodes.clear()
        self._began_s = now_s
        self._grace_s = max(self.timeout_s, lease_s)
        self._ticked_s = now_s

    def tick(self, now_s: float) -> float:
        """To be called several times in every T/2. Returns the lateness that was forgiven, 0.0 mostly."""
        late_s = now_s - self._ticked_s
        self._ticked_s = max(now_s, self._ticked_s)
        if late_s <= self.timeout_s / 2:
            return 0.0
        self._began_s = min(now_s, self._began_s + late_s)
        for node in self._nodes.values():
            node.answered_s = min(now_s, node.answered_s + late_s)
            if node.heard_s is not None:
                node.heard_s = min(now_s, node.heard_s + late_s)
        return late_s

    def registered(self, node_id: int, incarnation: int, now_s: float) -> None:
        """A new incarnation has been stored."""
        node = self._nodes.get(node_id)
        if node is None:
            self._nodes[node_id] = _Node(incarnation, now_s)
        elif node.incarnation < incarnation:
            if node.heard_s is not None:
                node.answered_s = max(node.answered_s, now_s)
            node.incarnation, node.heard_s = incarnation, None

    def heard(self, node_id: int, incarnation: int, now_s: float) -> None:
        """A heartbeat of the registered incarnation has come."""
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node(incarnation, self._began_s)
        if node.incarnation < incarnation:  # registered with the primary before
            node.incarnation = incarnation
        assert node.incarnation == incarnation, (node, incarnation)
        node.heard_s = now_s

    def answered(self, node_id: int, now_s: float) -> None:
        """It is being given a lease."""
        node = self._nodes[node_id]
        node.answered_s = max(node.answered_s, now_s)

    def here(self, node_id: int, incarnation: int, now_s: float) -> bool:
        """Heard in this incarnation within T."""
        node = self._nodes.get(node_id)
        if node is None or node.incarnation != incarnation or node.heard_s is None:
            return False
        return now_s - node.heard_s < self.timeout_s

    def lapsed(self, node_id: int, now_s: float) -> bool:
        """No lease that any primary has given it can still hold."""
        if now_s - self._began_s < self._grace_s:
            return False
        node = self._nodes.get(node_id)
        return node is None or now_s - node.answered_s >= self.timeout_s

    def silent_s(self, node_id: int, now_s: float) -> float | None:
        """Since its last heartbeat; None: none in this incarnation since the takeover."""
        node = self._nodes.get(node_id)
        return None if node is None or node.heard_s is None else now_s - node.heard_s

    def next_change_s(self, now_s: float) -> float:
        """The earliest time at which a node that says nothing may be judged otherwise; inf: none."""
        ends = [self._began_s + self._grace_s]
        for node in self._nodes.values():
            ends.append(node.answered_s + self.timeout_s)
            if node.heard_s is not None:
                ends.append(node.heard_s + self.timeout_s)
        return min((end for end in ends if end > now_s), default=float("inf"))
