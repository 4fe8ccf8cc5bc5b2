"""Checkpoints on ffs: `save` and `load` of state dicts (docs/guides/checkpoint.md)."""

from ffs.checkpoint.load import load, read_manifest
from ffs.checkpoint.manifest import Manifest
from ffs.checkpoint.save import save

__all__ = ["Manifest", "load", "read_manifest", "save"]
