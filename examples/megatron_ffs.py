"""Megatron-Core on ffs: strategies that keep the sharded part of a checkpoint in the cluster.

    from megatron.core import dist_checkpointing

    save, load = FfsSaveShardedStrategy(client, "/runs/7"), FfsLoadShardedStrategy(client, "/runs/7")
    dist_checkpointing.save(state_dict, "/nfs/ckpt/iter_100", sharded_strategy=save)
    state = dist_checkpointing.load(state_dict, "/nfs/ckpt/iter_100", sharded_strategy=load)

Megatron's directory keeps what is small (common.pt, metadata.json) and must be one that all ranks see;
tensors and sharded objects go to /runs/7/iter_100, written by all ranks and visible at once, and load into
any layout. Megatron's planners do the planning. Checked with megatron-core 0.16.
"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as megatron
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch.distributed import checkpoint as dcp

from ffs.checkpoint.dcp import FfsStorageReader, FfsStorageWriter
from ffs.client.client import Client

BACKEND, VERSION = "ffs", 1


class FfsSaveShardedStrategy(SaveShardedStrategy):
    """All ranks call `save`; it blocks."""

    def __init__(self, client: Client, root: str) -> None:
        super().__init__(BACKEND, VERSION)
        self.client, self.root = client, root

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = megatron._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            megatron.mcore_to_pyt_state_dict(flat, False),
            storage_writer=FfsStorageWriter(self.client, _path(self.root, checkpoint_dir)),
            planner=megatron.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class FfsLoadShardedStrategy(megatron.TorchDistLoadShardedStrategy):
    """As Megatron's own, but for where it reads. `trusted`: sharded objects may be any pickle."""

    def __init__(self, client: Client, root: str, trusted: bool = False) -> None:
        super().__init__()
        self.client, self.root, self.trusted = client, root, trusted

    def _reader(self, checkpoint_dir: str | Path) -> FfsStorageReader:
        return FfsStorageReader(self.client, _path(self.root, checkpoint_dir), trusted=self.trusted)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        wanted = [
            each for each in megatron.nested_values(sharded_state_dict) if hasattr(each, "global_shape")
        ]
        flat, mapping, renamed = megatron._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = megatron.mcore_to_pyt_state_dict(flat, True)
        dcp.load(
            state,
            storage_reader=self._reader(checkpoint_dir),
            planner=megatron.MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[t for t in wanted if not t.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={t.key: t for t in wanted if t.allow_shape_mismatch},
            ),
        )
        found = {key: megatron._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        found = megatron._replace_sharded_keys_with_state_dict_keys(found, mapping, renamed)
        megatron._restore_dict_types(found, sharded_state_dict)
        return found

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Any = None) -> Any:
        metadata = metadata or self._reader(checkpoint_dir).read_metadata()
        return super().load_tensors_metadata(checkpoint_dir, metadata)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise ValueError(f"this checkpoint was saved by {loaded_backend!r}, not by ffs")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version > VERSION:
            raise ValueError(f"this checkpoint has version {loaded_version} of {BACKEND}: update the example")


def _path(root: str, checkpoint_dir: str | Path) -> str:
    return posixpath.join(root, os.path.basename(os.path.normpath(checkpoint_dir)))
