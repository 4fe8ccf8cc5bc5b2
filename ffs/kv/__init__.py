"""KV-cache blocks on ffs: put, get and exists of many blocks, one round trip each (docs/guides/kv.md)."""

import importlib
from typing import TYPE_CHECKING

from ffs.kv.bounds import Bounds, Usage
from ffs.kv.keys import KEY_BYTES, Identity, block_hash, hash_tokens, part_key, root_hash
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.kv.blocks import Places
    from ffs.kv.counters import SpaceStats
    from ffs.kv.space import Space

__all__ = [
    "KEY_BYTES",
    "Bounds",
    "Identity",
    "Places",
    "Results",
    "Space",
    "SpaceStats",
    "Status",
    "Usage",
    "block_hash",
    "hash_tokens",
    "part_key",
    "root_hash",
]


_WITH_NATIVE = {"Places": "blocks", "Space": "space", "SpaceStats": "counters"}


def __getattr__(name: str) -> object:
    """These bring the native client along; keys alone (a scheduler, a router) don't need it."""
    if name not in _WITH_NATIVE:
        raise AttributeError(f"module 'ffs.kv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ffs.kv.{_WITH_NATIVE[name]}"), name)
