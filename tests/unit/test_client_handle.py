"""What an open file knows of its length while its epoch goes up."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest

from ffs import errors
from ffs.client.handle import OpenFile
from ffs.layout import Layout, Placement
from ffs.proto import meta
from ffs.proto.records import FILE

PLACEMENT = Placement(Layout(table=1, table_version=1, chunk_size=4096, stripe=0, seed=5), [4])


def _attributes(epoch: int) -> meta.Attributes:
    return meta.Attributes(
        v=1,
        ino=5,
        type=FILE,
        mode=0o644,
        uid=0,
        gid=0,
        nlink=1,
        length=0,
        mtime_ns=0,
        ctime_ns=0,
        btime_ns=0,
        epoch=epoch,
    )


class Session:
    """Of a file at a service that raised its epoch to `epoch`; its length there is 0."""

    over = False
    ended = False  # at the service

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.asked: list[Any] = []

    def changed(self, ino: int | None) -> None:
        """Nobody has read ahead."""

    def renew_capability(self, number: int) -> int:
        if self.ended:
            raise errors.Fenced("client session 9 is over: connect again")
        return self.epoch

    def drop_capability(self, number: int) -> None: ...

    def ask(self, request: Any, answer: Any) -> Any:
        return meta.StatReply(attributes=_attributes(self.epoch))

    def call(self, request: Any, answer: Any) -> Any:
        self.asked.append(request)
        return meta.LengthReply(length=request.length, epoch=self.epoch, merged=request.epoch == self.epoch)


def opened(session: Session) -> OpenFile:
    file = OpenFile(lambda: session, "/f", meta.OPEN_WRITE)  # type: ignore[arg-type, return-value]
    file._session = file._session_core = session  # type: ignore[assignment]
    file.ino, file._handle, file._native_id, file.epoch = 5, 3, 1, 4
    return file


@pytest.mark.parametrize(("epoch", "known"), [(4, 900), (5, 900), (6, 0), (7, 0)])
def test_only_a_truncation_makes_a_writer_forget_its_length(epoch: int, known: int) -> None:
    """By one, it goes up when another writer, which is gone, is settled: what this one wrote stands."""
    session = Session(epoch)
    file = opened(session)
    file.note_written(900, 4)
    file._take_epoch(session)  # type: ignore[arg-type]
    assert (file.epoch, file.length) == (epoch, known)
    file.close()
    (close,) = session.asked
    assert (close.epoch, close.length, close.written) == (epoch, known, known > 0)


@pytest.mark.parametrize(("epoch", "known"), [(4, 900), (5, 900), (6, 0)])
def test_a_write_that_comes_back_after_the_epoch_went_up(epoch: int, known: int) -> None:
    session = Session(epoch)
    file = opened(session)
    file._take_epoch(session)  # type: ignore[arg-type]
    file.note_written(900, 4)
    assert (file.length, file._unreported_end) == (known, known)


@pytest.mark.parametrize(("epoch", "told"), [(4, [4]), (5, [4, 5]), (6, [4])])
def test_a_flush_that_learns_of_a_new_epoch_reports_again_what_counts(epoch: int, told: list[int]) -> None:
    session = Session(epoch)
    file = opened(session)
    file.note_written(900, 4)
    file.report()
    assert [(request.epoch, request.length) for request in session.asked] == [(one, 900) for one in told]
    assert (file.epoch, file.length) == (epoch, 0 if epoch == 6 else 900)
    assert file._unreported_end == 0


def test_a_session_that_is_over_is_told_with_the_name_of_the_file() -> None:
    session = Session(4)
    file = opened(session)
    session.ended = True
    with pytest.raises(errors.Fenced, match="'/f'"):
        file._take_epoch(session)  # type: ignore[arg-type]
    assert session.over


class Full(Session):
    """Of a directory whose quota is used up."""

    def call(self, request: Any, answer: Any) -> Any:
        raise errors.QuotaExceeded("the quota is used up")


def test_an_error_at_the_end_of_a_with_block_keeps_the_users_own() -> None:
    """As with open(): and the error is told once, with the file's name."""
    file = opened(Full(4))
    file._placement = PLACEMENT
    file._room.begin(4, 0)
    mine = KeyError("mine")

    def work() -> None:
        try:
            raise mine
        finally:
            file.ensure_room(1)

    with pytest.raises(errors.QuotaExceeded, match="'/f'") as caught:
        work()
    assert caught.value.__context__ is mine
    assert not caught.value.__suppress_context__
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("QuotaExceeded: ") == 1
    assert "KeyError: 'mine'" in told


@pytest.mark.parametrize("closes", [False, True])
def test_a_close_while_another_thread_writes(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that leaves is looked for at the service; the writer is told what happened."""
    session = Session(4)
    file = opened(session)
    file._placement = PLACEMENT
    session.rings = object()  # type: ignore[attr-defined]

    def write(*_: Any) -> None:
        if closes:
            file.close()
            raise errors.InvalidArgument("no such capability id")

    monkeypatch.setattr("ffs.client.transfer.write", write)
    if closes:
        with pytest.raises(errors.BadHandle, match="another thread closed"):
            file.write_at(0, np.zeros(5, np.uint8))
    else:
        file.write_at(0, np.zeros(5, np.uint8))
        file.close()
    (close,) = session.asked
    assert close.doubtful == closes
    with pytest.raises(ValueError, match="closed file"):
        file.write_at(0, np.zeros(5, np.uint8))
    assert len(session.asked) == 1


@pytest.mark.parametrize("doing", ["written", "read", "looked at"])
@pytest.mark.parametrize("moves", [False, True])
def test_a_file_that_its_chunks_servers_turn_away_again_and_again(
    doing: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated all the time, or held for removed there while the service knows it as ever: not the same."""
    session = Session(4)
    file = opened(session)
    file._placement = PLACEMENT
    session.rings = object()  # type: ignore[attr-defined]
    file.length = 9
    monkeypatch.setattr(session, "ask", lambda *_: meta.StatReply(attributes=_longer(session.epoch)))
    pauses: list[float] = []
    monkeypatch.setattr("ffs.client.turns.time.sleep", pauses.append)
    tries = 0

    def turned_away(*_: Any) -> None:
        nonlocal tries
        tries += 1
        if moves:
            session.epoch += 2
        raise errors.StaleEpoch("the space's epoch is higher")

    monkeypatch.setattr("ffs.client.transfer.write", turned_away)
    monkeypatch.setattr("ffs.client.transfer.read", turned_away)

    def work() -> None:
        if doing == "written":
            file.write_at(0, np.zeros(5, np.uint8))
        elif doing == "read":
            file.read_at(0, np.zeros(5, np.uint8))
        else:
            file._on_chunks(turned_away)

    if moves:
        with pytest.raises(errors.Overloaded, match=f"truncated faster than it can be {doing}: '/f'"):
            work()
        assert not pauses
    else:
        with pytest.raises(
            errors.StaleEpoch, match=f"can't be {doing}: the servers of its chunks hold its id"
        ):
            work()
        assert 1 < sum(pauses) < 3
    assert tries == 16


def _longer(epoch: int) -> meta.Attributes:
    attributes = _attributes(epoch)
    attributes.length = 9
    return attributes
