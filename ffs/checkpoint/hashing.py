"""The hashes that prove a tensor's bytes, by the algorithm that the manifest names
(docs/guides/checkpoint.md, Hashes).

XXH3 finds every change that chance makes and costs a pass over the memory; BLAKE3 finds also what somebody
makes on purpose, and costs as much as all else of a save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

import blake3
import numpy as np
from numpy.typing import NDArray

from ffs.checkpoint.tensors import Bytes
from ffs.client.copying import XXH3_BYTES, xxh3_many
from ffs.errors import InvalidArgument

Algorithm = Literal["xxh3-128", "blake3"]

DEFAULT: Final[Algorithm] = "xxh3-128"
DIGITS: Final[dict[str, int]] = {"xxh3-128": 2 * XXH3_BYTES, "blake3": 64}
ANY_THREADS: Final = int(blake3.blake3.AUTO)
_SHARED_BYTES: Final = 1 << 20  # below, a second thread costs BLAKE3 more than it brings


def check_algorithm(algorithm: str) -> None:
    """InvalidArgument: there is no such one."""
    if algorithm not in DIGITS:
        raise InvalidArgument(f"hash {algorithm!r}: give {' or '.join(map(repr, get_args(Algorithm)))}")


def hash_spans(
    algorithm: str, memory: Bytes, spans: Sequence[tuple[int, int]], threads: int = 1
) -> list[str]:
    """Of bytes [begin, end) of one memory, each by itself, as hex digits. `threads`: that BLAKE3 may take.
    Blocking; without the GIL for all but small ones."""
    if algorithm == "blake3":
        return [_blake3(memory[begin:end], threads) for begin, end in spans]
    rows = np.array(spans, dtype=np.uint64).reshape(-1, 2)
    rows[:, 1] -= rows[:, 0]
    rows[:, 0] += np.uint64(memory.__array_interface__["data"][0])
    return _xxh3(rows)


def hash_all(algorithm: str, pieces: Iterable[Bytes], threads: int = 1) -> list[str]:
    """Of each of them, as hash_spans."""
    held = list(pieces)  # not to be freed meanwhile
    if algorithm == "blake3":
        return [_blake3(data, threads) for data in held]
    rows = [(data.__array_interface__["data"][0], data.nbytes) for data in held]
    return _xxh3(np.array(rows, dtype=np.uint64).reshape(-1, 2))


def hash_one(algorithm: str, data: Bytes | bytes | memoryview, threads: int = 1) -> str:
    """Of contiguous bytes."""
    return hash_all(algorithm, [np.frombuffer(data, np.uint8)], threads)[0]


def _blake3(data: Bytes, threads: int) -> str:
    hasher = blake3.blake3(max_threads=threads if data.nbytes >= _SHARED_BYTES else 1)
    hasher.update(data.data)
    return hasher.hexdigest()


def _xxh3(rows: NDArray[np.uint64]) -> list[str]:
    digests = xxh3_many(rows).hex()
    step = 2 * XXH3_BYTES
    return [digests[at : at + step] for at in range(0, len(digests), step)]
