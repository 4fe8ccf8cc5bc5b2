"""The check of a cluster: pages of it asked for, put together, looked at a second time, repaired.

`check` does no I/O: it is a generator that yields requests and is sent their replies, so that tests drive it
without servers; `run_check` drives it for a Client. Only administrators may ask. docs/guides/fsck.md.

A page is judged by the metadata service, from one snapshot. What no single page shows is how many names an
inode has: the ids of all entries are compared here with those of all inodes (8 and 26 bytes each, in memory),
and what doesn't agree is counted once more, with the inode's state before and after being the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ffs.client.client import Client
from ffs.client.paths import PathLike, check_path
from ffs.errors import FfsError, InvalidArgument, NotADirectory
from ffs.proto import checks, meta
from ffs.proto.checks import FsckFinding, FsckPage, FsckRepaired
from ffs.proto.common import Message
from ffs.proto.records import DIRECTORY

STATE: Final = np.dtype(list(checks.FSCK_STATE))
USAGE: Final = np.dtype(list(checks.FSCK_USAGE))
SUM: Final = np.dtype(list(checks.FSCK_SUM))
_TRIES: Final = 3  # of counting a directory, or an inode's names, that changes meanwhile
_ORPHAN: Final = "orphan-inode"
_LINKS: Final = "wrong-link-count"
_USAGE: Final = "wrong-quota-usage"

# The order of repairs: what changes entries goes before what is counted from them; and to count a directory
# anew makes what is counted wrong in it right.
_FIRST: Final = (
    _USAGE,
    "entry-without-directory",
    "dangling-entry",
    "wrong-entry-type",
    "wrong-parent",
    _ORPHAN,
)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of a finding that was to be repaired. `text`: what was done, or why it wasn't."""

    finding: FsckFinding
    mended: bool
    text: str


@dataclass(slots=True)
class Report:
    """What a check has found. `clean`: nothing is wrong, and everything could be looked at."""

    findings: list[FsckFinding] = field(default_factory=list)
    repairs: list[Repaired] = field(default_factory=list)
    unknown: dict[int, str] = field(default_factory=dict)  # chains that didn't answer: why
    unsettled: list[int] = field(default_factory=list)  # inodes that changed whenever they were looked at
    looked: Counter[str] = field(default_factory=Counter)  # entries, inodes, chunks, ...

    @property
    def left(self) -> list[FsckFinding]:
        """Findings that weren't repaired."""
        mended = {id(repaired.finding) for repaired in self.repairs if repaired.mended}
        return [finding for finding in self.findings if id(finding) not in mended]

    @property
    def clean(self) -> bool:
        return not self.left and not self.unknown


Steps = Generator[meta.Request, Message | FfsError, Report]
Page = Generator[meta.Request, Message | FfsError, FsckPage]
Progress = Callable[[str, int], None]


def check(
    chains: Iterable[tuple[int, int]],
    *,
    tree: int = 0,
    repair: bool = False,
    progress: Progress = lambda what, count: None,
) -> Steps:
    """Steps of a check. `chains`: (chain, table) of those to ask for chunks. `tree`: only the entries and
    counters of this directory and those below it. `progress(what, records)` is called after each page."""
    report = Report()
    first = yield from (_tree(report, tree, progress) if tree else _everything(report, chains, progress))
    for start in range(0, len(first), checks.MAX_FSCK_FINDINGS):
        some = tuple(first[start : start + checks.MAX_FSCK_FINDINGS])
        page = yield from _page(checks.FsckScan(what=checks.SCAN_AGAIN, findings=some))
        report.findings += page.findings
    if repair:
        ranks = {kind: rank for rank, kind in enumerate(_FIRST)}
        for finding in sorted(report.findings, key=lambda each: ranks.get(each.kind, len(ranks))):
            if finding.repair:
                report.repairs.append((yield from _repair(finding)))
    return report


def _repair(finding: FsckFinding) -> Generator[meta.Request, Message | FfsError, Repaired]:
    """One that doesn't hold any more is mended: an earlier repair may have done it."""
    reply = yield checks.FsckRepair(finding=finding)
    if isinstance(reply, FfsError):
        return Repaired(finding, False, reply.message or type(reply).__name__)
    assert isinstance(reply, FsckRepaired), reply
    return Repaired(finding, True, reply.text)


def _page(request: checks.FsckScan) -> Page:
    reply = yield request
    if isinstance(reply, FfsError):
        raise reply
    assert isinstance(reply, FsckPage), reply
    return reply


def _pages(
    report: Report, what: str, progress: Progress, request: checks.FsckScan
) -> Generator[meta.Request, Message | FfsError, list[FsckPage]]:
    """All pages of a scan."""
    pages = []
    while True:
        page = yield from _page(request)
        report.looked[what] += page.looked
        progress(what, report.looked[what])
        pages.append(page)
        if not page.next:
            return pages
        request = checks.FsckScan(
            what=request.what,
            ino=request.ino,
            only=request.only,
            chain=request.chain,
            table=request.table,
            after=page.next,
        )


_Found = Generator[meta.Request, Message | FfsError, list[FsckFinding]]


def _everything(report: Report, chains: Iterable[tuple[int, int]], progress: Progress) -> _Found:
    entries = yield from _pages(report, "entries", progress, checks.FsckScan(what=checks.SCAN_ENTRIES))
    inodes = yield from _pages(report, "inodes", progress, checks.FsckScan(what=checks.SCAN_INODES))
    found = [finding for page in (*entries, *inodes) for finding in page.findings]
    again = [ino for page in entries for ino in page.again]
    names = np.concatenate([np.frombuffer(page.rows, "<u8") for page in entries])
    states = np.concatenate([np.frombuffer(page.rows, STATE) for page in inodes])
    del entries, inodes
    suspects = disagreeing(names, states)
    del names, states
    found += yield from _count_names(report, suspects, progress)
    for ino in again:
        found += yield from _count_directory(report, ino, progress)
    for what, kind in (("sessions", checks.SCAN_SESSIONS), ("KV spaces", checks.SCAN_SPACES)):
        pages = yield from _pages(report, what, progress, checks.FsckScan(what=kind))
        found += [finding for page in pages for finding in page.findings]
    found += yield from _quotas(report, progress)
    for chain, table in chains:
        found += yield from _chain(report, chain, table, progress)
    return found


def _quotas(report: Report, progress: Progress) -> _Found:
    """What each quota counts, against the sum of what its inodes are charged; once more if it changed
    meanwhile, and if it changes always it is unsettled."""
    found: list[FsckFinding] = []
    changing: list[int] = []
    passes = Report()  # its counts are of records, of several passes: nothing that people know
    for turn in range(_TRIES):
        try:
            before = yield from _pages(
                passes, "records of quotas", progress, checks.FsckScan(what=checks.SCAN_QUOTAS)
            )
        except InvalidArgument:
            return []  # a service of the version before quotas
        report.looked["quotas"] = len(_table(before, USAGE))
        if not turn:
            found += {each.key: each for page in before for each in page.findings}.values()
        if not any(page.rows for page in before):
            return found
        pages = yield from _pages(
            passes, "charges of inodes", progress, checks.FsckScan(what=checks.SCAN_CHARGES)
        )
        after = yield from _pages(
            passes, "records of quotas", progress, checks.FsckScan(what=checks.SCAN_QUOTAS)
        )
        if not turn:
            found += [finding for page in pages for finding in page.findings]
        wrong, changing = judge_usage(_table(before, USAGE), _table(pages, SUM), _table(after, USAGE))
        found += [each for each in wrong if each.key not in {one.key for one in found}]
        if not changing:
            break
    report.unsettled += changing
    return found


def _table(pages: Iterable[FsckPage], row: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.frombuffer(page.rows, row) for page in pages])


def judge_usage(
    before: NDArray[Any], sums: NDArray[Any], after: NDArray[Any]
) -> tuple[list[FsckFinding], list[int]]:
    """(findings, directories whose quota changed while it was added up). Rows of FSCK_USAGE before and after,
    of FSCK_SUM in between. Pure."""
    then = {int(row["quota"]): row for row in before}
    found, changing = [], []
    for row in after:
        mine = sums[sums["quota"] == row["quota"]]
        told = int(row["bytes"]), int(row["entries"])
        there = int(mine["bytes"].sum()), int(mine["entries"].sum())
        if told == there:
            continue
        if then.get(int(row["quota"])) != row:
            changing.append(int(row["ino"]))
            continue
        found.append(
            FsckFinding(
                kind=_USAGE,
                ino=int(row["ino"]),
                key=b"Ql" + int(row["quota"]).to_bytes(8, "big"),
                found=told[0],
                expected=there[0],
                stamp=int(row["stamp"]).to_bytes(8, "little"),
                text=f"the quota of directory {row['ino']} counts {told[0]} bytes and {told[1]} entries, "
                f"where {there[0]} and {there[1]} are",
                repair="count the directory anew",
            )
        )
    return found, changing


def _chain(report: Report, chain: int, table: int, progress: Progress) -> _Found:
    scan = checks.FsckScan(what=checks.SCAN_CHUNKS, chain=chain, table=table)
    pages = yield from _pages(report, "chunks", progress, scan)
    why = next((page.unknown for page in pages if page.unknown), "")
    if why:
        report.unknown[chain] = why
    # A file's chunks may go over several pages: the last one reaches furthest.
    found = {(each.kind, each.ino): each for page in pages for each in page.findings}
    return list(found.values())


def _tree(report: Report, root: int, progress: Progress) -> _Found:
    found: list[FsckFinding] = []
    stack, seen = [root], {root}
    while stack:
        ino = stack.pop()
        inside: set[int] = set()
        found += yield from _count_directory(report, ino, progress, inside)
        stack += inside - seen
        seen |= inside
    return found


def _count_directory(report: Report, ino: int, progress: Progress, inside: set[int] | None = None) -> _Found:
    """Its entries and counters; once more if it changed meanwhile."""
    for _ in range(_TRIES):
        scan = checks.FsckScan(what=checks.SCAN_DIRECTORY, ino=ino)
        pages = yield from _pages(report, "entries", progress, scan)
        if inside is not None:
            inside |= {int(each) for page in pages for each in np.frombuffer(page.rows, "<u8")}
        if not any(page.again for page in pages):
            break
    else:
        report.unsettled.append(ino)
    return [finding for page in pages for finding in page.findings]


# --- names ----------------------------------------------------------------------------------


def disagreeing(names: NDArray[np.uint64], states: NDArray[Any]) -> NDArray[np.uint64]:
    """Inodes that have another number of names than they should. What a name leads to and isn't there is
    found elsewhere. Pure."""
    there, counts = np.unique(names, return_counts=True)
    order = np.argsort(states["ino"], kind="stable")
    inos, wanted = states["ino"][order], states["links"][order]
    at = np.minimum(np.searchsorted(there, inos), max(len(there) - 1, 0))
    have = np.zeros(len(inos), dtype=np.int64)
    if len(there):
        have = np.where(there[at] == inos, counts[at], 0)
    result: NDArray[np.uint64] = inos[have != wanted]
    return result


def _count_names(report: Report, suspects: NDArray[np.uint64], progress: Progress) -> _Found:
    """Counts anew, with the state of each inode before and after."""
    found: list[FsckFinding] = []
    for _ in range(_TRIES):
        unsettled = [np.zeros(0, dtype="<u8")]
        for start in range(0, len(suspects), checks.MAX_FSCK_ONLY):
            only = suspects[start : start + checks.MAX_FSCK_ONLY]
            state = checks.FsckScan(what=checks.SCAN_STATE, only=only.tobytes())
            before = yield from _page(state)
            scan = checks.FsckScan(what=checks.SCAN_NAMES, only=only.tobytes())
            pages = yield from _pages(report, "names", progress, scan)
            after = yield from _page(checks.FsckScan(what=checks.SCAN_STATE, only=only.tobytes()))
            names = Counter(int(ino) for page in pages for ino in np.frombuffer(page.rows, "<u8"))
            wrong, changed = judge_names(before.rows, after.rows, names)
            found += wrong
            unsettled.append(np.array(changed, dtype="<u8"))
        suspects = np.concatenate(unsettled)
        if not len(suspects):
            break
    report.unsettled += [int(ino) for ino in suspects]
    return found


def judge_names(before: bytes, after: bytes, names: Counter[int]) -> tuple[list[FsckFinding], list[int]]:
    """(findings, inodes that changed while their names were counted). Rows of FSCK_STATE before and after.
    Pure."""
    size = STATE.itemsize
    then = {row[:8]: row for row in _rows(before, size)}
    found, changed = [], []
    for row in _rows(after, size):
        state = np.frombuffer(row, STATE)[0]
        ino, wanted, have = int(state["ino"]), int(state["links"]), names[int(state["ino"])]
        if wanted == have:
            continue
        if then.get(row[:8]) != row:
            changed.append(ino)
        else:
            found.append(_wrong_names(ino, wanted, have, int(state["type"]), bool(state["garbage"]), row))
    return found, changed


def _rows(data: bytes, size: int) -> Sequence[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _wrong_names(ino: int, wanted: int, have: int, kind: int, garbage: bool, stamp: bytes) -> FsckFinding:
    if have == 0:
        return FsckFinding(
            kind=_ORPHAN,
            ino=ino,
            found=wanted,
            stamp=stamp,
            text=f"no entry leads to inode {ino}, and it isn't to be collected",
            repair=f"attach it as /lost+found/{ino}",
        )
    told = "is to be collected" if garbage else f"counts {wanted} names"
    several = kind == DIRECTORY and have > 1
    return FsckFinding(
        kind=_LINKS,
        ino=ino,
        found=wanted,
        expected=have,
        stamp=stamp,
        text=f"inode {ino} {told} and has {have}"
        + (": a directory has one; move what is in it elsewhere" if several else ""),
        repair="" if several else "correct the count",
    )


# --- driving it -----------------------------------------------------------------------------


def run_check(
    client: Client,
    path: PathLike = "/",
    *,
    repair: bool = False,
    progress: Progress = lambda what, count: None,
) -> Report:
    """Check the whole cluster, or of a directory `path` its entries and counters and those of all below.
    Blocking, long. Raises NotPermitted (administrators only), and what the metadata service raises."""
    tree = 0
    chains: list[tuple[int, int]] = []
    if check_path(path) == "/":
        chains = [(chain.id, chain.table) for chain in client.cluster_status().chains]
    else:
        attributes = client.attributes(path)
        if attributes.type != DIRECTORY:
            raise NotADirectory("give a directory, whose entries are checked", check_path(path))
        tree = attributes.ino
    steps = check(chains, tree=tree, repair=repair, progress=progress)
    request = next(steps)
    while True:
        reply: Message | FfsError
        try:
            if isinstance(request, checks.FsckRepair):
                reply = client.core.change(request, FsckRepaired)
            else:
                reply = client.core.ask(request, FsckPage)
        except FfsError as error:
            reply = error
        try:
            request = steps.send(reply)
        except StopIteration as done:
            report: Report = done.value
            return report
