"""What a KV cache would have hit, from a trace of requests (docs/kv_tiers.md, Traces). Pure, but read_trace.

A trace has one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`,
one for each block of the prompt, equal for equal prefixes. Only a prefix without a hole can be reused, so
what is counted are the blocks before a request's first miss: the prefix hit ratio is their share of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ffs.errors import InvalidArgument
from ffs.kv.policy.order import NAMES, Order, make_order

SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)

_WORTH: Final = 0.10  # of all blocks, that hits must be for a tier to be worth it
_NEAR: Final = 0.9  # of what is possible: the smallest capacity that reaches it is the one to take


class _Line(msgspec.Struct):
    hash_ids: list[int]
    timestamp: float = 0
    input_length: int = 0
    output_length: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """`blocks`: a name for each block of the prompt, first to last."""

    at_ms: float
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """One policy at one capacity. `hit_ratio`: blocks of whole prefixes that were there, of all blocks."""

    policy: str
    share: float
    capacity_blocks: int
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class Report:
    """`unique`: different blocks. `shared`: share of requests' blocks whose block more than one request has.
    `cold`: share of blocks that were never asked for before (no cache can have them). `possible`: prefix hit
    ratio of a cache that keeps everything."""

    requests: int
    blocks: int
    unique: int
    shared: float
    cold: float
    possible: float
    replays: tuple[Replay, ...]

    def best(self, share: float) -> Replay:
        """The best policy at that capacity."""
        return max(
            (replay for replay in self.replays if replay.share == share), key=lambda replay: replay.hit_ratio
        )

    @property
    def worth_it(self) -> bool:
        """Whether a shared tier would have served at least a tenth of all blocks."""
        return self.possible >= _WORTH

    @property
    def wanted_share(self) -> float | None:
        """The least capacity of those tried, as a share of the unique blocks, that gets nine tenths of what
        is possible; None: none does."""
        for share in sorted({replay.share for replay in self.replays}):
            if self.possible and self.best(share).hit_ratio >= _NEAR * self.possible:
                return share
        return None


def name_of(hash_id: int) -> bytes:
    """A block's key in replays: evenly distributed, as real ones are."""
    return hashlib.blake2b(hash_id.to_bytes(16, "little", signed=True), digest_size=16).digest()


def parse_trace(lines: Iterable[bytes | str], source: str = "trace") -> list[Request]:
    """InvalidArgument names the first line that is none."""
    decoder = msgspec.json.Decoder(_Line)
    names: dict[int, bytes] = {}
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = decoder.decode(line)
            blocks = tuple(names.get(one) or names.setdefault(one, name_of(one)) for one in parsed.hash_ids)
        except (msgspec.MsgspecError, OverflowError) as error:
            raise InvalidArgument(
                f"line {number} isn't a request ({error}): each line is a JSON object with timestamp and "
                "hash_ids (docs/kv_tiers.md, Traces)",
                source,
            ) from error
        found.append(Request(parsed.timestamp, blocks))
    if not any(request.blocks for request in found):
        raise InvalidArgument("holds no request with hash_ids", source)
    return found


def read_trace(path: str | Path) -> list[Request]:
    """Blocking. OSError, InvalidArgument."""
    with open(path, "rb") as file:
        return parse_trace(file, str(path))


def replay(requests: Sequence[Request], order: Order, capacity_blocks: int) -> float:
    """The prefix hit ratio of a cache of so many equal blocks. A request's blocks are used from its last to
    its first, so that the end of a prefix goes before its beginning, without which it is of no use."""
    hits = blocks = 0
    for request in requests:
        blocks += len(request.blocks)
        for key in request.blocks:
            if key not in order:
                break
            hits += 1
        for key in reversed(request.blocks):
            if key in order:
                order.touch(key)
                continue
            order.insert(key, 1)
            while order.total_bytes > capacity_blocks:
                victim = order.peek()
                assert victim is not None  # nothing is held
                order.evict(victim)
    return hits / blocks if blocks else 0.0


def evaluate(
    requests: Sequence[Request], policies: Sequence[str] = NAMES, shares: Sequence[float] = SHARES
) -> Report:
    """Replays it for each policy and capacity (a share of the unique blocks). Seconds for 10^5 blocks."""
    asked_by: dict[bytes, int] = {}
    blocks = hits = cold = 0
    for request in requests:
        blocks += len(request.blocks)
        whole = True
        for key in request.blocks:
            whole = whole and key in asked_by
            hits += whole
            cold += key not in asked_by
        for key in dict.fromkeys(request.blocks):
            asked_by[key] = asked_by.get(key, 0) + 1
    shared = sum(asked_by[key] > 1 for request in requests for key in request.blocks)
    replays = []
    for share in shares:
        capacity = max(1, round(len(asked_by) * share))
        for policy in policies:
            ratio = replay(requests, make_order(policy, capacity), capacity)
            replays.append(Replay(policy, share, capacity, ratio))
    return Report(
        requests=len(requests),
        blocks=blocks,
        unique=len(asked_by),
        shared=shared / blocks,
        cold=cold / blocks,
        possible=hits / blocks,
        replays=tuple(replays),
    )
