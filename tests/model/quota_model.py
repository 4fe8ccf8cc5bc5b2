"""Quotas of directories over the model of names: what docs/guides/quota.md says, by walking the tree.

It knows nothing of reservations. While a counted file is open for writing, the service may hold more than
there is, and refuse what would still fit: then the model takes its word (`refused`), if there is a reason for
it in the usage that the service told before (`told`).
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from posix_model import ModelFs, Node, User, fail


@dataclass(eq=False)
class Quota:
    directory: Node
    bytes: int = 0
    entries: int = 0


class QuotaModelFs(ModelFs):
    def __init__(self) -> None:
        super().__init__()
        self.quotas: list[Quota] = []
        self.labels: dict[Node, Quota] = {}
        self.refused = False
        self.told: dict[Quota, int] = {}

    # --- whose ---

    def label(self, node: Node) -> Quota | None:
        quota = self.labels.get(node)
        return quota if quota in self.quotas else None

    def own(self, node: Node) -> Quota | None:
        return next((quota for quota in self.quotas if quota.directory is node), None)

    def domain(self, directory: Node) -> Quota | None:
        """The quota of the directory, or of one above it."""
        return next((own for node in self.chain(directory) if (own := self.own(node))), None)

    def counted(self, quota: Quota) -> list[Node]:
        return [node for node in self.alive() if self.label(node) is quota]

    def alive(self) -> set[Node]:
        """What has a name, or is open."""
        return set(self.below(self.root)) | set(self.open.values())

    def below(self, top: Node) -> list[Node]:
        """Each object once."""
        found: dict[Node, None] = {}
        stack = list(top.entries.values())
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = None
                stack += node.entries.values()
        return list(found)

    def used(self, quota: Quota) -> tuple[int, int]:
        nodes = self.counted(quota)
        return sum(node.length for node in nodes), len(nodes)

    def busy(self, quota: Quota) -> bool:
        return any(self.label(node) is quota for node in self.open.values())

    # --- the calls ---

    def set_quota(self, user: User, path: bytes, limit_bytes: int | None, limit_entries: int | None) -> None:
        """None: as it is."""
        node = self.administered(user, path)
        quota = self.own(node)
        if quota is None:
            above = self.domain(node)
            if above is not None or any(node in self.chain(other.directory) for other in self.quotas):
                raise fail(errno.EINVAL)
            quota = Quota(node)
            for child in self.below(node):
                if self.label(child) is None:
                    self.labels[child] = quota
            self.quotas.append(quota)
        quota.bytes = quota.bytes if limit_bytes is None else limit_bytes
        quota.entries = quota.entries if limit_entries is None else limit_entries

    def clear_quota(self, user: User, path: bytes) -> None:
        quota = self.own(self.administered(user, path))
        if quota is None:
            raise fail(errno.EINVAL)
        self.quotas.remove(quota)

    def administered(self, user: User, path: bytes) -> Node:
        if user.uid not in (0, self.root.uid):
            raise fail(errno.EPERM)
        node = self.get(user, path)
        if node.kind != "dir":
            raise fail(errno.ENOTDIR)
        return node

    # --- what the calls on names do to quotas ---

    def admit(self, directory: Node, node: Node) -> None:
        quota = self.domain(directory)
        if quota is None:
            return
        if quota.entries and self.used(quota)[1] >= quota.entries:
            raise fail(errno.EDQUOT)
        self.labels[node] = quota

    def add(self, user: User, where: Node, name: bytes, node: Node) -> None:
        if node.names == 0:
            self.admit(where, node)
        elif self.label(node) is not self.domain(where):
            raise fail(errno.EXDEV)
        super().add(user, where, name, node)

    def open_tmpfile(self, user: User, handle: int, path: bytes, mode: int) -> None:
        super().open_tmpfile(user, handle, path, mode)
        node = self.open.pop(handle)
        self.admit(self.get(user, path), node)
        self.open[handle] = node

    def resize(self, node: Node, length: int) -> None:
        quota = self.label(node)
        if quota is not None and quota.bytes and length > node.length:
            growth = length - node.length
            over = self.used(quota)[0] + growth > quota.bytes
            if self.busy(quota):
                over = self.refused
                assert not over or self.told[quota] + growth > quota.bytes, "refused without a reason"
            if over:
                raise fail(errno.EDQUOT)
        super().resize(node, length)

    def cross(self, old_dir: Node, new_dir: Node, old: Node, new: Node | None) -> None:
        quota = self.domain(new_dir)
        if quota is not self.domain(old_dir):
            raise fail(errno.EXDEV)
        for node in (old, new):  # a file that an earlier quota counted by a name elsewhere
            if quota is not None and node is not None and self.label(node) is None:
                self.labels[node] = quota

    def drop(self, where: Node, name: bytes) -> None:
        node = where.entries[name]
        super().drop(where, name)
        quota = self.own(node)
        if quota is not None:
            self.quotas.remove(quota)
