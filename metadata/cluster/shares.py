"""A KV space's quota over its chains. Pure, integers only. docs/control_plane.md, Space policies.

A share is what one chain may hold of a space; the sum of a space's shares is its quota, always and exactly.
No share falls below a quarter of an even one, nor below the slot of a block, so that a chain which was idle
can be used again at once (a quota that doesn't give every chain a slot is refused where it is set). A hash
spreads blocks evenly, so even shares are nearly right to begin with; `rebalance` follows what is left:
chains that get more of what is read again, or larger blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LEAST_PARTS: Final = 4  # the least share is an even one divided by this
STEP_PARTS: Final = 16  # a round moves at most an even share divided by this, to or from a chain
NOISE_PARTS: Final = 100  # evictions below an even share divided by this say nothing


@dataclass(frozen=True, slots=True)
class Load:
    """What a chain holds of a space, and evicted of it in the last round; bytes as allocated."""

    bytes: int = 0
    evicted: int = 0


def least_share(quota: int, chains: int, slot: int = 0) -> int:
    """What every chain has at least, bytes."""
    return max(quota // (chains * LEAST_PARTS), min(quota // chains, slot))


def split(quota: int, chains: Sequence[int], before: Mapping[int, int], slot: int = 0) -> dict[int, int]:
    """Shares of the quota for these chains, in the proportions of the shares before; a chain that had none
    gets an average one. Shares that fit stay as they are. `slot`: of a block, bytes."""
    if not chains:
        return {}
    least = least_share(quota, len(chains), slot)
    if before.keys() == set(chains) and sum(before.values()) == quota and min(before.values()) >= least:
        return {chain: before[chain] for chain in chains}
    known = [before[chain] for chain in chains if chain in before]
    floor = least_share(sum(known), len(known), slot) if known else 0
    above = {chain: max(0, before[chain] - floor) for chain in chains if chain in before}
    average = sum(above.values()) // len(above) if above else 0
    weights = [above.get(chain, average) for chain in chains]
    if not any(weights):
        weights = [1] * len(chains)
    parts = apportion(quota - least * len(chains), weights)
    return {chain: least + part for chain, part in zip(chains, parts, strict=True)}


def rebalance(
    quota: int, shares: Mapping[int, int], loads: Mapping[int, Load], slot: int = 0
) -> dict[int, int]:
    """One round, towards the chains that evict most. Takers are full and evict clearly more than the average;
    givers evict clearly less, or have room that they don't use (their device may be what binds them). Clearly
    is a quarter, and three times what chance makes of that many blocks of a `slot`: a hash throws blocks at
    chains. A chain that nothing is known of neither takes nor gives."""
    if not shares or quota <= 0:
        return dict(shares)
    count = len(shares)
    even, least = quota // count, least_share(quota, count, slot)
    step = max(1, even // STEP_PARTS)
    total = sum(load.evicted for load in loads.values())
    mean = total // max(1, len(loads))
    chance = 3 * math.isqrt(mean * slot)
    takes: dict[int, int] = {}
    gives: dict[int, int] = {}
    for chain in sorted(shares):
        load, share = loads.get(chain), shares[chain]
        if load is None:
            continue
        full = load.bytes * 20 >= share * 19 or share - load.bytes < 2 * slot
        much = load.evicted * 4 > mean * 5 and load.evicted - mean > chance
        if full and much and load.evicted * NOISE_PARTS >= even:
            takes[chain] = step
        elif load.evicted * 4 < mean * 3 and mean - load.evicted > chance:
            gives[chain] = max(0, min(step, share - least))
        elif not full:
            gives[chain] = max(0, min(step, share - least, share - load.bytes * 20 // 19 - 2 * slot))
    moved = min(sum(takes.values()), sum(gives.values()))
    if not moved:
        return dict(shares)
    after = dict(shares)
    for sign, places in ((1, takes), (-1, gives)):
        for chain, part in zip(places, apportion(moved, list(places.values())), strict=True):
            after[chain] += sign * part
    return after


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in proportion to weights, in whole numbers: what is left by rounding goes to the largest
    remainders, the first of equal ones. No part is above its weight unless `total` is above their sum."""
    sum_of = sum(weights)
    parts = [total * weight // sum_of for weight in weights]
    order = sorted(range(len(weights)), key=lambda at: (-(total * weights[at] % sum_of), at))
    for at in order[: total - sum(parts)]:
        parts[at] += 1
    return parts
