"""What `convert` reads: one class a format. Each knows names, types and shapes at once, and reads a tensor
when it is asked for it. Context managers; all block. docs/guides/checkpoint.md, Converting.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ffs.checkpoint import manifest as manifests
from ffs.checkpoint import state as states
from ffs.checkpoint.dcp import FILE_NAME as OBJECTS
from ffs.checkpoint.dcp import Objects
from ffs.checkpoint.dtypes import DTYPE_BYTES, FROM_TORCH, TORCH_NAMES
from ffs.checkpoint.goals import Sources
from ffs.checkpoint.hashing import hash_one
from ffs.checkpoint.hold import held
from ffs.checkpoint.load import _new_tensors, shared_part
from ffs.checkpoint.manifest import Part
from ffs.checkpoint.shard import MAX_HEADER_BYTES, TensorSpec
from ffs.checkpoint.tensors import as_tensor, describe
from ffs.errors import AccessDenied, ChecksumMismatch, Damaged, InvalidArgument

if TYPE_CHECKING:
    from ffs.checkpoint.convert_files import Files
    from ffs.client.client import Client

_SMALL_BYTES = 1 << 20
_SMALL_TOTAL = 256 << 20
TREE = "ffs.tree"
"""In the metadata of a safetensors file: the structure and plain values of the state."""


class Source(Protocol):
    specs: dict[str, TensorSpec]
    tied: Mapping[str, str]
    tree: Any

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> torch.Tensor: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class _Base:
    def __init__(self) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.tied: Mapping[str, str] = {}
        self.tree: Any = None
        self._stack = contextlib.ExitStack()

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, TORCH_NAMES[self.specs[name].dtype])
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class NativeSource(_Base):
    """A checkpoint of ffs, without what single ranks have. In the cluster it can't be removed meanwhile."""

    def __init__(self, client: Client | None, files: Files, path: str) -> None:
        super().__init__()
        self._client, self._files, self._path = client, files, path
        if client is not None:
            whole = self._stack.enter_context(held(client, path))
        else:
            where = posixpath.join(path, manifests.FILE_NAME)
            with files.open(where) as file:
                whole = manifests.decode(file.read(), where)
        self._manifest = shared_part(whole)
        self.specs = {name: entry.spec(name) for name, entry in self._manifest.tensors.items()}
        self.tied, self.tree = self._manifest.tied, self._manifest.tree
        self._names = {name: name for name in self.specs}
        objects = posixpath.join(path, OBJECTS)
        if files.exists(objects):
            self._take_objects(objects)
        small = [name for name, spec in self.specs.items() if spec.nbytes < _SMALL_BYTES]
        fits = sum(self.specs[name].nbytes for name in small) <= _SMALL_TOTAL
        self._small = [self._names[name] for name in small] if fits else []
        self._read: dict[str, torch.Tensor] = {}

    def _take_objects(self, where: str) -> None:
        """Of FfsStorageWriter: values are pickles of DCP's planner, and its paths make the structure."""
        with self._files.open(where) as file:
            objects = msgspec.json.decode(file.read(), type=Objects)
        values = {
            name: _unpickled(self._bytes(part), False, name, where) for name, part in objects.objects.items()
        }
        self.specs, self.tree, self._names = _named(self.specs, values, objects.planner_data, where)

    def _bytes(self, part: Part) -> bytes:
        where = posixpath.join(self._path, self._manifest.shards[part.shard].file)
        with self._files.open(where) as file:
            file.seek(part.offset)
            data = file.read(part.bytes)
        if hash_one(self._manifest.hash, data) != part.hash:
            raise ChecksumMismatch("the bytes aren't those that were saved", where)
        return data

    def read(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        if self._client is not None:
            if stored in self._small and not self._read:
                self._read = self._fetch(self._small)
            return self._read[stored] if stored in self._read else self._fetch([stored])[stored]
        entry = self._manifest.tensors[stored]
        whole = torch.empty(entry.shape, dtype=self.dtype(name))
        for part in entry.parts:
            if part.bytes:
                begin, extent = entry.box_of(part)
                data = memoryview(bytearray(self._bytes(part)))
                piece = as_tensor(TensorSpec(name, entry.dtype, extent), data, "torch")
                whole[tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))] = piece
        return whole

    def _fetch(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        assert self._client is not None
        return _new_tensors(self._client, self._path, self._manifest, names, "torch", Sources())


class SafetensorsSource(_Base):
    """One file, of whoever wrote it."""

    def __init__(self, files: Files, path: str) -> None:
        super().__init__()
        self._file = self._stack.enter_context(files.open(path))
        try:
            length = int.from_bytes(self._file.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            head = json.loads(self._file.read(length))
            size = self._file.seek(0, io.SEEK_END)
            metadata = head.pop("__metadata__", None) or {}
            self._at: dict[str, int] = {}
            for name, entry in head.items():
                spec = TensorSpec(name, entry["dtype"], tuple(map(int, entry["shape"])))
                begin, end = entry["data_offsets"]
                inside = begin >= 0 and 8 + length + end <= size
                if spec.dtype not in DTYPE_BYTES or not inside or end - begin != spec.nbytes:
                    raise ValueError(f"the entry of {name!r}")
                self.specs[name] = spec
                self._at[name] = 8 + length + begin
            if TREE in metadata:
                self.tree = json.loads(metadata[TREE])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._stack.close()
            raise Damaged(f"no safetensors file: {error}", path) from error
        self.tied = {k: v for k, v in metadata.items() if k not in self.specs and v in self.specs}

    def read(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        data = bytearray(spec.nbytes)
        self._file.seek(self._at[name])
        if spec.nbytes and self._file.readinto(data) != spec.nbytes:  # type: ignore[attr-defined]
            raise Damaged(f"{name!r} ends early")
        found: torch.Tensor = as_tensor(spec, memoryview(data), "torch")
        return found


class TorchSource(_Base):
    """A file of torch.save: mapped from a local disk, read whole from the cluster."""

    def __init__(self, files: Files, path: str, trusted: bool) -> None:
        super().__init__()
        from ffs.checkpoint.convert_files import _Local

        options: dict[str, Any] = {"map_location": "cpu", "weights_only": not trusted}
        try:
            if isinstance(files, _Local):
                state = torch.load(path, mmap=_is_zip(path), **options)
            else:
                with files.open(path) as file:
                    state = torch.load(file, **options)
        except pickle.UnpicklingError as error:
            raise AccessDenied(
                "torch.load(weights_only=True) refuses it; if whoever wrote it may run code here, give "
                "--trusted",
                path,
            ) from error
        flat = states.flatten(state)
        self.tree = flat.tree
        self._tensors: dict[str, Any] = {}
        first: dict[Any, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in flat.tensors.items():
            found = describe(name, tensor)
            kept = first.setdefault(found.identity, name)
            if kept != name:
                tied[name] = kept
                continue
            self.specs[name] = found.spec
            self._tensors[name] = tensor
        self.tied = tied

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(np.asarray(tensor))


class DcpSource(_Base):
    """A directory of torch.distributed.checkpoint: .metadata and .distcp files."""

    def __init__(self, files: Files, path: str, trusted: bool) -> None:
        super().__init__()
        self._files, self._path = files, path
        where = posixpath.join(path, ".metadata")
        with files.open(where) as file:
            data = file.read()
        try:
            metadata = pickle.loads(data) if trusted else _MetadataUnpickler(io.BytesIO(data)).load()
            self._known: dict[str, Any] = dict(metadata.state_dict_metadata)
            self._places: dict[MetadataIndex, Any] = dict(metadata.storage_data)
        except (AttributeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise Damaged(f"not the .metadata of a DCP checkpoint: {error}", where) from error
        specs: dict[str, TensorSpec] = {}
        values: dict[str, Any] = {}
        for name, entry in self._known.items():
            if isinstance(entry, TensorStorageMetadata):
                dtype = FROM_TORCH.get(str(entry.properties.dtype))
                if dtype is None:
                    raise InvalidArgument(f"{name!r} has torch's dtype {entry.properties.dtype}", path)
                specs[name] = TensorSpec(name, dtype, tuple(entry.size))
            else:
                values[name] = _unpickled(self._bytes(MetadataIndex(name)), trusted, name, path)
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else None
        self.specs, self.tree, self._names = _named(specs, values, paths, path)

    def read(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        entry = self._known[stored]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            data = self._bytes(MetadataIndex(stored, chunk.offsets))
            piece = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            if whole.dim():
                whole[at] = piece
            else:
                whole.copy_(piece)
        return whole

    def _bytes(self, index: MetadataIndex) -> bytes:
        place = self._places[index]
        if getattr(place, "transform_descriptors", None):
            raise InvalidArgument(f"{index.fqn!r} was written through an extension of DCP", self._path)
        where = posixpath.join(self._path, place.relative_path)
        if posixpath.dirname(where) != self._path:
            raise Damaged(f"{index.fqn!r} lies outside of the checkpoint", self._path)
        with self._files.open(where) as file:
            file.seek(place.offset)
            return file.read(place.length)


class _MetadataUnpickler(pickle.Unpickler):
    """Of DCP's metadata, the classes that it consists of and no others."""

    def find_class(self, module: str, name: str) -> Any:
        own = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        plain = (module, name) in {
            ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("builtins", "set"),
        }  # fmt: skip
        dtype = module == "torch" and f"torch.{name}" in FROM_TORCH
        if plain or dtype or (own and name.lstrip("_")[:1].isupper() and name not in ("Enum", "Any")):
            found = super().find_class(module, name)
            if dtype or plain or (isinstance(found, type) and found.__module__ == module):
                return found
        raise AccessDenied(
            f".metadata names {module}.{name}, which isn't of DCP's metadata; if whoever wrote it may run "
            "code here, give --trusted"
        )


def _unpickled(data: bytes, trusted: bool, name: str, where: str) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise AccessDenied(
            f"{name!r} is an object that torch.load(weights_only=True) refuses; if whoever wrote the "
            "checkpoint may run code here, give --trusted",
            where,
        ) from error


def _named(
    specs: Mapping[str, TensorSpec],
    values: Mapping[str, Any],
    paths: Mapping[str, Sequence[str | int]] | None,
    where: str,
) -> tuple[dict[str, TensorSpec], Any, dict[str, str]]:
    """DCP's flat names as a state: (what tensors there are, the tree, where each is stored)."""
    leaves: dict[str, Any] = {
        name: torch.empty(spec.shape, dtype=getattr(torch, TORCH_NAMES[spec.dtype]), device="meta")
        for name, spec in specs.items()
    }
    stored = {id(tensor): name for name, tensor in leaves.items()}
    leaves.update(values)
    state: Any = leaves
    if paths is not None:
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

        state = unflatten_state_dict(leaves, {name: tuple(paths.get(name, (name,))) for name in leaves})
    flat = states.flatten(state)
    names = {name: stored[id(tensor)] for name, tensor in flat.tensors.items() if id(tensor) in stored}
    if len(names) != len(flat.tensors):
        other = next(name for name in flat.tensors if name not in names)
        raise InvalidArgument(
            f"{other!r} is a tensor inside of an object of DCP: it can't be converted", where
        )
    found = {name: TensorSpec(name, specs[kept].dtype, specs[kept].shape) for name, kept in names.items()}
    return found, flat.tree, names


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
