"""Whether blocks are there: one request a chain, not a block. docs/guides/kv.md, What a call tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ffs._native.ring import EXISTS_ENTRY_DTYPE, EXISTS_KEY_DTYPE, OP_EXISTS, SQE_DTYPE
from ffs.client.transfer import error_of_completion
from ffs.errors import FfsError
from ffs.kv.entries import blocks_of, by_chain, chains_of, chunk_keys
from ffs.kv.keys import CHUNK_KEY_BYTES
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.kv.batch import Batch
    from ffs.kv.handle import Handle

_PRESENT = 1  # wire.h, ExistsEntry


def look_up(
    batch: Batch, handle: Handle, hashes: npt.NDArray[np.uint8], pieces: int, flags: int, timeout: int
) -> Results:
    """HIT, MISS or ERROR for each `pieces` of these hashes (of parts of one block). `flags`: SQE_TOUCH, or 0.
    Blocking."""
    status = np.full(len(hashes), Status.MISS, dtype=np.uint8)
    lengths = np.zeros(len(hashes), dtype=np.int64)
    errors: dict[int, FfsError] = {}
    if not len(hashes):
        return Results(status, lengths, errors)
    space = handle.ino.to_bytes(8, "big")
    chains = chains_of(handle.placement, hashes)
    order = np.argsort(chains, kind="stable")
    asked = np.zeros(len(hashes), dtype=EXISTS_KEY_DTYPE)
    asked["key"] = chunk_keys(space, hashes[order])
    asked["tag"] = hashes[order, CHUNK_KEY_BYTES:]
    asked["tag_bytes"] = CHUNK_KEY_BYTES
    found, failed = _ask(batch, handle, space, asked, chains[order], flags, timeout)
    there = found["state"] == _PRESENT
    status[order[there]] = Status.HIT
    lengths[order] = np.where(there, found["length"], 0)
    for position, error in failed.items():
        status[order[position]] = Status.ERROR
        errors[int(order[position]) // pieces] = error
    return blocks_of(status, lengths, errors, pieces)


def _ask(
    batch: Batch,
    handle: Handle,
    space: bytes,
    asked: npt.NDArray[np.void],
    chains: npt.NDArray[np.uint32],
    flags: int,
    timeout: int,
) -> tuple[npt.NDArray[np.void], dict[int, FfsError]]:
    """Asks for keys in order of chain: what was found by position, and the errors."""
    runs = by_chain(chains)
    found = np.zeros(len(asked), dtype=EXISTS_ENTRY_DTYPE)
    failed: dict[int, FfsError] = {}
    entries = np.zeros(len(runs), dtype=SQE_DTYPE)
    entries["op"] = OP_EXISTS
    entries["flags"] = flags
    entries["group"] = 1
    entries["userdata"] = np.arange(len(runs), dtype=np.uint64)
    entries["timeout_ms"] = timeout
    entries["capability"] = handle.capability
    entries["space_epoch"] = handle.epoch
    entries["chain"] = [int(chains[begin]) for begin, _ in runs]
    entries["length"] = [end - begin for begin, end in runs]
    entries["iov_offset"] = [begin * EXISTS_KEY_DTYPE.itemsize for begin, _ in runs]
    entries["key"][:, :8] = np.frombuffer(space, dtype=np.uint8)
    with batch.memory(asked.nbytes) as (staging, memory):
        memory[: asked.nbytes] = asked.view(np.uint8).reshape(-1)
        entries["iov"] = staging.handle
        for (begin, end), row in zip(runs, batch.run(entries), strict=True):
            if row["result"] < 0:
                failed.update(dict.fromkeys(range(begin, end), error_of_completion(row, handle)))
                continue
            at = begin * EXISTS_KEY_DTYPE.itemsize
            size = (end - begin) * EXISTS_ENTRY_DTYPE.itemsize
            found[begin:end] = memory[at : at + size].view(EXISTS_ENTRY_DTYPE)
    return found, failed
