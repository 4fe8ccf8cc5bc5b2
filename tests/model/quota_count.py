"""What quotas should have counted, from all keys of a store and nothing else: the invariants of
docs/metadata.md, Quotas."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from ffs.proto.quota import READY
from ffs.proto.records import DIRECTORY, FILE, Inode, QuotaRecord
from metadata.fs.schema import decode_dirent, decode_inode, decode_quota

Pairs = list[tuple[bytes, bytes]]


class Counted(NamedTuple):
    bytes: int
    entries: int


class Store:
    """A store's content, taken apart by hand."""

    def __init__(self, pairs: Pairs) -> None:
        self.inodes: dict[int, Inode] = {}
        self.numbers: dict[tuple[int, bytes], int] = {}
        self.children: dict[int, list[int]] = defaultdict(list)
        self.writers: Counter[int] = Counter()
        self.garbage: set[int] = set()
        self.quotas: dict[int, QuotaRecord] = {}
        self.used: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        self.work: dict[int, set[int]] = defaultdict(set)
        for key, value in pairs:
            if key[:1] == b"i" and len(key) == 11:
                self.inodes[int.from_bytes(key[3:11], "big")] = decode_inode(value)
            elif key[:1] == b"i":
                number = int.from_bytes(value, "little", signed=True)
                self.numbers[int.from_bytes(key[3:11], "big"), key[11:]] = number
            elif key[:1] == b"d":
                self.children[int.from_bytes(key[1:9], "big")].append(decode_dirent(value).ino)
            elif key[:1] == b"w":
                self.writers[int.from_bytes(key[1:9], "big")] += 1
            elif key[:1] == b"g":
                self.garbage.add(int.from_bytes(key[1:9], "big"))
            elif key[:1] == b"Q" and key[1:2] in b"lbes":
                quota = int.from_bytes(key[2:10], "big")
                if key[1:2] == b"l":
                    self.quotas[quota] = decode_quota(value)
                elif key[1:2] == b"s":
                    self.work[quota].add(int.from_bytes(key[10:18], "big"))
                else:
                    self.used[quota][key[1:2] == b"e"] += int.from_bytes(value, "little", signed=True)

    def charged(self, ino: int) -> int:
        return self.numbers.get((ino, b"v"), 0)

    def length(self, ino: int) -> int:
        return self.numbers.get((ino, b"l"), 0)

    def labelled(self, quota: int) -> set[int]:
        own = self.quotas[quota].ino
        return {ino for ino, inode in self.inodes.items() if inode.quota == quota and ino != own}

    def usage(self, quota: int) -> Counted:
        return Counted(*self.used.get(quota, (0, 0)))

    def below(self, ino: int) -> set[int]:
        found: set[int] = set()
        stack = [ino]
        while stack:
            inside = set(self.children[stack.pop()]) - found
            found |= inside
            stack += inside
        return found


def check(pairs: Pairs) -> Store:
    """What is so after every transaction."""
    store = Store(pairs)
    for gone in (set(store.used) | set(store.work)) - set(store.quotas):
        raise AssertionError(f"quota {gone} has no record, but counters or work")
    for quota, record in store.quotas.items():
        labelled = store.labelled(quota)
        should = Counted(sum(store.charged(ino) for ino in labelled), len(labelled))
        assert store.usage(quota) == should, f"quota {quota}: {store.usage(quota)} counted, {should} charged"
        assert store.inodes[record.ino].quota == quota, f"quota {quota} isn't its directory's label"
        assert (record.state != READY) == bool(store.work[quota]), (record, store.work[quota])
        for ino in labelled:
            charged, length = store.charged(ino), store.length(ino)
            if store.writers[ino]:
                assert charged >= 0, f"{ino} is written: {charged} charged"
            elif store.inodes[ino].type == FILE:
                assert charged == length, f"{ino} isn't written: {charged} charged, {length} long"
                assert ino not in store.garbage, f"{ino} has no name and no writer, and is counted"
            else:
                assert charged == 0, ino
        inside = {other.ino for other in store.quotas.values()} & store.below(record.ino)
        assert not inside, f"quotas nest: {inside} in {record.ino}"
    return store


def check_settled(pairs: Pairs, *, links: bool = False) -> dict[int, Counted]:
    """When everything is counted, collected and settled: each quota counts what a walk through its directory
    finds, and nothing else. `links`: files may have had names on both sides of a border, and be counted where
    they lie no more. Usage by directory."""
    store = check(pairs)
    out = {}
    for quota, record in store.quotas.items():
        assert record.state == READY, record
        below, labelled = store.below(record.ino), store.labelled(quota)
        out[record.ino] = store.usage(quota)
        if links:
            below = {ino for ino in below if store.inodes[ino].type == DIRECTORY}
            labelled = {ino for ino in labelled if store.inodes[ino].type == DIRECTORY}
        assert below <= labelled, f"{below - labelled} lie in quota {quota} and aren't counted"
        assert labelled <= below, f"{labelled - below} don't lie in quota {quota} and are counted"
        if not links:
            files = [ino for ino in below if store.inodes[ino].type == FILE]
            assert out[record.ino] == (sum(map(store.length, files)), len(below))
    return out
