"""Rings at the limits of a process: FAULTS S5, S7, S20; docs/ring.md, Connections and Buffers."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import in_child

from ffs import errors
from ffs._native.iov import Iov
from ffs._native.ring import OP_READ, OP_WRITE, NativeClient, Ring, error_of_cqe

from .conftest import Nodes, capability, finish, key, until

SIZE = 1 << 20
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
OF_CLIENTS = ("sessions", "regions", "region_bytes")
OF_REQUESTS = ("pool_used_bytes", "ops_waiting")
MOST_NEEDED = 16  # descriptors of a client with a ring, its memory and one connection; it is fewer


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def quiet(nodes: Nodes) -> bool:
    """Whether clients have left nothing. Several servers are clients of each other."""
    names = OF_REQUESTS if len(nodes.nodes) > 1 else OF_CLIENTS + OF_REQUESTS
    return all(node.tell("metrics")[name] == 0 for node in nodes.nodes for name in names)


def write_and_read(client: NativeClient, right: int, index: int) -> None:
    """A ring, an Iov, a chunk written and read: all that there is to register. Raises what fails."""
    with Ring(client, 16) as ring, Iov(4 * SIZE) as iov:
        memory = iov.numpy()
        memory[:SIZE] = index
        for op, at in ((OP_WRITE, 0), (OP_READ, SIZE), (OP_READ, 2 * SIZE)):
            ring.prepare_one(op, 1, right, key(index), 0, SIZE, iov[at : at + SIZE], 1)
            (done,) = finish(ring, 1)
            if done["result"] != SIZE:
                raise error_of_cqe(done)
        assert (memory[: 3 * SIZE] == index).all()
        del memory


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_s5_registration_fails_at_each_descriptor_of_the_client(one: Nodes, transport: str) -> None:
    """With room for no descriptor, then one, and so on: each step of making a client, a ring, its memory and
    its connection fails once. What fails says so and leaves nothing; in the end all goes well."""

    def work() -> None:
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        while os.dup(0) < highest:
            pass  # so that the limit is the number of descriptors
        before = descriptors()
        fine = 0
        refusals = 0
        for room in range(40):
            # What lacks a descriptor to connect with ends by its deadline; what has enough may take long.
            limit_ms = 20_000 if fine or room > MOST_NEEDED else 100
            resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + room, HARD))
            try:
                client = one.client(transport, request_timeout_ms=limit_ms, connect_timeout_ms=limit_ms)
                try:
                    write_and_read(client, client.add_capability(capability(client)), room)
                    fine += 1
                finally:
                    client.close()
            except errors.FfsError:
                refusals += 1
                if fine:
                    raise  # fewer descriptors were enough
            resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
            assert descriptors() == before, f"with room for {room}"
            if fine == 3:
                break
        assert refusals >= 5  # client, ring (2), Iov, connection
        assert fine == 3

    assert in_child(work, 120)
    until(lambda: quiet(one))


@pytest.mark.parametrize("what", ["descriptors", "mappings"])
def test_s5_registration_fails_at_each_step_of_the_server(one: Nodes, what: str) -> None:
    """The server can't take the connection, or the Iov's descriptor, or can't map it. Requests end by their
    deadline or go the other way; when it can again they do as before, and nothing has stayed."""
    node = one.nodes[0]
    pid = node.process.pid
    limit = resource.RLIMIT_NOFILE if what == "descriptors" else resource.RLIMIT_AS
    usual = resource.prlimit(pid, limit)
    before = descriptors(pid)
    outcomes = []
    for turn in range(5):
        if what == "descriptors":
            highest = max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, limit, (highest + 1 + turn, usual[1]))
        else:
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, limit, (size + (turn << 20), usual[1]))
        limit_ms = 400 if turn < 4 else 20_000  # the last one has room enough
        client = one.client("local", request_timeout_ms=limit_ms, connect_timeout_ms=100)
        right = client.add_capability(capability(client))
        try:
            write_and_read(client, right, turn + 1)
            outcomes.append("done")
        except errors.FfsError as error:
            outcomes.append(type(error).__name__)
        resource.prlimit(pid, limit, usual)
        client.close()
        client = one.client("local")
        write_and_read(client, client.add_capability(capability(client)), turn + 1)
        client.close()
        until(lambda: quiet(one))
        until(lambda: descriptors(pid) <= before)
    assert outcomes[-1] == "done"
    if what == "descriptors":
        assert outcomes[0] != "done"  # the connection itself


@pytest.fixture
def small_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FFS_NODE_POOL", str(8 << 20))
    nodes = Nodes(tmp_path, 3, 3)
    assert all(node.tell("metrics")["pool_bytes"] < 128 << 20 for node in nodes.nodes)
    yield nodes
    nodes.end()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_s7_many_writers_at_small_pools_wait_and_none_fails(small_pools: Nodes, transport: str) -> None:
    """32 writers keep 256 MiB in flight at servers whose pools are the smallest there are."""
    client = small_pools.client(transport, request_timeout_ms=300_000)
    right = client.add_capability(capability(client))
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with Ring(client, 16) as ring, Iov(8 * SIZE) as iov:
                iov.numpy()[:] = number + 1
                for turn in range(2):
                    for i in range(8):
                        index = number * 8 + i
                        part = iov[i * SIZE : (i + 1) * SIZE]
                        op = OP_WRITE if turn == 0 else OP_READ
                        ring.prepare_one(op, index % 3 + 1, right, key(index), 0, SIZE, part, i)
                    done = finish(ring, 8, 300)
                    assert (done["result"] == SIZE).all(), [error_of_cqe(d) for d in done if d["result"] < 0]
                    assert (iov.numpy() == number + 1).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []
    client.close()
    until(lambda: quiet(small_pools))


def filled(client: NativeClient, right: int, chunks: int) -> None:
    with Ring(client, 16) as ring, Iov(SIZE) as iov:
        for i in range(chunks):
            iov.numpy()[:] = i + 1
            ring.prepare_one(OP_WRITE, 1, right, key(i), 0, SIZE, iov[0:SIZE], i)
            assert finish(ring, 1)["result"][0] == SIZE


def test_s20_destroyed_with_requests_in_flight_from_another_thread_and_twice(one: Nodes) -> None:
    client = one.client("local")
    right = client.add_capability(capability(client))
    filled(client, right, 8)
    for turn in range(20):
        ring, iov = Ring(client, 16), Iov(8 * SIZE)
        for _ in range(2):
            for i in range(8):
                ring.prepare_one(OP_READ, 1, right, key(i), 0, SIZE, iov[i * SIZE : (i + 1) * SIZE], i)
        ring.submit()
        seen: list[Any] = []

        def wait(ring: Ring = ring, seen: list[Any] = seen) -> None:
            try:
                seen.append(len(ring.wait(16, 30)[0]))
            except errors.FfsError as error:
                seen.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        closers = [threading.Thread(target=_close_quietly, args=(ring,)) for _ in range(2)]
        for closer in closers:
            closer.start()
        for thread in (waiter, *closers):
            thread.join(60)
            assert not thread.is_alive()
        assert seen == [16] or isinstance(seen[0], errors.BadHandle | errors.Busy), seen
        ring.close()
        ring.close()
        with pytest.raises(errors.BadHandle):
            ring.submit()
        memory = iov.numpy()
        memory[:] = turn
        assert (memory == turn).all()
        del memory
        iov.close()
    client.close()
    until(lambda: quiet(one))


def test_s20_destroyed_by_several_threads_at_once(one: Nodes) -> None:
    """Twice at the same moment: one of them does it."""
    client = one.client("local")
    right = client.add_capability(capability(client))
    filled(client, right, 1)

    def work() -> None:
        own = one.client("local")  # the child's
        allowed = own.add_capability(capability(own))
        for _ in range(100):
            ring, iov = Ring(own, 16), Iov(SIZE)
            ring.prepare_one(OP_READ, 1, allowed, key(0), 0, SIZE, iov[0:SIZE], 1)
            ring.submit()
            barrier = threading.Barrier(4)

            def close(ring: Ring = ring, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                ring.close()

            closers = [threading.Thread(target=close) for _ in range(4)]
            for closer in closers:
                closer.start()
            for closer in closers:
                closer.join()
            iov.close()
        own.close()

    assert in_child(work, 120)
    client.close()
    until(lambda: quiet(one))


def _close_quietly(ring: Ring) -> None:
    with contextlib.suppress(errors.Busy):  # another thread is inside
        ring.close()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_s20_numbers_are_used_again_while_completions_are_pending(one: Nodes, transport: str) -> None:
    """Userdata, a capability's id and a descriptor have new owners when the old answers come."""
    client = one.client(transport)
    right = client.add_capability(capability(client))
    filled(client, right, 8)
    node = one.nodes[0]
    iov = Iov(2 * SIZE)
    memory = iov.numpy()
    ring = Ring(client, 16)
    for _ in range(2):  # the second goes straight into the memory
        ring.prepare_one(OP_READ, 1, right, key(0), 0, SIZE, iov[0:SIZE], 7)
        finish(ring, 1)
    node.signal(signal.SIGSTOP)
    ring.prepare_one(OP_READ, 1, right, key(1), 0, SIZE, iov[0:SIZE], 7)
    ring.submit()
    ring.cancel(7)
    (cancelled,) = finish(ring, 1)
    assert isinstance(error_of_cqe(cancelled), errors.Cancelled)
    memory[:] = 0xC3
    client.drop_capability(right)
    again = client.add_capability(capability(client))
    assert again == right
    ring.prepare_one(OP_READ, 1, again, key(2), 0, SIZE, iov[SIZE : 2 * SIZE], 7)
    ring.submit()
    number = ring.fileno()
    other = Ring(client, 16)
    other.prepare_one(OP_READ, 1, again, key(3), 0, SIZE, iov[SIZE : 2 * SIZE], 7)
    other.submit()
    other.close()  # with its answer on the way
    node.signal(signal.SIGCONT)
    poll = select.poll()
    poll.register(number, select.POLLIN)
    assert poll.poll(30_000)
    done = finish(ring, 1)
    assert [(int(d["userdata"]), int(d["result"])) for d in done] == [(7, SIZE)]
    assert (memory[SIZE:] == 3).all()
    node.tell("report")
    ring.prepare_one(OP_READ, 1, again, key(4), 0, SIZE, iov[SIZE : 2 * SIZE], 8)
    assert finish(ring, 1)["userdata"].tolist() == [8]
    assert (memory[:SIZE] == 0xC3).all()
    # The next ring has the descriptor of the last.
    ring.close()
    following = Ring(client, 16)
    assert following.fileno() == number
    assert len(following.wait(0, 0)[0]) == 0
    following.prepare_one(OP_READ, 1, again, key(5), 0, SIZE, iov[0:SIZE], 7)
    assert finish(following, 1)["result"].tolist() == [SIZE]
    assert (memory[:SIZE] == 6).all()
    following.close()
    del memory
    iov.close()
    client.close()
    until(lambda: quiet(one))


def test_a_gib_and_more_is_asked_of_an_iov_of_sparse_memory() -> None:
    """Bounds of slices beyond 2^32 (S30, without data)."""
    with Iov((1 << 32) + 4096) as iov:
        part = iov[1 << 32 : (1 << 32) + 4096]
        assert (part.offset, part.length) == (1 << 32, 4096)
        part.view[:4] = b"tail"
        assert bytes(iov.buffer()[1 << 32 : (1 << 32) + 4]) == b"tail"
        assert np.frombuffer(part.view, np.uint8)[0] == ord("t")
