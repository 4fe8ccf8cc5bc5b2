"""KV-cache blocks on ffs: put, get and exists of many blocks, one round trip each (docs/guides/kv.md)."""

from ffs.kv.keys import KEY_BYTES, Identity, block_hash, hash_tokens, root_hash
from ffs.kv.results import Results, Status
from ffs.kv.space import Space

__all__ = ["KEY_BYTES", "Identity", "Results", "Space", "Status", "block_hash", "hash_tokens", "root_hash"]
