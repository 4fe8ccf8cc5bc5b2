"""Tiers of a KV cache: pinned host memory, a local store, an ffs space (docs/kv_tiers.md)."""

from ffs.kv.tiers.manager import TierManager, TierStats
from ffs.kv.tiers.store import BlockStore
from ffs.kv.tiers.streams import Block, Stream
from ffs.kv.tiers.words import Outcome, Settings, Share, Tier

__all__ = [
    "Block",
    "BlockStore",
    "Outcome",
    "Settings",
    "Share",
    "Stream",
    "Tier",
    "TierManager",
    "TierStats",
]
