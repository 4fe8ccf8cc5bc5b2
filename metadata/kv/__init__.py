"""The metadata store: contract.py says what it gives, `open_store` opens an engine by its address."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from ffs.errors import InvalidArgument
from metadata.kv.contract import Store

__all__ = ["Store", "open_store"]


def open_store(url: str) -> Store:
    """Opens `lmdb://DIRECTORY`, `fdb://CLUSTER-FILE?prefix=TEXT` or `memory://`.

    InvalidArgument for another form. An engine's module is imported only when it is asked for."""
    parts = urlsplit(url)
    path = unquote(parts.netloc + parts.path)
    query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    if parts.scheme == "lmdb" and path and not query:
        from metadata.kv.lmdb_store import LmdbStore

        return LmdbStore(path)
    if parts.scheme == "fdb" and query.keys() <= {"prefix"}:
        from metadata.kv.fdb_store import FdbStore

        return FdbStore(path or None, prefix=query.get("prefix", [""])[0].encode())
    if parts.scheme == "memory" and not path and not query:
        from metadata.kv.memory import MemoryStore

        return MemoryStore()
    raise InvalidArgument(
        f"metadata store {url!r}: give lmdb://DIRECTORY or fdb://CLUSTER-FILE?prefix=TEXT (tests: memory://)"
    )
