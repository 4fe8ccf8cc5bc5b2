"""Copies of a rank's part of a checkpoint on a disk of its host (docs/guides/checkpoint.md, Local scratch).

    LOCAL/RUN/rank-00003-of-00008/step-100/    the shards that this rank has stored, and copy.json
    LOCAL/RUN/rank-00003-of-00008/.step-100.saving-<hex>/   one that isn't whole

RUN is an attribute of the run's directory in the cluster, so that no copy is taken for one of another run,
job or cluster. A copy gets its name by one rename when all of it is durable; whatever else is there belongs
to nobody, and goes when the directory is next used. One process at a time writes for a rank: it holds a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from ffs.checkpoint.commit import step_name, step_of
from ffs.checkpoint.persist import ContentKey, key_of, known_files
from ffs.checkpoint.report import RankReport
from ffs.errors import Busy, Exists, NoData

if TYPE_CHECKING:
    from ffs.checkpoint.snapshot import StagedFile
    from ffs.client.client import Client

FILE_NAME: Final = "copy.json"
RUN: Final = "user.ffs.checkpoint.run"
_PIECE_BYTES: Final = 8 << 20


class LocalCopy(msgspec.Struct, frozen=True):
    """copy.json: what one rank has stored of one step, with the hashes."""

    run: str
    step: int
    report: RankReport
    format: Literal["ffs-local-copy"] = "ffs-local-copy"
    version: Literal[1] = 1


def run_of(client: Client, path: str) -> str:
    """The word that tells the run's directory from any other, made if it has none. Blocking."""
    while True:
        with contextlib.suppress(NoData):
            return client.getxattr(path, RUN).decode()
        with contextlib.suppress(Exists):
            client.setxattr(path, RUN, uuid.uuid4().hex.encode(), os.XATTR_CREATE)


def read_copy(directory: str) -> LocalCopy | None:
    """None: there is no whole copy, or not one that this version reads."""
    try:
        with open(os.path.join(directory, FILE_NAME), "rb") as file:
            return msgspec.json.decode(file.read(), type=LocalCopy)
    except (OSError, msgspec.MsgspecError):
        return None


def copies(root: str, run: str, step: int) -> Iterator[tuple[str, LocalCopy]]:
    """Whole copies of a step, of whichever ranks have theirs on this host: (directory, what it holds)."""
    try:
        ranks = sorted(os.listdir(os.path.join(root, run)))
    except OSError:
        return
    for rank in ranks:
        directory = os.path.join(root, run, rank, step_name(step))
        found = read_copy(directory)
        if found is not None and (found.run, found.step) == (run, step):
            yield directory, found


class Scratch:
    """Where one rank puts its copies. One thread, but for `steps`. All methods block and raise OSError."""

    def __init__(self, root: str, run: str, rank: int, ranks: int, keep: int) -> None:
        """Touches nothing yet: the first copy does. `keep`: how many whole copies stay."""
        self.root = os.path.abspath(root)
        self.run = run
        self.home = os.path.join(self.root, run, f"rank-{rank:05d}-of-{ranks:05d}")
        self._keep = keep
        self._lock: int | None = None

    def steps(self) -> list[int]:
        """Of the whole copies of this rank, rising."""
        try:
            names = os.listdir(self.home)
        except OSError:
            return []
        found = [step for name in names if (step := step_of(name)) is not None]
        return sorted(step for step in found if read_copy(self._path(step)) is not None)

    def begin(self, step: int) -> Copying:
        """Busy: another process writes copies of this rank."""
        if self._lock is None:
            self._lock = self._open()
        before: dict[ContentKey, str] = {}
        for each in self.steps():
            copy = read_copy(self._path(each))
            if copy is not None:
                before.update({key: os.path.join(self._path(each), f) for key, f in _files(copy).items()})
        return Copying(self, step, before)

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _open(self) -> int:
        """Its lock; what was left half made is removed."""
        os.makedirs(self.home, exist_ok=True)
        lock = os.open(os.path.join(self.home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy("another process keeps the local copies of this rank", self.home) from None
            for name in os.listdir(self.home):
                if name.startswith("."):
                    shutil.rmtree(os.path.join(self.home, name))
            return lock
        except BaseException:
            os.close(lock)
            raise

    def _path(self, step: int) -> str:
        return os.path.join(self.home, step_name(step))

    def _publish(self, directory: str, step: int) -> str:
        goal = self._path(step)
        if os.path.lexists(goal):
            self._remove(goal)  # the same step, saved again
        os.rename(directory, goal)
        _sync_directory(self.home)
        for old in self.steps()[: -self._keep]:
            if old != step:
                self._remove(self._path(old))
        return goal

    def _remove(self, path: str) -> None:
        """Not whole from the first moment on."""
        going = os.path.join(self.home, f".{os.path.basename(path)}.removing-{uuid.uuid4().hex}")
        os.rename(path, going)
        shutil.rmtree(going)


class Copying:
    """One copy on its way. `finish` or `drop` it."""

    def __init__(self, scratch: Scratch, step: int, before: dict[ContentKey, str]) -> None:
        self._scratch = scratch
        self._step = step
        self._before = before
        self._directory = os.path.join(scratch.home, f".{step_name(step)}.saving-{uuid.uuid4().hex}")
        os.mkdir(self._directory)

    def write(self, staged: StagedFile) -> None:
        """Durable when it returns. A file that an earlier copy has is linked."""
        path = os.path.join(self._directory, staged.plan.file)
        same = self._before.get(key_of(staged))
        if same is not None:
            with contextlib.suppress(FileNotFoundError):
                os.link(same, path)
                return
        write_direct(path, staged.region.memory(), staged.nbytes)

    def finish(self, report: RankReport) -> str:
        """Makes it whole, and lets the oldest go; its directory."""
        copy = LocalCopy(self._scratch.run, self._step, report)
        fd = os.open(os.path.join(self._directory, FILE_NAME), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(copy))
            file.flush()
            os.fsync(fd)
        _sync_directory(self._directory)
        return self._scratch._publish(self._directory, self._step)

    def drop(self) -> None:
        """What there is of it goes. Best effort: the disk may be what failed; the next use removes it."""
        shutil.rmtree(self._directory, ignore_errors=True)


def write_direct(path: str, memory: memoryview, nbytes: int) -> None:
    """The first `nbytes` of page-aligned memory of whole pages as a file, past the page cache where the file
    system can do that; durable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags, 0o600)
    try:
        end = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        at = 0
        while at < end:
            try:
                count = os.pwrite(fd, memory[at : min(at + _PIECE_BYTES, end)], at)
            except OSError as error:
                direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
                if error.errno != errno.EINVAL or not direct:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            whole = count // mmap.PAGESIZE * mmap.PAGESIZE
            if not whole:  # the disk takes less than a page: what is left of it?
                raise OSError(errno.ENOSPC, "no space left for a whole page", path)
            at += whole
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def _files(copy: LocalCopy) -> Mapping[ContentKey, str]:
    """The files of a copy by what they hold."""
    return known_files(copy.report.shards, copy.report.tensors)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
