"""Writing a directory of torch.distributed.checkpoint by DCP's own writer, tensor by tensor."""

from __future__ import annotations

import contextlib
import os
import posixpath
import warnings
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from ffs.checkpoint.convert_files import Files
    from ffs.client.client import Client


class _Planner(DefaultSavePlanner):
    """The state has tensors without data; they are read when they are written."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return self._read(found) if isinstance(found, torch.Tensor) and found.is_meta else found


class _InStore(FileSystemBase):
    """What DCP's FileSystemWriter asks of a file system."""

    def __init__(self, files: Files, client: Client) -> None:
        self._files, self._client = files, client

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = os.fspath(path)
        file: IO[bytes] = self._files.write(path) if mode == "wb" else self._files.open(path)
        with file:
            yield file

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return posixpath.join(os.fspath(path), suffix)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._client.rename(path, new_path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._client.makedirs(path, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._client.lexists(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._client.remove(path)

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._client.listdir(path)


def write(
    state: dict[str, Any],
    files: Files,
    client: Client | None,
    directory: str,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """`state`: tensors on the device meta, which `read` makes real; other values as they are. Blocking."""
    writer: Any = FileSystemWriter(directory, sync_files=False)
    if client is not None:
        writer.fs = _InStore(files, client)
        writer.path = directory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", ".*TypedStorage is deprecated")
        try:
            save(state, storage_writer=writer, planner=_Planner(read), no_dist=True)
        except CheckpointException as error:
            for cause, _ in error.failures.values():  # of this one process
                raise cause from None
            raise
