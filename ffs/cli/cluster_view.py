"""A cluster's state in words, tables and JSON, from a ClusterReply. Pure. docs/operations.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ffs.cli.text import format_bytes, format_seconds, plural, table
from ffs.proto.cluster import TargetState
from ffs.proto.commands import ChainView, ClusterReply, DeviceView, NodeView, SyncView, TargetView
from ffs.proto.spaces import SpaceView

REASONS = 5  # that status names
SYNCS = 8


class View:
    """A ClusterReply with what is looked up in it."""

    def __init__(self, reply: ClusterReply) -> None:
        self.reply = reply
        self.nodes = {node.id: node for node in reply.nodes}
        self.targets = {target.id: target for target in reply.targets}
        self.chains = {chain.id: chain for chain in reply.chains}
        self.tables = {entry.id: entry.name for entry in reply.tables}
        self.devices = {device.uuid: device for node in reply.nodes for device in node.devices}

    def node_name(self, target: int) -> str:
        known = self.targets.get(target)
        return self.nodes[known.node].name if known is not None and known.node in self.nodes else "?"

    def of_node(self, chain: ChainView, node: int) -> bool:
        """Whether the chain has or wants a target of the node."""
        return any(
            self.targets[target].node == node
            for target in (*chain.members, *chain.wanted)
            if target in self.targets
        )


def arrived(chain: ChainView) -> bool:
    """Whether it has what it wants, and all of it serves."""
    return set(chain.members) == set(chain.wanted) and set(chain.states) == {int(TargetState.SERVING)}


def on_its_way(chain: ChainView) -> bool:
    """Whether targets come or go."""
    return set(chain.members) != set(chain.wanted)


def condition(chain: ChainView) -> str:
    """One word: whole, syncing (a replica is filled), degraded (fewer replicas than wanted), offline."""
    if not chain.writable:
        return "offline"
    if chain.whole:
        return "whole"
    if TargetState.SYNCING in chain.states:
        return "syncing"
    return "moving" if arrived(chain) else "degraded"


def node_state(node: NodeView) -> str:
    if not node.alive and node.draining and not node.leaving:
        return "off"
    if not node.alive:
        silent = "silent" if node.silent_ms < 0 else "silent " + format_seconds(node.silent_ms / 1000)
        return silent + (", draining" if node.draining else "")
    if node.draining:
        return "draining" if node.leaving else "drained"
    return "alive"


def device_state(device: DeviceView) -> str:
    if device.poisoned:
        return "FAILED"
    if not device.here:
        return "not there"
    return "null" if device.null_data else "ok"


# --- for people -----------------------------------------------------------------------------------


def summary(view: View) -> str:
    reply = view.reply
    alive = sum(node.alive for node in reply.nodes)
    whole = sum(chain.whole for chain in reply.chains)
    capacity = sum(device.capacity_bytes for device in view.devices.values())
    used = capacity - sum(device.free_bytes for device in view.devices.values())
    return (
        f"{alive} of {plural(len(reply.nodes), 'storage node')} alive, "
        f"{whole} of {plural(len(reply.chains), 'chain')} whole, "
        f"{format_bytes(used)} of {format_bytes(capacity)} used"
    )


def status_lines(view: View) -> Iterator[str]:
    reply = view.reply
    yield f"cluster {reply.cluster.hex()}  manager {reply.primary} (term {reply.term})"
    yield summary(view)
    yield ""
    yield node_table(view)
    yield ""
    if empty := sum(device.null_data for device in view.devices.values()):
        yield f"{plural(empty, 'null device')}, for measuring: no data is kept, files hold zeros"
    for entry in {entry.id: entry for entry in reply.tables}.values():
        mine = [chain for chain in reply.chains if chain.table == entry.id]
        counts = Counter(condition(chain) for chain in mine)
        shown = ", ".join(f"{counts[word]} {word}" for word in _WORDS if counts[word])
        chains, replicas = plural(len(mine), "chain"), plural(entry.replicas, "replica")
        role = f"role {entry.role}, " if entry.role else ""
        yield f"table {entry.name}: {role}{replicas}, {chains}: {shown}"
    if reply.spaces:
        held = sum(space.bytes for space in reply.spaces)
        evicted = sum(space.evicted_bytes for space in reply.spaces)
        spaces = plural(len(reply.spaces), "KV space")
        yield (
            f"{spaces}: {format_bytes(held)} held, {format_bytes(evicted)} evicted since the servers started "
            "(ffs space ls)"
        )
    reasons = Counter(fold(view, chain.reason) for chain in reply.chains if not chain.whole)
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:REASONS]:
        yield f"  {plural(count, 'chain')}: {reason}"
    if len(reasons) > REASONS:
        yield f"  ... and {plural(len(reasons) - REASONS, 'other reason')}: ffs cluster chains --unhealthy"
    yield from _moving_lines(view)
    yield from _care_lines(view)


_WORDS = ("whole", "syncing", "moving", "degraded", "offline")


def fold(view: View, reason: str) -> str:
    """The reason without what differs from chain to chain, so that those of one cause count as one."""
    named = re.sub(r"target (\d+)", lambda found: f"a target of {view.node_name(int(found[1]))}", reason)
    return re.sub(r"\bversion \d+\.\d+", "version ...", named)


def _moving_lines(view: View) -> Iterator[str]:
    for node in view.reply.nodes:
        if node.draining and node.leaving:
            stuck = f": {node.note}" if node.note else ""
            yield f"node {node.name} is being drained, {plural(node.leaving, 'target')} left{stuck}"
        elif node.draining and not node.alive:
            yield f"node {node.name} is drained and off: ffs cluster forget {node.name} takes it off the list"
        elif node.draining:
            yield f"node {node.name} is drained: it may be switched off"
        elif node.note:
            yield f"node {node.name}: {node.note}"
    if view.reply.rebalancing:
        moving = sum(on_its_way(chain) for chain in view.reply.chains)
        yield f"a rebalance goes on, {plural(moving, 'chain')} on their way"
    syncing = [chain for chain in view.reply.chains if chain.sync is not None]
    for chain in syncing[:SYNCS]:
        yield "  " + sync_line(view, chain)
    if len(syncing) > SYNCS:
        yield f"  ... and {len(syncing) - SYNCS} more"


def sync_line(view: View, chain: ChainView) -> str:
    sync = chain.sync
    if sync is None:
        return f"chain {chain.id}"
    speed = f", {format_bytes(sync.bytes_per_s)}/s" if sync.bytes_per_s else ""
    failed = f", given up (reason {sync.failure}), will begin again" if sync.failure else ""
    source, target = view.node_name(sync.source), view.node_name(sync.target)
    sent = f"{format_bytes(sync.bytes_sent)} sent{speed}{failed}"
    return f"chain {chain.id}: {source} fills target {sync.target} of {target}, {share(sync):.0%}, {sent}"


def share(sync: SyncView) -> float:
    """How much of it has been compared, and sent where it differed."""
    if sync.done or not sync.chunks_total:
        return 1.0 if sync.done else 0.0
    return min(1.0, sync.chunks_compared / sync.chunks_total)


def _care_lines(view: View) -> Iterator[str]:
    targets = view.reply.targets
    damaged, repaired = (sum(getattr(t, name) for t in targets) for name in ("damaged", "repaired"))
    scrubbed = sum(target.scrubbed_bytes for target in targets)
    yield (
        f"scrub: {format_bytes(scrubbed)} read since the servers started, "
        f"{plural(damaged, 'chunk')} damaged now, {repaired} repaired"
    )
    shared = Counter(chain.shared_domain for chain in view.reply.chains if chain.shared_domain)
    for label, count in sorted(shared.items()):
        yield f"{plural(count, 'chain')} with two replicas in failure domain {label}"


def node_table(view: View) -> str:
    rows = []
    for node in view.reply.nodes:
        for device in node.devices or (None,):
            rows.append(
                (
                    str(node.id),
                    node.name,
                    node_state(node),
                    node.domain or "-",
                    node.host,
                    *(_device_cells(device) if device is not None else ("-",) * 7),
                )
            )
    head = (
        *("node", "name", "state", "domain", "host"),
        *("device", "role", "", "size", "free", "targets", "spare"),
    )
    return table(head, rows, right=(8, 9, 10, 11))


def _device_cells(device: DeviceView) -> tuple[str, ...]:
    known = device.capacity_bytes > 0
    return (
        device.path or device.uuid.hex(),
        device.role or "-",
        device_state(device),
        format_bytes(device.capacity_bytes) if known else "-",
        format_bytes(device.free_bytes) if known else "-",
        str(device.used_targets),
        str(device.free_targets),
    )


def chain_table(view: View, chains: list[ChainView]) -> str:
    rows = [
        (
            str(chain.id),
            view.tables.get(chain.table, str(chain.table)),
            f"{chain.term}.{chain.counter}",
            condition(chain),
            " ".join(_member(view, chain, at) for at in range(len(chain.members))) + _coming(view, chain),
            chain.reason,
        )
        for chain in chains
    ]
    return table(("chain", "table", "version", "state", "members (head first)", "why"), rows, right=(0,))


def _member(view: View, chain: ChainView, at: int) -> str:
    target, state = chain.members[at], chain.states[at]
    leaves = "" if target in chain.wanted else ",leaving"
    shown = "" if state == TargetState.SERVING else ":" + TargetState(state).name.lower().replace("_", "-")
    return f"{target}@{view.node_name(target)}{shown}{leaves}"


def _coming(view: View, chain: ChainView) -> str:
    coming = [target for target in chain.wanted if target not in chain.members]
    return "".join(f" +{target}@{view.node_name(target)}" for target in coming)


def target_table(view: View, targets: list[TargetView]) -> str:
    rows = [
        (
            str(target.id),
            view.nodes[target.node].name,
            _device_name(view, target.device),
            str(target.chain),
            target_state(target),
            format_bytes(target.used_bytes),
            str(target.chunks),
            str(target.damaged),
            str(target.repaired),
        )
        for target in targets
    ]
    head = ("target", "node", "device", "chain", "state", "used", "chunks", "damaged", "repaired")
    return table(head, rows, right=(0, 3, 5, 6, 7, 8))


def target_state(target: TargetView) -> str:
    if target.released:
        return "released"
    if not target.member:
        return "to come"
    state = TargetState(target.state).name.lower().replace("_", "-")
    return state if target.wanted else f"{state}, leaving"


def _device_name(view: View, uuid: bytes) -> str:
    device = view.devices.get(uuid)
    return device.path if device is not None and device.path else uuid.hex()


# --- for programs ---------------------------------------------------------------------------------


def status_fields(view: View) -> dict[str, object]:
    """Ids as numbers, states by name, sizes in bytes."""
    reply = view.reply
    return {
        "cluster": reply.cluster.hex(),
        "epoch": reply.epoch,
        "term": reply.term,
        "manager": reply.primary,
        "whole": all(chain.whole for chain in reply.chains),
        "rebalancing": reply.rebalancing,
        "nodes": [node_fields(node) for node in reply.nodes],
        "tables": [
            {
                "id": entry.id,
                "name": entry.name,
                "version": entry.version,
                "replicas": entry.replicas,
                "role": entry.role,
            }
            for entry in reply.tables
        ],
        "spaces": [space_fields(view, space) for space in reply.spaces],
        "states": dict(Counter(condition(chain) for chain in reply.chains)),
        "chains": [chain_fields(view, chain) for chain in reply.chains],
        "damaged": sum(target.damaged for target in reply.targets),
        "repaired": sum(target.repaired for target in reply.targets),
        "scrubbed_bytes": sum(target.scrubbed_bytes for target in reply.targets),
    }


def node_fields(node: NodeView) -> dict[str, object]:
    return {
        "id": node.id,
        "name": node.name,
        "domain": node.domain,
        "role": "storage",
        "alive": node.alive,
        "draining": node.draining,
        "drained": node.draining and not node.leaving,
        "state": node_state(node),
        "leaving": node.leaving,
        "note": node.note,
        "incarnation": node.incarnation,
        "host": node.host,
        "control": node.control,
        "silent_ms": node.silent_ms,
        "devices": [
            {
                "uuid": device.uuid.hex(),
                "path": device.path,
                "here": device.here,
                "failed": device.poisoned,
                "role": device.role,
                "null_data": device.null_data,
                "size": device.size_bytes,
                "capacity": device.capacity_bytes,
                "free": device.free_bytes,
                "targets": device.targets,
                "used_targets": device.used_targets,
                "free_targets": device.free_targets,
            }
            for device in node.devices
        ],
    }


def chain_fields(view: View, chain: ChainView) -> dict[str, object]:
    return {
        "id": chain.id,
        "table": chain.table,
        "version": [chain.term, chain.counter],
        "state": condition(chain),
        "members": list(chain.members),
        "nodes": [view.node_name(target) for target in chain.members],
        "states": [TargetState(state).name.lower() for state in chain.states],
        "wanted": list(chain.wanted),
        "writable": chain.writable,
        "readable": chain.readable,
        "whole": chain.whole,
        "forced": chain.forced,
        "reason": chain.reason,
        "shared_domain": chain.shared_domain,
        "sync": None if chain.sync is None else _sync_fields(chain.sync),
    }


def space_fields(view: View, space: SpaceView) -> dict[str, object]:
    """A KV space by its inode id; `ffs space` has them by path."""
    return {
        "inode": space.space,
        "table": view.tables.get(space.table, str(space.table)),
        "block_bytes": space.block_bytes,
        "quota_bytes": space.quota_bytes,
        "ttl_ms": space.ttl_ms,
        "evictable": space.evictable,
        "bytes": space.bytes,
        "blocks": space.chunks,
        "evicted_bytes": space.evicted_bytes,
        "evicted_blocks": space.evicted_chunks,
        "expired_blocks": space.expired_chunks,
        "dedup": space.dedup,
        "shared_blocks": space.shared_chunks,
        "saved_bytes": space.saved_bytes,
        "hits": space.hits,
        "chains": space.chains,
        "chains_reported": space.reported,
    }


def _sync_fields(sync: SyncView) -> dict[str, object]:
    return {
        "source": sync.source,
        "target": sync.target,
        "done": sync.done,
        "failure": sync.failure,
        "chunks_total": sync.chunks_total,
        "chunks_compared": sync.chunks_compared,
        "chunks_sent": sync.chunks_sent,
        "bytes_sent": sync.bytes_sent,
        "bytes_per_s": sync.bytes_per_s,
    }


def target_fields(view: View, target: TargetView) -> dict[str, object]:
    return {
        "id": target.id,
        "node": view.nodes[target.node].name,
        "device": target.device.hex(),
        "chain": target.chain,
        "state": target_state(target),
        "here": target.here,
        "failed": target.poisoned,
        "used_bytes": target.used_bytes,
        "chunks": target.chunks,
        "damaged": target.damaged,
        "repaired": target.repaired,
        "scrubbed_bytes": target.scrubbed_bytes,
    }
