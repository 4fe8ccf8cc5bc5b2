"""torch.distributed.checkpoint on ffs: a StorageWriter and a StorageReader (docs/guides/checkpoint.md, DCP).

    from torch.distributed import checkpoint as dcp
    dcp.save(state, storage_writer=FfsStorageWriter(client, "/runs/7/step-100"))
    dcp.load(state, storage_reader=FfsStorageReader(client, "/runs/7/step-100"))

What is written is a checkpoint like any other - shards, manifest.json, visible by one rename - and one file
beside it, dcp.json, with what DCP alone has: objects, as the bytes that its planner made of them, and its
planner's data. No pickle is read by ffs; those bytes are a pickle of torch's, and are handed to its planner
only if torch.load(weights_only=True) takes them, or on trust.
"""

from __future__ import annotations

import dataclasses
import io
import os
import posixpath
import uuid
from concurrent.futures import Future as Promise
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint.commit import Attempt
from ffs.checkpoint.dtypes import FROM_TORCH, TORCH_NAMES
from ffs.checkpoint.goals import Goal, read_goals
from ffs.checkpoint.hashing import DEFAULT, Algorithm, check_algorithm, hash_one
from ffs.checkpoint.hold import held
from ffs.checkpoint.manifest import Manifest, Shard, Tensor
from ffs.checkpoint.persist import ClusterWriter, entries, hash_parts
from ffs.checkpoint.plan import PART_BYTES, FilePlan, Part, files_of
from ffs.checkpoint.shard import TensorSpec, plan_shard
from ffs.checkpoint.snapshot import Flat, StagedFile
from ffs.checkpoint.staging import Pool
from ffs.checkpoint.tensors import Destination, describe
from ffs.errors import AccessDenied, ChecksumMismatch, Damaged, Exists, InvalidArgument

if TYPE_CHECKING:
    from ffs.client.client import Client

FILE_NAME = "dcp.json"
_HOST_BYTES = 512 << 20
_OBJECT = "object:"  # before the name of a planner's bytes, in the header of their shard


class Objects(msgspec.Struct, frozen=True):
    """dcp.json. `objects`: where the planner's bytes are; `planner_data`: the path of each flattened name."""

    objects: dict[str, manifests.Part]
    planner_data: dict[str, list[str | int]] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """What the coordinator tells every rank."""

    attempt: str
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a rank has written: its files, and which of them holds an item, in pieces."""

    shards: tuple[Shard, ...]
    pieces: tuple[manifests.Part, ...]  # `shard` counts within the rank


class FfsStorageWriter(StorageWriter):
    """Writes a checkpoint at `path`, which must not be there. For `dcp.save` and `dcp.async_save`, by threads
    or processes. Picklable; connects and allocates where it writes. host_bytes: memory for files on their
    way. hash: "xxh3-128" or "blake3", the same on all ranks."""

    def __init__(
        self,
        client: Client,
        path: str | os.PathLike[str] = "",
        host_bytes: int = _HOST_BYTES,
        hash: Algorithm = DEFAULT,
    ) -> None:
        check_algorithm(hash)
        self.client = client
        self.path = os.fspath(path)
        self.host_bytes = host_bytes
        self.hash: Algorithm = hash
        self._place: _Place | None = None
        self._attempt: Attempt | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """`checkpoint_id`, if there is one, takes the path's place."""
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)
        self._drop()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument(
                "use_collectives=False: use checkpoint.Manager, which needs none", self.path
            )
        if not posixpath.basename(self.path.rstrip("/")):
            raise InvalidArgument("a checkpoint needs a name: give a path, or a checkpoint_id", self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.client.lexists(self.path):
            raise Exists("is there already: choose another path, or remove it first", self.path)
        self.client.makedirs(posixpath.dirname(self.path.rstrip("/")) or "/", exist_ok=True)
        attempt = uuid.uuid4().hex
        return [
            dataclasses.replace(plan, storage_data=_Place(attempt, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Blocks until all replicas hold what this rank writes: async_save calls it in a thread or process of
        its own."""
        self._drop()
        place: _Place = plan.storage_data
        goal = self.path.rstrip("/")
        self._attempt = Attempt(self.client, goal, place.attempt, place.rank, place.ranks)
        self._attempt.begin()
        results: Future[list[WriteResult]] = Future()
        results.set_result(
            _write(self.client, self._attempt, place, plan, planner, self.host_bytes, self.hash)
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator makes the checkpoint visible."""
        assert self._attempt is not None
        manifest, objects = _joined(metadata, results, self.hash)
        manifests.check(manifest, self.path)
        self._attempt.put_beside(FILE_NAME, msgspec.json.encode(objects))
        self._attempt.publish(manifest)
        self._attempt.tidy()
        self._attempt = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("/")

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=uuid.uuid4().hex)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attempt": None}

    def _drop(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()


def _write(
    client: Client,
    attempt: Attempt,
    place: _Place,
    plan: SavePlan,
    planner: SavePlanner,
    host_bytes: int,
    algorithm: Algorithm,
) -> list[WriteResult]:
    items: dict[str, WriteItem] = {}
    parts = []
    blobs: dict[str, bytes] = {}
    for number, item in enumerate(plan.items):
        key = f"{number}"
        items[key] = item
        if item.type == WriteItemType.BYTE_IO:
            blobs[key] = planner.resolve_data(item).getvalue()  # type: ignore[union-attr]
            parts.append(Part(_OBJECT + item.index.fqn, "U8", (len(blobs[key]),), (0,), (len(blobs[key]),)))
        else:
            parts.append(_part_of(item))
    keys = {id(part): key for key, part in zip(items, parts, strict=True)}
    room = min(PART_BYTES, host_bytes // 4 - 8192)
    by_name: dict[tuple[str, tuple[int, ...]], str] = {
        (part.name, part.begin): keys[id(part)] for part in parts
    }
    shards: list[Shard] = []
    pieces: dict[str, list[manifests.Part]] = {key: [] for key in items}
    largest = max((part.nbytes for part in parts), default=0)
    total = sum(part.nbytes for part in parts) + (len(parts) + 1) * 16384
    pool = Pool(min(host_bytes, max(total, largest + 16384, 65536)))
    writer = ClusterWriter(client)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="ffs-dcp") as thread:
            going: list[Promise[None]] = []
            for file in files_of(parts, place.rank, place.ranks, room):
                for each in going:
                    if each.done():
                        each.result()
                staged = _stage(file, pool, planner, items, blobs, by_name)
                hash_parts(staged, algorithm)
                number = len(shards)
                shards.append(Shard(file.file, staged.nbytes))
                for part, entry in zip(file.parts, entries(staged, number), strict=True):
                    pieces[_key_of(part, by_name, items)].append(entry)
                going.append(thread.submit(_write_one, writer, attempt.data, staged))
            for each in going:
                each.result()
    finally:
        writer.close()
        pool.close()
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=sum(piece.bytes for piece in pieces[key]),
            storage_data=_Stored(tuple(shards), tuple(pieces[key])),
        )
        for key, item in items.items()
    ]


def _write_one(writer: ClusterWriter, directory: str, staged: StagedFile) -> None:
    try:
        writer.write(directory, staged)
    finally:
        staged.region.release()


def _part_of(item: WriteItem) -> Part:
    data = item.tensor_data
    assert data is not None
    dtype = FROM_TORCH.get(str(data.properties.dtype))
    if dtype is None:
        raise InvalidArgument(
            f"{item.index.fqn!r} has torch's dtype {data.properties.dtype}, which safetensors can't hold"
        )
    return Part(item.index.fqn, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _key_of(part: Part, by_name: dict[tuple[str, tuple[int, ...]], str], items: dict[str, WriteItem]) -> str:
    """The item that a piece was cut from: the one of that name whose chunk holds its beginning."""
    exact = by_name.get((part.name, part.begin))
    if exact is not None:
        return exact
    for (name, begin), key in by_name.items():
        if name == part.name:
            data = items[key].tensor_data
            extent = data.chunk.sizes if data is not None else ()
            if all(b <= p < b + e for b, p, e in zip(begin, part.begin, extent, strict=True)):
                return key
    raise AssertionError(part)


def _stage(
    file: FilePlan,
    pool: Pool,
    planner: SavePlanner,
    items: dict[str, WriteItem],
    blobs: dict[str, bytes],
    by_name: dict[tuple[str, tuple[int, ...]], str],
) -> StagedFile:
    shard = plan_shard((part.spec for part in file.parts), {"format": "pt"})
    region = pool.take(shard.nbytes)
    try:
        staged = StagedFile(file, shard, region, {part.name: "torch" for part in file.parts})
        flat = Flat()
        memory = staged.image()
        for part, placed in staged.placed():
            key = _key_of(part, by_name, items)
            target = memory[placed.begin : placed.end]
            if key in blobs:
                target[:] = memoryview(blobs[key])
            elif part.nbytes:
                # Resolved as late as it can be: it may be on a device, or be made for this.
                tensor = planner.resolve_data(items[key])
                flat.copy(describe(part.name, tensor), part, target)
        return staged
    except BaseException:
        region.release()
        raise


def _joined(
    metadata: Metadata, results: list[list[WriteResult]], algorithm: Algorithm
) -> tuple[Manifest, Objects]:
    shards: list[Shard] = []
    stored: dict[str, list[manifests.Part]] = {}
    for of_rank in results:
        base = len(shards)
        shards += of_rank[0].storage_data.shards if of_rank else ()
        for result in of_rank:
            for piece in result.storage_data.pieces:
                moved = msgspec.structs.replace(piece, shard=piece.shard + base)
                stored.setdefault(result.index.fqn, []).append(moved)
    tensors = {}
    objects = {}
    for name, held_there in metadata.state_dict_metadata.items():
        if isinstance(held_there, TensorStorageMetadata):
            dtype = FROM_TORCH[str(held_there.properties.dtype)]
            tensors[name] = Tensor(dtype, tuple(held_there.size), tuple(stored.get(name, ())))
        else:
            (objects[name],) = stored[name]
    data = metadata.planner_data
    paths = {name: list(path) for name, path in data.items()} if isinstance(data, dict) else None
    manifest = Manifest(
        tuple(shards),
        tensors,
        ranks=len(results),
        version=manifests.version_of(algorithm),
        hash=algorithm,
    )
    return manifest, Objects(objects, paths)


class FfsStorageReader(StorageReader):
    """Reads any checkpoint of ffs for `dcp.load`: of FfsStorageWriter, `save` or Manager. `trusted`: objects
    may be any pickle; else AccessDenied names the one that weights_only refuses (FAULTS C14)."""

    def __init__(self, client: Client, path: str | os.PathLike[str] = "", trusted: bool = False) -> None:
        self.client = client
        self.path = os.fspath(path)
        self.trusted = trusted

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)

    def read_metadata(self) -> Metadata:
        with held(self.client, self.path) as manifest:
            objects = self._objects()
        known: dict[str, Any] = {}
        for name, tensor in manifest.tensors.items():
            boxes = [tensor.box_of(part) for part in tensor.parts]
            known[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, TORCH_NAMES[tensor.dtype])),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(begin), torch.Size(extent)) for begin, extent in boxes],
            )
        known.update({name: BytesStorageMetadata() for name in objects.objects})
        paths = objects.planner_data
        return Metadata(
            state_dict_metadata=known,
            planner_data=None if paths is None else {name: tuple(path) for name, path in paths.items()},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.path, load_id=uuid.uuid4().hex),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Blocking. ChecksumMismatch, AccessDenied."""
        with held(self.client, self.path) as manifest:
            objects = self._objects()
            tensors = []
            goals = []
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._object(item, manifest, objects)))
                    continue
                entry = manifest.tensors[item.storage_index.fqn]
                tensor = planner.resolve_tensor(item).detach()
                spec = TensorSpec(item.storage_index.fqn, entry.dtype, tuple(item.lengths))
                destination = Destination(spec, tensor)
                chunk = item.storage_index.offset or torch.Size([0] * len(entry.shape))
                begin = tuple(c + o for c, o in zip(chunk, item.storage_offsets, strict=True))
                goals.append(Goal(spec.name, (begin, spec.shape), destination.buffer))
                tensors.append((item, tensor, destination))
            read_goals(self.client, self.path, manifest, goals)
            for item, tensor, destination in tensors:
                destination.finish()
                planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("/")

    def _objects(self) -> Objects:
        where = posixpath.join(self.path, FILE_NAME)
        try:
            with self.client.open(where, "rb") as file:
                return msgspec.json.decode(file.read(), type=Objects)
        except FileNotFoundError:
            return Objects({})  # a checkpoint of `save` or of a Manager
        except msgspec.MsgspecError as error:
            raise Damaged(f"not what FfsStorageWriter writes: {error}", where) from error

    def _object(self, item: ReadItem, manifest: Manifest, objects: Objects) -> bytes:
        name = item.storage_index.fqn
        part = objects.objects[name]
        if not 0 <= part.shard < len(manifest.shards):
            raise Damaged(f"{name!r} names a shard that isn't there", self.path)
        where = posixpath.join(self.path, manifest.shards[part.shard].file)
        with self.client.open(where, "rb", buffering=0) as file:
            data: bytes = file.pread(part.bytes, part.offset)
        if hash_one(manifest.hash, data) != part.hash:
            raise ChecksumMismatch(f"the bytes of {name!r} aren't those that were saved", where)
        if not self.trusted:
            try:
                torch.load(io.BytesIO(data), weights_only=True)
            except Exception as error:
                raise AccessDenied(
                    f"{name!r} is an object that torch.load(weights_only=True) refuses; if whoever wrote the "
                    "checkpoint may run code here, use FfsStorageReader(..., trusted=True)",
                    self.path,
                ) from error
        return data
