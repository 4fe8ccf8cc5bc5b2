"""Quotas under the machine of namespace_machine.py: after each call the service's usage is what a walk over
the model finds, and it refuses what the model refuses. What was there before is counted at once, or page by
page between the other calls. The store conflicts, loses outcomes and runs bodies twice."""

from __future__ import annotations

import random
from typing import Any

from ffs_fs import READING, FfsFs
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from namespace_machine import handles, lengths, names, outcome, rare_path, steps
from posix_model import EXCHANGE, NOREPLACE, User
from quota_model import Quota, QuotaModelFs
from test_namespace_machine import FfsMachine, NoWait

from ffs.client.room import Room, lacks
from ffs.proto import meta
from ffs.proto.quota import COUNTING, KEEP, GetQuota, ListQuotas, QuotaView, Reserve, SetQuota
from metadata.fs import quota_sweep
from metadata.fs.quota_sweep import QuotaSweeper
from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.memory import MemoryStore

READING |= {GetQuota, ListQuotas}

ROOT = User(0, 0)
administrators = st.sampled_from([ROOT, ROOT, ROOT, User(1000, 1000)])
numbers = st.integers(0, 20)
limits = st.sampled_from([None, 0, 1, 2, 5, 10])
limits_bytes = st.sampled_from([None, 0, 1, 100, 5000, 20_000, 100_000])


class QuotaFfs(FfsFs):
    """Writers ask for room as the client does (ffs/client/room.py)."""

    def set_quota(self, user: User, path: bytes, limit_bytes: int | None, limit_entries: int | None) -> None:
        request = SetQuota(
            path=path,
            limit_bytes=KEEP if limit_bytes is None else limit_bytes,
            limit_entries=KEEP if limit_entries is None else limit_entries,
        )
        self.call(request, user)

    def clear_quota(self, user: User, path: bytes) -> None:
        self.call(SetQuota(path=path, clear=True), user)

    def write(self, user: User, path: bytes, offset: int, length: int) -> int:
        opened = self.call(meta.Open(path=path, flags=meta.OPEN_WRITE), user)
        written = False
        try:
            if length:
                epoch, end = opened.attributes.epoch, offset + length
                if lacks(Room(epoch, opened.reserved), epoch, end):
                    self.call(Reserve(ino=opened.ino, handle=opened.handle, epoch=epoch, end=end))
                self.put(opened, offset, length)
                written = True
        finally:
            reply = self.close_write(opened, offset + length, written)
        return reply.length

    def handle_write(self, handle: int, offset: int, length: int) -> None:
        opened = self.handles[handle]
        renewed = self.call(meta.CapabilityRenew(ino=opened.ino, handle=opened.handle, rights=2))
        self.call(Reserve(ino=opened.ino, handle=opened.handle, epoch=renewed.epoch, end=offset + length))
        super().handle_write(handle, offset, length)

    def views(self) -> dict[int, QuotaView]:
        """By the directory's inode."""
        return {view.ino: view for view in self.call(ListQuotas()).quotas}

    def sweep(self, steps: int) -> None:
        async def work() -> None:
            sweeper = QuotaSweeper(self.store)
            for _ in range(steps):
                if not await sweeper.step():
                    return

        self.runner.run(work())


class QuotaMachine(FfsMachine):
    model: QuotaModelFs
    real: QuotaFfs
    # Of no interest to quotas, or with a rule below that finds what is there more often.
    stat = listdir = readlink = read = chown = chmod = None  # type: ignore[assignment]
    setxattr = getxattr = removexattr = listxattr = None  # type: ignore[assignment]
    create = mkdir = symlink = write = truncate = unlink = None  # type: ignore[assignment]

    @initialize(
        seed=st.integers(0, 2**32 - 1), faulty=st.booleans(), limit_bytes=limits_bytes, limit_entries=limits
    )
    def start(  # type: ignore[override]
        self, seed: int, faulty: bool, limit_bytes: int | None, limit_entries: int | None
    ) -> None:
        rates = Rates(conflict=0.05, unknown_applied=0.1, unknown_lost=0.05, too_old=0.02, twice=0.2)
        store = FaultyStore(MemoryStore(), rates if faulty else Rates(), random.Random(seed))
        store._backoff_rng = NoWait()
        self.model = QuotaModelFs()
        self.real = QuotaFfs(store, seed)
        self.places: dict[Quota, int] = {}  # where each quota of the model is set
        for path in (b"/a", b"/b", b"/a/c"):
            self.both("mkdir", ROOT, path, 0o777)
            self.both("create", ROOT, path + b"/d", 0o666, False, False)
            self.both("write", ROOT, path + b"/d", 0, 100)
        self.set_quota(ROOT, b"/a", limit_bytes, limit_entries)

    def both(self, name: str, *args: Any) -> None:
        """The service first: where it holds room for open files, its refusal counts if it has a reason."""
        before = self.real.views()
        actual = outcome(self.real, name, args)
        self.model.refused = actual == "EDQUOT"
        self.model.told = {
            quota: before[ino].used_bytes for quota, ino in self.places.items() if ino in before
        }
        lengths_before = {quota: self.model.used(quota)[0] for quota in self.model.quotas}
        expected = outcome(self.model, name, args)
        assert actual == expected, f"{name}{args}: {actual}, the model says {expected}"
        tree, want = self.real.dump(), self.model.dump()
        assert tree == want, f"after {name}{args}: {set(map(str, tree)) ^ set(map(str, want))}"
        for quota, ino in self.places.items():
            view = before.get(ino)
            if quota not in lengths_before or view is None or not view.limit_bytes:
                continue
            assert view.used_bytes >= lengths_before[quota]
            after = self.real.views().get(ino)
            if after is not None and name != "set_quota" and name != "rename":  # these adopt what is there
                assert after.used_bytes <= max(view.limit_bytes, view.used_bytes), f"after {name}{args}"

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.sweep(1000)
            super().teardown()

    # --- things that are there: paths drawn at random seldom find one ---

    def paths(self, *kinds: str) -> list[bytes]:
        """Of all names of these kinds, the root's too."""
        found = []
        stack = [(b"", self.model.root)]
        while stack:
            path, node = stack.pop()
            if node.kind in kinds:
                found.append(path or b"/")
            stack += [(path + b"/" + name, child) for name, child in sorted(node.entries.items())]
        return found

    def pick(self, number: int, *kinds: str) -> bytes | None:
        paths = self.paths(*kinds)
        return paths[number % len(paths)] if paths else None

    @rule(number=numbers, name=names, what=st.sampled_from(["create", "mkdir", "symlink"]))
    def make_something(self, number: int, name: bytes, what: str) -> None:
        path = (self.pick(number, "dir") or b"").rstrip(b"/") + b"/" + name
        args = {"create": (0o666, False, False), "mkdir": (0o777,), "symlink": (b"a",)}[what]
        self.both(what, ROOT, path, *args)

    @rule(number=numbers, what=st.sampled_from(["write", "write", "truncate"]), length=lengths)
    def change_a_file(self, number: int, what: str, length: int) -> None:
        path = self.pick(number, "file")
        if path is not None:
            self.both(what, ROOT, path, *((100, length) if what == "write" else (length,)))

    @rule(number=numbers, to=numbers, name=names, flags=st.sampled_from([0, 0, NOREPLACE, EXCHANGE]))
    def move_something(self, number: int, to: int, name: bytes, flags: int) -> None:
        source = self.pick(number, "file", "link", "dir")
        target = (self.pick(to, "dir") or b"").rstrip(b"/") + b"/" + name
        if source is not None:
            self.both("rename", ROOT, source, target, flags)

    @rule(number=numbers, to=numbers, name=names)
    def link_something(self, number: int, to: int, name: bytes) -> None:
        source = self.pick(number, "file", "link")
        if source is not None:
            self.link(ROOT, source, (self.pick(to, "dir") or b"").rstrip(b"/") + b"/" + name)

    @rule(number=numbers, handle=handles, tmpfile=st.booleans())
    def open_something(self, number: int, handle: int, tmpfile: bool) -> None:
        path = self.pick(number, "dir" if tmpfile else "file")
        if path is not None:
            self.open_handle(ROOT, handle, path, 0o666, tmpfile)

    @rule(number=numbers)
    def remove_something(self, number: int) -> None:
        path = self.pick(number, "file", "link")
        if path is not None:
            self.both("unlink", ROOT, path)

    # --- quotas ---

    @rule(number=numbers, limit_bytes=limits_bytes, limit_entries=limits)
    def set_one(self, number: int, limit_bytes: int | None, limit_entries: int | None) -> None:
        path = self.pick(number, "dir")
        if path is not None:
            self.set_quota(ROOT, path, limit_bytes, limit_entries)

    @precondition(lambda self: not self.model.open)
    @rule(number=numbers)
    def set_one_and_count_later(self, number: int) -> None:
        self.set_quota_and_count_later(self.pick(number, "dir") or b"/")

    @property
    def counting(self) -> bool:
        return any(view.state == COUNTING for view in self.real.views().values())

    @rule(user=administrators, path=rare_path, limit_bytes=limits_bytes, limit_entries=limits)
    def set_quota(self, user: User, path: bytes, limit_bytes: int | None, limit_entries: int | None) -> None:
        self.both("set_quota", user, path, limit_bytes, limit_entries)
        self.real.sweep(1000)
        self.note()

    @precondition(lambda self: not self.model.open)
    @rule(number=numbers, source=numbers, to=numbers, name=names)
    def move_what_isnt_counted_yet(self, number: int, source: int, to: int, name: bytes) -> None:
        """A directory's entries are counted, what is in those isn't."""
        path = self.pick(number, "dir") or b"/"
        quota = self.model.domain(self.model.get(ROOT, path))
        if quota is not None:
            path = self.path_of(quota.directory)
            self.both("clear_quota", ROOT, path)
        self.set_quota_and_count_later(path)
        self.real.sweep(1)
        self.move_something(source, to, name, 0)

    def set_quota_and_count_later(self, path: bytes) -> None:
        """Without limits, since those of half a count say little; and only where no file has one name inside
        and another outside, which counts where the sweep finds it."""
        if not self.names_are_together(path):
            return
        self.both("set_quota", ROOT, path, 0, 0)
        self.note()

    def names_are_together(self, path: bytes) -> bool:
        try:
            top = self.model.get(ROOT, path)
        except OSError:
            return True
        inside = [node for node in (top, *self.model.below(top)) if node.kind == "dir"]
        return all(
            node.kind == "dir" or node.names == sum(list(d.entries.values()).count(node) for d in inside)
            for node in self.model.below(top)
        )

    @rule(user=administrators, path=rare_path)
    def clear_quota(self, user: User, path: bytes) -> None:
        self.both("clear_quota", user, path)

    @rule(pick=st.integers(0, 5))
    def clear_one(self, pick: int) -> None:
        if self.model.quotas:
            node = self.model.quotas[pick % len(self.model.quotas)].directory
            self.both("clear_quota", ROOT, self.path_of(node))

    @precondition(lambda self: self.counting)
    @rule(steps=st.integers(1, 3))
    def count(self, steps: int) -> None:
        self.real.sweep(steps)

    def path_of(self, node: Any) -> bytes:
        way = []
        while node is not self.model.root:
            way.append(next(name for name, child in node.parent.entries.items() if child is node))
            node = node.parent
        return b"/" + b"/".join(reversed(way))

    def note(self) -> None:
        for quota in self.model.quotas:
            if quota not in self.places:
                self.places[quota] = self.real.call(
                    meta.Stat(path=self.path_of(quota.directory))
                ).attributes.ino

    @invariant()
    def usage_is_what_a_walk_finds(self) -> None:
        if not hasattr(self, "real"):
            return
        views = self.real.views()
        assert sorted(views) == sorted(self.places[quota] for quota in self.model.quotas)
        for quota in self.model.quotas:
            view = views[self.places[quota]]
            assert (view.limit_bytes, view.limit_entries) == (quota.bytes, quota.entries)
            if view.state == COUNTING:
                continue
            used = self.model.used(quota)
            assert view.used_entries == used[1]
            if self.model.busy(quota):
                assert view.used_bytes >= used[0]
            else:
                assert view.used_bytes == used[0]

    # --- what can't be told while something is being counted ---

    def link(self, user: User, source: bytes, to: bytes) -> None:
        if not self.counting:
            self.both("link", user, source, to)

    def open_handle(self, user: User, handle: int, path: bytes, mode: int, tmpfile: bool) -> None:
        if handle not in self.model.open and not self.counting:
            self.both("open_tmpfile" if tmpfile else "open_handle", user, handle, path, mode)


QuotaMachine.TestCase.settings = steps(40)
quota_sweep.PAGE = 2  # type: ignore[misc]  # so that a sweep has many pages


class TestQuota(QuotaMachine.TestCase):
    pass
