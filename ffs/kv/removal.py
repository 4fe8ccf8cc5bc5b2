"""Every block of a space, taken away: purge. docs/guides/kv.md, Tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ffs._native.ring import (
    LIST_ENTRY_DTYPE,
    LIST_MAX_ENTRIES,
    OP_LIST_CHUNKS,
    OP_REMOVE,
    SQE_DTYPE,
)
from ffs.client.transfer import error_of_completion
from ffs.kv.batch import ENTRIES, Batch

if TYPE_CHECKING:
    from ffs.kv.handle import Handle

_KEY_BYTES: Final = 24
_PAGE_BYTES: Final = LIST_MAX_ENTRIES * LIST_ENTRY_DTYPE.itemsize
_CHAINS_AT_A_TIME: Final = 64


def purge(batch: Batch, handle: Handle, timeout: int) -> int:
    """Removes all chunks that the space had when this began; how many were removed. Blocking. Raises the
    first error: what is left then can be purged again."""
    space = handle.ino.to_bytes(8, "big")
    removed = 0
    chains = sorted(set(handle.placement.chains))
    for begin in range(0, len(chains), _CHAINS_AT_A_TIME):
        todo = {chain: space + bytes(16) for chain in chains[begin : begin + _CHAINS_AT_A_TIME]}
        while todo:
            keys, of_chain, todo = _list(batch, handle, timeout, todo)
            for at in range(0, len(keys), ENTRIES * 8):
                _remove(batch, handle, timeout, keys[at : at + ENTRIES * 8], of_chain[at : at + ENTRIES * 8])
            removed += len(keys)
    return removed


def _list(
    batch: Batch, handle: Handle, timeout: int, todo: dict[int, bytes]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32], dict[int, bytes]]:
    """A page of each of these chains from its key on: keys, the chain of each, and where chains go on that
    have more."""
    entries = _entries(OP_LIST_CHUNKS, handle, timeout, len(todo))
    entries["length"] = LIST_MAX_ENTRIES
    entries["chain"] = list(todo)
    entries["key"] = np.frombuffer(b"".join(todo.values()), dtype=np.uint8).reshape(-1, _KEY_BYTES)
    keys, chains, more = [], [], {}
    with batch.memory(_PAGE_BYTES * len(todo)) as (staging, memory):
        entries["iov"] = staging.handle
        entries["iov_offset"] = np.arange(len(todo), dtype=np.uint64) * np.uint64(_PAGE_BYTES)
        for position, (chain, row) in enumerate(zip(todo, batch.run(entries), strict=True)):
            if row["result"] < 0:
                raise error_of_completion(row, handle)
            at = position * _PAGE_BYTES
            size = int(row["result"]) * LIST_ENTRY_DTYPE.itemsize
            found = memory[at : at + size].view(LIST_ENTRY_DTYPE)["key"].copy()
            keys.append(found)
            chains.append(np.full(len(found), chain, dtype=np.uint32))
            if row["value"] and len(found):
                more[chain] = _next(found[-1].tobytes())
    return np.concatenate(keys), np.concatenate(chains), more


def _next(key: bytes) -> bytes:
    """The key after it."""
    return (int.from_bytes(key, "big") + 1).to_bytes(_KEY_BYTES, "big")


def _remove(
    batch: Batch,
    handle: Handle,
    timeout: int,
    keys: npt.NDArray[np.uint8],
    chains: npt.NDArray[np.uint32],
) -> None:
    entries = _entries(OP_REMOVE, handle, timeout, len(keys))
    entries["chain"] = chains
    entries["key"] = keys
    done = batch.run(entries)
    failed = np.flatnonzero(done["result"] < 0)
    if len(failed):
        raise error_of_completion(done[failed[0]], handle)


def _entries(operation: int, handle: Handle, timeout: int, count: int) -> npt.NDArray[np.void]:
    entries = np.zeros(count, dtype=SQE_DTYPE)
    entries["op"] = operation
    entries["group"] = 1
    entries["userdata"] = np.arange(count, dtype=np.uint64)
    entries["timeout_ms"] = timeout
    entries["capability"] = handle.capability
    entries["space_epoch"] = handle.epoch
    return entries
