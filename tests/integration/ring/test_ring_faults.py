"""The ring when servers stop, die and come back: FAULTS S20, S26; docs/ring.md, Retries and Buffers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from transports import TRANSPORTS

from ffs import errors
from ffs._native.iov import Iov
from ffs._native.ring import OP_READ, OP_WRITE, NativeClient, Ring, error_of_cqe

from .conftest import CLUSTER, Nodes, capability, finish, key, until

IN_GUEST = "FFS_GUEST" in os.environ  # whose processors are emulated: less of the same
SIZE = 1 << (18 if IN_GUEST else 20)
CHUNKS = 6 if IN_GUEST else 12
KILLED = 2 if IN_GUEST else 4
SHORT_MS = 1000 if IN_GUEST else 300
SERVER_BUFFERS = 32  # native/net/rdma/pair.h, Shape: receives


def fill(client: NativeClient, right: int, chain_of: Any) -> np.ndarray[Any, Any]:
    """Writes CHUNKS chunks; returns what they hold."""
    data = np.random.default_rng(5).integers(0, 256, (CHUNKS, SIZE), dtype=np.uint8)
    with Ring(client, 16) as ring, Iov(CHUNKS * SIZE) as iov:
        iov.numpy()[:] = data.reshape(-1)
        for i in range(CHUNKS):
            part = iov[i * SIZE : (i + 1) * SIZE]
            ring.prepare_one(OP_WRITE, chain_of(i), right, key(i), 0, SIZE, part, i)
        assert (finish(ring, CHUNKS)["result"] == SIZE).all()
    return data


def read_all(ring: Ring, right: int, iov: Iov, chain_of: Any) -> None:
    for i in range(CHUNKS):
        part = iov[i * SIZE : (i + 1) * SIZE]
        ring.prepare_one(OP_READ, chain_of(i), right, key(i), 0, SIZE, part, i)


def chain_of(i: int) -> int:
    return i % 3 + 1


def queue_pairs() -> int:
    """Of this process, as the kernel knows them."""
    words = ["rdma", "-j", "resource", "show", "qp"]
    listed = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert listed, "the servers have some"
    return sum(one.get("pid") == os.getpid() for one in listed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_server_is_read_around_and_cannot_write_late(three: Nodes, transport: str) -> None:
    three.lease()
    client = three.client(transport, try_timeout_ms=SHORT_MS)
    right = client.add_capability(capability(client))
    data = fill(client, right, chain_of)
    with Ring(client, 16) as ring, Iov(CHUNKS * SIZE) as iov:
        memory = iov.numpy()
        for _ in range(2):  # the second goes straight into the memory
            read_all(ring, right, iov, chain_of)
            assert (finish(ring, CHUNKS)["result"] == SIZE).all()
        for victim in three.nodes:
            victim.signal(signal.SIGSTOP)
            memory[:] = 0
            read_all(ring, right, iov, chain_of)
            assert (finish(ring, CHUNKS)["result"] == SIZE).all()
            assert np.array_equal(memory.reshape(CHUNKS, SIZE), data)
            # The buffer is ours again: what the stopped server still does must not show in it.
            memory[:] = 0xC3
            victim.signal(signal.SIGCONT)
            victim.tell("report")  # it goes on; its queue is worked off behind this
            other_reads = Iov(SIZE)
            for _ in range(30):
                ring.prepare_one(OP_READ, 1, right, key(0), 0, SIZE, other_reads[0:SIZE], 1)
                assert finish(ring, 1)["result"][0] == SIZE
            other_reads.close()
            assert (memory == 0xC3).all()
        assert ring.stats().retries + ring.stats().hedge_wins > 0
        if transport == "rdma" and IN_GUEST:
            # One a server: those that reads were taken back from are gone, so nothing comes by them.
            assert queue_pairs() <= len(three.nodes)
        del memory
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_server_is_sent_no_more_than_it_has_room_for(one: Nodes, transport: str) -> None:
    """Over RDMA a message that meets no buffer breaks the queue pair (docs/rdma.md, Messages)."""
    one.lease()
    client = one.client(transport, try_timeout_ms=50_000)
    right = client.add_capability(capability(client))
    data = fill(client, right, lambda i: 1)
    with Ring(client, 128) as ring, Iov(101 * 4096) as iov:

        def read(number: int) -> None:
            part = iov[number * 4096 : (number + 1) * 4096]
            ring.prepare_one(OP_READ, 1, right, key(0), number * 64, 4096, part, number)
            ring.submit()

        read(100)
        assert finish(ring, 1)["result"][0] == 4096
        before = ring.stats()
        one.nodes[0].signal(signal.SIGSTOP)
        for number in range(100):
            read(number)
        stopped = ring.stats()
        one.nodes[0].signal(signal.SIGCONT)
        assert (finish(ring, 100)["result"] == 4096).all()
        for number in range(101):
            assert bytes(iov.numpy()[number * 4096 :][:4096]) == bytes(data[0][number * 64 :][:4096])
        after = ring.stats()
        assert (after.retries, after.rdma_breaks) == (0, 0)
        if transport == "rdma":
            # One of the last is kept, to tell of credits.
            assert SERVER_BUFFERS // 2 < stopped.rdma_sends - before.rdma_sends < SERVER_BUFFERS
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_killed_in_the_middle_of_reads(three: Nodes, transport: str) -> None:
    three.lease()  # or the others serve no longer than they hear of the one that is killed
    client = three.client(transport, try_timeout_ms=1000)
    right = client.add_capability(capability(client))
    data = fill(client, right, chain_of)
    with Ring(client, 64) as ring, Iov(CHUNKS * SIZE) as iov:
        memory = iov.numpy()
        read_all(ring, right, iov, chain_of)
        assert (finish(ring, CHUNKS)["result"] == SIZE).all()
        for turn in range(6):
            memory[:] = 0
            read_all(ring, right, iov, chain_of)
            ring.submit()
            if turn == 2:
                three.nodes[1].signal(signal.SIGKILL)
                three.nodes[1].process.wait()
            done = finish(ring, CHUNKS)
            assert (done["result"] == SIZE).all()
            assert np.array_equal(memory.reshape(CHUNKS, SIZE), data)
        del memory
    client.close()


def test_a_write_to_a_dead_server_says_that_its_outcome_is_unknown(one: Nodes) -> None:
    client = one.client("tcp")
    right = client.add_capability(capability(client))
    with Ring(client, 16) as ring, Iov(2 * SIZE) as iov:
        part = iov[0:SIZE]
        ring.prepare_one(OP_WRITE, 1, right, key(1), 0, SIZE, part, 1)
        assert finish(ring, 1)["result"][0] == SIZE
        one.nodes[0].signal(signal.SIGSTOP)
        ring.prepare_one(OP_WRITE, 1, right, key(1), 0, SIZE, part, 2, timeout_ms=500)
        (cqe,) = finish(ring, 1)
        assert isinstance(error_of_cqe(cqe), errors.OutcomeUnknown)
        ring.prepare_one(OP_READ, 1, right, key(1), 0, SIZE, part, 3, timeout_ms=500)
        (cqe,) = finish(ring, 1)
        assert isinstance(error_of_cqe(cqe), errors.DeadlineExceeded)
        one.nodes[0].signal(signal.SIGCONT)
        ring.prepare_one(OP_WRITE, 1, right, key(1), 0, SIZE, part, 4)
        assert finish(ring, 1)["result"][0] == SIZE
    client.close()


def test_a_stopped_head_holds_writes_up_and_they_finish_once(three: Nodes) -> None:
    # Tries are short, so that writes are sent again while the head stands still; connecting isn't, nor is
    # what the writes have in all: on a machine under load a server that goes on takes its time.
    client = three.client("local", try_timeout_ms=200, connect_timeout_ms=2000, request_timeout_ms=55_000)
    right = client.add_capability(capability(client))
    fill(client, right, lambda i: 1)
    with Ring(client, 16) as ring, Iov(CHUNKS * SIZE) as iov:
        iov.numpy()[:] = 0x77
        head = three.head(1)
        before = three.reports()
        head.signal(signal.SIGSTOP)
        for i in range(CHUNKS):
            part = iov[i * SIZE : (i + 1) * SIZE]
            ring.prepare_one(OP_WRITE, 1, right, key(i), 0, SIZE, part, i)
        cqes, _ = ring.wait(1, 1.5)
        assert len(cqes) == 0
        head.signal(signal.SIGCONT)
        assert (finish(ring, CHUNKS)["result"] == SIZE).all()
        for i in range(CHUNKS):
            part = iov[i * SIZE : (i + 1) * SIZE]
            ring.prepare_one(OP_READ, 1, right, key(i), 0, SIZE, part, i)
        assert (finish(ring, CHUNKS)["result"] == SIZE).all()
        assert (iov.numpy() == 0x77).all()
        assert sum(r["chunks"] for r in three.reports()) == sum(r["chunks"] for r in before)
    client.close()


def test_closing_a_ring_with_reads_at_a_stopped_server_frees_the_memory(three: Nodes) -> None:
    client = three.client("local")
    right = client.add_capability(capability(client))
    fill(client, right, chain_of)
    iov = Iov(CHUNKS * SIZE)
    ring = Ring(client, 16)
    read_all(ring, right, iov, chain_of)
    assert (finish(ring, CHUNKS)["result"] == SIZE).all()
    for node in three.nodes:
        node.signal(signal.SIGSTOP)
    read_all(ring, right, iov, chain_of)
    ring.submit()
    with pytest.raises(errors.Busy):
        iov.close()
    ring.close()  # takes the slices back
    memory = iov.numpy()
    memory[:] = 0x3C
    for node in three.nodes:
        node.signal(signal.SIGCONT)
    for node in three.nodes:
        node.tell("report")
    with Ring(client, 16) as fresh, Iov(SIZE) as other:
        for _ in range(10):
            fresh.prepare_one(OP_READ, 1, right, key(0), 0, SIZE, other[0:SIZE], 1)
            assert finish(fresh, 1)["result"][0] == SIZE
    assert (memory == 0x3C).all()
    del memory
    iov.close()
    client.close()


def test_a_fenced_session_writes_nothing_more(one: Nodes) -> None:
    client = NativeClient(4242, bytes(range(16)))
    client.set_routing(2, one.chains(), one.places)
    right = client.add_capability(capability(client))
    with Ring(client, 16) as ring, Iov(4096) as iov:
        ring.prepare_one(OP_WRITE, 1, right, key(1), 0, 100, iov[0:100], 1)
        assert finish(ring, 1)["result"][0] == 100
        one.nodes[0].tell("fence", client=4242)
        ring.prepare_one(OP_WRITE, 1, right, key(1), 0, 100, iov[0:100], 1)
        (cqe,) = finish(ring, 1)
        assert isinstance(error_of_cqe(cqe), errors.Fenced)
    client.close()


def test_a_child_of_fork_has_its_own_ring_while_the_parent_goes_on(one: Nodes) -> None:
    client = one.client()
    right = client.add_capability(capability(client))
    fill(client, right, lambda i: 1)
    ring, iov = Ring(client, 16), Iov(CHUNKS * SIZE)
    read_all(ring, right, iov, lambda i: 1)
    ring.submit()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ring.close()
            own, mine = Ring(client, 16), Iov(CHUNKS * SIZE)
            read_all(own, right, mine, lambda i: 1)
            done = finish(own, CHUNKS)
            own.close()
            status = 0 if (done["result"] == SIZE).all() else 2
        finally:
            os._exit(status)
    assert (finish(ring, CHUNKS)["result"] == SIZE).all()
    assert os.waitpid(child, 0)[1] == 0
    ring.close()
    iov.close()
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_clients_leave_nothing_at_the_servers(one: Nodes, transport: str) -> None:
    """FAULTS S4: kill -9 under I/O; sessions and registered memory go back to nothing."""
    code = (
        "import json, sys\n"
        "from ffs._native.iov import Iov\n"
        "from ffs._native.ring import NativeClient, OP_WRITE, OP_READ, Ring\n"
        "from ffs._native.routes import ChainRoute, TargetRoute\n"
        "given = json.loads(sys.argv[1])\n"
        "client = NativeClient(given['client'], bytes(range(16)), transport=given['transport'])\n"
        "chains = [ChainRoute(1, 1, 1, tuple(given['members']), (1,) * len(given['members']))]\n"
        "client.set_routing(2, chains, [TargetRoute(**t) for t in given['targets']])\n"
        "right = client.add_capability(bytes.fromhex(given['capability']))\n"
        "ring, iov = Ring(client, 16), Iov(16 << 20)\n"
        "key, turn = (9).to_bytes(8, 'big') + bytes(16), 0\n"
        "while True:\n"
        "    for i in range(16):\n"
        "        op = OP_WRITE if i == 0 or turn == 0 else OP_READ\n"
        "        ring.prepare_one(op, 1, right, key, 0, 1 << 20, iov[i << 20:(i + 1) << 20], i)\n"
        "    done = 0\n"
        "    while done < 16:\n"
        "        cqes, _ = ring.wait(1)\n"
        "        assert (cqes['result'] == 1 << 20).all()\n"
        "        done += len(cqes)\n"
        "    turn += 1\n"
        "    print(turn, flush=True)\n"
    )
    for round_ in range(KILLED):
        session = NativeClient(50_000 + round_, CLUSTER)
        given = {
            "client": session.client_id,
            "transport": transport,
            "members": list(one.members[1]),
            "targets": [dataclasses.asdict(p) for p in one.places],
            "capability": capability(session).hex(),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(given)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(2 + round_ % 3):
            assert process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()

    def quiet() -> bool:
        metrics = one.nodes[0].tell("metrics")
        names = ("sessions", "regions", "region_bytes", "pool_used_bytes", "ops_waiting")
        return all(metrics[name] == 0 for name in names)

    until(quiet)
    client = one.client()
    fill(client, client.add_capability(capability(client)), lambda i: 1)
    client.close()
