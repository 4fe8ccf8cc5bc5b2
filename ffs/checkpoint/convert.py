"""`ffs ckpt convert`: checkpoints of ffs, DCP directories, single safetensors files and torch.save files into
one another (docs/guides/checkpoint.md, Converting).

A source says which tensors it has and reads them one by one; a destination asks for them in the order in
which it writes. So one tensor and a little more is in memory, but for torch.save, whose files are written
whole. What is written gets its name at the end, or never.
"""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from ffs.checkpoint import state as states
from ffs.checkpoint.commit import Attempt
from ffs.checkpoint.convert_files import Files, local_files, store_files
from ffs.checkpoint.convert_sources import (
    TREE,
    DcpSource,
    NativeSource,
    SafetensorsSource,
    Source,
    TorchSource,
)
from ffs.checkpoint.manifest import FILE_NAME as MANIFEST
from ffs.checkpoint.plan import PART_BYTES, Part, files_of
from ffs.checkpoint.remains import collect_quietly
from ffs.checkpoint.saving import Background, Saving, done
from ffs.checkpoint.shard import plan_shard
from ffs.checkpoint.snapshot import Flat, StagedFile, StatePlan, moves_of
from ffs.checkpoint.staging import Pool
from ffs.checkpoint.tensors import describe
from ffs.errors import Exists, InvalidArgument, NotFound

if TYPE_CHECKING:
    from ffs.client.client import Client

Format = Literal["ffs", "dcp", "safetensors", "torch"]
FORMATS: tuple[Format, ...] = ("ffs", "dcp", "safetensors", "torch")
_HOST_BYTES = 512 << 20
_ENDINGS: dict[str, Format] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A path of the cluster, or of this machine (`client` None)."""

    path: str
    client: Client | None = None

    def files(self) -> Files:
        return local_files() if self.client is None else store_files(self.client)


def convert(
    source: Place,
    goal: Place,
    to: Format | None = None,
    *,
    trusted: bool = False,
    progress: Callable[[int], None] = lambda count: None,
    begun: Callable[[int], None] = lambda total: None,
) -> None:
    """Blocking. `to`: the format; None: by the ending of the goal's name, else ffs in the cluster. `begun` is
    told how many bytes of tensors there are, `progress` of those that were written. `trusted`: pickles of the
    source may run code; else what torch.load(weights_only=True) refuses is AccessDenied.

    Exists: the goal is there already; NotFound; InvalidArgument, TypeError: a state that the format can't
    hold. Then nothing is at the goal."""
    wanted = to or format_of(goal)
    if wanted == "ffs" and goal.client is None:
        raise InvalidArgument("a checkpoint of ffs is made in the cluster: give ffs:/path", goal.path)
    path = goal.path.rstrip("/")
    if goal.files().exists(path):
        raise Exists("is there already: choose another path, or remove it first", path)
    with opened(source, trusted) as state:
        begun(sum(spec.nbytes for spec in state.specs.values()))
        if wanted == "ffs":
            assert goal.client is not None
            _to_native(state, goal.client, path, progress)
        elif wanted == "safetensors":
            _to_safetensors(state, goal.files(), path, progress)
        elif wanted == "torch":
            _to_torch(state, goal.files(), path, progress)
        else:
            _to_dcp(state, goal, path, progress)


def format_of(goal: Place) -> Format:
    """By the ending. Pure."""
    found = _ENDINGS.get(os.path.splitext(goal.path)[1])
    if found is not None:
        return found
    if goal.client is not None:
        return "ffs"
    raise InvalidArgument(f"which format? give --to, one of {', '.join(FORMATS)}", goal.path)


def opened(place: Place, trusted: bool) -> Source:
    """The source, by what is there: manifest.json or .metadata in a directory, else by the file's ending."""
    files = place.files()
    path = place.path.rstrip("/")
    if files.exists(posixpath.join(path, MANIFEST)):
        return NativeSource(place.client, files, path)
    if files.exists(posixpath.join(path, ".metadata")):
        return DcpSource(files, path, trusted)
    if not files.exists(path) or files.is_directory(path):
        raise NotFound("no checkpoint: neither manifest.json nor .metadata is there, nor is it a file", path)
    if path.endswith(".safetensors"):
        return SafetensorsSource(files, path)
    return TorchSource(files, path, trusted)


# --- destinations ---------------------------------------------------------------------------------


def _to_native(state: Source, client: Client, path: str, progress: Callable[[int], None]) -> None:
    parts = [
        Part(name, spec.dtype, spec.shape, (0,) * len(spec.shape), spec.shape)
        for name, spec in state.specs.items()
    ]
    files = []
    for file in files_of(parts, 0, 1, min(PART_BYTES, _HOST_BYTES // 4 - 8192)):
        shard = plan_shard((part.spec for part in file.parts), {"format": "pt"})
        files.append((file, shard, moves_of()))
    declared = {name: (spec.dtype, spec.shape) for name, spec in state.specs.items()}
    plan = StatePlan(files, {}, dict(state.tied), declared)
    parent = posixpath.dirname(path) or "/"
    client.makedirs(parent, exist_ok=True)
    collect_quietly(client, parent)
    attempt = Attempt(client, path, uuid.uuid4().hex)
    attempt.begin()
    saving = Saving(attempt, plan, state.tree, begun=done())
    background = Background(client)
    pool = Pool(min(_HOST_BYTES, max(64 << 10, plan.staged_bytes)))
    flat = Flat()
    last: tuple[str, Any] = "", None
    try:
        for file, shard, _ in files:
            region = pool.take(shard.nbytes, lambda: saving.failure)
            try:
                staged = StagedFile(file, shard, region, {part.name: "torch" for part in file.parts})
                memory = staged.image()
                for part, placed in staged.placed():
                    if part.name != last[0]:
                        last = part.name, describe(part.name, state.read(part.name))
                    if part.nbytes:
                        flat.copy(last[1], part, memory[placed.begin : placed.end])
                del memory
            except BaseException:
                region.release()
                raise
            background.hand_over(saving, staged)
            progress(sum(part.nbytes for part in file.parts))
            if saving.failure is not None:
                break
    except BaseException as error:
        saving.failure = saving.failure or error
    background.end(saving)
    background.close()
    pool.close()
    saving.replicated.result()


def _to_safetensors(state: Source, files: Files, path: str, progress: Callable[[int], None]) -> None:
    metadata = {"format": "pt", **state.tied}
    if state.tree is not None:
        metadata[TREE] = msgspec.json.encode(state.tree).decode()
    plan = plan_shard(state.specs.values(), metadata)
    with files.create(path) as file:
        file.write(plan.header)
        for placed in plan.tensors:
            if placed.spec.nbytes:
                file.write(describe(placed.spec.name, state.read(placed.spec.name)).flat().data)
            progress(placed.spec.nbytes)


def _to_torch(state: Source, files: Files, path: str, progress: Callable[[int], None]) -> None:
    found = {}
    for name, spec in state.specs.items():
        found[name] = state.read(name)
        progress(spec.nbytes)
    found.update({alias: found[kept] for alias, kept in state.tied.items()})
    with files.create(path) as file:
        torch.save(states.unflatten(state.tree, found, path), file)


def _to_dcp(state: Source, goal: Place, path: str, progress: Callable[[int], None]) -> None:
    from ffs.checkpoint.convert_dcp import write

    held = {
        name: torch.empty(spec.shape, dtype=state.dtype(name), device="meta")
        for name, spec in state.specs.items()
    }
    held.update({alias: held[kept] for alias, kept in state.tied.items()})
    names = {id(tensor): name for name, tensor in held.items() if name not in state.tied}

    def read(tensor: torch.Tensor) -> torch.Tensor:
        name = names[id(tensor)]
        progress(state.specs[name].nbytes)
        return state.read(name)

    files = goal.files()
    with files.create_directory(path) as directory:
        write(states.unflatten(state.tree, held, path), files, goal.client, directory, read)
