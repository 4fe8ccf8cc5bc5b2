"""Checkpoints on ffs: `save` and `load` of states, `Manager` for training (docs/guides/checkpoint.md)."""

from ffs.checkpoint.commit import RankFailed
from ffs.checkpoint.guard import TornSnapshot
from ffs.checkpoint.hold import read_manifest
from ffs.checkpoint.load import load
from ffs.checkpoint.manager import Manager, SaveHandle
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.ranks import Ranks
from ffs.checkpoint.save import save
from ffs.checkpoint.saving import SaveReport

__all__ = [
    "Manager",
    "Manifest",
    "RankFailed",
    "Ranks",
    "SaveHandle",
    "SaveReport",
    "TornSnapshot",
    "load",
    "read_manifest",
    "save",
]
