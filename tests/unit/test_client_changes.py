"""Whom a client tells of its truncations: what it has read ahead of such a file is old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ffs import errors
from ffs.client.address import ClusterAddress
from ffs.client.core import ClientOptions, Core
from ffs.client.handle import OpenFile
from ffs.client.namespace import Namespace
from ffs.proto import meta
from ffs.proto.records import FILE


@dataclass
class Reader:
    """What has read ahead of one file."""

    ino: int
    stale: bool = False

    def changed(self) -> None:
        self.stale = True


@dataclass
class Session:
    answer: Any
    over: bool = False

    def call(self, request: meta.Request, reply: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Names(Namespace):
    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def core(self) -> Core:
        return self._core


def _attributes() -> meta.Attributes:
    zero: Any = dict.fromkeys(("uid", "gid", "length", "mtime_ns", "ctime_ns", "btime_ns"), 0)
    return meta.Attributes(v=1, ino=5, type=FILE, mode=0o644, nlink=1, epoch=6, **zero)


LOST = errors.OutcomeUnknown("no answer")


def made(answer: Any) -> tuple[Core, Reader, Reader]:
    core = Core(ClusterAddress((("127.0.0.1", 1),)), ClientOptions())
    core._session = Session(answer)  # type: ignore[assignment]
    mine, other = Reader(5), Reader(6)
    core.readers = {1: mine, 2: other}  # type: ignore[dict-item]
    return core, mine, other


def test_a_truncation_by_path() -> None:
    core, mine, other = made(meta.TruncateReply(length=3, epoch=6, ino=5))
    Names(core).truncate("/f", 3)
    assert (mine.stale, other.stale) == (True, False)


def test_a_truncation_by_path_that_may_have_been_made() -> None:
    core, mine, other = made(LOST)
    with pytest.raises(errors.OutcomeUnknown):
        Names(core).truncate("/f", 3)
    assert (mine.stale, other.stale) == (True, True)  # nobody knows of which file


@pytest.mark.parametrize("flags", [0, meta.OPEN_TRUNC])
@pytest.mark.parametrize("lost", [False, True])
def test_an_open_that_truncates(flags: int, lost: bool) -> None:
    flags |= meta.OPEN_WRITE | meta.OPEN_CREATE
    core, mine, other = made(LOST if lost else meta.Opened(ino=5, attributes=_attributes(), handle=9))
    file = OpenFile(lambda: core, "/f", flags)
    try:
        file.open(meta.Open(path=b"/f", flags=flags))
    except errors.OutcomeUnknown:
        assert lost
    cut = bool(flags & meta.OPEN_TRUNC)
    assert (mine.stale, other.stale) == (cut, cut and lost)
