"""What the primary has decided on every chain, in its term: metadata.cluster.chain with a memory.

Keeps the last decision and the last proposal of each chain, what waits to be recorded and what is being
recorded, who is being filled where, and since when things have been quiet or overdue. All of it is learned
anew by the next primary. Chains with news are looked at, and the others in turn. A chain about which an
assertion fails is left as it is, and the others go on. One event loop; no I/O. docs/control_plane.md, Chains.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from ffs.proto.cluster import ChainRecord
from metadata.cluster import chain as chains
from metadata.cluster.members import Proposal, Seat, Version, goal_of, serving_of, syncing_of, version_of
from metadata.cluster.routing import View

log = logging.getLogger("ffs.meta.chains")

SYNCS_OF_NODE: Final = 32  # at once, as their target and as their source
REORDERS_A_ROUND: Final = 64
LOOKS_A_ROUND: Final = 64
LONGEST_PAUSE: Final = 4  # times the first

SeatOf = Callable[[int], Seat]


class Decisions:
    """`forget` first, and with each term."""

    def __init__(self, seat_of: SeatOf, timeout_s: float, syncs_of_node: int = SYNCS_OF_NODE) -> None:
        self._seat_of = seat_of
        self._patience_s = max(2.0 * timeout_s, 5.0)  # for members to persist; for quiet before a reorder
        self._pause_s = 2.0 * timeout_s  # before one that was left out is filled again, at first
        self._syncs_of_node = syncs_of_node
        self.forget(0)

    def forget(self, term: int) -> None:
        self._term = term
        self._view = View()
        self.of: dict[int, chains.Decision] = {}
        self.proposals: dict[int, Proposal] = {}  # the last of each chain, live or not
        self.to_record: dict[int, tuple[ChainRecord, Proposal]] = {}
        self.in_flight: dict[int, tuple[ChainRecord, Proposal]] = {}
        self.impossible: set[int] = set()  # chains whose decision failed an assertion
        self.touched: set[int] = set()  # nodes whose configuration may have changed
        self._proposed_s: dict[int, float] = {}
        self._unsettled: dict[int, tuple[Version, float]] = {}  # chain -> recorded version, changing since
        self._unordered_s: dict[int, float] = {}  # since when nothing but the order is wrong
        self._syncs: dict[int, tuple[int, int]] = {}  # chain -> nodes of (source, target)
        self._sources: Counter[int] = Counter()
        self._targets: Counter[int] = Counter()
        self._waiting: dict[int, None] = {}  # chains that want a slot for a sync, longest first
        self._pauses: dict[int, tuple[int, float, float]] = {}  # target -> incarnation, until when, how long
        self._failing: dict[int, tuple[object, int, float]] = {}  # chain -> which sync, how far it got, since
        self._stalled: set[int] = set()  # chains whose sync has failed for long, as `decide` was told
        self._withheld: dict[int, tuple[int, ...]] = {}  # chain -> nodes
        self._turn: list[int] = []  # chains that are looked at soon, whatever happens

    # decisions

    def look(self, view: View, chain_ids: Iterable[int], now_s: float) -> None:
        """Decides on these chains anew, and on those that wait for what became free."""
        freed = False
        for chain_id in list(chain_ids):
            freed |= self._look_at(view, chain_id, now_s)
        if freed:
            self._give_slots(view, now_s)

    def look_again(self, view: View, now_s: float) -> None:
        """What only time changes."""
        late = [c for c, at_s in self._proposed_s.items() if now_s - at_s >= self._patience_s]
        settled = [c for c, at_s in self._unordered_s.items() if now_s - at_s >= self._patience_s]
        failing = [c for c, (_, _, at_s) in self._failing.items() if now_s - at_s >= self._patience_s]
        stalled = [c for c in failing if c not in self._stalled]
        self.look(view, [*late, *settled[:REORDERS_A_ROUND], *stalled, *self._next_ones(view)], now_s)
        self._give_slots(view, now_s)

    def _next_ones(self, view: View) -> list[int]:
        """Some chains without news, all of them in turn: news that was lost, or judged in a bad moment, costs
        a while and not for ever."""
        if not self._turn:
            self._turn = list(view.chains)
        chosen, self._turn = self._turn[-LOOKS_A_ROUND:], self._turn[:-LOOKS_A_ROUND]
        return [chain_id for chain_id in chosen if chain_id in view.chains]

    def may_lease(self, node: int) -> bool:
        """Whether the node may be given a lease: not while a version that leaves out what it serves is about
        to be recorded because its lease is over, nor while it doesn't stand down."""
        if any(node in nodes for nodes in self._withheld.values()):
            return False
        return not any(
            node in self._left_out_nodes(record, proposal)
            for pending in (self.to_record, self.in_flight)
            for record, proposal in pending.values()
        )

    def take_batch(self, limit: int) -> list[tuple[ChainRecord, Proposal]]:
        """Records to be made now; `landed` when it is known what became of them."""
        chosen = list(self.to_record)[:limit]
        for chain_id in chosen:
            self.in_flight[chain_id] = self.to_record.pop(chain_id)
        return [self.in_flight[chain_id] for chain_id in chosen]

    def came_back(self, targets: Iterable[int]) -> None:
        """Of a node that wasn't heard for a while and is heard again: what was wrong with it is over, as far
        as anybody can tell, so they needn't wait to be filled. The caller looks at their chains."""
        for target in targets:
            self._pauses.pop(target, None)

    def landed(self, chain_ids: Iterable[int]) -> None:
        for chain_id in chain_ids:
            self.in_flight.pop(chain_id, None)

    # inside

    def _look_at(self, view: View, chain_id: int, now_s: float) -> bool:
        """Whether a slot for a sync has become free."""
        if chain_id in self.in_flight:
            return False  # looked at when it has landed
        record = view.chains[chain_id]
        self._view = view
        held = self._drop_sync(chain_id)
        last = self.proposals.get(chain_id)
        proposed_s = self._proposed_s.get(chain_id)
        unordered_s = self._unordered_s.get(chain_id)
        stalled = self._stalls(record, now_s)
        try:
            decision = chains.decide(
                record,
                {target: self._seat_of(target) for target in chains.people_of(record)},
                last,
                self._term,
                may_sync=lambda source, target: self._may_sync(source, target, now_s),
                quiet=unordered_s is not None and now_s - unordered_s >= self._patience_s,
                overdue=proposed_s is not None and now_s - proposed_s >= self._patience_s,
                stalled=stalled,
                unsettled=self._is_unsettled(record, now_s),
            )
        except AssertionError:
            if chain_id not in self.impossible:
                self.impossible.add(chain_id)
                log.critical(
                    "chain %d: it should be impossible, and nothing is done about it", chain_id, exc_info=True
                )
            self.to_record.pop(chain_id, None)
            return held is not None
        self._log(chain_id, decision)
        self.of[chain_id] = decision
        self._act(record, decision, now_s)
        self._note_time(record, decision, now_s)
        self._hold_sync(view, record, decision)
        return held is not None and self._syncs.get(chain_id) != held

    def _act(self, record: ChainRecord, decision: chains.Decision, now_s: float) -> None:
        self.to_record.pop(record.id, None)
        proposal = decision.proposal
        if decision.action is chains.Action.PROPOSE:
            assert proposal is not None
            before = self.proposals.get(record.id)
            self.proposals[record.id] = proposal
            self._proposed_s[record.id] = now_s
            for target, incarnation in proposal.without:
                self._pause(target, incarnation, now_s)
            told = {*record.members, *proposal.next.members, *(before.next.members if before else ())}
            self.touched.update(self._view.targets[target].node for target in told)
        elif decision.action is chains.Action.RECORD:
            assert proposal is not None
            self.to_record[record.id] = (record, proposal)
        nodes = tuple(self._view.targets[target].node for target in decision.withhold)
        if nodes:
            self._withheld[record.id] = nodes
        else:
            self._withheld.pop(record.id, None)
        if proposal is None and decision.serving:
            for target in serving_of(record):
                self._pauses.pop(target, None)

    def _is_unsettled(self, record: ChainRecord, now_s: float) -> bool:
        version, since_s = self._unsettled.get(record.id, ((0, 0), now_s))
        return version == version_of(record) and now_s - since_s >= self._patience_s

    def _note_time(self, record: ChainRecord, decision: chains.Decision, now_s: float) -> None:
        chain_id = record.id
        if decision.proposal is None:
            self._proposed_s.pop(chain_id, None)
            self._unsettled.pop(chain_id, None)
        elif self._unsettled.get(chain_id, ((0, 0), 0.0))[0] != version_of(record):
            self._unsettled[chain_id] = version_of(record), now_s
        if decision.wants_quiet and decision.serving:
            self._unordered_s.setdefault(chain_id, now_s)
        else:
            self._unordered_s.pop(chain_id, None)
        if decision.wants_slot:
            self._waiting.setdefault(chain_id)
        else:
            self._waiting.pop(chain_id, None)

    def _log(self, chain_id: int, decision: chains.Decision) -> None:
        before = self.of.get(chain_id)
        if before is None or before.serving != decision.serving or before.reason != decision.reason:
            log.debug("chain %d: %s", chain_id, decision.reason or "whole")
        if decision.action is chains.Action.PROPOSE and decision.proposal is not None:
            after = decision.proposal.next
            log.info(
                "chain %d: version %d.%d is proposed: members %s, states %s",
                chain_id,
                after.term,
                after.counter,
                after.members,
                after.states,
            )

    def _left_out_nodes(self, record: ChainRecord, proposal: Proposal) -> list[int]:
        out = set(serving_of(record)) - set(serving_of(proposal.next))
        return [self._view.targets[target].node for target in out]

    # syncs

    def _may_sync(self, source: int, target: int, now_s: float) -> bool:
        incarnation, until_s, _ = self._pauses.get(target, (0, 0.0, 0.0))
        if until_s > now_s and incarnation == self._seat_of(target).incarnation:
            return False
        targets = self._view.targets
        return (
            self._sources[targets[source].node] < self._syncs_of_node
            and self._targets[targets[target].node] < self._syncs_of_node
        )

    def _pause(self, target: int, incarnation: int, now_s: float) -> None:
        """Each is twice as long as the one before, up to a bound, until the target serves again, its node
        comes back from a silence, or it restarts."""
        was, until_s, pause_s = self._pauses.get(target, (0, 0.0, 0.0))
        if was != incarnation:
            pause_s = self._pause_s
        elif until_s <= now_s:
            pause_s = min(2 * pause_s, LONGEST_PAUSE * self._pause_s)
        self._pauses[target] = (incarnation, now_s + pause_s, pause_s)

    def _stalls(self, record: ChainRecord, now_s: float) -> bool:
        """Whether its sync has failed for a while, and hasn't got further than ever since. (A source starts
        again after a failure, and names the last one until it is done.)"""
        target = syncing_of(record)
        report = self._seat_of(serving_of(record)[-1]).report if target else None
        self._stalled.discard(record.id)
        if report is None or report.sync_target != target or not report.sync_failure:
            self._failing.pop(record.id, None)
            return False
        sync = (target, record.incarnations)
        got = report.sync_chunks_compared + report.sync_chunks_sent
        was = self._failing.get(record.id)
        if was is None or was[0] != sync or was[1] < got:
            self._failing[record.id] = was = (sync, got, now_s)
        if now_s - was[2] < self._patience_s:
            return False
        self._stalled.add(record.id)
        return True

    def _hold_sync(self, view: View, record: ChainRecord, decision: chains.Decision) -> None:
        """Counts the sync that goes on in the recorded version, or begins with the live proposal."""
        live = decision.proposal
        filling = record if live is None or not syncing_of(live.next) else live.next
        if not syncing_of(filling):
            return
        source = view.targets[serving_of(filling)[-1]].node
        target = view.targets[syncing_of(filling)].node
        self._syncs[record.id] = (source, target)
        self._sources[source] += 1
        self._targets[target] += 1

    def _drop_sync(self, chain_id: int) -> tuple[int, int] | None:
        held = self._syncs.pop(chain_id, None)
        if held is not None:
            self._sources[held[0]] -= 1
            self._targets[held[1]] -= 1
        return held

    def _give_slots(self, view: View, now_s: float) -> None:
        """Looks only at those chains for which there is room."""
        self._view = view
        for chain_id in list(self._waiting):
            record = view.chains[chain_id]
            serving = serving_of(record)
            failed = syncing_of(record) if chain_id in self._stalled else 0
            wants = [target for target in goal_of(record) if target not in (*serving, failed)]
            if serving and any(self._may_sync(serving[-1], target, now_s) for target in wants):
                self._look_at(view, chain_id, now_s)

    def moving(self, chain_id: int) -> bool:
        decision = self.of.get(chain_id)
        return decision is None or decision.moving
