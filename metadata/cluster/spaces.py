"""Policies of KV spaces: from the namespace's index to the servers, and their use back.

The index (metadata.fs.spaces) is read when it has changed, every quota is split over the chains of its space
(metadata.cluster.shares), and each node is told the policies of its chains under a revision of its own. What
nodes report of use and evictions moves shares, slowly. Only shares that aren't even are stored (`cQ`), so
that another manager goes on from them. One event loop. docs/control_plane.md, Space policies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from ffs.errors import Damaged, FfsError, NotFound
from ffs.layout import Placement
from ffs.proto.cluster import Heartbeat
from ffs.proto.commands import GetSpaces, SpacesReply
from ffs.proto.records import KV_DEDUP, KV_EVICTABLE, KvIndexEntry
from ffs.proto.spaces import SpaceConfig, SpacePolicy, SpaceUse, SpaceView
from metadata.cluster.lease import Lease
from metadata.cluster.routing import View
from metadata.cluster.shares import Load, rebalance, split
from metadata.cluster.space_use import SpaceUses, space_view
from metadata.fs.spaces import SpaceIndex, read_index, slot_of
from metadata.kv.contract import Snapshot, Store, Transaction, after

log = logging.getLogger("ffs.meta.spaces")

ROUND_S: Final = 10.0  # between two rounds of rebalancing
ROUND_BLOCKS: Final = 100  # that chains of a space evict on average, before it is judged,
ROUND_MAX_S: Final = 600.0  # or so long
SHARES: Final = b"cQ"
POLICIES_OF_NODE: Final = 200_000  # more than that don't fit into a message
SPACES_A_TRANSACTION: Final = 200
CHAINS_A_TICK: Final = 20_000  # of spaces that are looked at in one go: the loop has other work

Shares = dict[int, int]  # chain -> bytes


class SharesRecord(Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """Shares of a space that aren't even. Key: cQ <space u64>."""

    v: int = 1
    shares: tuple[tuple[int, int], ...]  # (chain, bytes)


_decode = msgspec.msgpack.Decoder(SharesRecord).decode
_encode = msgspec.msgpack.Encoder().encode


def shares_key(space: int) -> bytes:
    return SHARES + space.to_bytes(8, "big")


class Spaces:
    """The manager calls `enter` at the start of a term, `tick` about twice a second, `heard` with each
    heartbeat. `changed`: told which nodes' policies may have changed."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        view: Callable[[], View],
        changed: Callable[[Iterable[int]], None],
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._lease = lease
        self._view = view
        self._changed = changed
        self._now_s = now_s
        self._index = SpaceIndex()
        self._shares: dict[int, Shares] = {}  # of every space of the index, its chains as keys
        self._stored: dict[int, Shares] = {}
        self._pending: set[int] = set()  # spaces whose table isn't known here yet
        self._uses = SpaceUses(view)
        self._evicted: dict[tuple[int, int], int] = {}  # (target, space) -> counter at the last round
        self._since: dict[int, float] = {}  # space -> the counters at the last round are of then
        self._round_s = 0.0
        self._shown: dict[int, SpaceView] = {}  # where there are many: as added up last
        self._to_show: list[int] = []
        self._to_judge: list[int] = []  # spaces that the present round hasn't looked at yet
        self._generation = 0  # grows with every change of a policy
        self._made: dict[int, tuple[int, frozenset[int], SpaceConfig]] = {}  # by node
        self._count = 0  # of revisions; never starts anew
        self._term = 0  # 0: nothing was read yet in this one
        self._entered = 0
        self._complaint = ""
        self._unsaved = False  # shares may differ from the stored ones
        self._too_many: set[int] = set()  # nodes of which that was said

    async def enter(self, term: int) -> None:
        """Another term: the stored shares and the index are read; what was known of use is forgotten, since
        other counters may have gone on from it. Records that can't be read stop nothing else: nodes keep the
        policies that they have, and `tick` tries again. Raises what a store that fails raises."""
        self._term, self._entered = 0, term
        try:
            index, stored = await self._store.read(_load)
        except Damaged as error:
            if self._complaint != error.message:  # it is tried twice a second
                self._complaint = error.message
                log.error("no policies of KV spaces: %s", error)
            return
        self._index, self._stored = index, stored
        self._shares, self._pending = {}, set()
        self._uses.clear()
        self._evicted.clear()
        self._since.clear()
        self._to_judge.clear()
        self._shown.clear()
        self._made.clear()
        self._too_many.clear()
        self._round_s = self._now_s()
        self._split(index.spaces)
        self._generation += 1
        self._unsaved = True
        self._term = term

    async def tick(self) -> None:
        """Takes up changes of the index, rebalances now and then, stores what isn't even. Raises FfsError."""
        if not self._term:
            return await self.enter(self._entered)
        before = self._index
        index = await self._store.read(lambda snapshot: read_index(snapshot, before))
        if index is not before or self._pending:
            self._take(index)
        if not self._to_judge and self._now_s() - self._round_s >= ROUND_S:
            self._round_s = self._now_s()
            self._to_judge = list(self._shares)
        self._rebalance()
        self._look_at_use()
        if self._unsaved:
            await self._save()
            self._unsaved = False

    # --- to the nodes ------------------------------------------------------------------------------

    def config_of(self, node: int) -> SpaceConfig | None:
        """The policies of a node's chains; a new revision only if they differ from the last. None: not known
        yet in this term, so the node's own stand."""
        if not self._term:
            return None
        chains = frozenset(self._view().chains_of(node))
        made = self._made.get(node)
        if made is not None and made[:2] == (self._generation, chains):
            return made[2]
        policies = self._policies(node, chains)
        if made is not None and made[2].policies == policies:
            config = made[2]
        else:
            self._count += 1
            config = SpaceConfig(revision=(self._term, self._count), policies=policies)
        self._made[node] = (self._generation, chains, config)
        return config

    def news_for(self, node: int, known: tuple[int, int] | None) -> SpaceConfig | None:
        """What a node that acts on revision `known` (None: it takes none) must be told; None: nothing."""
        if known is None:
            return None
        config = self.config_of(node)
        return None if config is None or config.revision == known else config

    def _policies(self, node: int, chains: frozenset[int]) -> tuple[SpacePolicy, ...]:
        policies: list[SpacePolicy] = []
        for space, entry in sorted(self._index.spaces.items()):
            shares = self._shares.get(space, {})
            mine = sorted(shares.keys() & chains)
            if len(policies) + len(mine) > POLICIES_OF_NODE:
                if node not in self._too_many:
                    self._too_many.add(node)
                    log.error(
                        "node %d: more KV spaces than fit into a message: nothing is evicted from space %d "
                        "and later ones",
                        node,
                        space,
                    )
                break
            policies += [
                SpacePolicy(
                    space=space,
                    chain=chain,
                    quota_bytes=shares[chain],
                    ttl_ms=entry.kv.ttl_ms,
                    flags=entry.kv.flags & (KV_EVICTABLE | KV_DEDUP),
                )
                for chain in mine
            ]
        return tuple(policies)

    # --- the index -----------------------------------------------------------------------------------

    def _take(self, index: SpaceIndex) -> None:
        old = self._index.spaces
        self._index = index
        for space in [space for space in self._shares if space not in index.spaces]:
            del self._shares[space]
        changed = {
            space: entry
            for space, entry in index.spaces.items()
            if old.get(space) != entry or space not in self._shares
        }
        split_now = self._split(changed)
        gone = old.keys() - index.spaces.keys()
        for key in [key for key in self._evicted if key[1] in gone]:
            del self._evicted[key]
        for space in gone:
            self._since.pop(space, None)
        for space in [space for space in self._shown if old.get(space) != index.spaces.get(space)]:
            del self._shown[space]
        if split_now or gone:
            self._tell()
            log.info("policies of %d KV spaces", len(index.spaces))

    def _split(self, spaces: Mapping[int, KvIndexEntry]) -> bool:
        """Shares of these, from the ones before. Whether there are any that could be made."""
        done = False
        for space, entry in spaces.items():
            chains = self._chains(entry)
            if not chains:  # of a table that another process made just now
                self._pending.add(space)
                continue
            self._pending.discard(space)
            before = self._shares.get(space) or self._stored.get(space, {})
            slot = slot_of(entry.kv)
            self._shares[space] = split(entry.kv.quota_bytes, chains, before, slot)
            done = True
        self._pending &= self._index.spaces.keys()
        return done

    def _chains(self, entry: KvIndexEntry) -> Sequence[int]:
        """In the order of their ids. The chains of a layout are those of one version of a table."""
        table = self._view().tables.get((entry.layout.table, entry.layout.table_version))
        if table is None:
            return ()
        try:
            return sorted(Placement(entry.layout, table.chains).chains)
        except FfsError as error:  # a stripe beyond the table: no block can be in it
            log.error("a KV space's layout doesn't fit its table: %s", error)
            return ()

    def _tell(self) -> None:
        self._unsaved = True
        self._generation += 1
        self._changed(list(self._view().nodes))

    # --- use and shares ------------------------------------------------------------------------------

    def heard(self, beat: Heartbeat) -> None:
        """A heartbeat that isn't late."""
        self._uses.heard(beat)

    def _rebalance(self) -> None:
        """Goes on with the round, for a bounded time."""
        moved = False
        now = self._now_s()
        budget = CHAINS_A_TICK
        while self._to_judge and budget > 0:
            space = self._to_judge.pop()
            entry, shares = self._index.spaces.get(space), self._shares.get(space)
            if entry is None or not shares or not entry.kv.quota_bytes:
                continue
            quota, of_targets = entry.kv.quota_bytes, self._uses.of(space, shares)
            slot = slot_of(entry.kv)
            budget -= len(shares)
            loads = self._loads(space, shares, of_targets)
            since = self._since.setdefault(space, now)
            enough = sum(load.evicted for load in loads.values()) >= ROUND_BLOCKS * slot * len(loads)
            if enough or now - since >= ROUND_MAX_S:
                after_it = rebalance(quota, shares, loads, slot)
                if after_it != shares:
                    self._shares[space] = after_it
                    moved = True
                self._since[space] = now
                for target, said in of_targets.items():
                    self._evicted[target, space] = said.evicted_bytes
            for target, said in of_targets.items():
                self._evicted.setdefault((target, space), said.evicted_bytes)
        if moved:
            self._tell()

    def _loads(self, space: int, shares: Shares, of_targets: Mapping[int, SpaceUse]) -> dict[int, Load]:
        """Of chains whose head has said what it holds, and whose evictions are known since the last round."""
        view = self._view()
        loads = {}
        for chain in shares:
            head = self._uses.head(chain, of_targets)
            if head is None:
                continue
            evicted = 0
            for member in view.chains[chain].members:
                said, last = of_targets.get(member), self._evicted.get((member, space))
                if said is not None and last is not None:
                    # A counter that went back began anew.
                    evicted += said.evicted_bytes - (last if last <= said.evicted_bytes else 0)
            loads[chain] = Load(head.bytes, evicted)
        return loads

    async def _save(self) -> None:
        """Shares that aren't even, and not those of spaces that have gone."""
        wanted: dict[int, Shares | None] = dict.fromkeys(self._stored.keys() - self._index.spaces.keys())
        for space, shares in self._shares.items():
            kv = self._index.spaces[space].kv
            even = split(kv.quota_bytes, list(shares), {}, slot_of(kv))
            if shares != (self._stored.get(space) or even):
                wanted[space] = shares if shares != even else None
        todo = list(wanted.items())
        for at in range(0, len(todo), SPACES_A_TRANSACTION):
            page = todo[at : at + SPACES_A_TRANSACTION]

            async def body(txn: Transaction, page: list[tuple[int, Shares | None]] = page) -> None:
                await self._lease.guard(txn)
                for space, shares in page:
                    if shares is None:
                        txn.clear(shares_key(space))
                    else:
                        txn.set(shares_key(space), _encode(SharesRecord(shares=tuple(shares.items()))))

            await self._store.run(body)
            for space, saved in page:
                if saved is None:
                    self._stored.pop(space, None)
                else:
                    self._stored[space] = saved

    # --- to people -----------------------------------------------------------------------------------

    def knows(self, space: int) -> bool:
        """Whether it is in the index as read last (0: any that is asked for)."""
        return not space or space in self._index.spaces

    def reply(self, request: GetSpaces) -> SpacesReply:
        """One space, with its chains, or all. NotFound."""
        if request.space:
            if request.space not in self._index.spaces:
                if not self._index.complete:
                    raise NotFound("the index of KV spaces is being made anew: try again in a minute")
                raise NotFound(f"there is no KV space of inode {request.space}")
            return SpacesReply(
                complete=self._index.complete, spaces=(self._view_of(request.space, chains=True),)
            )
        return SpacesReply(complete=self._index.complete, spaces=self.views())

    def views(self) -> tuple[SpaceView, ...]:
        """All spaces, without their chains. Where there are very many, their use as of some seconds ago."""
        spaces = sorted(self._index.spaces)
        if sum(map(len, self._shares.values())) <= CHAINS_A_TICK:
            return tuple(self._view_of(space, chains=False) for space in spaces)
        return tuple(
            self._shown[space] if space in self._shown else self._view_of(space, chains=False, used=False)
            for space in spaces
        )

    def _look_at_use(self) -> None:
        """Where there are too many to be added up when somebody asks: some of them, in turn."""
        if sum(map(len, self._shares.values())) <= CHAINS_A_TICK:
            self._shown.clear()
            return
        budget = CHAINS_A_TICK
        self._to_show = self._to_show or list(self._shares)
        while self._to_show and budget > 0:
            space = self._to_show.pop()
            if space in self._index.spaces:
                self._shown[space] = self._view_of(space, chains=False)
                budget -= len(self._shares.get(space, ()))

    def _view_of(self, space: int, *, chains: bool, used: bool = True) -> SpaceView:
        shares = self._shares.get(space, {})
        return space_view(space, self._index.spaces[space], shares, self._uses if used else None, chains)


async def _load(snapshot: Snapshot) -> tuple[SpaceIndex, dict[int, Shares]]:
    """The index, and the stored shares."""
    stored: dict[int, Shares] = {}
    for key, value in await snapshot.range(SHARES, after(SHARES)):
        try:
            stored[int.from_bytes(key[-8:], "big")] = dict(_decode(value).shares)
        except msgspec.MsgspecError as error:
            raise Damaged(f"record {key!r} of the metadata store can't be read: {error}") from None
    return await read_index(snapshot, SpaceIndex()), stored
