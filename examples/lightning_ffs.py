"""Lightning on ffs: a CheckpointIO whose checkpoints are those of ffs.checkpoint.

    import ffs
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    plugin = AsyncCheckpointIO(FfsCheckpointIO(ffs.connect()))      # or FfsCheckpointIO alone: it blocks
    trainer = Trainer(plugins=[plugin], default_root_dir="/runs/7")

Paths are paths of the cluster; a checkpoint appears whole, and `ffs ckpt` shows, verifies and converts it.
Hyperparameters are plain values, dicts and lists: what isn't is refused by name, since nothing is pickled.
Checked with lightning 2.6.
"""

from __future__ import annotations

import posixpath
import uuid
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from ffs import checkpoint
from ffs.checkpoint import retention
from ffs.client.client import Client
from ffs.errors import Busy


class FfsCheckpointIO(CheckpointIO):
    """One client, many checkpoints. Blocking."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def save_checkpoint(self, checkpoint_: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replaces what is at the path (Lightning's last.ckpt), but never by something that isn't whole."""
        if storage_options is not None:
            raise TypeError("storage_options: ffs has none")
        goal = _path(path)
        if not self.client.lexists(goal):
            checkpoint.save(self.client, goal, checkpoint_)
            return
        parent, name = posixpath.split(goal)
        fresh = posixpath.join(parent, f"{name}.new-{uuid.uuid4().hex}")
        checkpoint.save(self.client, fresh, checkpoint_)
        self.remove_checkpoint(goal)
        self.client.rename_exclusive(fresh, goal)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """`weights_only` says nothing here: there are no pickles. FileNotFoundError."""
        state: dict[str, Any] = checkpoint.load(self.client, _path(path), framework="torch")
        if map_location is None:
            return state
        return _moved(state, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        goal = _path(path)
        if self.client.lexists(goal) and not retention.remove(self.client, goal):
            raise Busy("somebody is reading it: try again later", goal)


def _path(path: Any) -> str:
    """Without the scheme and the cluster: ffs://host:port/runs/7 is /runs/7."""
    text = str(path)
    if text.startswith("ffs://"):
        text = "/" + text.removeprefix("ffs://").partition("/")[2]
    return text.removeprefix("ffs:").rstrip("/")


def _moved(value: Any, where: Any) -> Any:
    if hasattr(value, "untyped_storage"):
        return where(value, "cpu") if callable(where) else value.to(where)
    if isinstance(value, dict):
        return {key: _moved(each, where) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, where) for each in value]
    return value
