"""The namespace against a plain model, and the same machine on a local directory so that the kernel checks
the model (namespace_machine.py)."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ffs_fs import FfsFs
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from local_fs import AS_ROOT, LocalFs
from namespace_machine import ME, Machine, steps
from posix_model import ModelFs

from metadata.kv.faults import FaultyStore, Rates
from metadata.kv.memory import MemoryStore


class FfsMachine(Machine):
    @initialize(seed=st.integers(0, 2**32 - 1), faulty=st.booleans())
    def start(self, seed: int, faulty: bool) -> None:
        rates = Rates(conflict=0.05, unknown_applied=0.1, unknown_lost=0.05, too_old=0.02, twice=0.2)
        store = FaultyStore(MemoryStore(), rates if faulty else Rates(), random.Random(seed))
        store._backoff_rng = NoWait()
        self.model = ModelFs()
        self.real = FfsFs(store, seed)

    @rule()
    def collect(self) -> None:
        self.real.collect()

    def teardown(self) -> None:
        if not hasattr(self, "real"):
            return
        try:
            self.check_leaks()
        finally:
            self.real.close()

    def check_leaks(self) -> None:
        """When all files are closed and all garbage is collected, the store holds the tree and no more."""
        for handle in list(self.model.open):
            self.both("handle_close", handle)
        self.real.collect()
        reachable = {attrs for attrs in self.inos(1)}
        keys = self.real.all_keys()
        inodes = {int.from_bytes(k[3:11], "big") for k, _ in keys if k[:1] == b"i"}
        assert inodes == reachable
        assert not [k for k, _ in keys if k[:1] in b"gtwWe"]
        assert {int.from_bytes(k[1:9], "big") for k, _ in keys if k[:1] == b"u"} <= reachable
        assert self.real.chains.spaces() <= reachable

    def inos(self, ino: int) -> Any:
        yield ino
        prefix = b"d" + ino.to_bytes(8, "big")
        for key, value in self.real.all_keys():
            if key.startswith(prefix):
                import msgspec

                child, kind = msgspec.msgpack.decode(value)[1:3]
                yield from self.inos(child) if kind == 1 else [child]


class NoWait(random.Random):
    """Backoff of nothing: the machine makes no progress by waiting."""

    def random(self) -> float:
        return 0.0


class LocalMachine(Machine):
    local = True

    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.path.chmod(0o755)
        (self.path / "root").mkdir()
        strict = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "0"
        self.model = ModelFs(strict_links=strict)
        if not AS_ROOT:
            self.model.root.uid, self.model.root.gid = ME.uid, ME.gid
        self.real = LocalFs(self.path / "root")

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.close()
            if not AS_ROOT:
                for directory, _, _ in os.walk(self.path):
                    os.chmod(directory, 0o700)
            shutil.rmtree(self.path)


FfsMachine.TestCase.settings = steps(60)
LocalMachine.TestCase.settings = steps(40)


class TestFfs(FfsMachine.TestCase):
    pass


def counts_links() -> bool:
    """Does the temporary directory's file system count a directory's links as POSIX had it?"""
    with tempfile.TemporaryDirectory() as path:
        os.mkdir(f"{path}/x")
        return os.stat(path).st_nlink == 3


@pytest.mark.skipif(not counts_links(), reason="the local file system doesn't count links of directories")
class TestLocal(LocalMachine.TestCase):
    pass
