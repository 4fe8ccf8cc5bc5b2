"""Rings of one process, one a thread: a client and a file are shared, and nothing else. docs/ring.md."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import ffs
from ffs import errors
from ffs.client.client import Client

CHUNK = 1 << 20
SIZE = 8 * CHUNK
THREADS = 6
ROUNDS = 6
REQUESTS = 40
INFLIGHT = 8
PLACE = 96 << 10  # of one request, at most
AFTER = 0xA5


@pytest.fixture
def data() -> np.ndarray[Any, Any]:
    return np.random.default_rng(17).integers(0, 256, SIZE, np.uint8)


def read_at_random(
    client: Client, file: Any, data: Any, iov: ffs.Iov, rng: np.random.Generator, *, stop_after: int
) -> int:
    """REQUESTS reads of all kinds of places, each compared when it comes; the ring is closed once
    `stop_after` came, the others in flight or waiting behind the bound. How many were compared."""
    memory = iov.numpy()
    whole = rng.integers(0, 2, REQUESTS).astype(bool)  # pages, which servers fill themselves, or any bytes
    lengths = np.where(whole, 64 << 10, rng.integers(1, PLACE, REQUESTS))
    at = rng.integers(0, SIZE - PLACE, REQUESTS)
    at = np.where(whole, at & ~0xFFFF, at)
    to = np.arange(REQUESTS) * PLACE
    came = 0
    with ffs.Ior(client, 128, kind="read", inflight=INFLIGHT) as ring:
        assert ring.prepare_many(file, at, iov, to, lengths) == REQUESTS
        while came < stop_after:
            for number, moved in zip(*ring.wait_array(1), strict=True):
                assert moved == lengths[number]
                begin = to[number]
                expected = data[at[number] : at[number] + moved]
                assert np.array_equal(memory[begin : begin + moved], expected), f"request {number}"
                came += 1
        assert ring.stats().max_inflight <= INFLIGHT
        ring.close()
    memory[:] = AFTER
    del memory
    return came


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_threads_read_through_rings_of_their_own_and_leave_some_in_flight(
    address: str, home: str, data: Any, transport: str
) -> None:
    """Every byte is compared. Every second ring is closed with most of its reads in flight: what it leaves
    behind is not written to afterwards, and the rings of the other threads go on."""
    failures: list[BaseException] = []
    compared = [0] * THREADS

    def work(client: Client, number: int) -> None:
        rng = np.random.default_rng((19, number))
        try:
            with (
                client.open(f"{home}/f", "rb", 0) as file,
                ffs.Iov(REQUESTS * PLACE) as left,
                ffs.Iov(REQUESTS * PLACE) as iov,
            ):
                for _ in range(ROUNDS // 2):
                    compared[number] += read_at_random(client, file, data, left, rng, stop_after=5)
                    compared[number] += read_at_random(client, file, data, iov, rng, stop_after=REQUESTS)
                    assert bool((left.numpy() == AFTER).all()), "a closed ring's read came later"
        except BaseException as error:
            failures.append(error)

    with ffs.connect(address, transport=transport) as client:
        with client.open(f"{home}/f", "wb", 0, chunk_size=CHUNK) as file:
            file.write(data)
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        assert all(count >= ROUNDS // 2 * (REQUESTS + 5) for count in compared)


def test_a_write_ring_with_a_bound_writes_all(client: Client, home: str, data: Any) -> None:
    """Requests of several chunks too: their pieces count, and one completion says all."""
    with client.open(f"{home}/w", "wb", 0, chunk_size=CHUNK) as file, ffs.Iov(SIZE) as iov:
        iov.numpy()[:] = data
        at = np.arange(0, SIZE, 3 * CHUNK // 2)
        lengths = np.minimum(3 * CHUNK // 2, SIZE - at)
        with ffs.Ior(client, 32, kind="write", inflight=2) as ring:
            assert ring.prepare_many(file, at, iov, at, lengths) == len(at)
            left = len(at)
            while left:
                for done in ring.wait():
                    assert (done.error, done.result) == (None, lengths[done.userdata])
                    left -= 1
            assert ring.stats().max_inflight <= 2
    with client.open(f"{home}/w", "rb", 0) as file:
        assert file.read() == data.tobytes()


@pytest.mark.parametrize("inflight", [-1, 17])
def test_a_bound_that_can_not_be_is_refused(client: Client, inflight: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="inflight"):
        ffs.Ior(client, 16, inflight=inflight)
