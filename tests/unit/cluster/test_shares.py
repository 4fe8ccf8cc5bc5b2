"""Shares of a KV space's quota: properties over random cases, golden vectors, and a cluster of caches in
which rebalancing must gain."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from metadata.cluster.shares import LEAST_PARTS, STEP_PARTS, Load, apportion, least_share, rebalance, split

GOLDEN = Path(__file__).parents[2] / "golden" / "control" / "shares.json"
SEEDS = range(120)


def random_case(seed: int) -> tuple[random.Random, int, list[int], dict[int, int]]:
    """(rng, quota, chains, shares of a quota before over other chains)."""
    rng = random.Random(seed)
    quota = rng.choice([0, 1, rng.randrange(1, 100), rng.randrange(1 << 20), rng.randrange(1 << 60)])
    chains = rng.sample(range(1, 200), rng.randrange(1, 60))
    kept = rng.sample(chains, rng.randrange(len(chains) + 1))
    gone = [chain + 1000 for chain in range(rng.randrange(10))]
    earlier = [*kept, *gone]
    before: dict[int, int] = {}
    if earlier:
        before = split(rng.choice([quota, rng.randrange(1 << 40)]), earlier, {})
        for _ in range(rng.randrange(20)):
            loads = {c: Load(share, rng.randrange(share + 1)) for c, share in before.items()}
            before = rebalance(sum(before.values()), before, loads)
    return rng, quota, chains, before


@pytest.mark.parametrize("block", range(3))
def test_the_sum_is_the_quota_and_no_share_below_the_least(block: int) -> None:
    for seed in SEEDS[block::3]:
        _, quota, chains, before = random_case(seed)
        shares = split(quota, chains, before)
        assert list(shares) == chains, seed
        assert sum(shares.values()) == quota, seed
        assert min(shares.values()) >= least_share(quota, len(chains)), seed
        assert split(quota, chains, shares) == shares, seed


def test_without_a_past_shares_are_even() -> None:
    assert split(10, [7, 3, 5], {}) == {7: 4, 3: 3, 5: 3}
    assert split(0, [1, 2], {}) == {1: 0, 2: 0}
    assert split(5, [], {1: 5}) == {}
    shares = split(10**12 + 1, list(range(64)), {})
    assert max(shares.values()) - min(shares.values()) <= 1


def test_a_changed_quota_keeps_proportions() -> None:
    before = {1: 600, 2: 300, 3: 300}
    assert split(1200, [1, 2, 3], before) == before
    assert split(2400, [1, 2, 3], before) == {1: 1200, 2: 600, 3: 600}
    assert split(120, [1, 2, 3], before) == {1: 60, 2: 30, 3: 30}
    assert split(0, [1, 2, 3], before) == {1: 0, 2: 0, 3: 0}


def test_chains_that_come_get_an_average_share_and_those_that_go_leave_theirs() -> None:
    before = {1: 600, 2: 300, 3: 300}
    joined = split(1600, [1, 2, 3, 4], before)
    assert joined == {1: 600, 2: 300, 3: 300, 4: 400}
    left = split(1200, [2, 3], before)
    assert left == {2: 600, 3: 600}
    assert split(1200, [8, 9], before) == {8: 600, 9: 600}  # another table


@pytest.mark.parametrize("block", range(3))
def test_a_round_keeps_the_sum_the_least_and_its_step(block: int) -> None:
    for seed in SEEDS[block::3]:
        rng, quota, chains, _ = random_case(seed)
        shares = split(quota, chains, {})
        even, least = quota // len(chains), least_share(quota, len(chains))
        for _ in range(30):
            loads = {
                chain: Load(rng.randrange(share * 2 + 1), rng.choice([0, rng.randrange(even + 1)]))
                for chain, share in shares.items()
                if rng.random() < 0.9
            }
            after = rebalance(quota, shares, loads)
            assert sum(after.values()) == quota, seed
            assert after.keys() == shares.keys(), seed
            for chain, share in after.items():
                assert share >= least, seed
                assert abs(share - shares[chain]) <= max(1, even // STEP_PARTS), seed
                if chain not in loads:
                    assert share == shares[chain], seed
            shares = after


def test_who_evicts_most_gets_more_from_who_evicts_least() -> None:
    shares = split(1600, [1, 2, 3, 4], {})
    loads = {1: Load(400, 300), 2: Load(400, 100), 3: Load(400, 100), 4: Load(400, 0)}
    after = rebalance(1600, shares, loads)
    assert after[1] > 400 > after[4]
    even = {chain: Load(400, 100) for chain in shares}
    assert rebalance(1600, shares, even) == shares
    quiet = {chain: Load(400, 0) for chain in shares}
    assert rebalance(1600, shares, quiet) == shares
    noise = {1: Load(400, 3), 2: Load(400, 0), 3: Load(400, 0), 4: Load(400, 0)}
    assert rebalance(1600, shares, noise) == shares


def test_a_chain_that_its_device_binds_gets_nothing_and_gives_what_it_does_not_use() -> None:
    shares = split(1600, [1, 2, 3, 4], {})
    loads = {1: Load(200, 400), 2: Load(400, 400), 3: Load(400, 100), 4: Load(400, 100)}
    after = rebalance(1600, shares, loads)
    assert after[2] > 400
    assert after[1] <= 400
    loads = {1: Load(200, 340), 2: Load(400, 700), 3: Load(400, 340), 4: Load(400, 340)}
    after = rebalance(1600, shares, loads)  # nobody evicts little: only chain 1 has room to give
    assert after == {1: 375, 2: 425, 3: 400, 4: 400}


def test_a_share_reaches_the_least_and_stays_there() -> None:
    shares = split(6400, [1, 2, 3, 4], {})
    for _ in range(200):
        loads = {chain: Load(share, 500 if chain == 1 else 0) for chain, share in shares.items()}
        shares = rebalance(6400, shares, loads)
    least = least_share(6400, 4)
    assert least == 6400 // 4 // LEAST_PARTS
    assert shares == {1: 6400 - 3 * least, 2: least, 3: least, 4: least}


def test_chance_moves_nothing() -> None:
    """Blocks that a hash throws at chains, evicted as they come: shares stay about where they are."""
    rng = random.Random(3)
    slot, count = 1000, 30
    quota = count * 50 * slot
    shares = even = split(quota, range(count), {}, slot)
    for _ in range(100):
        thrown = [0] * count
        for _ in range(count * 20):
            thrown[rng.randrange(count)] += slot
        loads = {chain: Load(shares[chain], thrown[chain]) for chain in shares}
        shares = rebalance(quota, shares, loads, slot)
    assert max(abs(shares[chain] - even[chain]) for chain in shares) <= 50 * slot // 8
    blind = even
    for _ in range(100):
        loads = {chain: Load(blind[chain], rng.randrange(70, 130) * slot) for chain in blind}
        blind = rebalance(quota, blind, loads)  # without a slot every difference counts
    assert max(abs(blind[chain] - even[chain]) for chain in blind) > 50 * slot // 4


def test_no_share_falls_below_a_slot() -> None:
    slot = 1000
    shares = split(6000, [1, 2, 3, 4], {}, slot)
    for _ in range(200):
        loads = {chain: Load(share, 500_000 if chain == 1 else 0) for chain, share in shares.items()}
        shares = rebalance(6000, shares, loads, slot)
    assert shares == {1: 3000, 2: 1000, 3: 1000, 4: 1000}
    assert split(6000, [1, 2, 3, 4], shares, slot) == shares
    assert split(4000, [1, 2, 3, 4], shares, slot) == {1: 1000, 2: 1000, 3: 1000, 4: 1000}
    assert split(400, [1, 2, 3, 4], shares, slot) == {1: 100, 2: 100, 3: 100, 4: 100}


def test_rebalancing_settles_where_evictions_are_even() -> None:
    """Chains of different demand: each evicts what comes in beyond its share."""
    demand = {1: 4000, 2: 1000, 3: 1000, 4: 2000}  # bytes that are asked for again and again
    quota = 4000
    shares = split(quota, list(demand), {})

    def evicts(chain: int, share: int) -> int:
        return max(0, demand[chain] - share)

    start = max(evicts(chain, share) for chain, share in shares.items())
    history = []
    for _ in range(300):
        loads = {c: Load(min(s, demand[c]), evicts(c, s)) for c, s in shares.items()}
        shares = rebalance(quota, shares, loads)
        history.append(tuple(shares.values()))
    assert max(evicts(chain, share) for chain, share in shares.items()) < start
    assert shares[1] > shares[4] > shares[2]
    assert len(set(history[-20:])) <= 2  # it doesn't swing


def test_apportion_is_exact_and_bounded_by_weights() -> None:
    rng = random.Random(7)
    for _ in range(500):
        weights = [rng.randrange(0, 50) for _ in range(rng.randrange(1, 20))]
        if not sum(weights):
            continue
        total = rng.randrange(sum(weights) + 1)
        parts = apportion(total, weights)
        assert sum(parts) == total
        assert all(0 <= part <= weight for part, weight in zip(parts, weights, strict=True))


# --- golden -----------------------------------------------------------------------------------------


def _cases() -> list[dict[str, object]]:
    cases: list[dict[str, object]] = []
    for seed in (1, 2, 3, 5, 8, 13):
        _, quota, chains, before = random_case(seed)
        chains = sorted(chains)[:12]
        before = {chain: share for chain, share in before.items() if chain in set(chains) or chain > 1000}
        shares = split(quota, chains, before)
        loads = {chain: Load(share, share // (1 + chain % 5)) for chain, share in shares.items()}
        cases.append(
            {
                "quota": quota,
                "chains": chains,
                "before": sorted(before.items()),
                "shares": list(shares.values()),
                "round": list(rebalance(quota, shares, loads).values()),
            }
        )
    return cases


def test_golden_shares() -> None:
    """Two managers of different releases must agree, or every takeover would evict."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == 1
    for case in golden["cases"]:
        chains, quota = case["chains"], case["quota"]
        shares = split(quota, chains, dict(map(tuple, case["before"])))
        assert list(shares.values()) == case["shares"], case
        loads = {chain: Load(share, share // (1 + chain % 5)) for chain, share in shares.items()}
        assert list(rebalance(quota, shares, loads).values()) == case["round"], case


def make_golden() -> None:
    """Writes the file; only for new cases."""
    GOLDEN.write_text(json.dumps({"version": 1, "cases": _cases()}, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()
