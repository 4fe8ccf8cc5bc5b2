"""What a writer makes of the words about its room, and when it asks: decisions, and a writer with fakes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs.client.room import NO_ROOM_KNOWN, Room, WriterRoom, heard, lacks, moved
from ffs.errors import QuotaExceeded
from ffs.proto.quota import NO_QUOTA, Reserve, Reserved

replies = st.tuples(st.integers(0, 3), st.integers(NO_QUOTA, 50))


def test_where_nothing_counts_the_file_nobody_asks() -> None:
    assert not lacks(NO_ROOM_KNOWN, 0, 1 << 60)
    assert not lacks(NO_ROOM_KNOWN, 7, 1 << 60)
    assert moved(NO_ROOM_KNOWN, 7) == Room(7)


def test_a_write_asks_only_beyond_what_is_reserved() -> None:
    assert not lacks(Room(2, 100), 2, 100)
    assert lacks(Room(2, 100), 2, 101)
    assert lacks(Room(2, 0), 2, 1)
    assert lacks(Room(2, 100), 4, 1)  # reserved under another epoch


def test_of_one_epoch_the_largest_counts() -> None:
    assert heard(Room(2, 100), 2, 60) == Room(2, 100)
    assert heard(Room(2, 100), 2, 160) == Room(2, 160)


def test_a_truncation_takes_back_what_was_reserved() -> None:
    assert heard(Room(2, 100), 4, 10) == Room(4, 10)
    assert moved(Room(2, 100), 4) == Room(4, 0)
    assert moved(Room(4, 10), 4) == Room(4, 10)
    assert heard(Room(4, 10), 2, 100) == Room(4, 10)  # a reply of before that comes late


def test_quotas_come_and_go() -> None:
    assert heard(Room(2), 2, 10) == Room(2, 10)
    assert heard(Room(2, 10), 2, NO_QUOTA) == Room(2)


@given(st.lists(replies), st.integers(0, 60))
def test_room_is_never_more_than_was_said_of_this_epoch(said: list[tuple[int, int]], end: int) -> None:
    room = NO_ROOM_KNOWN
    for epoch, reserved in said:
        room = heard(room, epoch, reserved)
    newest = max((epoch for epoch, _ in said), default=0)
    assert room.epoch == newest
    if room.reserved != NO_QUOTA:
        assert room.reserved in [reserved for epoch, reserved in said if epoch == newest]
        assert lacks(room, newest, end) == (end > room.reserved)


class FakeSession:
    """Grants `step` ahead up to `limit`, under `epoch`."""

    def __init__(self, limit: int, epoch: int = 0, step: int = 0) -> None:
        self.limit, self.epoch, self.step = limit, epoch, step
        self.asked: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def call(self, request: Reserve, reply: type[Any]) -> Reserved:
        assert reply is Reserved
        self.asked.append(request.end)
        self.gate.wait(10)
        if request.epoch != self.epoch:
            return Reserved(reserved=0, epoch=self.epoch)
        if request.end > self.limit:
            raise QuotaExceeded("no room")
        return Reserved(reserved=min(self.limit, request.end + self.step), epoch=self.epoch)


def ask(room: WriterRoom, session: FakeSession, epoch: int, end: int) -> bool:
    return room.ask(session, 1, 2, epoch, end)  # type: ignore[arg-type]


def test_what_is_granted_ahead_saves_requests() -> None:
    session, room = FakeSession(1000, step=100), WriterRoom()
    room.begin(0, 0)
    for end in range(10, 1000, 10):
        if room.lacks(0, end):
            assert ask(room, session, 0, end)
    assert session.asked == [10, 120, 230, 340, 450, 560, 670, 780, 890]
    with pytest.raises(QuotaExceeded):
        ask(room, session, 0, 1001)
    assert not room.lacks(0, 990)  # a refusal takes nothing away


def test_a_new_epoch_is_learnt_before_anything_is_reserved() -> None:
    session, room = FakeSession(1000, epoch=4), WriterRoom()
    room.begin(2, 50)
    assert not ask(room, session, 2, 60)
    assert room.lacks(2, 60)
    room.move(4)
    assert room.lacks(4, 1)
    assert ask(room, session, 4, 60)
    assert not room.lacks(4, 60)


def test_threads_ask_once() -> None:
    session, room = FakeSession(1000, step=500), WriterRoom()
    room.begin(0, 0)
    session.gate.clear()
    threads = [threading.Thread(target=ask, args=(room, session, 0, 10 + i)) for i in range(8)]
    for thread in threads:
        thread.start()
    session.gate.set()
    for thread in threads:
        thread.join()
    assert len(session.asked) == 1


@pytest.mark.parametrize("reserved", [NO_QUOTA, 100])
def test_a_child_of_fork_has_nothing_of_what_its_parent_reserved(reserved: int) -> None:
    room = WriterRoom()
    room.begin(2, reserved)
    assert not room.lacks(2, 5)
    room.after_fork_in_child()
    assert room.lacks(2, 5)
    room.begin(2, reserved)  # it has opened the file for itself
    assert not room.lacks(2, 5)


def test_a_child_of_fork_isnt_stopped_by_a_thread_of_its_parent() -> None:
    session, room = FakeSession(1000), WriterRoom()
    room.begin(0, 0)
    session.gate.clear()
    thread = threading.Thread(target=ask, args=(room, session, 0, 5))
    thread.start()
    room.after_fork_in_child()
    assert room.lacks(0, 5)
    room.begin(0, 7)
    assert not room.lacks(0, 7)
    session.gate.set()
    thread.join()
