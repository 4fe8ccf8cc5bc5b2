"""KV-cache blocks on ffs: put, get and exists of many blocks, one round trip each (docs/guides/kv.md)."""

from typing import TYPE_CHECKING

from ffs.kv.bounds import Bounds, Usage
from ffs.kv.keys import KEY_BYTES, Identity, block_hash, hash_tokens, root_hash
from ffs.kv.results import Results, Status

if TYPE_CHECKING:
    from ffs.kv.space import Space

__all__ = [
    "KEY_BYTES",
    "Bounds",
    "Identity",
    "Results",
    "Space",
    "Status",
    "Usage",
    "block_hash",
    "hash_tokens",
    "root_hash",
]


def __getattr__(name: str) -> object:
    """Space brings the native client along; keys alone (a scheduler, a router) don't need it."""
    if name != "Space":
        raise AttributeError(f"module 'ffs.kv' has no attribute {name!r}")
    from ffs.kv.space import Space

    return Space
