"""The calls on quotas of directories. docs/client.md, Quotas; docs/guides/quota.md.

All block; all are thread-safe; all raise OSErrors of ffs.errors with the path in them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsIndex

from ffs.client.lookups import Lookups
from ffs.client.paths import PathLike, check_path, decode_text, wire_path
from ffs.errors import InvalidArgument
from ffs.proto.quota import (
    COUNTING,
    KEEP,
    MAX_LIMIT,
    GetQuota,
    ListQuotas,
    QuotaList,
    QuotaReply,
    QuotaView,
    SetQuota,
)


@dataclass(frozen=True, slots=True)
class Quota:
    """A directory's quota, as it was when it was asked for.

    Bytes are lengths of files: holes count, replicas don't; while a file is open for writing, what is
    reserved for it counts. Entries are files, directories, symbolic links and KV spaces below the directory.
    Limits of 0: none, it is only counted. `counting`: what was there before isn't counted whole yet, so the
    usage is less than what there is.
    """

    id: int
    inode: int
    path: str  # "" if it can't be told
    limit_bytes: int
    limit_entries: int
    used_bytes: int
    used_entries: int
    counting: bool

    @property
    def free_bytes(self) -> int | None:
        """What may be written still; None: without limit."""
        return max(0, self.limit_bytes - self.used_bytes) if self.limit_bytes else None

    @property
    def free_entries(self) -> int | None:
        """How many may be made still; None: without limit."""
        return max(0, self.limit_entries - self.used_entries) if self.limit_entries else None


class QuotaCalls(Lookups):
    """Mixed into Client."""

    def set_quota(self, path: PathLike, bytes: int | None = None, entries: int | None = None) -> Quota:
        """Give the directory at `path` a quota, or change its limits; returns it as it is then.

        bytes, entries: at most so many below it, whole numbers; 0: without limit, only counted; None: as it
        is (of a new one: without limit). What is in it already is counted in the background. A limit below
        what is used refuses what is new, nothing else. For root and the owner of `/` (else NotPermitted).
        InvalidArgument: neither is given; quotas don't nest. NotADirectory.
        """
        if bytes is None and entries is None:
            raise InvalidArgument(
                "give bytes, entries, or both; 0: no limit, only count (quota() tells what there is)",
                check_path(path),
            )
        request = SetQuota(
            path=wire_path(path),
            limit_bytes=_limit("bytes", bytes, path),
            limit_entries=_limit("entries", entries, path),
        )
        view = self.core.change(request, QuotaReply).quota
        if view is None:
            raise InvalidArgument("the quota was taken away meanwhile", check_path(path))
        return _quota(view)

    def clear_quota(self, path: PathLike) -> None:
        """Take away the quota of the directory at `path`. InvalidArgument if it has none; NotPermitted."""
        self.core.change(SetQuota(path=wire_path(path), clear=True), QuotaReply)

    def quota(self, path: PathLike) -> Quota | None:
        """The quota that counts what is at `path`: of it, or of a directory above it. None: there is none."""
        view = self.core.ask(GetQuota(path=wire_path(path)), QuotaReply).quota
        return None if view is None else _quota(view)

    def quotas(self) -> list[Quota]:
        """All quotas of the cluster, in the order of their paths. For root and the owner of `/`."""
        found: list[Quota] = []
        after = 0
        while True:
            page = self.core.ask(ListQuotas(after=after), QuotaList)
            found += [_quota(view) for view in page.quotas]
            if not page.more or not page.quotas:
                return sorted(found, key=lambda quota: (quota.path, quota.id))
            after = page.quotas[-1].quota


def _limit(name: str, value: object, path: PathLike) -> int:
    if value is None:
        return KEEP
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{name} {value!r}: give a whole number ({name}=1 << 30, say), not a {type(value).__name__};"
            " only ffs quota set reads 1G"
        )
    value = operator.index(value)
    if not 0 <= value <= MAX_LIMIT:
        raise InvalidArgument(f"{name} {value}: give 0 (no limit) to {MAX_LIMIT}", check_path(path))
    return value


def _quota(view: QuotaView) -> Quota:
    return Quota(
        view.quota,
        view.ino,
        decode_text(view.path),
        view.limit_bytes,
        view.limit_entries,
        view.used_bytes,
        view.used_entries,
        view.state == COUNTING,
    )
