"""`save`: a state as safetensors shards and a manifest, published as one directory
(docs/guides/checkpoint.md).

Everything is written into a directory of its own beside the goal, then one rename makes it visible.
Whatever fails before leaves nothing under the goal's name, and the remains are removed.
"""

from __future__ import annotations

import posixpath
import uuid
from typing import TYPE_CHECKING, Any

from ffs.checkpoint.commit import Attempt
from ffs.checkpoint.hashing import DEFAULT, Algorithm, check_algorithm
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.plan import PART_BYTES
from ffs.checkpoint.saving import Background, Saving, done
from ffs.checkpoint.snapshot import plan_state, stage
from ffs.checkpoint.staging import Pool
from ffs.checkpoint.state import flatten
from ffs.errors import InvalidArgument

if TYPE_CHECKING:
    from ffs.client.client import Client

_HOST_BYTES = 512 << 20


def save(
    client: Client,
    path: str,
    state: Any,
    *,
    part_bytes: int = PART_BYTES,
    table: str | int | None = None,
    hash: Algorithm = DEFAULT,
) -> Manifest:
    """Saves a state - nested dicts and lists of tensors (torch or numpy) and plain values, and objects with
    `state_dict` - as a checkpoint: the directory `path`, which must not be there yet. Returns its manifest
    once all replicas hold everything and the name is visible. Blocking, one process; `Manager` saves while
    training goes on, and from many ranks.

    The state must not change meanwhile. Tied tensors are stored once; a view costs its own bytes.
    `part_bytes`: tensors larger than that are stored in several files. `table`: the chain table by name or
    id; None: as the parent directory has it. `hash`: "xxh3-128", or "blake3", which finds also what somebody
    changed on purpose (docs/guides/checkpoint.md, Hashes).

    Raises Exists; TypeError, InvalidArgument (an entry that can't be stored: its name is said); NoSpace and
    any other failure of a write. Then nothing is visible under `path`. Directories above are made as needed.
    """
    if part_bytes < 1:
        raise InvalidArgument(f"part_bytes is {part_bytes}: give a positive number of bytes")
    check_algorithm(hash)
    flat = flatten(state)
    plan = plan_state(flat.tensors, 0, 1, _HOST_BYTES, part_bytes)
    path = path.rstrip("/")
    parent, name = posixpath.split(path)
    if not name:
        raise InvalidArgument("a checkpoint needs a name of its own", path)
    client.makedirs(parent, exist_ok=True)
    attempt = Attempt(client, path, uuid.uuid4().hex, table=table)
    attempt.begin()
    saving = Saving(attempt, plan, flat.tree, begun=done(), hash=hash)
    background = Background(client)
    pool = Pool(min(_HOST_BYTES, max(2, plan.staged_bytes // 4096) * 4096))
    try:
        for staged in stage(plan, pool, lambda: saving.failure):
            background.hand_over(saving, staged)
            if saving.failure is not None:
                break
    except BaseException as error:
        saving.failure = saving.failure or error
    background.end(saving)
    background.close()
    pool.close()
    return saving.replicated.result().manifest
