"""The cases of `ffs bench kv`: blocks put and got through one KV space, a call at a time
(docs/guides/bench.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ffs import Iov
from ffs.cli.benchmark.cost import CpuMeter
from ffs.cli.benchmark.io_matrix import SIZES, TRANSPORTS, IoCase
from ffs.cli.benchmark.protocol import Slice
from ffs.errors import ChecksumMismatch, FfsError, InvalidArgument
from ffs.kv.blocks import Places
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.kv.space import Space

OPS = ("get", "put", "again")
KV_SIZES = ("64k", "1m", "4m")
BATCHES = (1, 16)
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvCase:
    """`batch` blocks a call. "put": blocks that are new; "again": blocks that are there, so only asked
    about."""

    op: str
    size: str
    batch: int
    transport: str

    @property
    def name(self) -> str:
        return f"{self.op}-{self.size}-x{self.batch}-{self.transport}"

    @property
    def block_bytes(self) -> int:
        return SIZES[self.size]

    @property
    def like(self) -> IoCase:
        """The case of `ffs bench io` whose floors it has."""
        op = "read" if self.op == "get" else "write"
        return IoCase(op, self.size, self.batch, self.transport, "tmpfs")


CASES = tuple(
    KvCase(op, size, batch, transport)
    for transport in TRANSPORTS
    for op in OPS
    for size in KV_SIZES
    for batch in BATCHES
)


INT8_NAMES = ("int8-encode-float16", "int8-decode-float16", "int8-encode-bfloat16", "int8-decode-bfloat16")


def select(patterns: Sequence[str], transport: str | None) -> tuple[list[KvCase], frozenset[str]]:
    """Those whose names match one of the patterns (none: all), over that transport; and of INT8_NAMES.
    InvalidArgument: none does."""

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    chosen = [case for case in CASES if transport in (None, "auto", case.transport) and wanted(case.name)]
    int8 = frozenset(name for name in INT8_NAMES if wanted(name))
    if not chosen and not int8:
        names = ", ".join([*(case.name for case in CASES), *INT8_NAMES])
        raise InvalidArgument(f"no case matches; there are: {names}")
    return chosen, int8


def keys_at_random(count: int, seed: int) -> npt.NDArray[np.uint8]:
    """As hashes are: uint8 (count, 32)."""
    return np.random.default_rng(seed).integers(0, 256, (count, KEY_BYTES), dtype=np.uint8)


def fill(block: npt.NDArray[np.uint8], key: npt.NDArray[np.uint8], noise: npt.NDArray[np.uint8]) -> None:
    """The content of a block: noise from a place that its key chooses, so that no two are alike."""
    start = int(key[:2].view("<u2")[0]) % (len(noise) - len(block) + 1)
    block[:] = noise[start : start + len(block)]
    block[:KEY_BYTES] = key


@dataclass(slots=True)
class Tally:
    """What happened in all slices, the first one too."""

    calls_ns: list[int] = field(default_factory=list)
    blocks: int = 0
    errors: int = 0
    verified_bytes: int = 0

    def percentile_us(self, percent: float) -> float:
        """Of a call."""
        return float(np.percentile(np.array(self.calls_ns), percent)) / 1000

    def fields(self) -> dict[str, object]:
        return {
            "p50_us": round(self.percentile_us(50), 1),
            "p99_us": round(self.percentile_us(99), 1),
            "blocks": self.blocks,
            "errors": self.errors,
            "verified_bytes": self.verified_bytes,
        }


class KvLoop:
    """One call after another, for a slice. A contestant (protocol.py). What isn't the call itself - keys,
    content, comparing what came, deleting what was put - happens outside of the time that counts."""

    def __init__(self, space: Space, case: KvCase, set_bytes: int, cpu: CpuMeter) -> None:
        self.tally = Tally()
        self._space = space
        self._case = case
        self._cpu = cpu
        self._seed = 100
        size, batch = case.block_bytes, case.batch
        self._noise = np.random.default_rng(5).integers(0, 256, size + 65536, dtype=np.uint8)
        self._iov = Iov(size * batch)
        self._blocks = self._iov.numpy(shape=(batch, size))
        self._blocks[:] = self._noise[:size]  # touched, so that no page comes into being later
        self._places = Places(self._iov, np.arange(batch, dtype=np.int64) * size)
        self._set = keys_at_random(max(batch, set_bytes // size) // batch * batch, 7)
        self._next = 0
        self._wanted = Status.STORED if case.op == "put" else Status.HIT

    def prepare(self) -> None:
        """Stores the blocks that are got, or put again. Raises what a put raises."""
        if self._case.op == "put":
            return
        for begin in range(0, len(self._set), self._case.batch):
            keys = self._set[begin : begin + self._case.batch]
            self._fill(keys)
            self._space.put_many(keys, self._places).raise_errors()

    def _fill(self, keys: npt.NDArray[np.uint8]) -> None:
        for position, key in enumerate(keys):
            fill(self._blocks[position], key, self._noise)

    def __call__(self, seconds: float) -> Slice:
        fresh, batch = self._case.op == "put", self._case.batch
        if fresh:
            self._seed += 1
            keys = keys_at_random(4096 // batch * batch, self._seed)
        else:
            keys = self._set
        begun_cpu = self._cpu.read()
        at = 0 if fresh else self._next
        spent_ns, done = 0, 0
        while done == 0 or spent_ns < seconds * 1e9:
            if fresh and at + batch > len(keys):
                break
            part = keys[at : at + batch]
            begun = time.perf_counter_ns()
            results = self._call(part)
            took = time.perf_counter_ns() - begun
            self.tally.calls_ns.append(took)
            spent_ns += took
            done += 1
            self._count(results)
            at = at + batch if fresh else (at + batch) % len(keys)
        self._cpu.add(begun_cpu, done)
        if fresh:
            self._verify(part, self._space.get_many(part, self._places))
            self._space.delete(keys[:at]).raise_errors()
        else:
            self._next = at
            if self._case.op == "get":
                self._verify(part, results)
        return Slice(done * batch * self._case.block_bytes, spent_ns / 1e9)

    def _call(self, keys: npt.NDArray[np.uint8]) -> Results:
        if self._case.op == "get":
            return self._space.get_many(keys, self._places)
        return self._space.put_many(keys, self._places)

    def _count(self, results: Results) -> None:
        self.tally.blocks += len(results)
        if not (results.status == self._wanted).all():
            self.tally.errors += int((results.status != self._wanted).sum())
            results.raise_errors()
            raise FfsError(f"{self._case.name}: {results!r}, where all should be {self._wanted.name}")

    def _verify(self, keys: npt.NDArray[np.uint8], results: Results) -> None:
        """Every byte of a call's blocks. What was put is one content under many keys: see `_fill`."""
        results.raise_errors()
        expected = np.empty(self._case.block_bytes, dtype=np.uint8)
        for position, key in enumerate(keys):
            if self._case.op == "put":
                expected[:] = self._noise[: len(expected)]
            else:
                fill(expected, key, self._noise)
            if not np.array_equal(self._blocks[position], expected):
                raise ChecksumMismatch(f"{self._case.name}: a block came with other bytes than were put")
            self.tally.verified_bytes += len(expected)
