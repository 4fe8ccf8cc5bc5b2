"""What a tier below the host is to the manager: a store of blocks by key, called in batches. ffs.kv.Space is
one, so are tiers/local.py and tiers/compressed.py (docs/kv_tiers.md, Manager)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ffs.kv.results import Results


class BlockStore(Protocol):
    """Calls block, come from several threads at once, and tell what became of each block (results.py). A get
    is verified: a HIT is the block that was put under that key, whole, or the store is broken."""

    block_bytes: int

    def put_many(self, keys: Sequence[bytes], values: Any, *, timeout_s: float | None = None) -> Results: ...

    def get_many(self, keys: Sequence[bytes], into: Any, *, timeout_s: float | None = None) -> Results: ...

    def exists_many(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results: ...

    def delete(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Results: ...
