"""Handles of rings that are gone, or just go: calls are refused, and touch nothing of them."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from ffs import errors
from ffs._native.lib import ffi, lib
from ffs._native.ring import NativeClient, Ring


def _calls(raw: Any) -> dict[str, int]:
    """What each function of a ring says to the handle."""
    sqe, cqe, events = ffi.new("ffs_sqe*"), ffi.new("ffs_cqe*"), ffi.new("uint32_t*")
    return {
        "prepare": lib.ffs_ring_prepare(raw, sqe, 0),
        "submit": lib.ffs_ring_submit(raw),
        "wait": lib.ffs_ring_wait(raw, cqe, 1, 0, 0, events),
        "cancel": lib.ffs_ring_cancel(raw, 1),
        "fd": lib.ffs_ring_fd(raw),
        "stats": lib.ffs_ring_get_stats(raw, ffi.new("ffs_ring_stats*")),
        "destroy": lib.ffs_ring_destroy(raw),
    }


def test_a_handle_whose_ring_is_gone_is_refused_by_every_call_for_ever() -> None:
    client = NativeClient(9, bytes(16))
    ring = Ring(client, 4)
    raw = ring.raw
    ring.close()
    assert set(_calls(raw).values()) == {-errno.EBADF}
    others = [Ring(client, 4) for _ in range(300)]  # more than a block of the table of handles
    assert len({other.raw for other in others} | {raw}) == 301
    assert set(_calls(raw).values()) == {-errno.EBADF}
    for other in others:
        assert other.fileno() >= 0
        other.close()
    client.close()


def test_a_ring_that_another_thread_closes_refuses_calls() -> None:
    """The call read whether the ring was there from memory that the closing thread had just freed."""
    client = NativeClient(9, bytes(16))
    for _ in range(100):
        ring = Ring(client, 4)
        raw = ring.raw
        seen: set[int] = set()
        started = threading.Event()

        def work(raw: Any = raw, seen: set[int] = seen, started: threading.Event = started) -> None:
            events, cqe = ffi.new("uint32_t*"), ffi.new("ffs_cqe*")
            while -errno.EBADF not in seen:
                seen.add(lib.ffs_ring_wait(raw, cqe, 1, 0, 0, events))
                started.set()

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        while True:
            try:
                ring.close()
                break
            except errors.Busy:
                continue
        thread.join(30)
        assert not thread.is_alive()
        assert seen <= {0, -errno.EBADF, -errno.EBUSY}
    client.close()


def test_a_closed_ring_says_so() -> None:
    client = NativeClient(9, bytes(16))
    ring = Ring(client, 4)
    raw = ring.raw
    ring.close()
    ring._raw = raw  # as a thread has it that was about to call
    with pytest.raises(errors.BadHandle):
        ring.wait(0, 0)
    del ring._raw
    client.close()
